"""Rotated rows and channel scales (`calls.py`): rows as an append stores them, queries that meet them, and outputs.

Butterflies are taken in registers and in the order of the law, so that stored codes are the oracle's. A stage splits
neighbours and puts sums before differences, which moves the lowest bit of the column's number to the top: the next
bit's neighbours are neighbours then, and after all stages columns are in order again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .quant import reciprocal

_LOW = tl.constexpr(8)  # columns that a thread reads at once: their stages exchange nothing between threads


@triton.constexpr_function
def log2(n):
    return n.bit_length() - 1


@triton.jit
def stages(x, ROWS: tl.constexpr, B: tl.constexpr):
    """Rows [ROWS, B] times Sylvester's Hadamard matrix."""
    for _ in tl.static_range(log2(B)):
        a, b = tl.split(tl.reshape(x, [ROWS, B // 2, 2]))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), [ROWS, B])
    return x


@triton.jit
def sums(x, B: tl.constexpr):
    """Rows [ROWS, C] fp32 times Sylvester's Hadamard matrix, in blocks of B columns."""
    N: tl.constexpr = x.shape[0] * x.shape[1] // B
    LOW: tl.constexpr = min(B, _LOW)
    HIGH: tl.constexpr = B // LOW
    y = stages(tl.reshape(x, [N * HIGH, LOW]), N * HIGH, LOW)
    if HIGH > 1:
        y = tl.reshape(tl.permute(tl.reshape(y, [N, HIGH, LOW]), (0, 2, 1)), [N * LOW, HIGH])
        y = tl.permute(tl.reshape(stages(y, N * LOW, HIGH), [N, LOW, HIGH]), (0, 2, 1))
    return tl.reshape(y, [x.shape[0], x.shape[1]])


@triton.jit
def sums_of_parts(parts, PARTS: tl.constexpr, B: tl.constexpr):
    """As `sums`, of rows in PARTS tiles [ROWS, words]: part j holds the columns PARTS * i + j."""
    if PARTS == 2:
        parts = (parts[0] + parts[1], parts[0] - parts[1])
    elif PARTS == 4:
        a, b, c, d = parts[0] + parts[1], parts[0] - parts[1], parts[2] + parts[3], parts[2] - parts[3]
        parts = (a + c, b + d, a - c, b - d)
    out = ()
    for j in tl.static_range(PARTS):
        out = out + (sums(parts[j], B // PARTS),)
    return out


@triton.jit
def row(x, turn, head, D: tl.constexpr):
    """Rows x [ROWS, C] fp32 of heads [ROWS] as they are quantised.

    turn:  pointers signs and channel scales, either may be None; then the stride of a head of the latter
    """
    p_signs, p_channels, stride = turn
    c = tl.arange(0, x.shape[1])[None, :]
    if p_channels is not None:
        at = head.to(tl.int64)[:, None] * stride + c
        x *= reciprocal(tl.load(p_channels + at, mask=c < D, other=1.0))
    if p_signs is not None:
        B: tl.constexpr = D & -D
        x = sums(x * tl.load(p_signs + c % B), B) * B**-0.5
    return x


@triton.jit
def channels(p_channels, stride, h, J: tl.constexpr, PARTS: tl.constexpr, W: tl.constexpr, D: tl.constexpr):
    """Scales [1, W] of the columns PARTS * i + J of KV head h."""
    c = (PARTS * tl.arange(0, W) + J)[None, :]
    return tl.load(p_channels + h.to(tl.int64) * stride + c, mask=c < D, other=1.0)


@triton.jit
def query(parts, turn, h, PARTS: tl.constexpr, D: tl.constexpr):
    """Query rows of KV head h, fp32, in PARTS tiles [ROWS, words], as they meet keys that lie scaled and rotated."""
    p_signs, p_channels, stride = turn
    W: tl.constexpr = parts[0].shape[1]
    B: tl.constexpr = D & -D
    out = ()
    for j in tl.static_range(PARTS):
        x = parts[j]
        if p_channels is not None:
            x *= channels(p_channels, stride, h, j, PARTS, W, D)
        if p_signs is not None:
            x *= tl.load(p_signs + (PARTS * tl.arange(0, W) + j) % B)[None, :] * B**-0.5
        out = out + (x,)
    if p_signs is not None:
        out = sums_of_parts(out, PARTS, B)
    return out


@triton.jit
def back(parts, turn, h, PARTS: tl.constexpr, D: tl.constexpr):
    """Weighted values of KV head h, fp32, in PARTS tiles [ROWS, words], rotated back and multiplied by their scales.

    Of a part of the keys as well as of all: both are linear.
    """
    p_signs, p_channels, stride = turn
    W: tl.constexpr = parts[0].shape[1]
    B: tl.constexpr = D & -D
    if p_signs is not None:
        parts = sums_of_parts(parts, PARTS, B)
    out = ()
    for j in tl.static_range(PARTS):
        x = parts[j]
        if p_signs is not None:
            x *= tl.load(p_signs + (PARTS * tl.arange(0, W) + j) % B)[None, :] * B**-0.5
        if p_channels is not None:
            x *= channels(p_channels, stride, h, j, PARTS, W, D)
        out = out + (x,)
    return out
