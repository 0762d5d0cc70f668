"""The decode branch where merge and last projection are one launch, and programs take segments whole."""

from __future__ import annotations

import pytest
import torch

from tersekv.testing.cases import Case
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
