"""Every variant of paged decode, interpreted, against the fp64 reference, in formats that differ in their branches."""

from __future__ import annotations

import pytest

from tersekv.testing import verify
from tersekv.testing.cases import cases

CASES = [c for c in cases(("decode",), ("fp8_per_token_head", "nvfp4")) if c.name != "fp32 spread"]
CASES += [c for c in cases(("decode",), ("bf16", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head")) if c.name == "plain"]
CASES += [c for c in cases(("decode",), ("fp8_e4m3",)) if "tensor" in c.name or "query" in c.name]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_case(case):
    result = verify.run(case, "cpu", "triton")
    assert result.status == verify.PASSED, result.message


def test_an_fp32_query_is_refused_with_the_reason():
    (case,) = (c for c in cases(("decode",), ("fp8_e4m3",)) if c.name == "fp32 spread")
    result = verify.run(case, "cpu", "triton")
    assert result.status == verify.UNSUPPORTED
    assert "wants a 16-bit or 8-bit q, got float32" in result.message
