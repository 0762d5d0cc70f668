"""What README and docs claim: tables from the code, examples that run, commands that parse, links that lead on."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import logging
import re
import shlex
import textwrap
from pathlib import Path

import pytest
from script import script

from tersekv import KV_FORMATS
from tersekv.cli import main as cli
from tersekv.compat import deep_gemm, flash_mla, flashinfer, max, vllm
from tersekv.testing.cases import OPS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), RESULTS / "README.md"])
WORDS = 35_000  # of README, changelog, docs, notes and results, as `wc -w` counts them
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
NOT_RUN = "# not run by the tests: "  # first line of a block that a CPU cannot run; the reason follows
name_of = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)


@pytest.fixture(autouse=True)
def as_it_was():
    """What examples set for the whole process does not outlive them."""
    log, root = logging.getLogger("tersekv"), logging.getLogger()
    level, handlers = log.level, list(root.handlers)
    yield
    log.setLevel(level)
    root.handlers[:] = handlers


def test_tables_are_up_to_date():
    tables = script("scripts/support_table.py")
    for name, kinds in tables.FILES.items():
        text = (ROOT / name).read_text()
        assert tables.renewed(text, kinds) == text, f"{name}: run `make table`"


def test_tables_of_single_runs_are_up_to_date():
    for path, text in script("scripts/runs_page.py").wanted().items():
        assert text == path.read_text(), f"{path.name}: run `make table`"


def test_tables_and_picture_of_tiers_are_up_to_date():
    for path, text in (script("scripts/tiers_page.py").wanted() | script("scripts/sparse_page.py").wanted()).items():
        assert text == path.read_text(), f"{path.name}: run `make table`"


def test_the_table_of_reports_is_up_to_date():
    for path, text in script("scripts/reports_table.py").wanted().items():
        assert text == path.read_text(), f"{path.name}: run `make table`"


def test_the_support_table_follows_why_not(monkeypatch):
    tables = script("scripts/support_table.py")

    def refused(f, backend):
        return None if backend == "triton" and f.op == "append" and f.format != "nvfp4" else "not here"

    monkeypatch.setattr(tables.plan, "why_not", refused)
    lines = tables.support().splitlines()
    assert f"| `append` | {', '.join(name for name in KV_FORMATS if name != 'nvfp4')} |" in lines[2]
    assert lines[2].endswith("| triton | triton | triton | triton |")
    assert lines[3].startswith("| `append` | nvfp4 | - <sup>")
    assert "<sup>1</sup> cpu: not here; torch: not here" in lines


def blocks(page: Path, *languages: str) -> list[str]:
    return [textwrap.dedent(code) for _, language, code in FENCE.findall(page.read_text()) if language in languages]


def printed(code: str) -> list[str]:
    """What the comments after top-level prints say that they print."""
    return [m[1] for m in re.finditer(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)]


@name_of
def test_the_examples_of_a_page_run_and_print_what_they_say(page):
    names: dict = {"__name__": "docs"}
    for code in blocks(page, "python"):
        program = compile(code, page.name, "exec")
        if code.startswith(NOT_RUN):
            assert code.splitlines()[0].removeprefix(NOT_RUN).strip(), "say why"
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(program, names)
        assert out.getvalue().splitlines() == printed(code), code


def test_enough_examples_run():
    pages = {
        p.stem: [c for c in blocks(p, "python") if not c.startswith(NOT_RUN)] for p in PAGES if p.parent != RESULTS
    }
    for stem in ("README", "index", "choosing", "concepts", "operations", "scales", "context_parallel", "migration"):
        assert pages[stem], stem
    named = "\n".join(pages["operations"])
    for op in OPS:
        assert f"tersekv.{op}(" in named, op


def commands(page: Path) -> list[list[str]]:
    lines = "\n".join(blocks(page, "", "sh")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if re.match(r"(tersekv|python|torchrun) ", line)]


@name_of
def test_commands_parse_and_name_files_that_exist(page):
    for words in commands(page):
        if words[0] == "tersekv" and len(words) > 1:
            parser = argparse.ArgumentParser(exit_on_error=False)
            cli._module(words[1]).add_arguments(parser)
            parser.parse_args(words[2:])
        for word in words[1:]:
            assert not re.fullmatch(r"(scripts|examples|benchmarks)/\S+\.py", word) or (ROOT / word).exists(), word


@name_of
def test_names_of_tersekv_that_a_page_mentions_exist(page):
    for name in sorted(set(re.findall(r"`(tersekv(?:\.[A-Za-z_]\w*)+)", page.read_text()))):
        path = name.split(".")
        thing = importlib.import_module(path[0])
        for i, part in enumerate(path[1:], 1):
            if not hasattr(thing, part) and not importable(".".join(path[: i + 1])):
                break
            thing = getattr(thing, part)


def importable(module: str) -> bool:
    """False where another project's package is missing; what tersekv itself lacks raises."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("tersekv"):
            raise
        return False
    return True


@pytest.mark.parametrize(
    "module", [flashinfer, vllm, max, flash_mla, deep_gemm], ids=lambda m: m.__name__.split(".")[-1]
)
def test_the_migration_page_knows_every_function_and_argument(module):
    text = (ROOT / "docs" / "migration.md").read_text()
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]*)`", text))))
    missing = []
    for name in module.__all__:
        thing = getattr(module, name)
        parameters = inspect.signature(thing).parameters if inspect.isfunction(thing) else {}
        missing += [word for word in (name, *parameters) if word not in words]
    assert not missing


@pytest.mark.parametrize(
    "line", sorted({x for p in PAGES for x in re.findall(r"`(from tersekv[^`]*)`", p.read_text())})
)
def test_imports_that_a_page_names_work(line):
    exec(line, {})


@name_of
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_all_pages_together_stay_readable():
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", RESULTS / "README.md"]
    pages += [page for room in ("docs", "notes") for page in (ROOT / room).glob("*.md")]
    words = {str(page.relative_to(ROOT)): len(page.read_text().split()) for page in pages}
    assert sum(words.values()) <= WORDS, f"want at most {WORDS} words, got {sum(words.values())}: {words}"


def test_every_kept_result_is_described():
    named = re.findall(r"`([\w/*.]+\.jsonl?)`", (RESULTS / "README.md").read_text())
    kept = [path.relative_to(RESULTS) for path in RESULTS.rglob("*.json*")]
    assert not [str(path) for path in kept if not any(path.match(name) for name in named)]


def test_the_map_knows_every_room():
    text = (ROOT / "docs" / "map.md").read_text()
    rooms = [p for p in (ROOT / "src" / "tersekv").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
    missing = [p.name for p in rooms if p.name != "__init__.py" and f"`{p.name}" not in text and p.name != "backends"]
    assert not missing


def test_make_targets_that_the_docs_name_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shell = {page: "\n".join(blocks(page, "", "sh")) for page in PAGES}
    named = {t for page in PAGES for t in re.findall(r"^make (\w+)", shell[page], re.MULTILINE)}
    named |= {t for page in PAGES for t in re.findall(r"`make (\w+)", page.read_text())}
    assert named <= targets


def test_measured_accuracy_is_up_to_date():
    tables = script("scripts/format_tables.py")
    for name, kinds in tables.FILES.items():
        text = (ROOT / name).read_text()
        assert tables.alike(text, tables.renewed(text, kinds)), f"{name}: run `make table`"


def test_alike_allows_other_rounding_and_no_other_number():
    alike = script("scripts/format_tables.py").alike
    assert alike("| 2.7% | 3.3410 |", "| 2.6% | 3.3412 |")
    assert not alike("| 2.7% |", "| 2.4% |")
    assert not alike("| 2.7% |", "| 2.7 |")
