"""Ragged causal attention of new tokens to one chunk of up-projected keys and values (MLA prefill, last stage). The
mask and the rescale are in `mainloop`, Triton pipelines the loads; chunks are combined by starting from the last one's
state.

A chunk's rows hold, for every head, [k_nope | v]; the rotary part of a key is one row for all heads. Query i of request
b sees rows j of its own with cache_offsets[b] + j <= cache_lens[b] + i. Programs of heavy (late) query blocks start
first, and heads go in groups whose keys and values fit the L2 cache together.

Several chunks: a program starts from the previous chunk's state (out, lse). `out` is 16-bit, so its rounding error is
kept in OUT_RESIDUAL; the sum of both carries enough digits for any number of chunks.
"""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...host.bind import KernelLaunch, TensorMapArg, stride_args, tensor_args
from ...host.launch import next_power_of_2
from .config import AttentionTile
from .gather_latents import chunk_offset_args

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
_L2_BYTES = 24 << 20  # of keys and values that concurrent programs read


@triton.jit
def load_kv_block(
    SRC, first_row, num_rows, first_column, stride, COLUMNS: tl.constexpr, COLUMNS_PAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Loads [BLOCK_ROWS, COLUMNS_PAD] at (first_row, first_column); 0 outside `num_rows` rows or COLUMNS columns."""
    if USE_TMA:
        return SRC.load([first_row, first_column])
    else:
        o_r = first_row + tl.arange(0, BLOCK_ROWS)
        o_c = tl.arange(0, COLUMNS_PAD)
        m_load = (o_r < num_rows)[:, None] & (o_c < COLUMNS)[None, :]
        return tl.load(SRC + o_r.to(tl.int64)[:, None] * stride + first_column + o_c[None, :], mask=m_load, other=0.0)


@triton.jit
def mainloop(
    q, q_pe, softmax_state, o_m, K, V, KPE, chunk_row, num_rows, o_column, key_begin, key_end, causal_offset, num_keys,
    score_scale, stride_kv,
    DN: tl.constexpr, R: tl.constexpr, DV: tl.constexpr, DN_PAD: tl.constexpr, R_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, BLOCK_N: tl.constexpr, USE_TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Returns (acc_o, row_max, row_sum) after keys [key_begin, key_end) in key blocks; row_max in units of log2."""
    acc_o, row_max, row_sum = softmax_state
    for n_start in tl.range(key_begin, key_end, BLOCK_N):
        row = chunk_row + n_start
        k = load_kv_block(K, row, num_rows, o_column, stride_kv, DN, DN_PAD, BLOCK_N, USE_TMA)
        # QK
        s = tl.dot(q, tl.trans(k))
        if R > 0:
            k_pe = load_kv_block(KPE, row, num_rows, 0, R, R, R_PAD, BLOCK_N, USE_TMA)
            s = tl.dot(q_pe, tl.trans(k_pe), s)
        # Mask
        if MASKED:
            o_n = n_start + tl.arange(0, BLOCK_N)
            s = tl.where((o_n[None, :] <= (o_m + causal_offset)[:, None]) & (o_n < num_keys)[None, :], s, float("-inf"))
        # Online softmax
        row_max_new = tl.maximum(row_max, tl.max(s, 1) * score_scale)
        safe_max = row_max_new
        if MASKED:
            safe_max = tl.where(row_max_new == float("-inf"), 0.0, row_max_new)  # a row may have no visible key yet
        p = tl.exp2(s * score_scale - safe_max[:, None])
        rescale = tl.exp2(row_max - safe_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc_o = acc_o * rescale[:, None]
        # PV
        v = load_kv_block(V, row, num_rows, o_column + DN, stride_kv, DV, DV_PAD, BLOCK_N, USE_TMA)
        if MASKED:
            # NOTE: P = 0 does not hide NaN. Rows of the next request are zeroed; so is a NaN of the request's own
            # later tokens, and queries that see such a token still get NaN from its key.
            not_nan = v.to(tl.float32) == v.to(tl.float32)
            v = tl.where((o_n < num_keys)[:, None] & not_nan, v, 0.0)
        acc_o = tl.dot(p.to(v.dtype), v, acc_o)
        row_max = row_max_new
    return acc_o, row_max, row_sum


@triton.jit
def request_head_and_m_block_of_program(num_m_blocks, H, heads_per_l2_group):
    """Returns (request, head, m_block) of this program: late blocks first, within groups of heads."""
    i_program = tl.program_id(0)
    i_request = i_program // (num_m_blocks * H)
    i_in_request = i_program % (num_m_blocks * H)
    first_head = i_in_request // (num_m_blocks * heads_per_l2_group) * heads_per_l2_group
    group_size = tl.minimum(H - first_head, heads_per_l2_group)
    i_in_request = i_in_request % (num_m_blocks * heads_per_l2_group)
    return i_request, first_head + i_in_request % group_size, num_m_blocks - 1 - i_in_request // group_size


@triton.jit(do_not_specialize=["num_rows", "num_m_blocks", "heads_per_l2_group"])
def attention_kernel(
    Q, K, V, KPE, OUT, OUT_RESIDUAL, LSE, CU_SEQLENS_Q, CACHE_LENS, CHUNK_ROW_OFFSETS, CACHE_OFFSETS, num_rows,
    num_m_blocks, H, heads_per_l2_group, score_scale,
    stride_qt, stride_qh, stride_kv, stride_ot, stride_oh, stride_lt, stride_lh,
    DN: tl.constexpr, R: tl.constexpr, DV: tl.constexpr, DN_PAD: tl.constexpr, R_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, USE_TMA: tl.constexpr,
    MERGE_PREVIOUS_CHUNK: tl.constexpr, STORE_RESIDUAL: tl.constexpr, STORE_LSE: tl.constexpr,
):  # fmt: skip
    """Attends one m_block of one head to one chunk. See the module's docstring."""
    i_request, head, m_block = request_head_and_m_block_of_program(num_m_blocks, H, heads_per_l2_group)
    q_begin = tl.load(CU_SEQLENS_Q + i_request).to(tl.int64)
    num_queries = (tl.load(CU_SEQLENS_Q + i_request + 1).to(tl.int64) - q_begin).to(tl.int32)
    m_start = m_block * BLOCK_M
    if m_start >= num_queries:
        return
    chunk_row = tl.load(CHUNK_ROW_OFFSETS + i_request).to(tl.int32)
    num_keys = tl.minimum(tl.load(CHUNK_ROW_OFFSETS + i_request + 1).to(tl.int32), num_rows) - chunk_row
    causal_offset = (tl.load(CACHE_LENS + i_request).to(tl.int64) - tl.load(CACHE_OFFSETS + i_request).to(tl.int64)).to(
        tl.int32
    )
    unmasked_keys = tl.maximum(
        tl.minimum(num_keys, m_start + causal_offset + 1), 0
    )  # keys that every query of the block sees
    visible_keys = tl.minimum(num_keys, tl.minimum(m_start + BLOCK_M, num_queries) + causal_offset)
    if MERGE_PREVIOUS_CHUNK:  # noqa: SIM102 - known to the compiler, unlike the other
        if visible_keys <= 0:
            return

    o_m = m_start + tl.arange(0, BLOCK_M)
    m_q = o_m < num_queries
    o_d, o_r, o_v = tl.arange(0, DN_PAD), tl.arange(0, R_PAD), tl.arange(0, DV_PAD)
    o_t = q_begin + o_m
    # Load Q
    p_q = Q + o_t[:, None] * stride_qt + head.to(tl.int64) * stride_qh
    q = tl.load(p_q + o_d[None, :], mask=m_q[:, None] & (o_d < DN)[None, :], other=0.0)
    q_pe = tl.load(p_q + DN + o_r[None, :], mask=m_q[:, None] & (o_r < R)[None, :], other=0.0)

    m_out = m_q[:, None] & (o_v < DV)[None, :]
    p_out = OUT + o_t[:, None] * stride_ot + head.to(tl.int64) * stride_oh + o_v[None, :]
    p_residual = OUT_RESIDUAL + (o_t * H + head)[:, None] * DV + o_v[None, :]
    p_lse = LSE + o_t * stride_lt + head.to(tl.int64) * stride_lh
    # Initial state: the previous chunk's, or empty
    if MERGE_PREVIOUS_CHUNK:
        row_max = tl.load(p_lse, mask=m_q, other=float("-inf")) * LOG2E
        not_empty = row_max != float("-inf")
        row_sum = not_empty.to(tl.float32)
        acc_o = tl.load(p_out, mask=m_out, other=0.0).to(tl.float32)
        acc_o += tl.load(p_residual, mask=m_out, other=0.0).to(tl.float32)
    else:
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        acc_o = tl.zeros([BLOCK_M, DV_PAD], tl.float32)

    o_column = head * (DN + DV)
    # Unmasked key blocks, then masked ones
    unmasked_end = unmasked_keys // BLOCK_N * BLOCK_N
    acc_o, row_max, row_sum = mainloop(
        q, q_pe, (acc_o, row_max, row_sum), o_m, K, V, KPE, chunk_row, num_rows, o_column, 0, unmasked_end,
        causal_offset, num_keys, score_scale, stride_kv,
        DN, R, DV, DN_PAD, R_PAD, DV_PAD, BLOCK_N, USE_TMA, False,
    )  # fmt: skip
    acc_o, row_max, row_sum = mainloop(
        q, q_pe, (acc_o, row_max, row_sum), o_m, K, V, KPE, chunk_row, num_rows, o_column, unmasked_end, visible_keys,
        causal_offset, num_keys, score_scale,
        stride_kv, DN, R, DV, DN_PAD, R_PAD, DV_PAD, BLOCK_N, USE_TMA, True,
    )  # fmt: skip

    # Epilogue
    is_empty = row_sum == 0
    row_sum = tl.where(is_empty, 1.0, row_sum)
    acc_o = acc_o / row_sum[:, None]
    out = acc_o.to(OUT.dtype.element_ty)
    tl.store(p_out, out, mask=m_out)
    if STORE_RESIDUAL:
        tl.store(p_residual, (acc_o - out.to(tl.float32)).to(OUT_RESIDUAL.dtype.element_ty), mask=m_out)
    if STORE_LSE:
        tl.store(p_lse, tl.where(is_empty, float("-inf"), (row_max + tl.log2(row_sum)) * LN2), mask=m_q)


def make_attention_launch(
    f: SimpleNamespace, i_chunk: int, num_rows: int, has_previous_chunk: bool, has_next_chunk: bool, tile: AttentionTile
) -> KernelLaunch:
    """Returns the launch for a chunk of `num_rows` rows, continuing from (out, OUT_RESIDUAL, LSE) if
    `has_previous_chunk`.

    KV:    [M, H * (Dn + Dv)] in q's dtype, dense; K_PE: [M, R], dense; M >= num_rows
    OUT_RESIDUAL:   [T, H, Dv] in q's dtype, dense, if there are several chunks
    LSE:   [T, H] fp32, where several chunks need one and the call has none
    """
    heads, dim_v, rope = f.q.shape[1], f.out.shape[2], f.kpe.shape[-1]
    nope, several_chunks = f.q.shape[2] - rope, has_previous_chunk or has_next_chunk
    requests, num_m_blocks, num_columns = f.cache_lens.shape[0], -(-f.max_q_len // tile.block_m), f.kv_b_proj.shape[0]
    padded_dims = [max(16, next_power_of_2(d)) for d in (nope, rope, dim_v)]
    heads_per_l2_group = max(1, min(heads, _L2_BYTES * requests // (num_rows * f.q.dtype.itemsize * (nope + dim_v))))
    lse, lse_strides = lse_tensor_name_and_strides(f, several_chunks)  # without one `out`, never read, is passed
    arguments: dict[str, Any] = tensor_args(
        Q="q", K="KV", V="KV", KPE="K_PE", OUT="out", OUT_RESIDUAL="OUT_RESIDUAL" if several_chunks else "out",
        LSE=lse or "out",
        CU_SEQLENS_Q="cu_seqlens_q",
        CACHE_LENS="cache_lens",
    )  # fmt: skip
    if tile.tma:
        arguments |= {
            name: TensorMapArg(
                tensor_name, partial(_host_descriptor_of_matrix, num_rows=num_rows, num_columns=n,
                block=[tile.block_n, d])
            )
            for name, tensor_name, n, d in (
                ("K", "KV", num_columns, nope), ("V", "KV", num_columns, dim_v), ("KPE", "K_PE", rope, rope),
            ) if n
        }  # fmt: skip
    arguments |= chunk_offset_args(i_chunk) | stride_args(f.q, stride_q="th") | stride_args(f.out, stride_o="th") | {
        "num_rows": num_rows, "num_m_blocks": num_m_blocks, "H": heads, "heads_per_l2_group": heads_per_l2_group,
        "score_scale": f.softmax_scale * math.log2(math.e),
        "stride_kv": num_columns, "stride_lt": lse_strides[0], "stride_lh": lse_strides[1],
        "DN": nope, "R": rope, "DV": dim_v, "DN_PAD": padded_dims[0], "R_PAD": padded_dims[1], "DV_PAD": padded_dims[2],
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "USE_TMA": tile.tma,
        "MERGE_PREVIOUS_CHUNK": has_previous_chunk, "STORE_RESIDUAL": has_next_chunk, "STORE_LSE": lse is not None,
    }  # fmt: skip
    grid = (requests * num_m_blocks * heads,)
    return KernelLaunch(attention_kernel, grid, arguments, num_warps=tile.num_warps, num_stages=tile.num_stages)


def _host_descriptor_of_matrix(x: Tensor, num_rows: int, num_columns: int, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, [num_rows, num_columns], [num_columns, 1], block)


def lse_tensor_name_and_strides(f: SimpleNamespace, several_chunks: bool) -> tuple[str | None, tuple[int, int]]:
    """Returns (the name of the tensor that holds LSEs, its strides); (None, zeros) where LSEs are not needed."""
    if f.lse is not None:
        return "lse", f.lse.stride
    return ("LSE", (f.q.shape[1], 1)) if several_chunks else (None, (0, 0))


def residual_and_lse_workspace_tensors(
    f: SimpleNamespace, several_chunks: bool
) -> dict[str, tuple[tuple[int, ...], torch.dtype] | None]:
    """Returns the workspace tensors of several chunks."""
    return {
        "OUT_RESIDUAL": (f.out.shape, f.out.dtype) if several_chunks else None,
        "LSE": (f.out.shape[:2], torch.float32) if several_chunks and f.lse is None else None,
    }
