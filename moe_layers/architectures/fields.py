"""Reads the fields of a model's `config.json`, with clear errors for missing or malformed fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Objects in a composite model's config.json that may hold the configuration of its language model.
NESTED = ("thinker_config", "text_config", "llm_config", "language_config")
_MISSING = object()


@dataclass(frozen=True)
class ModelConfig:
    """The configuration of a model for one of its layers.

    A field that is a list has one entry per layer. A field that is null counts as missing.

    Attributes:
        values: the JSON object that holds the fields.
        layer: index of the layer whose entry is read from fields that are lists. Default: 0.
        required: names of fields that must exist, even if the caller gives a default.
    """

    values: dict
    layer: int = 0
    required: tuple[str, ...] = ()

    @property
    def model_type(self) -> str:
        return str(self.values.get("model_type", ""))

    def nested(self, name: str) -> ModelConfig:
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise ValueError(f"MoEConfig: config.json must hold an object {name}, got {value!r}")
        return ModelConfig(value, self.layer, self.required)

    def integer(self, *names: str, default: object = _MISSING, minimum: int = 0) -> int:
        """Return the value of the first of the named fields that exists. If none exists, return `default`.

        Raises:
            ValueError: no field exists and no default is given, or the value is not an integer of at least `minimum`.
        """
        name, value = self._find(names, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(f"MoEConfig: {name} in config.json must be an integer >= {minimum}, got {value!r}")
        return value

    def number(self, *names: str, default: object = _MISSING) -> float:
        name, value = self._find(names, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < float("inf"):
            raise ValueError(f"MoEConfig: {name} in config.json must be a finite number, got {value!r}")
        return float(value)

    def flag(self, *names: str, default: object = _MISSING) -> bool:
        name, value = self._find(names, default)
        if not isinstance(value, bool):
            raise ValueError(f"MoEConfig: {name} in config.json must be true or false, got {value!r}")
        return value

    def choice(self, name: str, choices: tuple[object, ...], default: object = _MISSING) -> Any:
        _, value = self._find((name,), default)
        if not isinstance(value, (str, bool, int, float, type(None))) or value not in choices:
            raise ValueError(f"MoEConfig: {name} in config.json must be one of {choices}, got {value!r}")
        return value

    def refuse_unless(self, **expected: object) -> None:
        """Raise ValueError if a field exists with another value than expected."""
        for name, value in expected.items():
            if (actual := self.values.get(name)) is not None and actual != value:
                raise ValueError(f"MoEConfig: {name} in config.json must be {value!r} to be loaded, got {actual!r}")

    def _find(self, names: tuple[str, ...], default: object) -> tuple[str, object]:
        for name in names:
            value = self.values.get(name)
            if isinstance(value, list):
                value = value[self.layer] if self.layer < len(value) else None
            if value is not None:
                return name, value
        if default is _MISSING or not set(names).isdisjoint(self.required):
            raise ValueError(f"MoEConfig: config.json must hold {' or '.join(names)}, got none")
        return names[0], default


def read_config(values: dict, layer: int, prefix: str = "") -> ModelConfig:
    """Return the configuration of the language model, which composite models keep in a nested object.

    `prefix` is the block's path in the model. For each part of the path, such as "talker", the object `talker_config`
    replaces the configuration, provided that this object exists and has a `model_type`.
    """
    for part in prefix.split("."):
        own = values.get(f"{part}_config")
        if isinstance(own, dict) and own.get("model_type"):
            values = own
    queue, found = [values], []
    while queue:
        value = queue.pop(0)
        found.append(value)
        queue += [value[name] for name in NESTED if isinstance(value.get(name), dict)]
    return ModelConfig(next((value for value in reversed(found) if value.get("model_type")), values), layer)
