"""Check the operands of grouped GEMMs, and return the dtype of the result."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import first_three
from ...reference_fp8 import BLOCK
from ...runtime.checks import (
    can_be_read,
    check_dtype,
    check_float8,
    check_no_gradient,
    check_same_device,
    check_same_dtype,
    check_shapes,
    overlaps_itself,
    result_dtype,
)
from ...runtime.dispatch import FLOAT8, KERNEL_DTYPES, choose, once_per_form
from ...runtime.triton import cdiv
from ...specs import as_activation
from ..kernel import device_cc


@once_per_form
def check_product(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    activation: str | None,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
) -> torch.dtype:
    """Return the dtype of the result. Raise ValueError unless all operands of `grouped_gemm` fit together."""
    sizes = check_shapes("grouped_gemm", a=(a, "R K"), b=(b, "G K N"), offsets=(offsets, "G"))
    check_same_dtype("grouped_gemm", a=a, b=b)
    _check_offsets("grouped_gemm", offsets, a=a, b=b)
    if activation is not None:
        _check_activation(activation, sizes["N"])
    if out is not None:
        sizes["F"] = sizes["N"] // 2
        check_shapes("grouped_gemm", sizes, out=(out, "R N" if activation is None else "R F"))
        check_same_device("grouped_gemm", out=out, offsets=offsets)
    out_dtype = result_dtype("grouped_gemm", a, out, out_dtype)
    _check_optional(a, b, offsets, out_dtype, bias=bias, row_scale=row_scale, scale_a=scale_a, scale_b=scale_b)
    return out_dtype


def _check_activation(activation: str, num_columns: int) -> None:
    """Raise ValueError unless `activation` names a gated activation and `num_columns` is even."""
    if not isinstance(activation, str):
        raise ValueError(
            f"grouped_gemm: activation must be a name, got {activation!r}; apply_activation and fused_experts take more"
        )
    if not as_activation("grouped_gemm", activation).gated:
        raise ValueError(f"grouped_gemm: activation must be gated, got {activation!r}")
    if num_columns % 2:
        raise ValueError(f"grouped_gemm: b must have an even number of columns with an activation, got N={num_columns}")


@once_per_form
def check_wgrad(
    a: Tensor,
    dout: Tensor,
    offsets: Tensor,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
) -> torch.dtype:
    """Return the dtype of the result. Raise ValueError unless all operands of `grouped_gemm_wgrad` fit together."""
    sizes = check_shapes("grouped_gemm_wgrad", a=(a, "R K"), dout=(dout, "R N"), offsets=(offsets, "G"))
    check_same_dtype("grouped_gemm_wgrad", a=a, dout=dout)
    if a.dtype == FLOAT8:
        raise ValueError(f"grouped_gemm_wgrad: operands must have 16 bits or more, got {a.dtype}")
    _check_offsets("grouped_gemm_wgrad", offsets, a=a, dout=dout)
    if out is not None:
        check_shapes("grouped_gemm_wgrad", sizes, out=(out, "G K N"))
        check_same_device("grouped_gemm_wgrad", out=out, offsets=offsets)
    return result_dtype("grouped_gemm_wgrad", a, out, out_dtype)


def _check_offsets(op: str, offsets: Tensor, **operands: Tensor) -> None:
    check_dtype(op, "offsets", offsets, torch.int32)
    check_same_device(op, offsets=offsets, **operands)
    if offsets.shape[0] == 0:
        raise ValueError(f"{op}: offsets must have at least one group, got none")


def choose_gemm(op: str, implementation: str | None, a: Tensor) -> str:
    """Return `implementation`. For None, return "triton" if Triton kernels run on the device of `a` and in its dtype,
    which may be float8, else "reference".

    Raises:
        ValueError: `implementation` is not a known name.
        NotImplementedError: "triton" is requested, but kernels do not run on the device or in the dtype of `a`; the
            result would be "triton", but `a` is float8 and this GPU cannot multiply float8; or `torch.jit.trace` runs.
    """
    chosen = choose(op, implementation, a, (*KERNEL_DTYPES, FLOAT8))
    if chosen == "triton" and a.dtype == FLOAT8 and a.is_cuda:
        check_float8(op, device_cc(a.device))
    return chosen


def check_out(op: str, out: Tensor, *inputs: Tensor | None) -> None:
    """Raise ValueError if `out` is expanded (elements share memory), or if `out` or an input requires a gradient."""
    check_no_gradient(op, "out=", out, *inputs)
    if overlaps_itself(out):
        raise ValueError(f"{op}: out must not overlap itself, got strides {out.stride()} of shape {list(out.shape)}")


def check_values(op: str, name: str, offsets: Tensor, num_rows: int) -> None:
    """Raise ValueError unless offsets on the CPU are sorted and within [0, num_rows]. Offsets on a GPU are not checked,
    because kernels clamp them."""
    if can_be_read(offsets):
        values = offsets.tolist()
        if values != sorted(values) or values[0] < 0 or values[-1] > num_rows:
            raise ValueError(
                f"{op}: {name} must be non-decreasing and within [0, R={num_rows}], got [{first_three(values)}]"
            )


_PATTERNS = {"bias": "G N", "row_scale": "R", "scale_a": "R", "scale_b": "G N"}
_OF_BLOCKS = {"scale_a": "R K/128", "scale_b": "G K/128 N/128"}


def has_block_scales(scale_a: Tensor | None) -> bool:
    return scale_a is not None and scale_a.dim() == 2


def _check_optional(a: Tensor, b: Tensor, offsets: Tensor, out_dtype: torch.dtype, **optional: Tensor | None) -> None:
    given = {name: tensor for name, tensor in optional.items() if tensor is not None}
    if not given:
        return
    patterns, sizes = _PATTERNS, {"R": len(a), "G": len(b), "N": b.shape[2]}
    if has_block_scales(given.get("scale_a")):
        if "scale_b" not in given:
            raise ValueError("grouped_gemm: scale_a of blocks must come with scale_b, got None")
        patterns = _PATTERNS | _OF_BLOCKS
        sizes |= {"K/128": cdiv(a.shape[1], BLOCK), "N/128": cdiv(b.shape[2], BLOCK)}
    check_shapes("grouped_gemm", sizes, **{name: (tensor, patterns[name]) for name, tensor in given.items()})
    check_same_device("grouped_gemm", offsets=offsets, **given)
    for name, tensor in given.items():
        dtypes = (torch.float32, torch.float64) if a.dtype == torch.float64 else (torch.float32,)
        check_dtype("grouped_gemm", name, tensor, *({*dtypes, out_dtype, a.dtype} if name == "bias" else dtypes))
        if name.startswith("scale") and a.dtype != FLOAT8:
            raise ValueError(f"grouped_gemm: {name} belongs to float8 operands, got {a.dtype}")
