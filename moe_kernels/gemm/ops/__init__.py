"""The public GEMM ops."""
