"""append: quantise rows of k and v and write them, in one launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl

from ...formats import CHANNELS, PAIRS, ROTATION, pair_of
from ..host import blocks, launch
from ..host.bind import BYTES, Bound, Launches, Template, given
from .parts.append_rows import PLACES, TURNS, append_rows

TAKES = (PAIRS, ROTATION, CHANNELS)
_TENSORS = PLACES | TURNS | given(
    BYTES, p_k="k", p_v="v", p_k_codes="k_cache", p_v_codes="v_cache", p_k_scales="k_scale_cache",
    p_v_scales="v_scale_cache", p_k_scale="k_scale_t", p_v_scale="v_scale_t",
)  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "num_pages", "num_requests", "num_indices", "k_end"])
def append_kernel(
    p_k, p_v, p_k_codes, p_v_codes, p_k_scales, p_v_scales, p_k_scale, p_v_scale,
    p_slots, p_batch, p_positions, p_indptr, p_indices, p_k_signs, p_v_signs, p_k_channels, p_v_channels,
    k_scale, v_scale, strides_k, strides_v, strides_k_codes, strides_v_codes, strides_k_scales, strides_v_scales,
    stride_k_channels, stride_v_channels, tokens, num_pages, num_requests, num_indices, k_end,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CK: tl.constexpr, CV: tl.constexpr,
    ROWS_K: tl.constexpr, ROWS_V: tl.constexpr, PAGE: tl.constexpr, K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr,
    K_PER_HEAD: tl.constexpr, V_PER_HEAD: tl.constexpr, QUANTIZES: tl.constexpr, NATIVE: tl.constexpr,
    UNIT: tl.constexpr, K_WORDS: tl.constexpr, V_WORDS: tl.constexpr, ASM: tl.constexpr, OVERLAPS: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    """Programs of k, then programs of v."""
    block = tl.program_id(0)
    places = (p_slots, p_batch, p_positions, p_indptr, p_indices, num_pages, num_requests, num_indices)
    angles = (None, None, 0, 0)
    if block < k_end:
        append_rows(
            block, tokens, p_k, strides_k, p_k_codes, strides_k_codes, p_k_scales, strides_k_scales, p_k_scale, k_scale,
            places, angles, H, DK, CK, ROWS_K, PAGE, K_FORMAT, K_PER_HEAD, QUANTIZES, NATIVE, UNIT,
            K_WORDS, ASM, OVERLAPS, LATE, (p_k_signs, p_k_channels, stride_k_channels),
        )  # fmt: skip
    else:
        append_rows(
            block - k_end, tokens, p_v, strides_v, p_v_codes, strides_v_codes, p_v_scales, strides_v_scales, p_v_scale,
            v_scale, places, angles, H, DV, CV, ROWS_V, PAGE, V_FORMAT, V_PER_HEAD, QUANTIZES, NATIVE, UNIT,
            V_WORDS, ASM, OVERLAPS, LATE, (p_v_signs, p_v_channels, stride_v_channels),
        )  # fmt: skip


def why_not(f: SimpleNamespace) -> str | None:
    return launch.why_not(f)


def configure(f: SimpleNamespace) -> Launches:
    tokens, heads, dk = f.k.shape
    dv, formats = f.v.shape[2], [fmt.name for fmt in pair_of(f)]
    ck, cv = blocks.columns(dk, formats[0]), blocks.columns(dv, formats[1])
    total = tokens * heads * (ck + cv)
    elements = blocks.program_elements(total, min(blocks.most_rows(name, total) for name in formats))
    k, v = blocks.Part(tokens, heads, ck, elements), blocks.Part(tokens, heads, cv, elements)
    k_end, end = blocks.ends(k, v)
    if end == 0:
        return Launches()
    unit = blocks.unit(f.k, f.v, f.k_cache, f.v_cache)
    words = [blocks.in_words(f, unit, side) for side in "kv"]
    if elements < blocks.MOST:  # no thread has two blocks of a row
        words = [min(n, 1) for n in words]
    arguments = _TENSORS | blocks.place_sizes(f, f.k_cache.shape[0]) | blocks.turn_strides(f) | {
        "k_scale": f.k_scale, "v_scale": f.v_scale,
        "strides_k": blocks.strides(f.k, 2, unit), "strides_v": blocks.strides(f.v, 2, unit),
        "strides_k_codes": blocks.strides(f.k_cache, 3, unit), "strides_v_codes": blocks.strides(f.v_cache, 3, unit),
        "strides_k_scales": blocks.scale_strides(f.k_scale_cache),
        "strides_v_scales": blocks.scale_strides(f.v_scale_cache),
        "tokens": tokens, "k_end": k_end, "H": heads, "DK": dk, "DV": dv, "CK": ck, "CV": cv,
        "ROWS_K": k.rows, "ROWS_V": v.rows, "PAGE": f.k_cache.shape[1],
        "K_FORMAT": blocks.stored(formats[0], f.widen), "V_FORMAT": blocks.stored(formats[1], f.widen),
        "K_PER_HEAD": blocks.per_head(f.k_scale_t), "V_PER_HEAD": blocks.per_head(f.v_scale_t),
        "QUANTIZES": f.scales_quantize, "NATIVE": launch.rounds_to_fp8(f), "UNIT": unit,
        "K_WORDS": words[0], "V_WORDS": words[1], "ASM": launch.has_ptx(f), "OVERLAPS": blocks.overlaps(f),
        "LATE": any(blocks.late(name, elements, blocks.SMALL) for name in formats),
    }  # fmt: skip
    return Launches(Template(append_kernel, (end,), arguments, **blocks.options(f)))


def run(call: Any, config: Launches) -> None:
    config(call)


def bind(config: Launches, at: dict[str, int]) -> Bound | None:
    return config.bind(at)
