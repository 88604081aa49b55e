"""Routing: from logits to experts and weights."""
