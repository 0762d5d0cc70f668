"""Portable decode over lists of blocks that become page tables: against fp64, the kernel that looks up every key, dense
decode, and in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from listed_replays import judge_replays, layer_and_call

import tersekv
from tersekv.backends.triton.decode import entry
from tersekv.dispatch import launch_cache, plan
from tersekv.testing.cases import Case
from tersekv.testing.compare import relative
from tersekv.testing.make import make
from tersekv.testing.verify import PASSED, run

FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head", "nvfp4")
FORMATS += ("int4_per_token_head",)
PAIRS = ("fp8_e4m3/int4_per_token_head", "int8_per_token_head/nvfp4", "bf16/fp8_e4m3")
LENS = (700, 1, 0, 400, 129, 64, 1700, 300)
MORE = (*LENS, 65, 16, 128, 5, 255, 512, 48, 900) * 4


def check(fmt: str, **options: Any) -> None:
    k, v = (fmt.split("/") * 2)[:2]
    fields = {"lens": LENS, "heads": 8, "page": 64, "dim": 128, "spread": True, "v_format": v if v != k else ""}
    fields |= {"listed": 9, "block_size": 128, "each_head": True}
    case = Case("decode", k, "listed pages", **(fields | options))
    lists = plan.plan("decode", make(case, "cuda"), "triton").config.constants.LIST
    assert lists.AS_PAGES
    assert case.each_head == lists.PER_HEAD
    result = run(case, "cuda", "triton")
    assert result.status == PASSED, result.message


@pytest.mark.parametrize("each_head", [True, False])
@pytest.mark.parametrize("lens", [LENS, MORE], ids=len)
@pytest.mark.parametrize("fmt", [*FORMATS, *PAIRS])
def test_formats(fmt, lens, each_head):
    check(fmt, lens=lens, list_lens=True, each_head=each_head)


@pytest.mark.parametrize("each_head", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"page": 16, "layout": "HND"},
        {"page": 128},
        {"page": 3, "block_size": 96, "lists": "again", "listed": 40},
        {"page": 1, "block_size": 1, "listed": 200, "lists": "again"},
        {"page": 256, "block_size": 64},
        {"page": 48, "block_size": 16, "lists": "again", "listed": 70, "layout": "HND"},
        {"dim": 256},
        {"dim": 80, "dim_v": 64},
        {"scales": "tail"},
        {"group": 16, "heads": 4},
        {"lists": "again", "listed": 70, "page": 16, "block_size": 16},
        {"lists": "again", "page": 128, "softcap": 20.0, "group": 5},
        {"lens": (9000, 3), "listed": 70},
        {"sinks": True, "softcap": 20.0, "index": "int64", "strided": True},
        {"sinks": True, "sink": "inf", "lse": False, "index": "uint32"},
        {"dtype": "float8_e4m3fn", "out_dtype": "float8_e4m3fn"},
        {"rotation": "kv", "channels": "kv"},
        {"q_lens": (20, 1, 0, 17, 3, 2, 9, 1), "ragged": True},
        {"q_lens": (3,) * 8, "lists": "again"},
    ],
    ids=str,
)
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3", "int8_per_token_head", "nvfp4", "int4_per_token_head"])
def test_options(fmt, options, each_head):
    check(fmt, each_head=each_head, **options)


def forget_plans() -> None:
    plan._plans.clear()
    plan._recent.clear()
    launch_cache._recent.clear()
    launch_cache._launches.clear()


@pytest.mark.parametrize("each_head", [False, True])
@pytest.mark.parametrize("requests", [1, 3, 100])
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3", "int8_per_token_head", "nvfp4", "int4_per_token_head"])
def test_as_the_kernel_that_looks_up_keys_and_dense_decode(fmt, requests, each_head, monkeypatch):
    torch.manual_seed(0)
    layer, q, table, lens, blocks = layer_and_call(fmt, requests, 16, each_head, 128)
    options = {"block_size": 128, "return_lse": True, "backend": "triton"}
    lists = blocks, torch.where(blocks % 3 == 0, -1, blocks)
    found = [tersekv.decode(q, layer, table, lens, indices=x, **options) for x in lists]
    forget_plans()
    monkeypatch.setattr(entry, "reads_listed_pages", lambda f: False)
    wanted = [tersekv.decode(q, layer, table, lens, indices=x, **options) for x in lists]
    forget_plans()
    dense = tersekv.decode(q, layer, table, lens, return_lse=True, backend="triton")
    for got, want in zip((*found, found[0]), (*wanted, dense), strict=True):
        for a, b in zip(got, want, strict=True):
            there = torch.isfinite(b)
            assert torch.equal(a[~there], b[~there])
            assert relative(a[there].double(), b[there].double()) < 3e-3


@pytest.mark.parametrize("each_head", [False, True])
@pytest.mark.parametrize("requests", [1, 2, 60])
@pytest.mark.parametrize("fmt", ["bf16", "int8_per_token_head", "nvfp4"])
def test_replays_see_new_lists_tables_and_lengths(fmt, requests, each_head):
    judge_replays(fmt, requests, each_head, "triton", pages=16, block=128)
