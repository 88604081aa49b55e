"""Layer sizes of real models, by name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moe_kernels.specs import is_gated


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer call."""

    name: str
    num_tokens: int
    d_model: int
    d_ff: int
    num_experts: int
    top_k: int
    activation: str = "swiglu"

    @property
    def num_rows(self) -> int:
        return self.num_tokens * self.top_k

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes by the letters that results and shape comments use."""
        numbers = self.num_tokens, self.d_model, self.d_ff, self.num_experts, self.top_k
        return dict(zip("TDFEK", numbers, strict=True))

    @property
    def up_columns(self) -> int:
        """Return the number of the up-projection's columns: gate and up, or up alone with a plain activation."""
        return (1 + is_gated(self.activation)) * self.d_ff

    @property
    def num_weights(self) -> int:
        """Return the number of values in the experts' weights."""
        return self.num_experts * self.d_model * (self.up_columns + self.d_ff)

    def with_tokens(self, num_tokens: int) -> Shape:
        """Return the layer with another number of tokens. The name ends with this number."""
        return replace(self, name=f"{self.name}-t{num_tokens}", num_tokens=num_tokens)

    def of_one_process(self, num_ranks: int) -> Shape:
        """Return the layer with the experts of one of `num_ranks` ranks, and the same number of rows."""
        num_experts = self.num_experts // num_ranks
        top_k = min(self.top_k, num_experts)
        return replace(self, num_tokens=self.num_rows // top_k, num_experts=num_experts, top_k=top_k)


def by_name(*shapes: Shape) -> dict[str, Shape]:
    return {shape.name: shape for shape in shapes}


SHAPES = by_name(
    Shape("4096x1024-e128", 32768, 4096, 1024, 128, 8),
    Shape("qwen3-30b-a3b", 16384, 2048, 768, 128, 8),
    Shape("fine-grained", 24576, 1536, 256, 128, 8),
    Shape("olmoe", 16384, 2048, 1024, 64, 8),
    Shape("mixtral-8x7b", 8192, 4096, 14336, 8, 2),
    Shape("qwen3-next", 16384, 2048, 512, 512, 10),
    Shape("gpt-oss-20b", 16384, 2880, 2880, 32, 4),
)
TINY = Shape("tiny", 40, 64, 32, 8, 2)

# Published sizes of further models. No table has measurements for them. Layers "-epN" have the experts of one of N
# ranks, and each token chooses as many experts as in the model.
PUBLISHED = by_name(
    Shape("granite-3.0-3b-a800m", 16384, 1536, 512, 40, 8),
    Shape("deepseek-v2-lite", 16384, 2048, 1408, 64, 6),
    Shape("deepseek-v3-ep8", 16384, 7168, 2048, 256, 8).of_one_process(8),
    Shape("kimi-k2-ep16", 16384, 7168, 2048, 384, 8).of_one_process(16),
    Shape("minimax-m2", 16384, 3072, 1536, 256, 8),
    Shape("glm-4.5-air", 16384, 4096, 1408, 128, 8),
    Shape("ernie-4.5-21b", 16384, 2560, 1536, 64, 6),
    Shape("hunyuan-a13b", 16384, 4096, 3072, 64, 8),
    Shape("phi-3.5-moe", 16384, 4096, 6400, 16, 2),
    Shape("llama4-scout", 16384, 5120, 8192, 16, 1),
    Shape("jamba", 16384, 4096, 14336, 16, 2),
    Shape("dbrx", 16384, 6144, 10752, 16, 4),
    Shape("lfm2-8b", 16384, 2048, 1792, 32, 4),
    Shape("qwen2-moe-57b", 16384, 3584, 2560, 64, 8),
    Shape("arctic", 16384, 7168, 4864, 128, 2),
    Shape("nemotron-3-nano", 16384, 2688, 1856, 128, 6, "relu_squared"),
)
TOKENS = (16384, 4096, 65536)  # numbers of tokens of each layer in UNSEEN, in the order of measurement
UNSEEN = by_name(*(shape.with_tokens(number) for number in TOKENS for shape in (PUBLISHED | SHAPES).values()))

# The widths of off-grid shapes are multiples of 8 but not of 64. TMA cannot address the rows of no-tma shapes, because
# these rows do not start at multiples of 16 bytes.
OFF_GRID = by_name(
    Shape("off-grid-2056x712", 10007, 2056, 712, 60, 6),
    Shape("off-grid-3080x1352", 16384, 3080, 1352, 32, 4),
    Shape("off-grid-1544x520", 32768, 1544, 520, 40, 8),
    Shape("off-grid-4104x200", 16384, 4104, 200, 128, 8),
    Shape("granite-like", 32768, 1536, 512, 40, 8),
    Shape("no-tma-2050x770", 16384, 2050, 770, 64, 6),
    Shape("no-tma-2047x1023", 8191, 2047, 1023, 64, 8),
)
GROUPS = {"tuned": SHAPES, "published": PUBLISHED, "unseen": UNSEEN, "off-grid": OFF_GRID}


def add_option(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add `--shapes`, whose values `shapes_named` reads. Default: `names`."""
    groups = f"names of layers, or of groups: {', '.join(GROUPS)}; default: {' '.join(names)}"
    parser.add_argument("--shapes", nargs="+", metavar="NAME", default=names, help=groups)


def shapes_named(names: Sequence[str]) -> list[Shape]:
    """Return the shapes of these names. The name of a group stands for all of its shapes."""
    known = {shape.name: [shape] for shape in (TINY, *(shape for group in GROUPS.values() for shape in group.values()))}
    known |= {name: list(group.values()) for name, group in GROUPS.items()}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"shapes: must be among {', '.join(known)}, got {', '.join(unknown)}")
    return [shape for name in names for shape in known[name]]
