"""A Qwen3-MoE of transformers with its default experts, against the same model with ours.

    python -m benchmarks.huggingface --commit $(git rev-parse --short HEAD) --output benchmarks/results/huggingface.json
    python -m benchmarks.huggingface --lora 16 --output benchmarks/results/huggingface_lora.json
    python -m benchmarks.huggingface --routing --output benchmarks/results/huggingface_routing.json

The model has the width of Qwen3-30B-A3B, four layers and random weights. The benchmark times one MoE block, router
included, forward and backward; and a training step of the model: forward, loss, backward and a fused AdamW. Timings
take turns in rounds. Peak memory is the highest during a call minus the memory allocated before it, so it excludes
parameters and optimizer states. With `--lora` both models have PEFT's adapters of that rank on the experts' weights,
and only these are trained. With `--routing`, steps of our model with statistics of its routers, and with its own
choices replayed, take turns with the others. The replayed step must have the loss of the plain one, bit by bit.

Both are first checked against float32. The experts of a block are checked element by element, by the tests' error
budget, with one choice of experts for all. In the step, near ties may choose other experts. It is checked by the norm
of each parameter's gradient: its relative error may be at most twice the default's largest, plus one unit in the last
place of the dtype. The error of the loss, an average over tokens in float32, may be at most twice the default's plus an
eighth of that unit, or plus one unit of float32.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from moe_kernels.runtime.dispatch import IMPLEMENTATIONS
from moe_kernels.testing import assert_accurate
from moe_layers import RoutingReplay, observe
from moe_layers.integrations.transformers import enable

from .common.timing import time_interleaved
from .layer import MIB, environment, print_rows


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model and its batch."""

    name: str
    d_model: int
    d_ff: int
    num_experts: int
    top_k: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    vocabulary: int
    batch: int
    context: int

    @property
    def num_tokens(self) -> int:
        return self.batch * self.context


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("qwen3-30b-a3b", 2048, 768, 128, 8, 4, 32, 4, 128, 32000, 4, 4096),
        ModelShape("tiny", 32, 16, 4, 2, 2, 2, 1, 16, 64, 2, 8),
    )
}
OURS = "moe_layers"


def make_model(shape: ModelShape, device: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=shape.d_model,
        moe_intermediate_size=shape.d_ff,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.context,
        use_cache=False,
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.train()


def with_adapters(model: nn.Module, rank: int, modules: list[str] | None = None) -> nn.Module:
    """Return PEFT's model with adapters of the experts' weights, and of `modules`, that already change the output."""
    from peft import LoraConfig, get_peft_model

    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_parameters=targets, target_modules=modules)
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return adapted


def draw_tokens(shape: ModelShape, device: str) -> Tensor:  # [B, S]
    generator = torch.Generator(device).manual_seed(1)
    return torch.randint(shape.vocabulary, (shape.batch, shape.context), device=device, generator=generator)


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


def check_step(default: nn.Module, ours: nn.Module, exact: nn.Module, batch: Tensor) -> None:
    """Check the loss and the norm of each gradient.

    Raises:
        AssertionError: names the wrong value.
    """

    def run(model: nn.Module) -> dict[str, float]:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        values = {name: parameter.grad.float().norm().item() for name, parameter in trained.items()}
        model.zero_grad()
        return {"loss": loss.item(), **values}

    def errors(values: dict[str, float]) -> dict[str, float]:
        return {name: abs(values[name] - value) / value for name, value in wanted.items()}

    wanted = run(exact)
    of_default, of_ours = errors(run(default)), errors(run(ours))
    one_ulp = torch.finfo(default.dtype).eps
    budgets = dict.fromkeys(wanted, 2 * max(of_default.values()) + one_ulp)
    budgets["loss"] = 2 * of_default["loss"] + max(one_ulp / 8, torch.finfo(torch.float32).eps)
    for name, budget in budgets.items():
        assert of_ours[name] <= budget, f"{name}: relative error {of_ours[name]:.3e} exceeds {budget:.3e}"


def check_models(default: nn.Module, ours: nn.Module, shape: ModelShape, batch: Tensor, rank: int | None) -> None:
    dtype = block_of(default).gate.weight.dtype
    exact = copy.deepcopy(default).to(torch.float64 if dtype == torch.float32 else torch.float32)
    exact.set_experts_implementation("eager")
    if rank is None:
        generator = torch.Generator(batch.device).manual_seed(3)
        tokens = torch.randn(shape.context, shape.d_model, device=batch.device, generator=generator).to(dtype)
        check_experts(default, ours, exact, tokens)
    check_step(default, ours, exact, batch[:1])


def block_pass(model: nn.Module, shape: ModelShape, device: str) -> Callable[[], None]:
    block = block_of(model)
    dtype = block.gate.weight.dtype
    generator = torch.Generator(device).manual_seed(4)
    x, dout = torch.randn(2, shape.batch, shape.context, shape.d_model, device=device, generator=generator).to(dtype)
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


def peak_mib(run: Callable[[], object], model: nn.Module) -> float:
    run()  # the first call makes the optimizer states
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    peak = torch.cuda.max_memory_allocated() - before
    model.zero_grad()
    return peak / MIB


def bench_model(
    shape: ModelShape,
    device: str,
    implementation: str | None,
    rounds: int,
    round_ms: float,
    rank: int | None = None,
    routing: bool = False,
) -> list[dict]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    default = make_model(shape, device, dtype)
    if rank is not None:
        default = with_adapters(default, rank)
    ours = copy.deepcopy(default)
    print(enable(ours, implementation=implementation))
    models = {f"transformers {default.config._experts_implementation}": default, OURS: ours}
    batch = draw_tokens(shape, device)
    check_models(default, ours, shape, batch, rank)
    if device == "cuda":
        torch.cuda.empty_cache()
    passes = {
        "block forward+backward": {name: block_pass(model, shape, device) for name, model in models.items()},
        "training step": {name: training_step(model, batch) for name, model in models.items()},
    }
    if routing:
        passes["training step"] |= routing_steps(ours, batch)
    rows = []
    for which, runs in passes.items():
        memory = {
            name: peak_mib(run, models.get(name, ours)) if device == "cuda" else None for name, run in runs.items()
        }
        timings = time_interleaved(runs, device, rounds=rounds, round_ms=round_ms)
        baseline = next(iter(timings.values()))
        for model in models.values():
            model.zero_grad()
        rows += [
            {
                "shape": shape.name,
                "T": shape.num_tokens,
                "D": shape.d_model,
                "F": shape.d_ff,
                "E": shape.num_experts,
                "K": shape.top_k,
                "layers": shape.num_layers,
                "vocabulary": shape.vocabulary,
                "lora_rank": rank,
                "pass": which,
                "implementation": name,
                **timing._asdict(),
                "tokens_per_s": 1e3 * shape.num_tokens / timing.ms,
                "times_as_fast": baseline.ms / timing.ms,
                "over_ours": timing.ms / timings[OURS].ms,
                "peak_mib": memory[name],
            }
            for name, timing in timings.items()
        ]
    return rows


COLUMNS = ("shape", "pass", "implementation", "ms", "ms_p20", "ms_p80", "tokens_per_s", "times_as_fast", "over_ours")
COLUMNS += ("peak_mib",)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, help="of ours; by default the device's")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train PEFT's adapters of the experts instead")
    parser.add_argument("--routing", action="store_true", help="also time statistics of routers, and replay")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--round-ms", type=float, default=1000.0, help="least milliseconds per timing and round")
    parser.add_argument("--commit", default="unknown", help="commit of this code, kept in the results")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    measured = bench_model(
        SHAPES[options.shape],
        options.device,
        options.implementation,
        options.rounds,
        options.round_ms,
        options.lora,
        options.routing,
    )
    where = {**environment(options.device, options.commit), "transformers": transformers.__version__}
    print_rows(measured, COLUMNS)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps([{**row, **where} for row in measured], indent=1) + "\n")


if __name__ == "__main__":
    main()
