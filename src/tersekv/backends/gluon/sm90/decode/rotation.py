"""Rotation and channel scales in decode: transforms Q and the accumulator of a CTA's heads, by `parts/hadamard`.

The scales of the columns are kept in shared memory in the kernel's column order: [packed tiles, heads, columns]. Caches
with neither rotation nor channel scales compile none of this.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts.hadamard import blockwise_hadamard, blockwise_hadamard_unpacked, load_rotation_scales
from .epilogue import logical_column
from .params import RotationSmem, SoftmaxState

UNSWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def allocate_rotation_smem(placeholder, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Allocates shared memory for the scales of K and V; `placeholder` where there are none."""
    k, v = placeholder, placeholder
    if tile_cfg.K.ROTATION.ENABLED:
        k = gl.allocate_shared_memory(gl.float32, [1, tile_cfg.HEADS_PER_CTA, cfg.D], UNSWIZZLED)
    if tile_cfg.V.ROTATION.ENABLED:
        NUM_TILES: gl.constexpr = 1 if tile_cfg.LARGE_M else tile_cfg.V.PACK
        v = gl.allocate_shared_memory(gl.float32, [NUM_TILES, tile_cfg.HEADS_PER_CTA, cfg.DV // NUM_TILES], UNSWIZZLED)
    return RotationSmem(k, v)


@gluon.jit
def _load_scales_of_side(
    tensors, first_head, NUM_TILES: gl.constexpr, D: gl.constexpr, rotation: gl.constexpr, cfg: gl.constexpr,
    tile_cfg: gl.constexpr,
):  # fmt: skip
    """Loads scales of K or V, for each of NUM_TILES tiles [heads, columns]; tensors: signs and channel scales."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    heads = first_head + gl.arange(0, tile_cfg.HEADS_PER_CTA, gl.SliceLayout(1, L))[:, None]
    position = gl.arange(0, D // NUM_TILES, gl.SliceLayout(0, L))[None, :]
    scales = ()
    for j in gl.static_range(NUM_TILES):
        o_head, o_d = gl.broadcast(
            heads, logical_column(position, cfg) if tile_cfg.LARGE_M else NUM_TILES * position + j
        )
        scales = scales + (load_rotation_scales(tensors[0], tensors[1], o_head, o_d, D, rotation),)
    return scales


@gluon.jit
def load_rotation_scales_of_heads(signs, channel_scales, first_head, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Loads the scales of K and of V to registers, before any copy is started."""
    K: gl.constexpr = tile_cfg.K.ROTATION
    V: gl.constexpr = tile_cfg.V.ROTATION
    k, v = (), ()
    if K.ENABLED:
        k = _load_scales_of_side((signs[0], channel_scales[0]), first_head, 1, cfg.D, K, cfg, tile_cfg)
    if V.ENABLED:
        v = _load_scales_of_side(
            (signs[1], channel_scales[1]), first_head, 1 if tile_cfg.LARGE_M else tile_cfg.V.PACK, cfg.DV, V, cfg,
            tile_cfg,
        )  # fmt: skip
    return k, v


@gluon.jit
def store_rotation_scales(rotation_smem, rotation_scales):
    """Stores the scales to shared memory; threads must synchronize before they are read."""
    k, v = rotation_scales
    for j in gl.static_range(len(k)):
        rotation_smem.k.index(j).store(k[j])
    for j in gl.static_range(len(v)):
        rotation_smem.v.index(j).store(v[j])


@gluon.jit
def rotate_query(x, rotation_smem, AXIS: gl.constexpr, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns query rows fp32, [heads, rows, columns] or [rows, columns] of one head, rotated and scaled as K needs."""
    if tile_cfg.K.ROTATION.ENABLED:
        L: gl.constexpr = x.type.layout
        if AXIS == 2:
            x = x * rotation_smem.k.index(0).load(gl.SliceLayout(1, L))[:, None, :]
        else:
            x = x * rotation_smem.k.index(0).reshape([cfg.D]).load(gl.SliceLayout(0, L))[None, :]
    if tile_cfg.K.ROTATION.ROTATED:
        x = blockwise_hadamard(x, AXIS, cfg.D)
    return x


@gluon.jit
def unrotate_acc(state, rotation_smem, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns the state with its accumulator unrotated and unscaled; it may be of some of the keys, or of all."""
    acc_o = state.acc_o
    if tile_cfg.V.ROTATION.ENABLED:
        if tile_cfg.LARGE_M:
            if tile_cfg.V.ROTATION.ROTATED:
                acc_o = blockwise_hadamard(acc_o, 1, cfg.DV)
            rotation_scales = rotation_smem.v.index(0).reshape([cfg.DV]).load(gl.SliceLayout(0, acc_o.type.layout))
            acc_o = acc_o * rotation_scales[None, :]
        else:
            if tile_cfg.V.ROTATION.ROTATED:
                acc_o = blockwise_hadamard_unpacked(acc_o, tile_cfg.V.PACK, 1, cfg.DV)
            tiles = ()
            for j in gl.static_range(gl.constexpr(tile_cfg.V.PACK)):
                rotation_scales = rotation_smem.v.index(j).load(gl.SliceLayout(2, acc_o[j].type.layout))
                tiles = tiles + (acc_o[j] * rotation_scales[:, :, None],)
            acc_o = tiles
    return SoftmaxState(state.row_max, state.row_sum, acc_o)
