"""What `tersekv bench` tells of its results, and the page that is written from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from script import script

from tersekv.testing.bench import data, engine, peers, plot, random_cells, report
from tersekv.testing.bench.cases import CPU_QUICK, GPU, OPS, Case, grid, with_cells
from tersekv.testing.bench.engine import OK, RED, UNSUPPORTED, Limits, Peer, Result
from tersekv.testing.bench.measure import Timing
from tersekv.testing.bench.shapes import Shape

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
LIMITS = Limits(copy=4e12, matmul=600e12)


def results() -> list[Result]:
    case = Case("decode", "fp8_e4m3", 64, 8192)
    mla = Case("mla_decode", "fp8_e4m3", 128, 8192, heads=128)
    won, lost = Peer("flashinfer xqa", 300.0, 1e-3), Peer("flashinfer xqa", 100.0, 1e-3)
    return [
        Result(
            case, OK, 250.0, 1e-3, "", 1_000_000_000, 8_000_000_000, (won, Peer("flashinfer fa2", reason="no nvcc"))
        ),
        Result(replace(case, format="nvfp4"), OK, 200.0, 1e-3, "", 600_000_000, 0, (lost,), "fp8_e4m3"),
        Result(mla, OK, 400.0, 1e-3, "", 600_000_000, 292_000_000_000, ()),
        Result(replace(case, host=True), OK, 12.0, 1e-3, "", 1, 1, ()),
        Result(replace(case, format="bf16"), UNSUPPORTED, reason="triton: no"),
        Result(replace(case, format="fp8_per_token_head"), RED, error=float("inf"), reason="want error <= 0.003"),
    ]


def test_a_line_tells_time_rate_share_error_and_peers():
    lines = [report.line(r, LIMITS) for r in results()]
    for part in (
        "64 x 8192",
        "250.00 us",
        "4 TB/s",
        "100% of limit",
        "error 1.0e-03",
        "1.2x as fast as flashinfer xqa (300.00 us)",
    ):
        assert part in lines[0]
    assert "0.5x as fast as flashinfer xqa on fp8_e4m3 (100.00 us)" in lines[1]
    assert "730 TFLOP/s  122% of limit" in lines[2]
    assert "of limit" not in lines[3]
    assert lines[4].endswith("not run: triton: no")
    assert lines[5].endswith("RED: want error <= 0.003")


def test_the_summary_has_means_losses_and_counts():
    text = "\n".join(report.summary(results(), LIMITS))
    assert "1.2x as fast as the best peer (1 case)" in text
    assert "slower than a peer\n  decode / nvfp4 / 64 x 8192 / H 32 / page 64: 200.00 us, flashinfer xqa 100.00" in text
    assert text.endswith("4 timed, 1 not run, 1 red, 0 failed")


@pytest.mark.parametrize("us", [1e-3, 1.0, 1e6])
def test_the_picture_shows_the_line_of_the_limit(us):
    axes = Figure().add_subplot()
    case = Result(Case("decode", "bf16", 1, 8), OK, us, 1e-3, "", 4_000_000, 8)
    plot._panel(axes, "bytes", [case], LIMITS, ["bf16"])
    (low, high), line = axes.get_ylim(), axes.get_lines()[0]
    assert line.get_label() == "copy, 4 TB/s"
    assert low < min(line.get_ydata()) < max(line.get_ydata()) < high
    assert low < us < high


@pytest.mark.parametrize("ops", [OPS, ("append",), ("decode", "mla_decode")])
def test_all_that_the_picture_says_lies_on_its_page(ops):
    """With every operation and format that a GPU is timed with, and a chip of a long name."""
    cases = [c for c in grid(GPU, ops, None) if not c.host]
    timed = [Result(c, OK, 9.0 + i, 1e-3, "", 10**6, 10**6 if i % 2 else 10**10) for i, c in enumerate(cases)]
    title = "tersekv 0.1.0 on CPU Intel(R) Xeon(R) Platinum 8488C Processor @ 2.40GHz of a longer name, 2026-11-25"
    figure = plot.drawn(timed, LIMITS, title)
    figure.canvas.draw()
    [legend] = figure.legends
    told = {text.get_text() for text in legend.get_texts()}
    assert {c.op for c in cases} | {c.format for c in cases} <= told
    box, heading, page = (x.get_window_extent() for x in (legend, figure._suptitle, figure.patch))
    for part in (box, heading, *(text.get_window_extent() for text in legend.get_texts())):
        assert page.x0 <= part.x0 < part.x1 <= page.x1
        assert page.y0 <= part.y0 < part.y1 <= page.y1
    for axes in figure.axes:
        assert axes.get_tightbbox().x1 <= box.x0
        assert axes.get_tightbbox().y1 <= heading.y0
    assert not heading.overlaps(box)
    colours = [h.get_color() for h in legend.legend_handles if h.get_marker() == "s" and h.get_color() != "0.45"]
    assert len({*colours}) == len(colours), "a colour is one format's"


def test_a_drawn_decode_is_called_what_it_is():
    shape = Result(Shape("shape", "bf16", 2, 30, kv_heads=8), OK, 5.0, 1e-3, "", 9, 9)
    assert report.line(shape, LIMITS).startswith("decode             bf16 ")
    assert any(text.startswith("  decode bf16") for text in report.summary([shape], LIMITS))
    assert shape.case.id.startswith("decode / bf16 / 2 x 30")
    assert shape.case.as_dict()["op"] == "shape"


def records() -> list[dict]:
    where = {**report.environment(CPU, ()), "chip": "NVIDIA H200", "date": "2026-01-02", "driver": "1.2"}
    return [json.loads(json.dumps(report.record(r, LIMITS, where), allow_nan=False)) for r in results()]


def test_a_record_carries_the_case_the_result_and_the_environment():
    r = records()[0]
    for name in (
        "chip",
        "driver",
        "torch",
        "triton",
        "tersekv",
        "date",
        "commit",
        "op",
        "format",
        "bytes",
        "copy_tb_s",
    ):
        assert name in r
    assert (r["us"], r["tb_s"], r["share_of_limit"]) == (250.0, 4.0, 1.0)
    assert r["peers"] == {
        "flashinfer xqa": {"us": 300.0, "ratio": 1.2, "spread": 0.0, "waited": 0.0},
        "flashinfer fa2": {"us": None, "reason": "no nvcc"},
    }


# The page


def page():
    return script("scripts/performance_page.py")


def test_the_page_is_up_to_date():
    module = page()
    text = module.PAGE.read_text()
    assert module.renewed(text) == text, "run python scripts/performance_page.py --write"


def test_the_page_shows_wins_losses_and_what_has_no_time(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records())))
    text = page().results(page().load(tmp_path))
    assert "## NVIDIA H200\n" in text
    assert "| 64 × 8K | 250.0 | 200.0 | 300.0 xqa |" in text
    assert "| 128 × 8K, H 128 | 400.0 |" in text
    assert "- decode, nvfp4, 64 × 8K: 200.0 µs, flashinfer xqa on fp8_e4m3 100.0 µs (0.50)" in text
    assert "- red, 1 case such as decode, fp8_per_token_head, 64 × 8K: want error <= 0.003" in text
    assert "driver 1.2" in text


def test_means_are_like_for_like_and_tell_the_ratio_to_a_peer_over_16_bits(tmp_path):
    case = Case("mla_decode", "bf16", 16, 8192, heads=16)
    peer = Peer("flashinfer fa3", 50.0, 1e-3)
    mine = [
        Result(case, OK, 40.0, 1e-3, "", 10, 10, (peer,)),
        Result(replace(case, format="fp8_e4m3"), OK, 25.0, 1e-3, "", 10, 10, (replace(peer, us=100.0),)),
        Result(
            replace(case, format="fp8_e4m3", query="fp8_e4m3"), OK, 20.0, 1e-3, "", 10, 10,
            (replace(peer, us=100.0),), "fp8_e4m3",
        ),
    ]  # fmt: skip
    where = {**report.environment(CPU, ()), "chip": "NVIDIA H200", "date": "2026-01-02"}
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(report.record(r, LIMITS, where)) for r in mine))
    text = page().results(page().load(tmp_path))
    assert "| mla_decode | fp8_e4m3 | 1 | 0% | 4.00 (1) | 2.00 (2.00) |" in text
    assert "| mla_decode | fp8_e4m3, q e4m3 | 1 | 0% | 5.00 (1, on fp8_e4m3) | 2.50 (2.50) |" in text
    assert "A ratio from 0.995 on counts as even" in text


def test_the_page_tells_chunks_of_a_prompt_from_the_whole(tmp_path):
    whole = Case("prefill", "bf16", 0, 512)
    mine = [
        Result(case, OK, us, 1e-3, "", 10, 600_000_000)
        for case, us in ((whole, 10.0), (replace(whole, total=8192), 20.0), (replace(whole, total=2048), 30.0))
    ]
    where = {**report.environment(CPU, ()), "chip": "NVIDIA H200", "date": "2026-01-02"}
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(report.record(r, LIMITS, where)) for r in mine))
    text = page().results(page().load(tmp_path))
    for told in ("512 tokens | 10.0", "512 of 8K tokens | 20.0", "512 of 2K tokens | 30.0"):
        assert f"| {told} |" in text


def test_of_two_results_of_a_case_the_later_counts(tmp_path):
    old, new = records()[0], {**records()[0], "date": "2026-01-03", "us": 240.0}
    (tmp_path / "a.jsonl").write_text(json.dumps(new))
    (tmp_path / "b.jsonl").write_text(json.dumps(old))
    (r,) = page().load(tmp_path)
    assert r["us"] == 240.0


def test_a_page_without_results_says_so(tmp_path):
    assert "No results are stored yet." in page().results(page().load(tmp_path))


def test_the_page_shows_draws_and_their_cells_the_worst_first(tmp_path):
    shape = Shape("shape", "int4_per_token_head", 7, 1000, heads=12, page=16, kv_heads=3, head_dim=96, uneven=True)
    latent = Case("mla_decode", "fp8_e4m3", 2, 500, heads=16)
    mine = [
        Result(latent, OK, 10.0, 1e-3, "", 40_000_000, 10, (Peer("flashinfer fa3 on bf16", 15.0),)),
        Result(shape, OK, 40.0, 1e-3, "", 80_000_000, 10, (Peer("flashinfer xqa on fp8_e4m3", 30.0),)),
        Result(replace(shape, page=8), OK, 40.0, 1e-3, "", 80_000_000, 10),
        Result(replace(shape, page=32), UNSUPPORTED, reason="no"),
    ]
    where = {**report.environment(CPU, ()), "chip": "NVIDIA H200", "date": "2026-01-02", "seed": 4}
    told = [report.record(r, LIMITS, where) for r in mine]
    told.append({"random": 4, "seed": 4, **random_cells.verdict(mine), **where})
    (tmp_path / "a_random_cells.json").write_text("".join(json.dumps(r) + "\n" for r in told))
    lines = page().drawn(tmp_path).splitlines()
    assert "| NVIDIA H200, seed 4, 2026-01-02 | 2 | 1.06 | 0.75 | 1 |" in lines
    assert "Each cell that loses; the JSON has all:" in lines
    assert lines[-2] == (
        "| int4_per_token_head, 7 × 1000, pages of 16, uneven, 12/3 heads, D 96 | 40.0 | 30.0 xqa on fp8_e4m3 | 0.75 |"
    )
    assert "No draw is stored yet." in page().drawn(tmp_path / "none")


def test_what_a_rotation_of_appended_rows_costs_is_told():
    asked = list(grid(with_cells(CPU_QUICK, ["16"]), ("append", "rope_append"), ("fp8_e4m3",)))
    assert [(c.op, c.rotated) for c in asked] == [(op, on) for op in ("append", "rope_append") for on in (False, True)]
    got = list(engine.bench(asked, CPU, ["flashinfer"]))
    assert [r.status for r in got] == [OK] * 4
    # No peer rotates: not even one that is not installed is asked.
    assert [len(r.peers) for r in got] == [0, 0, 1, 0]
    timed = [replace(r, us=us, spread=0.0, waited=0.0) for r, us in zip(got, (10.0, 12.0, 20.0, 21.0), strict=True)]
    text = "\n".join(report.summary(timed, LIMITS))
    assert f"rotated: 1.12x the time of the same calls without it (2 cases), at most 1.2x: {asked[1].id}" in text
    assert asked[1].id.endswith("/ rotated")
    assert "rotated" in report.line(timed[1], LIMITS)


def test_the_pages_tables_tell_rotated_appends_apart(tmp_path):
    page = script("scripts/performance_page.py")
    plain = Result(Case("append", "fp8_e4m3", 0, 16384, heads=8), OK, 25.0, 0.0, "", 100_000_000, 0, ())
    turned = replace(plain, case=replace(plain.case, rotated=True), us=27.0)
    where = {"chip": "NVIDIA H200", "date": "2026-11-24"}
    text = "\n".join(json.dumps(report.record(r, LIMITS, where)) for r in (plain, turned))
    (tmp_path / "r.jsonl").write_text(text)
    assert [page.cell(r) for r in page.load(tmp_path)] == ["16384 tokens", "16384 tokens, rotated"]


def test_a_peer_of_a_format_does_not_hide_those_of_e4m3(monkeypatch):
    """Where another library is the faster over e4m3, it counts beside one that has the format."""

    class Library:
        any_format = False

        def peers(self, problem):
            yield data.Rival(f"theirs, {problem.case.format}", lambda: problem.calls)

    times = iter((5.0, 3.0, 5.0, 4.0))
    monkeypatch.setitem(peers.LIBRARIES, "library", Library())
    monkeypatch.setattr(engine, "time_of", lambda calls, case, device: Timing(next(times)))
    case = Case("decode", "fp8_e4m3", 1, 20)
    own, other = engine.bench([case, replace(case, format="int4_per_token_head")], CPU, ["library"])
    assert [(p.name, p.us) for p in own.peers] == [("theirs, fp8_e4m3", 3.0)]
    assert [(p.name, p.us) for p in other.peers] == [
        ("theirs, int4_per_token_head", 4.0), ("theirs, fp8_e4m3 on fp8_e4m3", 3.0)
    ]  # fmt: skip
    assert (other.peers_format, other.best_peer.us) == (None, 3.0)


def unsteady(spread=0.0, waited=0.0):
    case = Case("decode", "fp8_e4m3", 1, 20)
    best, other = Peer("a", 50.0), Peer("b", 99.0, spread=0.9)
    return Result(case, OK, 100.0, 1e-3, "", 10, 10, (best, other), spread=spread, waited=waited)


def test_no_ratio_is_made_of_times_that_are_unsteady():
    steady, noisy, starved = unsteady(), unsteady(spread=0.5), unsteady(waited=0.25)
    assert "0.5x as fast as a (50.00 us)" in report.line(steady, LIMITS)
    assert "b: 99.00 us, UNSTEADY, runs differ by 90%" in report.line(steady, LIMITS)
    for r, why in ((noisy, "runs differ by 50%"), (starved, "threads waited for a core 25% of their time")):
        line = report.line(r, LIMITS)
        assert f"UNSTEADY, {why}" in line
        assert "as fast as" not in line
        assert r.ratio is None
        assert not list(report.losses([r]))
        told = report.record(r, LIMITS, {})
        assert (told["spread"], told["waited"], told["peers"]["a"]["ratio"]) == (r.spread, r.waited, None)
    assert report.record(steady, LIMITS, {})["peers"]["a"]["ratio"] == 0.5
    text = "\n".join(report.advice([noisy, starved], CPU))
    assert text.startswith("4 of 6 times unsteady, 3 times over: runs differ by more than 20%")
    assert "OMP_WAIT_POLICY=passive" in text
    assert "other processes" in text
    assert "nvidia-smi" in "\n".join(report.advice([noisy], torch.device("cuda")))
    assert not list(report.advice([replace(steady, peers=())], CPU))


def test_what_an_option_costs_is_told_of_steady_times_only():
    plain = unsteady()
    more = replace(plain, case=replace(plain.case, rotated=True))
    assert report.cost_of("rotated", [plain, more])
    assert not report.cost_of("rotated", [plain, replace(more, spread=0.5)])


def test_a_peer_that_reads_a_copy_in_16_bits_stands_once_beside_a_case(monkeypatch):
    class Library:
        any_format = True

        def peers(self, problem):
            yield data.Rival("sdpa on bf16", lambda: problem.calls)

    monkeypatch.setitem(peers.LIBRARIES, "library", Library())
    monkeypatch.setattr(engine, "time_of", lambda calls, case, device: Timing(1.0))
    case = Case("decode", "fp8_e4m3", 1, 20)
    _, other = engine.bench([case, replace(case, format="int4_per_token_head")], CPU, ["library"])
    assert [p.name for p in other.peers] == ["sdpa on bf16"]


def test_sizes_and_counts_are_told_in_words():
    line = report.line(unsteady(), LIMITS)
    assert "1 x 20 tokens  32 heads  page 64" in line
    text = "\n".join(report.summary([replace(unsteady(), peers=(Peer("a", 50.0),))], LIMITS))
    assert "1 case " in text
    assert "(1 case)" in text
    assert "1 cases" not in text
