"""Hopper's decode and prefill over pages of no multiple of 16: tensor copies are of 8 keys, two of them to a box."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tersekv.testing.cases import Case
from tersekv.testing.verify import PASSED, run

pytestmark = pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="kernels for Hopper")
FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_per_token_head", "int8_per_token_head", "nvfp4", "int4_per_token_head")
LENS = (70, 9, 0, 400, 129)


def passes(fmt: str, op: str = "decode", **options: Any) -> None:
    fields = {"lens": LENS, "heads": 4, "dim": 128, "spread": True, **options}
    result = run(Case(op, fmt, "small pages", **fields), "cuda", "gluon")
    assert result.status == PASSED, result.message


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [8, 24])
@pytest.mark.parametrize("fmt", FORMATS)
def test_one_row(fmt, page, layout):
    passes(fmt, page=page, layout=layout)


@pytest.mark.parametrize(
    "options",
    [
        {"dim": 64},
        {"dim": 256},
        {"heads": 8, "page": 40, "lens": (9000, 1, 17)},
        {"lens": (3000,) * 24},  # every place of the rings is used, many times
        {"window": 40, "sinks": True},
        {"q_lens": (3,) * 5, "mask": True, "lens": (70, 9, 3, 400, 129)},
        {"q_lens": (8,) * 5, "lens": (70, 9, 8, 400, 129)},
        {"q_lens": (8,) * 5, "group": 8, "lens": (70, 9, 8, 400, 129)},
        {"packed": True, "strided": True, "softcap": 20.0, "scale": "tensor"},
    ],
    ids=str,
)
@pytest.mark.parametrize("fmt", ["fp8_e4m3", "int8_per_token_head", "nvfp4"])
def test_with(fmt, options):
    passes(fmt, **{"page": 8, **options})


@pytest.mark.parametrize("scales", ["apart", "tail"])
@pytest.mark.parametrize("fmt", ["fp8_per_token_head", "nvfp4", "int4_per_token_head"])
def test_stored_scales_in_tails_and_of_wide_heads_with_many_rows(fmt, scales):
    passes(fmt, page=24, scales=scales, layout="HND")
    if fmt != "int4_per_token_head":
        passes(fmt, page=8, scales=scales, dim=256, group=8, q_lens=(8,) * 5, lens=(70, 9, 8, 400, 129))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3"])
def test_few_heads(fmt, heads):
    passes(fmt, heads=heads, page=8, lens=(6000, 0, 1, 900, 3333))


@pytest.mark.parametrize("page", [8, 40])
@pytest.mark.parametrize("fmt", FORMATS)
def test_prefill(fmt, page):
    dtype = "float16" if fmt == "fp16" else "bfloat16"
    passes(fmt, "prefill", page=page, dtype=dtype, lens=(300, 77, 130), q_lens=(300, 65, 100))
