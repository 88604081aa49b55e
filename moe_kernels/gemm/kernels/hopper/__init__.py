"""Gluon kernels for Hopper. `<name>.py` holds the host code of a kernel, and `<name>_device.py` holds the device code.
Import device code only if `runtime.gluon.OBSTACLE` is None."""
