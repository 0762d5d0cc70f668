"""mla_decode over two sets of listed keys in one softmax (`extra`): what they mean, and what is said of calls that do
not fit."""

from __future__ import annotations

import re

import pytest
import torch
from no_sync import NoHostReads

import tersekv
from tersekv import Selected
from tersekv.backends.torch import key_lists
from tersekv.dispatch import plan
from tersekv.testing import make, verify
from tersekv.testing.cases import Case

I32 = torch.int32
SCALE, HEADS = 0.05, 4
Q = torch.randn(4, HEADS, 576, generator=torch.Generator().manual_seed(7))
TABLE, LENS = torch.tensor([[3, 1, 2], [0, 4, 0]], dtype=I32), torch.tensor([40, 20], dtype=I32)


def filled(format="bf16", rope=64, page=16, seed=1):
    layer = tersekv.PagedLatentCache.allocate(1, 5, page, format=format, qk_rope_head_dim=rope)[0]
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(5 * page, 512, generator=g), torch.randn(5 * page, rope, generator=g)
    tersekv.mla_append(*rows, layer, torch.arange(5 * page))
    return layer


def attend(layer, indices, extra=None, by_slot=True, rope=64, **options):
    q = Q[: len(indices), :, : 512 + rope]
    where = (None, None) if by_slot else (TABLE, LENS)
    options = {"softmax_scale": SCALE, "return_lse": True, **options}
    return tersekv.mla_decode(q, layer, *where, indices=indices, extra=extra, **options)


def same(a, b, atol=2e-5):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=atol)


SLOTS = torch.tensor([[5, 40, -1, 7], [60, 2, 9, -1]])
OTHERS = torch.tensor([[33, 0, 12], [-1, 71, 3]])


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -torch.inf, torch.inf, 1e4])])
def test_two_sets_of_one_cache_are_one_longer_list(sinks):
    layer = filled("fp8_ds_mla")
    got = attend(layer, SLOTS, Selected(layer, OTHERS), sinks=sinks)
    same(got, attend(layer, torch.cat([SLOTS, OTHERS], 1), sinks=sinks))
    same(attend(layer, OTHERS, Selected(layer, SLOTS), sinks=sinks), got)


def test_they_are_what_merge_states_makes_of_both():
    first, second = filled("fp8_e4m3"), filled("bf16", page=7, seed=2)
    outs, lses = zip(attend(first, SLOTS), attend(second, OTHERS.clamp(max=34)), strict=True)
    same(attend(first, SLOTS, Selected(second, OTHERS.clamp(max=34))),
         tersekv.merge_states(torch.stack(outs), torch.stack(lses)))  # fmt: skip


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -torch.inf, torch.inf, 1e4])])
def test_either_may_be_empty_and_both(sinks):
    layer, none = filled(), torch.full((2, 3), -1)
    alone = attend(layer, SLOTS, sinks=sinks)
    for empty in (none, none[:, :0]):
        same(attend(layer, SLOTS, Selected(layer, empty), sinks=sinks), alone)
        same(attend(layer, empty, Selected(layer, SLOTS), sinks=sinks), alone)
        out, lse = attend(layer, empty, Selected(layer, empty), sinks=sinks)
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
    same(attend(layer, SLOTS, Selected(layer, OTHERS, index_lens=torch.zeros(2, dtype=I32)), sinks=sinks), alone)


def test_positions_of_the_second_set_are_all_seen():
    layer, lists = filled(), torch.tensor([[39, 0], [17, 40]])  # of rows at positions 39 and 19
    table = torch.tensor([[3, 1, 2], [0, 4, 1]], dtype=I32)
    slots = torch.tensor([[2 * 16 + 7, 3 * 16], [4 * 16 + 1, 16 + 8]])
    nothing = torch.full((2, 1), -1)
    got = attend(layer, nothing, Selected(layer, lists, page_table=table), by_slot=False)
    same(got, attend(layer, slots))
    same(attend(layer, nothing, Selected(layer, lists, page_table=table)), got)  # the first set by slots
    drafts = attend(layer, nothing.repeat(2, 1), Selected(layer, lists.repeat_interleave(2, 0), page_table=table))
    same([x[[0, 2]] for x in attend(layer, nothing.repeat(2, 1), Selected(layer, slots.repeat_interleave(2, 0)))],
         [x[[0, 2]] for x in drafts])  # fmt: skip


@pytest.mark.parametrize("by_slot", [False, True])
def test_under_torch_compile_and_without_host_reads(by_slot, monkeypatch):
    first, second = filled(), filled("fp8_ds_mla", page=3)
    table = None if by_slot else torch.tensor([[0, 1, 2], [3, 4, 0]], dtype=I32)
    lists = torch.tensor([[3, 8, -1], [7, 2, 1]], dtype=I32)
    want = attend(first, SLOTS, Selected(second, lists, table))
    compiled = torch.compile(lambda x: attend(first, SLOTS, Selected(second, x, table)), backend="aot_eager",
                             fullgraph=True)  # fmt: skip
    same(compiled(lists), want, atol=0)
    monkeypatch.setattr(key_lists, "may_read", lambda x: False)
    far = torch.cat([lists, torch.full((2, 1), 2**31 - 1, dtype=I32)], 1)
    with NoHostReads():
        got = attend(first, SLOTS, Selected(second, far, table), backend="torch")
    same(got, want)


WRONG = [
    ({"extra": Selected(filled(), OTHERS), "indices": None}, "extra: want None without indices, got a Selected"),
    ({"extra": Selected(filled(rope=0), OTHERS)}, "extra: want a cache with L=512, R=64 as cache has, got 512, 0"),
    ({"extra": Selected(filled(), OTHERS[:1])}, "extra.indices: want [T=2, extra_n]"),
    ({"extra": Selected(filled(), OTHERS, index_lens=torch.zeros(3, dtype=I32))}, "extra.index_lens: want [T=2]"),
    ({"extra": Selected(filled(), None)}, "extra.indices: want a tensor [T, n], got None"),
    ({"extra": Selected(filled(), OTHERS, page_table=TABLE[:1])}, "extra.page_table: want [B=2, extra_pages]"),
    ({"extra": Selected(filled(), OTHERS + 9)}, "extra.indices: want slots below 80 (P * S), got 80 at [1, 1]"),
    ({"extra": Selected(filled(), OTHERS, page_table=TABLE)},
     "extra.indices: want positions below 48 (max_pages * S), got 71 at [1, 1]"),
    ({"extra": Selected(filled(), OTHERS.clamp(max=20), page_table=TABLE + 5)},
     "extra.page_table: want page ids in [0, 5) for listed keys, got "),
]  # fmt: skip


@pytest.mark.parametrize("backend", [None, "torch"])
@pytest.mark.parametrize(("given", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_what_does_not_fit_is_said(given, message, backend):
    lists = given.get("indices", SLOTS.clamp(max=15))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        tersekv.mla_decode(torch.zeros(2, HEADS, 576), filled(), TABLE, LENS, softmax_scale=SCALE, indices=lists,
                           extra=given["extra"], backend=backend)  # fmt: skip


@pytest.mark.parametrize(("cache", "error", "message"), [
    (torch.zeros(5, 16), ValueError, "extra.cache: want [P, S, dim] or [P, S, 1, dim], got [5, 16]"),
    (torch.zeros(5, 16, 500).half(), ValueError, "extra.cache: want rows of kv_lora_rank=512 or more"),
    (torch.zeros(5, 16, 576, dtype=torch.int64), ValueError, "extra.cache: want "),
    ((torch.zeros(5, 16, 512).half(), 3), TypeError, "extra.cache: want Tensor, got int"),
    ((torch.zeros(5, 16, 512, dtype=torch.int64), None), ValueError, "extra.ckv: want "),
    (3, TypeError, "extra.cache: want Tensor or (ckv, kpe), got int"),
    (None, TypeError, "extra.cache: want Tensor or (ckv, kpe), got NoneType"),
])  # fmt: skip
def test_a_wrong_cache_of_the_second_set_is_named(cache, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        attend(filled(), SLOTS, Selected(cache, OTHERS))


def test_what_is_no_selected_is_said():
    with pytest.raises(TypeError, match="extra: want Selected or None, got tuple"):
        attend(filled(), SLOTS, (filled(), OTHERS))


@pytest.mark.parametrize(
    ("extra", "message"),
    [(Selected(filled(), torch.tensor([[3, 3], [1, 2]])),
      "extra.indices: want every valid entry of a list once, got 3 twice in list [0]"),
     (Selected(filled(), OTHERS, index_lens=torch.tensor([3, 4])), "extra.index_lens: want in [0, 3], got 4 at [1]"),
     (Selected(filled(), OTHERS, page_table=TABLE),
      "extra.indices: want positions below 48 (max_pages * S), got 71 at [1, 1]")],
)  # fmt: skip
def test_checked_mode_finds_wrong_entries(extra, message, monkeypatch):
    monkeypatch.setenv("TERSEKV_CHECKED", "1")
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        attend(filled(), SLOTS, extra)
    attend(filled(), SLOTS, Selected(filled(), OTHERS))


def test_checked_mode_finds_wrong_pages_where_backends_read_nothing(monkeypatch):
    monkeypatch.setenv("TERSEKV_CHECKED", "1")
    monkeypatch.setattr(key_lists, "may_read", lambda x: False)
    lists, table = torch.tensor([[40, -1], [17, -1]]), TABLE.clone()
    attend(filled(), SLOTS, Selected(filled(), lists, table), backend="torch")
    table[1, 1] = 5
    with pytest.raises(
        ValueError, match=r"^extra.page_table: want page ids in \[0, 5\) for listed keys, got 5 at \[1, 1\]"
    ):
        attend(filled(), SLOTS, Selected(filled(), lists, table), backend="torch")


def test_hopper_refuses_them_by_name():
    call = make.make(Case("mla_decode", "fp8_ds_mla", "x", heads=1, group=128, page=64, listed=70, extra_listed=3))
    with pytest.raises(tersekv.UnsupportedError, match=re.escape("gluon: takes no a second set of keys (extra) yet")):
        plan.plan("mla_decode", call, "gluon", arch=90)
    assert plan.plan("mla_decode", call, arch=90).backend == "triton"


def test_a_backend_that_left_out_a_set_would_be_seen(monkeypatch):
    case = Case("mla_decode", "bf16", "x", heads=1, group=4, listed=20, lens=(37, 5), extra_listed=9)
    assert verify.run(case, "cpu", "torch").status == verify.PASSED
    original = key_lists.attend_to_lists
    monkeypatch.setattr("tersekv.backends.torch.mla_decode.attend_to_lists",
                        lambda sets, *rest: original(sets[:1], *rest))  # fmt: skip
    assert verify.run(case, "cpu", "torch").status == verify.FAILED
