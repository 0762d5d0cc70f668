"""index_append: norm, rotate, quantise and store an indexer's keys, in one launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl

from ..host import launch, row_programs
from ..host.bind import BYTES, BoundLaunches, KernelLaunch, LaunchSequence, tensor_args
from .parts.index_rows import BLOCK, INDEX, cast_index_rows, encode_index_fp8_codes_and_pow2_scales, load_index_rows
from .parts.quant import store_codes
from .parts.token_rows import (
    cos_sin_row_ptr_and_mask,
    load_rope_positions,
    load_slot_or_request_and_position,
    resolve_page_slot_and_write_mask,
)

_TENSOR_ARGS = tensor_args(
    BYTES, p_k="k", p_codes="k_cache", p_scales="k_scale_cache", p_slot_mapping="slot_mapping", p_weight="norm_weight",
    p_bias="norm_bias", p_cos_sin="cos_sin_cache", p_positions="positions",
)  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "num_pages", "max_pos"])
def index_append_kernel(
    p_k, p_codes, p_scales, p_slot_mapping, p_weight, p_bias, p_cos_sin, p_positions, epsilon, stride_k, stride_codes_p,
    stride_codes_s, stride_scales_p, stride_scales_s, stride_cos_sin, max_pos, num_tokens, num_pages,
    D: tl.constexpr, D_PAD: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
    ROPE_LAST: tl.constexpr, INTERLEAVED: tl.constexpr, HADAMARD: tl.constexpr, ROUND16: tl.constexpr,
    FORMAT: tl.constexpr, NATIVE_FP8_CAST: tl.constexpr,
):  # fmt: skip
    """Handles ROWS tokens; past the last one it is repeated, and stored again alike."""
    token = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), num_tokens - 1)
    slot_args = (p_slot_mapping, None, None, None, None, num_pages, 0, 0)
    page, page_slot, m_write = resolve_page_slot_and_write_mask(
        load_slot_or_request_and_position(token, slot_args), slot_args, PAGE
    )
    m_write = m_write[:, None]
    p_cos_sin_row, has_position = None, None
    if p_cos_sin is not None:
        rope_args = (p_cos_sin, p_positions, max_pos, stride_cos_sin)
        p_cos_sin_row, has_position = cos_sin_row_ptr_and_mask(load_rope_positions(p_positions, token), rope_args)
        m_write = m_write & has_position
    x = load_index_rows(
        p_k + token.to(tl.int64)[:, None] * stride_k, (p_weight, p_bias, epsilon), p_cos_sin_row, has_position,
        D, D_PAD, R, ROPE_LAST, INTERLEAVED, HADAMARD, ROUND16,
    )  # fmt: skip
    o_codes = (page * stride_codes_p + page_slot * stride_codes_s)[:, None]
    if FORMAT.SCALE == INDEX:
        COLUMNS: tl.constexpr = min(D_PAD, BLOCK)
        codes, scales = encode_index_fp8_codes_and_pow2_scales(x, COLUMNS, NATIVE_FP8_CAST)
        o_scales = (page * stride_scales_p + page_slot * stride_scales_s)[:, None]
        tl.store(p_scales + o_scales + tl.arange(0, D_PAD // COLUMNS)[None, :], scales, mask=m_write)
    else:
        codes = cast_index_rows(x, p_codes.dtype.element_ty, FORMAT, NATIVE_FP8_CAST)
    store_codes(p_codes, o_codes, codes, m_write, D)


def why_not(f: SimpleNamespace) -> str | None:
    return launch.why_not_format_or_device(f)


def configure(f: SimpleNamespace) -> LaunchSequence:
    num_tokens, d = f.k.shape
    if num_tokens == 0 or f.k_cache.shape[0] == 0:
        return LaunchSequence()
    d_pad = row_programs.padded_columns(d)
    part = row_programs.RowPrograms(num_tokens, 1, d_pad, row_programs.program_elements(num_tokens * d_pad))
    max_pos, r, stride = (*f.cos_sin_cache.shape, f.cos_sin_cache.stride[0]) if f.cos_sin_cache else (0, 0, 0)
    scales = (0, 0) if f.k_scale_cache is None else f.k_scale_cache.stride[:2]
    arguments = _TENSOR_ARGS | {
        "epsilon": f.epsilon, "stride_k": f.k.stride[0], "stride_codes_p": f.k_cache.stride[0],
        "stride_codes_s": f.k_cache.stride[1], "stride_scales_p": scales[0], "stride_scales_s": scales[1],
        "stride_cos_sin": stride, "max_pos": max_pos, "num_tokens": num_tokens, "num_pages": f.k_cache.shape[0],
        "D": d, "D_PAD": d_pad, "R": r, "ROWS": part.rows, "PAGE": f.k_cache.shape[1], "ROPE_LAST": f.rope_last,
        "INTERLEAVED": f.interleaved, "HADAMARD": f.hadamard, "ROUND16": f.round16 and f.k.dtype.itemsize == 2,
        "FORMAT": row_programs.stored_format(f.format), "NATIVE_FP8_CAST": launch.has_exact_fp8_cast(f),
    }  # fmt: skip
    return LaunchSequence(KernelLaunch(index_append_kernel, (part.programs,), arguments, **row_programs.OPTIONS))


def run(call: Any, config: LaunchSequence) -> None:
    config(call)


def bind(config: LaunchSequence, at: dict[str, int]) -> BoundLaunches | None:
    return config.bind(at)
