"""Rotated rows and channel scales in prefill: a query in registers, and sums of values, by `parts/turn`.

Heads change from item to item, and shared memory is full: what columns are multiplied by is loaded where it is needed.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts.turn import factors_of, sums


class Turns(NamedTuple):
    """Signs and channel scales of keys and of values; what a cache does not have is None."""

    K_SIGNS: gl.tensor
    V_SIGNS: gl.tensor
    K_CHANNELS: gl.tensor
    V_CHANNELS: gl.tensor


@gluon.jit
def turned_query(x, turns, h, c: gl.constexpr):
    """Query rows [rows, columns] fp32 as they meet keys of such a cache."""
    TURN: gl.constexpr = c.K_TURN
    column = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    x = x * factors_of(turns.K_SIGNS, turns.K_CHANNELS, h, column, c.HEAD_D, TURN)[None, :]
    if TURN.ROTATED:
        x = sums(x, 1, c.HEAD_D & -c.HEAD_D)
    return x


@gluon.jit
def turned_back(acc, turns, h, c: gl.constexpr):
    """Sums of values [rows, columns] as those of rows before they were turned."""
    TURN: gl.constexpr = c.V_TURN
    if TURN.ROTATED:
        acc = sums(acc, 1, c.HEAD_DV & -c.HEAD_DV)
    column = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    return acc * factors_of(turns.V_SIGNS, turns.V_CHANNELS, h, column, c.HEAD_DV, TURN)[None, :]


@gluon.jit
def turned_as_rows(acc, turns, h, c: gl.constexpr):
    """The other way: sums of values that are to be added to those of a cache's rows."""
    TURN: gl.constexpr = c.V_TURN
    column = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    acc = acc * factors_of(turns.V_SIGNS, turns.V_CHANNELS, h, column, c.HEAD_DV, TURN, True)[None, :]
    if TURN.ROTATED:
        acc = sums(acc, 1, c.HEAD_DV & -c.HEAD_DV)
    return acc
