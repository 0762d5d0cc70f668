"""The decode branch on Hopper: its launches, and the merge that projects, compiled for sm_90."""

from __future__ import annotations

import pytest
from compile_tools import compile_launch
from test_compile_mla_decode_branch import call_of, launches

from tersekv.backends.gluon import mla_decode_branch
from tersekv.dispatch import plan

MERGE, SPLIT, FEW = "combine_quantize_project_kernel", "mla_decode_two_warpgroups_kernel", "mla_decode_small_m_kernel"


@pytest.mark.parametrize("tokens", [1, 8])
def test_few_tokens_are_three_launches(tokens):
    found = launches(mla_decode_branch, call_of(tokens, heads=128), 90)
    assert list(found) == ["rope_store_project_kernel", SPLIT if tokens > 1 else FEW, MERGE]
    fn, grid, args, options = found[MERGE]
    kernel = compile_launch(fn, args, options, 90)
    assert grid == (128, 1, 1)
    assert kernel["n_spills"] == 0
    assert kernel["shared"] <= 227 << 10
    # Weights are asked for before the wait; what was cut, behind it.
    before, behind = kernel["ptx"].split("griddepcontrol.wait")
    assert before.count("ld.global.v4") == 128 * 512 // (16 * 32 * options["num_warps"])
    assert "ld.global" in behind


@pytest.mark.parametrize(("tokens", "heads", "fp8"), [(64, 128, True), (8, 128, False), (1, 16, True)])
def test_many_tokens_few_heads_and_wide_weights_are_merged_and_projected_apart(tokens, heads, fp8):
    names = list(launches(mla_decode_branch, call_of(tokens, heads=heads, fp8=fp8), 90))
    assert names == ["rope_store_project_kernel", SPLIT if heads > 16 else FEW, "combine_kernel", "project_kernel"]


@pytest.mark.parametrize("rank", [256, 384])
def test_narrower_latents_are_merged_and_projected_apart(rank):
    found = launches(mla_decode_branch, call_of(8, heads=128, rank=rank), 90)
    assert list(found) == ["rope_store_project_kernel", SPLIT, "combine_kernel", "project_kernel"]
    for fn, _, args, options in found.values():
        assert compile_launch(fn, args, options, 90)["shared"] <= 227 << 10


def test_what_is_not_cut_needs_no_merge():
    names = list(launches(mla_decode_branch, call_of(2, heads=128, pages=4), 90))
    assert names == ["rope_store_project_kernel", SPLIT, "project_kernel"]


@pytest.mark.parametrize(("format", "heads"), [("fp8_e4m3", 128), ("fp8_ds_mla", 256)])
def test_pieces_of_8_bit_latents_are_merged_too(format, heads):
    fn, _, args, options = launches(mla_decode_branch, call_of(1, heads=heads, format=format), 90)[MERGE]
    assert compile_launch(fn, args, options, 90)["n_spills"] == 0


def test_it_refuses_what_mla_decode_refuses():
    assert "has no fp16" in str(mla_decode_branch.why_not(plan.facts("mla_decode_branch", call_of(format="fp16"), 90)))
