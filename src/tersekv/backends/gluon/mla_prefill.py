"""MLA prefill on Hopper: store the new rows; per chunk gather its latents, up-project them, attend.

A launch may begin before the one before it has ended (PDL). The queries are rotated beside the first chunk's gather.
Large calls launch attention with three warpgroups a CTA first, and the usual one behind it computes everything again on
overflow.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ..host import launch
from ..host.bind import BoundLaunches, HostAction, KernelLaunch, LaunchSequence, Workspace
from ..host.row_programs import uses_pdl
from ..triton.mla_prefill import blockwise_gemm as portable_gemm
from ..triton.mla_prefill import entry as portable
from ..triton.mla_prefill.config import MLAPrefillConfig, choose_mla_prefill_config
from ..triton.mla_prefill.rope_norm_store import make_rope_norm_store_launch


class Config(NamedTuple):
    portable: MLAPrefillConfig  # of the stages of the Triton backend
    use_gluon_gemm: bool
    launches: LaunchSequence | HostAction


def why_not(f: SimpleNamespace) -> str | None:
    reason = portable.why_not(f)
    if reason is not None:
        return reason
    rope, dim_v = f.kpe.shape[-1], f.out.shape[2]
    nope = f.q.shape[2] - rope
    if (nope, rope, dim_v) != (128, 64, 128):
        return f"needs heads of 128 nope, 64 rotary and 128 value dims, got {nope}, {rope} and {dim_v}"
    stride_t, stride_h, stride_d = f.q.stride
    outermost = stride_t >= (f.q.shape[1] - 1) * stride_h and (stride_t > 0 or f.q.shape[0] == 1)
    if not f.q.aligned or stride_d != 1 or stride_t % 8 or stride_h % 8 or not outermost:
        return f"needs q on a multiple of 16 bytes, tokens outermost, strides multiples of 8; got {f.q.stride}"
    return None


def configure(f: SimpleNamespace) -> Config:
    weight = f.kv_b_proj
    fits_tensor_map = (
        weight.aligned and weight.stride[0] % 16 == 0 and weight.stride[0] >= weight.shape[1]
    )  # alignment and strides of a tensor map
    use_gluon_gemm = weight.dtype == torch.float8_e4m3fn and fits_tensor_map and weight.shape[1] in (128, 256, 384, 512)
    portable_cfg = choose_mla_prefill_config(f)
    return Config(portable_cfg, use_gluon_gemm, _make_launch_sequence(f, portable_cfg, use_gluon_gemm))


def _make_launch_sequence(
    f: SimpleNamespace, portable_cfg: MLAPrefillConfig, use_gluon_gemm: bool
) -> LaunchSequence | HostAction:
    if 0 in f.q.shape[:2]:
        return portable.make_append_and_chunk_launches(f, portable_cfg)
    if not portable.has_keys_and_queries(f):
        return LaunchSequence(
            make_rope_norm_store_launch(f, portable_cfg.native_casts, store_all_outputs_empty=True, use_pdl=uses_pdl(f))
        )
    launches = [make_rope_norm_store_launch(f, portable_cfg.native_casts, rope_queries=False)]
    launches += _gather_gemm_and_attention_launches(f, portable_cfg, use_gluon_gemm, launch.num_sms(f), uses_pdl(f))
    # WORK_COUNTER: see `attention.make_attention_launch`; the last is unused. MAY_HAVE_NAN: the row's V may be NaN.
    workspace_tensors = portable.workspace_tensors(f) | {
        "WORK_COUNTER": ((4,), torch.int32),
        "MAY_HAVE_NAN": ((max(f.buffer_lengths),), torch.int8),
    }
    return LaunchSequence(*launches, workspace=Workspace(0, workspace_tensors, portable.MAX_CACHED_WORKSPACE))


def _gather_gemm_and_attention_launches(
    f: SimpleNamespace, portable_cfg: MLAPrefillConfig, use_gluon_gemm: bool, num_sms: int, use_pdl: bool
) -> list[KernelLaunch]:
    """Returns the launches of all chunks: gather, GEMM, attention. A single chunk may use three warpgroups, followed by
    the usual attention in case of overflow."""
    # Imported only after `why_not` has checked the version and the chip.
    from .sm90.mla_prefill import attention, blockwise_gemm, gather_latents, three_warpgroups

    chunks, max_rows = portable.nonempty_chunk_indices_and_num_rows(f), max(f.buffer_lengths)
    use_three_warpgroups = (
        len(chunks) == 1
        and use_gluon_gemm
        and f.q.dtype == torch.bfloat16
        and three_warpgroups.is_faster_than_two_warpgroups(f, num_sms)
    )
    launches: list[KernelLaunch] = []
    for i, (i_chunk, num_rows) in enumerate(chunks):
        has_previous_chunk, has_next_chunk = i > 0, i < len(chunks) - 1
        launches += (
            gather_latents.make_gather_launch(f, i_chunk, num_rows, max_rows, portable_cfg.native_casts, i == 0,
                                              use_pdl),
            blockwise_gemm.make_kv_up_projection_launch(f, num_rows, max_rows, num_sms, use_pdl) if use_gluon_gemm
            else portable_gemm.make_kv_up_projection_launch(f, num_rows, max_rows, portable_cfg.product,
                                                            portable_cfg.native_fp8),
            *([three_warpgroups.make_three_consumers_attention_launch(f, i_chunk, num_rows, num_sms, use_pdl)]
              if use_three_warpgroups else []),
            attention.make_attention_launch(f, i_chunk, num_rows, has_previous_chunk, has_next_chunk, num_sms, use_pdl,
                                            use_three_warpgroups),
        )  # fmt: skip
    return launches


def run(call: Any, config: Config) -> None:
    config.launches(call)


def bind(config: Config, at: dict[str, int]) -> BoundLaunches | None:
    return config.launches.bind(at)
