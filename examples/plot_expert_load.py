"""Plot how evenly a small language model loads its experts: without balancing, with a loss, and with bias updates.

Trains the model of `train_language_model.py` three times, from the same weights and on the same batches, and writes
expert_load.png and expert_load.json.

    python examples/plot_expert_load.py             # under a minute on one CPU core
    python examples/plot_expert_load.py --steps 50

Letters: N points in time, L layers, E experts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from _language_model import LanguageModel, Settings, Text, draw_batch, draw_expert_load, load_text, use_one_cpu_thread
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from moe_kernels import RouterSpec
from moe_layers import BalanceLosses, TopKRouter, observe, update_selection_bias

SETTINGS = Settings(
    width=64,
    num_layers=2,
    num_heads=4,
    d_ff=64,
    num_experts=8,
    top_k=2,
    context=128,
    batch=8,
    steps=300,
    peak_learning_rate=3e-3,
    warmup_steps=20,
    log_every=10,
)


class Balancing(NamedTuple):
    name: str
    losses: BalanceLosses
    bias_rate: float  # 0 for a router without a selection bias


BALANCINGS = (
    Balancing("no balancing", BalanceLosses(), 0.0),
    Balancing("Switch loss", BalanceLosses(switch=0.01), 0.0),
    Balancing("bias updates", BalanceLosses(), 0.003),
)


class Load(NamedTuple):
    """Results of one training run, every `log_every` steps."""

    steps: list[int]
    training_loss: list[float]  # nats per byte
    shares: Tensor  # [N, L, E]: shares of the layer's slots
    max_violation: Tensor  # [N, L]


def make_model(settings: Settings, balancing: Balancing, implementation: str | None) -> LanguageModel:
    """Make the language model of these settings, with another balancing method."""
    torch.manual_seed(settings.seed)
    model = LanguageModel(settings, implementation)
    for block in model.blocks:
        layer = block.feed_forward
        layer.balance_losses = balancing.losses
        if balancing.bias_rate:
            sizes = settings.width, settings.num_experts, settings.top_k
            router = TopKRouter(*sizes, router=RouterSpec.ernie(), implementation=implementation)
            router.load_state_dict(layer.router.state_dict(), strict=False)  # all but the bias, which starts at zero
            layer.router = router
    return model


def train(settings: Settings, text: Text, balancing: Balancing, implementation: str | None = None) -> Load:
    model = make_model(settings, balancing, implementation).to(text.training.device)
    observers = observe(model).values()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.peak_learning_rate)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / settings.warmup_steps, 1.0, settings.warmup_steps)
    steps, losses, statistics = [], [], []
    for step in tqdm(range(settings.steps), desc=balancing.name, unit="step"):
        windows = draw_batch(text, settings, step)  # [B, S + 1]
        logits, _ = model(windows[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        if balancing.bias_rate:
            update_selection_bias(model, rate=balancing.bias_rate)
        if (step + 1) % settings.log_every == 0:
            steps.append(step + 1)
            losses.append(loss.item())
            statistics.append([observer.read() for observer in observers])
            for observer in observers:
                observer.reset()
    counts = torch.stack([torch.stack([layer.tokens_per_expert for layer in point]) for point in statistics])
    violations = torch.tensor([[layer.max_violation for layer in point] for point in statistics])
    return Load(steps, losses, counts / counts.sum(-1, keepdim=True), violations)


def plot(settings: Settings, loads: dict[str, Load], path: Path) -> None:
    """Plot the busiest expert's excess over the mean (above), and for each run the share of every expert (below)."""
    figure = Figure(figsize=(9, 3 + 2 * len(loads)), layout="constrained")
    violation, *maps = figure.subplots(1 + len(loads), 1, sharex=True)
    for name, load in loads.items():
        violation.plot(load.steps, load.max_violation.mean(1), label=name)
    violation.set_ylabel("maximum violation,\nmean over layers")
    violation.set_ylim(bottom=0)
    violation.grid(alpha=0.3)
    violation.legend()
    for axes, (name, load) in zip(maps, loads.items(), strict=True):
        image = draw_expert_load(axes, load.shares, load.steps[-1])
        axes.set_ylabel(f"{name}\nlayer, {settings.num_experts} experts each")
    maps[-1].set_xlabel("step")
    label = f"expert's share of its layer's slots (%), {100 / settings.num_experts:.3g} if even"
    figure.colorbar(image, ax=maps, extend="max", label=label)
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=SETTINGS.steps, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("runs/expert_load"), help="default: %(default)s")
    parser.add_argument("--implementation", choices=("triton", "reference"), help="default: by device")
    options = parser.parse_args(arguments)
    use_one_cpu_thread()
    settings = dataclasses.replace(SETTINGS, steps=options.steps)
    if options.steps < settings.log_every:
        parser.error(f"--steps must be at least {settings.log_every}, got {options.steps}")
    text = load_text(Path(sysconfig.get_paths()["stdlib"]), "cuda" if torch.cuda.is_available() else "cpu")
    loads = {balancing.name: train(settings, text, balancing, options.implementation) for balancing in BALANCINGS}
    options.output.mkdir(parents=True, exist_ok=True)
    report = {
        name: {"training_loss": load.training_loss[-1], "max_violation": load.max_violation[-1].mean().item()}
        for name, load in loads.items()
    }
    for name, numbers in report.items():
        print(f"{name}: loss {numbers['training_loss']:.3f}, maximum violation {numbers['max_violation']:.2f}")
    (options.output / "expert_load.json").write_text(json.dumps(report, indent=2) + "\n")
    plot(settings, loads, options.output / "expert_load.png")
    for name in ("expert_load.json", "expert_load.png"):
        print(f"wrote {options.output / name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
