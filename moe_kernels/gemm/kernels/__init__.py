"""The GEMM kernels, one file per design. Each file ends with a tuple of the design's kernel objects."""

from .batched import BATCHED_KERNELS
from .hopper.gated_gradient import WARP_SPECIALIZED_GRADIENT_KERNELS
from .hopper.grouped import WARP_SPECIALIZED_KERNELS
from .hopper.grouped_scaled import WARP_SPECIALIZED_SCALED_KERNELS
from .hopper.streaming_decoding import STREAMING_DECODING_KERNELS
from .hopper.wgrad import WARP_SPECIALIZED_WGRAD_KERNELS
from .jagged import FLOAT32_WGRAD_KERNELS, JAGGED_KERNELS
from .pointer import POINTER_KERNELS
from .pointer_block_scaled import BLOCK_SCALED_KERNELS
from .pointer_decoding import DECODING_KERNELS
from .pointer_gemm import POINTER_GEMM_KERNELS
from .pointer_list import POINTER_ARRAY_KERNELS
from .pointer_wgrad import POINTER_WGRAD_KERNELS
from .streaming import STREAMING_KERNELS
from .tma import TMA_KERNELS
from .tma_list import TMA_ARRAY_KERNELS
from .tma_wgrad import TMA_WGRAD_KERNELS

ALL_KERNELS = (
    *WARP_SPECIALIZED_KERNELS,
    *WARP_SPECIALIZED_WGRAD_KERNELS,
    *STREAMING_KERNELS,
    *STREAMING_DECODING_KERNELS,
    *TMA_KERNELS,
    *TMA_WGRAD_KERNELS,
    *POINTER_KERNELS,
    *POINTER_WGRAD_KERNELS,
    *TMA_ARRAY_KERNELS,
    *POINTER_ARRAY_KERNELS,
    *JAGGED_KERNELS,
    *FLOAT32_WGRAD_KERNELS,
    *BATCHED_KERNELS,
    *POINTER_GEMM_KERNELS,
    *DECODING_KERNELS,
    *WARP_SPECIALIZED_SCALED_KERNELS,
    *BLOCK_SCALED_KERNELS,
    *WARP_SPECIALIZED_GRADIENT_KERNELS,
)
