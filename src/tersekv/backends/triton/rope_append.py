"""rope_append: rotate q and k, quantize, and store k and v in the cache, in one launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl

from ...formats import CHANNELS, PAIRS, ROTATION, pair_of
from ..host import launch, row_programs
from ..host.bind import BYTES, BoundLaunches, KernelLaunch, LaunchSequence, tensor_args
from .parts.append_rows import (
    QUERY_ARGS,
    ROTATION_ARGS,
    TOKEN_SLOT_ARGS,
    quantize_or_copy_rows_to_cache,
    rope_and_cast_queries,
    rope_quantize_and_append_keys,
)

SUPPORTS = (PAIRS, ROTATION, CHANNELS)
_TENSOR_ARGS = TOKEN_SLOT_ARGS | QUERY_ARGS | ROTATION_ARGS | tensor_args(
    BYTES, p_k_rope="k_rope", p_k_nope="k_nope", p_v="v", p_k_codes="k_cache", p_v_codes="v_cache",
    p_k_scales="k_scale_cache", p_v_scales="v_scale_cache", p_k_scale="k_scale_t", p_v_scale="v_scale_t",
)  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "max_pos",
        "num_tokens",
        "num_pages",
        "num_requests",
        "num_indices",
        "k_end",
        "v_end",
        "rope_end",
    ]
)
def rope_append_kernel(
    p_q_rope, p_q_nope, p_k_rope, p_k_nope, p_v, p_cos_sin, p_rope_positions, p_q_rope_out, p_q_nope_out,
    p_k_codes, p_v_codes, p_k_scales, p_v_scales, p_q_scale, p_k_scale, p_v_scale,
    p_slot_mapping, p_batch_indices, p_kv_positions, p_kv_indptr, p_kv_indices, p_k_signs, p_v_signs, p_k_channels,
    p_v_channels,
    q_quant_scale, k_quant_scale, v_quant_scale, strides_q_rope, strides_q_nope, strides_k_rope, strides_k_nope,
    strides_v, strides_q_rope_out, strides_q_nope_out, strides_k_codes, strides_v_codes, strides_k_scales,
    strides_v_scales,
    stride_k_channels, stride_v_channels, stride_cos_sin, max_pos, num_tokens, num_pages, num_requests, num_indices,
    k_end, v_end, rope_end,
    Q_HEADS: tl.constexpr, H: tl.constexpr, R: tl.constexpr, Q_NOPE_DIM: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr,
    R_PAD: tl.constexpr, Q_NOPE_PAD: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    ROWS_R: tl.constexpr, ROWS_N: tl.constexpr, ROWS_K: tl.constexpr, ROWS_V: tl.constexpr,
    PAGE: tl.constexpr, INTERLEAVED: tl.constexpr, K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr,
    QUERY_KIND: tl.constexpr,
    K_SCALE_PER_HEAD: tl.constexpr, V_SCALE_PER_HEAD: tl.constexpr, ZERO_PADDING: tl.constexpr,
    SCALE_T_MULTIPLIES: tl.constexpr,
    NATIVE_FP8_CAST: tl.constexpr, STRIDE_UNIT: tl.constexpr, SPLIT_HALVES: tl.constexpr,
    V_PACKED_READ_MODE: tl.constexpr,
    USE_PTX: tl.constexpr,
    USE_PDL: tl.constexpr, PDL_LAUNCH_LATE: tl.constexpr, ORDER_LOADS: tl.constexpr,
):  # fmt: skip
    """Handles, by program: k, v, q's rotary part, q's other part. k comes first: its chain of loads is longest."""
    i_block = tl.program_id(0)
    slot_args = (
        p_slot_mapping, p_batch_indices, p_kv_positions, p_kv_indptr, p_kv_indices, num_pages, num_requests,
        num_indices,
    )  # fmt: skip
    rope_args = (p_cos_sin, p_rope_positions, max_pos, stride_cos_sin)
    # K
    if i_block < k_end:
        rope_quantize_and_append_keys(
            i_block, num_tokens, p_k_rope, strides_k_rope, p_k_nope, strides_k_nope, p_k_codes, strides_k_codes,
            p_k_scales, strides_k_scales, p_k_scale, k_quant_scale, slot_args, rope_args,
            H, R, DK, DK_PAD, ROWS_K, PAGE, INTERLEAVED, K_FORMAT, K_SCALE_PER_HEAD, SCALE_T_MULTIPLIES,
            NATIVE_FP8_CAST, STRIDE_UNIT, SPLIT_HALVES,
            USE_PDL, PDL_LAUNCH_LATE, ORDER_LOADS, (p_k_signs, p_k_channels, stride_k_channels),
        )  # fmt: skip
    # V
    elif i_block < v_end:
        quantize_or_copy_rows_to_cache(
            i_block - k_end, num_tokens, p_v, strides_v, p_v_codes, strides_v_codes, p_v_scales, strides_v_scales,
            p_v_scale, v_quant_scale, slot_args, rope_args, H, DV, DV_PAD, ROWS_V, PAGE, V_FORMAT, V_SCALE_PER_HEAD,
            SCALE_T_MULTIPLIES, NATIVE_FP8_CAST, STRIDE_UNIT, V_PACKED_READ_MODE,
            USE_PTX, USE_PDL, PDL_LAUNCH_LATE, (p_v_signs, p_v_channels, stride_v_channels),
        )  # fmt: skip
    # Rotary part of q, to its output
    elif i_block < rope_end:
        if p_q_rope is not None:
            rope_and_cast_queries(
                i_block - v_end, num_tokens, p_q_rope, strides_q_rope, p_q_rope_out, strides_q_rope_out, p_q_scale,
                q_quant_scale,
                slot_args, rope_args, Q_HEADS, R, R_PAD, ROWS_R, True, INTERLEAVED, QUERY_KIND, ZERO_PADDING,
                SCALE_T_MULTIPLIES, NATIVE_FP8_CAST, STRIDE_UNIT,
                USE_PDL, PDL_LAUNCH_LATE, ORDER_LOADS,
            )  # fmt: skip
    # Other part of q
    elif p_q_nope is not None:
        rope_and_cast_queries(
            i_block - rope_end, num_tokens, p_q_nope, strides_q_nope, p_q_nope_out, strides_q_nope_out, p_q_scale,
            q_quant_scale,
            slot_args, rope_args, Q_HEADS, Q_NOPE_DIM, Q_NOPE_PAD, ROWS_N, False, INTERLEAVED, QUERY_KIND, ZERO_PADDING,
            SCALE_T_MULTIPLIES, NATIVE_FP8_CAST, STRIDE_UNIT,
            USE_PDL, PDL_LAUNCH_LATE, ORDER_LOADS,
        )  # fmt: skip


def why_not(f: SimpleNamespace) -> str | None:
    return launch.why_not_format_or_device(f)


def configure(f: SimpleNamespace) -> LaunchSequence:
    num_tokens, heads, r = f.k_rope.shape
    dk, dv = r + (f.k_nope.shape[2] if f.k_nope else 0), f.v.shape[2]
    formats = [fmt.name for fmt in pair_of(f)]
    q_heads, q_nope = row_programs.num_q_heads_and_nope_columns(f)
    r_pad, q_nope_pad = row_programs.padded_columns(r), row_programs.padded_columns(q_nope)
    dk_pad, dv_pad = row_programs.padded_columns(dk, formats[0]), row_programs.padded_columns(dv, formats[1])
    is_rotated = f.k_signs is not None or f.k_channel_scale is not None
    split_halves = (
        not f.interleaved
        and r == dk
        and r % (2 * row_programs.columns_stored_together(formats[0])) == 0
        and not is_rotated
    )
    num_elements = num_tokens * (heads * (dk_pad + dv_pad) + q_heads * (r + q_nope))
    elements_per_program, warps = min(
        row_programs.elements_and_warps_of_rotated_program(num_elements, name) for name in formats
    )
    k = row_programs.RowPrograms(
        num_tokens, heads, dk_pad, min(elements_per_program, row_programs.max_key_elements(formats[0], split_halves))
    )
    v = row_programs.RowPrograms(num_tokens, heads, dv_pad, elements_per_program)
    rope = row_programs.RowPrograms(num_tokens, q_heads if f.q_rope else 0, r_pad, elements_per_program)
    nope = row_programs.RowPrograms(num_tokens, q_heads if f.q_nope else 0, q_nope_pad, elements_per_program)
    *ends, num_programs = row_programs.program_ends(k, v, rope, nope)
    if num_programs == 0:
        return LaunchSequence()
    rows = (f.q_rope, f.q_nope, f.k_rope, f.k_nope, f.v, f.q_rope_out, f.q_nope_out)
    unit = row_programs.common_stride_unit_of_tensors(*rows, f.k_cache, f.v_cache)
    names = ("q_rope", "q_nope", "k_rope", "k_nope", "v", "q_rope_out", "q_nope_out")
    arguments: dict[str, Any] = _TENSOR_ARGS | row_programs.page_request_and_index_count_args(f, f.k_cache.shape[0])
    arguments |= {f"strides_{n}": row_programs.strides_in_units(x, 2, unit) for n, x in zip(names, rows, strict=True)}
    arguments |= row_programs.channel_scale_strides(f) | {
        "q_quant_scale": f.q_scale, "k_quant_scale": f.k_scale, "v_quant_scale": f.v_scale,
        "strides_k_codes": row_programs.strides_in_units(f.k_cache, 3, unit),
        "strides_v_codes": row_programs.strides_in_units(f.v_cache, 3, unit),
        "strides_k_scales": row_programs.scale_strides(f.k_scale_cache),
        "strides_v_scales": row_programs.scale_strides(f.v_scale_cache),
        "stride_cos_sin": f.cos_sin_cache.stride[0], "max_pos": f.cos_sin_cache.shape[0], "num_tokens": num_tokens,
        "k_end": ends[0], "v_end": ends[1], "rope_end": ends[2],
        "Q_HEADS": q_heads, "H": heads, "R": r, "Q_NOPE_DIM": q_nope, "DK": dk, "DV": dv, "R_PAD": r_pad,
        "Q_NOPE_PAD": q_nope_pad, "DK_PAD": dk_pad, "DV_PAD": dv_pad,
        "ROWS_R": rope.rows, "ROWS_N": nope.rows, "ROWS_K": k.rows, "ROWS_V": v.rows, "PAGE": f.k_cache.shape[1],
        "INTERLEAVED": f.interleaved, "K_FORMAT": row_programs.stored_format(formats[0]),
        "V_FORMAT": row_programs.stored_format(formats[1]),
        "QUERY_KIND": row_programs.query_output_cast_kind(f),
        "K_SCALE_PER_HEAD": row_programs.per_head(f.k_scale_t), "V_SCALE_PER_HEAD": row_programs.per_head(f.v_scale_t),
        "ZERO_PADDING": f.zero_padding, "SCALE_T_MULTIPLIES": f.scales_quantize,
        "NATIVE_FP8_CAST": launch.has_exact_fp8_cast(f),
        "STRIDE_UNIT": unit, "SPLIT_HALVES": split_halves,
        "V_PACKED_READ_MODE": min(row_programs.num_tensors_accessed_in_pairs_if_4bit(f, unit, "v"), 1),
        "USE_PTX": launch.has_ptx(f), "USE_PDL": row_programs.uses_pdl(f),
        "PDL_LAUNCH_LATE": any(
            row_programs.launches_dependents_late(name, elements_per_program, row_programs.SIZES[1])
            for name in formats
        ),
        "ORDER_LOADS": row_programs.issues_loads_first(num_elements),
    }  # fmt: skip
    return LaunchSequence(
        KernelLaunch(rope_append_kernel, (num_programs,), arguments, **row_programs.launch_options(f, warps))
    )


def run(call: Any, config: LaunchSequence) -> None:
    config(call)


def bind(config: LaunchSequence, at: dict[str, int]) -> BoundLaunches | None:
    return config.bind(at)
