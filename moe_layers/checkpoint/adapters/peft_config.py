"""Reads the settings of PEFT's adapter_config.json that determine the meaning of an adapter's factors."""

from __future__ import annotations

import re
from typing import Any

# Settings that change the meaning of lora_A and lora_B in PEFT's files, or that need further tensors.
_VARIANTS = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
# Values of init_lora_weights with which PEFT does not change the weights of the model.
_INITIAL = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


def check_plain(config: dict) -> None:
    """Raise ValueError unless the adapter is plain LoRA."""
    variants = [name for name in _VARIANTS if config.get(name)]
    if config.get("peft_type") != "LORA" or variants:
        raise ValueError(f"lora: an adapter must be plain LoRA, got {config.get('peft_type')} with {variants}")


def check_mergeable(config: dict) -> None:
    """Raise ValueError if the merged weight is not the stored weight [out, in] plus scale * lora_B @ lora_A."""
    got = {name: config[name] for name in ("fan_in_fan_out", "layer_replication") if config.get(name)}
    if (initial := config.get("init_lora_weights")) not in _INITIAL:
        got["init_lora_weights"] = initial
    if got:
        raise ValueError(
            f"lora: merge adds adapters to unchanged weights [out, in], got {got}; PEFT's save_pretrained converts "
            "adapters with such init_lora_weights, given path_initial_model_for_weight_conversion"
        )


def targets(name: str, config: dict) -> bool:
    """Return whether `target_parameters` names the parameter. As PEFT allows, an entry may omit leading parts of the
    dotted name."""
    return any(f".{name}".endswith(f".{target}") for target in config.get("target_parameters") or ())


def targets_below(module: str, config: dict) -> set[str]:
    """Return the names of the parameters of `module` that `target_parameters` lists. Skip entries without the last part
    of the module's name. For the module "mlp.experts", "experts.up_proj" counts, but "up_proj" does not."""
    named = [target.rpartition(".") for target in config.get("target_parameters") or ()]
    return {name for owner, _, name in named if owner and f".{module}".endswith(f".{owner}")}


def rank_and_scale(config: dict, name: str) -> tuple[int, float]:
    """Return the rank and the scale of the adapter of a module or parameter."""
    rank = _of_pattern(config, "rank_pattern", name, config["r"])
    alpha = _of_pattern(config, "alpha_pattern", name, config["lora_alpha"])
    return rank, alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _of_pattern(config: dict, kind: str, name: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of `name`, else `default`. PEFT uses the same rule."""
    patterns = config.get(kind) or {}
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), default)
