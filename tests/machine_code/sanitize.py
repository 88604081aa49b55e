"""Run a small layer forward and backward under NVIDIA's compute-sanitizer.

    compute-sanitizer --tool memcheck --report-api-errors no python -m tests.machine_code.sanitize
    compute-sanitizer --tool racecheck python -m tests.machine_code.sanitize > REPORT
    python -m tests.machine_code.racecheck REPORT

Records ask the driver for one parameter past a kernel's last, an error of its API. The sizes leave partial tiles
everywhere, empty experts, and both kinds of gathering. With `--kernels tma` or `pointer` the GEMMs use no
warp-specialised kernels, or also no TMA kernels.
"""

import argparse
import contextlib
from collections.abc import Iterator
from functools import partial
from unittest import mock

import torch

from moe_kernels import RouterSpec, get_kernels
from moe_kernels.gemm import selection
from moe_kernels.gemm.kernel import Design, PointerDesign, TmaDesign
from moe_kernels.runtime import replay
from moe_layers import LoRA, MoEFeedForward
from moe_layers.experts.quantization import quantize_experts_

from ..layers import moe_layer

FORMATS = ("fp8", "mxfp4", "nf4", "int8")

DESIGNS = {"all": Design, "tma": (TmaDesign, PointerDesign), "pointer": PointerDesign}


@contextlib.contextmanager
def only(designs: type[Design] | tuple[type[Design], ...]) -> Iterator[None]:
    """Restrict GEMMs inside the context to kernels of these designs."""

    def of_these_designs(args=None):
        return get_kernels(args, metadata_filter=lambda metadata: isinstance(metadata.design, designs))

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(selection._selected, clear=True))
        stack.enter_context(mock.patch.object(selection, "get_kernels", of_these_designs))
        yield


def adapted(layer: MoEFeedForward) -> None:
    layer.add_lora(LoRA(rank=8, alpha=16))


# Sizes, options, tokens, and what changes the layer.
PLAIN = {"shared_d_ff": 64}
BIASED = {"bias": True, "activation": "gpt_oss", "router": RouterSpec.deepseek_v3(4, 2), "num_zero_experts": 4}
ON_INPUT = {"bias": True, "activation": "relu_squared", "router": RouterSpec.llama4()}
FP8 = {"precision": "fp8"}
LAYERS = [
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
]


def run_layers() -> None:
    """Run each layer until its launches have run one by one, were recorded, and are replayed."""
    for d_model, d_ff, options, num_tokens, change in LAYERS:
        torch.manual_seed(0)
        layer = moe_layer(d_model, d_ff, 12, 2, **options, device="cuda", dtype=torch.bfloat16)
        if change is not None:
            change(layer)
        x = torch.randn(num_tokens, d_model, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        wanted = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
        for _ in range(3):
            gradients = torch.autograd.grad(layer(x).sum(), wanted)
            torch.cuda.synchronize()
            assert all(gradient.isfinite().all() for gradient in gradients)
        print(f"d_model {d_model}, d_ff {d_ff}, {num_tokens} tokens, {options}, {layer.experts}: finite")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", choices=DESIGNS, default="all")
    replay.CALLS_BEFORE_RECORD = 1
    with only(DESIGNS[parser.parse_args().kernels]):
        run_layers()
        print("kernels:", *sorted({kernel.metadata.kernel_name for kernel in selection._selected.values() if kernel}))


if __name__ == "__main__":
    main()
