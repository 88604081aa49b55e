"""Building blocks of the warp-specialised Hopper kernels, for Gluon in Triton 3.6 to 3.9.

One warpgroup is the producer. The producer copies both operands to shared memory, several steps ahead. Two warpgroups
are consumers. Each consumer computes half of the rows of a tile with wgmma. A consumer writes a finished tile to global
memory while the tensor cores already work on the next tile. The finished tile stays in registers as two rounded halves.
Each of the next tile's first steps writes one part of the finished tile.

In a ragged descriptor, the row coordinate reaches its bound at the end of a group. The hardware therefore clips reads
and writes at the end of the group (`ragged.py`). Gathered rows are copied asynchronously, 16 bytes at a time.
"""

# This file omits `from __future__ import annotations`, because `aggregate` needs the types of fields, not strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ....runtime.gluon import aggregate, copy_load, tma_load, tma_store

ROW_BOUND = gl.constexpr(0x40000000)  # 2**30, the bound of the row coordinate in a ragged descriptor
PRODUCER_THREADS = gl.constexpr(128)


@aggregate
class Ring:
    """Shared-memory buffers (slots) between the producer and the consumers. Reduction steps use the slots in turn."""

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # one barrier per slot, which signals that both operands have arrived
    empty: gl.shared_memory_descriptor  # one barrier per slot, which signals that both consumers have read the operands
    slots: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, a, b, full, empty, slots):
        self.a = a
        self.b = b
        self.full = full
        self.empty = empty
        self.slots = gl.constexpr(slots)


@gluon.jit
def make_ring(a, b, SLOTS: gl.constexpr, GATHER: gl.constexpr):
    """Return a ring over buffers [SLOTS, ...] of both operands. With GATHER, each producer thread also signals `full`
    when the rows that the thread copies have arrived."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1 + (PRODUCER_THREADS if GATHER else 0))
        mbarrier.init(empty.index(i), count=2)
    return Ring(a, b, full, empty, SLOTS)


@gluon.jit
def buffers(desc, SLOTS: gl.constexpr):
    """Allocate shared memory for SLOTS blocks of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [SLOTS] + desc.block_type.shape, desc.layout)  # noqa: RUF005


@gluon.jit
def gather_buffers(dtype, SLOTS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Allocate shared memory for SLOTS blocks of gathered rows."""
    BITS: gl.constexpr = dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=BITS, rank=2)
    return gl.allocate_shared_memory(dtype, [SLOTS, ROWS, COLUMNS], layout)


@gluon.jit
def free_slot(ring, step):
    """Producer: wait until the consumers have released the slot of a step, and return the slot."""
    slot = step % ring.slots
    mbarrier.wait(ring.empty.index(slot), (step // ring.slots & 1) ^ 1)
    return slot


@gluon.jit
def load_step(ring, step, a_desc, a_at, b_desc, b_at):
    """Producer: start to copy both operands of a step."""
    slot = free_slot(ring, step)
    ready = ring.full.index(slot)
    mbarrier.expect(ready, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
    tma_load(a_desc, a_at, ready, ring.a.index(slot))
    tma_load(b_desc, b_at, ready, ring.b.index(slot))


@gluon.jit
def load_block(ready, desc, at, buffer):
    """Producer: start to copy a block of the operand that is not gathered."""
    mbarrier.expect(ready, desc.block_type.nbytes)
    tma_load(desc, at, ready, buffer)


@gluon.jit
def gather_block(ready, pointers, mask, buffer):
    """Producer: start the copies of a block of gathered rows. The buffer gets zeros where `mask` is false."""
    copy_load(buffer, pointers, mask)
    async_copy.mbarrier_arrive(ready, increment_count=False)


@gluon.jit
def moved(pointers, num_columns):
    """Return the pointers [rows, columns] of a gather, moved to the right by `num_columns`. Without assembly, the
    compiler would move each pointer by a multiply-add right before the copy. A forward pass would then take 1 to 6 %
    longer on an H100, presumably because multiply-adds wait for the unit that starts tensor-core instructions."""
    BITS: gl.constexpr = pointers.dtype.element_ty.primitive_bitwidth
    num_bytes = num_columns.to(gl.int64) * (BITS // 8)
    at = gl.inline_asm_elementwise(
        "add.s64 $0, $1, $2;", "=l,l,l", [pointers, num_bytes], dtype=pointers.dtype, is_pure=True, pack=1
    )
    # The compiler cannot derive the alignment of results of assembly, but needs the alignment for 16-byte copies.
    return gl.max_contiguous(gl.multiple_of(at, [16, 16]), [1, 128 // BITS])


@gluon.constexpr_function
def gather_layout(columns, bits=16):
    """Return the layout in which one warp instruction copies whole rows of `columns` elements, 16 bytes per thread."""
    each = 128 // bits
    threads = columns // each
    return gl.BlockedLayout([1, each], [32 // threads, threads], [4, 1], [1, 0])


@gluon.jit
def wait_step(ring, step):
    """Consumer: wait for the operands of a step, and return the slot of the step."""
    slot = step % ring.slots
    mbarrier.wait(ring.full.index(slot), step // ring.slots & 1)
    return slot


@gluon.jit
def release_previous(ring, step, pred=True):
    """Consumer: release the slot of the step before `step` if `pred`."""
    mbarrier.arrive(ring.empty.index((step + ring.slots - 1) % ring.slots), count=1, pred=pred)


@gluon.jit
def pinned(value):
    """Return a 16-bit value unchanged. The assembly keeps the compiler from moving the rounding that made the value. If
    the rounding were among the next tile's wgmma instructions, the code would wait after every wgmma."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=value.dtype, is_pure=False, pack=2)


@gluon.jit
def opaque(value):
    """Return an int32 unchanged. The assembly hides from the compiler how the value was computed."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def halves(value):
    """Return the left and right half of the columns."""
    return value.reshape(value.shape[0], 2, value.shape[1] // 2).permute(0, 2, 1).split()


@gluon.jit
def joined(left, right):
    """Return the left and the right half joined along the columns, as the inverse of `halves`."""
    return gl.join(left, right).permute(0, 2, 1).reshape(left.shape[0], 2 * left.shape[1])


@gluon.jit
def packed(value):
    """Pack neighbouring 16-bit columns into 32-bit values. Inline assembly prevents the compiler from moving the
    packing to another point of the program (see `pinned`)."""
    left, right = value.to(gl.int16, bitcast=True).reshape(value.shape[0], value.shape[1] // 2, 2).split()
    return gl.inline_asm_elementwise(
        "mov.b32 $0, {$1, $2};", "=r,h,h", [left, right], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def unpacked(pairs, DTYPE: gl.constexpr):
    """Return the 16-bit columns that `packed` packed. Without the assembly, the compiler would unpack a finished
    tile before the next tile's first step, and run out of registers."""
    pairs = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [pairs], dtype=gl.int32, is_pure=False, pack=1)
    left = pairs.to(gl.int16).to(DTYPE, bitcast=True)
    right = (pairs >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.join(left, right).reshape(pairs.shape[0], 2 * pairs.shape[1])


@gluon.jit
def write(value, desc, at, buffer):
    """Start to copy a [rows, columns] value to global memory through this warpgroup's staging buffer."""
    stage(value, buffer, 0, 1)
    send(desc, at, buffer)


@gluon.jit
def stage(value, buffer, PIECE: gl.constexpr, PIECES: gl.constexpr):
    """Write the column piece PIECE (of PIECES) to the staging buffer. Piece 0 must be written first, because only the
    write of piece 0 waits until the previous `send` has read the buffer."""
    if PIECE == 0:
        tma.store_wait(0)
    COLUMNS: gl.constexpr = value.shape[1]
    target = buffer.reshape([value.shape[0], PIECES * COLUMNS])
    if PIECES > 1:
        target = target.slice(PIECE * COLUMNS, COLUMNS, 1)
    target.store(value)


@gluon.jit
def send(desc, at, buffer):
    """Start the copy of the staging buffer to global memory."""
    fence_async_shared()
    tma_store(desc, at, buffer)
