"""Decode with one or few KV heads over many pages: what a rank of a model has whose heads are dealt across GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from tersekv.testing.cases import Case
from tersekv.testing.verify import PASSED, run

FORMATS = ("bf16", "fp8_e4m3", "fp8_per_token_head", "int8_per_token_head", "nvfp4")
FORMATS += ("int4_per_token_head",)


def passes(fmt: str, **options: Any) -> None:
    result = run(Case("decode", fmt, "one head", spread=True, **options), "cuda")
    assert result.status == PASSED, result.message


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [16, 32, 64])
@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("fmt", FORMATS)
def test_few_heads_of_any_page_size(fmt, heads, page, layout):
    passes(fmt, heads=heads, page=page, layout=layout, lens=(6000, 0, 1, 900, 3333), dim=128)


@pytest.mark.parametrize("fmt", ["fp8_per_token_head", "int8_per_token_head", "nvfp4"])
@pytest.mark.parametrize(
    "options",
    [
        {"group": 1},
        {"group": 8, "packed": True},
        {"group": 32},
        {"dim_v": 128},
        {"dim": 128, "dim_v": 64, "layout": "HND"},
        {"dim": 256, "scales": "inline"},
        {"q_lens": (3, 3, 3, 3, 3), "mask": True},
        {"window": 100, "sinks": True, "softcap": 20.0},
    ],
    ids=str,
)
def test_one_head_in_pages_of_16_with(fmt, options):
    passes(fmt, **{"heads": 1, "page": 16, "lens": (6000, 3, 5, 900, 3333), "dim": 64, **options})


@pytest.mark.parametrize("fmt", ["fp8_per_token_head", "int8_per_token_head", "nvfp4", "int4_per_token_head"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dim", [64, 128])
def test_one_head_of_many_requests(fmt, layout, dim):
    """Every program has many tiles, and uses every place of its ring."""
    passes(fmt, heads=1, page=16, dim=dim, layout=layout, lens=(6000,) * 24)
