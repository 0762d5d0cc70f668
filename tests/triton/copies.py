"""The tensor copies of a compiled Gluon kernel, read from its TTGIR: where they go, and how many bytes are expected.

`faults(ttgir)` lists what a GPU would trap on or wait for without end:
    a copy into shared memory that does not begin at a multiple of 128 bytes, or comes from such a place;
    a barrier that expects other bytes than the copies bring that follow.
"""

from __future__ import annotations

import math
import re
from itertools import groupby

PLACE = 128
_TYPE = re.compile(r"!ttg\.memdesc<((?:\d+x)+)([a-z]+\d+\w*), (#\w+), [^>]*?(?:, ((?:\d+x)*\d+))?>")
_DEFINED = re.compile(r"^\s*%([\w#]+) = ttg\.(local_alloc|memdesc_\w+)(?: %([\w#]+))?(.*)")
_COPY = re.compile(
    r"ttng\.async_tma_copy_(?:global_to_local|local_to_global) %\w+\[.*?\] %([\w#]+)(?:, %([\w#]+))?(.*)"
)
_EXPECT = re.compile(r"ttng\.barrier_expect %([\w#]+), (\d+)")
_WORDS = {"f8E4M3FN": 1, "f8E5M2": 1}


class _Memory:
    """A view of shared memory: the alignment of its start, and who it is part of."""

    def __init__(self, align: int, origin: str) -> None:
        self.align, self.origin = align, origin


def _itemsize(kind: str) -> int:
    return _WORDS.get(kind) or int(re.sub(r"\D", "", kind)) // 8


def _type(text: str) -> tuple[list[int], int, str, list[int]]:
    """(shape, bytes of an element, encoding, allocated shape) of the last memory that the text names."""
    dims, kind, encoding, allocated = list(_TYPE.finditer(text))[-1].groups()
    shape = [int(n) for n in dims.rstrip("x").split("x")]
    return shape, _itemsize(kind), encoding, [int(n) for n in allocated.split("x")] if allocated else shape


def _swizzles(ttgir: str) -> dict[str, int]:
    """Bytes of a row by the names of the encodings that a tensor copy can write; 0: as they are."""
    found = re.findall(r"^(#\w+) = #ttg\.nvmma_shared<\{swizzlingByteWidth = (\d+)", ttgir, re.MULTILINE)
    return {name: int(width) for name, width in found}


def faults(ttgir: str) -> list[str]:
    swizzles, known, expected = _swizzles(ttgir), {}, {}
    captured: list[str] = []
    out: list[str] = []
    for line in ttgir.splitlines():
        if "ttg.warp_specialize(" in line:
            captured = re.findall(r"%([\w#]+)", line.split("ttg.warp_specialize(")[1].split(")")[0])
        elif re.match(r"\s*partition\d+\(", line):
            given = re.findall(r"%([\w#]+):", line)
            known |= {name: known[of] for name, of in zip(given, captured, strict=True) if of in known}
        elif found := _DEFINED.match(line):
            name, how, of, rest = found.groups()
            known[name] = _view(how, known.get(of or ""), rest, swizzles, name)
        elif found := _EXPECT.search(line):
            out += _unequal(expected, found[1])
            expected[found[1]] = [int(found[2])]
        elif found := _COPY.search(line):
            place, bar, rest = found.groups()
            shape, size, _, _ = _type(rest if bar else line)
            align = known[place].align
            if align % PLACE:
                out.append(f"a copy begins at a multiple of {align} bytes of {known[place].origin}")
            if bar:
                expected.setdefault(bar, [0]).append(math.prod(shape) * size)
    for bar in expected:
        out += _unequal(expected, bar)
    return [k for k, _ in groupby(sorted(out))]


def copies(ttgir: str) -> int:
    return len(_COPY.findall(ttgir))


def _unequal(expected: dict[str, list[int]], bar: str) -> list[str]:
    wanted, *brought = expected.get(bar, [0])
    return [] if wanted == sum(brought) else [f"{bar} expects {wanted} bytes, and copies bring {sum(brought)}"]


def _view(how: str, base: _Memory | None, rest: str, swizzles: dict[str, int], name: str) -> _Memory:
    shape, size, encoding, allocated = _type(rest)
    if how == "local_alloc":  # of a plain layout it begins anywhere at a multiple of 16
        return _Memory(1024 if encoding in swizzles else 16, name)
    assert base is not None, rest
    if how == "memdesc_index":
        return _Memory(math.gcd(base.align, math.prod(shape) * size), base.origin)
    if how != "memdesc_subslice":
        return base
    at = [int(n) for n in re.findall(r"\[([\d, ]+)\]", rest)[0].split(",")]
    row = allocated[-1] * size
    width = min(row, swizzles.get(encoding, 0) or row)  # rows wider than this lie in panels
    strides = [math.prod(allocated[i + 1 : -1]) * width for i in range(len(at) - 1)]
    moved = sum(o * n for o, n in zip(at, strides, strict=False)) + at[-1] * size
    return _Memory(math.gcd(base.align, moved), base.origin)
