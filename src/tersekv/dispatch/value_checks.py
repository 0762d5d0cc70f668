"""Checked mode (TERSEKV_CHECKED=1): checks of the values of index tensors, which lie on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..calls import TranscodeCall
from . import transcode_checks
from .list_checks import check_lists, extra_set


def check_host_values(call: Any) -> None:
    """As `check_values` in any mode, of calls on the CPU whose pages are looked at there."""
    if isinstance(call, TranscodeCall) and call.src_k.device.type == "cpu":
        transcode_checks.check_values(call)


def check_values(call: Any) -> None:
    """Raise ValueError for an index that points outside its tensor. Synchronises with the device."""
    if isinstance(call, TranscodeCall):
        transcode_checks.check_values(call)
    if getattr(call, "positions", None) is not None:
        _check_range("positions", call.positions, 0, call.cos_sin_cache.shape[0])
    cache = getattr(call, "k_cache", None)
    if cache is None:
        cache = getattr(call, "ckv", None)
    if cache is None:
        return
    pages, size = cache.shape[:2]
    if getattr(call, "slot_mapping", None) is not None:
        _check_range("slot_mapping", call.slot_mapping, None, pages * size)
    if getattr(call, "kv_indices", None) is not None:
        _check_kv_indices(call, pages, size)
    _check_attributes(call)
    if getattr(call, "page_table", None) is not None:
        _check_requests(call, pages, size)
    if getattr(call, "indices", None) is not None:
        check_lists(call)
    if getattr(call, "extra_indices", None) is not None:
        check_lists(extra_set(call), "extra.")
    sinks = getattr(call, "sinks", None)
    if sinks is not None and sinks.isnan().any():
        raise ValueError(f"sinks: want numbers, got NaN at {int(sinks.isnan().nonzero()[0, 0])}")


def _check_attributes(call: Any) -> None:
    """Check the signs and channel scales of a K/V cache."""
    for side in ("k", "v", "src_k", "src_v"):
        signs, scale = getattr(call, f"{side}_signs", None), getattr(call, f"{side}_channel_scale", None)
        for name, x, good, want in (
            (f"{side}_signs", signs, lambda x: x.abs() == 1, "1 or -1"),
            (f"{side}_channel_scale", scale, lambda x: (x > 0) & x.isfinite(), "positive, finite numbers"),
        ):
            if x is not None and not (fits := good(x)).all():
                raise ValueError(f"{name}: want {want}, got {float(x[~fits][0])}")


def _check_requests(call: Any, pages: int, size: int) -> None:
    """Check rows, lengths and pages of the requests of an attention."""
    new, room = _count_query_rows(call), call.page_table.shape[1] * size
    if hasattr(call, "seq_lens"):
        lens, name, what = call.seq_lens.to(torch.int64), "seq_lens", "(max_pages * S)"
        _check_non_negative(name, lens)
        lens = lens // getattr(call, "ratio", 1)  # keys of an indexer
        if getattr(call, "ends", None) is not None:
            ends = call.ends.to(torch.int64).view(len(lens), -1)
            lens, name = torch.cat([ends, ends.new_zeros(len(lens), 1)], 1).amax(1), "ends"
        if isinstance(getattr(call, "k", None), Tensor):  # a prefill's new rows are not read from pages
            lens, what = (lens - new).clamp(min=0), "before the new tokens (max_pages * S)"
    else:
        cached = call.cache_lens.to(torch.int64)
        lens = torch.where(cached > room, cached, cached + new)  # a sum could overflow
        name, what = "cache_lens", "(max_pages * S, the new tokens included)"
        _check_non_negative(name, cached)
        longest = int(lens[new > 0].max()) if (new > 0).any() else 0
        if call.freqs_cis is not None and longest > call.freqs_cis.shape[0]:
            raise ValueError(f"freqs_cis: want a row for each of {longest} tokens, got {call.freqs_cis.shape[0]}")
    if (lens > room).any():
        i = int((lens > room).nonzero()[0, 0])
        raise ValueError(f"{name}: want at most {room} {what}, got {int(lens[i])} at {i}")
    _check_pages("page_table", call.page_table, lens, pages, size)
    if hasattr(call, "buffer_row_offsets"):
        _check_chunks(call, lens)


def _count_query_rows(call: Any) -> Tensor:
    """Returns the query rows of each request, [B] int64, checked."""
    total, count = call.out.shape[0], call.page_table.shape[0]
    if call.cu_seqlens_q is None:
        return torch.full((count,), total // max(count, 1), device=call.out.device)
    starts = call.cu_seqlens_q.to(torch.int64)
    if starts[0] != 0:  # rows before the first belong to no request
        raise ValueError(f"cu_seqlens_q: want a first entry of 0, got {int(starts[0])}")
    if (starts[1:] < starts[:-1]).any() or starts[-1] > total:  # a difference could overflow
        raise ValueError(f"cu_seqlens_q: want rows in [0, {total}] that never fall, got {starts.tolist()}")
    new = starts.diff()
    if (new > call.max_q_len).any():
        raise ValueError(f"max_q_len: want at least {int(new.max())} as in cu_seqlens_q, got {call.max_q_len}")
    return new


def _check_chunks(call: Any, lens: Tensor) -> None:
    if not any(call.buffer_lengths):
        return  # no keys to attend to: the call appends only
    rows, starts = (x.to(torch.int64) for x in (call.buffer_row_offsets, call.cache_offsets[:, : len(lens)]))
    order = starts.argsort(0)
    first, counts = starts.gather(0, order), rows.diff().gather(0, order)
    whole = (counts >= 0).all() and (first == counts.cumsum(0) - counts)[counts > 0].all()
    if not whole or (counts.sum(0) != lens).any() or rows[:, -1].tolist() != list(call.buffer_lengths):
        raise ValueError(
            f"plan: want every cached token in exactly one chunk, lengths {lens.tolist()}, "
            f"got buffer_row_offsets {rows.tolist()} from {starts.tolist()}, buffer_lengths {list(call.buffer_lengths)}"
        )


def _check_non_negative(name: str, x: Tensor) -> None:
    if (x < 0).any():
        i = int((x < 0).nonzero()[0, 0])
        raise ValueError(f"{name}: want at least 0, got {int(x[i])} at {i}")


def _check_range(name: str, x: Tensor, low: int | None, high: int) -> None:
    x = x.to(torch.int64)
    bad = x >= high if low is None else (x < low) | (x >= high)
    if bad.any():
        i = int(bad.nonzero()[0, 0])
        wanted = f"below {high}" if low is None else f"in [{low}, {high})"
        raise ValueError(f"{name}: want every entry {wanted}, got {int(x[i])} at {i}")


def _check_kv_indices(call: Any, pages: int, size: int) -> None:
    b, pos = call.batch_indices.to(torch.int64), call.kv_positions.to(torch.int64)
    live = b >= 0
    _check_range("batch_indices", b, None, call.kv_indptr.shape[0] - 1)
    b, pos = b[live], pos[live]
    ptr = call.kv_indptr.to(torch.int64)
    _check_range("kv_indptr", ptr, 0, call.kv_indices.shape[0] + 1)
    room = (ptr[b + 1] - ptr[b]) * size
    bad = (pos < 0) | (pos >= room)
    if bad.any():
        i = int(bad.nonzero()[0, 0])
        raise ValueError(f"kv_positions: want in [0, {int(room[i])}) for request {int(b[i])}, got {int(pos[i])}")
    _check_range("kv_indices", call.kv_indices[ptr[b] + pos // size], 0, pages)


def _check_pages(name: str, table: Tensor, lens: Tensor, pages: int, size: int) -> None:
    used = -(-lens // size)
    live = torch.arange(table.shape[1], device=table.device) < used[:, None]
    ids = table.to(torch.int64)
    bad = live & ((ids < 0) | (ids >= pages))
    if bad.any():
        b, j = (int(n) for n in bad.nonzero()[0])
        raise ValueError(f"{name}: want page ids in [0, {pages}), got {int(ids[b, j])} at [{b}, {j}]")
