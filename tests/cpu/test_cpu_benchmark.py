"""The benchmark of CPUs, what it says of itself, and the page that is written from what it stored."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from script import script


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend("benchmarks")
    yield script("benchmarks/cpu_decode.py")
    torch.set_num_threads(1)


def test_it_judges_before_it_times_and_stores_what_the_page_shows(benchmark, monkeypatch, tmp_path, capsys):
    path = tmp_path / "cpu_here.json"
    arguments = ["--quick", "--formats", "nvfp4", "--seconds", "0", "--threads", "1,2"]
    monkeypatch.setattr(sys, "argv", ["cpu_decode.py", *arguments, "--json", str(path)])
    monkeypatch.setattr(benchmark, "read_rate", lambda: 30e9)
    benchmark.main()
    text = capsys.readouterr().out
    assert "small: 1 x 1024" in text
    assert "scaling" in text
    page = "".join(script("scripts/cpu_page.py").of(path))
    assert "2 threads. Median ms" in page
    assert "| format | 1 × 1024, 8/2 heads, D 64 |" in page
    assert "| peer | SDPA" in page
    assert "Times as fast with 2 threads as with 1: 1 × 1024, 8/2 heads, D 64:" in page
    assert "1 × 1024, 1024 new" in page
    assert "cases" in page

    monkeypatch.setattr(benchmark, "ROUNDED", 1e-9)
    with pytest.raises(SystemExit, match="not timed, since wrong"):
        benchmark.main()


def test_threads_double_up_to_all_cores(benchmark):
    assert benchmark.doubling(1) == [1]
    assert benchmark.doubling(2) == [1, 2]
    assert benchmark.doubling(32) == [1, 2, 4, 8, 16, 32]
    assert benchmark.doubling(12) == [1, 2, 4, 8, 12]


def test_the_page_is_up_to_date_and_tells_losses_and_a_second_peer(tmp_path):
    page = script("scripts/cpu_page.py")
    for path, text in page.wanted().items():
        assert path.read_text() == text, "run python scripts/cpu_page.py --write"
    shape = {"name": "long", "length": 512, "q_heads": 8, "heads": 2, "head_dim": 64, "page_size": 16, "new": 1}
    row = {
        "shape": shape, "format": "int8_per_token_head", "peer": "SDPA grouped", "threads": 1, "ms_median": 2.0,
        "ms_min": 1.0, "peer_ms_median": 1.6, "peer_ms_min": 1.5, "bytes": 30e6, "flops": 1e6, "read_gb_s": 40.0,
        "ratio": 1.25, "ratio_of_mins": 0.67, "share_of_read_rate": 0.75,
        "llama_cpp": {"type": "q8_0", "bytes": 3, "error": 0.01, "ms_median": 5.0, "ms_min": 4.0},
    }  # fmt: skip
    machine = {"cores": 8, "native": "avx2", "torch": "2.13.0", "cpu": "A CPU", "amx": True, "load": 0.1}
    (tmp_path / "cpu_x.json").write_text(json.dumps({"machine": machine, "rows": [row]}))
    text = "".join(page.of(tmp_path / "cpu_x.json"))
    assert "A CPU, 8 cores, avx2, AMX, torch 2.13.0" in text
    for line in ("| int8_per_token_head | 2 (1.25) |", "| peer | SDPA grouped 1.6 |", "| llama.cpp | q8_0 5 |"):
        assert line in text
    assert "in 1 of 1 cases: int8_per_token_head, 1 × 512, 8/2 heads, D 64, 1 threads: 1.25" in text


def test_the_page_shows_the_demos_speed_and_what_sanitizers_said(tmp_path, monkeypatch):
    page = script("scripts/cpu_page.py")
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    assert page.demo() == page.sanitized() == "\nNo run is stored yet.\n\n"
    speed = {"model": "llama", "format": "nvfp4", "tokens_per_s": {"eager": 50.0, "native": 150.0}}
    about = {"environment": {"torch": "2.13.0"}, "options": {"threads": 1}, "rounds": 5, "rows": [speed]}
    (tmp_path / "demo_speed_x.json").write_text(json.dumps(about))
    assert "llama: eager 50 to 50 tokens/s, native 150 to 150, 3.00 to 3.00 times as fast" in page.demo()
    clean = {"sanitizer": "thread", "cases": {"plain": 700, "avx2": 700}, "wrong": 0, "tests": 0, "exit_code": 0}
    failed = {"sanitizer": "address,undefined", "exit_code": 66}
    (tmp_path / "sanitize_cpu.json").write_text(json.dumps({"runs": [clean, failed]}))
    assert "| thread | plain 700, avx2 700 | 0 | passed | nothing |" in page.sanitized()
    assert "| address, undefined | - | - | - | exit code 66 |" in page.sanitized()


def test_llama_cpps_blocks_are_read_as_it_writes_them(benchmark):
    import ggml

    scale = torch.tensor([0.5], dtype=torch.float16).view(torch.uint8)
    codes = torch.arange(32, dtype=torch.uint8)
    got = ggml.dequantised("q8_0", torch.cat([scale, codes - 16]))
    assert got.flatten().tolist() == [0.5 * (i - 16) for i in range(32)]
    packed = torch.arange(16, dtype=torch.uint8) | (15 - torch.arange(16, dtype=torch.uint8)) << 4
    got = ggml.dequantised("q4_0", torch.cat([scale, packed]))
    assert got.flatten().tolist() == [0.5 * (i - 8) for i in (*range(16), *range(15, -1, -1))]
