"""The decode branch of MLA on Hopper in three launches: store and project queries; the split pass; combine fused with
the output projection."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from ..host.bind import BYTES, WORKSPACE, BoundLaunches, KernelLaunch, stride_args, tensor_args
from ..triton.mla_decode_branch import entry as portable
from ..triton.mla_decode_branch.entry import Config
from . import mla_decode
from .sm90.mla_decode.combine import PROJECTED_COLUMNS, combine_quantize_project_kernel

_MAX_FUSED_TOKENS, _MIN_FUSED_HEADS = 8, 128


class CombineProjectTile(NamedTuple):
    num_tokens: int
    splits_per_step: int  # loaded at once


def why_not(f: SimpleNamespace) -> str | None:
    return mla_decode.why_not(portable.facts_of_projections_and_decode(f).decode)


def configure(f: SimpleNamespace) -> Config:
    return portable.configure(f, mla_decode, combine_and_project_launches)


def run(call: Any, config: Config) -> None:
    portable.run(call, config)


def bind(config: Config, at: dict[str, int]) -> BoundLaunches | None:
    return portable.bind(config, at)


def combine_and_project_launches(
    f: SimpleNamespace, facts_of_sub_ops: portable.SubOpFacts, decode_config: mla_decode.Config,
    combine_launches: list[KernelLaunch],
) -> list[KernelLaunch]:  # fmt: skip
    # One launch for both, of a CTA for each head, where these are many, and tokens few. On an H200, 2026-11-21, 128
    # heads, e4m3 weights, in a graph with cold caches and weights: 1 × 4K 24.4 → 24.2 µs, 1 × 16K 35.4 → 34.6, 8 × 4K
    # 52.1 → 51.1; but 16 × 4K 67.4 → 69.7, 1 × 4K with 16-bit weights 30.0 → 30.7. Several tokens of a request were not
    # measured.
    tokens, heads, columns = f.out.shape
    takes_call = (
        f.w_uv_scale is not None
        and columns == PROJECTED_COLUMNS.value
        and facts_of_sub_ops.decode.ckv.shape[2] == mla_decode.MAX_RANK  # the kernel has its four groups of scales
        and bool(combine_launches)
    )
    pays = f.max_q_len == 1 and tokens <= _MAX_FUSED_TOKENS and heads >= _MIN_FUSED_HEADS
    if not (takes_call and pays):
        return portable.combine_then_project_launches(f, facts_of_sub_ops, decode_config, combine_launches)
    tile = CombineProjectTile(1, 32) if f.q.shape[0] == 1 else CombineProjectTile(8, 4)
    arguments = tensor_args(
        BYTES, CU_SEQLENS_Q="cu_seqlens_q", LATENTS="LATENTS", SPLIT_WORKSPACE=WORKSPACE, W="w_uv",
        W_SCALE="w_uv_scale", OUT="out",
        KV_SCALE="kv_scale_t",
    ) | {
        "kv_scale": f.kv_scale, "T": tokens, "B": f.cache_lens.shape[0],
        "num_ctas": decode_config.num_ctas, "max_m_blocks": decode_config.max_m_blocks,
        **stride_args(facts_of_sub_ops.output_projection.x, stride_l="th"),
        **stride_args(f.w_uv, stride_w="hn"), **stride_args(f.w_uv_scale, stride_s="hn"),
        **stride_args(f.out, stride_o="th"),
        "BLOCK_M": tile.num_tokens, "SPLITS_PER_STEP": tile.splits_per_step, "cfg": decode_config.combine_cfg,
    }  # fmt: skip
    grid = (heads, -(-tokens // tile.num_tokens))
    return [KernelLaunch(combine_quantize_project_kernel, grid, arguments, num_warps=8, launch_pdl=True)]
