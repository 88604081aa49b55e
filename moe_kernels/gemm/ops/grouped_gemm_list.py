"""Independent products of different sizes in one launch: out_list[g] = a_list[g] @ b_list[g].

A table on the device holds every problem's addresses, sizes and leading dimensions. A fixed number of programs computes
the tiles of all outputs (`gemm/kernels/problem_table.py`). `grouped_gemm_list` makes the table in every call. A
`GroupedProblem` makes the table once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ... import reference
from ...runtime.checks import check_no_gradient, result_dtype
from ...runtime.dispatch import FLOAT8, without_autocast
from ...runtime.launch import CompiledArtifact
from ...runtime.registered_ops import check_gradients, check_tangents, check_transforms, registered_op
from .. import selection
from ..arguments.list import GroupedGemmListArguments, leading_dimension
from ..kernel import Kernel
from ..kernels.problem_table import make_problem_table
from .grouped_checks import choose_gemm


def grouped_gemm_list(
    a_list: Sequence[Tensor],  # [M, K] each
    b_list: Sequence[Tensor],  # [K, N] each
    *,
    out_dtype: torch.dtype | None = None,
    implementation: str | None = None,
) -> list[Tensor]:  # [M, N] each
    """Multiply G pairs of matrices of different sizes in one launch.

    Operands are stored by rows or by columns, with any leading dimension. An operand without a contiguous axis is
    copied first. Any size may be 0. K = 0 gives zeros. Accumulates in float32 and rounds once. Tensor cores sum the
    float8 products of one step of the reduction with about 14 bits, and these sums are accumulated in float32. Float32
    operands use TF32 only if `torch.backends.cuda.matmul.fp32_precision` is "tf32", for example after
    `torch.set_float32_matmul_precision("high")`. Deterministic.

    Differentiable in every matrix that is not float8. The backward pass first rounds upstream gradients to the
    operands' dtype. The pass takes one launch for the gradients of `a_list` and one for those of `b_list`. Each
    gradient is stored by rows or by columns, like its matrix.

    A call costs some microseconds of CPU time per problem, one small asynchronous copy to the GPU and one launch, with
    no host synchronisation. In a CUDA graph, or to multiply the same tensors again, use `GroupedProblem`.

    Shapes: a_list [M, K] each, b_list [K, N] each; result [M, N] each.

    Args:
        out_dtype: default: the operands' dtype, or bfloat16 for float8. 16-bit operands also allow float32. Float8
            (e4m3) operands allow float16, bfloat16 and float32.
        implementation: "triton", "reference", or None to choose by device.

    Raises:
        ValueError: the lists are empty or differ in length, a shape, dtype or device disagrees with the signature, or
            a float8 matrix requires a gradient.
        NotImplementedError: a CUDA graph is being captured, or the operands are float8 and the GPU is below compute
            capability 8.9. Below 8.9, only the reference multiplies float8 operands, by upcasting them.
    """
    op = "grouped_gemm_list"
    _check(op, a_list, b_list)
    out_dtype = result_dtype(op, a_list[0], None, out_dtype)
    if a_list[0].dtype == FLOAT8:
        check_no_gradient(op, "float8 operands", *a_list, *b_list)
    if choose_gemm(op, implementation, a_list[0]) == "reference":
        with without_autocast(a_list[0]):
            return reference.grouped_gemm_list(a_list, b_list, out_dtype=out_dtype)
    if forward_ad._current_level >= 0:
        check_tangents(op, (*a_list, *b_list))
    if not torch.compiler.is_compiling():
        check_transforms(op, (*a_list, *b_list))
    return _grouped_gemm_list_op(list(a_list), list(b_list), [False] * len(a_list), out_dtype)


@dataclass(frozen=True, eq=False)
class GroupedProblem:
    """Independent products with a prepared table of addresses. Each `run` is one launch, which CUDA graphs may capture.

    `run` multiplies the current values of `a_list` and `b_list` and overwrites `out_list`.
    """

    args: GroupedGemmListArguments
    kernel: Kernel | None  # None: the reference computes the products
    artifact: CompiledArtifact | None = None

    @classmethod
    def from_lists(
        cls,
        a_list: Sequence[Tensor],  # [M, K] each
        b_list: Sequence[Tensor],  # [K, N] each
        *,
        out_list: Sequence[Tensor] | None = None,  # [M, N] each, rows contiguous; allocated if None
        out_dtype: torch.dtype | None = None,
        kernel: Kernel | None = None,
        implementation: str | None = None,
    ) -> GroupedProblem:
        """Prepare `a_list[g] @ b_list[g]` for every g. Takes as long as `grouped_gemm_list` without its launch.

        Shapes: a_list [M, K] each, b_list [K, N] each, out_list [M, N] each.

        Args:
            out_dtype: default: the dtype of `out_list`. Without `out_list`, the default is the operands' dtype, or
                bfloat16 for float8.
            kernel: a kernel of the catalog (`get_kernels`). None, the default, selects a kernel.
            implementation: "triton", "reference", or None to choose by device.

        Raises:
            ValueError: the lists are empty or differ in length, a shape, dtype or device disagrees with the signature,
                `out_list` does not fit the products, a matrix requires grad while gradients are recorded, an operand
                has no contiguous axis, or `kernel` does not support the operands.
            NotImplementedError: a CUDA graph is being captured, or the GPU cannot multiply the float8 operands.
        """
        op = "GroupedProblem.from_lists"
        _check(op, a_list, b_list)
        if torch.is_grad_enabled() and any(matrix.requires_grad for matrix in (*a_list, *b_list, *(out_list or ()))):
            raise ValueError(f"{op}: records no gradients, got operands that require grad: use grouped_gemm_list")
        out_dtype = result_dtype(op, a_list[0], out_list[0] if out_list else None, out_dtype)
        if out_list is None:
            out_list = _empty_products(a_list, b_list, [False] * len(a_list), out_dtype)
        args = GroupedGemmListArguments(tuple(a_list), tuple(b_list), tuple(out_list))
        if error := args.error():
            raise ValueError(f"{op}: {error}")
        if kernel is None and choose_gemm(op, implementation, a_list[0]) == "reference":
            return cls(args, None)
        kernel = kernel or selection.select(args)
        if not (status := kernel.supports(args)):
            raise ValueError(f"{op}: {kernel.metadata.kernel_name}: {status.error}")
        table = make_problem_table(args, *kernel.metadata.design.tile_shape[:2])
        args = dataclasses.replace(args, table=table)
        artifact = kernel.compile(args, assume_supported_args=True) if args.survey.num_filled else None
        return cls(args, kernel, artifact)

    def run(self) -> list[Tensor]:  # [M, N] each
        """Multiply on the current stream. Write the products to the tensors of `out_list` and return these tensors.

        Shapes: result [M, N] each.
        """
        args = self.args
        if self.kernel is not None:
            self.kernel.run(args, self.artifact, assume_supported_args=True)
        else:
            with without_autocast(args.A):
                products = reference.grouped_gemm_list(args.A_list, args.B_list, out_dtype=args.out_list[0].dtype)
            for out, product in zip(args.out_list, products, strict=True):
                out.copy_(product)
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
def _grouped_gemm_list_op(
    a_list: list[Tensor], b_list: list[Tensor], by_columns: list[bool], out_dtype: torch.dtype
) -> list[Tensor]:
    outs = _empty_products(a_list, b_list, by_columns, out_dtype)
    operands = a_list, b_list, outs
    if any(by_columns):
        # Kernels store results by rows. A result stored by columns is therefore computed as its transpose, B.T @ A.T,
        # stored by rows.
        problems = zip(*operands, by_columns, strict=True)
        operands = zip(*[(b.t(), a.t(), out.t()) if t else (a, b, out) for a, b, out, t in problems], strict=True)
    aligned_a, aligned_b, aligned_outs = (
        [matrix if leading_dimension(matrix) is not None else matrix.contiguous() for matrix in matrices]
        for matrices in operands
    )
    selection.run(GroupedGemmListArguments(aligned_a, aligned_b, aligned_outs))
    return outs


def _empty_products(
    a_list: Sequence[Tensor], b_list: Sequence[Tensor], by_columns: list[bool], dtype: torch.dtype
) -> list[Tensor]:
    return [
        b.new_empty(b.shape[1], a.shape[0], dtype=dtype).t()
        if transposed
        else a.new_empty(a.shape[0], b.shape[1], dtype=dtype)
        for a, b, transposed in zip(a_list, b_list, by_columns, strict=True)
    ]


_grouped_gemm_list_op.register_fake(_empty_products)


def _setup(ctx, inputs, output):
    a_list, b_list, *_ = inputs
    ctx.save_for_backward(*a_list, *b_list)


def _backward(ctx, douts):
    check_gradients("grouped_gemm_list", douts)
    num_problems = len(douts)
    a_list, b_list = ctx.saved_tensors[:num_problems], ctx.saved_tensors[num_problems:]
    needs_a, needs_b, *_ = ctx.needs_input_grad
    douts = [dout.to(a.dtype) for dout, a in zip(douts, a_list, strict=True)]
    da = _gradients(needs_a, douts, [b.t() for b in b_list], a_list)
    db = _gradients(needs_b, [a.t() for a in a_list], douts, b_list)
    return da, db, None, None


def _gradients(
    needed: list[bool], left: Sequence[Tensor], right: Sequence[Tensor], likes: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return a list with left[g] @ right[g] where needed[g] is true, and None elsewhere. Each product is stored like
    likes[g], by rows or by columns. All products take one launch."""
    wanted = [g for g, is_needed in enumerate(needed) if is_needed]
    if not wanted:
        return [None] * len(needed)
    by_columns = [likes[g].stride(0) < likes[g].stride(1) for g in wanted]
    operands = [left[g] for g in wanted], [right[g] for g in wanted]
    products = _grouped_gemm_list_op(*operands, by_columns, left[0].dtype)
    found = dict(zip(wanted, products, strict=True))
    return [found.get(g) for g in range(len(needed))]


_grouped_gemm_list_op.register_autograd(_backward, setup_context=_setup)
