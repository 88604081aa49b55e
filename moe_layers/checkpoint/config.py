"""Reading `config.json`: the part about the language model, with clear errors for what is missing or malformed."""

from __future__ import annotations

from dataclasses import dataclass

# Our entry in config.json: the layout of the experts, where `convert` or `save_checkpoint` wrote them.
RECORD = "moe_layers_layout"

_NESTED = ("thinker_config", "text_config", "llm_config", "language_config")
_MISSING = object()
_FLOAT8_BLOCK = [128, 128]


@dataclass(frozen=True)
class Config:
    """The configuration of a model, seen from one of its layers.

    A field that is a list has one entry per layer. A null is taken as missing.

    Attributes:
        required: names of fields that must be there, also where the reader has a default.
    """

    values: dict
    layer: int = 0
    required: tuple[str, ...] = ()

    @property
    def model_type(self) -> str:
        return str(self.values.get("model_type", ""))

    def nested(self, name: str) -> Config:
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise ValueError(f"checkpoint: config.json must hold an object {name}, got {value!r}")
        return Config(value, self.layer, self.required)

    def integer(self, *names: str, default: object = _MISSING, minimum: int = 0) -> int:
        """The first of the names that is there.

        Raises:
            ValueError: none is there and no default is given, or it is not an integer of at least `minimum`.
        """
        name, value = self._find(names, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(f"checkpoint: {name} in config.json must be an integer >= {minimum}, got {value!r}")
        return value

    def number(self, *names: str, default: object = _MISSING) -> float:
        name, value = self._find(names, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < float("inf"):
            raise ValueError(f"checkpoint: {name} in config.json must be a finite number, got {value!r}")
        return float(value)

    def flag(self, *names: str, default: object = _MISSING) -> bool:
        name, value = self._find(names, default)
        if not isinstance(value, bool):
            raise ValueError(f"checkpoint: {name} in config.json must be true or false, got {value!r}")
        return value

    def choice(self, name: str, choices: tuple[object, ...], default: object = _MISSING) -> object:
        _, value = self._find((name,), default)
        if not isinstance(value, (str, bool, int, float, type(None))) or value not in choices:
            raise ValueError(f"checkpoint: {name} in config.json must be one of {choices}, got {value!r}")
        return value

    def refuse_unless(self, **expected: object) -> None:
        """Raises ValueError for a field that is there and is not as expected."""
        for name, value in expected.items():
            if (actual := self.values.get(name)) is not None and actual != value:
                raise ValueError(f"checkpoint: {name} in config.json must be {value!r} to be loaded, got {actual!r}")

    def _find(self, names: tuple[str, ...], default: object) -> tuple[str, object]:
        for name in names:
            value = self.values.get(name)
            if isinstance(value, list):
                value = value[self.layer] if self.layer < len(value) else None
            if value is not None:
                return name, value
        if default is _MISSING or not set(names).isdisjoint(self.required):
            raise ValueError(f"checkpoint: config.json must hold {' or '.join(names)}, got none")
        return names[0], default


def read_config(values: dict, layer: int) -> Config:
    """The configuration of the language model, which composite models keep in an object of their own."""
    queue, found = [values], []
    while queue:
        value = queue.pop(0)
        found.append(value)
        queue += [value[name] for name in _NESTED if isinstance(value.get(name), dict)]
    return Config(next((value for value in reversed(found) if value.get("model_type")), values), layer)


def float8_block(values: dict, config: Config) -> tuple[int, int]:
    """Rows and columns that share a scale.

    Raises:
        ValueError: another quantisation than float8 by blocks or MXFP4, or a malformed block size.
    """
    quantization = values.get("quantization_config") or config.values.get("quantization_config") or {}
    if not isinstance(quantization, dict):
        raise ValueError(f"checkpoint: quantization_config in config.json must hold an object, got {quantization!r}")
    method = quantization.get("quant_method")
    if method not in (None, "fp8", "mxfp4"):
        raise ValueError(f"checkpoint: quant_method must be 'fp8' or 'mxfp4', got {method!r}")
    block = quantization.get("weight_block_size") or _FLOAT8_BLOCK
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise ValueError(f"checkpoint: weight_block_size must be two positive integers, got {block!r}")
    return block[0], block[1]


def without_quantization(values: dict) -> dict:
    """The configuration of the dequantised model, parts of a composite model included."""
    kept = {name: value for name, value in values.items() if name != "quantization_config"}
    return {
        name: without_quantization(value) if name in _NESTED and isinstance(value, dict) else value
        for name, value in kept.items()
    }
