"""The main loop of a kernel compiled for NVIDIA: its instructions, to be counted."""

from __future__ import annotations

import re
from typing import Any


def main_loop(kernel: dict[str, Any]) -> list[str]:
    """Instructions of the shortest loop that multiplies matrices: the one whose key blocks need no mask.

    kernel: of `compile_tools`
    """
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", kernel["sass"](), re.MULTILINE)
    lines = [(int(address, 16), text) for address, text in found if text != "NOP"]
    loops = []
    for end, text in lines:
        if branch := re.search(r"\bBRA\b.*0x([0-9a-f]+)", text):
            body = [x for address, x in lines if int(branch[1], 16) <= address <= end]
            if any(re.search(r"\b(HMMA|HGMMA|UTC\w*MMA)\b", x) for x in body):
                loops.append(body)
    assert loops, "no loop multiplies matrices"
    return min(loops, key=len)
