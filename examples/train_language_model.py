"""Train a small decoder-only transformer with Mixture-of-Experts feed-forwards on bytes.

The text is the source of the running Python's standard library, so nothing is downloaded. Losses are in nats per byte;
guessing uniformly costs ln 256 = 5.55. The last lines also print the loss of a table of byte pairs.

    python examples/train_language_model.py             # a larger model with a GPU
    python examples/train_language_model.py --resume    # continues after Ctrl-C, with the losses of an unbroken run
    python examples/train_language_model.py --precision fp8    # experts multiply e4m3 operands

Letters: B windows in a batch, S bytes in a window, L layers, E experts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import signal
import sysconfig
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from _language_model import (
    LanguageModel,
    Settings,
    Text,
    bigram_loss,
    draw_batch,
    draw_expert_load,
    held_out_windows,
    load_text,
    use_one_cpu_thread,
)
from matplotlib.figure import Figure
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

PROMPT = b"def "
PRECISIONS = ("fp8", "fp8_saved", "float32")  # of experts; of all products

PRESETS = {
    "cpu": Settings(
        width=128,
        num_layers=3,
        num_heads=4,
        d_ff=128,
        num_experts=8,
        top_k=2,
        context=128,
        batch=16,
        steps=600,
        peak_learning_rate=3e-3,
        warmup_steps=30,
        log_every=5,
        evaluate_every=50,
        held_out_windows=256,
    ),
    # 255 million parameters, of which a byte uses 85 million, as many as a dense model with d_ff 2048 has.
    "gpu": Settings(
        width=768,
        num_layers=12,
        num_heads=12,
        d_ff=1024,
        num_experts=8,
        top_k=2,
        context=1024,
        batch=32,
        steps=2000,
        peak_learning_rate=6e-4,
        warmup_steps=100,
        log_every=20,
        evaluate_every=200,
        held_out_windows=512,
    ),
}


class History(NamedTuple):
    """Data of the plot. It stays on the device, so that recording a step does not synchronise with the GPU."""

    training_loss: Tensor  # [steps] float32 nats per byte; NaN for future steps
    held_out_loss: Tensor  # [steps + 1] float32 nats per byte, by finished steps; NaN where not evaluated
    tokens_per_expert: Tensor  # [steps, L, E] int32


@dataclasses.dataclass
class Run:
    """A training run. Its checkpoint holds the model, the optimizer, the history and the number of finished steps."""

    settings: Settings
    text: Text
    model: LanguageModel
    optimizer: torch.optim.Optimizer
    history: History
    step: int = 0


def start_run(settings: Settings, text: Text, implementation: str | None = None) -> Run:
    device = text.training.device
    torch.manual_seed(settings.seed)
    # Drawn on the CPU, so that every device starts from the same weights.
    model = LanguageModel(settings, implementation).to(device)
    history = History(
        torch.full((settings.steps,), torch.nan, device=device),
        torch.full((settings.steps + 1,), torch.nan, device=device),
        torch.zeros(settings.steps, settings.num_layers, settings.num_experts, dtype=torch.int32, device=device),
    )
    return Run(settings, text, model, make_optimizer(model), history)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    scales = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def learning_rate(settings: Settings, step: int) -> float:
    """Return a linear warmup, then half a cosine down to a twentieth of the peak."""
    warmup = min(1.0, (step + 1) / settings.warmup_steps)
    decayed = max(0.0, (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps))
    return settings.peak_learning_rate * warmup * (0.05 + 0.475 * (1 + math.cos(math.pi * decayed)))


def predict(
    model: LanguageModel,
    tokens: Tensor,  # [B, S]
) -> tuple[Tensor, Tensor]:  # logits [B, S, 256], tokens per expert [L, E] int32
    """Run the model. Parameters, residual stream and optimizer are float32. On a GPU matrix products are bfloat16,
    unless the model's precision is "float32"."""
    has_bfloat16 = tokens.is_cuda and model.precision != "float32"
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=has_bfloat16):
        return model(tokens)


def loss_of(
    logits: Tensor,  # [B, S, 256]
    targets: Tensor,  # [B, S]
) -> Tensor:  # scalar, nats per byte
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def train_step(run: Run) -> None:
    windows = draw_batch(run.text, run.settings, run.step)  # [B, S + 1]
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(run.settings, run.step)
    logits, tokens_per_expert = predict(run.model, windows[:, :-1])
    loss = loss_of(logits, windows[:, 1:])
    run.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.history.training_loss[run.step] = loss.detach()
    run.history.tokens_per_expert[run.step] = tokens_per_expert
    run.step += 1


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Return the mean loss over the held-out windows, in nats per byte."""
    batches = held_out_windows(run.text, run.settings).split(run.settings.batch)
    losses = [loss_of(predict(run.model, batch[:, :-1])[0], batch[:, 1:]) * len(batch) for batch in batches]
    return torch.stack(losses).sum().item() / run.settings.held_out_windows


def train(run: Run, checkpoint: Path, *, stop_after: int | None = None) -> bool:
    """Train up to the last step, to step `stop_after` or to Ctrl-C, and write the checkpoint.

    Returns:
        whether the run is complete.
    """
    settings, history = run.settings, run.history
    bar = tqdm(total=settings.steps, initial=run.step, unit="step", dynamic_ncols=True)
    with bar, first_interrupt_as_event() as interrupted:
        logged_step, logged_time = run.step, time.perf_counter()
        while run.step < settings.steps:
            train_step(run)
            bar.update()
            if run.step % settings.log_every == 0:
                since = slice(logged_step, run.step)
                loss = history.training_loss[since].mean().item()  # synchronises with the GPU
                num_bytes = (run.step - logged_step) * settings.batch * settings.context
                rate = num_bytes / (time.perf_counter() - logged_time)
                busiest = expert_shares(history.tokens_per_expert[since]).mean(0).max().item()
                bar.set_postfix_str(f"loss {loss:.3f}, {rate:,.0f} tokens/s, busiest expert {busiest:.1%}")
                logged_step, logged_time = run.step, time.perf_counter()
            stops = interrupted.is_set() or run.step in (stop_after, settings.steps)
            evaluates = run.step % settings.evaluate_every == 0 or run.step == settings.steps
            if evaluates:
                held_out_loss = evaluate(run)
                history.held_out_loss[run.step] = held_out_loss
                bar.write(f"step {run.step}: held out {held_out_loss:.3f} nats per byte")
            if evaluates or stops:
                save_checkpoint(run, checkpoint)
                logged_step, logged_time = run.step, time.perf_counter()
            if stops:
                break
    return run.step == settings.steps


@contextmanager
def first_interrupt_as_event() -> Iterator[threading.Event]:
    """Let the first Ctrl-C only set the event, so that no step is interrupted. The next one interrupts as usual."""
    event = threading.Event()

    def handle(signal_number, frame):
        event.set()
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)


def expert_shares(
    tokens_per_expert: Tensor,  # [N, L, E] int32
) -> Tensor:  # [N, L, E] float32
    """Return the share of a layer's slots that each expert got."""
    return tokens_per_expert / tokens_per_expert.sum(-1, keepdim=True)


def checkpoint_tensors(run: Run) -> dict[str, Tensor]:
    tensors = {f"model.{name}": tensor for name, tensor in run.model.state_dict().items()}
    tensors |= {f"history.{name}": tensor for name, tensor in run.history._asdict().items()}
    for name, parameter in run.model.named_parameters():
        tensors |= {f"optimizer.{name}.{key}": value for key, value in run.optimizer.state[parameter].items()}
    return tensors


def run_identity(run: Run) -> dict[str, str]:
    """Return what must agree for a checkpoint to continue this run."""
    checksums = {f"{name}_crc32": zlib.crc32(part.cpu().numpy()) for name, part in run.text._asdict().items()}
    return {name: str(value) for name, value in (dataclasses.asdict(run.settings) | checksums).items()}


def save_checkpoint(run: Run, path: Path) -> None:
    write_safetensors(checkpoint_tensors(run), path, {"step": str(run.step), **run_identity(run)})


def load_checkpoint(run: Run, path: Path) -> None:
    """Continue the run of the checkpoint.

    Raises:
        ValueError: the checkpoint belongs to another run: its settings or its text differ.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        for name, value in run_identity(run).items():
            if metadata[name] != value:
                raise ValueError(f"load_checkpoint: {name} must be {metadata[name]}, as in {path}, got {value}")
        for parameter in run.model.parameters():
            # AdamW creates its state in the first step; this creates it in the same way, and it is filled below.
            moments = {key: torch.empty_like(parameter, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")}
            run.optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}
        for name, tensor in checkpoint_tensors(run).items():
            tensor.copy_(file.get_tensor(name))
    run.step = int(metadata["step"])


def write_safetensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Replace the file in one step: after any interruption, `path` is the complete old or the complete new file."""
    temporary = path.with_name(path.name + ".tmp")
    save_file(tensors, temporary, metadata)
    os.replace(temporary, path)


@torch.no_grad()
def sample(run: Run, prompt: bytes, num_bytes: int, temperature: float = 0.8) -> bytes:
    """Return `prompt` and `num_bytes` further bytes, drawn from the seed."""
    device = run.text.training.device
    generator = torch.Generator(device).manual_seed(run.settings.seed)
    tokens = torch.tensor([list(prompt)], device=device)  # [1, bytes so far]
    for _ in range(num_bytes):
        logits, _ = predict(run.model, tokens[:, -run.settings.context :])  # [1, S, 256]
        probabilities = (logits[:, -1].float() / temperature).softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    return bytes(tokens[0].tolist())


def plot(run: Run, path: Path) -> None:
    """Plot the losses (above) and, for every layer, the load of its experts over time (below)."""
    history = History(*(tensor[: run.step + 1].cpu() for tensor in run.history))
    figure = Figure(figsize=(9, 8), layout="constrained")
    losses, load = figure.subplots(2, 1, sharex=True)
    losses.plot(range(1, run.step + 1), history.training_loss[: run.step], linewidth=0.8, label="training, one batch")
    evaluated = history.held_out_loss.isfinite().nonzero().flatten()
    losses.plot(evaluated, history.held_out_loss[evaluated], marker="o", markersize=4, label="held out")
    losses.set_ylabel("loss (nats per byte)")
    losses.grid(alpha=0.3)
    losses.legend()
    bins = expert_shares(history.tokens_per_expert[: run.step]).tensor_split(min(run.step, 100))
    image = draw_expert_load(load, torch.stack([steps.mean(0) for steps in bins]), run.step)
    num_experts = run.settings.num_experts
    load.set_ylabel(f"layer, {num_experts} experts each")
    load.set_xlabel("step")
    label = f"expert's share of its layer's slots (%), {100 / num_experts:.3g} if even"
    figure.colorbar(image, ax=load, extend="max", label=label)
    figure.savefig(path, dpi=120)


def report(run: Run, output: Path) -> None:
    """Write the weights, the plot, the metrics and a sample, and print the held-out loss and the sample."""
    held_out_loss = run.history.held_out_loss[run.step].item()
    shares = expert_shares(run.history.tokens_per_expert[-run.settings.evaluate_every :]).mean(0)  # [L, E]
    baseline = bigram_loss(run.text, run.settings)
    metrics = {
        "held_out_nats_per_byte": held_out_loss,
        "bigram_nats_per_byte": baseline,
        "busiest_expert_share": shares.max().item(),
        "num_parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "settings": dataclasses.asdict(run.settings),
    }
    (output / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    write_safetensors(run.model.state_dict(), output / "model.safetensors", run_identity(run))
    plot(run, output / "training.png")
    text = sample(run, PROMPT, num_bytes=400)
    (output / "sample.txt").write_bytes(text)
    print(text.decode(errors="replace"))
    print(
        f"\nheld-out loss: {held_out_loss:.3f} nats per byte; {baseline:.3f} by counts of byte pairs, 5.545 by guessing"
    )
    for name in ("checkpoint.safetensors", "model.safetensors", "training.png", "metrics.json", "sample.txt"):
        print(f"wrote {output / name}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default_preset = "gpu" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--preset", choices=PRESETS, default=default_preset, help="default here: %(default)s")
    parser.add_argument("--steps", type=int, help="train for this many steps instead of the preset's")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the batches and the sample")
    parser.add_argument("--precision", choices=PRECISIONS, help="of products; default: bfloat16, without a GPU float32")
    parser.add_argument("--output", type=Path, default=Path("runs/language_model"), help="default: %(default)s")
    parser.add_argument("--resume", action="store_true", help="continue the run in --output, given the same options")
    parser.add_argument("--implementation", choices=("triton", "reference"), help="default: by device")
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps must be positive, got {options.steps}")
    preset = PRESETS[options.preset]
    changes = {"steps": options.steps or preset.steps, "seed": options.seed, "precision": options.precision}
    settings = dataclasses.replace(preset, **changes)
    use_one_cpu_thread()

    # Without these settings some GPU kernels sum in no fixed order, and resuming is no longer exact.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # for debugging, and slow
    text = load_text(Path(sysconfig.get_paths()["stdlib"]), "cuda" if torch.cuda.is_available() else "cpu")
    run = start_run(settings, text, options.implementation)
    options.output.mkdir(parents=True, exist_ok=True)
    checkpoint = options.output / "checkpoint.safetensors"
    if options.resume:
        load_checkpoint(run, checkpoint)
    if not train(run, checkpoint):
        print(f"interrupted: saved step {run.step} to {checkpoint}; --resume continues")
        return 130
    report(run, options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
