"""Which program is the last to deliver a piece: counts in memory that nobody has to set to zero.

A counter is an 8-byte word: MARK in its upper 48 bits says that the lower 16 are a count. Any other word is what the
memory held before, and counts as 0: whoever meets it puts MARK and 0 there (`look`, `arrive`). The last arriver puts
the count back to 0, so a counter may serve the next launch, and its memory anything else between. Scratch in a CUDA
graph thus needs no clearing at every replay; what lies there by chance looks like a count once in 2^48.

All programs of a launch must expect the same number of arrivals, so lengths must not change while it runs: a count that
is left over would stay, and later merges would come too early.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...versions import thread_barrier

# MARK begins as a NaN that arithmetic does not make.
NONE_YET = gl.constexpr(0x7FA5C3E1965A << 16)
_LOOK = gl.constexpr("ld.relaxed.gpu.global.b64 $0, [$1];")
# One thread of each four warps, the one that counts: replace what was seen, unless it has MARK or another was faster.
_MARK = gl.constexpr(
    """{
    .reg .pred first, other;
    .reg .b64 was, mark;
    .reg .b32 i;
    mov.u32 i, %tid.x;
    and.b32 i, i, 127;
    setp.eq.u32 first, i, 0;
    shr.u64 mark, $2, 16;
    setp.ne.and.u64 other, mark, 0x7FA5C3E1965A, first;
    @other atom.relaxed.gpu.global.cas.b64 was, [$1], $2, 0x7FA5C3E1965A0000;
    mov.u32 $0, 0;
    }"""
)


@gluon.jit
def look(counter):
    """What the counter holds; early, so that `arrive` need not wait for it."""
    return gl.inline_asm_elementwise(_LOOK, "=l,l", [counter.to(gl.int64)], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit
def arrive(counter, seen):
    """What all threads of this program have written is delivered: how many were before it.

    Whoever comes last sees everything that the others delivered. seen: by `look`, in this launch
    """
    thread_barrier()
    gl.inline_asm_elementwise(
        _MARK, "=r,l,l", [counter.to(gl.int64), seen], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip
    return (gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") - NONE_YET).to(gl.int32)


@gluon.jit
def reset(counter):
    """All have arrived."""
    gl.store(counter, NONE_YET)
