"""The experts' forward next to vLLM's Triton kernel, which is loaded from vLLM's sources at run time.

    python -m benchmarks.vllm_experts --source FILE --commit $(git rev-parse --short HEAD) --output FILE

`--source` is `vllm/model_executor/layers/fused_moe/fused_moe.py`. vLLM need not be installed: only that file's Triton
functions are loaded.

Both sides start with sorted choices of experts, end with one row per token, and replay a CUDA graph. vLLM's side is its
kernel for both GEMMs, this package's activation between them, and `torch.sum` over a token's outputs. Its tiles are the
fastest of `TILES` for each number of tokens. Both results are checked before they are timed. The bound is the time to
read the weights of every chosen expert once at the speed of a large copy.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels import Permutation, apply_activation, fused_experts, reference, sort_by_expert
from moe_layers import MoEFeedForward

from .common import shapes
from .common.command import Command
from .common.layers import chosen_bytes, make_layer, make_tokens
from .common.results_file import Row, Task
from .common.shapes import Shape
from .common.timing import copy_bytes_per_ms, in_a_graph, timed

NUM_TOKENS = (1, 8, 64, 256, 1024, 4096)
LARGEST_ERROR = 0.02  # root mean square, relative to float32


class Tiles(NamedTuple):
    """Block sizes and compiler options of vLLM's kernel."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int


TILES = (
    Tiles(16, 64, 128, 1, 4, 4),  # the first six: defaults of vLLM 0.33, from few tokens to many
    Tiles(32, 64, 128, 1, 4, 3),
    Tiles(64, 128, 64, 1, 4, 3),
    Tiles(64, 128, 64, 1, 8, 3),
    Tiles(128, 128, 64, 1, 8, 3),
    Tiles(128, 128, 64, 16, 8, 3),
    Tiles(16, 32, 128, 1, 4, 4),
    Tiles(16, 32, 256, 1, 4, 3),
    Tiles(16, 64, 64, 1, 4, 5),
    Tiles(16, 64, 256, 1, 4, 3),
    Tiles(16, 128, 64, 1, 4, 4),
    Tiles(16, 128, 128, 1, 4, 3),
    Tiles(16, 128, 128, 1, 8, 4),
    Tiles(32, 128, 64, 1, 4, 4),
    Tiles(64, 64, 128, 1, 4, 3),
    Tiles(128, 256, 64, 16, 8, 3),
)
COMPUTE_TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
# Arguments of vLLM's kernel for biases, quantised weights and other forms, none of which is used.
UNUSED = {
    **dict.fromkeys(("b_bias_ptr", "a_scale_ptr", "b_scale_ptr")),
    **dict.fromkeys(("stride_asm", "stride_ask", "stride_bse", "stride_bsk", "stride_bsn"), 0),
    **dict.fromkeys(("stride_bbe", "stride_bbn", "group_n", "group_k"), 0),
    **dict.fromkeys(("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "per_channel_quant"), False),
    **dict.fromkeys(("naive_block_assignment", "HAS_BIAS", "SWAP_AB", "USE_TD"), False),
    "SPLIT_K": 1,
}


def load_kernel(source: Path, directory: Path) -> Any:
    """Return `fused_moe_kernel` of the file, in a module that holds only the file's Triton functions.

    Args:
        directory: directory for the module. Triton reads a kernel's source from its file.
    """
    text = source.read_text()
    lines, parts = text.splitlines(), ["import triton", "import triton.language as tl"]
    for node in ast.parse(text).body:
        decorators = getattr(node, "decorator_list", [])
        if any(ast.unparse(decorator).startswith("triton.jit") for decorator in decorators):
            parts += lines[decorators[0].lineno - 1 : node.end_lineno]
    path = directory / "vllm_kernels.py"
    path.write_text("\n".join(parts) + "\n")
    spec = importlib.util.spec_from_file_location("vllm_kernels", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "fused_moe_kernel"):
        raise SystemExit(f"vllm_experts: {source} must define the Triton function fused_moe_kernel, got none")
    return module.fused_moe_kernel


class Blocks(NamedTuple):
    """vLLM's assignment of slots to blocks of rows, each of one expert."""

    slots: Tensor  # [capacity] int32; T * K for padding
    experts: Tensor  # [capacity / block_m] int32
    num_padded: Tensor  # [1] int32: number of slots of all blocks, padding included


def assign_blocks(permutation: Permutation, topk_experts: Tensor, num_experts: int, block_m: int) -> Blocks:
    """Pad each expert's slots to whole blocks."""
    num_slots, device = topk_experts.numel(), topk_experts.device
    counts = permutation.offsets.diff(prepend=permutation.offsets.new_zeros(1))
    padded = (counts + block_m - 1) // block_m * block_m  # [E]
    shift = (padded - counts).cumsum(0) - (padded - counts)  # padding in front of each expert
    capacity = min(num_slots + num_experts * (block_m - 1), num_slots * block_m) // block_m * block_m
    slots = torch.full((capacity,), num_slots, dtype=torch.int32, device=device)
    experts = topk_experts.flatten().long()
    place = permutation.slot_to_row.flatten() + shift[experts]
    slots[place.long()] = torch.arange(num_slots, dtype=torch.int32, device=device)
    starts = torch.arange(0, capacity, block_m, device=device)
    owners = torch.searchsorted(padded.cumsum(0), starts, right=True).clamp(max=num_experts - 1)
    return Blocks(slots, owners.int(), padded.sum(dtype=torch.int32)[None])


def launch(
    kernel: Any,
    a: Tensor,  # [T, K], or [T * top_k, K] with top_k 1
    b: Tensor,  # [E, N, K]
    c: Tensor,  # [T * top_k, N]
    blocks: Blocks,
    weights: Tensor | None,  # [T, top_k], multiplied into c if given
    top_k: int,
    tiles: Tiles,
) -> None:
    """Launch vLLM's kernel with arguments by name, because they differ between versions."""
    capacity = len(blocks.slots)
    values = {
        **UNUSED,
        "a_ptr": a,
        "b_ptr": b,
        "c_ptr": c,
        "topk_weights_ptr": weights,
        "sorted_token_ids_ptr": blocks.slots,
        "expert_ids_ptr": blocks.experts,
        "num_tokens_post_padded_ptr": blocks.num_padded,
        "N": b.shape[1],
        "K": b.shape[2],
        "EM": capacity,
        "num_valid_tokens": len(c),
        "stride_am": a.stride(0),
        "stride_ak": a.stride(1),
        "stride_be": b.stride(0),
        "stride_bk": b.stride(2),
        "stride_bn": b.stride(1),
        "stride_cm": c.stride(0),
        "stride_cn": c.stride(1),
        "BLOCK_SIZE_M": tiles.block_m,
        "BLOCK_SIZE_N": tiles.block_n,
        "BLOCK_SIZE_K": tiles.block_k,
        "GROUP_SIZE_M": tiles.group_m,
        "MUL_ROUTED_WEIGHT": weights is not None,
        "top_k": top_k,
        "compute_type": COMPUTE_TYPES[c.dtype],
    }
    if unknown := [name for name in kernel.arg_names if name not in values]:
        raise SystemExit(f"vllm_experts: fused_moe_kernel has parameters that are not known here: {', '.join(unknown)}")
    grid = (capacity // tiles.block_m * triton.cdiv(b.shape[1], tiles.block_n),)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    kernel[grid](**{name: values[name] for name in kernel.arg_names}, **options)


def vllm_experts(
    kernel: Any, layer: MoEFeedForward, tokens: Tensor, topk_weights: Tensor, blocks: Blocks, tiles: Tiles
) -> Tensor:  # [T, D]
    (num_tokens, top_k), experts = topk_weights.shape, layer.experts
    product = tokens.new_empty(num_tokens * top_k, experts.w_up.shape[1])
    launch(kernel, tokens, experts.w_up, product, blocks, None, top_k, tiles)
    activated = apply_activation(product, experts.activation)
    out = tokens.new_empty(num_tokens * top_k, tokens.shape[1])
    launch(kernel, activated, experts.w_down, out, blocks, topk_weights, 1, tiles)
    return out.view(num_tokens, top_k, -1).sum(1)


def relative_error(actual: Tensor, exact: Tensor) -> float:
    error = ((actual.float() - exact).square().mean() / exact.square().mean()).sqrt().item()
    assert error < LARGEST_ERROR, error
    return error


@torch.no_grad()
def bench_experts(kernel: Any, shape: Shape, bytes_per_ms: float, options: argparse.Namespace) -> list[Row]:
    layer = make_layer(shape, options.device, options.dtype)
    tokens = make_tokens(layer, shape, "even")
    topk_experts, topk_weights, *_ = layer.router(tokens)
    permutation = sort_by_expert(topk_experts, shape.num_experts)
    w_up, w_down, activation = layer.experts.w_up, layer.experts.w_down, layer.experts.activation
    ours = partial(fused_experts, tokens, topk_weights, permutation, w_up, w_down, activation=activation)
    functions: dict[str, Callable[[], Tensor]] = {"ours": ours}
    for tiles in TILES:
        blocks = assign_blocks(permutation, topk_experts, shape.num_experts, tiles.block_m)
        functions[str(tuple(tiles))] = partial(vllm_experts, kernel, layer, tokens, topk_weights, blocks, tiles)
    operands = tokens.float(), topk_weights, reference.sort_by_expert(topk_experts, shape.num_experts)
    exact = reference.fused_experts(*operands, w_up.float(), w_down.float(), activation=activation)
    errors = {name: relative_error(function(), exact) for name, function in functions.items()}
    if options.device == "cuda":
        functions = {name: in_a_graph(function) for name, function in functions.items()}
    times = {name: timing.ms for name, timing in timed(functions, options).items()}
    fastest = min(times.keys() - {"ours"}, key=times.__getitem__)
    bound_ms = chosen_bytes(layer, topk_experts) / bytes_per_ms
    return [
        {
            "ours_ms": times["ours"],
            "vllm_ms": times[fastest],
            "times_as_fast": times[fastest] / times["ours"],
            "weights_bound_ms": bound_ms,
            "ours_over_bound": times["ours"] / bound_ms,
            "vllm_tiles": fastest,
            "ours_error": errors["ours"],
            "vllm_error": errors[fastest],
        }
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    shapes.add_option(parser, "qwen3-30b-a3b", "mixtral-8x7b")
    parser.add_argument("--source", type=Path, required=True, metavar="FILE", help="vLLM's fused_moe.py")
    parser.add_argument("--tokens", nargs="+", type=int, default=NUM_TOKENS)
    parser.set_defaults(round_ms=50.0)


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    bytes_per_ms = copy_bytes_per_ms(options.device)
    with tempfile.TemporaryDirectory(prefix="vllm_") as directory:
        kernel = load_kernel(options.source, Path(directory))
        for shape in shapes.shapes_named(options.shapes):
            for num_tokens in options.tokens:
                sized = dataclasses.replace(shape, num_tokens=num_tokens)
                shared = {"shape": shape.name, "T": num_tokens}
                yield shared, partial(bench_experts, kernel, sized, bytes_per_ms, options)


main = Command(__doc__, add_options, tasks)


if __name__ == "__main__":
    main()
