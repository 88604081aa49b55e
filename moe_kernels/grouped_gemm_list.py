"""Independent products of different sizes in one launch: out_list[g] = a_list[g] @ b_list[g].

A table on the device holds every problem's addresses, sizes and leading dimensions, and a fixed number of programs
walks the tiles of all outputs (`gemm/array.py`). `grouped_gemm_list` makes the table in every call; a
`GroupedProblem` makes it once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import reference, tuning
from ._dispatch import choose, registered_op
from .catalog import CompiledArtifact, Kernel
from .gemm.array import GroupedGemmListArguments, leading_dimension, make_problem_table


def grouped_gemm_list(
    a_list: Sequence[Tensor],  # [M, K] each
    b_list: Sequence[Tensor],  # [K, N] each
    *,
    implementation: str | None = None,
) -> list[Tensor]:  # [M, N] each
    """Multiply G pairs of matrices, all of different sizes, in one launch. Differentiable in every matrix.

    Operands lie by rows or by columns, each with any leading dimension; one with neither axis contiguous is copied
    first. A size may be 0: K = 0 gives zeros. Accumulates in float32 and rounds once; float32 operands use TF32 only
    after `torch.set_float32_matmul_precision`. Deterministic, also the gradients, which are stored in their matrix's
    order; each list's gradient is one launch.

    A call costs some microseconds of CPU time per problem, one small asynchronous copy to the GPU and one launch, and
    never waits. Not in a CUDA graph, and where the same tensors are multiplied again: use `GroupedProblem`.

    Args:
        implementation: "triton", "reference", or None to choose by device.

    Raises:
        ValueError: the lists are empty or differ in length, or a shape, dtype or device disagrees with the signature.
        NotImplementedError: a CUDA graph is being captured.
    """
    _check("grouped_gemm_list", a_list, b_list)
    if choose("grouped_gemm_list", implementation, a_list[0]) == "reference":
        return reference.grouped_gemm_list(a_list, b_list)
    return _grouped_gemm_list_op(list(a_list), list(b_list), [False] * len(a_list))


@dataclass(frozen=True, eq=False)
class GroupedProblem:
    """Products whose table is made once, so that each `run` is one launch. CUDA graphs may capture `run`.

    The table holds addresses: `run` multiplies what `a_list` and `b_list` hold at that time, and overwrites `out_list`.
    """

    args: GroupedGemmListArguments
    kernel: Kernel | None  # None: the reference
    artifact: CompiledArtifact | None = None

    @classmethod
    def from_lists(
        cls,
        a_list: Sequence[Tensor],  # [M, K] each
        b_list: Sequence[Tensor],  # [K, N] each
        *,
        out_list: Sequence[Tensor] | None = None,  # [M, N] each, rows contiguous; allocated if None
        kernel: Kernel | None = None,
        implementation: str | None = None,
    ) -> GroupedProblem:
        """Prepare `a_list[g] @ b_list[g]` for every g. Costs what a call of `grouped_gemm_list` costs, less the launch.

        Args:
            kernel: one of the catalog (`get_kernels`); None selects.

        Raises:
            ValueError: as `grouped_gemm_list`, also for `out_list`; an operand requires grad while gradients are
                recorded, or has no contiguous axis; `kernel` does not support the operands.
        """
        op = "GroupedProblem.from_lists"
        _check(op, a_list, b_list)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*a_list, *b_list)):
            raise ValueError(f"{op}: records no gradients, got operands that require grad: use grouped_gemm_list")
        if out_list is None:
            out_list = [a.new_empty(a.shape[0], b.shape[1]) for a, b in zip(a_list, b_list, strict=True)]
        args = GroupedGemmListArguments(tuple(a_list), tuple(b_list), tuple(out_list))
        if error := args.error():
            raise ValueError(f"{op}: {error}")
        if kernel is None and choose(op, implementation, a_list[0]) == "reference":
            return cls(args, None)
        kernel = kernel or tuning.select(args)
        if not (status := kernel.supports(args)):
            raise ValueError(f"{op}: {kernel.metadata.kernel_name}: {status.error}")
        table = make_problem_table(args, *kernel.metadata.design.tile_shape[:2])
        args = dataclasses.replace(args, table=table)
        artifact = kernel.compile(args, assume_supported_args=True) if args.survey.num_filled else None
        return cls(args, kernel, artifact)

    def run(self) -> list[Tensor]:  # [M, N] each
        """Multiply on the current stream. Returns the same `out_list` each time."""
        args = self.args
        if self.kernel is not None:
            self.kernel.run(args, self.artifact, assume_supported_args=True)
        else:
            for a, b, out in zip(args.A_list, args.B_list, args.out_list, strict=True):
                out.copy_(a @ b)
        return list(args.out_list)


def _check(op: str, a_list: Sequence[Tensor], b_list: Sequence[Tensor]) -> None:
    if len(a_list) != len(b_list) or not a_list:
        raise ValueError(f"{op}: a_list and b_list must have one length, at least 1, got {len(a_list)}, {len(b_list)}")
    first = a_list[0]
    for g, (a, b) in enumerate(zip(a_list, b_list, strict=True)):
        if not (a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0]):
            raise ValueError(f"{op}: problem {g} must be [M, K] @ [K, N], got {list(a.shape)} @ {list(b.shape)}")
        if not (a.dtype == b.dtype == first.dtype and a.dtype.is_floating_point):
            raise ValueError(
                f"{op}: all matrices must have one floating-point dtype, got {first.dtype} in problem 0 and "
                f"{a.dtype} @ {b.dtype} in problem {g}"
            )
        if not a.device == b.device == first.device:
            raise ValueError(
                f"{op}: all matrices must be on one device, got {first.device} in problem 0 and {a.device} @ "
                f"{b.device} in problem {g}"
            )


@registered_op("grouped_gemm_list")
def _grouped_gemm_list_op(a_list: list[Tensor], b_list: list[Tensor], by_columns: list[bool]) -> list[Tensor]:
    outs = _empty_products(a_list, b_list, by_columns)
    operands = a_list, b_list, outs
    if any(by_columns):
        # Kernels write rows. The transpose of a product stored by columns is the product of the transposes, by rows.
        problems = zip(*operands, by_columns, strict=True)
        operands = zip(*[(b.t(), a.t(), out.t()) if t else (a, b, out) for a, b, out, t in problems], strict=True)
    args = GroupedGemmListArguments(*(_with_contiguous_axes(matrices) for matrices in operands))
    tuning.run(args)
    return outs


def _with_contiguous_axes(matrices: Iterable[Tensor]) -> list[Tensor]:
    return [matrix if leading_dimension(matrix) is not None else matrix.contiguous() for matrix in matrices]


def _empty_products(a_list: list[Tensor], b_list: list[Tensor], by_columns: list[bool]) -> list[Tensor]:
    return [
        b.new_empty(b.shape[1], a.shape[0]).t() if transposed else a.new_empty(a.shape[0], b.shape[1])
        for a, b, transposed in zip(a_list, b_list, by_columns, strict=True)
    ]


@_grouped_gemm_list_op.register_fake
def _(a_list, b_list, by_columns):
    return _empty_products(a_list, b_list, by_columns)


def _setup(ctx, inputs, output):
    a_list, b_list, _ = inputs
    ctx.save_for_backward(*a_list, *b_list)


def _backward(ctx, douts):
    num_problems = len(douts)
    a_list, b_list = ctx.saved_tensors[:num_problems], ctx.saved_tensors[num_problems:]
    needs_a, needs_b, _ = ctx.needs_input_grad
    da = _gradients(needs_a, douts, [b.t() for b in b_list], a_list)
    db = _gradients(needs_b, [a.t() for a in a_list], douts, b_list)
    return da, db, None


def _gradients(
    needed: list[bool], left: Sequence[Tensor], right: Sequence[Tensor], likes: Sequence[Tensor]
) -> list[Tensor | None]:
    """left[g] @ right[g], stored as likes[g], where it is needed; one launch."""
    wanted = [g for g, is_needed in enumerate(needed) if is_needed]
    if not wanted:
        return [None] * len(needed)
    by_columns = [likes[g].stride(0) < likes[g].stride(1) for g in wanted]
    products = _grouped_gemm_list_op([left[g] for g in wanted], [right[g] for g in wanted], by_columns)
    found = dict(zip(wanted, products, strict=True))
    return [found.get(g) for g in range(len(needed))]


_grouped_gemm_list_op.register_autograd(_backward, setup_context=_setup)
