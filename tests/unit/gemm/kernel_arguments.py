"""Arguments that a kernel of the catalog supports, for every form, and helpers of tests of kernels."""

import pytest
import torch

from moe_kernels import (
    GemmArguments,
    GroupedGemmArguments,
    GroupedGemmListArguments,
    JaggedGemmArguments,
    WgradArguments,
    get_kernels,
    reference,
)
from moe_kernels.gemm.arguments.activation_gradient import COLUMNS, ActivationGradientArguments
from moe_kernels.gemm.arguments.block_scaled import BlockScaledGemmArguments
from moe_kernels.gemm.arguments.decoding import DecodingGemmArguments, QuantizedMatrices
from moe_kernels.gemm.kernel import device_cc
from moe_kernels.gemm.kernels.streaming import StreamingGroupedGemm
from moe_kernels.gemm.tile_table import make_tile_table
from moe_kernels.quantization.quantize import quantize
from moe_kernels.reference_fp8 import BLOCK, quantize_blocks
from moe_kernels.specs import is_gated
from moe_kernels.testing import assert_accurate, to_float64


class Sizes:
    """Sizes of the operands. The last group but one is empty, and rows follow the last group."""

    ends = (130, 150, 150, 700) if torch.cuda.is_available() else (5, 20, 20, 36)
    few_ends = (33, 35, 35, 124) if torch.cuda.is_available() else ends  # for kernels of at most 32 rows per group
    num_tail = 4
    num_rows = ends[-1] + num_tail
    size_k, size_n = (384, 528) if torch.cuda.is_available() else (48, 80)


def kernels_of(arguments_class, dtypes=None):
    """Return the kernels of the catalog that take these arguments, by default with any dtype of A."""
    return [
        kernel
        for kernel in get_kernels()
        if kernel.arguments_class is arguments_class and (dtypes is None or kernel.metadata.operands.A.dtype in dtypes)
    ]


def name_of(kernel):
    return kernel.metadata.kernel_name


def row_ends(kernel):
    """Return the end of each group's rows in the arguments of a kernel."""
    return Sizes.few_ends if isinstance(kernel, StreamingGroupedGemm) else Sizes.ends


def supported_arguments(kernel, device):
    """Return random operands of unit scale, with NaN in outputs. Skip the test if the kernel cannot run."""
    if device == "cuda" and (error := kernel.obstacle or kernel.supports_cc(device_cc(torch.device("cuda", 0))).error):
        pytest.skip(error)
    metadata, generator = kernel.metadata, torch.Generator(device).manual_seed(0)

    def draw(operand, *shape):
        stored = (*shape[:-2], shape[-1], shape[-2]) if operand.layout == "column" else shape
        values = torch.randn(stored, device=device, generator=generator).to(operand.dtype)
        return values.mT if operand.layout == "column" else values

    def unwritten(*shape):
        return torch.full(shape, torch.nan, device=device, dtype=metadata.operands.out.dtype)

    args = _MAKERS[kernel.arguments_class](kernel, draw, unwritten, device)
    assert (status := kernel.supports(args)), status.error
    return args


def run_or_skip(kernel, args):
    """Run the kernel, or skip the test if it does not support the arguments on this machine."""
    skip_unless_supported(kernel, args)
    kernel.run(args)


def skip_unless_supported(kernel, args):
    if not (status := kernel.supports(args)):
        pytest.skip(status.error)


def skip_without_float8():
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")


def shuffled(rows):
    """Return tokens, and the index by which a gather reads the rows from them."""
    index = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).int().to(rows.device)
    tokens = torch.empty_like(rows)
    tokens[index.long()] = rows
    return tokens, index


def check_forward(args, a, b, offsets, bias=None):
    """Hold the results of a grouped GEMM to the reference on these operands."""
    added = None if args.epilogue is not None else bias
    exact = reference.grouped_gemm(*to_float64((a, b, offsets)), bias=None if added is None else added.double())
    assert_accurate(args.product, reference.grouped_gemm(a, b, offsets, bias=added), exact, "product")
    if args.epilogue is not None:
        # The activation applies to the product as stored, plus the bias.
        activate = reference.apply_activation
        exact = args.product.double()
        if bias is not None:
            sizes = offsets.diff(prepend=offsets.new_zeros(1))
            exact[: offsets[-1]] += bias.double().repeat_interleave(sizes, 0)
        baseline = activate(exact.to(args.out.dtype), args.epilogue)
        assert_accurate(args.out, baseline, activate(exact, args.epilogue), "activation")


def _grouped(kernel, draw, unwritten, device):
    ends, operands, n = row_ends(kernel), kernel.metadata.operands, Sizes.size_n
    rows = ends[-1] + Sizes.num_tail
    a, b = draw(operands.A, rows, Sizes.size_k), draw(operands.B, len(ends), Sizes.size_k, n)
    epilogue = kernel.metadata.epilogue
    return GroupedGemmArguments(
        a,
        b,
        unwritten(rows, n // (1 + is_gated(epilogue))),
        offsets=torch.tensor(ends, device=device, dtype=torch.int32),
        row_to_token=_index(device) if kernel.metadata.design.gather else None,
        epilogue=epilogue,
        preactivation=None if epilogue is None else unwritten(rows, n),
    )


def _decoding(kernel, draw, unwritten, device):
    # Rows past the last group stay unwritten, so there are none.
    operand, rows, groups = kernel.metadata.operands.A, Sizes.ends[-1], len(Sizes.ends)
    weight = quantize(torch.randn(groups, Sizes.size_n, Sizes.size_k, device=device), getattr(kernel, "form", "fp8"))
    a, b = draw(operand, rows, Sizes.size_k), QuantizedMatrices(weight, transposed=True)
    table = make_tile_table(_offsets(device), rows, 128)
    return DecodingGemmArguments.of(a, b, unwritten(rows, Sizes.size_n), tile_table=table)


def _block_scaled(kernel, draw, unwritten, device):
    rows, groups = Sizes.num_rows, len(Sizes.ends)
    a, scale_a = quantize_blocks(torch.randn(rows, Sizes.size_k, device=device), 1, BLOCK)
    b, scale_b = quantize_blocks(torch.randn(groups, Sizes.size_n, Sizes.size_k, device=device), BLOCK, BLOCK)
    scales = scale_a.t().contiguous().t(), scale_b.mT
    options = {"offsets": _offsets(device)}
    if kernel.metadata.design.gather:
        options["row_to_token"] = _index(device)
    return BlockScaledGemmArguments(a, b.mT, unwritten(rows, Sizes.size_n), *scales, **options)


def _activation_gradient(kernel, draw, unwritten, device):
    # Rows past the last group stay unwritten, so there are none. The reduction has room for all parts of the epilogue.
    operands, rows, depth, d_ff = kernel.metadata.operands, Sizes.ends[-1], 3 * 256, Sizes.size_n
    a, b = draw(operands.A, rows, depth), draw(operands.B, len(Sizes.ends), depth, d_ff)
    sums = torch.full((rows, -(-d_ff // COLUMNS)), torch.nan, device=device)
    written = unwritten(rows, 2 * d_ff), draw(operands.out, rows, 2 * d_ff), unwritten(rows, d_ff)
    options = {"offsets": _offsets(device), "epilogue": kernel.metadata.epilogue}
    if kernel.metadata.design.gather:
        options["row_to_token"] = _index(device)[:rows] % rows
    return ActivationGradientArguments(a, b, *written, torch.rand(rows, device=device), sums, **options)


def _wgrad(kernel, draw, unwritten, device):
    operands, rows = kernel.metadata.operands, Sizes.num_rows
    a, dout = draw(operands.A, rows, Sizes.size_k), draw(operands.dout, rows, Sizes.size_n)
    out = unwritten(len(Sizes.ends), Sizes.size_k, Sizes.size_n)
    args = [
        WgradArguments(a, dout, out, offsets=_offsets(device), **{name: _index(device) for name in gathered})
        for gathered in ((), ("a_row_to_token",), ("dout_row_to_token",))
    ]
    return next(candidate for candidate in args if kernel.supports_design(candidate))


def _gemm(kernel, draw, unwritten, device):
    operands, rows = kernel.metadata.operands, Sizes.num_rows
    a, b = draw(operands.A, 2, rows, Sizes.size_k), draw(operands.B, 2, Sizes.size_k, Sizes.size_n)
    return GemmArguments(a, b, unwritten(2, rows, Sizes.size_n), epilogue=kernel.metadata.epilogue)


def _jagged(kernel, draw, unwritten, device):
    operands, rows = kernel.metadata.operands, Sizes.num_rows
    a, b = draw(operands.A, rows, Sizes.size_k), draw(operands.B, Sizes.size_k, Sizes.size_n)
    offsets = torch.tensor([3, *Sizes.ends[1:]], device=device)
    return JaggedGemmArguments(a, b, unwritten(rows, Sizes.size_n), offsets)


def _list(kernel, draw, unwritten, device):
    operands = kernel.metadata.operands
    sizes = [(end, Sizes.size_n - 16 * i, Sizes.size_k - 16 * i) for i, end in enumerate((16, *Sizes.ends[:2]))]
    a_list, b_list, out_list = zip(
        *((draw(operands.A, m, k), draw(operands.B, k, n), unwritten(m, n)) for m, n, k in sizes), strict=True
    )
    return GroupedGemmListArguments(a_list, b_list, out_list, epilogue=kernel.metadata.epilogue)


_MAKERS = {
    GroupedGemmArguments: _grouped,
    DecodingGemmArguments: _decoding,
    BlockScaledGemmArguments: _block_scaled,
    ActivationGradientArguments: _activation_gradient,
    WgradArguments: _wgrad,
    GemmArguments: _gemm,
    JaggedGemmArguments: _jagged,
    GroupedGemmListArguments: _list,
}


def _offsets(device):
    return torch.tensor(Sizes.ends, device=device, dtype=torch.int32)


def _index(device):
    return torch.randperm(Sizes.num_rows, generator=torch.Generator().manual_seed(1)).int().to(device)


def _one_of_each_kind():
    """Return the smallest kernel of each form, design, dtype and epilogue, because the interpreter is slow."""
    chosen = {}
    for kernel in get_kernels(metadata_filter=lambda metadata: metadata.operands.A.dtype != torch.bfloat16):
        metadata = kernel.metadata
        kind = (kernel.arguments_class, type(metadata.design), metadata.operands.A.dtype, metadata.epilogue)
        rows, columns, _ = metadata.design.tile_shape
        if kernel.obstacle is None and (kind not in chosen or rows * columns < chosen[kind][0]):
            chosen[kind] = rows * columns, kernel
    return [kernel for _, kernel in chosen.values()]


KERNELS = get_kernels() if torch.cuda.is_available() else _one_of_each_kind()
