"""Losses, selection bias and statistics of the routing."""
