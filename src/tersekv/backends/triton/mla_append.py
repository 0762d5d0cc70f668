"""mla_append: rotate q and the rotary key, quantise, and write latent rows into the cache, in one launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl

from tersekv.formats import TENSOR, latent_format

from ..host import blocks, launch
from ..host.bind import BYTES, Bound, Launches, Template, given
from .parts.append_rows import PLACES, QUERIES, append_rows, key_rows, query_rows

_TENSORS = PLACES | QUERIES | given(
    BYTES, p_kv_c="kv_c", p_k_pe="k_pe", p_ckv="ckv", p_kpe="kpe", p_scales="ckv_scale_cache", p_kv_scale="kv_scale_t"
)  # fmt: skip


@triton.jit(
    do_not_specialize=["max_pos", "tokens", "num_pages", "num_requests", "num_indices", "pe_end", "c_end", "rope_end"]
)
def mla_append_kernel(
    p_q_rope, p_q_nope, p_kv_c, p_k_pe, p_cos_sin, p_rope_positions, p_q_rope_out, p_q_nope_out,
    p_ckv, p_kpe, p_scales, p_q_scale, p_kv_scale, p_slots, p_batch, p_positions, p_indptr, p_indices,
    q_scale, kv_scale, strides_q_rope, strides_q_nope, strides_kv_c, strides_k_pe, strides_q_rope_out,
    strides_q_nope_out, strides_ckv, strides_kpe, strides_scales,
    stride_cos_sin, max_pos, tokens, num_pages, num_requests, num_indices, pe_end, c_end, rope_end,
    HQ: tl.constexpr, L: tl.constexpr, R: tl.constexpr, NQ: tl.constexpr,
    CL: tl.constexpr, CR: tl.constexpr, CN: tl.constexpr,
    ROWS_C: tl.constexpr, ROWS_PE: tl.constexpr, ROWS_R: tl.constexpr, ROWS_N: tl.constexpr, PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr, FORMAT: tl.constexpr, PE_FORMAT: tl.constexpr, KIND: tl.constexpr,
    ZERO_PADDING: tl.constexpr, QUANTIZES: tl.constexpr, NATIVE: tl.constexpr, UNIT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Programs of the rotary key, of latents, of the rotary part of q, of its other part."""
    block = tl.program_id(0)
    places = (p_slots, p_batch, p_positions, p_indptr, p_indices, num_pages, num_requests, num_indices)
    angles = (p_cos_sin, p_rope_positions, max_pos, stride_cos_sin)
    turn = (None, None, 0)
    if block < pe_end:
        if p_cos_sin is not None:
            key_rows(
                block, tokens, p_k_pe, strides_k_pe, p_k_pe, strides_k_pe, p_kpe, strides_kpe, p_scales, strides_scales,
                p_kv_scale, kv_scale, places, angles,
                1, R, R, CR, ROWS_PE, PAGE, INTERLEAVED, PE_FORMAT, False, QUANTIZES, NATIVE, UNIT, not INTERLEAVED,
                OVERLAPS, False, True, turn,
            )  # fmt: skip
        else:
            append_rows(
                block, tokens, p_k_pe, strides_k_pe, p_kpe, strides_kpe, p_scales, strides_scales, p_kv_scale, kv_scale,
                places, angles, 1, R, CR, ROWS_PE, PAGE, PE_FORMAT, False, QUANTIZES, NATIVE, UNIT, False, False,
                OVERLAPS, False, turn,
            )  # fmt: skip
    elif block < c_end:
        append_rows(
            block - pe_end, tokens, p_kv_c, strides_kv_c, p_ckv, strides_ckv, p_scales, strides_scales, p_kv_scale,
            kv_scale, places, angles, 1, L, CL, ROWS_C, PAGE, FORMAT, False, QUANTIZES, NATIVE, UNIT, False, False,
            OVERLAPS, False, turn,
        )  # fmt: skip
    elif block < rope_end:
        if p_q_rope is not None:
            query_rows(
                block - c_end, tokens, p_q_rope, strides_q_rope, p_q_rope_out, strides_q_rope_out, p_q_scale, q_scale,
                places, angles, HQ, R, CR, ROWS_R, True, INTERLEAVED, KIND, ZERO_PADDING, QUANTIZES, NATIVE, UNIT,
                OVERLAPS, False, True,
            )  # fmt: skip
    elif p_q_nope is not None:
        query_rows(
            block - rope_end, tokens, p_q_nope, strides_q_nope, p_q_nope_out, strides_q_nope_out, p_q_scale, q_scale,
            places, angles, HQ, NQ, CN, ROWS_N, False, INTERLEAVED, KIND, ZERO_PADDING, QUANTIZES, NATIVE, UNIT,
            OVERLAPS, False, True,
        )  # fmt: skip


def why_not(f: SimpleNamespace) -> str | None:
    return launch.why_not(f)


def configure(f: SimpleNamespace) -> Launches:
    (tokens, rank), r = f.kv_c.shape, f.k_pe.shape[1]
    heads, q_nope = blocks.query_sizes(f)
    cl, cr, cn = blocks.columns(rank, f.format), blocks.columns(r), blocks.columns(q_nope)
    elements = blocks.program_elements(tokens * (cl + cr + heads * (r + q_nope)))
    pe = blocks.Part(tokens, 1, cr, min(elements, blocks.most_keys(f.format, not f.interleaved)))
    c = blocks.Part(tokens, 1, cl, elements)
    rope = blocks.Part(tokens, heads if f.q_rope else 0, cr, elements)
    nope = blocks.Part(tokens, heads if f.q_nope else 0, cn, elements)
    *ends, end = blocks.ends(pe, c, rope, nope)
    if end == 0:
        return Launches()
    rows = (f.q_rope, f.q_nope, f.kv_c, f.k_pe, f.q_rope_out, f.q_nope_out)
    unit = blocks.unit(*rows, f.ckv, f.kpe)
    max_pos, stride = (f.cos_sin_cache.shape[0], f.cos_sin_cache.stride[0]) if f.cos_sin_cache else (0, 0)
    # The rotary part of a row with group scales is 16-bit, and is not scaled.
    pe_format = f.format if latent_format(f.format).scale == TENSOR else "bf16"
    arguments = _TENSORS | blocks.place_sizes(f, f.ckv.shape[0]) | {
        "q_scale": f.q_scale, "kv_scale": f.kv_scale,
        "strides_q_rope": blocks.strides(f.q_rope, 2, unit), "strides_q_nope": blocks.strides(f.q_nope, 2, unit),
        "strides_kv_c": blocks.strides(f.kv_c, 2, unit), "strides_k_pe": blocks.strides(f.k_pe, 2, unit),
        "strides_q_rope_out": blocks.strides(f.q_rope_out, 2, unit),
        "strides_q_nope_out": blocks.strides(f.q_nope_out, 2, unit),
        "strides_ckv": blocks.strides(f.ckv, 3, unit), "strides_kpe": blocks.strides(f.kpe, 3, unit),
        "strides_scales": blocks.strides(f.ckv_scale_cache, 3),
        "stride_cos_sin": stride, "max_pos": max_pos, "tokens": tokens,
        "pe_end": ends[0], "c_end": ends[1], "rope_end": ends[2], "HQ": heads, "L": rank, "R": r, "NQ": q_nope,
        "CL": cl, "CR": cr, "CN": cn, "ROWS_C": c.rows, "ROWS_PE": pe.rows, "ROWS_R": rope.rows, "ROWS_N": nope.rows,
        "PAGE": f.ckv.shape[1], "INTERLEAVED": f.interleaved,
        "FORMAT": blocks.stored(f.format), "PE_FORMAT": blocks.stored(pe_format),
        "KIND": blocks.query_kind(f), "ZERO_PADDING": f.zero_padding, "QUANTIZES": f.scales_quantize,
        "NATIVE": launch.rounds_to_fp8(f), "UNIT": unit, "OVERLAPS": blocks.overlaps(f),
    }  # fmt: skip
    return Launches(Template(mla_append_kernel, (end,), arguments, **blocks.options(f)))


def run(call: Any, config: Launches) -> None:
    config(call)


def bind(config: Launches, at: dict[str, int]) -> Bound | None:
    return config.bind(at)
