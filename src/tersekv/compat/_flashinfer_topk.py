"""FlashInfer's top-k, alone and with what it chose looked up in a page table. Imported through
`tersekv.compat.flashinfer`."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..ops.registry import same_address
from ..scalars import as_bool
from ._adapt import as_host_int, dtype_name, index_tensor, tensor
from ._indexer import take_largest, where_inside

_NAMES = {"scores": "input", "visible": "lengths", "starts": "row_starts"}
_END = 2**31  # the first number that results, int32, do not hold
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class TopKTieBreak(IntEnum):
    """`flashinfer.TopKTieBreak`: which of equal values are taken.

    >>> TopKTieBreak.SMALL.value
    1
    """

    NONE, SMALL, LARGE = range(3)


def top_k(
    input: Tensor,
    k: int,
    sorted: bool = False,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
) -> tuple[Tensor, Tensor]:
    """`flashinfer.top_k`: the k largest values of each row, and their columns.

        >>> values, indices = top_k(torch.tensor([[1.0, 5.0, 3.0, 3.0]]), 2)
        >>> values, indices
        (tensor([[5., 3.]]), tensor([[1, 2]]))

        input:      [T, W] fp32 | fp16 | bf16
        k:          at most W
        sorted:     the largest first; else columns ascend
        tie_break:  0 or 1: the smaller column of equal values
        deterministic, dsa_graph_safe:  always, with them and without

    Returns values [T, k] in input's dtype and indices [T, k] int64. NaN is less than every number. Raises
    UnsupportedError for tie_break=2, and ValueError or TypeError for a bad argument.
    """
    _check(input, deterministic, tie_break, dsa_graph_safe)
    rows, columns = input.shape
    if as_host_int("k", k, 1) > columns:
        raise ValueError(f"k: want at most the {columns} columns of input, got {k}")
    # −inf, which index_topk never takes, counts as the least number.
    scores = input.float().clamp(min=torch.finfo(torch.float32).min)
    indices = torch.empty(rows, k, dtype=torch.int32, device=input.device)
    visible = torch.full((rows,), columns, dtype=torch.int32, device=input.device)
    take_largest(_NAMES, ("top_k",), scores, visible, None, indices, k)
    indices = indices.long()
    values = input.gather(1, indices)
    if as_bool("sorted", sorted):
        taken = scores.gather(1, indices).nan_to_num(nan=-torch.inf, posinf=torch.inf)
        order = taken.argsort(dim=1, descending=True, stable=True)
        values, indices = values.gather(1, order), indices.gather(1, order)
    return values, indices


def top_k_ragged_transform(
    input: Tensor,
    offsets: Tensor,
    lengths: Tensor,
    k: int,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: Tensor | None = None,
) -> Tensor:
    """`flashinfer.top_k_ragged_transform`: the columns of each row's largest values, plus the row's offset.

        >>> scores, lengths = torch.tensor([[1.0, 5.0, 3.0, 9.0]] * 2), torch.tensor([3, 1])
        >>> top_k_ragged_transform(scores, torch.tensor([0, 100]), lengths, 2)
        tensor([[  1,   2],
                [100,  -1]], dtype=torch.int32)

        input:       [T, W] fp32; fp16 | bf16: copied to fp32
        offsets:     [T]; sums past int32 raise on a CPU and in checked mode, else they are −1
        lengths:     [T]  columns that each row sees, from row_starts on; more than W count as W
        row_starts:  [T]  default zeros: columns are counted from there
        deterministic, tie_break, dsa_graph_safe:  as `top_k`

    Returns [T, k] int32: ascending, −1 behind them. NOTE: −inf is never taken; FlashInfer takes it where nothing else
    is left. Raises as `top_k`.
    """
    _check(input, deterministic, tie_break, dsa_graph_safe)
    _check_rows("offsets", offsets, input)
    local = _largest(("top_k_ragged_transform",), input, lengths, row_starts, None, k)
    sums = local + offsets.long()[:, None]
    valid = where_inside(local >= 0, sums, _END, "offsets: want results in [0, 2**31)", "input")
    return sums.where(valid, -1).to(torch.int32)


def top_k_page_table_transform(
    input: Tensor,
    src_page_table: Tensor,
    lengths: Tensor,
    k: int,
    row_to_batch: Tensor | None = None,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: Tensor | None = None,
    page_table_row_starts: Tensor | None = None,
    *,
    page_size: int = 1,
    out: Tensor | None = None,
    out_raw_indices: Tensor | None = None,
) -> Tensor:
    """`flashinfer.top_k_page_table_transform`: slots of the columns of each row's largest values.

        >>> scores = torch.tensor([[1.0, 5.0, 3.0, 9.0]])
        >>> top_k_page_table_transform(scores, torch.tensor([[7, 2]]), torch.tensor([4]), 2, page_size=2)
        tensor([[15,  5]], dtype=torch.int32)

        input, lengths, row_starts, deterministic, tie_break, dsa_graph_safe:  as `top_k_ragged_transform`
        src_page_table:         [B, max_pages]; column c of a row is in entry page_table_row_starts + c // page_size; a
                                negative page: −1. Slots past int32 raise on a CPU and in checked mode, else −1
        row_to_batch:           [T]  each row's request; default: row t is request t
        page_table_row_starts:  [T]  default row_starts, which beside a page_size above 1 needs it
        page_size:              a power of two
        out, out_raw_indices:   [T, k] int32, contiguous, to write into: slots; columns, from row_starts on

    Returns out. `mla_decode` needs neither: it takes columns and the page table. Raises as `top_k`.
    """
    _check(input, deterministic, tie_break, dsa_graph_safe)
    index_tensor("src_page_table", src_page_table, "B, max_pages")
    size = as_host_int("page_size", page_size, 1)
    if size & (size - 1):
        raise ValueError(f"page_size: want a power of two, got {page_size}")
    starts_name = "page_table_row_starts"
    if page_table_row_starts is None:
        if size > 1 and row_starts is not None:
            raise ValueError("page_table_row_starts: want [T] beside row_starts and a page_size above 1, got None")
        page_table_row_starts, starts_name = row_starts, "row_starts"
    batch = torch.arange(len(input), device=input.device) if row_to_batch is None else row_to_batch
    for name, x in (("row_to_batch", batch), (starts_name, page_table_row_starts)):
        if x is not None:
            _check_rows(name, x, input)
    if row_to_batch is None and len(src_page_table) != len(input):
        raise ValueError(f"src_page_table: want a row for each of input's {len(input)}, got {len(src_page_table)}")
    if out is not None:
        _check_out("out", out, input, k)
        if same_address(out, out_raw_indices):
            raise ValueError("out_raw_indices: want memory of its own, got a tensor that begins where out does")
    local = _largest(("top_k_page_table_transform",), input, lengths, row_starts, out_raw_indices, k)
    entry, batch = local.clamp(min=0).long() // size, batch.long()[:, None].expand_as(local)
    (requests, width), of = src_page_table.shape, "input"
    valid = where_inside(local >= 0, batch, requests, f"row_to_batch: want requests in [0, {requests})", of)
    if page_table_row_starts is not None:
        first, end = page_table_row_starts.long()[:, None].expand_as(local), max(width, 1)
        valid = where_inside(valid, first, end, f"{starts_name}: want entries of src_page_table in [0, {end})", of)
        entry = entry + first.where(valid, 0)
    valid = where_inside(valid, entry, width, f"src_page_table: want room for every entry, {width} of a row", of)
    if src_page_table.numel() == 0:  # there is nothing to look at, and no entry is valid
        src_page_table = src_page_table.new_zeros(1, 1)
    pages, end = src_page_table[batch.where(valid, 0), entry.where(valid, 0)].long(), max(_END // size, 1)
    want = f"src_page_table: want pages below {end}, for int32 slots"
    valid = where_inside(valid & (pages >= 0), pages, end, want, of)
    slots = (pages * size + local % size).where(valid, -1).to(torch.int32)
    return slots if out is None else out.copy_(slots)


def _largest(
    options: tuple, input: Tensor, lengths: Tensor, starts: Tensor | None, out: Tensor | None, k: int
) -> Tensor:
    """Columns [T, k] int32 of the largest values, from each row's start on."""
    k = as_host_int("k", k, 1)
    if out is None:
        out = torch.empty(len(input), k, dtype=torch.int32, device=input.device)
    else:
        _check_out("out_raw_indices", out, input, k)
    _check_rows("lengths", lengths, input)
    ends = lengths
    if starts is not None:
        _check_rows("row_starts", starts, input)
        ends = starts.long() + ends.long().clamp(0, input.shape[1])
    take_largest(_NAMES, options, input.float(), ends, starts, out, k)
    return out


def _check_rows(name: str, x: Tensor, input: Tensor) -> None:
    if len(index_tensor(name, x, "T")) != len(input):
        raise ValueError(f"{name}: want [T={len(input)}], got {list(x.shape)}")


def _check_out(name: str, out: Tensor, input: Tensor, k: int) -> None:
    if tensor(name, out).shape != (len(input), k) or out.dtype != torch.int32 or not out.is_contiguous():
        want = f"contiguous {[len(input), k]} int32"
        raise ValueError(f"{name}: want {want}, got {list(out.shape)} {dtype_name(out.dtype)}")


def _check(input: Tensor, deterministic: bool, tie_break: int, dsa_graph_safe: bool) -> None:
    if tensor("input", input, "T, W").dtype not in _DTYPES:
        raise ValueError(f"input: want float32, float16 or bfloat16, got {dtype_name(input.dtype)}")
    as_bool("deterministic", deterministic), as_bool("dsa_graph_safe", dsa_graph_safe)
    # torch.compile fails to make an int of an enum's member.
    tie_break = as_host_int("tie_break", getattr(tie_break, "value", tie_break), 0)
    if tie_break > TopKTieBreak.SMALL:
        raise UnsupportedError(f"tie_break: want 0 or 1, the smaller column of equal values, got {tie_break}")
