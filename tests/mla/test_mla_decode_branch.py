"""mla_decode_branch on the torch backend: what the four operations in a row compute, to the bit; what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from branch_cases import BASE, RAGGED, arguments

import tersekv
from tersekv import MLAPrefillPlan, PagedLatentLayer
from tersekv.testing.make import make
from tersekv.testing.memory import as_bytes, moved


def stored(call: Any) -> list[torch.Tensor]:
    return [as_bytes(x).clone() for x in (call.ckv, call.kpe, call.ckv_scale_cache) if x is not None]


def composed(call: Any) -> torch.Tensor:
    """The branch from four operations."""
    a = arguments(call)
    q, cu = a["q"], a["cu_seqlens_q"]
    tokens, heads, dq = q.shape
    rank, rope = call.ckv.shape[-1], call.kpe.shape[-1]
    cu = torch.arange(0, tokens + 1, call.max_q_len) if cu is None else cu
    nothing = cu.to(torch.int32)[None]
    q_pe, lens = q.new_empty(tokens, heads, rope), torch.empty(len(a["cache_lens"]), dtype=torch.int32)
    tersekv.mla_prefill(
        q, a["cache"], a["page_table"], a["cache_lens"], cu, a["freqs_cis"], a["kv_norm_gamma"],
        q.new_empty(heads * dq, rank), MLAPrefillPlan(nothing, nothing, [0], call.max_q_len), softmax_scale=1.0,
        kv_c=a["kv_c"], k_pe=a["k_pe"], q_pe_out=q_pe, seq_lens_out=lens,
    )  # fmt: skip
    q_nope = tersekv.mla_project(q[..., : dq - rope], a["w_uk"], weight_scale=a["w_uk_scale"])
    latents = tersekv.mla_decode(
        (q_nope, q_pe), a["cache"], a["page_table"], lens, softmax_scale=a["softmax_scale"], cu_seqlens_q=cu,
        max_q_len=call.max_q_len, backend="torch",
    )  # fmt: skip
    return tersekv.mla_project(latents, a["w_uv"], weight_scale=a["w_uv_scale"])


@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3", "fp8_ds_mla"])
@pytest.mark.parametrize("base", [BASE, RAGGED], ids=lambda c: c.name)
def test_it_is_four_operations_in_one(base, format):
    case = replace(base, format=format)
    got, want = make(case), make(case)
    q = got.q.clone()
    out = tersekv.mla_decode_branch(**arguments(got))
    assert out is got.out
    assert torch.equal(out, composed(want))
    assert all(torch.equal(a, b) for a, b in zip(stored(got), stored(want), strict=True))
    assert torch.equal(got.q, q), "q is not written"


def test_raw_rows_may_lie_in_the_cache():
    case = replace(RAGGED, raw_in_cache=True, weight="", rank=96, nope=40)
    got, want = make(case), make(case)
    assert torch.equal(tersekv.mla_decode_branch(**arguments(got)), composed(want))
    assert all(torch.equal(a, b) for a, b in zip(stored(got), stored(want), strict=True))


def test_without_row_offsets_every_request_has_as_many_tokens():
    case = replace(BASE, lens=(13, 2, 9), q_lens=(2, 2, 2))
    want = tersekv.mla_decode_branch(**arguments(make(case)))
    given = {"cu_seqlens_q": torch.tensor([0, 2, 4, 6]), "out": None}
    assert torch.equal(tersekv.mla_decode_branch(**arguments(make(case)) | given), want)
    with pytest.raises(ValueError, match="q: want T a multiple of B=4"):
        tersekv.mla_decode_branch(**arguments(make(RAGGED)) | {"cu_seqlens_q": None})


def test_a_scale_on_the_device_is_as_good_as_a_number():
    want = tersekv.mla_decode_branch(**arguments(make(RAGGED)))
    given = {"softmax_scale": torch.tensor([make(RAGGED).softmax_scale]), "max_q_len": 6}
    torch.testing.assert_close(tersekv.mla_decode_branch(**arguments(make(RAGGED)) | given), want, rtol=1e-2, atol=1e-4)


def test_rows_of_no_request_are_0():
    """As CUDA graphs pad them."""
    call = make(RAGGED)
    starts = call.cu_seqlens_q.clone()
    starts[-1] = starts[-2]
    out = tersekv.mla_decode_branch(**arguments(call) | {"cu_seqlens_q": starts})
    assert out[: int(starts[-1])].isfinite().all()
    assert (out[int(starts[-1]) :] == 0).all()


def test_zero_tokens_do_nothing():
    call = make(replace(BASE, lens=(4, 0), q_lens=(0, 0)))
    before = stored(call)
    assert tersekv.mla_decode_branch(**arguments(call)).shape == (0, 2, 128)
    assert all(torch.equal(a, b) for a, b in zip(stored(call), before, strict=True))


E4M3 = torch.float8_e4m3fn
BAD = {
    "w_uk of other rows": ({"w_uk": torch.zeros(2, 256, 128).to(E4M3)}, r"w_uk: want \[H=2, L=128, Dn=128\]"),
    "w_uv of other columns": ({"w_uv": torch.zeros(2, 128, 256).to(E4M3)}, r"w_uv: want \[H=2, Dv, L=128\]"),
    "an 8-bit weight alone": ({"w_uv_scale": None}, "w_uv_scale: want a tensor beside an e4m3 w_uv, got None"),
    "scales beside 16 bits": ({"w_uk": torch.zeros(2, 128, 128).bfloat16()}, "w_uk_scale: want None beside a 16-bit"),
    "scales of other blocks": ({"w_uv_scale": torch.ones(2, 2, 1)}, r"w_uv_scale: want \[H=2, Dv/128=1, L/128=1\]"),
    "raw rows missing": ({"k_pe": None}, "k_pe: want a tensor beside kv_c, got None"),
    "rows of other tokens": ({"kv_c": torch.zeros(3, 128).bfloat16()}, r"kv_c: want \[T=9, L\]"),
    "no head": ({"q": torch.zeros(9, 0, 144).bfloat16()}, "w_uk: want"),
    "a negative epsilon": ({"epsilon": -1.0}, "epsilon: want a finite number, not negative, got -1.0"),
    "a bound below a request's rows": ({"max_q_len": 3}, "max_q_len: want at least 6 as in cu_seqlens_q, got 3"),
    "a bad bound": ({"max_q_len": 0}, "max_q_len: want a positive bound"),
    "an output of another dtype": ({"out": torch.zeros(9, 2, 128)}, "out: want"),
    "lengths of other requests": ({"cache_lens": torch.zeros(3, dtype=torch.int32)}, "cache_lens: want"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_does_not_fit_raises_before_anything_is_written(what):
    changed, message = BAD[what]
    call = make(RAGGED)
    before = stored(call)
    with pytest.raises((ValueError, TypeError), match=message):
        tersekv.mla_decode_branch(**arguments(call) | changed)
    assert all(torch.equal(a, b) for a, b in zip(stored(call), before, strict=True))
    assert call.out.isnan().all()


def test_checked_mode_finds_values_that_do_not_fit(monkeypatch):
    monkeypatch.setenv("TERSEKV_CHECKED", "1")
    tersekv.mla_decode_branch(**arguments(make(RAGGED)))
    for changed, message in (
        ({"cu_seqlens_q": torch.tensor([0, 6, 5, 7, 9])}, "cu_seqlens_q: want rows"),
        ({"cu_seqlens_q": torch.tensor([1, 6, 6, 7, 9])}, "cu_seqlens_q: want a first entry of 0, got 1"),
        ({"max_q_len": 3}, "max_q_len: want at least 6"),
        ({"freqs_cis": make(RAGGED).freqs_cis[:4]}, "freqs_cis: want a row for each of 13 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            tersekv.mla_decode_branch(**arguments(make(RAGGED)) | changed)


def test_a_step_compiles_whole():
    def step(call_arguments: dict[str, Any], rows: torch.Tensor) -> torch.Tensor:
        cache = PagedLatentLayer.of(rows, kv_lora_rank=128)
        return tersekv.mla_decode_branch(**call_arguments, cache=cache) * 2

    torch._dynamo.reset()
    results = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        call = arguments(make(RAGGED)) | {"out": None}
        layer = call.pop("cache")
        rows = torch.cat([layer.ckv, layer.kpe], -1)
        results.append((run(call, rows), rows.view(torch.int16)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_a_moved_record_is_the_same_call():
    call = make(RAGGED)
    assert torch.equal(
        tersekv.mla_decode_branch(**arguments(moved(call, "cpu"))), tersekv.mla_decode_branch(**arguments(call))
    )
