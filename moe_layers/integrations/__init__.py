"""Runs this package's experts in models of other libraries. Code outside this folder does not import the folder's
modules, because the folder's modules import the other libraries."""
