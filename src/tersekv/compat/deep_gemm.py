"""DeepGEMM's scores of an indexer: over pages, and over keys gathered from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..calls import IndexScoresCall
from ..dispatch.checks import joined
from ..errors import UnsupportedError
from ..index_layers import PagedIndexLayer
from ..scalars import as_bool
from ._adapt import as_host_int, dtype_name, tensor, with_caller_names
from ._indexer import launched

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_paged_mqa_logits_metadata",
]

_NAMES = {
    **dict.fromkeys(("k_cache", "k_scale_cache", "pages"), "kv_cache"),
    **dict.fromkeys(("seq_lens", "ends"), "context_lens"),
    "page_table": "block_table",
}
_RAGGED_NAMES = {"k_cache": "kv[0]", "k_scale_cache": "kv[1]", "starts": "cu_seq_len_k_start"} | dict.fromkeys(
    ("ends", "seq_lens"), "cu_seq_len_k_end"
)
_Made = tuple[IndexScoresCall, dict[str, Tensor]]
_PAGE = 128  # keys that are gathered, looked at as pages


def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    """`deep_gemm.get_paged_mqa_logits_metadata`: a tensor of the same shape, which nothing here reads.

    >>> get_paged_mqa_logits_metadata(torch.tensor([[60], [40]], dtype=torch.int32), 64, 132).shape
    torch.Size([133, 2])

    context_lens:       [B, next_n]; says on which device the result is
    num_sms:            the result is [num_sms + 1, 2] int32
    block_kv, indices:  accepted, without effect
    """
    rows = as_host_int("num_sms", num_sms, 0) + 1
    return torch.zeros(rows, 2, dtype=torch.int32, device=tensor("context_lens", context_lens).device)


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: object = None,
    max_context_len: int = 0,
    clean_logits: bool = False,
    indices: Tensor | None = None,
) -> Tensor:
    """`deep_gemm.fp8_paged_mqa_logits`: an indexer's scores of the cached keys, k_scale · Σ_h weight_h · relu(q_h · k).

        >>> q = torch.randn(2, 1, 64, 128).to(torch.float8_e4m3fn)
        >>> kv_cache = torch.zeros(16, 64, 1, 132, dtype=torch.uint8)
        >>> lens, table = torch.tensor([[60], [40]], dtype=torch.int32), torch.tensor([[3], [5]], dtype=torch.int32)
        >>> fp8_paged_mqa_logits(q, kv_cache, torch.ones(2, 64), lens, table, None, 64).shape
        torch.Size([2, 64])

        q:                [B, next_n, Hi, Di] e4m3, any Hi; Di a multiple of 8 up to 128
        kv_cache:         [P, S, 1, Di + 4] uint8: a page is S rows of codes, then S fp32 scales; any S
        weights:          [B * next_n, Hi] fp32, q's scales in them
        context_lens:     [B, next_n] keys that each row sees; or [B] keys of each request, of which row i sees all but
                          the last next_n - i - 1
        block_table:      [B, max_pages]; entries past a row's keys are never read
        max_context_len:  columns of the result
        clean_logits:     columns that a row does not see are −inf with it and without
        schedule_meta:    accepted, without effect

    Returns [B * next_n, max_context_len] fp32. Raises UnsupportedError for indices (requests that share rows of the
    table), and ValueError or TypeError for a bad argument.
    """
    if indices is not None:
        raise UnsupportedError("indices: want None: a row of block_table for each request, got a tensor")
    as_bool("clean_logits", clean_logits)
    each = isinstance(context_lens, Tensor) and context_lens.dim() == 2
    # With `ends` lengths of requests are not read, and only as many as there are.
    seq_lens, ends = (context_lens.flatten()[: len(context_lens)], context_lens) if each else (context_lens, None)

    def make() -> _Made:
        b, n = tensor("q", q, "B, next_n, Hi, Di").shape[:2]
        layer = with_caller_names(_NAMES, PagedIndexLayer.from_buffer, kv_cache)
        if each and context_lens.shape != (b, n):
            raise ValueError(f"context_lens: want [B, next_n] = {[b, n]}, got {list(context_lens.shape)}")
        columns = as_host_int("max_context_len", max_context_len, 0)
        last = joined("context_lens", context_lens) if each else None
        return _call(joined("q", q), weights, layer.k, layer.scale, columns, n, block_table, seq_lens, None, last)

    return launched(
        _NAMES, "index_scores", ("deep_gemm_paged", max_context_len),
        (q, weights, kv_cache, None, block_table, seq_lens, None, None, None, ends), make, {"k_scale_cache": "k_cache"},
    )[0]  # fmt: skip


def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> Tensor:
    """`deep_gemm.fp8_mqa_logits`: an indexer's scores of keys that lie one behind the other, of all requests.

        >>> q = torch.randn(3, 64, 128).to(torch.float8_e4m3fn)
        >>> kv = torch.randn(100, 128).to(torch.float8_e4m3fn), torch.ones(100)
        >>> starts, ends = torch.tensor([0, 0, 40]), torch.tensor([39, 40, 100])
        >>> fp8_mqa_logits(q, kv, torch.ones(3, 64), starts, ends).shape
        torch.Size([3, 100])

        q:                [T, Hi, Di] e4m3, any Hi; Di a multiple of 8 up to 128
        kv:               codes [N, Di] e4m3 and their scales [N] fp32
        weights:          [T, Hi] fp32, q's scales in them
        cu_seq_len_k_start, cu_seq_len_k_end:  [T] the keys that each row sees, [start, end)
        clean_logits:     columns that a row does not see are −inf with it and without
        max_seqlen_k:     0; or the columns of the result, which count from each row's start

    Returns [T, N] or [T, max_seqlen_k] fp32; [T, N] is made and copied from first. Keys are read as they are: nothing
    is dequantised beforehand. Raises ValueError or TypeError for a bad argument.
    """
    as_bool("clean_logits", clean_logits)
    columns = as_host_int("max_seqlen_k", max_seqlen_k, 0)
    logits = _ragged(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end)
    if columns == 0:
        return logits
    if logits.shape[1] == 0:
        return logits.new_full((logits.shape[0], columns), -torch.inf)
    column = cu_seq_len_k_start.long().clamp(min=0)[:, None] + torch.arange(columns, device=logits.device)
    seen = column < cu_seq_len_k_end.long().clamp(max=logits.shape[1])[:, None]
    return logits.gather(1, column.clamp(max=logits.shape[1] - 1)).where(seen, -torch.inf)


def _ragged(q: Tensor, kv: tuple[Tensor, Tensor], weights: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    if not isinstance(kv, (tuple, list)) or len(kv) != 2:
        raise TypeError(f"kv: want (codes, scales), got {type(kv).__name__}")
    codes, scales = tensor("kv[0]", kv[0], "N, Di"), tensor("kv[1]", kv[1], "N")
    tensor("cu_seq_len_k_start", starts, "T")
    last = tensor("cu_seq_len_k_end", ends, "T")[:1]
    keys = codes.shape[0]
    page = _PAGE if keys % _PAGE == 0 else 1
    # The pages are the keys in order: one request, all rows of which share its table; none without rows.
    table = torch.arange(keys // page, dtype=torch.int32, device=codes.device).expand(len(last), -1)

    def make() -> _Made:
        rows = len(tensor("q", q, "T, Hi, Di"))
        if len(ends) != rows:
            raise ValueError(f"cu_seq_len_k_end: want [T={rows}], got {list(ends.shape)}")
        if scales.shape != (keys,):
            raise ValueError(f"kv[1]: want a scale for each of the {keys} rows of kv[0], got {list(scales.shape)}")
        k, scale = codes.unflatten(0, (-1, page)), scales.unflatten(0, (-1, page))
        return _call(q, weights, k, scale, keys, rows, table, last, starts, ends)

    return launched(
        _RAGGED_NAMES, "index_scores", ("deep_gemm_ragged",),
        (q, weights, codes, scales, table, last, None, None, starts, ends), make,
    )[0]  # fmt: skip


def fp8_fp4_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`deep_gemm.fp8_fp4_mqa_logits`: `fp8_mqa_logits` with q as (codes, None).

        >>> q = torch.randn(1, 64, 128).to(torch.float8_e4m3fn), None
        >>> kv = torch.randn(100, 128).to(torch.float8_e4m3fn), torch.ones(100)
        >>> fp8_fp4_mqa_logits(q, kv, torch.ones(1, 64), torch.tensor([0]), torch.tensor([100])).shape
        torch.Size([1, 100])

    logits_dtype:  float32, or bfloat16, to which fp32 is rounded

    Raises UnsupportedError for scales of q (MXFP4) and for another logits_dtype.
    """
    codes = _fp8_query(q, logits_dtype)
    logits = fp8_mqa_logits(codes, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k)
    return logits.to(logits_dtype)


def fp8_fp4_paged_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: object = None,
    max_context_len: int = 0,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: Tensor | None = None,
) -> Tensor:
    """`deep_gemm.fp8_fp4_paged_mqa_logits`: `fp8_paged_mqa_logits` with q as (codes, None).

        >>> q = torch.randn(1, 1, 64, 128).to(torch.float8_e4m3fn), None
        >>> kv_cache, lens = torch.zeros(16, 64, 1, 132, dtype=torch.uint8), torch.tensor([[60]])
        >>> fp8_fp4_paged_mqa_logits(q, kv_cache, torch.ones(1, 64), lens, torch.tensor([[3]]), None, 64).shape
        torch.Size([1, 64])

    logits_dtype:  float32, or bfloat16, to which fp32 is rounded

    Raises UnsupportedError for scales of q (MXFP4) and for another logits_dtype.
    """
    codes = _fp8_query(q, logits_dtype)
    logits = fp8_paged_mqa_logits(
        codes, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits, indices
    )
    return logits.to(logits_dtype)


def _fp8_query(q: Any, logits_dtype: torch.dtype) -> Tensor:
    if not isinstance(q, (tuple, list)) or len(q) != 2:
        raise TypeError(f"q: want (codes, None), got {type(q).__name__}")
    if q[1] is not None:
        raise UnsupportedError("q[1]: want None: e4m3 queries, whose scales are in the weights, got a tensor")
    if logits_dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedError(f"logits_dtype: want float32 or bfloat16, got {dtype_name(logits_dtype)}")
    return q[0]


def _call(
    q: Tensor, weights: Tensor, k: Tensor, scale: Tensor | None, columns: int, rows: int, page_table: Tensor,
    seq_lens: Tensor, starts: Tensor | None, ends: Tensor | None,
) -> _Made:  # fmt: skip
    out = torch.empty(q.shape[0], columns, dtype=torch.float32, device=q.device)
    call = IndexScoresCall(
        q, weights, k, scale, page_table, seq_lens, None, out, "index_fp8", rows, 1, True, 1.0, False, 1, starts, ends
    )
    return call, {"out": out}
