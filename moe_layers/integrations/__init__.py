"""This package's experts in models of other libraries. The rest of `moe_layers` imports none of these modules, because
they import those libraries."""
