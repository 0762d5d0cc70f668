"""append: quantize rows of k and v and store them, in one launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl

from ...formats import CHANNELS, PAIRS, ROTATION, pair_of
from ..host import launch, row_programs
from ..host.bind import BYTES, BoundLaunches, KernelLaunch, LaunchSequence, tensor_args
from .parts.append_rows import ROTATION_ARGS, TOKEN_SLOT_ARGS, quantize_or_copy_rows_to_cache

SUPPORTS = (PAIRS, ROTATION, CHANNELS)
_TENSOR_ARGS = TOKEN_SLOT_ARGS | ROTATION_ARGS | tensor_args(
    BYTES, p_k="k", p_v="v", p_k_codes="k_cache", p_v_codes="v_cache", p_k_scales="k_scale_cache",
    p_v_scales="v_scale_cache", p_k_scale="k_scale_t", p_v_scale="v_scale_t",
)  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "num_pages", "num_requests", "num_indices", "k_end"])
def append_kernel(
    p_k, p_v, p_k_codes, p_v_codes, p_k_scales, p_v_scales, p_k_scale, p_v_scale,
    p_slot_mapping, p_batch_indices, p_kv_positions, p_kv_indptr, p_kv_indices, p_k_signs, p_v_signs, p_k_channels,
    p_v_channels,
    k_quant_scale, v_quant_scale, strides_k, strides_v, strides_k_codes, strides_v_codes, strides_k_scales,
    strides_v_scales, stride_k_channels, stride_v_channels, num_tokens, num_pages, num_requests, num_indices, k_end,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    ROWS_K: tl.constexpr, ROWS_V: tl.constexpr, PAGE: tl.constexpr, K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr,
    K_SCALE_PER_HEAD: tl.constexpr, V_SCALE_PER_HEAD: tl.constexpr, SCALE_T_MULTIPLIES: tl.constexpr,
    NATIVE_FP8_CAST: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, K_PACKED_READ_MODE: tl.constexpr, V_PACKED_READ_MODE: tl.constexpr,
    USE_PTX: tl.constexpr,
    USE_PDL: tl.constexpr,
    PDL_LAUNCH_LATE: tl.constexpr,
):  # fmt: skip
    """Appends k in programs up to k_end, then v."""
    i_block = tl.program_id(0)
    slot_args = (
        p_slot_mapping, p_batch_indices, p_kv_positions, p_kv_indptr, p_kv_indices, num_pages, num_requests,
        num_indices,
    )  # fmt: skip
    rope_args = (None, None, 0, 0)
    # K: scales, rotation and the wait for the previous kernel are inside
    if i_block < k_end:
        quantize_or_copy_rows_to_cache(
            i_block, num_tokens, p_k, strides_k, p_k_codes, strides_k_codes, p_k_scales, strides_k_scales, p_k_scale,
            k_quant_scale,
            slot_args, rope_args, H, DK, DK_PAD, ROWS_K, PAGE, K_FORMAT, K_SCALE_PER_HEAD, SCALE_T_MULTIPLIES,
            NATIVE_FP8_CAST, STRIDE_UNIT,
            K_PACKED_READ_MODE, USE_PTX, USE_PDL, PDL_LAUNCH_LATE, (p_k_signs, p_k_channels, stride_k_channels),
        )  # fmt: skip
    # V
    else:
        quantize_or_copy_rows_to_cache(
            i_block - k_end, num_tokens, p_v, strides_v, p_v_codes, strides_v_codes, p_v_scales, strides_v_scales,
            p_v_scale, v_quant_scale, slot_args, rope_args, H, DV, DV_PAD, ROWS_V, PAGE, V_FORMAT, V_SCALE_PER_HEAD,
            SCALE_T_MULTIPLIES, NATIVE_FP8_CAST, STRIDE_UNIT,
            V_PACKED_READ_MODE, USE_PTX, USE_PDL, PDL_LAUNCH_LATE, (p_v_signs, p_v_channels, stride_v_channels),
        )  # fmt: skip


def why_not(f: SimpleNamespace) -> str | None:
    return launch.why_not_format_or_device(f)


def configure(f: SimpleNamespace) -> LaunchSequence:
    num_tokens, heads, dk = f.k.shape
    dv, formats = f.v.shape[2], [fmt.name for fmt in pair_of(f)]
    dk_pad, dv_pad = row_programs.padded_columns(dk, formats[0]), row_programs.padded_columns(dv, formats[1])
    num_elements = num_tokens * heads * (dk_pad + dv_pad)
    elements_per_program = row_programs.program_elements(
        num_elements, min(row_programs.max_program_elements(name, num_elements) for name in formats)
    )
    k, v = (
        row_programs.RowPrograms(num_tokens, heads, dk_pad, elements_per_program),
        row_programs.RowPrograms(num_tokens, heads, dv_pad, elements_per_program),
    )
    k_end, num_programs = row_programs.program_ends(k, v)
    if num_programs == 0:
        return LaunchSequence()
    unit = row_programs.common_stride_unit_of_tensors(f.k, f.v, f.k_cache, f.v_cache)
    packed = [row_programs.num_tensors_accessed_in_pairs_if_4bit(f, unit, side) for side in "kv"]
    if elements_per_program < row_programs.MAX_ELEMENTS:  # no thread holds two blocks of a row
        packed = [min(n, 1) for n in packed]
    bounds = row_programs.page_request_and_index_count_args(f, f.k_cache.shape[0])
    arguments = _TENSOR_ARGS | bounds | row_programs.channel_scale_strides(f) | {
        "k_quant_scale": f.k_scale, "v_quant_scale": f.v_scale,
        "strides_k": row_programs.strides_in_units(f.k, 2, unit),
        "strides_v": row_programs.strides_in_units(f.v, 2, unit),
        "strides_k_codes": row_programs.strides_in_units(f.k_cache, 3, unit),
        "strides_v_codes": row_programs.strides_in_units(f.v_cache, 3, unit),
        "strides_k_scales": row_programs.scale_strides(f.k_scale_cache),
        "strides_v_scales": row_programs.scale_strides(f.v_scale_cache),
        "num_tokens": num_tokens, "k_end": k_end, "H": heads, "DK": dk, "DV": dv, "DK_PAD": dk_pad, "DV_PAD": dv_pad,
        "ROWS_K": k.rows, "ROWS_V": v.rows, "PAGE": f.k_cache.shape[1],
        "K_FORMAT": row_programs.stored_format(formats[0], f.widen),
        "V_FORMAT": row_programs.stored_format(formats[1], f.widen),
        "K_SCALE_PER_HEAD": row_programs.per_head(f.k_scale_t), "V_SCALE_PER_HEAD": row_programs.per_head(f.v_scale_t),
        "SCALE_T_MULTIPLIES": f.scales_quantize, "NATIVE_FP8_CAST": launch.has_exact_fp8_cast(f), "STRIDE_UNIT": unit,
        "K_PACKED_READ_MODE": packed[0], "V_PACKED_READ_MODE": packed[1], "USE_PTX": launch.has_ptx(f),
        "USE_PDL": row_programs.uses_pdl(f),
        "PDL_LAUNCH_LATE": any(row_programs.launches_dependents_late(name, elements_per_program,
                                                                     row_programs.SMALL) for name in formats),
    }  # fmt: skip
    return LaunchSequence(KernelLaunch(append_kernel, (num_programs,), arguments, **row_programs.launch_options(f)))


def run(call: Any, config: LaunchSequence) -> None:
    config(call)


def bind(config: LaunchSequence, at: dict[str, int]) -> BoundLaunches | None:
    return config.bind(at)
