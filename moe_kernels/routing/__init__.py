"""Logits to experts and weights."""
