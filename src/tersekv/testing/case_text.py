"""A case as one line of text and back: what a failure prints, and `tersekv verify --case` runs.

`decode/fp8_e4m3/7.31 lens=24x6000,1 heads=1`: its id, then every field that differs from the default. Lengths that
repeat are counted.
"""

from __future__ import annotations

import re
from dataclasses import fields
from functools import cache
from itertools import groupby
from typing import Any

from .cases import OPS, Case, Lens, cases, formats_of

_FIELDS = {f.name: f for f in fields(Case) if f.name not in ("op", "format", "name", "quick")}
_DRAWN = re.compile(r"\d+\.\d+")  # seed and number: the name of a random case


@cache
def _listed() -> dict[str, Case]:
    return {c.id: c for c in cases()}


def text_of(case: Case) -> str:
    """The line; of a listed case its id."""
    if _listed().get(case.id) == case:
        return case.id
    words = [case.id]
    for name, f in _FIELDS.items():
        value = getattr(case, name)
        if value != f.default:
            words.append(f"{name}={_lens_text(value) if name in ('lens', 'q_lens') else value}")
    return " ".join(words)


def case_of(text: str) -> Case:
    """The case of a line, or the listed one of that id. Raises ValueError that says what of it is wrong."""
    text = text.strip()
    if text in _listed():
        return _listed()[text]
    head, *words = text.split() or [""]
    parts = head.split("/")
    if len(parts) != 3 or parts[0] not in OPS or not all(parts):
        raise ValueError(f"want operation/format/name, the operation one of {', '.join(OPS)}, got {head!r}")
    if parts[1] not in formats_of(parts[0]):
        raise ValueError(f"want a format of {parts[0]}, one of {', '.join(formats_of(parts[0]))}, got {parts[1]!r}")
    # A name alone says nothing of the case: without fields, one that is not listed is misspelt.
    if not words and not _DRAWN.fullmatch(parts[2]):
        names = [c.name for c in _listed().values() if (c.op, c.format) == (parts[0], parts[1])]
        raise ValueError(f"want a name of {parts[0]}/{parts[1]}, one of {', '.join(names)}, got {parts[2]!r}")
    values: dict[str, Any] = dict(zip(("op", "format", "name"), parts, strict=True))
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in _FIELDS:
            raise ValueError(f"want field=value with a field of {', '.join(_FIELDS)}, got {word!r}")
        values[name] = _value(name, value)
    return Case(**values)


def _value(name: str, text: str) -> Any:
    kind = str(_FIELDS[name].type)
    try:
        if "Lens" in kind:
            return _lens(text)
        if kind == "bool":
            return {"True": True, "False": False}[text]
        return {"int": int, "float": float, "str": str}[kind](text)
    except (ValueError, KeyError):
        raise ValueError(
            f"{name}: want {'lengths such as 24x6000,1' if 'Lens' in kind else kind}, got {text!r}"
        ) from None


def _lens_text(lens: Lens) -> str:
    runs = [(n, len(list(same))) for n, same in groupby(lens)]
    return ",".join(f"{count}x{n}" if count > 1 else str(n) for n, count in runs)


def _lens(text: str) -> Lens:
    out: list[int] = []
    for word in filter(None, text.split(",")):
        count, times, n = word.partition("x")
        out += [int(n)] * int(count) if times else [int(word)]
    if any(n < 0 for n in out):
        raise ValueError(text)
    return tuple(out)
