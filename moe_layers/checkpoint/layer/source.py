"""The origin of a layer, which is kept to write the layer back under the same names."""

from __future__ import annotations

from dataclasses import dataclass

from ..files.blocks import Block
from ..files.layouts import Key
from .plan import Plan


@dataclass(frozen=True)
class CheckpointSource:
    """Names of the block that a layer was read from.

    Attributes:
        config: the complete `config.json`.
        layout: name of the experts' layout.
        names: full tensor names of the router and other single parameters, by parameter.
        shapes: shapes of these tensors on disk; some biases are [1, E] there.
        shared: key table of the shared expert, with full names.
        dotted_scales: whether the scales of experts are called "w1.scale" instead of "w1.weight_scale_inv".
    """

    config: dict
    prefix: str
    layer: int
    layout: str
    names: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    shared: tuple[Key, ...]
    dotted_scales: bool = False

    @classmethod
    def of(cls, config: dict, block: Block, plan: Plan) -> CheckpointSource:
        others = [fill for fill in plan.fills if fill.experts is None]
        single = [fill for fill in others if fill.key is None]
        return cls(
            config=config,
            prefix=block.prefix,
            layer=block.layer,
            layout=plan.layout.name,
            names={fill.parameter: fill.stored.name for fill in single},
            shapes={fill.parameter: fill.stored.shape for fill in single},
            shared=tuple(Key(fill.stored.name, fill.key.parts) for fill in others if fill.key is not None),
            dotted_scales=any(f.stored.names[-1].endswith(".scale") for f in plan.fills if f.experts is not None),
        )
