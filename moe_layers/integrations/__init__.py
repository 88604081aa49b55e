"""Experts of this package in models of other libraries. These modules import the other libraries, so the rest of
`moe_layers` does not import these modules."""
