"""Finds and recognises the experts modules of transformers' models, and computes them with `moe_kernels`."""
