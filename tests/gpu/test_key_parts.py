"""Hopper's decode of short requests: the warps of a CTA divide the keys of one head."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tersekv.backends.gluon.sm90.decode import config as decode_tune
from tersekv.dispatch import launch_cache, plan
from tersekv.testing.cases import Case
from tersekv.testing.make import make
from tersekv.testing.verify import PASSED, run

pytestmark = pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="kernels for Hopper")
FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head", "nvfp4")
FORMATS += ("int4_per_token_head",)
PAIRS = ("fp8_e4m3/int4_per_token_head", "int8_per_token_head/nvfp4", "int4_per_token_head/fp8_per_token_head")
LENS = (70, 1, 0, 400, 129, 64, 17, 300, 63, 65, 16, 128, 5, 255, 512, 48)  # of 8 heads each: about a CTA an SM


def forget_plans() -> None:
    for cache in (plan._plans, plan._recent, launch_cache._recent, launch_cache._launches):
        cache.clear()


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """As if it paid everywhere: plans are made anew."""
    monkeypatch.setattr(decode_tune, "uses_key_parts", lambda f: True)
    forget_plans()
    yield
    forget_plans()


def passes(fmt: str, **options: Any) -> None:
    k, v = (fmt.split("/") * 2)[:2]
    fields = {"lens": LENS, "heads": 8, "page": 64, "dim": 128, "spread": True, "v_format": v if v != k else ""}
    case = Case("decode", k, "key parts", **(fields | options))
    shape = plan.plan("decode", make(case, "cuda"), "gluon").config.shape
    assert (shape.KEY_PARTS, shape.UNSPLIT) == (4, True)
    result = run(case, "cuda", "gluon")
    assert result.status == PASSED, result.message


@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("fmt", [*FORMATS, *PAIRS])
def test_short_requests(fmt, dim, page):
    passes(fmt, dim=dim, page=page)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    "options",
    [
        {"layout": "HND"},
        {"layout": "HND", "page": 16},
        {"layout": "HND", "page": 32, "dim": 256},
        {"scales": "tail"},
        {"scales": "tail", "page": 16, "layout": "HND"},
        {"page": 48},
        {"page": 32, "dim": 64},
        {"heads": 4, "lens": 2 * LENS, "page": 128},
        {"heads": 2, "lens": 4 * LENS},
        {"heads": 2, "lens": 4 * LENS, "page": 16, "dim": 64},
        {"heads": 1, "lens": 8 * LENS, "page": 16},
        {"heads": 1, "lens": 8 * LENS, "layout": "HND"},
    ],
    ids=str,
)
def test_heads_and_scales_lie_in_any_way(fmt, options):
    passes(fmt, **options)


@pytest.mark.parametrize("fmt", [*FORMATS, "fp8_e4m3/int4_per_token_head"])
@pytest.mark.parametrize(
    "options",
    [
        {"group": 1},
        {"group": 8},
        {"group": 16},
        {"group": 16, "dim": 256},
        {"group": 16, "dim": 64, "page": 16},
        {"dim": 128, "dim_v": 64},
        {"dim": 64, "dim_v": 128, "page": 16},
        {"dim": 256, "dim_v": 128},
        {"window": 30},
        {"window": 100, "sinks": True, "softcap": 20.0, "page": 16},
        {"sinks": True, "lse": False},
        {"sinks": True, "sink": "inf"},
        {"q_lens": (3,) * 16, "mask": True},
        {"q_lens": (4,) * 16, "mask": True, "page": 16, "group": 4},
        {"q_lens": (2, 1, 0, 4, 1, 3, 2, 1, 4, 2, 1, 3, 2, 1, 4, 2), "ragged": True, "group": 2, "window": 33},
        {"q_lens": (2, 1, 0, 4, 1, 3, 2, 1, 4, 2, 1, 3, 2, 1, 4, 2), "ragged": True, "group": 4},
        {"dtype": "float16", "index": "int64"},
        {"strided": True, "scale": "float"},
        {"scale": "tensor"},
        {"scale": "head"},
        {"dtype": "float8_e4m3fn", "out_dtype": "float8_e4m3fn"},
    ],
    ids=str,
)
def test_options(fmt, options):
    if options.get("scale") == "head" and fmt not in ("fp8_e4m3", "fp8_e5m2"):
        pytest.skip("only formats with a scale of the tensor have one a head")
    if fmt == "bf16" and options.get("dtype") == "float16":
        pytest.skip("Triton's kernel")
    lens = tuple(max(n, m) for n, m in zip(LENS, options.get("q_lens", (0,) * 16), strict=True))
    passes(fmt, **({"lens": lens} | options))


@pytest.mark.parametrize("fmt", [*FORMATS, "fp8_e4m3/int4_per_token_head"])
def test_equal_calls_have_equal_bits(fmt):
    k, v = (fmt.split("/") * 2)[:2]
    again = make(
        Case("decode", k, "key parts", page=64, heads=8, dim=128, lens=LENS, v_format=v if v != k else ""), "cuda"
    )
    found = plan.plan("decode", again, "gluon")
    assert found.config.shape.KEY_PARTS == 4
    outs = []
    for _ in range(2):
        found.run(again, found.config)
        outs.append(again.out.clone())
    assert torch.equal(*outs)
