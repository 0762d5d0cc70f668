"""Decode with 1 to 320 query rows of a KV head, by whichever kernel takes them, against the dense reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tersekv import plan
from tersekv.backends.gluon.sm90.decode import tune as decode_tune
from tersekv.testing.cases import Case
from tersekv.testing.verify import PASSED, run

FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head", "nvfp4")
LENS = (70, 9, 0, 400, 129)


def passes(fmt: str, drafts: int, group: int, **options: Any) -> None:
    case = Case(
        "decode", fmt, "rows", lens=LENS, q_lens=(drafts,) * len(LENS), heads=4, group=group, dim=128, page=64,
        mask=True, spread=True,
    )  # fmt: skip
    result = run(replace(case, **options), "cuda")
    assert result.status == PASSED, result.message


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("drafts", "group"), [(1, 1), (2, 8), (5, 4), (7, 5), (8, 16), (40, 8)])
def test_any_number_of_query_rows(fmt, drafts, group):
    passes(fmt, drafts, group)


@pytest.mark.parametrize("fmt", ["fp8_per_token_head", "nvfp4"])
@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize(
    "options",
    [
        {"dim": 64, "layout": "HND"},
        {"dim": 256},
        {"page": 16, "window": 40, "mask": False, "sinks": True},
        {"ragged": True, "q_lens": (8, 1, 0, 5, 3), "dtype": "float16"},
        {"heads": 3, "softcap": 20.0, "scale": "tensor"},
        {"out_dtype": "float8_e4m3fn", "lse": False, "strided": True},
    ],
    ids=str,
)
def test_many_rows_with(fmt, group, options):
    passes(fmt, 8, group, **options)


@pytest.fixture
def room_for_many_keys(monkeypatch):
    """As if page tables had it: plans are made anew."""
    monkeypatch.setattr(decode_tune, "MANY_KEYS", 0)
    plan._plans.clear()
    plan._latest.clear()
    yield
    plan._plans.clear()
    plan._latest.clear()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dim": 64, "layout": "HND"},
        {"page": 16, "window": 40, "mask": False, "sinks": True},
        {"ragged": True, "q_lens": (8, 1, 0, 5, 3), "dtype": "float16"},
        {"heads": 8, "softcap": 20.0, "scale": "tensor"},
        {"out_dtype": "float8_e4m3fn", "lse": False, "strided": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("group", [3, 4])
def test_a_warp_unpacks_four_bits_once_for_32_rows(room_for_many_keys, group, options):
    passes("nvfp4", 8, group, **options)
