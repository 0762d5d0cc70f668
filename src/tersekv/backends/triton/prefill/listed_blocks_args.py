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
from .listed_blocks import ListedBlocksConfig, count_listed_blocks_kernel, list_blocks_of_m_blocks_kernel

BLOCKS, ENDS, COUNTS, NUMBERS = "listed_blocks", "listed_ends", "listed_counts", "num_listed_blocks"
_MIN_BLOCK = 16  # keys, of a product
_MIN_ROWS = 64  # of a request, for a product
_MAX_COMPARISONS = 1 << 16  # of a token: blocks of a request × entries of a list; measured up to 1 << 12
_MAX_BYTES = 1 << 28  # of what is stored
MAX_CACHED_BYTES = 1 << 26  # above it, memory is allocated in each call
_COMPARED = 1 << 13  # by a program at a time
_MAX_BINS = 1 << 10
_MAX_ENTRIES = 16  # of a token that are looked at together


def has_shared_blocks(f: SimpleNamespace) -> bool:
    """Returns whether to attend to the union of the lists of neighbouring rows; else each row to its own blocks.

    Not where blocks are no multiple of 16 keys, where a request has few rows, or where finding the union takes much
    memory or time.
    """
    entries = f.indices.shape[-1]
    tokens = padded_tokens(f, _MIN_ROWS)
    programs = (f.q.shape[0] * group_of(f) // _MIN_ROWS + f.seq_lens.shape[0]) * f.k_cache.shape[2]
    return (
        f.block_size % _MIN_BLOCK == 0
        and has_many_rows(f)
        and num_blocks(f) * entries <= _MAX_COMPARISONS
        and programs * max_listed_blocks(f, tokens, 1) * (2 * tokens + 8) <= _MAX_BYTES
    )


def has_many_rows(f: SimpleNamespace) -> bool:
    """Returns whether a request may have the rows of a product, and lists that 16 bits count."""
    return f.max_q_len * group_of(f) >= _MIN_ROWS and 0 < f.indices.shape[-1] < 1 << 15


def padded_tokens(f: SimpleNamespace, block_m: int) -> int:
    """Returns how many tokens an m_block may have rows of, padded to a power of two."""
    group = group_of(f)
    return launch.next_power_of_2((block_m + group - 2) // group + 1 if block_m % group else block_m // group)


def listed_blocks_launches(
    f: SimpleNamespace, cfg: Any, num_programs: int, min_entries: int = 1, **k2q: Any
) -> tuple[KernelLaunch, KernelLaunch]:
    """Returns the launches that find the blocks.

    cfg: constants of prefill's kernel; min_entries: that make a block one of an m_block's; k2q: arguments by name
    """
    tokens, entries = cfg.LISTED_TOKENS, min(_MAX_ENTRIES, max(launch.next_power_of_2(f.indices.shape[-1]), 2))
    lists = replace(key_list_config(f), VARLEN_Q=False, MAX_SEQLEN_Q=0)  # m_blocks find their requests themselves
    blocks_of = ListedBlocksConfig(
        lists, cfg.HEADS, cfg.GROUP, cfg.BLOCK_M, cfg.BLOCK_B, tokens,
        BINS=min(max(launch.next_power_of_2(num_blocks(f)), 64), _MAX_BINS),
        BLOCK_IDS=max(4, _COMPARED // (tokens * entries)), ENTRIES=entries, MIN_ENTRIES=min_entries,
    )  # fmt: skip
    none = dict.fromkeys(
        (
            "SHARED_BLOCKS",
            "K2Q_COUNTS",
            "K2Q_BUCKETS",
            "K2Q_SORTED_IDS",
            "K2Q_NUM_PAIRS",
            "K2Q_FIRST_TOKENS",
            "first_tile",
        )
    ) | {"num_counts": 0}
    stride = f.indices.stride
    lens = {"INDEX_LENS": None} if f.index_lens is None else tensor_args(INDEX_LENS="index_lens")
    arguments: dict[str, Any] = tensor_args(INDICES="indices", SEQ_LENS="seq_lens") | query_offset_args(f) | lens
    arguments |= none | k2q | listed_blocks_args(f, tokens, min_entries) | {
        "B": f.seq_lens.shape[0], "num_blocks": num_blocks(f), "stride_list_t": stride[0],
        "stride_list_h": stride[1] if f.indices.shape[1] > 1 else 0, "stride_list_n": stride[2], "cfg": blocks_of,
    }  # fmt: skip

    def kernel_launch(fn: Any) -> KernelLaunch:
        return KernelLaunch(fn, (num_programs,), {name: arguments[name] for name in fn.arg_names}, num_warps=4)

    return kernel_launch(list_blocks_of_m_blocks_kernel), kernel_launch(count_listed_blocks_kernel)


def listed_blocks_args(f: SimpleNamespace, tokens: int, min_entries: int = 1) -> dict[str, Any]:
    """Returns the arguments of either kernel that hold the blocks found; None without lists."""
    names = {"LISTED_BLOCKS": BLOCKS, "LISTED_ENDS": ENDS, "LISTED_COUNTS": COUNTS, "NUM_LISTED_BLOCKS": NUMBERS}
    if f.indices is None:
        return dict.fromkeys(names) | {"max_listed_blocks": 0}
    return {name: TensorArg(x) for name, x in names.items()} | {
        "max_listed_blocks": max_listed_blocks(f, tokens, min_entries)
    }


def listed_blocks_slices(
    f: SimpleNamespace, tokens: int, num_programs: int, min_entries: int = 1
) -> dict[str, tuple[tuple[int, ...], torch.dtype] | None]:
    """Returns the slices of the workspace by name."""
    lists = (num_programs, max_listed_blocks(f, tokens, min_entries))
    return {
        BLOCKS: (lists, torch.int32), ENDS: (lists, torch.int32), COUNTS: ((*lists, tokens), torch.int16),
        NUMBERS: ((num_programs, 2), torch.int32),
    }  # fmt: skip


def group_of(f: SimpleNamespace) -> int:
    """Returns the query heads of a KV head."""
    return f.q.shape[1] // max(f.k_cache.shape[2], 1)


def num_blocks(f: SimpleNamespace) -> int:
    """Returns a bound on the blocks of a request."""
    return -(-f.page_table.shape[1] * f.k_cache.shape[1] // f.block_size)


def max_listed_blocks(f: SimpleNamespace, tokens: int, min_entries: int) -> int:
    """Returns a bound on the blocks that stand min_entries times in the lists of so many tokens."""
    return max(1, min(num_blocks(f), tokens * f.indices.shape[-1] // min_entries))
