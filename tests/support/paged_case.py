"""Random paged problems: live slots hold random codes, everything that must not be read is poisoned."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tersekv import PagedKVCache, PagedKVLayer, PagedLatentCache, PagedLatentLayer

HUGE = 2**31 - 1  # a page id that no table entry in use holds
POISON = 0xFF  # NaN in every 8-bit and 16-bit float format, and in fp32


@dataclass(frozen=True)
class Case:
    """A cache layer, and which requests lie where in it."""

    layer: PagedKVLayer | PagedLatentLayer
    page_table: torch.Tensor  # [B, max_pages] int32
    seq_lens: torch.Tensor  # [B] int32

    def lists(self) -> tuple[list, list]:
        return self.page_table.tolist(), self.seq_lens.tolist()

    def with_layer(self, **changes) -> Case:
        return replace(self, layer=replace(self.layer, **changes))


def places(seq_lens: list[int], size: int, spare: int = 2) -> tuple[torch.Tensor, torch.Tensor, int]:
    """An unsorted page table with poisoned tails, the live slots [P, S], and the number of pages. Page 0 is dead."""
    used = [-(-n // size) for n in seq_lens]
    pages = sum(used) + spare
    order = (torch.randperm(pages - 1) + 1).tolist()
    table = torch.full((len(seq_lens), max(used, default=0) + 1), HUGE, dtype=torch.int32)
    live = torch.zeros(pages, size, dtype=torch.bool)
    for b, n in enumerate(seq_lens):
        for j in range(used[b]):
            page = order.pop()
            table[b, j] = page
            live[page, : min(size, n - j * size)] = True
    return table, live, pages


def kv_case(
    format: str, seq_lens: list[int], *, page_size=16, heads=2, head_dim=32, head_dim_v=None, seed=0, **options
) -> Case:
    """K and V as random codes of about unit size, with many subnormal ones among them."""
    torch.manual_seed(seed)
    table, live, pages = places(seq_lens, page_size)
    cache = PagedKVCache.allocate(
        1, pages, page_size, heads, head_dim, format=format, head_dim_v=head_dim_v, **options
    )[0]  # fmt: skip
    for codes, scales in ((cache.k, cache.k_scale_cache), (cache.v, cache.v_scale_cache)):
        fill(codes, live)
        if scales is not None:
            fill_scales(scales, live, format)
    return Case(cache, table, torch.tensor(seq_lens, dtype=torch.int32))


def latent_case(format: str, seq_lens: list[int], *, page_size=16, seed=0, **options) -> Case:
    torch.manual_seed(seed)
    table, live, pages = places(seq_lens, page_size)
    cache = PagedLatentCache.allocate(1, pages, page_size, format=format, **options)[0]
    fill(cache.ckv, live)
    fill(cache.kpe, live)
    if cache.ckv_scale_cache is not None:
        poison(cache.ckv_scale_cache)
        cache.ckv_scale_cache[live] = torch.rand(cache.ckv_scale_cache[live].shape) + 0.2
    return Case(cache, table, torch.tensor(seq_lens, dtype=torch.int32))


def fill(codes: torch.Tensor, live: torch.Tensor) -> None:
    """Random codes in live slots [P, S] of [P, S, ...], 0xFF bytes in the others."""
    poison(codes)
    shape = codes[live].shape
    if codes.dtype == torch.int8:
        new = torch.randint(-128, 128, shape, dtype=torch.int8)
    elif codes.dtype == torch.uint8:
        new = torch.randint(0, 256, shape, dtype=torch.uint8)
    else:
        new = (torch.randn(shape) * 10 ** (-3 * torch.rand(shape) ** 3)).to(codes.dtype)
    raw(codes)[live] = raw(new)


def fill_scales(scales: torch.Tensor, live: torch.Tensor, format: str) -> None:
    poison(scales)
    shape = scales[live].shape
    size = {"int8_per_token_head": 0.02, "nvfp4": 0.5, "int4_per_token_head": 0.2}.get(format, 1.5)
    new = ((torch.rand(shape) + 0.1) * size).to(scales.dtype)
    raw(scales)[live] = raw(new)


def poison(x: torch.Tensor) -> None:
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    x.view(signed).fill_(POISON if signed == torch.uint8 else -1)


def raw(x: torch.Tensor) -> torch.Tensor:
    """fp8 as bytes: no indexed writes exist for it."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def nan_like(*shape: int, dtype=torch.float32) -> torch.Tensor:
    """An output that starts as NaN."""
    return torch.full(shape, torch.nan).to(dtype)


def tree_mask(drafts: list[int], seed=0) -> torch.Tensor:
    """A random mask for ragged drafts, uint16 words [T, W]: every draft sees itself, and others at random."""
    generator = torch.Generator().manual_seed(seed)
    words = 2 * -(-max(drafts) // 32)
    rows = []
    for n in drafts:
        bits = torch.zeros(n, words * 16, dtype=torch.int64)
        bits[:, :n] = torch.rand(n, n, generator=generator) < 0.5
        bits[torch.arange(n), torch.arange(n)] = 1
        bits[:, n:] = 1  # bits of drafts that do not exist mean nothing
        rows.append((bits.view(n, words, 16) << torch.arange(16)).sum(-1))
    return torch.cat(rows).to(torch.int32).to(torch.uint16)
