"""Which keys a sparse attention reads: `index_scores`, `index_topk`, and both in one, `index_select`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..calls import IndexScoresCall, IndexSelectCall, IndexTopkCall
from ..dispatch.checks import tensor
from ..dispatch.launch_cache import CallSignature, lookup
from ..index_layers import PagedIndexLayer
from ..scalars import as_bool, as_float, as_int, as_non_negative_int, as_positive_int
from .attention import max_query_rows
from .index import _layer
from .registry import dispatch_call


def index_scores(
    q: Tensor,
    weights: Tensor | None,
    cache: PagedIndexLayer,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_q_len: int | None = None,
    ratio: int = 1,
    relu: bool = True,
    scale: float = 1.0,
    heads: str = "sum",
    reduce_blocks: int | None = None,
    width: int | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Score the cached keys of each row: scale · k_scale[s] · Σ_h weights[t, h] · relu(q[t, h] · k[s]).

        >>> q8, w = tersekv.index_query(torch.randn(2, 64, 128), torch.randn(2, 64), cache=index_cache[0])
        >>> tersekv.index_scores(q8, w, index_cache[0], page_table, seq_lens).shape
        torch.Size([2, 64])

        q:              [T, Hi, Di]  as `index_query` returns it; e4m3 or 16 bits over fp8 keys, the keys' own dtype or
                        e4m3 over 16-bit ones
        weights:        [T, Hi] fp32; None: ones
        cache:          PagedIndexLayer
        page_table:     [B, max_pages] of the index cache; entries past a request's keys are never read
        seq_lens:       [B] tokens, new ones included; row i of a request's n is at position seq_len − n + i
        cu_seqlens_q:   [B + 1] ragged rows, beginning with 0; None: T / B rows each
        ratio:          tokens of a cached key: a row at position p sees the first (p + 1) // ratio keys
        relu:           False: products as they are
        heads:          "each": a row of scores for each head, with its weight, instead of their sum
        reduce_blocks:  a column is the largest score among so many keys, of those that are seen; NaN only if all are
        width:          columns; None: those of the page table
        out:            [T, W] or [T, Hi, W] fp32 to write into

    Columns that a row does not see are −inf; a NaN in key or query is one in the score. Returns out. Raises ValueError
    or TypeError for arguments that do not fit; on a CPU also for lengths and pages outside table and cache.
    """
    c = _layer(cache)
    ratio, relu, each, block, scale = _scoring(ratio, relu, heads, reduce_blocks, scale)
    width = None if width is None else as_non_negative_int("width", width)
    max_q_len = None if max_q_len is None else as_int("max_q_len", max_q_len)
    inputs = (q, weights, c.k, c.scale, page_table, seq_lens, cu_seqlens_q, out, None, None)
    options = (c.format, max_q_len, ratio, relu, scale, each, block, width, backend)
    cached = lookup("index_scores", options, inputs)
    if cached is not None:
        return cached[0] if out is None else out
    tensor("q", q, "T Hi Di")
    columns = _width(width, page_table, c, block)
    if out is None:
        out = torch.empty(*_lines(q, each), columns, dtype=torch.float32, device=q.device)
    elif width is not None and isinstance(out, Tensor) and out.shape[-1:] != (width,):
        raise ValueError(f"out: want {width} columns as in width, got {list(out.shape)}")
    call = IndexScoresCall(
        q, weights, c.k, c.scale, page_table, seq_lens, cu_seqlens_q, out, c.format,
        max_query_rows(q.shape[0], seq_lens, cu_seqlens_q, max_q_len), ratio, relu, scale, each, block,
    )  # fmt: skip
    dispatch_call("index_scores", call, backend, CallSignature(options, inputs, {"out": out}))
    return out


def index_topk(
    scores: Tensor,
    visible: Tensor,
    k: int,
    *,
    keep_first: int = 0,
    keep_last: int = 0,
    open_group: Tensor | None = None,
    starts: Tensor | None = None,
    out: Tensor | None = None,
    out_lens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Take the columns of the `min(k, visible)` largest scores of each row; ascending, −1 behind them.

        >>> scores = torch.tensor([[1.0, 5.0, 3.0, 3.0, 9.0]])
        >>> tersekv.index_topk(scores, torch.tensor([4]), 2)
        tensor([[1, 2]], dtype=torch.int32)

        scores:      [T, W] or [T, Hi, W] fp32
        visible:     [T] columns that each row sees, its first ones; more than W count as W
        starts:      [T] the first of them, if it is not 0: a row sees the columns [starts, visible), and the result
                     counts from starts; not with open_group
        k:           how many are taken
        keep_first, keep_last:  so many visible columns are taken before all others; if both are more than k, the last
        open_group:  [T] bool: column visible[t] is appended where it is true, unless negative; the result has
                     k + 1 columns
        out:         [T, k] or [T, Hi, k] int32 to write into
        out_lens:    [T] or [T, Hi] int32 to write into: how many of them were taken

    Equal scores: the smaller column; −0 equals 0. NaN is less than every number; −inf, a caller's mask, is never taken.
    Returns out. Raises ValueError or TypeError for arguments that do not fit.
    """
    k, first, last = _selection(k, keep_first, keep_last)
    inputs = (scores, visible, open_group, out, out_lens, starts)
    options = (k, first, last, backend)
    cached = lookup("index_topk", options, inputs)
    if cached is not None:
        return cached[0] if out is None else out
    if isinstance(scores, Tensor) and scores.dim() != 3:
        tensor("scores", scores, "T W")
    else:
        tensor("scores", scores, "T Hi W")
    if out is None:
        columns = k + (open_group is not None)
        out = torch.empty(*scores.shape[:-1], columns, dtype=torch.int32, device=scores.device)
    call = IndexTopkCall(scores, visible, open_group, out, out_lens, *options[:-1], starts)
    dispatch_call("index_topk", call, backend, CallSignature(options, inputs, {"out": out}))
    return out


def index_select(
    q: Tensor,
    weights: Tensor | None,
    cache: PagedIndexLayer,
    page_table: Tensor,
    seq_lens: Tensor,
    k: int,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_q_len: int | None = None,
    ratio: int = 1,
    relu: bool = True,
    scale: float = 1.0,
    heads: str = "sum",
    reduce_blocks: int | None = None,
    width: int | None = None,
    keep_first: int = 0,
    keep_last: int = 0,
    open_group: bool = False,
    out: Tensor | None = None,
    out_lens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Take the keys of each row with the largest scores: `index_topk(index_scores(…))`, without all scores in memory.

        >>> q8, w = tersekv.index_query(torch.randn(2, 64, 128), torch.randn(2, 64), cache=index_cache[0])
        >>> indices, index_lens = tersekv.index_select(q8, w, index_cache[0], page_table, seq_lens, 50)
        >>> indices.shape, index_lens
        (torch.Size([2, 50]), tensor([50, 40], dtype=torch.int32))

        open_group:     with ratio > 1: where (position + 1) % ratio > 0, the id of the open group is appended; the
                        result has k + 1 columns
        out, out_lens:  [T, k] and [T] int32 to write into; with heads="each" [T, Hi, k] and [T, Hi]
        the rest as in `index_scores` and `index_topk`

    Positions of keys, or with reduce_blocks of blocks, and how many each row has: what `mla_decode` and `decode` take
    as `indices` and `index_lens`. Scores are held for so many rows at a time as fit into 256 MB. Returns (out,
    out_lens). Raises ValueError or TypeError for arguments that do not fit.
    """
    c = _layer(cache)
    ratio, relu, each, block, scale = _scoring(ratio, relu, heads, reduce_blocks, scale)
    k, first, last = _selection(k, keep_first, keep_last)
    width = None if width is None else as_non_negative_int("width", width)
    max_q_len = None if max_q_len is None else as_int("max_q_len", max_q_len)
    open_group = as_bool("open_group", open_group)
    inputs = (q, weights, c.k, c.scale, page_table, seq_lens, cu_seqlens_q, out, out_lens)
    options = (c.format, max_q_len, ratio, relu, scale, each, block, k, first, last, open_group, width, backend)
    cached = lookup("index_select", options, inputs)
    if cached is not None:
        return cached[0] if out is None else out, cached[-1] if out_lens is None else out_lens
    tensor("q", q, "T Hi Di")
    columns, lines = _width(width, page_table, c, block), _lines(q, each)
    if out is None:
        out = torch.empty(*lines, k + open_group, dtype=torch.int32, device=q.device)
    if out_lens is None:
        out_lens = torch.empty(lines, dtype=torch.int32, device=q.device)
    call = IndexSelectCall(
        q, weights, c.k, c.scale, page_table, seq_lens, cu_seqlens_q, out, out_lens, c.format,
        max_query_rows(q.shape[0], seq_lens, cu_seqlens_q, max_q_len), ratio, relu, scale, each, block, k, first, last,
        open_group, columns,
    )  # fmt: skip
    made = {"out": out, "out_lens": out_lens}
    dispatch_call("index_select", call, backend, CallSignature(options, inputs, made))
    return out, out_lens


def _scoring(ratio: Any, relu: Any, heads: Any, block: Any, scale: Any) -> tuple[int, bool, bool, int, float]:
    """Returns ratio, relu, whether each head has its scores, keys of a column, and scale, checked."""
    if heads not in ("sum", "each"):
        raise ValueError(f"heads: want 'sum' or 'each', got {heads!r}")
    block = 1 if block is None else as_positive_int("reduce_blocks", block)
    return as_positive_int("ratio", ratio), as_bool("relu", relu), heads == "each", block, as_float("scale", scale)


def _selection(k: Any, first: Any, last: Any) -> tuple[int, int, int]:
    first, last = as_non_negative_int("keep_first", first), as_non_negative_int("keep_last", last)
    return as_positive_int("k", k), first, last


def _width(width: int | None, page_table: Any, c: PagedIndexLayer, block: int) -> int:
    """Returns the columns of the scores."""
    if width is not None:
        return width
    tensor("page_table", page_table, "B max_pages")
    tensor("k_cache", c.k, "P S Di")
    return -(-page_table.shape[1] * c.page_size // block)


def _lines(q: Tensor, each: bool) -> tuple[int, ...]:
    return tuple(q.shape[: 2 if each else 1])
