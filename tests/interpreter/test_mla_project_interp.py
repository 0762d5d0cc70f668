"""mla_project's Triton kernel in the interpreter: against fp64, and its codes against the oracle's."""

from __future__ import annotations

import pytest
import torch

from tersekv import plan
from tersekv.backends.torch import mla_project as oracle
from tersekv.backends.triton import mla_project
from tersekv.calls import MLAProjectCall
from tersekv.testing import verify
from tersekv.testing.cases import cases

torch.set_num_threads(1)


@pytest.mark.parametrize("case", list(cases(("mla_project",))), ids=lambda c: c.id)
def test_case(case):
    result = verify.run(case, "cpu", "triton")
    assert result.status == verify.PASSED, result.message


@pytest.mark.parametrize("native", [True, False])
def test_rows_are_quantised_as_the_oracle_does_it(native):
    """A weight of unit rows shows every code times its scale."""
    torch.manual_seed(0)
    x = torch.randn(5, 1, 128).bfloat16() * torch.tensor([1.0, 1e-3, 0.0, 1e4, 1.0])[:, None, None].bfloat16()
    call = MLAProjectCall(
        x, torch.eye(128)[None].to(torch.float8_e4m3fn), torch.ones(1, 1, 1), torch.full_like(x, torch.nan)
    )
    config = mla_project.configure(plan.facts("mla_project", call))._replace(native_fp8=native, native_casts=native)
    mla_project.run(call, config)
    codes, scale = oracle.quantise(x)
    assert torch.equal(call.out, (codes.float() * scale).bfloat16())
