import dataclasses
from functools import partial

import pytest
import torch

from moe_kernels import GemmArguments, PointerDesign, WarpSpecializedDesign, batched_gemm, get_kernels, reference
from moe_kernels.activation.functions import PLAIN_EPILOGUES
from moe_kernels.gemm import selection
from moe_kernels.gemm.kernel import Operand, device_cc
from moe_kernels.gemm.kernels.batched import BatchedGemm
from moe_kernels.gemm.ops.batched_gemm import _batched_gemm_op
from moe_kernels.runtime.launch import observing_launches
from moe_kernels.testing import assert_accurate, check_accuracy, to_float64

from ...dtypes import DTYPES
from ...tiers import slow
from ..compiled import assert_compiles
from .kernel_arguments import kernels_of

FLOAT8 = torch.float8_e4m3fn
triton_gemm = partial(batched_gemm, implementation="triton")

# (L of a, L of b, M, K, N); L is None without a batch
CASES = {
    "batched": (2, 2, 40, 64, 72),
    "dense": (None, None, 130, 33, 47),
    "shared_b": (3, None, 17, 40, 24),
    "shared_a": (None, 3, 17, 40, 24),
    "one_element": (1, 1, 1, 1, 1),
    "no_rows": (2, 2, 0, 32, 16),
    "no_batch": (0, 0, 8, 32, 16),
}
if torch.cuda.is_available():
    CASES["large"] = (4, 4, 1000, 520, 328)


def draw(case, dtype, device, seed=0):
    batch_a, batch_b, size_m, size_k, size_n = CASES[case]
    generator = torch.Generator(device).manual_seed(seed)

    def normal(batch, *shape):
        shape = shape if batch is None else (batch, *shape)
        return torch.randn(*shape, device=device, generator=generator).to(dtype)

    return normal(batch_a, size_m, size_k), normal(batch_b, size_k, size_n)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_matches_reference(case, dtype, device):
    check_accuracy(triton_gemm, reference.batched_gemm, partial(draw, case, dtype, device), ("out", "da", "db"))


@pytest.mark.parametrize("case", ["batched", "shared_b"])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_float32_results_of_16_bit_operands(dtype, case, device):
    def wide(op, a, b):
        return op(a, b, out_dtype=torch.float32 if a.dtype == dtype else None)

    draw_case = partial(draw, case, dtype, device)
    check_accuracy(partial(wide, triton_gemm), partial(wide, reference.batched_gemm), draw_case, ("out", "da", "db"))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32], ids=str)
def test_integers_are_exact(out_dtype, implementation, device):
    """At (L, M, N, K) = (2, 128, 256, 64) every sum is below 2048, which float16 represents."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-4, 5, (2, 128, 64), generator=generator)
    b = torch.randint(-4, 5, (2, 64, 256), generator=generator)
    out = batched_gemm(*(t.half().to(device) for t in (a, b)), out_dtype=out_dtype, implementation=implementation)
    assert out.dtype == out_dtype and torch.equal(out.cpu().long(), a @ b)


KERNELS = kernels_of(GemmArguments)


def expected_results(a, b, epilogue=None):
    """Return the reference's result in the dtype of the operands, then in float64."""
    results = [reference.batched_gemm(*operands) for operands in ((a, b), to_float64((a, b)))]
    return results if epilogue is None else [reference.apply_activation(product, epilogue) for product in results]


def by_columns(tensor):
    return tensor.mT.contiguous().mT


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_each_kernel(kernel, device):
    operands, design = kernel.metadata.operands, kernel.metadata.design
    dtype, is_pointer = operands.A.dtype, isinstance(design, PointerDesign)
    if dtype not in DTYPES or kernel.obstacle:
        pytest.skip(kernel.obstacle or f"no {dtype} in the interpreter")
    num_supported = 0
    for case in CASES:
        a, b = draw(case, dtype, device)
        shape = reference.batched_gemm(a, b).shape
        out = torch.full(shape, torch.nan, dtype=dtype, device=device)
        epilogue = kernel.metadata.epilogue
        args = GemmArguments(a, by_columns(b) if operands.B.layout == "column" else b, out, epilogue=epilogue)
        if is_pointer:
            # Every stride differs from a contiguous tensor's.
            out = torch.full((*shape[:-1], 2 * shape[-1]), torch.nan, dtype=dtype, device=device)[..., ::2]
            args = GemmArguments(by_columns(a), by_columns(b), out, epilogue=epilogue)
        if kernel.supports(args):
            num_supported += 1
            kernel.run(args)
            assert_accurate(out, *expected_results(a, b, epilogue), case)
    on_other_gpu = torch.cuda.is_available() and not kernel.supports_cc(device_cc(torch.device("cuda", 0)))
    assert num_supported >= (0 if on_other_gpu else len(CASES) if is_pointer else 2)


def test_offsets_whatever_the_default_device(device):
    a, b = torch.empty(3, 5, 16, device=device).half(), torch.empty(3, 16, 8, device=device).half()
    args = GemmArguments(a, b, torch.empty(3, 5, 8, device=device).half())
    kernel = next(kernel for kernel in KERNELS if isinstance(kernel, BatchedGemm))
    with torch.device("meta"):
        offsets = kernel.with_metadata(args, None).tile_table
    assert offsets.bounds.device == a.device and offsets.bounds[:4].tolist() == [0, 5, 10, 15]


@pytest.mark.parametrize("epilogue", PLAIN_EPILOGUES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_epilogues(dtype, epilogue, device):
    a, b = draw("dense", dtype, device)
    a *= 0.3
    baseline, exact = expected_results(a, b, epilogue)
    for out_dtype in {dtype, torch.float32}:
        args = GemmArguments(a, b, torch.full_like(baseline, torch.nan, dtype=out_dtype), epilogue=epilogue)
        kernels = get_kernels(args)
        assert kernels and kernels[0] is selection.select(args)
        for kernel in kernels:
            assert kernel.metadata.epilogue == epilogue and kernel.metadata.kernel_name.endswith(epilogue)
            kernel.run(args, kernel.compile(args))
            assert_accurate(args.out.to(dtype), baseline, exact, kernel.metadata.kernel_name)


@pytest.mark.parametrize("form", ["slice", "expanded"])
def test_matrices_apart_after_contiguous_ones(form, device, monkeypatch):
    """A kernel chosen for matrices without gaps is not reused for others of the same sizes."""
    monkeypatch.setattr("moe_kernels.gemm.kernels.batched._TABLE_LAUNCHES", 0)
    monkeypatch.setattr(selection, "_selected", {})
    b = torch.randn(3, 64, 256, device=device).half()
    memory = torch.randn(3, 256, 64, device=device).half()
    behind = memory[:, :128].contiguous()
    apart = memory[:, :128] if form == "slice" else memory[:1, :128].expand(3, -1, -1)
    chosen = [selection.select(GemmArguments(a, b, b.new_empty(3, 128, 256))) for a in (behind, apart)]
    assert isinstance(chosen[0], BatchedGemm) and not isinstance(chosen[1], BatchedGemm)
    for a in (behind, apart):
        assert_accurate(triton_gemm(a, b), *expected_results(a, b))


def test_an_epilogue_that_no_kernel_has_is_named():
    a, b = draw("dense", torch.float32, "cpu")
    args = GemmArguments(a, b, a.new_empty(len(a), b.shape[1]), epilogue="swiglu")
    assert get_kernels(args) == []
    for kernel in KERNELS:
        if kernel.metadata.operands.A.dtype == torch.float32:
            has = kernel.metadata.epilogue or "no"
            assert kernel.supports(args).error == f"applies {has} epilogue, requested swiglu"
            plain = dataclasses.replace(args, epilogue=None)
            assert has == "no" or kernel.supports(plain).error == f"applies {has} epilogue, requested None"


def test_batches_that_are_no_rows_name_the_operand():
    rows_of_16_bytes = {Operand(torch.float16, "row", 16)}
    kernel = next(kernel for kernel in KERNELS if kernel.metadata.operands.B in rows_of_16_bytes)

    def zeros(*shape):
        return torch.zeros(*shape, dtype=torch.float16)

    spread = zeros(4, 16, 64)[::2]
    for operands, error in [
        ((spread, zeros(2, 64, 32), zeros(2, 16, 32)), "Operand `A`: expected matrices one after another"),
        ((zeros(2, 16, 64), zeros(2, 64, 64), spread), "Operand `out`: expected matrices one after another"),
        ((zeros(16, 64), zeros(2, 64, 32), zeros(2, 16, 32)), "Operand `A`: this kernel takes none shared by a batch"),
        ((zeros(16, 64), zeros(2, 64, 32), zeros(16, 32)), "Operand `out`: expected shape [2, 16, 32], got [16, 32]"),
    ]:
        assert kernel.supports(GemmArguments(*operands)).error.startswith(error)


@slow
def test_opcheck(device):
    for case in ("batched", "shared_a", "shared_b"):
        a, b = (t.requires_grad_() for t in draw(case, torch.float32, device))
        torch.library.opcheck(_batched_gemm_op.overload, (a, b, torch.float32))


def test_compiles_without_graph_break(device):
    assert_compiles(triton_gemm, draw("shared_a", torch.float32, device), frozen=(1,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(3)}, r"a must be \[M, K\], got \[3\]"),
        ({"b": torch.zeros(4, 4)}, r"b must be \[K, N\] with K=3, got \[4, 4\]"),
        (
            {"a": torch.zeros(2, 5, 3), "b": torch.zeros(3, 3, 4)},
            r"b must be \[L, K, N\] with L=2, K=3, got \[3, 3, 4\]",
        ),
        ({"b": torch.zeros(3, 4).half()}, "one floating-point dtype"),
        ({"a": torch.zeros(2, 3).int(), "b": torch.zeros(3, 4).int()}, "one floating-point dtype"),
        ({"b": torch.zeros(3, 4, device="meta")}, "one device"),
        ({"out_dtype": torch.float16}, "do not give out_dtype torch.float16"),
        ({"a": torch.zeros(2, 3).to(FLOAT8), "b": torch.zeros(3, 4).to(FLOAT8)}, "16 bits or more"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        batched_gemm(**{"a": torch.zeros(2, 3), "b": torch.zeros(3, 4)} | change)


def test_every_kernel_has_the_table_that_it_says():
    """Each kernel gets its declared table, although the grouped kernel behind it may use offsets, which a batch
    lacks."""
    a, b, out = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((4, 256, 512), (4, 512, 768), (4, 256, 768)))
    args = GemmArguments(a, b, out)
    kernels = get_kernels(metadata_filter=lambda metadata: issubclass(metadata.kernel_class, BatchedGemm))
    assert any(isinstance(kernel.metadata.design, WarpSpecializedDesign) for kernel in kernels)
    for kernel in kernels:
        assert kernel.metadata_bytes(args) > 0 and kernel.estimate(args) > 0
        with observing_launches(lambda launch, run: None):  # the operands are on the CPU
            assert kernel.with_metadata(args, None).tile_table is not None
