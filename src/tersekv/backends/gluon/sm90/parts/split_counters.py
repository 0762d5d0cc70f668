"""Counters of arrived splits, to find the CTA that arrives last; their memory needs no initialization.

A counter is 8 bytes: MARK in its upper 48 bits marks the lower 16 as a count. Any other value is left over and counts
as 0: the CTA that reads it stores MARK and 0 (`read_counter`, `arrive_at_counter`). The last CTA resets the count to 0,
so the next launch may use the counter, and its memory may hold anything in between. Workspace in a CUDA graph thus
needs no clearing at replay; leftover bytes look like a count once in 2^48.

All CTAs of a launch must expect the same number of arrivals, so lengths must not change while it runs: a count left
over would stay, and later combines would start too early.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...versions import thread_barrier

# MARK begins as an fp32 NaN that arithmetic does not produce.
COUNTER_ZERO = gl.constexpr(0x7FA5C3E1965A << 16)
_READ_COUNTER_PTX = gl.constexpr("ld.relaxed.gpu.global.b64 $0, [$1];")
# One thread of each four warps, the one that counts: replace the observed value, unless it has MARK or has changed.
_INIT_COUNTER_PTX = gl.constexpr(
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
def read_counter(p_counter):
    """Loads the counter; early, so that `arrive_at_counter` need not wait for it."""
    return gl.inline_asm_elementwise(
        _READ_COUNTER_PTX, "=l,l", [p_counter.to(gl.int64)], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.jit
def arrive_at_counter(p_counter, observed):
    """Publishes the stores of all threads of this CTA; returns how many CTAs arrived before it.

    The last CTA sees the stores of all others. observed: by `read_counter`, in this launch
    """
    thread_barrier()
    gl.inline_asm_elementwise(
        _INIT_COUNTER_PTX, "=r,l,l", [p_counter.to(gl.int64), observed], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip
    return (gl.atomic_add(p_counter, 1, sem="acq_rel", scope="gpu") - COUNTER_ZERO).to(gl.int32)


@gluon.jit
def reset_counter(p_counter):
    """Resets the count to 0, after all have arrived."""
    gl.store(p_counter, COUNTER_ZERO)
