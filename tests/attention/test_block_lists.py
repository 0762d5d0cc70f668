"""decode and prefill over lists of blocks of keys (`indices`): what lists mean, and which are refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from no_sync import NoHostReads

import tersekv
from tersekv.backends.torch import key_lists
from tersekv.dispatch import plan
from tersekv.formats import KV_FORMATS
from tersekv.testing import make
from tersekv.testing.cases import Case

I32, PAGE, LENS, HEADS = torch.int32, 16, [50, 37], 2


class Cached:
    """Two requests over a cache of pages in any order."""

    def __init__(self, format="bf16", drafts=1, **options):
        torch.manual_seed(0)
        self.layer = tersekv.PagedKVCache.allocate(1, 9, PAGE, HEADS, 32, format=format, **options)[0]
        self.table = torch.tensor([[7, 2, 5, 0], [1, 8, 3, 0]], dtype=I32)
        self.seq_lens = torch.tensor(LENS, dtype=I32)
        for b, n in enumerate(LENS):
            at = torch.arange(n)
            slots = self.table[b].long()[at // PAGE] * PAGE + at % PAGE
            tersekv.append(torch.randn(n, HEADS, 32), torch.randn(n, HEADS, 32), self.layer, slots)
        self.q = torch.randn(2 * drafts, 4, 32)

    def __call__(self, indices=None, **options):
        return tersekv.decode(
            self.q, self.layer, self.table, self.seq_lens, indices=indices, return_lse=True, **options
        )

    def prefill(self, indices, **options):
        starts = torch.tensor([0, len(self.q) // 2, len(self.q)], dtype=I32)
        return tersekv.prefill(
            self.q, self.layer, self.table, self.seq_lens, starts, indices=indices, return_lse=True, **options
        )


def same(a, b, atol=2e-5):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=atol)


def everything(n, heads=1, rows=2):
    return torch.arange(n).expand(rows, heads, n)


@pytest.mark.parametrize("format", KV_FORMATS)
def test_lists_of_all_blocks_are_dense(format):
    cached = Cached(format, rotation="hadamard")
    want = cached(softcap=20.0)
    for n, c in ((64, 1), (17, 3), (4, 16), (1, 128)):
        same(cached(everything(n), block_size=c, softcap=20.0), want)
        same(cached(everything(n, HEADS), block_size=c, softcap=20.0), want)


def test_blocks_are_their_positions_and_the_open_one_is_cut():
    cached = Cached()
    blocks = torch.tensor([[[12, 3, -1]], [[0, 9, 5]]])
    positions = (blocks[..., None] * 4 + torch.arange(4)).flatten(-2)
    positions[blocks.repeat_interleave(4, -1) < 0] = -1
    same(cached(blocks, block_size=4), cached(positions))


def test_each_head_has_its_own_list():
    cached = Cached()
    lists = torch.tensor([[[0, 2], [1, 3]], [[2, 1], [0, -1]]])
    out, lse = cached(lists, block_size=16)
    for h in range(HEADS):
        want = cached(lists[:, h : h + 1], block_size=16)
        same((out[:, 2 * h : 2 * h + 2], lse[:, 2 * h : 2 * h + 2]), [x[:, 2 * h : 2 * h + 2] for x in want], atol=1e-6)
    lens = torch.tensor([[1, 2], [0, 1]], dtype=I32)
    cut = torch.where(torch.arange(2) < lens[..., None], lists, -1)
    same(cached(lists, block_size=16, index_lens=lens), cached(cut, block_size=16), atol=0)


def test_prefill_is_decode_and_rows_see_nothing_behind_themselves():
    cached = Cached(drafts=20)
    lists = everything(4, rows=40)
    same(cached.prefill(lists, block_size=16), cached())
    same(cached.prefill(lists, block_size=16), cached(lists, block_size=16), atol=0)


def test_rows_without_keys():
    cached = Cached()
    for lists in (torch.full((2, 1, 3), -1), torch.zeros(2, 1, 0, dtype=I32), torch.full((2, HEADS, 1), 40)):
        out, lse = cached(lists, sinks=torch.ones(4), block_size=2)
        assert (out == 0).all()
        assert (lse == -torch.inf).all()


WRONG = [
    ({"indices": torch.zeros(2, 3, dtype=I32)}, "indices: want [T=2, Hx, n] int32 | int64 | uint32, got [2, 3] int32"),
    ({"indices": everything(3, 3)}, "indices: want lists for 1 or num_kv_heads=2 heads, got 3"),
    ({"indices": everything(3), "window": 5}, "indices: want None beside window, got a tensor"),
    ({"indices": everything(3), "mask": torch.zeros(2, 2).to(torch.uint16)},
     "indices: want None beside mask, got a tensor"),
    ({"indices": everything(3), "block_size": -1}, "block_size: want a positive number of positions, got -1"),
    ({"indices": everything(3), "index_lens": torch.zeros(2, 2, dtype=I32)},
     "index_lens: want [T=2, Hx=1] int32 | int64 | uint32, got [2, 2] int32"),
    ({"indices": everything(3), "block_size": 2**30},
     "block_size: want n * block_size below 2**31, got 3 * 1073741824"),
    ({"block_size": 16}, "block_size: want 1 without indices, got 16"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_what_does_not_fit_is_said(given, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Cached()(**given)


def test_prefill_takes_no_new_rows_beside_them():
    new = torch.randn(2, HEADS, 32).bfloat16()
    with pytest.raises(ValueError, match="indices: want None beside k, got a tensor"):
        Cached().prefill(everything(3), k=new, v=new)


def test_checked_mode_finds_wrong_entries(monkeypatch):
    monkeypatch.setenv("TERSEKV_CHECKED", "1")
    message = "indices: want blocks of 16 below 3 (seq_lens[1]), got 3 at [1, 0, 3]"
    with pytest.raises(ValueError, match=re.escape(message)):
        Cached()(everything(4), block_size=16)
    Cached()(everything(3), block_size=16)


@pytest.mark.parametrize(("op", "options", "reason"), [
    ("prefill", {}, r"takes no lists of keys \(indices\) in prefill"),
    ("decode", {"block_size": 32}, "wants lists of whole pages, of 64 tokens, got blocks of 32"),
    ("decode", {"group": 33}, "wants lists for at most 32 query heads of a KV head, got 33"),
    ("decode", {"group": 17, "each_head": True}, "wants, with a list per KV head, at most 16 query rows of each"),
    ("decode", {"dim": 96, "each_head": True}, "wants, with a list per KV head, .* heads of 64, 128 or 256"),
    ("decode", {"rotation": "k", "each_head": True}, "wants, with a list per KV head, .* rows that lie as they are"),
    ("decode", {"batch_invariant": True}, "takes no batch invariance yet"),
])  # fmt: skip
def test_hopper_refuses_by_name_what_portable_kernels_take(op, options, reason):
    base = Case(op, "fp8_e4m3", "x", dim=128, page=64, listed=4, block_size=64)
    assert plan.plan("decode", make.make(replace(base, op="decode")), arch=90).backend == "gluon"
    call = make.make(replace(base, **options))
    with pytest.raises(tersekv.UnsupportedError, match=f"gluon: {reason}"):
        plan.plan(op, call, "gluon", arch=90)
    assert plan.plan(op, call, arch=90).backend == "triton"


def test_on_another_device_the_oracle_reads_nothing(monkeypatch):
    monkeypatch.setattr(key_lists, "may_read", lambda x: False)
    cached = Cached("nvfp4")
    with NoHostReads():
        got = cached(everything(4, HEADS), block_size=16, backend="torch")
    same(got, cached())


def test_under_torch_compile():
    cached = Cached()
    lists = torch.tensor([[[0, 2], [1, 3]], [[2, 1], [0, -1]]])
    compiled = torch.compile(lambda x: cached(x, block_size=16), backend="aot_eager", fullgraph=True)
    same(compiled(lists), cached(lists, block_size=16), atol=0)
