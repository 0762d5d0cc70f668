"""MLA prefill in stages: rotate, norm and store the new tokens; then for each chunk gather and quantise its latents,
up-project them, attend. One chunk's scratch is used by all of them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from ...host import launch
from . import gather
from . import prepare as rope
from .attention import attend, scratch_low
from .gather import scratch
from .project import up_project
from .tune import PrefillConfig, choose

_MAX_HEAD_DIM, _MAX_ROPE, _MAX_RANK = 256, 128, 4096


def why_not(f: SimpleNamespace) -> str | None:
    reason = launch.why_not(f)
    if reason is not None:
        return reason
    dim_v, rope, rank = f.out.shape[2], f.kpe.shape[-1], f.ckv.shape[-1]
    nope = f.q.shape[2] - rope
    if max(nope, dim_v) > _MAX_HEAD_DIM or min(nope, dim_v) < 1:
        return f"needs heads of 1 to {_MAX_HEAD_DIM} nope and value dims, got {nope} and {dim_v}"
    if rope > _MAX_ROPE:
        return f"needs at most {_MAX_ROPE} rotary dims, got {rope}"
    if rank > _MAX_RANK:
        return f"needs a latent rank of at most {_MAX_RANK}, got {rank}"
    if not f.softmax_scale > 0:
        return f"needs softmax_scale > 0, got {f.softmax_scale}"
    return None


def configure(f: SimpleNamespace) -> PrefillConfig:
    return choose(f)


def attends(call: Any) -> bool:
    """Whether there are both keys and queries; without, a call rotates, norms and stores, and its outputs are empty."""
    return any(call.buffer_lengths) and call.max_q_len > 0 and call.cache_lens.shape[0] > 0


def run(call: Any, config: PrefillConfig) -> None:
    tokens, heads = call.q.shape[:2]
    if tokens == 0:
        if call.seq_lens_out is not None:
            call.seq_lens_out.copy_(call.cache_lens)
        return
    launches = config.launches
    if "prepare" not in launches:
        launches["prepare"] = rope.prepared(call, config.native_casts, ends=not attends(call))
    launches["prepare"](*rope.tensors(call))
    if heads == 0 or not attends(call):
        return
    chunks = [(c, rows) for c, rows in enumerate(call.buffer_lengths) if rows]
    most = max(rows for _, rows in chunks)
    latents = scratch(call, most)
    kv = torch.empty(most, call.kv_b_proj.shape[0], dtype=call.q.dtype, device=call.q.device)
    low, lse = scratch_low(call, len(chunks))
    for i, (chunk, rows) in enumerate(chunks):
        if chunk not in launches:
            launches[chunk] = gather.prepared(call, rows, latents, config.native_casts)
        launches[chunk](*gather.tensors(call, chunk, *latents), call.kv_scale_t)
        up_project(
            latents.rows, latents.scales, call.kv_b_proj, call.kv_b_proj_scale, kv, rows,
            config.product, config.native_fp8,
        )  # fmt: skip
        attend(call, chunk, rows, kv, latents.k_pe, low, lse, i > 0, i + 1 < len(chunks), config.attention)
