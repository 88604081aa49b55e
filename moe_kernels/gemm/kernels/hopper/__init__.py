"""Warp-specialised kernels for Hopper. To be imported only where `warp_specialized.OBSTACLE` is None."""
