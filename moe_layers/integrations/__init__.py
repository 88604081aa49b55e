"""Runs this package's experts in models of other libraries. The rest of `moe_layers` does not import these modules,
because they import the other libraries."""
