"""Register layouts of decode's tiles. Nothing crosses lanes: every layout conversion is trivial.

A warp has a KV head, or one in WARPS_PER_HEAD of its query rows; its MMA tiles are 16 keys. With KEY_PARTS the
HEADS_PER_CTA heads of these layouts are parts of one head's keys. Both MMAs run as m16n8k16
with keys (or V columns) on M and query rows on N, so warps exchange nothing. The order of the contracted dimension is
free: a lane loads a contiguous run of a key's row, and the same of the query's
(`producer.rotate_to_query_operands_and_q_scales`). V is transposed by ldmatrix in 16-bit packed words; tile j of PACK
holds the columns PACK * i + j, as in the Triton kernels.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts.dequant import (
    K_BLOCK_SCALES_OF_TWO_WORDS_PTX,
    K_BLOCK_SCALES_PTX,
    V_BLOCK_SCALES_PTX,
    WORD_OF_TWO_PTX,
)
from .scale_words import bytes_beyond_whole_words, load_both_planes, own_block_byte_masks

# ---- layouts ----


@gluon.constexpr_function
def _warp_bases_by_head_replicating_keys(HEADS_PER_CTA, WARPS_PER_HEAD, rank):
    """Returns the warp bases: WARPS_PER_HEAD warps with the same keys, then a KV head each, heads in the first
    dimension."""
    bases, head = [[0] * rank] * (WARPS_PER_HEAD.bit_length() - 1), 1
    while head < HEADS_PER_CTA:
        bases.append([head] + [0] * (rank - 1))
        head *= 2
    return bases


@gluon.constexpr_function
def _register_bases_of_keys_from_16_on(NUM_KEYS, rank, dim):
    """Returns the register bases of the keys from 16 on."""
    bases, key = [], 16
    while key < NUM_KEYS:
        bases.append([key if i == dim else 0 for i in range(rank)])
        key *= 2
    return bases


@gluon.constexpr_function
def _lane_stretch_and_panels(CODE_WORDS_PER_ROW):
    """Returns (packed words of a lane in each panel of at most 128 bytes of a row, number of panels)."""
    return min(CODE_WORDS_PER_ROW, 64) // 4, max(CODE_WORDS_PER_ROW // 64, 1)


@gluon.constexpr_function
def mma_layout(HEADS_PER_CTA, WARPS_PER_HEAD):
    """Returns the accumulator layout of both MMAs: [HEADS_PER_CTA, keys or V columns, BLOCK_M]."""
    return gl.NVMMADistributedLayout([2, 0], [HEADS_PER_CTA, 1, WARPS_PER_HEAD], [1, 16, 8])


@gluon.constexpr_function
def k_load_layout(HEADS_PER_CTA, WARPS_PER_HEAD, NUM_KEYS, CODE_WORDS_PER_ROW):
    """Returns the layout of packed K [HEADS_PER_CTA, NUM_KEYS, CODE_WORDS_PER_ROW]: lane l has key l // 4 (and 8
    more) and a run of its row."""
    stretch, panels = _lane_stretch_and_panels(CODE_WORDS_PER_ROW)
    regs = [[0, 0, 1 << i] for i in range(stretch.bit_length() - 1)]
    regs += (
        [[0, 8, 0]]
        + [[0, 0, 64 << i] for i in range(panels.bit_length() - 1)]
        + _register_bases_of_keys_from_16_on(NUM_KEYS, 3, 1)
    )
    lanes = [[0, 0, stretch], [0, 0, 2 * stretch], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(
        regs,
        lanes,
        _warp_bases_by_head_replicating_keys(HEADS_PER_CTA, WARPS_PER_HEAD, 3),
        [],
        [HEADS_PER_CTA, NUM_KEYS, CODE_WORDS_PER_ROW],
    )


@gluon.constexpr_function
def query_load_layout(HEADS_PER_CTA, WARPS_PER_HEAD, NUM_ROWS, CODE_WORDS_PER_ROW, PACK):
    """Returns the layout of a query [HEADS_PER_CTA, NUM_ROWS, CODE_WORDS_PER_ROW * PACK columns]: lane l has row
    l // 4 and the same columns as of its keys."""
    stretch, panels = _lane_stretch_and_panels(CODE_WORDS_PER_ROW)
    columns = stretch * PACK
    rows = [[0, 8 << i, 0] for i in range((NUM_ROWS // 8).bit_length() - 1)]
    heads = [[1 << i, 0, 0] for i in range(HEADS_PER_CTA.bit_length() - 1)]
    shared = WARPS_PER_HEAD.bit_length() - 1
    regs = [[0, 0, 1 << i] for i in range(columns.bit_length() - 1)]
    regs += [[0, 0, (4 * columns) << i] for i in range(panels.bit_length() - 1)] + rows[shared:]
    lanes = [[0, 0, columns], [0, 0, 2 * columns], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(
        regs, lanes, rows[:shared] + heads, [], [HEADS_PER_CTA, NUM_ROWS, CODE_WORDS_PER_ROW * PACK]
    )


@gluon.constexpr_function
def k_block_scale_word_of_4_load_layout(HEADS_PER_CTA, WARPS_PER_HEAD, NUM_KEYS, CODE_WORDS_PER_ROW):
    """Returns the layout [HEADS_PER_CTA, NUM_KEYS, words, parts of a word] of a key's block scales: lane l % 4 has the
    l-th part."""
    num_words = CODE_WORDS_PER_ROW // 16
    lanes = {
        1: [[0, 0, 0, 1], [0, 0, 0, 2]],
        2: [[0, 0, 0, 1], [0, 0, 1, 0]],
        4: [[0, 0, 1, 0], [0, 0, 2, 0]],
    }[num_words]
    lanes = lanes + [[0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    return gl.DistributedLinearLayout(
        [[0, 8, 0, 0], *_register_bases_of_keys_from_16_on(NUM_KEYS, 4, 1)],
        lanes,
        _warp_bases_by_head_replicating_keys(HEADS_PER_CTA, WARPS_PER_HEAD, 4),
        [],
        [HEADS_PER_CTA, NUM_KEYS, num_words, 4 // num_words],
    )


@gluon.constexpr_function
def k_block_scale_broadcast_layout(HEADS_PER_CTA, WARPS_PER_HEAD, NUM_KEYS, CODE_WORDS_PER_ROW):
    """Returns `k_load_layout` with the packed words as [blocks, 4]."""
    blocks = CODE_WORDS_PER_ROW // 16  # of a lane
    regs = [[0, 0, 0, 1], [0, 0, 0, 2]] + [[0, 0, 1 << i, 0] for i in range(blocks.bit_length() - 1)]
    regs += [[0, 8, 0, 0], *_register_bases_of_keys_from_16_on(NUM_KEYS, 4, 1)]
    lanes = [
        [0, 0, blocks, 0],
        [0, 0, 2 * blocks, 0],
        [0, 1, 0, 0],
        [0, 2, 0, 0],
        [0, 4, 0, 0],
    ]
    return gl.DistributedLinearLayout(
        regs,
        lanes,
        _warp_bases_by_head_replicating_keys(HEADS_PER_CTA, WARPS_PER_HEAD, 4),
        [],
        [HEADS_PER_CTA, NUM_KEYS, CODE_WORDS_PER_ROW // 4, 4],
    )


@gluon.constexpr_function
def v_block_scale_word_of_4_load_layout(HEADS_PER_CTA, WARPS_PER_HEAD, NUM_KEYS, CODE_WORDS_PER_ROW):
    """Returns the layout [HEADS_PER_CTA, words, 2 bytes of a half, 4 packed, NUM_KEYS] of V block scales, as the MMA
    operand needs them."""
    regs = (
        [[0, 0, 0, 0, 1], [0, 0, 0, 0, 8]]
        + [[0, 1 << i, 0, 0, 0] for i in range((CODE_WORDS_PER_ROW // 16).bit_length() - 1)]  # words of block scales
        + _register_bases_of_keys_from_16_on(NUM_KEYS, 5, 4)
    )
    lanes = [
        [0, 0, 0, 0, 2],
        [0, 0, 0, 0, 4],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 2, 0],
        [0, 0, 1, 0, 0],
    ]
    return gl.DistributedLinearLayout(
        regs, lanes, _warp_bases_by_head_replicating_keys(HEADS_PER_CTA, WARPS_PER_HEAD, 5), [],
        [HEADS_PER_CTA, CODE_WORDS_PER_ROW // 16, 2, 4, NUM_KEYS],
    )  # fmt: skip


@gluon.constexpr_function
def v_block_scale_broadcast_layout(HEADS_PER_CTA, WARPS_PER_HEAD, NUM_KEYS, CODE_WORDS_PER_ROW):
    """Returns the layout [HEADS_PER_CTA, blocks, 4 packed, NUM_KEYS]: the operand's, with the packed words as [blocks,
    4]."""
    regs = (
        [[0, 0, 0, 1], [0, 0, 0, 8]]
        + [[0, 2 << i, 0, 0] for i in range((CODE_WORDS_PER_ROW // 8).bit_length() - 1)]
        + _register_bases_of_keys_from_16_on(NUM_KEYS, 4, 3)
    )
    lanes = [[0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0]]
    return gl.DistributedLinearLayout(
        regs,
        lanes,
        _warp_bases_by_head_replicating_keys(HEADS_PER_CTA, WARPS_PER_HEAD, 4),
        [],
        [HEADS_PER_CTA, CODE_WORDS_PER_ROW // 4, 4, NUM_KEYS],
    )


# ---- query operands in shared memory ----


@gluon.constexpr_function
def _query_smem_copy_layout(CODE_WORDS_PER_ROW, NUM_ROWS, tile_cfg):
    """Returns the layout of a query operand in shared memory: each lane has one contiguous row."""
    return gl.BlockedLayout([1, CODE_WORDS_PER_ROW * NUM_ROWS // 32], [32, 1], [tile_cfg.HEADS_PER_CTA, 1], [1, 0])


@gluon.jit
def store_query_fragment(smem_q, I_OPERAND: gl.constexpr, q_tile, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Stores a query operand [HEADS_PER_CTA, PACKED_K, BLOCK_M], the right operand, to shared memory."""
    CODE_WORDS_PER_ROW: gl.constexpr = cfg.PACKED_K
    q_tile = q_tile.reshape([tile_cfg.HEADS_PER_CTA, CODE_WORDS_PER_ROW // 16, 2, 4, 2, cfg.BLOCK_M // 8, 8]).permute(
        [0, 6, 3, 5, 1, 2, 4]
    )
    q_tile = q_tile.reshape([tile_cfg.HEADS_PER_CTA * 32, CODE_WORDS_PER_ROW * cfg.BLOCK_M // 32])
    smem_q.index(I_OPERAND).store(
        gl.convert_layout(
            q_tile, _query_smem_copy_layout(CODE_WORDS_PER_ROW, cfg.BLOCK_M, tile_cfg), assert_trivial=True
        )
    )


@gluon.jit
def load_query_fragment(smem_q, I_OPERAND: gl.constexpr, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Loads a query operand from shared memory."""
    CODE_WORDS_PER_ROW: gl.constexpr = cfg.PACKED_K
    q_tile = smem_q.index(I_OPERAND).load(_query_smem_copy_layout(CODE_WORDS_PER_ROW, cfg.BLOCK_M, tile_cfg))
    q_tile = q_tile.reshape([tile_cfg.HEADS_PER_CTA, 8, 4, cfg.BLOCK_M // 8, CODE_WORDS_PER_ROW // 16, 2, 2]).permute(
        [0, 4, 5, 2, 6, 3, 1]
    )
    q_tile = q_tile.reshape([tile_cfg.HEADS_PER_CTA, CODE_WORDS_PER_ROW, cfg.BLOCK_M])
    return gl.convert_layout(
        q_tile,
        gl.DotOperandLayout(1, mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD), 2),
        assert_trivial=True,
    )


# ---- key parts ----
# A copy of one head's stored scales begins at a multiple of 16 bytes and has other heads' too
# (`tensor_maps.scale_map_spec_of_a_head_or_none`): a thread loads them all, and takes its own.


@gluon.constexpr_function
def _linear_layout_with_all_copied_heads(linear, KEYS_DIM, NUM_WORDS, NUM_HEADS, SHAPE):
    """Returns a linear layout of one head's scales, [parts, keys] or with words behind or before the keys, as one of
    [parts, keys, heads × words] in which a thread has those of all heads."""

    def with_words_last(base):
        return [base[0], base[KEYS_DIM], base[3 - KEYS_DIM] if len(base) == 3 else 0]

    regs, lanes, warps = (
        [with_words_last(x) for x in bases] for bases in (linear.reg_bases, linear.lane_bases, linear.warp_bases)
    )
    heads = [[0, 0, NUM_WORDS << i] for i in range(NUM_HEADS.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        heads + regs, lanes, warps, [], [SHAPE[0], SHAPE[KEYS_DIM], NUM_HEADS * NUM_WORDS]
    )  # fmt: skip


@gluon.jit
def load_scales_of_own_head(
    smem, LAYOUT: gl.constexpr, SHAPE: gl.constexpr, KEYS_DIM: gl.constexpr, NUM_WORDS: gl.constexpr,
    tile_cfg: gl.constexpr,
):  # fmt: skip
    """Loads the CTA's one head's scales from an MMA tile [KEY_PARTS, MMA_KEYS, heads × NUM_WORDS], in LAYOUT, of SHAPE,
    whose dimension KEYS_DIM are the keys."""
    NUM_HEADS: gl.constexpr = smem.shape[2] // NUM_WORDS
    P: gl.constexpr = smem.shape[0]
    K: gl.constexpr = smem.shape[1]
    x = smem.load(
        _linear_layout_with_all_copied_heads(gl.to_linear_layout(LAYOUT, SHAPE), KEYS_DIM, NUM_WORDS, NUM_HEADS, SHAPE)
    )
    if NUM_HEADS > 1:
        head = gl.program_id(0) % tile_cfg.HEAD_GROUPS
        x = x.reshape([P, K, NUM_HEADS, NUM_WORDS]).permute([0, 1, 3, 2])
        even, odd = x.reshape([P, K, NUM_WORDS, NUM_HEADS // 2, 2]).split()
        x = gl.where(head % 2 == 0, even, odd)
        if NUM_HEADS == 4:
            even, odd = x.split()
            x = gl.where(head // 2 % 2 == 0, even, odd)
    if KEYS_DIM == 2:
        x = x.reshape([P, K, NUM_WORDS]).permute([0, 2, 1])
    return gl.convert_layout(x.reshape(SHAPE), LAYOUT, assert_trivial=True)


# ---- heads in column parts ----
# A head of more than 256 columns is HEAD_DIM_PARTS heads of fewer, each a warp's (or WARPS_PER_HEAD warps'), that see
# the same keys. What they have in common: the scores, which are sums over the parts, and scales of the head.


@gluon.constexpr_function
def _linear_layout_with_heads_axis_split(linear, shape, HEAD_DIM_PARTS):
    """Returns a linear layout of [heads, keys] as one of [heads / HEAD_DIM_PARTS, HEAD_DIM_PARTS, keys]."""
    bases = [
        [[head // HEAD_DIM_PARTS, head % HEAD_DIM_PARTS, key] for head, key in found]
        for found in (linear.reg_bases, linear.lane_bases, linear.warp_bases)
    ]
    return gl.DistributedLinearLayout(*bases, [], [shape[0] // HEAD_DIM_PARTS, HEAD_DIM_PARTS, shape[1]])


@gluon.jit
def load_token_scales(smem, LAYOUT: gl.constexpr, tile_cfg: gl.constexpr):
    """Loads the token scales of an MMA tile: [HEADS_PER_CTA, MMA_KEYS]. Parts of a head's columns have the same."""
    PARTS: gl.constexpr = tile_cfg.HEAD_DIM_PARTS
    SHAPE: gl.constexpr = [tile_cfg.HEADS_PER_CTA, tile_cfg.MMA_KEYS]
    if tile_cfg.KEY_PARTS > 1:
        return load_scales_of_own_head(smem, LAYOUT, SHAPE, 1, 1, tile_cfg)
    elif PARTS == 1:
        return smem.load(LAYOUT)
    else:
        L: gl.constexpr = _linear_layout_with_heads_axis_split(gl.to_linear_layout(LAYOUT, SHAPE), SHAPE, PARTS)
        x = smem.load(gl.SliceLayout(1, L))
        x, _ = gl.broadcast(x[:, None, :], gl.full([SHAPE[0] // PARTS, PARTS, SHAPE[1]], 0, x.dtype, L))
        return gl.convert_layout(x.reshape(SHAPE), LAYOUT, assert_trivial=True)


@gluon.jit
def kv_heads_of_cta(first_head, LAYOUT: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns the KV heads of the CTA: [HEADS_PER_CTA]. Key parts have the same."""
    o_h = gl.arange(0, tile_cfg.HEADS_PER_CTA, LAYOUT)
    if tile_cfg.KEY_PARTS > 1:
        return first_head + o_h * 0
    else:
        return first_head + o_h


@gluon.jit
def query_heads_of_rows(kv_heads, o_r, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns the query heads of rows o_r, all heads of a group counted, of KV heads or parts of them."""
    return (kv_heads // tile_cfg.HEAD_DIM_PARTS * cfg.GROUP + o_r % cfg.GROUP).to(gl.int64)


# ---- K and V as operands ----


@gluon.jit
def packed_column_offset_in_padded_tile(kv_heads, IS_V: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns the packed column of a copied row at which a head's own columns begin
    (`tensor_maps._padded_heads_and_word_shift_per_head`)."""
    SIDE: gl.constexpr = tile_cfg.V if IS_V else tile_cfg.K
    return kv_heads % SIDE.PADDED_HEADS * SIDE.HEAD_SHIFT


@gluon.jit
def dequantized_k_to_mma_operand(k, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns K [HEADS_PER_CTA, MMA_KEYS, PACKED_K] (k_load_layout) as the left operand, columns in the order of
    `producer.rotate_to_query_operands_and_q_scales`."""
    STRETCH: gl.constexpr = min(cfg.PACKED_K, 64) // 4
    SHAPE: gl.constexpr = [tile_cfg.HEADS_PER_CTA, tile_cfg.MMA_KEYS, cfg.PACKED_K // (4 * STRETCH), 4, STRETCH // 2, 2]
    k = k.reshape(SHAPE).permute([0, 1, 2, 4, 3, 5]).reshape([tile_cfg.HEADS_PER_CTA, tile_cfg.MMA_KEYS, cfg.PACKED_K])
    return gl.convert_layout(
        k, gl.DotOperandLayout(0, mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD), 2), assert_trivial=True
    )


# ---- block scales ----


@gluon.jit
def _k_block_scale_pair_of_padded_head(
    scale_words, next_words, selector, FIRST_BLOCK: gl.constexpr, i_part, L4: gl.constexpr, tile_cfg: gl.constexpr
):
    """Returns the bytes of the words that the selector names, as two fp16, or 0 for those that are not the head's own:
    0 × NaN is NaN. They are blocks FIRST_BLOCK and FIRST_BLOCK + 1 of part i_part."""
    K: gl.constexpr = tile_cfg.K
    NUM_WORDS: gl.constexpr = scale_words.shape[2]
    o_h = gl.arange(0, tile_cfg.HEADS_PER_CTA, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L4))))
    o_key = gl.arange(0, tile_cfg.MMA_KEYS, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L4))))
    o_w = gl.arange(0, NUM_WORDS, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L4))))
    o_h, o_key, o_w = o_h[:, None, None, None], o_key[None, :, None, None], o_w[None, None, :, None]
    masks = own_block_byte_masks(o_h, 4 * o_w + NUM_WORDS * i_part + FIRST_BLOCK, K)
    if K.SCALES_UNALIGNED:
        selector += (bytes_beyond_whole_words(o_h, o_key, K, tile_cfg) & 3) * 0x11
    next_words, scale_words = gl.broadcast(next_words, scale_words)
    return gl.inline_asm_elementwise(
        K_BLOCK_SCALES_OF_TWO_WORDS_PTX, "=h,=h,r,r,r,r", [scale_words, next_words, selector, masks],
        (gl.float16, gl.float16), True, 1,
    )  # fmt: skip


@gluon.jit
def load_and_expand_k_block_scales_to_fp16(smem_scales, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Loads K block scales of an MMA tile [HEADS_PER_CTA, MMA_KEYS, words] as fp16 [HEADS_PER_CTA, MMA_KEYS, PACKED_K]
    in k_load_layout."""
    NUM_WORDS: gl.constexpr = cfg.PACKED_K // 16
    PARTS_PER_WORD: gl.constexpr = 4 // NUM_WORDS
    L4: gl.constexpr = k_block_scale_word_of_4_load_layout(
        tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD, tile_cfg.MMA_KEYS, cfg.PACKED_K
    )
    W: gl.constexpr = gl.SliceLayout(3, L4)
    K: gl.constexpr = tile_cfg.K
    if tile_cfg.KEY_PARTS > 1:
        SHAPE: gl.constexpr = [tile_cfg.HEADS_PER_CTA, tile_cfg.MMA_KEYS, NUM_WORDS]
        scale_words = load_scales_of_own_head(smem_scales, W, SHAPE, 1, NUM_WORDS, tile_cfg)[:, :, :, None]
        next_words = scale_words
    else:
        scale_words, next_words = load_both_planes(smem_scales, W, 2, K)
        scale_words, next_words = scale_words[:, :, :, None], next_words[:, :, :, None]
    i_part = gl.arange(0, PARTS_PER_WORD, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L4))))[
        None, None, None, :
    ]
    scale_words, i_part = gl.broadcast(
        scale_words,
        i_part + gl.full([tile_cfg.HEADS_PER_CTA, tile_cfg.MMA_KEYS, NUM_WORDS, PARTS_PER_WORD], 0, gl.int32, L4),
    )
    # Two bytes from i_part * NUM_WORDS on; a lane with one block uses the first, one with four converts twice.
    selector = i_part * (0x11 * NUM_WORDS) + 0x10
    if K.SCALE_BLOCKS > 0:
        low, high = _k_block_scale_pair_of_padded_head(scale_words, next_words, selector, 0, i_part, L4, tile_cfg)
    else:
        low, high = gl.inline_asm_elementwise(
            K_BLOCK_SCALES_PTX, "=h,=h,r,r", [scale_words, selector], (gl.float16, gl.float16), True, 1
        )
    if NUM_WORDS == 1:
        block_scales = low
    elif NUM_WORDS == 2:
        block_scales = gl.join(low, high)
    else:
        if K.SCALE_BLOCKS > 0:
            third, fourth = _k_block_scale_pair_of_padded_head(
                scale_words, next_words, selector + 0x22, 2, i_part, L4, tile_cfg
            )
        else:
            third, fourth = gl.inline_asm_elementwise(
                K_BLOCK_SCALES_PTX, "=h,=h,r,r", [scale_words, selector + 0x22], (gl.float16, gl.float16), True, 1
            )
        block_scales = gl.join(gl.join(low, third), gl.join(high, fourth))
    block_scales = block_scales.reshape([tile_cfg.HEADS_PER_CTA, tile_cfg.MMA_KEYS, cfg.PACKED_K // 4])
    LAYOUT: gl.constexpr = k_block_scale_broadcast_layout(
        tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD, tile_cfg.MMA_KEYS, cfg.PACKED_K
    )
    block_scales = gl.convert_layout(block_scales, gl.SliceLayout(3, LAYOUT), assert_trivial=True)
    block_scales, _ = gl.broadcast(
        block_scales[:, :, :, None], gl.full([tile_cfg.HEADS_PER_CTA, tile_cfg.MMA_KEYS, cfg.PACKED_K // 4, 4], 0,
                                             gl.float16, LAYOUT)
    )  # fmt: skip
    return gl.convert_layout(
        block_scales.reshape([tile_cfg.HEADS_PER_CTA, tile_cfg.MMA_KEYS, cfg.PACKED_K]),
        k_load_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD, tile_cfg.MMA_KEYS, cfg.PACKED_K),
        assert_trivial=True,
    )


@gluon.jit
def load_and_expand_v_block_scales_to_fp16(smem_scales, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Loads V block scales of an MMA tile [HEADS_PER_CTA, words, MMA_KEYS] as fp16 [HEADS_PER_CTA, PACKED_V, MMA_KEYS],
    the left operand's layout."""
    NUM_WORDS: gl.constexpr = cfg.PACKED_V // 16
    L5: gl.constexpr = v_block_scale_word_of_4_load_layout(
        tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD, tile_cfg.MMA_KEYS, cfg.PACKED_V
    )
    L4: gl.constexpr = gl.SliceLayout(3, L5)
    W: gl.constexpr = gl.SliceLayout(2, L4)
    if tile_cfg.KEY_PARTS > 1:
        SHAPE: gl.constexpr = [tile_cfg.HEADS_PER_CTA, NUM_WORDS, tile_cfg.MMA_KEYS]
        smem_scales = smem_scales.permute([0, 2, 1])  # [parts, keys, words] again
        scale_words = load_scales_of_own_head(smem_scales, W, SHAPE, 2, NUM_WORDS, tile_cfg)[:, :, None, :]
    else:
        V: gl.constexpr = tile_cfg.V
        scale_words, next_words = load_both_planes(smem_scales, W, 1, V)
        if V.SCALES_UNALIGNED:
            o_h = gl.arange(0, tile_cfg.HEADS_PER_CTA, gl.SliceLayout(1, gl.SliceLayout(2, W)))[:, None, None]
            o_key = gl.arange(0, tile_cfg.MMA_KEYS, gl.SliceLayout(0, gl.SliceLayout(1, W)))[None, None, :]
            o_byte = bytes_beyond_whole_words(o_h, o_key, V, tile_cfg) & 3
            selector, scale_words = gl.broadcast(o_byte * 0x1111 + 0x3210, scale_words)
            scale_words = gl.inline_asm_elementwise(
                WORD_OF_TWO_PTX, "=r,r,r,r", [scale_words, next_words, selector], gl.int32, True, 1
            )
        scale_words = scale_words[:, :, None, :]
    odd = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L4))))[None, None, :, None]
    scale_words, odd = gl.broadcast(
        scale_words, odd + gl.full([tile_cfg.HEADS_PER_CTA, NUM_WORDS, 2, tile_cfg.MMA_KEYS], 0, gl.int32, L4)
    )
    # Bytes odd and odd + 2 of the words of two keys.
    low, high = gl.inline_asm_elementwise(
        V_BLOCK_SCALES_PTX,
        "=r,=r,r,r,r,r",
        [scale_words, odd * 0x1111 + 0x6240],
        (gl.float16, gl.float16),
        True,
        2,
    )
    block_scales = (
        gl.join(low, high)
        .permute([0, 1, 4, 2, 3])
        .reshape([tile_cfg.HEADS_PER_CTA, cfg.PACKED_V // 4, tile_cfg.MMA_KEYS])
    )
    LAYOUT: gl.constexpr = v_block_scale_broadcast_layout(
        tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD, tile_cfg.MMA_KEYS, cfg.PACKED_V
    )
    block_scales = gl.convert_layout(block_scales, gl.SliceLayout(2, LAYOUT), assert_trivial=True)
    block_scales, _ = gl.broadcast(
        block_scales[:, :, None, :], gl.full([tile_cfg.HEADS_PER_CTA, cfg.PACKED_V // 4, 4, tile_cfg.MMA_KEYS], 0,
                                             gl.float16, LAYOUT)
    )  # fmt: skip
    return gl.convert_layout(
        block_scales.reshape([tile_cfg.HEADS_PER_CTA, cfg.PACKED_V, tile_cfg.MMA_KEYS]),
        gl.DotOperandLayout(0, mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD), 2),
        assert_trivial=True,
    )
