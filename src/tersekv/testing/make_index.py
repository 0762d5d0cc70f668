"""Turns cases of an indexer's operations into their call records, as `make` does the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..calls import IndexAppendCall, IndexQueryCall, IndexScoresCall, IndexSelectCall, IndexTopkCall
from ..formats import PAGE_STEP, index_format
from ..index_layers import PagedIndexLayer
from .codes import encode
from .memory import POISON, poisoned, put
from .reference_index import encode_rows
from .requests import Requests

_GAP = 20  # bytes between pages: their distance is no multiple of 16 then


def _layer(m: Any, num_pages: int) -> PagedIndexLayer:
    """Poisoned pages; with gaps: parts of pages with more slots, pages apart, or scales in memory of their own."""
    c, f = m.case, index_format(m.case.format)
    n, size = f.row_bytes(c.dim), c.page + 3 * (c.gaps == "slots")
    step = -(-size * n // PAGE_STEP) * PAGE_STEP + _GAP * (c.gaps == "pages")
    whole = torch.full((num_pages, step), POISON, dtype=torch.uint8)
    made = PagedIndexLayer.from_buffer(whole[:, : size * n].unflatten(1, (size, n)), c.format)
    k, scale = made.k[:, : c.page], made.scale
    if c.gaps == "columns" and scale is not None:
        scale = poisoned(num_pages, c.page + 1, *scale.shape[2:], dtype=torch.float32)
    return PagedIndexLayer(k, None if scale is None else scale[:, : c.page], c.format)


def _rope(m: Any) -> tuple[Tensor | None, Tensor | None]:
    if not m.case.rotate:
        return None, None
    return m.requests.cos_sin(m.case.rotary or m.case.dim), m.requests.positions()


def _index_append(m: Any) -> IndexAppendCall:
    c, r = m.case, m.requests
    k, a = m.new_rows(r.tokens, c.dim), _layer(m, r.num_pages)
    norm: tuple[Tensor | None, Tensor | None] = (None, None)
    if c.norm:
        norm = (1 + 0.2 * m.normal(c.dim)).to(m.out_dtype), (0.2 * m.normal(c.dim)).to(m.out_dtype)
    return IndexAppendCall(
        k, a.k, a.scale, r.place()[0], *norm, *_rope(m), c.format, c.epsilon, c.interleaved, c.rope_last,
        bool(c.rotation), c.round16,
    )  # fmt: skip


def _index_query(m: Any) -> IndexQueryCall:
    c, r = m.case, m.requests
    q = m.new_rows(r.tokens, c.heads, c.dim)
    weights = m.rows(r.tokens, c.heads) if c.weighted else None
    q_out = m.by_token(r.tokens, c.heads, c.dim, dtype=index_format(c.format).storage)
    return IndexQueryCall(
        q, weights, *_rope(m), q_out, m.lse(r.tokens, c.heads), c.format, c.interleaved, c.rope_last, bool(c.rotation),
        c.round16, (c.heads * c.dim) ** -0.5,
    )  # fmt: skip


def _scored(m: Any) -> dict[str, Any]:
    """The fields that scores and selections share."""
    c, r, f = m.case, m.requests, index_format(m.case.format)
    stored = Requests(replace(c, lens=tuple(n // c.ratio for n in c.lens), q_lens=(0,) * len(c.lens)), m.random)
    a = _layer(m, stored.num_pages)
    pages, slots = stored.live()
    x = _numbers(m, len(pages), c.dim)
    codes, scales = encode_rows(x, f, whole=c.whole)
    put(a.k, pages, slots, codes)
    if scales is not None and a.scale is not None:
        if c.spread:  # readers take any scale
            scales = scales * 10.0 ** m.uniform(-1, 1, *scales.shape)
        elif c.whole:
            scales = 2.0 ** m.uniform(-1, 2, *scales.shape).floor()
        put(a.scale, pages, slots, scales[:, 0] if a.scale.dim() == 2 else scales)
    q = m.placed(encode(_numbers(m, r.tokens, c.heads, c.dim), m.dtype))
    weights = None
    if c.weighted:
        w = m.normal(r.tokens, c.heads)
        weights = m.view(r.tokens, c.heads, dtype=torch.float32)
        weights.copy_((4 * w).round().clamp(-4, 4) / 4 if c.whole else w)
    return {
        "q": q, "weights": weights, "k_cache": a.k, "k_scale_cache": a.scale, "page_table": stored.page_table(),
        "seq_lens": r.seq_lens(), "cu_seqlens_q": r.cu_seqlens() if c.ragged else None, "format": c.format,
        "max_q_len": r.max_q_len, "ratio": c.ratio, "relu": c.relu, "scale": 0.25 if c.scale == "float" else 1.0,
        "each": c.each, "block": c.block,
    }  # fmt: skip


def _numbers(m: Any, *shape: int) -> Tensor:
    x = m.normal(*shape)
    return x.round().clamp(-2, 2) if m.case.whole else x


def _width(m: Any, call: dict[str, Any]) -> int:
    return m.case.width or -(-call["page_table"].shape[1] * m.case.page // m.case.block)


def _index_scores(m: Any) -> IndexScoresCall:
    given = _scored(m)
    lines = (m.requests.tokens, *([m.case.heads] if m.case.each else []))
    call = IndexScoresCall(**given, out=m.view(*lines, _width(m, given), dtype=torch.float32))
    if not m.case.starts:
        return call
    rows = m.requests.max_q_len
    ends = [int((n // m.case.ratio + 1) * float(m.uniform(0, 1, 1))) for n in m.case.lens for _ in range(rows)]
    starts = [int(n * float(m.uniform(0, 1.2, 1))) for n in ends]
    return call._replace(starts=m.requests.index(starts), ends=m.requests.index(ends))


def _index_select(m: Any) -> IndexSelectCall:
    c, given = m.case, _scored(m)
    out, lens = _selected(m, m.requests.tokens, c.open_group)
    return IndexSelectCall(
        **given, out=out, out_lens=lens, k=c.top, keep_first=c.keep_first, keep_last=c.keep_last,
        open_group=c.open_group, width=_width(m, given),
    )  # fmt: skip


def _selected(m: Any, tokens: int, open_group: bool) -> tuple[Tensor, Tensor]:
    c = m.case
    lines = (tokens, *([c.heads] if c.each else []))
    return m.view(*lines, c.top + open_group, dtype=torch.int32), poisoned(*lines, dtype=torch.int32)


def _index_topk(m: Any) -> IndexTopkCall:
    """A row for each entry of lens, which sees so many of the columns. Scores past them are NaN."""
    c, tokens = m.case, len(m.case.lens)
    width = c.width or max(c.lens, default=0) + 5
    lines = (tokens, *([c.heads] if c.each else []))
    x = m.normal(*lines, width)
    if c.whole:
        x = x.round()
    if c.special:
        for value in (torch.nan, torch.inf, -torch.inf, -0.0):
            x[m.uniform(0, 1, *x.shape) < 0.1] = value
    scores = m.view(*lines, width, dtype=torch.float32)
    scores.copy_(x)
    for t, n in enumerate(c.lens):
        scores[t, ..., max(n, 0) :] = torch.nan
    open_group = m.uniform(0, 1, tokens) < 0.5 if c.open_group else None
    out, lens = _selected(m, tokens, c.open_group)
    visible = m.requests.index(list(c.lens))
    starts = None
    if c.starts:
        starts = m.requests.index([int(n * float(m.uniform(0, 1.2, 1))) for n in c.lens])
        for t, start in enumerate(starts.tolist()):
            scores[t, ..., :start] = torch.nan
    return IndexTopkCall(
        scores, visible, open_group, out, lens if c.lse else None, c.top, c.keep_first, c.keep_last, starts
    )


MAKERS = {
    "index_append": _index_append,
    "index_query": _index_query,
    "index_scores": _index_scores,
    "index_topk": _index_topk,
    "index_select": _index_select,
}
