"""Up-projection of latents: e4m3 codes [M, L] x [N, L] -> [M, N], 16-bit out, fp32 sums, for sm_90.

Both sides have scales, per (row, 128 columns) and per 128 x 128 block; partial sums of 128 columns are scaled before
they are added in fp32. A persistent block walks over a range of 128 x 128 tiles, those of one panel of the weight after
each other: the panel stays in shared memory, and a second one is fetched while the first is used. A producer warp
copies by TMA; two warpgroups have 64 latents each, and one multiplies while the other scales, rounds and stores.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..triton.launch import TENSOR, Template, next_power_of_2
from .pipeline import launch_dependents, wait_for_previous

STAGES = 4

ROWS = gl.constexpr(64)  # latents of one warpgroup
TILE = gl.constexpr(128)  # latents and weight rows of a tile, and columns of a scale


@gluon.jit
def share_of_program(tiles):
    """First of this block's share of so many tiles, and the first that is not its own any more."""
    return gl.program_id(0) * tiles // gl.num_programs(0), (gl.program_id(0) + 1) * tiles // gl.num_programs(0)


@gluon.jit
def produce(A, W, rows_of_tiles, tiles, buffers, bars, STEPS: gl.constexpr, STAGES: gl.constexpr):
    a_s, w_s, _ = buffers
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
                tma.async_copy_global_to_shared(
                    W, [panel * TILE, i * TILE], w_full.index(side), w_s.index(side * STEPS + i)
                )
            panels += 1
        row = tile % rows_of_tiles * TILE
        for i in range(STEPS):
            stage = at % STAGES
            mbarrier.wait(a_free.index(stage), ((at // STAGES) & 1) ^ 1)
            mbarrier.expect(a_full.index(stage), TILE * TILE)
            tma.async_copy_global_to_shared(A, [row, i * TILE], a_full.index(stage), a_s.index(stage))
            at += 1


@gluon.jit
def start(at, side, i, buffers, bars, HALF: gl.constexpr, ACC: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr):
    """Start the product of step `at`, columns i · 128 … of the panel."""
    a_s, w_s, _ = buffers
    a_full, _, _, _ = bars
    stage = at % STAGES
    mbarrier.wait(a_full.index(stage), (at // STAGES) & 1)
    zero = gl.full([ROWS, TILE], 0.0, gl.float32, ACC)
    a = a_s.index(stage).slice(HALF * ROWS, ROWS)
    w = w_s.index(side * STEPS + i).permute((1, 0))
    return warpgroup_mma(a, w, zero, use_acc=False, is_async=True)


@gluon.jit
def load_scales(A_SCALE, W_SCALE, row, panel, i, o_m, rows, stride_as, stride_ws):
    """Scales of a step: of its latents, and of its block of the weight."""
    a_scale = gl.load(A_SCALE + i * stride_as + row * TILE + o_m, mask=row * TILE + o_m < rows, other=0.0)
    return a_scale, gl.load(W_SCALE + panel * stride_ws + i)


@gluon.jit
def multiply(
    OUT, scales, rows, rows_of_tiles, tiles, buffers, bars,
    HALF: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup: 64 rows of every tile of this block."""
    _, _, out_s = buffers
    _, a_free, w_full, w_free = bars
    A_SCALE, W_SCALE, stride_as, stride_ws = scales
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 32])
    o_m = gl.arange(0, ROWS, gl.SliceLayout(1, ACC)) + HALF * ROWS
    first, end = share_of_program(tiles)
    at = 0
    panels = 0  # that were begun
    row, panel = first % rows_of_tiles, first // rows_of_tiles
    fresh = True  # the panel is another than the last tile's
    side = 0
    # Scales are loaded a step ahead, so that no product waits for them.
    a_scale, w_scale = load_scales(A_SCALE, W_SCALE, row, panel, 0, o_m, rows, stride_as, stride_ws)
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
        acc = gl.full([ROWS, TILE], 0.0, gl.float32, ACC)
        for i in range(STEPS):
            scale = a_scale * w_scale
            last = i == STEPS - 1
            a_scale, w_scale = load_scales(
                A_SCALE, W_SCALE, gl.where(last, row_after, row), gl.where(last, panel_after, panel),
                gl.where(last, 0, i + 1), o_m, rows, stride_as, stride_ws,
            )  # fmt: skip
            part = start(at, side, i, buffers, bars, HALF, ACC, STEPS, STAGES)
            part = warpgroup_mma_wait(0, [part])
            mbarrier.arrive(a_free.index(at % STAGES), count=1)
            acc = gl.fma(part, gl.broadcast(scale[:, None], acc)[0], acc)
            at += 1
        to = out_s.index(HALF)
        tma.store_wait(0)
        gl.thread_barrier()  # one thread has waited for all
        to.store(acc.to(to.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(OUT, [row * TILE + HALF * ROWS, panel * TILE], to)
        row, panel = row_after, panel_after
    tma.store_wait(0)


@gluon.jit
def rounded_product(a, b):
    """a * b of one dtype, rounded to it; fp32 holds the product of two 16-bit values exactly."""
    return (a.to(gl.float32) * b.to(gl.float32)).to(a.dtype)


@gluon.jit
def rotated(x, cos, sin, even):
    """RoPE of interleaved pairs of x [ROWS, R], every operation rounded to the dtype of cos and sin. even: is the
    column the first of its pair."""
    x = x.to(cos.dtype)
    first, second = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    other = gl.convert_layout(gl.reshape(gl.join(second, first), x.shape), x.type.layout)
    a, b = rounded_product(x, cos).to(gl.float32), rounded_product(other, sin).to(gl.float32)
    return gl.where(even, a - b, a + b).to(cos.dtype)


@gluon.jit
def request_of(CU, t, B):
    """The request of new token t, one number or several: 0 before the first, B - 1 behind the last."""
    low = t * 0
    high = low + B - 1
    width = B - 1
    while width > 0:
        middle = (low + high) // 2
        later = gl.load(CU + middle + 1).to(gl.int32) <= t
        high = gl.where((low < high) & (later == 0), middle, high)
        low = gl.where((low < high) & later, middle + 1, low)
        width = width // 2
    return low


@gluon.jit
def rotate_queries(
    Q, FREQS, CU, LENS, tokens, B, H, max_pos, stride_qt, stride_qh, stride_freqs, column,
    HEADS: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """Rotate the queries in place, as the Triton backend's prepare_kernel does it, to the bit: 128 rows at a time."""
    TOKENS: gl.constexpr = TILE // HEADS
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // R, R // 8], [4, 1], [1, 0])
    o_r = gl.arange(0, TILE, gl.SliceLayout(1, L))
    o_c = gl.arange(0, R, gl.SliceLayout(0, L))
    parts = gl.cdiv(H, HEADS)
    items = gl.cdiv(tokens, TOKENS) * parts
    low, high, ahead = 0, 0, items.to(gl.int64) * 0  # of the request at hand: its tokens; position less token
    begin, end = share_of_program(items)
    for item in range(begin, end):
        first = item // parts * TOKENS
        t = first + o_r // HEADS
        h = item % parts * HEADS + o_r % HEADS
        if first >= high:
            request = request_of(CU, first, B)
            low, high = gl.load(CU + request).to(gl.int32), gl.load(CU + request + 1).to(gl.int32)
            ahead = gl.load(LENS + request).to(gl.int64) - low
        position, live = ahead + t, (t >= low) & (t < high)
        if TOKENS > 1:  # noqa: SIM102 - known to the compiler, unlike the other
            if (first < low) | (first + TOKENS > high):
                requests = request_of(CU, t, B)
                its_first = gl.load(CU + requests).to(gl.int32)
                position = gl.load(LENS + requests).to(gl.int64) - its_first + t
                live = (t >= its_first) & (t < gl.load(CU + requests + 1).to(gl.int32))
        live = live & (t < tokens) & (h < H)
        p_q = Q + (t.to(gl.int64) * stride_qt + h.to(gl.int64) * stride_qh)[:, None] + (column + o_c)[None, :]
        m_q = live[:, None] & (o_c >= 0)[None, :]
        x = gl.load(p_q, mask=m_q, other=0.0)
        if TOKENS == 1:  # one row of cosines and sines for all
            position = ahead + first
            known = (position >= 0) & (position < max_pos)
            p_f = FREQS + gl.where(known, position, 0) * stride_freqs + o_c // 2 * 2
            cos = gl.load(p_f, mask=known & (o_c >= 0), other=0.0)
            sin = gl.load(p_f + 1, mask=known & (o_c >= 0), other=0.0)
            y = rotated(x, cos[None, :], sin[None, :], (o_c % 2 == 0)[None, :])
        else:
            known = live & (position >= 0) & (position < max_pos)
            p_f = FREQS + gl.where(known, position, 0)[:, None] * stride_freqs + o_c[None, :]
            f = gl.load(p_f, mask=known[:, None] & (o_c >= 0)[None, :], other=0.0)
            cos, sin = gl.split(gl.reshape(f, [TILE, R // 2, 2]))
            cos = gl.convert_layout(gl.reshape(gl.join(cos, cos), [TILE, R]), L)
            sin = gl.convert_layout(gl.reshape(gl.join(sin, sin), [TILE, R]), L)
            y = rotated(x, cos, sin, (o_c % 2 == 0)[None, :])
        gl.store(p_q, y.to(Q.dtype.element_ty), mask=m_q)


@gluon.jit(do_not_specialize=["rows", "tokens", "B", "max_pos"])
def product_kernel(
    A, W, OUT, A_SCALE, W_SCALE, Q, FREQS, CU, LENS, rows, N, stride_as, stride_ws, tokens, B, H, max_pos, stride_qt,
    stride_qh, stride_freqs, column,
    STEPS: gl.constexpr, STAGES: gl.constexpr, HEADS: gl.constexpr, R: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    """The product; with HEADS, four more warps rotate columns column … column + R of q meanwhile."""
    a_s = gl.allocate_shared_memory(A.dtype, [STAGES, TILE, TILE], A.layout)
    w_s = gl.allocate_shared_memory(W.dtype, [2 * STEPS, TILE, TILE], W.layout)
    out_s = gl.allocate_shared_memory(OUT.dtype, [2, ROWS, TILE], OUT.layout)
    a_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    a_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    w_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    w_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(a_full.index(i), count=1)
        mbarrier.init(a_free.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(w_full.index(i), count=1)
        mbarrier.init(w_free.index(i), count=2)
    fence_async_shared()
    if OVERLAPS:
        launch_dependents()
        wait_for_previous()
    buffers = (a_s, w_s, out_s)
    bars = (a_full, a_free, w_full, w_free)
    rows_of_tiles = gl.cdiv(rows, TILE)
    tiles = rows_of_tiles * (N // TILE)
    scales = (A_SCALE, W_SCALE, stride_as, stride_ws)
    if HEADS > 0:
        gl.warp_specialize(
            [
                (multiply, (OUT, scales, rows, rows_of_tiles, tiles, buffers, bars, 0, STEPS, STAGES)),
                (multiply, (OUT, scales, rows, rows_of_tiles, tiles, buffers, bars, 1, STEPS, STAGES)),
                (produce, (A, W, rows_of_tiles, tiles, buffers, bars, STEPS, STAGES)),
                (rotate_queries, (
                    Q, FREQS, CU, LENS, tokens, B, H, max_pos, stride_qt, stride_qh, stride_freqs, column, HEADS, R,
                )),
            ],
            [4, 1, 4], [176, 24, 136],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply, (OUT, scales, rows, rows_of_tiles, tiles, buffers, bars, 0, STEPS, STAGES)),
                (multiply, (OUT, scales, rows, rows_of_tiles, tiles, buffers, bars, 1, STEPS, STAGES)),
                (produce, (A, W, rows_of_tiles, tiles, buffers, bars, STEPS, STAGES)),
            ],
            [4, 1], [232, 24],
        )  # fmt: skip


def descriptors(codes: Any, weight: Any, out: Any, rows: int, shape: tuple[int, int], stride: int) -> tuple:
    """Of the kernel. shape, stride: the weight's [N, L] and its rows' distance."""
    n, rank = shape
    layout = gl.NVMMASharedLayout.get_default_for([TILE.value, TILE.value], gl.float8e4nv)
    staged = gl.NVMMASharedLayout.get_default_for([ROWS.value, TILE.value], gl.bfloat16)
    return (
        TensorDescriptor(codes, [rows, rank], [rank, 1], [TILE.value, TILE.value], layout),
        TensorDescriptor(weight, [n, rank], [stride, 1], [TILE.value, TILE.value], layout),
        TensorDescriptor(out, [rows, n], [n, 1], [ROWS.value, TILE.value], staged),
    )


def prepared(call: Any, rows: int, scale_stride: int, sms: int, rotate: bool, overlaps: bool) -> Template:
    """The launch for a chunk of `rows` rows and calls with the facts of this one.

    Its tensors: scales [L/128, M], weight scales, q, freqs_cis, cu_seqlens_q, cache_lens. rotate: rotate q as well.
    """
    n, rank = call.kv_b_proj.shape
    tokens, heads = call.q.shape[:2]
    rope = call.kpe.shape[-1]
    tiles = -(-rows // TILE.value) * (n // TILE.value)
    arguments = (
        *[TENSOR] * 6, rows, n, scale_stride, call.kv_b_proj_scale.stride(0), tokens, call.cache_lens.shape[0], heads,
        call.freqs_cis.shape[0], *call.q.stride()[:2], call.freqs_cis.stride(0), call.q.shape[2] - rope,
        rank // TILE.value, STAGES, min(TILE.value, next_power_of_2(heads)) if rotate else 0, rope, overlaps,
    )  # fmt: skip
    # Without fused multiply-adds the rotation has the oracle's bits; the product asks for its own by name.
    grid = min(sms, tiles) if not rotate else sms
    return Template(
        product_kernel, (grid,), arguments, fp8_as_bytes=False, num_warps=4, enable_fp_fusion=False,
        launch_pdl=overlaps,
    )  # fmt: skip
