"""Records of arguments that decode's kernels pass between functions.

NOTE: Triton's cache keys include the source of functions, not of these records: clear it after reordering fields.
"""

from typing import NamedTuple

from triton.experimental.gluon import language as gl


class AttentionTensors(NamedTuple):
    """Tensors that the kernels load and store. SPLIT_METADATA: each work tile's number of splits and first CTA
    range."""

    Q: gl.tensor
    SEQ_LENS: gl.tensor
    CU_SEQLENS_Q: gl.tensor
    MASK: gl.tensor
    SINKS: gl.tensor
    OUT: gl.tensor
    LSE: gl.tensor
    SPLIT_WORKSPACE: gl.tensor
    SPLIT_METADATA: gl.tensor


class CallScales(NamedTuple):
    """Scalars of a call; K_SCALE and V_SCALE are device tensors that may replace k_scale and v_scale."""

    score_scale: gl.tensor  # softmax_scale × log2(e)
    k_scale: gl.tensor
    K_SCALE: gl.tensor
    v_scale: gl.tensor
    V_SCALE: gl.tensor
    out_scale: gl.tensor
    softcap: gl.tensor


class Strides(NamedTuple):
    """Strides of Q, MASK, OUT and LSE."""

    q_t: gl.tensor
    q_h: gl.tensor
    mask_t: gl.tensor
    out_t: gl.tensor
    out_h: gl.tensor
    lse_t: gl.tensor
    lse_h: gl.tensor


class PageLookup(NamedTuple):
    """Tensors that locate keys. stride_table_b: of the page table's rows."""

    PAGE_TABLE: gl.tensor
    SEQ_LENS: gl.tensor
    CU_SEQLENS_Q: gl.tensor
    stride_table_b: gl.tensor


class TensorMaps(NamedTuple):
    """Tensor maps; for stored scales, pointers where they are loaded one by one."""

    K: gl.tensor
    V: gl.tensor
    K_SCALES: gl.tensor
    V_SCALES: gl.tensor


class KVStages(NamedTuple):
    """Shared memory of codes and stored scales: a buffer for each copy of an n_block, with all its stages."""

    k: tuple
    k_scales: tuple
    v: tuple
    v_scales: tuple


class CtaRange(NamedTuple):
    """Flat n_blocks [block_begin, block_end), for a group of heads."""

    i_range: gl.tensor
    head_group: gl.tensor
    blocks_per_range: gl.tensor  # n_blocks of every range
    block_begin: gl.tensor
    block_end: gl.tensor
    i_request: gl.tensor  # request that holds block_begin
    n_block_base: gl.tensor  # flat index of the request's first n_block


class RotationSmem(NamedTuple):
    """Scales of the columns of Q and of the accumulator (`rotation`), where rows are rotated or scaled."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor


class PrefetchPosition(NamedTuple):
    """Position of the copies, ahead of the n_blocks in use, across the ends of work tiles and requests."""

    block: gl.tensor  # flat index of the n_block
    i_request: gl.tensor
    n_block: gl.tensor  # in its work tile
    m_block: gl.tensor
    num_n_blocks: gl.tensor  # of a work tile
    num_m_blocks: gl.tensor
    first_n_block: gl.tensor  # n_block of the request that a work tile begins with
    num_keys: gl.tensor
    page_ids: tuple  # of the n_block's copies


class MaskArgs(NamedTuple):
    """Arguments of the mask: which keys are visible to a work tile's query rows."""

    num_keys: gl.tensor
    num_q_rows: gl.tensor  # of the request's query
    row_begin: gl.tensor  # the work tile's first row, all heads of a group counted
    q_begin: gl.tensor  # the request's first query row
    MASK: gl.tensor
    stride_mask_t: gl.tensor


class QueryOperands(NamedTuple):
    """Of a work tile: PACK right operands of QK, and the sums of its rows, for int4 keys."""

    operands: tuple  # or their copy in shared memory
    row_sums: gl.tensor


class SoftmaxState(NamedTuple):
    """Running softmax of query rows: row_max (base 2), row_sum of P, and the accumulator of P V."""

    row_max: gl.tensor
    row_sum: gl.tensor
    acc_o: gl.tensor


class SplitWorkTile(NamedTuple):
    """A work tile that is split over several CTA ranges."""

    i_range: gl.tensor  # this one
    first_range: gl.tensor  # range in which the work tile begins
    num_splits: gl.tensor


class ConvertedStages(NamedTuple):
    """fp16 stages that the converter warpgroup fills, and their barriers."""

    kv: gl.shared_memory_descriptor  # fp16: K and V alternate
    token_scales: gl.shared_memory_descriptor  # vectors of stored scales of SCALE_STAGES n_blocks
    full_barriers: gl.shared_memory_descriptor  # the item is in its stage
    empty_barriers: gl.shared_memory_descriptor  # the stage may be refilled


class SmemOperands(NamedTuple):
    """fp16 operands in shared memory, and the stored scales of an n_block."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    scales: tuple
