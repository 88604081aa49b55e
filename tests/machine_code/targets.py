"""Compute capabilities for which this Triton compiles the kernels."""

from moe_kernels.runtime.gluon import NEWEST, OLDEST
from moe_kernels.runtime.triton import TRITON_VERSION

# The oldest and the newest Triton compile for all targets. The versions between compile for 9.0 alone. Its kernels are
# written in Gluon, which differs by version.
TARGETS = (90,) if TRITON_VERSION and OLDEST < TRITON_VERSION[:2] < NEWEST else (80, 90, 100)
