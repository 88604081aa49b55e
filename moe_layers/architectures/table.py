"""Tables of the published architectures, by the `model_type` of their configuration.

Every entry was checked against the architecture's module in transformers 5.24. `REFUSED` lists the known architectures
that are not supported, each with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from moe_kernels import Activation, RouterSpec

from ..checks import first_three
from . import routers
from .fields import ModelConfig

_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
_NUM_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "relu": "reglu"}
_PLAIN = {"relu2": "relu_squared", "relu": "relu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}


# Each function down to `Architecture` reads one `MoEConfig` field from a configuration, or returns such a reader.


def _none(config: ModelConfig) -> None:
    return None


def _activation(kinds: dict[str, str], field: str, default: str) -> Callable[[ModelConfig], Activation]:
    return lambda config: Activation(kinds[config.choice(field, tuple(kinds), default)])


_gated = _activation(_GATED, "hidden_act", "silu")


def _dbrx_activation(config: ModelConfig) -> Activation:
    config = config.nested("ffn_config")
    if config.values.get("ffn_act_fn") is None:
        return Activation("swiglu")
    return _activation(_GATED, "name", "silu")(config.nested("ffn_act_fn"))


def _gpt_oss_activation(config: ModelConfig) -> Activation:
    alpha, limit = config.number("swiglu_alpha", default=1.702), config.number("swiglu_limit", default=7.0)
    return Activation("gpt_oss", limit=limit, alpha=alpha)


def _clamped(config: ModelConfig) -> Activation:
    config.refuse_unless(hidden_act="silu")
    return Activation("clamped_swiglu", limit=config.number("swiglu_limit", default=10.0))


def _step_activation(limits: str) -> Callable[[ModelConfig], Activation]:
    """Return a reader of Step 3.5's activation, whose limit differs by layer. A missing limit or 0 means no clamp."""

    def read(config: ModelConfig) -> Activation:
        config.refuse_unless(hidden_act="silu")
        limit = config.number(limits, default=0.0)
        return Activation("swiglu_clamped_after", limit=limit) if limit else Activation("swiglu")

    return read


def _one_shared(config: ModelConfig) -> int:
    config.refuse_unless(n_shared_experts=1)
    return config.integer("moe_intermediate_size")


def _several_shared(*d_ff: str, **default: int) -> Callable[[ModelConfig], int | None]:
    """Return a reader of the shared experts' total d_ff: one expert of this d_ff equals all shared experts."""
    names = d_ff or ("moe_intermediate_size",)
    return lambda config: config.integer(*_NUM_SHARED, **default) * config.integer(*names) or None


def _shared(*d_ff: str, **default: int) -> Callable[[ModelConfig], int | None]:
    return lambda config: config.integer(*d_ff, **default) or None


@dataclass(frozen=True)
class Architecture:
    """Describes how to read the settings of an architecture's MoE block from its configuration.

    Attributes:
        d_ff, zero_experts, latent, capacity: names of fields in config.json; "" if the block has no such feature.
        sizes_in: name of the object that holds the sizes of the experts; "" for the configuration itself.
        required: fields that config.json must hold, because their defaults here differ from those of the model's
            configuration class.
    """

    router: Callable[[ModelConfig], RouterSpec]
    d_ff: str = "moe_intermediate_size"
    activation: Callable[[ModelConfig], Activation] = _gated
    shared: Callable[[ModelConfig], int | None] = _none
    shared_gate: bool = False
    shared_activation: Callable[[ModelConfig], Activation | None] = _none
    bias: bool = False
    zero_experts: str = ""
    latent: str = ""
    capacity: str = ""
    top_k: int | None = None
    separate_router_input: bool = False
    sizes_in: str = ""
    required: tuple[str, ...] = ()

    def settings(self, config: ModelConfig) -> dict[str, Any]:
        """Return the block's `MoEConfig` fields. Raise ValueError if a field is missing, malformed or not supported."""
        config = replace(config, required=self.required)
        sizes = self._sizes(config)
        num_experts, d_ff = self.expert_sizes(config)
        latent = sizes.integer(self.latent, default=0) if self.latent else 0
        shared_d_ff = self.shared(config)
        return {
            "d_model": config.integer("hidden_size", "d_model", minimum=1),
            "d_ff": d_ff,
            "num_experts": num_experts,
            "top_k": self.top_k or sizes.integer(*_TOP_K, minimum=1),
            "activation": self.activation(config),
            "router": self.router(config),
            "bias": self.bias,
            "shared_d_ff": shared_d_ff,
            "shared_gate": self.shared_gate and shared_d_ff is not None,
            "shared_activation": self.shared_activation(config) if shared_d_ff else None,
            "num_zero_experts": self.num_zero_experts(config),
            "latent_dim": latent or None,
            "capacity": config.integer(self.capacity, minimum=1) if self.capacity else None,
            "separate_router_input": self.separate_router_input,
        }

    def _sizes(self, config: ModelConfig) -> ModelConfig:
        return config.nested(self.sizes_in) if self.sizes_in else config

    def expert_sizes(self, config: ModelConfig) -> tuple[int, int]:
        """Return the number of experts, without zero experts, and the d_ff of one expert."""
        sizes = self._sizes(config)
        return sizes.integer(*_NUM_EXPERTS, minimum=1), sizes.integer(self.d_ff, minimum=1)

    def num_zero_experts(self, config: ModelConfig) -> int:
        return config.integer(self.zero_experts) if self.zero_experts else 0


# `save_checkpoint` and `convert` write the name of the experts' layout into the field RECORD of config.json.
# `save_checkpoint` writes OWN_MODEL_TYPE as the `model_type` of a layer that was not read from a checkpoint.
OWN_MODEL_TYPE = "moe_layers"
RECORD = "moe_layers_layout"
_NO_SETTINGS = ("model_type", RECORD, "quantization_config", "dtype")  # fields of config.json, not of `MoEConfig`


class _OwnArchitecture(Architecture):
    """An architecture whose configuration holds `MoEConfig.to_dict()`."""

    def settings(self, config: ModelConfig) -> dict[str, Any]:
        return {name: value for name, value in config.values.items() if name not in _NO_SETTINGS}


_MIXTRAL = Architecture(routers.softmax(True), d_ff="intermediate_size")
_OLMOE = Architecture(routers.softmax_by_flag(False), d_ff="intermediate_size")
_GATED_SHARED = {"shared": _shared("shared_expert_intermediate_size"), "shared_gate": True}
_GPT_OSS = Architecture(
    lambda config: RouterSpec.softmax(logit_bias=True),
    d_ff="intermediate_size",
    activation=_gpt_oss_activation,
    bias=True,
)
_GRANITE = Architecture(
    routers.softmax(True), d_ff="intermediate_size", shared=_shared("shared_intermediate_size", default=0)
)
_DEEPSEEK_V2 = Architecture(routers.deepseek_v2, shared=_several_shared(), required=("n_group", "topk_group"))
_GLM4 = Architecture(routers.deepseek_v3, shared=_several_shared())
_SCALED = replace(_GLM4, required=("routed_scaling_factor",))
_DEEPSEEK_V3 = replace(_GLM4, required=("routed_scaling_factor", "n_group", "topk_group"))
_CLAMPED = replace(_SCALED, activation=_clamped)
_GEMMA4 = Architecture(
    lambda config: RouterSpec.gemma4(config.number("rms_norm_eps", default=1e-6)),
    activation=_activation(_GATED, "hidden_activation", "gelu_pytorch_tanh"),
    separate_router_input=True,
)

ARCHITECTURES = {
    "mixtral": _MIXTRAL,
    "minimax": _MIXTRAL,
    "qwen2_moe": Architecture(routers.softmax_by_flag(False), **_GATED_SHARED),
    "qwen3_moe": Architecture(routers.softmax_by_flag(False)),
    "qwen3_next": Architecture(routers.softmax_by_flag(True), **_GATED_SHARED),
    "qwen4_exp_text": Architecture(routers.softmax_by_flag(True), **_GATED_SHARED),
    "qwen3_5_moe_text": Architecture(routers.softmax(True), **_GATED_SHARED),
    "qwen3_vl_moe_text": Architecture(routers.softmax(True)),
    "qwen3_omni_moe_text": Architecture(routers.softmax_by_flag(True)),
    "olmoe": _OLMOE,
    "flex_olmo": _OLMOE,
    "mellum": Architecture(routers.softmax_by_flag(True)),
    "jamba": Architecture(routers.softmax(False), d_ff="intermediate_size"),
    "hunyuan_v1_moe": Architecture(
        routers.softmax(True), d_ff="intermediate_size", shared=_shared("intermediate_size")
    ),
    "dbrx": Architecture(routers.dbrx, d_ff="ffn_hidden_size", activation=_dbrx_activation, sizes_in="ffn_config"),
    "gpt_oss": _GPT_OSS,
    "openai_privacy_filter": _GPT_OSS,  # the block divides weights by k and multiplies its output by k, which cancels
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
    "granitemoehybrid": replace(_GRANITE, required=("shared_intermediate_size",)),
    "granitemoe_swa": _GRANITE,
    "aria_text": Architecture(
        routers.softmax(True),
        d_ff="intermediate_size",
        activation=lambda config: Activation("swiglu"),  # routed experts ignore hidden_act
        shared=_several_shared("intermediate_size"),
        shared_activation=_gated,
    ),
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_ocr2_text": _DEEPSEEK_V2,
    "unlimited_ocr_text": _DEEPSEEK_V2,
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V3,
    "deepseek_v4": Architecture(
        routers.deepseek_v4, activation=_clamped, shared=_one_shared, required=("routed_scaling_factor",)
    ),
    "kimi_k2": _DEEPSEEK_V3,
    "kimi_linear": _SCALED,
    "glm4_moe": _GLM4,
    "glm4_moe_lite": _SCALED,
    "glm4v_moe_text": _GLM4,
    "glm_moe_dsa": _SCALED,
    "glm5_next_text": _CLAMPED,
    # HY-V4's routed experts clamp their activation, but its shared expert does not.
    **dict.fromkeys(("hy_v4", "hy_v4_vl_text"), replace(_CLAMPED, shared_activation=_gated)),
    "dots3_note_text": replace(
        _GLM4, shared=_several_shared("moe_shared_expert_intermediate_size", "shared_experts_intermediate_size")
    ),
    "beam": replace(_DEEPSEEK_V3, shared=_none),
    "dots1": replace(_GLM4, router=routers.dots, required=("norm_topk_prob",)),
    "solar_open": _GLM4,
    "exaone_moe": _SCALED,
    "bailing_hybrid": _DEEPSEEK_V3,
    "mimo_v2_flash": Architecture(routers.deepseek_v3),
    "nemotron_h": Architecture(
        routers.deepseek_v3,
        activation=_activation(_PLAIN, "mlp_hidden_act", "relu2"),
        shared=_shared("moe_shared_expert_intermediate_size"),
        latent="moe_latent_size",
    ),
    "minimax_m2": Architecture(routers.minimax_m2, d_ff="intermediate_size"),
    "minimax_m3_vl_text": Architecture(
        routers.minimax_m2,
        d_ff="intermediate_size",
        activation=_gpt_oss_activation,
        shared=_shared("shared_intermediate_size"),
        required=("routed_scaling_factor",),
    ),
    "step3p5": Architecture(
        routers.step3,
        activation=_step_activation("swiglu_limits"),
        shared=_shared("share_expert_dim", "share_expert_dims"),
        shared_activation=_step_activation("swiglu_limits_shared"),
    ),
    "kolibri1": Architecture(
        routers.sigmoid_by_flag(False, "logit"), shared=_shared("shared_expert_intermediate_size")
    ),
    "gemma4_text": _GEMMA4,
    "diffusion_gemma_text": _GEMMA4,
    "lfm2_moe": Architecture(routers.lfm2),
    "afmoe": Architecture(routers.scaled_by("route_scale", default=1.0), shared=_several_shared()),
    "hy_v3": Architecture(routers.scaled_by("router_scaling_factor"), shared=_several_shared()),
    "laguna": Architecture(routers.laguna, shared=_shared("shared_expert_intermediate_size")),
    "flint": Architecture(routers.sigmoid_by_flag(True, None), shared=_shared("shared_expert_intermediate_size")),
    "lara_mini": Architecture(routers.softmax_by_flag(True), shared=_shared("shared_expert_intermediate_size")),
    "cohere2_moe": Architecture(
        routers.cohere, d_ff="intermediate_size", shared=_several_shared("intermediate_size", default=0)
    ),
    "mistral4": Architecture(routers.mistral, shared=_several_shared()),
    "mistral_large4_text": Architecture(routers.mistral, shared=_several_shared()),
    "ernie4_5_moe": Architecture(
        lambda config: RouterSpec.ernie(norm_minimum=config.number("moe_norm_min", default=1e-12)),
        shared=_several_shared(),
    ),
    "longcat_flash": Architecture(routers.longcat, d_ff="expert_ffn_hidden_size", zero_experts="zero_expert_num"),
    "llama4_text": Architecture(
        lambda config: RouterSpec.llama4(), d_ff="intermediate_size", shared=_shared("intermediate_size")
    ),
    "phimoe": Architecture(
        lambda config: RouterSpec.phimoe(config.number("router_jitter_noise", default=0.01)), d_ff="intermediate_size"
    ),
    OWN_MODEL_TYPE: _OwnArchitecture(routers.softmax(True), d_ff="d_ff", zero_experts="num_zero_experts"),
    "switch_transformers": Architecture(
        routers.softmax(False),
        d_ff="d_ff",
        activation=_activation(_PLAIN, "dense_act_fn", "relu"),
        capacity="expert_capacity",
        top_k=1,
    ),
}

REFUSED = {
    "axk1": "the block ends in an RMSNorm",
    "axk2": "the block ends in an RMSNorm",
    "jetmoe": "the block adds a bias to its output",
    **dict.fromkeys(("muse_spark", "muse_spark_text"), "the experts end in an RMSNorm"),
    **dict.fromkeys(
        (
            "inkling",
            "inkling_mm_model",
            "inkling_text",
            "inkling2",
            "inkling2_text",
            "inkling2_loop",
            "inkling2_loop_text",
        ),
        "routed and shared experts are normalised together",
    ),
    "dots3_note_vision_encoder": "experts of vision models differ in number and size by layer",
    **dict.fromkeys(("ernie4_5_vl_moe", "ernie4_5_vl_moe_text"), "text and vision have separate experts"),
    "nllb-moe": "its router chooses the second expert at random and drops tokens by a global capacity",
    "zaya": "its router is a network with a skip expert",
    "doge": "its experts are embeddings chosen by product keys",
    **dict.fromkeys(("vitpose", "vitpose_backbone"), "experts are chosen by the dataset"),
}


def find_architecture(config: ModelConfig) -> Architecture:
    """Return the model's architecture. Raise ValueError if the architecture is unknown or not supported."""
    model_type = config.model_type
    if model_type in REFUSED:
        raise ValueError(f"MoEConfig: model_type {model_type!r} is not supported: {REFUSED[model_type]}")
    if model_type not in ARCHITECTURES:
        known = first_three(sorted(ARCHITECTURES))
        raise ValueError(
            f"MoEConfig: model_type must be one of {known} (moe_layers.architectures.ARCHITECTURES), got {model_type!r}"
        )
    return ARCHITECTURES[model_type]
