"""mla_project's Triton kernel in the interpreter: against fp64, and its codes against the oracle's."""

from __future__ import annotations

import pytest
import torch

from tersekv.backends.torch import mla_project as oracle
from tersekv.backends.torch.mla_latents import quantize_gemm_input_by_128_columns
from tersekv.backends.triton import mla_project
from tersekv.calls import MLAProjectCall
from tersekv.dispatch import plan
from tersekv.testing import verify
from tersekv.testing.cases import cases


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
    f = plan.facts("mla_project", call)
    mla_project.make_projection_launch(
        f, mla_project.choose_projection_config(f)._replace(native_fp8=native, native_casts=native)
    )(call)
    codes, scale = quantize_gemm_input_by_128_columns(x)
    assert torch.equal(call.out, (codes.float() * scale).bfloat16())


@pytest.mark.parametrize("fp8", [True, False], ids=["e4m3", "bf16"])
@pytest.mark.parametrize(
    ("tokens", "rank", "columns"),
    [(1, 512, 128), (7, 384, 128), (16, 128, 512), (20, 256, 256), (40, 128, 128), (3, 640, 128)],
)
def test_tiles_of_every_shape_give_what_the_oracle_gives(tokens, rank, columns, fp8):
    """Also more columns than are asked for ahead."""
    torch.manual_seed(1)
    x, weight = torch.randn(tokens, 2, rank).bfloat16(), torch.randn(2, columns, rank)
    scale = torch.rand(2, columns // 128, rank // 128) + 0.5 if fp8 else None
    call = MLAProjectCall(
        x, weight.to(torch.float8_e4m3fn if fp8 else torch.bfloat16), scale,
        torch.full((tokens, 2, columns), torch.nan, dtype=torch.bfloat16),
    )  # fmt: skip
    mla_project.run(call, mla_project.configure(plan.facts("mla_project", call)))
    want = call._replace(out=torch.empty_like(call.out))
    oracle.run(want, None)
    torch.testing.assert_close(call.out.float(), want.out.float(), rtol=2e-2, atol=1e-1)
