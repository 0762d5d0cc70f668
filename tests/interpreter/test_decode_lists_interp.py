"""Paged decode over lists of blocks that become page tables, interpreted, against the fp64 reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from drawn import drawn, long_but_for

from tersekv.backends.triton import attention
from tersekv.backends.triton.decode import entry as decode
from tersekv.dispatch import plan
from tersekv.testing import verify
from tersekv.testing.cases import Case
from tersekv.testing.make import make
from tersekv.testing.memory import moved

FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head", "nvfp4")
FORMATS += ("int4_per_token_head",)
BASE = Case("decode", "bf16", "pages", lens=(137, 1, 0, 230, 64), heads=2, dim=32, page=16, listed=6, block_size=16)
EACH = replace(BASE, name="of each head", each_head=True, list_lens=True)
VARIANTS = [
    BASE,
    EACH,
    replace(EACH, name="blocks of four pages, sinks", block_size=64, sinks=True, softcap=20.0, index="uint32"),
    replace(EACH, name="page as long as a key block", page=64, block_size=128, lens=(700, 5, 0, 600), layout="HND"),
    replace(EACH, name="again", lists="again", listed=20, block_size=32, index="int64", strided=True, group=5),
    replace(EACH, name="again, page of four key blocks", lists="again", page=256, block_size=256, lens=(700, 900)),
    replace(BASE, name="again, one list", lists="again", listed=9, block_size=128, page=64, list_lens=True),
    replace(BASE, name="again, pages of 3", lists="again", listed=50, page=3, block_size=96, group=1),
    replace(EACH, name="parts of pages", page=64, block_size=16, sinks=True),
    replace(EACH, name="parts of pages as long as a key block", page=128, block_size=64, lens=(700, 5, 0, 600)),
    replace(BASE, name="thirds of pages, again", page=48, lists="again", listed=30, layout="HND", scales="tail"),
    replace(BASE, name="tokens in pages of one", page=1, block_size=1, listed=70, each_head=True, lists="again"),
    replace(BASE, name="shared by drafts", lists="shared", lens=(150,), q_lens=(20,), each_head=True),
    replace(BASE, name="drafts", lens=(137, 4, 3, 70), q_lens=(3, 3, 3, 3), each_head=True, list_lens=True, group=8),
    replace(BASE, name="ragged", lens=(137, 40, 0, 70), q_lens=(20, 1, 0, 17), ragged=True, lists="again"),
    replace(EACH, name="ragged, slack", lens=(137, 40), q_lens=(9, 1), ragged=True, slack=5, block_size=48),
    replace(EACH, name="sinks of inf", sinks=True, sink="inf", lse=False, out_dtype="float32"),
    replace(EACH, name="rotated, channel scales, tail", rotation="kv", channels="kv", scales="tail", heads=3),
    replace(EACH, name="e4m3 query and output", dtype="float8_e4m3fn", out_dtype="float8_e4m3fn", group=16),
    replace(EACH, name="V of another format", v_format="int4_per_token_head", dim=64, dim_v=32),
    replace(EACH, name="one long list, splits", lens=(2100,), listed=16, block_size=128, page=64, heads=3),
]  # fmt: skip
CASES = [replace(c, format=fmt) for c in VARIANTS for fmt in FORMATS if fmt != c.v_format]
# Cut pages that repeat in every format, every variant in two.
QUICK = drawn(CASES, 4) + [c for c in CASES if c.name == "again"]


def config_of(case: Case) -> decode.Config:
    return attention.configure(plan.facts("decode", make(case)))


@pytest.mark.parametrize("case", long_but_for(QUICK, CASES), ids=lambda c: c.id)
def test_case(case):
    lists = config_of(case).constants.LIST
    assert lists.AS_PAGES
    assert case.each_head == lists.PER_HEAD
    result = verify.run(case, "cpu", "triton")
    assert result.status == verify.PASSED, result.message


@pytest.mark.parametrize(
    "other",
    [
        replace(BASE, block_size=8),
        replace(BASE, block_size=24),
        replace(BASE, page=40, block_size=16),
        replace(BASE, page=64, block_size=8),
        replace(BASE, batch_invariant=True),
        replace(BASE, listed=0),
    ],
    ids=("half pages", "pages and a half", "parts that do not fit", "short parts", "batch invariant", "no entries"),
)
def test_other_lists_are_looked_up_key_by_key(other):
    assert not config_of(other).constants.LIST.AS_PAGES
    result = verify.run(other, "cpu", "triton")
    assert result.status == verify.PASSED, result.message


def test_requests_are_split_by_the_lengths_of_each_head():
    """One head lists nothing, the other much: its keys are divided among all programs of that head."""
    case = replace(EACH, lens=(2100,), listed=16, block_size=128, page=64, list_lens=False)
    call = make(case)
    call.indices[:, 0] = -1
    alone = moved(call, "cpu")._replace(indices=call.indices[:, 1:].contiguous())
    for x in (call, alone):
        attention.run(x, attention.configure(plan.facts("decode", x)))
    group = call.q.shape[1] // 2
    assert torch.equal(call.out[:, group:], alone.out[:, group:])
    assert not call.out[:, :group].any()
    assert (call.lse[:, :group] == -torch.inf).all()


def test_an_unlisted_entry_may_be_any_number():
    case = replace(EACH, index="int64", list_lens=False)
    found = []
    for junk in (-1, 2**62, -(2**62)):
        call = make(case)
        call.indices[:, :, 0] = junk
        attention.run(call, attention.configure(plan.facts("decode", call)))
        found.append(call.out)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
