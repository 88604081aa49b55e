"""Caches the experts' e4m3 weights between forwards until the weights change.

Two checks find changes. First, PyTorch's version counter registers changes by optimizers, `copy_` and
`load_state_dict`. After such a change, or with a new parameter or storage, the weight is quantised again. Second,
checksums find other changes, such as `weight.data[0] = 0` or raw writes of an optimizer. In each later forward, a
kernel compares a checksum of every block with the stored checksum, and quantises blocks that differ. A change of
several elements is missed with a probability of about 2**-32. See `moe_kernels.quantization.fp8_weights`.

Nothing is cached in CUDA graphs, in compiled code and under FSDP. CUDA graphs replay without this code, so changes of
the weights could be missed. FSDP gathers the weights for each forward, and a cache would hold the whole model. Without
a cache, the experts' op quantises each weight right before the GEMM that reads the weight. Functorch transforms, tensor
subclasses, inference tensors and the reference implementation use no cache, either.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from moe_kernels.quantization.fp8_weights import Forms, empty_checksums, launch_quantize_weight, launch_requantize
from moe_kernels.runtime.dispatch import runs_kernels
from moe_kernels.runtime.pytorch import functorch_is_active, unseen_by_modes
from moe_kernels.types import ScaledForms


class _Kept(NamedTuple):
    """One weight in e4m3, and weak references to the parameter and the storage that were quantised. Weak references do
    not keep the weight alive, and never equal a later object at the same address."""

    parameter: weakref.ref[Tensor]
    storage: StorageWeakRef
    facts: tuple[Any, ...]
    forms: Forms
    checksums: Tensor  # [blocks] int64, one checksum per block of the weight


class KeptForms:
    """The cached e4m3 weights of one `GroupedExperts`. A copy of the module starts with an empty cache."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def __reduce__(self) -> tuple[type[KeptForms], tuple[()]]:
        return KeptForms, ()

    def drop(self) -> None:
        """Free the cached e4m3 weights."""
        self._kept = {}

    def of(
        self,
        module: nn.Module,  # owner of the parameters
        parameters: tuple[Tensor, Tensor],  # w_up and w_down
        parts: tuple[Tensor, Tensor],  # this rank's parts of the parameters
        weights: tuple[Tensor, Tensor],  # `parts`, converted to the dtype of the tokens
        implementation: str | None,
    ) -> ScaledForms | None:
        """Return the e4m3 weights, or None if nothing may be cached. The experts' op then quantises the weights."""
        # FSDP1 and FSDP2 set `_is_fsdp_managed_module`.
        if torch.compiler.is_compiling() or getattr(module, "_is_fsdp_managed_module", False):
            return None
        if functorch_is_active() or not all(map(_is_plain, (*parts, *weights))):
            return None
        is_captured = weights[0].is_cuda and torch.cuda.is_current_stream_capturing()
        if is_captured or not runs_kernels(implementation, weights[0]):
            return None
        turned = torch.is_grad_enabled()
        with torch.no_grad(), unseen_by_modes(), torch.cuda.device_of(weights[0]):
            for name, parameter, part, weight in zip(("w_up", "w_down"), parameters, parts, weights, strict=True):
                self._kept[name] = _renewed(self._kept.pop(name, None), parameter, part, weight, turned)
        return ScaledForms(*self._kept["w_up"].forms, *self._kept["w_down"].forms)


def _renewed(kept: _Kept | None, parameter: Tensor, part: Tensor, weight: Tensor, turned: bool) -> _Kept:
    storage, facts = StorageWeakRef(part.untyped_storage()), _facts(part, weight)
    is_same = kept is not None and kept.parameter() is parameter and (kept.storage, kept.facts) == (storage, facts)
    if kept is not None and is_same and (kept.forms.turned is not None or not turned):
        launch_requantize(weight, kept.forms, kept.checksums)
        return kept
    del kept  # free the old e4m3 weight before the new one is allocated
    checksums = empty_checksums(weight)
    forms = launch_quantize_weight(weight, transposed=turned, checksums=checksums)
    return _Kept(weakref.ref(parameter), storage, facts, forms, checksums)


def _facts(part: Tensor, weight: Tensor) -> tuple[Any, ...]:
    """Return a cache key: a weight's version counter, address, dtype, shape and strides, and the current stream."""
    stream = torch.cuda.current_stream(weight.device).cuda_stream if weight.is_cuda else 0
    return part._version, part.data_ptr(), weight.dtype, weight.shape, weight.stride(), stream


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor has its own memory and a version counter."""
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta and not tensor.is_inference()
