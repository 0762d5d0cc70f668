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
from ..host.bind import BoundLaunches, HostAction, LaunchSequence
from ..host.row_programs import uses_pdl
from ..triton.mla_prefill import entry as portable
from ..triton.mla_prefill.config import MLAPrefillConfig, choose_mla_prefill_config
from ..triton.mla_prefill.rope_norm_store import make_rope_norm_store_launch


class Config(NamedTuple):
    portable: MLAPrefillConfig  # of the stages of the Triton backend
    own_gemm: bool
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
    own_gemm = weight.dtype == torch.float8_e4m3fn and fits_tensor_map and weight.shape[1] in (128, 256, 384, 512)
    choice = choose_mla_prefill_config(f)
    return Config(choice, own_gemm, _make_launches(f, choice, own_gemm))


def _make_launches(f: SimpleNamespace, choice: MLAPrefillConfig, own_gemm: bool) -> LaunchSequence | HostAction:
    if 0 in f.q.shape[:2]:
        return portable.make_launches(f, choice)
    if not portable.has_keys_and_queries(f):
        return LaunchSequence(make_rope_norm_store_launch(f, choice.native_casts, no_keys=True, use_pdl=uses_pdl(f)))
    # Imported only after `why_not` has checked the version and the chip.
    from .sm90.mla_prefill import launch_sequence

    return launch_sequence.make_launches(f, choice, launch.num_sms(f), own_gemm, uses_pdl(f))


def run(call: Any, config: Config) -> None:
    config.launches(call)


def bind(config: Config, at: dict[str, int]) -> BoundLaunches | None:
    return config.launches.bind(at)
