"""Kernels that are right and one that is not, for a look at what a sanitizer says of each (sanitize_gpu.py --control).

Both pass numbers from one warp to four others, as Hopper's attention does with the facts of its next piece of work: the
warp's lanes store to shared memory, meet, and one of them arrives at an mbarrier that the others wait for before they
load; with `copying` it tells the barrier to expect a copy instead. `racing` leaves out the waiting, on both sides.
"""

from __future__ import annotations

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tersekv.backends.gluon.versions import thread_barrier, tma_load


@gluon.jit
def store(SOURCE, words, copied, bars, TURNS: gl.constexpr, WAITS: gl.constexpr, COPIES: gl.constexpr):
    whole: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in range(TURNS):
        if WAITS:
            mbarrier.wait(bars.index(1), (i & 1) ^ 1)
        words.store(gl.arange(0, 32, whole) + i)
        thread_barrier()
        if COPIES:
            mbarrier.expect(bars.index(0), 32 * 4)
            tma_load(SOURCE, [0], bars.index(0), copied)
        else:
            mbarrier.arrive(bars.index(0))


@gluon.jit
def load(OUT, words, bars, TURNS: gl.constexpr, WAITS: gl.constexpr):
    whole: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    total = gl.zeros([32], gl.int32, whole)
    for i in range(TURNS):
        if WAITS:
            mbarrier.wait(bars.index(0), i & 1)
        total += words.load(whole)
        thread_barrier()
        mbarrier.arrive(bars.index(1))
    gl.store(OUT + gl.arange(0, 32, whole), total)


@gluon.jit
def passing_kernel(OUT, SOURCE, TURNS: gl.constexpr, WAITS: gl.constexpr, COPIES: gl.constexpr):
    words = gl.allocate_shared_memory(gl.int32, [32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    copied = gl.allocate_shared_memory(gl.int32, [32], SOURCE.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(bars.index(i), count=1)
    gl.warp_specialize(
        [(load, (OUT, words, bars, TURNS, WAITS)), (store, (SOURCE, words, copied, bars, TURNS, WAITS, COPIES))],
        [1],
        [32],
    )


def main(kind: str) -> None:
    out, source = (torch.empty(32, dtype=torch.int32, device="cuda") for _ in range(2))
    box = TensorDescriptor(source, [32], [1], [32], gl.NVMMASharedLayout(0, 32, 1))
    if kind == "racing":
        passing_kernel[(1,)](out, box, 64, False, False, num_warps=4)  # often, so that both sides run at once
        torch.cuda.synchronize()
        return
    turns = 8
    passing_kernel[(1,)](out, box, turns, True, kind == "copying", num_warps=4)
    want = turns * torch.arange(32) + turns * (turns - 1) // 2
    assert torch.equal(out.cpu(), want.int()), out


if __name__ == "__main__":
    main(sys.argv[1])
