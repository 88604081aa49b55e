"""A Qwen3-MoE of transformers with few layers and random weights, PEFT's adapters, and the check of a training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn

from .layers import MIB


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
