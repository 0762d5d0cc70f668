"""Windows, softcaps, lengths, offsets and indices at the ends of their types: right, refused or dropped."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tersekv.backends.cpu import library
from tersekv.calls import CALLS
from tersekv.dispatch import plan
from tersekv.testing import reference
from tersekv.testing.canaries import Guarded
from tersekv.testing.cases import Case
from tersekv.testing.compare import compare
from tersekv.testing.make import make
from tersekv.testing.memory import as_bytes

BACKENDS = ("cpu", "torch") if library.why_no_library() is None else ("torch",)
native = pytest.mark.skipif(library.why_no_library() is not None, reason="no native library here")
I64, I32, U32 = (-(2**63), 2**63 - 1), (-(2**31), 2**31 - 1), (0, 2**32 - 1)
ENDS = sorted({e + d for ends in (I64, I32, U32) for e in ends for d in (-2, -1, 0, 1, 2)} | {2**62, -(2**62), 2**40})

# More rows than tokens, none, one and some; the keys of the first are those of many tiles.
ROWS = {"lens": (300, 3, 0, 1, 20), "q_lens": (20, 9, 2, 5, 20), "ragged": True, "page": 16}
ATTENTIONS = {
    "decode": Case("decode", "int8_per_token_head", "extremes", **ROWS),
    "decode mask": Case("decode", "bf16", "extremes", **ROWS, mask=True),
    "decode bf16 heads": Case("decode", "bf16", "extremes", **ROWS, group=1, heads=8),
    "decode fp16": Case("decode", "fp16", "extremes", **ROWS, dtype="float32"),
    "prefill": Case("prefill", "fp8_e4m3", "extremes", **ROWS),
    "prefill new rows": Case("prefill", "nvfp4", "extremes", **ROWS, new_rows=True),
    "mla_decode": Case("mla_decode", "bf16", "extremes", **ROWS, heads=1),
}
WINDOWS = (1, 2, 19, 299, 300, 301, 320, *(e for e in ENDS if 2**31 - 3 < e < 2**63))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", [n for n in ATTENTIONS if n != "mla_decode"])
def test_any_window_is_right(name, window, backend):
    case = replace(ATTENTIONS[name], window=window)
    want, got = make(case), make(case)
    plan.dispatch(case.op, got, backend)
    assert compare(case.op, got, want, reference.run(case.op, want, got)).message is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [1e-38, 1e-20, 1e-3, 0.3, 1e3, 1e5, 1e7, 1e12, 1e25, 2.4e38, 3.3e38])
@pytest.mark.parametrize("name", [n for n in ATTENTIONS if n != "mla_decode"])
def test_any_softcap_is_right(name, softcap, backend):
    case = replace(ATTENTIONS[name], softcap=softcap)
    want, got = make(case), make(case)
    plan.dispatch(case.op, got, backend)
    assert compare(case.op, got, want, reference.run(case.op, want, got)).message is None


def outcome(op: str, call: Any, backend: str) -> tuple[str, list[torch.Tensor]]:
    """The error of a call, if it is one, and the bytes of what it writes; it touches nothing else."""
    guarded = Guarded(call, "cpu")
    told = ""
    try:
        plan.dispatch(op, guarded.call, backend)
    except ValueError as e:
        told = str(e)
    assert guarded.strays() == []
    back = guarded.back()
    return told, [getattr(back, n) for n in CALLS[op][1] if getattr(back, n) is not None]


def spoilt(call: Any, names: tuple[str, ...], dice: random.Random) -> Any:
    """The call with one to three entries of its index tensors at the ends of some type, as int64 holds them."""
    changed = {n: getattr(call, n).to(torch.int64).clone() for n in names if getattr(call, n) is not None}
    for _ in range(dice.randint(1, 3)):
        x = changed[dice.choice(sorted(changed))].view(-1)
        x[dice.randrange(x.numel())] = min(max(dice.choice(ENDS) + dice.randint(-1, 1), I64[0]), I64[1])
    for name, x in changed.items():
        dtype = dice.choice((torch.int64, torch.int32, torch.uint32))
        fits = dtype == torch.int64 or (
            dtype.is_signed == bool((x < 0).any()) and torch.equal(x.to(dtype).to(torch.int64), x)
        )
        changed[name] = x.to(dtype) if fits else x
    return call._replace(**changed)


INDEX = ("seq_lens", "cu_seqlens_q", "page_table")


@native
@pytest.mark.parametrize("name", ATTENTIONS)
def test_lengths_offsets_and_pages_of_any_size_are_refused_as_the_oracle_does(name):
    dice, case = random.Random(name), ATTENTIONS[name]
    refusals = 0
    for i in range(150):
        wide = replace(case, window=dice.choice(WINDOWS) if dice.random() < 0.5 and case.op != "mla_decode" else 0)
        names = tuple(n for n in INDEX if i % 3 or n != "page_table")
        call = spoilt(make(wide), names, dice)
        (told, got), (want_told, want) = (outcome(case.op, call, backend) for backend in ("cpu", "torch"))
        assert told == want_told
        refusals += bool(told)
        for a, b in zip(got, want, strict=True):
            # A length may reach slots that hold nothing: NaN.
            assert told or torch.allclose(a.float(), b.float(), rtol=2e-2, atol=2e-2, equal_nan=True)
    assert 50 < refusals < 150


LOW, HIGH = I64
OFFSETS = ((HIGH, LOW), (LOW, HIGH), (HIGH, HIGH), (1, LOW), (LOW, LOW + 1), (2**62, -(2**62)), (HIGH - 1, HIGH))


@native
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_offsets_whose_difference_overflows(name, offsets):
    case = replace(ATTENTIONS[name], lens=(20,), q_lens=(3,))
    call = make(case)._replace(cu_seqlens_q=torch.tensor(offsets))
    told, want = (outcome(case.op, call, backend)[0] for backend in ("cpu", "torch"))
    assert told == want
    if offsets[1] > offsets[0]:
        assert told.startswith("cu_seqlens_q: want rows in [0, 3], got ")


PLACED = {"lens": (40, 3, 0, 17), "q_lens": (9, 3, 0, 5), "page": 8}
APPENDS = {
    "append": Case("append", "int8_per_token_head", "extremes", **PLACED),
    "append pages": Case("append", "nvfp4", "extremes", **PLACED, place="pages"),
    "rope_append": Case("rope_append", "fp8_e4m3", "extremes", **PLACED),
    "rope_append pages": Case("rope_append", "bf16", "extremes", **PLACED, place="pages", zero_padding=True),
    "mla_append": Case("mla_append", "fp8_ds_mla", "extremes", **PLACED, q_nope=128),
    "mla_append pages": Case("mla_append", "fp8_e4m3", "extremes", **PLACED, q_nope=128, place="pages"),
}
PLACES = ("slot_mapping", "batch_indices", "kv_positions", "kv_indptr", "kv_indices", "positions")


@native
@pytest.mark.parametrize("name", APPENDS)
def test_places_of_any_size_are_dropped_as_the_oracle_does(name):
    dice, case = random.Random(name), APPENDS[name]
    for _ in range(120):
        call = make(case)
        call = spoilt(call, tuple(n for n in PLACES if getattr(call, n, None) is not None), dice)
        (told, got), (want_told, want) = (outcome(case.op, call, backend) for backend in ("cpu", "torch"))
        assert told == want_told == ""
        assert all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(got, want, strict=True))


PREFILLS = {
    "mla_prefill": Case("mla_prefill", "bf16", "extremes", lens=(20, 3, 0), q_lens=(4, 3, 0), heads=1, group=2, page=8,
                        rank=128, nope=16, dim_v=16, weight="", ragged=True, chunk=12),
    "mla_decode_branch": Case("mla_decode_branch", "bf16", "extremes", lens=(20, 3, 5), q_lens=(4, 3, 1), heads=1,
                              group=2, page=8, rank=128, nope=16, dim_v=16, weight="", ragged=True),
}  # fmt: skip
OF_PREFILL = ("cache_lens", "cu_seqlens_q", "page_table", "buffer_row_offsets", "cache_offsets")


@pytest.mark.parametrize("checked", ["", "1"])
@pytest.mark.parametrize("name", PREFILLS)
def test_an_mla_prefill_writes_nothing_where_a_place_is_none(name, checked, monkeypatch):
    monkeypatch.setenv("TERSEKV_CHECKED", checked)
    dice, case = random.Random(name), PREFILLS[name]
    refusals = 0
    for _ in range(120):
        call = make(case)
        call = spoilt(call, tuple(n for n in OF_PREFILL if getattr(call, n, None) is not None), dice)
        before = [as_bytes(getattr(call, n)).clone() for n in CALLS[case.op][1] if getattr(call, n) is not None]
        told, after = outcome(case.op, call, "torch")
        refusals += bool(told)
        if told:
            assert all(torch.equal(a, as_bytes(b)) for a, b in zip(before, after, strict=True)), told
    assert refusals > 60


@pytest.mark.parametrize("name", [*ATTENTIONS, *APPENDS])
def test_checked_mode_refuses_what_the_backends_drop_and_raises_nothing_else(name, monkeypatch):
    monkeypatch.setenv("TERSEKV_CHECKED", "1")
    dice, case = random.Random(name), {**ATTENTIONS, **APPENDS}[name]
    for _ in range(100):
        call = make(case)
        given = tuple(n for n in (*INDEX, *PLACES) if getattr(call, n, None) is not None)
        outcome(case.op, spoilt(call, given, dice), BACKENDS[0])
