"""MLA prefill in stages: rotate, norm and store the new tokens; then for each chunk gather and quantise its latents,
up-project them, attend. One chunk's scratch is used by all of them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ...host import launch
from ...host.bind import Bound, Instead, Launches, Scratch, Template
from . import attention, gather, prepare, project
from .tune import Choice, choose

_MAX_HEAD_DIM, _MAX_ROPE, _MAX_RANK = 256, 128, 4096
MOST_KEPT = 8 << 20  # bytes of scratch that are kept for the next call: an allocation takes the host 2 µs


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


class Config(NamedTuple):
    choice: Choice
    launches: Launches | Instead


def configure(f: SimpleNamespace) -> Config:
    choice = choose(f)
    return Config(choice, launches(f, choice))


def attends(f: SimpleNamespace) -> bool:
    """Whether there are both keys and queries; without, a call rotates, norms and stores, and its outputs are empty."""
    return any(f.buffer_lengths) and f.max_q_len > 0 and f.cache_lens.shape[0] > 0


def launches(f: SimpleNamespace, choice: Choice) -> Launches | Instead:
    if f.q.shape[0] == 0:
        return Instead(_take_lengths)
    first = prepare.prepared(f, choice.native_casts, ends=not attends(f))
    if f.q.shape[1] == 0 or not attends(f):
        return Launches(first)
    chunks, most = chunks_of(f)
    templates: list[Template] = []
    for i, (chunk, rows) in enumerate(chunks):
        templates += (
            gather.prepared(f, chunk, rows, most, choice.native_casts),
            project.prepared(f, rows, most, choice.product, choice.native_fp8),
            attention.prepared(f, chunk, rows, i > 0, i + 1 < len(chunks), choice.attention),
        )
    return Launches(first, *templates, scratch=Scratch(0, places(f), MOST_KEPT))


def chunks_of(f: SimpleNamespace) -> tuple[list[tuple[int, int]], int]:
    """(the chunks that are not empty, by their place and their rows; the rows of the longest)"""
    chunks = [(chunk, rows) for chunk, rows in enumerate(f.buffer_lengths) if rows]
    return chunks, max(rows for _, rows in chunks)


def places(f: SimpleNamespace) -> dict[str, tuple[tuple[int, ...], torch.dtype] | None]:
    """What lies in the scratch, by name; all chunks use the same."""
    chunks, most = chunks_of(f)
    found = gather.places(f, most) | {"KV": ((most, f.kv_b_proj.shape[0]), f.q.dtype)}
    return found | attention.places(f, len(chunks) > 1)


def _take_lengths(call: Any) -> None:
    """There are no new tokens."""
    if call.seq_lens_out is not None:
        call.seq_lens_out.copy_(call.cache_lens)


def run(call: Any, config: Config) -> None:
    config.launches(call)


def bind(config: Config, at: dict[str, int]) -> Bound | None:
    return config.launches.bind(at)
