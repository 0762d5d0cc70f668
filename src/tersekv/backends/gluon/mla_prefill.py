"""MLA prefill on Hopper: new rows are stored, a chunk's latents gathered, multiplied blockwise and attended to.

All launches of a plan and their scalars are made at its first call; later ones only fill in addresses. A launch may
begin before the one ahead of it has ended. The queries are rotated beside the first chunk's latents. Where there is
much to attend to, a launch of three warpgroups a block goes first, and the usual one behind it does everything again if
that failed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from ..host import launch
from ..host.bind import Bound, Step, bound
from ..host.blocks import overlaps
from ..triton.mla_prefill import entry as portable
from ..triton.mla_prefill.prepare import TENSORS as rope_fields
from ..triton.mla_prefill.prepare import prepared
from ..triton.mla_prefill.prepare import tensors as of_prepare
from ..triton.mla_prefill.project import up_project
from ..triton.mla_prefill.tune import PrefillConfig
from .sm90.mla_prefill.latents import tensors as of_latents


@dataclass(frozen=True, slots=True)
class Config:
    portable: PrefillConfig  # of the stages that are the Triton backend's
    sms: int
    own_product: bool
    overlaps: bool  # a launch may begin before the one ahead of it has ended
    # One, from the first call on: Stages, or the only launch where there is nothing to attend to.
    stages: list[Any] = field(default_factory=list, compare=False, repr=False)


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
    w = f.kv_b_proj
    rows = w.aligned and w.stride[0] % 16 == 0 and w.stride[0] >= w.shape[1]  # a tensor map takes them
    own = w.dtype == torch.float8_e4m3fn and rows and w.shape[1] in (128, 256, 384, 512)
    return Config(portable.configure(f), launch.num_sms(f), own, overlaps(f))


def run(call: Any, config: Config) -> None:
    if 0 in call.q.shape[:2]:
        portable.run(call, config.portable)
        return
    if not portable.attends(call):
        _append(call, config)
        return
    if not config.stages:
        from .sm90.mla_prefill.stages import Stages

        config.stages.append(Stages(call, config))
    stages = config.stages[0]
    memory = stages.memory(call)
    s, descriptors = stages.at(call, memory)
    out, cu, lens = call.out, call.cu_seqlens_q, call.cache_lens
    low = out if s.low is None else s.low
    lse = call.lse if call.lse is not None else out if s.lse is None else s.lse
    stages.store(*of_prepare(call))
    counter, counter_of_three, again = stages.counters(s)
    for chunk, (product, attention, of_three) in zip(stages.chunks, descriptors, strict=True):
        found = of_latents(call, chunk.index, s)
        chunk.latents(*found)
        if chunk.product is None:
            t = stages.tensors(memory)
            up_project(
                t.codes, t.scales, call.kv_b_proj, call.kv_b_proj_scale, t.kv, chunk.rows, config.portable.product,
                config.portable.native_fp8,
            )  # fmt: skip
        else:
            chunk.product(s.scales, call.kv_b_proj_scale, descriptors=product)
        wanted = counter  # not looked at
        if chunk.of_three is not None:
            wanted = again
            chunk.of_three(
                out, lse, counter_of_three, again, s.dirty, cu, lens, found[8], found[9], descriptors=of_three
            )  # fmt: skip
        chunk.attention(
            out, low, lse, counter, wanted, s.dirty, cu, lens, found[8], found[9], descriptors=attention
        )  # fmt: skip
    stages.warm = True


def bind(config: Config, at: dict[str, int]) -> Bound | None:
    """Of calls with one chunk; None for others."""
    if not config.stages:
        return None
    only = config.stages[0]
    return bound([Step(only, rope_fields)], at) if isinstance(only, launch.Template) else only.bind(at)


def _append(call: Any, config: Config) -> None:
    """Rotate, norm and store only."""
    if not config.stages:
        config.stages.append(prepared(call, config.portable.native_casts, ends=True, overlaps=config.overlaps))
    config.stages[0](*of_prepare(call))
