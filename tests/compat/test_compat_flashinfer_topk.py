"""FlashInfer's top-k and its transforms against torch.topk and plain loops."""

from __future__ import annotations

import re

import pytest
import torch

from tersekv.backends.cpu import library
from tersekv.compat import _indexer
from tersekv.compat.flashinfer import TopKTieBreak, top_k, top_k_page_table_transform, top_k_ragged_transform
from tersekv.dispatch import launch_cache
from tersekv.errors import UnsupportedError

I32 = torch.int32


def largest(row, k):
    """Columns of the k largest, the smaller of equal ones, ascending; −1 behind them."""
    order = sorted(range(len(row)), key=lambda j: (-row[j], j))[:k]
    return sorted(order) + [-1] * (k - len(order))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 7, 300])
def test_top_k_is_torch_topk(dtype, k):
    torch.manual_seed(k)
    x = torch.stack([torch.randperm(300) for _ in range(5)])[:, :300].to(dtype)
    x = x if dtype == torch.float32 else torch.randn(5, 600, dtype=dtype)[:, ::2]  # strided, with ties
    want = x.float().topk(k)
    values, indices = top_k(x, k, sorted=True, deterministic=True, tie_break=TopKTieBreak.SMALL)
    assert (values.dtype, indices.dtype) == (dtype, torch.int64)
    assert torch.equal(values.float(), want.values)
    assert torch.equal(x.gather(1, indices), values)
    values, indices = top_k(x, k)
    assert indices.tolist() == [largest(row.tolist(), k) for row in x]
    assert torch.equal(values, x.gather(1, indices))


def test_masked_values_fill_what_is_left_and_nan_comes_last():
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([[-inf, 3.0, -inf, 2.0], [nan, -inf, inf, 0.0], [-0.0, 0.0, -1.0, 0.0]])
    values, indices = top_k(x, 3, sorted=True)
    assert indices.tolist() == [[1, 3, 0], [2, 3, 1], [0, 1, 3]]
    assert torch.equal(values, x.gather(1, indices))
    assert top_k(x, 4, sorted=True)[1].tolist()[1] == [2, 3, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_starts", [False, True])
def test_offsets(dtype, with_starts):
    torch.manual_seed(0)
    x = torch.randn(6, 60).round(decimals=1).to(dtype)
    lengths = torch.tensor([60, 0, 4, 5, 30, 17], dtype=I32)
    starts = torch.tensor([0, 60, 50, 3, 30, 40], dtype=I32) if with_starts else None
    offsets = torch.tensor([0, 7, 100, 60, 2**30, 1], dtype=I32)
    want = []
    for t in range(6):
        begin = int(starts[t]) if with_starts else 0
        seen = x[t, begin : begin + int(lengths[t])].tolist()
        want.append([j + int(offsets[t]) if j >= 0 else -1 for j in largest(seen, 5)])
    got = top_k_ragged_transform(x, offsets, lengths, 5, row_starts=starts)
    assert (got.dtype, got.tolist()) == (I32, want)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("with_starts", [False, True])
def test_slots(page_size, batch, with_starts):
    torch.manual_seed(page_size)
    rows, width, k = 6, 64, 5
    x, lengths = torch.randn(rows, width), torch.tensor([40, 0, 3, 5, 30, 17], dtype=I32)
    starts = torch.tensor([0, 64, 20, 3, 8, 40], dtype=I32) if with_starts else None
    entries = torch.tensor([2, 0, 1, 0, 5, 3], dtype=I32) if with_starts else None
    if with_starts and page_size == 1:
        entries = None  # the scores' own
    request = torch.tensor([1, 0, 1, 2, 2, 0], dtype=I32) if batch else None
    table = torch.randperm(6 * width).view(6, width).to(I32)[: 3 if batch else 6]
    want, raw = [], []
    for t in range(rows):
        begin = int(starts[t]) if with_starts else 0
        first = begin if entries is None else int(entries[t])
        mine = table[int(request[t]) if batch else t]
        raw.append(largest(x[t, begin : begin + int(lengths[t])].tolist(), k))
        want.append([
            -1 if j < 0 else int(mine[first + j // page_size]) * page_size + j % page_size for j in raw[-1]
        ])  # fmt: skip
    given = {"row_to_batch": request, "row_starts": starts, "page_table_row_starts": entries, "page_size": page_size}
    got = top_k_page_table_transform(x, table, lengths, k, **given)
    assert (got.dtype, got.tolist()) == (I32, want)
    out, columns = (torch.full((rows, k), 99, dtype=I32) for _ in range(2))
    assert top_k_page_table_transform(x, table, lengths, k, **given, out=out, out_raw_indices=columns) is out
    assert (out.tolist(), columns.tolist()) == (want, raw)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint32])
def test_index_tensors_of_other_dtypes(dtype):
    torch.manual_seed(0)
    x, starts = torch.randn(3, 40), torch.tensor([0, 2, 4], dtype=I32)
    given = (LENS, starts, TABLE, torch.tensor([2, 0, 1], dtype=I32))
    for lens, begin, table, request in (given, [t.to(dtype) for t in given]):
        got = (
            top_k_ragged_transform(x, lens, lens, 4, row_starts=begin),
            top_k_page_table_transform(x, table, lens, 4, row_to_batch=request, row_starts=begin),
        )
        if lens is LENS:
            want = got
    assert all(map(torch.equal, got, want))


FAR, END = 2**63 - 1, 2**31  # the largest int64, and the first number that int32 does not hold


@pytest.mark.parametrize(("function", "given", "message"), [
    (top_k_ragged_transform, {"offsets": [0, END - 2, 0]}, f"offsets: want results in [0, 2**31), got {END} for row 1"),
    (top_k_ragged_transform, {"offsets": [0, 0, 2**32]}, f"offsets: want results in [0, 2**31), got {2**32} for row 2"),
    (top_k_ragged_transform, {"offsets": [FAR, 0, 0]}, f"offsets: want results in [0, 2**31), got {FAR} for row 0"),
    (top_k_ragged_transform, {"offsets": [0, -1, 0]}, "offsets: want results in [0, 2**31), got -1 for row 1"),
    (top_k_page_table_transform, {"src_page_table": [[0], [END // 4], [0]], "page_size": 4},
     f"src_page_table: want pages below {END // 4}, for int32 slots, got {END // 4} for row 1"),
    (top_k_page_table_transform, {"src_page_table": [[0], [0], [2**62]], "page_size": 4},
     f"src_page_table: want pages below {END // 4}, for int32 slots, got {2**62} for row 2"),
    (top_k_page_table_transform, {"src_page_table": [[0, 1, 2], [END, 1, 2], [0, 1, 2]]},
     f"src_page_table: want pages below {END}, for int32 slots, got {END} for row 1"),
])  # fmt: skip
def test_what_int32_does_not_hold_is_refused_or_left_out(function, given, message, monkeypatch):
    name, numbers = next(iter(given.items()))
    given = {"lengths": torch.tensor([4, 4, 4]), "k": 3} | given | {name: torch.tensor(numbers)}
    x = torch.tensor([[3.0, 2.0, 1.0, 0.0]] * 3)
    with pytest.raises(ValueError, match=f"^{re.escape(message)} of input$"):
        function(x, **given)
    monkeypatch.setattr(_indexer, "tracing", lambda: True)  # as where nothing is read on the host
    got = function(x, **given)
    row = next(t for t in range(3) if f"row {t}" in message)
    assert got[row, 2 if numbers[row] == END - 2 else 0] == -1
    assert all(got[t].tolist() == [0, 1, 2] for t in range(3) if t != row)


def test_results_up_to_the_largest_int32():
    x, lengths = torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.tensor([4])
    last = [END - 3, END - 2, END - 1]
    assert top_k_ragged_transform(x, torch.tensor([END - 3]), lengths, 3).tolist() == [last]
    assert top_k_ragged_transform(x, torch.tensor([END - 3], dtype=torch.uint32), lengths, 3).tolist() == [last]
    table = torch.tensor([[-5, END - 1, 7]])
    assert top_k_page_table_transform(x, table, lengths, 3).tolist() == [[-1, END - 1, 7]]


@pytest.mark.parametrize(("start", "length", "want"), [
    (1, FAR, [1, 2]), (3, 2**32, [3, -1]), (-1, -FAR - 1, [-1, -1]), (FAR, FAR, [-1, -1]), (1, -1, [-1, -1]),
])  # fmt: skip
def test_a_length_that_no_row_has_does_not_wrap(start, length, want):
    x, starts, lengths = torch.tensor([[9.0, 3.0, 2.0, 1.0]]), torch.tensor([start]), torch.tensor([length])
    offsets = torch.tensor([start if want[0] >= 0 else 0])
    assert top_k_ragged_transform(x, offsets, lengths, 2, row_starts=starts).tolist() == [want]


@pytest.mark.skipif(library.why_no_library() is not None, reason="no native library here")
def test_a_call_like_one_before_it_takes_the_short_way(monkeypatch):
    for known in ("_launches", "_recent"):
        monkeypatch.setattr(launch_cache, known, {})
    x, lens = torch.randn(3, 40), torch.tensor([40, 3, 9], dtype=I32)

    def every():
        return top_k(x, 4)[1], top_k_ragged_transform(x, lens, lens, 4), top_k_page_table_transform(x, TABLE, lens, 4)

    first = every()

    def refuse(*_):
        raise AssertionError("the long way")

    monkeypatch.setattr(_indexer, "dispatch_call", refuse)
    assert all(map(torch.equal, every(), first))
    with pytest.raises(AssertionError, match="the long way"):
        top_k(x, 5)


X, LENS, TABLE = torch.zeros(3, 40), torch.tensor([40, 3, 9], dtype=I32), torch.arange(120, dtype=I32).view(3, 40)
SLOTS = {"input": X, "src_page_table": TABLE, "lengths": LENS, "k": 4}
RAGGED = {"input": X, "offsets": LENS, "lengths": LENS, "k": 4}
PLAIN = {"input": X, "k": 4}
OUT = torch.zeros(3, 4, dtype=I32)


@pytest.mark.parametrize(("function", "given", "wrong", "message"), [
    (top_k, PLAIN, {"k": 41}, "k: want at most the 40 columns of input, got 41"),
    (top_k, PLAIN, {"k": 0}, "k: want 1 or more, got 0"),
    (top_k, PLAIN, {"input": X[0]}, "input: want [T, W], got [40]"),
    (top_k, PLAIN, {"input": X.double()}, "input: want float32, float16 or bfloat16, got float64"),
    (top_k, PLAIN, {"tie_break": -1}, "tie_break: want 0 or more"),
    (top_k, PLAIN, {"deterministic": 1.5}, "deterministic: want"),
    (top_k_ragged_transform, RAGGED, {"offsets": LENS[:2]}, "offsets: want [T=3], got [2]"),
    (top_k_ragged_transform, RAGGED, {"lengths": LENS[:2]}, "lengths: want [T=3]"),
    (top_k_ragged_transform, RAGGED, {"lengths": LENS.float()}, "lengths: want"),
    (top_k_ragged_transform, RAGGED, {"row_starts": LENS[:2]}, "row_starts: want [T=3], got [2]"),
    (top_k_page_table_transform, SLOTS, {"src_page_table": TABLE[0]}, "src_page_table: want [B, max_pages], got [40]"),
    (top_k_page_table_transform, SLOTS, {"src_page_table": TABLE[:2]}, "src_page_table: want a row for each"),
    (top_k_page_table_transform, SLOTS, {"page_size": 3}, "page_size: want a power of two, got 3"),
    (top_k_page_table_transform, SLOTS, {"page_size": 2, "row_starts": LENS}, "page_table_row_starts: want [T] beside"),
    (top_k_page_table_transform, SLOTS, {"row_to_batch": LENS[:2]}, "row_to_batch: want [T=3], got [2]"),
    (top_k_page_table_transform, SLOTS, {"out": TABLE}, "out: want contiguous [3, 4] int32, got [3, 40] int32"),
    (top_k_page_table_transform, SLOTS, {"out_raw_indices": X[:, :4]}, "out_raw_indices: want contiguous [3, 4]"),
    *((top_k_ragged_transform, RAGGED | {"row_starts": LENS}, {name: LENS + 0.7}, f"{name}: want int32, int64")
      for name in ("offsets", "lengths", "row_starts")),
    *((top_k_page_table_transform, SLOTS, {name: LENS + 0.7}, f"{name}: want int32, int64 or uint32, got float32")
      for name in ("lengths", "row_to_batch", "page_table_row_starts")),
    (top_k_page_table_transform, SLOTS, {"src_page_table": TABLE + 0.7}, "src_page_table: want int32, int64"),
    (top_k_page_table_transform, SLOTS, {"src_page_table": TABLE[:, :2]}, "src_page_table: want room for every"),
    (top_k_page_table_transform, SLOTS, {"row_to_batch": LENS}, "row_to_batch: want requests in [0, 3), got 40"),
    (top_k_page_table_transform, SLOTS, {"row_to_batch": LENS - 4}, "row_to_batch: want requests in [0, 3), got 36"),
    (top_k_page_table_transform, SLOTS, {"page_table_row_starts": LENS - 3}, "src_page_table: want room for every"),
    *((top_k_page_table_transform, SLOTS, {name: torch.tensor([0, start, 2])},
       f"{name}: want entries of src_page_table in [0, 40), got {start} for row 1 of input")
      for name, start in (("row_starts", -1), *(("page_table_row_starts", x) for x in (-1, -(2**63), 40, 2**63 - 1)))),
    (top_k_page_table_transform, SLOTS, {"out": OUT, "out_raw_indices": OUT}, "out_raw_indices: want memory of"),
])  # fmt: skip
def test_wrong_arguments(function, given, wrong, message):
    with pytest.raises((ValueError, TypeError)) as told:
        function(**{**given, **wrong})
    assert str(told.value).startswith(message)


@pytest.mark.parametrize("width", [0, 5])
def test_a_row_that_sees_nothing_needs_no_request_and_no_entry(width):
    lengths, request = torch.tensor([0, 0, 0], dtype=I32), torch.tensor([-1, 7, 2], dtype=I32)
    got = top_k_page_table_transform(X, TABLE[:, :width], lengths, 4, row_to_batch=request)
    assert got.unique().tolist() == [-1]


def test_torch_compile_takes_each_of_them_whole():
    torch.manual_seed(0)
    x = torch.randn(3, 40)

    def every(x):
        slots = top_k_page_table_transform(x, TABLE, LENS, 4, page_size=2, tie_break=TopKTieBreak.SMALL)
        return top_k(x, 4)[1], top_k_ragged_transform(x, LENS, LENS, 4), slots

    assert all(map(torch.equal, torch.compile(every, fullgraph=True, backend="eager")(x), every(x)))


@pytest.mark.parametrize(("function", "given"), [
    (top_k, PLAIN), (top_k_ragged_transform, RAGGED), (top_k_page_table_transform, SLOTS),
])  # fmt: skip
def test_the_larger_column_of_equal_values_is_refused(function, given):
    with pytest.raises(UnsupportedError, match="tie_break: want 0 or 1"):
        function(**given, tie_break=TopKTieBreak.LARGE)
