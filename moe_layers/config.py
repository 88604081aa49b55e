"""`MoEConfig`: the complete description of an MoE layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, is_dataclass
from typing import Any

from moe_kernels import Activation, RouterSpec
from moe_kernels.activation.functions import ACTIVATIONS
from moe_kernels.experts.fused import PRECISIONS, RECOMPUTE, check_fp8_sizes
from moe_kernels.specs import KNOWN_ACTIVATIONS

from .architectures import find_architecture, read_config
from .balance.balancing import BalanceLosses
from .checks import check_choice, check_kind, check_positive, first_three
from .routing.capacity import CapacityFactor


@dataclass(frozen=True)
class MoEConfig:
    """The sizes and settings of an `MoEFeedForward`.

    `MoEFeedForward.from_config(config)` builds the layer and `layer.config` returns its configuration. Assignment,
    noise, implementation, device and dtype are arguments of `from_config`, because they do not describe the layer.

        config = MoEConfig.qwen3_30b_a3b()                           # a published model
        config = MoEConfig.from_hf(transformers_config)              # any supported config.json
        config = dataclasses.replace(config, recompute="up")

    Args:
        d_ff: hidden size of one expert.
        num_experts: number of experts with parameters, without the `num_zero_experts`.
        activation: activation of the experts; a name is converted to its `Activation`. A gated activation makes the
            experts gated. Default: "swiglu".
        router: the router's settings, such as `RouterSpec.softmax(normalize=False)`. Default: `RouterSpec()`.
        bias: whether the experts' projections have biases. Default: False.
        shared_d_ff: hidden size of a shared expert that processes every token; None (default) for no shared expert.
        shared_gate: multiply the shared expert's output by the sigmoid of a linear map of the token. Default: False.
        shared_activation: activation of the shared expert; None (default) for the activation of the experts.
        num_zero_experts: number of experts without parameters, which return their token unchanged. Zero experts have
            the last ids. Default: 0.
        latent_dim: size of `w_latent_in @ x`, which routed experts process instead of x. `w_latent_out` maps the sum of
            the experts' outputs back to d_model. Router and shared expert process x. Default: no latent projections.
        capacity: maximum number of slots (token-expert pairs) that an expert takes from one sequence, in token order.
            Sequences lie along the second-last axis of x. A `CapacityFactor` sets a multiple of an even share. Slots
            beyond the capacity add nothing. None (default) means no limit.
        separate_router_input: whether the router reads a separate tensor, the forward's argument `router_input`, as in
            Gemma 4. Default: False, the router reads x.
        recompute: "up" recomputes the experts' pre-activations in backward, with one more GEMM. None (default) saves
            the pre-activations.
        precision: "fp8" lets routed experts multiply e4m3 operands, except for the gradients of weights. "fp8_saved"
            also saves pre-activations in e4m3: see `fused_experts`. None (default) multiplies in the parameters' dtype.
        balance_losses: the coefficients of the auxiliary losses; all are zero by default.
        batch_invariant: whether a token's output is independent of other tokens. Default: False. See
            `MoEFeedForward.batch_invariant`.
        init_std: standard deviation of all weights at initialisation. Default: 0.02.

    Raises:
        ValueError: a size is not positive, a name is unknown, a setting has a wrong type, the router cannot choose
            `top_k` experts, or two settings exclude each other.
    """

    d_model: int
    d_ff: int
    num_experts: int
    top_k: int
    _: KW_ONLY
    activation: str | Activation = "swiglu"
    router: RouterSpec = field(default_factory=RouterSpec)
    bias: bool = False
    shared_d_ff: int | None = None
    shared_gate: bool = False
    shared_activation: str | Activation | None = None
    num_zero_experts: int = 0
    latent_dim: int | None = None
    capacity: int | CapacityFactor | None = None
    separate_router_input: bool = False
    recompute: str | None = None
    precision: str | None = None
    balance_losses: BalanceLosses = field(default_factory=BalanceLosses)
    batch_invariant: bool = False
    init_std: float = 0.02

    def __post_init__(self):
        object.__setattr__(self, "activation", _as_activation("activation", self.activation))
        if self.shared_activation is not None:
            shared = _as_activation("shared_activation", self.shared_activation)
            object.__setattr__(self, "shared_activation", shared)
        check_kind("MoEConfig", "router", self.router, RouterSpec)
        check_kind("MoEConfig", "balance_losses", self.balance_losses, BalanceLosses)
        for name in ("bias", "shared_gate", "separate_router_input", "batch_invariant"):
            check_kind("MoEConfig", name, getattr(self, name), bool)
        check_choice("MoEConfig", "recompute", self.recompute, RECOMPUTE)
        check_choice("MoEConfig", "precision", self.precision, PRECISIONS)
        if not isinstance(self.init_std, int | float) or not 0 <= self.init_std < math.inf:
            raise ValueError(f"MoEConfig: init_std must be finite and not negative, got {self.init_std!r}")
        self._check_sizes()
        self._check_combinations()

    def _check_sizes(self) -> None:
        check_positive(
            "MoEConfig", d_model=self.d_model, d_ff=self.d_ff, num_experts=self.num_experts, top_k=self.top_k
        )
        optional = {name: getattr(self, name) for name in ("shared_d_ff", "latent_dim", "capacity")}
        if isinstance(self.capacity, CapacityFactor):
            del optional["capacity"]
        elif isinstance(self.capacity, float):
            raise ValueError(
                f"MoEConfig: capacity must be a positive integer, got {self.capacity}; for a multiple of an expert's "
                f"even share pass CapacityFactor({self.capacity})"
            )
        check_positive("MoEConfig", **{name: size for name, size in optional.items() if size is not None})
        if self.num_zero_experts != 0:
            check_positive("MoEConfig", num_zero_experts=self.num_zero_experts)
        if self.precision is not None:
            check_fp8_sizes("MoEConfig", self.latent_dim or self.d_model, self.d_ff)
        self.router.check_sizes("MoEConfig", self.num_experts + self.num_zero_experts, self.top_k)

    def _check_combinations(self) -> None:
        if self.num_zero_experts and self.latent_dim is not None:
            raise ValueError(
                "MoEConfig: num_zero_experts and latent_dim exclude each other, because zero experts return x, "
                f"got {self.num_zero_experts} and {self.latent_dim}"
            )
        if self.shared_d_ff is None and (self.shared_gate or self.shared_activation is not None):
            raise ValueError(
                "MoEConfig: shared_gate and shared_activation need a shared_d_ff, "
                f"got {self.shared_gate} and {self.shared_activation} without one"
            )
        if self.batch_invariant and self.capacity is not None:
            raise ValueError(f"MoEConfig: batch_invariant must have no capacity, got {self.capacity}")

    @property
    def is_gated(self) -> bool:
        """Return whether the activation of the experts is gated."""
        return _as_activation("activation", self.activation).gated

    @property
    def shared_is_gated(self) -> bool:
        """Return whether the activation of the shared expert is gated."""
        return _as_activation("activation", self.shared_activation or self.activation).gated

    def num_parameters(self, *, active: bool = False) -> int:
        """Return the number of parameters of the whole layer. A selection bias is a buffer and does not count.

        Args:
            active: count the parameters that a token uses: `top_k` experts instead of all. Zero experts have no
                parameters, so a token that chooses them uses fewer. Default: False.
        """
        num_experts = min(self.top_k, self.num_experts) if active else self.num_experts
        num_logits, router = self.num_experts + self.num_zero_experts, self.router
        vectors = num_logits * (router.logit_bias + router.per_expert_scale)
        vectors += 0 if router.input_norm_epsilon is None else self.d_model
        if self.bias:
            expert_in = self.latent_dim or self.d_model
            vectors += num_experts * ((1 + self.is_gated) * self.d_ff + expert_in)
        return self._matrix_elements(num_experts) + vectors

    def flops_per_token(self) -> int:
        """Return the number of floating-point operations of a token's forward: two per element of the used matrices.

        Backward takes twice as many operations. With `recompute="up"`, backward also repeats the products with `w_up`.
        Activations, biases and the routing after the logits are not counted. A token needs fewer operations if some
        of its chosen experts are zero experts, or if a capacity drops some of its slots.
        """
        return 2 * self._matrix_elements(min(self.top_k, self.num_experts))

    def _matrix_elements(self, num_experts: int) -> int:
        """Return the number of matrix elements in the router, `num_experts` experts, and all other parts."""
        expert_in = self.latent_dim or self.d_model
        elements = (self.num_experts + self.num_zero_experts) * self.d_model
        elements += num_experts * (2 + self.is_gated) * expert_in * self.d_ff
        if self.latent_dim is not None:
            elements += 2 * self.latent_dim * self.d_model
        if self.shared_d_ff is not None:
            elements += (2 + self.shared_is_gated) * self.d_model * self.shared_d_ff + self.shared_gate * self.d_model
        return elements

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain JSON types. `from_dict` reads the result.

        An object (activation, router, capacity, balance_losses) becomes a dict of the settings that differ from their
        defaults. The process group of `balance_losses` is left out.
        """
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MoEConfig:
        """Return the configuration that `to_dict` wrote. A missing field has its default.

        Raises:
            ValueError: a field is unknown, a size is missing, or the constructor refuses a value.
        """
        check_kind("MoEConfig", "values", values, Mapping)
        known = [f.name for f in fields(cls)]
        if unknown := sorted(map(str, set(values) - set(known))):
            raise ValueError(f"MoEConfig: fields must be among {first_three(known)}, got {first_three(unknown)}")
        if missing := [name for name in known[:4] if name not in values]:
            raise ValueError(f"MoEConfig: the four sizes must be given, got no {first_three(missing)}")
        return cls(**{name: _parsed(name, value) for name, value in values.items()})

    @classmethod
    def from_hf(cls, hf_config: Any, layer: int = 0) -> MoEConfig:
        """Return the configuration of a published model's MoE block.

        `moe_layers.architectures.ARCHITECTURES` lists the supported values of `model_type`.

        Args:
            hf_config: a configuration object of transformers, or the dict of a config.json. If the model is
                composite, the configuration of its language model is read.
            layer: index of the layer, used for settings that the configuration lists by layer. Default: 0.

        Raises:
            ValueError: the architecture is not supported, or a field is missing, malformed or not supported.
        """
        values = hf_config.to_dict() if hasattr(hf_config, "to_dict") else hf_config
        if not isinstance(values, dict):
            got = f"{type(values).__name__} {values!r}"[:100]
            raise ValueError(f"MoEConfig: hf_config must be a dict or a configuration of transformers, got {got}")
        config = read_config(values, layer)
        return cls.from_dict(find_architecture(config).settings(config))

    # Published models. Each method returns the configuration that `from_hf` returns for the model's config.json.

    @classmethod
    def mixtral_8x7b(cls) -> MoEConfig:
        return cls(4096, 14336, 8, 2)

    @classmethod
    def mixtral_8x22b(cls) -> MoEConfig:
        return cls(6144, 16384, 8, 2)

    @classmethod
    def dbrx(cls) -> MoEConfig:
        return cls(6144, 10752, 16, 4, router=RouterSpec.dbrx(1.0))

    @classmethod
    def olmoe(cls) -> MoEConfig:
        return cls(2048, 1024, 64, 8, router=RouterSpec.softmax(normalize=False))

    @classmethod
    def qwen1_5_moe_a2_7b(cls) -> MoEConfig:
        router = RouterSpec.softmax(normalize=False)
        return cls(2048, 1408, 60, 4, router=router, shared_d_ff=5632, shared_gate=True)

    @classmethod
    def qwen3_30b_a3b(cls) -> MoEConfig:
        return cls(2048, 768, 128, 8)

    @classmethod
    def qwen3_235b_a22b(cls) -> MoEConfig:
        return cls(4096, 1536, 128, 8)

    @classmethod
    def qwen3_next_80b_a3b(cls) -> MoEConfig:
        return cls(2048, 512, 512, 10, shared_d_ff=512, shared_gate=True)

    @classmethod
    def deepseek_v2(cls) -> MoEConfig:
        return cls(5120, 1536, 160, 6, router=RouterSpec.deepseek_v2(8, 3, scale=16.0), shared_d_ff=2 * 1536)

    @classmethod
    def deepseek_v3(cls) -> MoEConfig:
        return cls(7168, 2048, 256, 8, router=RouterSpec.deepseek_v3(8, 4, scale=2.5), shared_d_ff=2048)

    @classmethod
    def kimi_k2(cls) -> MoEConfig:
        return cls(7168, 2048, 384, 8, router=RouterSpec.deepseek_v3(scale=2.827), shared_d_ff=2048)

    @classmethod
    def gpt_oss_20b(cls) -> MoEConfig:
        return cls(2880, 2880, 32, 4, activation="gpt_oss", router=RouterSpec.softmax(logit_bias=True), bias=True)

    @classmethod
    def gpt_oss_120b(cls) -> MoEConfig:
        return cls(2880, 2880, 128, 4, activation="gpt_oss", router=RouterSpec.softmax(logit_bias=True), bias=True)

    @classmethod
    def llama4_scout(cls) -> MoEConfig:
        return cls(5120, 8192, 16, 1, router=RouterSpec.llama4(), shared_d_ff=8192)

    @classmethod
    def phi3_5_moe(cls) -> MoEConfig:
        return cls(4096, 6400, 16, 2, router=RouterSpec.phimoe(0.01))


def _as_activation(name: str, value: str | Activation) -> Activation:
    if not isinstance(value, Activation):
        if value not in tuple(ACTIVATIONS):
            raise ValueError(f"MoEConfig: {name} must be one of {KNOWN_ACTIVATIONS}, got {value!r}")
        return Activation(value)
    if value.interleaved:  # checkpoints and adapters hold all gate rows before the up rows
        raise ValueError(f"MoEConfig: {name} must have its gates first, got {value}")
    return value


_PARTS = {
    "activation": Activation,
    "shared_activation": Activation,
    "router": RouterSpec,
    "capacity": CapacityFactor,
    "balance_losses": BalanceLosses,
}


def _plain(value: Any) -> Any:
    """Return a field's value in JSON types. An object becomes a dict of its settings that are not defaults."""
    if not is_dataclass(value):
        return value
    kept = [f for f in fields(value) if f.init and f.name != "group"]  # a process group cannot be stored
    return {f.name: getattr(value, f.name) for f in kept if getattr(value, f.name) != f.default}


def _parsed(name: str, value: Any) -> Any:
    """Return the value of field `name`, given its JSON value. A dict becomes an object of the field's class."""
    if name not in _PARTS or not isinstance(value, Mapping):
        return value
    kind = _PARTS[name]
    try:
        return kind(**value)
    except (TypeError, ValueError) as error:
        got = str(dict(value))[:100]
        raise ValueError(f"MoEConfig: {name} must hold the fields of a {kind.__name__}, got {got}: {error}") from error
