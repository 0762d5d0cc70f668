"""`barriers.faults` finds a barrier in another buffer's memory, and is silent where each has its own."""

from __future__ import annotations

import pytest
from compile_tools import compile_kernel
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def copy_kernel(X, Y, IS_USED: gl.constexpr, SUMS: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    barrier = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier.index(0), count=1)
    o = gl.arange(0, 256, L)
    x = gl.load(X + o)
    if SUMS:
        y = x + gl.sum(x, 0)
    else:
        tile = gl.allocate_shared_memory(gl.float32, [256], gl.SwizzledSharedLayout(1, 1, 1, [0]), x)
        y = tile.load(L)
    if IS_USED:
        mbarrier.arrive(barrier.index(0), count=1)
        mbarrier.wait(barrier.index(0), 0)
    gl.store(Y + o, y)


def compiled(is_used: bool, sums: bool = False) -> dict:
    return compile_kernel(copy_kernel, {"X": "*fp32", "Y": "*fp32"}, {"IS_USED": is_used, "SUMS": sums}, 90)


def test_an_unused_barrier_in_a_tiles_memory_is_found():
    with pytest.raises(AssertionError, match=r"copy_kernel: .*mbarriers 1x1xi64 at byte 0 share memory with 256xf32"):
        compiled(False)


def test_an_unused_barrier_in_a_reductions_memory_is_found():
    with pytest.raises(AssertionError, match=r"copy_kernel: .*mbarriers 1x1xi64 at byte 0 share memory with scratch"):
        compiled(False, sums=True)


def test_a_used_barrier_has_memory_of_its_own():
    assert compiled(True)["shared"] >= 256 * 4 + 8
    compiled(True, sums=True)
