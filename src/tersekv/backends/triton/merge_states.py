"""merge_states: combine partial attention results by their LSE, in one launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl

from ..host import launch, row_programs
from ..host.bind import BoundLaunches, KernelLaunch, LaunchSequence, tensor_args
from .parts.token_rows import clamped_token_and_head_of_rows, row_offsets, store_rows, unique_rows_mask

_TENSOR_ARGS = tensor_args(p_outs="outs", p_lses="lses", p_out="out", p_lse="lse")
MAX_UNROLLED_STATES = 8  # states; more run in a dynamic loop, so that their number compiles no new kernel


@triton.jit(do_not_specialize=["num_tokens", "num_states"])
def merge_states_kernel(
    p_outs, p_lses, p_out, p_lse, strides_outs, strides_lses, strides_out, strides_lse, num_tokens, num_states,
    H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, STATIC_NUM_STATES_OR_0: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
):  # fmt: skip
    """Merges one block of rows. STATIC_NUM_STATES_OR_0: number of states, or 0 to read it from `num_states`."""
    token, head = clamped_token_and_head_of_rows(tl.program_id(0), num_tokens, H, ROWS)
    if STATIC_NUM_STATES_OR_0 > 0:
        num_states = STATIC_NUM_STATES_OR_0
    c = tl.arange(0, D_PAD)[None, :]
    p_outs += row_offsets(token, head, (strides_outs[1], strides_outs[2]), STRIDE_UNIT)
    p_lses += row_offsets(token, head, (strides_lses[1], strides_lses[2]), 1)

    lse_max = tl.full([ROWS, 1], float("-inf"), tl.float32)
    for i in range(num_states):
        lse_max = tl.maximum(lse_max, tl.load(p_lses + tl.cast(i, tl.int64) * strides_lses[0]))
    # Where every state is empty, exp(-inf - 0) = 0 instead of exp(-inf + inf) = NaN.
    is_empty = lse_max == float("-inf")
    safe_max = tl.where(is_empty, 0.0, lse_max)

    exp_sum = tl.zeros([ROWS, 1], tl.float32)
    acc_o = tl.zeros([ROWS, D_PAD], tl.float32)
    for i in range(num_states):
        lse = tl.load(p_lses + tl.cast(i, tl.int64) * strides_lses[0])
        scale = tl.exp(lse - safe_max)
        exp_sum += scale
        # An empty state may hold anything, NaN included: it is not loaded.
        valid = (lse > float("-inf")) & (c < D)
        x = tl.load(p_outs + tl.cast(i, tl.int64) * strides_outs[0] * STRIDE_UNIT + c, mask=valid, other=0.0)
        acc_o += scale * x.to(tl.float32)
    # At least one state has scale 1, unless all are empty.
    acc_o = acc_o / tl.where(is_empty, 1.0, exp_sum)
    m_unique = unique_rows_mask(tl.program_id(0), num_tokens, H, ROWS)
    store_rows(
        p_out + row_offsets(token, head, strides_out, STRIDE_UNIT), acc_o.to(p_out.dtype.element_ty), m_unique, D
    )
    if p_lse is not None:
        tl.store(p_lse + row_offsets(token, head, strides_lse, 1), safe_max + tl.log(exp_sum))


def why_not(f: SimpleNamespace) -> str | None:
    return launch.why_not_format_or_device(f)


def configure(f: SimpleNamespace) -> LaunchSequence:
    num_states, num_tokens, heads, d = f.outs.shape
    if num_tokens * heads * d == 0:
        return LaunchSequence()
    c, unit = row_programs.padded_columns(d), row_programs.common_stride_unit_of_tensors(f.outs, f.out)
    part = row_programs.RowPrograms(num_tokens, heads, c, row_programs.program_elements(num_tokens * heads * c))
    arguments = _TENSOR_ARGS | {
        "strides_outs": row_programs.strides_in_units(f.outs, 3, unit), "strides_lses": f.lses.stride,
        "strides_out": row_programs.strides_in_units(f.out, 2, unit),
        "strides_lse": (0, 0) if f.lse is None else f.lse.stride,
        "num_tokens": num_tokens, "num_states": num_states, "H": heads, "D": d, "D_PAD": c, "ROWS": part.rows,
        "STATIC_NUM_STATES_OR_0": num_states if num_states <= MAX_UNROLLED_STATES else 0, "STRIDE_UNIT": unit,
    }  # fmt: skip
    return LaunchSequence(
        KernelLaunch(merge_states_kernel, (part.programs,), arguments, num_warps=row_programs.OPTIONS["num_warps"])
    )


def run(call: Any, config: LaunchSequence) -> None:
    config(call)


def bind(config: LaunchSequence, at: dict[str, int]) -> BoundLaunches | None:
    return config.bind(at)
