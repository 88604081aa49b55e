"""Keeps the programs of a persistent kernel close together in time.

Programs that run at the same time share operand blocks. If some programs run far ahead of others, the L2 cache drops a
block between its first and its last use, and the block is read from memory again. This costs time and energy.

Each producer therefore passes a mark every few steps. A producer that is ahead of the average by more than one mark
waits. The wait changes only when a result is computed, never the result.

A producer waits only while all programs of the grid run. If some programs cannot start, because another kernel occupies
their SM, or have ended already, no producer waits. Every wait ends after `MOST_POLLS` reads in any case.

`TileTable.num_tiles` holds the two counters: marks passed by all producers, and number of running producers. Both are 0
between two kernels. If two kernels use one table at the same time, the numbers do not match, and no producer waits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MARK_STEPS = gl.constexpr(8)  # number of steps from one mark to the next
MOST_POLLS = gl.constexpr(20000)  # some 10 ms
PASSED = gl.constexpr(2)  # places of the counters in `num_tiles`
RUNNING = gl.constexpr(3)


@gluon.jit
def start_pace(num_tiles_ptr):
    """Count a producer as running. Without a table, `num_tiles_ptr` is None, and this function does nothing."""
    if num_tiles_ptr is not None:
        gl.atomic_add(num_tiles_ptr + RUNNING, 1, sem="relaxed", scope="gpu")


@gluon.jit
def read_marks(num_tiles_ptr):
    """Return the number of marks passed by all producers. `pass_mark` uses it a step later, when it has arrived."""
    return gl.load(num_tiles_ptr + PASSED, volatile=True)


@gluon.jit
def pass_mark(
    num_tiles_ptr,
    mark,  # number of marks that this producer has passed
    passed,  # result of `read_marks` during the step before
):
    """Pass a mark. First wait until all producers together have passed `mark` marks each, on average."""
    gl.atomic_add(num_tiles_ptr + PASSED, 1, sem="relaxed", scope="gpu")
    target = mark * gl.num_programs(0) - 1  # `passed` lacks the mark just counted
    running = gl.num_programs(0)
    polls = 0
    while passed < target and running == gl.num_programs(0) and polls < MOST_POLLS:
        passed = read_marks(num_tiles_ptr)
        running = gl.load(num_tiles_ptr + RUNNING, volatile=True)
        polls += 1


@gluon.jit
def keep_pace(num_tiles_ptr, step, passed):
    """Pass a mark every MARK_STEPS steps. Return `passed` for the next step. Without a table, do nothing."""
    if num_tiles_ptr is not None:
        if step % MARK_STEPS == MARK_STEPS - 1:
            passed = read_marks(num_tiles_ptr)
        if step % MARK_STEPS == 0:
            pass_mark(num_tiles_ptr, step // MARK_STEPS, passed)
    return passed


@gluon.jit
def end_pace(num_tiles_ptr):
    """Count a producer as ended. The last one resets the counters. Without a table, do nothing."""
    if num_tiles_ptr is not None:
        running = gl.atomic_add(num_tiles_ptr + RUNNING, -1, sem="acq_rel", scope="gpu")
        if running == 1:
            gl.store(num_tiles_ptr + PASSED, 0)
