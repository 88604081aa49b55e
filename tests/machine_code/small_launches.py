"""Launches of the kernels that the catalog does not list: routing, permutation, activations, quantisation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

import moe_kernels as mk
from moe_kernels.activation.ops import (
    Destination,
    RowBias,
    launch_activation,
    launch_scaled_activation,
    launch_weighted_activation_backward,
)
from moe_kernels.experts import expert_bias
from moe_kernels.experts.router_gradient import launch_combine_with_router
from moe_kernels.experts.slot_values import launch_row_weights, launch_slot_sums
from moe_kernels.gemm.kernels.jagged import make_jagged_table
from moe_kernels.gemm.passes import launch_bias_and_scale, launch_row_scale_backward
from moe_kernels.permutation.partial_sums import launch_sum_shares
from moe_kernels.quantization.formats import FORMATS
from moe_kernels.quantization.fp8_rows import (
    empty_scaled_rows,
    launch_dequantize_rows,
    launch_pack_rows,
    launch_quantize_rows,
    launch_unpack_rows,
)
from moe_kernels.quantization.fp8_weights import empty_checksums, launch_quantize_weight, launch_requantize
from moe_kernels.quantization.kernels import launch_dequantize
from moe_kernels.quantization.quantize import quantize
from moe_kernels.routing.linear import launch_product, launch_weight_gradient
from moe_kernels.routing.scored import launch_backward, launch_forward, score_settings
from moe_kernels.routing.statistics import RoutedForward, add_routing_statistics
from moe_kernels.runtime.row_layout import empty_rows
from moe_kernels.specs import ACTIVATION_KINDS


def run_small_ops(num_tokens: int, d_model: int, d_ff: int, num_experts: int, top_k: int, dtype: torch.dtype) -> None:
    """Run each op that is not a GEMM, forward and backward."""
    logits = torch.empty(num_tokens, num_experts)
    for normalize, split_dtype in ((True, torch.bfloat16), (False, None)):
        routed = mk.routing.softmax.topk_routing_op(logits, top_k, normalize)
        saved = None if normalize else logits
        direct = None if normalize else logits
        mk.routing.softmax.topk_backward_op(routed[0], *routed, saved, direct, num_experts, split_dtype)
    settings = score_settings(mk.RouterSpec.deepseek_v3(8, 4) if num_experts == 128 else mk.RouterSpec.ernie())
    launch_forward(logits, logits[0], *routed, settings)
    launch_backward(routed[0], routed[1], logits, logits, torch.bfloat16, settings)
    totals = torch.empty(2 * num_experts + 4, dtype=torch.int64), torch.empty(6, dtype=torch.float64)
    is_token, loss = torch.empty(num_tokens, dtype=torch.bool), torch.empty(())
    forward = RoutedForward(logits, logits, routed[1], routed[1], is_token, loss)
    add_routing_statistics(*totals, forward, num_experts)
    permutation = mk.sort_by_expert(routed[1], num_experts, implementation="triton")
    mk.gemm.tile_table.make_tile_table(permutation.offsets, num_tokens * top_k, 128)
    tokens = torch.empty(num_tokens, d_model, dtype=dtype)
    slot_to_row = permutation.slot_to_row
    rows = mk.permutation.permute._permute_op(tokens, permutation.row_to_token, slot_to_row)
    # Fewer rows than slots, some of them dropped, cover the same code and more.
    mk.permutation.permute.launch_combine(rows[1:], routed[0], slot_to_row)
    mk.permutation.permute.launch_permute(tokens, routed[0], slot_to_row, rows)  # weights cover the same code and more
    w_router = torch.empty(num_experts, d_model, dtype=dtype)
    launch_row_weights(routed[0], slot_to_row, torch.empty(len(rows)))
    launch_slot_sums(torch.empty(len(rows), 23), slot_to_row)
    launch_combine_with_router(rows, routed[0], routed[0], slot_to_row, permutation.tile_table.bounds, w_router)
    mk.permutation.permute._combine_dweights_op(tokens, rows, slot_to_row)
    shares = tokens if dtype != torch.float32 else tokens[:1, :1]  # sizes of one become constants
    launch_sum_shares(shares, torch.empty(8, *shares.shape, dtype=dtype), 1, torch.empty_like(shares))
    if dtype != torch.float32:
        mk.permutation.permute.launch_combine(rows, None, slot_to_row)
        many = torch.empty(4096, 2048, dtype=dtype)
        index = torch.empty(4096, top_k, dtype=torch.int32)
        mk.permutation.permute.launch_permute(many, None, index, torch.empty(4096 * top_k, 2048, dtype=dtype))
        bias, row_scale = torch.empty(num_experts, d_model, dtype=dtype), torch.empty(len(rows))
        launch_bias_and_scale(rows, bias, row_scale, permutation.tile_table)
        launch_row_scale_backward(rows, row_scale, rows.float(), dtype, permutation.offsets)
    expert_bias.launch_segment_sum(tokens, permutation.tile_table.bounds, permutation.row_to_token, routed[0].flatten())
    swiglu = mk.Activation("swiglu")
    activated = run_activation(swiglu, None, len(rows), d_ff, routed[0], slot_to_row, dtype)
    mk.activation.ops._activation_backward_op(
        torch.empty(len(rows), 2 * d_ff, dtype=dtype), activated, "swiglu", None, None, False
    )
    bias = RowBias(torch.empty(num_experts, 2 * d_ff, dtype=dtype), torch.zeros(len(rows), dtype=torch.int32))
    # This covers the same code and more: rows of some slots, written to other places.
    others = {"row_to_token": permutation.row_to_token}
    others["destination"] = Destination(rows.new_empty(len(rows), 2 * d_ff), torch.empty_like(activated), slot_to_row)
    run_activation(swiglu, bias, len(rows) - 1, d_ff, routed[0], slot_to_row, dtype, **others)


def run_activation(activation, bias, num_rows, d_ff, weights, slot_to_row, dtype, **others) -> torch.Tensor:
    preactivation = torch.empty(num_rows, (1 + activation.gated) * d_ff, dtype=dtype)
    activated = launch_activation(preactivation, activation, bias)
    launch_weighted_activation_backward(preactivation, activated, weights, slot_to_row, activation, bias, **others)
    return activated


def run_activations() -> None:
    """Run each activation once, forward and in the middle of the expert op's backward."""
    weights, slot_to_row = torch.empty(64, 8), torch.zeros(64, 8, dtype=torch.int32)
    for name in ACTIVATION_KINDS:
        run_activation(mk.Activation(name), None, 512, 1024, weights, slot_to_row, torch.bfloat16)
    bias = RowBias(torch.empty(32, 2 * 2880, dtype=torch.bfloat16), torch.zeros(512, dtype=torch.int32))
    interleaved = mk.Activation("gpt_oss", interleaved=True)
    run_activation(interleaved, bias, 512, 2880, weights, slot_to_row, torch.bfloat16)


def run_between_tiles() -> None:
    """Run what reads or writes rows of 16-bit numbers whose widths are multiples of 8 but not of 16."""
    num_tokens, d_model, d_ff, top_k = 32768, 1544, 520, 8
    tokens, weights = torch.empty(num_tokens, d_model, dtype=torch.bfloat16), torch.empty(num_tokens, top_k)
    slot_to_row = torch.zeros(num_tokens, top_k, dtype=torch.int32)
    rows = empty_rows(tokens, slot_to_row.numel(), d_model)
    mk.permutation.permute.launch_permute(tokens, None, slot_to_row, rows)
    mk.permutation.permute.launch_combine(rows, weights, slot_to_row)
    hidden, activated = empty_rows(tokens, len(rows), 2 * d_ff), empty_rows(tokens, len(rows), d_ff)
    activation = mk.Activation("swiglu")
    launch_activation(hidden, activation, None, activated)
    launch_weighted_activation_backward(hidden, activated, weights, slot_to_row, activation)


def run_jagged_tables() -> None:
    """Write the table that lets a grouped GEMM kernel compute packed rows with a shared matrix."""
    out = torch.empty(256, 512, dtype=torch.bfloat16)
    make_jagged_table(torch.zeros(5, dtype=torch.int64), len(out), 128, parts=1, out=out)


def run_scaled() -> None:
    """Run everything that quantises to e4m3 with scales of blocks."""
    rows = torch.empty(512, 2880, dtype=torch.bfloat16)
    launch_dequantize_rows(launch_quantize_rows(rows), torch.bfloat16)
    launch_unpack_rows(launch_pack_rows(rows), rows.shape[1])
    weight = torch.empty(2, 1536, 2048, dtype=torch.bfloat16)
    for given in (weight, weight.mT, weight.float()):
        launch_quantize_weight(given)
    launch_quantize_weight(weight, as_is=False)
    checksums = empty_checksums(weight)
    launch_requantize(weight, launch_quantize_weight(weight, checksums=checksums), checksums)
    weights, slot_to_row = torch.empty(64, 8), torch.zeros(64, 8, dtype=torch.int32)
    for name, d_ff in (("swiglu", 512), ("swiglu", 1024), ("gpt_oss", 2048), ("relu_squared", 1856)):
        activation = mk.Activation(name)
        hidden = torch.empty(512, (1 + activation.gated) * d_ff, dtype=torch.bfloat16)
        launch_scaled_activation(hidden, activation)
        dweighted, scaled = torch.empty(512, d_ff, dtype=torch.bfloat16), empty_scaled_rows(hidden, *hidden.shape)
        launch_weighted_activation_backward(hidden, dweighted, weights, slot_to_row, activation, scaled=scaled)


def run_router_products(*sizes: tuple[int, int]) -> None:
    """Run the products of a linear router with these numbers of tokens and experts."""
    for num_tokens, num_experts in sizes:
        tokens = torch.empty(num_tokens, 2048, dtype=torch.bfloat16)
        w_router, dlogits = tokens.new_empty(num_experts, 2048), tokens.new_empty(num_tokens, 2 * num_experts)
        launch_product(tokens, w_router.t(), torch.float32, bias=tokens.new_empty(num_experts))
        launch_product(dlogits, w_router, tokens.dtype, addend=tokens)
        launch_weight_gradient(dlogits, tokens, w_router.dtype)


def run_dequantize(format: str, dtype: torch.dtype, size_in: int) -> None:
    launch_dequantize(quantize(torch.zeros(2, 128, size_in), format), dtype)


_SIZES = {
    "large": {"num_tokens": 64, "d_model": 4096, "d_ff": 1024, "num_experts": 128, "top_k": 8, "dtype": torch.bfloat16},
    "odd": {"num_tokens": 64, "d_model": 97, "d_ff": 47, "num_experts": 1000, "top_k": 10, "dtype": torch.float32},
}
SMALL_LAUNCHES: dict[str, Callable[[], object]] = {
    "between tiles": run_between_tiles,
    **{case: partial(run_small_ops, **sizes) for case, sizes in _SIZES.items()},
    "jagged": run_jagged_tables,
    "activations": run_activations,
    "scaled": run_scaled,
    "router": partial(run_router_products, (16384, 128)),
    "router, other tiles": partial(run_router_products, (64, 8), (1024, 128), (4096, 128)),
    **{format: partial(run_dequantize, format, torch.bfloat16, 512) for format in FORMATS},
    "nf4_nested float32": partial(run_dequantize, "nf4_nested", torch.float32, 38),  # blocks run over the ends of rows
    "fp8 float16": partial(run_dequantize, "fp8", torch.float16, 512),
}
