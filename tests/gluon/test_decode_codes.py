"""Conversions that the kernels write in PTX, worked out here for every code."""

from __future__ import annotations

import numpy as np
import torch

from tersekv.backends.gluon.sm90.parts import dequant as decode_codes
from tersekv.backends.triton.parts import dequant as portable_codes

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)


def products(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """mul.f16x2; a product of two fp16 numbers is exact in fp32."""
    x, y = (np.ascontiguousarray(v, np.uint32).view(np.float16).astype(np.float32) for v in (a, b))
    with np.errstate(over="ignore"):
        return (x * y).astype(np.float16).view(np.uint32)


def sums(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """fma.rn.f16x2, where the product is exact in fp32."""
    x, y, z = (np.ascontiguousarray(v, np.uint32).view(np.float16).astype(np.float32) for v in (a, b, c))
    with np.errstate(invalid="ignore"):
        return (x * y + z).astype(np.float16).view(np.uint32)


def differences(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """sub.f16x2 of multiples of one power of two, below fp16's smallest normal number too."""
    x, y = (np.ascontiguousarray(v, np.uint32).view(np.float16).astype(np.float32) for v in (a, b))
    return (x - y).astype(np.float16).view(np.uint32)


def lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    terms = [
        (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8) if table >> i & 1
    ]  # fmt: skip
    return np.bitwise_or.reduce(terms)


def permuted(a: np.ndarray, b: np.ndarray, selector: int) -> np.ndarray:
    """prmt.b32 without signs."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << 32
    found = [(both >> (8 * (selector >> 4 * i & 7)) & 0xFF) << (8 * i) for i in range(4)]
    return np.bitwise_or.reduce(found).astype(np.uint32)


def run(ptx: str, *inputs: np.ndarray, results: int = 4) -> list[np.ndarray]:
    """The results of straight PTX on registers of 32 bits: $0, $1, …; the inputs follow."""
    words, registers = inputs[0], {f"${results + i}": x for i, x in enumerate(inputs)}

    def value(name: str) -> np.ndarray:
        return registers[name] if name in registers else np.full_like(words, int(name, 0))

    for line in ptx.splitlines():
        op, _, rest = line.strip().rstrip(";").partition(" ")
        if op in ("{", "}", ".reg"):
            continue
        to, *names = rest.split(", ")
        match op:
            case "lop3.b32":
                out = lop3(*map(value, names[:3]), int(names[3], 0))
            case "mul.lo.u32":
                out = value(names[0]) * value(names[1])
            case "add.u32":
                out = value(names[0]) + value(names[1])
            case "shr.u32":
                out = value(names[0]) >> value(names[1])
            case "shl.b32":
                out = value(names[0]) << value(names[1])
            case "mov.b32":
                out = value(names[0])
            case "fma.rn.f16x2":
                out = sums(*map(value, names))
            case "and.b32":
                out = value(names[0]) & value(names[1])
            case "prmt.b32":
                out = permuted(*map(value, names[:2]), int(names[2], 0))
            case "mul.f16x2":
                out = products(value(names[0]), value(names[1]))
            case "sub.f16x2":
                out = differences(value(names[0]), value(names[1]))
        registers[to] = out
    return [registers[f"${i}"] for i in range(results)]


def test_every_e2m1_code_beside_any_others_times_every_scale_is_exact():
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).half()
    scales = scales[scales.isfinite()].numpy()
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (4096, 1), np.uint32)
    # All codes in all places beside codes that would carry into them.
    for place in range(8):
        for others in (0, 0x77777777, 0x88888888, 0xFFFFFFFF):
            field = 0xF << 4 * place
            words = np.append(words, [[others & ~field | code << 4 * place] for code in range(16)], 0).astype(np.uint32)
    factor = scales.view(np.uint16).astype(np.uint32) * 0x10001
    words, factor = np.broadcast_arrays(words, factor[None, :])
    out = run(decode_codes.E2M1_PTX.value, words.copy(), factor.copy())
    for i in range(4):
        for unit in range(2):
            code = words >> (16 * unit + 4 * i) & 0xF
            want = np.where(code & 8, -1, 1) * E2M1[code & 7] * scales.astype(np.float64) * 2.0**-14
            got = (out[i] >> (16 * unit) & 0xFFFF).astype(np.uint16).view(np.float16)
            assert np.array_equal(got.astype(np.float64), want), (i, unit)


def zeroed(words: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """The zero point of one key, for both units of a register."""
    return np.broadcast_to(((zeros & 15) * 0x10001)[None, :], words.shape).copy()


def test_every_int4_code_beside_any_others_is_exact_with_and_without_its_zero_point():
    """Of keys as they are, of values less the zero points of the two keys in a register; odd codes 16 times larger."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (4096, 1), np.uint32)
    zeros = np.arange(256, dtype=np.uint32)  # of both keys
    words, low = np.broadcast_arrays(words, (zeros & 15 | zeros >> 4 << 16)[None, :])
    words, low = words.copy(), low.copy()
    keys, values = (
        run(decode_codes.INT4_PTX.value, words),
        run(decode_codes.INT4_LESS_ZERO_PTX.value, words, low, low << 4),
    )
    for i in range(4):
        scale = 2.0**-24 * (decode_codes.INT4_ODD_SCALE.value if i % 2 else 1.0)
        for unit in range(2):
            code = (words >> (16 * unit + 4 * i) & 0xF).astype(np.float64)
            zero = (low >> (16 * unit) & 0xF).astype(np.float64)
            for out, want in ((keys, code), (values, code - zero)):
                got = (out[i] >> (16 * unit) & 0xFFFF).astype(np.uint16).view(np.float16)
                assert np.array_equal(got.astype(np.float64), want * scale), (i, unit)
    # In the order of a row, as other kernels want them: no power of two is left over.
    rows = run(
        decode_codes._INT4_ROW_PTX.value, words, zeroed(words, zeros) | 0x64006400,
        zeroed(words, zeros) << 4 | 0x54005400,
    )  # fmt: skip
    for out, pair in zip(rows, ((0, 2), (4, 6), (1, 3), (5, 7)), strict=True):
        for half, i in enumerate(pair):
            got = (out >> (16 * half) & 0xFFFF).astype(np.uint16).view(np.float16)
            want = (words >> (4 * i) & 0xF).astype(np.float64) - (zeros & 15)
            assert np.array_equal(got.astype(np.float64), want), i
    # What is left over of products whose even codes met numbers that are larger by INT4_ODD.
    assert decode_codes.INT4_RESIDUAL_SCALE.value * decode_codes.INT4_ODD_SCALE.value * 2.0**-24 == 1.0


def test_every_e4m3_code_beside_any_others_becomes_fp16_without_a_type_for_it():
    """Of a register of codes, even ones and odd ones, NaN too; and in their order, of scales, which are no NaN."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, 4096, np.uint32)
    for place in range(4):
        for others in (0, 0x7F7F7F7F, 0x80808080, 0xFFFFFFFF):
            field = 0xFF << 8 * place
            words = np.append(words, [others & ~field | code << 8 * place for code in range(256)]).astype(np.uint32)
    codes = words.view(np.uint8).reshape(-1, 4)
    want = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).half().numpy()
    pairs = run(portable_codes._E4M3_FIELDS_PTX.value, words, results=2)
    rows = run(portable_codes._E4M3_FIELDS_ROW_PTX.value, words, results=2)
    for i in range(2):
        for unit in range(2):
            even_odd, in_order = (
                (x[i] >> (16 * unit) & 0xFFFF).astype(np.uint16).view(np.float16) for x in (pairs, rows)
            )
            assert np.array_equal(even_odd, want[:, 2 * unit + i], equal_nan=True), (i, unit)
            number = ~np.isnan(want[:, 2 * i + unit])
            assert np.array_equal(in_order[number], want[:, 2 * i + unit][number]), (i, unit)
            assert np.array_equal(np.signbit(in_order[number]), np.signbit(want[:, 2 * i + unit][number])), (i, unit)
