"""GRPO on a tiny Mixture of Experts whose sampler and trainer compute in different dtypes, with routing replay.

The sampler runs in bfloat16 with a cache, as an inference engine does, and returns the experts of each token. The
trainer runs in float32 on whole sequences. Without replay, it sends some tokens to other experts than the sampler did,
and its log-probabilities of the samples are off by more than rounding. With replay, it uses the sampler's experts.
After each step it sends its weights under the names that the loader of vLLM takes.

    python examples/grpo_routing_replay.py             # less than half a minute on one CPU core
    python examples/grpo_routing_replay.py --steps 5

Letters: B sequences, S tokens of a sequence, L layers, K experts per token.
"""

from __future__ import annotations

import argparse
import copy
import re
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from _language_model import use_one_cpu_thread
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from moe_layers import RoutingReplay
from moe_layers.integrations.transformers import enable
from moe_layers.serving import iter_weights, pack

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class Settings:
    steps: int = 30
    num_prompts: int = 4
    group: int = 8  # samples of each prompt
    prompt_lengths: tuple[int, int] = (4, 8)
    new_tokens: int = 24
    vocab_size: int = 64
    width: int = 64
    num_layers: int = 4
    num_experts: int = 16
    top_k: int = 4
    learning_rate: float = 1e-3
    clip: float = 0.2
    bucket_bytes: int = 1 << 20  # of weights that are sent together
    seed: int = 0


class Samples(NamedTuple):
    """Sampled sequences, with what an inference engine returns about them."""

    tokens: Tensor  # [B, S] prompts, padded on the left, and samples
    mask: Tensor  # [B, S]
    log_probs: Tensor  # [B, new_tokens] of the sampler
    routed_experts: list[Tensor]  # of each sequence [tokens - 1, L, K]


class Comparison(NamedTuple):
    """Differences between trainer and sampler, on the same samples and weights."""

    other_experts: float  # share of tokens with another set of experts in some layer
    gap: float  # mean |log-probability of the trainer - of the sampler|, without replay
    replayed_gap: float


class Step(NamedTuple):
    reward: float
    comparison: Comparison


def make_model(settings: Settings, device: str) -> Any:
    config = Qwen3MoeConfig(
        vocab_size=settings.vocab_size,
        hidden_size=settings.width,
        intermediate_size=2 * settings.width,
        moe_intermediate_size=settings.width // 2,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=settings.num_experts,
        num_experts_per_tok=settings.top_k,
        norm_topk_prob=True,
        initializer_range=0.15,  # experts whose outputs matter, as in a trained model
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(settings.seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)


def draw_prompts(settings: Settings, step: int, device: str) -> tuple[Tensor, Tensor]:
    """Return prompts [B, longest] of random tokens and lengths, each `group` times, and their mask."""
    generator = torch.Generator().manual_seed(1000 * settings.seed + step)
    shortest, longest = settings.prompt_lengths
    shape = settings.num_prompts, longest
    prompts = torch.randint(1, settings.vocab_size, shape, generator=generator)
    lengths = torch.randint(shortest, longest + 1, (settings.num_prompts, 1), generator=generator)
    mask = torch.arange(longest) >= longest - lengths
    prompts, mask = (tensor.repeat_interleave(settings.group, 0) for tensor in (prompts * mask, mask.long()))
    return prompts.to(device), mask.to(device)


@torch.no_grad()
def sample(sampler: Any, settings: Settings, prompts: Tensor, mask: Tensor) -> Samples:
    """Sample with a cache. The record holds a choice [B * length, K] per forward: the prompts, then each new token."""
    record = RoutingReplay()
    with record.capture(sampler):
        result = sampler.generate(
            prompts,
            attention_mask=mask,
            max_new_tokens=settings.new_tokens,
            do_sample=True,
            top_k=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tokens, new = result.sequences, settings.new_tokens
    log_probs = torch.stack(result.logits, 1).float().log_softmax(-1).gather(2, tokens[:, -new:, None])[..., 0]
    layers = [
        torch.cat([choice.view(len(tokens), -1, settings.top_k) for choice in forwards], 1)  # [B, S - 1, K]
        for forwards in record.choices.values()
    ]
    mask = functional.pad(mask, (0, new), value=1)
    experts = torch.stack(layers, 2)  # [B, S - 1, L, K]
    routed_experts = [array[row[:-1].bool()] for array, row in zip(experts, mask, strict=True)]
    return Samples(tokens, mask, log_probs, routed_experts)


@torch.no_grad()
def load_weights(sampler: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy weights as an engine's loader does: experts by their number, others by name. Rounds to the sampler's dtype.

    With vLLM or SGLang, their own `load_weights` takes its place.
    """
    parameters = dict(sampler.named_parameters())
    for name, tensor in weights:
        if match := _EXPERT.fullmatch(name):
            experts, number, projection = match[1], int(match[2]), match[3]
            if projection == "down":
                parameters[f"{experts}.down_proj"][number].copy_(tensor)
            else:
                gate, up = parameters[f"{experts}.gate_up_proj"][number].chunk(2)
                (gate if projection == "gate" else up).copy_(tensor)
        else:
            parameters[name].copy_(tensor)


def log_probs_of(model: Any, samples: Samples) -> Tensor:  # [B, new_tokens]
    logits = model(input_ids=samples.tokens, attention_mask=samples.mask, use_cache=False).logits.float()
    log_probs = logits[:, :-1].log_softmax(-1).gather(2, samples.tokens[:, 1:, None])[..., 0]
    return log_probs[:, -samples.log_probs.shape[1] :]


@torch.no_grad()
def compare(trainer: Any, samples: Samples, record: RoutingReplay) -> Comparison:
    own = RoutingReplay()
    with own.capture(trainer):
        plain = log_probs_of(trainer, samples)
    with record.replay(trainer):
        replayed = log_probs_of(trainer, samples)
    differs = []
    for name, (choice,) in record.choices.items():
        mine, theirs = (choices.cpu().sort(1).values for choices in (own.choices[name][0], choice))
        differs.append((mine != theirs).any(1))
    known = choice[:, 0] >= 0  # without padding and the last token
    other_experts = torch.stack(differs).any(0)[known].float().mean().item()
    gaps = [(log_probs - samples.log_probs).abs().mean().item() for log_probs in (plain, replayed)]
    return Comparison(other_experts, *gaps)


def rewards_of(samples: Samples, settings: Settings) -> Tensor:  # [B]
    """Return the share of sampled tokens from the lower half of the vocabulary."""
    return (samples.tokens[:, -settings.new_tokens :] < settings.vocab_size // 2).float().mean(1)


def grpo_loss(log_probs: Tensor, samples: Samples, rewards: Tensor, settings: Settings) -> Tensor:  # scalar
    """Return the clipped loss with advantages relative to the group.

    Source: equation 3 of https://arxiv.org/abs/2402.03300, without the penalty.
    """
    grouped = rewards.view(-1, settings.group)
    advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    advantages = advantages.view(-1, 1)
    ratio = (log_probs - samples.log_probs).exp()
    clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    return -torch.minimum(ratio * advantages, clipped * advantages).mean()


def train(settings: Settings, device: str, *, replay: bool = True, implementation: str | None = None) -> list[Step]:
    trainer = make_model(settings, device)
    sampler = copy.deepcopy(trainer).to(torch.bfloat16).eval()
    for model in (trainer, sampler):
        enable(model, implementation=implementation)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    steps = []
    for step in range(settings.steps):
        for bucket in pack(iter_weights(trainer, "vllm"), settings.bucket_bytes):  # each could be one broadcast
            load_weights(sampler, bucket.unpack())
        samples = sample(sampler, settings, *draw_prompts(settings, step, device))
        record = RoutingReplay.from_rollouts(trainer, samples.routed_experts, attention_mask=samples.mask)
        comparison = compare(trainer, samples, record)
        rewards = rewards_of(samples, settings)
        with record.replay(trainer) if replay else nullcontext():
            log_probs = log_probs_of(trainer, samples)
        loss = grpo_loss(log_probs, samples, rewards, settings)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainer.parameters(), 1.0)
        optimizer.step()
        steps.append(Step(rewards.mean().item(), comparison))
        print(
            f"step {step + 1}: reward {steps[-1].reward:.3f}, tokens with other experts "
            f"{100 * comparison.other_experts:.1f} %, log-probability gap {comparison.gap:.4f} without replay, "
            f"{comparison.replayed_gap:.4f} with it"
        )
    return steps


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=Settings.steps, help="default: %(default)s")
    parser.add_argument("--without-replay", action="store_true", help="train on the own choices of the trainer")
    parser.add_argument("--implementation", choices=("triton", "reference"), help="default: by device")
    options = parser.parse_args(arguments)
    use_one_cpu_thread()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = Settings(steps=options.steps)
    steps = train(settings, device, replay=not options.without_replay, implementation=options.implementation)
    means = [sum(values) / len(steps) for values in zip(*(step.comparison for step in steps), strict=True)]
    print(f"mean share of tokens with other experts: {100 * means[0]:.1f} %")
    print(f"mean log-probability gap without replay: {means[1]:.4f}")
    print(f"mean log-probability gap with replay: {means[2]:.4f}")
    print(f"reward of the first and last step: {steps[0].reward:.3f} {steps[-1].reward:.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
