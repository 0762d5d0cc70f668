"""The decode branch where merge and last projection are one launch, and programs take segments whole."""

from __future__ import annotations

import pytest
import torch

from tersekv.dispatch import plan
from tersekv.testing.cases import Case
from tersekv.testing.make import make
from tersekv.testing.memory import moved
from tersekv.testing.verify import PASSED, run

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
LENS = (500, 70, 130, 900, 64, 640, 300, 200)


@pytest.mark.skipif(not ON_HOPPER, reason="needs sm_90")
@pytest.mark.parametrize("heads", [128, 384])
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3", "fp8_ds_mla"])
def test_uneven_requests_come_out_whether_they_are_cut_or_not(fmt, heads):
    case = Case("mla_decode_branch", fmt, "uneven", lens=LENS, page=64, heads=1, group=heads, dim_v=128)
    result = run(case, "cuda", "gluon")
    assert result.status == PASSED, result


def ragged(fmt: str, *q_lens: int, **options) -> Case:
    return Case(
        "mla_decode_branch", fmt, "ragged", lens=LENS, q_lens=q_lens, ragged=True, page=64, heads=1, group=128,
        dim_v=128, **options,
    )  # fmt: skip


@pytest.mark.skipif(not ON_HOPPER, reason="needs sm_90")
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3", "fp8_ds_mla"])
def test_ragged_rows_in_strided_memory_with_scales_on_the_device_come_out(fmt):
    result = run(ragged(fmt, 1, 1, 1, 0, 1, 1, 1, 1, strided=True, scale="tensor"), "cuda", "gluon")
    assert result.status == PASSED, result


@pytest.mark.skipif(not ON_HOPPER, reason="needs sm_90")
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3", "fp8_ds_mla"])
def test_rows_behind_the_last_request_are_0(fmt):
    """As CUDA graphs pad them."""
    want = make(ragged(fmt, 1, 1, 1, 1, 1, 1, 1, 1))
    want.cu_seqlens_q[-1] = 7
    outs = []
    for backend in ("gluon", "triton"):
        call = moved(want, "cuda")
        plan.dispatch("mla_decode_branch", call, backend)
        assert (call.out[7:] == 0).all()
        outs.append(call.out[:7].double())
    assert (outs[0] - outs[1]).norm() <= 2e-2 * outs[1].norm()
