"""vLLM's OffloadingConnector over tersekv's pages: blocks go out and come back, whole, and so do the scales in them."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import llama, text
from offload_cpu import COPIED, offload_on_cpus, transfer_config
from reference import Reference, hold
from vllm_cpu import count, engine, generate

from tersekv.demo import models
from tersekv.formats import kv_format
from tersekv.integrations import vllm_attention

FORMATS = (
    "fp8", "int8_per_token_head", "fp8_per_token_head", "nvfp4", "int4_per_token_head+rotated",
    "fp8_e4m3/int4_per_token_head",
)  # fmt: skip
BLOCK = 16
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "vllm_offload.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("llama"))


def offloaded(folder, monkeypatch, cache_dtype, **more):
    """A prompt twice, between them others that take all blocks on the device. Returns both results and the hits."""
    options = {
        "kv_cache_dtype": cache_dtype, "dtype": "float32", "block_size": BLOCK, "num_gpu_blocks_override": 24,
        "max_model_len": 256, "kv_transfer_config": transfer_config(), **more,
    }  # fmt: skip
    seen: list[bool] = []
    plain = vllm_attention.pages_of

    def pages_of(*args, inline, **kwargs):
        seen.append(inline)
        return plain(*args, inline=inline, **kwargs)

    monkeypatch.setattr(vllm_attention, "pages_of", pages_of)
    prompt = text(900, 120)
    with engine(folder, **options) as llm:
        first = generate(llm, [prompt], 12)
        for i in range(4):
            generate(llm, [text(4000 * i + 17, 200)], 2)
        own = count(llm, "prefix_cache_hits")
        second = generate(llm, [prompt], 12)
        assert count(llm, "prefix_cache_hits") == own, "nothing was left on the device"
        hits = count(llm, "external_prefix_cache_hits")
    assert {*seen} == {False}, "whole blocks: scales lie in tails"
    return prompt, first, second, hits


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_go_out_and_come_back(model, monkeypatch, name):
    offload_on_cpus(monkeypatch)
    prompt, first, second, hits = offloaded(model, monkeypatch, name)
    assert hits == len(prompt) // BLOCK * BLOCK
    (before, _), (after, _) = first[0], second[0]
    assert before == after
    reference = Reference(model, "fp8_e4m3" if name == "fp8" else name)
    hold(second, [reference.score(prompt, after)])
    c = models.load("llama").config
    k, v = (kv_format(n) for n in (reference.formats[0].partition("+")[0].split("/") * 2)[:2])
    block = BLOCK * c.num_kv_heads * (k.row_bytes(c.head_dim) + v.row_bytes(c.head_dim))
    assert {nbytes for *_, nbytes in COPIED} == {block}, "a copy is a block with its scales"


@pytest.mark.parametrize("name", ["int8_per_token_head", "nvfp4"])
def test_it_would_be_seen_if_scales_stayed_behind(model, monkeypatch, name):
    c, f = models.load("llama").config, kv_format(name)
    codes, row = 2 * BLOCK * f.code_bytes(c.head_dim), 2 * BLOCK * f.row_bytes(c.head_dim)

    def without_scales(source, target, nbytes):
        assert nbytes == c.num_kv_heads * row
        for head in range(c.num_kv_heads):
            ctypes.memmove(target + head * row, source + head * row, codes)

    offload_on_cpus(monkeypatch, without_scales)
    prompt, _, second, _ = offloaded(model, monkeypatch, name)
    reference = Reference(model, name)
    with pytest.raises(AssertionError, match=r"KL|behind"):
        hold(second, [reference.score(prompt, second[0][0])])


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_in_every_layout_of_blocks(model, monkeypatch, layout):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    offload_on_cpus(monkeypatch)
    prompt, _, second, hits = offloaded(model, monkeypatch, "int8_per_token_head")
    assert hits == len(prompt) // BLOCK * BLOCK
    hold(second, [Reference(model, "int8_per_token_head").score(prompt, second[0][0])])


def test_the_benchmark_runs(tmp_path):
    file = tmp_path / "lines"
    command = [sys.executable, BENCHMARK, "--tiny", "--formats", "nvfp4", "--json", file]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = map(json.loads, file.read_text().splitlines())
    assert record["came_back"] == record["asked"]
    assert "reason" not in record
    assert min(record["with_s"], record["without_s"]) > 0
