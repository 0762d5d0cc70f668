"""Prefill's epilogue on Hopper: four lanes exchange registers, so that each stores 16 adjacent bytes."""

from __future__ import annotations

import re

import pytest

from tersekv.backends.gluon.sm90.prefill.epilogue import (
    QUAD_TRANSPOSE_PTX,
    adjacent_columns_layout,
    quad_transpose_layout,
)

LANES = range(4)


def run(ptx: str, inputs: list[list[int]]) -> list[list[int]]:
    """The outputs $0 to $3 of each lane whose inputs $4 to $7 are given."""
    values = [{f"${4 + i}": x for i, x in enumerate(row)} | {"%laneid": lane} for lane, row in enumerate(inputs)]

    def read(lane: int, name: str) -> int:
        return values[lane][name] if name in values[lane] else int(name, 0)

    for line in re.findall(r"^\s*([a-z][^;{]*);", ptx, re.MULTILINE):
        op, *names = re.split(r",?\s+", line)
        to, a = names[0], [[read(lane, x) for x in names[1:4]] for lane in LANES]
        if op == "shfl.sync.bfly.b32":
            found = [read(lane ^ int(names[2]), names[1]) for lane in LANES]
        else:
            do = {
                "mov.u32": lambda x: x, "and.b32": lambda x, y: x & y, "setp.ne.u32": lambda x, y: x != y,
                "selp.b32": lambda x, y, p: x if p else y,
            }[op]  # fmt: skip
            found = [do(*a[lane]) for lane in LANES]
        for lane in LANES:
            values[lane][to] = found[lane]
    return [[values[lane][f"${i}"] for i in range(4)] for lane in LANES]


def test_registers_of_four_lanes_are_transposed():
    registers = [[10 * lane + i for i in range(4)] for lane in LANES]
    assert run(QUAD_TRANSPOSE_PTX.value, registers) == [[10 * i + lane for i in range(4)] for lane in LANES]


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("columns", [32, 64, 128, 256])
def test_then_each_lane_holds_8_adjacent_columns(rows, columns):
    """What was register and lane of [rows, 32 columns, register, lane, 2] changes places, and nothing else."""
    before, after = quad_transpose_layout(rows, columns), adjacent_columns_layout(rows, columns)

    def column(base: list[int]) -> list[int]:
        row, group, register, lane, pair = base
        return [row, 32 * group + 8 * lane + 2 * register + pair]

    for kind in ("reg_bases", "lane_bases", "warp_bases"):
        assert [column(base) for base in getattr(before, kind)] == getattr(after, kind)
