"""Warp-specialised kernels for Hopper. Import them only if `warp_specialized.OBSTACLE` is None."""
