"""index_query: rotate and quantise an indexer's queries, and scale its heads' weights, in one launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl

from ..host import launch, row_programs
from ..host.bind import BYTES, BoundLaunches, KernelLaunch, LaunchSequence, tensor_args
from .parts.index_rows import INDEX, cast_index_rows, encode_index_fp8_codes_and_pow2_scales, load_index_rows
from .parts.token_rows import (
    clamped_token_and_head_of_rows,
    cos_sin_row_ptr_and_mask,
    load_rope_positions,
    row_offsets,
    store_rows,
    unique_rows_mask,
)

_TENSOR_ARGS = tensor_args(
    BYTES, p_q="q", p_weights="weights", p_cos_sin="cos_sin_cache", p_positions="positions", p_q_out="q_out",
    p_weights_out="weights_out",
)  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "max_pos"])
def index_query_kernel(
    p_q, p_weights, p_cos_sin, p_positions, p_q_out, p_weights_out, weight_scale, strides_q, strides_weights,
    strides_q_out, strides_weights_out, stride_cos_sin, max_pos, num_tokens,
    H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr,
    ROPE_LAST: tl.constexpr, INTERLEAVED: tl.constexpr, HADAMARD: tl.constexpr, ROUND16: tl.constexpr,
    FORMAT: tl.constexpr, NATIVE_FP8_CAST: tl.constexpr,
):  # fmt: skip
    """Handles one block of rows [tokens, H]."""
    token, head = clamped_token_and_head_of_rows(tl.program_id(0), num_tokens, H, ROWS)
    p_cos_sin_row, has_position = None, None
    if p_cos_sin is not None:
        rope_args = (p_cos_sin, p_positions, max_pos, stride_cos_sin)
        p_cos_sin_row, has_position = cos_sin_row_ptr_and_mask(load_rope_positions(p_positions, token), rope_args)
    x = load_index_rows(
        p_q + row_offsets(token, head, strides_q, 1), (None, None, 0.0), p_cos_sin_row, has_position,
        D, D_PAD, R, ROPE_LAST, INTERLEAVED, HADAMARD, ROUND16,
    )  # fmt: skip
    if p_cos_sin is not None:
        x = tl.where(has_position, x, 0.0)
    weight = tl.full([ROWS, 1], 1.0, tl.float32)
    if p_weights is not None:
        weight = tl.load(p_weights + row_offsets(token, head, strides_weights, 1)).to(tl.float32)
    weight = weight * weight_scale
    if FORMAT.SCALE == INDEX:
        codes, scale = encode_index_fp8_codes_and_pow2_scales(x, D_PAD, NATIVE_FP8_CAST)
        weight = weight * scale
    else:
        codes = cast_index_rows(x, p_q_out.dtype.element_ty, FORMAT, NATIVE_FP8_CAST)
    m_unique = unique_rows_mask(tl.program_id(0), num_tokens, H, ROWS)
    store_rows(p_q_out + row_offsets(token, head, strides_q_out, 1), codes, m_unique, D)
    tl.store(p_weights_out + row_offsets(token, head, strides_weights_out, 1), weight, mask=m_unique)


def why_not(f: SimpleNamespace) -> str | None:
    return launch.why_not_format_or_device(f)


def configure(f: SimpleNamespace) -> LaunchSequence:
    num_tokens, heads, d = f.q.shape
    if num_tokens * heads == 0:
        return LaunchSequence()
    d_pad = row_programs.padded_columns(d)
    part = row_programs.RowPrograms(num_tokens, heads, d_pad, row_programs.program_elements(num_tokens * heads * d_pad))
    max_pos, r, stride = (*f.cos_sin_cache.shape, f.cos_sin_cache.stride[0]) if f.cos_sin_cache else (0, 0, 0)
    arguments = _TENSOR_ARGS | {
        "weight_scale": f.weight_scale, "strides_q": f.q.stride[:2],
        "strides_weights": (0, 0) if f.weights is None else f.weights.stride, "strides_q_out": f.q_out.stride[:2],
        "strides_weights_out": f.weights_out.stride, "stride_cos_sin": stride, "max_pos": max_pos,
        "num_tokens": num_tokens, "H": heads, "D": d, "D_PAD": d_pad, "R": r, "ROWS": part.rows,
        "ROPE_LAST": f.rope_last, "INTERLEAVED": f.interleaved, "HADAMARD": f.hadamard,
        "ROUND16": f.round16 and f.q.dtype.itemsize == 2, "FORMAT": row_programs.stored_format(f.format),
        "NATIVE_FP8_CAST": launch.has_exact_fp8_cast(f),
    }  # fmt: skip
    return LaunchSequence(KernelLaunch(index_query_kernel, (part.programs,), arguments, **row_programs.OPTIONS))


def run(call: Any, config: LaunchSequence) -> None:
    config(call)


def bind(config: LaunchSequence, at: dict[str, int]) -> BoundLaunches | None:
    return config.bind(at)
