"""Small random models of published architectures, built and saved by transformers."""

import random
import re

import pytest
import torch
from packaging.version import Version
from torch import nn

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 16,
}
LINEAR_ATTENTION = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}

# By model type, the fields that differ from the common ones in `config_fields`.
MODELS = {
    "mixtral": {},
    "minimax": {"layer_types": ["full_attention"] * 2, "block_size": 4},
    "minimax_m2": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "qwen3_next": LINEAR_ATTENTION,
    "qwen3_5_moe_text": LINEAR_ATTENTION,
    "qwen4_exp_text": LINEAR_ATTENTION,
    "qwen3_vl_moe_text": {},
    "qwen3_omni_moe_text": {},
    "olmoe": {},
    "flex_olmo": {},
    "mellum": {},
    "jamba": {"expert_layer_period": 1, "expert_layer_offset": 0, "attn_layer_period": 1, "attn_layer_offset": 0},
    "hunyuan_v1_moe": {},
    "dbrx": {},
    "gpt_oss": {"swiglu_limit": 1.5},
    "openai_privacy_filter": {"swiglu_limit": 1.5},
    "granitemoe": {},
    "granitemoeshared": {},
    "granitemoehybrid": {"layer_types": ["attention"] * 2, "mamba_expand": 2, "mamba_n_heads": 8},
    "granitemoe_swa": {},
    "aria_text": {},
    "deepseek_v2": {"topk_method": "group_limited_greedy", **LATENT_ATTENTION},
    "deepseek_ocr2_text": {"topk_method": "group_limited_greedy", "num_attention_heads": 2},
    "unlimited_ocr_text": {"topk_method": "group_limited_greedy", "num_attention_heads": 2},
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe"], "n_shared_experts": 1, "swiglu_limit": 1.5},
    "deepseek_v3": LATENT_ATTENTION,
    "deepseek_v32": LATENT_ATTENTION,
    "kimi_linear": LATENT_ATTENTION,
    "glm4_moe": {},
    "glm4_moe_lite": LATENT_ATTENTION,
    "glm4v_moe_text": {},
    "glm_moe_dsa": LATENT_ATTENTION,
    "glm5_next_text": {"swiglu_limit": 1.5, **LATENT_ATTENTION, "qk_rope_head_dim": 0},
    "hy_v4": {"swiglu_limit": 1.5, **LATENT_ATTENTION},
    "hy_v4_vl_text": {"swiglu_limit": 1.5, **LATENT_ATTENTION, "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}},
    "dots3_note_text": LATENT_ATTENTION,
    "beam": {},
    "minimax_m3_vl_text": {"swiglu_limit": 1.5},
    "step3p5": {"swiglu_limits": [None, 0.4], "swiglu_limits_shared": [0.0, 0.3]},
    "kolibri1": {"norm_topk_prob": True},
    "gemma4_text": {"enable_moe_block": True, "vocab_size_per_layer_input": 32},
    "diffusion_gemma_text": {},
    "dots1": {},
    "solar_open": {},
    "exaone_moe": {},
    "bailing_hybrid": LATENT_ATTENTION,
    "mimo_v2_flash": {},
    "nemotron_h": {},
    "lfm2_moe": {"layer_types": ["full_attention"] * 2, "num_dense_layers": 1},
    "afmoe": {},
    "hy_v3": {},
    "laguna": {},
    "flint": {"mlp_only_layers": [0]},
    "lara_mini": {},
    "cohere2_moe": {"shared_expert_combination_strategy": "sum"},
    "mistral4": LATENT_ATTENTION,
    "mistral_large4_text": LATENT_ATTENTION,
    "ernie4_5_moe": {},
    "longcat_flash": LATENT_ATTENTION,
    "llama4_text": {},
    "phimoe": {},
    "switch_transformers": {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2, "expert_capacity": 3},
}
LAYER = 1
# Models whose configuration is in no mapping of transformers.
CLASSES = {
    "deepseek_ocr2_text": "DeepseekOcr2TextModel",
    "diffusion_gemma_text": "DiffusionGemmaEncoderTextModel",
    "muse_spark_text": "MuseSparkTextModel",
    "qwen3_omni_moe_text": "Qwen3OmniMoeThinkerTextModel",
    "step3p5": "Step3p7TextModel",
    "unlimited_ocr_text": "UnlimitedOcrTextModel",
}


def config_fields(model_type):
    """Return configuration fields with random sizes per architecture that are no round numbers."""
    draw = random.Random(model_type)
    num_groups, top_k = draw.choice([2, 3]), draw.choice([2, 3])
    num_experts = num_groups * draw.choice([3, 4, 5])
    d_model, d_ff, shared_d_ff = 4 * draw.randint(9, 17), draw.randint(9, 31), draw.randint(9, 31)
    fields = {
        **dict.fromkeys(("hidden_size", "d_model"), d_model),
        **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size", "d_ff"), d_ff),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), num_experts),
        **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), top_k),
        **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 2),
        **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), shared_d_ff),
        **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"), shared_d_ff),
        "share_expert_dim": shared_d_ff,
        **dict.fromkeys(("n_group", "num_expert_group"), num_groups),
        "topk_group": num_groups - 1,
        **dict.fromkeys(("num_hidden_layers", "n_layers", "num_layers", "num_decoder_layers"), 2),
        "zero_expert_num": 3,
        **dict.fromkeys(("routed_scaling_factor", "moe_routed_scaling_factor", "route_scale"), 1.7),
        **dict.fromkeys(("router_scaling_factor", "moe_router_scaling_factor"), 1.7),
        "moe_router_logit_softcapping": 0.8,
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense", "sparse"],
        "vocab_size": 32,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        **HEADS,
    }
    return {**fields, **MODELS.get(model_type, {})}


def config_class_of(model_type):
    """Return transformers' class of a configuration. Skip the test if this version has none."""
    import transformers

    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    return transformers.CONFIG_MAPPING[model_type]


def known_fields(config_class, fields):
    """Return the fields that the configuration class has."""
    default = config_class()
    known = {*default.to_dict(), *getattr(default, "attribute_map", {})}
    return {name: value for name, value in fields.items() if name in known}


def save_model(model_type, directory, *, save_original_format=True, **changes):
    """Write a random model in the hub's layout, in small shards. Return its MoE block, a function of x."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config_class = config_class_of(model_type)
    if model_type == "switch_transformers" and Version(transformers.__version__) < Version("5.23"):
        pytest.skip(
            f"transformers {transformers.__version__} may count Switch's capacity over the batch, not a sequence"
        )
    torch.manual_seed(len(model_type))
    fields = known_fields(config_class, {**config_fields(model_type), **changes})
    if model_type == "dbrx":
        sizes = {"moe_num_experts": 6, "moe_top_k": 3, "ffn_hidden_size": 20, "moe_normalize_expert_weights": 2.0}
        fields["ffn_config"] = {**sizes, "hidden_size": fields["d_model"], **changes.get("ffn_config", {})}
    config = config_class(**fields)
    if model_type == "dbrx":
        config.attn_config.rope_theta = 1e4
    # Other implementations of the experts need aligned sizes.
    model = model_class(model_type)._from_config(config, experts_implementation="eager").eval()
    block = Block(model)
    with torch.no_grad():
        for tensor in [*block.parameters(), *block.buffers()]:
            tensor.copy_(torch.randn(tensor.shape) * (tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.3))
    block.save(directory, save_original_format=save_original_format)
    return block


def model_class(model_type):
    """Return the class with a head, if there is one, because its names are those of the hub."""
    import transformers
    from transformers.models.auto import modeling_auto

    if model_type in CLASSES:
        return getattr(transformers, CLASSES[model_type])
    for names in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_MAPPING_NAMES,
    ):
        if model_type in names:
            return getattr(transformers, names[model_type])
    raise AssertionError(model_type)


class Block(nn.Module):
    """The MoE block of layer 1 as one function of x, including a shared expert stored next to the block.

    A block whose router reads another tensor is a function of x and that tensor.
    """

    def __init__(self, model):
        super().__init__()
        modules = dict(model.named_modules())
        number = re.compile(rf"[^\d]*\b{LAYER}\b")  # the first number in the name counts layers
        name = next(name for name in modules if self.is_moe(modules[name]) and number.match(name))
        block = modules[name]
        self.separate_router_input = hasattr(block, "self_attn")  # the block is the decoder layer itself
        self.moe = nn.ModuleList([block.router, block.experts]) if self.separate_router_input else block
        self.shared_mlp = modules.get(name.rpartition(".")[0] + ".shared_mlp")
        self.model = (model,)  # in a tuple, so that it is no submodule of the block

    @staticmethod
    def is_moe(module):
        children = dict(module.named_children())
        return "experts" in children and {"gate", "router"} & set(children)

    def forward(self, x, router_input=None):
        if self.separate_router_input:
            router, experts = self.moe
            _, weights, chosen = router(router_input.flatten(0, 1))
            return experts(x.flatten(0, 1), chosen, weights).view(x.shape)
        y = self.moe(x)
        y = y[0] if isinstance(y, tuple) else y
        y = y.view(x.shape)
        return y if self.shared_mlp is None else y + self.shared_mlp(x)

    def save(self, directory, *, save_original_format=True):
        """Write the model, in small shards."""
        (model,) = self.model
        model.save_pretrained(directory, max_shard_size="60KB", save_original_format=save_original_format)
