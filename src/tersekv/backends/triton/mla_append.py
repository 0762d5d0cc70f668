"""mla_append: rotate q and the rotary key, quantise, and write latent rows into the cache, in one launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl

from tersekv.formats import TENSOR, latent_format

from ..host import blocks, launch
from ..host.bind import Bound, Fields, Step, bound
from .append import append_rows
from .rope_append import key_rows, query_rows

_TENSORS = Fields(
    "q_rope q_nope kv_c k_pe cos_sin_cache positions q_rope_out q_nope_out ckv kpe ckv_scale_cache q_scale_t "
    "kv_scale_t slot_mapping batch_indices kv_positions kv_indptr kv_indices"
)


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
    if block < pe_end:
        if p_cos_sin is not None:
            key_rows(
                block, tokens, p_k_pe, strides_k_pe, p_k_pe, strides_k_pe, p_kpe, strides_kpe, p_scales, strides_scales,
                p_kv_scale, kv_scale, places, angles,
                1, R, R, CR, ROWS_PE, PAGE, INTERLEAVED, PE_FORMAT, False, QUANTIZES, NATIVE, UNIT, not INTERLEAVED,
                OVERLAPS, False, True,
            )  # fmt: skip
        else:
            append_rows(
                block, tokens, p_k_pe, strides_k_pe, p_kpe, strides_kpe, p_scales, strides_scales, p_kv_scale, kv_scale,
                places, angles, 1, R, CR, ROWS_PE, PAGE, PE_FORMAT, False, QUANTIZES, NATIVE, UNIT, False, False,
                OVERLAPS, False,
            )  # fmt: skip
    elif block < c_end:
        append_rows(
            block - pe_end, tokens, p_kv_c, strides_kv_c, p_ckv, strides_ckv, p_scales, strides_scales, p_kv_scale,
            kv_scale, places, angles, 1, L, CL, ROWS_C, PAGE, FORMAT, False, QUANTIZES, NATIVE, UNIT, False, False,
            OVERLAPS, False,
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


def configure(f: SimpleNamespace) -> launch.Prepared | None:
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
        return None
    rows = (f.q_rope, f.q_nope, f.kv_c, f.k_pe, f.q_rope_out, f.q_nope_out)
    unit = blocks.unit(*rows, f.ckv, f.kpe)
    max_pos, stride = (f.cos_sin_cache.shape[0], f.cos_sin_cache.stride[0]) if f.cos_sin_cache else (0, 0)
    scalars = (
        f.q_scale, f.kv_scale, *[blocks.strides(x, 2, unit) for x in rows],
        *[blocks.strides(x, 3, unit) for x in (f.ckv, f.kpe)], blocks.strides(f.ckv_scale_cache, 3),
        stride, max_pos, tokens, *blocks.place_sizes(f, f.ckv.shape[0]), *ends,
    )  # fmt: skip
    # The rotary part of a row with group scales is 16-bit, and is not scaled.
    pe_format = f.format if latent_format(f.format).scale == TENSOR else "bf16"
    constants = (
        heads, rank, r, q_nope, cl, cr, cn, c.rows, pe.rows, rope.rows, nope.rows, f.ckv.shape[1],
        f.interleaved, f.format, pe_format, blocks.query_kind(f), f.zero_padding, f.scales_quantize,
        launch.rounds_to_fp8(f), unit, blocks.overlaps(f),
    )  # fmt: skip
    return launch.Prepared(mla_append_kernel, end, scalars, constants, **blocks.options(f))


def run(call: Any, config: launch.Prepared | None) -> None:
    if config is None:
        return
    config(*_TENSORS(call))


def bind(config: launch.Prepared | None, at: dict[str, int]) -> Bound | None:
    return None if config is None else bound([Step(config, _TENSORS)], at)
