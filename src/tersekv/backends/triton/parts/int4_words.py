"""Rows of int4 to e4m3, bf16 or fp16: words of eight codes become two or four words, each in the thread that has it."""

from __future__ import annotations

import triton
import triton.language as tl

from .dequant import E4M3, FP16
from .quant import ZERO_POINT, encode_fp8


def _int4_word_to_target_words_ptx(target_code: str) -> str:
    """Returns PTX: eight codes and the stored scale, 2^23 + the zero point, (e4m3:) the multiplier → words $0 and on.

    A byte permute puts a code into the last bits of 2^23, so that one subtraction gives it less the zero point.
    """
    outputs = 2 if target_code == "e4m3" else 4
    word, scale, zero, e4m3_multiplier = (f"${outputs + i}" for i in range(4))
    lines = ["{", ".reg .b32 even, odd, t;", ".reg .f32 y<8>;", ".reg .b16 l, h;"]
    lines += [f"and.b32 even, {word}, 0x0F0F0F0F;", f"shr.u32 t, {word}, 4;", "and.b32 odd, t, 0x0F0F0F0F;"]
    for i in range(8):
        lines += [
            f"prmt.b32 t, {('even', 'odd')[i % 2]}, 0x4B000000, 0x744{i // 2};",
            f"mov.b32 y{i}, t;",
            f"sub.rn.f32 y{i}, y{i}, {zero};",
            f"mul.rn.f32 y{i}, y{i}, {scale};",
        ]
    if target_code == "e4m3":
        for i in range(2):
            lines += [f"mul.rn.f32 y{j}, y{j}, {e4m3_multiplier};" for j in range(4 * i, 4 * i + 4)]
            lines += [
                f"cvt.rn.satfinite.e4m3x2.f32 {to}, y{4 * i + at + 1}, y{4 * i + at};"
                for to, at in (("l", 0), ("h", 2))
            ]
            lines.append(f"mov.b32 ${i}, {{l, h}};")
    else:
        kind = {"bf16": "bf16x2", "fp16": "f16x2"}[target_code]
        lines += [f"cvt.rn.{kind}.f32 ${i}, y{2 * i + 1}, y{2 * i};" for i in range(4)]
    return "\n".join([*lines, "}"])


_E4M3_PTX, _BF16_PTX, _FP16_PTX = (
    tl.constexpr(_int4_word_to_target_words_ptx(code)) for code in ("e4m3", "bf16", "fp16")
)


@triton.jit
def _in_order(a, b):
    """Words a0 b0 a1 b1 …: [ROWS, W], [ROWS, W] → [ROWS, 2 W]."""
    return tl.reshape(tl.join(a, b), [a.shape[0], 2 * a.shape[1]])


@triton.jit
def int4_words_to_format_words(
    words, stored_scale, e4m3_multiplier, FORMAT: tl.constexpr, NATIVE_FP8_CAST: tl.constexpr, PTX: tl.constexpr
):
    """Returns words [ROWS, 2 W] of e4m3, or [ROWS, 4 W] of 16 bits, of int4 words [ROWS, W].

    stored_scale:     [ROWS, 1] fp32, with the zero point in its last bits
    e4m3_multiplier:  of the numbers before they become e4m3
    """
    zero_point = (stored_scale.to(tl.int32, bitcast=True) & ZERO_POINT).to(tl.float32)
    if PTX and FORMAT.CODE == E4M3 and NATIVE_FP8_CAST:
        low, high = tl.inline_asm_elementwise(
            _E4M3_PTX, "=&r,=&r,r,f,f,f", [words, stored_scale, zero_point + 8388608.0, e4m3_multiplier],
            (tl.uint32, tl.uint32), True, 1,
        )  # fmt: skip
        return _in_order(low, high)
    elif PTX and FORMAT.CODE != E4M3:
        TEXT: tl.constexpr = _FP16_PTX if FORMAT.CODE == FP16 else _BF16_PTX
        a, b, c, d = tl.inline_asm_elementwise(
            TEXT, "=&r,=&r,=&r,=&r,r,f,f", [words, stored_scale, zero_point + 8388608.0],
            (tl.uint32, tl.uint32, tl.uint32, tl.uint32), True, 1,
        )  # fmt: skip
        return _in_order(_in_order(a, c), _in_order(b, d))
    else:
        BITS: tl.constexpr = 8 if FORMAT.CODE == E4M3 else 16
        out = ()
        for i in tl.static_range(BITS // 4):
            word = tl.zeros(words.shape, tl.uint32)
            for j in tl.static_range(32 // BITS):
                y = (((words >> (4 * (i * (32 // BITS) + j))) & 15).to(tl.float32) - zero_point) * stored_scale
                if FORMAT.CODE == E4M3:
                    bits = encode_fp8(y * e4m3_multiplier, False, NATIVE_FP8_CAST).to(tl.uint32)
                elif FORMAT.CODE == FP16:
                    bits = y.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
                else:
                    bits = y.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
                word |= bits << (BITS * j)
            out = out + (word,)
        if FORMAT.CODE == E4M3:
            return _in_order(out[0], out[1])  # type: ignore[misc]
        else:
            return _in_order(_in_order(out[0], out[2]), _in_order(out[1], out[3]))  # type: ignore[misc]


@triton.jit
def transcode_int4_rows(
    p_src, o_src, p_stored_scales, o_stored_scales, p_dst, o_dst, m_row, e4m3_multiplier, D: tl.constexpr,
    THREADS_PER_ROW: tl.constexpr, FORMAT: tl.constexpr, NATIVE_FP8_CAST: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """Loads rows of int4 and stores them as FORMAT, 16 bytes a thread at a time."""
    GROWS: tl.constexpr = 2 if FORMAT.CODE == E4M3 else 4
    VECTOR: tl.constexpr = 4 // GROWS * THREADS_PER_ROW
    p_src = (p_src + o_src).to(tl.pointer_type(tl.uint32)) + tl.arange(0, VECTOR)[None, :]
    p_dst = (p_dst + o_dst).to(tl.pointer_type(tl.uint32)) + tl.arange(0, GROWS * VECTOR)[None, :]
    stored_scale = tl.load(p_stored_scales + o_stored_scales, mask=m_row, other=0.0)
    tiles = ()
    for i in tl.static_range(D // 8 // VECTOR):
        tiles = tiles + (tl.load(p_src + VECTOR * i, mask=m_row, other=0),)
    for i in tl.static_range(D // 8 // VECTOR):
        words = int4_words_to_format_words(tiles[i], stored_scale, e4m3_multiplier, FORMAT, NATIVE_FP8_CAST, USE_PTX)
        tl.store(p_dst + GROWS * VECTOR * i, words, mask=m_row)
