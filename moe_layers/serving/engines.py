"""The layout of experts that the loaders of inference engines read, by architecture.

vLLM: `load_weights` in vllm/model_executor/models; SGLang: `load_weights` in python/sglang/srt/models. Both take the
names of published checkpoints, and stack gate and up of each expert in a parameter of their own. The rows qwen3_moe,
qwen3_vl_moe_text and gpt_oss were compared with these files. The other rows are the layouts of published checkpoints of
architectures that the engines list.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..checks import check_choice, first_three

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
    "llama4_text": "transposed",
    "qwen3_vl_moe_text": "transposed",
    "granitemoe": "linear",
    "dbrx": "flat",
}
_BOTH = {**dict.fromkeys(_PER_EXPERT, "per_expert"), **dict.fromkeys(_W123, "per_expert_w123"), **_OTHERS}
_ENGINES = {
    "vllm": {
        **_BOTH,
        **dict.fromkeys(("flex_olmo", "dots1", "jamba"), "per_expert"),
        **dict.fromkeys(("granitemoeshared", "granitemoehybrid"), "linear"),
    },
    "sglang": _BOTH,
}
LAYOUTS = ("huggingface", *_ENGINES)


def check_layout(layout: str) -> None:
    check_choice("iter_weights", "layout", layout, LAYOUTS)


def engine_layout(engine: str, model_type: str | None) -> str:
    """Return the layout of experts that an engine reads.

    Raises:
        ValueError: the engine is not known to load this architecture.
    """
    known = _ENGINES[engine]
    if model_type not in known:
        raise ValueError(
            f"iter_weights: layout {engine!r} must be one that the architecture has, got model_type {model_type!r}; "
            f"known are {first_three(sorted(known))}; 'huggingface' gives the names of save_pretrained"
        )
    return known[model_type]


def check_engine(engine: str, model_type: str | None, prefix: str, found: Iterable[str]) -> None:
    """Raise ValueError unless the layout of a block's tensors may be that of the engine."""
    expected, names = engine_layout(engine, model_type), list(found)
    if expected not in names:
        raise ValueError(
            f"iter_weights: {engine} reads the experts of {model_type} in the layout {expected!r}, but this version "
            f"of transformers writes {prefix} as {names or 'an unknown layout'}"
        )
