"""The argument classes of the catalog's kernels, one file per form of GEMM."""
