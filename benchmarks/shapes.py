"""Layer sizes of real models, by name."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer call."""

    name: str
    num_tokens: int
    d_model: int
    d_ff: int
    num_experts: int
    top_k: int

    @property
    def num_rows(self) -> int:
        return self.num_tokens * self.top_k

    def of_one_process(self, num_ranks: int) -> Shape:
        """Return the layer with the experts of one of `num_ranks` ranks, and as many rows."""
        num_experts = self.num_experts // num_ranks
        top_k = min(self.top_k, num_experts)
        return replace(self, num_tokens=self.num_rows // top_k, num_experts=num_experts, top_k=top_k)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("4096x1024-e128", 32768, 4096, 1024, 128, 8),
        Shape("qwen3-30b-a3b", 16384, 2048, 768, 128, 8),
        Shape("fine-grained", 24576, 1536, 256, 128, 8),
        Shape("olmoe", 16384, 2048, 1024, 64, 8),
        Shape("mixtral-8x7b", 8192, 4096, 14336, 8, 2),
        Shape("qwen3-next", 16384, 2048, 512, 512, 10),
        Shape("gpt-oss-20b", 16384, 2880, 2880, 32, 4),
    )
}
TINY = Shape("tiny", 40, 64, 32, 8, 2)
