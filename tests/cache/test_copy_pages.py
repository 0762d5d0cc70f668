"""`copy_pages` over caches whose tensors share memory: every page gets what its source held before, once."""

from __future__ import annotations

import random

import pytest
import torch

from tersekv import PagedKVCache, PagedKVLayer, PagedLatentCache, PagedLatentLayer
from tersekv.pages import copy_pages
from tersekv.testing.memory import as_bytes, storage_bytes

P, S, H, D = 6, 2, 2, 16
CHAINS = ([(0, 1), (2, 0)], [(0, 1), (1, 2), (2, 0)], [(3, 4), (4, 3), (3, 5)], [(1, 1), (0, 1)], [(0, 5), (5, 0)])


def random_chains(n: int) -> list[list[tuple[int, int]]]:
    dice = random.Random(3)
    return [[(dice.randrange(P), dice.randrange(P)) for _ in range(dice.randrange(1, 9))] for _ in range(n)]


def buffer(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def one_tensor() -> PagedKVCache:
    """K and V of one tensor."""
    return PagedKVCache([PagedKVLayer.of(buffer(P, 1, S, H, D))], D, D)


def a_part() -> PagedKVCache:
    """V of K's first columns."""
    x = buffer(P, S, H, D, dtype=torch.float8_e4m3fn)
    return PagedKVCache([PagedKVLayer.of((x, x[..., : D // 2]))], D, D // 2)


def shared_layers() -> PagedKVCache:
    """Two layers of one, and one of its own."""
    a, b = (PagedKVLayer.of((buffer(P, S, H, D), buffer(P, S, H, D))) for _ in range(2))
    return PagedKVCache([a, b, a], D, D)


def crossed() -> PagedKVCache:
    """One layer's K is another's V."""
    x, y = buffer(P, S, H, D), buffer(P, S, H, D)
    return PagedKVCache([PagedKVLayer.of((x, y)), PagedKVLayer.of((y, x))], D, D)


def side_by_side() -> PagedKVCache:
    """All layers in one buffer, page by page, with scales behind them."""
    return PagedKVCache.allocate(2, P, S, H, D, format="int8_per_token_head", scales="tail")


def of_two_storages() -> PagedKVCache:
    """The same memory twice, as from another library."""
    raw = bytearray(P * S * H * D * 2)
    x, y = (torch.frombuffer(raw, dtype=torch.bfloat16).view(P, S, H, D) for _ in range(2))
    return PagedKVCache([PagedKVLayer.of((x, y))], D, D)


def latents() -> PagedLatentCache:
    """Rotary parts that are columns of the latent."""
    x = buffer(P, S, 32)
    layers = [PagedLatentLayer(x, x[..., 16:], "bf16"), PagedLatentLayer(x, x[..., 16:], "bf16")]
    return PagedLatentCache(layers)


CACHES = (one_tensor, a_part, shared_layers, crossed, side_by_side, of_two_storages, latents)


@pytest.mark.parametrize("make", CACHES, ids=lambda f: f.__name__)
def test_pages_are_copied_as_if_one_after_the_other(make):
    names = ("k", "v", "k_scale_cache", "v_scale_cache", "ckv", "kpe", "ckv_scale_cache")
    for copies in (*CHAINS, *random_chains(40)):
        cache = make()
        tensors = [x for layer in cache.layers for n in names if (x := getattr(layer, n, None)) is not None]
        for x in tensors:
            storage_bytes(x).random_(0, 120)
        want = [as_bytes(x).clone() for x in tensors]
        for x in want:
            for src, dst in copies:
                x[dst] = x[src].clone()
        copy_pages(cache, copies)
        for got, x in zip(tensors, want, strict=True):
            assert torch.equal(as_bytes(got), x), copies
