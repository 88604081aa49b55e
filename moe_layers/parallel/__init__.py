"""Experts sharded over the ranks of a process group."""
