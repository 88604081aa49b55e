"""Train a Hugging Face Qwen3-MoE or Mixtral twice from the same start: with this package's experts and with its own.

    python examples/fine_tune_hugging_face.py                       # under a minute on one CPU core; larger with a GPU
    python examples/fine_tune_hugging_face.py --model-type mixtral

The only change is `enable(model)`. The model has random weights and reads bytes, so that nothing is downloaded; a
published model is trained in the same way. The text is the source of the running Python's standard library. Both models
see the same batches, in turns. Losses are in nats per byte; in training they include the load-balancing loss.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import statistics
import sysconfig
import time
from pathlib import Path

import torch
import transformers
from _language_model import VOCABULARY, Settings, Text, draw_batch, held_out_windows, load_text, use_one_cpu_thread
from torch import Tensor, nn

from moe_layers.integrations.transformers import enable

MODEL_TYPES = ("qwen3_moe", "mixtral")
PRESETS = {
    "cpu": Settings(
        width=128,
        num_layers=2,
        num_heads=4,
        d_ff=128,
        num_experts=8,
        top_k=2,
        context=128,
        batch=8,
        steps=60,
        peak_learning_rate=2e-3,
        warmup_steps=10,
        log_every=10,
        held_out_windows=32,
    ),
    "gpu": Settings(
        width=1024,
        num_layers=8,
        num_heads=8,
        d_ff=512,
        num_experts=64,
        top_k=8,
        context=1024,
        batch=16,
        steps=200,
        peak_learning_rate=5e-4,
        warmup_steps=20,
        log_every=20,
        held_out_windows=64,
    ),
}


@dataclasses.dataclass
class Run:
    """One of the models in training, its loss in each step, and the time of its logged steps."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[Tensor] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)


def make_model(model_type: str, settings: Settings) -> nn.Module:
    """Make the model. Both configurations accept these names; Mixtral's experts use `intermediate_size`."""
    torch.manual_seed(settings.seed)
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=VOCABULARY,
        hidden_size=settings.width,
        intermediate_size=settings.d_ff,
        moe_intermediate_size=settings.d_ff,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_heads,
        head_dim=settings.width // settings.num_heads,
        num_local_experts=settings.num_experts,
        num_experts=settings.num_experts,
        num_experts_per_tok=settings.top_k,
        norm_topk_prob=True,
        max_position_embeddings=settings.context,
        output_router_logits=True,  # adds the load-balancing loss
        router_aux_loss_coef=0.01,
        use_cache=False,
    )
    return transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")


def start_runs(model: nn.Module, settings: Settings, implementation: str | None) -> dict[str, Run]:
    """Return the model with its own experts, and a copy with ours."""
    models = {"eager": model, "moe_layers": copy.deepcopy(model)}
    print(enable(models["moe_layers"], implementation=implementation))
    return {
        name: Run(model.train(), torch.optim.AdamW(model.parameters(), lr=settings.peak_learning_rate, fused=True))
        for name, model in models.items()
    }


def loss_of(
    model: nn.Module,
    windows: Tensor,  # [B, S + 1]
) -> Tensor:  # scalar, nats per byte
    """Compute the loss. On a GPU matrix products are bfloat16; parameters and the optimizer are always float32."""
    tokens = windows[:, :-1]
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=windows.is_cuda):
        return model(input_ids=tokens, labels=tokens, output_router_logits=model.training).loss


def train_step(run: Run, windows: Tensor, settings: Settings) -> None:
    step = len(run.losses)
    for group in run.optimizer.param_groups:
        group["lr"] = settings.peak_learning_rate * min(1.0, (step + 1) / settings.warmup_steps)
    loss = loss_of(run.model, windows)
    run.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.losses.append(loss.detach())


def train(runs: dict[str, Run], text: Text, settings: Settings) -> None:
    """Train both models in turns of `log_every` steps."""
    tokens_per_turn = settings.log_every * settings.batch * settings.context
    for first in range(0, settings.steps, settings.log_every):
        batches = [draw_batch(text, settings, first + i) for i in range(settings.log_every)]
        columns = []
        for name, run in runs.items():
            start = time.perf_counter()
            for windows in batches:
                train_step(run, windows, settings)
            loss = torch.stack(run.losses[-settings.log_every :]).mean().item()  # synchronises with the GPU
            run.seconds.append(time.perf_counter() - start)
            columns.append(f"{name} loss {loss:.4f}, {tokens_per_turn / run.seconds[-1]:,.0f} tokens/s")
        print(f"step {first + settings.log_every}: {'; '.join(columns)}")


@torch.no_grad()
def evaluate(run: Run, text: Text, settings: Settings) -> float:
    """Return the mean loss over the held-out windows, in nats per byte."""
    run.model.eval()
    batches = held_out_windows(text, settings).split(settings.batch)
    return sum(loss_of(run.model, batch).item() * len(batch) for batch in batches) / settings.held_out_windows


def report(runs: dict[str, Run], text: Text, settings: Settings) -> None:
    """Print the comparison. The median turn counts, because the first turn compiles kernels."""
    tokens_per_turn = settings.log_every * settings.batch * settings.context
    for name, run in runs.items():
        rate = tokens_per_turn / statistics.median(run.seconds)
        print(f"{name}: held out {evaluate(run, text, settings):.4f} nats per byte, {rate:,.0f} tokens/s")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_preset = "gpu" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--preset", choices=PRESETS, default=default_preset, help="default here: %(default)s")
    parser.add_argument("--model-type", choices=MODEL_TYPES, default=MODEL_TYPES[0])
    parser.add_argument("--implementation", choices=("triton", "reference"), help="of our experts; default: by device")
    options = parser.parse_args(arguments)
    use_one_cpu_thread()
    settings = PRESETS[options.preset]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = load_text(Path(sysconfig.get_paths()["stdlib"]), device)
    model = make_model(options.model_type, settings).to(device)
    runs = start_runs(model, settings, options.implementation)
    train(runs, text, settings)
    report(runs, text, settings)


if __name__ == "__main__":
    main()
