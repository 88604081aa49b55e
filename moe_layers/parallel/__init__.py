"""Experts shared by the ranks of a process group."""
