"""Codes of padded heads, copied in chunks of 8 bytes by cp.async: rows of 4 bits at odd multiples of 8 bytes, which
tensor copies cannot bring. They lie in shared memory as those would leave them, with zeros behind each row.

Heads side by side are copied together by tensor copies even so (`tensor_maps._padded_heads_and_word_shift_per_head`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...versions import async_load, reinterpret

CHUNK_WORDS = gl.constexpr(4)  # packed words, of 16 bits


@gluon.jit
def start_code_chunk_copies(
    CODES, smem_codes, stage, page_id, first_head, page_slot, enabled, IS_V: gl.constexpr, NUM_WARPS: gl.constexpr,
    tile_cfg: gl.constexpr,
):  # fmt: skip
    """Copies the codes of a buffer's keys, which lie in one page; the caller commits, or arrives."""
    SIDE: gl.constexpr = tile_cfg.V if IS_V else tile_cfg.K
    STRIDES: gl.constexpr = SIDE.CODE_STRIDES
    HEADS: gl.constexpr = tile_cfg.HEADS_PER_CTA
    WORDS: gl.constexpr = SIDE.SMEM_SHAPE[3]
    TILES: gl.constexpr = tile_cfg.KEYS_PER_BUFFER // tile_cfg.MMA_KEYS
    LANES: gl.constexpr = WORDS // CHUNK_WORDS  # of a row
    L: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, CHUNK_WORDS], [1, 1, 32 // LANES, LANES], [1, 1, NUM_WARPS, 1], [3, 2, 1, 0]
    )
    o_tile = gl.arange(0, TILES, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))[:, None, None, None]
    o_h = gl.arange(0, HEADS, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))[None, :, None, None]
    o_key = gl.arange(0, tile_cfg.MMA_KEYS, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
    o_key = o_key[None, None, :, None]
    o_w = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))[None, None, None, :]
    o_word = o_h.to(gl.int64) * STRIDES[2] + o_key.to(gl.int64) * STRIDES[1]
    o_word += o_tile.to(gl.int64) * (tile_cfg.MMA_KEYS * STRIDES[1])
    o_first = page_id.to(gl.int64) * STRIDES[0] + page_slot.to(gl.int64) * STRIDES[1]
    o_first += first_head.to(gl.int64) * STRIDES[2]
    p_word = CODES.to(gl.pointer_type(gl.int16), bitcast=True) + o_first + (o_word + o_w)
    valid, p_word = gl.broadcast((o_w < SIDE.ROW_PACKED) & enabled, p_word)
    RING: gl.constexpr = [tile_cfg.STAGES, TILES, HEADS, tile_cfg.MMA_KEYS, WORDS]
    RING_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(SIDE.SWIZZLE, 16, 4)
    async_load(reinterpret(smem_codes, gl.int16, RING, RING_LAYOUT).index(stage), p_word, mask=valid)
