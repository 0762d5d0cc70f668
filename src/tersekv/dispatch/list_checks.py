"""Checks of `indices`: lists of the keys that each query row attends to. By their shapes, and by their values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..calls import MLADecodeCall
from ..shapes import ShapeChecker, require

INDEX = (torch.int32, torch.int64, torch.uint32)


def by_slot(f: Any) -> bool:
    """Returns whether the lists of a call hold slots instead of positions."""
    return f.indices is not None and f.page_table is None


def latent_lists(f: SimpleNamespace, s: ShapeChecker) -> None:
    """Raise ValueError unless lists over a latent cache fit; they may hold slots."""
    lists = f.indices is not None
    require(lists or f.page_table is not None, "page_table", "a tensor without indices", None)
    require(by_slot(f) or f.seq_lens is not None, "seq_lens", "a tensor beside page_table", None)
    _lists(f)
    if lists:
        s.see("indices", "T n", INDEX, last_dim_dense=False)
        s.see("index_lens", "T", INDEX, last_dim_dense=False)
        slots = by_slot(f) and f.block_size != 1
        require(not slots, "block_size", "1 where indices are slots (page_table is None)", f.block_size)


def block_lists(f: SimpleNamespace, s: ShapeChecker) -> None:
    """Raise ValueError unless lists of blocks over a K/V cache fit."""
    _lists(f)
    if f.indices is None:
        return
    for name, absent in (("mask", f.mask is None), ("window", f.window == 0), ("k", f.k is None), ("v", f.v is None)):
        require(absent, "indices", f"None beside {name}", "a tensor")
    s.see("indices", "T Hx n", INDEX, last_dim_dense=False)
    require(s["Hx"] in (1, s["H"]), "indices", f"lists for 1 or num_kv_heads={s['H']} heads", s["Hx"])
    per_list = f.index_lens is not None and len(f.index_lens.shape) == 2
    s.see("index_lens", "T Hx" if per_list else "T", INDEX, last_dim_dense=False)


def _lists(f: SimpleNamespace) -> None:
    lists = f.indices is not None
    require(lists or f.index_lens is None, "index_lens", "None without indices", "a tensor")
    require(lists or f.block_size == 1, "block_size", "1 without indices", f.block_size)
    require(f.block_size > 0, "block_size", "a positive number of positions", f.block_size)
    n = f.indices.shape[-1] if lists and f.indices.shape else 0
    require(n * f.block_size < 2**31, "block_size", "n * block_size below 2**31", f"{n} * {f.block_size}")


def _entries(x: Tensor) -> Tensor:
    """Returns the entries of lists as int64, where padding is negative."""
    y = x.to(torch.int64)
    return torch.where(y == 2**32 - 1, -1, y) if x.dtype == torch.uint32 else y


def _used_entries(call: Any) -> Tensor:
    """Returns the entries of each list as int64, −1 past its end: [T, n], or [T, Hx, n]."""
    x = _entries(call.indices)
    if call.index_lens is None:
        return x
    lens = call.index_lens.to(torch.int64)
    if x.dim() == 3 and lens.dim() == 1:
        lens = lens[:, None]
    return torch.where(torch.arange(x.shape[-1], device=x.device) < lens[..., None], x, -1)


def _request_of_rows(call: Any) -> Tensor:
    """Returns the request of each query row, [T] int64; −1 for a row of none."""
    row, count = torch.arange(call.out.shape[0], device=call.out.device), len(call.page_table)
    if call.cu_seqlens_q is None:
        return row // max(call.max_q_len, 1)
    starts = call.cu_seqlens_q.to(torch.int64)
    request = torch.searchsorted(starts[1:].contiguous(), row, right=True)
    return torch.where((request < count) & (row >= starts[0]), request, -1)


def extra_set(call: MLADecodeCall) -> SimpleNamespace:
    """An `mla_decode` over its second set of keys alone, whose lists may hold any position: it has no seq_lens."""
    fields = call._asdict()
    extra = {name.removeprefix("extra_"): x for name, x in fields.items() if name.startswith("extra_")}
    none = {f"extra_{name}": None for name in extra}
    return SimpleNamespace(**fields | none | extra | {"seq_lens": None, "block_size": 1})


def check_lists(call: Any, of: str = "") -> None:
    """Raise ValueError for values that lists may not hold: checked mode. of: what their arguments belong to."""
    if call.index_lens is not None:
        lens, n = call.index_lens.to(torch.int64), call.indices.shape[-1]
        _raise_first(f"{of}index_lens", f"in [0, {n}]", lens, (lens < 0) | (lens > n))
    used = _used_entries(call)
    if by_slot(call):
        slots = call.ckv.shape[0] * call.ckv.shape[1]
        _raise_first(f"{of}indices", f"slots below {slots} (P * S)", used, used >= slots)
    elif call.seq_lens is None:  # a second set, of whose requests no length is known
        room = call.page_table.shape[1] * call.ckv.shape[1]
        _raise_first(f"{of}indices", f"positions below {room} (max_pages * S)", used, used >= room)
        _check_listed_pages(call, used, of)
    else:
        _check_positions(call, used)
    ordered = used.sort(-1).values
    again = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if again.any():
        at = again.nonzero()[0].tolist()
        got = int(ordered[..., 1:][tuple(at)])
        raise ValueError(f"{of}indices: want every valid entry of a list once, got {got} twice in list {at[:-1]}")


def _check_listed_pages(call: Any, used: Tensor, of: str) -> None:
    (pages, size), request = call.ckv.shape[:2], _request_of_rows(call)[:, None]
    valid = (used >= 0) & (request >= 0)
    if valid.any():
        column = torch.where(valid, used, 0) // size
        ids = call.page_table.to(torch.int64)[request.clamp(min=0), column]
        wrong = valid & ((ids < 0) | (ids >= pages))
        if wrong.any():
            b, j = (int(x.expand_as(wrong)[wrong][0]) for x in (request, column))
            want = f"page ids in [0, {pages}) for listed keys"
            raise ValueError(f"{of}page_table: want {want}, got {int(ids[wrong][0])} at [{b}, {j}]")


def _check_positions(call: Any, used: Tensor) -> None:
    request = _request_of_rows(call)
    lens = call.seq_lens.to(torch.int64)
    if not len(lens):
        return
    room = torch.where(request < 0, 2**62, lens[request.clamp(min=0)])
    room = room.view(-1, *[1] * (used.dim() - 1)).expand_as(used)
    # No product with the block size, which could overflow.
    wrong = used > (room - 1).div(call.block_size, rounding_mode="floor")
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        b = int(request[at[0]])
        limit = -(-int(lens[b]) // call.block_size)
        what = "positions" if call.block_size == 1 else f"blocks of {call.block_size}"
        raise ValueError(f"indices: want {what} below {limit} (seq_lens[{b}]), got {int(used[tuple(at)])} at {at}")


def _raise_first(name: str, want: str, x: Tensor, wrong: Tensor) -> None:
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise ValueError(f"{name}: want {want}, got {int(x[tuple(at)])} at {at}")
