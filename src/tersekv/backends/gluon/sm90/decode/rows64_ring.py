"""A ring of items that one warpgroup fills and others read: item i lies at place i % N, and its parity is i // N's."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def barriers(N: gl.constexpr, count: gl.constexpr):
    """One barrier a place, reached when `count` warpgroups have arrived."""
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=count)
    return bars


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
