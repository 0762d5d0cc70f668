"""Decode over a cache whose tokens are sharded across the ranks of a process group.

Every rank attends to its own tokens and computes an output and an LSE for all heads; one exchange merges them and
leaves each rank with its own heads. See docs/context_parallel.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..dispatch.checks import INDEX, dtype_name, require, tensor
from ..errors import UnsupportedError
from ..layers import PagedKVLayer, PagedLatentLayer
from ..scalars import as_int
from .append import KVLike
from .attention import max_query_rows
from .decode import decode
from .exchange import Exchange, Parts
from .mla import LatentLike, mla_decode, rotary_part
from .shards import (
    ExchangeCost,
    HeadShard,
    LocalRows,
    TokenSharding,
    exchange_cost,
    local_rows,
    shard_heads,
    shard_seq_lens,
    shard_slot_mapping,
    token_pages,
)

__all__ = [
    "ContextParallel",
    "ExchangeCost",
    "HeadShard",
    "exchange_cost",
    "shard_heads",
    "shard_seq_lens",
    "shard_slot_mapping",
]


class ContextParallel:
    """One rank's view of a group that shares caches. Hold one per group, and call it on every rank.

    group:       process group; None: the default group, or a single rank where none is initialised
    interleave:  consecutive tokens on a rank before the next rank's; the page size shards whole pages
    exchange:    "all_to_all": output and LSE in one message, merged by the receiver;
                 "reduce_scatter": LSE gathered, outputs weighted by their owner and summed on the way
    sharded_q:   True: q holds this rank's heads (tensor parallelism), and is gathered; False: q holds all heads on
                 every rank. Either way the results are this rank's heads, in order of rank
    wire_dtype:  of outputs in an all_to_all: fp32, or fp16 | bf16 for half the bytes; sums travel in fp32
    workspace:   uint8 tensor [workspace_bytes(...)] for the exchange, not used by two calls at a time; None: new
                 buffers at each call

    No call synchronises with the host, and calls may be captured in a CUDA graph. Lengths, positions and windows
    count the tokens of all ranks; page tables are the rank's own. Raises ValueError for arguments that do not fit.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        interleave: int = 1,
        exchange: str = "all_to_all",
        sharded_q: bool = True,
        wire_dtype: torch.dtype = torch.float32,
        workspace: Tensor | None = None,
    ) -> None:
        alone = group is None and not (dist.is_available() and dist.is_initialized())
        self.rank, self.world = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))
        self.deal = TokenSharding(self.rank, self.world, interleave).checked()
        self.interleave = self.deal.interleave
        self.exchange = Exchange(group, self.rank, self.world, exchange, sharded_q, wire_dtype, workspace)

    def decode(
        self,
        q: Tensor,
        cache: KVLike,
        page_table: Tensor,
        seq_lens: Tensor,
        *,
        softmax_scale: float | Tensor | None = None,
        window: int | None = None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
        mask: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        max_q_len: int | None = None,
        out: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        out_scale: float | Tensor = 1.0,
        lse: Tensor | None = None,
        return_lse: bool = False,
        precision: str = "exact",
        backend: str | None = None,
        local_seq_lens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`tersekv.decode` over the caches of all ranks. Arguments that differ from it:

            q:           [T, Hq / world, D], or [T, Hq, D] without `sharded_q`
            cache:       this rank's layer, with every KV head that the Hq heads need
            page_table:  [B, max_pages]  pages of this rank; tokens that it does not own take no room
            seq_lens:    [B]  tokens on all ranks, the new ones included; the same on every rank
            window:      any; the fastest are multiples of interleave * world
            sinks:       for the heads of q; each counts once, whatever the number of ranks
            mask:        None: drafts are causal; a mask raises UnsupportedError unless there is one rank
            out, lse:    [T, share, Dv] bf16 | fp16 | fp32, [T, share]; share: this rank's heads
            backend:     of the attention; the merge is the oracle's for "torch", else the device's own
            local_seq_lens:  `local_seq_lens(seq_lens)`, made once for all layers of a step; None: made here. For
                         one query row a request without a window

        Returns out, or (out, lse) with `return_lse`, for this rank's heads.
        """
        c = PagedKVLayer.of(cache)
        local = partial(
            decode, softmax_scale=softmax_scale, softcap=softcap, out_scale=out_scale, precision=precision,
            backend=backend,
        )  # fmt: skip
        tensor("q", q, "T Hq D")
        plain = self._plain(local_seq_lens, len(q), page_table, seq_lens, cu_seqlens_q, window)
        if self.world == 1:
            return local(
                q, c, page_table, plain.seq_lens if plain else seq_lens, window=window, sinks=sinks, mask=mask,
                cu_seqlens_q=cu_seqlens_q, max_q_len=max_q_len, out=out, out_dtype=out_dtype, lse=lse,
                return_lse=return_lse,
            )  # fmt: skip
        if mask is not None:
            raise UnsupportedError("mask: want None over several ranks, whose drafts are causal, got a mask")
        if window is not None:
            window = as_int("window", window)
            require(window > 0, "window", "a positive number of keys (own included), or None", window)
        limit = self._check_requests(q, page_table, seq_lens, cu_seqlens_q, max_q_len)
        require(q.shape[2] == c.head_dim, "q", f"head_dim {c.head_dim} as in cache", q.shape[2])

        def attend(parts: Parts, out: Tensor, lse: Tensor) -> None:
            by_token = window is not None and window % (self.deal.interleave * self.world) != 0
            layer, step = token_pages(c) if by_token else (c, 1)
            x = plain or local_rows(
                self.deal, len(q), page_table, seq_lens, cu_seqlens_q, limit,
                window=window, page_size=c.page_size, pages_per_slot=step, masks=True,
            )  # fmt: skip
            local(
                parts()[0], layer, x.page_table, x.seq_lens, window=x.window, mask=x.mask,
                cu_seqlens_q=x.cu_seqlens_q, max_q_len=x.max_q_len, out=out, lse=lse,
            )  # fmt: skip

        return self.exchange.run(
            [q], c.head_dim_v, attend, sinks, out, out_dtype, lse, return_lse, backend, plain is None
        )

    def mla_decode(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        cache: LatentLike,
        page_table: Tensor,
        seq_lens: Tensor,
        *,
        softmax_scale: float | Tensor,
        cu_seqlens_q: Tensor | None = None,
        max_q_len: int | None = None,
        out: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        out_scale: float | Tensor = 1.0,
        lse: Tensor | None = None,
        return_lse: bool = False,
        precision: str = "exact",
        backend: str | None = None,
        local_seq_lens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`tersekv.mla_decode` over the caches of all ranks. Arguments that differ from it:

            q:           [T, H / world, L + R] or (q_nope, q_pe), or all H heads without `sharded_q`
            cache:       this rank's layer
            page_table:  [B, max_pages]  pages of this rank
            seq_lens:    [B]  tokens on all ranks, the new ones included; the same on every rank
            out, lse:    [T, share, L] bf16 | fp16 | fp32, [T, share]; share: this rank's heads
            backend:     of the attention; the merge is the oracle's for "torch", else the device's own
            local_seq_lens:  `local_seq_lens(seq_lens)`, made once for all layers of a step; None: made here. For
                         one query row a request

        Each draft row reads the rank's tokens by itself. Returns out, or (out, lse) with `return_lse`, for this
        rank's heads.
        """
        c = PagedLatentLayer.of(cache)
        local = partial(
            mla_decode, softmax_scale=softmax_scale, out_scale=out_scale, precision=precision, backend=backend
        )
        given = _query_parts(q)
        plain = self._plain(local_seq_lens, len(given[0]), page_table, seq_lens, cu_seqlens_q, None)
        if self.world == 1:
            return local(
                q, c, page_table, plain.seq_lens if plain else seq_lens, cu_seqlens_q=cu_seqlens_q,
                max_q_len=max_q_len, out=out, out_dtype=out_dtype, lse=lse, return_lse=return_lse,
            )  # fmt: skip
        rows, limit = len(given[0]), self._check_requests(given[0], page_table, seq_lens, cu_seqlens_q, max_q_len)
        _check_widths(given, isinstance(q, Tensor), c)

        def attend(parts: Parts, out: Tensor, lse: Tensor) -> None:
            x = plain or local_rows(self.deal, rows, page_table, seq_lens, cu_seqlens_q, limit)
            all_q = parts()
            local(all_q[0] if len(all_q) == 1 else (all_q[0], all_q[1]), c, x.page_table, x.seq_lens, out=out, lse=lse)

        dv = c.kv_lora_rank
        return self.exchange.run(given, dv, attend, None, out, out_dtype, lse, return_lse, backend, plain is None)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Calls inside skip the collectives; their results are meaningless.

        The first step of a process compiles kernels, for seconds on each rank. In a rehearsal no rank waits for another
        meanwhile: do it once, synchronise the device, meet at a barrier, and only then run or capture steps.
        """
        self.exchange.silent = True
        try:
            yield
        finally:
            self.exchange.silent = False

    def local_seq_lens(self, seq_lens: Tensor) -> Tensor:
        """Returns this rank's tokens of each request: `shard_seq_lens` for this group."""
        return shard_seq_lens(seq_lens, self.rank, self.world, self.interleave)

    def workspace_bytes(
        self, max_rows: int, num_heads: int, head_dim: int, head_dim_v: int, q_dtype: torch.dtype = torch.bfloat16
    ) -> int:
        """Returns the bytes of workspace that calls with up to `max_rows` query rows need.

        num_heads: heads of q as passed; MLA: head_dim L + R, head_dim_v L
        """
        return self.exchange.workspace_bytes(max_rows, num_heads, head_dim, head_dim_v, q_dtype)

    def _plain(
        self, lens: Tensor | None, rows: int, page_table: Tensor, seq_lens: Tensor, cu: Tensor | None,
        window: int | None,
    ) -> LocalRows | None:  # fmt: skip
        """Returns this rank's part of a decode from the caller's local lengths; None without them."""
        if lens is None:
            return None
        _index_tensor("local_seq_lens", lens, "B")
        tensor("seq_lens", seq_lens, "B")
        require(len(lens) == len(seq_lens), "local_seq_lens", f"[B={len(seq_lens)}]", list(lens.shape))
        if rows != len(seq_lens) or cu is not None or window is not None:
            raise UnsupportedError("local_seq_lens: want one query row a request and no window, or None")
        return LocalRows(page_table, lens, None, 1, None, None, False)

    def _check_requests(
        self, q: Tensor, page_table: Tensor, seq_lens: Tensor, cu: Tensor | None, max_q_len: int | None
    ) -> int:
        """Raise unless the index tensors fit together. Returns the bound on the rows of a request."""
        _index_tensor("page_table", page_table, "B max_pages")
        _index_tensor("seq_lens", seq_lens, "B")
        t, b = len(q), len(seq_lens)
        require(len(page_table) == b, "page_table", f"[B={b}, max_pages]", list(page_table.shape))
        if b == 0 or cu is None:
            require(t % b == 0 if b else t == 0, "q", f"T a multiple of B={b} (or cu_seqlens_q)", f"T={t}")
        if cu is not None:
            _index_tensor("cu_seqlens_q", cu, "B+1")
            require(len(cu) == b + 1, "cu_seqlens_q", f"[B+1={b + 1}]", list(cu.shape))
        return max_query_rows(t, seq_lens, cu, max_q_len)


def _index_tensor(name: str, x: Tensor, pattern: str) -> None:
    """Raise unless x is an index tensor with one dimension per word of the pattern."""
    tensor(name, x, pattern)
    require(x.dtype in INDEX, name, " | ".join(map(dtype_name, INDEX)), dtype_name(x.dtype))


def _query_parts(q: Tensor | tuple[Tensor, Tensor | None]) -> list[Tensor]:
    """Returns the parts of a latent query that have columns. Raises unless they have one T, H and dtype."""
    if isinstance(q, Tensor):
        tensor("q", q, "T H D")
        return [q]
    if not isinstance(q, (tuple, list)) or len(q) != 2:
        raise TypeError(f"q: want Tensor or (q_nope, q_pe), got {type(q).__name__}")
    q_nope, q_pe = q[0], rotary_part(q[1])
    tensor("q_nope", q_nope, "T H L")
    if q_pe is None:
        return [q_nope]
    tensor("q_pe", q_pe, "T H R")
    (t, heads), kind = q_nope.shape[:2], q_nope.dtype
    got = f"{list(q_pe.shape)} {dtype_name(q_pe.dtype)}"
    require((t, heads, kind) == (*q_pe.shape[:2], q_pe.dtype), "q_pe", f"[{t}, {heads}, R] {dtype_name(kind)}", got)
    return [q_nope, q_pe]


def _check_widths(parts: list[Tensor], joined: bool, c: PagedLatentLayer) -> None:
    """Raise unless the parts of a latent query are as wide as those of the cache's rows."""
    rank, rope = c.kv_lora_rank, c.qk_rope_head_dim
    width = parts[0].shape[2]
    if joined:
        require(width == rank + rope, "q", f"[T, H, {rank} + {rope}]", f"rows of {width}")
        return
    require(width == rank, "q_nope", f"[T, H, {rank}]", f"rows of {width}")
    require(len(parts) == 2 or rope == 0, "q_pe", "a tensor for a cache with a rotary part", None)
    require(len(parts) == 1 or parts[1].shape[2] == rope, "q_pe", f"[T, H, {rope}]", f"rows of {parts[-1].shape[2]}")
