"""Block scales of padded heads, copied in 4-byte words by cp.async: their rows are no multiples of 16 bytes, which
tensor copies want.

A row of SCALE_BLOCKS bytes begins in shared memory where its codes do: SCALE_SHIFT bytes later for each head of a group
of padded heads (`tensor_maps._padded_heads_and_word_shift_per_head`). In the cache this row may begin between two
words. Then shared memory has two words for each word of the row, those that it lies in, in two planes, and consumers
select its bytes from both. Words without a byte of the own row are zeros.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .....formats import KVFormat
from ...versions import async_load, reinterpret
from ..parts.tensor_maps import MMA_KEYS, KVLayout, TensorMapSpec, are_scales_copied_by_word

# ---- host ----


def why_scales_cannot_be_copied_by_word(f: SimpleNamespace, name: str) -> str | None:
    """Returns why not, or None: words are aligned in every page if they are in the first, and keys of a tile lie in one
    page."""
    scales, page = getattr(f, name), f.k_cache.shape[1]
    if page % MMA_KEYS:
        return f"wants pages of a multiple of {MMA_KEYS} with blocks of {scales.shape[3]} scales, got {page}"
    if not scales.aligned or scales.stride[0] % 4 or scales.stride[3] != 1:
        return f"wants {name} at a multiple of 16 bytes, and its pages at multiples of 4"
    return None


def scale_shift_and_unaligned(scale_cache: Any, codes: TensorMapSpec) -> tuple[int, bool]:
    """Returns (bytes by which a head's row begins later than the previous head's, whether rows begin between words in
    the cache)."""
    (_, s_s, s_h), heads, shift, group = scale_cache.stride[:3], scale_cache.shape[2], 0, codes.padded_heads
    if group > 1:  # as the codes: four in a packed word, 16 of a scale
        shift = (codes.strides[1] // group - codes.strides[2]) // 4
    steps = [s_s, s_h - shift if group > 1 else 0, s_h * group if heads > group else 0]
    return shift, any(n % 4 for n in steps)


def words_per_scale_row(padded_dim: int, unaligned: bool) -> int:
    """Returns the words of a row in shared memory."""
    return padded_dim // 64 * (2 if unaligned else 1)


def with_scales_by_word(
    layout: KVLayout, codes: TensorMapSpec, fmt: KVFormat, scale_cache: Any, heads_per_cta: int, padded_dim: int
) -> KVLayout:
    """Returns the KVLayout with its stored scales, if they are copied by word."""
    if not are_scales_copied_by_word(fmt, scale_cache):
        return layout
    shift, unaligned = scale_shift_and_unaligned(scale_cache, codes)
    return replace(
        layout,
        SCALE_SMEM_SHAPE=(
            layout.SMEM_SHAPE[0], heads_per_cta, MMA_KEYS, words_per_scale_row(padded_dim, unaligned)
        ),
        SCALE_ROWS_ARE_KEYS=False,
        SCALE_STRIDES=scale_cache.stride[:3],
        SCALE_BLOCKS=scale_cache.shape[3],
        SCALE_SHIFT=shift,
        SCALES_UNALIGNED=unaligned,
    )  # fmt: skip


# ---- where a row begins ----


@gluon.constexpr_function
def _steps(SIDE):
    """Returns the bytes from one group of padded heads to the next, from a head of it to the next, less their distance
    in shared memory, and from one key to the next."""
    _, s_s, s_h = SIDE.SCALE_STRIDES
    return SIDE.PADDED_HEADS * s_h, s_h - SIDE.SCALE_SHIFT, s_s


@gluon.jit
def bytes_beyond_whole_words(o_h, o_key, SIDE: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns what the bytes from the CTA's first row to that of head o_h and key o_key have beyond whole words, each
    step and four keys counted apart; modulo 4, where the row begins in its first word."""
    STEPS: gl.constexpr = _steps(SIDE)
    o_byte = o_h // SIDE.PADDED_HEADS * (STEPS[0] % 4) + o_h % SIDE.PADDED_HEADS * (STEPS[1] % 4)
    o_byte += o_key % 4 * (STEPS[2] % 4)
    CTA_STEP: gl.constexpr = tile_cfg.HEADS_PER_CTA * SIDE.SCALE_STRIDES[2] % 4
    if CTA_STEP > 0:
        o_byte += gl.program_id(0) % tile_cfg.HEAD_GROUPS * CTA_STEP % 4
    return o_byte


# ---- producer ----


@gluon.constexpr_function
def _copy_layout(SIDE, shape, num_warps):
    """Returns the layout of words [tiles, heads, keys, words]: a warp copies neighbours in the cache. Of heads side by
    side it takes two only: their rows in shared memory begin in one bank."""
    words = shape[3]
    heads = min(shape[1], 2) if SIDE.SCALE_STRIDES[2] < SIDE.SCALE_STRIDES[1] else 1
    keys = min(shape[2], 32 // (words * heads))
    tiles = 32 // (words * heads * keys)
    return gl.BlockedLayout([1, 1, 1, 1], [tiles, heads, keys, words], [1, 1, num_warps, 1], [3, 1, 2, 0])


@gluon.jit
def start_scale_word_copies(
    SCALES, smem_scales, stage, page_id, first_head, page_slot, enabled, IS_V: gl.constexpr, NUM_WARPS: gl.constexpr,
    tile_cfg: gl.constexpr,
):  # fmt: skip
    """Copies the stored scales of a buffer's keys, which lie in one page; the caller commits, or arrives."""
    SIDE: gl.constexpr = tile_cfg.V if IS_V else tile_cfg.K
    S: gl.constexpr = SIDE.SCALE_STRIDES
    HEADS: gl.constexpr = SIDE.SCALE_SMEM_SHAPE[1]
    ROW_WORDS: gl.constexpr = SIDE.SCALE_SMEM_SHAPE[3]
    TILES: gl.constexpr = tile_cfg.KEYS_PER_BUFFER // tile_cfg.MMA_KEYS
    SHAPE: gl.constexpr = [TILES, HEADS, tile_cfg.MMA_KEYS, ROW_WORDS]
    L: gl.constexpr = _copy_layout(SIDE, SHAPE, NUM_WARPS)
    RING: gl.constexpr = [tile_cfg.STAGES, TILES, HEADS, tile_cfg.MMA_KEYS, ROW_WORDS]
    RING_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    o_tile = gl.arange(0, TILES, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))[:, None, None, None]
    o_h = gl.arange(0, HEADS, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))[None, :, None, None]
    o_key = gl.arange(0, tile_cfg.MMA_KEYS, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
    o_key = o_key[None, None, :, None]
    o_w = gl.arange(0, ROW_WORDS, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))[None, None, None, :]
    # Rows in whole words, so that a lane's addresses differ by constants.
    STEPS: gl.constexpr = _steps(SIDE)
    o_word = (o_h // SIDE.PADDED_HEADS).to(gl.int64) * (STEPS[0] // 4) + o_h % SIDE.PADDED_HEADS * (STEPS[1] // 4)
    o_word += o_key.to(gl.int64) * (STEPS[2] // 4) + o_tile.to(gl.int64) * (tile_cfg.MMA_KEYS // 4 * STEPS[2])
    row_begin = o_h % SIDE.PADDED_HEADS * SIDE.SCALE_SHIFT
    if SIDE.SCALES_UNALIGNED:  # a second plane has the words one further
        o_byte = bytes_beyond_whole_words(o_h, o_key, SIDE, tile_cfg)
        o_word += (o_byte >> 2) + o_key // 4 * (STEPS[2] % 4)
        row_begin += o_byte & 3
        o_w = o_w % (ROW_WORDS // 2) + o_w // (ROW_WORDS // 2)
    # Words that have a byte of the own row.
    valid = (4 * o_w + 3 >= row_begin) & (4 * o_w < row_begin + SIDE.SCALE_BLOCKS) & enabled
    page_slot, first_head = page_slot.to(gl.int64), first_head.to(gl.int64)
    o_first = page_id.to(gl.int64) * (S[0] // 4) + page_slot // 4 * S[1] + (first_head * S[2] >> 2)
    p_word = SCALES.to(gl.pointer_type(gl.int32), bitcast=True) + o_first + (o_word + o_w)
    valid, p_word = gl.broadcast(valid, p_word)
    async_load(reinterpret(smem_scales, gl.int32, RING, RING_LAYOUT).index(stage), p_word, mask=valid)


# ---- consumers ----


@gluon.jit
def own_block_byte_masks(o_h, first_block, SIDE: gl.constexpr):
    """Returns, for two bytes of scales from first_block on, 0xFF where they are the head's own."""
    block = first_block - o_h % SIDE.PADDED_HEADS * SIDE.SCALE_SHIFT
    low = gl.where((block >= 0) & (block < SIDE.SCALE_BLOCKS), 0xFF, 0)
    return low | gl.where((block >= -1) & (block < SIDE.SCALE_BLOCKS - 1), 0xFF00, 0)


@gluon.jit
def load_both_planes(smem_scales, LAYOUT: gl.constexpr, DIM: gl.constexpr, SIDE: gl.constexpr):
    """Loads the words of rows, and the words one further, from an MMA tile whose dimension DIM are words."""
    if SIDE.SCALES_UNALIGNED:
        NUM_WORDS: gl.constexpr = smem_scales.shape[DIM] // 2
        words = smem_scales.slice(0, NUM_WORDS, DIM).load(LAYOUT)
        next_words = smem_scales.slice(NUM_WORDS, NUM_WORDS, DIM).load(LAYOUT)
    else:
        words = smem_scales.load(LAYOUT)
        next_words = words
    return words, next_words
