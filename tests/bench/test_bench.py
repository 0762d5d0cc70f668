"""What `tersekv bench` times: the grid, the judge that comes before the clock, peers."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace

import pytest
import torch
from fake_flashinfer import flashinfer_modules

from tersekv import UnsupportedError
from tersekv.testing.bench import (
    append,
    cases,
    data,
    decode,
    engine,
    flashinfer,
    measure,
    merge_states,
    mla_prefill,
    mla_project,
    peers,
    prefill,
    report,
)
from tersekv.testing.bench.cases import CPU_QUICK, GPU, Case, grid, with_cells
from tersekv.testing.bench.engine import FAILED, OK, RED, UNSUPPORTED, Limits
from tersekv.testing.bench.shapes import Shape

CPU = torch.device("cpu")
LIMITS = Limits(copy=4e12, matmul=600e12)
SMALL = {
    "append": Case("append", "int8_per_token_head", 0, 5, heads=8, page=16),
    "rope_append": Case("rope_append", "fp8_e4m3", 0, 5, page=16),
    "mla_append": Case("mla_append", "fp8_ds_mla", 0, 5, heads=2, page=16),
    "decode": Case("decode", "nvfp4", 2, 40, page=16, uneven=True),
    "prefill": Case("prefill", "nvfp4", 0, 24, page=16, total=70),
    "mla_decode": Case("mla_decode", "fp8_e4m3", 2, 40, heads=4, page=16),
    "mla_decode_branch": Case("mla_decode_branch", "fp8_ds_mla", 2, 40, heads=4, page=16, uneven=True),
    "mla_prefill": Case("mla_prefill", "bf16", 0, 24, heads=1, page=16),
    "mla_project": Case("mla_project", "fp8_e4m3", 0, 5, heads=2),
    "merge_states": Case("merge_states", "bf16", 0, 5, heads=2),
}
SHAPE = Shape("shape", "fp8_e4m3", 3, 40, heads=6, page=16, uneven=True, kv_heads=2, head_dim=64)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Little memory to rotate over, and short counts."""
    monkeypatch.setattr(data, "ROTATE", {"cpu": 1e5})
    monkeypatch.setattr(measure, "_CPU_SECONDS", 0.01)
    monkeypatch.setattr(measure, "_HOST_CALLS", 2)


def ids(*args, **options) -> list[str]:
    return [c.id for c in grid(*args, **options)]


# The grid


def test_the_default_grid_holds_every_cell():
    every = set(ids(GPU))
    for b, n in [(1, 8192), (1, 131072), (16, 8192), (16, 65536), (64, 1024), (64, 8192), (256, 1024), (256, 8192)]:
        for name in ("fp8_e4m3", "fp8_per_token_head", "int8_per_token_head", "bf16", "nvfp4"):
            assert f"decode / {name} / {b} x {n} / H 32 / page 64" in every
    for cell in ("16 x 8192", "64 x 8192"):
        assert f"decode / fp8_e4m3 / {cell} / H 32 / page 16" in every
        assert f"decode / fp8_e4m3 / {cell} / H 32 / page 64 / uneven" in every
        assert f"decode / nvfp4 / {cell} / H 32 / page 64 / tail" in every
        assert f"decode / fp8_e4m3/int4_per_token_head / {cell} / H 32 / page 64" in every
    for cell in ("1 x 8192", "16 x 8192", "64 x 4096", "128 x 8192"):
        assert all(f"mla_decode / fp8_ds_mla / {cell} / H {h} / page 64" in every for h in (16, 128))
    for n in (1, 32, 256, 2048, 16384):
        assert f"mla_append / fp8_e4m3 / {n} / H 128 / page 64" in every
    assert "mla_prefill / bf16 / 4096 / H 128 / page 64" in every
    for name in cases.DECODE_FORMATS:
        assert {f"prefill / {name} / {cell} / H 32 / page 64" for cell in ("8192", "512 of 131072")} <= every
    assert "prefill / fp8_e4m3 / 8192 / H 32 / page 64 / q fp8_e4m3" in every
    for cell in ("1 x 4096", "8 x 4096", "64 x 4096"):
        assert f"mla_decode_branch / bf16 / {cell} / H 128 / page 64" in every
    lists = {c.op for c in grid(GPU, ("sparse", "block_sparse"))} - {"decode"}
    assert {c.op for c in grid(GPU) if c.host and not c.through} == set(engine.PROBLEMS) - {"shape", *lists}


def test_no_case_comes_twice():
    assert len(ids(GPU)) == len(set(ids(GPU)))


def test_cells_named_replace_those_of_their_kind():
    s = with_cells(GPU, ["2x100", "7", "5 of 30"])
    assert {c.cell for c in grid(s, ("decode", "mla_decode"))} == {"2 x 100"}
    assert {c.cell for c in grid(s, ("append", "mla_prefill"))} == {"7"}
    assert {c.cell for c in grid(s, ("prefill",))} == {"7", "5 of 30"}
    assert {c.cell for c in grid(with_cells(GPU, ["2x100"]), ("prefill",))} == {c.cell for c in grid(GPU, ("prefill",))}
    assert {c.cell for c in grid(with_cells(GPU, ["7"]), ("mla_decode",))} == {
        c.cell for c in grid(GPU, ("mla_decode",))
    }


@pytest.mark.parametrize("cell", ["x", "0x5", "1x2x3", "", "-4", "9of8", "3of", "2x3of4"])
def test_a_cell_of_neither_kind_is_refused(cell):
    with pytest.raises(ValueError, match=r"^cells: want requests x tokens"):
        with_cells(GPU, [cell])


def test_options_of_the_grid():
    assert {c.page for c in grid(GPU, page=32)} == {32}
    assert all(c.uneven for c in grid(GPU, uneven=True))
    assert {c.format for c in grid(GPU, formats=("nvfp4",))} == {"nvfp4"}
    fast = [c for c in grid(GPU, ("prefill",), precisions=("exact", "fast")) if c.precision == "fast"]
    assert {(c.format, c.query) for c in fast} == {
        ("fp8_e4m3", "fp8_e4m3"), ("int8_per_token_head", "bf16"),
    }  # fmt: skip
    fast = [c for c in grid(GPU, ("mla_decode",), precisions=("exact", "fast")) if c.precision == "fast"]
    assert {c.format for c in fast} == {"fp8_e4m3", "fp8_ds_mla"}
    asked = ("append", "decode")
    assert ids(GPU, iter(asked), precisions=iter(("fast",))) == ids(GPU, asked, precisions=("fast",))


def test_a_cpu_has_no_host_cases():
    assert not list(grid(cases.CPU, ("host",)))


def test_quick_cells_are_few():
    assert len(ids(CPU_QUICK)) < len(ids(cases.CPU)) < len(ids(GPU))


# Problems


def test_bytes_of_an_append_are_two_read_and_one_written_per_value():
    p = append.Append(Case("mla_append", "fp8_e4m3", 0, 3, heads=2, page=16), CPU)
    assert p.nbytes == 3 * 3 * (2 * (512 + 64) + 512 + 64)


def test_bytes_of_a_decode_are_the_rows_of_the_live_tokens():
    p = decode.Decode(Case("decode", "fp8_per_token_head", 3, 20, page=16, uneven=True), CPU)
    assert p.nbytes == int(data.lengths(p.case).sum()) * 8 * 2 * (128 + 4)
    assert p.flops == 4 * p.total * 32 * 128


@pytest.mark.parametrize("name", ["int4_per_token_head", *cases.PAIRS])
def test_a_pair_with_its_scales_in_the_tails_of_pages_is_judged(name):
    p = decode.Decode(Case("decode", name, 2, 40, page=16, scales="tail"), CPU)
    rows = {"int4_per_token_head": 68 + 68, cases.PAIRS[0]: 128 + 68, cases.PAIRS[1]: 132 + 68}
    assert p.nbytes == 80 * 8 * rows[name]
    p.poison()
    assert p.error(p.calls[0]()) <= p.limit
    p.layer.v_scale_cache.mul_(1.5)
    assert p.error(None) > p.limit


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3"])
def test_a_wrong_weight_of_a_projection_is_red(name):
    p = mla_project.MLAProject(replace(SMALL["mla_project"], format=name), CPU)
    assert p.error(p.calls[0]()) <= p.limit
    p.weights[0][0][0, 5] = 0
    assert p.error(None) > p.limit


@pytest.mark.parametrize("window", [0, 1, 7, 33, 200])
def test_flops_and_bytes_of_a_prefill_are_of_what_its_rows_see(window):
    p = prefill.Prompts("some", (5, 1, 40), (33, 7, 40), window)
    seen = [
        range(max(0, i + 1 - window) if window else 0, i + 1)
        for new, total in zip(p.new, p.total, strict=True)
        for i in range(total - new, total)
    ]
    assert p.pairs == sum(map(len, seen))
    requests = (seen[:5], seen[5:6], seen[6:])
    assert p.keys == sum(len(set().union(*rows)) for rows in requests)


def test_a_prefill_counts_its_keys_once_and_the_causal_half():
    p = prefill.Prefill(SMALL["prefill"], CPU)
    assert p.flops == 4 * 32 * 128 * sum(range(47, 71))
    assert p.nbytes == 70 * 8 * 2 * (64 + 8) + 24 * 32 * 128 * (2 + 2)


def test_flops_of_an_mla_prefill_are_the_projection_and_the_causal_half():
    p = mla_prefill.MLAPrefill(SMALL["mla_prefill"], CPU)
    assert p.flops == 2 * 24 * 512 * 256 + 24 * 24 * 320


def test_page_tables_hold_distinct_pages():
    tables = data.page_tables(torch.tensor([3, 1, 2]), 4, CPU)
    live = torch.arange(3) < torch.tensor([3, 1, 2])[:, None]
    assert sorted(tables[:, live].flatten().tolist()) == list(range(24))
    assert not tables[:, ~live].any()


def test_calls_rotate_over_more_than_the_caches(monkeypatch):
    monkeypatch.setattr(data, "ROTATE", {"cpu": 1e6})
    p = decode.Decode(Case("decode", "fp8_e4m3", 2, 64), CPU)
    assert len(p.calls) * p.nbytes >= 1e6
    a = append.Append(Case("append", "fp8_e4m3", 0, 1, heads=8), CPU)
    assert a.layer.k.nbytes * 2 >= 1e6
    assert len({int(s) for s in a.slots}) == len(a.calls)


# The judge


@pytest.mark.parametrize("op", SMALL)
def test_a_right_result_is_timed(op):
    r = engine.run(SMALL[op], CPU)
    assert (r.status, r.reason) == (OK, "")
    assert r.us is not None
    assert r.us > 0


@pytest.mark.parametrize("op", SMALL)
def test_a_result_that_is_not_written_is_red_and_not_timed(op, monkeypatch):
    homes = dict.fromkeys(("decode", "mla_decode", "mla_decode_branch"), decode)
    homes |= {m.__name__.rpartition(".")[2]: m for m in (prefill, mla_prefill, mla_project, merge_states)}
    module, name = homes.get(op, append), op
    real = getattr(module, name)
    judging = {"append", "rope_append", "mla_append"}  # their judge calls the operation itself, by backend
    monkeypatch.setattr(
        module, name, lambda *a, **k: real(*a, **k) if op in judging and k.get("backend") == "torch" else None
    )
    r = engine.run(SMALL[op], CPU)
    assert r.status == RED
    assert r.us is None
    assert "want error <=" in r.reason


def test_one_wrong_request_is_red(monkeypatch):
    real = decode.decode

    def wrong(*args, out, **options):
        real(*args, out=out, **options)
        out[-1, 0, :16] *= 1.5

    monkeypatch.setattr(decode, "decode", wrong)
    assert engine.run(SMALL["decode"], CPU).status == RED


def test_one_wrong_code_is_red(monkeypatch):
    real = append.append

    def wrong(k, v, layer, slots, backend):
        real(k, v, layer, slots, backend=backend)
        if backend is None:
            layer.k[int(slots[0]) // 16, int(slots[0]) % 16, 3, 5] ^= 1

    monkeypatch.setattr(append, "append", wrong)
    assert engine.run(SMALL["append"], CPU).status == RED


def test_refusals_and_errors_are_told_and_end_nothing(monkeypatch):
    def refuse(*args, **options):
        raise UnsupportedError("decode has no backend\n  triton: needs sm_80")

    def fail(*args, **options):
        raise RuntimeError("out of memory\nmore")

    monkeypatch.setattr(decode, "decode", refuse)
    monkeypatch.setattr(decode, "mla_decode", fail)
    got = list(engine.bench([SMALL["decode"], SMALL["mla_decode"], SMALL["append"]], CPU))
    assert [r.status for r in got] == [UNSUPPORTED, FAILED, OK]
    assert got[0].reason == "decode has no backend; triton: needs sm_80"
    assert got[1].reason == "RuntimeError: out of memory"


def test_what_batch_invariance_costs_is_told():
    asked = list(
        grid(with_cells(CPU_QUICK, ["2x40"]), ("decode", "mla_decode", "host"), ("fp8_e4m3",), batch_invariant=True)
    )
    assert [(c.op, c.batch_invariant, c.query) for c in asked] == [
        (op, on, query)
        for op, query in (("decode", "bf16"), ("mla_decode", "bf16"), ("mla_decode", "fp8_e4m3"))
        for on in (False, True)
    ]
    got = list(engine.bench(asked[:2], CPU, ["sdpa"]))
    assert [(r.status, len(r.peers)) for r in got] == [(OK, 1), (OK, 0)]
    timed = [replace(r, us=us, spread=0.0, waited=0.0) for r, us in zip(got, (10.0, 12.0), strict=True)]
    text = "\n".join(report.summary(timed, LIMITS))
    assert f"batch invariant: 1.2x the time of the same calls without it (1 case), at most 1.2x: {asked[1].id}" in text
    assert asked[1].id.endswith("/ batch invariant")
    assert "batch invariant" in report.line(timed[1], LIMITS)


def test_the_option_is_in_the_call(monkeypatch):
    seen = []
    monkeypatch.setattr(decode, "decode", lambda *args, batch_invariant, **options: seen.append(batch_invariant))
    monkeypatch.setattr(decode, "mla_decode", lambda *args, batch_invariant, **options: seen.append(batch_invariant))
    for op in ("decode", "mla_decode"):
        engine.run(replace(SMALL[op], batch_invariant=True), CPU)
    assert seen == [True, True]


def test_host_time_is_of_eager_calls():
    r = engine.run(replace(SMALL["decode"], host=True), CPU)
    assert r.status == OK
    assert r.share(LIMITS) is None


def test_every_call_of_a_graph_is_made_equally_often():
    assert [measure._whole_rounds(20, n) for n in (1, 3, 20, 24)] == [20, 21, 20, 24]


class FakeCUDA:
    """A clock that a graph's replay moves on by 5 us per captured call."""

    def __init__(self):
        self.now, self.captured, self.calls, self.capturing = 0.0, [], 0, False

    def call(self):
        self.calls += 1

    def install(self, monkeypatch):
        cuda = self

        class Graph:
            def replay(self):
                cuda.now += 5.0 * cuda.captured[-1]

            def reset(self):
                pass

        class Capture:
            def __init__(self, graph):
                pass

            def __enter__(self):
                cuda.before = cuda.calls

            def __exit__(self, *error):
                cuda.captured.append(cuda.calls - cuda.before)

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = cuda.now

            def synchronize(self):
                pass

            def elapsed_time(self, other):
                return (other.at - self.at) / 1e3

        for name, fake in {"CUDAGraph": Graph, "graph": Capture, "Event": Event, "synchronize": lambda: None}.items():
            monkeypatch.setattr(torch.cuda, name, fake)


def test_a_graph_of_short_calls_is_made_long(monkeypatch):
    cuda = FakeCUDA()
    cuda.install(monkeypatch)
    assert measure.device_time([cuda.call] * 3, torch.device("cuda", 0)).us == pytest.approx(5.0)
    assert cuda.captured == [21, 402]  # at least 20, then 2 ms; whole rounds of 3


def test_what_the_chip_does_is_measured():
    assert measure._repeat_us(lambda: None, CPU) > 0


# Peers


class Fake:
    """A library with one right peer, one wrong and one that raises."""

    any_format = False

    def missing(self):
        return None

    def peers(self, problem):
        def right():
            return [lambda: problem.calls[0]()]

        def raises():
            raise ImportError("no nvcc\nmore")

        if problem.case.format == "fp8_e4m3":
            yield data.Rival("right", right)
            yield data.Rival("wrong", lambda: [lambda: None])
            yield data.Rival("absent", raises)


def test_peers_are_judged_and_told(monkeypatch):
    monkeypatch.setitem(peers.LIBRARIES, "fake", Fake())
    case = Case("decode", "fp8_e4m3", 1, 20)
    own, other, half = engine.bench([case, replace(case, format="nvfp4"), replace(case, format="bf16")], CPU, ["fake"])
    assert {p.name: p.us is not None for p in own.peers} == {"right": True, "wrong": False, "absent": False}
    assert own.peers[1].reason.startswith("its result is wrong: error")
    assert own.peers[2].reason == "ImportError: no nvcc"
    assert own.peers_format is None
    assert (other.peers_format, other.best_peer) == ("fp8_e4m3", own.best_peer)
    assert half.peers == ()
    assert list(report.notes(own)) == [
        f"    wrong: {own.peers[1].reason}", "    absent: ImportError: no nvcc"
    ]  # fmt: skip


@pytest.mark.parametrize(("op", "requests"), [("decode", 2), ("prefill", 0)])
def test_sdpa_computes_the_same(op, requests):
    r = engine.run(Case(op, "int8_per_token_head", requests, 20, page=16), CPU, ["sdpa"])
    assert [p.name for p in r.peers] == ["sdpa on bf16"]
    assert r.peers[0].us is not None, r.peers[0].reason
    assert not list(peers.SDPA().peers(prefill.Prefill(SMALL["prefill"], CPU)))


@pytest.mark.parametrize("name", ["flashinfer", "vllm"])
def test_a_library_that_is_not_there_is_told(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    assert peers.LIBRARIES[name].missing() == f"{name} is not installed"


@pytest.mark.parametrize(
    ("case", "names"),
    [
        (Case("decode", "fp8_e4m3", 3, 40, page=16, uneven=True), ["flashinfer xqa", "flashinfer fa2"]),
        (Case("decode", "bf16", 2, 40), ["flashinfer xqa", "flashinfer fa2"]),
        (Case("decode", "nvfp4", 2, 40), []),
        (SHAPE, ["flashinfer xqa", "flashinfer fa2"]),
        (replace(SHAPE, window=9), []),
        (replace(SHAPE, head_dim=96), ["flashinfer xqa"]),
        (replace(SMALL["prefill"], format="fp8_e4m3"), ["flashinfer fa2", "flashinfer fa3"]),
        (Case("prefill", "bf16", 0, 24), ["flashinfer fa2", "flashinfer fa3", "flashinfer fmha_v2"]),
        (SMALL["prefill"], []),
        (Case("mla_decode", "fp8_e4m3", 3, 70, heads=4), ["flashinfer fa3"]),
        (Case("mla_decode", "bf16", 2, 40, heads=4, uneven=True), ["flashinfer fa3"]),
        (Case("rope_append", "fp8_e4m3", 0, 70), ["flashinfer"]),
        (Case("mla_append", "fp8_e4m3", 0, 40, heads=2, page=16), ["flashinfer"]),
        (Case("append", "fp8_e4m3", 0, 5, heads=8), []),
    ],
    ids=lambda x: x.id if isinstance(x, Case) else "",
)
def test_flashinfer_gets_the_same_work(case, names, monkeypatch):
    monkeypatch.setattr(flashinfer, "_WORKSPACE", 16 << 20)
    for name, module in flashinfer_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    r = engine.run(case, CPU, ["flashinfer"])
    assert (r.status, r.reason) == (OK, "")
    assert [p.name for p in r.peers] == names
    assert all(p.us is not None for p in r.peers), r.peers
