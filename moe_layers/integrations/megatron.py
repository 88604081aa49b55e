"""Computes the routed experts of Megatron-Core's MoE layer with `moe_kernels`.

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from moe_layers.integrations.megatron import GroupedExperts

    spec = get_gpt_layer_local_spec(num_experts=8, moe_grouped_gemm=False)
    spec.submodules.mlp.submodules.experts = GroupedExperts

Megatron's own router, dispatchers, shared experts and parallelism remain in use. Distributed checkpoints are
interchangeable with those of Megatron's own experts, `SequentialMLP` and `TEGroupedMLP`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor  # pyright: ignore[reportMissingImports]  # optional
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory  # pyright: ignore[reportMissingImports]
from megatron.core.tensor_parallel.layers import (  # pyright: ignore[reportMissingImports]
    _initialize_affine_weight_gpu,
)
from megatron.core.transformer.module import MegatronModule  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moe_kernels import Activation, apply_activation, grouped_gemm, grouped_gemm_wgrad
from moe_kernels.experts.main_grad import mark_added

from .versions import check_version

__all__ = ["GroupedExperts"]

check_version("megatron-core", "0.16", "use its own experts")


class GroupedExperts(MegatronModule):
    """Holds a rank's experts in two parameters, `weight1` [E, 2F or F, H] and `weight2` [E, H, F].

    `weight1` holds the gate rows before the up rows. H is the width of the tokens, and F that of an expert. With
    `gradient_accumulation_fusion`, backward adds each weight's gradient to the weight's `main_grad`, in the dtype of
    `main_grad`. With `delay_wgrad_compute`, backward does not compute the weights' gradients, and `backward_dw`
    computes them later.

    Raises:
        ValueError: the configuration has biases, FP8 or FP4, offloading or recomputation inside the experts, tensor
            parallelism of experts, or an unsupported activation.
    """

    def __init__(self, num_local_experts: int, config: Any, submodules: Any = None, pg_collection: Any = None):
        super().__init__(config=config)
        self.num_local_experts = num_local_experts
        self.ep_group, self.dp_group = pg_collection.ep, pg_collection.expt_dp
        _check(config, pg_collection.expt_tp.size())
        self.activation = _activation_of(config)
        width, hidden = config.moe_latent_size or config.hidden_size, config.moe_ffn_hidden_size
        on_gpu = not config.use_cpu_initialization
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        shapes = (hidden * (1 + config.gated_linear_unit), width), (width, hidden)
        for name, shape, initialise in zip(
            ("weight1", "weight2"), shapes, (config.init_method, config.output_layer_init_method), strict=True
        ):
            weight = nn.Parameter(torch.empty(num_local_experts, *shape, device=device, dtype=config.params_dtype))
            if config.perform_initialization and on_gpu:
                _initialize_affine_weight_gpu(weight, initialise, partition_dim=0, is_expert=True)
            elif config.perform_initialization:
                initialise(weight)
            weight.allreduce = config.expert_model_parallel_size == 1  # pyright: ignore[reportAttributeAccessIssue]
            self.register_parameter(name, weight)
        self._delays = bool(getattr(config, "delay_wgrad_compute", False))
        self._delayed: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # arguments of delayed `weight_gradient` calls
        self._hooks: list[Callable[[], None]] = []
        for weight in self.parameters():
            weight.skip_backward_post_hook = self._delays

    def forward(
        self,
        permuted_local_hidden_states: Tensor,  # [R, H]
        tokens_per_expert: Tensor,  # [E]
        permuted_probs: Tensor,  # [R]
    ) -> tuple[Tensor, None]:  # [R, H]
        """Return the weighted expert outputs of rows sorted by expert, and None for the absent bias."""
        rows = permuted_local_hidden_states
        offsets = tokens_per_expert.to(rows.device).cumsum(0).int()
        probs = permuted_probs.unsqueeze(-1)
        if self.config.moe_apply_probs_on_input:
            rows, probs = (probs * rows).to(rows.dtype), None
        hidden = apply_activation(_Linear.apply(rows, self.weight1, offsets, self), activation=self.activation)
        if probs is not None:
            hidden = (hidden * probs).to(rows.dtype)
        return _Linear.apply(hidden, self.weight2, offsets, self), None

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Compute the weight gradients that `delay_wgrad_compute` delayed, then call the registered hooks."""
        while self._delayed:
            weight, rows, dout, offsets = self._delayed.pop(0)
            gradient = self.weight_gradient(weight, rows, dout, offsets)
            if gradient is not None and not _is_fused(self.config, weight):
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        for hook in self._hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Register a hook of Megatron's DistributedDataParallel. Each `backward_dw` calls all registered hooks."""
        self._hooks.append(hook)

    def weight_gradient(self, weight: Any, rows: Tensor, dout: Tensor, offsets: Tensor) -> Tensor | None:
        """Return the gradient [E, out, in]. If gradients are fused into `main_grad`, add the gradient to `main_grad`
        instead. Then return a placeholder if Megatron's hooks expect a gradient of the weight, and None otherwise."""
        if not _is_fused(self.config, weight):
            return grouped_gemm_wgrad(dout, rows, offsets)
        grouped_gemm_wgrad(dout, rows, offsets, out=weight.main_grad, accumulate=True)
        return mark_added(weight)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        """Return the local experts' shards under Megatron's own names. Each shard states its expert's global index."""
        if (metadata or {}).get("singleton_local_shards", False):
            raise ValueError("GroupedExperts: singleton_local_shards must be off, got checkpoints of single shards")
        first, axis = self.ep_group.rank() * self.num_local_experts, len(sharded_offsets)
        total = self.ep_group.size() * self.num_local_experts
        replica = 0, 0, self.dp_group.rank()

        def factory(name: str, weight: Tensor, num_parts: int) -> ShardedTensorFactory:
            def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
                if flattened_range is not None:
                    raise ValueError("GroupedExperts: tensors must be whole, got a flattened range of an optimizer")
                return [
                    ShardedTensor.from_rank_offsets(
                        key,
                        part,
                        *sharded_offsets,
                        (axis, first + number, total),
                        *([(axis + 1, half, num_parts)] if num_parts > 1 else []),
                        replica_id=replica_id,
                        prepend_axis_num=axis + 1,
                    )
                    for number, matrix in enumerate(tensor)
                    for half, part in enumerate(matrix.chunk(num_parts))
                ]

            def merge(parts: list[Tensor]) -> Tensor:
                with torch.no_grad():
                    return torch.cat(list(parts)).view(weight.shape)

            return ShardedTensorFactory(f"{prefix}experts.{name}.weight", weight, build, merge, replica)

        gated = 1 + self.config.gated_linear_unit
        return {
            f"{prefix}weight1": factory("linear_fc1", self.weight1, gated),
            f"{prefix}weight2": factory("linear_fc2", self.weight2, 1),
        }


class _Linear(torch.autograd.Function):
    """Multiplies rows [R, in] by the transposed matrices [E, out, in] of the rows' experts."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, offsets: Tensor, experts: GroupedExperts) -> Tensor:
        ctx.save_for_backward(rows, weight, offsets)
        ctx.experts, ctx.parameter = experts, weight  # keep the parameter: saved-tensor hooks may drop `main_grad`
        return grouped_gemm(rows, weight.transpose(1, 2), offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weight, offsets = ctx.saved_tensors
        drows = grouped_gemm(dout, weight, offsets) if ctx.needs_input_grad[0] else None
        experts, gradient, dweight = ctx.experts, (ctx.parameter, rows, dout, offsets), None
        if ctx.needs_input_grad[1] and experts._delays:
            experts._delayed.append(gradient)
        elif ctx.needs_input_grad[1]:
            dweight = experts.weight_gradient(*gradient)
        return drows, dweight, None, None


def _is_fused(config: Any, weight: Any) -> bool:
    return config.gradient_accumulation_fusion and getattr(weight, "main_grad", None) is not None


def _check(config: Any, tensor_parallel: int) -> None:
    refused = {
        "add_bias_linear": config.add_bias_linear,
        "fp8": config.fp8,
        "fp4": config.fp4,
        "fine_grained_activation_offloading": config.fine_grained_activation_offloading,
        "recompute_modules with moe_act": config.recompute_granularity == "selective"
        and "moe_act" in config.recompute_modules,
        "expert_tensor_parallel_size": tensor_parallel if tensor_parallel > 1 else None,
    }
    if got := {name: value for name, value in refused.items() if value}:
        raise ValueError(f"GroupedExperts: the configuration must be without these settings, got {got}")


_ACTIVATIONS = {  # (name, gated_linear_unit, whether values are clamped, glu_linear_offset) -> name in this project
    ("silu", True, False, 0.0): "swiglu",
    ("silu", True, True, 0.0): "clamped_swiglu",
    ("gelu", True, False, 0.0): "geglu",
    ("quick_gelu", True, True, 1.0): "gpt_oss",
    ("squared_relu", False, False, 0.0): "relu_squared",
    ("gelu", False, False, 0.0): "gelu",
    ("silu", False, False, 0.0): "silu",
}


def _activation_of(config: Any) -> str | Activation:
    name, limit = getattr(config.activation_func, "__name__", "?"), config.activation_func_clamp_value
    settings = name, bool(config.gated_linear_unit), limit is not None, float(config.glu_linear_offset)
    ours = _ACTIVATIONS.get(settings)
    if ours is None:
        raise ValueError(
            f"GroupedExperts: the activation must be known here, got {name} with gated_linear_unit={settings[1]}, "
            f"activation_func_clamp_value={limit} and glu_linear_offset={settings[3]}"
        )
    if ours == "gpt_oss":
        return Activation(ours, limit=limit, alpha=1.702)
    return ours if limit is None else Activation(ours, limit=limit)
