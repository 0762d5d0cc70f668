"""Kernels that workers compile ahead are those of the calls, found on disk; who fails is named, and nothing is lost."""

from __future__ import annotations

import importlib
import json
import logging
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton

import tersekv
from tersekv.backends.host import compile_only
from tersekv.cli.main import main
from tersekv.dispatch import plan
from tersekv.integrations import vllm_warm_up
from tersekv.integrations.vllm_pages import pages_of
from tersekv.integrations.vllm_warm_up import Limits
from tersekv.ops import compile_workers
from tersekv.ops.append import append
from tersekv.ops.compile_workers import Chip, compile_ahead, on_meta, outline
from tersekv.ops.decode import decode

CHIP = Chip(80, 108)


def calls(device: str, format: str = "int8_per_token_head") -> list[partial]:
    """A write and a decode of one request, and a decode whose lengths begin at no multiple of 16 bytes."""
    layer = tersekv.PagedKVCache.allocate(1, 2, 16, 1, 64, format=format)[0]
    rows = [torch.zeros(1, 1, 64, dtype=torch.bfloat16) for _ in range(3)]
    slots, table = torch.full((1,), -1), torch.zeros(1, 4, dtype=torch.int32)
    lens = torch.zeros(2, dtype=torch.int32)
    if device == "meta":
        layer, slots, table, *rows = map(on_meta, (layer, slots, table, *rows))
        lens = lens.to("meta")
    k, v, q = rows
    return [
        partial(append, k, v, layer, slots),
        partial(decode, q, layer, table, lens[:1]),
        partial(decode, q, layer, table, lens[1:]),
    ]


def cubins(folder: Path) -> int:
    return sum(1 for _ in folder.glob("*/*.cubin"))


def test_what_workers_compiled_is_found(tmp_path, monkeypatch):
    lines: list[str] = []
    found = compile_ahead(calls("meta"), CHIP, processes=2, cache_dir=tmp_path, say=lines.append)
    assert found is not None
    assert not found.failed
    assert len(found.kernels) == cubins(tmp_path) >= 3
    assert {name for name, _ in found.kernels} >= {"append_kernel", "stream_k_decode_kernel"}
    assert all(seconds > 0 for _, seconds in found.kernels)
    assert lines[0] == "compiling kernels for sm_80 in 2 processes"
    assert lines[1].startswith(f"{len(found.kernels)} kernels compiled in ")
    assert str(tmp_path) in lines[1]
    shared = importlib.import_module("triton.backends.nvidia.driver")
    for built in ["cuda_utils*", *["__triton_launcher*"] * hasattr(shared, "make_launcher")]:
        assert any(tmp_path.glob(f"*/{built}")), "what launches them too, whether there is a driver or not"

    # This process, over tensors with memory, compiles nothing that is not there.
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    launched: list[str] = []
    for name in ("append", "attention"):
        module = importlib.import_module(f"tersekv.ops.{name}")
        monkeypatch.setattr(module, "dispatch_call", lambda op, call, *_: plan.dispatch(op, call, arch=80))
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "_recent", {})
    before = cubins(tmp_path)
    with compile_only.compiling(80, lambda fn, _: launched.append(fn.__name__), num_sms=108):
        for call in calls("cpu"):
            call()
    assert {*launched} == {name for name, _ in found.kernels}
    assert cubins(tmp_path) == before
    with compile_only.compiling(80, lambda *_: None, num_sms=108):
        for call in calls("cpu", "fp8_e4m3"):
            call()
    assert cubins(tmp_path) > before, "what was not compiled ahead would be seen"

    # Another process of these calls finds that they are done, and one of others does not.
    assert compile_ahead(calls("meta"), CHIP, processes=2, cache_dir=tmp_path) is None
    monkeypatch.setattr(compile_workers, "_run_workers", lambda *_: pytest.fail("as it should"))
    with pytest.raises(pytest.fail.Exception, match="as it should"):
        compile_ahead(calls("meta")[:1], CHIP, processes=1, cache_dir=tmp_path)


def test_a_worker_that_fails_is_named_and_its_calls_are_tried_again(tmp_path, monkeypatch, caplog):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no memory >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    for _ in range(2):  # what failed is not kept as done
        caplog.clear()
        with caplog.at_level(logging.WARNING, "tersekv"):
            found = compile_ahead(calls("meta"), CHIP, processes=2, cache_dir=tmp_path / "cache")
        assert found is not None
        assert found.failed == ["a process ended with exit code 3: no memory"]
        assert "no memory; what is missing is compiled at its first launch" in caplog.text
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    found = compile_ahead(calls("meta"), CHIP, processes=1, cache_dir=tmp_path / "cache")
    assert found is not None
    assert "no process could be started" in found.failed[0]


def test_a_worker_that_dies_is_named(tmp_path):
    """As one that the kernel ends for its memory."""
    code = """
import os, signal
from tersekv.ops.compile_workers import _Workers
workers = _Workers(1, before_forks=lambda: print("joined", flush=True))
for key in "first", "second", "second":
    if workers.fork_once(key):
        os.kill(os.getpid(), signal.SIGKILL)
workers.wait(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    dead = '{"failed": "a process ended with exit code -9"}'
    assert done.stdout.splitlines() == ["joined", "joined", dead, dead]


def test_where_there_is_no_fork_one_process_compiles_all(tmp_path, monkeypatch):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import os\ndel os.fork\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    found = compile_ahead(calls("meta"), CHIP, processes=2, cache_dir=tmp_path / "cache")
    assert found is not None
    assert not found.failed
    assert len(found.kernels) == cubins(tmp_path / "cache") >= 3


def test_what_one_backend_has_compiled_is_not_anothers(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_workers, "_run_workers", lambda *_: compile_workers.Compiled([], [], 0.0, 1))
    monkeypatch.setenv("TERSEKV_BACKEND", "triton")
    assert compile_ahead(calls("meta"), CHIP, processes=1, cache_dir=tmp_path) is not None
    assert compile_ahead(calls("meta"), CHIP, processes=1, cache_dir=tmp_path) is None
    monkeypatch.delenv("TERSEKV_BACKEND")
    assert compile_ahead(calls("meta"), CHIP, processes=1, cache_dir=tmp_path) is not None


def test_what_a_compiler_prints_is_no_result(tmp_path, monkeypatch):
    text = '{\n  "a program"\n{-# of MLIR\n#-}\n{"failed": "append: RuntimeError: PassManager::run failed"}\n'
    text += '{"kernel": "app\n'
    done = SimpleNamespace(returncode=0, stdout=text)
    monkeypatch.setattr(compile_workers.subprocess, "run", lambda *_, **__: done)
    found = compile_ahead(calls("meta"), CHIP, processes=1, cache_dir=tmp_path)
    assert found is not None
    assert found.failed == [
        "append: RuntimeError: PassManager::run failed", 'a line that is not whole: {"kernel": "app'
    ]  # fmt: skip
    assert not found.kernels


def test_a_call_that_fails_does_not_keep_the_others_from_being_compiled(tmp_path):
    write, read, _ = calls("meta")
    wrong = partial(read.func, read.args[0][:, :0], *read.args[1:])
    found = compile_ahead([wrong, write], CHIP, processes=1, cache_dir=tmp_path)
    assert found is not None
    assert [name for name, _ in found.kernels] == ["append_kernel"]
    assert found.failed
    assert found.failed[0].startswith("decode: ")


def test_what_has_no_memory_is_planned_as_what_has():
    layer = tersekv.PagedKVCache.allocate(1, 2, 16, 2, 64, format="nvfp4", layout="HND", scales="tail")[0]
    for x in (layer.k, layer.v, layer.k_scale_cache, torch.zeros(9, dtype=torch.int32)[1:], torch.ones(4, 4).t()):
        y = on_meta(x)
        assert (y.dtype, y.shape, y.stride(), y.data_ptr() & 15) == (x.dtype, x.shape, x.stride(), x.data_ptr() & 15)
        assert y.is_meta
    seen = on_meta(layer)
    assert (seen.formats, seen.device.type) == (layer.formats, "meta")
    assert compile_workers.outline(seen) == compile_workers.outline(layer)


ORDER = """
import importlib, sys
from tersekv.backends.host.cache_keys import hash_callees_first_for_stable_cache_key
kernels = [getattr(importlib.import_module("tersekv.backends." + m), n) for m, n in (a.rsplit(".", 1) for a in {names})]
for i in {order}:
    hash_callees_first_for_stable_cache_key(kernels[i])
print([k.cache_key for k in kernels])
"""


def test_keys_on_disk_do_not_depend_on_what_was_compiled_before():
    names = ["gluon.sm90.decode.combine.combine_kernel", "triton.append.append_kernel"]
    keys = set()
    for order in (range(len(names)), reversed(range(len(names)))):
        code = ORDER.format(names=names, order=[*order])
        keys.add(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert len(keys) == 1


def test_the_command_compiles_a_models_kernels(tmp_path, capsys, monkeypatch):
    config = {
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
        "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"], "model_type": "gpt_oss",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked: list[tuple] = []

    def ahead(calls, chip, *, cache_dir, **_):
        asked.append((calls, chip, cache_dir))

    monkeypatch.setattr("tersekv.cli.warm_up.compile_ahead", ahead)
    options = ["--model", str(tmp_path), "--out", str(tmp_path / "out"), "--max-num-seqs", "2"]
    assert main(["warm-up", *options, "--formats", "auto,nvfp4", "--tensor-parallel-size", "2"]) == 0
    assert f"TRITON_CACHE_DIR={tmp_path / 'out'}" in capsys.readouterr().out
    assert {x[1:] for x in asked} == {(Chip(90, 132), tmp_path / "out")}
    assert len(asked) == 2 * len(vllm_warm_up.JOBS), "layers of all windows together, as an engine asks for them"
    decodes = [c for made, *_ in asked for c in made if c.func is decode]
    assert {c.keywords["window"] for c in decodes} == {None, 128}
    assert {c.args[1].format for c in decodes} == {"bf16", "nvfp4"}
    assert {(c.args[0].shape[1], c.args[1].num_kv_heads, c.keywords["sinks"].shape[0]) for c in decodes} == {(2, 1, 2)}
    assert {c.keywords["page_table"].shape[1] for c in decodes} == {32}

    # What an engine asks for with its pages, however many: it finds that this is done.
    pages = pages_of(torch.zeros(9, 1, 16, 128, dtype=torch.bfloat16), "auto", 64, torch.ones(()), torch.ones(()))
    ints = partial(torch.zeros, 1, device="meta")
    like = SimpleNamespace(
        limits=Limits(2, 8192, 1), block_table=torch.zeros(1, 32, dtype=torch.int32, device="meta"),
        seq_lens=ints(dtype=torch.int32), slot_mapping=ints(dtype=torch.int64),
    )  # fmt: skip
    q = torch.zeros(1, 2, 64, dtype=torch.bfloat16, device="meta")
    options_of = {
        "softmax_scale": vllm_warm_up.ANY_SCALE, "window": None, "sinks": torch.zeros(2, device="meta"), "softcap": 0.0,
        "batch_invariant": False,
    }  # fmt: skip
    for job in vllm_warm_up.JOBS:
        each = [job(True, q, on_meta(pages), like, {**options_of, "window": window}) for window in (None, 128)]
        assert outline([call for made in each for call in made]) in [outline(made) for made, *_ in asked]
