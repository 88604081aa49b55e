"""Functions under torch.compile."""

import torch

from moe_kernels.testing import run_with_grads


def assert_compiles(function, inputs, frozen=()):
    """Check that `function` compiles without a graph break, and that results and gradients have the same bits.

    Args:
        inputs, frozen: as in `run_with_grads`.
    """
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected, actual = (run_with_grads(run, inputs, frozen=frozen) for run in (function, compiled))
    assert all(map(torch.equal, actual, expected))
