"""Decode with 1 to 320 query rows of a KV head, by whichever kernel takes them, against the dense reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tersekv.backends.gluon.sm90.decode import config as decode_tune
from tersekv.dispatch import plan
from tersekv.testing.cases import Case
from tersekv.testing.verify import PASSED, run

FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head", "nvfp4")
FORMATS += ("int4_per_token_head",)
LENS = (70, 9, 0, 400, 129)


def passes(fmt: str, drafts: int, group: int, backend: str | None = None, **options: Any) -> None:
    case = Case(
        "decode", fmt, "rows", lens=LENS, q_lens=(drafts,) * len(LENS), heads=4, group=group, dim=128, page=64,
        mask=True, spread=True,
    )  # fmt: skip
    result = run(replace(case, **options), "cuda", backend)
    assert result.status == PASSED, result.message


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("drafts", "group"), [(1, 1), (2, 8), (5, 4), (7, 5), (8, 16), (40, 8)])
def test_any_number_of_query_rows(fmt, drafts, group):
    passes(fmt, drafts, group)


@pytest.mark.parametrize("fmt", ["fp8_per_token_head", "nvfp4", "int4_per_token_head"])
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
    monkeypatch.setattr(decode_tune, "LARGE_CACHE_KEYS", 0)
    plan._plans.clear()
    plan._recent.clear()
    yield
    plan._plans.clear()
    plan._recent.clear()


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
@pytest.mark.parametrize("fmt", ["nvfp4", "int4_per_token_head"])
def test_a_warp_unpacks_four_bits_once_for_32_rows(room_for_many_keys, fmt, group, options):
    passes(fmt, 8, group, **options)


HOPPER = "gluon" if torch.cuda.get_device_capability() == (9, 0) else None


@pytest.mark.parametrize(
    "options",
    [{}, {"layout": "HND"}, {"heads": 2}, {"heads": 1}, {"heads": 3, "layout": "HND"}, {"page": 16}, {"dim": 64}],
    ids=str,
)
@pytest.mark.parametrize("fmt", ["fp8_per_token_head", "int8_per_token_head", "nvfp4", "int4_per_token_head"])
def test_scales_in_the_tails_of_pages(fmt, options):
    """Few rows and many."""
    passes(fmt, 1, 4, HOPPER, scales="tail", **options)
    passes(fmt, 4, 4, HOPPER, scales="tail", **options)
    passes(fmt, 8, 8, HOPPER, scales="tail", **options)


TURNS = {
    "rotated": {"rotation": "kv"},
    "channel scales": {"channels": "kv"},
    "both": {"rotation": "kv", "channels": "kv"},
    "keys rotated, values scaled": {"rotation": "k", "channels": "v"},
    "values alone": {"rotation": "v", "channels": "v"},
}


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ((1, 4), {"heads": 8}),
        ((1, 16), {"heads": 1, "page": 16, "scales": "tail"}),
        ((3, 5), {"dim": 64, "layout": "HND", "dtype": "float16"}),
        ((8, 4), {"window": 40, "mask": False, "sinks": True}),
        ((8, 8), {"heads": 3, "out_dtype": "float8_e4m3fn"}),
        ((8, 16), {"ragged": True, "q_lens": (8, 1, 0, 5, 3)}),
        ((1, 4), {"dim": 256}),
        ((8, 8), {"dim": 256, "softcap": 20.0}),
    ],
    ids=str,
)
@pytest.mark.parametrize("fmt", ["fp16", "fp8_e4m3", "int8_per_token_head", "nvfp4", "int4_per_token_head"])
def test_rotated_rows_and_channel_scales(fmt, rows, options, turn):
    """By Hopper's kernels wherever they take as many rows of the format."""
    wide = fmt == "int4_per_token_head" and options.get("dim") == 256
    many = rows[0] * rows[1] > (16 if fmt == "fp16" else 32 if wide else 128)
    passes(fmt, *rows, None if many else HOPPER, **options, **TURNS[turn])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dim": 64, "page": 16, "layout": "HND"},
        {"window": 40, "mask": False, "sinks": True, "heads": 3},
        {"ragged": True, "q_lens": (8, 1, 0, 5, 3), "dtype": "float16", "softcap": 20.0},
        {"lens": (3000, 1, 700), "q_lens": (8, 1, 8), "ragged": True, "out_dtype": "float8_e4m3fn"},
    ],
    ids=str,
)
@pytest.mark.parametrize("group", [3, 8, 16])
def test_many_rows_share_what_4_bit_integers_become(group, options):
    """24 to 128 rows and more: zero points are taken off where codes are converted."""
    passes("int4_per_token_head", 8, group, HOPPER, **options)


@pytest.mark.parametrize("turn", [{}, TURNS["both"]], ids=["plain", "turned"])
@pytest.mark.parametrize(("fmt", "v"), [("fp8_e4m3", "int4_per_token_head"), ("int8_per_token_head", "nvfp4")])
def test_prefills_of_few_rows_over_pairs(fmt, v, turn):
    case = Case("prefill", fmt, "few", v_format=v, lens=(70, 9, 0, 400), q_lens=(8, 1, 0, 5), ragged=True, **turn)
    result = run(replace(case, heads=4, group=4, dim=128, page=64), "cuda", HOPPER)
    assert result.status == PASSED, result.message


def test_values_of_16_bits_may_lie_turned():
    passes("bf16", 1, 4, HOPPER, rotation="v", channels="v")
    passes("bf16", 1, 4, rotation="kv", channels="kv")


def test_four_bits_of_32_rows_that_lie_turned(room_for_many_keys):
    for fmt in ("nvfp4", "int4_per_token_head"):
        for turn in TURNS.values():
            passes(fmt, 8, 4, HOPPER, **turn)


@pytest.mark.parametrize(
    "options",
    [
        {"heads": 8},
        {"heads": 2, "layout": "HND", "scales": "tail"},
        {"page": 16, "window": 40, "mask": False, "sinks": True, "scales": "tail"},
        {"dim": 64, "scale": "tensor", "softcap": 20.0},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("fmt", "v"),
    [
        ("fp8_e4m3", "int4_per_token_head"),
        ("int8_per_token_head", "int4_per_token_head"),
        ("fp8_per_token_head", "nvfp4"),
        ("int4_per_token_head", "fp8_e5m2"),
        ("nvfp4", "int4_per_token_head"),
        ("fp8_e4m3", "int8_per_token_head"),
    ],
)
def test_keys_and_values_of_different_formats(fmt, v, options):
    for drafts, group in ((1, 4), (1, 16), (8, 4)):
        passes(fmt, drafts, group, HOPPER, v_format=v, **options)
    passes(fmt, 1, 8, HOPPER, v_format=v, rotation="kv", channels="kv", **options)
