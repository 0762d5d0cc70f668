"""mla_append: rotate q and the rotary key, quantize, and store latent rows in the cache, in one launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl

from tersekv.formats import TENSOR, UE8M0, latent_format

from ..host import launch, row_programs
from ..host.bind import BYTES, BoundLaunches, KernelLaunch, LaunchSequence, tensor_args
from .parts.append_rows import (
    QUERY_ARGS,
    TOKEN_SLOT_ARGS,
    quantize_or_copy_rows_to_cache,
    rope_and_cast_queries,
    rope_quantize_and_append_keys,
)

_TENSOR_ARGS = TOKEN_SLOT_ARGS | QUERY_ARGS | tensor_args(
    BYTES, p_kv_c="kv_c", p_k_pe="k_pe", p_ckv="ckv", p_kpe="kpe", p_scales="ckv_scale_cache", p_kv_scale="kv_scale_t"
)  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "max_pos",
        "num_tokens",
        "num_pages",
        "num_requests",
        "num_indices",
        "pe_end",
        "c_end",
        "rope_end",
    ]
)
def mla_append_kernel(
    p_q_rope, p_q_nope, p_kv_c, p_k_pe, p_cos_sin, p_rope_positions, p_q_rope_out, p_q_nope_out,
    p_ckv, p_kpe, p_scales, p_q_scale, p_kv_scale, p_slot_mapping, p_batch_indices, p_kv_positions, p_kv_indptr,
    p_kv_indices,
    q_quant_scale, kv_quant_scale, strides_q_rope, strides_q_nope, strides_kv_c, strides_k_pe, strides_q_rope_out,
    strides_q_nope_out, strides_ckv, strides_kpe, strides_scales,
    stride_cos_sin, max_pos, num_tokens, num_pages, num_requests, num_indices, pe_end, c_end, rope_end,
    Q_HEADS: tl.constexpr, L: tl.constexpr, R: tl.constexpr, Q_NOPE_DIM: tl.constexpr,
    L_PAD: tl.constexpr, R_PAD: tl.constexpr, Q_NOPE_PAD: tl.constexpr,
    ROWS_C: tl.constexpr, ROWS_PE: tl.constexpr, ROWS_R: tl.constexpr, ROWS_N: tl.constexpr, PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr, FORMAT: tl.constexpr, PE_FORMAT: tl.constexpr, QUERY_KIND: tl.constexpr,
    ZERO_PADDING: tl.constexpr, SCALE_T_MULTIPLIES: tl.constexpr, NATIVE_FP8_CAST: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Handles, by program: the rotary key, latents, q's rotary part, q's other part."""
    i_block = tl.program_id(0)
    slot_args = (
        p_slot_mapping, p_batch_indices, p_kv_positions, p_kv_indptr, p_kv_indices, num_pages, num_requests,
        num_indices,
    )  # fmt: skip
    rope_args = (p_cos_sin, p_rope_positions, max_pos, stride_cos_sin)
    rotation = (None, None, 0)
    if i_block < pe_end:
        if p_cos_sin is not None:
            rope_quantize_and_append_keys(
                i_block, num_tokens, p_k_pe, strides_k_pe, p_k_pe, strides_k_pe, p_kpe, strides_kpe, p_scales,
                strides_scales,
                p_kv_scale, kv_quant_scale, slot_args, rope_args,
                1, R, R, R_PAD, ROWS_PE, PAGE, INTERLEAVED, PE_FORMAT, False, SCALE_T_MULTIPLIES, NATIVE_FP8_CAST,
                STRIDE_UNIT, not INTERLEAVED,
                USE_PDL, False, True, rotation,
            )  # fmt: skip
        else:
            quantize_or_copy_rows_to_cache(
                i_block, num_tokens, p_k_pe, strides_k_pe, p_kpe, strides_kpe, p_scales, strides_scales, p_kv_scale,
                kv_quant_scale,
                slot_args, rope_args, 1, R, R_PAD, ROWS_PE, PAGE, PE_FORMAT, False, SCALE_T_MULTIPLIES, NATIVE_FP8_CAST,
                STRIDE_UNIT, False, False,
                USE_PDL, False, rotation,
            )  # fmt: skip
    elif i_block < c_end:
        quantize_or_copy_rows_to_cache(
            i_block - pe_end, num_tokens, p_kv_c, strides_kv_c, p_ckv, strides_ckv, p_scales, strides_scales,
            p_kv_scale,
            kv_quant_scale, slot_args, rope_args, 1, L, L_PAD, ROWS_C, PAGE, FORMAT, False, SCALE_T_MULTIPLIES,
            NATIVE_FP8_CAST, STRIDE_UNIT, False, False,
            USE_PDL, False, rotation,
        )  # fmt: skip
    elif i_block < rope_end:
        if p_q_rope is not None:
            rope_and_cast_queries(
                i_block - c_end, num_tokens, p_q_rope, strides_q_rope, p_q_rope_out, strides_q_rope_out, p_q_scale,
                q_quant_scale,
                slot_args, rope_args, Q_HEADS, R, R_PAD, ROWS_R, True, INTERLEAVED, QUERY_KIND, ZERO_PADDING,
                SCALE_T_MULTIPLIES, NATIVE_FP8_CAST, STRIDE_UNIT,
                USE_PDL, False, True,
            )  # fmt: skip
    elif p_q_nope is not None:
        rope_and_cast_queries(
            i_block - rope_end, num_tokens, p_q_nope, strides_q_nope, p_q_nope_out, strides_q_nope_out, p_q_scale,
            q_quant_scale,
            slot_args, rope_args, Q_HEADS, Q_NOPE_DIM, Q_NOPE_PAD, ROWS_N, False, INTERLEAVED, QUERY_KIND, ZERO_PADDING,
            SCALE_T_MULTIPLIES, NATIVE_FP8_CAST, STRIDE_UNIT,
            USE_PDL, False, True,
        )  # fmt: skip


def why_not(f: SimpleNamespace) -> str | None:
    fmt = latent_format(f.format)
    if fmt.tail and (not f.ckv.even or any(n % 2 for n in f.ckv.stride[:2])):
        return f"wants {fmt.name} rows that begin at even bytes, got strides {list(f.ckv.stride)}"
    if fmt.scale == UE8M0 and f.kv_c.shape[1] != 512:
        return f"wants {fmt.name} rows of 512 values, got {f.kv_c.shape[1]}"
    return launch.why_not_format_or_device(f)


def configure(f: SimpleNamespace) -> LaunchSequence:
    (num_tokens, rank), r = f.kv_c.shape, f.kpe.shape[2]
    heads, q_nope = row_programs.num_q_heads_and_nope_columns(f)
    l_pad, r_pad, q_nope_pad = (
        row_programs.padded_columns(rank, f.format),
        row_programs.padded_columns(r),
        row_programs.padded_columns(q_nope),
    )
    elements_per_program = row_programs.program_elements(num_tokens * (l_pad + r_pad + heads * (r + q_nope)))
    pe = row_programs.RowPrograms(
        num_tokens,
        1 if r else 0,
        r_pad,
        min(elements_per_program, row_programs.max_key_elements(f.format, not f.interleaved)),
    )
    c = row_programs.RowPrograms(num_tokens, 1, l_pad, elements_per_program)
    rope = row_programs.RowPrograms(num_tokens, heads if f.q_rope else 0, r_pad, elements_per_program)
    nope = row_programs.RowPrograms(num_tokens, heads if f.q_nope else 0, q_nope_pad, elements_per_program)
    *ends, num_programs = row_programs.program_ends(pe, c, rope, nope)
    if num_programs == 0:
        return LaunchSequence()
    rows = (f.q_rope, f.q_nope, f.kv_c, f.k_pe, f.q_rope_out, f.q_nope_out)
    unit = row_programs.common_stride_unit_of_tensors(*rows, f.ckv, f.kpe)
    max_pos, stride = (f.cos_sin_cache.shape[0], f.cos_sin_cache.stride[0]) if f.cos_sin_cache else (0, 0)
    # The rotary part of a row with group scales is 16-bit, and is not scaled.
    pe_format = f.format if latent_format(f.format).scale == TENSOR else "bf16"
    arguments = _TENSOR_ARGS | row_programs.page_request_and_index_count_args(f, f.ckv.shape[0]) | {
        "q_quant_scale": f.q_scale, "kv_quant_scale": f.kv_scale,
        "strides_q_rope": row_programs.strides_in_units(f.q_rope, 2, unit),
        "strides_q_nope": row_programs.strides_in_units(f.q_nope, 2, unit),
        "strides_kv_c": row_programs.strides_in_units(f.kv_c, 2, unit),
        "strides_k_pe": row_programs.strides_in_units(f.k_pe, 2, unit),
        "strides_q_rope_out": row_programs.strides_in_units(f.q_rope_out, 2, unit),
        "strides_q_nope_out": row_programs.strides_in_units(f.q_nope_out, 2, unit),
        "strides_ckv": row_programs.strides_in_units(f.ckv, 3, unit),
        "strides_kpe": row_programs.strides_in_units(f.kpe, 3, unit),
        "strides_scales": row_programs.strides_in_units(f.ckv_scale_cache, 3),
        "stride_cos_sin": stride, "max_pos": max_pos, "num_tokens": num_tokens,
        "pe_end": ends[0], "c_end": ends[1], "rope_end": ends[2], "Q_HEADS": heads, "L": rank, "R": r,
        "Q_NOPE_DIM": q_nope,
        "L_PAD": l_pad, "R_PAD": r_pad, "Q_NOPE_PAD": q_nope_pad, "ROWS_C": c.rows, "ROWS_PE": pe.rows,
        "ROWS_R": rope.rows, "ROWS_N": nope.rows,
        "PAGE": f.ckv.shape[1], "INTERLEAVED": f.interleaved,
        "FORMAT": row_programs.stored_format(f.format, dim=rank), "PE_FORMAT": row_programs.stored_format(pe_format),
        "QUERY_KIND": row_programs.query_output_cast_kind(f), "ZERO_PADDING": f.zero_padding,
        "SCALE_T_MULTIPLIES": f.scales_quantize,
        "NATIVE_FP8_CAST": launch.has_exact_fp8_cast(f), "STRIDE_UNIT": unit, "USE_PDL": row_programs.uses_pdl(f),
    }  # fmt: skip
    if f.k_pe is None:  # R is 0: no program handles what stands in for it
        arguments |= tensor_args(BYTES, p_k_pe="kv_c")
    return LaunchSequence(KernelLaunch(mla_append_kernel, (num_programs,), arguments, **row_programs.launch_options(f)))


def run(call: Any, config: LaunchSequence) -> None:
    config(call)


def bind(config: LaunchSequence, at: dict[str, int]) -> BoundLaunches | None:
    return config.bind(at)
