"""Computes another library's experts with `moe_kernels`, on the parameters as the model stores them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations
from transformers.integrations.moe import ExpertsInterface

from moe_kernels import Activation, ExpertAdapters, apply_activation, combine, grouped_gemm, permute, sort_by_expert
from moe_kernels.experts.fused import compute_chosen, compute_experts, compute_routed
from moe_kernels.quantization.formats import check_quantized
from moe_kernels.runtime.pytorch import called_while_traced, unseen_by_tracers
from moe_kernels.types import ExpertWeights, QuantizedWeight, ScaledForms, Weight

from ....autocast import call_with_autocast_rules
from ....checks import first_three
from ....experts.grouped import ExpertRows
from ....experts.kept_fp8 import KeptForms
from .activation import recognise_gated, recognise_plain
from .deferred_routing import DeferredRouting
from .parametrized import check_stored, stored_weight
from .rebuilding import rebuilt_in_backward

NAME = "moe_layers"  # name of `experts_forward` in the experts interface
ATTRIBUTE = "_moe_layers_experts"  # experts' attribute that holds the ExpertsSpec, set by `enable` or the first call
FORMS = "_moe_layers_forms"  # experts' attribute that holds the KeptForms (cached e4m3 weights), if a precision is set
SHARING = "_moe_layers_sharing"  # experts' attribute that holds the Sharing, if `shard_experts` sharded the experts
ENABLED = "_moe_layers_enabled"  # experts' attribute, set by `enable`, that holds the experts' name in the model
DISPATCHED = "_moe_layers_dispatched"  # attribute of experts sharded by transformers: their name in errors
TOLD = "_moe_layers_told"  # experts' attribute that exists once `_tell_once` has warned about the experts


class _Calls(threading.local):
    def __init__(self) -> None:
        # experts module -> {parameter name: LowRank}. `call_with_changes` adds an entry for the time of one call.
        self.changes: dict[nn.Module, Mapping[str, LowRank]] = {}


_calls = _Calls()

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class LowRank(NamedTuple):
    """A low-rank change of a parameter's matrices: left[e] @ right[e] is added to matrix e."""

    left: Tensor  # [E, rows, r]
    right: Tensor  # [E, r, columns]


@dataclass(frozen=True)
class ExpertsSpec:
    """Describes how to compute an experts module from `gate_up_proj` (or `up_proj`), `down_proj` and their biases."""

    copies: ClassVar[bool] = False  # True if `w_up` is a copy of the parameters instead of a view
    activation: Activation
    implementation: str | None  # "triton", "reference", or None to choose by device
    transposed: bool = False  # whether the stored matrices are [in, out] instead of [out, in]
    bias: bool = False
    weight_on_input: bool = False  # whether routing weights multiply the experts' inputs instead of the outputs
    normed: bool = False  # whether `post_expert_norm` normalises each expert's output before the output is weighted
    precision: str | None = None  # "fp8" or "fp8_saved" for e4m3 GEMMs, see `fused_experts`; None: the tokens' dtype

    @property
    def _up_name(self) -> str:
        return "gate_up_proj" if self.activation.gated else "up_proj"

    @property
    def adaptable(self) -> tuple[str, ...]:
        """Return the names of the parameters for which the kernels can compute low-rank changes."""
        return () if self.normed else (self._up_name, "down_proj")

    readable = adaptable  # names of the parameters whose 4-bit form the kernels can read

    def tensors(self, experts: nn.Module) -> dict[str, Tensor]:
        """Return, by name, the parameters and buffers whose first axis is divided among the experts."""
        every = chain(experts.named_parameters(), experts.named_buffers())
        return {name: tensor for name, tensor in every if not name.startswith("post_expert_norm.")}

    def held(self, experts: Any) -> Iterable[Weight]:
        """Return the weights to check at the first call. Parametrised weights are left out, because reading
        them would make PEFT cache their values."""
        return dict(experts.named_parameters(recurse=False)).values()

    def weights(self, experts: Any) -> tuple[Weight, ...]:
        """Return the weights of the up- and down-projections and the biases, as the module stores them."""
        return (*self.up_parameters(experts), self.stored_down(experts), *self.biases(experts))

    def up_parameters(self, experts: Any) -> tuple[Weight, ...]:
        return (self._parameter(experts, self._up_name),)

    def w_up(self, *parameters: Any) -> Weight:  # [E, 2F, D] in the activation's order of rows, or [E, F, D] if plain
        (parameter,) = parameters
        return self._matrices(parameter)

    def stored_down(self, experts: Any) -> Weight:
        return self._parameter(experts, "down_proj")

    def w_down(self, experts: Any) -> Weight:  # [E, D, F]
        return self._matrices(self.stored_down(experts))

    def _parameter(self, experts: Any, name: str) -> Weight:
        stored = stored_weight(experts, self.readable, name, transposed=self.transposed)
        return getattr(experts, name) if stored is None else stored

    def _matrices(self, parameter: Weight) -> Weight:  # [E, out, in]
        if self.transposed and isinstance(parameter, Tensor):
            return parameter.transpose(1, 2)
        return parameter

    def biases(self, experts: Any) -> tuple[Tensor, ...]:  # b_up [E, 2F] or [E, F], b_down [E, D]; or none
        if not self.bias:
            return ()
        return getattr(experts, f"{self._up_name}_bias"), experts.down_proj_bias

    def adapters(self, changes: Mapping[str, LowRank]) -> ExpertAdapters:
        """Convert low-rank changes, keyed by parameter name, to adapters of `w_up` and `w_down`."""
        return ExpertAdapters(*self._factors(changes.get(self._up_name)), *self._factors(changes.get("down_proj")))

    def _factors(self, change: LowRank | None) -> tuple[Tensor | None, Tensor | None]:  # a [E, r, in], b [E, out, r]
        if change is None:
            return None, None
        if self.transposed:
            return change.left.transpose(1, 2), change.right.transpose(1, 2)
        return change.right, change.left


def interface_spec(experts: Any, implementation: str | None) -> ExpertsSpec:
    """Return the spec of an experts module whose forward calls the experts interface. Raise ValueError, with the
    reason, for unsupported modules."""
    normed = getattr(experts, "has_post_expert_norm", False)
    if normed and experts.has_bias:
        raise ValueError(f"moe_layers: experts with a norm must have no biases, got both in {type(experts).__name__}")
    interleaved = experts.has_gate and not experts.is_concatenated
    if experts.has_gate:
        activation = recognise_gated(experts, experts._apply_gate, interleaved=interleaved)
    else:
        activation = recognise_plain(experts, experts.act_fn)
    return ExpertsSpec(activation, implementation, experts.is_transposed, experts.has_bias, normed=normed)


def check_weights(name: str, weights: Iterable[Weight]) -> None:
    """Raise ValueError if the kernels cannot read the weights of an experts module."""
    weights = list(weights)
    dtypes = {weight.dtype for weight in weights if isinstance(weight, Tensor)}
    if len(dtypes) > 1 or not dtypes <= set(_DTYPES):
        raise ValueError(
            f"moe_layers: the weights of {name} must have one dtype of {first_three(_DTYPES)}, "
            f"got {first_three(sorted(map(str, dtypes)))}"
        )
    for matrix, weight in zip(("the up-projection", "the down-projection"), weights, strict=False):
        if isinstance(weight, QuantizedWeight):
            check_quantized("moe_layers", f"{matrix} of {name}", weight)
    formats = sorted({str(weight.format) for weight in weights if isinstance(weight, QuantizedWeight)})
    if len(formats) > 1:
        raise ValueError(f"moe_layers: the weights of {name} must have one format, got {first_three(formats)}")


def changes_of(experts: nn.Module) -> Mapping[str, LowRank]:
    """Return the low-rank changes, by parameter name, that PEFT's wrappers have set for the experts in this thread."""
    return _calls.changes.get(experts, {})


def call_with_changes(experts: nn.Module, changes: Mapping[str, LowRank], call: Callable[[], Tensor]) -> Tensor:
    """Return the result of `call()`. Until `call` returns, calls of `experts` in this thread apply `changes`."""
    outer = _calls.changes
    _calls.changes = {**outer, experts: changes}
    try:
        return call()
    finally:
        _calls.changes = outer


def recognise_once(experts: nn.Module, make_spec: Callable[[Any, str | None], ExpertsSpec]) -> None:
    """Set the spec of an experts module, unless `enable` or an earlier call has set it."""
    if not hasattr(experts, ATTRIBUTE):
        with unseen_by_tracers(), torch.no_grad():
            spec = make_spec(experts, None)
            kind = type(experts).__name__
            check_stored(kind, experts, spec.readable, transposed=spec.transposed)
            check_weights(kind, spec.held(experts))
        setattr(experts, ATTRIBUTE, spec)


@called_while_traced
def _recognise_once(experts: nn.Module) -> None:
    _tell_once(experts)
    recognise_once(experts, interface_spec)


def _tell_once(experts: Any) -> None:
    """Warn once if PEFT computes the experts' adapters. The kernels could compute them if the model were enabled."""
    chains = experts.parametrizations.values() if "parametrizations" in experts._modules else ()
    if TOLD in vars(experts) or not any(type(part).__module__.startswith("peft.") for part in chain(*chains)):
        return
    setattr(experts, TOLD, True)
    kind = type_before_parametrizations(experts).__name__
    warnings.warn(
        f"moe_layers: PEFT itself computes the adapters of {kind}, as changes of the size of the weights; call "
        "moe_layers.integrations.transformers.enable(model) to let the kernels compute their factors",
        stacklevel=2,
    )


def experts_forward(
    self: nn.Module,
    hidden_states: Tensor,  # [T, D]
    top_k_index: Tensor | DeferredRouting,  # [T, K]; ids outside [0, E) add nothing
    top_k_weights: Tensor | DeferredRouting,  # [T, K]
) -> Tensor:  # [T, D]
    """Compute an experts module, in place of its own forward. The first call raises ValueError, with the reason, for
    unsupported modules."""
    if isinstance(top_k_index, DeferredRouting):
        if top_k_index.is_of(hidden_states):
            return compute_module(self, hidden_states, top_k_index, None, changes_of(self)).to(hidden_states.dtype)
        top_k_weights, top_k_index = top_k_index.compute()
    assert isinstance(top_k_weights, Tensor)
    # Look up attributes in `__dict__`, because `nn.Module.__getattr__` is slow for missing attributes.
    if ENABLED not in self.__dict__:
        _recognise_once(self)
    top_k_weights = top_k_weights.to(torch.promote_types(top_k_weights.dtype, torch.float32))
    if (sharing := self.__dict__.get(SHARING)) is not None:
        return sharing.forward(self, hidden_states, top_k_index.int(), top_k_weights)
    changes = changes_of(self)
    return compute_module(self, hidden_states, top_k_index, top_k_weights, changes).to(hidden_states.dtype)


def compute_module(
    self: Any,  # an experts module with a spec
    tokens: Tensor,  # [T, D]
    choice: Tensor | ExpertRows | DeferredRouting,  # [T, K] int32 or int64, or the rows that a dispatcher passes
    topk_weights: Any,  # [T, K] float32; None with a DeferredRouting
    changes: Mapping[str, LowRank],
    parameters: tuple[Weight, Weight] | None = None,  # key of the cached e4m3 weights; None: the parameters of `self`
) -> Tensor:  # [T, D]
    """Compute an experts module with the parameters that the module holds."""
    spec: ExpertsSpec = getattr(self, ATTRIBUTE)
    up_parameters, w_down = spec.up_parameters(self), spec.w_down(self)
    adapters, biases = spec.adapters(changes) if changes else None, spec.biases(self)
    of_router = choice.parameters() if isinstance(choice, DeferredRouting) else ()

    def experts(tokens: Tensor, w_up: Any, w_down: Any, *others: Any) -> Tensor:
        operands = ExpertWeights(w_up, w_down, *others[: len(biases)])
        if isinstance(choice, ExpertRows) and choice.plan is not None:
            return choice.plan(tokens, topk_weights, operands, adapters)
        settings: dict[str, Any] = {
            "adapters": adapters,
            "activation": spec.activation,
            "weight_on_input": spec.weight_on_input,
            "precision": spec.precision,
            "forms": _forms(self, parameters, weights[:2], (w_up, w_down)),
        }
        with rebuilt_in_backward(w_up, up_parameters, spec.w_up) if spec.copies else nullcontext():
            if isinstance(choice, DeferredRouting):
                return compute_routed(tokens, choice.operands(*others[len(biases) :]), operands, **settings).out
            settings["implementation"] = spec.implementation
            if isinstance(choice, Tensor):
                return compute_chosen(tokens, choice, topk_weights, operands, **settings)
            assert choice.permutation is not None
            return compute_experts(tokens, topk_weights, choice.permutation, operands, **settings)

    weights: tuple[Any, ...] = (spec.w_up(*up_parameters), w_down, *biases, *of_router)
    normed = partial(_normed_experts, self, choice, topk_weights)
    return call_with_autocast_rules(normed if spec.normed else experts, tokens, *weights)


def _forms(
    experts: Any, parameters: tuple[Any, Any] | None, parts: tuple[Any, ...], weights: tuple[Any, Any]
) -> ScaledForms | None:
    """Return the cached e4m3 weights. Return None without a precision, for copied weights, and in compiled code."""
    spec: ExpertsSpec = getattr(experts, ATTRIBUTE)
    if spec.precision is None or spec.copies or torch.compiler.is_compiling():
        return None
    if not hasattr(experts, FORMS):
        setattr(experts, FORMS, KeptForms())
    return getattr(experts, FORMS).of(
        experts, parameters or stored_pair(experts, spec), parts, weights, spec.implementation
    )


def stored_pair(experts: Any, spec: ExpertsSpec) -> tuple[Weight, Weight]:
    """Return the up-projection's first parameter and the down-projection, as the module stores them."""
    return spec.up_parameters(experts)[0], spec.stored_down(experts)


def _normed_experts(
    self: Any, choice: Any, topk_weights: Tensor, tokens: Tensor, w_up: Tensor, w_down: Tensor
) -> Tensor:
    """Compute experts whose outputs are normalised before weighting. The fused op cannot normalise outputs, because its
    backward differentiates the down projection and the weighted sum together."""
    spec: ExpertsSpec = getattr(self, ATTRIBUTE)
    if isinstance(choice, Tensor):
        permutation = sort_by_expert(choice, w_down.shape[0], implementation=spec.implementation)
    else:
        assert choice.permutation is not None
        permutation = choice.permutation
    product = partial(grouped_gemm, offsets=permutation.offsets, implementation=spec.implementation)
    rows = permute(tokens, permutation, implementation=spec.implementation)
    preactivation = product(rows, w_up.transpose(1, 2))
    activated = apply_activation(preactivation, spec.activation, implementation=spec.implementation)
    out = self.post_expert_norm(product(activated, w_down.transpose(1, 2)))
    return combine(out, topk_weights, permutation.slot_to_row, implementation=spec.implementation)


# Register the function in this file, because unpickling a model that has an `ExpertsSpec` may import only this file.
ExpertsInterface.register(NAME, experts_forward)
