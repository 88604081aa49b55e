"""Runs this package's experts in models of other libraries. The modules here import those libraries, so the rest of
`moe_layers` does not import the modules here."""
