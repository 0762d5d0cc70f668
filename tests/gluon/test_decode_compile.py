"""Gluon's paged decode, compiled for a GPU that is not there: what matters in the machine code, and who gets a plan."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from compile_tools import compile_launches

from tersekv import checks
from tersekv.backends.gluon import decode
from tersekv.cache import PagedKVCache
from tersekv.calls import DecodeCall
from tersekv.plan import facts

FORMATS = ("fp8_e4m3", "fp8_per_token_head", "int8_per_token_head", "nvfp4")


def call_of(
    fmt: str, *, page_size: int = 64, head_dim: int = 128, requests: int = 64, drafts: int = 1, max_pages: int = 128,
    heads: int = 8, group: int = 4, layout: str = "NHD", inline_scales: bool = False, **changes,
) -> DecodeCall:  # fmt: skip
    c = PagedKVCache.allocate(
        1, 8, page_size, heads, head_dim, format=fmt, layout=layout, inline_scales=inline_scales
    )[0]  # fmt: skip
    q = torch.empty(requests * drafts, heads * group, head_dim, dtype=torch.bfloat16)
    table, lens = torch.empty(requests, max_pages, dtype=torch.int32), torch.empty(requests, dtype=torch.int32)
    return DecodeCall(
        q, c.k, c.v, c.k_scale_cache, c.v_scale_cache, table, lens, None, None, None, torch.empty_like(q), None,
        fmt, drafts, 0, 0.0, 0.1, None, 1.0, None, 1.0, None, 1.0, None, "exact",
    )._replace(**changes)  # fmt: skip


def why_not(call: DecodeCall, arch: int = 90) -> str | None:
    return decode.why_not(facts("decode", call, arch=arch))


def compiled(call: DecodeCall) -> list[dict]:
    f = facts("decode", call, arch=90)
    checks.facts(f)
    assert decode.why_not(f) is None
    return compile_launches(decode.run, call, decode.configure(f), 90)


@cache
def tuned(fmt: str) -> tuple[dict, dict]:
    split, merge = compiled(call_of(fmt))
    return split, merge


@pytest.mark.parametrize("fmt", FORMATS)
def test_tuned_for_hopper(fmt):
    """No spills; tensor copies; operands of both products in registers; codes cross lanes only when loaded."""
    split, merge = tuned(fmt)
    assert (split["n_spills"], merge["n_spills"]) == (0, 0)
    assert split["shared"] <= 232448
    sass = split["sass"]()
    assert "UTMALDG.4D" in sass
    assert "HMMA.16816.F32" in sass
    assert "LDS.128" in sass, "keys come by whole stretches of their rows"
    assert "LDSM.16.MT88.4" in sass, "values are transposed on their way"
    assert "MOVM.16.MT88" in sass, "probabilities are transposed in registers"
    assert not re.search(r"LDS\.[US](8|16) ", sass)


@pytest.mark.parametrize(("fmt", "limit"), [("fp8_e4m3", 210), ("fp8_per_token_head", 240), ("nvfp4", 350)])
def test_few_instructions_a_step(fmt, limit):
    """Two products, their conversions and their share of the softmax: instructions of a warp per 16 keys."""
    assert instructions_of_a_step(tuned(fmt)[0]["sass"]()) <= limit


def test_threads_meet_three_times_a_tile():
    """More barriers between the copies of a tile would say that they share a buffer or a barrier of arrival."""
    lines = [x for x in tuned("nvfp4")[0]["sass"]().splitlines() if "UTMALDG" in x or "BAR.SYNC" in x]
    copies = "".join("c" if "UTMALDG" in x else "|" for x in lines)
    assert "cccc" in copies


def instructions_of_a_step(sass: str) -> float:
    """Instructions of the shortest straight run that holds whole products, per 16 keys (16 matrix instructions)."""
    runs, here = [], []
    for line in sass.splitlines():
        found = re.search(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9.]*)", line)
        if found is None:
            continue
        here.append(found[1])
        if found[1] in ("BRA", "EXIT"):
            runs.append(here)
            here = []
    products = [(len(run), sum(x.startswith("HMMA") for x in run)) for run in runs]
    return min(16 * n / matrix for n, matrix in products if matrix >= 16)


@pytest.mark.parametrize(
    ("fmt", "options"),
    [
        ("nvfp4", {"page_size": 16}),
        ("nvfp4", {"head_dim": 64, "layout": "HND"}),
        ("nvfp4", {"head_dim": 256}),
        ("fp8_e4m3", {"group": 16, "window": 100, "softcap": 20.0}),
        ("fp8_per_token_head", {"head_dim": 256}),
    ],
    ids=str,
)
def test_compiles_with(fmt, options):
    split, merge = compiled(call_of(fmt, **options))
    assert split["shared"] <= 232448
    # Four copies a tile carry four page ids and as many addresses: some wait in local memory.
    assert split["n_spills"] <= (64 if options.get("page_size") == 16 else 0)
    assert merge["n_spills"] == 0


@pytest.mark.parametrize(
    ("fmt", "options", "reason"),
    [
        ("bf16", {}, "has no bf16"),
        ("fp8_e4m3", {"head_dim": 96}, "head sizes"),
        ("nvfp4", {"head_dim": 32}, "head sizes"),
        ("fp8_e4m3", {"page_size": 8}, "pages of a multiple of 16"),
        ("fp8_e4m3", {"drafts": 8}, "at most 16 query rows"),
        ("nvfp4", {"inline_scales": True}, "multiples of 16 bytes"),
        ("fp8_per_token_head", {"heads": 2}, "stored scales"),
    ],
)
def test_refuses_what_it_does_not_run(fmt, options, reason):
    assert reason in why_not(call_of(fmt, **options))


def narrowed(x: torch.Tensor, width: int) -> torch.Tensor:
    """A tensor like x whose rows take `width` elements."""
    return torch.empty(*x.shape[:-1], width, dtype=x.dtype)[..., : x.shape[-1]]


def test_refuses_what_a_tensor_map_cannot_hold():
    call = call_of("fp8_e4m3")
    k = call.k_cache
    behind = torch.empty(k.numel() + 8, dtype=torch.uint8)[8:].view(k.dtype).view(k.shape)
    for bad in (narrowed(k, 136), behind, k[:, :, :1].expand_as(k), k[:, :1].expand_as(k), k[:0]):
        for changes in ({"k_cache": bad}, {"v_cache": bad}):
            assert "rows at equal distances" in why_not(call._replace(**changes))
    assert why_not(call._replace(k_cache=narrowed(k, 144))) is None


def test_refuses_more_rows_than_fit_31_bits():
    call = DecodeCall(*[x.to("meta") if isinstance(x, torch.Tensor) else x for x in call_of("fp8_e4m3")])
    many, too_many = (torch.empty(n, 64, 8, 128, dtype=call.k_cache.dtype, device="meta") for n in (2**24, 2**25))
    assert why_not(call._replace(k_cache=many, v_cache=many)) is None  # 2^40 elements
    assert "rows at equal distances" in why_not(call._replace(k_cache=too_many, v_cache=too_many))


def test_other_versions_of_triton_are_refused(monkeypatch):
    monkeypatch.setattr(decode.triton, "__version__", "3.7.0")
    assert why_not(call_of("fp8_e4m3")) == "is written for Triton 3.6, got 3.7.0"


@pytest.mark.parametrize("side", ["k_scale", "v_scale"])
def test_scales_of_heads_must_lie_side_by_side(side):
    for bad in (torch.ones(16)[::2], torch.ones(1).expand(8)):
        with pytest.raises(ValueError, match=f"{side}: want stride 1"):
            checks.facts(facts("decode", call_of("fp8_e4m3", **{f"{side}_t": bad}), arch=90))


def test_runs_on_hopper_only():
    assert why_not(call_of("fp8_e4m3"), arch=100) == "needs sm_90, got sm_100"
    assert why_not(call_of("fp8_e4m3")) is None
