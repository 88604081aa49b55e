"""What Gluon's versions 3.6 to 3.9 name differently, under the newest names."""

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

if hasattr(gluon, "aggregate"):  # from 3.8 on
    aggregate = gluon.aggregate
else:
    from triton.language.core import _aggregate as aggregate

if hasattr(tma, "async_load"):  # from 3.8 on; 3.9 keeps the old names to say that they are gone
    tma_load, tma_store, copy_load = tma.async_load, tma.async_store, async_copy.async_load
else:
    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
    copy_load = async_copy.async_copy_global_to_shared

__all__ = ["aggregate", "copy_load", "tma_load", "tma_store"]
