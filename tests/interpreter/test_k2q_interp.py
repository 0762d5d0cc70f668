"""Prefill over lists of blocks by k2q, interpreted, against the fp64 reference: blocks of few rows are attended to once
for all rows that list them, in chunks that share their memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tersekv.backends.host import launch
from tersekv.backends.triton import attention
from tersekv.backends.triton.prefill import entry as prefill
from tersekv.backends.triton.prefill import k2q_args
from tersekv.dispatch import plan
from tersekv.testing import verify
from tersekv.testing.cases import Case
from tersekv.testing.compare import relative
from tersekv.testing.make import make

BASE = Case(
    "prefill", "bf16", "k2q", lens=(330, 9, 0, 290), q_lens=(70, 5, 0, 60), ragged=True, heads=2, group=4, dim=32,
    page=16, listed=3, block_size=64,
)  # fmt: skip
CASES = [
    BASE,
    replace(BASE, name="of each head, sinks", block_size=128, lens=(700,), q_lens=(200,), listed=2, each_head=True,
            sinks=True),
    replace(BASE, name="a group of 3, entries that repeat, softcap", format="int8_per_token_head", group=3,
            block_size=128, lists="again", listed=20, softcap=20.0),
    replace(BASE, name="three partial results a block, rotated", format="int4_per_token_head", block_size=192, page=64,
            rotation="kv"),
    replace(BASE, name="values of another format, lengths, uint32", format="nvfp4", v_format="fp8_e4m3",
            list_lens=True, index="uint32"),
    replace(BASE, name="an fp16 query, a group of 12", format="fp8_e4m3", group=12, heads=1, block_size=256,
            dtype="float16"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def few_sms(monkeypatch):
    monkeypatch.setattr(launch, "num_sms", lambda f: 1)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_case(case):
    config = attention.configure(plan.facts("prefill", make(case)))
    assert isinstance(config, prefill.Config)
    keys = 128 if case.block_size % 128 == 0 else 64
    assert case.block_size // keys == config.constants.K2Q_PARTIALS
    result = verify.run(case, "cpu", "triton")
    assert result.status == verify.PASSED, result.message


@pytest.mark.parametrize("case", [BASE, CASES[3]], ids=lambda c: c.id)
def test_rows_in_chunks(case, monkeypatch):
    monkeypatch.setattr(k2q_args, "_MAX_BYTES", 300_000)
    monkeypatch.setattr(k2q_args, "_MIN_TOKENS", 1)
    monkeypatch.setattr(k2q_args, "_PAIRS", 16)  # several work tiles of a slot
    monkeypatch.setattr(k2q_args, "_BLOCK", 64)  # several programs
    config = attention.configure(plan.facts("prefill", make(case)))
    assert len(config.launches.kernel_launches) > 6
    result = verify.run(case, "cpu", "triton")
    assert result.status == verify.PASSED, result.message


@pytest.mark.parametrize("share", [1e-9, 10.0], ids=["all blocks by m_blocks", "none"])
def test_any_share_of_the_blocks_may_be_left_to_k2q(share, monkeypatch):
    monkeypatch.setattr(k2q_args, "_SHARED", share)
    result = verify.run(replace(BASE, sinks=True, lists="again"), "cpu", "triton")
    assert result.status == verify.PASSED, result.message


def test_the_order_of_pairs_moves_no_bit(monkeypatch):
    """Other rows beside a row, and so other places and work tiles."""
    monkeypatch.setattr(k2q_args, "_SHARED", 10.0)
    call = make(replace(BASE, lens=(500,), q_lens=(120,), ragged=False))
    attention.run(call, attention.configure(plan.facts("prefill", call)))
    wanted = call.out.clone()
    call.indices[::2, :, 1:] = -1
    attention.run(call, attention.configure(plan.facts("prefill", call)))
    assert torch.equal(call.out[1::2], wanted[1::2])
    assert not torch.equal(call.out, wanted)


@pytest.mark.parametrize("past", [{"lens": (0,), "q_lens": (0,)}, {"lens": (), "q_lens": ()}], ids=["no pages", "none"])
def test_nothing_to_attend_to(past):
    """No page in the table or no request, but rows of padding: their output is 0."""
    call = make(replace(BASE, lens=(90,), q_lens=(90,)))
    requests = len(past["lens"])
    call = call._replace(
        page_table=call.page_table[:requests, :0].contiguous(), seq_lens=call.seq_lens[:requests] * 0,
        cu_seqlens_q=call.cu_seqlens_q[: requests + 1] * 0,
    )  # fmt: skip
    call.out.fill_(torch.nan)
    attention.run(call, attention.configure(plan.facts("prefill", call)))
    assert not call.out.any()


@pytest.mark.parametrize("fmt", ["int8_per_token_head", "int4_per_token_head", "fp8_per_token_head"])
def test_blocks_of_zeros_with_scales_of_zero(fmt, monkeypatch):
    monkeypatch.setattr(k2q_args, "_SHARED", 10.0)
    call = make(replace(BASE, format=fmt, lens=(500,), q_lens=(120,), ragged=False))
    for x in (call.v_cache, call.v_scale_cache):
        x.view(torch.uint8)[call.page_table[0, :4].long()] = 0
    attention.run(call, attention.configure(plan.facts("prefill", call)))
    assert call.out.isfinite().all()


@pytest.mark.parametrize("value", [float("inf"), 1e6, 1e7, 1e36])
def test_one_large_column_leaves_the_others_as_they_are(value, monkeypatch):
    """An inf of one key, or a column of large values."""
    monkeypatch.setattr(k2q_args, "_SHARED", 10.0)
    calls = [make(replace(BASE, lens=(500,), q_lens=(120,), ragged=False)) for _ in range(2)]
    page = calls[0].page_table[0, 0].long()
    calls[0].v_cache[(page, 3) if value == float("inf") else (...,)][..., 5] = value
    for call in calls:
        attention.run(call, attention.configure(plan.facts("prefill", call)))
    others = torch.arange(32) != 5
    if value != 1e36:  # fp16 holds nothing beside it
        assert relative(calls[0].out[..., others].double(), calls[1].out[..., others].double()) < 3e-3
    assert (calls[0].out[..., 5].isinf() == ((calls[0].indices == 0).any(-1) & (value == float("inf")))).all()


def test_a_nan_reaches_the_rows_alone_that_list_its_block(monkeypatch):
    monkeypatch.setattr(k2q_args, "_SHARED", 10.0)
    call = make(replace(BASE, lens=(500,), q_lens=(120,), ragged=False))
    call.v_cache[call.page_table[0, 0].long()] = float("nan")
    attention.run(call, attention.configure(plan.facts("prefill", call)))
    assert torch.equal(call.out.isnan().any(-1).any(-1), (call.indices == 0).any(-1).any(-1))


@pytest.mark.parametrize("changed", [
    {"group": 18}, {"block_size": 48}, {"block_size": 32}, {"dim": 512, "block_size": 64}, {"group": 80, "heads": 1},
    {"lens": (150, 9), "q_lens": (15, 5)}, {"listed": 0}, {"lens": (40_000,), "q_lens": (64,)},
], ids=str)  # fmt: skip
def test_not_of_short_blocks_wide_heads_large_groups_or_few_rows(changed):
    facts = plan.facts("prefill", make(replace(BASE, **changed)))
    assert k2q_args.keys_of_partial(facts) == 0


def test_much_memory_for_few_tokens_is_not_taken(monkeypatch):
    facts = plan.facts("prefill", make(BASE))
    assert k2q_args.keys_of_partial(facts) == 64
    monkeypatch.setattr(k2q_args, "_MAX_BYTES", 1000)
    assert k2q_args.keys_of_partial(facts) == 0
