"""The decode branch of MLA on Hopper in three launches: what attention waits for; the split pass; and the merge of what
that cut, in the programs that project it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from ..host import launch
from ..host.bind import Bound, Fields, Step
from ..triton.mla_decode_branch import entry as portable
from ..triton.mla_decode_branch.entry import Config
from . import mla_decode
from .sm90.mla_decode.merge import COLUMNS, merge_project_kernel

_JOINED = Fields("cu_seqlens_q LATENTS part w_uv w_uv_scale out kv_scale_t")
_MOST_TOKENS, _LEAST_HEADS = 8, 128


class Tile(NamedTuple):
    tokens: int
    pieces: int  # that are read at once


def why_not(f: SimpleNamespace) -> str | None:
    return mla_decode.why_not(portable.parts(f).decode)


def configure(f: SimpleNamespace) -> Config:
    return portable.configure(f, mla_decode)


def run(call: Any, config: Config) -> None:
    portable.run(call, config, mla_decode, steps)


def bind(config: Config, at: dict[str, int]) -> Bound | None:
    return portable.bind(config, at)


def tile(tokens: int) -> Tile:
    return Tile(1, 32) if tokens == 1 else Tile(8, 4)


def joins(call: Any, config: Config) -> bool:
    """Whether merge and projection are one launch, of a program for each head: these must be many, and tokens few.

    On an H200, 2026-11-21, 128 heads, e4m3 weights, in a graph with cold caches and weights: 1 × 4K 24.4 → 24.2 µs,
    1 × 16K 35.4 → 34.6, 8 × 4K 52.1 → 51.1; but 16 × 4K 67.4 → 69.7, 1 × 4K with 16-bit weights 30.0 → 30.7. Several
    tokens of a request were not run there.
    """
    tokens, heads, columns = call.out.shape
    if call.w_uv_scale is None or columns != COLUMNS.value or config.decode.merge is None:
        return False
    return call.max_q_len == 1 and tokens <= _MOST_TOKENS and heads >= _LEAST_HEADS


def steps(call: Any, given: SimpleNamespace, config: Config, decode: Any) -> list[Step]:
    found = portable.launches(call, given, config, decode)
    if not joins(call, config):
        return found
    (tokens, heads, _), t, d, latents = call.out.shape, tile(call.q.shape[0]), config.decode, given.LATENTS
    joined = launch.Template(
        merge_project_kernel, (heads, -(-tokens // t.tokens)), (
            *[launch.TENSOR] * 6, call.kv_scale, launch.TENSOR, tokens, call.cache_lens.shape[0],
            d.programs, d.segments,
            *latents.stride()[:2], *call.w_uv.stride()[:2], *call.w_uv_scale.stride()[:2], *call.out.stride()[:2],
            t.tokens, t.pieces, d.cut,
        ), num_warps=8, launch_pdl=True,
    )  # fmt: skip
    return [*found[:2], Step(joined, _JOINED)]
