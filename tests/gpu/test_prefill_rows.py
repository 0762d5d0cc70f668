"""On Hopper: prefill with many query rows by the kernel of its own, in processes of their own, with guard zones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tersekv.backends.gluon.sm90.prefill.config import PrefillConfig
from tersekv.dispatch.plan import plan
from tersekv.testing import verify
from tersekv.testing.cases import Case
from tersekv.testing.make import make
from tersekv.testing.workers import Workers

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
SECONDS = 150.0  # a case takes some 20 with its compilation; one that hangs is ended
PROCESSES = 18

# A prompt, a chunk, a single row, a request without tokens, rows that fill blocks evenly, a long prefix.
_BASE = Case(
    "prefill", "bf16", "", ragged=True, heads=2, group=4, dim=128, page=64, lens=(700, 300, 9, 0, 256, 1500),
    q_lens=(700, 41, 1, 0, 256, 130),
)  # fmt: skip
_E4M3 = {"dtype": "float8_e4m3fn", "out_dtype": "bfloat16"}
_FAST = {
    "plain": {},
    "pages of 16, heads apart": {"page": 16, "layout": "HND", "sinks": True},
    "window": {"window": 100},
    "narrow window": {"window": 3, "page": 16},
    "soft cap, scale per head": {"softcap": 20.0, "scale": "head"},
    "D 64": {"dim": 64, "group": 6},
    "D 96": {"dim": 96, "group": 5},
    "more rows than tokens": {"lens": (3, 90), "q_lens": (90, 9), "page": 16},
    "many requests": {"lens": (40,) * 70, "q_lens": (33,) * 70, "page": 16},
    "large": {"heads": 4, "lens": (4096, 2500), "q_lens": (1024, 700), "page": 16},
}
# Of a query in 16 bits, which becomes int8.
_QUANTIZED = {
    "plain": {},
    "pages of 16, heads apart": {"page": 16, "layout": "HND", "sinks": True},
    "tail": {"scales": "tail", "page": 48},
    "window": {"window": 100},
    "narrow window": {"window": 3, "page": 16},
    "soft cap": {"softcap": 20.0},
    "D 64": {"dim": 64, "group": 6},
    "D 96": {"dim": 96, "group": 5},
    "D 256": {"dim": 256},
    "D 192, Dv 128": {"dim": 192, "dim_v": 128},
    "fp16": {"dtype": "float16", "spread": True},
    "more rows than tokens": {"lens": (3, 90), "q_lens": (90, 9), "page": 16},
    "many requests": {"lens": (40,) * 70, "q_lens": (33,) * 70, "page": 16},
    "large": {"heads": 4, "lens": (4096, 2500), "q_lens": (1024, 700), "page": 16},
    "turned": {"rotation": "kv", "channels": "kv"},
    "turned, D 64": {"rotation": "k", "dim": 64, "dtype": "float16"},
    "int4 values": {"v_format": "int4_per_token_head"},
    "fp8 values": {"v_format": "fp8_e4m3"},
    "D 512, as it is": {"dim": 512, "heads": 1},
    "new rows, as it is": {"new_rows": True},
}
VARIANTS = {
    "plain": {},
    "pages of 16, heads apart": {"page": 16, "layout": "HND"},
    "pages of 48": {"page": 48},
    "pages of 256, packed": {"page": 256, "packed": True},
    "window": {"window": 100, "sinks": True},
    "narrow window": {"window": 3, "page": 16},
    "wide window": {"window": 700, "lse": False},
    "soft cap": {"softcap": 20.0, "sinks": True},
    "more rows than tokens": {"lens": (3, 90), "q_lens": (90, 9), "page": 16},
    "many requests": {"lens": (40,) * 70, "q_lens": (33,) * 70, "page": 16},
    "one head": {"heads": 1, "group": 1, "lens": (1000,), "q_lens": (1000,)},
    "group of 6": {"group": 6},
    "group of 5": {"group": 5, "index": "int64"},
    "group of 16": {"group": 16, "heads": 1, "index": "uint32"},
    "group of 128": {"group": 128, "heads": 1, "lens": (300, 20), "q_lens": (100, 20)},
    "D 64": {"dim": 64},
    "D 96": {"dim": 96},
    "D 512, Dv 256": {"dim": 512, "dim_v": 256, "heads": 1},
    "D 80": {"dim": 80, "window": 50},
    "D 112": {"dim": 112, "heads": 4, "group": 6, "sinks": True},
    "D 112, pages of 16": {"dim": 112, "page": 16, "packed": True},
    "D 112, e4m3 query": {**_E4M3, "dim": 112},
    "D 112, e4m3 out": {"dim": 112, "out_dtype": "float8_e4m3fn"},
    "D 112, fp8 values": {"dim": 112, "v_format": "fp8_per_token_head"},
    "D 112, Dv 128": {"dim": 112, "dim_v": 128, "softcap": 20.0},
    "D 128, Dv 80": {"dim": 128, "dim_v": 80},
    "D 112, int4 values": {"dim": 112, "v_format": "int4_per_token_head"},
    "D 112, new rows": {"dim": 112, "new_rows": True, "window": 150},
    "D 80, many requests": {"dim": 80, "lens": (40,) * 70, "q_lens": (33,) * 70, "page": 16},
    "D 112, turned": {"dim": 112, "rotation": "kv", "channels": "kv"},
    "D 80, turned, new rows": {"dim": 80, "rotation": "kv", "channels": "kv", "new_rows": True},
    "D 240": {"dim": 240},
    "D 48": {"dim": 48, "heads": 8},
    "scale tensors": {"scale": "tensor"},
    "scale per head, e4m3 out": {"scale": "head", "out_dtype": "float8_e4m3fn"},
    "e4m3 query": {"dtype": "float8_e4m3fn", "out_dtype": "bfloat16", "scale": "float"},
    "e4m3 query, pages of 16, heads apart": {**_E4M3, "page": 16, "layout": "HND", "sinks": True},
    "e4m3 query, window": {**_E4M3, "window": 100},
    "e4m3 query, narrow window": {**_E4M3, "window": 3, "page": 16},
    "e4m3 query, soft cap, scale per head": {**_E4M3, "softcap": 20.0, "scale": "head"},
    "e4m3 query, scale tensors": {**_E4M3, "scale": "tensor", "spread": True},
    "e4m3 query, D 64": {**_E4M3, "dim": 64, "group": 6},
    "e4m3 query, D 96": {**_E4M3, "dim": 96, "group": 5},
    "e4m3 query, more rows than tokens": {**_E4M3, "lens": (3, 90), "q_lens": (90, 9), "page": 16},
    "e4m3 query, many requests": {**_E4M3, "lens": (40,) * 70, "q_lens": (33,) * 70, "page": 16},
    "e4m3 query, large": {**_E4M3, "heads": 4, "lens": (4096, 2500), "q_lens": (1024, 700), "page": 16},
    **{f"fast, {name}": {**_E4M3, "precision": "fast", **more} for name, more in _FAST.items()},
    **{f"quantized, {name}": {"precision": "fast", **more} for name, more in _QUANTIZED.items()},
    "e4m3 query, values with a scale each": {**_E4M3, "v_format": "int8_per_token_head", "page": 16},
    "e5m2 query": {"dtype": "float8_e5m2", "out_dtype": "float16", "dim": 64},
    "fp16 query": {"dtype": "float16"},
    "D 256": {"dim": 256},
    "spread": {"spread": True},
    "new rows": {"new_rows": True},
    "new rows, pages of 16, heads apart": {"new_rows": True, "page": 16, "layout": "HND", "sinks": True},
    "new rows, window": {"new_rows": True, "window": 150},
    "new rows, narrow window": {"new_rows": True, "window": 5, "page": 16},
    "new rows, more than tokens": {"new_rows": True, "lens": (3, 90, 400), "q_lens": (90, 9, 500), "page": 16},
    "new rows, soft cap, scale per head": {"new_rows": True, "softcap": 20.0, "scale": "head"},
    "new rows, e4m3 query": {"new_rows": True, "dtype": "float8_e4m3fn", "out_dtype": "bfloat16"},
    "new rows, fp16": {"new_rows": True, "dtype": "float16", "scale": "tensor"},
    "new rows, D 64": {"new_rows": True, "dim": 64, "group": 6},
    "new rows, prompts": {"new_rows": True, "lens": (900, 20), "q_lens": (900, 20)},
    "new rows, two tiles and two of pages": {"new_rows": True, "lens": (400,) * 40, "q_lens": (200,) * 40},
    "large": {"heads": 4, "lens": (4096, 2500), "q_lens": (1024, 700), "page": 16},
    "turned values": {"rotation": "v", "channels": "v", "sinks": True},
    "turned values, new rows": {"rotation": "v", "channels": "v", "new_rows": True, "window": 150},
    "turned": {"rotation": "kv", "channels": "kv"},
    "turned, keys rotated, values scaled": {"rotation": "k", "channels": "v", "softcap": 20.0, "scale": "head"},
    "turned, D 96": {"rotation": "kv", "channels": "k", "dim": 96, "group": 5},
    "turned, D 64, pages of 16": {"rotation": "kv", "dim": 64, "group": 6, "page": 16, "layout": "HND"},
    "turned, fp16 query": {"rotation": "kv", "dtype": "float16", "spread": True},
    "turned, e4m3 query": {**_E4M3, "rotation": "kv", "channels": "kv"},
    "turned, e4m3 query, fast": {**_E4M3, "channels": "k", "rotation": "v", "precision": "fast"},
    "turned, new rows": {"rotation": "kv", "channels": "kv", "new_rows": True, "window": 150},
    "turned, new rows, prompts": {"rotation": "kv", "new_rows": True, "lens": (900, 20), "q_lens": (900, 20)},
    "turned, new rows, more than tokens": {
        "rotation": "v", "channels": "kv", "new_rows": True, "lens": (3, 90, 400), "q_lens": (90, 9, 500), "page": 16,
    },
    "turned, new rows, e4m3 query, D 64": {**_E4M3, "rotation": "k", "channels": "v", "new_rows": True, "dim": 64},
    "turned, large": {"rotation": "kv", "heads": 4, "lens": (4096, 2500), "q_lens": (1024, 700), "page": 16},
}  # fmt: skip


_FEW = ("plain", "window", "group of 6", "D 64", "e5m2 query", "fp16 query", "D 256", "new rows", "new rows, window")
_OF_TOKENS = (
    *("plain", "pages of 16, heads apart", "pages of 48", "narrow window", "wide window", "soft cap", "D 64", "D 96"),
    *("more rows than tokens", "many requests", "group of 6", "e4m3 query", "fp16 query", "spread", "large"),
    *(name for name in VARIANTS if name.startswith("new rows")),
)
_OF_BLOCKS = (
    *("plain", "pages of 16, heads apart", "window", "soft cap", "D 64", "D 96", "more rows than tokens", "spread"),
    *("scale tensors", "e4m3 query", "new rows", "new rows, window", "new rows, D 64"),
)
_PADDED = tuple(name for name in VARIANTS if name.startswith(("D 80", "D 112", "D 128, Dv 80", "D 240", "D 48")))
_PADDED_INT4 = tuple(name for name in _PADDED if "int4 values" not in name)
_SEEN_ONCE = (
    *("plain", "pages of 16, heads apart", "window", "many requests", "group of 128", "D 96", "soft cap", "large"),
    *(name for name in VARIANTS if name.startswith("new rows")),
)
_DIRECT = tuple(name for name in VARIANTS if name.startswith(("e4m3 query", "fast")))  # such queries meet codes of keys
_TURNED = tuple(name for name in VARIANTS if name.startswith("turned"))
_INT8 = tuple(name for name in VARIANTS if name.startswith("quantized"))
FORMATS = {
    "bf16": (*_SEEN_ONCE, "D 512, Dv 256", "turned values", "turned values, new rows"),
    "fp8_e4m3": (*_SEEN_ONCE, "D 512, Dv 256", "D 80", "D 112, int4 values", *_DIRECT, *_TURNED),
    "fp16": (*_FEW, "turned", "turned, D 96", "turned, new rows"),
    "fp8_e5m2": ("plain", "D 64"),
    "int8_per_token_head": (*_OF_TOKENS, "D 112, int4 values", "D 80, turned, new rows", *_TURNED, *_INT8),
    "fp8_per_token_head": ("plain", "wide window", "spread", "new rows", *_DIRECT),
    "int4_per_token_head": (*_OF_TOKENS, *_PADDED_INT4, *_TURNED),
    "nvfp4": (*_OF_BLOCKS, *_PADDED, "turned", "turned, D 96", "turned, new rows"),
}


def decodes() -> list[Case]:
    """Of many rows: ragged ones, and as many of every request, which no tensor says."""
    ragged = replace(_BASE, op="decode")
    even = replace(ragged, ragged=False, lens=(700, 300, 40, 1500), q_lens=(60,) * 4)
    return [
        replace(case, format=fmt, name=f"decode, {name}")
        for fmt in ("bf16", "fp8_e4m3")
        for name, case in (
            ("ragged", ragged),
            ("even", even),
            ("one request", replace(even, lens=(3000,), q_lens=(1000,))),
            ("ragged, e4m3 query", replace(ragged, **_E4M3)),
        )
    ]


def cases() -> list[Case]:
    found = []
    for fmt, names in FORMATS.items():
        for name in names:
            if fmt == "bf16" and VARIANTS[name].get("dtype") == "float16":
                continue  # taken by other kernels
            changes = dict(VARIANTS[name])
            if not fmt.startswith(("fp8_e", "nvfp4")):
                changes.pop("scale", None)
            found.append(replace(_BASE, format=fmt, name=name, **changes))
    return found + decodes()


@pytest.fixture(scope="module")
def results() -> dict[str, verify.Result]:
    with Workers(PROCESSES, "cuda", "gluon", seconds=SECONDS) as pool:
        return {r.case.id: r for r in pool.results(cases())}


@pytest.mark.skipif(not ON_HOPPER, reason="needs sm_90")
@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case.format}-{case.name}")
def test_what_the_reference_says(case, results):
    assert results[case.id].status == verify.PASSED, results[case.id].message


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case.format}-{case.name}")
def test_these_cases_get_the_kernel_for_many_rows(case):
    assert isinstance(plan(case.op, make(case), "gluon", arch=90).config.shape, PrefillConfig)
