"""Who gets Gluon's kernels: any version of Triton that compiles them. That is found out once, before a plan is made."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton

from tersekv.backends.gluon import compiles
from tersekv.backends.host import versions
from tersekv.cli import doctor
from tersekv.dispatch import plan
from tersekv.errors import UnsupportedError
from tersekv.testing import compiles as probe
from tersekv.testing.cases import cases
from tersekv.testing.make import make

NEW = "9.9.0"  # of Triton, which nobody has tested


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Nothing is known, planned, told or kept."""
    monkeypatch.setattr(compiles, "_results", {})
    monkeypatch.setattr(plan, "_warned", set())
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "_recent", {})
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.delenv("TERSEKV_STRICT", raising=False)
    monkeypatch.delenv("TERSEKV_BACKEND", raising=False)


@pytest.fixture
def newer(monkeypatch):
    """A newer Triton than any that was tested; the operations that were tried on it, and what that says."""
    monkeypatch.setattr(triton, "__version__", NEW)
    found = SimpleNamespace(tried=[], reason=None, lasting=True)

    def tried(op):
        found.tried.append(op)
        return found.reason, found.lasting

    monkeypatch.setattr(compiles, "_why_not_compiles_and_is_permanent", tried)
    return found


def call_of(op: str = "decode"):
    return make(next(iter(cases((op,), ("bf16",)))))


def backend_of(op: str = "decode", arch: int = 90, **options) -> str:
    return plan.plan(op, call_of(op), arch=arch, **options).backend


def test_the_installed_version_is_tested_and_trusted(monkeypatch):
    monkeypatch.setattr(
        compiles, "_why_not_compiles_and_is_permanent", lambda op: pytest.fail("compiled to see whether it does")
    )
    assert versions.is_tested(triton.__version__)
    assert backend_of() == "gluon"


def test_a_newer_version_that_compiles_runs_them(newer):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backend_of() == "gluon"
    assert newer.tried == ["decode"]


def test_each_operation_is_tried_once_and_kept_for_other_processes(newer):
    newer.reason = "no such name"
    with pytest.warns(RuntimeWarning):
        assert [backend_of(), backend_of("mla_decode"), backend_of()] == ["triton"] * 3
    assert newer.tried == ["decode", "mla_decode"]
    compiles._results.clear()  # another process
    plan._plans.clear()
    assert compiles.why_not("decode") == f"does not compile with Triton {NEW}: no such name. Install {versions.RANGE}"
    assert newer.tried == ["decode", "mla_decode"]


def test_another_version_or_other_sources_are_tried_anew(newer, monkeypatch):
    compiles.why_not("decode")
    monkeypatch.setattr(triton, "__version__", "9.10.0")
    compiles.why_not("decode")
    compiles._results.clear()
    monkeypatch.setattr(compiles, "kernel_sources_hash", lambda: "edited")
    compiles.why_not("decode")
    assert newer.tried == ["decode"] * 3


def test_portable_kernels_take_over_with_one_warning(newer):
    newer.reason = "no such name"
    calls = [call_of()._replace(softcap=x) for x in (1.0, 2.0, 3.0)]
    with pytest.warns(RuntimeWarning) as told:
        assert [plan.plan("decode", c, arch=90).backend for c in calls] == ["triton"] * 3
    (one,) = told
    assert str(one.message) == (
        f"decode: gluon is off, slower kernels run: it does not compile with Triton {NEW}: no such name. "
        f"Install {versions.RANGE}"
    )


def test_other_chips_operations_and_backends_are_not_concerned(newer):
    newer.reason = "no such name"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backend_of(arch=100) == backend_of("append") == backend_of(backend="triton") == "triton"
    assert newer.tried == []
    assert plan.why_not(plan.facts("decode", call_of(), 100), "gluon") == "needs sm_90, got sm_100"
    assert plan.why_not(plan.facts("decode", call_of()), "gluon") == "needs sm_90, got cpu"
    assert plan.why_not(plan.facts("append", call_of("append"), 90), "gluon") == "has no append"


def test_a_backend_that_was_named_raises_and_says_why(newer):
    newer.reason = "no such name"
    with pytest.raises(UnsupportedError, match=f"gluon: does not compile with Triton {NEW}: no such name. Install"):
        backend_of(backend="gluon")


def test_the_environment_can_make_it_an_error(newer, monkeypatch):
    newer.reason = "no such name"
    monkeypatch.setenv("TERSEKV_STRICT", "1")
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"decode: gluon is off, .* no such name"):
            backend_of()
    monkeypatch.setenv("TERSEKV_STRICT", "0")
    with pytest.warns(RuntimeWarning):
        assert backend_of() == "triton"


def test_nothing_is_tried_while_a_graph_is_captured(newer, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"decode: whether its kernels compile .* call it once before"):
        backend_of()
    assert newer.tried == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert backend_of() == "gluon"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    compiles._results.clear()
    assert compiles.why_not("decode") is None, "what is kept is read"


def test_threads_try_once(newer):
    threads = [threading.Thread(target=compiles.why_not, args=("decode",)) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert newer.tried == ["decode"]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"triton": 1}', "\x00\xff"])
def test_what_was_damaged_is_found_out_anew(newer, text):
    path = compiles._result_path(NEW, "decode")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert compiles.why_not("decode") is None
    assert newer.tried == ["decode"]
    assert json.loads(path.read_text()) == {"triton": NEW, "op": "decode", "reason": None}
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing else is left"


def test_a_folder_that_cannot_be_written_keeps_nothing(newer, tmp_path):
    (tmp_path / "tersekv").write_text("a file where the folder would be")
    assert [compiles.why_not("decode"), compiles.why_not("decode")] == [None, None]
    assert newer.tried == ["decode"]


def test_what_may_be_chance_is_not_kept(newer):
    newer.reason, newer.lasting = "it could not be tried", False
    assert "could not be tried" in compiles.why_not("decode")
    assert not compiles._result_path(NEW, "decode").exists()


@pytest.mark.parametrize(("done", "reason", "lasting"), [
    ((0, 'leaked\n{"reason": null}\nmore\n', ""), None, True),
    ((0, '{"reason": "no such name"}\n', ""), "no such name", True),
    ((-11, "", "one\nLLVM ERROR: what"), "the compiler ended with exit code -11: LLVM ERROR: what", True),
    ((-9, "", ""), "the compiler ended with exit code -9: nothing was said", False),
    ((1, "", "ModuleNotFoundError: x"), "the compiler ended with exit code 1: ModuleNotFoundError: x", False),
])  # fmt: skip
def test_what_a_process_of_its_own_says(done, reason, lasting, monkeypatch):
    ended = SimpleNamespace(returncode=done[0], stdout=done[1], stderr=done[2])
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: ended)
    assert compiles._why_not_compiles_and_is_permanent("decode") == (reason, lasting)


def test_a_process_that_cannot_be_started_is_no_verdict(monkeypatch):
    monkeypatch.setattr(sys, "executable", "no such program")
    reason, lasting = compiles._why_not_compiles_and_is_permanent("decode")
    assert reason.startswith("it could not be tried: ")
    assert not lasting


def test_every_kernel_of_an_operation_is_compiled_in_a_process_of_its_own(monkeypatch):
    """Really: with the Triton that is installed. The shortest of the operations."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(compiles._result_path(NEW, "x").parent))
    assert compiles._why_not_compiles_and_is_permanent("mla_decode_branch") == (None, True)


def test_a_kernel_that_does_not_compile_is_named(monkeypatch):
    from tersekv.backends.gluon.sm90.decode import combine as decode_merge

    def broken(self, *args, **options):
        raise TypeError("no such name") from AttributeError("module has no attribute thread_barrier")

    monkeypatch.setattr(type(decode_merge.combine_kernel), "run", broken)
    assert probe.why_not("decode") == "AttributeError: module has no attribute thread_barrier"


def test_a_name_that_is_gone_is_told(monkeypatch):
    def gone(backend, op):
        raise ImportError("cannot import name 'mbarrier'")

    monkeypatch.setattr(plan, "_module", gone)
    assert probe.why_not("decode") == "ImportError: cannot import name 'mbarrier'"


def test_what_is_tried_reaches_every_kernel(monkeypatch):
    source = "".join(p.read_text() for p in sorted(Path(compiles.__file__).parent.rglob("*.py")))
    defined = set(re.findall(r"^def ([a-z]\w*_kernel)\(", source, re.M))
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", lambda self, *args, **options: None)
    tried: set[str] = set()
    for op in probe.PROBES:
        assert probe.why_not(op, tried=tried) is None
    assert defined <= {name.rpartition(".")[2] for name in tried if ".gluon." in name}


def test_doctor_says_the_same(newer, monkeypatch):
    newer.reason = "no such name"
    monkeypatch.setattr(plan, "_arch", lambda device: 90)
    told = [*doctor.off("cpu")]
    assert told[0] == (f"decode: gluon does not compile with Triton {NEW}: no such name. Install {versions.RANGE}")
    assert [line.split(":")[0] for line in told] == [
        "decode",
        "prefill",
        "mla_decode",
        "mla_prefill",
        "mla_decode_branch",
        "index_topk",
        "index_select",
    ]
