"""Paged prefill, interpreted, against the fp64 reference: each branch of the kernel in some format."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tersekv.backends.host import launch
from tersekv.backends.torch import attention as oracle
from tersekv.backends.triton import attention
from tersekv.backends.triton.prefill import entry as prefill
from tersekv.dispatch import plan
from tersekv.testing import verify
from tersekv.testing.cases import Case, cases
from tersekv.testing.make import make
from tersekv.testing.memory import as_bytes, moved

LISTED = {c.id: c for c in cases(("prefill",))}
CASES = [
    "bf16/plain", "bf16/new rows window sinks hnd packed", "bf16/more new rows than tokens", "fp16/new rows e4m3 query",
    "fp8_e4m3/a scale per head", "fp8_e5m2/window softcap fp16 pages of 3", "int8_per_token_head/new rows",
    "fp8_per_token_head/new rows window sinks hnd packed", "nvfp4/new rows", "nvfp4/window softcap fp16 pages of 3",
    "int4_per_token_head/new rows window sinks hnd packed", "int4_per_token_head/window softcap fp16 pages of 3",
    "bf16/rotated, V of another format", "fp8_per_token_head/rotated, V of another format",
    "int4_per_token_head/new rows, rotated, channel scales", "nvfp4/new rows, channel scales, D 80",
]  # fmt: skip


@pytest.fixture(autouse=True)
def own_kernel(monkeypatch):
    """However few the rows are."""
    monkeypatch.setattr(launch, "num_sms", lambda f: 1)


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    result = verify.run(LISTED[f"prefill/{name}"], "cpu", "triton")
    assert result.status == verify.PASSED, result.message


def test_few_rows_take_decodes_kernels_and_many_their_own(monkeypatch):
    monkeypatch.setattr(launch, "num_sms", lambda f: 8)
    few = make(SMALL)
    f = plan.facts("prefill", few)
    assert not isinstance(attention.configure(f), prefill.Config)
    f.q = f.q._replace(shape=(4096 * 8, *f.q.shape[1:]))
    assert isinstance(attention.configure(f), prefill.Config)
    attention.run(few, attention.configure(plan.facts("prefill", few)))
    other = moved(few, "cpu")
    oracle.run(other, None)
    assert (few.out.double() - other.out.double()).norm() <= 3e-3 * other.out.double().norm()


@pytest.mark.parametrize("q_lens", [(30, 20, 0), (25, 25, 25)])
def test_a_decode_of_many_rows_takes_the_kernel_of_many(q_lens):
    """Where requests begin, the kernel reads, or is told how many rows every one has."""
    case = replace(SMALL, op="decode", lens=(41, 20, 27), q_lens=q_lens, ragged=len(set(q_lens)) > 1, group=4)
    call = make(case)
    assert (call.cu_seqlens_q is None) != case.ragged
    assert isinstance(plan.plan("decode", call, "triton").config, prefill.Config)
    result = verify.run(case, "cpu", "triton")
    assert result.status == verify.PASSED, result.message


def close(call, tolerance: float = 3e-3) -> None:
    """What the kernel gives is what the oracle gives."""
    other = moved(call, "cpu")
    oracle.run(other, None)
    attention.run(call, attention.configure(plan.facts("prefill", call)))
    assert (call.out.double() - other.out.double()).norm() <= tolerance * other.out.double().norm()
    torch.testing.assert_close(call.lse, other.lse, rtol=1e-4, atol=1e-3)


SMALL = Case("prefill", "fp8_e4m3", "small", lens=(21, 0, 9), q_lens=(6, 0, 9), group=2, dim=32, page=4, ragged=True)


@pytest.mark.parametrize("sink", [-100.0, 150.0])
def test_a_sink_far_from_every_score_is_weighed_in_once(sink):
    for new_rows in (False, True):
        call = make(replace(SMALL, sinks=True, new_rows=new_rows, out_dtype="float32"))
        call.sinks.fill_(sink)
        close(call)


@pytest.mark.parametrize("out", ["float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_queries_and_outputs_as_bytes_give_the_same_bits(out, monkeypatch):
    call = make(replace(SMALL, format="nvfp4", dtype="float8_e4m3fn", out_dtype=out))
    other = moved(call, "cpu")
    attention.run(call, attention.configure(plan.facts("prefill", call)))
    monkeypatch.setattr(launch, "emulates_e4m3", lambda f: True)
    monkeypatch.setattr(launch, "has_exact_fp8_cast", lambda f: False)
    config = attention.configure(plan.facts("prefill", other))
    assert config.constants.Q_AS_BYTES
    attention.run(other, config)
    assert as_bytes(call.out).any()
    assert torch.equal(as_bytes(call.out), as_bytes(other.out))


def test_an_fp16_query_over_bf16_keys_is_not_rounded_to_bf16():
    call = make(replace(SMALL, format="bf16", dtype="float16", out_dtype="float32", spread=True))
    other = moved(call, "cpu")
    oracle.run(other, None)
    attention.run(call, attention.configure(plan.facts("prefill", call)))
    torch.testing.assert_close(call.lse, other.lse, rtol=0, atol=1e-4)


def test_rows_behind_the_last_request_are_0():
    call = make(replace(SMALL, lens=(20, 9), q_lens=(4, 3)))
    call = call._replace(cu_seqlens_q=torch.tensor([0, 2, 5], dtype=torch.int32))
    attention.run(call, attention.configure(plan.facts("prefill", call)))
    assert (call.out[5:] == 0).all()
    assert call.lse[5:].isneginf().all()
    assert call.out[:5].isfinite().all()


def test_blocks_find_their_requests(monkeypatch):
    """More requests than are looked at at once, in blocks that hold several tokens of a group that divides none."""
    monkeypatch.setattr(prefill, "request_block_size", lambda requests: 4)
    lens = (3, 0, 0, 9, 20, 1, 0, 5, 2, 7, 0)
    q_lens = tuple(n - n // 3 for n in lens)
    close(make(replace(SMALL, lens=lens, q_lens=q_lens, group=3, heads=1, dim=16, format="bf16")))
