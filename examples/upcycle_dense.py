"""Turn the feed-forwards of a trained dense transformer into Mixtures of Experts, and continue training.

    python examples/upcycle_dense.py        # under a minute on one CPU core; a larger model with a GPU

Every expert starts as a copy of the dense feed-forward. The routing weights of a token sum to one, so the new model is
the same function as the old one, whatever its new routers choose; the example checks this in float64. Then both models
continue with the same batches. Losses are in nats per byte of the running Python's standard library source.

Source: sparse upcycling, https://arxiv.org/abs/2212.05055; normalised weights make its start exact.
"""

from __future__ import annotations

import argparse
import copy
import sysconfig
from pathlib import Path

import torch
from _language_model import (
    EPSILON,
    VOCABULARY,
    Attention,
    Settings,
    Text,
    draw_batch,
    held_out_windows,
    load_text,
    rotary_table,
    use_one_cpu_thread,
)
from torch import Tensor, nn
from torch.nn import functional

from moe_layers import BalanceLosses, MoEFeedForward

PRESETS = {  # `d_ff`: dense feed-forward and every expert; `steps`: before upcycling, and again after it
    "cpu": Settings(
        width=96,
        num_layers=2,
        num_heads=4,
        d_ff=192,
        num_experts=4,
        top_k=2,
        context=128,
        batch=8,
        steps=80,
        peak_learning_rate=3e-3,
        warmup_steps=10,
        log_every=20,
        held_out_windows=32,
    ),
    "gpu": Settings(
        width=768,
        num_layers=8,
        num_heads=12,
        d_ff=2048,
        num_experts=8,
        top_k=2,
        context=1024,
        batch=16,
        steps=400,
        peak_learning_rate=6e-4,
        warmup_steps=50,
        log_every=50,
        held_out_windows=128,
    ),
}


class SwiGLU(nn.Module):
    """A dense feed-forward, as in Llama."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.gate_proj = nn.Linear(d_model, d_ff, bias=False)
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)

    def forward(
        self,
        x: Tensor,  # [..., D]
    ) -> Tensor:  # [..., D]
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


def upcycle(dense: SwiGLU, num_experts: int, top_k: int, **options: object) -> MoEFeedForward:
    """Return a Mixture of Experts that computes the same as `dense` until it is trained.

    Args:
        options: further arguments of `MoEFeedForward`.
    """
    weight = dense.down_proj.weight
    d_model, d_ff = weight.shape
    moe = MoEFeedForward(d_model, d_ff, num_experts, top_k, device=weight.device, dtype=weight.dtype, **options)
    with torch.no_grad():
        # All experts get the same matrix.
        moe.experts.w_up.copy_(torch.cat([dense.gate_proj.weight, dense.up_proj.weight]))
        moe.experts.w_down.copy_(weight)
    return moe


class Block(nn.Module):
    """Attention, then a feed-forward, each on a normalised input and added to the stream."""

    def __init__(self, settings: Settings):
        super().__init__()
        self.attention_norm = nn.RMSNorm(settings.width, eps=EPSILON)
        self.attention = Attention(settings)
        self.feed_forward_norm = nn.RMSNorm(settings.width, eps=EPSILON)
        self.feed_forward: nn.Module = SwiGLU(settings.width, settings.d_ff)

    def forward(
        self,
        x: Tensor,  # [B, S, D]
        rotation: Tensor,  # [2, S, D / H]
    ) -> Tensor:  # [B, S, D]
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.feed_forward_norm(x))


class LanguageModel(nn.Module):
    def __init__(self, settings: Settings):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, settings.width)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.num_layers))
        self.norm = nn.RMSNorm(settings.width, eps=EPSILON)
        self.head = nn.Linear(settings.width, VOCABULARY, bias=False)
        self.register_buffer("rotation", rotary_table(settings), persistent=False)

    def forward(
        self,
        tokens: Tensor,  # [B, S] bytes
    ) -> Tensor:  # [B, S, 256]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rotation[:, : tokens.shape[1]])
        return self.head(self.norm(x))


def upcycled(model: LanguageModel, settings: Settings, implementation: str | None = None) -> LanguageModel:
    """Return a copy of the model with each dense feed-forward upcycled."""
    model = copy.deepcopy(model)
    options = {"balance_losses": BalanceLosses(switch=0.01), "implementation": implementation}
    for block in model.blocks:
        block.feed_forward = upcycle(block.feed_forward, settings.num_experts, settings.top_k, **options)
    return model


@torch.no_grad()
def check_same_function(dense: LanguageModel, settings: Settings, windows: Tensor) -> float:
    """Check in float64 that upcycling changes the logits by no more than rounding. Return the largest difference."""
    exact = copy.deepcopy(dense).double()
    wanted = exact(windows)
    difference = (upcycled(exact, settings, "reference")(windows) - wanted).abs().max().item()
    assert difference <= 1e-12 * wanted.abs().max().item(), f"upcycling changed the logits by {difference:.3e}"
    return difference


def loss_of(
    model: LanguageModel,
    windows: Tensor,  # [B, S + 1]
) -> Tensor:  # scalar, nats per byte
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=windows.is_cuda):
        logits = model(windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: LanguageModel, text: Text, settings: Settings) -> float:
    """Return the mean loss over the held-out windows."""
    batches = held_out_windows(text, settings).split(settings.batch)
    return sum(loss_of(model, batch).item() * len(batch) for batch in batches) / settings.held_out_windows


def train(name: str, model: LanguageModel, text: Text, settings: Settings, first_step: int) -> None:
    """Train `settings.steps` steps with a linear warmup, from `first_step` of the text on."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, fused=True)
    recent = []
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.peak_learning_rate * min(1.0, (step + 1) / settings.warmup_steps)
        loss = loss_of(model, draw_batch(text, settings, first_step + step))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent.append(loss.detach())
        if (step + 1) % settings.log_every == 0:
            print(f"{name}, step {first_step + step + 1}: loss {torch.stack(recent).mean().item():.4f}")
            recent = []


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_preset = "gpu" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--preset", choices=PRESETS, default=default_preset, help="default here: %(default)s")
    parser.add_argument("--implementation", choices=("triton", "reference"), help="of the experts; default: by device")
    options = parser.parse_args(arguments)
    use_one_cpu_thread()
    settings = PRESETS[options.preset]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = load_text(Path(sysconfig.get_paths()["stdlib"]), device)
    torch.manual_seed(settings.seed)
    dense = LanguageModel(settings).to(device)
    train("dense", dense, text, settings, 0)
    print(f"dense: held out {evaluate(dense, text, settings):.4f}")

    difference = check_same_function(dense, settings, held_out_windows(text, settings)[:2, :-1])
    moe = upcycled(dense, settings, options.implementation)
    print(f"upcycled: held out {evaluate(moe, text, settings):.4f}; logits in float64 differ by {difference:.1e}")
    for name, model in (("dense", dense), ("upcycled", moe)):
        train(name, model, text, settings, settings.steps)
    for name, model in (("dense", dense), ("upcycled", moe)):
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        print(f"{name}: held out {evaluate(model, text, settings):.4f} with {num_parameters / 1e6:.2f}M parameters")


if __name__ == "__main__":
    main()
