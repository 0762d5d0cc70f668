"""Sharding of tokens and heads over the ranks of a group, and the cost of an exchange. Index arithmetic only.

Tokens are sharded in blocks: positions [j * interleave, (j + 1) * interleave) of a request lie on rank j % world, and a
rank keeps its tokens in order, without gaps. interleave = page_size shards whole pages, interleave = 1 single tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch.checks import INDEX, dtype_name, require
from ..errors import UnsupportedError
from ..layers import PagedKVLayer
from ..scalars import as_int, as_non_negative_int, as_positive_int

EXCHANGES = ("all_to_all", "reduce_scatter")
LSE_BYTES = 4
ALIGNMENT = 16  # bytes of a vectorised store


class TokenSharding(NamedTuple):
    """The tokens of rank `rank` among `world`."""

    rank: int
    world: int
    interleave: int

    def checked(self) -> TokenSharding:
        """Returns the sharding in Python ints. Raises ValueError or TypeError for invalid numbers."""
        world, interleave = as_positive_int("world", self.world), as_positive_int("interleave", self.interleave)
        rank = as_int("rank", self.rank)
        require(0 <= rank < world, "rank", f"a rank in [0, {world})", rank)
        return TokenSharding(rank, world, interleave)

    def owned(self, n: Tensor) -> Tensor:
        """Returns how many of positions [0, n) this rank owns; 0 for n <= 0. n: int64."""
        # Few operations, since each is a launch: counted from this rank's first token, it owns the first `interleave`
        # positions of every round. Below its first token n // size is −1, and the clamped rest cancels it.
        n = n.clamp(min=0) - self.rank * self.interleave
        size = self.interleave * self.world
        rest = (n % size).clamp_(max=self.interleave)
        return rest.add_(n // size, alpha=self.interleave)

    def most_owned(self, window: int) -> int:
        """Returns the most tokens that this rank owns among `window` consecutive ones."""
        rounds, rest = divmod(window, self.interleave * self.world)
        return rounds * self.interleave + min(rest, self.interleave)


def shard_seq_lens(seq_lens: Tensor, rank: int, world: int, interleave: int = 1) -> Tensor:
    """Returns the tokens of each request on one rank: int32 like `seq_lens`, which counts them on all ranks."""
    return TokenSharding(rank, world, interleave).checked().owned(_indices("seq_lens", seq_lens)).to(torch.int32)


def shard_slot_mapping(slot_mapping: Tensor, rank: int, world: int, page_size: int, interleave: int = 1) -> Tensor:
    """Returns slots on one rank of tokens with slots in a pool over all ranks; −1 for tokens of other ranks.

        slot_mapping:  [T]  from a pool whose pages hold page_size * world tokens; negative: skipped on every rank
        page_size:     slots of a page of the rank's cache, a multiple of `interleave`

    Page p of the pool is page p of every rank's cache, so that all ranks share one page table. Returns [T] int64, for
    `append`, which skips a negative slot.
    """
    rank, world, interleave = TokenSharding(rank, world, interleave).checked()
    page_size = as_positive_int("page_size", page_size)
    require(page_size % interleave == 0, "page_size", f"a multiple of {interleave}", page_size)
    slot = _indices("slot_mapping", slot_mapping)
    page, offset = slot // (page_size * world), slot % (page_size * world)
    block = offset // interleave
    local = page * page_size + block // world * interleave + offset % interleave
    return torch.where((slot >= 0) & (block % world == rank), local, -1)


def _indices(name: str, x: Tensor) -> Tensor:
    """Returns an index tensor as int64."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: want Tensor, got {type(x).__name__}")
    require(x.dtype in INDEX, name, " | ".join(map(dtype_name, INDEX)), dtype_name(x.dtype))
    return x.to(torch.int64)


class HeadShard(NamedTuple):
    """Heads of one rank under tensor parallelism.

    q, kv:     the rank's heads: x[:, shard.q]
    replicas:  ranks with the same KV heads, over which a cache can be sharded: consecutive ranks r with equal
               r // replicas
    """

    q: slice
    kv: slice
    replicas: int


def shard_heads(num_q_heads: int, num_kv_heads: int, rank: int, world: int) -> HeadShard:
    """Returns the heads of `rank` if `world` ranks share an attention layer. MLA has one KV head: its latent row.

    Raises ValueError where heads or ranks cannot be divided evenly.
    """
    rank, world, _ = TokenSharding(rank, world, 1).checked()
    num_q_heads, num_kv_heads = (
        as_positive_int("num_q_heads", num_q_heads),
        as_positive_int("num_kv_heads", num_kv_heads),
    )
    require(num_q_heads % world == 0, "num_q_heads", f"a multiple of world={world}", num_q_heads)
    require(num_q_heads % num_kv_heads == 0, "num_q_heads", f"a multiple of {num_kv_heads}", num_q_heads)
    small, large = sorted((num_kv_heads, world))
    require(large % small == 0, "num_kv_heads", f"a divisor or a multiple of {world}", num_kv_heads)
    replicas = max(world // num_kv_heads, 1)
    q, kv = num_q_heads // world, max(num_kv_heads // world, 1)
    first = rank // replicas * kv
    return HeadShard(slice(rank * q, (rank + 1) * q), slice(first, first + kv), replicas)


class LocalRows(NamedTuple):
    """A rank's part of a decode, as arguments of the operation over one cache."""

    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None
    max_q_len: int
    mask: Tensor | None
    window: int | None
    by_token: bool  # the table holds tokens: see `token_pages`


def local_rows(
    deal: TokenSharding, rows: int, page_table: Tensor, seq_lens: Tensor, cu: Tensor | None, max_q_len: int, *,
    window: int | None = None, page_size: int = 1, pages_per_slot: int = 1, masks: bool = False,
) -> LocalRows:  # fmt: skip
    """Returns this rank's part of a decode whose query positions count the tokens of all ranks.

    A row sees a prefix of this rank's tokens, and drafts of one request see prefixes of different lengths. One row per
    request: seq_lens gives it. Several, if the operation takes masks: a mask gives it, and keys are read once. Else
    every row becomes a request of its own. A window of w tokens is the same number of local tokens for every row if w
    is a multiple of interleave * world; else each row gets a table of its tokens, one per page.
    """
    n = seq_lens.to(torch.int64)
    if rows == len(n) and cu is None and window is None:
        return LocalRows(page_table, deal.owned(n), None, 1, None, None, False)
    request, position, drafts = _query_row_positions(rows, n, cu)
    until = deal.owned(position + 1)
    if masks and window is None:
        first = deal.owned(n) - drafts  # the local key of bit 0
        bits = _prefix_bits(until - first[request], max_q_len)
        return LocalRows(page_table, deal.owned(n), cu, max_q_len, bits, None, False)
    table = page_table.to(torch.int32)
    if rows != len(n) or cu is not None:
        table = table.index_select(0, request)
    if window is None or window % (deal.interleave * deal.world) == 0:
        local = None if window is None else window // deal.world
        return LocalRows(table, until, None, 1, None, local, False)
    since = deal.owned(position + 1 - min(window, 2**62))  # rows may stand before the first token
    # At least one column: a table without columns has no entry to point at.
    width = max(min(deal.most_owned(window), table.shape[1] * page_size), 1)
    token = since[:, None] + torch.arange(width, device=table.device)
    page = table.to(torch.int64).gather(1, (token // page_size).clamp(max=max(table.shape[1] - 1, 0)))
    tokens = torch.where(token < until[:, None], page * pages_per_slot + token % page_size, 0)
    return LocalRows(tokens, until - since, None, 1, None, None, True)


def _query_row_positions(rows: int, n: Tensor, cu: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns request and position of each query row [T], −1 for rows of no request, and rows of each request [B]."""
    row = torch.arange(rows, device=n.device)
    if cu is None:
        drafts = torch.full_like(n, rows // len(n))
        request = row // (rows // len(n))
        return request, n[request] - drafts[request] + row % (rows // len(n)), drafts
    starts = cu.to(torch.int64)
    drafts = starts.diff()
    request = torch.searchsorted(starts[1:].contiguous(), row, right=True)
    real = (row >= starts[0]) & (request < len(n))
    request = request.clamp(max=len(n) - 1)
    position = n[request] - drafts[request] + row - starts[:-1][request]
    return request, torch.where(real, position, -1), drafts


def _prefix_bits(count: Tensor, drafts: int) -> Tensor:
    """Returns masks [T, W] uint16 whose first count[t] bits are set."""
    words = torch.arange(0, 32 * -(-drafts // 32), 16, device=count.device)
    bits = (1 << (count[:, None] - words).clamp(0, 16)) - 1
    return bits.to(torch.int16).view(torch.uint16)  # few devices convert to uint16; the low bits are the same


def token_pages(layer: PagedKVLayer) -> tuple[PagedKVLayer, int]:
    """The layer with pages of one token, without copying, and the pages between two pages of the layer.

    Raises UnsupportedError if the layouts of its tensors differ.
    """
    tensors = {n: getattr(layer, n) for n in ("k", "v", "k_scale_cache", "v_scale_cache")}
    tensors = {n: x for n, x in tensors.items() if x is not None}
    if layer.page_size == 1 or layer.num_pages == 0:
        return layer, 1
    steps = {x.stride(0) / x.stride(1) for x in tensors.values()}
    if len(steps) != 1 or not min(steps).is_integer() or min(steps) < layer.page_size:
        raise UnsupportedError(
            "window: want a multiple of interleave * world, or a cache whose k, v and scales have pages of the same "
            f"whole number of tokens, got page strides / token strides {sorted(steps)}"
        )
    step = int(min(steps))
    tokens = (layer.num_pages - 1) * step + layer.page_size
    views = {
        n: x.as_strided((tokens, 1, *x.shape[2:]), (x.stride(1), x.stride(1), *x.stride()[2:]))
        for n, x in tensors.items()
    }
    return replace(layer, **views), step


class ExchangeCost(NamedTuple):
    """Bytes that one rank sends in one exchange, and the number of collectives."""

    bytes_sent: int
    collectives: int

    def seconds(self, latency: float, bandwidth: float) -> float:
        """Returns the time. latency: seconds per collective; bandwidth: bytes per second that a rank sends."""
        return self.collectives * latency + self.bytes_sent / bandwidth


def exchange_cost(
    exchange: str, world: int, rows: int, num_q_heads: int, head_dim: int, head_dim_v: int, *,
    q_bytes: int = 2, wire_bytes: int = 4, sharded_q: bool = True,
) -> ExchangeCost:  # fmt: skip
    """Returns the cost of one layer's exchange for `rows` query rows; num_q_heads counts the heads of all ranks.

    Raises ValueError or TypeError for an unknown exchange or invalid sizes.
    """
    require(exchange in EXCHANGES, "exchange", " or ".join(map(repr, EXCHANGES)), repr(exchange))
    world, rows = as_positive_int("world", world), as_non_negative_int("rows", rows)
    num_q_heads, head_dim = as_positive_int("num_q_heads", num_q_heads), as_positive_int("head_dim", head_dim)
    head_dim_v = as_positive_int("head_dim_v", head_dim_v)
    q_bytes, wire_bytes = as_positive_int("q_bytes", q_bytes), as_positive_int("wire_bytes", wire_bytes)
    if world == 1:
        return ExchangeCost(0, 0)
    share = -(-num_q_heads // world)
    others = world - 1
    q = others * share * rows * head_dim * q_bytes if sharded_q else 0
    if exchange == "all_to_all":
        return ExchangeCost(q + others * share * head_pitch(rows, head_dim_v, wire_bytes), 1 + sharded_q)
    lse = others * share * world * rows * LSE_BYTES
    return ExchangeCost(q + lse + others * share * rows * head_dim_v * 4, 2 + sharded_q)


def head_pitch(rows: int, head_dim_v: int, wire_bytes: int) -> int:
    """Returns the bytes of one head in an all-to-all: its output rows, then their LSE."""
    used = rows * (head_dim_v * wire_bytes + LSE_BYTES)
    return -(-used // ALIGNMENT) * ALIGNMENT
