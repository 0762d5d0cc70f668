"""Parameter structs of MLA decode's kernels, and their common prologue."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts.dequant import load_scale
from ..parts.online_softmax import LOG2E
from ..parts.tile_scheduler import assign_cta_range, find_cta_block_range, find_request_of_block


class AttentionTensors(NamedTuple):
    """Tensors that consumers read and write. SPLIT_METADATA: see `tile_scheduler.split_metadata_ptr`."""

    Q_NOPE: gl.tensor
    Q_PE: gl.tensor
    SEQ_LENS: gl.tensor
    CU_SEQLENS_Q: gl.tensor
    OUT: gl.tensor
    LSE: gl.tensor
    SPLIT_WORKSPACE: gl.tensor
    SPLIT_METADATA: gl.tensor


class Strides(NamedTuple):
    q_nope_t: gl.tensor
    q_nope_h: gl.tensor
    q_pe_t: gl.tensor
    q_pe_h: gl.tensor
    out_t: gl.tensor
    out_h: gl.tensor
    lse_t: gl.tensor
    lse_h: gl.tensor


class PageLookup(NamedTuple):
    """Where a request's keys lie in the cache."""

    PAGE_TABLE: gl.tensor
    SEQ_LENS: gl.tensor
    CU_SEQLENS_Q: gl.tensor
    stride: gl.tensor  # of the page table's rows
    oob_row: gl.tensor  # a row past the cache: TMA reads it as 0
    scale_rows_per_page: gl.tensor  # rows of group scales of a page


class TensorMaps(NamedTuple):
    """Tensor maps of latents, rotary part and group scales."""

    latents: gl.tensor
    pe: gl.tensor
    scales: gl.tensor


class KVStages(NamedTuple):
    """Their stages in shared memory; without group scales, `scales` is any of the others."""

    latents: gl.shared_memory_descriptor
    pe: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor


class QuerySmem(NamedTuple):
    """The query in shared memory, by tiles of columns."""

    latents: gl.shared_memory_descriptor
    pe: gl.shared_memory_descriptor


class Scales(NamedTuple):
    score_scale: gl.tensor  # of scores, base 2
    value_scale: gl.tensor  # of the output: V scale × out_scale


class CtaRange(NamedTuple):
    """The n_blocks [block_begin, block_end), of all requests', that a CTA computes for a block of heads."""

    max_m_blocks: gl.tensor  # of a request
    i_cta: gl.tensor
    blocks_per_range: gl.tensor  # of every CTA range
    block_begin: gl.tensor
    block_end: gl.tensor
    i_request: gl.tensor  # the request of block_begin
    n_block_base: gl.tensor  # flat index of that request's first n_block


class SoftmaxState(NamedTuple):
    """Of query rows: row_max (lazily raised), row_sum and acc_o."""

    row_max: gl.tensor
    row_sum: gl.tensor
    acc_o: gl.tensor


@gluon.jit
def load_call_scales(softmax_scale, SOFTMAX_SCALE, kv_scale, KV_SCALE, out_scale, OUT_SCALE, cfg: gl.constexpr):
    """Returns the call's Scales."""
    scale_kv = load_scale(kv_scale, KV_SCALE, cfg.HAS_V_SCALE)
    score_scale = load_scale(softmax_scale, SOFTMAX_SCALE, cfg.HAS_SOFTMAX_SCALE) * LOG2E * scale_kv
    return Scales(score_scale, scale_kv * load_scale(out_scale, OUT_SCALE, cfg.HAS_OUT_SCALE))


@gluon.constexpr_function
def fits_all_requests(cfg):
    """Returns whether BLOCK_B holds all requests: then their lengths are loaded early (`load_all_request_shapes`)."""
    return cfg.BLOCK_B < 1024 and not cfg.UNSPLIT


@gluon.jit
def make_cta_range(
    SEQ_LENS, CU_SEQLENS_Q, B, request_shapes, i_range, num_ranges, max_m_blocks, i_cta, cfg: gl.constexpr
):
    """Returns this CTA's CtaRange. request_shapes: of `load_all_request_shapes`, if BLOCK_B holds all requests."""
    if fits_all_requests(cfg):
        block_begin, block_end, blocks_per_range, i_request, n_block_base = assign_cta_range(
            request_shapes, i_range, num_ranges, cfg
        )
    else:
        block_begin, block_end, blocks_per_range = find_cta_block_range(
            SEQ_LENS, CU_SEQLENS_Q, B, i_range, num_ranges, cfg
        )
        i_request, n_block_base = find_request_of_block(
            SEQ_LENS, CU_SEQLENS_Q, B, gl.minimum(block_begin, block_end - 1), cfg
        )
    return CtaRange(max_m_blocks, i_cta, blocks_per_range, block_begin, block_end, i_request, n_block_base)


@gluon.jit
def make_uniform(smem, i: gl.constexpr, x):
    """Returns x read back from shared memory: so the compiler knows that x, and loops over it, are uniform."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    smem.index(i).store(gl.full([1], x, gl.int32, L))
    return gl.max(smem.index(i).load(L), 0)
