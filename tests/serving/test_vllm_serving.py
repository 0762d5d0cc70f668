"""benchmarks/vllm_serving.py without an engine: what runs in which order, what a failure costs, what is kept."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from script import script

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import vllm_accept
import vllm_engine
from vllm_engine import Case

serving = script("benchmarks/vllm_serving.py")


def test_the_reference_of_a_kind_runs_before_what_is_judged_by_it():
    names = [c.name for c in serving.cases(["speed", "windows"], ["fp8"], True, False)]
    assert names == [
        "speed FLASH_ATTN auto", "speed tersekv fp8", "speed FLASH_ATTN fp8", "speed TRITON_ATTN int8_per_token_head",
        "speed FLASHINFER fp8", "windows FLASH_ATTN auto", "windows tersekv fp8",
    ]  # fmt: skip
    first, second = serving.cases(["speed"], ["nvfp4"], False, False)
    assert (first.name, first.is_reference) == ("speed FLASH_ATTN auto", True)
    assert (second.name, second.is_reference) == ("speed tersekv nvfp4", False)
    latents = [c.name for c in serving.cases(["mla"], ["fp8"], True, False)]
    assert latents == ["mla FLASH_ATTN_MLA auto", "mla tersekv fp8", "mla TRITON_MLA fp8"]
    tiny = serving.cases(["speed"], ["fp8"], True, True)
    assert [c.name for c in tiny] == ["speed tersekv auto", "speed tersekv fp8"]


@pytest.mark.parametrize(("dtype", "bits"), [
    ("auto", 16), ("fp8", 8), ("int8_per_token_head", 8), ("nvfp4", 4), ("int4_per_token_head+rotated", 4),
    ("fp8_e4m3/int4_per_token_head", 4), ("fp8_e4m3/fp8_per_token_head", 8),
])  # fmt: skip
def test_limits_are_those_of_the_side_with_fewer_bits(dtype, bits):
    assert Case("speed", "tersekv", dtype).bits == bits


def test_a_case_that_fails_costs_itself(tmp_path, monkeypatch, capsys):
    """No engine is here, so every process ends with an error; one is given no time."""
    monkeypatch.setattr(sys, "argv", ["vllm_serving.py"])
    file = tmp_path / "kept.jsonl"
    kept = {"kind": "speed", "backend": "tersekv", "dtype": "nvfp4", "tiny": False, "step_ms": 1.5}
    file.write_text(json.dumps(kept))
    ask = ["--only", "speed", "--formats", "fp8", "--no-peers", "--work", str(tmp_path / "work"), "--json", str(file)]
    assert serving.main(ask) == 1
    old, first, second = map(json.loads, file.read_text().splitlines())
    assert old["step_ms"] == 1.5
    assert (first["backend"], second["backend"]) == ("FLASH_ATTN", "tersekv")
    assert "No module named 'vllm'" in first["reason"]
    assert "No module named 'vllm'" in second["reason"]
    assert "speed tersekv fp8: ; FAILED: exit code 1" in capsys.readouterr().out
    assert serving.main([*ask, "--seconds", "0.01"]) == 1
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line.get("reason") for line in lines] == [None, *["took more than 0.01 s"] * 2]
    assert not serving.RUNNING
    assert {path.suffix for path in (tmp_path / "work" / "logs").iterdir()} == {".log"}


def test_a_case_that_its_limit_ends_tells_how_far_it_came(tmp_path, monkeypatch):
    slow = tmp_path / "slow.py"
    slow.write_text(
        f"import sys, time; sys.path.insert(0, {str(Path(vllm_engine.__file__).parent)!r})\n"
        "import vllm_engine as e; e.phase('the engine starts'); e.phase('kernel 7'); print('x', flush=True)\n"
        "open(sys.argv[-1] + '/told', 'w').close(); time.sleep(600)"
    )
    monkeypatch.setattr(serving, "__file__", str(slow))
    wait = serving.subprocess.Popen.wait

    def limited(process, timeout=None):
        """The limit passes when the case has told."""
        while timeout is not None and not (tmp_path / "told").exists():
            assert process.poll() is None, "the case ended by itself"
            time.sleep(0.01)
        return wait(process, timeout)

    monkeypatch.setattr(serving.subprocess.Popen, "wait", limited)
    reason = serving.child(Case("speed", "tersekv", "fp8"), tmp_path, None, 0.01)["reason"]
    assert re.fullmatch(r"took more than 0\.01 s; since \d+\.\d s: kernel 7", reason), reason


@pytest.mark.parametrize(("backend", "ranks"), [("FLASH_ATTN", 1), ("tersekv", 2)])
def test_each_model_of_the_ranks_has_workers_of_its_own(backend, ranks, tmp_path, monkeypatch):
    """Two engines of one process would share its pool of CUDA graphs, which PyTorch does not open twice."""
    made = []

    def engine(model, case, **options):
        made.append((options["tensor_parallel_size"], options["distributed_executor_backend"]))
        raise InterruptedError

    monkeypatch.setitem(sys.modules, "checkpoints", SimpleNamespace(text=lambda start, n: [1] * n, llama=Path))
    monkeypatch.setattr(vllm_accept, "engine", engine)
    monkeypatch.setattr(vllm_accept, "more_kv_heads", lambda folder, target: target)
    with pytest.raises(InterruptedError):
        vllm_accept.run(Case("ranks", backend, "auto"), tmp_path)
    assert made == [(ranks, "mp")]


def test_what_triton_compiles_is_counted_and_told_on(monkeypatch):
    from triton import knobs

    told = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **given: told.append(given))
    compiled = vllm_engine.Compiled()
    for module, name in (("tersekv.backends.triton.append", "append_kernel"), ("vllm.v1.sample", "rank")):
        knobs.runtime.jit_post_compile_hook(fn=type("Fn", (), {"module": module, "name": name}), key=name)
    assert [given["key"] for given in told] == ["append_kernel", "rank"]
    names = compiled.clear()
    assert (vllm_engine.of_ours(names), len(names)) == (["tersekv.backends.triton.append.append_kernel"], 2)
    assert compiled.clear() == []


def test_how_far_apart_log_probabilities_are():
    want = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]).double()
    assert vllm_engine.apart(want + 3, want) == pytest.approx(0)
    got = want.clone()
    got[1] = 1
    assert vllm_engine.apart(got, want) == pytest.approx(1)
    p, q = (torch.tensor(x).double()[None].log() for x in ([0.5, 0.5], [0.25, 0.75]))
    assert vllm_engine.divergence(q, p) == pytest.approx(0.1438, abs=1e-4)


SPEED = {
    "kind": "speed", "backend": "FLASH_ATTN", "dtype": "auto", "tiny": False, "gpu": "NVIDIA H200", "torch": "2.11.0",
    "prefill_tokens_s": 154000.4, "first_token_ms": 55.2, "step_ms": 3.118, "cache_tokens": 294912,
    "serve_tokens_s": 20000.0, "apart": 0.0, "apart_cached": 0.0123,
}  # fmt: skip


def test_the_table_of_what_a_cache_dtype_buys():
    page = script("scripts/vllm_page.py")
    ours = {**SPEED, "backend": "tersekv", "dtype": "nvfp4", "step_ms": 1.9, "serve_tokens_s": 40000.0}
    failed = {"kind": "speed", "backend": "FLASHINFER", "dtype": "fp8", "tiny": False, "reason": "took more than 240 s"}
    late = {**ours, "dtype": "fp8", "reason": "want no kernel compiled after the engine began, got 1"}
    rows = page.speed([SPEED, ours, failed, late]).splitlines()
    assert rows[1] == "NVIDIA H200, PyTorch 2.11.0"
    assert rows[3].endswith("(pictures/vllm_h200.svg)")
    assert rows[7:11] == [
        "| FLASH_ATTN | `auto` | 154,000 | 55 | 3.12 | 294,912 | 20,000 (1.00 ×) | 0.012 |",
        "| tersekv | `nvfp4` | 154,000 | 55 | 1.90 | 294,912 | 40,000 (2.00 ×) | 0.012 |",
        "| FLASHINFER | `fp8` | - | - | - | - | - | took more than 240 s |",
        "| tersekv | `fp8` | 154,000 | 55 | 1.90 | 294,912 | 40,000 (2.00 ×) | 0.012; want no kernel compiled after "
        "the engine began, got 1 |",
    ]
    assert "No run is kept yet." in page.speed([])
    picture = page.drawn([SPEED, ours, failed])
    assert "40,000" in picture
    assert "1.90" in picture
    assert "FLASHINFER" not in picture


def test_the_table_of_what_was_found_right():
    page = script("scripts/vllm_page.py")
    whole = {"kind": "perplexity", "backend": "tersekv", "dtype": "fp8", "perplexity": 3.34219, "kl": 2.2e-3,
             "kl_decoded": 1e-3}  # fmt: skip
    ranks = {"kind": "ranks", "backend": "tersekv", "dtype": "auto"}
    for model in ("1 KV head a rank", "2 KV heads a rank"):
        ranks |= {f"perplexity, {model}": 3.2, f"kl, {model}": 1e-4, f"kl_decoded, {model}": 0.0}
    broken = {"kind": "windows", "backend": "tersekv", "dtype": "auto", "reason": "exit code 1: "}
    rows = page.accepted([SPEED, whole, ranks, broken]).splitlines()
    assert rows[3:7] == [
        "| plain | tersekv | `fp8` | 3.3422 | 2.2e-03 | 1.0e-03 |  |",
        "| 2 GPUs, 1 KV head a rank | tersekv | `auto` | 3.2000 | 1.0e-04 | 0.0e+00 |  |",
        "| 2 GPUs, 2 KV heads a rank | tersekv | `auto` | 3.2000 | 1.0e-04 | 0.0e+00 |  |",
        "| windows and sinks | tersekv | `auto` | - | - | - | exit code 1:  |",
    ]


def test_the_tables_of_the_page_are_those_of_the_kept_lines():
    page = script("scripts/vllm_page.py")
    for path, want in page.wanted().items():
        assert path.read_text() == want


def test_starts_have_empty_caches_but_the_last(tmp_path, monkeypatch):
    homes, took = [], iter((9.0, 5.0, 7.0, 1.0))

    def child(case, work, gpus, limit, what, env):
        homes.append(env["HOME"])
        assert what == "--start"
        assert env["TRITON_CACHE_DIR"].startswith(env["HOME"])
        return {"start_s": next(took), "compiled": 3, "gpu": "x"}

    monkeypatch.setattr(serving, "child", child)
    record = serving.starts(serving.Case("speed", "tersekv", "fp8"), tmp_path, None, 1, 3)
    assert record == {"starts_s": [9.0, 5.0, 7.0], "compiled": 3, "again_s": 1.0, "gpu": "x", "start_s": 7.0}
    assert len(set(homes)) == 3
    assert homes[3] == homes[2]


def test_a_start_that_fails_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "child", lambda *_: {"reason": "took more than 1 s"})
    record = serving.starts(serving.Case("speed", "tersekv", "fp8"), tmp_path, None, 1, 3)
    assert record["reason"] == "took more than 1 s"
    assert record["starts_s"] == []
