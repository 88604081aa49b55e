"""Surveys the MoE blocks of a checkpoint from the headers of its files. The architecture may be unknown."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...architectures import ARCHITECTURES, RECORD, ModelConfig, read_config
from ..files.blocks import ROUTER_WEIGHT, Block, find_blocks, matching_layouts
from ..files.directory import CONFIG, CheckpointFiles, read_json
from ..files.layouts import Layout, Sizes, published_layouts
from ..files.quantization_config import float8_block
from ..files.stored_weights import Stored, describe_all


@dataclass(frozen=True)
class BlockSurvey:
    """A block, and the layouts that its tensors may have.

    Attributes:
        layouts: the layouts that fit. There are several if names, shapes and architecture do not decide between them.
        sizes: the sizes of the experts according to each layout in `layouts`.
        bias: whether the experts have biases.
        experts: the experts' weights, zero experts included, by their names without the block's prefix.
        num_routed: number of experts that the router chooses from, without zero experts.
        config: the configuration of the model, with the index of the block's layer.
        num_bytes: number of bytes of all weights of the block on disk.
        wrong: if no layout fits, the errors of the layout with the fewest errors; otherwise empty.
    """

    block: Block
    layouts: tuple[Layout, ...]
    sizes: tuple[Sizes, ...]
    bias: bool
    experts: dict[str, Stored]
    num_routed: int
    config: ModelConfig
    num_bytes: int
    wrong: tuple[str, ...]


def survey(files: CheckpointFiles) -> list[BlockSurvey]:
    """Return a survey of each MoE block. Raise ValueError if config.json or another file is missing or damaged."""
    values = read_json(files.directory / CONFIG)
    files.require(files.file_of)
    return [_survey_block(files, block, values) for block in find_blocks(files.file_of)]


def _survey_block(files: CheckpointFiles, block: Block, values: dict) -> BlockSurvey:
    config = read_config(values, block.layer, block.prefix)
    where = f"block {block.prefix} of {files.directory}"
    described = describe_all(files, block.weights, float8_block(values, config), where)
    architecture = ARCHITECTURES.get(config.model_type)
    num_zero = architecture.num_zero_experts(config) if architecture else 0
    router = next(described[name].shape for name in ROUTER_WEIGHT if name in described)
    fitting, wrong = _fitting(block, described, router, num_zero)
    fitting = _narrow(fitting, values.get(RECORD), config)
    layouts, sizes = zip(*fitting, strict=True) if fitting else ((), ())
    bias = any(_has_bias(block, layout) for layout in layouts)
    names = {name for layout, size in fitting for name in _names(layout, bias, size.num_experts + num_zero)}
    return BlockSurvey(
        block=block,
        layouts=layouts,
        sizes=sizes,
        bias=bias,
        experts={name: stored for name, stored in described.items() if name in names},
        num_routed=router[0] - num_zero if router else 0,
        config=config,
        num_bytes=sum(stored.num_bytes for stored in described.values()),
        wrong=tuple(wrong),
    )


def _fitting(
    block: Block, described: dict[str, Stored], router: tuple[int, ...], num_zero_experts: int
) -> tuple[list[tuple[Layout, Sizes]], list[str]]:
    """Return (layout, experts' sizes) for each layout that fits. If none fits, also return the errors of the layout
    with the fewest errors."""
    matches = [
        (layout, *_match(block, described, layout, router, num_zero_experts)) for layout in matching_layouts(block)
    ]
    fitting = [(layout, sizes) for layout, sizes, wrong in matches if sizes is not None and not wrong]
    return fitting, [] if fitting else min((wrong for _, _, wrong in matches), key=len, default=[])


def _has_bias(block: Block, layout: Layout) -> bool:
    patterns = block.patterns()
    return any(key.bias and key.name in patterns for key in layout.keys)


def _names(layout: Layout, bias: bool, num_experts: int) -> set[str]:
    return {name for key in layout.select(bias=bias) for _, name in key.names(num_experts)}


def _match(
    block: Block, described: dict[str, Stored], layout: Layout, router: tuple[int, ...], num_zero_experts: int
) -> tuple[Sizes | None, list[str]]:
    """Return the experts' sizes according to this layout (None if unknown), and errors for tensors that do not fit."""
    numbers = block.expert_numbers()
    down = next(key for key in layout.select(bias=False) if key.parts == ("down",))
    name = down.name_of(min(numbers, default=0))
    if len(router) != 2 or name not in described or len(described[name].shape) < 2:
        return None, [f"missing: {block.prefix}{name}, or not a matrix"]
    if num_zero_experts or down.flat:
        num_experts = router[0] - num_zero_experts
    else:
        num_experts = max(numbers) + 1 if down.per_expert else described[name].shape[0]
    if num_experts < 1:
        return None, [f"wrong shape: the router of {block.prefix} is {router}, with {num_zero_experts} zero experts"]
    rows, columns = described[name].shape[-2:]
    if down.flat:
        rows //= num_experts
    d_model, d_ff = (columns, rows) if down.transposed else (rows, columns)
    wrong = []
    if d_model != router[1] and "fc1_latent_proj.weight" not in described:
        wrong.append(f"wrong shape: {block.prefix}{name} has d_model {d_model}, the router {router[1]}")
    sizes = Sizes(num_experts, d_ff, d_model)
    return sizes, wrong + _misfits(block, described, layout, sizes, num_zero_experts)


def _misfits(
    block: Block, described: dict[str, Stored], layout: Layout, sizes: Sizes, num_zero_experts: int
) -> list[str]:
    """Return errors for missing, wrongly sized and left-over tensors. Only the tensors of gate and up may
    also hold the weights of zero-computation experts."""
    wrong = []
    with_zero_experts = replace(sizes, num_experts=sizes.num_experts + num_zero_experts)
    for key in layout.select(bias=_has_bias(block, layout)):
        shapes = [key.shape(sizes)] if key.parts == ("down",) else [key.shape(sizes), key.shape(with_zero_experts)]
        for _, name in key.names(sizes.num_experts):
            if name not in described:
                wrong.append(f"missing: {block.prefix}{name} {shapes[0]}")
            elif described[name].shape not in shapes:
                wrong.append(f"wrong shape: {block.prefix}{name} is {described[name].shape}, must be {shapes[0]}")
        if key.parts == ("down",):
            numbers = sorted(number for number in block.expert_numbers() if number >= sizes.num_experts)
            names = map(key.name_of, numbers)
            wrong += [f"left over: {block.prefix}{name}" for name in names if name in described]
    return wrong


def _narrow(
    fitting: list[tuple[Layout, Sizes]], recorded: str | None, config: ModelConfig
) -> list[tuple[Layout, Sizes]]:
    """Keep the layout that config.json records. Without a record, drop layouts that a known architecture rules out."""
    if recorded is not None:
        return [(layout, sizes) for layout, sizes in fitting if layout.name == recorded]
    if config.model_type not in ARCHITECTURES or len(fitting) < 2:
        return fitting
    names = published_layouts(config.model_type)
    published = [(layout, sizes) for layout, sizes in fitting if layout.name in names]
    plain = [(layout, sizes) for layout, sizes in fitting if layout.name != "interleaved"]
    return published or ([] if "interleaved" in names else plain) or fitting
