"""PV in e4m3, which `precision="fast"` permits: the steps of `mainloop` that differ.

8-bit WGMMA needs both operands K-major. So the converter transposes V: ldmatrix with two columns an element, then one
byte permute of two keys and the two eight keys later. That permutes the keys of every 16 into the order in which a
thread holds P: P becomes an operand without leaving its registers.

8-bit WGMMA accumulates with too few bits: each tile starts from 0 and is added in fp32. PV runs in two halves of V's
columns, to save registers: the first is added while QK runs, the second is multiplied during the softmax.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from ...versions import thread_barrier
from ..parts.pipeline import consumer_wait, producer_acquire, stage_and_phase

# Four P of a thread, two neighbouring keys of a row and the two eight keys later → four e4m3 codes.
_PACK_E4M3_PTX = gl.constexpr(
    """{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
    }"""
)
# Two columns of keys 2a, 2a + 1 and of those eight later → four keys of either column.
_TRANSPOSE_PTX = gl.constexpr(
    """{
    prmt.b32 $0, $2, $3, 0x6420;
    prmt.b32 $1, $2, $3, 0x7531;
    }"""
)


class FP8SoftmaxState(NamedTuple):
    """As `mainloop.SoftmaxState`, with acc_o in halves one block behind: `rescale` is still to be applied to them."""

    acc_low: gl.tensor
    acc_high: gl.tensor
    rescale: gl.tensor
    row_max: gl.tensor
    row_sum: gl.tensor
    p_packed: gl.tensor


@gluon.constexpr_function
def half_acc_layout(cfg):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cfg.DV // 2, 32])


@gluon.jit
def split_keys_by_eight(x):
    """Returns (first, second) eight keys of every 16 of [rows, keys]: [rows, keys / 16, 8] each."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], x.shape[1] // 16, 2, 8]), (0, 1, 3, 2)))


@gluon.jit
def pack_p_e4m3(p):
    """Returns P as e4m3, four keys an int32: [rows, keys / 4]."""
    a, b = split_keys_by_eight(p)
    a0, a1 = gl.split(gl.reshape(a, [a.shape[0], a.shape[1], 4, 2]))
    b0, b1 = gl.split(gl.reshape(b, [b.shape[0], b.shape[1], 4, 2]))
    p_packed = gl.inline_asm_elementwise(_PACK_E4M3_PTX, "=r,f,f,f,f", [a0, a1, b0, b1], gl.int32, True, 1)
    return gl.reshape(p_packed, [p.shape[0], p.shape[1] // 4])


@gluon.jit
def unpack_p_e4m3(p_packed, cfg: gl.constexpr):
    """Returns packed P as an MMA operand [rows, keys].

    NOTE: pack the next P only after no MMA reads this one: ptxas gives both the same registers, and would serialize
    the MMAs.
    """
    A: gl.constexpr = gl.DotOperandLayout(0, half_acc_layout(cfg), 4)
    low_bytes = gl.join(p_packed.to(gl.int8), (p_packed >> 8).to(gl.int8))
    high_bytes = gl.join((p_packed >> 16).to(gl.int8), (p_packed >> 24).to(gl.int8))
    codes = gl.reshape(
        gl.permute(gl.join(low_bytes, high_bytes), (0, 1, 3, 2)), [p_packed.shape[0], 4 * p_packed.shape[1]]
    )
    return gl.convert_layout(codes.to(gl.float8e4nv, bitcast=True), A, assert_trivial=True)


@gluon.jit
def start_half_pv(p_operand, v_stages, iter, I_HALF: gl.constexpr, cfg: gl.constexpr):
    """Starts PV of a tile for half of V's columns; returns it in flight."""
    stage, _ = stage_and_phase(iter, cfg.STAGES)
    HALF_COLUMNS: gl.constexpr = cfg.DV // 2
    zero = gl.full([p_operand.shape[0], HALF_COLUMNS], 0.0, gl.float32, half_acc_layout(cfg))
    v = v_stages.tiles.index(stage).slice(I_HALF * HALF_COLUMNS, HALF_COLUMNS).permute((1, 0))
    return warpgroup_mma(p_operand, v, zero, use_acc=False, is_async=True)


@gluon.jit
def rescale_and_add(acc_o, product, rescale):
    """Returns acc_o × rescale + product."""
    return acc_o * gl.convert_layout(rescale, gl.SliceLayout(1, acc_o.type.layout))[:, None] + product


@gluon.jit
def concat_halves(acc_low, acc_high, LAYOUT: gl.constexpr):
    """Returns both halves side by side, in LAYOUT."""
    x = gl.permute(gl.join(acc_low, acc_high), (0, 2, 1))
    return gl.convert_layout(gl.reshape(x, [acc_low.shape[0], 2 * acc_low.shape[1]]), LAYOUT, assert_trivial=True)


@gluon.jit
def init_half_acc(NUM_ROWS: gl.constexpr, cfg: gl.constexpr):
    """Returns half of acc_o before the first block: zeros [NUM_ROWS, DV / 2]."""
    return gl.full([NUM_ROWS, cfg.DV // 2], 0.0, gl.float32, half_acc_layout(cfg))


@gluon.jit
def transpose_v_tile(code_stages, v_stages, iter, code_iter, key_begin, key_end, is_edge, cfg: gl.constexpr):
    """Transposes a tile of V codes to [columns, keys]; at an edge, keys outside [key_begin, key_end) become 0."""
    NUM_PACKED: gl.constexpr = code_stages.tiles.shape[2]
    L: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]), 2)
    code_tile = code_stages.tiles.index(consumer_wait(code_stages.full_barriers, code_iter, cfg.CODE_STAGES))
    packed = code_tile.permute((1, 0)).load(L)
    if is_edge:
        o_n = gl.arange(0, cfg.BLOCK_N, gl.SliceLayout(0, L))
        packed = gl.where(((o_n >= key_begin) & (o_n < key_end))[None, :], packed, 0)
    a, b = split_keys_by_eight(packed)
    even, odd = gl.inline_asm_elementwise(_TRANSPOSE_PTX, "=&r,=&r,r,r", [a, b], (gl.int16, gl.int16), True, 2)
    transposed = gl.reshape(gl.permute(gl.join(even, odd), (0, 3, 1, 2)), [2 * NUM_PACKED, cfg.BLOCK_N // 2])
    v_tile = v_stages.tiles.index(producer_acquire(v_stages.empty_barriers, iter, cfg.STAGES))
    v_tile.store(transposed)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(v_stages.full_barriers.index(stage_and_phase(iter, cfg.STAGES)[0]))
    mbarrier.arrive(code_stages.empty_barriers.index(stage_and_phase(code_iter, cfg.CODE_STAGES)[0]))
