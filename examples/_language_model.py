"""Parts that the training examples share: a decoder-only transformer, a text, and a plot of the experts' loads.

The text is the source of the standard library.

Letters: B windows in a batch, S bytes in a window, D width, H heads, L layers, E experts, N points in time.
"""

from __future__ import annotations

import dataclasses
import math
import random
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from moe_layers import BalanceLosses, MoEFeedForward

VOCABULARY = 256
END_OF_FILE = b"\0"  # does not occur in Python source
EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that determines the losses of a run, besides the text and the machine."""

    width: int
    num_layers: int
    num_heads: int
    d_ff: int  # per expert
    num_experts: int
    top_k: int
    context: int  # bytes
    batch: int  # windows per step
    steps: int
    peak_learning_rate: float
    warmup_steps: int
    log_every: int  # steps; in between, the loop never synchronises with the GPU
    evaluate_every: int = 200  # steps, in `train_language_model.py`, which then also writes a checkpoint
    held_out_windows: int = 64
    seed: int = 0
    precision: str | None = None  # of experts, or "float32" for all; None: bfloat16 on a GPU, else float32


class Text(NamedTuple):
    """Whole files, each followed by END_OF_FILE. No file is in both parts."""

    training: Tensor  # [num_bytes] uint8
    held_out: Tensor  # [num_bytes] uint8


def load_text(root: Path, device: torch.device | str = "cpu") -> Text:
    """Read the *.py files under `root`, except installed packages. A hash of the path holds out one file in 20."""
    training, held_out = [], []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not {"site-packages", "dist-packages"}.intersection(name.parts):
            part = held_out if zlib.crc32(name.as_posix().encode()) % 20 == 0 else training
            part.append(path.read_bytes() + END_OF_FILE)
    parts = (bytearray(b"".join(part)) for part in (training, held_out))
    return Text(*(torch.frombuffer(part, dtype=torch.uint8).to(device) for part in parts))


def use_one_cpu_thread() -> None:
    """Without a GPU, compute in one thread. OpenMP's threads spin while they wait: next to another busy program, two
    threads on two cores take 35 times as long for a step as one. On idle cores they take two thirds of its time."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)


def bigram_loss(text: Text, settings: Settings) -> float:
    """Return the loss of the held-out windows, in nats per byte, by the counts of byte pairs in the training text."""
    pairs = VOCABULARY * text.training[:-1].int() + text.training[1:]
    counts = torch.bincount(pairs, minlength=VOCABULARY**2).view(VOCABULARY, VOCABULARY).double() + 1
    losses = -(counts / counts.sum(1, keepdim=True)).log()
    windows = held_out_windows(text, settings)
    return losses[windows[:, :-1], windows[:, 1:]].mean().item()


def draw_batch(text: Text, settings: Settings, step: int) -> Tensor:  # [B, S + 1] int64
    """Draw random windows of the training text. Seed and step alone decide, so resuming needs no other state."""
    device = text.training.device
    generator = torch.Generator(device).manual_seed(random.Random(f"{settings.seed} {step}").getrandbits(48))
    num_starts = len(text.training) - settings.context
    starts = torch.randint(num_starts, (settings.batch, 1), generator=generator, device=device)
    return text.training[starts + torch.arange(settings.context + 1, device=device)].long()


def held_out_windows(text: Text, settings: Settings) -> Tensor:  # [held_out_windows, S + 1] int64
    """Return the windows of every evaluation, evenly spread over the held-out text."""
    device = text.held_out.device
    num_starts = len(text.held_out) - settings.context
    starts = torch.arange(settings.held_out_windows, device=device)[:, None] * num_starts // settings.held_out_windows
    return text.held_out[starts + torch.arange(settings.context + 1, device=device)].long()


class Attention(nn.Module):
    """Causal self-attention with normalised queries and keys and rotary positions."""

    def __init__(self, settings: Settings):
        super().__init__()
        self.num_heads = settings.num_heads
        self.project_in = nn.Linear(settings.width, 3 * settings.width, bias=False)
        self.project_out = nn.Linear(settings.width, settings.width, bias=False)

    def forward(
        self,
        x: Tensor,  # [B, S, D]
        rotation: Tensor,  # [2, S, D / H]
    ) -> Tensor:  # [B, S, D]
        query, key, value = rearrange(self.project_in(x), "b s (three h d) -> three b h s d", three=3, h=self.num_heads)
        query, key = (rotate(functional.rms_norm(z, z.shape[-1:], eps=EPSILON), rotation) for z in (query, key))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project_out(rearrange(mixed, "b h s d -> b s (h d)"))


class Block(nn.Module):
    """Attention, then a Mixture-of-Experts feed-forward, each on a normalised input and added to the stream."""

    def __init__(self, settings: Settings, implementation: str | None):
        super().__init__()
        self.attention_norm = nn.RMSNorm(settings.width, eps=EPSILON)
        self.attention = Attention(settings)
        self.feed_forward_norm = nn.RMSNorm(settings.width, eps=EPSILON)
        self.feed_forward = MoEFeedForward(
            settings.width,
            settings.d_ff,
            settings.num_experts,
            settings.top_k,
            balance_losses=BalanceLosses(switch=0.01, z=1e-3),
            precision=None if settings.precision == "float32" else settings.precision,
            implementation=implementation,
        )

    def forward(
        self,
        x: Tensor,  # [B, S, D]
        rotation: Tensor,  # [2, S, D / H]
    ) -> tuple[Tensor, Tensor]:  # [B, S, D], [E] int32
        x = x + self.attention(self.attention_norm(x), rotation)
        y, routing = self.feed_forward(self.feed_forward_norm(x), return_routing=True)
        return x + y, routing.tokens_per_expert


class LanguageModel(nn.Module):
    def __init__(self, settings: Settings, implementation: str | None = None):
        super().__init__()
        self.precision = settings.precision
        self.embedding = nn.Embedding(VOCABULARY, settings.width)
        self.blocks = nn.ModuleList(Block(settings, implementation) for _ in range(settings.num_layers))
        self.norm = nn.RMSNorm(settings.width, eps=EPSILON)
        self.head = nn.Linear(settings.width, VOCABULARY, bias=False)
        self.register_buffer("rotation", rotary_table(settings), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.5 / math.sqrt(settings.width))

    def forward(
        self,
        tokens: Tensor,  # [B, S] bytes
    ) -> tuple[Tensor, Tensor]:  # logits [B, S, 256], tokens per expert [L, E] int32
        x = self.embedding(tokens)  # [B, S, D]
        rotation = self.rotation[:, : tokens.shape[1]]
        tokens_per_expert = []
        for block in self.blocks:
            x, counts = block(x, rotation)
            tokens_per_expert.append(counts)
        return self.head(self.norm(x)), torch.stack(tokens_per_expert)


def rotary_table(settings: Settings) -> Tensor:  # [2, S, D / H]
    """Return cosines, then sines. Source: section 3.4 of https://arxiv.org/abs/2104.09864."""
    half = settings.width // settings.num_heads // 2
    frequencies = 10_000.0 ** (-torch.arange(half) / half)
    angles = torch.arange(settings.context)[:, None] * frequencies  # [S, D / H / 2]
    return torch.stack([angles.cos(), angles.sin()]).repeat(1, 1, 2)


def rotate(
    x: Tensor,  # [B, H, S, D / H]
    rotation: Tensor,  # [2, S, D / H]
) -> Tensor:  # [B, H, S, D / H]
    first, second = x.chunk(2, dim=-1)
    return x * rotation[0] + torch.cat([-second, first], dim=-1) * rotation[1]


def draw_expert_load(
    axes: Any,
    shares: Tensor,  # [N, L, E]: shares of the layer's slots
    last_step: int,
) -> Any:
    """Draw the share of every expert over time, and return the image for a colour bar in per cent."""
    num_layers, num_experts = shares.shape[1:]
    image = axes.imshow(
        100 * shares.flatten(1).T.numpy(),
        aspect="auto",
        interpolation="nearest",
        cmap="coolwarm",
        vmin=0,
        vmax=2 * 100 / num_experts,
        extent=(0, last_step, num_layers, 0),
    )
    axes.hlines(range(1, num_layers), 0, last_step, color="black", linewidth=1)
    axes.set_yticks([layer + 0.5 for layer in range(num_layers)], map(str, range(num_layers)))
    return image
