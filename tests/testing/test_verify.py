"""The shipped test tools: every case passes on the oracle, and a fault in a backend turns a case red."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from tersekv import UnsupportedError, formats
from tersekv.cli import verify as command
from tersekv.dispatch import plan
from tersekv.testing import cases as cases_module
from tersekv.testing import codes, compare, memory, reference
from tersekv.testing import verify as tool
from tersekv.testing.cases import OPS, Case, cases
from tersekv.testing.make import make

FORMATS = {op: tuple(dict.fromkeys(c.format for c in cases((op,)))) for op in OPS}


@pytest.mark.parametrize(("op", "format"), [(op, name) for op in OPS for name in FORMATS[op]])
def test_the_oracle_passes_every_case(op, format):
    results = list(tool.verify("cpu", "torch", ops=(op,), formats=(format,)))
    assert [f"{r.case.id}: {r.message}" for r in results if r.status != tool.PASSED] == []
    assert results


def test_case_names_are_unique():
    names = [c.id for c in cases()]
    assert len(names) == len(set(names))
    assert {c.op for c in cases(quick=True)} == set(OPS)


def one(op: str, format: str | None = "bf16", name: str | None = None) -> Case:
    return next(c for c in cases((op,), None if format is None else (format,)) if name in (None, c.name))


@pytest.fixture
def ninth(monkeypatch):
    """A format that stands in the table and nowhere else, as its first line of code would have it."""
    f = formats.KVFormat("ninth", "int8", torch.int8, 127.0, formats.TENSOR)
    for table in (formats.KV_FORMATS, formats.LATENT_FORMATS, formats.ALL_FORMATS, formats.STORED_FORMATS):
        monkeypatch.setitem(table, f.name, f)
    latent = {"mla_append", "mla_decode", "mla_prefill", "mla_decode_branch"}
    for op in (*latent, "append", "rope_append", "decode"):
        known, variants = cases_module._VARIANTS[op]
        monkeypatch.setitem(cases_module._VARIANTS, op, ((*known, f.name), variants))
    return f


def test_a_format_that_no_backend_knows_is_refused_by_each(ninth, monkeypatch):
    monkeypatch.setattr("tersekv.backends.cpu.library.why_no_library", lambda: None)
    assert len(list(cases(None, ("ninth",)))) > 50, "every operation has cases of it"
    results = list(tool.verify("cpu", formats=("ninth",), quick=True))
    assert {r.status for r in results} == {tool.UNSUPPORTED, tool.FAILED}
    told = {r.message for r in results}
    assert told == {
        "cpu: has no ninth; torch: has no codec for ninth: scale='tensor', codes of int8, no stored scales",
        "NotImplementedError: tersekv.testing.codes: no reference encoder of torch.int8",
    }
    # With a reference encoder, the cases reach the backends: each refuses.
    for module in ("codes", "make"):
        monkeypatch.setattr(f"tersekv.testing.{module}.encode", lambda x, dtype: x.to(dtype))
    for case in cases(None, ("ninth",), quick=True):
        if case.listed >= 0:
            continue  # two refuse lists of keys first
        call = make(case)
        for name, arch in (("torch", None), ("cpu", None), ("triton", 90), ("gluon", 90)):
            with pytest.raises(UnsupportedError, match=f"{name}: has no "):
                plan.plan(case.op, call, name, arch=arch)


@pytest.mark.parametrize("op", OPS)
def test_a_case_always_makes_the_same_tensors(op):
    case = one(op, None)
    first, second = make(case), make(case)
    for a, b in zip(first, second, strict=True):
        if isinstance(a, torch.Tensor):
            assert torch.equal(memory.storage_bytes(a), memory.storage_bytes(b))
            assert a.stride() == b.stride()
        else:
            assert a == b


def test_a_moved_call_keeps_strides_gaps_and_shared_buffers():
    call = make(one("append", "fp8_per_token_head", "hnd packed inline strided"))
    copy = memory.moved(call, "cpu")
    assert copy.k_cache.stride() == call.k_cache.stride()
    assert copy.k_cache.data_ptr() != call.k_cache.data_ptr()
    shared = {t.untyped_storage().data_ptr() for t in (copy.k_cache, copy.v_cache, copy.k_scale_cache)}
    assert len(shared) == 1
    assert torch.equal(memory.storage_bytes(copy.k), memory.storage_bytes(call.k))


def test_what_must_not_be_read_is_poisoned():
    call = make(one("decode", "fp8_e4m3"))
    assert call.out.isnan().all()
    assert call.lse.isnan().all()
    live = -(-call.seq_lens // call.k_cache.shape[1])
    dead = torch.arange(call.page_table.shape[1]) >= live[:, None]
    assert (call.page_table[dead] == 2**31 - 1).all()
    stored = call.k_cache.float().isfinite().all(-1).all(-1)  # [P, S]
    assert int(stored.sum()) == int(call.seq_lens.sum())


# A fault: what a wrong backend would do to a finished call, and what the report says about it.
FAULTS = {
    "a wrong code": ("append", "int8_per_token_head", lambda c: flip(c.k_cache, 0), "k_cache: 1 of"),
    "a wrong scale": ("append", "fp8_per_token_head", lambda c: flip(c.v_scale_cache, 0), "v_scale_cache: 1 of"),
    "a rotated query off by a bit": ("rope_append", "bf16", lambda c: flip(c.q_rope_out, 0), "q_rope_out: 1 of"),
    "an output of NaN": ("decode", "bf16", lambda c: c.out[3, 1].fill_(torch.nan), "out: want finite"),
    "an output that is not written": ("mla_decode", "bf16", lambda c: c.out[2].fill_(torch.nan), "out: want finite"),
    "one token 1 % off": ("decode", "nvfp4", lambda c: c.out[3].mul_(1.02), "out: want relative error"),
    "an lse in base 2": ("decode", "fp16", lambda c: c.lse.mul_(1.4427), "lse: want"),
    "an lse of +inf for no keys": ("mla_decode", "fp16", lambda c: c.lse[2].fill_(torch.inf), "lse: want -inf"),
    "an unrotated query": ("mla_prefill", "bf16", lambda c: c.q.mul_(1.02), "q: want relative error"),
    "a latent row that is not normed": ("mla_prefill", "bf16", lambda c: c.ckv.mul_(2), "ckv rows: want"),
    "a wrong group scale": ("mla_prefill", "fp8_ds_mla", lambda c: c.ckv_scale_cache.mul_(2), "ckv rows: want"),
    "a transcoded code off by one": ("transcode", "int4_per_token_head", lambda c: flip(c.v_cache, 0), "v_cache: 1 of"),
    "a later slot written": ("transcode", "fp8_e4m3", lambda c: c.k_cache.view(torch.uint8).zero_(), "k_cache: "),
    "an empty part that weighs": ("merge_states", "fp32", lambda c: c.out[0].fill_(1e-2), "out: want"),
}


def flip(t: torch.Tensor, bit: int) -> None:
    """Flip one bit of the first element that was written."""
    b = memory.as_bytes(t)
    written = (b != memory.POISON).any(-1).nonzero()[0]
    b[(*written.tolist(), 0)] ^= 1 << bit


def with_fault(monkeypatch, op: str, fault) -> None:
    """Let the oracle run, then do `fault` to the call."""
    real = plan.dispatch

    def run(name, call, backend=None, arch=None):
        real(name, call, backend)
        if name == op:
            fault(call)

    monkeypatch.setattr(tool, "dispatch", run)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault, monkeypatch):
    op, format, do, message = FAULTS[fault]
    with_fault(monkeypatch, op, do)
    result = tool.run(one(op, format), "cpu", "torch")
    assert result.status == tool.FAILED
    assert message in result.message


# A backend that ignores or mistakes an option: the case that is there for that option must turn red.
MISTAKES = {
    "a window one key longer": ("decode", "bf16", "G 1 fp16 window", lambda c: {"window": c.window + 1}),
    "no window": ("decode", "int8_per_token_head", "ragged drafts window", lambda c: {"window": 0}),
    "no softcap": ("decode", "fp8_e4m3", "G 16 sinks softcap", lambda c: {"softcap": 0.0}),
    "no sinks": ("decode", "nvfp4", "drafts fp16 sinks", lambda c: {"sinks": None}),
    "no mask": ("decode", "fp16", "drafts tree mask", lambda c: {"mask": None}),
    "a causal line one key early": ("mla_decode", "bf16", "ragged drafts", lambda c: {"seq_lens": c.seq_lens - 1}),
    "one stale key": ("decode", "bf16", "plain", lambda c: {"seq_lens": c.seq_lens + (c.seq_lens % 16 > 0).int()}),
    "no scale of K": ("decode", "fp8_e4m3", "scale tensors e4m3 out", lambda c: {"k_scale_t": None}),
    "one scale for all heads": ("decode", "fp8_e5m2", "a scale per head", lambda c: {"v_scale_t": c.v_scale_t[:1]}),
    "no output scale": ("mla_decode", "fp16", "scale tensors e4m3 out", lambda c: {"out_scale_t": None}),
    "neox for interleaved": ("rope_append", "bf16", "partial interleaved", lambda c: {"interleaved": False}),
    "no zero padding": ("rope_append", "fp16", "kv_indices zero padding", lambda c: {"zero_padding": False}),
    "a scale the wrong way": (
        "append",
        "fp8_e4m3",
        "kv_indices quantising scales",
        lambda c: {"scales_quantize": False},
    ),
    "no scale of the query": ("mla_append", "fp8_e4m3", "scale tensors strided", lambda c: {"q_scale_t": None}),
    "no scale of the latent": ("mla_append", "fp8_e4m3", "rank 256 rope 32", lambda c: {"kv_scale": 1.0}),
    "another epsilon": ("mla_prefill", "bf16", "plain", lambda c: {"epsilon": 0.1}),
    "a later place": (
        "mla_prefill",
        "bf16",
        "plain",
        lambda c: {"cache_lens": c.cache_lens - (c.cache_lens > 0).int()},
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistaken_option_is_found(mistake, monkeypatch):
    op, format, name, change = MISTAKES[mistake]
    real = plan.dispatch
    monkeypatch.setattr(tool, "dispatch", lambda op, call, *a, **k: real(op, call._replace(**change(call)), *a, **k))
    result = tool.run(one(op, format, name), "cpu", "torch")
    assert result.status == tool.FAILED
    assert ": want" in result.message or "differ" in result.message


def test_a_write_beside_an_output_is_found(monkeypatch):
    def stray(call):
        call.out.as_strided((1,), (1,), call.out.storage_offset() - 1).zero_()

    with_fault(monkeypatch, "decode", stray)
    result = tool.run(one("decode", "bf16", "strided spread fast"), "cpu", "torch")
    assert result.status == tool.FAILED
    assert "outside the view" in result.message


def test_a_write_to_a_dead_slot_is_found(monkeypatch):
    def stray(call):
        memory.as_bytes(call.k_cache)[0, 0, 0, 0, 0] ^= 1

    with_fault(monkeypatch, "append", stray)
    assert tool.run(one("append"), "cpu", "torch").status == tool.FAILED


def test_an_unsupported_call_is_neither_passed_nor_failed(monkeypatch):
    def refuse(*args, **options):
        raise UnsupportedError("decode has no backend\n  triton: needs a GPU")

    monkeypatch.setattr(tool, "plan", refuse)
    result = tool.run(one("decode"), "cpu", "triton")
    assert (result.status, result.message, result.error) == (tool.UNSUPPORTED, "triton: needs a GPU", None)


def test_a_crash_is_a_failure(monkeypatch):
    def crash(*args, **options):
        raise ZeroDivisionError("in a kernel")

    monkeypatch.setattr(tool, "dispatch", crash)
    result = tool.run(one("decode"), "cpu", "torch")
    assert (result.status, result.message) == (tool.FAILED, "ZeroDivisionError: in a kernel")


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)])
def test_reference_codes_are_torchs_where_torch_is_right(dtype, largest):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x = x[~x.isnan()]
    want = x.clamp(-largest, largest).to(dtype)
    assert torch.equal(codes.encode(x, dtype).view(torch.uint8), want.view(torch.uint8))
    finite = want[want.float().isfinite()]
    assert torch.equal(codes.decode(finite), finite.double())


def test_reference_decode_is_torchs_attention():
    case = dataclasses.replace(one("decode", "bf16"), lens=(33,), dtype="float32")
    call = make(case)
    expected = reference.run("decode", call).values["out"]
    where = call.page_table[0].long()[torch.arange(33) // 16], torch.arange(33) % 16
    k, v = (c[where].double().transpose(0, 1)[None] for c in (call.k_cache, call.v_cache))
    q = call.q.double()[:, :, None]
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(expected, want[:, :, 0], rtol=1e-9, atol=1e-9)


def test_rows_of_two_values_hold_what_is_not_finite():
    case = next(c for c in cases(("mla_append",), ("fp8_e4m3",)) if c.special)
    rows = make(dataclasses.replace(case, rope=2)).k_pe.float().flatten()
    assert rows.isposinf().sum() == rows.isneginf().sum() == 1


def test_an_error_is_told_beside_the_bound_of_its_own_output():
    found = {c.id: tool.run(c) for c in cases(("decode", "append"), ("fp8_e4m3",)) if c.name in ("plain", "e5m2 out")}
    plain, eight_bits = found["decode/fp8_e4m3/plain"], found["decode/fp8_e4m3/e5m2 out"]
    assert 0 < plain.error < plain.bound == pytest.approx(compare.EXACT)
    assert compare.FAST < eight_bits.error < eight_bits.bound < 2 * eight_bits.error
    assert found["append/fp8_e4m3/plain"].error == found["append/fp8_e4m3/plain"].bound == 0


def test_what_is_told_is_the_case_nearest_to_its_bound():
    case = Case("decode", "bf16", "plain")
    told = [(5e-2, 6e-2), (2.9e-3, 3e-3), (1e-3, 3e-3)]
    rows = command.table([tool.Result(case, "cpu", tool.PASSED, error, bound=bound) for error, bound in told], "cpu")
    assert [[*c.cells] for c in rows.columns[-2:]] == [["2.9e-3"], ["3.0e-3"]]
    assert compare.share_of_bound(1e-9, 0.0) == torch.inf


def test_fp16_rounds_its_subnormals_by_no_small_share():
    values = torch.full((2, 64), 3.3e-7)
    values[1] = 1.0
    stored = values.half().double()
    assert compare._values("out", stored, values.double(), compare.EXACT, torch.float16).message is None
    assert compare._values("out", stored, values.double(), compare.EXACT).message
    stored[0] += 2 * torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps  # two steps off
    assert compare._values("out", stored, values.double(), compare.EXACT, torch.float16).message


def test_one_code_of_a_stored_row_may_be_the_next_one_and_no_more():
    want = torch.full((3, 128), 0.1, dtype=torch.float64)
    want[1, 5], want[1, 7] = 2.5, 2.5
    got, step = want.clone(), compare.STEP[torch.float8_e4m3fn]
    got[1, 5] = 2.25
    judged = functools.partial(compare._values, "ckv rows", want=want, limit=0.01)
    assert judged(got, step=step).message is None
    assert "token 1" in judged(got, step=0.0).message
    for column, value in ((5, 2.0), (7, 2.25)):  # two codes away; a second one
        worse = got.clone()
        worse[1, column] = value
        assert "token 1" in judged(worse, step=step).message


@pytest.mark.parametrize("query", ["float8_e4m3fn", "bfloat16"])
def test_an_lse_may_move_by_what_sums_of_8_bit_products_lose(query):
    """Where a product may be off by 2**-10 of itself, an LSE may by 2**-10 of its scores' products; else by nothing."""
    case = dataclasses.replace(one("prefill", "fp8_e4m3"), dtype=query, out_dtype="bfloat16", spread=True)
    call = make(case)
    found = reference.run("prefill", call)
    lse, rounding = found.values["lse"], found.lse_rounding
    assert (query == "bfloat16") == (not rounding.any())
    for off, right in ((3 * rounding, True), (2 * compare.LSE + 7 * rounding, False)):
        call.lse.copy_(lse + off)
        report = compare._lse("lse", codes.decode(call.lse), lse, rounding)
        assert (report.message is None) == right
