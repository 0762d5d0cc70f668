"""Which query rows a program of prefill attends for.

A row is a new token and a query head of the group. m_blocks of BLOCK_M rows are numbered over all requests without
their lengths on the host: request b begins at `cu[b] * GROUP // BLOCK_M + b`, which leaves room for those before it.
"""

import triton
import triton.language as tl


@triton.jit
def load_q_begin(CU_SEQLENS_Q, i_request, m_request):
    """Loads the first query token of requests where m_request. CU_SEQLENS_Q: [B + 1], or every request's tokens."""
    if CU_SEQLENS_Q.dtype.is_ptr():
        return tl.load(CU_SEQLENS_Q + i_request, mask=m_request, other=0).to(tl.int64)
    else:
        return tl.where(m_request, i_request * CU_SEQLENS_Q, 0).to(tl.int64)


@triton.jit
def find_request_and_m_block_maybe_empty(CU_SEQLENS_Q, B, i_work_tile, cfg: tl.constexpr):
    """Returns (request, m_block) of work tile i_work_tile; past the rows of the request the m_block is empty."""
    i_request, first_block = -1, 0
    for i in range(0, B, cfg.BLOCK_B):
        o_b = i + tl.arange(0, cfg.BLOCK_B)
        first_index = load_q_begin(CU_SEQLENS_Q, o_b, o_b < B) * cfg.GROUP // cfg.BLOCK_M + o_b
        is_before = (first_index <= i_work_tile) & (o_b < B)
        i_request += tl.sum(is_before.to(tl.int32))
        first_block = tl.maximum(first_block, tl.max(tl.where(is_before, first_index, 0)).to(tl.int32))
    return i_request, i_work_tile - first_block
