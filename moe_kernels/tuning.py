"""Which kernel runs for which arguments. Selection never times anything and never waits for the GPU."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._triton import TRITON_VERSION, triton
from .catalog import (
    Arguments,
    Design,
    GroupedGemmArguments,
    Kernel,
    PointerDesign,
    WarpSpecializedDesign,
    get_kernels,
)
from .gemm.array import GroupedGemmListArguments
from .gemm.jagged import JaggedGemmArguments

TABLES = Path(__file__).parent / "tables"

# Arguments that make their own keys; their kernels estimate the work.
_KEYED = (GroupedGemmListArguments, JaggedGemmArguments)

_selected: dict[tuple[Any, ...], Kernel | None] = {}


class Copies(NamedTuple):
    """Which gathers of the expert op are copies of their own, rather than part of the GEMM that wants the rows."""

    tokens_forward: bool
    dout: bool  # one copy for both GEMMs that want it
    tokens_backward: bool


_copies: dict[tuple[Any, ...], Copies] = {}


def select(args: Arguments) -> Kernel:
    """The kernel to run for these arguments, the same one for all arguments of one key.

    Raises:
        NotImplementedError: no kernel supports them; the message holds each one's reason.
    """
    if kernel := find(args):
        return kernel
    reasons = sorted({str(kernel.supports(args).error) for kernel in get_kernels()})
    shapes = {name: (list(tensor.shape), tensor.dtype) for name, tensor in args.operands.items()}
    raise NotImplementedError(f"no kernel supports {type(args).__name__} {shapes}: {'; '.join(reasons)}")


def find(args: Arguments) -> Kernel | None:
    """As `select`, but None where no kernel supports the arguments."""
    key = _key(args)
    if key not in _selected:
        _selected[key] = _from_table(args) or _by_rule(args)
    return _selected[key]


def _from_table(args: Arguments) -> Kernel | None:
    name = table_for(args.A.device).kernels.get(table_key(args))
    if name is None:
        return None
    (kernel,) = get_kernels(metadata_filter=lambda metadata: metadata.kernel_name == name)
    return kernel if kernel.supports(args) else None


def _by_rule(args: Arguments) -> Kernel | None:
    return min(get_kernels(args), key=lambda kernel: _rule_of_thumb(kernel, args), default=None)


def choose_copies(tokens: Tensor, w_up: Tensor, num_rows: int) -> Copies:
    """What the table says; without an entry, a rule.

    A copy takes as long for every d_ff, while what a GEMM loses by gathering grows with d_ff, so large ones copy. And
    only where the GEMM behind the copy then runs warp-specialised; elsewhere gathering costs little.
    """
    num_experts, num_columns, _ = w_up.shape
    key = (tokens.device, _layout(tokens), _layout(w_up), tuple(w_up.shape), _rows_bucket(num_rows, num_experts))
    if key not in _copies:
        out = tokens.new_empty(1, num_columns).expand(num_rows, num_columns)  # stands for rows, without the memory
        kernel = find(GroupedGemmArguments(tokens, w_up.transpose(1, 2), out))
        fast = kernel is not None and isinstance(kernel.metadata.design, WarpSpecializedDesign)
        d_ff = num_columns // 2
        by_rule = Copies(fast and d_ff >= 512, fast and d_ff >= 512, fast and d_ff >= 192)
        entry = table_for(tokens.device).copies.get(copies_key(tokens, w_up, num_rows))
        _copies[key] = Copies(*entry) if entry and fast else by_rule
    return _copies[key]


class Table(NamedTuple):
    """What was measured on one kind of GPU with one version of Triton."""

    kernels: dict[str, str]  # by `table_key`
    copies: dict[str, list[bool]]  # by `copies_key`


@functools.cache
def table_for(device: torch.device) -> Table:
    """The shipped table of this GPU and this Triton, or an empty one."""
    if device.type != "cuda" or TRITON_VERSION is None:
        return Table({}, {})
    path = TABLES / table_name(torch.cuda.get_device_name(device))
    return Table(**json.loads(path.read_text())["table"]) if path.exists() else Table({}, {})


def table_name(gpu: str) -> str:
    major, minor, *_ = TRITON_VERSION
    return f"{gpu.lower().replace(' ', '_')}_triton_{major}.{minor}.json"


def table_key(args: Arguments) -> str:
    """The arguments of a table entry: the layouts and sizes that decide which kernel is fastest."""
    if isinstance(args, _KEYED):
        return args.table_key()
    if isinstance(args, GroupedGemmArguments):
        num_groups, size_k, size_n = args.B.shape
        layout = "row" if args.B.stride(2) == 1 else "column"
        gather = "A" if args.row_to_token is not None else "none"
        form = f"grouped_gemm B={layout} gather={gather} epilogue={args.epilogue or 'none'}"
        num_rows = len(args.out)
    else:
        num_groups, size_k, size_n = args.out.shape
        gathers = (("A", args.a_row_to_token), ("dout", args.dout_row_to_token))
        form = f"wgrad gather={'+'.join(name for name, index in gathers if index is not None) or 'none'}"
        num_rows = args.num_rows
    rows = _rows_bucket(num_rows, num_groups)
    return f"{form} {str(args.A.dtype)[6:]} G={num_groups} K={size_k} N={size_n} rows={rows}"


def copies_key(tokens: Tensor, w_up: Tensor, num_rows: int) -> str:
    num_experts, num_columns, d_model = w_up.shape
    rows = _rows_bucket(num_rows, num_experts)
    return f"experts {str(tokens.dtype)[6:]} E={num_experts} D={d_model} F={num_columns // 2} rows={rows}"


def _key(args: Arguments) -> tuple[Any, ...]:
    """Everything that support and speed depend on; the number of rows per group only by its power of two."""
    if isinstance(args, _KEYED):
        return type(args), args.accumulator_type, *args.selection_key()
    if isinstance(args, GroupedGemmArguments):
        sizes = (*args.B.shape, _rows_bucket(len(args.out), len(args.B)))
        form = (args.row_to_token is not None, args.epilogue)
    else:
        sizes = (*args.out.shape, _rows_bucket(args.num_rows, len(args.out)))
        form = (args.a_row_to_token is not None, args.dout_row_to_token is not None)
    layouts = tuple(_layout(tensor) for tensor in args.operands.values())
    return type(args), args.accumulator_type, args.A.device, sizes, form, layouts


def _rows_bucket(num_rows: int, num_groups: int) -> int:
    return triton.next_power_of_2(triton.cdiv(num_rows, num_groups))


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """dtype, which axes are contiguous, and whether the tensor satisfies the copy engine's 16-byte alignment."""
    size = tensor.element_size()
    contiguous = tuple(stride == 1 for stride in tensor.stride())
    aligned = tensor.data_ptr() % 16 == 0 and all(s == 1 or s * size % 16 == 0 for s in tensor.stride())
    return tensor.dtype, contiguous, aligned


def _rule_of_thumb(kernel: Kernel, args: Arguments) -> float:
    """An estimate of the time: the multiplications of all tiles, padding included, over the speed of the design."""
    if isinstance(args, _KEYED):
        return kernel.estimate(args) / _speed(kernel.metadata.design)
    tile = kernel.metadata.design.tile_shape
    if isinstance(args, GroupedGemmArguments):
        num_groups, _, num_columns = args.B.shape
        rows_per_group = max(triton.cdiv(len(args.out), num_groups), 1)
        work = _padded(rows_per_group, tile[0]) * _padded(num_columns, tile[1])
    else:
        _, size_k, size_n = args.out.shape
        work = _padded(size_k, tile[0]) * _padded(size_n, tile[1])
    return work / _speed(kernel.metadata.design)


def _padded(size: int, block: int) -> int:
    return triton.cdiv(size, block) * block


def _speed(design: Design) -> float:
    """Relative speed on one tile: larger tiles read less per multiplication, and fewer stalls are better."""
    rows, columns, _ = design.tile_shape
    reuse = rows * columns / (rows + columns)  # multiplications per element read
    kind = 1.0 if isinstance(design, WarpSpecializedDesign) else 0.7 if isinstance(design, PointerDesign) else 0.9
    return kind * reuse / (reuse + 20.0)
