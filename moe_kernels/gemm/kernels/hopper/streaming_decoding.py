"""Catalog entries and argument checks of the grouped GEMM kernels for quantised weights and few rows per group."""

from __future__ import annotations

import math

import torch

from ....runtime.gluon import OBSTACLE
from ....runtime.launch import Launch
from ....runtime.triton import cdiv
from ...arguments.decoding import DecodingGemmArguments
from ...kernel import SUPPORTED, Kernel, KernelMetadata, Operand, Status, StreamingDesign
from ..families import kernel_name
from ..pointer_decoding import DecodingGemmOperands
from .descriptors import descriptor, form

if OBSTACLE is None:
    from .streaming_decoding_device import streaming_kernel, values_per_64_bytes

_REGISTERS = 128  # maximum number of registers per thread for tiles of 8 rows; lets an SM run 16 warps without spills
_READING = 100  # cost of reading and decoding one value of a weight; multiplying the value by one row costs 2


class StreamingDecodingGemm(Kernel):
    """Computes grouped GEMMs with a quantised B, stored as [G, N, K], and without the optional operand `extra_a`."""

    arguments_class = DecodingGemmArguments
    obstacle = OBSTACLE
    form: str  # name of the quantisation format
    values_per_byte = 1
    cost = 1.0  # measured factor that makes the estimate comparable to that of `DecodingGemm`

    def supports_design(self, args: DecodingGemmArguments) -> Status:
        if args.format.name != self.form:
            return Status(f"decodes {self.form}, got {args.format.name}")
        if not args.transposed:
            return Status("reads weights [G, out, in] along `in`, got a reduction along `out`")
        if args.extra_a is not None:
            return Status("Operand `extra_a`: this kernel takes none")
        if args.bias is not None and args.bias.stride(-1) != 1:
            return Status(f"Operand `bias`: expected axis -1 contiguous, got strides {args.bias.stride()}")
        row_bytes = args.shape[2] // self.values_per_byte
        if args.values.data_ptr() % 16 or row_bytes % 16 or not args.values.numel() or not args.A.numel():
            return Status(f"expected weights in rows of whole 16 bytes, aligned to 16, got {row_bytes} bytes")
        scale_dtypes = torch.float32, torch.bfloat16, torch.float16
        if self.form == "fp8" and (args.format.block != (128, 128) or args.scales.dtype not in scale_dtypes):
            return Status(f"takes floating-point scales of 128x128 blocks, got {args.scales.dtype} of {args.format}")
        return SUPPORTED

    def estimate(self, args: DecodingGemmArguments) -> float:
        """Return the cost of one group for one index along K. Each tile of rows reads the weight again. Tiles are
        counted for the average number of rows plus two standard deviations: most groups have fewer rows. With at most
        one row per group on average, tiles below 128 columns cost less: such tiles make more programs, so that few
        groups can occupy all SMs. Otherwise wider tiles cost less."""
        rows, columns, _ = self.metadata.design.tile_shape
        average = args.rows_per_group
        passes = max(cdiv(math.ceil(average + 2 * math.sqrt(average)), rows), 1)
        misfit = (columns < 128) != (average <= 1)
        return self.cost * passes * (_READING + 2 * rows + 5 * misfit) * args.B.shape[2]

    def _launch(self, args: DecodingGemmArguments) -> Launch:
        assert args.tile_table is not None
        table, design = args.tile_table, self.metadata.design
        num_groups, size_out, size_in = args.shape
        rows, block_out, _ = design.tile_shape
        chunks = design.tile_shape[2] // values_per_64_bytes(self.form)
        row_bytes = size_in // self.values_per_byte
        shape, strides = [num_groups, size_out, row_bytes], [size_out * row_bytes, row_bytes, 1]
        stored = form(shape, strides, [1, block_out, 64 * chunks], 8, 64 * chunks)
        # Triton has no e8m0 dtype, so the kernel reads e8m0 scales as bytes.
        is_e8m0 = args.scales.dtype == torch.float8_e8m0fnu
        return Launch(
            streaming_kernel,
            (table.tiles.shape[0] * cdiv(size_out, block_out),),
            (
                args.A,
                args.A.stride(0),
                args.row_to_token,
                descriptor(args.values, stored),
                args.scales.view(torch.uint8) if is_e8m0 else args.scales,
                args.bias,
                0 if args.bias is None else args.bias.stride(0),
                args.out,
                args.out.stride(0),
                table.bounds,
                table.tiles,
                table.num_tiles,
                num_groups,
            ),
            {
                "OUT": size_out,
                "IN": size_in,
                "FORM": self.form,
                "NAN_255": is_e8m0,
                "TILE_ROWS": table.block_rows,
                "BLOCK_OUT": block_out,
                "ROWS": rows,
                "CHUNKS": chunks,
                "STAGES": design.num_stages,
                "num_warps": design.num_warps,
                **({"maxnreg": _REGISTERS} if rows == 8 else {}),
            },
        )


class StreamingFp8Gemm(StreamingDecodingGemm):
    form = "fp8"


class StreamingMxfp4Gemm(StreamingDecodingGemm):
    form = "mxfp4"
    values_per_byte = 2
    cost = 0.65


def _decoding(cls: type[StreamingDecodingGemm], design: StreamingDesign) -> StreamingDecodingGemm:
    operands = DecodingGemmOperands(Operand(torch.bfloat16, "row", 16), Operand(torch.bfloat16, "row"))
    name = kernel_name("decoding_gemm", "streaming", torch.bfloat16, design, cls.form)
    return cls(KernelMetadata(name, cls, 90, operands, design, max_cc=90, optional_operands=("bias",)))


def _designs(*tiles: tuple[int, int, int, int]) -> list[StreamingDesign]:
    """Return one design for each (rows, columns, stages, warps). A reduction step of each design covers 128 values."""
    return [StreamingDesign((rows, columns, 128), warps, stages, tma=True) for rows, columns, stages, warps in tiles]


_FP8 = _designs((8, 64, 4, 2), (8, 128, 3, 4), (16, 128, 4, 4))
_MXFP4 = _designs((8, 64, 4, 2), (16, 64, 4, 2))

STREAMING_DECODING_KERNELS = (
    *(_decoding(StreamingFp8Gemm, design) for design in _FP8),
    *(_decoding(StreamingMxfp4Gemm, design) for design in _MXFP4),
)
