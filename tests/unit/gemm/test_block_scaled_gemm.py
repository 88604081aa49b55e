"""Grouped GEMM of e4m3 operands with block scales: every kernel, and which one is chosen."""

import dataclasses
import re

import pytest
import torch

from moe_kernels import WarpSpecializedDesign, get_kernels, grouped_gemm, reference
from moe_kernels.gemm import rule as rule_of_thumb
from moe_kernels.gemm import selection
from moe_kernels.gemm.arguments.block_scaled import BlockScaledGemmArguments
from moe_kernels.gemm.verify import check_result
from moe_kernels.reference_fp8 import BLOCK, dequantize_blocks, quantize_blocks
from moe_kernels.runtime.gluon import KNOWS_GLUON
from moe_kernels.tools.measurement_keys import arguments_of
from moe_kernels.tools.tune import check

from ...tiers import default_tier
from .kernel_arguments import kernels_of, name_of, run_or_skip, shuffled

KERNELS = kernels_of(BlockScaledGemmArguments)
# (rows of each group, rows without a group, K, N)
CASES = {
    "ordinary": ([20, 30, 14], 0, 256, 128),
    "tile_edges": ([0, 1, 127, 128, 129], 0, 128, 128),
    "one_group_owns_all": ([0, 0, 150, 0], 0, 128, 16),
    "partial_blocks": ([5, 31, 17], 3, 208, 144),
    "odd_sizes": ([5, 0, 17], 4, 131, 45),
    "tail": ([9, 0, 40], 21, 48, 264),
    "no_rows": ([0, 0], 0, 128, 32),
}
QUICK = {"partial_blocks", "odd_sizes", "tail", "no_rows"}
if torch.cuda.is_available():
    uneven = [0, 700, 1, 64, 300, 0, 129, 1500, 63, 2, 640, 65]
    CASES["many_uneven_tiles"] = (uneven, 100, 1024, 1536)
    CASES["half_a_column_tile"] = (uneven, 100, 2048, 1152)
    CASES["gpt_oss"] = ([959, 1090, 0, 1153], 100, 2880, 2880)


def draw(case, device, *, gather, out_dtype=torch.float16, row_scales=True, seed=0):
    """Return arguments with NaN in rows that no group has, and in tokens that no row reads."""
    sizes, tail, size_k, size_n = CASES[case]
    generator = torch.Generator(device).manual_seed(seed)
    num_rows, num_groups = sum(sizes) + tail, len(sizes)

    def normal(*shape, scale=1.0):
        exponents = torch.randint(-3, 4, (*shape[:-1], 1), device=device, generator=generator)
        return torch.randn(shape, device=device, generator=generator) * scale * 2.0**exponents

    a, b = normal(num_rows, size_k), normal(num_groups, size_n, size_k, scale=size_k**-0.5)
    a[sum(sizes) :] = torch.nan
    row_to_token = None
    if gather:
        tokens, row_to_token = shuffled(a)
        a = torch.cat([tokens, torch.full_like(a[:2], torch.nan)])
    (a, scale_a), (b, scale_b) = quantize_blocks(a, 1, BLOCK), quantize_blocks(b, BLOCK, BLOCK)
    return BlockScaledGemmArguments(
        a,
        b.mT,
        torch.full((num_rows, size_n), torch.nan, dtype=out_dtype, device=device),
        scale_a.t().contiguous().t() if row_scales else scale_a,
        scale_b.mT,
        offsets=torch.tensor(sizes).cumsum(0).int().to(device),
        row_to_token=row_to_token,
    )


@pytest.mark.parametrize("case", default_tier(CASES, QUICK))
@pytest.mark.parametrize("kernel", KERNELS, ids=name_of)
def test_every_kernel(kernel, case, device):
    args = draw(case, device, gather=kernel.metadata.design.gather)
    run_or_skip(kernel, args)
    for first in range(len(args.B)):
        check_result(args, kernel.metadata.kernel_name, first=first)
    assert args.out.isfinite().all() and not args.out[args.offsets[-1] :].any()


@pytest.mark.parametrize("kernel", KERNELS, ids=name_of)
def test_rows_past_the_groups_stay_unwritten_on_request(kernel, device):
    args = dataclasses.replace(draw("tail", device, gather=kernel.metadata.design.gather), zero_tail=False)
    run_or_skip(kernel, args)
    assert args.out[: args.offsets[-1]].isfinite().all() and args.out[args.offsets[-1] :].isnan().all()


@pytest.mark.parametrize("gather", [False, True])
def test_any_layout(gather, device):
    """Kernels take scales and operands by rows or columns, and give a float32 result."""
    args = draw("partial_blocks", device, gather=gather, out_dtype=torch.float32, row_scales=False)
    args = dataclasses.replace(args, B=args.B.contiguous(), scale_b=args.scale_b.contiguous())
    selection.run(args)
    check_result(args, "any layout")


def test_nan_and_infinite_scales_stay_in_their_rows(device):
    args = draw("ordinary", device, gather=False)
    expected = dataclasses.replace(args, out=torch.empty_like(args.out))
    selection.run(expected)
    values = dequantize_blocks(args.A, args.scale_a, 1, BLOCK, torch.float32)
    values[3, 5], values[40, 255] = torch.nan, torch.inf
    a, scale_a = quantize_blocks(values, 1, BLOCK)
    args = dataclasses.replace(args, A=a, scale_a=scale_a.t().contiguous().t())
    selection.run(args)
    is_bad = torch.zeros(64, dtype=torch.bool, device=device)
    is_bad[[3, 40]] = True
    assert not args.out[is_bad].isfinite().any() and args.out[~is_bad].isfinite().all()
    torch.testing.assert_close(args.out[~is_bad], expected.out[~is_bad], rtol=0.01, atol=0.01)


KEY = "block_scaled_gemm B=column gather={} float8_e4m3fn G=4 K={} N={} rows={}"


@pytest.mark.parametrize("gather", ["none", "A"])
def test_table_keys_make_arguments(gather, device):
    key = KEY.format(gather, 144, 48, 16)
    args = arguments_of(key, device)
    assert args.table_key() == key
    args = dataclasses.replace(args, out=args.out.to(torch.float16))
    check(selection.select(args), args)


@pytest.mark.skipif(not KNOWS_GLUON, reason="no Gluon for the warp-specialised kernels")
@pytest.mark.parametrize("gather", ["none", "A"])
def test_the_fastest_kernel_comes_first(gather):
    args = arguments_of(KEY.format(gather, 512, 768, 512), "meta")
    takes = [kernel for kernel in KERNELS if kernel.supports_cc(90) and kernel.takes(args)]
    first, *_ = rule_of_thumb.best_first(takes, args, None)
    assert isinstance(first.metadata.design, WarpSpecializedDesign)
    assert first.metadata.design.tile_shape == (128, 256, 128)
    few, *_ = get_kernels(arguments_of(KEY.format(gather, 512, 768, 16), "meta"), cc=100)
    assert few.metadata.design.tile_shape[0] == 64


CHANGES = {
    "scale_a": ({"scale_a": torch.zeros(64, 1)}, r"Operand `scale_a`: expected shape \[64, 2\], got \[64, 1\]"),
    "scale_b": ({"scale_b": torch.zeros(3, 2, 2)}, r"Operand `scale_b`: expected shape \[3, 2, 1\], got \[3, 2, 2\]"),
    "dtype": ({"scale_a": torch.zeros(64, 2).double()}, "Operand `scale_a`: expected torch.float32, got torch.float64"),
    "a": ({"A": torch.zeros(64, 256)}, "Operand `A`: expected torch.float8_e4m3fn, got torch.float32"),
    "rows": ({"out": torch.zeros(63, 128)}, r"Operand `A`: expected shape \[63, 256\], got \[64, 256\]"),
    "device": ({"scale_b": torch.zeros(3, 2, 1, device="meta")}, "Operand `scale_b`: expected device cpu as A"),
    "offsets": ({"offsets": None}, "Operand `offsets`: expected it or tile_table, got neither"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_unsupported_arguments_name_the_operand(change):
    changes, message = CHANGES[change]
    args = dataclasses.replace(draw("ordinary", "cpu", gather=False), **changes)
    kernel = next(k for k in KERNELS if not k.metadata.design.gather and not k.metadata.design.tma)
    assert re.search(message, kernel.takes(args).error)


def test_the_warp_specialised_kernel_names_what_it_does_not_take():
    kernel = next(k for k in KERNELS if k.metadata.design.tma and not k.metadata.design.gather)
    args = draw("ordinary", "cpu", gather=False)
    assert kernel.takes(args)
    by_rows = draw("ordinary", "cpu", gather=False, row_scales=False)
    assert "`scale_a`: expected scales stored by columns" in kernel.takes(by_rows).error
    odd = draw("odd_sizes", "cpu", gather=False)
    assert "aligned to 16 bytes" in kernel.takes(odd).error
    assert "`B`: expected axis -2 contiguous" in kernel.takes(dataclasses.replace(args, B=args.B.contiguous())).error


def test_a_tile_table_of_another_height(device):
    args = draw("partial_blocks", device, gather=False)
    table = reference.tile_table(args.offsets, len(args.out), 32)
    args = dataclasses.replace(args, offsets=None, tile_table=table)
    selection.run(args)
    check_result(args, "tile table")


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("form", ["product", "bias", "activation", "out"])
def test_grouped_gemm_takes_block_scales(form, implementation, device):
    args = draw("partial_blocks", device, gather=False)
    a = dequantize_blocks(args.A, args.scale_a, 1, BLOCK, torch.float64)
    b = dequantize_blocks(args.B, args.scale_b, BLOCK, BLOCK, torch.float64)
    generator = torch.Generator(device).manual_seed(1)
    bias = torch.randn(len(b), b.shape[2], device=device, generator=generator)
    row_scale = torch.rand(len(a), device=device, generator=generator)
    options = {"bias": bias, "row_scale": row_scale} if form in ("bias", "activation") else {}
    options |= {"activation": "swiglu"} if form == "activation" else {}
    memory = {"out": torch.full_like(args.out, torch.nan)} if form == "out" else {"out_dtype": torch.float32}
    scales = {"scale_a": args.scale_a, "scale_b": args.scale_b}
    actual = grouped_gemm(args.A, args.B, args.offsets, **scales, **options, **memory, implementation=implementation)
    assert form != "out" or actual is memory["out"]
    exact = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    expected = reference.grouped_gemm(a.nan_to_num(), b, args.offsets, **exact)
    assert not actual[args.offsets[-1] :].any()
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < (1e-3 if form == "out" or device == "cuda" else 1e-6)


@pytest.mark.parametrize(
    ("name", "rule"),
    [("scale_a", r"scale_a must be \[R, K/128\]"), ("scale_b", r"scale_b must be \[G, K/128, N/128\]")],
)
def test_grouped_gemm_names_wrong_block_scales(name, rule):
    args = draw("partial_blocks", "cpu", gather=False)
    scales = {"scale_a": args.scale_a, "scale_b": args.scale_b}
    with pytest.raises(ValueError, match=rule):
        grouped_gemm(args.A, args.B, args.offsets, **{**scales, name: scales[name][..., :1]})
    with pytest.raises(ValueError, match="scale_a of blocks must come with scale_b, got None"):
        grouped_gemm(args.A, args.B, args.offsets, scale_a=args.scale_a)
