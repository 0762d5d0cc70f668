"""tersekv bench --random: cells by a seed, beside peers of three formats; their mean and the worst."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import torch

from tersekv.cli import main
from tersekv.formats import latent_bytes_per_token
from tersekv.testing.bench import data, decode, engine, measure, random_cells, shapes
from tersekv.testing.bench.apart import Apart
from tersekv.testing.bench.cases import DECODE_FORMATS, LATENT_FORMATS, RANK, ROPE, Case
from tersekv.testing.bench.engine import OK, RED, Limits, Peer, Result

CPU = torch.device("cpu")


def cells(seed=0, n=200, device="cuda", ops=random_cells.DECODES, formats=None):
    return random_cells.cells(seed, n, device, ops, formats)


def nbytes(case: Case) -> int:
    each = case.bytes_per_token if isinstance(case, shapes.Shape) else latent_bytes_per_token(case.format, RANK, ROPE)
    return case.requests * case.tokens * each


def test_a_seed_draws_the_same_cells_and_more_of_them_begin_alike():
    assert cells(7, 5) == cells(7, 40)[:5]
    assert cells(7, 5) != cells(8, 5)


def test_most_cells_lie_where_serving_does():
    middle = [50e6 <= nbytes(c) <= 400e6 for c in cells()]
    assert 0.75 <= sum(middle) / len(middle) <= 0.95
    assert all(1e6 <= nbytes(c) <= 1.6e9 for c in cells())
    assert all(nbytes(c) <= 4e6 for c in cells(device="cpu"))


def test_draws_reach_every_kind_of_shape():
    drawn = cells(n=400)
    of_kv = [c for c in drawn if isinstance(c, shapes.Shape)]
    assert {c.format for c in of_kv} == {*DECODE_FORMATS}
    assert {c.format for c in drawn if c.op == "mla_decode"} == {*LATENT_FORMATS}
    assert {64, 80, 96, 112, 128, 192, 256} == {c.head_dim for c in of_kv}
    assert {8, 16, 32, 64, 128} == {c.page for c in of_kv}
    assert {c.uneven for c in drawn} == {True, False}
    assert all(c.heads <= 128 and c.heads % c.kv_heads == 0 and c.is_causal for c in of_kv)
    assert 1 in {c.requests for c in drawn}


def test_operations_and_formats_are_those_that_are_named():
    assert {c.op for c in cells(ops=("append", "mla_decode"))} == {"mla_decode"}
    assert {(c.op, c.format) for c in cells(formats=("fp8_ds_mla", "nvfp4"))} == {
        ("shape", "nvfp4"), ("mla_decode", "fp8_ds_mla"),
    }  # fmt: skip
    assert cells(ops=("append",)) == cells(ops=("mla_decode",), formats=("nvfp4",)) == []


@pytest.fixture
def _small(monkeypatch):
    monkeypatch.setattr(data, "ROTATE", {"cpu": 1e5})
    monkeypatch.setattr(measure, "_CPU_SECONDS", 0.01)


UNEVEN = shapes.Shape("shape", "nvfp4", 5, 30, heads=6, page=8, uneven=True, kv_heads=2, head_dim=80)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("wrong", ["", "longest", "last"])
def test_uneven_lengths_are_judged(wrong, monkeypatch):
    lens, real = data.lengths(UNEVEN), shapes.decode
    assert len(lens.unique()) > 2
    places = {"longest": int(lens.argmax()), "last": 4}

    def spoiled(*args, out, **options):
        real(*args, out=out, **options)
        if wrong:
            out[places[wrong], 0, :16] *= 1.5

    monkeypatch.setattr(shapes, "decode", spoiled)
    result = engine.run(UNEVEN, CPU, ["sdpa"])
    assert result.status == (RED if wrong else OK), result.reason
    assert result.peers == ()  # SDPA takes equal lengths


def test_a_cell_stands_beside_peers_of_its_own_format_of_e4m3_and_of_bf16():
    asked = []

    def run(case):
        return Result(case, OK, us=10.0, peers=(Peer("own", 30.0),))

    def peers_of(case):
        asked.append((case.format, case.query))
        return (Peer("xqa", 20.0 if case.format == "bf16" else 40.0), Peer("fa2", reason="no nvcc"))

    int8 = replace(UNEVEN, format="int8_per_token_head")
    mla = Case("mla_decode", "fp8_e4m3", 1, 64, query="fp8_e4m3")
    bf16 = replace(UNEVEN, format="bf16")
    found = list(random_cells.compared([int8, mla, bf16, replace(UNEVEN, format="fp8_e4m3")], run, peers_of))
    assert asked == [*[("fp8_e4m3", "bf16"), ("bf16", "bf16")] * 2, ("bf16", "bf16")]
    assert [p.name for p in found[0].peers] == [
        "own",
        "xqa on fp8_e4m3",
        "fa2 on fp8_e4m3",
        "xqa on bf16",
        "fa2 on bf16",
    ]
    assert [r.best_peer.name for r in found] == ["xqa on bf16", "xqa on bf16", "own", "xqa on bf16"]
    assert [r.ratio for r in found] == [2.0, 2.0, 3.0, 2.0]
    red = Result(UNEVEN, RED, reason="wrong")
    assert list(random_cells.compared([UNEVEN], lambda case: red, peers_of)) == [red]


def test_peers_of_a_cell_that_does_not_fit_are_told(monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory\nmore")

    monkeypatch.setitem(engine.PROBLEMS, "shape", full)
    assert engine.peers_of(UNEVEN, CPU, ["sdpa"]) == (Peer("peers", reason="OutOfMemoryError: CUDA out of memory"),)


def broken_by_peers(case, device, libraries=(), backend=None):
    """A peer that takes its process with it."""
    if libraries:
        os._exit(3)
    return Result(case, OK, us=1.0, reason=str(os.getpid()))


def broken(case, device, *_):
    raise RuntimeError("an illegal memory access")


def test_a_peer_that_ends_its_process_costs_its_own_cell(monkeypatch):
    monkeypatch.setattr(engine, "run", broken_by_peers)
    monkeypatch.setattr(engine, "peers_of", broken_by_peers)
    with Apart() as apart:
        first, again = apart.run(UNEVEN, CPU), apart.run(UNEVEN, CPU)
        lost, after = apart.run(UNEVEN, CPU, ["p"]), apart.run(UNEVEN, CPU)
        (peer,) = apart.peers_of(UNEVEN, CPU, ["p"])
        monkeypatch.setattr(engine, "run", broken)
        assert apart.run(UNEVEN, CPU, ["p"]).reason == "RuntimeError: an illegal memory access"
    assert first.reason == again.reason != str(os.getpid())
    assert lost.reason == after.reason != first.reason
    assert (lost.status, lost.us, lost.peers) == (OK, 1.0, (peer,))
    assert peer.us is None
    assert peer.reason.startswith("BrokenProcessPool: ")


def test_the_verdict_has_the_mean_and_the_worst():
    timed = [(10.0, 20.0), (10.0, 5.0), (10.0, 10.0)]
    results = [
        Result(replace(UNEVEN, requests=i + 1), OK, us=us, peers=(Peer("p", peer), Peer("q", 99.0)))
        for i, (us, peer) in enumerate(timed)
    ]
    found = random_cells.verdict([*results, Result(UNEVEN, OK, us=3.0), Result(UNEVEN, RED)])
    assert found["geometric_mean"] == pytest.approx(1.0)
    assert (found["cells"], found["worst"], found["lost"]) == (3, 0.5, 1)
    assert found["worst_cell"] == results[1].case.id
    assert random_cells.verdict([])["cells"] == 0


@pytest.mark.usefixtures("_small")
def test_the_command_prints_and_stores_cells_and_the_verdict(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(Limits, "of", lambda device: Limits(copy=4e12, matmul=600e12))
    stored = tmp_path / "r.jsonl"
    argv = ["bench", "--device", "cpu", "--random", "2", "--seed", "5", "--ops", "decode", "--json", str(stored)]
    monkeypatch.setattr(random_cells, "_UNEVEN", 0)
    for limit in ("MOST_SPREAD", "MOST_WAITED"):  # this machine may be busy
        monkeypatch.setattr(measure, limit, float("inf"))
    assert main.main(argv) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1].startswith("seed 5: ")
    assert "the best peer, geometric mean of 2 cells; worst " in out[-1]
    *told, verdict = [json.loads(text) for text in stored.read_text().splitlines()]
    assert [(r["seed"], r["status"], "sdpa on bf16" in r["peers"]) for r in told] == [(5, "ok", True)] * 2
    assert (verdict["random"], verdict["seed"], verdict["cells"]) == (2, 5, 2)
    assert verdict["worst"] == min(p["ratio"] for r in told for p in r["peers"].values())


@pytest.mark.usefixtures("_small")
def test_a_drawn_latent_cell_is_judged_and_timed(monkeypatch):
    case = cells(seed=3, n=1, device="cpu", ops=("mla_decode",), formats=("fp8_ds_mla",))[0]
    assert engine.run(replace(case, requests=2, tokens=20, heads=4), CPU).status == OK
    monkeypatch.setattr(decode, "mla_decode", lambda *args, **options: None)
    assert engine.run(replace(case, requests=2, tokens=20, heads=4), CPU).status == RED
