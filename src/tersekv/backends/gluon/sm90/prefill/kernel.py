"""Prefill of keys and values on sm_90: a persistent program copies, converts where codes are stored, and multiplies.

A warp copies queries and tiles by tensor copies (`produce`); two warpgroups attend 64 query rows each (`attend`); over
a cache of codes a third makes 16-bit tiles of them (`convert`), for both; of values only, where an e4m3 query meets
e4m3 keys. Each waits for the others by barriers in
shared memory alone. What is done, and in which order, is in `items`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...versions import reinterpret
from ..parts.convert import multiplied
from ..parts.ring import barriers, launch_dependents, wait_for_previous
from ..parts.schedule import LOG2E, scalar
from .attend import ROWS, Numbers, attend
from .attend_new import Both, attend_new
from .convert import Stored, convert
from .items import FIELDS, PAGES, first_row
from .produce import Ring, produce
from .turns import Turns


@gluon.jit
def make_ring(dtype: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, READERS: gl.constexpr):
    """N tiles [ROWS, COLUMNS] of 16 bits an element."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(min(2 * COLUMNS, 128), 16, 2)
    tiles = gl.allocate_shared_memory(dtype, [N, ROWS, COLUMNS], LAYOUT)
    return Ring(tiles, barriers(N, 1), barriers(N, READERS))


@gluon.jit
def as_codes(ring):
    """A ring of words, as the e4m3 codes that they hold."""
    COLUMNS: gl.constexpr = 2 * ring.tiles.shape[2]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(min(COLUMNS, 128), 8, 2)
    tiles = reinterpret(ring.tiles, gl.float8e4nv, [ring.tiles.shape[0], ring.tiles.shape[1], COLUMNS], LAYOUT)
    return Ring(tiles, ring.full, ring.free)


@gluon.jit
def zero_padding(OUT, LSE, t, T, strides, c: gl.constexpr):
    """Query rows behind the last request: output 0, LSE −inf."""
    so_t, so_h, sl_t, sl_h = strides
    o_d = gl.arange(0, c.DV, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    t += gl.program_id(0)
    while t < T:
        for head in range(c.HEADS * c.GROUP):
            p_out = OUT + t.to(gl.int64) * so_t + head.to(gl.int64) * so_h + o_d
            gl.store(p_out, (o_d * 0).to(gl.float32).to(OUT.dtype.element_ty), mask=o_d < c.HEAD_DV)
            if c.HAS_LSE:
                gl.store(LSE + t.to(gl.int64) * sl_t + head.to(gl.int64) * sl_h, float("-inf"))
        t += gl.num_programs(0)


@gluon.jit
def run_new(tensors, numbers, strides, shared, codes, stored, maps, new, given, B, DTYPE: gl.constexpr,
            NEW_DTYPE: gl.constexpr, c: gl.constexpr, n: gl.constexpr):  # fmt: skip
    """The parts of a program, where the new rows' keys and values come with the call."""
    queries, facts, keys, values = shared
    rows = (keys, values)
    if c.CODE_STAGES > 0:
        gl.warp_specialize(
            [
                (convert, (stored, queries, facts, codes[0], codes[1], keys, values, c)),
                (attend_new, (
                    tensors, numbers, strides, queries, facts, keys, values, stored, 0, DTYPE, NEW_DTYPE, c, n,
                )),
                (attend_new, (
                    tensors, numbers, strides, queries, facts, keys, values, stored, 1, DTYPE, NEW_DTYPE, c, n,
                )),
                (produce, (maps, new, given, B, stored.st_b, queries, facts, codes[0], codes[1], rows, 3, c)),
            ],
            [4, 4, 1], [c.REGISTERS, c.REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (attend_new, (
                    tensors, numbers, strides, queries, facts, keys, values, stored, 0, DTYPE, NEW_DTYPE, c, n,
                )),
                (attend_new, (
                    tensors, numbers, strides, queries, facts, keys, values, stored, 1, DTYPE, NEW_DTYPE, c, n,
                )),
                (produce, (maps, new, given, B, stored.st_b, queries, facts, keys, values, rows, 2, c)),
            ],
            [4, 1], [c.REGISTERS, 24],
        )  # fmt: skip


@gluon.jit(do_not_specialize=["LENS", "CU", "B", "T"])
def prefill_kernel(
    Q, K, V, KN, VN, KS, VS, TABLE, LENS, CU, SINKS, OUT, LSE, K_SIGNS, V_SIGNS, K_CHANNELS, V_CHANNELS,
    softmax_scale, SOFTMAX_T, k_scale, K_T, v_scale, V_T, out_scale, OUT_T, softcap,
    B, T, st_b, so_t, so_h, sl_t, sl_h, c: gl.constexpr, n: gl.constexpr,
):  # fmt: skip
    X: gl.constexpr = multiplied(c)
    DTYPE: gl.constexpr = Q.dtype
    STAGES: gl.constexpr = c.STAGES
    queries = make_ring(X, 2, ROWS, c.D, 1)
    if c.KEYS_8:
        keys = make_ring(gl.int16, c.CODE_STAGES, c.TILE, c.WORDS_K, 2)
    else:
        keys = make_ring(X, c.STAGES, c.TILE, c.D, 2)
    if c.VALUES_8:
        values = make_ring(gl.int16, c.STAGES, c.DV, c.TILE // 2, 2)
    else:
        values = make_ring(X, c.STAGES, c.TILE, c.DV, 2)
    facts = gl.allocate_shared_memory(gl.int32, [PAGES + 1, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BYTES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    stored = Stored(KS, VS, TABLE, st_b, facts, facts, facts)  # without stored scales none is read
    if c.TOKEN_SCALES:
        of_keys = gl.allocate_shared_memory(gl.float32, [STAGES, c.TILE], PLAIN)
        ROW: gl.constexpr = gl.int32 if c.CODE == "int4" else gl.int16  # `codes.row_word`
        of_values = gl.allocate_shared_memory(ROW, [STAGES, c.TILE], PLAIN)
        of_tiles = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 2], PLAIN)
        stored = Stored(KS, VS, TABLE, st_b, of_keys, of_values, of_tiles)
    elif c.BLOCK_SCALES:
        of_keys = gl.allocate_shared_memory(gl.uint8, [STAGES, c.TILE, c.WORDS_K // 4], BYTES)
        of_values = gl.allocate_shared_memory(gl.uint8, [STAGES, c.TILE, c.WORDS_V // 4], BYTES)
        stored = Stored(KS, VS, TABLE, st_b, of_keys, of_values, facts)
    key_codes, value_codes = keys, values
    if c.CODE_STAGES > 0:
        queries = Ring(queries.tiles, barriers(3, 1), barriers(3, 1))
        if c.KEYS_8:
            keys = as_codes(key_codes)
        else:
            key_codes = make_ring(gl.int16, c.CODE_STAGES, c.TILE, c.WORDS_K, 1)
        value_codes = make_ring(gl.int16, c.CODE_STAGES, c.TILE, c.WORDS_V, 1)
    fence_async_shared()
    wait_for_previous()
    strides = (so_t, so_h, sl_t, sl_h)
    zero_padding(OUT, LSE, first_row(CU, B, True), T, strides, c)
    scores = scalar(softmax_scale, SOFTMAX_T, c.SOFTMAX_T) * LOG2E
    of_output = scalar(out_scale, OUT_T, c.OUT_T)
    of_pages, of_values = scores * c.K_FACTOR, softcap * 0.0 + c.V_FACTOR  # a tensor, where there is no scale either
    if not c.K_T:
        of_pages = of_pages * k_scale
    if not c.V_T:
        of_values = of_values * v_scale
    tensors, turns = (OUT, LSE, SINKS), Turns(K_SIGNS, V_SIGNS, K_CHANNELS, V_CHANNELS)
    maps, given = (Q, K, V), (TABLE, LENS, CU)
    if c.NEW:
        both = Both(scores, of_pages, K_T, of_values, V_T, of_output, softcap, turns)
        NEW_DTYPE: gl.constexpr = KN.dtype
        shared, codes, new = (queries, facts, keys, values), (key_codes, value_codes), (KN, VN)
        run_new(tensors, both, strides, shared, codes, stored, maps, new, given, B, DTYPE, NEW_DTYPE, c, n)
    elif c.CODE_STAGES > 0:
        numbers = Numbers(of_pages, K_T, of_values * of_output, V_T, softcap, turns)
        read = values
        if c.VALUES_8:
            read = as_codes(values)
        gl.warp_specialize(
            [
                (convert, (stored, queries, facts, key_codes, value_codes, keys, values, c)),
                (attend, (tensors, numbers, strides, queries, facts, keys, read, stored, 0, DTYPE, c)),
                (attend, (tensors, numbers, strides, queries, facts, keys, read, stored, 1, DTYPE, c)),
                (produce, (maps, maps, given, B, st_b, queries, facts, key_codes, value_codes, maps, 3, c)),
            ],
            [4, 4, 1], [c.REGISTERS, c.REGISTERS, 24],
        )  # fmt: skip
    else:
        numbers = Numbers(of_pages, K_T, of_values * of_output, V_T, softcap, turns)
        gl.warp_specialize(
            [
                (attend, (tensors, numbers, strides, queries, facts, keys, values, stored, 0, DTYPE, c)),
                (attend, (tensors, numbers, strides, queries, facts, keys, values, stored, 1, DTYPE, c)),
                (produce, (maps, maps, given, B, st_b, queries, facts, keys, values, maps, 2, c)),
            ],
            [4, 1], [c.REGISTERS, 24],
        )  # fmt: skip
    launch_dependents()
