"""index_topk and index_select in Gluon, compiled for sm_90: histograms, ballots, registers; whom they are for."""

from __future__ import annotations

import re

import pytest
import torch
from compile_tools import compile_launches

from tersekv.backends.gluon import index_select, index_topk
from tersekv.calls import IndexTopkCall
from tersekv.dispatch.plan import facts
from tersekv.testing.case import Case
from tersekv.testing.make import make


def topk_call(width: int, k: int, rows: int = 64) -> IndexTopkCall:
    out = torch.empty(rows, k, dtype=torch.int32)
    return IndexTopkCall(torch.empty(rows, width), torch.empty(rows, dtype=torch.int32), None, out, None, k, 0, 0)


@pytest.mark.parametrize(("width", "k", "rounds"), [(65536, 2048, 1), (65536, 512, 1), (4000, 9, 0), (20000, 9000, 0)])
def test_keys_are_counted_in_shared_memory_and_stay_in_registers(width, k, rounds):
    call = topk_call(width, k)
    kernels = compile_launches(index_topk.run, call, index_topk.configure(facts("index_topk", call, 90)), 90)
    assert [x["name"] for x in kernels] == ["index_candidates_kernel"] * rounds + ["index_topk_kernel"]
    for kernel in kernels:
        sass = kernel["sass"]()
        # Equal bins of a warp's lanes are one addition, and places need no scan over lanes.
        assert set(re.findall(r"ATOMS\S*", sass)) == {"ATOMS.POPC.INC.32"}
        assert len(re.findall(r"\bSHFL", sass)) <= 20
        assert kernel["n_spills"] <= 72  # of 64 registers a thread


def test_rows_find_their_request_where_lengths_differ():
    case = Case("index_select", "index_fp8", "", lens=(9000, 40), q_lens=(2, 1), ragged=True, dim=128, heads=32,
                page=64, dtype="float8_e4m3fn", top=9)  # fmt: skip
    call = make(case)
    kernels = compile_launches(index_select.run, call, index_select.configure(facts("index_select", call, 90)), 90)
    assert [x["name"] for x in kernels] == [
        "index_block_max_scores_kernel",
        "index_candidates_kernel",
        "index_topk_kernel",
    ]
