"""Pipeline: a ring of shared-memory stages that a producer fills while consumers use earlier stages.

Iteration i uses stage i % STAGES, and its barrier has phase i // STAGES & 1. The same holds for item i of a ring that
one warpgroup fills and others read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...versions import thread_barrier

# ---- barriers ----


@gluon.jit
def allocate_mbarrier_groups(STAGES: gl.constexpr, arrival_counts):
    """Allocates, for each of `arrival_counts`, a group of one mbarrier per stage with that arrival count.

    NOTE: groups are initialized together, stage by stage: the compiler inserts a barrier of all threads between two
    initializations of one group. Each group has memory of its own: between an arrival and a wait that share memory it
    inserts one too.

    NOTE: every group must stay in use until the kernel's last use of shared memory. The compiler reuses its memory
    after that without invalidating the mbarriers, and a GPU that was preempted may write them again (notes/prefill.md).
    """
    groups = ()
    for _ in gl.static_range(len(arrival_counts)):
        groups = groups + (gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),)
    for i in gl.static_range(STAGES):
        for j in gl.static_range(len(arrival_counts)):
            mbarrier.init(groups[j].index(i), count=arrival_counts[j])
    return groups


@gluon.jit
def allocate_mbarriers(STAGES: gl.constexpr, arrival_count: gl.constexpr = 1):
    """Allocates one group of `allocate_mbarrier_groups`."""
    return allocate_mbarrier_groups(STAGES, (arrival_count,))[0]


@gluon.jit
def allocate_full_barriers(NUM_GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """Allocates NUM_GROUPS groups of full barriers, one per stage, each for the bytes of one kind of copy.

    NOTE: kinds of copies have groups and buffers of their own, because the compiler inserts a barrier of all threads
    between two copies that share either.
    """
    groups = ()
    for _ in gl.static_range(NUM_GROUPS):
        groups = groups + (allocate_mbarriers(STAGES),)
    fence_async_shared()
    return groups


# ---- producer and consumer ----


@gluon.jit
def stage_and_phase(iter, STAGES: gl.constexpr):
    """Returns (stage, phase) of item iter in a ring of STAGES."""
    if STAGES & (STAGES - 1) == 0:
        return iter & (STAGES - 1), iter // STAGES & 1
    else:
        iter = iter.to(gl.uint32)
        return (iter % STAGES).to(gl.int32), (iter // STAGES & 1).to(gl.int32)


@gluon.jit
def producer_acquire(empty_barriers, iter, STAGES: gl.constexpr):
    """Waits until the stage of item iter is empty; returns it."""
    stage, phase = stage_and_phase(iter, STAGES)
    mbarrier.wait(empty_barriers.index(stage), phase ^ 1)
    return stage


@gluon.jit
def consumer_wait(full_barriers, iter, STAGES: gl.constexpr):
    """Waits until item iter is full; returns its stage."""
    stage, phase = stage_and_phase(iter, STAGES)
    mbarrier.wait(full_barriers.index(stage), phase)
    return stage


@gluon.jit
def consumer_release(empty_barriers, iter, STAGES: gl.constexpr):
    """Releases the stage of item iter."""
    stage, _ = stage_and_phase(iter, STAGES)
    mbarrier.arrive(empty_barriers.index(stage))


@gluon.jit
def wait_copies(full_barriers, iter, NUM_GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """Waits until all copies of this iteration are in shared memory."""
    for i in gl.static_range(NUM_GROUPS):
        mbarrier.wait(full_barriers[i].index(iter % STAGES), (iter // STAGES) & 1)


@gluon.jit
def sync_and_arrive(barrier):
    """Arrives at the barrier once all warps of the partition are here."""
    thread_barrier()
    mbarrier.arrive(barrier)


# ---- the kernels before and after (PDL) ----


@gluon.jit
def pdl_wait():
    """Waits until the previous kernel has ended."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pdl_launch_dependents():
    """Allows the next kernel to launch before this one ends; it calls `pdl_wait`."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
