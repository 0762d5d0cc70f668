"""tersekv bench --random --ops prefill: prefills by a seed, within bounds, judged before they are timed."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from script import script

from tersekv.cli import bench, main
from tersekv.formats import kv_bytes_per_token
from tersekv.testing.bench import data, engine, measure, peers, prefill, random_cells, random_prefill, report
from tersekv.testing.bench.cases import DECODE_FORMATS, OPS, PAIRS, Case
from tersekv.testing.bench.engine import OK, RED, UNSUPPORTED, Limits, Peer, Result
from tersekv.testing.bench.prefill import PrefillShape, Prompts

CPU = torch.device("cpu")
LIMITS = Limits(copy=4e12, matmul=600e12)
BOUNDS = {"cpu": random_prefill.CPU, "cuda": random_prefill.GPU}
PAIR = PAIRS[0]
BOTH = (False, True)


def cells(seed=0, n=300, device="cuda", ops=("prefill",), formats=None):
    return random_cells.cells(seed, n, device, ops, formats)


def shape(new, total=None, format=PAIR, window=0, **options) -> PrefillShape:
    options = {"heads": 6, "kv_heads": 2, "head_dim": 64, "page": 8, **options}
    return PrefillShape.of(Prompts("some", new, total or new, window), format, **options)


RAGGED = shape((5, 20, 9), (30, 40, 9))


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(data, "ROTATE", {"cpu": 1e5})
    monkeypatch.setattr(measure, "_CPU_SECONDS", 0.01)


def test_a_seed_draws_the_same_prefills_and_more_of_them_begin_alike():
    assert cells(7, 5) == cells(7, 40)[:5]
    assert cells(7, 5) != cells(8, 5)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_draws_stay_within_bounds(device):
    bounds, drawn = BOUNDS[device], cells(device=device)
    for c in drawn:
        cached = sum(c.prompts.total) * kv_bytes_per_token("bf16", c.kv_heads, c.head_dim)
        assert cached <= bounds.nbytes
        assert c.flops <= bounds.flops
        assert 1 <= len(c.prompts.new) == c.requests <= bounds.requests
        assert all(bounds.new[0] <= n <= bounds.new[1] for n in c.prompts.new)
        pasts = [total - new for new, total in zip(c.prompts.new, c.prompts.total, strict=True)]
        assert all(n == 0 for n in pasts) or all(bounds.past[0] <= n <= bounds.past[1] for n in pasts)
        assert c.prompts.window == 0 or bounds.window[0] <= c.prompts.window <= bounds.window[1]
    assert 0.25 <= sum(c.total > 0 for c in drawn) / len(drawn) <= 0.42
    assert max(c.flops for c in drawn) > bounds.flops / 4


def test_draws_reach_every_kind_of_prefill():
    drawn = cells()
    assert {c.format for c in drawn} == {*DECODE_FORMATS, "fp16", "fp8_e5m2", *PAIRS}
    dims = [c.head_dim for c in drawn]
    assert {64, 80, 96, 112, 128, 192, 256} == {*dims}
    assert {128, 256} == {*sorted({*dims}, key=dims.count)[-2:]}
    assert {(32, 8), (64, 8), (24, 4), (28, 4), (8, 1)} <= {(c.heads, c.kv_heads) for c in drawn}
    assert {c.layout for c in drawn} == {"NHD", "HND"}
    kinds = {(c.uneven, c.total > 0, c.prompts.window > 0) for c in drawn}
    assert kinds == {(ragged, chunks, window) for ragged in BOTH for chunks in BOTH for window in BOTH}
    assert {1, 32} <= {c.requests for c in drawn}
    assert {(c.format, c.query) for c in drawn if c.query != "bf16"} == {("fp8_e4m3", "fp8_e4m3")}
    assert len({c.id for c in drawn}) == len(drawn)


def test_formats_are_those_that_are_named_and_decodes_are_drawn_beside():
    assert {c.format for c in cells(formats=("nvfp4", PAIR))} == {"nvfp4", PAIR}
    assert {c.op for c in cells(ops=OPS)} == {"shape", "mla_decode", "prefill"}
    assert cells(formats=("fp8_ds_mla",)) == []
    assert bench.drawn_ops(Namespace(ops=OPS)) == random_cells.DECODES
    assert bench.drawn_ops(Namespace(ops=("prefill",))) == ("prefill",)


def test_sizes_of_a_prefill_are_those_of_its_shape():
    p = prefill.Prefill(replace(RAGGED, layout="HND"), CPU)
    assert (RAGGED.requests, RAGGED.tokens, RAGGED.total, RAGGED.uneven) == (3, 11, 26, True)
    assert RAGGED.cell == "3 x 11 of 26"
    assert p.flops == 4 * 6 * 64 * sum(sum(range(t - n + 1, t + 1)) for n, t in ((5, 30), (20, 40), (9, 9)))
    assert p.nbytes == 79 * 2 * (64 + 32 + 4) + 34 * 6 * 64 * (2 + 2)
    assert p.layer.k.shape[2:] == (2, 64)
    assert p.layer.k.stride(1) < p.layer.k.stride(2)  # the tokens of a head lie side by side
    assert prefill.shape_of(Case("prefill", "bf16", 0, 24, total=70)).prompts == Prompts("24 of 70", (24,), (70,))


@pytest.mark.parametrize(
    "case",
    [shape((5, 20, 9, 30, 4), (30, 40, 9, 90, 5)), replace(RAGGED, layout="HND", head_dim=96, format="nvfp4"),
     shape((40,), (70,), window=9),
     shape((12, 12), format="fp8_e4m3", query="fp8_e4m3"),
     shape((9, 3), (20, 3), "int8_per_token_head", new_rows=True)],
    ids=lambda c: c.id,
)  # fmt: skip
@pytest.mark.parametrize("wrong", BOTH)
def test_a_wrong_row_of_the_longest_request_is_red_and_not_timed(case, wrong, monkeypatch):
    real, longest = prefill.prefill, max(range(case.requests), key=case.prompts.total.__getitem__)

    def spoiled(*args, out, **options):
        real(*args, out=out, **options)
        if wrong:
            out[sum(case.prompts.new[: longest + 1]) - 1, 0, :16] *= 1.5

    monkeypatch.setattr(prefill, "prefill", spoiled)
    result = engine.run(case, CPU, ["sdpa"])
    assert result.status == (RED if wrong else OK), result.reason
    assert (result.us is None) == wrong


def test_sdpa_takes_whole_prompts_of_equal_lengths_in_a_batch():
    result = engine.run(shape((20, 20, 20)), CPU, ["sdpa"])
    assert [(p.name, p.us is None, p.reason) for p in result.peers] == [("sdpa on bf16", False, "")]
    for other in (RAGGED, shape((5, 5), (9, 9)), shape((20,), window=7), shape((9, 7))):
        assert not list(peers.SDPA().peers(prefill.Prefill(other, CPU)))


def test_a_head_size_that_would_lose_the_device_is_told_and_not_tried():
    found = list(engine.rivals(prefill.Prefill(shape((20,), format="bf16", head_dim=96), CPU), CPU, ["flashinfer"]))
    assert [p.name for p in found] == ["flashinfer fa2", "flashinfer fa3", "flashinfer fmha_v2"]
    assert all(p.us is None and "UnsupportedError: not tried" in p.reason for p in found)


def test_drawn_prefills_stand_beside_sdpa_and_peers_over_bf16():
    assert peers.default(torch.device("cuda"), [RAGGED]) == ["flashinfer", "sdpa"]
    assert peers.default(torch.device("cuda"), [RAGGED, Case("append", "bf16", 0, 1)]) == ["flashinfer", "vllm"]
    asked = []

    def peers_of(case):
        asked.append((case.format, case.query, case.prompts))
        return (Peer("fa3", 20.0),)

    e4m3 = replace(RAGGED, format="fp8_e4m3", query="fp8_e4m3")
    found = list(random_cells.compared([RAGGED, e4m3], lambda case: Result(case, OK, us=10.0), peers_of))
    assert asked == [("bf16", "bf16", RAGGED.prompts)] * 2
    assert [p.name for r in found for p in r.peers] == ["fa3 on bf16"] * 2


def test_the_verdict_has_rates_by_format_and_query():
    e4m3 = replace(RAGGED, format="fp8_e4m3")
    timed = [(e4m3, 1e6), (e4m3, 4e6), (replace(e4m3, query="fp8_e4m3"), 6e6)]
    results = [Result(c, OK, us=1.0, flops=n, peers=(Peer("p", 0.5),)) for c, n in timed]
    found = random_cells.verdict([*results, Result(RAGGED, RED), Result(RAGGED, UNSUPPORTED)])
    assert found["tflop_s"] == {"fp8_e4m3": pytest.approx(2.0), "fp8_e4m3, q fp8_e4m3": pytest.approx(6.0)}
    assert (found["cells"], found["worst"], found["lost"]) == (3, 0.5, 3)


def test_the_command_runs_tiny_cells_on_a_cpu(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(Limits, "of", lambda device: LIMITS)
    for limit in ("MOST_SPREAD", "MOST_WAITED"):  # this machine may be busy
        monkeypatch.setattr(measure, limit, float("inf"))
    monkeypatch.setattr(random_prefill, "CPU", replace(random_prefill.CPU, flops=2e7))
    for share in ("_CHUNKS", "_RAGGED", "_WINDOWS"):
        monkeypatch.setattr(random_prefill, share, 0)
    stored = tmp_path / "r.jsonl"
    argv = ["bench", "--device", "cpu", "--random", "2", "--seed", "5", "--ops", "prefill", "--json", str(stored)]
    assert main.main([*argv, "--formats", f"bf16,{PAIR}"]) == 0
    *_, rates, last = capsys.readouterr().out.splitlines()
    assert rates.startswith("TFLOP/s of prefill, geometric means: ")
    assert "the best peer, geometric mean of 2 cells; worst " in last
    *told, verdict = [json.loads(text) for text in stored.read_text().splitlines()]
    assert [(r["op"], r["status"], "sdpa on bf16" in r["peers"]) for r in told] == [("prefill", OK, True)] * 2
    assert all(r["flops"] <= 2e7 and r["prompts"]["new"] == r["prompts"]["total"] for r in told)
    assert {*verdict["tflop_s"]} == {r["format"] for r in told}


def test_the_page_names_a_drawn_prefill():
    page = script("scripts/performance_page.py")
    record = report.record(Result(replace(RAGGED, prompts=replace(RAGGED.prompts, window=7)), OK, us=1.0), LIMITS, {})
    name = "prefill, 3 × 11 of 26 tokens, pages of 8, uneven, 6/2 heads, D 64, window 7"
    assert page.drawn_cell(json.loads(json.dumps(record))) == name
