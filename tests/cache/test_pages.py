"""PagePool against a model that keeps every request's tokens in a list."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from tersekv import OutOfPagesError, PagedKVCache, PagedLatentCache, PagePool, copy_pages


def no_page(n):
    raise OutOfPagesError(f"want {n} free pages")


class PoolAgainstLists(RuleBasedStateMachine):
    """`memory` is the cache, one number per slot; every request must read its own tokens back from it."""

    requests = Bundle("requests")

    @initialize(num_pages=st.integers(1, 8), page_size=st.integers(1, 4))
    def start(self, num_pages, page_size):
        self.pool = PagePool(num_pages, page_size)
        self.memory = [[-1] * page_size for _ in range(num_pages)]
        self.model: dict[int, list[int]] = {}
        self.next = 0

    def fresh(self) -> int:
        self.next += 1
        return self.next

    def state(self):
        pool = self.pool
        return {r: (pool.pages(r), pool.num_tokens(r)) for r in self.model}, pool.num_free_pages, list(pool._owners)

    def wanted_pages(self, request, n) -> int:
        """Pages that n more tokens take, by what others own."""
        size, old = self.pool.page_size, len(self.model.get(request, []))
        extra = -(-(old + n) // size) - -(-old // size)
        if n and old % size:
            last = self.pool.pages(request)[-1]
            extra += any(last in self.pool.pages(r) for r in self.model if r != request)
        return extra

    def write(self, request, n) -> None:
        tokens = [self.fresh() for _ in range(n)]
        self.model[request] = self.model.get(request, []) + tokens
        slots = self.pool.slot_mapping([request], [n])
        assert slots.dtype == torch.int64
        for slot, token in zip(slots.tolist(), tokens, strict=True):
            self.memory[slot // self.pool.page_size][slot % self.pool.page_size] = token

    @rule(target=requests, n=st.integers(0, 9))
    def add(self, n):
        request, before = self.fresh(), self.state()
        if self.wanted_pages(request, n) > self.pool.num_free_pages:
            with pytest.raises(OutOfPagesError):
                self.pool.add(request, n)
            assert request not in self.pool
            assert self.state() == before
            self.pool.add(request)
            n = 0
        else:
            self.pool.add(request, n)
        self.write(request, n)
        return request

    @rule(request=requests, n=st.integers(0, 6))
    def extend(self, request, n):
        before = self.state()
        if self.wanted_pages(request, n) > self.pool.num_free_pages:
            with pytest.raises(OutOfPagesError):
                self.pool.extend(request, n)
            assert self.state() == before
            return
        for src, dst in self.pool.extend(request, n):
            self.memory[dst] = list(self.memory[src])
        self.write(request, n)

    @rule(data=st.data(), together=st.lists(requests, unique=True, max_size=4), fails=st.booleans())
    def extend_together(self, data, together, fails):
        """All, as one after the other; or none, where pages run out, or taking them fails."""
        counts, before = [data.draw(st.integers(0, 6)) for _ in together], self.state()
        alone = copy.copy(self.pool)
        try:
            for request, n in zip(together, counts, strict=True):
                alone.extend(request, n)
        except OutOfPagesError:
            fails = True
        assert self.state() == before
        if fails:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(self.pool, "_take", no_page)
                with pytest.raises(OutOfPagesError):
                    self.pool.extend_all(together, counts)
            assert self.state() == before
            return
        for src, dst in self.pool.extend_all(together, counts):
            self.memory[dst] = list(self.memory[src])
        assert self.pool.num_free_pages == alone.num_free_pages
        for request, n in zip(together, counts, strict=True):
            self.write(request, n)

    @rule(more=st.integers(0, 3))
    def grow(self, more):
        if self.pool.num_pages < 12:
            self.pool.grow(self.pool.num_pages + more)
            self.memory += [[-1] * self.pool.page_size for _ in range(more)]

    @rule(target=requests, source=requests)
    def fork(self, source):
        request, free = self.fresh(), self.pool.num_free_pages
        self.pool.fork(source, request)
        self.model[request] = list(self.model[source])
        assert self.pool.num_free_pages == free
        return request

    @rule(request=requests, data=st.data())
    def truncate(self, request, data):
        n = data.draw(st.integers(0, len(self.model[request])))
        self.pool.truncate(request, n)
        self.model[request] = self.model[request][:n]

    @rule(request=consumes(requests))
    def free(self, request):
        self.pool.free(request)
        del self.model[request]

    @invariant()
    def every_request_reads_its_own_tokens(self):
        pool, size, ids = self.pool, self.pool.page_size, list(self.model)
        table, lens = pool.page_table(ids), pool.seq_lens(ids)
        indptr, indices, last = (x.tolist() for x in pool.ragged_pages(ids))
        assert len(pool) == len(ids)
        for i, request in enumerate(ids):
            tokens = self.model[request]
            assert lens[i] == len(tokens)
            used = -(-len(tokens) // size)
            row = table[i].tolist()
            assert row[used:] == [-1] * (len(row) - used)
            assert indices[indptr[i] : indptr[i + 1]] == row[:used]
            assert last[i] == (len(tokens) - (used - 1) * size if used else 0)
            assert [self.memory[row[j // size]][j % size] for j in range(len(tokens))] == tokens
            assert pool.positions([request], [len(tokens)]).tolist() == list(range(len(tokens)))

    @invariant()
    def no_page_is_lost_or_owned_and_free(self):
        owned = [p for r in self.model for p in self.pool.pages(r)]
        assert self.pool.num_free_pages == self.pool.num_pages - len(set(owned))
        assert self.pool.utilisation == pytest.approx(len(set(owned)) / self.pool.num_pages)
        assert set(self.pool._free).isdisjoint(owned)
        assert len(set(self.pool._free)) == len(self.pool._free)


TestPoolAgainstLists = PoolAgainstLists.TestCase
TestPoolAgainstLists.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)


def test_views_have_the_kernels_types_and_shapes():
    pool = PagePool(8, 4)
    pool.add("a", 5)
    pool.add("b", 0)
    pool.add("c", 8)
    ids = ["c", "b", "a"]
    table = pool.page_table(ids, max_pages=4)
    assert table.dtype == torch.int32
    assert table.tolist() == [[2, 3, -1, -1], [-1] * 4, [0, 1, -1, -1]]
    assert pool.page_table(["b"]).shape == (1, 0)
    assert pool.page_table([]).shape == (0, 0)
    assert pool.seq_lens(ids).tolist() == [8, 0, 5]
    assert pool.seq_lens([]).dtype == torch.int32
    assert pool.slot_mapping(ids, [1, 0, 2]).tolist() == [15, 3, 4]
    assert pool.positions(ids, [1, 0, 2]).tolist() == [7, 3, 4]
    ragged = pool.ragged_pages(ids)
    assert all(x.dtype == torch.int32 for x in ragged)
    assert ragged.kv_indptr.tolist() == [0, 2, 2, 4]
    assert ragged.kv_indices.tolist() == [2, 3, 0, 1]
    assert ragged.last_page_len.tolist() == [4, 0, 1]


def test_the_first_fork_to_grow_copies_the_shared_page_and_the_other_keeps_it():
    pool = PagePool(4, 4)
    pool.add("a", 6)
    pool.fork("a", "b")
    assert pool.num_free_pages == 2
    assert pool.extend("b") == [(1, 2)]
    assert pool.extend("a") == []
    assert pool.pages("a") == (0, 1)
    assert pool.pages("b") == (0, 2)
    pool.free("a")
    assert pool.num_free_pages == 2


def test_a_shared_page_is_not_copied_for_no_tokens():
    pool = PagePool(4, 4)
    pool.add("a", 6)
    pool.fork("a", "b")
    assert pool.extend("b", 0) == []
    assert pool.pages("b") == pool.pages("a")


def test_a_full_shared_page_is_not_copied():
    pool = PagePool(4, 4)
    pool.add("a", 4)
    pool.fork("a", "b")
    assert pool.extend("b", 1) == []
    assert pool.pages("b") == (0, 1)


def test_a_copy_counts_when_pages_run_out_and_the_pool_stays():
    pool = PagePool(2, 4)
    pool.add("a", 2)
    pool.fork("a", "b")
    with pytest.raises(OutOfPagesError, match=r"^want 2 free pages, got 1 of 2$"):
        pool.extend("b", 4)
    assert pool.num_tokens("b") == 2
    assert pool.extend("b", 2) == [(0, 1)]


@pytest.mark.parametrize("make", [
    lambda: PagedKVCache.allocate(2, 5, 2, 1, 16, format="nvfp4", scales="inline", layout="HND"),
    lambda: PagedKVCache.allocate(2, 5, 2, 1, 8, format="fp8_per_token_head", packed=True),
    lambda: PagedKVCache.allocate(2, 5, 2, 1, 8, format="bf16", head_dim_v=16),
    lambda: PagedLatentCache.allocate(2, 5, 2, format="fp8_ds_mla"),
    lambda: PagedLatentCache.allocate(2, 5, 2, format="bf16", split=True),
])  # fmt: skip
def test_copies_take_every_byte_of_a_page_in_order(make):
    cache, want = make(), make()

    def tensors(c):
        for layer in c.layers:
            yield from (t for t in (getattr(layer, n) for n in layer.__slots__) if isinstance(t, torch.Tensor))

    g = torch.Generator().manual_seed(0)
    for a, b in zip(tensors(cache), tensors(want), strict=True):
        shape = (*a.shape[:-1], a.shape[-1] * a.element_size()) if a.stride(-1) == 1 else a.shape
        raw = torch.randint(0, 100, shape, generator=g, dtype=torch.uint8)
        value = raw.view(a.dtype) if raw.shape != a.shape else raw.to(a.dtype)
        a.copy_(value)
        b.copy_(value)
    copies = [(0, 3), (3, 1), (4, 3), (1, 4)]
    for src, dst in copies:
        for t in tensors(want):
            t[dst].copy_(t[src].clone())
    copy_pages(cache, copies)
    copy_pages(cache, [])
    for a, b in zip(tensors(cache), tensors(want), strict=True):
        assert torch.equal(a.float(), b.float())


@pytest.mark.parametrize(("act", "message"), [
    (lambda p: p.add("a", 1), "request_id: want a new one, got 'a', which is in the pool"),
    (lambda p: p.fork("a", "a"), "request_id: want a new one, got 'a', which is in the pool"),
    (lambda p: p.fork("x", "y"), "request_id: want a request of this pool, got 'x'"),
    (lambda p: p.free("x"), "request_id: want a request of this pool, got 'x'"),
    (lambda p: p.extend("x", 1), "request_id: want a request of this pool, got 'x'"),
    (lambda p: p.page_table(["x"]), "request_id: want a request of this pool, got 'x'"),
    (lambda p: p.add("b", -1), "num_tokens: want 0 or more, got -1"),
    (lambda p: p.extend("a", -1), "num_tokens: want 0 or more, got -1"),
    (lambda p: p.extend_all(["a", "x"], [1, 1]), "request_id: want a request of this pool, got 'x'"),
    (lambda p: p.extend_all(["a"], [1, 1]), "num_tokens: want 1 numbers, got 2"),
    (lambda p: p.extend_all(["a", "a"], [1, 1]), "request_ids: want each request once, got 'a' again"),
    (lambda p: p.extend_all(["a"], [-1]), "num_tokens: want 0 or more, got -1"),
    (lambda p: p.truncate("a", 6), "num_tokens: want in [0, 5], got 6"),
    (lambda p: p.page_table(["a"], max_pages=1), "max_pages: want at least 2, got 1"),
    (lambda p: p.slot_mapping(["a"], [6]), "new_tokens: want in [0, 5] for request 'a', got 6"),
    (lambda p: p.slot_mapping(["a"], [1, 1]), "new_tokens: want 1 numbers, got 2"),
    (lambda p: p.slot_mapping(["a", "a"], [2, 2]), "request_ids: want each request once, got 'a' again"),
    (lambda p: p.positions(["a", "a"], [0, 0]), "request_ids: want each request once, got 'a' again"),
    (lambda p: PagePool(0, 4), "num_pages: want a positive number, got 0"),
    (lambda p: PagePool(4, 0), "page_size: want a positive number, got 0"),
])  # fmt: skip
def test_a_wrong_argument_is_named_and_changes_nothing(act, message):
    pool = PagePool(4, 4)
    pool.add("a", 5)
    with pytest.raises(ValueError, match="want") as error:
        act(pool)
    assert str(error.value) == message
    assert len(pool) == 1
    assert pool.pages("a") == (0, 1)
    assert pool.num_free_pages == 2


@pytest.mark.parametrize(("act", "message"), [
    (lambda p: p.add("b", 2.5), "num_tokens: want int, got float 2.5"),
    (lambda p: p.extend("a", None), "num_tokens: want int, got NoneType None"),
    (lambda p: p.extend_all(["a"], 1), "num_tokens: want a number for each request, got int"),
    (lambda p: p.extend_all(["a"], torch.tensor(1)), "num_tokens: want a number for each request, got Tensor"),
    (lambda p: p.truncate("a", 2.0), "num_tokens: want int, got float 2.0"),
    (lambda p: PagePool("4", 4), "num_pages: want int, got str '4'"),
    (lambda p: p.grow(8.5), "num_pages: want int, got float 8.5"),
    (lambda p: p.page_table(["a"], max_pages=8.0), "max_pages: want int, got float 8.0"),
    (lambda p: p.slot_mapping(["a"], [1.0]), "new_tokens: want int, got float 1.0"),
    (lambda p: p.positions(["a"], [None]), "new_tokens: want int, got NoneType None"),
])  # fmt: skip
def test_a_number_of_another_type_is_named(act, message):
    pool = PagePool(4, 4)
    pool.add("a", 5)
    with pytest.raises(TypeError) as error:
        act(pool)
    assert str(error.value) == message
    assert pool.num_tokens("a") == 5


def test_counts_may_be_anything_that_counts():
    pool = PagePool(4, 4)
    pool.add("a", 5)
    want = pool.slot_mapping(["a"], [2])
    for counts in (np.array([2]), torch.tensor([2]), (n for n in [2])):
        assert torch.equal(pool.slot_mapping(["a"], counts), want)
    assert pool.positions(["a"], torch.tensor([2])).tolist() == [3, 4]
    for counts, kind in ((1, "int"), (torch.tensor(2), "Tensor"), (np.array(2), "ndarray")):
        with pytest.raises(TypeError, match=rf"^new_tokens: want a number for each request, got {kind}$"):
            pool.slot_mapping(["a"], counts)


@pytest.mark.parametrize("pair", [(0, -1), (5, 0), (0, 2)])
def test_a_copy_outside_the_cache_is_refused_and_copies_nothing(pair):
    cache = PagedLatentCache.allocate(1, 2, 4, format="bf16")
    cache[0].ckv[0] = 1
    with pytest.raises(ValueError, match=rf"^copies: want pages in \[0, 2\), got \({pair[0]}, {pair[1]}\)$"):
        copy_pages(cache, [(0, 1), pair])
    assert not cache[0].ckv[1].any()


@pytest.mark.parametrize(("what", "copies", "message"), [
    (lambda c: c[0], [(0, 1)], "cache: want PagedKVCache, PagedLatentCache or PagedIndexCache, got PagedLatentLayer"),
    (lambda c: c, torch.tensor([[0, 1]]), "copies: want a list of (src, dst), got Tensor"),
    (lambda c: c, None, "copies: want a list of (src, dst), got NoneType"),
    (lambda c: c, [0, 1], "copies: want (src, dst) pairs, got 0"),
    (lambda c: c, [(0, 1.0)], "copies: want int, got float 1.0"),
])  # fmt: skip
def test_what_is_no_list_of_copies_is_named(what, copies, message):
    with pytest.raises(TypeError) as error:
        copy_pages(what(PagedLatentCache.allocate(1, 2, 4, format="bf16")), copies)
    assert str(error.value) == message


def test_a_pool_is_printed_in_one_line():
    pool = PagePool(4, 8)
    pool.add("a", 9)
    assert repr(pool) == "PagePool(1 requests, 2 of 4 pages free, page_size=8)"


def test_a_count_that_changes_later_does_not_change_the_pool():
    pool, count = PagePool(4, 4), torch.tensor(5)
    pool.add("a", count)
    count.add_(3)
    assert pool.num_tokens("a") == 5


def test_requests_that_share_a_page_grow_together_or_not_at_all():
    pool = PagePool(5, 4)
    pool.add("a", 6)
    pool.fork("a", "b")
    pool.fork("a", "c")
    with pytest.raises(OutOfPagesError, match=r"^want 4 free pages, got 3 of 5$"):
        pool.extend_all("abc", [1, 1, 7])
    assert {pool.pages(r) for r in "abc"} == {(0, 1)}
    assert pool.extend_all("abc", [1, 1, 2]) == [(1, 2), (1, 3)]
    assert [pool.pages(r) for r in "abc"] == [(0, 2), (0, 3), (0, 1)]
    assert pool.num_free_pages == 1


def test_a_pool_that_grows_keeps_its_requests():
    pool = PagePool(2, 4)
    pool.add("a", 8)
    with pytest.raises(OutOfPagesError):
        pool.add("b", 1)
    pool.grow(4)
    pool.grow(4)
    pool.add("b", 5)
    assert (pool.num_pages, pool.num_free_pages) == (4, 0)
    assert sorted(pool.pages("a") + pool.pages("b")) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="num_pages: want at least 4, got 3"):
        pool.grow(3)
