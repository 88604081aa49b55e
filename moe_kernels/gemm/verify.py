"""Check a few groups of a kernel's result against the reference in float64. Checking all groups would take too long."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..quantization.decode import decode_weight
from ..reference_fp8 import BLOCK, dequantize_blocks
from ..runtime.dispatch import without_autocast
from ..runtime.triton import cdiv
from ..testing import assert_accurate
from .arguments.activation_gradient import COLUMNS, ActivationGradientArguments
from .arguments.base import Arguments
from .arguments.block_scaled import BlockScaledGemmArguments
from .arguments.decoding import DecodingGemmArguments
from .arguments.dense import GemmArguments
from .arguments.grouped import GroupedGemmArguments, WgradArguments
from .arguments.jagged import JaggedGemmArguments
from .arguments.list import GroupedGemmListArguments
from .kernel import Kernel

_FAR = 4.0  # multiple of the error budget that rounding alone never exceeds
_BLOCK_ROWS = 256  # number of rows of a dense product that are checked as one group


class Comparison(NamedTuple):
    """Part of a kernel's result, and the same part computed by plain PyTorch, in the kernel's dtype and in float64."""

    actual: Tensor
    baseline: Tensor  # result of plain PyTorch in the dtype of `actual`
    exact: Tensor  # result of plain PyTorch in float64


def check_result(args: Arguments, name: str, *, first: int = 0, budgets: float = 1.0) -> None:
    """Check three groups of a kernel's result against the error budget of `assert_accurate`.

    Waits for the GPU. Groups whose exact result is not finite are skipped.

    Args:
        name: name of the kernel, for the message.
        first: number added to the indices of the first, middle and last group, to check other groups. Default: 0.
        budgets: multiple of the error budget that the error may reach. Default: 1.

    Raises:
        AssertionError: the result is wrong; the message says by how much.
    """
    with torch.no_grad(), without_autocast(args.A):
        for comparison in _COMPARISONS[type(args)](args, first):
            if comparison.exact.isfinite().all():
                actual, baseline, exact = _as_precise_as_sums_of(args.A.dtype, comparison)
                assert_accurate(actual, baseline, exact, name, budgets=budgets)


def verified(launch: Callable[[Arguments], Kernel | None], every: int) -> Callable[[Arguments], Kernel | None]:
    """Return a function that calls `launch` and checks one result per `every` launches. Each check shifts the sampled
    groups by one.

    A single sample may exceed the error budget by chance, so the check allows four times the budget. Launches that a
    CUDA graph captures are not checked, because results cannot be read during capture.

    `launch` and the returned function return the launched kernel, or None. If a result is wrong, the returned function
    raises RuntimeError. The message names the kernel and the size of the error.
    """
    numbers = itertools.count(1)

    def launch_and_verify(args: Arguments) -> Kernel | None:
        if (kernel := launch(args)) is None:
            return None
        number = next(numbers)
        if number % every or (args.A.is_cuda and torch.cuda.is_current_stream_capturing()):
            return kernel
        name = kernel.metadata.kernel_name
        try:
            check_result(args, name, first=number // every, budgets=_FAR)
        except AssertionError as error:
            raise RuntimeError(f"MOE_VERIFY: wrong result in launch {number}: {error}") from error
        return kernel

    return launch_and_verify


def verify_interval(setting: str | None) -> int | None:
    """Return the number of launches per check for a value of MOE_VERIFY, or None for no checks."""
    if setting is None or setting in ("", "0"):
        return None
    if not setting.isdecimal():
        raise ValueError(f"MOE_VERIFY: must be a number of launches, got {setting!r}")
    return int(setting)


def _sampled(num_groups: int, first: int) -> list[int]:
    return sorted(
        {(group + first) % num_groups for group in (0, num_groups // 2, num_groups - 1)} if num_groups else ()
    )


def _as_precise_as_sums_of(dtype: torch.dtype, comparison: Comparison) -> Comparison:
    """Round float32 results of 16-bit and float8 operands to bfloat16, because tensor cores sum products of these
    operands in fewer bits than plain PyTorch."""
    actual, baseline, exact = comparison
    if dtype.itemsize >= 4 or actual.dtype != torch.float32:
        return comparison
    return Comparison(actual.bfloat16(), baseline.bfloat16(), exact)


def _compare(op: Callable[..., Tensor], actual: Tensor, *operands: Tensor, **options: Tensor | None) -> Comparison:
    baseline = op(*operands, **options, out_dtype=actual.dtype)
    exact = op(
        *(operand if operand.dtype == torch.int32 else operand.double() for operand in operands),
        **{name: None if option is None else option.double() for name, option in options.items()},
        out_dtype=torch.float64,
    )
    return Comparison(actual, baseline, exact)


def _product(a: Tensor, b: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    return reference.grouped_gemm_list([a], [b], out_dtype=out_dtype)[0]


def _zeros(actual: Tensor) -> Comparison:
    return Comparison(actual, torch.zeros_like(actual), torch.zeros_like(actual, dtype=torch.float64))


def _bounds(
    args: GroupedGemmArguments | BlockScaledGemmArguments | ActivationGradientArguments | WgradArguments,
    num_rows: int,
) -> list[int]:  # [G + 2]
    table = args.tile_table
    if table is None:
        assert args.offsets is not None
        table = reference.tile_table(args.offsets, num_rows, 128)
    return table.bounds.tolist()


def _one_group(rows: Tensor) -> Tensor:  # [1] int32
    return torch.tensor([len(rows)], dtype=torch.int32, device=rows.device)


def _rows_of(operand: Tensor, row_to_token: Tensor | None, rows: slice) -> Tensor:
    return operand[rows] if row_to_token is None else operand[row_to_token[rows].long()]


def _of_grouped_gemm(args: GroupedGemmArguments, first: int) -> Iterator[Comparison]:
    bounds = _bounds(args, len(args.out))
    for group in _sampled(len(args.B), first):
        rows, g = slice(bounds[group], bounds[group + 1]), slice(group, group + 1)
        a, b, product = _rows_of(args.A, args.row_to_token, rows), args.B[g], args.product[rows]
        if args.extra_a is not None and args.extra_b is not None:
            a, b = torch.cat([a, args.extra_a[rows]], 1), torch.cat([b, args.extra_b[g]], 1)
        options = {
            "bias": None if args.bias is None or args.epilogue is not None else args.bias[g],
            "row_scale": None if args.row_scale is None else args.row_scale[rows],
            "scale_a": None if args.scale_a is None else _rows_of(args.scale_a, args.row_to_token, rows),
            "scale_b": None if args.scale_b is None else args.scale_b[g],
        }
        yield _compare(reference.grouped_gemm, product, a, b, _one_group(a), **options)
        if args.epilogue is not None:
            activate = partial(reference.apply_activation, activation=args.epilogue)
            bias = 0.0 if args.bias is None else args.bias[group].double()
            exact = product.double() + bias
            yield Comparison(args.out[rows], activate(exact.to(product.dtype)), activate(exact))
    if args.zero_tail:
        yield _zeros(args.out[bounds[-2] :])


def _of_decoding_gemm(args: DecodingGemmArguments, first: int) -> Iterator[Comparison]:
    b = decode_weight(args.B.weight, args.A.dtype)
    options = {name: getattr(args, name) for name in ("row_to_token", "tile_table", "bias", "extra_a", "extra_b")}
    product = GroupedGemmArguments(args.A, b.mT if args.transposed else b, args.out, zero_tail=False, **options)
    yield from _of_grouped_gemm(product, first)


def _of_block_scaled_gemm(args: BlockScaledGemmArguments, first: int) -> Iterator[Comparison]:
    bounds = _bounds(args, len(args.out))
    for group in _sampled(len(args.B), first):
        rows, g = slice(bounds[group], bounds[group + 1]), slice(group, group + 1)
        a, scale_a = (_rows_of(operand, args.row_to_token, rows) for operand in (args.A, args.scale_a))

        def product(dtype: torch.dtype, a=a, scale_a=scale_a, g=g) -> Tensor:
            b = dequantize_blocks(args.B[g], args.scale_b[g], BLOCK, BLOCK, dtype)
            return reference.grouped_gemm(dequantize_blocks(a, scale_a, 1, BLOCK, dtype), b, _one_group(a))

        yield Comparison(args.out[rows], product(torch.float32).to(args.out.dtype), product(torch.float64))
    if args.zero_tail:
        yield _zeros(args.out[bounds[-2] :])


def _of_activation_gradient(args: ActivationGradientArguments, first: int) -> Iterator[Comparison]:
    if args.out.data_ptr() == args.preactivation.data_ptr():
        return  # cannot check: the kernel has overwritten the preactivation
    bounds, dtype = _bounds(args, args.num_rows), args.out.dtype
    for group in _sampled(len(args.B), first):
        rows, g = slice(bounds[group], bounds[group + 1]), slice(group, group + 1)
        a, weights = _rows_of(args.A, args.row_to_token, rows), args.row_weights[rows, None]

        def results(precise: torch.dtype, stored: torch.dtype, rows=rows, g=g, a=a, weights=weights) -> list[Tensor]:
            product = reference.grouped_gemm(a.to(stored), args.B[g].to(stored), _one_group(a)).to(precise)
            with torch.enable_grad():
                h = args.preactivation[rows].to(precise).requires_grad_()
                activated = reference.apply_activation(h, args.epilogue)
            (gradient,) = torch.autograd.grad(activated, h, weights.to(precise) * product)
            activated = activated.detach()
            sums = torch.stack([part.sum(1) for part in (product * activated).split(COLUMNS, 1)], 1)
            return [gradient.to(stored), (weights * activated).to(stored), sums]

        actual = args.out[rows], args.weighted[rows], args.row_sums[rows]
        baseline, exact = results(torch.float32, dtype), results(torch.float64, torch.float64)
        yield from map(Comparison, actual, baseline, exact)


def _of_wgrad(args: WgradArguments, first: int) -> Iterator[Comparison]:
    if args.accumulate:  # cannot check: the values of `out` before the addition are lost
        return
    bounds = _bounds(args, args.num_rows)
    for group in _sampled(len(args.out), first):
        rows = slice(bounds[group], bounds[group + 1])
        a, dout = _rows_of(args.A, args.a_row_to_token, rows), _rows_of(args.dout, args.dout_row_to_token, rows)
        yield _compare(reference.grouped_gemm_wgrad, args.out[group : group + 1], a, dout, _one_group(a))


def _of_jagged_gemm(args: JaggedGemmArguments, first: int) -> Iterator[Comparison]:
    bounds = args.group_offsets.long().clamp(0, len(args.out)).cummax(0).values.tolist()
    for group in _sampled(args.num_groups, first):
        rows = slice(bounds[group], bounds[group + 1])
        yield _compare(_product, args.out[rows], args.A[rows], args.B)
    for rows in (slice(bounds[0]), slice(bounds[-1], None)):
        yield _zeros(args.out[rows])


def _of_product(a: Tensor, b: Tensor, out: Tensor, epilogue: str | None) -> Comparison:
    if epilogue is None:
        return _compare(_product, out, a, b)
    # Apply the activation to the float32 product, because the kernel does not round before the activation.
    _, product, exact = _compare(_product, out.float(), a, b)
    activate = partial(reference.apply_activation, activation=epilogue)
    return Comparison(out, activate(product).to(out.dtype), activate(exact))


def _of_gemm(args: GemmArguments, first: int) -> Iterator[Comparison]:
    blocks = cdiv(args.out.shape[-2], _BLOCK_ROWS)
    for sample in _sampled(args.num_batches * blocks, first):
        batch, block = divmod(sample, blocks)
        a, b, out = (t[batch] if t.dim() == 3 else t for t in (args.A, args.B, args.out))
        rows = slice(block * _BLOCK_ROWS, (block + 1) * _BLOCK_ROWS)
        yield _of_product(a[rows], b, out[rows], args.epilogue)


def _of_list(args: GroupedGemmListArguments, first: int) -> Iterator[Comparison]:
    for g in _sampled(len(args.out_list), first):
        yield _of_product(args.A_list[g], args.B_list[g], args.out_list[g], args.epilogue)


_COMPARISONS = {
    GroupedGemmArguments: _of_grouped_gemm,
    WgradArguments: _of_wgrad,
    DecodingGemmArguments: _of_decoding_gemm,
    BlockScaledGemmArguments: _of_block_scaled_gemm,
    ActivationGradientArguments: _of_activation_gradient,
    JaggedGemmArguments: _of_jagged_gemm,
    GemmArguments: _of_gemm,
    GroupedGemmListArguments: _of_list,
}
