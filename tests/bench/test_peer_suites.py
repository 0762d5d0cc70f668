"""scripts/peer_suites.py over a small suite of our own that imports what vLLM's test imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from script import script

ROOT = Path(__file__).parents[2]
FILE = "tests/quantization/test_per_token_kv_cache.py"
SUITE = """
import os

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash_per_token_head_quant
from vllm.v1.kv_cache_interface import KVQuantMode


def store(dtype):
    rows, scales = torch.ones(1, 1, 8), torch.zeros(1, 4, 1)
    cache = torch.zeros(1, 4, 1, 8, dtype=dtype)
    slots = torch.zeros(1, dtype=torch.int64)
    triton_reshape_and_cache_flash_per_token_head_quant(rows, rows, cache, cache.clone(), scales, scales.clone(), slots)
    return cache


@pytest.mark.parametrize("n", range(3))
def test_right(n):
    assert store(torch.int8)[0, 0, 0, 0] == 127  # by triton_reshape_and_cache_flash_per_token_head_quant()


def test_refused():
    store(torch.uint8)  # by triton_reshape_and_cache_flash_per_token_head_quant()


def test_wrong():
    assert store(torch.int8)[0, 0, 0, 0] == 1  # by triton_reshape_and_cache_flash_per_token_head_quant()


def test_skipped():
    pytest.skip("not today")  # before triton_reshape_and_cache_flash_per_token_head_quant()


def test_idle():
    "A test that only names triton_reshape_and_cache_flash_per_token_head_quant()."


def test_spoils_the_gpu():
    raise RuntimeError("CUDA error: misaligned address")  # before triton_reshape_and_cache_flash_per_token_head_quant()


def test_killed():
    os._exit(9)  # before triton_reshape_and_cache_flash_per_token_head_quant()


@pytest.mark.xfail(reason="the peer's own trouble")
def test_wrong_for_the_peer_too():
    raise ValueError("no name of ours")  # before triton_reshape_and_cache_flash_per_token_head_quant()


def test_of_something_else():
    assert KVQuantMode.INT8_PER_TOKEN_HEAD == 2
"""
INTERFACE = """
from enum import IntEnum

import nothing_of_this_name


class KVQuantMode(IntEnum):
    INT8_PER_TOKEN_HEAD = 2
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    checkout = tmp_path_factory.mktemp("vllm")
    for name, text in ((FILE, SUITE), ("vllm/v1/kv_cache_interface.py", INTERFACE)):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(text)
    kept = checkout / "counts.json"
    command = [
        sys.executable,
        "scripts/peer_suites.py",
        "--vllm",
        str(checkout),
        "--device",
        "cpu",
        "--json",
        str(kept),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    return json.loads(kept.read_text()), done.stdout


def test_every_item_is_counted_once_and_under_what_came_of_it(result):
    (f,) = result[0]["files"].values()
    assert {k: f[k] for k in ("items", "ours", "chosen", "passed", "not_run")} == {
        "items": 11, "ours": 10, "chosen": 10, "passed": 3, "not_run": 0,
    }  # fmt: skip
    (refused,) = f["refused"]
    assert refused.startswith("ValueError: kv_quant_mode: want INT4_PER_TOKEN_HEAD ")
    assert f["skipped"] == {"not today": 1}
    failed = {reason: x["first"] for reason, x in f["failed"].items()}
    assert sorted(ids[0].split("::")[1] for ids in failed.values()) == [
        "test_idle", "test_killed", "test_spoils_the_gpu", "test_wrong", "test_wrong_for_the_peer_too",
    ]  # fmt: skip
    assert failed["the process ended with 9"] == [f"{FILE}::test_killed"]
    assert failed["passed without a call of a function of ours"] == [f"{FILE}::test_idle"]


def test_the_counts_are_printed_with_their_reasons(result):
    assert "test_per_token_kv_cache.py: skipped 1: not today" in result[1]
    assert f"    {FILE}::test_killed" in result[1]


def test_the_page_of_the_counts_is_up_to_date():
    page = script("scripts/peer_table.py")
    for path, text in page.wanted().items():
        assert path.read_text() == text, f"{path}: run `make table`"
    for record in page.records().values():
        assert not any(f["failed"] for f in record["files"].values()), "what fails is mended, not kept"
