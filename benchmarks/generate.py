"""Tokens per second of `generate` with a Qwen3-MoE of transformers: its experts implementations, and ours.

    python -m benchmarks.generate --commit $(git rev-parse --short HEAD) --output benchmarks/results/generate.json

The model is that of `benchmarks.huggingface`, with random weights. Prompts are random. Decoding is greedy, with a
dynamic cache, and stops after a fixed number of new tokens. Each round times every implementation once. Before any
timing, the logits of the prompts are checked: their error against float32 may be at most twice that of `grouped_mm`. An
implementation of transformers that needs more memory than the GPU has is reported without a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from moe_layers.integrations.transformers import disable, enable

from .common.command import Command
from .common.model_variants import NUM_LAYERS, OURS, make_model
from .common.results_file import Row, Task
from .common.timing import Timing, timed

IMPLEMENTATIONS = (OURS, "grouped_mm", "batched_mm")


def use(model: torch.nn.Module, name: str) -> None:
    """Let one implementation compute the experts of the model."""
    if hasattr(model, "_moe_layers_state"):
        disable(model)
    if name == OURS:
        enable(model)
    else:
        model.set_experts_implementation(name)


@torch.no_grad()
def check(model: torch.nn.Module, prompts: Tensor, names: list[str]) -> None:
    """Raise AssertionError if our logits are less exact than allowed."""
    dtype = model.dtype
    errors = {}
    use(model.float(), "grouped_mm")
    exact = model(prompts).logits
    model.to(dtype)
    for name in ("grouped_mm", *(n for n in names if n == OURS)):
        use(model, name)
        errors[name] = (model(prompts).logits.float() - exact).norm() / exact.norm()
    if OURS in errors:
        limit = 2 * errors["grouped_mm"] + torch.finfo(dtype).eps
        assert errors[OURS] <= limit, f"relative error of the logits {errors[OURS]}, at most {limit} allowed"


def bench(model: torch.nn.Module, batch: int, options: argparse.Namespace) -> list[Row]:
    used = ""
    generator = torch.Generator().manual_seed(batch)
    shape = batch, options.prompt
    prompts = torch.randint(1, model.config.vocab_size, shape, generator=generator).to(options.device)
    check(model, prompts, options.implementations)

    def run(name: str) -> None:
        nonlocal used
        if name != used:  # once per turn, so that switching hardly changes the median
            use(model, name)
            used = name
        new = {"max_new_tokens": options.new, "min_new_tokens": options.new, "do_sample": False, "pad_token_id": 0}
        model.generate(prompts, attention_mask=torch.ones_like(prompts), **new)

    runs = {name: partial(run, name) for name in options.implementations if fits_memory(name, partial(run, name))}
    timings = timed(runs, options)
    unknown = dict.fromkeys((*Timing._fields, "tokens_per_s"))
    rows = {name: {"implementation": name, **unknown} for name in options.implementations}
    for name, timing in timings.items():
        rows[name] |= {**timing._asdict(), "tokens_per_s": 1e3 * batch * options.new / timing.ms}
    return list(rows.values())


def fits_memory(name: str, run: Callable[[], None]) -> bool:
    """Return whether an implementation fits in memory. Ours is not tried here, so its lack of memory is an error."""
    if name == OURS:
        return True
    try:
        run()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return False
    return True


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=list(NUM_LAYERS), default="qwen3-30b-a3b")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=32, help="new tokens per prompt")
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    model = make_model(options.shape, NUM_LAYERS[options.shape], options.device, options.dtype, attention=None).eval()
    model.config.use_cache = model.generation_config.use_cache = True
    for batch in options.batch:
        shared = {"shape": options.shape, "batch": batch, "prompt": options.prompt, "new": options.new}
        yield shared, partial(bench, model, batch, options)


main = Command(__doc__, add_options, tasks)


if __name__ == "__main__":
    main()
