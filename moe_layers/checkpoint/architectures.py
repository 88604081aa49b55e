"""What the published architectures compute, by the `model_type` of their configuration.

Every entry was checked against the module of transformers 5.23 that it describes. Architectures that are known and not
loaded stand in `REFUSED` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from moe_kernels import Activation, RouterSpec

from .config import Config

_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")
_NUM_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "relu": "reglu"}
_PLAIN = {"relu2": "relu_squared", "relu": "relu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}


@dataclass(frozen=True)
class BlockSpec:
    """An MoE block in the words of `MoEFeedForward`'s arguments."""

    d_model: int
    d_ff: int
    num_experts: int
    top_k: int
    activation: Activation
    router: RouterSpec
    bias: bool = False
    shared_d_ff: int | None = None
    shared_gate: bool = False
    shared_activation: Activation | None = None
    num_zero_experts: int = 0
    latent_dim: int | None = None
    capacity: int | None = None

    @property
    def shared_is_gated(self) -> bool:
        return (self.shared_activation or self.activation).gated


# The functions below read one fact of a block from its configuration.


def _none(config: Config) -> None:
    return None


def _gated(config: Config) -> Activation:
    return Activation(_GATED[config.choice("hidden_act", tuple(_GATED), "silu")])


def _dbrx_activation(config: Config) -> Activation:
    config = config.nested("ffn_config")
    if config.values.get("ffn_act_fn") is None:
        return Activation("swiglu")
    return Activation(_GATED[config.nested("ffn_act_fn").choice("name", tuple(_GATED), "silu")])


def _plain(field: str, default: str) -> Callable[[Config], Activation]:
    return lambda config: Activation(_PLAIN[config.choice(field, tuple(_PLAIN), default)])


def _gpt_oss_activation(config: Config) -> Activation:
    alpha, limit = config.number("swiglu_alpha", default=1.702), config.number("swiglu_limit", default=7.0)
    return Activation("gpt_oss", limit=limit, alpha=alpha)


def _clamped(config: Config) -> Activation:
    return Activation("clamped_swiglu", limit=config.number("swiglu_limit", default=10.0))


def _several_shared(d_ff: str = "moe_intermediate_size", default: int | None = None) -> Callable[[Config], int | None]:
    """Several shared experts side by side are one of their common size."""
    missing = {} if default is None else {"default": default}
    return lambda config: config.integer(*_NUM_SHARED, **missing) * config.integer(d_ff) or None


def _shared(d_ff: str, **default: int) -> Callable[[Config], int | None]:
    return lambda config: config.integer(d_ff, **default) or None


def _softmax(normalize: bool) -> Callable[[Config], RouterSpec]:
    return lambda config: RouterSpec.softmax(normalize=normalize)


def _softmax_by_flag(default: bool) -> Callable[[Config], RouterSpec]:
    return lambda config: RouterSpec.softmax(normalize=config.flag("norm_topk_prob", default=default))


def _dbrx_router(config: Config) -> RouterSpec:
    """A null power means weights that are not normalised, and is not the default."""
    values = config.nested("ffn_config").values
    power = values.get("moe_normalize_expert_weights", 1.0)
    if power is None:
        return RouterSpec.softmax(normalize=False)
    return RouterSpec.dbrx(config.nested("ffn_config").number("moe_normalize_expert_weights", default=1.0))


def _groups(config: Config) -> tuple[int, int]:
    num_groups = config.integer("n_group", "num_expert_group", default=1, minimum=1)
    return num_groups, config.integer("topk_group", default=1, minimum=1)


def _deepseek_v2_router(config: Config) -> RouterSpec:
    scale = config.number("routed_scaling_factor", default=1.0)
    if config.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy") == "greedy":
        return RouterSpec.softmax(normalize=False, scale=scale)
    return RouterSpec.deepseek_v2(*_groups(config), scale=scale)


def _deepseek_v3_router(config: Config) -> RouterSpec:
    config.refuse_unless(scoring_func="sigmoid", topk_method="noaux_tc", score_function="sigmoid")
    return RouterSpec.deepseek_v3(
        *_groups(config),
        normalize=config.flag("norm_topk_prob", "moe_renormalize", default=True),
        scale=config.number("routed_scaling_factor", default=1.0),
    )


def _dots_router(config: Config) -> RouterSpec:
    if config.values.get("scoring_func") == "noaux_tc":  # as its published files call the choice by sigmoid and bias
        config = replace(config, values=config.values | {"scoring_func": "sigmoid"})
    return _deepseek_v3_router(config)


def _minimax_m2_router(config: Config) -> RouterSpec:
    config.refuse_unless(scoring_func="sigmoid")
    return RouterSpec.deepseek_v3(norm_epsilon=0.0, scale=config.number("routed_scaling_factor", default=1.0))


def _lfm2_router(config: Config) -> RouterSpec:
    return RouterSpec.deepseek_v3(
        normalize=config.flag("norm_topk_prob", default=True),
        scale=config.number("routed_scaling_factor", default=1.0),
        norm_epsilon=1e-6,
        selection_bias="score" if config.flag("use_expert_bias", default=True) else None,
    )


def _scaled_by(field: str, **default: float) -> Callable[[Config], RouterSpec]:
    return lambda config: RouterSpec.deepseek_v3(scale=config.number(field, **default))


def _laguna_router(config: Config) -> RouterSpec:
    config.refuse_unless(moe_apply_router_weight_on_input=False)
    return RouterSpec.deepseek_v3(
        norm_epsilon=0.0,
        scale=config.number("moe_routed_scaling_factor", default=1.0),
        logit_softcap=config.number("moe_router_logit_softcapping", default=0.0) or None,
    )


def _flint_router(config: Config) -> RouterSpec:
    normalize = config.flag("norm_topk_prob", default=True)
    return RouterSpec.deepseek_v3(normalize=normalize, norm_epsilon=0.0, selection_bias=None)


def _cohere_router(config: Config) -> RouterSpec:
    if config.integer("num_shared_experts", default=0):
        config.refuse_unless(shared_expert_combination_strategy="sum")
        config.choice("shared_expert_combination_strategy", ("sum",), "average")
    if config.choice("expert_selection_fn", ("softmax", "sigmoid"), "softmax") == "softmax":
        return RouterSpec.softmax()
    return RouterSpec(score="sigmoid", normalize=config.flag("norm_topk_prob", default=True))


def _mistral_router(config: Config) -> RouterSpec:
    num_groups, topk_groups = _groups(config)
    return RouterSpec.softmax(
        normalize=config.flag("norm_topk_prob", default=True),
        num_groups=num_groups,
        topk_groups=topk_groups,
        group_score="top2_sum",
        norm_epsilon=1e-20,
        scale=config.number("routed_scaling_factor", default=1.0),
    )


def _longcat_router(config: Config) -> RouterSpec:
    config.refuse_unless(zero_expert_type="identity")
    return RouterSpec.ernie(normalize=False, scale=config.number("routed_scaling_factor"))


@dataclass(frozen=True)
class Architecture:
    """Where the facts of a block stand in a configuration, and what some names mean in the tensors' layout.

    Attributes:
        layouts: those it is published in, of the layouts that share names and that shapes may not tell apart
            ("fused", "transposed", "interleaved").
        sizes_in: object of the configuration with the sizes of the experts, "" for the configuration itself.
        required: fields that must be in the file: missing, the functions above would take them for neutral, and the
            configuration classes of the architecture (transformers', the model's own) for something else.
    """

    router: Callable[[Config], RouterSpec]
    d_ff: str = "moe_intermediate_size"
    activation: Callable[[Config], Activation] = _gated
    shared: Callable[[Config], int | None] = _none
    shared_gate: bool = False
    shared_activation: Callable[[Config], Activation | None] = _none
    bias: bool = False
    zero_experts: str = ""
    latent: str = ""
    capacity: str = ""
    top_k: int | None = None
    layouts: tuple[str, ...] = ("fused",)
    sizes_in: str = ""
    required: tuple[str, ...] = ()

    def block(self, config: Config) -> BlockSpec:
        """Raises ValueError for a field that is missing, malformed or not supported."""
        config = replace(config, required=self.required)
        sizes = config.nested(self.sizes_in) if self.sizes_in else config
        latent = sizes.integer(self.latent, default=0) if self.latent else 0
        shared_d_ff = self.shared(config)
        return BlockSpec(
            d_model=config.integer("hidden_size", "d_model", minimum=1),
            d_ff=sizes.integer(self.d_ff, minimum=1),
            num_experts=sizes.integer(*_NUM_EXPERTS, minimum=1),
            top_k=self.top_k or sizes.integer(*_TOP_K, minimum=1),
            activation=self.activation(config),
            router=self.router(config),
            bias=self.bias,
            shared_d_ff=shared_d_ff,
            shared_gate=self.shared_gate,
            shared_activation=self.shared_activation(config) if shared_d_ff else None,
            num_zero_experts=self.num_zero_experts(config),
            latent_dim=latent or None,
            capacity=config.integer(self.capacity, minimum=1) if self.capacity else None,
        )

    def num_zero_experts(self, config: Config) -> int:
        return config.integer(self.zero_experts) if self.zero_experts else 0


# What `save_checkpoint` calls a layer that was not read from a checkpoint.
OWN_MODEL_TYPE = "moe_layers"


class _OwnArchitecture(Architecture):
    """The arguments of the layer, as `save_checkpoint` writes them."""

    def block(self, config: Config) -> BlockSpec:
        block, activation, router = (config.nested(name).values for name in ("block", "activation", "router"))
        shared = (
            Activation(**config.nested("shared_activation").values) if "shared_activation" in config.values else None
        )
        try:
            return BlockSpec(
                **block, activation=Activation(**activation), shared_activation=shared, router=RouterSpec(**router)
            )
        except TypeError as error:
            raise ValueError(f"checkpoint: config.json does not describe a layer: {error}") from error

    def num_zero_experts(self, config: Config) -> int:
        return config.nested("block").integer("num_zero_experts", default=0)


_MIXTRAL = Architecture(_softmax(True), d_ff="intermediate_size")
_OLMOE = Architecture(_softmax_by_flag(False), d_ff="intermediate_size")
_QWEN3 = Architecture(_softmax_by_flag(False))
_GATED_SHARED = {"shared": _shared("shared_expert_intermediate_size"), "shared_gate": True}
_GRANITE = Architecture(_softmax(True), d_ff="intermediate_size", shared=_shared("shared_intermediate_size", default=0))
_DEEPSEEK_V2 = Architecture(_deepseek_v2_router, shared=_several_shared(), required=("n_group", "topk_group"))
_GLM4 = Architecture(_deepseek_v3_router, shared=_several_shared())
_SCALED = replace(_GLM4, required=("routed_scaling_factor",))
_DEEPSEEK_V3 = replace(_GLM4, required=("routed_scaling_factor", "n_group", "topk_group"))
_LLAMA4 = Architecture(
    lambda config: RouterSpec.llama4(),
    d_ff="intermediate_size",
    shared=_shared("intermediate_size"),
    layouts=("transposed",),
)

ARCHITECTURES = {
    "mixtral": _MIXTRAL,
    "minimax": _MIXTRAL,
    "qwen2_moe": Architecture(_softmax_by_flag(False), **_GATED_SHARED),
    "qwen3_moe": _QWEN3,
    "qwen3_next": Architecture(_softmax_by_flag(True), **_GATED_SHARED),
    "qwen3_5_moe_text": Architecture(_softmax(True), **_GATED_SHARED),
    "qwen3_vl_moe_text": Architecture(_softmax(True), layouts=("transposed", "fused")),
    "qwen3_omni_moe_text": Architecture(_softmax_by_flag(True)),
    "olmoe": _OLMOE,
    "flex_olmo": _OLMOE,
    "mellum": Architecture(_softmax_by_flag(True)),
    "jamba": Architecture(_softmax(False), d_ff="intermediate_size"),
    "hunyuan_v1_moe": Architecture(_softmax(True), d_ff="intermediate_size", shared=_shared("intermediate_size")),
    "dbrx": Architecture(
        _dbrx_router,
        d_ff="ffn_hidden_size",
        activation=_dbrx_activation,
        sizes_in="ffn_config",
    ),
    "gpt_oss": Architecture(
        lambda config: RouterSpec.softmax(logit_bias=True),
        d_ff="intermediate_size",
        activation=_gpt_oss_activation,
        bias=True,
        layouts=("interleaved",),
    ),
    # Its router divides the weights by k, and the block multiplies its output by k.
    "openai_privacy_filter": Architecture(
        lambda config: RouterSpec.softmax(logit_bias=True),
        d_ff="intermediate_size",
        activation=_gpt_oss_activation,
        bias=True,
        layouts=("transposed",),
    ),
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
    "granitemoehybrid": replace(_GRANITE, required=("shared_intermediate_size",)),
    "granitemoe_swa": _GRANITE,
    "aria_text": Architecture(
        _softmax(True),
        d_ff="intermediate_size",
        activation=lambda config: Activation("swiglu"),  # the routed experts', whatever hidden_act is
        shared=_several_shared("intermediate_size"),
        shared_activation=_gated,
        layouts=("fused",),
    ),
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "kimi_linear": _SCALED,
    "glm4_moe": _GLM4,
    "glm4_moe_lite": _SCALED,
    "glm4v_moe_text": _GLM4,
    "glm_moe_dsa": _SCALED,
    "dots1": replace(_GLM4, router=_dots_router, required=("norm_topk_prob",)),
    "solar_open": _GLM4,
    "exaone_moe": _SCALED,
    "bailing_hybrid": _DEEPSEEK_V3,
    "mimo_v2_flash": Architecture(_deepseek_v3_router),
    "nemotron_h": Architecture(
        _deepseek_v3_router,
        activation=_plain("mlp_hidden_act", "relu2"),
        shared=_shared("moe_shared_expert_intermediate_size"),
        latent="moe_latent_size",
    ),
    "minimax_m2": Architecture(_minimax_m2_router, d_ff="intermediate_size"),
    "lfm2_moe": Architecture(_lfm2_router),
    "afmoe": Architecture(_scaled_by("route_scale", default=1.0), shared=_several_shared()),
    "hy_v3": Architecture(_scaled_by("router_scaling_factor"), shared=_several_shared()),
    "laguna": Architecture(_laguna_router, shared=_shared("shared_expert_intermediate_size")),
    "flint": Architecture(_flint_router, shared=_shared("shared_expert_intermediate_size")),
    "cohere2_moe": Architecture(
        _cohere_router, d_ff="intermediate_size", shared=_several_shared("intermediate_size", default=0)
    ),
    "mistral4": Architecture(_mistral_router, shared=_several_shared()),
    "ernie4_5_moe": Architecture(
        lambda config: RouterSpec.ernie(norm_minimum=config.number("moe_norm_min", default=1e-12)),
        shared=_several_shared(),
    ),
    "longcat_flash": Architecture(_longcat_router, d_ff="expert_ffn_hidden_size", zero_experts="zero_expert_num"),
    "llama4_text": _LLAMA4,
    "phimoe": Architecture(
        lambda config: RouterSpec.phimoe(config.number("router_jitter_noise", default=0.01)),
        d_ff="intermediate_size",
    ),
    OWN_MODEL_TYPE: _OwnArchitecture(_softmax(True)),
    "switch_transformers": Architecture(
        _softmax(False),
        d_ff="d_ff",
        activation=_plain("dense_act_fn", "relu"),
        capacity="expert_capacity",
        top_k=1,
    ),
}

REFUSED = {
    "gemma4": "its router reads another tensor than its experts",
    "gemma4_text": "its router reads another tensor than its experts",
    "deepseek_v4": "its first layers route by token id and its experts are packed float4",
    "axk1": "the block ends in an RMSNorm",
    "axk2": "the block ends in an RMSNorm",
    "jetmoe": "the block adds a bias to its output",
    "muse_spark": "the experts end in an RMSNorm",
    "inkling": "routed and shared experts are normalised together",
    "inkling2": "routed and shared experts are normalised together",
    "ernie4_5_vl_moe": "text and vision have separate experts",
    "nllb-moe": "its router chooses the second expert at random and drops tokens by a global capacity",
    "zaya": "its router is a network with a skip expert",
    "doge": "its experts are embeddings chosen by product keys",
    "vitpose": "experts are chosen by the dataset",
}


def find_architecture(config: Config) -> Architecture:
    """Raises ValueError for an architecture that is unknown or not supported."""
    model_type = config.model_type
    if model_type in REFUSED:
        raise ValueError(f"checkpoint: model_type {model_type!r} is not supported: {REFUSED[model_type]}")
    if model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ValueError(f"checkpoint: model_type must be one of {known}, got {model_type!r}")
    return ARCHITECTURES[model_type]
