"""The conversions of a compiled kernel that keep half of a register, found in its SASS.

`faults(sass)` lists those to e4m3 or e5m2 whose other half is nothing: two values become 16 bits, and the instruction
takes the other 16 from a register that a conversion before it has written. Where all four values are one constant,
ptxas 12.8 has left that conversion out, and the other half is whatever the register held.
"""

from __future__ import annotations

import re

from descriptors import following, instructions, words

_MERGE = re.compile(r"F2FP\.\S*_MERGE_C")


def faults(sass: str) -> list[str]:
    written: dict[str, str] = {}  # by which instruction a register was last written
    out = []
    for i in instructions(sass):
        if _MERGE.match(i.op) and i.predicate is None:
            other = i.operands[-1].removesuffix(".reuse")
            if other != "RZ" and not _MERGE.match(written.get(other, "")):
                out.append(f"{i.op} at {i.at:#x}: {other}, of {written.get(other, 'nothing')}")
        if i.operands and re.fullmatch(r"R\d+", i.operands[0]):
            written |= dict.fromkeys(following(i.operands[0], words(i.op)), i.op)
    return out
