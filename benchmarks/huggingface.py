"""A Qwen3-MoE of transformers with its default experts, against the same model with ours.

    python -m benchmarks.huggingface --commit $(git rev-parse --short HEAD) --output benchmarks/results/huggingface.json
    python -m benchmarks.huggingface --lora 16 --output benchmarks/results/huggingface_lora.json
    python -m benchmarks.huggingface --routing --output benchmarks/results/huggingface_routing.json

The model has the width of Qwen3-30B-A3B, four layers and random weights. The benchmark times one MoE block, router
included, forward and backward; and a training step of the model: forward, loss, backward and a fused AdamW. Each round
times every form once. Peak memory is the highest during a call minus the memory allocated before it, so it excludes
parameters and optimizer states. With `--lora` both models have PEFT's adapters of that rank on the experts' weights,
and only these are trained. With `--routing`, steps of our model with statistics of its routers, and with its own
choices replayed, take turns with the others. The replayed step must have the loss of the plain one, bit by bit.

Both models are first compared with float32. Without `--lora`, a block's experts are checked element by element, by the
tests' error budget, with one choice of experts for all. In a step, near ties may choose other experts. So the relative
error of each gradient's norm may be twice the default's largest error, plus one unit in the last place of the dtype.
The loss is an average over tokens in float32. Its error may be twice the default's error, plus the larger of an eighth
of that unit and one unit of float32.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
import transformers
from torch import Tensor, nn

from moe_kernels.runtime.dispatch import IMPLEMENTATIONS
from moe_kernels.testing import assert_accurate
from moe_layers import RoutingReplay, observe
from moe_layers.integrations.transformers import enable

from .common.command import Command
from .common.model_variants import (
    NUM_LAYERS,
    OURS,
    VOCABULARY,
    check_step,
    draw_tokens,
    make_model,
    peak_mib,
    with_adapters,
)
from .common.results_file import Row, Task
from .common.timing import timed

BATCHES = {"qwen3-30b-a3b": (4, 4096), "tiny": (2, 8)}  # sequences, and their length


def block_of(model: nn.Module) -> nn.Module:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner.model.layers[0].mlp


def check_experts(default: nn.Module, ours: nn.Module, exact: nn.Module, tokens: Tensor) -> None:
    """Apply the error budget to a block's experts: output and gradients."""
    with torch.no_grad():
        _, weights, chosen = block_of(default).gate(tokens)

    def run(model: nn.Module) -> list[Tensor]:
        experts = block_of(model).experts
        dtype = experts.down_proj.dtype
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (tokens, weights)]
        out = experts(leaves[0], chosen, leaves[1])
        generator = torch.Generator(tokens.device).manual_seed(2)
        dout = torch.randn(out.shape, device=out.device, generator=generator).to(tokens.dtype).to(dtype)
        gradients = torch.autograd.grad(out, [*leaves, experts.gate_up_proj, experts.down_proj], dout)
        return [out.detach(), *gradients]

    names = ("out", "dtokens", "dweights", "dgate_up", "ddown")
    for name, *results in zip(names, run(ours), run(default), run(exact), strict=True):
        assert_accurate(*results, name)


def check_models(default: nn.Module, ours: nn.Module, batch: Tensor, rank: int | None) -> None:
    dtype = block_of(default).gate.weight.dtype
    exact = copy.deepcopy(default).to(torch.float64 if dtype == torch.float32 else torch.float32)
    exact.set_experts_implementation("eager")
    if rank is None:
        generator = torch.Generator(batch.device).manual_seed(3)
        sizes = batch.shape[1], default.config.hidden_size
        tokens = torch.randn(sizes, device=batch.device, generator=generator).to(dtype)
        check_experts(default, ours, exact, tokens)
    check_step(default, ours, exact, batch[:1])


def block_pass(model: nn.Module, batch: Tensor) -> Callable[[], None]:
    block = block_of(model)
    dtype = block.gate.weight.dtype
    generator = torch.Generator(batch.device).manual_seed(4)
    sizes = 2, *batch.shape, model.config.hidden_size
    x, dout = torch.randn(sizes, device=batch.device, generator=generator).to(dtype)
    x.requires_grad_()

    def run() -> None:
        for tensor in (x, *block.parameters()):
            tensor.grad = None
        block(x).backward(dout)

    return run


def training_step(model: nn.Module, batch: Tensor) -> Callable[[], None]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)

    def run() -> None:
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()

    return run


def routing_steps(model: nn.Module, batch: Tensor) -> dict[str, Callable[[], None]]:
    """Return training steps with statistics of every router, and with the choices of one forward replayed.

    Raises:
        AssertionError: replaying the model's own choices changes the loss.
    """
    step, record = training_step(model, batch), RoutingReplay()
    with torch.no_grad():
        with record.capture(model):
            loss = model(input_ids=batch, labels=batch).loss
        with record.replay(model):
            assert torch.equal(model(input_ids=batch, labels=batch).loss, loss), "the replayed loss"

    def observed() -> None:
        observers = observe(model)
        step()
        for observer in observers.values():
            observer.router.observer = None

    def replayed() -> None:
        with record.replay(model):
            step()

    return {f"{OURS} observed": observed, f"{OURS} replayed": replayed}


def bench_model(options: argparse.Namespace) -> list[Row]:
    device, rank, num_layers = options.device, options.lora, NUM_LAYERS[options.shape]
    default = make_model(options.shape, num_layers, device, options.dtype, attention=None)
    if rank is not None:
        default = with_adapters(default, rank)
    ours = copy.deepcopy(default)
    print(enable(ours, implementation=options.implementation))
    models = {f"transformers {default.config._experts_implementation}": default, OURS: ours}
    batch = draw_tokens(*BATCHES[options.shape], device)
    check_models(default, ours, batch, rank)
    torch.cuda.empty_cache()  # does nothing without a GPU
    passes = {
        "block forward+backward": {name: block_pass(model, batch) for name, model in models.items()},
        "training step": {name: training_step(model, batch) for name, model in models.items()},
    }
    if options.routing:
        passes["training step"] |= routing_steps(ours, batch)
    config, num_tokens = default.config, batch.numel()
    numbers = config.hidden_size, config.moe_intermediate_size, config.num_experts, config.num_experts_per_tok
    sizes = dict(zip("TDFEK", (num_tokens, *numbers), strict=True)) | {"layers": num_layers, "vocabulary": VOCABULARY}
    rows = []
    for which, runs in passes.items():
        memory = {
            name: peak_mib(run, models.get(name, ours)) if device == "cuda" else None for name, run in runs.items()
        }
        timings = timed(runs, options)
        baseline = next(iter(timings.values()))
        for model in models.values():
            model.zero_grad()
        rows += [
            {
                **sizes,
                "pass": which,
                "implementation": name,
                **timing._asdict(),
                "tokens_per_s": 1e3 * num_tokens / timing.ms,
                "times_as_fast": baseline.ms / timing.ms,
                "over_ours": timing.ms / timings[OURS].ms,
                "peak_mib": memory[name],
            }
            for name, timing in timings.items()
        ]
    return rows


COLUMNS = ("shape", "pass", "implementation", "ms", "ms_p20", "ms_p80", "tokens_per_s", "times_as_fast", "over_ours")
COLUMNS += ("peak_mib",)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=list(NUM_LAYERS), default="qwen3-30b-a3b")
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, help="of ours; by default the device's")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train PEFT's adapters of the experts instead")
    parser.add_argument("--routing", action="store_true", help="also time statistics of routers, and replay")
    parser.set_defaults(round_ms=1000.0)


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    yield {"shape": options.shape, "lora_rank": options.lora}, partial(bench_model, options)


main = Command(
    __doc__, add_options, tasks, COLUMNS, constants=lambda options: {"transformers": transformers.__version__}
)


if __name__ == "__main__":
    main()
