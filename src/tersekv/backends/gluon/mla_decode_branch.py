"""The decode branch of MLA on Hopper in three launches: what attention waits for; the split pass; and the merge of what
that cut, in the programs that project it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from ..host.bind import BYTES, PART, Bound, Template, given, strides
from ..triton.mla_decode_branch import entry as portable
from ..triton.mla_decode_branch.entry import Config
from . import mla_decode
from .sm90.mla_decode.merge import COLUMNS, merge_project_kernel

_MOST_TOKENS, _LEAST_HEADS = 8, 128


class Tile(NamedTuple):
    tokens: int
    pieces: int  # that are read at once


def why_not(f: SimpleNamespace) -> str | None:
    return mla_decode.why_not(portable.parts(f).decode)


def configure(f: SimpleNamespace) -> Config:
    return portable.configure(f, mla_decode, last)


def run(call: Any, config: Config) -> None:
    portable.run(call, config)


def bind(config: Config, at: dict[str, int]) -> Bound | None:
    return portable.bind(config, at)


def tile(tokens: int) -> Tile:
    return Tile(1, 32) if tokens == 1 else Tile(8, 4)


def joins(f: SimpleNamespace, merge: list[Template]) -> bool:
    """Whether merge and projection are one launch, of a program for each head: these must be many, and tokens few.

    On an H200, 2026-11-21, 128 heads, e4m3 weights, in a graph with cold caches and weights: 1 × 4K 24.4 → 24.2 µs,
    1 × 16K 35.4 → 34.6, 8 × 4K 52.1 → 51.1; but 16 × 4K 67.4 → 69.7, 1 × 4K with 16-bit weights 30.0 → 30.7. Several
    tokens of a request were not run there.
    """
    tokens, heads, columns = f.out.shape
    if f.w_uv_scale is None or columns != COLUMNS.value or not merge:
        return False
    return f.max_q_len == 1 and tokens <= _MOST_TOKENS and heads >= _LEAST_HEADS


def last(f: SimpleNamespace, p: portable.Parts, decode: mla_decode.Config, merge: list[Template]) -> list[Template]:
    if not joins(f, merge):
        return portable.merged_then_projected(f, p, decode, merge)
    (tokens, heads, _), t = f.out.shape, tile(f.q.shape[0])
    arguments = given(
        BYTES, CU="cu_seqlens_q", LATENTS="LATENTS", PART=PART, W="w_uv", W_SCALE="w_uv_scale", OUT="out",
        KV_T="kv_scale_t",
    ) | {
        "kv_scale": f.kv_scale, "T": tokens, "B": f.cache_lens.shape[0],
        "num_programs": decode.programs, "max_segments": decode.segments, **strides(p.last.x, stride_l="th"),
        **strides(f.w_uv, stride_w="hn"), **strides(f.w_uv_scale, stride_s="hn"), **strides(f.out, stride_o="th"),
        "BLOCK_M": t.tokens, "PIECES": t.pieces, "c": decode.cut,
    }  # fmt: skip
    grid = (heads, -(-tokens // t.tokens))
    return [Template(merge_project_kernel, grid, arguments, num_warps=8, launch_pdl=True)]
