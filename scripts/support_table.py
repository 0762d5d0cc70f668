"""Writes the tables of docs/support.md and docs/formats.md that must not go stale: which backend runs what where, asked
of the plans themselves, and what each format stores.

    python scripts/support_table.py            check: exit code 1 if a file is out of date
    python scripts/support_table.py --write    bring the files up to date
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch

from tersekv import formats
from tersekv.backends.cpu import library
from tersekv.dispatch import plan
from tersekv.testing.cases import OPS, Case, cases
from tersekv.testing.make import make

sys.path.insert(0, str(Path(__file__).parent))
import pages
from pages import ROOT, table

FILES = {"docs/support.md": ("support",), "docs/formats.md": ("formats",)}
GPU = ("gluon", "triton")  # in the order in which a plan tries them

# Column -> (backends tried, compute capability × 10 or None, seen as a GPU)
DEVICES: dict[str, tuple[tuple[str, ...], int | None, bool]] = {
    "CPU": (plan.candidate_backends("decode", "cpu"), None, False),
    "sm_80": (GPU, 80, True),
    "sm_90": (GPU, 90, True),
    "sm_100": (GPU, 100, True),
    "AMD": (GPU, None, True),
}


@cache
def support() -> str:
    """Markdown: operation × formats × device, and why some calls are refused. Kernels for CPUs count as compiled."""
    with patch.object(library, "why_no_library", lambda: None):
        return _support()


def _support() -> str:
    notes: dict[str, int] = {}
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)  # (formats, cells) → operations
    for op in OPS:
        groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for name in dict.fromkeys(c.format for c in cases((op,))):
            mine = [(c, make(c)) for c in cases((op,), (name,))]
            groups[tuple(_cell(mine, *device, notes) for device in DEVICES.values())].append(name)
        everything = len(groups) == 1
        for cells, names in groups.items():
            alike["all" if everything else ", ".join(names), *cells].append(f"`{op}`")
    text = table(("operation", "formats", *DEVICES), ((", ".join(ops), *rest) for rest, ops in alike.items()))
    return text + "".join(f"\n<sup>{number}</sup> {reason}\n" for reason, number in notes.items())


def format_table() -> str:
    """Markdown: what a row stores in each format."""
    rows = []
    latents = formats.LATENT_FORMATS | formats.LATENT_RECORDS
    for name, f in (formats.ALL_FORMATS | latents).items():
        rows.append((
            f"`{name}`", str(f.storage).removeprefix("torch.") + (" (2 codes)" if f.values_per_element > 1 else ""),
            f"{f.max_value:g}", _SCALES[f.scale] + (" with a zero point" if f.code == "int4" else ""),
            str(formats.kv_bytes_per_token(name, 1, 128)) if name in formats.KV_FORMATS else "-",
            str(formats.latent_bytes_per_token(name)) if name in latents else "-",
        ))  # fmt: skip
    head = (
        "format",
        "storage",
        "largest code",
        "scale",
        "bytes: K + V of a head, D = 128",
        "bytes: latent row 512 + 64",
    )
    return table(head, rows)


_SCALES = {
    formats.NONE: "none",
    formats.TENSOR: "given: one per tensor or head",
    formats.TOKEN_HEAD: "stored: fp32 per token and head",
    formats.BLOCK: "stored: e4m3 per 16 values, × one given",
    formats.GROUP: "stored: fp32 per 128 values",
    formats.UE8M0: "stored: an exponent per 64 values (`fp8_v41`: 32)",
}
TABLES: dict[str, Callable[[], str]] = {"support": support, "formats": format_table}


def _cell(
    mine: list[tuple[Case, tuple]], doors: tuple[str, ...], arch: int | None, gpu: bool, notes: dict[str, int]
) -> str:
    """The backends that the cases of one operation × format get, with notes for those that get none."""
    used: dict[str, None] = {}
    numbers = set()
    for case, call in mine:
        doors = plan.candidate_backends(case.op, "cuda") if gpu else doors
        f = _facts(case.op, call, arch, gpu)
        reasons = {name: plan.why_not(f, name) for name in doors}
        fit = next((name for name in doors if reasons[name] is None), None)
        if fit:
            used[fit] = None
        else:
            numbers.add(notes.setdefault(_told(reasons), len(notes) + 1))
    names = ", ".join(name for name in doors if name in used) or "-"
    marks = ", ".join(str(n) for n in sorted(numbers))
    return f"{names} <sup>{marks}</sup>" if marks else names


def _told(reasons: dict[str, str | None]) -> str:
    """The reasons of the backends that have the operation on such a chip, or that there is none."""
    own = {
        name: reason for name, reason in reasons.items() if reason and not reason.startswith(("has no ", "needs sm_"))
    }
    return "; ".join(f"{name}: {reason}" for name, reason in own.items()) or "no kernel yet"


def _facts(op: str, call: tuple, arch: int | None, gpu: bool) -> SimpleNamespace:
    f = plan.facts(op, call, arch)
    if gpu:
        f.device = torch.device("cuda", 0)
    return f


def renewed(text: str, names: Iterable[str]) -> str:
    """`text` with its tables written anew."""
    return pages.renewed(text, TABLES, names)


def wanted() -> dict[Path, str]:
    return {ROOT / name: renewed((ROOT / name).read_text(), names) for name, names in FILES.items()}


if __name__ == "__main__":
    sys.exit(pages.main("Tables of docs/support.md and docs/formats.md.", wanted))
