"""4-bit codes of 16-bit rows, read as 32-bit words of two values each: what a thread reads is what it writes.

Byte i holds the codes of word i, so words and bytes have one shape, a thread keeps whole blocks of nvfp4, and neither a
block's largest value nor a byte needs another thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .quant import (
    E2M1_MAX,
    E4M3_MAX,
    divide,
    encode_e2m1,
    int4_codes,
    int4_scales,
    largest,
    range_of,
    reciprocal,
    round_magnitude,
    write_codes,
)

BLOCK_WORDS = tl.constexpr(8)


def _bytes_of_words(fp16: bool) -> str:
    """PTX: four words $1 to $4 and half of a block's inverse scale $5 to $8 for each → four bytes $0.

    With h = y / 2, the magnitude's code is the sum of three parts that saturate, each rounded to nearest even by
    adding it to 2^23: 4 sat(|h|) counts halves up to 2, then 2 sat(|h| - 1) ones up to 4, then sat(|h| - 2) twos up to
    6. The multipliers do it all, at twice the rate of comparisons. NaN saturates to 0, and a product that is NaN has a
    positive sign.
    """
    lines = ["{", ".reg .f32 x, h<8>, a, b, c, r;", ".reg .b32 k<8>, even, odd, s, t;", ".reg .b16 low, high;"]
    for i in range(8):
        word, inverse = f"${1 + i // 2}", f"${5 + i // 2}"
        if fp16:
            lines += [f"mov.b32 {{low, high}}, {word};", f"cvt.f32.f16 x, {'high' if i % 2 else 'low'};"]
        else:
            lines += [f"and.b32 t, {word}, 0xFFFF0000;" if i % 2 else f"shl.b32 t, {word}, 16;", "mov.b32 x, t;"]
        lines += [
            f"mul.rn.f32 h{i}, x, {inverse};",
            f"abs.f32 x, h{i};",
            "add.rn.sat.f32 a, x, 0f80000000;",
            "add.rn.sat.f32 b, x, 0fBF800000;",
            "add.rn.sat.f32 c, x, 0fC0000000;",
            "fma.rn.f32 r, a, 0f40800000, 0f4B000000;",
            "fma.rn.f32 r, b, 0f40000000, r;",
            "add.rn.f32 r, r, c;",
            f"mov.b32 k{i}, r;",
        ]
    # 2^23's own bits, shifted with the codes, add up to 0xFB000000.
    lines.append("add.u32 t, k0, 0x05000000;")
    for i in range(1, 8):
        lines += [f"shl.b32 k{i}, k{i}, {4 * i};", f"add.u32 t, t, k{i};"]
    # A byte permute that repeats a byte's top bit gives the signs of even and of odd columns, a byte each.
    for first, name in ((0, "even"), (1, "odd")):
        lines += [
            f"mov.b32 k0, h{first};", f"mov.b32 k1, h{first + 2};", "prmt.b32 s, k0, k1, 0x00FB;",
            f"mov.b32 k0, h{first + 4};", f"mov.b32 k1, h{first + 6};", "prmt.b32 k0, k0, k1, 0x00FB;",
            f"prmt.b32 {name}, s, k0, 0x5410;",
        ]  # fmt: skip
    lines += ["and.b32 even, even, 0x08080808;", "and.b32 odd, odd, 0x80808080;", "or.b32 s, even, odd;"]
    lines += ["or.b32 $0, t, s;", "}"]
    return "\n".join(lines)


_PTX_BF16 = tl.constexpr(_bytes_of_words(False))
_PTX_FP16 = tl.constexpr(_bytes_of_words(True))


@triton.jit
def read_words(p, at, D: tl.constexpr, C: tl.constexpr):
    """Rows [ROWS, C / 2] of words; at counts words; words past column D are 0."""
    i = tl.arange(0, C // 2)[None, :]
    p = p.to(tl.pointer_type(tl.uint32))
    if D == C:
        return tl.load(p + at + i)
    else:
        return tl.load(p + at + i, mask=i < D // 2, other=0)


@triton.jit
def values(words, FP16: tl.constexpr):
    """The two values of each word, fp32: even columns, odd columns."""
    if FP16:
        low = (words & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        return low, (words >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (words << 16).to(tl.float32, bitcast=True), (words & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _larger_bf16(a, b):
    return tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.uint32, True, 1)


@triton.jit
def _larger_fp16(a, b):
    return tl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.uint32, True, 1)


@triton.jit
def largest_of_blocks(words, FP16: tl.constexpr, ASM: tl.constexpr):
    """Largest magnitude of each block, NaN ignored: words [ROWS, W] → fp32 [ROWS, W / 8]."""
    sizes = tl.reshape(words & 0x7FFF7FFF, [words.shape[0], words.shape[1] // BLOCK_WORDS, BLOCK_WORDS])
    if ASM:
        low, high = values(tl.reduce(sizes, 2, _larger_fp16 if FP16 else _larger_bf16), FP16)
        amax = tl.maximum(low, high)
        return tl.where(amax > 0, amax, 0.0)
    else:
        low, high = values(sizes, FP16)
        return largest(tl.maximum(low, high))


@triton.jit
def encode_words(words, multiplier, global_scale, FP16: tl.constexpr, ASM: tl.constexpr):
    """nvfp4 of words [ROWS, W]: bytes [ROWS, W] and e4m3 scales [ROWS, W / 8] as uint32. As `encode_blocks`."""
    ROWS: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    amax = largest_of_blocks(words, FP16, ASM)
    scale_code, scale = round_magnitude(divide(amax, E2M1_MAX) * multiplier, 3, -6, E4M3_MAX)
    inverse = tl.where(scale > 0, reciprocal(scale * global_scale), float("nan"))
    inverse = tl.broadcast_to(inverse[:, :, None], [ROWS, W // BLOCK_WORDS, BLOCK_WORDS])
    inverse = tl.reshape(inverse, [ROWS, W])
    if ASM:
        # Half of it is exact, but for global scales above 2^116, which no cache of finite values has.
        inverse *= 0.5
        PTX: tl.constexpr = _PTX_FP16 if FP16 else _PTX_BF16
        codes = tl.inline_asm_elementwise(PTX, "=&r,r,r,r,r,f,f,f,f", [words, inverse], tl.uint8, True, 4)
    else:
        low, high = values(words, FP16)
        codes = (encode_e2m1(low * inverse) | (encode_e2m1(high * inverse) << 4)).to(tl.uint8)
    return codes, scale_code & 0xFF


@triton.jit
def store_words(
    words, p_codes, p_scales, at, at_scales, written, multiplier, global_scale,
    D: tl.constexpr, FP16: tl.constexpr, ASM: tl.constexpr, SCALE_PAIRS: tl.constexpr,
):  # fmt: skip
    """Quantise words [ROWS, C / 2] and write them, as `quant.store` does with rows.

    SCALE_PAIRS: scales can be written two at a time, as a thread has them
    """
    codes, scales = encode_words(words, multiplier, global_scale, FP16, ASM)
    W: tl.constexpr = words.shape[1]
    i = tl.arange(0, W)[None, :]
    tl.store(p_codes + at + i, codes, mask=written if D == 2 * W else written & (i < D // 2))
    if SCALE_PAIRS:
        ROWS: tl.constexpr = words.shape[0]
        low, high = tl.split(tl.reshape(scales, [ROWS, W // (2 * BLOCK_WORDS), 2]))
        # NOTE: as a sum of 16-bit numbers ptxas gets it wrong.
        pairs = (low | (high << 8)).to(tl.uint16)
        i = tl.arange(0, W // (2 * BLOCK_WORDS))[None, :]
        p = (p_scales + at_scales).to(tl.pointer_type(tl.uint16))
        tl.store(p + i, pairs, mask=written if D == 2 * W else written & (i < D // 32))
    else:
        i = tl.arange(0, W // BLOCK_WORDS)[None, :]
        tl.store(p_scales + at_scales + i, scales.to(tl.uint8), mask=written if D == 2 * W else written & (i < D // 16))


@triton.jit
def store_int4_words(
    words, p_codes, p_scales, at, at_scales, written, D: tl.constexpr, FP16: tl.constexpr, WIDEN: tl.constexpr
):  # fmt: skip
    """int4 of words [ROWS, C / 2], written as `quant.store` does with rows."""
    even, odd = values(words, FP16)
    low, high = range_of(even, D // 2, WIDEN)
    low_odd, high_odd = range_of(odd, D // 2, WIDEN)
    scale, zero, stored = int4_scales(tl.minimum(low, low_odd), tl.maximum(high, high_odd))
    codes = int4_codes(even, scale, zero) | (int4_codes(odd, scale, zero) << 4)
    write_codes(p_codes, at, codes.to(tl.uint8), written, D // 2)
    tl.store(p_scales + at_scales, stored[:, None], mask=written)
