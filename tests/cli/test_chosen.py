"""What `tersekv eval` makes of its winner: the lines to paste, the file that keeps it, and nothing unasked."""

from __future__ import annotations

import json

import pytest
import torch

import tersekv
from tersekv.cli import demo, main
from tersekv.cli import eval as command
from tersekv.demo import report, text
from tersekv.demo.attend import PagedLlama
from tersekv.demo.measure import Measured, ModelResult
from tersekv.demo.subject import BuiltIn
from tersekv.recipe import recipe

NOTES = "int4_per_token_head+ends=int8_per_token_head"


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A folder with a text in it, where commands run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book").write_text(text.heldout_text()[:900])
    return tmp_path


def evaluate(*argv: str) -> int:
    return main.main(("eval", "--device", "cpu", "--text", "book", "--model", "llama", "--tokens", "60", *argv))


def pasted(out: str) -> tersekv.PagedKVCache:
    names: dict = {"tersekv": tersekv}
    exec("\n".join(line.strip() for line in out.splitlines() if line.startswith("    cache = ")), names)
    return names["cache"]


@torch.inference_mode()
def logits(cache: tersekv.PagedKVCache) -> torch.Tensor:
    paged = PagedLlama(BuiltIn("llama").model, "bf16", 1, 16)
    super(PagedLlama, paged).__init__(paged.model, cache)
    paged.cache = cache
    return paged.step({"r": text.encode(text.heldout_text()[:60])})


@pytest.mark.parametrize("word", [
    "nvfp4", "int8_per_token_head/int4_per_token_head+rotated", NOTES, "int8_per_token_head/nvfp4+channels",
    "fp8_e4m3+fitted", "nvfp4+rotated+channels+fitted+ends=fp8_e4m3/bf16",
])  # fmt: skip
def test_the_line_that_eval_prints_is_the_cache_that_it_measured(word, book, capsys, monkeypatch):
    used = []
    made = PagedLlama.__init__
    monkeypatch.setattr(PagedLlama, "__init__", lambda self, *a: (made(self, *a), used.append(self.cache))[0])
    assert evaluate("--formats", word, "--save", "kept.safetensors", "--json", "j") == 0
    saved = pasted(capsys.readouterr().out)
    want = next(cache for cache in used if cache.layer_formats == saved.layer_formats)
    assert json.loads((book / "j").read_text())["saved"] == {"file": "kept.safetensors", "cache": word}
    assert torch.equal(logits(saved), logits(want))
    assert evaluate("--formats", word) == 0
    out = capsys.readouterr().out
    if recipe(word).calibrated:
        assert f"# {word} has numbers of this text: run this again with --save FILE" in out
    else:
        assert torch.equal(logits(pasted(out)), logits(want))


def test_a_search_names_its_winner_then_the_lines_and_samples_on_demand(book, capsys):
    argv = ("--search", "--formats", "int8_per_token_head,nvfp4", "--within", "1")
    assert evaluate(*argv, "--save", "kept") == 0
    out = capsys.readouterr().out
    assert "they write:" not in out
    assert out.index("the smallest within 1 nats") < out.index("allocate_saved('kept', num_pages=64, page_size=16)")
    assert evaluate(*argv, "--samples") == 0
    out = capsys.readouterr().out
    assert out.index("the smallest within 1 nats") < out.index("they write:")


def test_where_nothing_is_near_enough_nothing_is_saved_and_that_is_said(book, capsys, monkeypatch):
    monkeypatch.setattr("tersekv.cli.chosen.smallest", lambda *a: None)
    assert evaluate("--formats", "nvfp4", "--within", "0", "--save", "kept") == 1
    assert "kept is not written: no cache is as near as --within wants it" in capsys.readouterr().out
    assert not (book / "kept").exists()


def test_calibrated_scales_are_kept_too(book, capsys):
    assert evaluate("--formats", "fp8_e4m3", "--calibrate", "--save", "kept") == 0
    layer = pasted(capsys.readouterr().out)[0]
    assert layer.k_scale != 1.0 != layer.v_scale


@pytest.mark.parametrize(("argv", "message"), [
    (("--model", "both", "--save", "x", "--formats", "bf16,fp16"), "--save: want one model, by --model, got llama, d"),
    (("--model", "deepseek", "--save", "x", "--formats", "fp16"), "--save: want a model that caches K and V, got deep"),
    (("--save", "x"), "--save: want --within, or one cache in --formats, to know which to keep"),
    (("--save", "x", "--search", "--formats", "nvfp4"), "--save: want --within, or one cache in --formats"),
    (("--save", "book", "--formats", "nvfp4"), "--save book: want a file of its own, got that of --text"),
    (("--save", "none", "--formats", "nvfp4"), "--save none: want the name of a file; without --save none is written"),
])  # fmt: skip
def test_what_cannot_be_saved_is_said_before_anything_runs(argv, message, book, capsys, monkeypatch):
    monkeypatch.setattr(demo, "measure", None)
    assert evaluate(*argv) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_no_command_writes_a_file_unasked(book, capsys):
    assert evaluate("--formats", "fp16") == 0
    assert main.main(("demo", "--device", "cpu", "--tokens", "16", "--formats", "fp16")) == 0
    assert "wrote" not in capsys.readouterr().out
    assert [p.name for p in book.iterdir()] == ["book"]


def test_of_a_large_file_only_what_is_needed_is_read(book, monkeypatch):
    with open("book", "r+b") as file:
        file.truncate(300 << 20)  # takes no room on the disk
    seen = []
    monkeypatch.setattr(command, "show", lambda args, subjects, tokens, *more: seen.append(tokens) or 0)
    assert evaluate() == 0
    assert 61 <= len(seen[0]) <= 61 + 4 * BuiltIn("llama").context


def test_long_names_stand_below_the_picture_and_on_the_page(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    words = ["bf16", NOTES, "int8_per_token_head/int4_per_token_head+channels", "nvfp4+rotated+channels"]
    rows = [Measured(word, 2048 >> i, kl=i * 0.1**i) for i, word in enumerate(words)]
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: figures.append(self))
    report.plot([ModelResult("llama", 1, 1, "", rows)], "title", str(tmp_path / "p.png"))
    (axes,) = figures[0].axes
    renderer = figures[0].canvas.get_renderer()
    figures[0].draw_without_rendering()
    legend, page = axes.get_legend().get_window_extent(renderer), figures[0].bbox
    assert not axes.texts
    assert [t.get_text() for t in axes.get_legend().get_texts()][::-1] == ["bf16 (reference, KL = 0)", *words[1:]]
    assert legend.y1 < axes.get_window_extent(renderer).y0
    assert not legend.overlaps(axes.xaxis.label.get_window_extent(renderer))
    assert page.x0 <= legend.x0 < legend.x1 <= page.x1
    assert page.y0 <= legend.y0
