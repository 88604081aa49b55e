"""GPU memory of a configuration of `benchmarks.expert_parallel`, from its sizes alone."""

from __future__ import annotations

from ..common.shapes import Shape


def peak_bytes(shape: Shape, num_ranks: int, routing: str, itemsize: int = 2) -> int:
    """Return an upper bound on one rank's bytes, for `grouped_mm`, which needs the most of all implementations.

    The weights exist once. The bound adds one implementation's gradients and a copy of them, the inputs of the
    collectives alone, and the tensors of one forward with backward. The latter are, per received row, 10 tensors as
    wide as a token and 8 as wide as an expert; per sent row, one float32 tensor, its gradient and two others. With
    skewed routing, one rank may get all rows. Memory of copies between GPUs is never freed.
    """
    rows_sent = shape.num_rows
    rows = rows_sent * (1 if routing == "even" else num_ranks)
    w_down = shape.num_experts // num_ranks * shape.d_model * shape.d_ff * itemsize
    weights = gradients = copied = 3 * w_down
    made = rows * (10 * shape.d_model + 8 * shape.d_ff) * itemsize
    made += rows_sent * shape.d_model * (2 * 4 + 2 * itemsize)
    collectives = (rows + rows_sent + (num_ranks + 1) * shape.num_tokens) * shape.d_model * itemsize
    tokens = shape.num_tokens * shape.d_model * (3 * 4 + 4 * itemsize)  # float32 while they are drawn
    mapped = ((num_ranks + 1) * shape.d_model * itemsize + num_ranks * shape.top_k * 4) * shape.num_tokens
    mapped = mapped if num_ranks > 1 else 0
    return weights + gradients + copied + made + collectives + tokens + mapped
