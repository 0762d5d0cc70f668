"""The decode branch's Triton kernels in the interpreter: against fp64, and its stores to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from branch_cases import BASE, RAGGED

from tersekv.backends.torch import mla_decode_branch as oracle
from tersekv.backends.triton.mla_decode_branch import entry as mla_decode_branch
from tersekv.dispatch import plan
from tersekv.formats import LATENT_FORMATS
from tersekv.testing import verify
from tersekv.testing.make import make
from tersekv.testing.memory import as_bytes, moved

CASES = [replace(c, format=f) for f in LATENT_FORMATS for c in (BASE, RAGGED)] + [
    replace(BASE, name="drafts fp16", q_lens=(1, 1, 1, 1), dtype="float16", index="int64", strided=True),
    replace(BASE, name="two each", lens=(13, 2, 9, 2), q_lens=(2, 2, 2, 2), index="uint32"),
    replace(RAGGED, name="odd sizes", nope=40, dim_v=72, rank=144, rope=24, weight="", group=3),
    replace(RAGGED, name="raw rows in the cache", raw_in_cache=True, split=True),
    replace(BASE, name="fp8 scale tensors", format="fp8_e4m3", scale="tensor"),
    replace(BASE, name="70 heads", group=70, lens=(5,)),
    replace(BASE, name="no tokens", lens=(4, 0), q_lens=(0, 0)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_case(case):
    result = verify.run(case, "cpu", "triton")
    assert result.status == verify.PASSED, result.message


@pytest.mark.parametrize("format", LATENT_FORMATS)
def test_rows_are_stored_as_the_oracle_stores_them(format):
    case = replace(RAGGED, format=format)
    a, b = make(case), moved(make(case), "cpu")
    mla_decode_branch.run(a, mla_decode_branch.configure(plan.facts("mla_decode_branch", a)))
    oracle.run(b, None)
    for name in ("ckv", "kpe", "ckv_scale_cache"):
        if getattr(a, name) is not None:
            assert torch.equal(as_bytes(getattr(a, name)), as_bytes(getattr(b, name))), name


def test_rows_of_no_request_are_0():
    """As CUDA graphs pad them."""
    a = make(replace(RAGGED, q_lens=(6, 1, 0, 2)))
    cu = a.cu_seqlens_q.clone()
    cu[-1] = cu[-2]
    a = a._replace(cu_seqlens_q=cu)
    mla_decode_branch.run(a, mla_decode_branch.configure(plan.facts("mla_decode_branch", a)))
    assert a.out[:7].isfinite().all()
    assert (a.out[7:] == 0).all()
