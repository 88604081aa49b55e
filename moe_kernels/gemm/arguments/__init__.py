"""Argument classes of the GEMM kernels, one file per kind of GEMM."""
