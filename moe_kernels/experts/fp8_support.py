"""The GPUs on which precision "fp8" runs, and the sizes for which it was measured to be faster."""

from __future__ import annotations

import functools
import warnings

# The smallest sizes at which layers with e4m3 operands were measured to be faster, on compute capability 9.0. With
# fewer rows per expert, quantising the weights once per step costs what the products save.
_LEAST_D_MODEL, _LEAST_D_FF, _LEAST_ROWS = 2048, 768, 1024
_MEASURED_CC = 90

_FIRST_CC = 90  # compute capability from which GPUs run the kernels


def check_fp8_gpu(cc: int) -> None:
    """Raise NotImplementedError unless a GPU of compute capability `cc` runs the kernels of precision "fp8"."""
    if cc < _FIRST_CC:
        raise NotImplementedError(
            f"fused_experts: precision='fp8' needs a GPU of compute capability {_FIRST_CC / 10}, this one has {cc / 10}"
        )


@functools.cache
def warn_if_unmeasured(cc: int, d_model: int, d_ff: int, rows_per_expert: int) -> None:
    """Warn once if no measurement shows that e4m3 operands are faster with these sizes on this GPU."""
    if cc != _MEASURED_CC or d_model < _LEAST_D_MODEL or d_ff < _LEAST_D_FF or rows_per_expert < _LEAST_ROWS:
        message = (
            f'fused_experts: precision="fp8" was measured to be faster on compute capability {_MEASURED_CC / 10}, from '
            f"d_model {_LEAST_D_MODEL}, d_ff {_LEAST_D_FF} and {_LEAST_ROWS} rows per expert on; it may be slower than "
            f"without on {cc / 10}, with {d_model}, {d_ff} and {rows_per_expert}"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=2)
