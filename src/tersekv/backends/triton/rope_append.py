"""rope_append: rotate q and k, quantise, and write k and v into the cache, in one launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl

from ...formats import CHANNELS, PAIRS, ROTATION, pair_of
from ..host import blocks, launch
from ..host.bind import BYTES, Bound, Launches, Template, given
from .parts.append_rows import PLACES, QUERIES, TURNS, append_rows, key_rows, query_rows

TAKES = (PAIRS, ROTATION, CHANNELS)
_TENSORS = PLACES | QUERIES | TURNS | given(
    BYTES, p_k_rope="k_rope", p_k_nope="k_nope", p_v="v", p_k_codes="k_cache", p_v_codes="v_cache",
    p_k_scales="k_scale_cache", p_v_scales="v_scale_cache", p_k_scale="k_scale_t", p_v_scale="v_scale_t",
)  # fmt: skip


@triton.jit(
    do_not_specialize=["max_pos", "tokens", "num_pages", "num_requests", "num_indices", "k_end", "v_end", "rope_end"]
)
def rope_append_kernel(
    p_q_rope, p_q_nope, p_k_rope, p_k_nope, p_v, p_cos_sin, p_rope_positions, p_q_rope_out, p_q_nope_out,
    p_k_codes, p_v_codes, p_k_scales, p_v_scales, p_q_scale, p_k_scale, p_v_scale,
    p_slots, p_batch, p_positions, p_indptr, p_indices, p_k_signs, p_v_signs, p_k_channels, p_v_channels,
    q_scale, k_scale, v_scale, strides_q_rope, strides_q_nope, strides_k_rope, strides_k_nope, strides_v,
    strides_q_rope_out, strides_q_nope_out, strides_k_codes, strides_v_codes, strides_k_scales, strides_v_scales,
    stride_k_channels, stride_v_channels, stride_cos_sin, max_pos, tokens, num_pages, num_requests, num_indices,
    k_end, v_end, rope_end,
    HQ: tl.constexpr, H: tl.constexpr, R: tl.constexpr, NQ: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    CR: tl.constexpr, CN: tl.constexpr, CK: tl.constexpr, CV: tl.constexpr,
    ROWS_R: tl.constexpr, ROWS_N: tl.constexpr, ROWS_K: tl.constexpr, ROWS_V: tl.constexpr,
    PAGE: tl.constexpr, INTERLEAVED: tl.constexpr, K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr, KIND: tl.constexpr,
    K_PER_HEAD: tl.constexpr, V_PER_HEAD: tl.constexpr, ZERO_PADDING: tl.constexpr, QUANTIZES: tl.constexpr,
    NATIVE: tl.constexpr, UNIT: tl.constexpr, HALVES: tl.constexpr, WORDS: tl.constexpr, ASM: tl.constexpr,
    OVERLAPS: tl.constexpr, LATE: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Programs of k, of v, of the rotary part of q, of its other part. k comes first: its chain of loads is longest."""
    block = tl.program_id(0)
    places = (p_slots, p_batch, p_positions, p_indptr, p_indices, num_pages, num_requests, num_indices)
    angles = (p_cos_sin, p_rope_positions, max_pos, stride_cos_sin)
    if block < k_end:
        key_rows(
            block, tokens, p_k_rope, strides_k_rope, p_k_nope, strides_k_nope, p_k_codes, strides_k_codes,
            p_k_scales, strides_k_scales, p_k_scale, k_scale, places, angles,
            H, R, DK, CK, ROWS_K, PAGE, INTERLEAVED, K_FORMAT, K_PER_HEAD, QUANTIZES, NATIVE, UNIT, HALVES,
            OVERLAPS, LATE, ORDERED, (p_k_signs, p_k_channels, stride_k_channels),
        )  # fmt: skip
    elif block < v_end:
        append_rows(
            block - k_end, tokens, p_v, strides_v, p_v_codes, strides_v_codes, p_v_scales, strides_v_scales, p_v_scale,
            v_scale, places, angles, H, DV, CV, ROWS_V, PAGE, V_FORMAT, V_PER_HEAD, QUANTIZES, NATIVE, UNIT, WORDS,
            ASM, OVERLAPS, LATE, (p_v_signs, p_v_channels, stride_v_channels),
        )  # fmt: skip
    elif block < rope_end:
        if p_q_rope is not None:
            query_rows(
                block - v_end, tokens, p_q_rope, strides_q_rope, p_q_rope_out, strides_q_rope_out, p_q_scale, q_scale,
                places, angles, HQ, R, CR, ROWS_R, True, INTERLEAVED, KIND, ZERO_PADDING, QUANTIZES, NATIVE, UNIT,
                OVERLAPS, LATE, ORDERED,
            )  # fmt: skip
    elif p_q_nope is not None:
        query_rows(
            block - rope_end, tokens, p_q_nope, strides_q_nope, p_q_nope_out, strides_q_nope_out, p_q_scale, q_scale,
            places, angles, HQ, NQ, CN, ROWS_N, False, INTERLEAVED, KIND, ZERO_PADDING, QUANTIZES, NATIVE, UNIT,
            OVERLAPS, LATE, ORDERED,
        )  # fmt: skip


def why_not(f: SimpleNamespace) -> str | None:
    return launch.why_not(f)


def configure(f: SimpleNamespace) -> Launches:
    tokens, heads, r = f.k_rope.shape
    dk, dv = r + (f.k_nope.shape[2] if f.k_nope else 0), f.v.shape[2]
    formats = [fmt.name for fmt in pair_of(f)]
    q_heads, q_nope = blocks.query_sizes(f)
    cr, cn = blocks.columns(r), blocks.columns(q_nope)
    ck, cv = blocks.columns(dk, formats[0]), blocks.columns(dv, formats[1])
    turned = f.k_signs is not None or f.k_channel_scale is not None
    halves = not f.interleaved and r == dk and r % (2 * blocks.step(formats[0])) == 0 and not turned
    total = tokens * (heads * (ck + cv) + q_heads * (r + q_nope))
    elements, warps = min(blocks.rotated(total, name) for name in formats)
    k = blocks.Part(tokens, heads, ck, min(elements, blocks.most_keys(formats[0], halves)))
    v = blocks.Part(tokens, heads, cv, elements)
    rope = blocks.Part(tokens, q_heads if f.q_rope else 0, cr, elements)
    nope = blocks.Part(tokens, q_heads if f.q_nope else 0, cn, elements)
    *ends, end = blocks.ends(k, v, rope, nope)
    if end == 0:
        return Launches()
    rows = (f.q_rope, f.q_nope, f.k_rope, f.k_nope, f.v, f.q_rope_out, f.q_nope_out)
    unit = blocks.unit(*rows, f.k_cache, f.v_cache)
    names = ("q_rope", "q_nope", "k_rope", "k_nope", "v", "q_rope_out", "q_nope_out")
    arguments: dict[str, Any] = dict(_TENSORS)
    arguments |= {f"strides_{n}": blocks.strides(x, 2, unit) for n, x in zip(names, rows, strict=True)}
    arguments |= blocks.place_sizes(f, f.k_cache.shape[0]) | blocks.turn_strides(f) | {
        "q_scale": f.q_scale, "k_scale": f.k_scale, "v_scale": f.v_scale,
        "strides_k_codes": blocks.strides(f.k_cache, 3, unit), "strides_v_codes": blocks.strides(f.v_cache, 3, unit),
        "strides_k_scales": blocks.scale_strides(f.k_scale_cache),
        "strides_v_scales": blocks.scale_strides(f.v_scale_cache),
        "stride_cos_sin": f.cos_sin_cache.stride[0], "max_pos": f.cos_sin_cache.shape[0], "tokens": tokens,
        "k_end": ends[0], "v_end": ends[1], "rope_end": ends[2],
        "HQ": q_heads, "H": heads, "R": r, "NQ": q_nope, "DK": dk, "DV": dv, "CR": cr, "CN": cn, "CK": ck, "CV": cv,
        "ROWS_R": rope.rows, "ROWS_N": nope.rows, "ROWS_K": k.rows, "ROWS_V": v.rows, "PAGE": f.k_cache.shape[1],
        "INTERLEAVED": f.interleaved, "K_FORMAT": blocks.stored(formats[0]), "V_FORMAT": blocks.stored(formats[1]),
        "KIND": blocks.query_kind(f),
        "K_PER_HEAD": blocks.per_head(f.k_scale_t), "V_PER_HEAD": blocks.per_head(f.v_scale_t),
        "ZERO_PADDING": f.zero_padding, "QUANTIZES": f.scales_quantize, "NATIVE": launch.rounds_to_fp8(f),
        "UNIT": unit, "HALVES": halves, "WORDS": min(blocks.in_words(f, unit, "v"), 1), "ASM": launch.has_ptx(f),
        "OVERLAPS": blocks.overlaps(f), "LATE": any(blocks.late(name, elements, blocks.SIZES[1]) for name in formats),
        "ORDERED": blocks.ordered(total),
    }  # fmt: skip
    return Launches(Template(rope_append_kernel, (end,), arguments, **blocks.options(f, warps)))


def run(call: Any, config: Launches) -> None:
    config(call)


def bind(config: Launches, at: dict[str, int]) -> Bound | None:
    return config.bind(at)
