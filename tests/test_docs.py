"""What README and docs claim: tables from the code, examples that run, links that lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def script():
    spec = importlib.util.spec_from_file_location("support_table", ROOT / "scripts" / "support_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_up_to_date():
    tables = script()
    for name, kinds in tables.FILES.items():
        text = (ROOT / name).read_text()
        assert tables.renewed(text, kinds) == text, f"{name}: run `make table`"


def test_the_support_table_follows_why_not(monkeypatch):
    tables = script()

    def refused(f, backend):
        return None if backend == "triton" and f.op == "append" and f.format != "nvfp4" else "not here"

    monkeypatch.setattr(tables.plan, "why_not", refused)
    lines = tables.support().splitlines()
    assert "| `append` | bf16, fp16, fp8_e4m3, fp8_e5m2, fp8_per_token_head, int8_per_token_head |" in lines[2]
    assert lines[2].endswith("| triton | triton | triton | triton |")
    assert lines[3].startswith("| `append` | nvfp4 | - <sup>")
    assert "<sup>1</sup> torch: not here" in lines


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def test_the_quick_start_prints_what_it_says():
    code = "\n".join(blocks(ROOT / "README.md"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wanted = [line.split("  # ")[1] for line in code.splitlines() if line.startswith("print(")]
    assert done.stdout.splitlines() == wanted
    assert len(wanted) == 2


@pytest.mark.parametrize("line", re.findall(r"`(from tersekv[^`]*)`", (ROOT / "README.md").read_text()))
def test_imports_that_the_readme_names_work(line):
    exec(line, {})


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_the_map_knows_every_room():
    text = (ROOT / "docs" / "map.md").read_text()
    rooms = [p for p in (ROOT / "src" / "tersekv").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
    missing = [p.name for p in rooms if p.name != "__init__.py" and f"`{p.name}" not in text and p.name != "backends"]
    assert not missing


def test_make_targets_that_the_docs_name_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {t for page in PAGES for t in re.findall(r"(?:^|`)make (\w+)", page.read_text(), re.MULTILINE)}
    assert named <= targets
