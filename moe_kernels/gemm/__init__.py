"""The GEMM engine: arguments, kernels, selection, tables and ops."""
