"""Launches and memory of `k2q`, from facts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from ....formats import pair_of
from ...host import launch
from ...host.bind import KernelLaunch, LaunchSequence, TensorArg, Workspace
from ..parts.kv_cache_args import needs_two_term_query
from .k2q import COUNTERS, K2QConfig, fill_k2q_kernel, k2q_attention_kernel, schedule_k2q_kernel
from .listed_blocks_args import (
    MAX_CACHED_BYTES,
    group_of,
    has_many_rows,
    listed_blocks_args,
    listed_blocks_launches,
    listed_blocks_slices,
    num_blocks,
)

_ROWS = 64  # of a product
_WARPS = 4
_CTAS_PER_SM = 2
_PAIRS = 512  # of a work tile: fewer would load and dequantize a block for too few rows
_BLOCK = 1024  # numbers that a program of the small kernels handles
_SHARED = 0.4  # fraction of an m_block's tokens from which on it attends to a block itself
_MAX_BYTES = 1 << 29  # of partial results; more rows are attended to in chunks (half of it: 12% slower)
_MIN_TOKENS = 256  # of a chunk
_MIN_PAIRS = 2  # of a block on average
_MAX_BUCKETS = 1 << 24
_OF_LISTS = ("SHARED_BLOCKS", "K2Q_COUNTS", "K2Q_BUCKETS", "K2Q_SORTED_IDS", "K2Q_NUM_PAIRS", "K2Q_FIRST_TOKENS")
_OF_ATTENTION = ("K2Q_OFFSETS", "K2Q_WORK_TILES", "K2Q_TOKENS", "K2Q_STATES", "K2Q_ACCS")
_OF_PREFILL = ("K2Q_NUM_PAIRS", "K2Q_SORTED_IDS", "K2Q_STATES", "K2Q_ACCS")


def keys_of_partial(f: SimpleNamespace) -> int:
    """Returns the keys of a partial result; 0: rows attend to the union of their lists alone.

    So where blocks are short, a partial result being as long as a row; where it would take much memory; where few rows
    list the same block; where an m_block has so few tokens (groups from 18 heads on) that it attends to all their
    blocks; and where shared memory holds no tile of K and V.
    """
    group, entries = group_of(f), f.indices.shape[-1]
    keys = next((n for n in (128, 64) if f.block_size % n == 0 and _fits_shared_memory(f, n)), 0)
    if not keys or not has_many_rows(f) or _min_entries(_ROWS, group) == 1 or _num_buckets(f) >= _MAX_BUCKETS:
        return 0
    pair_bytes = f.block_size // keys * launch.next_power_of_2(group) * _row_bytes(f)
    token_bytes = f.k_cache.shape[2] * (entries * pair_bytes + num_blocks(f) * group // _ROWS)
    tokens = min(f.q.shape[0], _MAX_BYTES // token_bytes)
    pairs = tokens * entries / max(1, num_blocks(f) * f.seq_lens.shape[0])
    return keys if tokens >= min(_MIN_TOKENS, f.q.shape[0]) and pairs >= _MIN_PAIRS else 0


def _fits_shared_memory(f: SimpleNamespace, keys: int) -> bool:
    """Returns whether a tile of K, of V and of the query fit the shared memory of one program."""
    d, dv = (launch.next_power_of_2(n) for n in (f.q.shape[2], f.out.shape[2]))
    queries = _ROWS * d * 2 * (1 + needs_two_term_query(f, pair_of(f)[0]))
    return max(d, dv) <= 256 and keys * (d + dv) * 2 + queries + 8192 <= launch.shared_memory_bytes_per_cta(f)


def k2q_launches(f: SimpleNamespace, cfg: Any, num_tiles: int, prefill: KernelLaunch) -> LaunchSequence:
    """Returns the launches of a call over lists: of all m_blocks, in chunks that share their memory.

    cfg: constants of prefill's kernel; prefill: its launch over all m_blocks
    """
    pair_bytes = cfg.K2Q_PARTIALS * cfg.K2Q_GROUP_PAD * _row_bytes(f)
    tile_bytes = cfg.HEADS * (cfg.LISTED_TOKENS * cfg.K2Q_LENGTH * pair_bytes + num_blocks(f))
    tiles = min(num_tiles, max(1, _MAX_BYTES // tile_bytes))
    k2q = K2QConfig(cfg.K2Q_LENGTH, cfg.K2Q_GROUP_PAD, cfg.LISTED_TOKENS, cfg.K2Q_PARTIALS, _PAIRS, _BLOCK)
    programs, min_entries = tiles * cfg.HEADS, _min_entries(cfg.BLOCK_M, cfg.GROUP)
    slices = listed_blocks_slices(f, cfg.LISTED_TOKENS, programs, min_entries) | _slices(f, cfg, programs)
    launches: list[KernelLaunch] = []
    for first_tile in range(0, num_tiles, tiles):
        launches += _launches_of_chunk(f, cfg, k2q, min(tiles, num_tiles - first_tile), first_tile, prefill)
    return LaunchSequence(*launches, workspace=Workspace(0, slices, MAX_CACHED_BYTES))


def _launches_of_chunk(
    f: SimpleNamespace, cfg: Any, k2q: K2QConfig, tiles: int, first_tile: int, prefill: KernelLaunch
) -> tuple[KernelLaunch, ...]:
    buckets, programs, keys = _num_buckets(f), tiles * cfg.HEADS, f.block_size // cfg.K2Q_PARTIALS
    min_entries = _min_entries(cfg.BLOCK_M, cfg.GROUP)
    max_pairs = programs * k2q.TOKENS * k2q.LENGTH
    slices = {name: TensorArg(_slice_name(name)) for name in {*_OF_LISTS, *_OF_ATTENTION}}
    chunk = {"num_blocks": num_blocks(f), "num_buckets": buckets, "max_pairs": max_pairs}
    available = prefill.arguments | slices | chunk
    of_attention = replace(
        cfg, BLOCK_M=_ROWS, BLOCK_N=keys, ONE_PAGE_PER_BLOCK=cfg.PAGE % keys == 0,
        SCALE_COPIES=max(1, 32 * _WARPS // keys),
    )  # fmt: skip

    # Without a mask a product before the maximum's subtraction would fuse with it, with one not. Scores of values with
    # stored scales end in a sum.
    def kernel_launch(fn: Any, programs: int, **constants: Any) -> KernelLaunch:
        arguments = {name: available[name] for name in fn.arg_names if name not in constants} | constants
        return KernelLaunch(fn, (programs,), arguments, num_warps=_WARPS, enable_fp_fusion=cfg.TOKEN_SCALES)

    of_lists = {name: slices[name] for name in _OF_LISTS} | {"first_tile": first_tile, "num_counts": buckets + COUNTERS}
    of_prefill = {name: slices[name] for name in _OF_PREFILL} | {"first_tile": first_tile, "max_pairs": max_pairs}
    of_prefill |= listed_blocks_args(f, cfg.LISTED_TOKENS, min_entries)
    return (
        *listed_blocks_launches(f, cfg, programs, min_entries, **of_lists),
        kernel_launch(schedule_k2q_kernel, -(-buckets // _BLOCK), cfg=k2q),
        kernel_launch(fill_k2q_kernel, -(-max_pairs // _BLOCK), cfg=k2q),
        kernel_launch(k2q_attention_kernel, _CTAS_PER_SM * launch.num_sms(f), cfg=of_attention, k2q=k2q),
        prefill.with_args(**of_prefill).with_grid(programs),
    )


def _slices(f: SimpleNamespace, cfg: Any, programs: int) -> dict[str, tuple[tuple[int, ...], torch.dtype] | None]:
    """Returns the slices of the workspace by name, for so many programs of an m_block."""
    buckets, pairs = _num_buckets(f), programs * cfg.LISTED_TOKENS * cfg.K2Q_LENGTH
    rows, work_tiles = pairs * cfg.K2Q_PARTIALS * cfg.K2Q_GROUP_PAD, pairs // _PAIRS + min(buckets, pairs)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "SHARED_BLOCKS": ((programs, num_blocks(f)), torch.int8), "K2Q_COUNTS": ((buckets + COUNTERS,), torch.int32),
        "K2Q_BUCKETS": ((pairs,), torch.int32), "K2Q_SORTED_IDS": ((pairs,), torch.int32),
        "K2Q_NUM_PAIRS": ((programs, cfg.LISTED_TOKENS), torch.int32), "K2Q_FIRST_TOKENS": ((programs,), torch.int32),
        "K2Q_OFFSETS": ((buckets,), torch.int32), "K2Q_WORK_TILES": ((cfg.K2Q_PARTIALS * work_tiles, 4), torch.int32),
        "K2Q_TOKENS": ((pairs,), torch.int32), "K2Q_STATES": ((rows, 2), torch.float32),
        "K2Q_ACCS": ((rows, cfg.PACK * cfg.BLOCK_DV), torch.float16),
    }  # fmt: skip
    return {_slice_name(name): x for name, x in shapes.items()}


def _slice_name(argument: str) -> str:
    return argument.lower()


def _min_entries(block_m: int, group: int) -> int:
    """Returns how often a block stands in the lists of an m_block's tokens for the m_block to attend to it."""
    return max(1, round(_SHARED * block_m / group))


def _row_bytes(f: SimpleNamespace) -> int:
    """Returns the bytes of a row's partial result."""
    return 2 * launch.next_power_of_2(f.out.shape[2]) + 8


def _num_buckets(f: SimpleNamespace) -> int:
    """Returns the blocks of all requests and KV heads."""
    return f.k_cache.shape[2] * f.seq_lens.shape[0] * num_blocks(f)
