"""Settings of routers and of activation functions, as frozen dataclasses. `reference.topk_routing` and
`reference.apply_activation` evaluate these settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from .errors import first_three


@dataclass(frozen=True)
class RouterSpec:
    """Settings of one router function, in the order of their use. The defaults give the router of Mixtral and Qwen3.

        logits = softcap(w_router @ token [+ logit_bias])
        scores = softmax(logits) over all experts, or sigmoid or sqrt(softplus) of each logit
        chosen = top-k of scores [+ selection bias] among the experts of the best groups
        weight = scale * scores[chosen] / norm(scores[chosen])         (without the selection bias)

    Scores have the order of the logits, but different logits may round to equal scores. Without a
    selection bias and without "top2_sum", experts are therefore chosen by logit instead of by score.

    Args:
        input_norm_epsilon: if set, the token is divided by its root mean square, with this epsilon, before the linear
            map. The quotient is divided by sqrt(D) and multiplied by a learned vector. Default: None.
        logit_bias: whether the linear map has a bias.
        logit_softcap: if set, the logits become softcap * tanh(logits / softcap).
        sparsemixer_jitter: if set, the router is a top-2 SparseMixer in evaluation mode. The router chooses the expert
            with the highest logit, then the expert with the highest of the other logits. Each weight is a softmax over
            experts not chosen before, whose logits are within the relative distance `2 * jitter` of the chosen logit.
            Settings below are ignored, except `per_expert_scale`, `scale` and `weight_on_input`.
        selection_bias: "score" adds a bias [E] without gradient to the scores, for selection only. "logit" adds the
            bias to the logits instead. None, the default, means no bias.
        num_groups: experts form this many groups of consecutive ids.
        topk_groups: number of groups whose experts can be chosen: the groups with the highest scores.
        group_score: score of a group: "max" of its experts' scores, or "top2_sum", the sum of the two highest.
        normalize: whether weights are divided by the norm of the chosen scores, but at least by `norm_minimum`. The
            norm is (sum of score ** norm_power) ** (1 / norm_power) + norm_epsilon.
        scale: multiplies the weights.
        per_expert_scale: whether a learned factor [E] multiplies the weights.
        weight_on_input: whether the weight multiplies the expert's input instead of its output.

    Raises:
        ValueError: a name is unknown, or a number is out of range.
    """

    input_norm_epsilon: float | None = None
    logit_bias: bool = False
    logit_softcap: float | None = None
    sparsemixer_jitter: float | None = None
    score: str = "softmax"
    selection_bias: str | None = None
    num_groups: int = 1
    topk_groups: int = 1
    group_score: str = "max"
    normalize: bool = True
    norm_power: float = 1.0
    norm_epsilon: float = 0.0
    norm_minimum: float = 0.0
    scale: float = 1.0
    per_expert_scale: bool = False
    weight_on_input: bool = False

    def __post_init__(self):
        for name, choices in (
            ("score", ("softmax", "sigmoid", "sqrt_softplus")),
            ("selection_bias", (None, "score", "logit")),
            ("group_score", ("max", "top2_sum")),
        ):
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"RouterSpec: {name} must be one of {choices}, got {value!r}")
        for name in ("num_groups", "topk_groups"):
            if not isinstance(value := getattr(self, name), int):
                raise ValueError(f"RouterSpec: {name} must be an integer, got {value!r}")
        for name in ("norm_power", "norm_epsilon", "norm_minimum", "scale"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"RouterSpec: {name} must be a finite number, got {value!r}")
        self._check_ranges()
        # Compute `is_softmax_of_logits` here, and not in the property. With dynamic shapes, torch.compile would turn
        # the numbers that the property reads, such as `scale`, into inputs of its graph.
        object.__setattr__(self, "_is_softmax_of_logits", self._chooses_and_weighs_by_softmax())

    def _check_ranges(self) -> None:
        if not 1 <= self.topk_groups <= self.num_groups:
            raise ValueError(
                f"RouterSpec: topk_groups must be in [1, num_groups={self.num_groups}], got {self.topk_groups}"
            )
        for name in ("logit_softcap", "norm_power", "input_norm_epsilon", "sparsemixer_jitter"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"RouterSpec: {name} must be positive, got {value}")
        if self.norm_epsilon < 0 or self.norm_minimum < 0:
            raise ValueError(
                f"RouterSpec: norm_epsilon and norm_minimum must not be negative, "
                f"got {self.norm_epsilon} and {self.norm_minimum}"
            )

    def _chooses_and_weighs_by_softmax(self) -> bool:
        settings = (self.sparsemixer_jitter, self.score, self.selection_bias, self.num_groups, self.scale)
        if settings != (None, "softmax", None, 1, 1.0):
            return False
        return not self.normalize or (self.norm_power, self.norm_epsilon, self.norm_minimum) == (1.0, 0.0, 0.0)

    @property
    def is_softmax_of_logits(self) -> bool:
        """Return whether the experts with the highest logits are chosen, and their weights are a softmax with scale 1.
        The softmax is over all logits or, if `normalize` is set, over the chosen logits."""
        return self._is_softmax_of_logits  # pyright: ignore[reportAttributeAccessIssue]  # set by __post_init__

    @property
    def chooses_by_logit(self) -> bool:
        """Return whether the logits, with the selection bias if there is one, decide which experts are chosen."""
        if self.selection_bias is not None:
            return self.selection_bias == "logit"
        return self.num_groups == 1 or self.group_score == "max"

    @property
    def is_softmax_of_chosen(self) -> bool:
        """Return whether the weights, up to their scale, are a softmax over the logits of the chosen experts only."""
        norm = self.norm_power, self.norm_epsilon, self.norm_minimum
        is_normalized = self.normalize and norm == (1.0, 0.0, 0.0)
        return self.score == "softmax" and is_normalized and self.sparsemixer_jitter is None

    @property
    def single_weight_is_one(self) -> bool:
        """Return whether a single chosen expert (top-1) has the same weight whatever its logit is, because
        normalisation divides the single score by itself."""
        # Epsilons and minimums below 1e-3, such as the published 1e-20 to 1e-6, only avoid a division by zero.
        return self.normalize and max(self.norm_epsilon, self.norm_minimum) < 1e-3 and self.sparsemixer_jitter is None

    def check_sizes(self, owner: str, num_experts: int, top_k: int) -> None:
        """Raise ValueError unless this router can choose `top_k` of `num_experts`."""
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"{owner}: top_k must be in [1, num_experts={num_experts}], got {top_k}")
        if num_experts % self.num_groups:
            raise ValueError(
                f"{owner}: num_experts must be a multiple of num_groups={self.num_groups}, got {num_experts}"
            )
        if top_k > (available := self.topk_groups * (num_experts // self.num_groups)):
            raise ValueError(f"{owner}: top_k must be at most {available}, the experts of topk_groups, got {top_k}")
        if self.sparsemixer_jitter is not None and top_k != 2:
            raise ValueError(f"{owner}: a SparseMixer chooses top_k=2 experts, got {top_k}")

    def __str__(self) -> str:
        """Return a text with `normalize` and every setting that differs from its default."""
        values = [(field, getattr(self, field.name)) for field in fields(self) if field.name != "normalize"]
        others = [f"{field.name}={value}" for field, value in values if value != field.default]
        return ", ".join([f"normalize={self.normalize}", *others])

    # Constructors of published routers, by model name. All take further settings, such as logit_softcap, by keyword.

    @classmethod
    def softmax(cls, *, normalize: bool = True, **settings) -> RouterSpec:
        """Return the router of Mixtral, Qwen, OLMoE or Switch. With normalize=True, the default, the result is also the
        router of Granite. With logit_bias=True in addition, the result is the router of GPT-OSS."""
        return cls(normalize=normalize, **settings)

    @classmethod
    def dbrx(cls, power: float, **settings) -> RouterSpec:
        """Return the router of DBRX, which divides the weights by their L^power norm."""
        return cls(norm_power=power, **settings)

    @classmethod
    def deepseek_v2(cls, num_groups: int, topk_groups: int, *, scale: float = 1.0, **settings) -> RouterSpec:
        """Return DeepSeek-V2's "group_limited_greedy". The score of a group is the highest score of its experts.
        Weights are not normalised."""
        return cls(num_groups=num_groups, topk_groups=topk_groups, normalize=False, scale=scale, **settings)

    @classmethod
    def deepseek_v3(
        cls, num_groups: int = 1, topk_groups: int = 1, *, norm_epsilon: float = 1e-20, **settings
    ) -> RouterSpec:
        """Return the router of DeepSeek-V3, MiniMax-M2 (norm_epsilon=0), LFM2 (norm_epsilon=1e-6) or DeepSeek-V4
        (score="sqrt_softplus")."""
        settings = {"score": "sigmoid", "selection_bias": "score", "group_score": "top2_sum", **settings}
        return cls(num_groups=num_groups, topk_groups=topk_groups, norm_epsilon=norm_epsilon, **settings)

    @classmethod
    def ernie(cls, *, normalize: bool = True, norm_minimum: float = 0.0, scale: float = 1.0, **settings) -> RouterSpec:
        """Return the router of ERNIE 4.5 (norm of at least norm_minimum) or LongCat (normalize=False, with a scale)."""
        return cls(selection_bias="score", normalize=normalize, norm_minimum=norm_minimum, scale=scale, **settings)

    @classmethod
    def llama4(cls, **settings) -> RouterSpec:
        """Return the router of Llama 4: the sigmoid of the chosen logit multiplies the expert's input."""
        return cls(score="sigmoid", normalize=False, weight_on_input=True, **settings)

    @classmethod
    def phimoe(cls, jitter: float, **settings) -> RouterSpec:
        """Return the router of Phi-3.5-MoE in evaluation."""
        return cls(sparsemixer_jitter=jitter, **settings)

    @classmethod
    def gemma4(cls, epsilon: float, **settings) -> RouterSpec:
        """Return the router of Gemma 4, which normalises and scales the token and learns a factor per expert."""
        return cls(input_norm_epsilon=epsilon, per_expert_scale=True, **settings)


class ActivationKind(NamedTuple):
    """Whether a named activation is gated, and its limit and alpha in published models. A number that the activation
    does not have is None."""

    gated: bool
    limit: float | None = None
    alpha: float | None = None


ACTIVATION_KINDS = {
    "swiglu": ActivationKind(gated=True),
    "geglu": ActivationKind(gated=True),
    "geglu_tanh": ActivationKind(gated=True),
    "reglu": ActivationKind(gated=True),
    "clamped_swiglu": ActivationKind(gated=True, limit=10.0),
    "swiglu_clamped_after": ActivationKind(gated=True, limit=7.0),
    "clamped_geglu": ActivationKind(gated=True, limit=10.0),
    "softcapped_swiglu": ActivationKind(gated=True, limit=25.0, alpha=4.0),
    "gpt_oss": ActivationKind(gated=True, limit=7.0, alpha=1.702),
    "relu_squared": ActivationKind(gated=False),
    "relu": ActivationKind(gated=False),
    "gelu": ActivationKind(gated=False),
    "gelu_tanh": ActivationKind(gated=False),
    "silu": ActivationKind(gated=False),
}
KNOWN_ACTIVATIONS = f"{first_three(map(repr, ACTIVATION_KINDS))} (all: help(moe_kernels.Activation))"


@dataclass(frozen=True)
class Activation:
    """An activation with its limit and alpha, by default those of published models. Every `activation` argument also
    accepts a name, which selects these defaults.

    Gated, with a gate g and an up value u:

        swiglu                silu(g) * u
        geglu, geglu_tanh     gelu(g) * u, exact (by erf) or by tanh
        reglu                 relu(g) * u
        clamped_swiglu        silu(min(g, limit)) * clamp(u, -limit, limit)             (DeepSeek-V4, GLM-5)
        swiglu_clamped_after  min(silu(g), limit) * clamp(u, -limit, limit)             (Step 3.7)
        clamped_geglu         gelu(min(g, limit)) * clamp(u, -limit, limit)             (DeepSeek-V4 with GELU)
        softcapped_swiglu     alpha tanh(g / alpha) * sigmoid(g) * limit tanh(u / limit)   (Inkling 2)
        gpt_oss               with g and u clamped as in clamped_swiglu: (u + 1) * g * sigmoid(alpha * g)

    Where a value equals the limit, the gradient of clamping is 1.

    Plain, with one value: relu_squared, relu, gelu, gelu_tanh, silu. Plain activations have no gate: w_up is [E, F, D].

    Args:
        interleaved: whether gate and up alternate: gate 0, up 0, gate 1, ... (GPT-OSS). By default all gates are first.
            This order applies to the columns of the pre-activation, and to the rows of w_up and b_up.

    Raises:
        ValueError: the name is unknown, the activation has no limit or alpha but one is given, a number is not
            positive, or a plain activation is interleaved.
    """

    name: str
    limit: float | None = None
    alpha: float | None = None
    interleaved: bool = False
    gated: bool = field(init=False, repr=False, compare=False)
    published: bool = field(init=False, repr=False, compare=False)  # whether limit and alpha are the published numbers

    def __post_init__(self):
        if self.name not in ACTIVATION_KINDS:
            raise ValueError(f"activation must be one of {KNOWN_ACTIVATIONS}, got {self.name!r}")
        kind = ACTIVATION_KINDS[self.name]
        for number in ("limit", "alpha"):
            value, published = getattr(self, number), getattr(kind, number)
            if value is None:
                object.__setattr__(self, number, published)
            elif published is None:
                raise ValueError(f"activation {self.name!r} has no {number}, got {value}")
            elif not value > 0:
                raise ValueError(f"{number} of an activation must be positive, got {value}")
        if self.interleaved and not kind.gated:
            raise ValueError(f"activation {self.name!r} has no gate, got interleaved=True")
        object.__setattr__(self, "gated", kind.gated)
        object.__setattr__(self, "published", (self.limit, self.alpha) == (kind.limit, kind.alpha))

    def __str__(self) -> str:
        numbers = [f"{name}={value}" for name in ("limit", "alpha") if (value := getattr(self, name)) is not None]
        settings = [*([] if self.published else numbers), *(["interleaved"] if self.interleaved else [])]
        return f"{self.name}({', '.join(settings)})" if settings else self.name


def is_gated(name: str | None) -> bool:
    """Return whether `name` is the name of a gated activation."""
    return name is not None and ACTIVATION_KINDS[name].gated


def as_activation(op: str, activation: str | Activation) -> Activation:
    """Return an `Activation` unchanged, and convert a name to an `Activation`.

    Raises:
        ValueError: the name is unknown.
    """
    if isinstance(activation, Activation):
        return activation
    if activation not in ACTIVATION_KINDS:
        raise ValueError(f"{op}: activation must be one of {KNOWN_ACTIVATIONS}, got {activation!r}")
    return Activation(activation)
