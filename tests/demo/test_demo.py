"""`tersekv demo` and `tersekv eval`: the demo models through the paged cache, and what is made of it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tersekv import KV_FORMATS, LATENT_FORMATS, UnsupportedError, kv_bytes_per_token, latent_bytes_per_token
from tersekv.cli import main
from tersekv.demo import measure as tool
from tersekv.demo import report, text
from tersekv.demo.attend import RUNNERS
from tersekv.demo.measure import Measured, ModelResult, Settings, windows
from tersekv.demo.subject import BuiltIn

ROOT = Path(__file__).parents[2]

QUICK = Settings(chunk=96, batch=2, generate=5, prompt=40)
NAMES = tuple(RUNNERS)


@pytest.fixture(scope="module")
def heldout():
    return text.encode(text.heldout_text())


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(name):
    return BuiltIn(name).model


@pytest.fixture(scope="module")
def measured(name, heldout):
    return measure(name, heldout[:601], QUICK)


def measure(name, *rest):
    return tool.measure(BuiltIn(name), *rest)


def runner(name, format, requests, longest, page_size):
    return BuiltIn(name).runner(format, requests, longest, page_size, None)


@torch.inference_mode()
def logits(paged, tokens, chunk):
    return torch.cat([paged.step({"r": part}) for part in tokens.split(chunk)])


def distance(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("chunk", [1, 7, 48, 200])
def test_the_paged_path_equals_dense_attention_whatever_the_chunk(name, model, heldout, chunk):
    tokens = heldout[:150]
    paged = runner(name, "fp16", 1, len(tokens), page_size=16)
    assert distance(logits(paged, tokens, chunk), model(tokens)) < 2e-3


def test_requests_of_uneven_length_do_not_disturb_each_other(name, model, heldout):
    long, short = heldout[:100], heldout[500:561]
    paged = runner(name, "fp16", 2, 100, page_size=16)
    with torch.inference_mode():
        paged.step({"long": long[:40], "short": short[:33]})
        both = paged.step({"long": long[40:], "short": short[33:]})
    assert distance(both[:60], model(long)[40:]) < 2e-3
    assert distance(both[60:], model(short)[33:]) < 2e-3


def test_stale_rows_of_the_cache_reach_no_output(name, model, heldout):
    tokens = heldout[:70]
    paged = runner(name, "fp16", 2, len(tokens), page_size=16)
    for layer in paged.cache.layers:
        for rows in (layer.k, layer.v) if name == "llama" else (layer.ckv, layer.kpe):
            rows.fill_(torch.nan)
    assert logits(paged, tokens, 32).isfinite().all()


def test_windows_score_every_byte_but_the_first_once():
    for n in (2, 9, 10, 17):
        pieces = windows(torch.arange(n), 8)
        assert torch.cat([p[1:] for p in pieces]).tolist() == list(range(1, n))
        assert all(2 <= len(p) <= 9 for p in pieces)


def test_perplexity_is_the_dense_models(name, model, heldout, measured):
    bits = text.bits_per_byte(model, heldout[:601], context=600)
    assert measured.formats[0].perplexity == pytest.approx(2**bits, rel=2e-3)


def test_every_format_gives_finite_numbers_and_the_finer_is_closer(name, measured):
    found = {m.format: m for m in measured.formats}
    assert set(found) == set(KV_FORMATS if name == "llama" else LATENT_FORMATS)
    for m in found.values():
        assert m.unsupported is None
        assert torch.tensor([m.perplexity, m.kl, m.top1, m.tokens_per_s, m.times_smaller]).isfinite().all()
        assert 0 <= m.kl < 0.1
        assert 0.8 < m.top1 <= 1
        assert len(m.sample) == QUICK.generate
    assert (found["bf16"].kl, found["bf16"].top1, found["bf16"].same) == (0.0, 1.0, QUICK.generate)
    assert 0 < found["fp16"].kl < 1e-4 < found["fp8_e4m3"].kl < found["fp8_e5m2"].kl
    if name == "llama":
        assert found["int8_per_token_head"].kl < found["fp8_per_token_head"].kl < found["int4_per_token_head"].kl
        assert found["int4_per_token_head"].kl < found["nvfp4"].kl
        assert found["int4_per_token_head"].kl <= 1.3e-2
    else:
        assert found["fp8_ds_mla"].kl < found["fp8_e4m3"].kl


def test_sizes_are_those_of_the_formats(name, model, measured):
    c = model.config
    for m in measured.formats:
        if name == "llama":
            one = kv_bytes_per_token(m.format, c.num_kv_heads, c.head_dim)
        else:
            one = latent_bytes_per_token(m.format, c.kv_lora_rank, c.qk_rope_head_dim)
        assert m.bytes_per_token == c.num_layers * one
        assert m.times_smaller == measured.formats[0].bytes_per_token / m.bytes_per_token


def test_the_reference_is_measured_even_if_not_asked_for(heldout):
    result = measure("llama", heldout[:60], QUICK, ["nvfp4"])
    assert [m.format for m in result.formats] == ["bf16", "nvfp4"]


def test_calibration_sets_the_scales_so_that_the_largest_value_of_another_text_just_fits(name, heldout, monkeypatch):
    seen = {}
    original = tool.run_format

    def spy(subject, format, tokens, prompt, settings, scales, tick, options):
        seen[format] = scales
        return original(subject, format, tokens, prompt, settings, scales, tick, options)

    monkeypatch.setattr(tool, "run_format", spy)
    wanted = ["fp8_e4m3", "fp16", "nvfp4", "fp8_ds_mla"]
    paged, other = runner(name, "bf16", 1, 40, 16), heldout[600:640]
    logits(paged, other[:-1], 40)
    largest = [tuple(float(x.abs().max()) for x in layer) for layer in paged.rows()]
    if name == "deepseek":  # one scale for latent and rotary part
        largest = [(max(layer),) for layer in largest]
    calibrated = dataclasses.replace(QUICK, calibrate=True, chunk=40)
    measure(name, heldout[:60], calibrated, wanted, None, None, other)
    assert seen["bf16"] is None
    assert seen["fp8_e4m3"] == [tuple(x / 448.0 for x in layer) for layer in largest]
    assert all(x == 1.0 for layer in seen["fp16"] for x in layer)
    if name == "llama":
        assert seen["nvfp4"] == [tuple(x / (6 * 448.0) for x in layer) for layer in largest]
    measure(name, heldout[:60], QUICK, ["fp8_e4m3", "fp8_e4m3+fitted"], None, None, other)
    assert seen["fp8_e4m3"] is None
    assert seen["fp8_e4m3+fitted"][0][0] == pytest.approx(largest[0][0] / 448)
    with pytest.raises(ValueError, match="other: want another part of the text to calibrate on, got None"):
        measure(name, heldout[:60], calibrated, wanted)


def test_a_format_without_a_kernel_is_told_not_hidden(heldout, monkeypatch):
    original = tool.run_format

    def refuse(subject, format, *rest):
        if format == "nvfp4":
            raise UnsupportedError("decode has no backend for nvfp4")
        return original(subject, format, *rest)

    monkeypatch.setattr(tool, "run_format", refuse)
    result = measure("llama", heldout[:40], QUICK, ["fp16", "nvfp4"])
    assert result.formats[-1] == Measured("nvfp4", unsupported="decode has no backend for nvfp4")
    assert "nvfp4 is refused: decode has no backend" in printed(report.refusals(result)[0])
    assert "refused" in printed(report.table(result))


def printed(what) -> str:
    from rich.console import Console

    console = Console(width=80)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def test_the_table_fits_into_80_columns(measured):
    out = printed(report.table(measured))
    assert "…" not in out
    assert all(m.format in out for m in measured.formats)


def test_the_command_rounds_as_the_tables_of_the_docs_do():
    kept = json.loads((ROOT / "benchmarks" / "results" / "demo_cpu.json").read_text())["models"][0]
    told = printed(report.table(ModelResult("llama", 9, 9, "p", [Measured(**m) for m in kept["formats"]])))
    page = (ROOT / "docs" / "index.md").read_text()
    for m in kept["formats"]:
        line = next((row for row in page.splitlines() if row.startswith(f"| {m['format']} | ") and "%" in row), None)
        if line is not None:
            assert line.split(" | ")[-1].removesuffix(" |") in told.split(), line


def test_equal_samples_share_a_line():
    rows = [Measured("bf16", sample="a\nb"), Measured("fp16", sample="a\nb"), Measured("nvfp4", sample="c")]
    lines = printed(report.samples(ModelResult("llama", 9, 9, "p", rows))).splitlines()
    assert [line.strip() for line in lines[1:]] == ["a↵b", "bf16, fp16", "c", "nvfp4"]


def test_json_has_no_number_that_json_cannot_say():
    row = Measured("bf16", tokens_per_s=float("nan"), kl=0.0)
    [told] = report.as_json([ModelResult("llama", 9, 9, "p", [row])])
    assert told["formats"][0]["tokens_per_s"] is None
    assert told["formats"][0]["kl"] == 0.0
    json.dumps(told, allow_nan=False)


def test_labels_of_the_picture_do_not_overlap(tmp_path, measured):
    from matplotlib.figure import Figure

    figures = []
    original = Figure.savefig
    Figure.savefig = lambda self, *a, **k: (figures.append(self), original(self, *a, **k))
    try:
        report.plot([measured], "title", str(tmp_path / "p.png"))
    finally:
        Figure.savefig = original
    [axes] = figures[0].axes
    renderer = figures[0].canvas.get_renderer()  # not the finer picture's, with larger letters
    boxes = [t.get_window_extent(renderer) for t in axes.texts]
    assert len(boxes) == len(measured.formats)
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


ROW_KEYS = {f.name for f in dataclasses.fields(Measured)}


def test_demo_prints_tables_and_writes_json_and_picture(tmp_path, capsys):
    stored, picture = tmp_path / "d.json", tmp_path / "d.png"
    argv = ("--tokens", "80", "--formats", "fp8_e4m3,nvfp4", "--json", str(stored), "--plot", str(picture))
    assert main.main(("demo", "--device", "cpu", *argv)) == 0
    out = capsys.readouterr().out
    assert "the first 80 bytes of held-out" in out
    assert "Llama-style" in out
    assert "DeepSeek-style" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    data = json.loads(stored.read_text())
    assert set(data) == {"command", "text", "options", "environment", "seconds", "interrupted", "models"}
    assert data["command"] == "demo"
    assert data["options"]["dtype"] == "float32"
    assert [m["model"] for m in data["models"]] == list(NAMES)
    assert [[f["format"] for f in m["formats"]] for m in data["models"]] == [
        ["bf16", "fp8_e4m3", "nvfp4"],
        ["bf16", "fp8_e4m3"],
    ]
    for m in data["models"]:
        assert m["bytes_scored"] == 80
        assert m["reference"] == "bf16"
        assert all(set(f) == ROW_KEYS for f in m["formats"])


def test_eval_measures_any_file_of_at_least_two_bytes(tmp_path, capsys):
    file, stored = tmp_path / "x.bin", tmp_path / "x.json"
    file.write_bytes(bytes([255, 0, 7]))
    argv = ("--text", str(file), "--model", "llama", "--formats", "nvfp4", "--json", str(stored))
    argv += ("--tokens", str(10**30))  # all that there are
    assert main.main(("eval", "--device", "cpu", *argv)) == 0
    assert ": 2 bytes of x.bin" in capsys.readouterr().out
    [told] = json.loads(stored.read_text())["models"]
    assert told["bytes_scored"] == 2
    assert list(tmp_path.glob("*.png")) == []


def eval_of_stdin(tmp_path, stdin, **options):
    files = ("--json", str(tmp_path / "x.json"))
    argv = ("eval", "--device", "cpu", "--text", "-", "--model", "llama", "--formats", "bf16", *files)
    command = [sys.executable, "-m", "tersekv", *argv]
    return subprocess.run(command, stdin=stdin, capture_output=True, text=True, timeout=300, **options)


def test_eval_reads_a_pipe(tmp_path):
    (tmp_path / "text").write_bytes(b"for key in d:\xff")
    with open(tmp_path / "text", "rb") as stdin:
        done = eval_of_stdin(tmp_path, stdin)
    assert (done.returncode, done.stderr) == (0, "")
    assert ": 13 bytes of standard input" in done.stdout
    assert json.loads((tmp_path / "x.json").read_text())["text"] == "standard input"


def test_eval_says_on_a_terminal_that_it_waits_for_a_text(tmp_path):
    mine, its = os.openpty()
    os.write(mine, b"for key in d\n\x04")  # Ctrl-D
    done = eval_of_stdin(tmp_path, its)
    os.close(its), os.close(mine)
    assert (done.returncode, done.stderr) == (0, "reading the text from the terminal; Ctrl-D on a new line ends it\n")
    assert ": 12 bytes of standard input" in done.stdout


def test_the_file_on_standard_input_is_not_written_over(tmp_path):
    text = tmp_path / "x.json"
    text.write_text("for key in d")
    with open(text, "rb") as stdin:
        done = eval_of_stdin(tmp_path, stdin)
    assert done.returncode == 2
    assert "want a file of its own, got that of --text" in done.stderr
    assert text.read_text() == "for key in d"


def test_without_standard_input_eval_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", None)
    assert main.main(("eval", "--device", "cpu", "--text", "-")) == 2
    assert "--text -: there is no standard input" in capsys.readouterr().err


def test_without_matplotlib_the_picture_is_left_out_and_that_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    file = tmp_path / "x.txt"
    file.write_text("for key in d: print(key)")
    argv = ("--json", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.png"))
    assert main.main(("eval", "--text", str(file), "--formats", "fp16", "--device", "cpu", *argv)) == 0
    assert "no picture: it needs matplotlib" in capsys.readouterr().out
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("demo", "--formats", "fp3"), "want some of bf16,"),
        (("demo", "--tokens", "0"), "want a positive number, got '0'"),
        (("demo", "--tokens", "²"), "want a positive number, got '²'"),
        (("demo", "--threads", "10000000"), "want at most"),
        (("demo", "--plot", "x.txt"), "want a name ending in .png"),
        (("demo", "--device", "meta"), "--device meta: "),
        (("demo", "--device", "nonsense"), "--device nonsense: "),
        (("demo", "--device", "xla"), "with arguments from the 'XLA' backend\n"),
        (("demo", "--json", "none"), "--json none: want the name of a file; without --json none is written"),
        (("demo", "--plot", "none"), "want a name ending in .png, .svg, .pdf, got 'none'"),
        (("demo", "--json", "-"), "--json -: want the name of a file"),
        (("demo", "--json", "/sys/x.json"), "--json /sys/x.json: want a file that can be written, got "),
        (("demo", "--json", "x.png", "--plot", "x.png"), "--plot x.png: want a file of its own, got that of --json"),
        (("demo", "--json", "no/such/folder/x.json"), "--json no/such/folder/x.json: want a file in a folder"),
        (("demo", "--device", "cuda:99"), "--device cuda:99:"),
        (("eval",), "--text"),
        (("eval", "--text", "no-such-file"), "--text no-such-file: No such file"),
        (("eval", "--text", __file__, "--json", __file__), "want a file of its own, got that of --text"),
        (("eval", "--text", __file__, "--model", "./no-such-folder"), "--model ./no-such-folder: "),
        (("eval", "--text", __file__, "--model", "./x", "--device", "nonsense"), "--device nonsense: "),
        (("eval", "--text", __file__, "--context", "9"), "--context and --dtype are of Hugging Face models"),
        (("eval", "--text", __file__, "--model", "deepseek", "--formats", "nvfp4"), "want a format of a model"),
        (("eval", "--text", "short", "--calibrate"), "text: want at least 9 bytes, a part of them to calibrate on"),
    ],
    ids=lambda x: " ".join(x[:3]) if isinstance(x, tuple) else None,
)
def test_bad_arguments_exit_with_2_and_say_why(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_bytes(b"8 bytes.")
    try:
        code = main.main(argv)
    except SystemExit as stop:  # argparse's own way out
        code = stop.code
    assert code == 2
    err = capsys.readouterr().err
    assert message in err if message.endswith("\n") else message in " ".join(err.split())


def test_a_folder_with_a_model_and_a_built_in_models_name_is_not_passed_over(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    argv = ("eval", "--text", __file__, "--model", "llama", "--device", "cpu")
    assert main.main((*argv, "--tokens", "5", "--formats", "fp16")) == 0, "the folder holds no model"
    (tmp_path / "llama" / "config.json").write_text("{}")
    capsys.readouterr()
    assert main.main(argv) == 2
    err = capsys.readouterr().err
    assert "--model llama: want one, but here it names a built-in model (llama) and a folder with a model" in err


def test_prompt_and_sample_stay_within_the_models_positions(heldout):
    class Few:
        """The built-in model as if it had 64 positions."""

        def __init__(self):
            self.inner, self.lengths, self.context, self.positions = BuiltIn("llama"), {}, 64, 64

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def runner(self, *args):
            paged = self.inner.runner(*args)
            step = paged.step

            def counted(new):
                out = step(new)
                self.lengths |= {r: max(self.lengths.get(r, 0), paged.pool.num_tokens(r)) for r in new}
                return out

            paged.step = counted
            return paged

    few = Few()
    result = tool.measure(few, heldout[:200], Settings(batch=2), ["bf16"])
    assert len(result.formats[0].sample) == 32
    assert 32 < few.lengths.pop("sample") <= 64, "a prompt ends at a blank"
    assert few.lengths == {0: 64, 1: 64}


@pytest.mark.parametrize("size", [0, 1])
def test_a_text_with_nothing_to_score_exits_with_2_and_says_why(tmp_path, capsys, monkeypatch, size):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "short"
    file.write_bytes(b"x" * size)
    assert main.main(("eval", "--text", str(file), "--device", "cpu")) == 2
    assert f"want at least 2 bytes, got {size}" in capsys.readouterr().err


def test_a_format_that_no_model_has_is_left_out_and_that_is_said(tmp_path, capsys):
    (tmp_path / "text").write_bytes(b"abc" * 20)
    argv = ("--formats", "fp8_ds_mla,nvfp4", "--tokens", "20", "--json", str(tmp_path / "x.json"))
    assert main.main(("eval", "--device", "cpu", "--model", "llama", "--text", str(tmp_path / "text"), *argv)) == 0
    out = capsys.readouterr().out
    assert "fp8_ds_mla is left out: no model's cache has it" in out
    assert "nvfp4 is left out" not in out


def test_a_model_without_a_wanted_format_is_left_out_and_that_is_said(tmp_path, capsys):
    argv = ("--formats", "nvfp4", "--tokens", "20", "--json", str(tmp_path / "x.json"))
    assert main.main(("demo", "--device", "cpu", *argv)) == 0
    assert "deepseek is left out: its cache has none of nvfp4" in capsys.readouterr().out
