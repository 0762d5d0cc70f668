"""Hopper's decode over lists of blocks, which become page tables: against fp64, the portable kernel, and in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from listed_replays import judge_replays, layer_and_call

import tersekv
from tersekv.dispatch import plan
from tersekv.testing.cases import Case
from tersekv.testing.compare import relative
from tersekv.testing.make import make
from tersekv.testing.verify import PASSED, run

pytestmark = pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="kernels for Hopper")
FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head", "nvfp4")
FORMATS += ("int4_per_token_head",)
PAIRS = ("fp8_e4m3/int4_per_token_head", "int8_per_token_head/nvfp4", "int4_per_token_head/fp8_per_token_head")
LENS = (700, 1, 0, 400, 129, 64, 1700, 300)  # of 8 heads each: a CTA takes ranges of them
MANY = (*LENS, 65, 16, 128, 5, 255, 512, 48, 900) * 2  # about two CTAs an SM: each has one
MORE = 2 * MANY  # more than run at once


def passes(fmt: str, **options: Any) -> Any:
    """Returns the plan's configuration."""
    k, v = (fmt.split("/") * 2)[:2]
    fields = {"lens": LENS, "heads": 8, "page": 64, "dim": 128, "spread": True, "v_format": v if v != k else ""}
    fields |= {"listed": 9, "block_size": 128, "each_head": True}
    case = Case("decode", k, "listed pages", **(fields | options))
    config = plan.plan("decode", make(case, "cuda"), "gluon").config
    result = run(case, "cuda", "gluon")
    assert result.status == PASSED, result.message
    return config


@pytest.mark.parametrize("lens", [LENS, MANY, MORE], ids=("ranges", "one a CTA", "ranges, combined by the last"))
@pytest.mark.parametrize("fmt", [*FORMATS, *PAIRS])
def test_a_list_for_each_head(fmt, lens):
    config = passes(fmt, lens=lens, list_lens=True)
    shape = config.shape
    assert shape.KEY_PARTS == 4
    assert config.constants.LIST.PER_HEAD
    assert (lens is MANY) == shape.UNSPLIT
    assert (shape.FUSED_COMBINE_ROWS > 0) == (lens is not LENS)


@pytest.mark.parametrize("lens", [LENS, MORE], ids=("ranges", "ranges, combined by the last"))
@pytest.mark.parametrize(
    "options",
    [
        {"page": 16},
        {"page": 16, "layout": "HND"},
        {"page": 128, "layout": "HND"},
        {"page": 32, "dim": 64},
        {"page": 48, "block_size": 96},
        {"dim": 256},
        {"scales": "tail"},
        {"heads": 4, "group": 16},
        {"heads": 2, "group": 8, "block_size": 64},
        {"dim": 128, "dim_v": 64},
        {"lists": "again", "listed": 20},
        {"lists": "again", "listed": 70, "page": 16, "block_size": 16},
        {"lists": "again", "page": 128, "softcap": 20.0, "group": 5},
        {"sinks": True, "softcap": 20.0, "index": "int64", "strided": True},
        {"sinks": True, "sink": "inf", "lse": False, "index": "uint32"},
        {"dtype": "float8_e4m3fn", "out_dtype": "float8_e4m3fn"},
        {"scale": "tensor"},
    ],
    ids=str,
)
@pytest.mark.parametrize("fmt", FORMATS)
def test_options_of_a_list_for_each_head(fmt, options, lens):
    assert passes(fmt, lens=lens, **options).constants.LIST.PER_HEAD


@pytest.mark.parametrize("lens", [LENS, MORE], ids=len)
@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2"])
def test_scales_of_heads(fmt, lens):
    passes(fmt, lens=lens, scale="head")


ONE_LIST: list[dict[str, Any]] = [
    {},
    {"page": 16, "lists": "again", "listed": 20},
    {"page": 128, "lists": "again", "group": 16},
    {"rotation": "kv", "channels": "kv"},
    {"group": 32, "heads": 4, "lists": "again"},
    {"dim": 256, "sinks": True},
    {"lens": MORE, "lists": "again"},
    {"lens": MANY, "listed": 2, "lists": "again"},
    {"heads": 1, "group": 8, "lists": "again"},
]


def is_portable(fmt: str, options: dict[str, Any]) -> bool:
    """Whether Hopper's kernels refuse it: 32 query heads over 16 bits, rotated rows of bf16."""
    return (fmt in ("bf16", "fp16") and options.get("group") == 32) or (fmt == "bf16" and "rotation" in options)


@pytest.mark.parametrize(
    ("fmt", "options"),
    [(x, y) for x in (*FORMATS, "fp8_e4m3/int4_per_token_head") for y in ONE_LIST if not is_portable(x, y)],
    ids=str,
)
def test_one_list_for_all_heads(fmt, options):
    assert not passes(fmt, **({"each_head": False} | options)).constants.LIST.PER_HEAD


@pytest.mark.parametrize("each_head", [False, True])
def test_drafts_of_ragged_requests(each_head):
    lens, q_lens = (700, 40, 0, 400, 129), (20, 1, 0, 17, 3)
    for options in ({}, {"lists": "again", "page": 16}, {"lists": "shared", "lens": (300,), "q_lens": (40,)}):
        passes("fp8_e4m3", **({"lens": lens, "q_lens": q_lens, "ragged": True, "each_head": each_head} | options))
    passes("int8_per_token_head", lens=lens, q_lens=(3,) * 5, each_head=each_head)


@pytest.mark.parametrize("each_head", [False, True])
@pytest.mark.parametrize("requests", [3, 32, 100])
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3", "int8_per_token_head", "nvfp4", "int4_per_token_head"])
def test_as_the_portable_kernel_and_dense_decode(fmt, requests, each_head):
    torch.manual_seed(0)
    layer, q, table, lens, blocks = layer_and_call(fmt, requests, 16, each_head, 128)
    options = {"block_size": 128, "return_lse": True}
    want = tersekv.decode(q, layer, table, lens, return_lse=True)
    for x in (blocks, blocks[..., :5].contiguous()):
        got = tersekv.decode(q, layer, table, lens, indices=x, backend="gluon", **options)
        portable = tersekv.decode(q, layer, table, lens, indices=x, backend="triton", **options)
        for a, b in zip(got, want if x is blocks else portable, strict=True):
            there = torch.isfinite(b)
            assert torch.equal(a[~there], b[~there])
            assert relative(a[there].double(), b[there].double()) < 3e-3


@pytest.mark.parametrize("each_head", [False, True])
@pytest.mark.parametrize("requests", [2, 16, 60])
@pytest.mark.parametrize("fmt", ["bf16", "int8_per_token_head", "nvfp4"])
def test_replays_see_new_lists_tables_and_lengths(fmt, requests, each_head):
    judge_replays(fmt, requests, each_head, "gluon", pages=8, block=64)
