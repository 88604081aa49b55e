"""The GPU memory that a configuration of `benchmarks.expert_parallel` takes, from its sizes alone."""

from __future__ import annotations

from .shapes import Shape


def peak_bytes(shape: Shape, num_ranks: int, routing: str, itemsize: int = 2) -> int:
    """Bytes of one process at most, of whichever implementation takes the most, which is `grouped_mm`.

    The weights are there once. Beside them are the gradients of one implementation and a copy of these, the inputs of
    the collectives alone, and what one forward with backward makes: of a row received 10 tensors as wide as a token and
    8 as wide as an expert, of a row sent one that is float32, its gradient, and two that are not. With skewed routing
    one process may get all rows there are. What GPUs copy to each other lies in memory that is never given back.
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
