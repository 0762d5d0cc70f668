"""Online softmax of a tile of scores: reductions, softcap, P, and a row_max that is raised in every step, or lazily."""

import math
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .mask import apply_mask

LOG2E = gl.constexpr(math.log2(math.e))
LN2 = gl.constexpr(math.log(2))


class SoftmaxState(NamedTuple):
    """Running softmax of query rows: row_max (base 2), row_sum of P, and the accumulator of P V."""

    row_max: gl.tensor
    row_sum: gl.tensor
    acc_o: gl.tensor


# ---- rows on M: reductions of which few instructions wait ----


@gluon.jit
def split_columns(x):
    """Returns the left and the right half of the columns, which are in the same threads."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def row_max_by_tree_reduction(s):
    """Returns the maximum of each row.

    NOTE: gl.max compares a thread's numbers one after the other, each waiting for the last; a reduction tree does not.
    """
    x = s
    for _ in gl.static_range(s.shape[1].bit_length() - 4):
        a, b = split_columns(x)
        x = gl.maximum(a, b)
    return gl.convert_layout(gl.max(x, 1), gl.SliceLayout(1, s.type.layout))


@gluon.jit
def row_sums_by_lane(x):
    """Returns four partial sums of each row, one per thread: [rows, 4]."""
    a, b = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    x = a + b
    for _ in gl.static_range(x.shape[1].bit_length() - 3):
        a, b = split_columns(x)
        x = a + b
    return x


# ---- softcap ----


@gluon.jit
def apply_softcap_to_log2_scores(s_log2, softcap):
    """Returns softcap × tanh(s / softcap) of scores s_log2 in units of log2; softcap in those of scores.

    tanh is 1 − 2 / (e^2x + 1), which cancels near 0: there, s is multiplied by tanh(x) / x, a polynomial in the square
    of x × log2(e) (fitted for the least relative error, 3.2e-7).
    """
    t = s_log2 * (1.0 / softcap)
    u = t * t
    ratio = (((7.488054e-4 * u - 5.668405e-3) * u + 3.0677834e-2) * u - 1.6014094e-1) * u + 1.0
    far = (softcap * LOG2E) * (1.0 - 2.0 / (gl.exp2(t + t) + 1.0))
    return gl.where(gl.abs(t) < 1.0, s_log2 * ratio, far)


# ---- one step of many query rows: MLA prefill, prefill ----


@gluon.jit
def softmax_to_p_row_max_and_rescale(s, row_max, last_key_in_tile, score_scale, MASKED: gl.constexpr):
    """Returns (p fp32, row_max, rescale) of a tile of scores. last_key_in_tile: the last that a row sees."""
    S: gl.constexpr = s.type.layout
    if MASKED:
        o_n = gl.arange(0, s.shape[1], gl.SliceLayout(0, S))
        s = gl.where(o_n[None, :] <= last_key_in_tile[:, None], s, float("-inf"))
    row_max_new = gl.maximum(row_max, row_max_by_tree_reduction(s) * score_scale)
    safe_max = row_max_new
    if MASKED:
        safe_max = gl.where(row_max_new == float("-inf"), 0.0, row_max_new)  # all keys of a row may be masked so far
    return gl.exp2(s * score_scale - safe_max[:, None]), row_max_new, gl.exp2(row_max - safe_max)


# P in e4m3, which holds 2^-9 to 448, is at most 2^LOG2_P_MAX. It is relative to its own block's maximum, or small P
# would be lost beside a large one of another block; but at most 2^40 below the row maximum: sums must not leave fp32.
LOG2_P_MAX, MAX_LOG2_BELOW_ROW_MAX = gl.constexpr(8.0), gl.constexpr(40.0)


class FP8RowMax(NamedTuple):
    """For P in e4m3: the offset subtracted from the scores, and the running row maximum."""

    row_max: gl.tensor
    running_max: gl.tensor


@gluon.jit
def scaled_softmax_to_p_row_max_and_rescale(
    s, row_max, last_causal_key_in_tile, key_begin_in_tile, key_end_in_tile, row_score_scales, log2_tile_v_scale,
    softcap, MASKED: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """Returns (P in fp32, row_max, rescale) of a tile of scores.

    row_max: for P in e4m3, an FP8RowMax
    last_causal_key_in_tile: of each row; key_begin_in_tile, key_end_in_tile: the first key, and the keys' end
    row_score_scales: of each row, > 0; log2_tile_v_scale: with token scales, added to the exponent (`TileVScale`)
    """
    if cfg.HAS_SOFTCAP:
        s = apply_softcap_to_log2_scores(s * row_score_scales[:, None], softcap)
    if MASKED:
        s = apply_mask(s, last_causal_key_in_tile, key_begin_in_tile, key_end_in_tile, cfg)
    block_max = row_max_by_tree_reduction(s)
    if not cfg.HAS_SOFTCAP:
        block_max = block_max * row_score_scales
    if cfg.V.TOKEN_SCALES:
        block_max = block_max + log2_tile_v_scale
    if cfg.FP8_PV:
        prev_max = row_max.row_max
        running_max = gl.maximum(row_max.running_max, block_max)
        score_offset = gl.maximum(block_max, running_max - MAX_LOG2_BELOW_ROW_MAX) - LOG2_P_MAX
        row_max_new = FP8RowMax(score_offset, running_max)
    else:
        prev_max = row_max
        score_offset = gl.maximum(row_max, block_max)
        row_max_new = score_offset
    if MASKED:
        score_offset = gl.where(score_offset == float("-inf"), 0.0, score_offset)  # a row may have seen no key yet
    rescale = gl.exp2(prev_max - score_offset)
    if cfg.V.TOKEN_SCALES:
        score_offset = score_offset - log2_tile_v_scale
    if not cfg.HAS_SOFTCAP:
        s = s * row_score_scales[:, None]
    return gl.exp2(s - score_offset[:, None]), row_max_new, rescale


# ---- P in registers ----


@gluon.jit
def pack_p_16bit(p, dtype: gl.constexpr):
    """Returns adjacent numbers of a row, rounded to a 16-bit dtype, packed in pairs: [rows, columns / 2] int32.

    NOTE: 16-bit numbers that a loop carries are unpacked and packed again in every iteration.
    """
    PTX: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    a, b = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(PTX, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack_p_16bit(p_packed, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the numbers packed by `pack_p_16bit`, in LAYOUT."""
    a, b = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [p_packed], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    x = gl.reshape(gl.join(a, b), [p_packed.shape[0], 2 * p_packed.shape[1]])
    return gl.convert_layout(x.to(dtype, bitcast=True), LAYOUT)


# ---- lazy rescaling: row_max is raised only where P would overflow 16 bits, by warp ----
# In PTX, so that a warp branches around what it does not need, and threads of other warps wait for nothing. If rows are
# on M of an MMA, a thread has two of them and four lanes share one; if on N, eight lanes share one.


# Of two rows: (maximum of a thread's scores, row_max) → (row_max, whether any row_max of the warp is new). row_max is
# raised to the row's maximum only where P would exceed 2^8, well within fp16: rarely.
LAZY_ROW_MAX_PTX = gl.constexpr(
    """{
    .reg .pred p, q;
    .reg .f32 a, b, x, y, z;
    add.f32 a, $6, 0f41000000;
    add.f32 b, $7, 0f41000000;
    setp.gt.f32 p, $4, a;
    setp.gt.or.f32 p, $5, b, p;
    vote.sync.any.pred q, p, 0xffffffff;
    mov.f32 $0, $6;
    mov.f32 $1, $7;
    selp.b32 $2, 1, 0, q;
    mov.b32 $3, $2;
    @!q bra DONE;
    shfl.sync.bfly.b32 x, $4, 1, 0x1f, 0xffffffff;
    shfl.sync.bfly.b32 y, $5, 1, 0x1f, 0xffffffff;
    max.f32 x, x, $4;
    max.f32 y, y, $5;
    shfl.sync.bfly.b32 z, x, 2, 0x1f, 0xffffffff;
    max.f32 x, x, z;
    shfl.sync.bfly.b32 z, y, 2, 0x1f, 0xffffffff;
    max.f32 y, y, z;
    setp.gt.f32 p, x, a;
    selp.f32 $0, x, $6, p;
    setp.gt.f32 p, y, b;
    selp.f32 $1, y, $7, p;
    DONE:
    }"""
)


def rescale_unless_all_ones_ptx_and_constraints(num_elements: int) -> tuple[str, str]:
    """Returns PTX and its constraints: `num_elements` numbers of a thread times scales, skipped where all scales of a
    warp are 1.

    Elements 0 and 2 of a thread are in its two rows; all others are in one of them.
    """
    lines = [f"mul.f32 ${i}, ${i}, ${2 * num_elements + i};" for i in range(num_elements)]
    test = [f"setp.neu.f32 {p}, ${2 * num_elements + i}, 0f3F800000;" for p, i in (("p", 0), ("q", 2))]
    text = ["{ .reg .pred p, q;", *test, "or.pred p, p, q;", "@!p bra NONE;", *lines, "NONE: }"]
    return "\n".join(text), ",".join([*["=f"] * num_elements, *map(str, range(num_elements)), *["f"] * num_elements])


def _lazy_row_max_rescale_flag_ptx_and_constraints(num_rows: int) -> tuple[str, str]:
    """Returns PTX and its constraints, of `num_rows` rows: lane_max, row_max → row_max, rescale, flags.

    A flag says whether any row_max of the warp is new. Lanes 4, 8 and 16 apart hold other keys of the same rows.
    """
    new_max, rescale, flag, lane_max, row_max = (range(n * num_rows, (n + 1) * num_rows) for n in range(5))
    text = ["{ .reg .pred p, q;", f".reg .f32 x, y, {', '.join(f'a{i}' for i in range(num_rows))};"]
    for i in range(num_rows):
        text.append(f"add.f32 a{i}, ${row_max[i]}, 0f41000000;")
        text.append(f"setp.gt{'.or' if i else ''}.f32 p, ${lane_max[i]}, a{i}{', p' if i else ''};")
    text.append("vote.sync.any.pred q, p, 0xffffffff;")
    for i in range(num_rows):
        text += [
            f"mov.f32 ${new_max[i]}, ${row_max[i]};",
            f"mov.f32 ${rescale[i]}, 0f3F800000;",
            f"selp.b32 ${flag[i]}, 1, 0, q;",
        ]
    text.append("@!q bra DONE;")
    for i in range(num_rows):
        text.append(f"mov.f32 x, ${lane_max[i]};")
        for lanes in (4, 8, 16):
            text += [f"shfl.sync.bfly.b32 y, x, {lanes}, 0x1f, 0xffffffff;", "max.f32 x, x, y;"]
        text += [f"setp.gt.f32 p, x, a{i};", f"@p mov.f32 ${new_max[i]}, x;"]
        text += [f"sub.f32 y, ${row_max[i]}, x;", "ex2.approx.ftz.f32 y, y;", f"@p mov.f32 ${rescale[i]}, y;"]
    text.append("DONE: }")
    return "\n".join(text), ",".join(["=&f"] * (2 * num_rows) + ["=&r"] * num_rows + ["f"] * (2 * num_rows))


def _rescale_if_flagged_ptx_and_constraints(num_elements: int) -> tuple[str, str]:
    """Returns PTX and its constraints: numbers of a thread times scales, skipped where the first flag is 0."""
    lines = [f"mul.f32 ${i}, ${i}, ${2 * num_elements + i};" for i in range(num_elements)]
    text = ["{ .reg .pred p;", f"setp.eq.b32 p, ${3 * num_elements}, 0;", "@p bra NONE;", *lines, "NONE: }"]
    constraints = [*["=f"] * num_elements, *map(str, range(num_elements)), *["f"] * num_elements, *["r"] * num_elements]
    return "\n".join(text), ",".join(constraints)


LAZY_ROW_MAX_4, LAZY_ROW_MAX_4_CONSTRAINTS = map(gl.constexpr, _lazy_row_max_rescale_flag_ptx_and_constraints(4))
LAZY_ROW_MAX_8, LAZY_ROW_MAX_8_CONSTRAINTS = map(gl.constexpr, _lazy_row_max_rescale_flag_ptx_and_constraints(8))
RESCALE_16, RESCALE_16_CONSTRAINTS = map(gl.constexpr, _rescale_if_flagged_ptx_and_constraints(16))
RESCALE_32, RESCALE_32_CONSTRAINTS = map(gl.constexpr, _rescale_if_flagged_ptx_and_constraints(32))
RESCALE_64, RESCALE_64_CONSTRAINTS = map(gl.constexpr, _rescale_if_flagged_ptx_and_constraints(64))
