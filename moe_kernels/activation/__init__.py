"""Activations: their functions and kernels."""
