"""Which keys lists of keys (`indices`) name, by their definition: plain lists of plain numbers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..calls import AttentionCall, MLADecodeCall


def latent_keys(call: MLADecodeCall) -> list[list[tuple[int, int]]]:
    """(page, slot) of each key of each row, as often as it stands in the row's list."""
    size, found = call.ckv.shape[1], []
    places = row_places(call)
    for t in range(call.out.shape[0]):
        used = _used(call.indices, call.index_lens, t)
        if call.page_table is None:
            found.append([divmod(x, size) for x in used])
            continue
        b, position = places[t]
        found.append(
            [(int(call.page_table[b, j // size]), j % size) for j in positions(used, position, call.block_size)]
        )
    return found


def extra_keys(call: MLADecodeCall) -> list[list[tuple[int, int]]]:
    """The same of a call's second set: rows see all that they list."""
    assert call.extra_ckv is not None
    size, table, found = call.extra_ckv.shape[1], call.extra_page_table, []
    starts = [b * call.max_q_len for b in range(1 + (0 if table is None else len(table)))]
    if call.cu_seqlens_q is not None:
        starts = call.cu_seqlens_q.tolist()
    for t in range(call.out.shape[0]):
        used = _used(call.extra_indices, call.extra_index_lens, t)
        if table is None:
            found.append([divmod(x, size) for x in used])
            continue
        of = [b for b, (start, stop) in enumerate(pairwise(starts)) if start <= t < stop]
        found.append([(int(table[b, x // size]), x % size) for b in of for x in used])
    return found


def block_counts(call: AttentionCall, start: int, stop: int, n: int) -> Tensor:
    """How often each of a request's n keys stands in the lists of its rows [start, stop): [r, Hkv, n] fp64."""
    assert call.indices is not None
    heads, counts = call.k_cache.shape[2], torch.zeros(stop - start, call.k_cache.shape[2], n, dtype=torch.float64)
    for t in range(start, stop):
        for h in range(heads):
            which = h if call.indices.shape[1] > 1 else 0
            lens = call.index_lens
            if lens is not None and lens.dim() == 2:
                lens = lens[:, which if lens.shape[1] > 1 else 0]
            used = _used(call.indices[:, which], lens, t)
            for j in positions(used, n - stop + t, call.block_size):
                counts[t - start, h, j] += 1
    return counts


def positions(used: list[int], last: int, block: int) -> list[int]:
    """Positions that entries stand for, up to a row's own."""
    return [j for x in used if x * block <= last for j in range(x * block, (x + 1) * block) if j <= last]


def row_places(call: Any) -> list[tuple[int, int]]:
    """(request, position) of each query row; a row of no request has position −1."""
    rows = call.out.shape[0]
    if call.page_table is None:
        return [(0, -1)] * rows
    requests = len(call.seq_lens)
    starts = [b * call.max_q_len for b in range(requests + 1)]
    if call.cu_seqlens_q is not None:
        starts = call.cu_seqlens_q.tolist()
    found = [(0, -1)] * rows
    for b, (start, stop) in enumerate(pairwise(starts)):
        for t in range(start, stop):
            found[t] = b, int(call.seq_lens[b]) - stop + t
    return found


def _used(indices: Tensor | None, lens: Tensor | None, t: int) -> list[int]:
    assert indices is not None
    n = indices.shape[-1] if lens is None else int(lens[t])
    entries = [int(x) for x in indices[t].tolist()[:n]]
    return [x for x in entries if 0 <= x != 0xFFFFFFFF]
