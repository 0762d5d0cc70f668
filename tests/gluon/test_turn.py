"""Rotations on Hopper, thread by thread: Gluon has no interpreter, so `parts/turn` runs on numpy in its place."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tersekv.backends.gluon.sm90.decode import layouts
from tersekv.backends.gluon.sm90.parts import dequant, hadamard
from tersekv.testing.reference_rotation import row as reference

LANES = 32


class Layout(SimpleNamespace):
    """As `gl.DistributedLinearLayout` has it."""

    reg_bases: list[list[int]]
    lane_bases: list[list[int]]
    warp_bases: list[list[int]]


class Numbers(np.ndarray):
    """A tensor of a layout."""

    layout: Any = None

    def __array_finalize__(self, other: Any) -> None:
        self.layout = getattr(other, "layout", None)

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=self.layout)


def placed(x: np.ndarray, layout: Any) -> Numbers:
    x = x.astype(np.float32).view(Numbers)
    x.layout = layout
    return x


def places(layout: Any) -> np.ndarray:
    """Coordinates of what every thread holds: [threads, registers, dimensions]."""
    found = np.zeros((1, len(layout.reg_bases[0])), int)
    for basis in (*layout.reg_bases, *layout.lane_bases, *layout.warp_bases):
        found = np.concatenate((found, found ^ np.array(basis)))
    return found.reshape(-1, 2 ** len(layout.reg_bases), found.shape[1])


def run_ptx(text: str, ties: str, args: list, dtype: Any, pure: bool, pack: int) -> Numbers:
    """The few instructions of `across_lanes`, by all threads in step."""
    assert (ties, pure, pack) == ("=f,f", False, 1)
    (x,) = args
    at = tuple(np.moveaxis(places(x.layout), -1, 0))
    given = np.asarray(x)[at].view(np.uint32)
    thread = np.arange(given.shape[0])
    found = {"$1": given, "%laneid": np.repeat((thread % LANES)[:, None], given.shape[1], 1).astype(np.uint32)}
    for line in re.sub(r"[{}]|\.reg[^;]*;", "", text).split(";"):
        op, *operands = line.replace(",", " ").split() or [""]
        to, *values = operands or [""]
        a, *more = (found.get(v, v) for v in values or [""])
        match op:
            case "mov.u32":
                found[to] = a
            case "shl.b32":
                found[to] = a << np.uint32(int(more[0]))
            case "and.b32":
                found[to] = a & np.uint32(int(more[0], 0))
            case "xor.b32":
                found[to] = a ^ more[0]
            case "add.f32":
                found[to] = (a.view(np.float32) + more[0].view(np.float32)).view(np.uint32)
            case "shfl.sync.bfly.b32":
                assert more[1:] == ["0x1f", "0xffffffff"]
                found[to] = a[thread ^ int(more[0])]
            case _:
                assert not op, op
    out = np.empty_like(x)
    out[at] = found["$0"].view(np.float32)
    return out


@pytest.fixture
def on_numpy(monkeypatch):
    def converted(x, layout, assert_trivial):
        assert assert_trivial
        return placed(np.asarray(x), layout)

    monkeypatch.setattr(hadamard, "gl", SimpleNamespace(
        static_range=range, reshape=np.reshape, permute=np.transpose, join=lambda a, b: np.stack((a, b), -1),
        split=lambda x: (x[..., 0], x[..., 1]), convert_layout=converted, inline_asm_elementwise=run_ptx,
        to_linear_layout=lambda layout, shape: layout, float32=None, constexpr=None,
    ))  # fmt: skip
    for name in ("hadamard_butterfly", "blockwise_hadamard_unnormalized", "blockwise_hadamard_unnormalized_unpacked"):
        monkeypatch.setattr(hadamard, name, getattr(hadamard, name).fn)


def wgmma(columns: int) -> Layout:
    """A left operand or an accumulator [64, columns] of a warpgroup."""
    wide = [[0, 8 << i] for i in range((columns // 8).bit_length() - 1)]
    return Layout(reg_bases=[[0, 1], [8, 0], *wide], lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
                  warp_bases=[[16, 0], [32, 0]])  # fmt: skip


def mma(heads: int, words: int, epilogue: int) -> Layout:
    """An accumulator of values [heads, words, rows] on mma.sync; a head a warp."""
    more = [[0, 16 << i, 0] for i in range((words // 16).bit_length() - 1)]
    more += [[0, 0, 8 << i] for i in range((epilogue // 8).bit_length() - 1)]
    return Layout(reg_bases=[[0, 0, 1], [0, 8, 0], *more],
                  lane_bases=[[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
                  warp_bases=[[1 << i, 0, 0] for i in range(heads.bit_length() - 1)])  # fmt: skip


def law(x: np.ndarray) -> np.ndarray:
    """Along the last axis, by the reference of an append: butterflies of neighbours first."""
    d = x.shape[-1]
    x = torch.from_numpy(x.astype(np.float32)).reshape(-1, 1, d)
    return (reference(x, torch.ones(d), None) / torch.tensor(float(d)).rsqrt()).reshape(-1, d).numpy()


def close(x: np.ndarray, y: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(x).reshape(y.shape), y, rtol=0, atol=2e-6 * np.abs(y).max())


@pytest.mark.parametrize(("words", "parts"), [(16, 4), (32, 4), (64, 4), (32, 2), (64, 2), (128, 2), (64, 1), (256, 1)])
def test_queries_in_the_layout_of_their_keys(on_numpy, words, parts):
    layout = layouts.query_load_layout(4, 1, 16, words, parts)
    x = np.random.default_rng(0).standard_normal((4, 16, words * parts))
    close(hadamard.blockwise_hadamard_unnormalized(placed(x, layout), 2, words * parts), law(x))


@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.parametrize("block", [16, 64])
def test_rows_of_a_warpgroup_in_blocks(on_numpy, columns, block):
    x = np.random.default_rng(1).standard_normal((64, columns))
    close(hadamard.blockwise_hadamard_unnormalized(placed(x, wgmma(columns)), 1, block), law(x.reshape(-1, block)))


@pytest.mark.parametrize(("columns", "parts"), [(64, 4), (256, 4), (128, 2), (64, 1)])
def test_weighted_values_in_parts(on_numpy, columns, parts):
    layout = mma(4, columns // parts, 16)
    x = np.random.default_rng(2).standard_normal((4, columns, 16))
    given = tuple(placed(x[:, j::parts], layout) for j in range(parts))
    found = np.stack(
        [np.asarray(y) for y in hadamard.blockwise_hadamard_unnormalized_unpacked(given, parts, 1, columns)], 2
    ).reshape(x.shape)
    close(np.moveaxis(found, 1, -1), law(np.moveaxis(x, 1, -1)))


@pytest.mark.parametrize("parts", [2, 4])
def test_columns_of_converted_codes_only_change_places_within_eight(parts):
    """So a product with the Hadamard matrix, which knows no order of the bits of a column, may run over places."""
    place, c = np.arange(128), SimpleNamespace(PACK=parts)
    column = dequant.head_column_of_converted_column.fn(place, c)
    assert sorted(column) == list(place)
    for bit in range(7):  # bits go to bits
        assert bin(column[1 << bit]).count("1") == 1
        assert (column[place ^ (1 << bit)] == column ^ column[1 << bit]).all()


def test_a_row_in_two_warps_is_refused():
    split = Layout(reg_bases=[[0, 1]], lane_bases=[[0, 2], [1, 0], [2, 0], [4, 0], [8, 0]], warp_bases=[[0, 4]])
    assert [hadamard.partner_lane_xor_mask(split, 1, step) for step in (1, 2)] == [0, 1]
    with pytest.raises(AssertionError, match="more than one warp"):
        hadamard.partner_lane_xor_mask(split, 1, 4)
