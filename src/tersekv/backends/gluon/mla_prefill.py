"""MLA prefill on Hopper: the stages of the Triton backend, with a blockwise product and an attention of its own.

All launches of a plan and their scalars are made at its first call; later ones only fill in addresses. The queries are
rotated by idle warps of the first chunk's product, which leaves half of the memory's bandwidth unused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import triton

from ..triton import launch
from ..triton import mla_prefill as portable
from ..triton.gemm_blockwise import up_project
from ..triton.mla_prefill_gather import tensors as of_gather
from ..triton.mla_prefill_rope import prepared
from ..triton.mla_prefill_rope import tensors as of_prepare
from ..triton.mla_prefill_tune import PrefillConfig


@dataclass(frozen=True, slots=True)
class Config:
    portable: PrefillConfig  # of the stages that are the Triton backend's
    sms: int
    own_product: bool
    # One, from the first call on: Stages, or the only launch where there is nothing to attend to.
    stages: list[Any] = field(default_factory=list, compare=False, repr=False)


def why_not(f: SimpleNamespace) -> str | None:
    if f.arch != 90:
        return f"needs sm_90, got {f'sm_{f.arch}' if f.arch else f.device.type}"
    if launch.interpreting():
        return "has no interpreter"
    if not triton.__version__.startswith("3.6."):
        return f"is written for Triton 3.6, got {triton.__version__}"
    reason = portable.why_not(f)
    if reason is not None:
        return reason
    rope, dim_v = f.kpe.shape[-1], f.out.shape[2]
    nope = f.q.shape[2] - rope
    if (nope, rope, dim_v) != (128, 64, 128):
        return f"needs heads of 128 nope, 64 rotary and 128 value dims, got {nope}, {rope} and {dim_v}"
    stride_t, stride_h, stride_d = f.q.stride
    if not f.q.aligned or stride_d != 1 or stride_t % 8 or stride_h % 8 or stride_t < (f.q.shape[1] - 1) * stride_h:
        return f"needs q on a multiple of 16 bytes, tokens outermost, strides multiples of 8; got {f.q.stride}"
    return None


def configure(f: SimpleNamespace) -> Config:
    w = f.kv_b_proj
    rows = w.aligned and w.stride[0] % 16 == 0 and w.stride[0] >= w.shape[1]  # a tensor map takes them
    own = w.dtype == torch.float8_e4m3fn and rows and w.shape[1] in (128, 256, 384, 512)
    return Config(portable.configure(f), launch.num_sms(f), own)


def run(call: Any, config: Config) -> None:
    if 0 in call.q.shape[:2]:
        portable.run(call, config.portable)
        return
    if not any(call.buffer_lengths):
        _append(call, config)
        return
    if not config.stages:
        from .mla_prefill_stages import Stages

        config.stages.append(Stages(call, config))
    stages = config.stages[0]
    memory = torch.empty(stages.size, dtype=torch.uint8, device=call.q.device)
    s = stages.places(memory) if stages.warm else stages.tensors(memory)
    lse = s.lse if call.lse is None else call.lse
    stages.prepare(*of_prepare(call), s.dirty)
    for chunk, (product, attention) in zip(stages.chunks, stages.descriptors(call, s), strict=True):
        found = of_gather(call, chunk.index, s.codes, s.scales, s.k_pe)
        chunk.gather(*found, s.counter, s.dirty, call.kv_scale_t)
        if chunk.product is None:
            t = stages.tensors(memory)
            up_project(
                t.codes, t.scales, call.kv_b_proj, call.kv_b_proj_scale, t.kv, chunk.rows, config.portable.product,
                config.portable.native_fp8,
            )  # fmt: skip
        else:
            chunk.product(
                s.scales, call.kv_b_proj_scale, call.q, call.freqs_cis, call.cu_seqlens_q, call.cache_lens,
                descriptors=product,
            )  # fmt: skip
        chunk.attention(
            call.out, call.out if s.low is None else s.low, call.out if lse is None else lse, s.counter, s.dirty,
            call.cu_seqlens_q, call.cache_lens, found[4], found[5], descriptors=attention,
        )  # fmt: skip
    stages.warm = True


def _append(call: Any, config: Config) -> None:
    """Rotate, norm and store only."""
    if not config.stages:
        config.stages.append(prepared(call, config.portable.native_casts))
    config.stages[0](*of_prepare(call), None)
    call.out.zero_()
    if call.lse is not None:
        call.lse.fill_(-torch.inf)
