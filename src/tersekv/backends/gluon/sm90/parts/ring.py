"""A ring of shared-memory stages, filled by tensor copies while earlier stages are used: acquire, use, release.

A stage is told by the number of its turn: turn i uses stage i % STAGES, and its barrier has the parity of i // STAGES.
So are the places of a ring that one warpgroup fills and others read, by the number of an item.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from ...versions import thread_barrier


@gluon.jit
def barrier_sets(N: gl.constexpr, counts):
    """For each of `counts` a set of one barrier a place of a ring, reached when so many have arrived.

    NOTE: sets are made together, place by place: the compiler lets all threads meet between two barriers of one set.
    Each has memory of its own: between an arrival and a wait that share it, it does so too.
    """
    sets = ()
    for _ in gl.static_range(len(counts)):
        sets = sets + (gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout()),)
    for i in gl.static_range(N):
        for j in gl.static_range(len(counts)):
            mbarrier.init(sets[j].index(i), count=counts[j])
    return sets


@gluon.jit
def barriers(N: gl.constexpr, count: gl.constexpr = 1):
    """One of `barrier_sets`."""
    return barrier_sets(N, (count,))[0]


@gluon.jit
def make_barriers(N: gl.constexpr, STAGES: gl.constexpr):
    """N sets of one barrier a stage, each reached when the bytes of its kind have arrived for a turn.

    NOTE: sets of their own for kinds of copies, and buffers of their own for the copies, because the compiler puts a
    barrier of all threads between two copies that share either.
    """
    sets = ()
    for _ in gl.static_range(N):
        sets = sets + (barriers(STAGES),)
    fence_async_shared()
    return sets


@gluon.jit
def acquire(sets, turn, N: gl.constexpr, STAGES: gl.constexpr):
    """Wait until all copies of this turn are in shared memory."""
    for i in gl.static_range(N):
        mbarrier.wait(sets[i].index(turn % STAGES), (turn // STAGES) & 1)


@gluon.jit
def release():
    """All warps are done with the stages of earlier turns: they may be filled again."""
    thread_barrier()


@gluon.jit
def launch_dependents():
    """The next kernel may be launched before this one has ended; `wait_for_previous` is its part."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_for_previous():
    """This kernel may have been launched before the one in front of it has ended; from here on, it has."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def signal(bar):
    """Arrive, once all warps of the partition are here."""
    thread_barrier()
    mbarrier.arrive(bar)


@gluon.jit
def place_of(i, N: gl.constexpr):
    """(place, parity) of item i in a ring of N."""
    if N & (N - 1) == 0:
        return i & (N - 1), i // N & 1
    else:
        i = i.to(gl.uint32)
        return (i % N).to(gl.int32), (i // N & 1).to(gl.int32)


@gluon.jit
def wait_full(bars, i, N: gl.constexpr):
    """The place of item i in a ring of N, once it has come."""
    place, parity = place_of(i, N)
    mbarrier.wait(bars.index(place), parity)
    return place


@gluon.jit
def wait_free(bars, i, N: gl.constexpr):
    """The place of item i in a ring of N, once it may come."""
    place, parity = place_of(i, N)
    mbarrier.wait(bars.index(place), parity ^ 1)
    return place


@gluon.jit
def give_back(empty, i, N: gl.constexpr):
    """Item i is no longer wanted."""
    place, _ = place_of(i, N)
    mbarrier.arrive(empty.index(place))
