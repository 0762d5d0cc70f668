"""Up-projection of latents: e4m3 codes [M, L] x [N, L] -> [M, N], 16-bit out, fp32 sums, for sm_90.

Both sides have scales, per (row, 128 columns) and per 128 x 128 block; partial sums of 128 columns are scaled before
they are added in fp32. A persistent block walks over a range of 128 x 128 tiles, those of one panel of the weight after
each other: the panel stays in shared memory, and a second one is fetched while the first is used. A producer warp
copies by TMA; two warpgroups have 64 latents each, and scale one half of their columns while the other is multiplied.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ....host.bind import Template, given
from ...versions import thread_barrier, tma_load, tma_store
from ..parts.ring import barrier_sets, launch_dependents, wait_for_previous
from ..parts.tensor_maps import described

STAGES = 4

ROWS = gl.constexpr(64)  # latents of one warpgroup
TILE = gl.constexpr(128)  # latents and weight rows of a tile, and columns of a scale
HALF_TILE = gl.constexpr(64)  # weight rows of one product


class Buffers(NamedTuple):
    a: gl.shared_memory_descriptor  # latents
    w: gl.shared_memory_descriptor  # two panels
    out: gl.shared_memory_descriptor


class Bars(NamedTuple):
    a_full: gl.shared_memory_descriptor
    a_free: gl.shared_memory_descriptor
    w_full: gl.shared_memory_descriptor
    w_free: gl.shared_memory_descriptor


class Scales(NamedTuple):
    A: gl.tensor
    W: gl.tensor
    a_stride: gl.tensor
    w_stride: gl.tensor


@gluon.jit
def share_of_program(tiles):
    """First of this block's share of so many tiles, and the first that is not its own any more."""
    return gl.program_id(0) * tiles // gl.num_programs(0), (gl.program_id(0) + 1) * tiles // gl.num_programs(0)


@gluon.jit
def produce(A, W, rows_of_tiles, tiles, buffers, bars, STEPS: gl.constexpr, STAGES: gl.constexpr):
    a_s, w_s = buffers.a, buffers.w
    a_full, a_free, w_full, w_free = bars
    first, end = share_of_program(tiles)
    at = 0  # steps of 128 columns
    panels = 0
    panel = -1
    for tile in range(first, end):
        if tile // rows_of_tiles != panel:
            panel = tile // rows_of_tiles
            side = panels % 2
            mbarrier.wait(w_free.index(side), ((panels // 2) & 1) ^ 1)
            mbarrier.expect(w_full.index(side), STEPS * TILE * TILE)
            for i in gl.static_range(STEPS):
                tma_load(W, [panel * TILE, i * TILE], w_full.index(side), w_s.index(side * STEPS + i))
            panels += 1
        row = tile % rows_of_tiles * TILE
        for i in range(STEPS):
            stage = at % STAGES
            mbarrier.wait(a_free.index(stage), ((at // STAGES) & 1) ^ 1)
            mbarrier.expect(a_full.index(stage), TILE * TILE)
            tma_load(A, [row, i * TILE], a_full.index(stage), a_s.index(stage))
            at += 1


@gluon.jit
def start(a, w, RIGHT: gl.constexpr, ACC: gl.constexpr):
    """Start the product of 128 columns of latents with half of the panel's rows."""
    zero = gl.full([ROWS, HALF_TILE], 0.0, gl.float32, ACC)
    return warpgroup_mma(a, w.slice(RIGHT * HALF_TILE, HALF_TILE).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def scales_of_step(scales, row, panel, i, o_m, rows):
    """Scales of a step: of its latents, and of its block of the weight."""
    p_a = scales.A + i * scales.a_stride.to(gl.int64) + row * TILE + o_m
    a_scale = gl.load(p_a, mask=row * TILE + o_m < rows, other=0.0)
    return a_scale, gl.load(scales.W + panel.to(gl.int64) * scales.w_stride + i)


@gluon.jit
def multiply(
    OUT, scales, rows, rows_of_tiles, tiles, buffers, bars,
    HALF: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup: 64 rows of every tile of this block."""
    a_s, w_s, out_s = buffers
    a_full, a_free, w_full, w_free = bars
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF_TILE, 32])
    o_m = gl.arange(0, ROWS, gl.SliceLayout(1, ACC)) + HALF * ROWS
    first, end = share_of_program(tiles)
    at = 0
    panels = 0  # that were begun
    row, panel = first % rows_of_tiles, first // rows_of_tiles
    fresh = True  # the panel is another than the last tile's
    side = 0
    # Scales are loaded a step ahead, so that no product waits for them.
    a_scale, w_scale = scales_of_step(scales, row, panel, 0, o_m, rows)
    for tile in range(first, end):
        if fresh:
            if panels > 0:
                mbarrier.arrive(w_free.index(side), count=1)
            side = panels % 2
            mbarrier.wait(w_full.index(side), (panels // 2) & 1)
            panels += 1
        fresh = row + 1 == rows_of_tiles
        row_after = gl.where(fresh, 0, row + 1)
        panel_after = gl.where(tile + 1 < end, panel + fresh.to(gl.int32), panel)
        # While one half is scaled, the product of the other runs.
        left = gl.full([ROWS, HALF_TILE], 0.0, gl.float32, ACC)
        right = left
        part_right, scale_before = left, a_scale
        for i in gl.static_range(STEPS):
            scale = a_scale * w_scale
            a_scale, w_scale = scales_of_step(
                scales, row_after if i == STEPS - 1 else row, panel_after if i == STEPS - 1 else panel,
                (i + 1) % STEPS, o_m, rows,
            )  # fmt: skip
            stage = at % STAGES
            mbarrier.wait(a_full.index(stage), (at // STAGES) & 1)
            a = a_s.index(stage).slice(HALF * ROWS, ROWS)
            w = w_s.index(side * STEPS + i)
            part_left = start(a, w, 0, ACC)
            if i > 0:
                part_right = warpgroup_mma_wait(1, [part_right])
                mbarrier.arrive(a_free.index((at - 1) % STAGES), count=1)
                right = gl.fma(part_right, gl.broadcast(scale_before[:, None], right)[0], right)
            part_right = start(a, w, 1, ACC)
            part_left = warpgroup_mma_wait(1, [part_left])
            left = gl.fma(part_left, gl.broadcast(scale[:, None], left)[0], left)
            scale_before = scale
            at += 1
        part_right = warpgroup_mma_wait(0, [part_right])
        mbarrier.arrive(a_free.index((at - 1) % STAGES), count=1)
        right = gl.fma(part_right, gl.broadcast(scale_before[:, None], right)[0], right)
        tma.store_wait(0)
        thread_barrier()  # one thread has waited for all
        for j in gl.static_range(2):
            to = out_s.index(2 * HALF + j)
            to.store((right if j else left).to(to.dtype))
        fence_async_shared()
        for j in gl.static_range(2):
            tma_store(OUT, [row * TILE + HALF * ROWS, panel * TILE + j * HALF_TILE], out_s.index(2 * HALF + j))
        row, panel = row_after, panel_after
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows"])
def product_kernel(
    A, W, OUT, A_SCALE, W_SCALE, rows, N, stride_as, stride_ws,
    STEPS: gl.constexpr, STAGES: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    a_s = gl.allocate_shared_memory(A.dtype, [STAGES, TILE, TILE], A.layout)
    w_s = gl.allocate_shared_memory(W.dtype, [2 * STEPS, TILE, TILE], W.layout)
    out_s = gl.allocate_shared_memory(OUT.dtype, [4, ROWS, HALF_TILE], OUT.layout)
    a_full, a_free = barrier_sets(STAGES, (1, 2))
    w_full, w_free = barrier_sets(2, (1, 2))
    fence_async_shared()
    if OVERLAPS:
        launch_dependents()
        wait_for_previous()
    buffers, bars = Buffers(a_s, w_s, out_s), Bars(a_full, a_free, w_full, w_free)
    rows_of_tiles = gl.cdiv(rows, TILE)
    tiles = rows_of_tiles * (N // TILE)
    scales = Scales(A_SCALE, W_SCALE, stride_as, stride_ws)
    gl.warp_specialize(
        [
            (multiply, (OUT, scales, rows, rows_of_tiles, tiles, buffers, bars, 0, STEPS, STAGES)),
            (multiply, (OUT, scales, rows, rows_of_tiles, tiles, buffers, bars, 1, STEPS, STAGES)),
            (produce, (A, W, rows_of_tiles, tiles, buffers, bars, STEPS, STAGES)),
        ],
        [4, 1], [232, 24],
    )  # fmt: skip


def prepared(f: SimpleNamespace, rows: int, most: int, sms: int, overlaps: bool) -> Template:
    """The launch for a chunk of `rows` rows, in places for `most`: KV = CODES @ kv_b_proj.T"""
    n, rank = f.kv_b_proj.shape
    tile = [TILE.value, TILE.value]
    layout = gl.NVMMASharedLayout.get_default_for(tile, gl.float8e4nv)
    staged = gl.NVMMASharedLayout.get_default_for([ROWS.value, HALF_TILE.value], gl.bfloat16)
    arguments = given(A_SCALE="SCALES", W_SCALE="kv_b_proj_scale") | {
        "A": described("CODES", [rows, rank], [rank, 1], tile, layout),
        "W": described("kv_b_proj", [n, rank], [f.kv_b_proj.stride[0], 1], tile, layout),
        "OUT": described("KV", [rows, n], [n, 1], [ROWS.value, HALF_TILE.value], staged),
        "rows": rows, "N": n, "stride_as": most, "stride_ws": f.kv_b_proj_scale.stride[0],
        "STEPS": rank // TILE.value, "STAGES": STAGES, "OVERLAPS": overlaps,
    }  # fmt: skip
    tiles = -(-rows // TILE.value) * (n // TILE.value)
    return Template(product_kernel, (min(sms, tiles),), arguments, num_warps=4, launch_pdl=overlaps)
