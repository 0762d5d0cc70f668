"""Attention over lists of keys (`indices`), in fp32 over the exact codes: rows side by side, each over its own list.

Nothing is read on the host but on a CPU, where slots and pages outside the cache raise ValueError.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .codes import may_read
from .gather import KeySlots
from .online_softmax import PagedSource, Results

_ELEMENTS = 1 << 24  # most elements of the keys of a step in fp32


class ListedKeys(NamedTuple):
    """The keys of rows, [N, K], or of their heads, [N, H, K]. Page and slot are 0 where a key is not visible."""

    pages: Tensor
    slots: Tensor
    visible: Tensor

    def rows(self, begin: int, end: int) -> ListedKeys:
        return ListedKeys(*[x[begin:end] for x in self])


def listed_keys(call: Any, num_pages: int, page_size: int, error_name_prefix: str = "") -> ListedKeys:
    """Returns the keys of the lists of a call, [T, n] or [T, Hx, n]: by positions, or by slots where it has no page
    table. One list for all heads: [T, K]. error_name_prefix: of the lists."""
    used = _entries_with_padding_as_minus_one(call)
    used = used[:, 0] if used.dim() == 3 and used.shape[1] == 1 else used
    if call.page_table is None:
        if may_read(used):
            _raise_at_first_wrong(
                f"{error_name_prefix}indices",
                f"slots below {num_pages * page_size} (P * S)",
                used,
                used >= num_pages * page_size,
            )
        visible = (used >= 0) & (used < num_pages * page_size)
        slot = torch.where(visible, used, 0)
        return ListedKeys(slot // page_size, slot % page_size, visible)
    room = call.page_table.shape[1] * page_size
    if call.seq_lens is None and may_read(used):
        _raise_at_first_wrong(
            f"{error_name_prefix}indices", f"positions below {room} (max_pages * S)", used, used >= room
        )
    request, last = _request_and_last_position_of_rows(call, room)
    last = last.view(-1, *[1] * (used.dim() - 1))
    # A block past the row's own position may stand for any number: no product before it is dropped.
    used = torch.where(used > last.div(call.block_size, rounding_mode="floor"), -1, used)
    position = used[..., None] * call.block_size + torch.arange(call.block_size, device=used.device)
    visible = ((used >= 0)[..., None] & (position <= last[..., None])).flatten(-2)
    position = torch.where(visible, position.flatten(-2), 0)
    table = call.page_table.to(torch.int64)
    if 0 in table.shape:
        _check_positions_below_on_cpu(visible, position, 0)
        return ListedKeys(position * 0, position * 0, visible & False)
    column = position // page_size
    _check_positions_below_on_cpu(visible, position, room)
    request = request.clamp(min=0).view(-1, *[1] * (used.dim() - 1))
    page = torch.where(visible, table[request, column.clamp(max=table.shape[1] - 1)], 0)
    if may_read(page):
        wrong = visible & ((page < 0) | (page >= num_pages))
        if wrong.any():
            b, j, got = (int(x.expand_as(wrong)[wrong][0]) for x in (request, column, page))
            want = f"page ids in [0, {num_pages}) for listed keys"
            raise ValueError(f"{error_name_prefix}page_table: want {want}, got {got} at [{b}, {j}]")
    return ListedKeys(page, position % page_size, visible)


def _entries_with_padding_as_minus_one(call: Any) -> Tensor:
    """Returns the lists as int64, −1 for padding and past their ends."""
    x = call.indices.to(torch.int64)
    if call.indices.dtype == torch.uint32:
        x = torch.where(x == 0xFFFFFFFF, -1, x)
    if call.index_lens is None:
        return x
    lens = call.index_lens.to(torch.int64)
    lens = lens.view(*lens.shape, *[1] * (x.dim() - lens.dim()))
    return torch.where(torch.arange(x.shape[-1], device=x.device) < lens, x, -1)


def _request_and_last_position_of_rows(call: Any, num_positions_if_no_lens: int) -> tuple[Tensor, Tensor]:
    """Returns the request of each row and its position there, [T] int64; position −1 for a row of no request. A second
    set of keys has no lengths: rows see num_positions_if_no_lens."""
    count, row = call.page_table.shape[0], torch.arange(call.out.shape[0], device=call.out.device)
    if not count:
        return row * 0, row * 0 - 1
    if call.cu_seqlens_q is None:
        starts = torch.arange(count + 1, device=row.device) * call.max_q_len
    else:
        starts = call.cu_seqlens_q.to(torch.int64)
    request = (row[:, None] >= starts[None, 1:]).sum(1)
    known = request.clamp(max=count - 1)
    if call.seq_lens is None:
        position = row * 0 + num_positions_if_no_lens - 1
    else:
        position = call.seq_lens.to(torch.int64)[known] - starts[known + 1] + row
    return known, torch.where((request < count) & (row >= starts[0]), position, -1)


def _check_positions_below_on_cpu(visible: Tensor, position: Tensor, num_positions: int) -> None:
    """Raise ValueError on a CPU for a listed key past the page table; elsewhere nothing is read on the host."""
    if may_read(position):
        _raise_at_first_wrong(
            "indices",
            f"positions below {num_positions} (max_pages * S)",
            position,
            visible & (position >= num_positions),
        )


def _raise_at_first_wrong(name: str, want: str, x: Tensor, wrong: Tensor) -> None:
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise ValueError(f"{name}: want {want}, got {int(x[tuple(at)])} at {at}")


class KeySet(NamedTuple):
    """Keys of one cache."""

    q: list[Tensor]  # parts [T, H * G, D_i], scaled for its scores
    source: PagedSource
    keys: ListedKeys
    value_scale: float | Tensor = 1.0  # of its values


def attend_to_lists(
    sets: list[KeySet], sinks: Tensor | None, softcap: float, results: Results, lse_of_keys: bool = False
) -> None:
    """Store outputs, LSEs and largest scores of rows over the keys of all sets, in one softmax."""
    sets = [x for x in sets if x.source.num_pages and x.keys.pages.shape[-1]]
    if not sets:
        return
    tokens, heads = sets[0].q[0].shape[0], sets[0].source.heads
    width = sum(x.keys.pages.shape[-1] * x.source.widest * heads for x in sets)
    step = max(1, _ELEMENTS // width)
    for begin in range(0, tokens, step):
        rows = slice(begin, min(begin + step, tokens))
        found = [_scores_and_values(x, rows, softcap) for x in sets]
        s, values = torch.cat([x[0] for x in found], -1), torch.cat([x[1] for x in found], -2)
        out, lse = _output_and_lse_of_scores(s, values, sinks, lse_of_keys)
        results.out[rows], results.lse[rows] = out.flatten(1, 2), lse.flatten(1, 2)
        results.max_logits[rows] = s.amax(-1).flatten(1, 2)


def _scores_and_values(key_set: KeySet, rows: slice, softcap: float) -> tuple[Tensor, Tensor]:
    """Returns scores [N, H, G, K], −inf where a key is not visible, and values [N, H, K, Dv], 0 there."""
    heads, visible = key_set.source.heads, key_set.keys.visible[rows]
    visible = visible[:, None] if visible.dim() == 2 else visible
    keys, values = _load_kv_and_scales(key_set.source, key_set.keys, rows)
    s = torch.zeros((), device=visible.device)
    for q, k in zip(key_set.q, keys[:-1], strict=True):
        s = s + torch.einsum("nhgd,nhkd->nhgk", q[rows].unflatten(1, (heads, -1)), k)
    if keys[-1] is not None:
        s = s * keys[-1][:, :, None]
    if softcap:
        s = (s / softcap).tanh() * softcap
    v = values[0] if values[1] is None else values[0] * values[1][..., None]
    v = torch.where(visible[..., None], v, 0.0) * key_set.value_scale
    return torch.where(visible[:, :, None], s, -torch.inf), v


def _load_kv_and_scales(
    source: PagedSource, listed_keys_of_rows: ListedKeys, rows: slice
) -> tuple[list[Any], list[Any]]:
    """Returns key parts [N, H, K, D_i] and their scale [N, H, K] or None; values and theirs."""

    def load_k_parts_k_scale_v_and_v_scale(pages: Tensor, slots: Tensor) -> list[Tensor | None]:
        k_parts, k_scale = source.load_k_parts_and_unapplied_scale_or_none(KeySlots(pages, slots))
        found = [*k_parts, k_scale, *source.load_v_and_scale(KeySlots(pages, slots), k_parts)]
        return [None if x is None else x.unflatten(0, (-1, source.heads)) for x in found]

    pages, slots = listed_keys_of_rows.pages[rows], listed_keys_of_rows.slots[rows]
    if pages.dim() == 2:
        found = load_k_parts_k_scale_v_and_v_scale(pages, slots)
    else:  # a list for each head: the rows of all heads are loaded for each list, and one head's kept
        by_list = [load_k_parts_k_scale_v_and_v_scale(pages[:, h], slots[:, h]) for h in range(source.heads)]
        each = zip(*by_list, strict=True)
        found = [None if x[0] is None else torch.stack([y[:, h] for h, y in enumerate(x)], 1) for x in each]  # type: ignore[index]
    return found[:-2], found[-2:]


def _output_and_lse_of_scores(
    s: Tensor, values: Tensor, sinks: Tensor | None, lse_of_keys: bool
) -> tuple[Tensor, Tensor]:
    """Returns the output [N, H, G, Dv] and LSE [N, H, G]; a row without keys: 0 and −inf, whatever its sink."""
    empty = (s == -torch.inf).all(-1)
    top = s.amax(-1).masked_fill(empty, 0.0)
    if sinks is not None:
        sinks = sinks.to(torch.float32).view(s.shape[1:3])
        top = torch.maximum(top, sinks)
    infinite = top == torch.inf  # a sink takes all
    base = top.masked_fill(infinite, 0.0)
    p = torch.where(infinite[..., None], 0.0, (s - base[..., None]).exp())
    total = p.sum(-1)
    if sinks is not None:
        total = total + torch.where(infinite, 1.0, (sinks - base).exp())
    out = torch.matmul(p, values) / total[..., None]
    lse = s.logsumexp(-1) if lse_of_keys else top + total.log()
    return torch.where(empty[..., None], 0.0, out), torch.where(empty, -torch.inf, lse)
