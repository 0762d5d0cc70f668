"""MLA prefill on Hopper: new rows are stored, a chunk's latents gathered, multiplied blockwise and attended to.

A launch may begin before the one ahead of it has ended. The queries are rotated beside the first chunk's latents. Where
there is much to attend to, a launch of three warpgroups a block goes first, and the usual one behind it does everything
again if that failed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ..host import launch
from ..host.bind import Bound, Instead, Launches
from ..host.blocks import overlaps
from ..triton.mla_prefill import entry as portable
from ..triton.mla_prefill.prepare import prepared
from ..triton.mla_prefill.tune import Choice, choose


class Config(NamedTuple):
    portable: Choice  # of the stages that are the Triton backend's
    own_product: bool
    launches: Launches | Instead


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
    choice = choose(f)
    return Config(choice, own, _launches(f, choice, own))


def _launches(f: SimpleNamespace, choice: Choice, own_product: bool) -> Launches | Instead:
    if 0 in f.q.shape[:2]:
        return portable.launches(f, choice)
    if not portable.attends(f):
        return Launches(prepared(f, choice.native_casts, ends=True, overlaps=overlaps(f)))
    # Imported when `why_not` has seen the version and the chip.
    from .sm90.mla_prefill import stages

    return stages.launches(f, choice, launch.num_sms(f), own_product, overlaps(f))


def run(call: Any, config: Config) -> None:
    config.launches(call)


def bind(config: Config, at: dict[str, int]) -> Bound | None:
    return config.launches.bind(at)
