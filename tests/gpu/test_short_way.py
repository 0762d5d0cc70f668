"""A call that is like one before it gives the bits of the long way, with tensors and layers of its own."""

from __future__ import annotations

import pytest
import torch

import tersekv
from tersekv.dispatch import launch_cache

CUDA, BF = "cuda", torch.bfloat16
B, PAGES, S = 4, 24, 64


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA, dtype=BF)


def kv_layers(format: str):
    cache = tersekv.PagedKVCache.allocate(2, PAGES, S, 2, 128, format=format, device=CUDA)
    for layer in cache.layers:
        tersekv.append(rows(PAGES * S, 2, 128), rows(PAGES * S, 2, 128), layer, torch.arange(PAGES * S, device=CUDA))
    return cache.layers


def latent_layers(format: str):
    cache = tersekv.PagedLatentCache.allocate(2, PAGES, S, format=format, device=CUDA)
    for layer in cache.layers:
        tersekv.mla_append(rows(PAGES * S, 512), rows(PAGES * S, 64), layer, torch.arange(PAGES * S, device=CUDA))
    return cache.layers


def pages(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.randperm(PAGES, device=CUDA)[: B * width].view(B, width).int()
    return table, torch.randint(0, width * S + 1, (B,), device=CUDA).int()


def decode(layer, width):
    q, (table, lens) = rows(B, 8, 128), pages(width)
    return lambda: tersekv.decode(q, layer, table, lens, return_lse=True)


def mla_decode(heads, layer, width):
    q, (table, lens) = rows(B, heads, 576), pages(width)
    return lambda: tersekv.mla_decode(q, layer, table, lens, softmax_scale=0.07, return_lse=True)


def rope_append(layer, width):
    q, k, v, angles = (
        rows(B, 8, 128),
        rows(B, 2, 128),
        rows(B, 2, 128),
        torch.randn(99, min(128, 32 * width), device=CUDA),
    )
    slots, positions = torch.randperm(PAGES * S, device=CUDA)[:B], torch.randint(0, 99, (B,), device=CUDA)

    def call():
        out = tersekv.rope_append(q, k, v, layer, slots, angles, positions)
        return [out, *(x.view(torch.uint8).clone() for x in (layer.k, layer.v))]

    return call


CASES = {
    **{
        f"decode {f}": (decode, lambda f=f: kv_layers(f))
        for f in ("bf16", "fp8_e4m3", "fp8_per_token_head", "nvfp4", "int4_per_token_head")
    },
    **{
        f"rope_append {f}": (rope_append, lambda f=f: kv_layers(f))
        for f in ("fp8_e4m3", "nvfp4", "int4_per_token_head")
    },
    **{
        f"mla_decode {f} {h}": (lambda *a, h=h: mla_decode(h, *a), lambda f=f: latent_layers(f))
        for f in ("bf16", "fp8_e4m3", "fp8_ds_mla")
        for h in (16, 32, 128)
    },
}


# Four pages: a segment is merged where it is cut, or is not cut.
@pytest.mark.parametrize("width", [6, 4, 1])
@pytest.mark.parametrize("case", CASES)
def test_the_short_way_gives_the_bits_of_the_long_way(case, width, monkeypatch):
    torch.manual_seed(0)
    make, layers_of = CASES[case]
    layers = layers_of()
    calls = [make(layers[i % 2], width) for i in range(4)]

    def round_of_calls():
        return [[x.contiguous().view(torch.uint8).clone() for x in call()] for call in calls]

    monkeypatch.setattr(launch_cache, "_recent", {})
    monkeypatch.setattr(launch_cache, "_launches", {})
    round_of_calls()
    round_of_calls()
    with monkeypatch.context() as only_long:
        only_long.setattr(launch_cache, "_recent", {})
        only_long.setattr(launch_cache, "_launches", {})
        only_long.setattr(launch_cache._CachedLaunch, "__call__", lambda self, given: None)
        want = round_of_calls()
    taken = []
    short = launch_cache._CachedLaunch.__call__
    monkeypatch.setattr(
        launch_cache._CachedLaunch, "__call__", lambda self, given: taken.append(short(self, given)) or taken[-1]
    )
    got = round_of_calls()
    assert sum(x is not None for x in taken) == len(calls)
    assert all(torch.equal(x, y) for a, b in zip(got, want, strict=True) for x, y in zip(a, b, strict=True))
