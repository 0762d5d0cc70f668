"""Prefill over lists of blocks, interpreted, against the fp64 reference: m_blocks attend to unions of lists."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tersekv.backends.host import launch
from tersekv.backends.triton import attention
from tersekv.backends.triton.decode import entry as decode
from tersekv.backends.triton.prefill import entry as prefill
from tersekv.dispatch import plan
from tersekv.testing import verify
from tersekv.testing.cases import Case
from tersekv.testing.make import make

BASE = Case(
    "prefill", "bf16", "lists of blocks", lens=(150, 9, 0, 230), q_lens=(70, 5, 0, 33), ragged=True, heads=2, group=4,
    dim=32, page=16, listed=6, block_size=16,
)  # fmt: skip
CASES = [
    BASE,
    replace(BASE, name="of each head, sinks", each_head=True, list_lens=True, sinks=True, block_size=32, page=64),
    replace(BASE, name="of a group of 3, entries that repeat", group=3, lists="again", listed=20),
    replace(BASE, name="of 48 keys, in pages of 3", block_size=48, page=3, group=12, index="int64", strided=True),
    replace(BASE, name="one list for all", lists="shared", lens=(150,), q_lens=(150,), ragged=False, group=1),
    replace(BASE, name="uint32, long blocks", format="fp8_e4m3", block_size=128, index="uint32", list_lens=True),
    replace(BASE, name="softcap, rotated", format="int8_per_token_head", softcap=20.0, rotation="kv", each_head=True),
    replace(BASE, name="values of another format", format="nvfp4", v_format="bf16", block_size=64, page=64),
    replace(BASE, name="sinks of inf", format="int4_per_token_head", sinks=True, sink="inf", listed=20),
    replace(BASE, name="requests of as many rows", lens=(90, 64), q_lens=(64, 64), ragged=False, listed=3),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_case(case, monkeypatch):
    monkeypatch.setattr(launch, "num_sms", lambda f: 1)
    assert isinstance(attention.configure(plan.facts("prefill", make(case))), prefill.Config)
    result = verify.run(case, "cpu", "triton")
    assert result.status == verify.PASSED, result.message


@pytest.mark.parametrize("changed", [
    {"block_size": 24}, {"lens": (150, 9), "q_lens": (15, 5)}, {"batch_invariant": True}, {"op": "decode"},
    {"listed": 0},
], ids=str)  # fmt: skip
def test_rows_without_enough_in_common_read_their_own_blocks(changed, monkeypatch):
    """Blocks that no product of 16 keys fits, few rows, bits that are those of a step; and lists of nothing."""
    monkeypatch.setattr(launch, "num_sms", lambda f: 1)
    case = replace(BASE, **changed)
    assert isinstance(attention.configure(plan.facts(case.op, make(case))), decode.Config)
    result = verify.run(case, "cpu", "triton")
    assert result.status == verify.PASSED, result.message


def test_any_negative_entry_is_padding_and_lengths_past_the_table_read_nothing_else(monkeypatch):
    monkeypatch.setattr(launch, "num_sms", lambda f: 1)
    call = make(replace(BASE, index="int64"))
    call.indices[call.indices < 0] = -(1 << 32)
    wanted = make(replace(BASE, index="int64"))
    for c in (call, wanted):
        attention.run(c, attention.configure(plan.facts("prefill", c)))
    assert torch.equal(call.out, wanted.out)
    call.seq_lens[0] = 100 * BASE.page * call.page_table.shape[1]  # undefined, but nothing is written elsewhere
    attention.run(call, attention.configure(plan.facts("prefill", call)))


def test_few_m_blocks_leave_a_gpu_idle(monkeypatch):
    monkeypatch.setattr(launch, "num_sms", lambda f: 132)
    assert isinstance(attention.configure(plan.facts("prefill", make(BASE))), decode.Config)
