"""TieredPool: what is found again, what is moved, and what never is."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import tier_traffic
import torch

import tersekv
from tersekv import OutOfPagesError, PagedIndexCache, PagedKVCache, PagedLatentCache, TieredPool, tiers
from tersekv.prefix import page_keys, token_ids

PROMPT = [*range(10, 20)]  # two full pages of 4, and half of one


def kv(pages=6, format="fp8_e4m3", **options) -> PagedKVCache:
    return PagedKVCache.allocate(num_pages=pages, format=format, **{**tier_traffic.SIZES, **options})


def served(pool, cache, request, tokens) -> None:
    got = pool.acquire(request, tokens)
    tier_traffic.append(pool, cache, request, tokens, got.num_new_tokens)
    pool.release(request, tokens)


@pytest.mark.parametrize("cold_pages", [0, 3, 40])
@pytest.mark.parametrize(("pages", "format"), [(9, "fp8_e4m3"), (14, "bf16")])
def test_rows_are_right_in_any_traffic(pages, format, cold_pages):
    cache = kv(pages, format)
    pool = TieredPool(cache, cold_pages=cold_pages)
    got = tier_traffic.run(cache, pool, 150, seed=pages)
    assert got["right"].all()
    assert got["found"] > 0
    assert (got["cold"] > 0) == (cold_pages > 0)
    assert got["refused"] > 0 or pages == 14
    assert pool.num_cold_pages <= cold_pages


def test_wrong_rows_would_be_seen(monkeypatch):
    cache = kv(9)
    pool = TieredPool(cache, cold_pages=40)
    monkeypatch.setattr(pool._mover, "back", lambda moves: None)
    assert not tier_traffic.run(cache, pool, 150, seed=9)["right"].all()


def test_running_requests_share_full_pages_and_nothing_else():
    cache = kv()
    pool = TieredPool(cache, cold_pages=4)
    pool.acquire("a", PROMPT)
    assert pool.match(PROMPT) == 0  # its rows are not there yet
    pool.commit("a", PROMPT)
    b = pool.acquire("b", PROMPT)
    assert (b.num_tokens, b.num_new_tokens, b.num_cold_tokens, b.ready) == (8, 2, 0, None)
    assert b.pages[:2] == pool.pages("a")[:2]
    assert b.pages[2] != pool.pages("a")[2]
    assert pool.match(PROMPT[:8]) == 4  # the last token is computed
    assert pool.match([1, *PROMPT]) == pool.match([*PROMPT[:3], 0, *PROMPT[4:]]) == 0


def test_pages_that_are_read_stay():
    cache = kv(4)
    pool = TieredPool(cache, cold_pages=8)
    pool.acquire("a", PROMPT)
    pool.commit("a", PROMPT)
    pages = pool.pages("a")
    before = [*pool._kept]
    with pytest.raises(OutOfPagesError, match="want 3 free pages, got 1 and 0 that no request reads, of 4"):
        pool.acquire("b", [*range(12)])
    with pytest.raises(OutOfPagesError):
        pool.extend("a", 10)
    with pytest.raises(OutOfPagesError):
        pool.acquire("c", [*PROMPT, *range(30)])  # shares what it cannot keep
    assert [*pool._kept] == before
    assert pool.pages("a") == pages
    assert (pool.num_free_pages, pool.num_evictable_pages, pool.num_cold_pages, len(pool)) == (1, 0, 0, 1)
    pool.release("a")
    assert pool.num_evictable_pages == 2
    assert pool.acquire("b", [*range(16)]).num_new_tokens == 16


@pytest.mark.parametrize("format", ["int4_per_token_head", "fp8_per_token_head", ("fp8_e4m3", "int4_per_token_head")])
def test_what_comes_back_was_transcoded_there_and_back(format):
    cache = kv(3, "bf16")
    pool = TieredPool(cache, cold_pages=3, cold_format=format, rotation="hadamard")
    got = pool.acquire("a", PROMPT)
    x = torch.randn(2, 10, 2, 32)
    for layer in cache.layers:
        tersekv.append(*x, layer, pool.slot_mapping(["a"], [10]))
    want, cold = kv(3, "bf16"), kv(3, format, rotation="hadamard")
    tersekv.transcode(cache, list(got.pages), cold, [0, 1, 2])
    tersekv.transcode(cold, [0, 1, 2], want, [0, 1, 2])
    pool.release("a", PROMPT)
    served(pool, cache, "b", [*range(12)])
    got = pool.acquire("c", PROMPT)
    assert (got.num_cold_tokens, got.num_new_tokens) == (8, 2)
    for layer, expected in zip(cache.layers, want.layers, strict=True):
        assert torch.equal(layer.k[list(got.pages[:2])], expected.k[:2])
        assert torch.equal(layer.v[list(got.pages[:2])], expected.v[:2])


def test_a_page_that_came_back_leaves_for_nothing(monkeypatch):
    cache = kv(3)
    pool = TieredPool(cache, cold_pages=8)
    for request, tokens in enumerate([PROMPT, [*range(12)], PROMPT]):
        served(pool, cache, request, tokens)
    moves = []
    monkeypatch.setattr(pool._mover, "away", moves.extend)
    pool.make_room(3)
    assert (moves, pool.match(PROMPT)) == ([], 8)


def test_the_policy_says_what_leaves():
    for policy, stays in ((None, [*range(30, 38)]), (lambda page: -page.last_used, PROMPT)):
        pool = TieredPool(kv(6), cold_pages=0, **({} if policy is None else {"policy": policy}))
        for request, tokens in enumerate([PROMPT, [*range(30, 39)]]):
            served(pool, kv(6), request, tokens)
        assert (pool.match([*PROMPT, 0]), pool.match([*range(30, 39)])) == (8, 8)
        pool.make_room(4)
        assert pool.match([*stays, 0]) == 8


def test_a_beginning_that_two_requests_computed_stays_as_long_as_the_ends():
    pool, other = TieredPool(kv(8), cold_pages=0), [*range(30, 39)]
    tokens = {"a": PROMPT[:5], "b": PROMPT}
    for request in tokens:
        pool.acquire(request, tokens[request])  # before either is committed
    for request in tokens:
        pool.commit(request, tokens[request])
    pool.release("a")
    served(pool, kv(8), "other", other)
    pool.release("b")
    pool.make_room(pool.num_free_pages + 2)
    assert (pool.match(PROMPT), pool.match(other)) == (8, 0)


def test_a_full_tier_forgets_first_what_the_cache_has_too():
    cache, other = kv(6), [*range(9)]
    pool = TieredPool(cache, cold_pages=2)
    served(pool, cache, 0, PROMPT)
    pool.make_room(6)
    assert pool.acquire(1, PROMPT).num_cold_tokens == 8
    served(pool, cache, 2, other)
    assert (pool.num_cold_pages, pool.num_evictable_pages) == (2, 2)
    pool.make_room(3)
    assert (pool.match(PROMPT), pool.match(other), pool.num_cold_pages) == (8, 8, 2)
    pool.release(1)
    pool.make_room(6)  # the tier holds two pages: those that were used last
    assert (pool.match(PROMPT), pool.match(other), pool.num_cold_pages) == (8, 0, 2)


def test_what_a_request_writes_again_is_its_own():
    cache = kv(6)
    pool = TieredPool(cache, cold_pages=2)
    served(pool, cache, "a", PROMPT)
    pool.acquire("b", PROMPT)
    shared = pool.pages("b")[1]
    pool.truncate("b", 6)
    (copied,) = pool.extend("b", 3)
    assert copied.src == shared
    assert pool.pages("b")[1] == copied.dst
    with pytest.raises(ValueError, match=f"tokens: want those of page {pool.pages('b')[0]}, which is kept, got others"):
        pool.commit("b", [0, *PROMPT[1:6], 1, 2, 3])
    pool.release("b", [*PROMPT[:6], 1, 2, 3])
    assert pool.match([*PROMPT[:6], 1, 2, 3]) == pool.match(PROMPT) == 8


def test_latents_come_back():
    cache = PagedLatentCache.allocate(2, 3, 64, format="bf16", kv_lora_rank=64, qk_rope_head_dim=16)
    pool = TieredPool(cache, cold_pages=3, cold_format="fp8_e4m3", kv_scale=0.02)
    tokens = [*range(130)]
    pool.acquire(0, tokens)
    for layer in cache.layers:
        layer.ckv.normal_()
        layer.kpe.normal_()
    before = [(layer.ckv[:2].clone(), layer.kpe[:2].clone()) for layer in cache.layers]
    pool.release(0, tokens)
    pool.acquire(1, [*range(200, 330)])
    pool.release(1)
    got = pool.acquire(2, tokens)
    assert got.num_cold_tokens == 128
    for layer, (ckv, kpe) in zip(cache.layers, before, strict=True):
        for x, y in ((layer.ckv[list(got.pages[:2])], ckv), (layer.kpe[list(got.pages[:2])], kpe)):
            assert 0 < (x - y).norm() < 0.05 * y.norm()


def pool_state(pool):
    kept = {key: (page.hot, page.cold, page.last_used, page.uses) for key, page in pool._kept.items()}
    requests = {request: (pool.pages(request), pool.num_tokens(request)) for request in pool._pages}
    return kept, {*pool._of_hot}, [*pool._owners], sorted(pool._free), sorted(pool._free_cold), requests


@pytest.mark.parametrize("way", ["away", "back"])
def test_a_move_that_fails_leaves_the_pool_as_it_was(monkeypatch, way):
    cache = kv(3)
    pool = TieredPool(cache, cold_pages=8)
    served(pool, cache, 0, PROMPT)
    if way == "back":
        pool.make_room(3)
    before = pool_state(pool)

    def fail(moves):
        raise torch.OutOfMemoryError("no room to stage")

    with monkeypatch.context() as patched:
        patched.setattr(pool._mover, way, fail)
        with pytest.raises(torch.OutOfMemoryError):
            pool.acquire(1, PROMPT if way == "back" else [*range(12)])
    assert pool_state(pool) == before
    got = tier_traffic.run(cache, pool, 60, seed=3)
    assert got["right"].all()


def test_a_page_is_not_given_to_others_while_it_arrives(monkeypatch):
    cache, waited = kv(3), []
    pool = TieredPool(cache, cold_pages=8)
    served(pool, cache, 0, PROMPT)
    pool.make_room(3)
    stream = SimpleNamespace(wait_event=waited.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: stream)
    monkeypatch.setattr(pool._mover, "back", lambda moves: "arrived")  # an event, as on a GPU
    assert pool.acquire(1, PROMPT).ready == "arrived"
    pool.free(1)  # given up: nobody waited
    assert waited == []
    pool.add(2, 12)
    assert waited == ["arrived"]


def test_the_current_stream_of_the_cache_waits(monkeypatch):
    waited, device = [], torch.device("cuda", 1)

    def current_stream(device=None):
        return SimpleNamespace(wait_event=lambda event: waited.append((device, event)))

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    event = SimpleNamespace(device=device)
    tiers.Acquired((), 0, 0, 0, event).wait()
    tiers.Acquired((), 0, 0, 0, event).wait(current_stream("given"))
    assert waited == [(device, event), ("given", event)]


def test_errors_change_nothing():
    cache = kv()
    with pytest.raises(TypeError, match="cache: want PagedKVCache or PagedLatentCache, got PagedIndexCache"):
        TieredPool(PagedIndexCache.allocate(1, 4, 64, format="index_fp8"), cold_pages=1)
    with pytest.raises(ValueError, match="cache: want latent rows with a rotary part, got qk_rope_head_dim 0"):
        TieredPool(PagedLatentCache.allocate(1, 4, 16, format="fp8_v4", qk_rope_head_dim=0), cold_pages=1)
    with pytest.raises(ValueError, match="rotation: want it beside a cold_format, got none"):
        TieredPool(cache, cold_pages=1, rotation="hadamard")
    with pytest.raises(ValueError, match="cold_pages"):
        TieredPool(cache, cold_pages=-1)
    with pytest.raises(ValueError, match="chunk_bytes"):
        TieredPool(cache, cold_pages=1, chunk_bytes=0)
    with pytest.raises(ValueError, match="format: want one of bf16"):
        TieredPool(cache, cold_pages=1, cold_format="int3")
    with pytest.raises(TypeError, match="policy: want a function of a KeptPage, got str"):
        TieredPool(cache, cold_pages=1, policy="lru")
    one = PagedKVCache.from_tensors([torch.zeros(6, 1, 4, 2, 32, dtype=torch.bfloat16)])
    with pytest.raises(ValueError, match="cache: want K and V in memory of their own, got one tensor for both in lay"):
        TieredPool(one, cold_pages=1)
    pool = TieredPool(cache, cold_pages=1)
    no_ids = [1.5], [True, 2], "text", bytearray(16), torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64), None
    for tokens in (*no_ids, torch.tensor([True, False])):
        with pytest.raises(TypeError, match="tokens"):
            pool.acquire("a", tokens)
    pool.acquire("a", torch.tensor(PROMPT))
    with pytest.raises(ValueError, match="request_id: want a new one, got 'a'"):
        pool.acquire("a", PROMPT)
    with pytest.raises(ValueError, match="tokens: want at most the request's 10, got 11"):
        pool.release("a", [*PROMPT, 1])
    pool.release("a", PROMPT)
    for call in (pool.release, pool.free):
        with pytest.raises(ValueError, match="request_id: want a request of this pool, got 'a'"):
            call("a")
    with pytest.raises(ValueError, match="num_pages: want those of the cache, 6, got 8"):
        pool.grow(8)
    with pytest.raises(TypeError, match="one pool a cache"):
        copy.copy(pool)
    assert (pool.num_free_pages, pool.num_evictable_pages, len(pool)) == (4, 2, 0)


def test_keys_tell_every_token_and_its_place():
    keys = page_keys(token_ids(PROMPT), 4)
    assert len(keys) == 2
    assert page_keys(token_ids(torch.tensor(PROMPT, dtype=torch.int32)), 4) == keys
    assert page_keys(token_ids(PROMPT[4:]), 4)[0] not in keys
    for i in range(8):
        other = page_keys(token_ids([*PROMPT[:i], 99, *PROMPT[i + 1 :]]), 4)
        assert [a == b for a, b in zip(keys, other, strict=True)] == [i >= 4, False]
