"""The house rules of CONTRIBUTING.md, as tests."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tersekv import env

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "tersekv"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = [p for d in ("src", "tests", "scripts", "benchmarks", "examples") for p in sorted((ROOT / d).rglob("*.py"))]
NATIVE = sorted((PACKAGE / "backends" / "cpu" / "native").glob("*"))
TEXTS = [p for d in ("docs", ".ci") for p in sorted((ROOT / d).rglob("*")) if p.suffix in (".md", ".txt", "")]

FILE_LINES, KERNEL_FILE_LINES, FUNCTION_LINES, KERNEL_LINES, VARIABLES = 500, 900, 60, 180, 4

GPU_ROOMS = {"backends.triton": {"backends.host"}, "backends.gluon": {"backends.host", "backends.triton"}}

# Room -> the rooms that it may import. A room may always import itself; in `dispatch` each file is a room. `plan`
# loads backends lazily, by name.
BASE = {"scalars", "formats", "errors", "env"}
DISPATCH = {"dispatch", "dispatch.checks", "dispatch.type_checks", "dispatch.plan", "dispatch.launch_cache"}
LAYERS = {"attributes", "layers", "index_layers"}
CORE = BASE | DISPATCH | LAYERS | {"calls", "cache", "index_cache", "recipe", "saved", "tracing"}
VERBS = CORE | {"ops", "pages", "records", "record_file", "prefix", "page_mover", "tiers"}
MAY_IMPORT = {
    "scalars": set(),
    "formats": {"scalars"},
    "errors": set(),
    "env": set(),
    "calls": set(),
    "layers": {"attributes", "scalars", "formats"},
    "index_layers": {"attributes", "formats", "layers"},
    "index_cache": {"scalars", "formats", "index_layers", "cache"},
    "recipe": {"attributes", "formats"},
    "saved": {"attributes", "scalars", "formats", "layers", "record_file", "shapes"},
    "cache": LAYERS | {"scalars", "formats", "recipe", "saved"},
    "pages": LAYERS | {"scalars", "errors", "cache", "tracing"},
    "record_file": set(),
    "records": {"scalars", "cache", "saved", "record_file"},
    "prefix": {"scalars"},
    "page_mover": {"cache", "ops"},
    "tiers": {"scalars", "errors", "cache", "pages", "prefix", "page_mover"},
    "shapes": {"calls"},
    "tracing": set(),
    "attributes": {"scalars", "formats", "shapes", "tracing"},
    "dispatch": set(),
    "dispatch.checks": {"attributes", "scalars", "formats", "calls", "shapes"}
    | {"dispatch.cache_checks", "dispatch.transcode_checks", "dispatch.list_checks"},
    "dispatch.cache_checks": {"attributes", "scalars", "formats", "calls", "shapes"},
    "dispatch.type_checks": {"shapes"},
    "dispatch.list_checks": {"calls", "shapes"},
    "dispatch.transcode_checks": {"attributes", "scalars", "formats", "calls", "shapes"},
    "dispatch.value_checks": {"calls", "dispatch.list_checks", "dispatch.transcode_checks"},
    "dispatch.index_checks": {"formats", "shapes", "dispatch.cache_checks", "dispatch.checks"},
    "dispatch.signature": {"calls"},
    "dispatch.aliasing": {"calls", "dispatch.signature", "shapes"},
    "dispatch.kernel_errors": {"errors", "dispatch.signature"},
    "dispatch.plan": {"attributes", "errors", "env", "calls"}
    | {
        f"dispatch.{n}"
        for n in (
            "checks",
            "type_checks",
            "index_checks",
            "value_checks",
            "kernel_errors",
            "signature",
            "aliasing",
        )
    },
    "dispatch.launch_cache": {"env", "calls", "tracing"}
    | {f"dispatch.{n}" for n in ("kernel_errors", "signature", "plan")},
    "ops": CORE,
    "compat": VERBS,
    "testing": VERBS | {"compat"},
    "demo": VERBS,
    "integrations": VERBS,
    "cli": VERBS | {"testing", "demo", "integrations"},
    "__main__": {"cli"},
    "__init__": VERBS,
}


def room(module: str) -> str:
    """The room of a dotted module inside the package; each backend, and each file of `dispatch`, is a room of its
    own."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] in ("backends", "dispatch") and len(parts) > 1 else parts[0] or "__init__"


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports(path: Path) -> Iterator[str]:
    """Dotted names, inside the package, of what a file imports from it."""
    package = list(path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "tersekv":
                    yield name.name.removeprefix("tersekv").lstrip(".") or "__init__"
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1]
                target = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            elif (node.module or "").split(".")[0] == "tersekv":
                target = (node.module or "").removeprefix("tersekv").lstrip(".")
            else:
                continue
            for name in node.names:
                yield f"{target}.{name.name}" if target else _top(name.name)


def _top(name: str) -> str:
    """`from tersekv import x`: a module, or a public name that the package itself looks up."""
    return name if (PACKAGE / f"{name}.py").exists() or (PACKAGE / name).is_dir() else "__init__"


def allowed(importer: str, imported: str) -> bool:
    if imported == importer or imported == "__init__":
        return True
    if importer.startswith("backends"):
        # GPU backends share the host's side. Gluon's kernels share plans and scratch with the portable ones that they
        # stand in for, and leave to those what they do not do themselves.
        return imported == "formats" or imported in GPU_ROOMS.get(importer, set())
    return imported in MAY_IMPORT[importer]


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_nobody_imports_upward(path):
    mine = room(dotted(path))
    wrong = sorted({name for name in imports(path) if not allowed(mine, room(name))})
    assert not wrong, f"{dotted(path)} (room {mine}) imports {', '.join(wrong)}"


def test_the_import_rule_sees_an_upward_import(tmp_path, monkeypatch):
    (tmp_path / "ops").mkdir()
    bad = tmp_path / "ops" / "bad.py"
    bad.write_text("def f():\n    from ..compat import vllm\n    from tersekv.backends.torch import rope\n")
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    assert [room(n) for n in imports(bad)] == ["compat", "backends.torch"]
    assert not any(allowed("ops", room(n)) for n in imports(bad))


# Folders whose files and folders are operations; what two of these share lies in `parts`.
OPERATIONS = ("backends.triton", "backends.gluon.sm90", "backends.gluon")
# What an operation is made of. A Gluon operation also stands in for Triton's of the same name.
MADE_OF = {"mla_decode_branch": {"mla_decode", "mla_project"}, "attention": {"decode", "prefill"}}


def operation(module: str) -> str | None:
    """The operation of a dotted module of a GPU backend, if it is of one."""
    for base in OPERATIONS:
        if module.startswith(base + "."):
            name = module.removeprefix(base + ".").split(".")[0]
            if name != "sm90":
                return None if name in ("parts", "compiles", "versions") else name
    return None


def crossings(path: Path) -> set[tuple[str, str]]:
    """Imports of another operation's files."""
    mine, found = operation(dotted(path)), set()
    for name in imports(path):
        other = operation(name)
        if mine is not None and other not in (None, mine) and other not in MADE_OF.get(mine, ()):
            found.add((dotted(path), name.rpartition(".")[0]))
    return found


@pytest.mark.parametrize("backend", ["triton", "gluon"])
def test_operations_share_parts_and_not_each_other_s_files(backend):
    assert not set().union(*map(crossings, (PACKAGE / "backends" / backend).rglob("*.py")))


def test_the_rule_of_operations_sees_a_crossing(tmp_path, monkeypatch):
    bad = tmp_path / "backends" / "gluon" / "sm90" / "decode" / "bad.py"
    bad.parent.mkdir(parents=True)
    bad.write_text(
        "from ..mla_decode.merge import f\nfrom ..parts.ring import g\nfrom ....triton.decode.tiles import h\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    assert crossings(bad) == {("backends.gluon.sm90.decode.bad", "backends.gluon.sm90.mla_decode.merge")}


@pytest.mark.parametrize("path", [*SOURCES, *NATIVE], ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_small_rooms(path):
    lines, kernels = path.read_text().splitlines(), "gluon" in path.parts or "triton" in path.parts
    most = KERNEL_FILE_LINES if kernels and path.is_relative_to(PACKAGE) else FILE_LINES
    assert len(lines) <= most, f"{len(lines)} lines; at most {most}"


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_functions_are_short(path):
    tree = ast.parse(path.read_text())
    jitted = {id(n) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and _jitted(n)}
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        limit = KERNEL_LINES if id(node) in jitted else FUNCTION_LINES
        # A contract may be long: signature and docstring do not count.
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        length = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
        assert length <= limit, f"{node.name}: {length} lines; at most {limit}"


def _jitted(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(d).split("(")[0].split(".")[-1] in ("jit", "aggregate") for d in node.decorator_list)


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_the_environment_is_read_in_one_place(path):
    reads = re.search(r"\bos\.(environ|getenv|putenv)\b|\bfrom os import\b", path.read_text())
    assert path == PACKAGE / "env.py" or not reads, f"{dotted(path)} reads the environment; only env.py may"


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_only_the_command_line_prints(path):
    calls = [n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    prints = [f.lineno for f in calls if isinstance(f, ast.Name) and f.id == "print"]
    assert room(dotted(path)) == "cli" or not prints, f"print on line {prints}; the library logs"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_star_imports(path):
    stars = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and any(name.name == "*" for name in node.names)
    ]
    assert not stars, f"star import on line {stars}"


C_HEADERS = {"math.h", "pthread.h", "signal.h", "stddef.h", "stdint.h", "stdlib.h", "string.h"}


@pytest.mark.parametrize("path", NATIVE, ids=lambda p: p.name)
def test_native_code_includes_c_and_itself_alone(path):
    """No inline code of a C++ library, of which the linker keeps one copy for all instruction sets; no PyTorch."""
    named = re.findall(r'^#include [<"](.*?)[>"]$', path.read_text(), re.MULTILINE)
    assert {*named} <= C_HEADERS | {"immintrin.h", "arm_neon.h"} | {p.name for p in NATIVE}
    assert len(named) == path.read_text().count("#include")


def test_few_environment_variables():
    assert len(env.VARIABLES) <= VARIABLES
    assert all(name.startswith("TERSEKV_") for name in env.VARIABLES)


def test_importing_tersekv_loads_no_backend():
    code = (
        "import sys, tersekv; dir(tersekv); tersekv.PagedKVCache; tersekv.KV_FORMATS;"
        "print([m for m in sys.modules if m.split('.')[0] == 'triton' or m.startswith('tersekv.backends')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_exists():
    code = "import tersekv; print([n for n in tersekv.__all__ if not hasattr(tersekv, n)])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Joined here, so that this file does not contain what it looks for.
ABSOLUTE = re.compile(r"(?<![\w.}/-])/(?:" + "|".join(("work", "tmp", "home", "root", "Users", "mnt")) + r")/[\w.]")
UNFINISHED = re.compile(r"\b(?:" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b")


def _texts() -> list[Path]:
    root_files = [p for p in ROOT.iterdir() if p.suffix in (".md", ".toml") or p.name in ("Makefile", "NOTICE")]
    return [p for p in (*SOURCES, *NATIVE, *TEXTS, *root_files) if p.is_file()]


@pytest.mark.parametrize("path", _texts(), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_machine_paths_and_nothing_unfinished(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        assert not ABSOLUTE.search(line), f"line {number} names a path of one machine: {line.strip()}"
        assert not UNFINISHED.search(line), f"line {number} is unfinished: {line.strip()}"


@pytest.mark.parametrize("line", ["see /" + "tmp/x", "'/" + "home/me'"])
def test_the_path_rule_sees_a_path(line):
    assert ABSOLUTE.search(line)
