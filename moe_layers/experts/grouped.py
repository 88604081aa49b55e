"""A module with the parameters of E expert feed-forwards. Its forward is one call into `moe_kernels`.

Weights are [E, out, in], like nn.Linear with an expert axis in front. For each expert, `w_up` [E, 2F, D] holds the gate
rows, then the up rows. Without a gate, `w_up` is [E, F, D] and holds only up rows. `w_down` is [E, D, F]. Biases are
`b_up` [E, 2F] or [E, F], and `b_down` [E, D].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_kernels import Activation, Permutation
from moe_kernels.experts.fused import RoutedExperts, compute_experts, compute_routed
from moe_kernels.runtime.pytorch import any_autocast_is_enabled
from moe_kernels.specs import as_activation
from moe_kernels.types import ExpertAdapters, ExpertWeights, ScaledForms

from ..autocast import call_with_autocast_rules
from ..routing.router import TopKRouter
from .kept_fp8 import KeptForms
from .lora.adapters import ActiveAdapter, ExpertLoRA, active_adapters, any_dropout, joined
from .lora.dropout import compute_with_dropout
from .lora.merging import Unmerged
from .stored import QuantizedExperts

# A function (tokens, topk_weights, weights, adapters) -> outputs [T, D]. The function computes all tokens in chunks,
# and transfers other chunks while a chunk is computed.
ChunkPlan = Callable[[Tensor, Tensor, ExpertWeights, ExpertAdapters | None], Tensor]


class ExpertRows(NamedTuple):
    """The input of the experts: tokens, and the order of their slots when sorted by expert. This class is a named
    tuple, because FSDP2 finds the tensors in named tuples."""

    tokens: Tensor  # [T, D]
    topk_weights: Tensor  # [T, K] float32
    permutation: Permutation | None  # order of the slots; None if a plan is given
    offsets: Tensor | None = None  # [E] int32: exclusive end row of each expert among this rank's sorted slots
    plan: ChunkPlan | None = None  # computes the tokens in chunks; None computes all rows in one call
    route: Any = None  # data with which the dispatcher sends the outputs back


class GroupedExperts(nn.Module):
    """`num_experts` feed-forwards `w_down @ activation(w_up @ token)`, computed for all tokens together.

    `MoEConfig`, `RouterSpec` and `MoEFeedForward` document the arguments of the same names, and check them.

    Attributes:
        adds_to_main_grad: backward adds the gradients of `w_up` and `w_down` to the float32 tensors `w_up.main_grad`
            and `w_down.main_grad`, and does not change `grad`. The kernel of the weight gradient accumulates in
            float32, adds to `main_grad` and rounds only the new sum. Hooks of these weights get no gradient, and
            `DistributedDataParallel` does not average `main_grad`, so the caller must average `main_grad`. Default:
            False. The attribute may be changed at any time.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        num_experts: int,
        *,
        activation: str | Activation = "swiglu",
        bias: bool = False,
        weight_on_input: bool = False,
        recompute: str | None = None,
        precision: str | None = None,
        init_std: float = 0.02,
        implementation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.num_experts = num_experts
        # Maps (name, parameter distributed over ranks) to this rank's part. None without expert parallelism.
        self.local_share: Callable[[str, Tensor], Tensor] | None = None
        self.reserved_sms = 0  # SMs that persistent GEMMs leave to concurrent communication
        self.adds_to_main_grad = False
        self.lora: nn.ModuleDict | None = None  # name of an adapter -> its `ExpertLoRA`; set by `add_lora`
        self.unmerged: Unmerged | None = None  # state that `unmerge_lora` restores
        self.activation = as_activation("GroupedExperts", activation)
        self.weight_on_input = weight_on_input
        self.recompute = recompute
        self.batch_invariant = False
        self.precision = precision  # may be changed at any time
        self.kept_forms = KeptForms()
        self.init_std = init_std
        self.implementation = implementation

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))

        d_up = (1 + self.activation.gated) * d_ff
        # `quantize_experts_` replaces `w_up` and `w_down` by a `QuantizedExperts` each.
        self.w_up: nn.Parameter | QuantizedExperts = parameter(d_up, d_model)
        self.w_down: nn.Parameter | QuantizedExperts = parameter(d_model, d_ff)
        self.b_up = parameter(d_up) if bias else None
        self.b_down = parameter(d_model) if bias else None
        self.reset_parameters()

    def reset_parameters(self, std: float | None = None) -> None:
        """Draw the weights from a normal distribution (default `std`: `init_std`), and set biases to zero. Reset the
        adapters, which then do not change the output."""
        std = self.init_std if std is None else std
        for weight in (self.w_up, self.w_down):
            if isinstance(weight, QuantizedExperts):
                raise ValueError(f"reset_parameters: weights must not be quantised, got {weight.format}")
            nn.init.normal_(weight, std=std)
        for bias in (self.b_up, self.b_down):
            if bias is not None:
                nn.init.zeros_(bias)
        for adapter in (self.lora or {}).values():
            assert isinstance(adapter, ExpertLoRA)
            adapter.reset_parameters()

    def keep(self, experts: range, num_experts: int) -> None:
        """Keep only the parameters of `experts`, a range within the layer's `num_experts` experts. Raise ValueError if
        `experts` is not such a range, or if experts were dropped or sharded before."""
        if not isinstance(experts, range) or experts.step != 1 or not experts:
            raise ValueError(f"keep_local_experts: experts must be a range(lo, hi) that is not empty, got {experts!r}")
        all_here = len(self.w_up) == num_experts and self.local_share is None
        if experts.start < 0 or experts.stop > num_experts or not all_here:
            raise ValueError(
                f"keep_local_experts: experts must lie in {range(num_experts)}, all still here, got {experts}"
            )
        self.check_divisible("keep_local_experts")
        for name, parameter in list(self.named_parameters()):
            if len(parameter) == num_experts:  # False only for adapters' factors that all experts share
                kept = parameter.detach()[experts.start : experts.stop].clone()
                self.replace_parameter(name, nn.Parameter(kept, requires_grad=parameter.requires_grad))
        self.num_experts = len(experts)

    def check_divisible(self, op: str) -> None:
        """Raise ValueError unless the stored bytes of quantised experts can be split by expert."""
        for weight in (self.w_up, self.w_down):
            if isinstance(weight, QuantizedExperts):
                weight.check_divisible(op)

    def replace_parameter(self, name: str, parameter: nn.Parameter) -> None:
        """Replace the parameter that has this name in `named_parameters`."""
        owner, _, leaf = name.rpartition(".")
        setattr(self.get_submodule(owner), leaf, parameter)

    def forward(self, rows: ExpertRows) -> Tensor:  # [T, D]
        """Return, for each token, the sum of its experts' outputs, weighted by the token's routing weights."""
        adapters = active_adapters(self.lora, self.local_share)
        self._check(rows, adapters)
        weights = self._weights()
        compute = partial(self._compute, rows, adapters, weights)
        return call_with_autocast_rules(compute, rows.tokens, *weights)

    def route_and_compute(self, tokens: Tensor, router: TopKRouter) -> RoutedExperts:  # tokens [T, D]
        """Compute router and experts as one op. Call only if `runs_as_one_op` returned True."""
        parts, w_router = self._weights(), router.weight
        if not any_autocast_is_enabled():
            return self._compute_routed(router, parts, tokens, w_router, *parts)
        compute = partial(self._compute_routed, router, parts)
        return call_with_autocast_rules(compute, tokens, w_router, *parts)

    def _compute_routed(
        self, router: TopKRouter, parts: ExpertWeights, tokens: Tensor, w_router: Tensor, *operands: Any
    ) -> RoutedExperts:
        adapters: list[ActiveAdapter] = []
        if self._modules.get("lora") is not None:
            adapters = active_adapters(self.lora, None)
            self._check_precision(adapters)
        weights = ExpertWeights(*operands)
        return compute_routed(tokens, router.operands(w_router), weights, **self._settings(adapters, parts, weights))

    def _check(self, rows: ExpertRows, adapters: list[ActiveAdapter]) -> None:
        dtype = rows.topk_weights.dtype
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"GroupedExperts: topk_weights must be float32 or float64, got {dtype}; if fully_shard made them so, "
                "its MixedPrecisionPolicy needs cast_forward_inputs=False"
            )
        if any_dropout(adapters) and (self.batch_invariant or rows.plan is not None):
            option = "batch_invariant" if self.batch_invariant else "the overlapped dispatcher"
            raise ValueError(f"GroupedExperts: {option} needs adapters without dropout in training, got dropout")
        if self.adds_to_main_grad and (rows.plan is not None or any_dropout(adapters)):
            option = "the overlapped dispatcher" if rows.plan is not None else "dropout of adapters in training"
            raise NotImplementedError(f"GroupedExperts: adds_to_main_grad must be off with {option}")
        self._check_precision(adapters)

    def _check_precision(self, adapters: list[ActiveAdapter]) -> None:
        if self.precision is not None and adapters:
            raise NotImplementedError(
                f"GroupedExperts: precision={self.precision!r} takes no adapters; merge them, or set precision to None"
            )

    def _compute(
        self,
        rows: ExpertRows,
        adapters: list[ActiveAdapter],
        parts: ExpertWeights,
        tokens: Tensor,  # [T, D]
        *operands: Any,  # the weights in `parts`, cast by autocast
    ) -> Tensor:  # [T, D]
        weights = ExpertWeights(*operands)
        if rows.plan is not None:
            return rows.plan(tokens, rows.topk_weights, weights, joined([factors for factors, _ in adapters]))
        assert rows.permutation is not None
        if any_dropout(adapters):
            return compute_with_dropout(
                tokens,
                rows.topk_weights,
                rows.permutation,
                weights,
                adapters,
                activation=self.activation,
                weight_on_input=self.weight_on_input,
                implementation=self.implementation,
            )
        return compute_experts(
            tokens,
            rows.topk_weights,
            rows.permutation,
            weights,
            reserved_sms=self.reserved_sms,
            implementation=self.implementation,
            **self._settings(adapters, parts, weights),
        )

    def _settings(self, adapters: list[ActiveAdapter], parts: ExpertWeights, weights: ExpertWeights) -> dict[str, Any]:
        return {
            "adapters": joined([factors for factors, _ in adapters]) if adapters else None,
            "activation": self.activation,
            "weight_on_input": self.weight_on_input,
            "recompute": self.recompute,
            "batch_invariant": self.batch_invariant,
            "precision": self.precision,
            "adds_to_main_grad": self.adds_to_main_grad,
            "forms": None if self.precision is None else self._forms(parts, weights),
        }

    def _forms(self, parts: ExpertWeights, weights: ExpertWeights) -> ScaledForms | None:
        """Return the current weights in e4m3 from the cache, or None if the experts' op must quantise the weights."""
        if isinstance(self.w_up, QuantizedExperts):
            return None
        own, local, given = ((each.w_up, each.w_down) for each in (self, parts, weights))
        return self.kept_forms.of(self, own, local, given, self.implementation)  # pyright: ignore[reportArgumentType]  # not quantised

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> GroupedExperts:
        self.kept_forms.drop()  # the cached e4m3 weights have the former device and dtype
        return super()._apply(fn, recurse)

    def _weights(self) -> ExpertWeights:
        share, own = self.local_share, self._parameters
        if share is None and "w_up" in own and "w_down" in own:
            return ExpertWeights(own["w_up"], own["w_down"], self.b_up, self.b_down)  # pyright: ignore[reportArgumentType]  # never None
        given = {"w_up": self.w_up, "w_down": self.w_down, "b_up": self.b_up, "b_down": self.b_down}
        weights: dict[str, Any] = {}
        for name, weight in given.items():
            if isinstance(weight, QuantizedExperts):
                weights[name] = weight.weight(share, name)
            else:
                weights[name] = weight if share is None or weight is None else share(name, weight)
        return ExpertWeights(**weights)

    def extra_repr(self) -> str:
        num_experts, d_model, d_ff = self.w_down.shape
        sizes = f"num_experts={num_experts}, d_model={d_model}, d_ff={d_ff}, activation={self.activation}"
        weights = f", weights={self.w_up.format}" if isinstance(self.w_up, QuantizedExperts) else ""
        weights += f", precision={self.precision}" if self.precision is not None else ""
        return f"{sizes}, bias={self.b_up is not None}, weight_on_input={self.weight_on_input}{weights}"
