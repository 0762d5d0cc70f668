"""Rotation and channel scales (`attributes.py`): transforms queries to match such keys, and unrotates accumulators.

The same transform as `triton/parts/hadamard`, in the same order of columns. Here the location of a column is known: in
a register of its partner's thread, or in another lane of the warp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....host.kernel_config import KernelConfig
from .dequant import head_column_of_converted_column
from .online_softmax import SoftmaxState


@dataclass(frozen=True)
class Rotation(KernelConfig):
    """How the rows of K or V are stored."""

    ROTATED: bool
    SCALED: bool  # divided by channel scales
    CHANNEL_SCALES_STRIDE: int  # of a head's channel scales

    @property
    def ENABLED(self) -> bool:
        return self.ROTATED or self.SCALED


def rotation_config(signs: Any, channel_scales: Any) -> Rotation:
    """Returns the Rotation for the facts of signs and channel scales; None: there are none."""
    return Rotation(
        signs is not None, channel_scales is not None, 0 if channel_scales is None else channel_scales.stride[0]
    )


# ---- Hadamard transform ----


@gluon.constexpr_function
def log2(n):
    return n.bit_length() - 1


@gluon.constexpr_function
def num_elements(shape):
    n = 1
    for x in shape:
        n *= x
    return n


@gluon.constexpr_function
def partner_lane_xor_mask(layout, axis, distance):
    """Returns the lane distance, a power of two, of the element `distance` further along the axis; 0: same lane.
    layout: linear."""
    for i, basis in enumerate(layout.lane_bases):
        if basis[axis] == distance:
            return 1 << i
    assert any(basis[axis] == distance for basis in layout.reg_bases), "a row lies in more than one warp"
    return 0


@gluon.constexpr_function
def butterfly_ptx(lane_xor_mask):
    """Returns PTX of a butterfly whose partner is in another lane: a + b in the lower lane, a − b in the upper."""
    return f"""{{
    .reg .b32 x, y, l;
    mov.u32 l, %laneid;
    shl.b32 l, l, {32 - lane_xor_mask.bit_length()};
    and.b32 l, l, 0x80000000;
    xor.b32 x, $1, l;
    shfl.sync.bfly.b32 y, $1, {lane_xor_mask}, 0x1f, 0xffffffff;
    add.f32 $0, x, y;
    }}"""


@gluon.jit
def hadamard_butterfly(x, AXIS: gl.constexpr, DISTANCE: gl.constexpr):
    """Returns a + b and a − b of columns that are DISTANCE apart."""
    SHAPE: gl.constexpr = x.shape
    LANE: gl.constexpr = partner_lane_xor_mask(gl.to_linear_layout(x.type.layout, SHAPE), AXIS, DISTANCE)
    if LANE > 0:
        PTX: gl.constexpr = butterfly_ptx(LANE)
        return gl.inline_asm_elementwise(PTX, "=f,f", [x], gl.float32, False, 1)
    else:
        OUTER: gl.constexpr = num_elements(SHAPE[:AXIS]) * (SHAPE[AXIS] // (2 * DISTANCE))
        INNER: gl.constexpr = DISTANCE * num_elements(SHAPE[AXIS + 1 :])
        a, b = gl.split(gl.permute(gl.reshape(x, [OUTER, 2, INNER]), (0, 2, 1)))
        y = gl.reshape(gl.permute(gl.join(a + b, a - b), (0, 2, 1)), SHAPE)
        return gl.convert_layout(y, x.type.layout, assert_trivial=True)


@gluon.jit
def blockwise_hadamard_unnormalized(x, AXIS: gl.constexpr, HADAMARD_SIZE: gl.constexpr):
    """Returns fp32 x times Sylvester's Hadamard matrix along AXIS, in blocks of HADAMARD_SIZE columns. A row is in one
    warp."""
    for i in gl.static_range(log2(HADAMARD_SIZE)):
        x = hadamard_butterfly(x, AXIS, 1 << i)
    return x


@gluon.jit
def blockwise_hadamard_unnormalized_unpacked(
    tiles, PACK: gl.constexpr, AXIS: gl.constexpr, HADAMARD_SIZE: gl.constexpr
):
    """Returns the same for rows in PACK tensors: tensor j holds the columns PACK * i + j."""
    if PACK == 2:
        tiles = (tiles[0] + tiles[1], tiles[0] - tiles[1])
    elif PACK == 4:
        a, b, c, d = tiles[0] + tiles[1], tiles[0] - tiles[1], tiles[2] + tiles[3], tiles[2] - tiles[3]
        tiles = (a + c, b + d, a - c, b - d)
    transformed = ()
    for j in gl.static_range(PACK):
        transformed = transformed + (blockwise_hadamard_unnormalized(tiles[j], AXIS, HADAMARD_SIZE // PACK),)
    return transformed


# ---- scales of the columns ----


@gluon.jit
def load_normalized_signs_times_channel_scales_if_any(
    SIGNS, CHANNEL_SCALES, kv_heads, o_d, D: gl.constexpr, rotation: gl.constexpr,
    INVERT_CHANNEL_SCALES: gl.constexpr = False,
):  # fmt: skip
    """Returns the scales of columns o_d of KV heads: channel scales, and signs / sqrt(HADAMARD_SIZE).

    INVERT_CHANNEL_SCALES: reciprocals of the channel scales, for rows that are scaled as the cache's
    """
    HADAMARD_SIZE: gl.constexpr = D & -D
    INV_SQRT: gl.constexpr = HADAMARD_SIZE**-0.5
    if rotation.SCALED:
        scales = gl.load(
            CHANNEL_SCALES + kv_heads.to(gl.int64) * rotation.CHANNEL_SCALES_STRIDE + o_d, mask=o_d < D, other=1.0
        )
        if INVERT_CHANNEL_SCALES:
            scales = 1.0 / scales
        if rotation.ROTATED:
            scales = scales * (gl.load(SIGNS + o_d % HADAMARD_SIZE) * INV_SQRT)
    else:
        scales = gl.load(SIGNS + o_d % HADAMARD_SIZE) * INV_SQRT
    return scales


# ---- decode: scales in shared memory ----
# Loaded at a work tile's begin or end, they would queue behind all copies in flight. They are kept in the kernel's
# column order: [packed tiles, heads, columns]. Caches with neither rotation nor channel scales compile none of this.


class SmemColumnScales(NamedTuple):
    """Scales of the columns of Q and of the accumulator where rows are rotated or scaled."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor


UNSWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def allocate_smem_k_and_v_column_scales(placeholder, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Allocates shared memory for the scales of K and of V; `placeholder` for the one that has none."""
    k, v = placeholder, placeholder
    if tile_cfg.K.ROTATION.ENABLED:
        k = gl.allocate_shared_memory(gl.float32, [1, tile_cfg.HEADS_PER_CTA, cfg.D], UNSWIZZLED)
    if tile_cfg.V.ROTATION.ENABLED:
        NUM_PACKED_TILES: gl.constexpr = 1 if tile_cfg.LARGE_M else tile_cfg.V.PACK
        v = gl.allocate_shared_memory(
            gl.float32, [NUM_PACKED_TILES, tile_cfg.HEADS_PER_CTA, cfg.DV // NUM_PACKED_TILES], UNSWIZZLED
        )
    return SmemColumnScales(k, v)


@gluon.jit
def _load_packed_column_scales_of_k_or_v(
    SIGNS, CHANNEL_SCALES, first_head, NUM_PACKED_TILES: gl.constexpr, D: gl.constexpr, rotation: gl.constexpr,
    cfg: gl.constexpr, tile_cfg: gl.constexpr,
):  # fmt: skip
    """Loads scales of K or V, for each of NUM_PACKED_TILES tiles [heads, columns]."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    heads = first_head + gl.arange(0, tile_cfg.HEADS_PER_CTA, gl.SliceLayout(1, L))[:, None]
    position = gl.arange(0, D // NUM_PACKED_TILES, gl.SliceLayout(0, L))[None, :]
    scales = ()
    for j in gl.static_range(NUM_PACKED_TILES):
        o_head, o_d = gl.broadcast(
            heads,
            head_column_of_converted_column(position, cfg) if tile_cfg.LARGE_M else NUM_PACKED_TILES * position + j,
        )
        scales = scales + (
            load_normalized_signs_times_channel_scales_if_any(SIGNS, CHANNEL_SCALES, o_head, o_d, D, rotation),
        )
    return scales


@gluon.jit
def load_k_and_v_column_scales(signs, channel_scales, first_head, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Loads the scales of K and of V to registers, before any copy is started."""
    K: gl.constexpr = tile_cfg.K.ROTATION
    V: gl.constexpr = tile_cfg.V.ROTATION
    k, v = (), ()
    if K.ENABLED:
        k = _load_packed_column_scales_of_k_or_v(signs[0], channel_scales[0], first_head, 1, cfg.D, K, cfg, tile_cfg)
    if V.ENABLED:
        v = _load_packed_column_scales_of_k_or_v(
            signs[1], channel_scales[1], first_head, 1 if tile_cfg.LARGE_M else tile_cfg.V.PACK, cfg.DV, V, cfg,
            tile_cfg,
        )  # fmt: skip
    return k, v


@gluon.jit
def store_smem_k_and_v_column_scales(smem_column_scales, column_scales):
    """Stores the scales to shared memory; threads must synchronize before they are read."""
    k, v = column_scales
    for j in gl.static_range(len(k)):
        smem_column_scales.k.index(j).store(k[j])
    for j in gl.static_range(len(v)):
        smem_column_scales.v.index(j).store(v[j])


@gluon.jit
def scale_and_rotate_query(x, smem_column_scales, AXIS: gl.constexpr, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns query rows fp32, [heads, rows, columns] or [rows, columns] of one head, rotated and scaled as K needs."""
    if tile_cfg.K.ROTATION.ENABLED:
        L: gl.constexpr = x.type.layout
        if AXIS == 2:
            x = x * smem_column_scales.k.index(0).load(gl.SliceLayout(1, L))[:, None, :]
        else:
            x = x * smem_column_scales.k.index(0).reshape([cfg.D]).load(gl.SliceLayout(0, L))[None, :]
    if tile_cfg.K.ROTATION.ROTATED:
        x = blockwise_hadamard_unnormalized(x, AXIS, cfg.D)
    return x


@gluon.jit
def unrotate_and_scale_acc(state, smem_column_scales, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns the state with its accumulator unrotated and unscaled; it may be of some of the keys, or of all."""
    acc_o = state.acc_o
    if tile_cfg.V.ROTATION.ENABLED:
        if tile_cfg.LARGE_M:
            if tile_cfg.V.ROTATION.ROTATED:
                acc_o = blockwise_hadamard_unnormalized(acc_o, 1, cfg.DV)
            column_scales = smem_column_scales.v.index(0).reshape([cfg.DV]).load(gl.SliceLayout(0, acc_o.type.layout))
            acc_o = acc_o * column_scales[None, :]
        else:
            if tile_cfg.V.ROTATION.ROTATED:
                acc_o = blockwise_hadamard_unnormalized_unpacked(acc_o, tile_cfg.V.PACK, 1, cfg.DV)
            tiles = ()
            for j in gl.static_range(gl.constexpr(tile_cfg.V.PACK)):
                column_scales = smem_column_scales.v.index(j).load(gl.SliceLayout(2, acc_o[j].type.layout))
                tiles = tiles + (acc_o[j] * column_scales[:, :, None],)
            acc_o = tiles
    return SoftmaxState(state.row_max, state.row_sum, acc_o)


# ---- prefill: scales are loaded where they are used, as heads change with the work tile and shared memory is full ----


class RotationTensors(NamedTuple):
    """Signs and channel scales of K and V; None where the cache has none."""

    K_SIGNS: gl.tensor
    V_SIGNS: gl.tensor
    K_CHANNEL_SCALES: gl.tensor
    V_CHANNEL_SCALES: gl.tensor
