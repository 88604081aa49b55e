"""Warp-specialised kernels for Hopper: the host half of a kernel in `<name>.py`, its device half in
`<name>_device.py`. Import a device half only if `runtime.gluon.OBSTACLE` is None.
"""
