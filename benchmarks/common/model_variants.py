"""Makes models of transformers with random weights, copies with other experts implementations, and PEFT's adapters.
Checks a training step."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from moe_layers.integrations.transformers import enable

from .layers import MIB

MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> (class of the configuration, sizes)
    "qwen3-30b-a3b": (
        "Qwen3MoeConfig",
        {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
        | {"norm_topk_prob": True, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
    ),
    "gpt-oss-20b": (
        "GptOssConfig",
        {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64},
    ),
    "olmoe-1b-7b": (
        "OlmoeConfig",
        {"hidden_size": 2048, "intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8}
        | {"num_attention_heads": 16, "num_key_value_heads": 16},
    ),
    "tiny": (
        "Qwen3MoeConfig",
        {"hidden_size": 32, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
        | {"norm_topk_prob": True, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
    ),
}
OURS = "moe_layers"
VOCABULARY = 32000
ATTENTION = "causal_without_mask"  # name in transformers' registry of attention functions


def attend(
    module: nn.Module,
    query: Tensor,  # [B, H, S, d]
    key: Tensor,  # [B, G, L, d]
    value: Tensor,  # [B, G, L, d]
    attention_mask: None,
    scaling: float,
    s_aux: Tensor | None = None,  # [H]
    **options,
) -> tuple[Tensor, None]:  # [B, S, H, d]
    """Compute causal attention of whole sequences, or of one new token. `s_aux` are the logits of gpt-oss's sinks."""
    if s_aux is None:
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling, **options)
    # Prepend a key for the sink. Append a column: the sink's logit in queries, 1 in the sink's key, 0 in other keys.
    # Kernels need widths that are multiples of 8, and as many queries as keys: prepend a query, and drop its result.
    length, width = query.shape[2:]
    logits = (s_aux / scaling).to(query.dtype).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
    query = functional.pad(torch.cat([query, logits], -1), (0, 7, int(length > 1), 0))
    sink = functional.pad(key.new_ones(*key.shape[:2], 1, 1), (width, 7))
    key = torch.cat([sink, functional.pad(key, (0, 8))], 2)
    value = functional.pad(value, (0, 8, 1, 0))
    out = functional.scaled_dot_product_attention(
        query, key, value, is_causal=length > 1, scale=scaling, enable_gqa=True
    )
    return out[:, :, -length:, :width].transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register(ATTENTION, attend)


def make_model(name: str, num_layers: int, device: str, dtype: torch.dtype) -> nn.Module:
    """Return a model in training mode."""
    torch.manual_seed(0)
    kind, sizes = MODELS[name]
    if kind == "GptOssConfig":
        sizes = {**sizes, "layer_types": ["full_attention"] * num_layers}
    shared = {"vocab_size": VOCABULARY, "use_cache": False, "pad_token_id": None, "eos_token_id": None}
    config = getattr(transformers, kind)(**sizes, **shared, num_hidden_layers=num_layers)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)


def draw_tokens(batch: int, length: int, device: str) -> Tensor:  # [B, S]
    generator = torch.Generator(device).manual_seed(1)
    return torch.randint(VOCABULARY, (batch, length), device=device, generator=generator)


def size(text: str) -> tuple[int, int]:
    """Return batch and length of an option such as 4x4096."""
    batch, length = text.split("x")
    return int(batch), int(length)


def free_memory() -> None:
    gc.collect()  # modules with hooks are in reference cycles
    torch.cuda.empty_cache()  # does nothing without a GPU


def with_experts(base: nn.Module, name: str, implementation: str | None) -> nn.Module:
    """Return a copy of the model that shares its parameters, and computes the experts by an implementation."""
    model = copy.deepcopy(base, {id(tensor): tensor for tensor in (*base.parameters(), *base.buffers())})
    if name == OURS:
        enable(model, implementation=implementation)
    else:
        model.set_experts_implementation(name)
    return model


def compile_layers(model: nn.Module) -> None:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's model holds the base model
    for layer in inner.model.layers:
        layer.compile(backend="inductor" if model.device.type == "cuda" else "aot_eager")


def captured(
    run: Callable[[], Tensor], model: nn.Module, pool: tuple[int, int] | None
) -> tuple[Callable[[], Tensor], float, tuple[int, int]]:
    """Capture `run` in a CUDA graph, after warm-up calls. Return a function that replays the graph, the peak of memory
    in MiB during the capture, and the graph's memory pool.

    Args:
        pool: memory pool of a graph that never runs at the same time; None for a new pool.

    Raises:
        RuntimeError: the pass waits for the GPU.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
        torch.cuda.set_sync_debug_mode("error")  # raise here, because a failed capture would change the allocator
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, graph = torch.cuda.memory_allocated(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        result = run()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay, (torch.cuda.max_memory_allocated() - before) / MIB, graph.pool()


def with_adapters(model: nn.Module, rank: int, modules: list[str]) -> nn.Module:
    """Return PEFT's model with adapters of the experts' weights and of `modules`. No adapter is zero."""
    from peft import LoraConfig, get_peft_model

    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_parameters=targets, target_modules=modules)
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return adapted


def check_step(default: nn.Module, ours: nn.Module, exact: nn.Module, batch: Tensor) -> None:
    """Check the loss and the norm of each gradient."""

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
