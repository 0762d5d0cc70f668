"""Hadamard rotation and channel scales (`calls.py`): of rows to append, of queries, and of outputs.

Butterflies run in registers and in the oracle's order, so that stored codes are the oracle's. A stage splits neighbours
and puts sums before differences, which moves the lowest bit of the column index to the top: the next bit's neighbours
are neighbours then, and after all stages columns are in order again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .quant import reciprocal_rn

_COLUMNS_PER_THREAD = tl.constexpr(
    8
)  # columns that a thread loads at once: their stages need no exchange between threads


@triton.constexpr_function
def log2(n):
    return n.bit_length() - 1


@triton.jit
def hadamard_butterflies(x, ROWS: tl.constexpr, HADAMARD_SIZE: tl.constexpr):
    """Returns rows [ROWS, HADAMARD_SIZE] times Sylvester's Hadamard matrix."""
    for _ in tl.static_range(log2(HADAMARD_SIZE)):
        a, b = tl.split(tl.reshape(x, [ROWS, HADAMARD_SIZE // 2, 2]))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), [ROWS, HADAMARD_SIZE])
    return x


@triton.jit
def blockwise_hadamard_unnormalized(x, HADAMARD_SIZE: tl.constexpr):
    """Returns rows [ROWS, C] fp32 times Sylvester's Hadamard matrix, in blocks of HADAMARD_SIZE columns."""
    NUM_BLOCKS: tl.constexpr = x.shape[0] * x.shape[1] // HADAMARD_SIZE
    LOW: tl.constexpr = min(HADAMARD_SIZE, _COLUMNS_PER_THREAD)
    HIGH: tl.constexpr = HADAMARD_SIZE // LOW
    transformed = hadamard_butterflies(tl.reshape(x, [NUM_BLOCKS * HIGH, LOW]), NUM_BLOCKS * HIGH, LOW)
    if HIGH > 1:
        transformed = tl.reshape(
            tl.permute(tl.reshape(transformed, [NUM_BLOCKS, HIGH, LOW]), (0, 2, 1)), [NUM_BLOCKS * LOW, HIGH]
        )
        transformed = tl.permute(
            tl.reshape(hadamard_butterflies(transformed, NUM_BLOCKS * LOW, HIGH), [NUM_BLOCKS, LOW, HIGH]), (0, 2, 1)
        )
    return tl.reshape(transformed, [x.shape[0], x.shape[1]])


@triton.jit
def blockwise_hadamard_unnormalized_unpacked(tiles, PACK: tl.constexpr, HADAMARD_SIZE: tl.constexpr):
    """Does `blockwise_hadamard_unnormalized` on PACK tiles [ROWS, C]: tile j holds the columns PACK * i + j."""
    if PACK == 2:
        tiles = (tiles[0] + tiles[1], tiles[0] - tiles[1])
    elif PACK == 4:
        a, b, c, d = tiles[0] + tiles[1], tiles[0] - tiles[1], tiles[2] + tiles[3], tiles[2] - tiles[3]
        tiles = (a + c, b + d, a - c, b - d)
    transformed = ()
    for j in tl.static_range(PACK):
        transformed = transformed + (blockwise_hadamard_unnormalized(tiles[j], HADAMARD_SIZE // PACK),)
    return transformed


@triton.jit
def divide_by_channel_scales_and_rotate(x, rotation, head, D: tl.constexpr):
    """Returns rows x [ROWS, C] fp32 of heads [ROWS], scaled and rotated before quantization.

    rotation:  pointers signs and channel scales, either may be None; then the stride of a head of the latter
    """
    p_signs, p_channel_scales, stride_channel_scales = rotation
    c = tl.arange(0, x.shape[1])[None, :]
    if p_channel_scales is not None:
        o_channels = head.to(tl.int64)[:, None] * stride_channel_scales + c
        x *= reciprocal_rn(tl.load(p_channel_scales + o_channels, mask=c < D, other=1.0))
    if p_signs is not None:
        HADAMARD_SIZE: tl.constexpr = D & -D
        x = (
            blockwise_hadamard_unnormalized(x * tl.load(p_signs + c % HADAMARD_SIZE), HADAMARD_SIZE)
            * HADAMARD_SIZE**-0.5
        )
    return x


@triton.jit
def load_channel_scales(
    p_channel_scales, stride_channel_scales, h, I_PACKED: tl.constexpr, PACK: tl.constexpr,
    PACKED_COLUMNS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Loads channel scales [1, PACKED_COLUMNS] of the columns PACK * i + j of KV head h."""
    c = (PACK * tl.arange(0, PACKED_COLUMNS) + I_PACKED)[None, :]
    return tl.load(p_channel_scales + h.to(tl.int64) * stride_channel_scales + c, mask=c < D, other=1.0)


@triton.jit
def scale_and_rotate_query(tiles, rotation, h, PACK: tl.constexpr, D: tl.constexpr):
    """Returns query rows of KV head h, fp32, PACK tiles [ROWS, C], rotated to match scaled and rotated keys."""
    p_signs, p_channel_scales, stride_channel_scales = rotation
    PACKED_COLUMNS: tl.constexpr = tiles[0].shape[1]
    HADAMARD_SIZE: tl.constexpr = D & -D
    out = ()
    for j in tl.static_range(PACK):
        x = tiles[j]
        if p_channel_scales is not None:
            x *= load_channel_scales(p_channel_scales, stride_channel_scales, h, j, PACK, PACKED_COLUMNS, D)
        if p_signs is not None:
            x *= (
                tl.load(p_signs + (PACK * tl.arange(0, PACKED_COLUMNS) + j) % HADAMARD_SIZE)[None, :]
                * HADAMARD_SIZE**-0.5
            )
        out = out + (x,)
    if p_signs is not None:
        out = blockwise_hadamard_unnormalized_unpacked(out, PACK, HADAMARD_SIZE)
    return out


@triton.jit
def unrotate_and_rescale_output(tiles, rotation, h, PACK: tl.constexpr, D: tl.constexpr):
    """Returns acc_o of KV head h, fp32, PACK tiles [ROWS, C], unrotated and times the channel scales.

    Works on a split's acc_o as on the whole: both steps are linear.
    """
    p_signs, p_channel_scales, stride_channel_scales = rotation
    PACKED_COLUMNS: tl.constexpr = tiles[0].shape[1]
    HADAMARD_SIZE: tl.constexpr = D & -D
    if p_signs is not None:
        tiles = blockwise_hadamard_unnormalized_unpacked(tiles, PACK, HADAMARD_SIZE)
    out = ()
    for j in tl.static_range(PACK):
        x = tiles[j]
        if p_signs is not None:
            x *= (
                tl.load(p_signs + (PACK * tl.arange(0, PACKED_COLUMNS) + j) % HADAMARD_SIZE)[None, :]
                * HADAMARD_SIZE**-0.5
            )
        if p_channel_scales is not None:
            x *= load_channel_scales(p_channel_scales, stride_channel_scales, h, j, PACK, PACKED_COLUMNS, D)
        out = out + (x,)
    return out
