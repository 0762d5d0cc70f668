"""Checks of the operations of an indexer, as `checks` has them of the others."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from ..formats import INDEX_BLOCK, MAX_INDEX_DIM, index_format
from ..shapes import ShapeChecker, require
from .cache_checks import finite
from .checks import F32, FLOAT, HALF, INDEX, _both, _query_rows, _rotary

_E4M3 = torch.float8_e4m3fn
_I32 = (torch.int32,)


def _index_append(f: SimpleNamespace) -> None:
    s = _index_cache(f)
    s.see("k", "T D", FLOAT)
    s.see("slot_mapping", "T", INDEX)
    _both("norm[1]", f.norm_bias, "norm[0]", f.norm_weight)
    s.see("norm_weight", "D", FLOAT)
    s.see("norm_bias", "D", FLOAT)
    finite("norm[2]", "a finite number, not negative", f.epsilon, f.epsilon >= 0)
    _rope(f, s)


def _index_query(f: SimpleNamespace) -> None:
    s, fmt = ShapeChecker(f), index_format(f.format)
    s.see("q", "T Hi D", FLOAT)
    _columns("q", s["D"])
    s.see("weights", "T Hi", FLOAT, last_dim_dense=False)
    s.see("q_out", "T Hi D", [fmt.storage])
    s.see("weights_out", "T Hi", F32, last_dim_dense=False)
    finite("weight_scale", "a finite number", f.weight_scale)
    _rope(f, s)


def _rope(f: SimpleNamespace, s: ShapeChecker) -> None:
    _both("positions", f.positions, "cos_sin_cache", f.cos_sin_cache)
    if f.cos_sin_cache is not None:
        _rotary(f, s)
        require(s["R"] <= s["D"], "cos_sin_cache", f"at most D={s['D']} rotary columns", s["R"])


def _index_cache(f: SimpleNamespace) -> ShapeChecker:
    s, fmt = ShapeChecker(f), index_format(f.format)
    s.see("k_cache", "P S D", [fmt.storage])
    _columns("k_cache", s["D"])
    require(s["S"] > 0, "k_cache", "at least one slot a page", s["S"])
    if fmt.scale_dtype is None:
        require(f.k_scale_cache is None, "k_scale_cache", f"None for {f.format}", "a tensor")
        return s
    require(f.k_scale_cache is not None, "k_scale_cache", f"the stored scales of {f.format}", None)
    if s["D"] <= INDEX_BLOCK:
        s.see("k_scale_cache", "P S", [fmt.scale_dtype], last_dim_dense=False)
    else:
        s.see("k_scale_cache", f"P S {fmt.scales(s['D'])}", [fmt.scale_dtype])
    return s


def _columns(name: str, d: int) -> None:
    want = f"a head_dim that is a multiple of 8 up to {MAX_INDEX_DIM}"
    require(d % 8 == 0 and 0 < d <= MAX_INDEX_DIM, name, want, d)


def _scored(f: SimpleNamespace) -> ShapeChecker:
    """Check what is common to scores and selections from them: queries, keys, requests, options."""
    s, stored = _index_cache(f), index_format(f.format).storage
    s.see("q", "T Hi D", [stored, _E4M3] if stored in HALF else [_E4M3, *HALF])
    require(s["Hi"] > 0, "q", "at least one head", s["Hi"])
    s.see("weights", "T Hi", F32, last_dim_dense=False)
    s.see("seq_lens", "B", INDEX)
    s.see("page_table", "B max_pages", INDEX)
    _query_rows(f, s)
    require(f.ratio >= 1, "ratio", "a positive number of tokens a key", f.ratio)
    require(f.block >= 1, "reduce_blocks", "a positive number of keys, or None", f.block)
    finite("scale", "a finite number", f.scale)
    return s


def _index_scores(f: SimpleNamespace) -> None:
    s = _scored(f)
    s.see("out", "T Hi W" if f.each else "T W", F32)
    for name in ("starts", "ends"):
        s.see(name, "T", INDEX)
        ragged = f.cu_seqlens_q is not None and getattr(f, name) is not None
        require(not ragged, name, "None beside cu_seqlens_q", "a tensor")


def _index_select(f: SimpleNamespace) -> None:
    s = _scored(f)
    require(f.width >= 0, "width", "0 or more columns", f.width)
    require(not f.open_group or f.block == 1, "open_group", "False with reduce_blocks", True)
    s.dims["K"] = f.k + f.open_group
    _selection(f, s, f.each)


def _index_topk(f: SimpleNamespace) -> None:
    s = ShapeChecker(f)
    each = len(f.scores.shape) == 3
    s.see("scores", "T Hi W" if each else "T W", F32)
    s.see("visible", "T", INDEX)
    s.see("open_group", "T", [torch.bool])
    s.see("starts", "T", INDEX)
    require(f.starts is None or f.open_group is None, "open_group", "None beside starts", "a tensor")
    s.dims["K"] = f.k + (f.open_group is not None)
    _selection(f, s, each)


def _selection(f: SimpleNamespace, s: ShapeChecker, each: bool) -> None:
    require(f.k >= 1, "k", "a positive number of columns to take", f.k)
    for name in ("keep_first", "keep_last"):
        require(getattr(f, name) >= 0, name, "0 or more columns", getattr(f, name))
    s.see("out", "T Hi K" if each else "T K", _I32)
    s.see("out_lens", "T Hi" if each else "T", _I32)


CHECKS = {
    "index_append": _index_append,
    "index_query": _index_query,
    "index_scores": _index_scores,
    "index_topk": _index_topk,
    "index_select": _index_select,
}
