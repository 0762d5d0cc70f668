"""index_topk of more columns than a program holds: rounds of candidates, and where k is most of a split no rounds."""

from __future__ import annotations

import pytest
import torch

import tersekv
from tersekv.backends.triton.parts.index_topk import num_candidates_and_max_per_split_by_round


def scores_of(kind: str, rows: int, width: int) -> torch.Tensor:
    x = torch.randn(rows, width)
    if kind == "ties":
        x = (x * 3).round()
    elif kind == "equal":
        x = torch.zeros(rows, width)
    elif kind == "few":  # fewer than k may be taken in row 1, and NaN in row 0
        x[0], x[1, 100:] = torch.nan, -torch.inf
        x[0, ::7], x[0, 5::1000] = -torch.inf, 1.0
    return x


@pytest.mark.parametrize("kept", [{}, {"keep_first": 5, "keep_last": 9}], ids=["", "kept"])
@pytest.mark.parametrize(
    ("width", "k", "rounds", "kind"),
    [(5000, 2048, 0, "normal"), (40000, 2000, 1, "normal"), (40000, 2048, 1, "ties"), (33000, 2048, 1, "equal"),
     (70000, 700, 1, "few"), (140000, 512, 2, "normal"), (20000, 9000, 0, "ties"), (16385, 1, 1, "normal")],
)  # fmt: skip
def test_rounds_take_what_a_sort_takes(width, k, rounds, kind, kept):
    torch.manual_seed(0)
    assert len(num_candidates_and_max_per_split_by_round(width, k)) == rounds
    scores, visible = scores_of(kind, 3, width), torch.tensor([width, width - 1003, 10])
    lens = [torch.empty(3, dtype=torch.int32) for _ in range(2)]
    got, want = (
        tersekv.index_topk(scores, visible, k, **kept, out_lens=x, backend=backend)
        for x, backend in zip(lens, ("triton", "torch"), strict=True)
    )
    assert torch.equal(got, want)
    assert torch.equal(*lens)


def test_rows_go_in_parts_where_their_candidates_do_not_fit(monkeypatch):
    from tersekv.backends.triton import index_topk

    monkeypatch.setattr(index_topk, "_MAX_WORDS", 2 * 2 * 3 * 100)
    scores, visible = torch.randn(5, 10000), torch.tensor([10000, 7, 9000, 0, 4097])
    got = tersekv.index_topk(scores, visible, 100, backend="triton")
    assert torch.equal(got, tersekv.index_topk(scores, visible, 100, backend="torch"))


def test_a_negative_group_is_no_entry_of_a_list():
    scores, visible = torch.tensor([[1.0, 9.0]] * 4), torch.tensor([-1, -(2**31), 0, 2], dtype=torch.int32)
    lens = torch.full((4,), 99, dtype=torch.int32)
    is_open = torch.tensor([True] * 4)
    got = tersekv.index_topk(scores, visible, 1, open_group=is_open, out_lens=lens, backend="triton")
    assert got.tolist() == [[-1, -1], [-1, -1], [0, -1], [1, 2]]
    assert lens.tolist() == [0, 0, 1, 2]
