"""Online softmax of `rows_64`: 64 rows of a warpgroup, one n_block at a time.

Numbers of a row are kept once per lane that shares it, [ROWS_PER_WARPGROUP, LANES_PER_ROW], so that lanes exchange
nothing: exchanges would wait for shared memory behind the MMA operands.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts.lazy_rescaling import LAZY_ROW_MAX_PTX, rescale_ptx
from ..parts.online_softmax import apply_softcap, lane_row_sums, split_columns
from .epilogue import is_visible_in_block
from .rows_64_converter import NUM_SCALE_VECTORS, SCALE_STAGES

ROWS_PER_WARPGROUP = gl.constexpr(64)
LANES_PER_ROW = gl.constexpr(4)  # that share a row of an accumulator
RESCALE_64_COLUMNS, RESCALE_64_COLUMNS_CONSTRAINTS = map(gl.constexpr, rescale_ptx(64 // 2))
RESCALE_128_COLUMNS, RESCALE_128_COLUMNS_CONSTRAINTS = map(gl.constexpr, rescale_ptx(128 // 2))


@gluon.constexpr_function
def score_layout(cfg):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cfg.BLOCK_N, 16])


@gluon.jit
def view_by_lane(x):
    """Returns rows of an accumulator with the columns split by lane: [rows, columns / 8, LANES_PER_ROW, 2]."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, LANES_PER_ROW, 2])


@gluon.constexpr_function
def row_per_lane_layout(layout):
    """Returns the layout [rows, LANES_PER_ROW] of one number per row and lane; layout: of `view_by_lane`."""
    return gl.SliceLayout(1, gl.SliceLayout(3, layout))


@gluon.jit
def broadcast_by_lane(x, like):
    """Returns one number per row and lane [rows, LANES_PER_ROW], broadcast to `view_by_lane` of the row."""
    return gl.convert_layout(x, row_per_lane_layout(like.type.layout), assert_trivial=True)[:, None, :][:, :, :, None]


@gluon.jit
def undo_view_by_lane(x, like):
    """Returns `view_by_lane`'s result in the original shape and layout."""
    return gl.convert_layout(gl.reshape(x, like.shape), like.type.layout, assert_trivial=True)


@gluon.jit
def lane_row_max(s):
    """Returns the maximum of each row's scores in one thread: [rows, LANES_PER_ROW], by a reduction tree."""
    a, b = gl.split(gl.reshape(s, [s.shape[0], s.shape[1] // 2, 2]))
    x = gl.maximum(a, b)
    for _ in gl.static_range(x.shape[1].bit_length() - 3):
        a, b = split_columns(x)
        x = gl.maximum(a, b)
    return gl.convert_layout(x, row_per_lane_layout(view_by_lane(s).type.layout), assert_trivial=True)


@gluon.jit
def load_token_scales(token_scales, iter, I_VECTOR: gl.constexpr, cfg: gl.constexpr):
    """Loads one vector of an n_block's stored scales, broadcast to all rows: [1, BLOCK_N]."""
    return token_scales.index(iter % SCALE_STAGES * NUM_SCALE_VECTORS + I_VECTOR).load(
        gl.SliceLayout(0, score_layout(cfg))
    )[None, :]


@gluon.jit
def softmax_step(
    s, row_max, score_scales, softcap, token_scales, iter, n_block, is_unmasked, mask_args, cfg: gl.constexpr
):
    """Returns (p, its sums by lane, row_max, rescale) of an n_block's scores.

    row_max is raised only where P would overflow fp16, which is rare.
    """
    PLAIN: gl.constexpr = not cfg.TOKEN_SCALES and not cfg.HAS_SOFTCAP
    # Scales and softcap.
    if cfg.TOKEN_SCALES:
        s = s * load_token_scales(token_scales, iter, 0, cfg)
    if not PLAIN:
        x = view_by_lane(s)
        s = undo_view_by_lane(x * broadcast_by_lane(score_scales, x), s)
    if cfg.HAS_SOFTCAP:
        s = apply_softcap(s, softcap)
    if cfg.TOKEN_SCALES:  # as in `mainloop`: the V scale is added to the exponent
        s = s + load_token_scales(token_scales, iter, 1, cfg)
    # Mask.
    if not is_unmasked:
        s = gl.where(
            is_visible_in_block(n_block, mask_args, ROWS_PER_WARPGROUP, score_layout(cfg), cfg), s, float("-inf")
        )
    # Lazy row_max, P and its sums.
    lane_max = lane_row_max(s)
    if PLAIN:
        lane_max = lane_max * score_scales
    row_max_new, _ = gl.inline_asm_elementwise(
        LAZY_ROW_MAX_PTX, "=&f,=&f,=&r,=&r,f,f,f,f", [lane_max, row_max], [gl.float32, gl.int32], False, 2
    )  # fmt: skip
    safe_max = gl.where(row_max_new == float("-inf"), 0.0, row_max_new)
    x = view_by_lane(s)
    if PLAIN:
        x = x * broadcast_by_lane(score_scales, x)
    p = undo_view_by_lane(gl.exp2(x - broadcast_by_lane(safe_max, x)), s)
    if cfg.TOKEN_SCALES:
        p_sums = lane_row_sums(p * load_token_scales(token_scales, iter, 2, cfg))
    else:
        p_sums = lane_row_sums(p)
    return (
        p, gl.convert_layout(p_sums, row_max.type.layout, assert_trivial=True), row_max_new,
        gl.exp2(row_max - safe_max),
    )  # fmt: skip


@gluon.jit
def rescale_acc(acc_o, rescale):
    """Returns the accumulator times each row's rescale; a warp skips it where all are 1, as they mostly are."""
    x = view_by_lane(acc_o)
    scales, x = gl.broadcast(broadcast_by_lane(rescale, x), x)
    PTX: gl.constexpr = RESCALE_64_COLUMNS if acc_o.shape[1] == 64 else RESCALE_128_COLUMNS
    CONSTRAINTS: gl.constexpr = (
        RESCALE_64_COLUMNS_CONSTRAINTS if acc_o.shape[1] == 64 else RESCALE_128_COLUMNS_CONSTRAINTS
    )
    PACK: gl.constexpr = acc_o.shape[1] // 2
    return undo_view_by_lane(
        gl.inline_asm_elementwise(PTX, CONSTRAINTS, [x, scales], gl.float32, is_pure=True, pack=PACK), acc_o
    )
