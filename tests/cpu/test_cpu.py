"""The native kernels for CPUs: every instruction set against the references, and against the oracle byte by byte."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from paged_case import kv_case, latent_case, nan_like, tree_mask

import tersekv
from tersekv.backends.cpu import build, library
from tersekv.cli import doctor
from tersekv.dispatch import plan
from tersekv.formats import KV_FORMATS
from tersekv.testing import verify as tool

ATTENTION = ("append", "rope_append", "mla_append", "decode", "prefill", "mla_decode", "merge_states")
OPS = (*ATTENTION, "index_append", "index_query", "index_topk")
BF = torch.bfloat16
LEVELS = tuple(build._LEVELS)
COMPILER = next(filter(None, map(shutil.which, build._COMPILERS)), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler is here: the backend refuses every call")


@pytest.fixture(params=["team", "own"])
def threads_of(request, native):
    """Whose threads work: those of PyTorch's OpenMP, which it has here, or the library's own."""
    before, wanted = native.team, request.param == "team"
    native.use_pytorch_threads(wanted)
    assert native.team == wanted
    yield request.param
    native.use_pytorch_threads(before)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("level", LEVELS)
def test_every_instruction_set_passes_every_case(level, op, native):
    if level not in native.levels():
        pytest.skip(f"this machine has no {level}")
    native.use_level(level)
    results = list(tool.verify("cpu", "cpu", ops=(op,)))
    assert [f"{r.case.id}: {r.status} {r.message}" for r in results if r.status != tool.PASSED] == []
    assert len(results) > 10


def test_the_best_instruction_set_is_taken(native):
    assert native.level() == native.levels()[-1]
    with pytest.raises(ValueError, match="level: want one of plain"):
        native.use_level("altivec")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("format", KV_FORMATS)
def test_codes_are_the_oracles_whatever_the_bits(format, level, native):
    if level not in native.levels():
        pytest.skip(f"this machine has no {level}")
    native.use_level(level)
    bits = torch.randint(-(2**31), 2**31, (512, 2, 64), dtype=torch.int64).to(torch.int32)
    x = torch.cat([bits.view(torch.float32), torch.randn(512, 2, 64), 1e-3 * torch.randn(512, 2, 64)])
    codes = torch.arange(-448, 449, dtype=torch.float32)[: 7 * 128].view(7, 2, 64) / 64  # halfway, and beside it
    x = torch.cat([x, codes, torch.nextafter(codes, codes + 1), torch.nextafter(codes, codes - 1)])
    if KV_FORMATS[format].scale == "none":  # 16-bit NaNs differ in their bits
        x = x.nan_to_num(nan=1.0)
    got, want = (tersekv.PagedKVCache.allocate(1, len(x), 1, 2, 64, format=format)[0] for _ in range(2))
    slots = torch.randperm(len(x))
    for layer, backend in ((got, "cpu"), (want, "torch")):
        tersekv.append(x, x.flip(0), layer, slots, backend=backend)
    for name in ("k", "v", "k_scale_cache", "v_scale_cache"):
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None and b is None) or torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


def attention(case, q, **options):
    out, lse = nan_like(*q.shape[:2], case.layer.head_dim_v, dtype=torch.float32), nan_like(*q.shape[:2])
    tersekv.decode(q, case.layer, case.page_table, case.seq_lens, out=out, lse=lse, **options)
    return out, lse


LONG = {
    "one request": {"seq_lens": [9000]},
    "requests of all lengths": {"seq_lens": [3000, 1, 0, 7000, 64, 65]},
    "HND": {"seq_lens": [5000, 5000], "layout": "HND", "page_size": 64},
    "odd pages": {"seq_lens": [4001], "page_size": 3, "heads": 1},
}


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("what", LONG)
def test_keys_cut_into_pieces_are_joined(what, threads, native, threads_of):
    case = kv_case("int8_per_token_head", head_dim=128, **LONG[what])
    q = torch.randn(len(case.seq_lens), 16, 128).to(BF)
    want = attention(case, q, backend="torch")
    torch.set_num_threads(threads)
    try:
        got = attention(case, q, backend="cpu")
    finally:
        torch.set_num_threads(1)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_many_rows_attend_like_the_oracle_and_fp32_shows_no_rounding(native):
    for format in KV_FORMATS:
        case = kv_case(format, [500, 130], heads=2, head_dim=64)
        q = torch.randn(260, 8, 64)
        for options in ({}, {"window": 70}, {"softcap": 5.0, "sinks": torch.randn(8)}):
            got, want = (attention(case, q, backend=name, **options) for name in ("cpu", "torch"))
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("format", [f for f in KV_FORMATS if f != "fp16"])
def test_few_rows_are_right_in_every_number_of_rows_and_columns(format, native):
    for rows, dim, length in ((1, 16, 1), (2, 48, 67), (3, 80, 129), (5, 192, 63), (8, 112, 200)):
        case = kv_case(format, [length], heads=2, head_dim=dim)
        q = torch.randn(1, 2 * rows, dim).to(BF)
        got = tersekv.decode(q, case.layer, case.page_table, case.seq_lens, backend="cpu").double()
        want, _ = attention(case, q, backend="torch")
        assert (got - want).norm() < 3e-3 * want.norm(), (rows, dim)


def test_zero_points_cost_a_long_request_no_digits(native):
    layer = tersekv.PagedKVCache.allocate(1, 512, 64, 1, 128, format="int4_per_token_head")[0]
    torch.manual_seed(0)
    k, v, q = torch.randn(32768, 1, 128), torch.randn(32768, 1, 128), torch.randn(1, 4, 128).to(BF)
    tersekv.append(k, v, layer, torch.arange(32768), backend="cpu")
    call = (q, layer, torch.arange(512)[None].int(), torch.tensor([32768], dtype=torch.int32))
    want = tersekv.decode(*call, out_dtype=torch.float32, backend="torch")
    got = tersekv.decode(*call, out_dtype=torch.float32, backend="cpu")
    rounded = tersekv.decode(*call, backend="cpu")
    assert (got - want).norm() < 3e-6 * want.norm()
    assert (rounded - want).norm() < 2.8e-3 * want.norm()


@pytest.mark.parametrize("rotation", [None, "hadamard"])
@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_per_token_head", "nvfp4", "int4_per_token_head"])
def test_new_rows_are_met_as_they_are_after_a_prefix_that_is_cut_into_pieces(format, rotation, native):
    case = kv_case(format, [3000, 40], heads=2, head_dim=64, rotation=rotation)
    layer = replace(case.layer, v_scale=torch.tensor([0.25, 3.0])) if format == "fp8_e4m3" else case.layer
    starts = torch.tensor([0, 70, 120], dtype=torch.int32)  # more rows than tokens: the first ten see nothing
    q, k, v = (torch.randn(120, h, 64).to(BF) for h in (8, 2, 2))

    def attended(backend, dtype):
        return tersekv.prefill(q, layer, case.page_table, case.seq_lens, starts, k=k, v=v, backend=backend,
                               out_dtype=dtype, return_lse=True)  # fmt: skip

    want = attended("torch", torch.float32)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            got, rounded = attended("cpu", torch.float32), attended("cpu", BF)[0]
        finally:
            torch.set_num_threads(1)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert (rounded - want[0]).norm() < 3e-3 * want[0].norm()
    told = []
    for backend in ("cpu", "torch"):
        with pytest.raises(ValueError, match="before the new tokens") as error:
            tersekv.prefill(q, case.layer, case.page_table, case.seq_lens + 1000, starts, k=k, v=v, backend=backend)
        told.append(str(error.value))
    assert told[0] == told[1]


@pytest.mark.parametrize("dtype", [torch.float32, BF])
def test_a_nan_that_a_draft_does_not_see_does_not_reach_it(dtype, native):
    case = kv_case("bf16", [70], heads=1)
    mask = tree_mask([6])
    mask.view(torch.int16)[:, 0] &= ~4  # nobody sees draft 2 …
    case.layer.k[case.page_table[0, 66 // 16], 66 % 16] = torch.nan
    case.layer.v[case.page_table[0, 66 // 16], 66 % 16] = torch.nan
    q = torch.randn(6, 2, 32).to(dtype)
    out = tersekv.decode(q, case.layer, case.page_table, case.seq_lens, mask=mask, backend="cpu")
    assert out.isfinite().all()
    case.layer.v[case.page_table[0, 3], 5] = torch.nan  # … but everybody sees the prefix
    out = tersekv.decode(q, case.layer, case.page_table, case.seq_lens, mask=mask, backend="cpu")
    assert out.isnan().all()


@pytest.mark.parametrize("format", ["int8_per_token_head", "nvfp4", "int4_per_token_head"])
def test_a_factor_that_is_nan_of_a_draft_that_nobody_sees_reaches_nobody(format, native):
    case = kv_case(format, [70], heads=1, head_dim=144)
    mask = tree_mask([6])
    mask.view(torch.int16)[:, 0] &= ~4  # draft 2
    q = torch.randn(6, 1, 144).to(BF)
    want, _ = attention(case, q, mask=mask, backend="torch")
    for stored in (case.layer.k_scale_cache, case.layer.v_scale_cache):
        stored[case.page_table[0, 66 // 16], 66 % 16] = torch.nan
    got = tersekv.decode(q, case.layer, case.page_table, case.seq_lens, mask=mask, backend="cpu")
    assert (got - want).norm() < 3e-3 * want.norm()


def test_what_does_not_fit_is_told_in_the_oracles_words(native):
    case = kv_case("bf16", [40, 20])
    q, starts = torch.randn(3, 4, 32).to(BF), torch.tensor([0, 2, 3], dtype=torch.int32)
    bad = {
        "page": {"page_table": case.page_table + 1000},
        "negative page": {"page_table": -case.page_table - 1},
        "long": {"seq_lens": case.seq_lens + 1000},
        "rows": {"cu_seqlens_q": starts + 1},
        "bound": {"max_q_len": 1},
    }
    for what, changed in bad.items():
        told = []
        for backend in ("torch", "cpu"):
            call = {"page_table": case.page_table, "seq_lens": case.seq_lens, "cu_seqlens_q": starts, **changed}
            with pytest.raises(ValueError, match="want") as error:
                tersekv.decode(q, case.layer, **call, backend=backend)
            told.append(str(error.value))
        assert told[0] == told[1], what


def test_rows_that_are_no_requests_are_zero(native):
    case = kv_case("fp16", [40, 0, 20])
    starts = torch.tensor([1, 3, 4, 5], dtype=torch.int32)
    got, want = (attention(case, torch.randn(7, 4, 32), cu_seqlens_q=starts, backend=b) for b in ("cpu", "torch"))
    for t in (0, 3, 5, 6):
        assert (got[0][t] == 0).all()
        assert (got[1][t] == -torch.inf).all()
        assert (want[0][t] == 0).all()


def test_the_short_way_computes_the_same(native):
    case, latents = kv_case("fp8_per_token_head", [300, 20]), latent_case("fp8_ds_mla", [300, 20])
    q, joined = torch.randn(2, 4, 32).to(BF), torch.randn(2, 4, 576).to(BF)
    tables = case.page_table, case.seq_lens
    first = tersekv.decode(q, case.layer, *tables, return_lse=True, backend="cpu")
    again = tersekv.decode(q, case.layer, *tables, return_lse=True, backend="cpu")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    tables = latents.page_table, latents.seq_lens
    first = tersekv.mla_decode(joined, latents.layer, *tables, softmax_scale=0.1, backend="cpu")
    assert torch.equal(first, tersekv.mla_decode(joined, latents.layer, *tables, softmax_scale=0.1, backend="cpu"))
    tables = case.page_table + 1000, case.seq_lens
    with pytest.raises(ValueError, match="page_table: want page ids in"):
        tersekv.decode(q, case.layer, *tables, return_lse=True, backend="cpu")


def test_of_two_tokens_with_one_slot_the_last_stays_whole(native, threads_of):
    torch.set_num_threads(4)
    try:
        layer = tersekv.PagedKVCache.allocate(1, 4, 4, 8, 128, format="int8_per_token_head")[0]
        slots = torch.randint(0, 16, (512,))
        k = torch.arange(1, 513).float()[:, None, None].expand(512, 8, 128).contiguous()
        tersekv.append(k, -k, layer, slots, backend="cpu")
    finally:
        torch.set_num_threads(1)
    for slot in slots.unique().tolist():
        last = int((slots == slot).nonzero()[-1, 0]) + 1
        read = layer.k[slot // 4, slot % 4].float() * layer.k_scale_cache[slot // 4, slot % 4][:, None]
        torch.testing.assert_close(read, torch.full_like(read, last), rtol=1e-6, atol=0)


def _decode_in_child(case, q, want):
    torch.set_num_threads(2)
    got = tersekv.decode(q, case.layer, case.page_table, case.seq_lens, backend="cpu")
    raise SystemExit(0 if torch.equal(got, want) else 1)


def test_a_forked_process_computes_with_threads_of_its_own(native, threads_of):
    torch.set_num_threads(2)
    try:
        case, q = kv_case("bf16", [9000], head_dim=128), torch.randn(1, 16, 128).to(BF)
        want = tersekv.decode(q, case.layer, case.page_table, case.seq_lens, backend="cpu")
        child = multiprocessing.get_context("fork").Process(target=_decode_in_child, args=(case, q, want))
        child.start()
        child.join(60)
        assert child.exitcode == 0
    finally:
        torch.set_num_threads(1)


_FORKED_FIRST = """
import os, signal, torch, tersekv
from tersekv.backends.cpu import library
torch.set_num_threads(2)
layer = tersekv.PagedKVCache.allocate(1, 256, 64, 8, 128, format="int8_per_token_head")[0]
table, lens = torch.arange(256, dtype=torch.int32)[None], torch.tensor([16384], dtype=torch.int32)
torch.ones(1 << 22).sum()  # OpenMP's threads stay in the parent
child = os.fork()
if child == 0:
    signal.alarm(60)
    tersekv.decode(torch.ones(1, 32, 128), layer, table, lens, backend="cpu")
    library.load_compiled_library_or_reason().use_pytorch_threads(True)
    tersekv.decode(torch.ones(1, 32, 128), layer, table, lens, backend="cpu")
    os._exit(library.load_compiled_library_or_reason().team)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that it was forked")
def test_a_forked_process_may_be_the_first_to_compute(native):
    assert subprocess.run([sys.executable, "-c", _FORKED_FIRST], timeout=100).returncode == 0


def test_a_process_forks_while_a_thread_of_it_computes(native, threads_of):
    torch.set_num_threads(2)
    case, q = kv_case("bf16", [9000], head_dim=128), torch.randn(1, 16, 128).to(BF)
    want, done = tersekv.decode(q, case.layer, case.page_table, case.seq_lens, backend="cpu"), threading.Event()

    def compute():
        while not done.is_set():
            tersekv.decode(q, case.layer, case.page_table, case.seq_lens, backend="cpu")

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        for _ in range(3):
            child = multiprocessing.get_context("fork").Process(target=_decode_in_child, args=(case, q, want))
            child.start()
            child.join(60)
            assert child.exitcode == 0
    finally:
        done.set()
        thread.join()
        torch.set_num_threads(1)


_COUNTS = """
import os, torch, tersekv
from tersekv.backends.cpu import library
def threads(): return len(os.listdir("/proc/self/task"))
torch.set_num_threads(4)
torch.ones(1 << 22).sum()
counts = [threads()]
layer = tersekv.PagedKVCache.allocate(1, 256, 64, 8, 128, format="int8_per_token_head")[0]
table, lens = torch.arange(256, dtype=torch.int32)[None], torch.tensor([16384], dtype=torch.int32)
for team in (True, False):
    library.load_compiled_library_or_reason().use_pytorch_threads(team)
    tersekv.decode(torch.ones(1, 32, 128), layer, table, lens, backend="cpu")
    counts.append(threads())
print(*counts)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_pytorchs_threads_work_where_it_has_some(native):
    told = subprocess.run([sys.executable, "-c", _COUNTS], capture_output=True, text=True, check=True, timeout=120)
    before, team, own = map(int, told.stdout.split())
    assert (team - before, own - before) == (0, 3)


_BEFORE = """
#include <dlfcn.h>
static int calls = 0;
extern "C" void GOMP_parallel(void (*f)(void*), void* x, unsigned n, unsigned flags) {
    ++calls;
    ((void (*)(void (*)(void*), void*, unsigned, unsigned))dlsym(RTLD_NEXT, "GOMP_parallel"))(f, x, n, flags);
}
extern "C" int calls_so_far() { return calls; }
"""
_THROUGH = """
import ctypes, sys, torch, tersekv
torch.set_num_threads(2)
told = ctypes.CDLL(sys.argv[1]).calls_so_far
layer = tersekv.PagedKVCache.allocate(1, 256, 64, 8, 128, format="int8_per_token_head")[0]
table, lens = torch.arange(256, dtype=torch.int32)[None], torch.tensor([16384], dtype=torch.int32)
q = torch.ones(1, 32, 128)
tersekv.decode(q, layer, table, lens, backend="cpu")
before = told()
for _ in range(3):
    tersekv.decode(q, layer, table, lens, backend="cpu")
print(told() - before)
"""


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")
def test_a_runtime_that_stands_before_pytorchs_is_taken(native, tmp_path):
    source, preloaded = tmp_path / "before.cpp", tmp_path / "before.so"
    source.write_text(_BEFORE)
    subprocess.run([COMPILER, "-shared", "-fPIC", "-w", "-o", preloaded, source, "-ldl"], check=True)
    told = subprocess.run(
        [sys.executable, "-c", _THROUGH, preloaded], env=os.environ | {"LD_PRELOAD": str(preloaded)},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert int(told.stdout) >= 3


def test_without_openmp_the_library_has_threads_of_its_own(native, monkeypatch):
    monkeypatch.setattr(torch.__config__, "parallel_info", lambda: "ATen parallel backend: native thread pool")
    assert native.team
    native.use_pytorch_threads(True)
    assert not native.team
    monkeypatch.undo()
    native.use_pytorch_threads(True)
    assert native.team


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_threads_that_wait_for_the_next_call_take_no_time(native, threads_of):
    case, q = kv_case("bf16", [9000], head_dim=128), torch.randn(1, 16, 128).to(BF)
    torch.set_num_threads(4)
    try:
        tersekv.decode(q, case.layer, case.page_table, case.seq_lens, backend="cpu")
        assert len(os.listdir("/proc/self/task")) >= 4
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.1  # one that spins would take 0.5, or its share of a busy core
    finally:
        torch.set_num_threads(1)


def test_threads_of_the_program_call_side_by_side(native, threads_of):
    torch.set_num_threads(2)
    case, wrong = kv_case("fp8_e4m3", [4000, 900], head_dim=128), []
    q = torch.randn(2, 16, 128).to(BF)
    try:
        want = tersekv.decode(q, case.layer, case.page_table, case.seq_lens, backend="cpu")

        def call():
            for _ in range(20):
                got = tersekv.decode(q, case.layer, case.page_table, case.seq_lens, backend="cpu")
                if not torch.equal(got, want):
                    wrong.append(got)

        threads = [threading.Thread(target=call) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        torch.set_num_threads(1)
    assert not wrong


def test_without_a_library_the_oracle_runs_and_doctor_says_what_it_costs(monkeypatch, capsys):
    for name in ("_plans", "_recent"):
        monkeypatch.setattr(plan, name, {})
    monkeypatch.setattr(library, "load_compiled_library_or_reason", lambda: "is not compiled; with a C++ compiler: try")
    call = tool.make(next(tool.cases(("decode",), ("bf16",))))
    assert plan.plan("decode", call).backend == "torch"
    with pytest.raises(tersekv.UnsupportedError, match=r"cpu: is not compiled; with a C\+\+ compiler: try"):
        plan.plan("decode", call, "cpu")
    assert any("3 to 10 times as long: backend cpu is not compiled" in hint for hint in doctor.hints())
    assert "native kernels: none" in dict(doctor.devices())["cpu"]


def test_the_native_kernels_are_taken_first_on_a_cpu(native):
    call = tool.make(next(tool.cases(("decode",), ("bf16",))))
    assert plan.candidate_backends("decode", "cpu") == ("cpu", "torch")
    assert plan.plan("decode", call).backend == "cpu"
    assert plan.why_not(plan.facts("decode", call, 90), "cpu") == "needs a CPU, got sm_90"


@needs_compiler
def test_a_library_of_other_sources_is_not_used(tmp_path, monkeypatch):
    target = tmp_path / "_native.so"
    assert build.build_library_and_return_levels(target, only_levels=("plain",), extra_flags=("-O0",)) == ["plain"]
    monkeypatch.setattr(build, "LIBRARY", target)
    library.load_compiled_library_or_reason.cache_clear()
    try:
        assert isinstance(library.load_compiled_library_or_reason(), library.Library)
        monkeypatch.setattr(build, "sources_hash", lambda: "other")
        library.load_compiled_library_or_reason.cache_clear()
        assert "was compiled from other sources" in library.load_compiled_library_or_reason()
        monkeypatch.setattr(build, "LIBRARY", tmp_path / "other.so")
        build.LIBRARY.write_bytes(b"no library")
        library.load_compiled_library_or_reason.cache_clear()
        assert "does not load" in library.load_compiled_library_or_reason()
    finally:
        library.load_compiled_library_or_reason.cache_clear()


@pytest.mark.parametrize("unit", ["kernels", "entry", "pool"])
def test_the_kernels_compile_elsewhere_with_neon(unit, tmp_path):
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang, whose compiler knows aarch64, is not here: `make versions` brings it")
    source, target = build.SOURCES / f"{unit}.cpp", tmp_path / f"{unit}.o"
    told = ["-Werror", "-DLEVEL=plain", "-DHAS_PLAIN", '-DTERSEKV_SOURCES="x"', "-c", str(source), "-o", str(target)]
    compiler = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu"]
    assert build._run_and_return_error([*compiler, *build._FLAGS, *told]) is None
    assert target.read_bytes()[18:20] == b"\xb7\x00"  # an ELF file's machine: aarch64


def test_a_compiler_that_fails_is_told(tmp_path):
    with pytest.raises(RuntimeError, match="no-such-compiler"):
        build.build_library_and_return_levels(tmp_path / "x.so", "no-such-compiler")
    assert not list(tmp_path.iterdir())
