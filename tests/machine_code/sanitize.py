"""Run a small layer forward and backward under NVIDIA's compute-sanitizer.

    compute-sanitizer --tool memcheck python -m tests.machine_code.sanitize
    compute-sanitizer --tool racecheck python -m tests.machine_code.sanitize > REPORT
    python -m tests.machine_code.racecheck REPORT

The sizes leave partial tiles everywhere, empty experts, and both kinds of gathering. With `--kernels tma` or `pointer`
the GEMMs use no warp-specialised kernels, or also no TMA kernels.
"""

import argparse
import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

from moe_kernels import RouterSpec, get_kernels
from moe_kernels.gemm import selection
from moe_kernels.gemm.kernel import Design, PointerDesign, TmaDesign

from ..layers import moe_layer

DESIGNS = {"all": Design, "tma": (TmaDesign, PointerDesign), "pointer": PointerDesign}


@contextlib.contextmanager
def only(designs: type[Design] | tuple[type[Design], ...]) -> Iterator[None]:
    """Restrict GEMMs inside the context to kernels of these designs."""

    def of_these_designs(args=None):
        return get_kernels(args, metadata_filter=lambda metadata: isinstance(metadata.design, designs))

    with contextlib.ExitStack() as stack:
        for chosen in (selection._selected, selection._launches):
            stack.enter_context(mock.patch.dict(chosen, clear=True))
        stack.enter_context(mock.patch.object(selection, "get_kernels", of_these_designs))
        yield


def run_layers() -> None:
    plain = {"shared_d_ff": 64}
    biased = {"bias": True, "activation": "gpt_oss", "router": RouterSpec.deepseek_v3(4, 2), "num_zero_experts": 4}
    on_input = {"bias": True, "activation": "relu_squared", "router": RouterSpec.llama4()}
    fp8 = {"precision": "fp8"}
    layers = ((136, 200, plain), (256, 512, plain), (136, 200, biased), (136, 200, on_input))
    for d_model, d_ff, options in (*layers, (144, 208, fp8), (256, 512, fp8), (144, 208, biased | fp8)):
        torch.manual_seed(0)
        layer = moe_layer(d_model, d_ff, 12, 2, **options, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(150, d_model, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        layer(x).sum().backward()
        torch.cuda.synchronize()
        assert all(parameter.grad.isfinite().all() for parameter in (x, *layer.parameters()))
        print(f"d_model {d_model}, d_ff {d_ff}, {options}: finite")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", choices=DESIGNS, default="all")
    with only(DESIGNS[parser.parse_args().kernels]):
        run_layers()
        print("kernels:", *sorted({kernel.metadata.kernel_name for kernel in selection._selected.values() if kernel}))


if __name__ == "__main__":
    main()
