"""What kernels write in PTX to make e2m1 codes, worked out here: for ties, their neighbours, and what is no number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tersekv.backends.torch import quantize
from tersekv.backends.triton.parts import nvfp4_rows, packed_quant

F32, U32 = np.float32, np.uint32


def made(x: np.ndarray) -> np.ndarray:
    """fp64 → fp32, whose NaN is the one that a GPU makes."""
    with np.errstate(over="ignore"):
        bits = x.astype(F32).view(U32)
    return np.where(np.isnan(x), U32(0x7FFFFFFF), bits)


def permuted(a: np.ndarray, b: np.ndarray, selector: int) -> np.ndarray:
    both, found = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32), np.zeros_like(a)
    for i in range(4):
        pick = selector >> 4 * i
        byte = (both >> np.uint64(8 * (pick & 7)) & np.uint64(0xFF)).astype(U32)
        found |= np.where(byte >> 7, U32(0xFF), U32(0)) << U32(8 * i) if pick & 8 else byte << U32(8 * i)
    return found


def run(ptx: str, inputs: list[np.ndarray]) -> np.ndarray:
    """$0 of straight PTX; the inputs are $1, $2, … as bits."""
    registers = {f"${1 + i}": x for i, x in enumerate(inputs)}

    def bits(name: str) -> np.ndarray:
        if name in registers:
            return registers[name]
        return np.full_like(inputs[0], int(name[2:], 16) if name.startswith("0f") else int(name, 0))

    def number(name: str) -> np.ndarray:
        return bits(name).view(F32).astype(np.float64)  # products of two, and sums with a third, are exact or far away

    for line in ptx.splitlines():
        op, _, rest = line.strip().rstrip(";").partition(" ")
        if op in ("{", "}", ".reg"):
            continue
        if rest.startswith("{"):
            word = bits(rest.partition("}, ")[2])
            registers |= {"low": word & U32(0xFFFF), "high": word >> U32(16)}
            continue
        to, *names = rest.split(", ")
        with np.errstate(invalid="ignore"):
            match op.split("."):
                case ["mul", "rn", "f32"]:
                    out = made(number(names[0]) * number(names[1]))
                case ["abs", "f32"]:
                    out = bits(names[0]) & U32(0x7FFFFFFF)
                case ["add", "rn", *sat, "f32"]:
                    out = made(clamped(number(names[0]) + number(names[1]), bool(sat)))
                case ["fma", "rn", *sat, "f32"]:
                    out = made(clamped(number(names[0]) * number(names[1]) + number(names[2]), bool(sat)))
                case ["cvt", "f32", "f16"]:
                    out = made(bits(names[0]).astype(np.uint16).view(np.float16).astype(np.float64))
                case ["mov", "b32"]:
                    out = bits(names[0])
                case ["add", "u32"]:
                    out = bits(names[0]) + bits(names[1])
                case ["shl", "b32"]:
                    out = bits(names[0]) << bits(names[1])
                case ["and", "b32"]:
                    out = bits(names[0]) & bits(names[1])
                case ["or", "b32"]:
                    out = bits(names[0]) | bits(names[1])
                case ["prmt", "b32"]:
                    out = permuted(bits(names[0]), bits(names[1]), int(names[2], 0))
                case _:
                    raise AssertionError(line)
        registers[to] = out
    return registers["$0"]


def clamped(x: np.ndarray, saturate: bool) -> np.ndarray:
    return np.where(np.isnan(x), 0.0, np.clip(x, 0.0, 1.0)) if saturate else x


def numbers() -> np.ndarray:
    """fp32 [N], N a multiple of 8, shuffled: ties of e2m1 and of its saturation, what is near them, and the rest."""
    edges = np.array(
        [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 2.0**-126, 1e-45, 3e38, np.inf], F32
    )
    near = [np.nextafter(edges, F32(to)) for to in (-np.inf, np.inf)]
    rng = np.random.default_rng(0)
    found = np.concatenate([edges, *near, rng.normal(0, 3, 4096).astype(F32), np.full(8, np.nan, F32)])
    found = np.concatenate([found, -found])
    rng.shuffle(found)
    return found[: len(found) // 8 * 8].astype(F32)


def wanted(y: np.ndarray) -> np.ndarray:
    """Codes of fp32, eight a word."""
    codes = quantize.encode_e2m1_nearest_even_satfinite(torch.from_numpy(y)).numpy().astype(U32).reshape(-1, 8)
    return np.bitwise_or.reduce(codes << (U32(4) * np.arange(8, dtype=U32)), axis=1)


def scaled(x: np.ndarray, inv_scale: np.ndarray) -> np.ndarray:
    return made(x.astype(np.float64) * inv_scale).view(F32)


@pytest.mark.parametrize("inv_scale", [1.0, 0.3, 2.0**-20, 3e4, np.nan])
def test_tiles_become_the_oracles_codes(inv_scale):
    y, inv = numbers(), F32(inv_scale)
    x = np.clip(y.astype(np.float64) / inv_scale, -3e38, 3e38).astype(F32) if inv == inv else y
    columns = x.reshape(-1, 8)
    inputs = [columns[:, 4 * i + j].copy().view(U32) for j in range(4) for i in range(2)]
    inputs += [np.full(len(columns), inv, F32).view(U32)] * 2
    assert np.array_equal(run(nvfp4_rows._encode_8_floats_as_e2m1_ptx(), inputs), wanted(scaled(x, inv)))


@pytest.mark.parametrize("inv_scale", [1.0, 0.3, 2.0**-20, np.nan])
@pytest.mark.parametrize("fp16", [False, True])
def test_pairs_become_the_oracles_codes(fp16, inv_scale):
    dtype, inv = torch.float16 if fp16 else torch.bfloat16, F32(inv_scale)
    x = torch.from_numpy(numbers().astype(np.float64) / (inv if inv == inv else 1)).to(dtype)
    words = x.view(torch.int16).numpy().view(np.uint16).astype(U32).reshape(-1, 4, 2)
    inputs = [*(words[..., 0] | words[..., 1] << U32(16)).T.copy()] + [np.full(len(words), inv / 2, F32).view(U32)] * 4
    got = run(packed_quant._fp16_or_bf16_pairs_to_e2m1_ptx(fp16), inputs)
    assert np.array_equal(got, wanted(scaled(x.float().numpy(), inv)))
