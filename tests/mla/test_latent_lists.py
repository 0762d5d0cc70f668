"""mla_decode over lists of keys (`indices`): what lists mean, which are refused, and what is said of wrong entries."""

from __future__ import annotations

import re

import pytest
import torch
from no_sync import NoHostReads

import tersekv
from tersekv.backends.torch import key_lists
from tersekv.dispatch import plan
from tersekv.testing import make, verify
from tersekv.testing.cases import Case

BF16, I32 = torch.bfloat16, torch.int32
FORMATS = list(tersekv.LATENT_FORMATS)
SCALE, PAGE = 0.05, 16
LENS = [50, 37]


class Cached:
    """Two requests over a cache of pages in any order."""

    def __init__(self, format="bf16", heads=4, drafts=1):
        torch.manual_seed(0)
        self.layer = tersekv.PagedLatentCache.allocate(1, 9, PAGE, format=format)[0]
        self.table = torch.tensor([[7, 2, 5, 0], [1, 8, 3, 0]], dtype=I32)
        self.seq_lens = torch.tensor(LENS, dtype=I32)
        for b, n in enumerate(LENS):
            tersekv.mla_append(torch.randn(n, 512), torch.randn(n, 64), self.layer, self.slots(b, torch.arange(n)))
        self.q = torch.randn(2 * drafts, heads, 576)

    def slots(self, b, positions):
        return self.table[b].long()[positions // PAGE] * PAGE + positions % PAGE

    def __call__(self, indices=None, by_slot=False, **options):
        where = (None, None) if by_slot else (self.table, self.seq_lens)
        return tersekv.mla_decode(
            self.q, self.layer, *where, indices=indices, softmax_scale=SCALE, return_lse=True, **options
        )


def same(a, b, atol=2e-5):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=atol)


def everything(n=64):
    return torch.arange(n).expand(2, n)


@pytest.mark.parametrize("format", FORMATS)
def test_lists_of_all_positions_are_dense(format):
    cached = Cached(format)
    want = cached()
    same(cached(everything()), want)
    shuffled = torch.stack([torch.randperm(64) for _ in range(2)])
    padded = torch.full((2, 130), -1)
    padded[:, 1:129:2] = shuffled
    same(cached(padded), want)
    same(cached(everything(16), block_size=4), want)
    same(cached(everything(22), block_size=3), want)


def test_slots_are_positions_by_the_page_table():
    cached = Cached("fp8_ds_mla")
    positions = torch.tensor([[3, 0, 49, -1, 17], [36, -1, 35, 2, 20]])
    slots = torch.stack([torch.where(p < 0, -1, cached.slots(b, p)) for b, p in enumerate(positions)])
    same(cached(slots, by_slot=True), cached(positions))


def test_a_row_sees_nothing_behind_itself_and_drafts_may_share_a_list():
    cached = Cached(drafts=3)
    same(cached(torch.arange(64).expand(6, 64)), cached())


def test_entries_past_the_length_of_a_list_are_unused_and_padding_is_skipped():
    cached = Cached()
    lists = torch.tensor([[4, 9, 2**31 - 1, 2**31 - 1], [-5, 7, 8, -1]], dtype=I32)
    got = cached(lists, index_lens=torch.tensor([2, 4], dtype=I32))
    want = [cached(torch.tensor([[4, 9], [7, 8]]))[i] for i in range(2)]
    same(got, want)


def test_an_entry_counts_as_often_as_it_stands():
    cached = Cached()
    (_, once), (_, twice) = cached(torch.tensor([[4], [4]])), cached(torch.tensor([[4, 4], [4, 4]]))
    torch.testing.assert_close(twice - once, torch.full_like(once, 2.0).log())


def test_two_halves_merge_into_the_whole():
    cached = Cached()
    outs, lses = zip(cached(everything()[:, :20]), cached(everything()[:, 20:]), strict=True)
    same(tersekv.merge_states(torch.stack(outs), torch.stack(lses)), cached())


def test_a_needle_in_the_last_entry_moves_the_row_and_one_outside_the_list_nothing():
    cached = Cached()
    lists = torch.tensor([[1, 5, 40], [1, 5, 30]])
    before = cached(lists)
    cached.layer.ckv[7, 3] = cached.q[0, 0, :512].to(BF16) * 50  # position 3 of request 0
    same(cached(lists), before, atol=0)
    cached.layer.ckv[5, 8] = cached.q[0, 0, :512].to(BF16) * 50  # position 40
    assert cached(lists)[1][0, 0] > before[1][0, 0] + 100


@pytest.mark.parametrize("sinks", [None, 3.0, -torch.inf])
def test_rows_without_keys(sinks):
    cached = Cached()
    sinks = None if sinks is None else torch.full((4,), sinks)
    nothing = torch.zeros(2, dtype=I32)
    for lists, options in (
        (torch.full((2, 3), -1), {}),
        (torch.zeros(2, 0), {}),
        (everything(), {"index_lens": nothing}),
    ):
        for by_slot in (False, True):
            out, lse = cached(lists.to(I32), by_slot, sinks=sinks, **options)
            assert (out == 0).all()
            assert (lse == -torch.inf).all()


def test_sinks():
    cached = Cached()
    out, lse = cached(everything())
    sinks = torch.tensor([-torch.inf, torch.inf, 1.0, 1e4])
    got, got_lse = cached(everything(), sinks=sinks)
    want_lse = torch.logaddexp(lse, sinks)
    torch.testing.assert_close(got_lse, want_lse)
    torch.testing.assert_close(got, out * (lse - want_lse).exp()[..., None])
    same(cached(sinks=sinks), (got, got_lse))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint32])
def test_every_index_dtype_and_any_strides(dtype):
    cached = Cached()
    lists = torch.tensor([[3, 0, 49, -1, 17], [36, -1, 35, 2, 20]])
    want = cached(lists)
    same(cached(lists.to(dtype)), want, atol=0)
    same(cached(lists.to(dtype).T.contiguous().T), want, atol=0)
    lens = torch.tensor([5], dtype=dtype).expand(2)
    same(cached(lists.to(dtype), index_lens=lens), want, atol=0)


WRONG = [
    ({"indices": torch.zeros(2, 3)}, "indices: want [T=2, n] int32 | int64 | uint32, got [2, 3] float32"),
    ({"indices": torch.zeros(3, 3, dtype=I32)}, "indices: want [T=2, n] int32 | int64 | uint32, got [3, 3] int32"),
    ({"indices": torch.zeros(2, 1, 3, dtype=I32)},
     "indices: want [T=2, n] int32 | int64 | uint32, got [2, 1, 3] int32"),
    ({"index_lens": torch.zeros(2, dtype=I32)}, "index_lens: want None without indices, got a tensor"),
    ({"block_size": 4}, "block_size: want 1 without indices, got 4"),
    ({"indices": everything(), "block_size": 0}, "block_size: want a positive number of positions, got 0"),
    ({"indices": everything(), "by_slot": True, "block_size": 2},
     "block_size: want 1 where indices are slots (page_table is None), got 2"),
    ({"indices": everything(), "index_lens": torch.zeros(3, dtype=I32)},
     "index_lens: want [T=2] int32 | int64 | uint32, got [3] int32"),
    ({"indices": everything(), "sinks": torch.zeros(3)}, "sinks: want [H=4] float32, got [3] float32"),
    ({"indices": torch.full((2, 1), 144), "by_slot": True}, "indices: want slots below 144 (P * S), got 144 at [0, 0]"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_what_does_not_fit_is_said(given, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Cached()(**given)


def test_positions_want_lengths():
    cached = Cached()
    with pytest.raises(ValueError, match="seq_lens: want a tensor beside page_table"):
        tersekv.mla_decode(cached.q, cached.layer, cached.table, None, indices=everything(), softmax_scale=SCALE,
                           cu_seqlens_q=torch.tensor([0, 1, 2]), max_q_len=1)  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"indices": torch.tensor([[3, 49], [36, 37]])},
         "indices: want positions below 37 (seq_lens[1]), got 37 at [1, 1]"),
        ({"indices": torch.tensor([[3, 13], [1, 2]]), "block_size": 4},
         "indices: want blocks of 4 below 13 (seq_lens[0]), got 13 at [0, 1]"),
        ({"indices": torch.tensor([[3, 4, 3], [1, -1, -1]])},
         "indices: want every valid entry of a list once, got 3 twice in list [0]"),
        ({"indices": everything(), "index_lens": torch.tensor([3, 65])}, "index_lens: want in [0, 64], got 65 at [1]"),
        ({"indices": everything(), "index_lens": torch.tensor([-1, 5])}, "index_lens: want in [0, 64], got -1 at [0]"),
        ({"indices": torch.tensor([[3], [36]]), "sinks": torch.tensor([0, 0, torch.nan, 0])},
         "sinks: want numbers, got NaN at 2"),
        ({"indices": torch.tensor([[144], [5]]), "by_slot": True},
         "indices: want slots below 144 (P * S), got 144 at [0, 0]"),
    ],
)  # fmt: skip
def test_checked_mode_finds_wrong_entries(given, message, monkeypatch):
    monkeypatch.setenv("TERSEKV_CHECKED", "1")
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Cached()(**given)


def test_checked_mode_takes_what_is_right(monkeypatch):
    monkeypatch.setenv("TERSEKV_CHECKED", "1")
    cached = Cached(drafts=2)
    cached(torch.tensor([[49, -1, 3], [0, 49, -1], [36, 35, -1], [36, -1, -1]]))


def test_without_lists_a_page_table_is_wanted():
    with pytest.raises(TypeError, match="page_table: want Tensor, got NoneType"):
        Cached()(by_slot=True)


@pytest.mark.parametrize("by_slot", [False, True])
def test_hopper_has_kernels_for_them(by_slot):
    call = make.make(Case("mla_decode", "fp8_ds_mla", "x", heads=1, group=128, page=64, listed=70, by_slot=by_slot))
    assert plan.plan("mla_decode", call, arch=90).backend == "gluon"


def test_on_another_device_the_oracle_reads_nothing(monkeypatch):
    monkeypatch.setattr(key_lists, "may_read", lambda x: False)
    cached = Cached("fp8_ds_mla")
    slots = torch.tensor([[3, 999, -1], [5, 6, 2**31 - 1]], dtype=I32)
    with NoHostReads():
        cached(everything(), backend="torch", cu_seqlens_q=torch.tensor([0, 1, 2]), max_q_len=1)
        got = cached(slots, by_slot=True, backend="torch")
    same(got, cached(torch.tensor([[3, -1, -1], [5, 6, -1]]), by_slot=True), atol=0)


@pytest.mark.parametrize("by_slot", [False, True])
def test_under_torch_compile(by_slot):
    cached = Cached()
    lists = torch.tensor([[3, 40, -1], [7, 8, 9]], dtype=I32)
    sinks = torch.randn(4)
    compiled = torch.compile(lambda x: cached(x, by_slot, sinks=sinks), backend="aot_eager", fullgraph=True)
    same(compiled(lists), cached(lists, by_slot, sinks=sinks), atol=0)


def test_a_reference_that_took_another_key_would_be_seen(monkeypatch):
    """A backend that sees one key too many, or too few, of a list fails."""
    case = Case("mla_decode", "bf16", "x", heads=1, group=4, listed=20, lens=(37, 5))
    assert verify.run(case, "cpu", "torch").status == verify.PASSED
    original = key_lists._entries_with_padding_as_minus_one

    def one_less(call):
        used = original(call)
        used[:, -1] = -1
        return used

    monkeypatch.setattr(key_lists, "_entries_with_padding_as_minus_one", one_less)
    failed = [
        verify.run(Case("mla_decode", "bf16", f"{i}", heads=1, group=4, listed=20, lens=(37,)), "cpu", "torch")
        for i in range(3)
    ]
    assert verify.FAILED in [r.status for r in failed]
