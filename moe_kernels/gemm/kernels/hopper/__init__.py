"""Gluon kernels for Hopper. `<name>.py` holds the host code of a kernel, `<name>_device.py` its device code.
Import device code only if `runtime.gluon.OBSTACLE` is None.
"""
