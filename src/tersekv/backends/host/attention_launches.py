"""Attention in two launches: a split pass over equal CTA ranges of all key tiles, and the combine of its splits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from ...formats import E4M3_MAX, E5M2_MAX
from . import launch
from .bind import BYTES, WORKSPACE, HostAction, KernelLaunch, LaunchSequence, Workspace, stride_args, tensor_args

# Batch invariance: a request is split by its own length alone (docs/serving.md).
SPLIT_KEYS = 512  # least keys of a split
MAX_SPLITS = 128  # of a work tile, as in `triton/parts/tile_scheduler`
UNBOUNDED_PAGES = 1 << 24  # pages of a request, where a kernel is chosen for any length
_OUT_MAX = {torch.float8_e4m3fn: E4M3_MAX, torch.float8_e5m2: E5M2_MAX}
_OUT_KIND = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def has_no_work(f: SimpleNamespace) -> bool:
    """Returns whether there is no query, no request or no key: lists of keys without entries."""
    lists = getattr(f, "indices", None)
    return 0 in f.out.shape or f.seq_lens.shape[0] == 0 or (lists is not None and lists.shape[-1] == 0)


def page_table_lengths_and_softmax_scale_args(f: SimpleNamespace) -> dict[str, Any]:
    """Returns the arguments of a split pass other than queries and caches."""
    tensors = tensor_args(
        PAGE_TABLE="page_table", SEQ_LENS="seq_lens", CU_SEQLENS_Q="cu_seqlens_q", SOFTMAX_SCALE="softmax_scale_t"
    )
    sizes = {"B": f.seq_lens.shape[0], "T": f.out.shape[0], "softmax_scale": f.softmax_scale}
    return tensors | sizes | {"stride_table_b": f.page_table.stride[0]}


def query_offset_args(f: SimpleNamespace) -> dict[str, Any]:
    """Returns CU_SEQLENS_Q of a large-M kernel: the tensor, or the number of rows that every request has."""
    return {"CU_SEQLENS_Q": f.max_q_len} if f.cu_seqlens_q is None else tensor_args(CU_SEQLENS_Q="cu_seqlens_q")


def output_and_workspace_args(f: SimpleNamespace, fp8_as_bytes: bool = False) -> dict[str, Any]:
    """Returns the outputs and the workspace as arguments of either launch.

    fp8_as_bytes: kernels write fp8 by bit arithmetic
    """
    tensors = tensor_args(LSE="lse", SPLIT_WORKSPACE=WORKSPACE, OUT_SCALE="out_scale_t") | tensor_args(
        BYTES if fp8_as_bytes else "", OUT="out"
    )
    return (
        tensors
        | {"out_scale": f.out_scale}
        | stride_args(f.out, stride_out_="th")
        | stride_args(f.lse, stride_lse_="th")
    )


def output_lse_softmax_scale_and_varlen_constants(f: SimpleNamespace) -> dict[str, Any]:
    """Returns the constexpr arguments shared by all these attention kernels."""
    return output_lse_and_softmax_scale_constants(f) | {
        # Ragged rows are read from cu_seqlens_q; a bound that changes with the batch must not recompile.
        "MAX_SEQLEN_Q": 0 if f.cu_seqlens_q is not None else f.max_q_len,
        "VARLEN_Q": f.cu_seqlens_q is not None,
    }


def output_lse_and_softmax_scale_constants(f: SimpleNamespace) -> dict[str, Any]:
    """Returns the constexpr arguments of the output, of the LSE and of the softmax scale."""
    return {
        "HAS_LSE": f.lse is not None,
        "HAS_SOFTMAX_SCALE": f.softmax_scale_t is not None,
        "HAS_OUT_SCALE": f.out_scale_t is not None,
        "OUT_MAX": _OUT_MAX.get(f.out.dtype, 0.0),
        "OUT_KIND": "float" if launch.has_exact_fp8_cast(f) else _OUT_KIND.get(f.out.dtype, "float"),
    }


def facts_for_kernel_choice(f: SimpleNamespace, seqlen_q_if_batch_invariant: int = 1) -> SimpleNamespace:
    """Returns the facts by which kernels are chosen; batch invariant calls get none that depend on other requests.

    seqlen_q_if_batch_invariant: query tokens of a request to choose the kernel for in that case
    """
    if not f.batch_invariant:
        return f
    table = f.page_table._replace(shape=(1, UNBOUNDED_PAGES))
    return SimpleNamespace(**vars(f) | {"max_q_len": seqlen_q_if_batch_invariant, "page_table": table})


def min_split_blocks_if_batch_invariant(f: SimpleNamespace, block_n: int) -> int:
    """Returns SPLIT_BLOCKS of `triton/parts/tile_scheduler`: least tiles of a split for batch invariant calls; else
    0."""
    return max(1, SPLIT_KEYS // block_n) if f.batch_invariant else 0


def split_and_combine_launches(
    f: SimpleNamespace, split: KernelLaunch, combine_kernel: Any, combine_args: dict[str, Any], page_size: int
) -> LaunchSequence | HostAction:
    """Returns the split pass, with workspace for every possible split, and the combine of all splits.

    combine_args: of the combine kernel; page_size: slots of a page
    """
    cfg = combine_args["cfg"]
    tiles = -(-f.page_table.shape[1] * page_size // cfg.BLOCK_N)
    max_splits = max(1, min(MAX_SPLITS, -(-tiles // cfg.SPLIT_BLOCKS)))
    work_tiles = f.out.shape[0] * cfg.GROUP // cfg.BLOCK_M + f.seq_lens.shape[0]
    combine_args = (
        tensor_args(SEQ_LENS="seq_lens", CU_SEQLENS_Q="cu_seqlens_q")
        | combine_args
        | {"B": f.seq_lens.shape[0], "max_splits": max_splits}
    )
    split = split.with_args(max_splits=max_splits)
    combine = (
        KernelLaunch(combine_kernel, (work_tiles * cfg.HEADS, cfg.PARTIAL_ROWS), combine_args, num_warps=4)
        if max_splits > 1
        else None
    )
    return attention_launches(
        f, split, combine, work_tiles * max_splits * cfg.HEADS * cfg.PARTIAL_ROWS * cfg.PARTIAL_COLUMNS
    )


def write_empty_outputs(call: Any) -> None:
    """Store 0 to the outputs and −inf to the LSEs and largest scores."""
    call.out.zero_()
    if getattr(call, "lse", None) is not None:
        call.lse.fill_(float("-inf"))
    if getattr(call, "max_logits", None) is not None:
        call.max_logits.fill_(float("-inf"))


def attention_launches(
    f: SimpleNamespace, split: KernelLaunch, combine: KernelLaunch | None, workspace_floats: int
) -> LaunchSequence | HostAction:
    """Returns the launches of an attention.

    combine:          None where the split pass writes all outputs
    workspace_floats: fp32 numbers for the partial states of splits and their metadata
    """
    if has_no_work(f):
        return HostAction(write_empty_outputs)
    return LaunchSequence(split, *([] if combine is None else [combine]), workspace=Workspace(workspace_floats))
