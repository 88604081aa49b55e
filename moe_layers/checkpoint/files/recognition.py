"""Selects an MoE block of a checkpoint, and recognises the layout of its experts."""

from __future__ import annotations

from itertools import takewhile

from ...checks import first_three
from .blocks import Block, find_blocks, matching_layouts
from .directory import CheckpointFiles
from .layouts import LAYOUTS, Layout, Sizes

# Words that may precede a layer's number in any model. Other words name a submodel that numbers its own layers.
_COMMON = {"model", "language_model", "text_model", "llm", "transformer", "backbone", "module", "_orig_mod"}
_COMMON |= {"layers", "layer", "blocks", "block", "h"}
_FIRST = {"thinker", "encoder"}  # submodels whose layers may be selected by number, without a prefix


def is_main(block: Block) -> bool:
    """Return whether a block belongs to the language model or, in an encoder-decoder, to the encoder. The prefix of
    such a block has only words of `_COMMON` and `_FIRST` before its first number."""
    return _part(block.prefix) <= _FIRST


def select_block(files: CheckpointFiles, layer: int | str) -> Block:
    """Return the block with the prefix `layer`, or the block of the layer with the index `layer`. If `is_main` holds
    for any block, an index selects among these blocks, otherwise among all blocks. Raise ValueError if no block or
    several blocks match."""
    blocks = find_blocks(files.file_of)
    if isinstance(layer, str):
        found = [block for block in blocks if block.prefix.rstrip(".") == layer.rstrip(".")]
    else:
        main = list(filter(is_main, blocks))
        found = [block for block in main or blocks if block.layer == layer]
    if len(found) == 1:
        return found[0]
    if found:
        prefixes = first_three(block.prefix for block in found)
        raise ValueError(f"checkpoint: layer {layer} must name one MoE block; say which by its prefix: {prefixes}")
    where = first_three(block.prefix for block in blocks) or "none"
    raise ValueError(f"checkpoint: {files.directory} has no MoE block in layer {layer!r}; its MoE blocks: {where}")


def block_of_module(prefixes: list[str], module: str) -> str:
    """Return the prefix of the block that holds a module, such as "model.layers.0.mlp.experts".

    transformers renames parts of the names on disk. The block is therefore matched by prefix, else by layer (such as
    "model.layers.0"), else by layer number. If only the number matches, the names before the number may differ only in
    words of `_COMMON`, such as "model". Raise ValueError if no block or several blocks match.
    """
    name = module[: module.rfind(".") + 1]
    numbered = [prefix for prefix in prefixes if _numbers(prefix) == _numbers(name)]
    layer = [prefix for prefix in numbered if stack_of(prefix) == stack_of(name)]
    number = [prefix for prefix in numbered if _part(prefix) == _part(name)]
    found = [prefix for prefix in layer if prefix == name] or layer or number
    if len(found) != 1:
        raise ValueError(
            f"checkpoint: {module} must have the stack of layers and the number of one MoE block, "
            f"got a checkpoint with {first_three(found or prefixes) or 'none'}"
        )
    return found[0]


def stack_of(name: str) -> str:
    """Return the name of a stack of layers: "model.layers" for "model.layers.0.mlp."."""
    return ".".join(takewhile(lambda part: not part.isdigit(), name.split(".")))


def _numbers(name: str) -> list[str]:
    return [part for part in name.split(".") if part.isdigit()]


def _part(name: str) -> set[str]:
    return set(stack_of(name).split(".")) - _COMMON


def choose_layout(
    block: Block,
    shapes: dict[str, tuple[int, ...]],
    sizes: Sizes,
    *,
    gated: bool,
    published: tuple[str, ...],
    recorded: str | None,
) -> Layout:
    """Return the layout of the block's experts. Tensor names decide first, then shapes, then `published`.

    Args:
        shapes: shapes of those weights of the block that hold all experts.
        published: the result of `published_layouts` for this architecture.
        recorded: the layout that `convert` or `save_checkpoint` wrote into the configuration, or None.

    Raises:
        ValueError: no layout has any of the block's tensor names; the recorded layout does not fit these names; or
            several layouts fit and `published` does not decide between them.
    """
    candidates = _candidates(block, gated, recorded)
    if not candidates:
        return _most_similar(block, gated, published)
    if len(candidates) == 1:
        return candidates[0]
    fitting = [layout for layout in candidates if _fits(layout, shapes, sizes)]
    if not fitting:
        return next((layout for layout in candidates if layout.name in published), candidates[0])
    if (layout := _only_one(fitting, sizes, published)) is not None:
        return layout
    held = first_three(f"{block.prefix}{name} {shape}" for name, shape in sorted(shapes.items()))
    raise ValueError(
        f"checkpoint: the layout of {held} is ambiguous, it may be {' or '.join(layout.name for layout in fitting)}"
    )


def _candidates(block: Block, gated: bool, recorded: str | None) -> list[Layout]:
    """Return the layouts whose tensors all exist in the block. If a layout is recorded, return only that layout."""
    candidates = matching_layouts(block, gated=gated)
    if recorded is None or not candidates:
        return candidates
    candidates = [layout for layout in candidates if layout.name == recorded]
    if not candidates:
        raise ValueError(
            f"checkpoint: config.json records layout {recorded!r} for {block.prefix}, whose tensors have another"
        )
    return candidates


def _only_one(fitting: list[Layout], sizes: Sizes, published: tuple[str, ...]) -> Layout | None:
    """Return the only layout that is both in `fitting` and in `published`, or None if several are.

    If none is in both, return the only layout of `fitting` that is not "interleaved". This fallback returns None if
    "interleaved" is in `published`, or if d_model is d_ff or 2 * d_ff, because such sizes make shapes ambiguous.
    """
    stated = [layout for layout in fitting if layout.name in published]
    if stated:
        return stated[0] if len(stated) == 1 else None
    distinct = sizes.d_model not in (sizes.d_ff, 2 * sizes.d_ff) and "interleaved" not in published
    plain = [layout for layout in fitting if layout.name != "interleaved"]
    return plain[0] if distinct and len(plain) == 1 else None


def _fits(layout: Layout, shapes: dict[str, tuple[int, ...]], sizes: Sizes) -> bool:
    stacked = [key for key in layout.select(bias=False) if not key.per_expert]
    return all(shapes.get(key.name) == key.shape(sizes) for key in stacked)


def _most_similar(block: Block, gated: bool, published: tuple[str, ...]) -> Layout:
    """Return the layout that shares most names with the block. `Planner` then reports the tensors that are missing."""
    patterns = block.patterns()

    def likeness(layout: Layout) -> tuple[int, bool]:
        return sum(key.name in patterns for key in layout.keys), layout.name in published

    best = max((layout for layout in LAYOUTS if layout.gated == gated), key=likeness)
    if not likeness(best)[0]:
        names = first_three(sorted(patterns))
        kind = "gated" if gated else "plain"
        raise ValueError(f"checkpoint: no known layout of {kind} experts has the tensors below {block.prefix}: {names}")
    return best
