"""Launches and memory of `listed_blocks`, from facts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from ...host import launch
from ...host.attention_launches import query_offset_args
from ...host.bind import KernelLaunch, TensorArg, tensor_args
from ...host.key_lists import key_list_config
from .listed_blocks import ListedBlocksConfig, list_blocks_of_m_blocks_kernel

BLOCKS, ENDS, COUNTS, NUMBERS = "listed_blocks", "listed_ends", "listed_counts", "num_listed_blocks"
_MIN_BLOCK = 16  # keys, of a product
_MIN_ROWS = 64  # of a request, for a product
_MAX_COMPARISONS = 1 << 16  # of a token: blocks of a request × entries of a list; measured up to 1 << 12
_MAX_BYTES = 1 << 28  # of what is stored
MAX_CACHED_BYTES = 1 << 26  # above it, memory is allocated in each call
_COMPARED = 1 << 14  # by a program at a time


def has_shared_blocks(f: SimpleNamespace) -> bool:
    """Returns whether to attend to the union of the lists of neighbouring rows; else each row to its own blocks.

    Not where blocks are no multiple of 16 keys, where a request has few rows, or where finding the union takes much
    memory or time.
    """
    group, entries = f.q.shape[1] // max(f.k_cache.shape[2], 1), f.indices.shape[-1]
    tokens = padded_tokens(f, _MIN_ROWS)
    programs = (f.q.shape[0] * group // _MIN_ROWS + f.seq_lens.shape[0]) * f.k_cache.shape[2]
    return (
        f.block_size % _MIN_BLOCK == 0
        and f.max_q_len * group >= _MIN_ROWS
        and 0 < entries < 1 << 15  # counted in 16 bits
        and _num_blocks(f) * entries <= _MAX_COMPARISONS
        and programs * _max_listed_blocks(f, tokens) * (2 * tokens + 8) <= _MAX_BYTES
    )


def padded_tokens(f: SimpleNamespace, block_m: int) -> int:
    """Returns how many tokens an m_block may have rows of, padded to a power of two."""
    group = f.q.shape[1] // max(f.k_cache.shape[2], 1)
    return launch.next_power_of_2((block_m + group - 2) // group + 1 if block_m % group else block_m // group)


def listed_blocks_launch(f: SimpleNamespace, cfg: Any, num_programs: int) -> KernelLaunch:
    """Returns the launch that finds the blocks. cfg: constants of prefill's kernel."""
    tokens, stride, entries = cfg.LISTED_TOKENS, f.indices.stride, 16
    lists = replace(key_list_config(f), VARLEN_Q=False, MAX_SEQLEN_Q=0)  # which are another's
    blocks_of = ListedBlocksConfig(
        lists, cfg.HEADS, cfg.GROUP, cfg.BLOCK_M, cfg.BLOCK_B, tokens,
        BLOCK_IDS=max(16, _COMPARED // (tokens * entries)), ENTRIES=entries,
    )  # fmt: skip
    arguments: dict[str, Any] = tensor_args(INDICES="indices", SEQ_LENS="seq_lens") | query_offset_args(f)
    arguments |= {"INDEX_LENS": None} if f.index_lens is None else tensor_args(INDEX_LENS="index_lens")
    arguments |= listed_blocks_args(f, tokens) | {
        "B": f.seq_lens.shape[0], "num_blocks": _num_blocks(f), "stride_list_t": stride[0],
        "stride_list_h": stride[1] if f.indices.shape[1] > 1 else 0, "stride_list_n": stride[2], "cfg": blocks_of,
    }  # fmt: skip
    return KernelLaunch(list_blocks_of_m_blocks_kernel, (num_programs,), arguments, num_warps=4)


def listed_blocks_args(f: SimpleNamespace, tokens: int) -> dict[str, Any]:
    """Returns the arguments of either kernel that hold the blocks found; None without lists."""
    names = {"LISTED_BLOCKS": BLOCKS, "LISTED_ENDS": ENDS, "LISTED_COUNTS": COUNTS, "NUM_LISTED_BLOCKS": NUMBERS}
    if f.indices is None:
        return dict.fromkeys(names) | {"max_listed_blocks": 0}
    return {name: TensorArg(x) for name, x in names.items()} | {"max_listed_blocks": _max_listed_blocks(f, tokens)}


def listed_blocks_slices(
    f: SimpleNamespace, tokens: int, num_programs: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns the slices of the workspace by name."""
    lists = (num_programs, _max_listed_blocks(f, tokens))
    return {
        BLOCKS: (lists, torch.int32), ENDS: (lists, torch.int32), COUNTS: ((*lists, tokens), torch.int16),
        NUMBERS: ((num_programs, 2), torch.int32),
    }  # fmt: skip


def _num_blocks(f: SimpleNamespace) -> int:
    """Returns a bound on the blocks of a request."""
    return -(-f.page_table.shape[1] * f.k_cache.shape[1] // f.block_size)


def _max_listed_blocks(f: SimpleNamespace, tokens: int) -> int:
    return max(1, min(_num_blocks(f), tokens * f.indices.shape[-1]))
