"""Quantise the experts of a small trained model to each format, and train adapters over them.

The model of `train_language_model.py` first learns the standard library's source. Then, for each format: the loss of
the model with quantised experts, and the loss after some steps of LoRA adapters over them. Losses are in nats per byte,
and exp(loss) is the perplexity per byte.

    python examples/fine_tune_quantized.py    # about two minutes on one CPU core
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import sysconfig
from pathlib import Path

import torch
from _language_model import LanguageModel, Settings, Text, draw_batch, held_out_windows, load_text, use_one_cpu_thread
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from moe_layers import LoRA
from moe_layers.experts import quantize_experts_

FORMATS = ("fp8", "int8", "nf4", "mxfp4")
SETTINGS = Settings(
    width=128,
    num_layers=3,
    num_heads=4,
    d_ff=128,
    num_experts=8,
    top_k=2,
    context=128,
    batch=16,
    steps=200,
    peak_learning_rate=3e-3,
    warmup_steps=20,
    log_every=20,
)


def loss_of(model: LanguageModel, windows: Tensor) -> Tensor:  # windows [B, S + 1] -> scalar, nats per byte
    logits, _ = model(windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: LanguageModel, text: Text, settings: Settings) -> float:
    model.eval()
    windows = held_out_windows(text, settings).split(settings.batch)
    return sum(loss_of(model, part).item() * len(part) for part in windows) / settings.held_out_windows


def train(model: LanguageModel, text: Text, settings: Settings, learning_rate: float, name: str) -> None:
    """Train what requires a gradient."""
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    for step in (progress := tqdm(range(settings.steps), desc=name)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / settings.warmup_steps)
        loss = loss_of(model, draw_batch(text, settings, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % settings.log_every == 0:
            progress.set_postfix(loss=f"{loss.item():.3f}")


def expert_bytes(model: LanguageModel) -> int:
    """Return the bytes of the experts' weights, without adapters."""
    named = (item for block in model.blocks for item in block.feed_forward.experts.named_parameters())
    return sum(tensor.nbytes for name, tensor in named if "lora" not in name)


def report(model: LanguageModel, name: str, loss: float) -> None:
    print(
        f"{name:>16}: {loss:.4f} nats per byte, perplexity {math.exp(loss):.3f}, experts {expert_bytes(model):,} bytes"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=SETTINGS.steps, help="of the base model; adapters get a quarter")
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_path("stdlib")), help="folder of *.py files")
    options = parser.parse_args(arguments)
    use_one_cpu_thread()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = dataclasses.replace(SETTINGS, steps=options.steps)
    text = load_text(options.text, device)
    torch.manual_seed(0)
    base = LanguageModel(settings, None if device == "cuda" else "reference").to(device)
    train(base, text, settings, settings.peak_learning_rate, "base")
    report(base, "float32", evaluate(base, text, settings))

    short = dataclasses.replace(settings, steps=max(1, options.steps // 4), seed=1)
    for format in options.formats:
        model = copy.deepcopy(base)
        quantize_experts_(model, format)
        report(model, format, evaluate(model, text, settings))
        model.requires_grad_(False)
        for block in model.blocks:
            block.feed_forward.add_lora(LoRA(options.rank, 2 * options.rank))
        train(model, text, short, 1e-3, f"LoRA over {format}")
        report(model, f"{format} + LoRA", evaluate(model, text, settings))


if __name__ == "__main__":
    main()
