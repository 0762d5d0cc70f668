"""The descriptors of matrices that a compiled kernel's warpgroup products read, found in its SASS.

`faults(sass)` lists the products whose descriptor has an upper word that is not one constant on every way there. That
word says how a matrix lies in shared memory, which the compiler knows; the lower one is an address, to which offsets
are added. ptxas 12.8 has lost the instruction that puts the lower word of a base into the uniform registers where
offsets are added, together with the zero that is the base's part of the upper word: products then read whatever lay
there before. What is not constant is such a loss.
"""

from __future__ import annotations

import re
import struct
from itertools import dropwhile, pairwise, takewhile
from typing import NamedTuple

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[T\d]) )?\s*([A-Z][\w.]*)\s*(.*?)\s*;")
_REGISTER = re.compile(r"U?R(?:\d+|Z)")
_STACK = re.compile(r"\[R1(?:\+(0x[0-9a-f]+))?\]")
_PRODUCT = re.compile(r"[HQI]GMMA\.(?:SP\.)?64x(\d+)x")
_ENDS = ("EXIT", "BRA", "BRX", "RET", "KILL")
_CALLS = ("CALL.REL.NOINC", "CALL.ABS.NOINC")
_SUMS = ("IADD3", "UIADD3", "IMAD.X", "IMAD.IADD", "VIADD")
_MOVES = ("MOV", "UMOV", "R2UR", "IMAD.MOV", "IMAD.U32", "IMAD.MOV.U32")
Known = dict[str, int]


class Instruction(NamedTuple):
    at: int
    predicate: str | None
    op: str
    operands: list[str]


def instructions(sass: str) -> list[Instruction]:
    """Of a call, the operands are the registers that the function writes."""
    found = (_LINE.match(line) for line in sass.splitlines())
    code = [Instruction(int(m[1], 16), m[2], m[3], re.split(r",\s*", m[4]) if m[4] else []) for m in found if m]
    code = _with_swaps(code)
    return [i._replace(operands=_written(code, int(i.operands[-1], 16))) if i.op in _CALLS else i for i in code]


def _with_swaps(code: list[Instruction]) -> list[Instruction]:
    """Two registers that are swapped by three exclusive ors, as one instruction of that name where the third is."""
    out: list[Instruction | None] = [*code]
    for n, i in enumerate(code):
        if out[n] is None or not _is_xor(i) or (pair := {*i.operands[1:3]}) != {i.operands[0], *pair} or len(pair) != 2:
            continue
        other = pair - {i.operands[0]}
        touching = (m for m in range(n + 1, len(code)) if _touches(code[m], pair))
        # Until the second one writes it, the other register may be read.
        second = next((m for m in touching if _is_xor(code[m]) or not _only_reads(code[m], other, {*pair} - other)), n)
        third = next((m for m in range(second + 1, len(code)) if _touches(code[m], pair)), n)
        if [code[m].op[0] for m in (second, third) if _is_xor(code[m]) and {*code[m].operands[1:3]} == pair] != [
            i.op[0]
        ] * 2:
            continue
        if (code[second].operands[0], code[third].operands[0]) == (*(pair - {i.operands[0]}), i.operands[0]):
            out[n] = out[second] = None
            out[third] = code[third]._replace(op="SWAP", operands=sorted(pair))
    return [i for i in out if i is not None]


def _is_xor(i: Instruction) -> bool:
    return i.predicate is None and i.op.endswith("LOP3.LUT") and i.operands[4:5] == ["0x3c"]


def _only_reads(i: Instruction, registers: set[str], others: set[str]) -> bool:
    """Whether it reads some of the registers, writes none of them, and does neither with the others."""
    written = i._replace(operands=i.operands[:1])
    return _touches(i, registers) and not _touches(written, registers) and not _touches(i, others)


def _touches(i: Instruction, registers: set[str]) -> bool:
    def named(operand: str) -> set[str]:
        n = 4 if operand.startswith("gdesc") else words(i.op)
        found = re.findall(r"(U?R)(\d+)", operand)
        return {f"{kind}{int(first) + k}" for kind, first in found for k in range(n)}

    return any(named(o) & registers for o in i.operands)


def _written(code: list[Instruction], start: int) -> list[str]:
    body = takewhile(lambda i: not i.op.startswith("RET"), dropwhile(lambda i: i.at != start, code))
    firsts = [(i, _REGISTER.fullmatch(i.operands[0])) for i in body if i.operands]
    return sorted({r for i, first in firsts if first for r in following(first[0], words(i.op))})


def faults(sass: str) -> list[str]:
    code = instructions(sass)
    blocks = _blocks(code)
    entering: dict[int, Known] = {code[0].at: {}} if code else {}
    todo = list(entering)
    while todo:
        at = todo.pop()
        known = dict(entering[at])
        for i in blocks[at].code:
            _step(i, known)
        for after in blocks[at].followers:
            old = entering.get(after)
            new = known if old is None else {k: x for k, x in old.items() if known.get(k) == x}
            if new != old:
                entering[after] = dict(new)
                todo.append(after)
    out = []
    for at, start in entering.items():
        known = dict(start)
        for i in blocks[at].code:
            out += [f"{i.op} at {i.at:#x}: {r}" for r in _upper_words(i) if r not in known]
            _step(i, known)
    return sorted(out)


class _Block(NamedTuple):
    code: list[Instruction]
    followers: list[int]


def _blocks(code: list[Instruction]) -> dict[int, _Block]:
    """By the address of the first instruction. A way that depends on a register is not followed: such code raises."""
    starts = {code[0].at} if code else set()
    for i, after in pairwise(code):
        if i.op.startswith(_ENDS):
            starts.add(after.at)
            if i.op.startswith("BRA"):
                starts.add(int(i.operands[-1], 16))
    out: dict[int, _Block] = {}
    block: list[Instruction] = []
    for i, after in zip(code, [*code[1:], None], strict=True):
        block.append(i)
        if after is not None and after.at not in starts:
            continue
        followers = [] if after is None else [after.at]
        if i.op.startswith(_ENDS):
            if i.op.startswith("BRX"):
                raise ValueError(f"{i.op} at {i.at:#x}: where it leads is not in the text")
            always = i.predicate is None and i.operands[:1] != ["UP0"] and len(i.operands) < 2
            followers = [] if always or i.op.startswith("RET") else followers
            if i.op.startswith("BRA"):
                followers.append(int(i.operands[-1], 16))
        out[block[0].at] = _Block(block, followers)
        block = []
    return out


def _upper_words(i: Instruction) -> list[str]:
    """Of b, and of a where a descriptor says where it is."""
    if not _PRODUCT.match(i.op):
        return []
    given = next(n for n, x in enumerate(i.operands) if x.startswith("gdesc"))
    first = int(re.search(r"UR(\d+)", i.operands[given])[1])
    return [f"UR{first + 3}"] + ([f"UR{first + 1}"] if given == 1 else [])


def _value(text: str, known: Known) -> int | None:
    """Of an operand without its sign."""
    text = text.removesuffix(".reuse")
    if text in ("RZ", "URZ", "SRZ"):
        return 0
    if _REGISTER.fullmatch(text):
        return known.get(text)
    return int(text, 0) if re.fullmatch(r"0x[0-9a-f]+", text) else None


def _sum(terms: list[str], known: Known) -> int | None:
    total = 0
    for term in terms:
        x = _value(term.lstrip("-"), known)
        if x is None:
            return None
        total += -x if term.startswith("-") else x
    return total & 0xFFFFFFFF


def _results(i: Instruction, known: Known) -> list[int | None] | None:
    """What an instruction puts into its first register and the next ones; None: it is not among those followed."""
    x = [o for o in i.operands[1:] if not re.fullmatch(r"!?U?P[T\d]", o)]
    if i.op.startswith("LDL"):
        return [known.get(word) for word in _stack(x[0], words(i.op))] or None
    if i.op in _MOVES:
        return [_sum(x[-1:], known)]
    if i.op.startswith("CS2R"):
        return [_value(x[0], known)] * (1 if i.op.endswith(".32") else 2)
    if i.op.startswith("HFMA2") and x[:2] == ["-RZ", "RZ"]:
        high, low = (int.from_bytes(struct.pack("<e", float(o)), "little") for o in x[2:4])
        return [high << 16 | low]
    if i.op == "UIADD3.64":
        upper = [re.sub(r"\d+$", lambda n: str(int(n[0]) + 1), o) if _REGISTER.match(o) else "RZ" for o in x]
        return [_sum(x, known), _sum(upper, known)]
    if i.op.startswith(_SUMS):
        # Of IMAD only sums are followed. Carries are none: an address and its offsets stay within their word.
        return [_sum(x[2:] if i.op == "IMAD.X" and x[:2] == ["RZ", "RZ"] else x, known)]
    return None


def _step(i: Instruction, known: Known) -> None:
    """What is known after an instruction. Words of the stack are names too: a register waits there for its turn."""
    if i.op in _CALLS:
        for register in i.operands:
            known.pop(register, None)
        return
    if i.op.startswith("STL"):
        put = _stack(i.operands[0], words(i.op))
        if not put:  # somewhere
            for name in [k for k in known if k.startswith("[")]:
                del known[name]
        _set(put, [_value(r, known) for r in following(i.operands[1], len(put))], i.predicate, known)
        return
    if i.op == "SWAP":
        a, b = i.operands
        _set([a, b], [known.get(b), known.get(a)], None, known)
        return
    if not i.operands or not (first := _REGISTER.fullmatch(i.operands[0])):
        return
    if first[0].endswith("Z"):
        return
    results = _results(i, known)
    if results is None:
        product = _PRODUCT.match(i.op)
        results = [None] * (int(product[1]) // 2 if product else words(i.op))
    _set(following(first[0], len(results)), results, i.predicate, known)


def _set(names: list[str], values: list[int | None], predicate: str | None, known: Known) -> None:
    for name, x in zip(names, values, strict=True):
        if x is None or (predicate is not None and known.get(name) != x):
            known.pop(name, None)
        else:
            known[name] = x


def words(op: str) -> int:
    """Registers that an instruction writes, or the most that it may. A shift of 64 bits writes one half of them."""
    if op.startswith(("SHF.", "USHF.")):
        return 1
    return 4 if "128" in op else 2 if re.search(r"64|WIDE", op) else 1


def following(register: str, n: int) -> list[str]:
    """A register and those after it; of the one that is always 0, itself."""
    name, number = re.match(r"(U?R)(\d+|Z)", register).groups()
    return [register.removesuffix(".reuse") if number == "Z" else f"{name}{int(number) + k}" for k in range(n)]


def _stack(place: str, n: int) -> list[str]:
    """The words at a fixed place of the stack; none where it is another."""
    found = _STACK.fullmatch(place)
    return [f"[{int(found[1] or '0', 16) + 4 * k}]" for k in range(n)] if found else []
