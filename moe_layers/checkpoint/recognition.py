"""Which block of a checkpoint is meant, and which layout its experts have."""

from __future__ import annotations

from .blocks import Block, find_blocks, matching_layouts
from .files import CheckpointFiles
from .layouts import LAYOUTS, Layout, Sizes

# Parts of a model whose layers are counted apart from those of the language model's (or encoder's) stack.
_BESIDE = ("mtp", "decoder", "talker", "code_predictor")


def select_block(files: CheckpointFiles, layer: int | str) -> Block:
    """The block of a layer, or the one with the given prefix.

    A number counts the layers of the language model, in an encoder-decoder those of the encoder.

    Raises:
        ValueError: there is no such block, or several.
    """
    blocks = find_blocks(files.file_of)
    if isinstance(layer, str):
        found = [block for block in blocks if block.prefix.rstrip(".") == layer.rstrip(".")]
    else:
        found = [block for block in blocks if block.layer == layer]
        main = [block for block in found if not set(_BESIDE) & set(block.prefix.split("."))]
        found = main or found
    if len(found) == 1:
        return found[0]
    if found:
        prefixes = ", ".join(block.prefix for block in found)
        raise ValueError(f"checkpoint: layer {layer} must name one MoE block; say which by its prefix: {prefixes}")
    where = ", ".join(block.prefix for block in blocks) or "none"
    raise ValueError(f"checkpoint: {files.directory} has no MoE block in layer {layer!r}; its MoE blocks: {where}")


def choose_layout(
    block: Block,
    shapes: dict[str, tuple[int, ...]],
    sizes: Sizes,
    *,
    gated: bool,
    published: tuple[str, ...],
    recorded: str | None,
) -> Layout:
    """The layout of the block's experts; shapes settle what names leave open, and publication what shapes do.

    Args:
        shapes: of the weights of the block that hold all experts.
        published: the layouts of this architecture, among those with the same names.
        recorded: what our own `convert` and `save_checkpoint` wrote into the configuration.

    Raises:
        ValueError: no layout has these names, or several fit and nothing says which.
    """
    candidates = matching_layouts(block, gated=gated)
    if recorded is not None and candidates:
        candidates = [layout for layout in candidates if layout.name == recorded]
        if not candidates:
            raise ValueError(
                f"checkpoint: config.json says that {block.prefix} has layout {recorded!r}, which it has not"
            )
    if not candidates:
        return _most_similar(block, gated, published)
    if len(candidates) == 1:
        return candidates[0]
    fitting = [layout for layout in candidates if _fits(layout, shapes, sizes)]
    stated = [layout for layout in fitting if layout.name in published]
    if len(stated) == 1:
        return stated[0]
    if not fitting:
        return next((layout for layout in candidates if layout.name in published), candidates[0])
    told_apart = sizes.d_model not in (sizes.d_ff, 2 * sizes.d_ff) and "interleaved" not in published
    plain = [layout for layout in fitting if layout.name != "interleaved"]
    if not stated and told_apart and len(plain) == 1:
        return plain[0]
    held = ", ".join(f"{block.prefix}{name} {shape}" for name, shape in sorted(shapes.items()))
    raise ValueError(
        f"checkpoint: the layout of {held} is ambiguous, it may be {' or '.join(layout.name for layout in fitting)}"
    )


def _fits(layout: Layout, shapes: dict[str, tuple[int, ...]], sizes: Sizes) -> bool:
    stacked = [key for key in layout.select(bias=False) if not key.per_expert]
    return all(shapes.get(key.name) == key.shape(sizes) for key in stacked)


def _most_similar(block: Block, gated: bool, published: tuple[str, ...]) -> Layout:
    """For naming what is missing: the layout of which most tensors are there."""
    patterns = block.patterns()

    def likeness(layout: Layout) -> tuple[int, bool]:
        return sum(key.name in patterns for key in layout.keys), layout.name in published

    best = max((layout for layout in LAYOUTS if layout.gated == gated), key=likeness)
    if not likeness(best)[0]:
        names = ", ".join(sorted(patterns))
        kind = "gated" if gated else "plain"
        raise ValueError(f"checkpoint: no known layout of {kind} experts has the tensors below {block.prefix}: {names}")
    return best
