"""merge_states: weigh partial attention results by the exponentials of their LSE, in one launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl

from ..host import blocks, launch
from ..host.bind import Bound, Launches, Template, given
from .parts.rows import offsets, own_rows, token_and_head, write

_TENSORS = given(p_outs="outs", p_lses="lses", p_out="out", p_lse="lse")
MAX_UNROLLED = 8  # parts; more are counted by a loop, so that their number compiles nothing anew


@triton.jit(do_not_specialize=["tokens", "parts"])
def merge_kernel(
    p_outs, p_lses, p_out, p_lse, strides_outs, strides_lses, strides_out, strides_lse, tokens, parts,
    H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """One block of rows. PARTS: number of parts, or 0 to take it from `parts`."""
    token, head = token_and_head(tl.program_id(0), tokens, H, ROWS)
    if PARTS > 0:
        parts = PARTS
    c = tl.arange(0, C)[None, :]
    p_outs += offsets(token, head, (strides_outs[1], strides_outs[2]), UNIT)
    p_lses += offsets(token, head, (strides_lses[1], strides_lses[2]), 1)

    largest = tl.full([ROWS, 1], float("-inf"), tl.float32)
    for i in range(parts):
        largest = tl.maximum(largest, tl.load(p_lses + tl.cast(i, tl.int64) * strides_lses[0]))
    # Where every part is empty, exp(-inf - 0) = 0 instead of exp(-inf + inf) = NaN.
    empty = largest == float("-inf")
    base = tl.where(empty, 0.0, largest)

    total = tl.zeros([ROWS, 1], tl.float32)
    merged = tl.zeros([ROWS, C], tl.float32)
    for i in range(parts):
        lse = tl.load(p_lses + tl.cast(i, tl.int64) * strides_lses[0])
        weight = tl.exp(lse - base)
        total += weight
        # A part that saw nothing may hold anything, NaN included: it is not read.
        live = (lse > float("-inf")) & (c < D)
        x = tl.load(p_outs + tl.cast(i, tl.int64) * strides_outs[0] * UNIT + c, mask=live, other=0.0)
        merged += weight * x.to(tl.float32)
    # One part at least weighs 1, unless all are empty.
    merged = merged / tl.where(empty, 1.0, total)
    own = own_rows(tl.program_id(0), tokens, H, ROWS)
    write(p_out + offsets(token, head, strides_out, UNIT), merged.to(p_out.dtype.element_ty), own, D)
    if p_lse is not None:
        tl.store(p_lse + offsets(token, head, strides_lse, 1), base + tl.log(total))


def why_not(f: SimpleNamespace) -> str | None:
    return launch.why_not(f)


def configure(f: SimpleNamespace) -> Launches:
    parts, tokens, heads, d = f.outs.shape
    if tokens * heads * d == 0:
        return Launches()
    c, unit = blocks.columns(d), blocks.unit(f.outs, f.out)
    part = blocks.Part(tokens, heads, c, blocks.program_elements(tokens * heads * c))
    arguments = _TENSORS | {
        "strides_outs": blocks.strides(f.outs, 3, unit), "strides_lses": f.lses.stride,
        "strides_out": blocks.strides(f.out, 2, unit), "strides_lse": (0, 0) if f.lse is None else f.lse.stride,
        "tokens": tokens, "parts": parts, "H": heads, "D": d, "C": c, "ROWS": part.rows,
        "PARTS": parts if parts <= MAX_UNROLLED else 0, "UNIT": unit,
    }  # fmt: skip
    return Launches(Template(merge_kernel, (part.programs,), arguments, num_warps=blocks.OPTIONS["num_warps"]))


def run(call: Any, config: Launches) -> None:
    config(call)


def bind(config: Launches, at: dict[str, int]) -> Bound | None:
    return config.bind(at)
