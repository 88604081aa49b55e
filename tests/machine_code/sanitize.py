"""Launch every kernel for NVIDIA's compute-sanitizer. Exit status 1: a kernel that can run here was not reached.

    python -m tests.machine_code.sanitize
    compute-sanitizer --tool memcheck --report-api-errors no python -m tests.machine_code.sanitize
    compute-sanitizer --tool racecheck --print-limit 100000 python -m tests.machine_code.sanitize > REPORT
    python -m tests.machine_code.racecheck REPORT

The first command fills Triton's cache with compiled kernels. Records ask the driver for one parameter past a kernel's
last, an error of its API. Every kernel of the catalog runs alone; then layers and ops run until their launches have run
one by one, were recorded, and are replayed. The sizes leave partial tiles everywhere, empty experts, and both kinds of
gathering. With `--kernels tma` or `pointer` the layers use no warp-specialised kernels, or also no TMA kernels.

In Triton's interpreter (TRITON_INTERPRET=1) the program runs one kernel of each kind, and layers of small sizes. The
last lines name the kernels that remain for a GPU.
"""

import argparse
import ast
import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

import moe_kernels
from moe_kernels import GroupedGemmArguments, RouterSpec, get_kernels, grouped_gemm, permute, sort_by_expert
from moe_kernels.experts.slot_values import launch_row_weights, launch_slot_sums
from moe_kernels.gemm import selection
from moe_kernels.gemm.kernel import Design, PointerDesign, TmaDesign, device_cc
from moe_kernels.gemm.passes import launch_bias_and_scale
from moe_kernels.permutation.partial_sums import sum_shares
from moe_kernels.quantization.ops import dequantize, pack_rows, quantize_rows, unpack_rows
from moe_kernels.quantization.quantize import quantize
from moe_kernels.routing.statistics import RoutedForward, add_routing_statistics
from moe_kernels.runtime import replay
from moe_layers import LoRA, MoEFeedForward
from moe_layers.experts.quantization import quantize_experts_

from ..layers import moe_layer
from ..unit.gemm.kernel_arguments import KERNELS, supported_arguments

FORMATS = ("fp8", "mxfp4", "nf4", "int8")

DESIGNS = {"all": Design, "tma": (TmaDesign, PointerDesign), "pointer": PointerDesign}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16


@contextlib.contextmanager
def only(designs: type[Design] | tuple[type[Design], ...]) -> Iterator[None]:
    """Restrict GEMMs inside the context to kernels of these designs."""

    def of_these_designs(args=None):
        return get_kernels(args, metadata_filter=lambda metadata: isinstance(metadata.design, designs))

    with (
        mock.patch.dict(selection._selected, clear=True),
        mock.patch.object(selection, "get_kernels", of_these_designs),
    ):
        yield


@contextlib.contextmanager
def noting_launches() -> Iterator[set[str]]:
    """Yield the names of the Triton functions that the context launches: at least the first launch of each form."""
    launched: set[str] = set()
    with contextlib.ExitStack() as stack:
        for kind in (JITFunction, InterpretedFunction):

            def run(function, *args, original=kind.run, **options):
                launched.add(f"{function.fn.__module__}.{function.fn.__name__}")
                return original(function, *args, **options)

            stack.enter_context(mock.patch.object(kind, "run", run))
        yield launched


def triton_kernels() -> set[str]:
    """Return the names of all Triton functions with a grid, from the sources: the interpreter defines none of Gluon."""
    root = Path(moe_kernels.__file__).parent
    return {
        ".".join((root.name, *path.relative_to(root).with_suffix("").parts, function.name))
        for path in root.rglob("*.py")
        for function in ast.parse(path.read_text()).body
        if isinstance(function, ast.FunctionDef) and "Grid:" in (ast.get_docstring(function) or "")
    }


def adapted(layer: MoEFeedForward) -> None:
    layer.add_lora(LoRA(rank=8, alpha=16))


# Sizes, options, tokens, and what changes the layer.
PLAIN = {"shared_d_ff": 64}
BIASED = {"bias": True, "activation": "gpt_oss", "router": RouterSpec.deepseek_v3(4, 2), "num_zero_experts": 4}
ON_INPUT = {"bias": True, "activation": "relu_squared", "router": RouterSpec.llama4()}
FP8 = {"precision": "fp8"}
LAYERS = (
    [
        (136, 200, PLAIN, 150, None),
        (256, 512, PLAIN, 150, None),
        (256, 512, PLAIN, 900, None),
        (136, 200, BIASED, 150, None),
        (136, 200, ON_INPUT, 150, None),
        (144, 208, FP8, 150, None),
        (256, 512, FP8, 900, None),
        (144, 208, BIASED | FP8, 150, None),
        (136, 200, {}, 150, adapted),
        (256, 512, {}, 900, adapted),
        *[(256, 512, {}, tokens, partial(quantize_experts_, format=kind)) for tokens in (9, 900) for kind in FORMATS],
        (256, 512, {}, 3600, None),
    ]
    if torch.cuda.is_available()
    else [(64, 64, PLAIN, 10, None), (64, 64, BIASED, 10, None), (64, 64, FP8, 10, None)]
)


def run_catalog() -> set[str]:
    """Run each kernel that can run here, also with a bias where it takes one. Return their names."""
    cc = device_cc(torch.device(DEVICE)) if DEVICE == "cuda" else None
    able = [kernel for kernel in KERNELS if cc is None or (kernel.obstacle is None and kernel.supports_cc(cc))]
    for kernel in able:
        args = supported_arguments(kernel, DEVICE)
        kernel.run(args)
        if isinstance(args, GroupedGemmArguments) and "bias" in kernel.metadata.optional_operands:
            kernel.run(dataclasses.replace(args, bias=args.out.new_ones(len(args.B), args.B.shape[2])))
    return {kernel.metadata.kernel_name for kernel in able}


def run_layers() -> None:
    """Run each layer until its launches have run one by one, were recorded, and are replayed."""
    for d_model, d_ff, options, num_tokens, change in LAYERS:
        torch.manual_seed(0)
        layer = moe_layer(d_model, d_ff, 12, 2, **options, device=DEVICE, dtype=DTYPE)
        if change is not None:
            change(layer)
        x = torch.randn(num_tokens, d_model, device=DEVICE, dtype=DTYPE, requires_grad=True)
        wanted = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
        for _ in range(3 if DEVICE == "cuda" else 1):
            gradients = torch.autograd.grad(layer(x).sum(), wanted)
            assert all(gradient.isfinite().all() for gradient in gradients)
        print(f"d_model {d_model}, d_ff {d_ff}, {num_tokens} tokens, {options}, {layer.experts}: finite")


def run_ops() -> None:
    """Run the kernels that neither the catalog nor every layer launches."""
    tokens = torch.randn(37, 80, device=DEVICE, dtype=DTYPE)
    for num_tokens in (600, len(tokens)):  # two ways to sort
        topk_experts = torch.randint(0, 11, (num_tokens, 2), device=DEVICE, dtype=torch.int32)
        permutation = sort_by_expert(topk_experts, 12)
    rows, row_scale = permute(tokens, permutation), torch.rand(74, device=DEVICE, requires_grad=True)
    w = torch.randn(12, 80, 48, device=DEVICE, dtype=DTYPE)
    torch.autograd.grad(grouped_gemm(rows, w, permutation.offsets, row_scale=row_scale).sum(), row_scale)
    launch_bias_and_scale(rows, rows[:12].float(), row_scale.detach(), permutation.tile_table)
    for kind in FORMATS:
        dequantize(quantize(torch.randn(2, 40, 64, device=DEVICE), kind), DTYPE)
    quantize_rows(tokens)
    unpack_rows(pack_rows(tokens), 80)
    sum_shares(tokens, torch.stack([tokens] * 3), 1, torch.empty_like(tokens))
    launch_row_weights(torch.rand(37, 2, device=DEVICE), permutation.slot_to_row, row_scale.detach())
    launch_slot_sums(torch.rand(74, 23, device=DEVICE), permutation.slot_to_row)
    logits, mask = torch.randn(37, 12, device=DEVICE), torch.ones(37, dtype=torch.bool, device=DEVICE)
    totals = (torch.zeros(28, dtype=torch.int64, device=DEVICE), torch.zeros(6, dtype=torch.float64, device=DEVICE))
    forward = RoutedForward(logits, logits, topk_experts, topk_experts, mask, logits[0, 0])
    add_routing_statistics(*totals, forward, 12)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", choices=DESIGNS, default="all")
    designs = DESIGNS[parser.parse_args(arguments).kernels]
    with mock.patch.object(replay, "CALLS_BEFORE_RECORD", 1), noting_launches() as launched:
        reached = run_catalog()
        with only(designs):
            run_layers()
            print("layers:", *sorted({k.metadata.kernel_name for k in selection._selected.values() if k}))
        run_ops()
    functions = triton_kernels() - launched
    print("catalog:", len(reached), "kernels reached")
    print(
        "remaining:", *sorted({kernel.metadata.kernel_name for kernel in get_kernels()} - reached), *sorted(functions)
    )
    # A function of the catalog is reached by its kernels where they can run.
    if missing := sorted(name for name in functions if not name.startswith("moe_kernels.gemm.kernels.")):
        sys.exit(f"sanitize: must launch every Triton function, not reached: {', '.join(missing)}")


if __name__ == "__main__":
    main()
