"""Runs this package's experts in models of other libraries. Code outside this folder does not import these modules,
because these modules import the other libraries."""
