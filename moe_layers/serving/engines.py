"""Tables of the layouts in which inference engines read experts, by architecture.

Every entry was compared with `load_weights` in vllm/model_executor/models of vLLM 0.33.0 and in sglang/srt/models of
SGLang 0.5.23. vLLM has no file for flex_olmo and hunyuan_v1_moe, so vLLM's transformers backend loads these models.
Both engines take the names of published checkpoints, and stack each expert's gate and up matrices in one parameter.
"""

from __future__ import annotations

from ..checks import first_three

_PER_EXPERT = (
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_moe_text",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
    "afmoe",
    "exaone_moe",
    "nemotron_h",
)
_W123 = ("mixtral", "phimoe", "minimax_m2", "lfm2_moe")
_OTHERS = {
    "gpt_oss": "interleaved",
    "qwen3_vl_moe_text": "transposed",
    "granitemoe": "linear",
    "granitemoeshared": "linear",
    "granitemoehybrid": "linear",
    "dbrx": "flat",
}
_BOTH = {**dict.fromkeys(_PER_EXPERT, "per_expert"), **dict.fromkeys(_W123, "per_expert_w123"), **_OTHERS}
_ENGINES = {
    "vllm": {
        **_BOTH,
        **dict.fromkeys(("flex_olmo", "jamba"), "per_expert"),
        "llama4_text": "transposed",
    },
    # "llama4_text" is missing, because SGLang drops the experts when it loads this text model without the whole model.
    "sglang": {**_BOTH, "llama4": "transposed"},
}
LAYOUTS = ("huggingface", *_ENGINES)


def engine_layout(engine: str, *model_types: str | None) -> str:
    """Return the layout in which an engine reads the experts of an architecture.

    Args:
        model_types: model_type of the text model, then of the model that contains the text model.

    Raises:
        ValueError: the engine is not known to load this architecture.
    """
    known = _ENGINES[engine]
    for model_type in model_types:
        if model_type in known:
            return known[model_type]
    raise ValueError(
        f"iter_weights: layout {engine!r} must be one that the architecture has, got model_type {model_types[0]!r}; "
        f"known are {first_three(sorted(known))}; 'huggingface' gives the names of save_pretrained"
    )
