"""A whole model of transformers with its own experts implementations, and with ours.

    python -m benchmarks.whole_model --commit $(git rev-parse --short HEAD) --output benchmarks/results/model.json
    python -m benchmarks.whole_model --model gpt-oss-20b --layers 4 --modes eager compiled --training lora

The model has the width of the published one, few layers, a vocabulary of 32,000 and random weights. Modes are eager,
each decoder layer compiled, and one CUDA graph of the whole pass. Full training trains all parameters; LoRA trains
PEFT's adapters of the experts and of attention. A training step is forward, backward and a fused AdamW, whose learning
rate of 0 keeps the weights. `generate` decodes greedily with a dynamic cache after a prompt.

Implementations share the parameters. Each round times each of them once. `host_ms` is the wall-clock time of one call
that begins with an idle GPU and does not wait for it. Peak memory is the highest during a call minus the memory
allocated before it, so it excludes parameters and optimizer states. `times_as_fast` compares with the fastest
implementation of transformers in the same rows. `no_experts` is the bound: experts that only scale their tokens, so the
rest of the model takes all the time, the router of transformers included. `no_experts` is no bound where the experts'
op also computes the router. `no_experts` is no bound with LoRA, because PEFT still adds the adapters to weights that
nothing reads.

Every implementation except `no_experts` is first compared with float32. Loss and norms of gradients may have twice the
error of transformers' default, plus an allowance for rounding (`check_step`). Before each timing, the loss and the norm
of the gradient must agree with those of transformers' default in eager mode. An implementation that fails has an
`error` instead of times. A pass that waits for the GPU is refused before its capture.
Attention is causal and has no mask, because transformers makes a whole mask in a captured graph. Every layer of
gpt-oss-20b sees the whole sequence.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import peft
import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from moe_kernels.runtime.dispatch import IMPLEMENTATIONS

from .common.command import Command
from .common.model_variants import (
    MODELS,
    OURS,
    captured,
    check_step,
    compile_layers,
    draw_tokens,
    free_memory,
    make_model,
    peak_mib,
    size,
    with_adapters,
    with_experts,
)
from .common.results_file import Row, Task, attempt
from .common.timing import Timing, host_us, timed

MODES = ("eager", "compiled", "graph")
GENERATE = "generate"
PASSES = ("forward+backward", "training step", GENERATE)
CHECKED_TOKENS = 1024
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj"]  # also adapted by LoRA, besides the experts
EMPTY = dict.fromkeys((*Timing._fields, "tokens_per_s", "host_ms", "peak_mib", "times_as_fast"))
BOUND = "no_experts"


def scale_tokens(self: nn.Module, tokens: Tensor, topk_experts: Tensor, topk_weights: Tensor) -> Tensor:  # [T, D]
    """Compute no experts. The router still gets a gradient."""
    return tokens * topk_weights[:, :1].to(tokens.dtype)


ExpertsInterface.register(BOUND, scale_tokens)


@dataclass
class Measurement:
    """One pass in one mode, which all implementations compute with the parameters of `base`."""

    base: nn.Module
    which: str  # one of PASSES
    mode: str
    tokens: Tensor  # [B, S]
    options: argparse.Namespace

    def __post_init__(self) -> None:
        trained = [parameter for parameter in self.base.parameters() if parameter.requires_grad]
        self.pool = None  # memory pool that graphs share, because only one runs at a time
        self.optimizer = torch.optim.AdamW(trained, lr=0.0, fused=True, capturable=self.tokens.is_cuda)
        self.base.train(self.which != GENERATE)

    def run(self, model: nn.Module) -> Tensor:
        """Return the loss, or the generated tokens."""
        if self.which == GENERATE:
            new = {"max_new_tokens": self.options.new, "min_new_tokens": self.options.new, "do_sample": False}
            mask = torch.ones_like(self.tokens)
            return model.generate(self.tokens, attention_mask=mask, pad_token_id=0, use_cache=True, **new)
        self.optimizer.zero_grad()
        loss = model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        if self.which == "training step":
            self.optimizer.step()
        return loss.detach()

    def values(self, model: nn.Module, run: Callable[[], Tensor]) -> dict[str, float]:
        """Return the loss and the gradients' norm of one call; with `generate` the loss of the prompts."""
        if self.which == GENERATE:
            with torch.no_grad():
                return {"loss": model(input_ids=self.tokens, labels=self.tokens).loss.item()}
        loss = run().item()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32).item() for gradient in gradients]
        return {"loss": loss, "gradient_norm": math.hypot(*norms)}

    def prepare(self, name: str, wanted: dict[str, float]) -> tuple[Callable[[], Tensor], float | None]:
        """Return a call whose values are `wanted`, and its peak memory in MiB, or None without a GPU."""
        model = with_experts(self.base, name, self.options.implementation)
        if self.mode == "compiled":
            compile_layers(model)
        run, peak = partial(self.run, model), None
        if self.mode == "graph":
            run, peak, self.pool = captured(run, model, self.pool)
        else:
            for _ in range(10 if self.mode == "compiled" else 2):  # with PEFT's wrappers, more than one call compiles
                run()
        unit = max(torch.finfo(self.base.dtype).eps, 1e-5)
        limits = {"loss": unit / 8, "gradient_norm": unit}
        for key, value in self.values(model, run).items() if name != BOUND else ():
            error = abs(value / wanted[key] - 1)
            assert error <= limits[key], f"{key}: {value} differs by {error:.2e} from {wanted[key]}"
        if peak is None and self.tokens.is_cuda:
            peak = peak_mib(run, model)
        model.zero_grad()
        return run, peak


def checked_model(options: argparse.Namespace, training: str) -> tuple[nn.Module, dict[str, str | None]]:
    """Return the model and, for each implementation, the error of its check or None."""
    dtype = options.dtype
    base = make_model(options.model, options.layers, options.device, dtype)
    if training == "lora":
        base = with_adapters(base, options.rank, ADAPTED)
    exact = copy.deepcopy(base).to(torch.float64 if dtype == torch.float32 else torch.float32)
    exact.set_experts_implementation("eager")
    tokens = draw_tokens(1, CHECKED_TOKENS, options.device)
    errors = {}
    for name in options.implementations:

        def check(name: str = name) -> None:
            try:
                check_step(base, with_experts(base, name, options.implementation), exact, tokens)
            except torch.OutOfMemoryError:  # batched_mm copies weights per slot; timed calls check the values
                if name == OURS:
                    raise

        _, errors[name] = (None, None) if name == BOUND else attempt(check)
        base.zero_grad()
        free_memory()
    return base, errors


def bench(
    shared: Row, make: Callable[[], tuple[nn.Module, dict[str, str | None]]], options: argparse.Namespace
) -> list[Row]:
    torch._dynamo.reset()  # free the models of the last measurement
    base, errors = make()
    free_memory()
    rows = {name: {**shared, "implementation": name, **EMPTY, "error": errors[name]} for name in errors}
    generates, tokens = shared["pass"] == GENERATE, draw_tokens(shared["batch"], shared["length"], options.device)
    measurement = Measurement(base, shared["pass"], shared["mode"], tokens, options)
    plain = Measurement(base, GENERATE if generates else PASSES[0], "eager", tokens, options)
    wanted, error = attempt(lambda: plain.values(base, partial(plain.run, base)))
    if wanted is None:  # without values of transformers' default, other implementations cannot be checked
        return [{**row, "error": row["error"] or error} for row in rows.values()]
    base.zero_grad()
    runs, host = {}, {}
    # All implementations recompile the same code, so the limit of recompilations grows with their number.
    with torch._dynamo.config.patch(recompile_limit=8 * len(rows)):
        for name in [name for name, row in rows.items() if row["error"] is None]:
            prepared, rows[name]["error"] = attempt(partial(measurement.prepare, name, wanted))
            if prepared is not None:
                runs[name], rows[name]["peak_mib"] = prepared
            base.zero_grad()
            free_memory()
        timings, error = attempt(partial(timed, runs, options))
        if timings is not None and not generates:  # not for generate, which waits for each token
            host = host_us(runs, time.perf_counter, options.device, batch=1, rounds=5 * options.rounds)
    base.zero_grad()
    if timings is None:
        return [{**row, "error": row["error"] or error} for row in rows.values()]
    num_tokens = shared["batch"] * (options.new if generates else shared["length"])
    best_ms = min((timing.ms for name, timing in timings.items() if name not in (OURS, BOUND)), default=None)
    for name, timing in timings.items():
        rows[name] |= {**timing._asdict(), "tokens_per_s": 1e3 * num_tokens / timing.ms}
        rows[name] |= {"host_ms": host[name] / 1e3 if host else None}
        rows[name] |= {"times_as_fast": None if best_ms is None else best_ms / timing.ms}
    return list(rows.values())


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    checked = lru_cache(maxsize=1)(partial(checked_model, options))
    for training in options.training:
        cases = [(mode, which, size) for mode in options.modes for size in options.tokens for which in options.passes]
        cases = [case for case in cases if case[1] != GENERATE]
        if GENERATE in options.passes and training == "full":
            cases += [("eager", GENERATE, (batch, options.prompt)) for batch in options.batch]
        for mode, which, (batch, length) in cases:
            about = {"model": options.model, "layers": options.layers, "training": training, "mode": mode}
            shared = {**about, "pass": which, "batch": batch, "length": length}
            yield shared, partial(bench, shared, partial(checked, training), options)


COLUMNS = ("training", "mode", "pass", "batch", "length", "implementation", *EMPTY, "error")


def add_options(parser: argparse.ArgumentParser) -> None:
    theirs = [name for name in ALL_EXPERTS_FUNCTIONS.valid_keys() if name != OURS]  # includes the bound
    parser.add_argument("--model", choices=list(MODELS), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", nargs="+", type=size, metavar="BxS", default=[(1, 1024), (1, 4096), (4, 4096)])
    parser.add_argument("--training", nargs="+", choices=["full", "lora"], default=["full", "lora"])
    parser.add_argument("--rank", type=int, default=16, help="rank of LoRA")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="modes of training")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8], help="batch sizes of generate")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt of generate")
    parser.add_argument("--new", type=int, default=32, help="new tokens per prompt of generate")
    names = [OURS, "eager", *theirs]
    parser.add_argument("--implementations", nargs="+", choices=names, default=names)
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, help="of our experts; default: by device")
    parser.set_defaults(round_ms=500.0)


def versions(options: argparse.Namespace) -> Row:
    return {"transformers": transformers.__version__, "peft": peft.__version__}


main = Command(__doc__, add_options, tasks, COLUMNS, constants=versions)


if __name__ == "__main__":
    main()
