"""Waits and arrivals of single warps at mbarriers, and warp scheduler barriers.

Triton has one thread of a partition arrive for all, behind a barrier of its warps, and puts one between two waits: a
warp might otherwise fall two phases behind. Two warpgroups in one partition would run in lockstep. Here each warp
arrives for itself, so none falls behind, and mbarriers are known by address, which Triton's analysis does not see.

NOTE: Triton does not tell a kernel the addresses of its shared memory. `allocate_mbarriers_and_address` finds one: it
stores a number there that no memory holds by chance, and searches for it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...versions import reinterpret, thread_barrier

# ---- addresses ----

_NONCE_PTX = gl.constexpr(
    """{
    .reg .b64 t, c;
    mov.u64 t, %globaltimer;
    mov.u64 c, %clock64;
    shl.b64 c, c, 24;
    xor.b64 $0, t, c;
    }"""
)
# A warp searches from the end of shared memory, where mbarriers lie behind the tiles, 32 numbers of 8 bytes at once.
_FIND_PTX = gl.constexpr(
    """{
    .reg .pred inside, equal;
    .reg .b32 begin, at, lane, found;
    .reg .b64 number;
    mov.u32 begin, global_smem;
    mov.u32 at, %dynamic_smem_size;
    add.u32 at, at, begin;
    and.b32 at, at, 0xfffffff8;
    mov.u32 lane, %laneid;
    shl.b32 lane, lane, 3;
    sub.u32 at, at, lane;
    sub.u32 at, at, 8;
    search:
    setp.ge.s32 inside, at, begin;
    vote.sync.any.pred equal, inside, 0xffffffff;
    @!equal trap;
    mov.b64 number, 0;
    @inside ld.volatile.shared.b64 number, [at];
    setp.eq.and.b64 equal, number, $1, inside;
    vote.sync.ballot.b32 found, equal, 0xffffffff;
    sub.u32 at, at, 256;
    setp.eq.u32 inside, found, 0;
    @inside bra.uni search;
    bfind.u32 lane, found;
    add.u32 at, at, 256;
    shfl.sync.idx.b32 $0, at, lane, 31, 0xffffffff;
    }"""
)


@gluon.constexpr_function
def first_empty(stages):
    """Returns the number of the first empty mbarrier: after the full ones, rounded up to a power of two."""
    return 1 << (stages - 1).bit_length()


@gluon.jit
def allocate_mbarriers_and_address(STAGES: gl.constexpr, WRITERS: gl.constexpr, READERS: gl.constexpr):
    """Allocates a full and an empty mbarrier for each stage; returns (full, empty, address). At the address lie the
    full ones and, from `first_empty` on, the empty ones, 8 bytes each.

    WRITERS, READERS: their arrivals
    """
    SCALAR: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    FIRST_EMPTY: gl.constexpr = first_empty(STAGES)
    barriers = gl.allocate_shared_memory(gl.int64, [2 * FIRST_EMPTY, 1], mbarrier.MBarrierLayout())
    nonce = gl.inline_asm_elementwise(_NONCE_PTX, "=l", [], gl.int64, is_pure=False, pack=1)
    barriers.index(0).store(gl.full([1], 0, gl.int64, SCALAR) + nonce)
    nonce = gl.sum(barriers.index(0).load(SCALAR), 0)  # that of one thread
    thread_barrier()
    address = gl.inline_asm_elementwise(_FIND_PTX, "=r,l", [nonce], gl.int32, is_pure=False, pack=1)
    thread_barrier()
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(i), count=WRITERS)
        mbarrier.init(barriers.index(FIRST_EMPTY + i), count=READERS)
    halves = reinterpret(barriers, gl.int64, [2, FIRST_EMPTY], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = reinterpret(halves.index(0), gl.int64, [FIRST_EMPTY, 1], mbarrier.MBarrierLayout())
    empty = reinterpret(halves.index(1), gl.int64, [FIRST_EMPTY, 1], mbarrier.MBarrierLayout())
    return full, empty, address


# ---- waits and arrivals ----

_WAIT_PTX = gl.constexpr(
    """{
    .reg .pred waits, complete;
    setp.ne.b32 waits, $3, 0;
    @!waits bra done;
    again:
    mbarrier.try_wait.parity.shared.b64 complete, [$1], $2;
    @!complete bra again;
    done:
    mov.b32 $0, 0;
    }"""
)
# A warp's loads from shared memory and its arrival reach it in order: they are instructions of all lanes at once.
_ARRIVE_PTX = gl.constexpr(
    """{
    .reg .pred elected, arrives;
    elect.sync _|elected, 0xffffffff;
    setp.ne.and.b32 arrives, $2, 0, elected;
    @arrives mbarrier.arrive.shared.b64 _, [$1];
    mov.b32 $0, 0;
    }"""
)


@gluon.jit
def warp_wait(address, barrier, phase, condition=True):
    """Waits, warp by warp, until mbarrier number `barrier` completes `phase`, if `condition`."""
    phase, condition = gl.to_tensor(phase).to(gl.int32), gl.to_tensor(condition).to(gl.int32)
    address = address + 8 * barrier
    gl.inline_asm_elementwise(_WAIT_PTX, "=r,r,r,r", [address, phase, condition], gl.int32, is_pure=False, pack=1)


@gluon.jit
def warp_arrive(address, barrier, condition=True):
    """Arrives once for each warp at mbarrier number `barrier`, if `condition`."""
    address, condition = address + 8 * barrier, gl.to_tensor(condition).to(gl.int32)
    gl.inline_asm_elementwise(_ARRIVE_PTX, "=r,r,r", [address, condition], gl.int32, is_pure=False, pack=1)


@gluon.jit
def release_stage(stages, stage, condition=True):
    """Releases a stage of a pipeline of tiles, warp by warp, if `condition`."""
    warp_arrive(stages.address, first_empty(stages.tiles.shape[0]) + stage, condition)


# ---- warp scheduler barriers: two warpgroups in turns ----
# Named barriers 14 and 15 of the CTA, of a warpgroup each, which Triton does not use: it counts from 0.

_SYNC_PTX = gl.constexpr(
    """{
    .reg .b32 id;
    mov.u32 id, %tid.x;
    bfe.u32 id, id, 7, 1;
    add.u32 id, id, 14;
    bar.sync id, 256;
    mov.b32 $0, 0;
    }"""
)
_PASS_PTX = gl.constexpr(
    """{
    .reg .b32 id;
    mov.u32 id, %tid.x;
    bfe.u32 id, id, 7, 1;
    sub.u32 id, 15, id;
    bar.arrive id, 256;
    mov.b32 $0, 0;
    }"""
)
_INIT_PTX = gl.constexpr(
    """{
    .reg .pred second;
    .reg .b32 id;
    mov.u32 id, %tid.x;
    bfe.u32 id, id, 7, 1;
    setp.ne.u32 second, id, 0;
    @second bar.arrive 14, 256;
    mov.b32 $0, 0;
    }"""
)


@gluon.jit
def warp_scheduler_barrier_init():
    """Gives one of two warpgroups the first turn. Both call it, once."""
    gl.inline_asm_elementwise(_INIT_PTX, "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def warp_scheduler_barrier_sync():
    """Waits until the other warpgroup passes its turn on."""
    gl.inline_asm_elementwise(_SYNC_PTX, "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def warp_scheduler_barrier_arrive():
    """Passes the turn on to the other warpgroup."""
    gl.inline_asm_elementwise(_PASS_PTX, "=r", [], gl.int32, is_pure=False, pack=1)
