"""Kernels that cut requests by their own lengths compile, by choices that do not know the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from compile_tools import compile_launches, since

from tersekv.backends.triton import attention, mla_decode
from tersekv.dispatch import plan
from tersekv.testing.cases import Case
from tersekv.testing.make import make

OPS = {"decode": attention, "mla_decode": mla_decode, "prefill": attention}


def planned(case: Case, arch=90):
    call = make(case)._replace(batch_invariant=True)
    return call, OPS[case.op].configure(plan.facts(case.op, call, arch))


# Bytes a thread that a loop over pieces spills beside the loop over tiles, which has none: bf16 on sm_80 24.
A_FEW = 32


@pytest.mark.parametrize(("format", "arch"), [("fp8_e4m3", 90), ("bf16", 80)])
def test_decode(format, arch):
    case = Case("decode", format, "x", lens=(5000, 70), q_lens=(1, 1), heads=8, group=4, dim=128, page=64)
    call, config = planned(case, arch)
    split, merge = compile_launches(attention.run, call, config, arch)
    assert [split["name"], merge["name"]] == ["stream_k_decode_kernel", "combine_batch_invariant_kernel"]
    assert split["n_spills"] <= since({(3, 6): A_FEW, (3, 7): 112, (3, 9): 104})
    assert merge["n_spills"] == 0


def test_mla_decode():
    case = Case("mla_decode", "fp8_e4m3", "x", lens=(5000, 70), q_lens=(1, 1), heads=16, page=64)
    call, config = planned(case)
    split, merge = compile_launches(mla_decode.run, call, config, 90)
    assert [split["name"], merge["name"]] == ["stream_k_mla_decode_kernel", "combine_batch_invariant_kernel"]
    plain = mla_decode.configure(plan.facts("mla_decode", call._replace(batch_invariant=False), 90))
    assert split["n_spills"] <= compile_launches(mla_decode.run, call, plain, 90)[0]["n_spills"] + A_FEW
    assert merge["n_spills"] == 0


# Where they may differ: how many requests are looked at together, and how states and rows lie.
OF_A_BATCH = {"BLOCK_B", "PARTIAL_ROWS", "MAX_SEQLEN_Q", "RAGGED"}


@pytest.mark.parametrize("op", OPS)
def test_choices_do_not_know_the_batch(op):
    one = Case(op, "fp8_e4m3", "x", lens=(30,), q_lens=(1,), heads=2, group=4, dim=64, page=16)
    many = replace(one, lens=(30, 2100, 40), q_lens=(1, 40, 1))
    found = [planned(case)[1].constants for case in (one, many)]
    assert {n for n in found[0] if found[0][n] != found[1][n]} <= OF_A_BATCH
    templates = [planned(case)[1].launches.kernel_launches[0] for case in (one, many)]
    assert templates[0].launch.options == templates[1].launch.options


@pytest.mark.parametrize(("format", "arch"), [("fp8_e4m3", 90), ("bf16", 80), ("int4_per_token_head", 120)])
def test_one_tile_serves_decode_and_prefill(format, arch):
    """Kernels of "prefill" do not know the verb, nor the rows; few rows of few requests take a combine."""
    few = Case("decode", format, "x", lens=(5000, 70), q_lens=(1, 1), heads=8, group=4, dim=128, page=64)
    many = replace(few, op="prefill", lens=(3000, 3000), q_lens=(3000, 3000))
    plans = []
    for case in (few, many):
        call = make(case)._replace(batch_invariant=True, prefill_invariant=True)
        plans.append((call, OPS[case.op].configure(plan.facts(case.op, call, arch))))
    (call, config), (_, of_many) = plans
    assert replace(config.constants, BLOCK_B=of_many.constants.BLOCK_B) == of_many.constants
    split, merge = compile_launches(attention.run, call, config, arch)
    assert [split["name"], merge["name"]] == ["prefill_kernel", "combine_in_order_kernel"]
    assert split["n_spills"] <= since({(3, 6): 0, (3, 7): A_FEW})
    assert merge["n_spills"] == 0
    launches = [c.launches.kernel_launches[0] for _, c in plans]
    assert launches[0].launch.options == launches[1].launch.options
    assert len(of_many.launches.kernel_launches) == 1
