"""Epilogue of prefill: an accumulator is unrotated, and its columns go to the output in stores of 16 bytes a lane."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts.epilogue import cast_output_saturating_fp8
from ..parts.hadamard import blockwise_hadamard_unnormalized, load_normalized_signs_times_channel_scales_if_any
from .tile_scheduler import head_columns_of_tile


@gluon.jit
def unrotate_and_scale_acc_rows(acc, rotation, kv_head, cfg: gl.constexpr):
    """Returns acc_o [rows, columns] with the cache's V rotation undone."""
    ROTATION: gl.constexpr = cfg.V_ROTATION
    if ROTATION.ROTATED:
        acc = blockwise_hadamard_unnormalized(acc, 1, cfg.HEAD_DIM_V & -cfg.HEAD_DIM_V)
    o_d = head_columns_of_tile(acc.shape[1], gl.SliceLayout(0, acc.type.layout), kv_head, True, cfg)
    return (
        acc
        * load_normalized_signs_times_channel_scales_if_any(
            rotation.V_SIGNS, rotation.V_CHANNEL_SCALES, kv_head, o_d, cfg.HEAD_DIM_V, ROTATION
        )[None, :]
    )


@gluon.jit
def scale_and_rotate_acc_rows_of_new_v(acc, rotation, kv_head, cfg: gl.constexpr):
    """Returns acc_o of new V [rows, columns] scaled and rotated as cached V is, to be added to that of cached V."""
    ROTATION: gl.constexpr = cfg.V_ROTATION
    o_d = head_columns_of_tile(acc.shape[1], gl.SliceLayout(0, acc.type.layout), kv_head, True, cfg)
    column_scales = load_normalized_signs_times_channel_scales_if_any(
        rotation.V_SIGNS, rotation.V_CHANNEL_SCALES, kv_head, o_d, cfg.HEAD_DIM_V, ROTATION, True
    )
    acc = acc * column_scales[None, :]
    if ROTATION.ROTATED:
        acc = blockwise_hadamard_unnormalized(acc, 1, cfg.HEAD_DIM_V & -cfg.HEAD_DIM_V)
    return acc


# Four registers of each of four lanes, transposed: lane i gets register i of all.
QUAD_TRANSPOSE_PTX = gl.constexpr(
    """{
    .reg .pred p, q;
    .reg .b32 l, x, y, a<4>;
    mov.u32 l, %laneid;
    and.b32 x, l, 1;
    setp.ne.u32 p, x, 0;
    and.b32 x, l, 2;
    setp.ne.u32 q, x, 0;
    selp.b32 x, $4, $5, p;
    selp.b32 y, $6, $7, p;
    shfl.sync.bfly.b32 x, x, 1, 0x1f, 0xffffffff;
    shfl.sync.bfly.b32 y, y, 1, 0x1f, 0xffffffff;
    selp.b32 a0, x, $4, p;
    selp.b32 a1, $5, x, p;
    selp.b32 a2, y, $6, p;
    selp.b32 a3, $7, y, p;
    selp.b32 x, a0, a2, q;
    selp.b32 y, a1, a3, q;
    shfl.sync.bfly.b32 x, x, 2, 0x1f, 0xffffffff;
    shfl.sync.bfly.b32 y, y, 2, 0x1f, 0xffffffff;
    selp.b32 $0, x, a0, q;
    selp.b32 $1, y, a1, q;
    selp.b32 $2, a2, x, q;
    selp.b32 $3, a3, y, q;
    }"""
)


@gluon.constexpr_function
def quad_transpose_layout(rows, columns):
    """Returns the layout of an accumulator, viewed as [rows, groups of 32 columns, 4 registers, 4 lanes, pairs], in
    which a thread's 8 values of a row and group are consecutive registers."""
    more_columns = [[0, 1 << i, 0, 0, 0] for i in range((columns // 32).bit_length() - 1)]
    registers = [[0, 0, 0, 0, 1], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [8, 0, 0, 0, 0], *more_columns]
    lanes = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]]
    return gl.DistributedLinearLayout(
        registers,
        lanes,
        [[16 << i, 0, 0, 0, 0] for i in range((rows // 16).bit_length() - 1)],
        [],
        [rows, columns // 32, 4, 4, 2],
    )


@gluon.constexpr_function
def adjacent_columns_layout(rows, columns):
    """Returns the accumulator's layout with lanes exchanged: each holds 8 adjacent columns of a row."""
    more_columns = [[0, 32 << i] for i in range((columns // 32).bit_length() - 1)]
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *more_columns]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[16 << i, 0] for i in range((rows // 16).bit_length() - 1)], [], [rows, columns]
    )


@gluon.jit
def transpose_quads(out):
    """Returns 16-bit outputs in `adjacent_columns_layout`: four lanes store 64 adjacent bytes of a row, not 16."""
    ROWS: gl.constexpr = out.shape[0]
    COLUMNS: gl.constexpr = out.shape[1]
    x = gl.reshape(out, [ROWS, COLUMNS // 32, 4, 4, 2])
    x = gl.convert_layout(x, quad_transpose_layout(ROWS, COLUMNS))
    x = gl.inline_asm_elementwise(QUAD_TRANSPOSE_PTX, "=&r,=&r,=&r,=&r,r,r,r,r", [x], x.dtype, False, 8)
    out = gl.reshape(gl.permute(x, (0, 1, 3, 2, 4)), [ROWS, COLUMNS])
    return gl.convert_layout(out, adjacent_columns_layout(ROWS, COLUMNS), assert_trivial=True)


@gluon.jit
def store_output_columns(OUT, acc_o, acc_scale, rows, strides, first_column, cfg: gl.constexpr):
    """Stores acc_o × acc_scale as output columns from `first_column` on."""
    # Beside int32 scores of the next tile, registers spill.
    ADJACENT: gl.constexpr = OUT.dtype.element_ty.primitive_bitwidth == 16 and not cfg.INT8_Q
    L: gl.constexpr = adjacent_columns_layout(acc_o.shape[0], acc_o.shape[1]) if ADJACENT else acc_o.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, L)
    tokens, q_heads, m_row = rows
    o_d = first_column + gl.arange(0, acc_o.shape[1], gl.SliceLayout(0, L))
    m_column = o_d < cfg.HEAD_DIM_V
    if cfg.V.PACKED_HEAD_STRIDE > 0:
        m_column = m_column & (o_d >= 0)
    valid = gl.convert_layout(m_row, ROW, assert_trivial=True)[:, None] & m_column[None, :]
    p_row = gl.convert_layout(OUT + tokens * strides[0] + q_heads * strides[1], ROW, assert_trivial=True)
    out = cast_output_saturating_fp8(acc_o * acc_scale[:, None], OUT, cfg)
    if ADJACENT:
        out = transpose_quads(out)
    gl.store(p_row[:, None] + o_d[None, :], out, mask=valid)
