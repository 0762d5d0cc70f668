"""Every variant of paged decode, interpreted, against the fp64 reference, in formats that differ in their branches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from drawn import drawn, long_but_for

from tersekv.backends.host import launch
from tersekv.backends.torch import attention as oracle
from tersekv.backends.triton import attention
from tersekv.backends.triton.decode import entry as decode
from tersekv.dispatch import plan
from tersekv.testing import verify
from tersekv.testing.cases import cases
from tersekv.testing.make import make
from tersekv.testing.memory import as_bytes, moved

CASES = [
    c
    for c in cases(("decode",), ("fp8_per_token_head", "nvfp4"))
    if c.name != "fp32 spread" and not (c.rotation or c.channels or c.v_format)
]
TURNED = [
    "bf16/rotated D 72 Dv 72", "fp8_per_token_head/channel scales softcap e4m3 query", "nvfp4/rotated D 80 Dv 32",
    "int4_per_token_head/rotated sinks window", "nvfp4/V of another format, rotated, tail", "fp16/V of another format",
]  # fmt: skip
CASES += [c for c in cases(("decode",)) if c.id.removeprefix("decode/") in TURNED]
CASES += [c for c in cases(("decode",), ("bf16", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head")) if c.name == "plain"]
CASES += [c for c in cases(("decode",), ("fp8_e4m3",)) if "tensor" in c.name or "query" in c.name]
# A variant's branches and a format's are not each other's: every variant in one of two formats, and the turned ones.
QUICK = drawn(CASES, 2) + [c for c in CASES if c.id.removeprefix("decode/") in TURNED]


def test_every_case_of_a_turned_cache_is_listed_still():
    assert {c.id.removeprefix("decode/") for c in CASES} >= set(TURNED)


@pytest.mark.parametrize("case", long_but_for(QUICK, CASES), ids=lambda c: c.id)
def test_case(case):
    result = verify.run(case, "cpu", "triton")
    assert result.status == verify.PASSED, result.message


def test_an_fp32_query_is_refused_with_the_reason():
    (case,) = (c for c in cases(("decode",), ("fp8_e4m3",)) if c.name == "fp32 spread")
    result = verify.run(case, "cpu", "triton")
    assert result.status == verify.UNSUPPORTED
    assert "wants a 16-bit or 8-bit q, got float32" in result.message


@pytest.mark.parametrize("out", ["float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_queries_and_outputs_as_bytes_give_the_same_bits(out, monkeypatch):
    plain = next(c for c in cases(("decode",), ("fp8_e4m3",)) if c.name == "plain")
    call = make(replace(plain, dtype="float8_e4m3fn", out_dtype=out))
    other = moved(call, "cpu")
    attention.run(call, decode.configure(plan.facts("decode", call)))
    monkeypatch.setattr(launch, "emulates_e4m3", lambda f: True)
    monkeypatch.setattr(launch, "has_exact_fp8_cast", lambda f: False)
    config = decode.configure(plan.facts("decode", other))
    assert config.constants.Q_AS_BYTES
    assert (config.constants.OUT_KIND == "float") == (out == "bfloat16")
    attention.run(other, config)
    assert as_bytes(call.out).any()
    assert torch.equal(as_bytes(call.out), as_bytes(other.out))


@pytest.mark.parametrize("sink", [-100.0, 150.0])
def test_a_sink_far_from_every_score_is_weighed_in_whole_and_in_cut_requests(sink):
    """Requests of one tile are whole; of 4000 keys every share holds a piece. exp(150) is beyond fp32."""
    base = next(c for c in cases(("decode",), ("fp8_e4m3",)) if c.name == "plain")
    for lens in ((5, 0), (4000, 3)):
        call = make(replace(base, sinks=True, lens=lens, q_lens=(1, 1), out_dtype="float32"))
        call.sinks.fill_(sink)
        other = moved(call, "cpu")
        oracle.run(other, None)
        attention.run(call, decode.configure(plan.facts("decode", call)))
        assert (call.out - other.out).norm() <= 3e-3 * other.out.norm()
        torch.testing.assert_close(call.lse, other.lse, rtol=1e-6, atol=1e-5)


def test_an_fp16_query_over_bf16_keys_is_not_rounded_to_bf16():
    base = next(c for c in cases(("decode",), ("bf16",)) if c.name == "plain")
    call = make(replace(base, dtype="float16", out_dtype="float32", spread=True))
    other = moved(call, "cpu")
    oracle.run(other, None)
    attention.run(call, decode.configure(plan.facts("decode", call)))
    torch.testing.assert_close(call.lse, other.lse, rtol=0, atol=1e-4)
