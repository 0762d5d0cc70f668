"""The engine of examples/continuous_batching.py: what a batch makes is what each request makes alone."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tersekv

PATH = Path(__file__).parents[2] / "examples" / "continuous_batching.py"
SMALL = ["--layers", "2", "--heads", "4", "--kv-heads", "2", "--head-dim", "32", "--dim", "32", "--mlp", "32"]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("continuous_batching", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("format", ["fp8_e4m3", "nvfp4"])
def test_a_batch_makes_what_each_request_makes_alone(example, format, tmp_path):
    file = tmp_path / "result.json"
    (result,) = example.main([*SMALL, "--format", format, "--requests", "6", "--batch", "3", "--json", str(file)])
    assert result["difference_to_alone"] < 1e-3
    assert result["pages_left"] == 0
    assert json.loads(file.read_text())["results"] == [result]


def engine_of(example, num_pages: int, batch: int = 4, format: str = "bf16"):
    model = example.random_model(
        example.LlamaConfig(num_layers=1, num_q_heads=2, num_kv_heads=1, head_dim=32, dim=32, mlp_dim=32, max_pos=256),
        "cpu", torch.float32,
    )  # fmt: skip
    cache = tersekv.PagedKVCache.allocate(1, num_pages, 16, 1, 32, format=format)
    for t in (cache[0].k, cache[0].v):
        t.fill_(float("nan"))  # of what nobody wrote, nothing may be read
    return example.Engine(model, cache, batch, 128, keep_logits=True)


def requests(example, n: int, prompt: int = 20, new: int = 10) -> list:
    return [example.Request(f"r{i}", list(range(i, i + prompt)), new, arrives=i) for i in range(n)]


@torch.inference_mode()
def test_requests_wait_for_pages_and_none_is_stopped(example):
    engine, waiting = engine_of(example, num_pages=5), requests(example, 4)  # two pages each: two at a time
    most, admit = [], engine.admit
    engine.admit = lambda *a: (admit(*a), most.append(sum(r is not None for r in engine.rows)))
    engine.run(waiting)
    assert [len(r.tokens) for r in waiting] == [10] * 4
    assert max(most) == 2
    assert all(torch.isfinite(x).all() for r in waiting for x in r.logits)
    assert engine.pool.num_free_pages == 5


@torch.inference_mode()
def test_a_request_that_can_never_fit_says_so(example):
    with pytest.raises(tersekv.OutOfPagesError, match="r0 needs more pages"):
        engine_of(example, num_pages=1).run(requests(example, 1))


@torch.inference_mode()
def test_a_shared_prefix_is_stored_once_and_its_last_page_is_copied(example):
    engine = engine_of(example, num_pages=20)
    engine.share(list(range(40)))  # two full pages and a half
    running = requests(example, 3, prompt=4, new=8)
    for r in running:
        r.arrives = 0
    engine.admit(running.copy(), 0)
    pages = [engine.pool.pages(r.name) for r in running]
    prefix = engine.pool.pages(example.PREFIX)
    assert all(p[:2] == prefix[:2] for p in pages)
    assert len({prefix[2], *[p[2] for p in pages]}) == 4
    k = engine.cache[0].k
    assert all(torch.equal(k[p[2], :8], k[prefix[2], :8]) for p in pages)


@torch.inference_mode()
def test_tokens_are_read_in_order_though_a_step_late(example):
    engine, running = engine_of(example, num_pages=8), requests(example, 2)
    engine.run(running)
    for r in running:
        assert r.tokens == [int(x.argmax()) for x in r.logits]
    assert not engine.unread


@torch.inference_mode()
def test_free_rows_write_nothing(example):
    engine = engine_of(example, num_pages=8)
    engine._forward()
    assert bool(engine.cache[0].k.isnan().all())
    assert torch.isfinite(engine.logits).all()


@pytest.mark.parametrize(("argv", "why"), [
    (["--requests", "0"], "want at least 1, got 0"),
    (["--batch", "0"], "want at least 1, got 0"),
    (["--page-size", "0"], "want at least 1, got 0"),
    (["--new-tokens", "0"], "want at least 4, got 0"),
    (["--context", "5"], "want A:B with 1 <= A <= B, got '5'"),
    (["--context", "9:3"], "want A:B with 1 <= A <= B, got '9:3'"),
    (["--prefix", "100000"], "--prefix and --new-tokens: want at most 4032 together"),
])  # fmt: skip
def test_arguments_that_cannot_work_are_told_at_once(example, argv, why, capsys):
    with pytest.raises(SystemExit) as stop:
        example.main(argv)
    assert why in capsys.readouterr().err + str(stop.value)


@pytest.mark.parametrize("argv", [
    ["--requests", "1"], ["--batch", "1"], ["--new-tokens", "4"], ["--context", "3:3", "--no-check"],
    ["--prefix", "0"], ["--gap", "0"], ["--page-size", "1"],
])  # fmt: skip
def test_the_least_of_every_argument_works(example, argv):
    (result,) = example.main([*SMALL, "--format", "bf16", "--requests", "2", "--new-tokens", "4", *argv])
    assert result["pages_left"] == 0


def test_it_runs_as_it_stands(tmp_path):
    done = subprocess.run([sys.executable, PATH], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second, made = done.stdout.splitlines()
    assert "tokens/s" in first
    assert second.startswith("int8_per_token_head")
    assert made.startswith("request 0: ")


def test_the_docs_tell_the_numbers_that_are_kept():
    root = PATH.parents[1]
    page = (root / "docs" / "serving.md").read_text()
    for run in json.loads((root / "benchmarks" / "results" / "h200_serve.json").read_text())["runs"]:
        for result in run["results"]:
            assert f"| {result['tokens_per_s']:.0f} |" in page
