"""The main loop of a compiled kernel: its instructions, to be counted."""

from __future__ import annotations

import re
from typing import Any

_PRODUCT = re.compile(r"\bU?T?C?[HIQO]?G?MMA|mfma")


def main_loop(kernel: dict[str, Any]) -> list[str]:
    """Instructions of the shortest loop that multiplies matrices: the one whose key blocks need no mask.

    kernel: of `compile_tools`
    """
    lines = _of_amd(kernel["amdgcn"]) if "amdgcn" in kernel else _of_nvidia(kernel["sass"]())
    labels = {name: i for i, (name, _) in enumerate(lines) if name}
    loops = []
    for i, (_, text) in enumerate(lines):
        target = re.search(r"BRA.*0x([0-9a-f]+)|s_c?branch\w* (\S+)", text)
        begin = labels.get(target[1] or target[2], len(lines)) if target else len(lines)
        body = [x for _, x in lines[begin : i + 1]]
        if any(map(_PRODUCT.search, body)):
            loops.append(body)
    assert loops, "no loop multiplies matrices"
    return min(loops, key=len)


def _of_nvidia(sass: str) -> list[tuple[str, str]]:
    """(address, instruction) of each, without what does nothing."""
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.MULTILINE)
    return [(f"{int(address, 16):x}", text) for address, text in found if text != "NOP"]


def _of_amd(text: str) -> list[tuple[str, str]]:
    """(label or "", instruction) of each."""
    out, label = [], ""
    for line in text.splitlines():
        if name := re.match(r"(\.LBB\w+):", line):
            label = name[1]
        elif re.match(r"\s+[sv]_|\s+(ds|buffer|global|flat)_", line):
            out.append((label, line.strip()))
            label = ""
    return out
