"""Narrow terminals: at 40, 60 and 80 columns no command cuts a word, and what fits stays on its line."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tersekv.cli import bench, demo, main, tables, verify
from tersekv.demo.measure import Measured, ModelResult
from tersekv.formats import ALL_FORMATS
from tersekv.testing import verify as tool
from tersekv.testing.bench import engine
from tersekv.testing.cases import OPS, Case

WIDTHS = (40, 60, 80)


@pytest.fixture
def terminal(monkeypatch):
    """Makes standard output a terminal of a width, without animations and colours."""
    for name, value in {"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "dumb", "LINES": "50"}.items():
        monkeypatch.setenv(name, value)
    return lambda width: monkeypatch.setenv("COLUMNS", str(width))


def every_case(*args, **options):
    for op in OPS:
        for name in ALL_FORMATS:
            yield tool.Result(Case(op, name, "plain"), "gluon", tool.PASSED, 1.2e-3)
            yield tool.Result(Case(op, name, "other"), "triton", tool.PASSED, 0.0)


def every_format(subject, tokens, settings, formats, tick, begun, other):
    numbers = (123456, 12.34, 98765.4321, 1.2e-4, 0.98765, 12345.6, "for key in d: print(key)", 3)
    measured = [Measured(name, *numbers) for name in ALL_FORMATS]
    begun.append(ModelResult(subject.name, 4096, 512, "a prompt", measured))


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """Every command, with results of all kinds at no cost."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))  # doctor counts what lies there
    monkeypatch.setattr(verify, "verify", every_case)
    monkeypatch.setattr(demo, "measure", every_format)
    (tmp_path / "t").write_text("for key in d")
    cells = list(bench.grid(bench.sizes("cpu", True), bench.OPS))
    monkeypatch.setattr(
        bench, "bench", lambda *a: (engine.Result(c, engine.OK, us=12.5, nbytes=1 << 20, error=1e-3) for c in cells)
    )
    monkeypatch.setattr(bench.Limits, "of", lambda device: bench.Limits(1e11, 1e12))
    files = ("--json", "j")
    return {
        "demo": ("demo", "--device", "cpu", *files),
        "eval": ("eval", "--device", "cpu", "--text", "t", *files),
        "bench": ("bench", "--device", "cpu", "--peers", "none"),
        "verify": ("verify", "--device", "cpu"),
        "doctor": ("doctor",),
    }


def words(out: str) -> list[str]:
    return re.findall(r"[^\s─:·]+", out)


# warm-up compiles for minutes, and prints three lines.
@pytest.mark.parametrize("command", [c for c in main.COMMANDS if c != "warm-up"])
def test_no_command_cuts_a_word(command, terminal, commands, capsys):
    def shown(width):
        terminal(width)
        assert main.main(commands[command]) == 0
        return capsys.readouterr().out

    wide = shown(400)
    for width in WIDTHS:
        out = shown(width)
        assert max(map(len, out.splitlines())) <= width
        found = set(words(out))
        # A list does without the heads of rows, and joins heads that are broken; a word wider than a line is broken.
        cut = {w for w in words(wide) if len(w) < width - 4} - found
        heads = {"bytes/", "token", "per-", "plexity", "unsup-", "ported", "format", "operation"}
        assert not cut - heads, (width, cut)
        assert "…" not in out.replace("After “…", "")


def test_a_pipe_gets_lines_as_they_are(commands, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert main.main(commands["bench"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) > 100


@pytest.mark.parametrize("width", WIDTHS)
def test_verify_on_two_backends_is_a_table_at_80_columns(width):
    out = io.StringIO()
    rows = tables.Fitted(verify.table(every_case(), "cpu"), heads=2)
    Console(file=out, width=width).print(rows)
    assert ("─" in out.getvalue()) == (width >= 80)
    assert ("unsupported: 0" in out.getvalue()) == (width < 80)


def a_table() -> Table:
    t = Table("name", "bytes/\ntoken", "per-\nplexity", "KL, nats\nper byte", title="a title of some words")
    t.add_row("fp8", "[red]17[/red]", Text("3.1[0]"), "a long story of many words")
    return t


def test_a_row_is_listed_where_its_table_does_not_fit():
    out = io.StringIO()
    Console(file=out, width=30).print(tables.Fitted(a_table()))
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [
        "a title of some words",
        "fp8",
        "  bytes/token: 17",
        "  perplexity: 3.1[0]",
        "  KL, nats per byte: a long",
        "    story of many words",
        "",
    ]


def test_lines_are_folded_between_their_parts():
    line = "decode      bf16     1x8192  H 32   page 64   12.50 us  4 GB/s"
    assert tables.folded(line, 80) == line
    assert tables.folded(line, 24) == "decode  bf16  1x8192\n    H 32  page 64\n    12.50 us  4 GB/s"
    assert tables.folded("    vllm: is not here at all", 20) == "    vllm: is not\n      here at all"
