"""Keeps the programs of a persistent kernel close together in time.

Programs that run at the same time share operand blocks. If some programs run far ahead of others, the L2 cache drops a
block between its first and its last use. Reading the block from memory again costs time and energy.

Each producer therefore counts its progress in marks. A producer passes a mark every `MARK_STEPS` steps of a grouped
GEMM, or at every tile of a weight gradient. Only long reductions (`LONG_REDUCTION`) have marks. In a weight gradient,
the groups' average reduction length decides. A producer waits if it is more than one mark ahead of the producers'
average. A wait never changes a result, because the atomic additions affect only the counters.

A producer waits only while all programs of the grid run. Some programs may have ended, or cannot start because another
kernel occupies their SM. A producer then reads the counters once at a mark and continues. A wait ends after at most
20000 reads, about 10 ms.

`TileTable.num_tiles` holds two counters. `PASSED` counts the marks of the running producers, once for each thread.
`RUNNING` counts the running producers. Both counters are 0 between two kernels. If two kernels use one table at the
same time, producers may wait too little or too long (at most 20000 reads).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .ring import PRODUCER_THREADS

PASSED = gl.constexpr(2)  # PASSED and RUNNING are indices of counters in `num_tiles`
RUNNING = gl.constexpr(3)

# Value of `passed` before any count was read. It is below every count that `keep_pace` waits for, so that `keep_pace`
# reads the count.
NOT_READ = gl.constexpr(-0x40000000)

# PTX hides the branches from Triton. If Triton 3.8 sees a producer branch on a run-time value, it computes more values
# before the warps split into producer and consumers. The values occupy registers of the consumers, which then spill.
# Every producer thread adds 1, because choosing one thread also makes consumers spill. 8 and 12 are the byte offsets of
# PASSED and RUNNING.
_PASS = gl.constexpr("""{
    .reg .pred reads, passes, waits;
    .reg .b32 left, running, programs, polls;
    setp.ne.s32 reads, $2, 0;
    setp.ne.s32 passes, $3, 0;
    mov.u32 programs, %nctaid.x;
    mov.b32 polls, 20000;
    mov.b32 $0, $5;
    @reads ld.volatile.global.s32 $0, [$1 + 8];
    @!passes bra DONE;
    red.relaxed.gpu.global.add.s32 [$1 + 8], 1;
WAIT:
    sub.s32 left, $4, $0;
    setp.le.s32 waits, left, 0;
    @waits bra DONE;
    ld.volatile.global.s32 $0, [$1 + 8];
    ld.volatile.global.s32 running, [$1 + 12];
    sub.s32 polls, polls, 1;
    setp.eq.s32 waits, running, programs;
    setp.gt.and.s32 waits, polls, 0, waits;
    @waits bra WAIT;
DONE:
}""")


@gluon.jit
def start_pace(num_tiles_ptr):
    """Count a producer as running. If `num_tiles_ptr` is None, do nothing."""
    if num_tiles_ptr is not None:
        gl.atomic_add(num_tiles_ptr + RUNNING, 1, sem="relaxed", scope="gpu")


@gluon.jit
def keep_pace(
    num_tiles_ptr,
    mark,  # number of marks that this producer passed in earlier calls
    passes,  # whether the producer goes past a mark in this call
    is_next,  # whether the producer goes past a mark in the next call
    passed,  # result of the previous call, or NOT_READ
):
    """If `passes`, count a mark. Then wait until the producers have passed `mark` marks on average. If `is_next`, start
    to read the count of all marks for the next call. Return the newest count (`passed` if `num_tiles_ptr` is None)."""
    if num_tiles_ptr is not None:
        # Subtract one mark, because the count of an earlier call lacks the mark that this producer adds now. Counts
        # read during the wait include this mark, and therefore end the wait one mark early.
        target = (mark * gl.num_programs(0) - 1) * PRODUCER_THREADS
        operands = [num_tiles_ptr, is_next.to(gl.int32), passes.to(gl.int32), target, passed]
        passed = gl.inline_asm_elementwise(_PASS, "=&r,l,r,r,r,r", operands, dtype=gl.int32, is_pure=False, pack=1)
    return passed


@gluon.jit
def end_pace(num_tiles_ptr, num_marks):
    """Count a producer as ended, and take back its marks. If `num_tiles_ptr` is None, do nothing."""
    if num_tiles_ptr is not None:
        gl.atomic_add(num_tiles_ptr + RUNNING, -1, sem="relaxed", scope="gpu")
        gl.atomic_add(num_tiles_ptr + PASSED, -PRODUCER_THREADS * num_marks, sem="relaxed", scope="gpu")
