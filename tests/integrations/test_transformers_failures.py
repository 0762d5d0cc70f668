"""Both caches as state machines: forwards, beams, crops and resets, each of which may fail wherever pages are taken,
tensors allocated, rows written or pages copied. What fails has not happened: attention reads the tokens of before.

No model runs. Keys hold the numbers of their tokens, and in place of attention the pages are read and compared.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers import FalconH1Config, Gemma2Config, Gemma3nTextConfig, Llama4TextConfig, LlamaConfig, Qwen2Config
from transformers_models import VOCABULARY, over, tiny

from tersekv import OutOfPagesError, PagePool, UnsupportedError
from tersekv.cache import PagedKVCache
from tersekv.integrations import transformers_store as store
from tersekv.integrations.transformers import TersekvCache, TersekvStaticCache, attention

WINDOW, CHUNK, HEADS, SIZE = 5, 12, 1, 8  # a chunk begins with a page of any size that is drawn
NUMBERS = 251  # that bf16 holds exactly
_SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": HEADS}
_SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
CONFIGS = {
    "full": LlamaConfig(**_SIZES),
    "full, then a window": Qwen2Config(**_SIZES, **_SLIDING),
    "a window, then full": Gemma2Config(**_SIZES, sliding_window=WINDOW),
    "chunks, then full": Llama4TextConfig(
        **_SIZES, layer_types=["chunked_attention", "full_attention"], attention_chunk_size=CHUNK
    ),
    "with states": FalconH1Config(**_SIZES),
    "read by others": Gemma3nTextConfig(
        **{**_SIZES, "num_hidden_layers": 4}, layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2, sliding_window=WINDOW,
    ),
}  # fmt: skip
failures = st.one_of(st.none(), st.integers(0, 12))  # which of the calls that may fail does; None: none


class InjectedError(RuntimeError):
    """Memory that ran out."""


class Histories(RuleBasedStateMachine):
    """`rows` is what the cache should hold: the columns of each row, None for padding."""

    def __init__(self):
        super().__init__()
        self.patch, self.left, self.token, self.rows = pytest.MonkeyPatch(), None, 0, []
        for owner, name in (
            (PagePool, "_take"), (PagedKVCache, "allocate"), (store, "append"), (store, "copy_pages"),
        ):  # fmt: skip
            self.patch.setattr(owner, name, self.failing(getattr(owner, name)))
        self.patch.setattr(store.KVStore, "attend", lambda this, *args: self.read(this.cache, *args))

    def teardown(self):
        self.patch.undo()

    def failing(self, call):
        def may_fail(*args, **kwargs):
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise InjectedError(call.__name__)
            return call(*args, **kwargs)

        return may_fail

    def read(self, cache, q, piece, rules, module):
        """In place of attention: every token that a query sees lies where the kernels are told to look."""
        keys, size, ends = cache[0].k[:, :, 0, 0].flatten(), cache.page_size, piece.cu_seqlens_q
        for b, n in enumerate(piece.seq_lens.tolist()):
            new = piece.max_q_len if ends is None else int(ends[b + 1] - ends[b])
            seen = torch.arange(max(0, n - new - rules.window + 1) if rules.window else 0, n)
            slots = piece.page_table[b].long()[seen // size] * size + seen % size
            if self.chunked:
                self.check_chunk(keys[slots].tolist(), q, piece, b, new)
            else:
                assert keys[slots].tolist() == self.tokens[b][int(seen[0]) if n else 0 : n]
        return q

    def check_chunk(self, keys, q, piece, b, new):
        """The keys are those of a chunk from its first token on, up to the tokens that attend to them."""
        first = b * new if piece.cu_seqlens_q is None else int(piece.cu_seqlens_q[b])
        rows = slice(first, first + new)
        if keys and (piece.real is None or piece.real[rows].all()):
            assert [row[i : i + len(keys)] for row in self.tokens for i in range(0, len(row), CHUNK)].count(keys) > 0
            assert q[rows, 0, 0].tolist() == keys[len(keys) - new :]

    def run(self, cache, new, past=None):
        """A forward that brings `new` columns of each row, through both layers."""
        rows = [old + more for old, more in zip(past or self.rows or [[]] * len(new), new, strict=True)]
        self.tokens = [[x for x in row if x is not None] for row in rows]
        mask = torch.tensor([[x is not None for x in row] for row in rows])
        keys = torch.tensor([[x or 0 for x in row] for row in new]).float()[:, None, :, None].expand(-1, -1, -1, SIZE)
        module, lent = torch.nn.Module(), []
        for layer in cache.paged:
            if layer.kind.state is not None:
                self.advance(cache, layer.index, past or self.rows, rows)
            self.chunked = layer.kind.attention_chunk
            k, v = cache.update(keys.clone(), keys.clone(), layer.index)
            attention(module, k, k, v, mask, sliding_window=layer.kind.window)
            lent += [(k, v, layer.kind.window)] * layer.kind.readers
        for k, v, window in lent:
            attention(module, k if window else k[:, :, -1:], k, v, mask, sliding_window=window)
        return rows

    def advance(self, cache, index, old, rows):
        """What a layer with a state does before it attends: its state tells the rows that it has seen."""
        told = [torch.tensor([[float(hash(tuple(row)) % 2**20)] for row in x]) for x in (old, rows)]
        state = cache.get_recurrent_state(index)
        assert self.lost or (state is None if not old else torch.equal(state, told[0]))
        cache.update_conv_state(told[1][:, None], index, conv_kernel_size=1)
        cache.update_recurrent_state(told[1], index)

    def happens(self, fail, act):
        """What `act` returns; None if it fails, as it was to, or for want of pages."""
        before, expected = self.state(), [OutOfPagesError] * self.limited + [InjectedError] * (fail is not None)
        self.left = fail
        try:
            return act()
        except tuple(expected):
            assert self.may_lose if self.lost else self.state() == before
        finally:
            self.left = None
        return None

    @property
    def may_lose(self):
        """Whether there is what cannot go back: pages of a window, and states."""
        return any(self.cache.is_sliding) or self.cache.states.tensors()

    def columns(self, data, batch):
        length = data.draw(st.integers(1, 7))
        real = data.draw(st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=batch,
                                  max_size=batch))  # fmt: skip
        return [[self.number() if r else None for r in row] for row in real]

    def number(self):
        self.token = self.token % NUMBERS + 1
        return self.token

    @property
    def lost(self):
        return self.cache.book.lost

    @rule(data=st.data(), fail=failures)
    def forward(self, data, fail):
        new = self.columns(data, self.batch(data))
        if self.lost:
            with pytest.raises(RuntimeError, match="overwritten; call reset"):
                self.run(self.cache, new)
            return
        self.rows = self.happens(fail, lambda: self.run(self.cache, new)) or self.rows

    # Another batch than a state has fails before attention is asked.
    @precondition(lambda self: self.rows and not self.lost and not self.cache.states.tensors())
    @rule(by=st.sampled_from([-1, 1]), data=st.data())
    def forward_of_another_batch(self, by, data):
        before, wrong = self.state(), len(self.rows) + by
        past = (self.rows + [[None] * len(self.rows[0])])[:wrong]
        new = self.columns(data, max(wrong, 1))
        if wrong:
            with pytest.raises(ValueError, match=rf"^input_ids: want a batch of {len(self.rows)}, .* got {wrong}"):
                self.run(self.cache, new, past)
        assert self.state() == before

    @rule()
    def reset(self):
        self.cache.reset()
        self.rows = []

    @invariant()
    def the_next_token_sees_its_past(self):
        if self.rows and not self.lost:
            other = copy.deepcopy(self.cache)
            try:
                self.run(other, [[self.number()] for _ in self.rows])
            except OutOfPagesError:
                assert self.limited


class PagedHistories(Histories):
    limited = False

    @initialize(config=st.sampled_from([*CONFIGS]), page_size=st.integers(1, 4), chunk=st.integers(1, 6),
                num_pages=st.one_of(st.none(), st.integers(4, 16)), data=st.data())  # fmt: skip
    def start(self, config, page_size, chunk, num_pages, data):
        self.limited = num_pages is not None
        options = {"page_size": page_size, "chunk": chunk, "num_pages": num_pages}
        self.cache = TersekvCache(CONFIGS[config], "bf16", **options)

    def state(self):
        book = self.cache.book
        held = {w: (p.pool.num_pages, [p.pool.pages(r) for r in p._ids]) for w, p in book._requests.items()}
        return book.columns, book.counts, self.cache.batch_size, held, [x.columns for x in self.cache.paged]

    def batch(self, data):
        return len(self.rows) or data.draw(st.integers(1, 3))

    @precondition(lambda self: self.rows and not self.lost)
    @rule(data=st.data(), fail=failures)
    def select(self, data, fail):
        sources = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=4))
        if self.happens(fail, lambda: self.cache.reorder_cache(torch.tensor(sources)) or True):
            self.rows = [self.rows[s] for s in sources]

    @precondition(lambda self: 0 < len(self.rows) < 3 and not self.lost)
    @rule(repeats=st.integers(1, 2), fail=failures)
    def repeat(self, repeats, fail):
        if self.happens(fail, lambda: self.cache.batch_repeat_interleave(repeats) or True):
            self.rows = [row for row in self.rows for _ in range(repeats)]

    @precondition(lambda self: self.rows and not self.lost)
    @rule(wrong=st.sampled_from([[7], [-9, 0], []]))
    def select_wrong_rows(self, wrong):
        before = self.state()
        with pytest.raises(ValueError, match=r"^indices: want"):
            self.cache.batch_select_indices(torch.tensor(wrong, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"^repeats: want"):
            self.cache.batch_repeat_interleave(0)
        assert self.state() == before

    @precondition(lambda self: self.rows and not self.lost)
    @rule(data=st.data())
    def crop(self, data):
        before, whole = self.state(), len(self.rows[0])
        n = data.draw(st.one_of(st.integers(0, whole), st.just(whole)))
        try:
            self.cache.crop(-n)
        except (ValueError, UnsupportedError):
            assert self.may_lose
            assert n < whole
            assert self.state() == before
            return
        self.rows = [row[: whole - n] for row in self.rows] if n < whole else []


class StaticHistories(Histories):
    limited = True
    size = 0  # of the batch, once there are pages

    @initialize(config=st.sampled_from([*CONFIGS]), page_size=st.integers(1, 4), chunk=st.integers(1, 6),
                max_tokens=st.integers(4, 30))  # fmt: skip
    def start(self, config, page_size, chunk, max_tokens):
        options = {"page_size": page_size, "chunk": chunk, "max_tokens": max_tokens}
        self.cache = TersekvStaticCache(CONFIGS[config], "bf16", **options)

    def state(self):
        book = self.cache.book
        counted = (book.counts.tolist(), book.batch) if self.rows else None  # pages may stay for a batch without tokens
        return int(book.columns), counted, book._next, book.first

    def happens(self, fail, act):
        done = super().happens(fail, act)
        self.size = self.cache.book.batch
        return done

    def batch(self, data):
        return self.size or data.draw(st.integers(1, 3))

    @precondition(lambda self: self.rows and not self.lost)
    @rule(data=st.data())
    def select(self, data):
        sources = data.draw(st.lists(st.integers(0, self.size - 1), min_size=self.size, max_size=self.size))
        self.cache.reorder_cache(torch.tensor(sources))
        self.rows = [self.rows[s] for s in sources]

    @precondition(lambda self: self.rows)
    @rule()
    def what_needs_another_size_is_refused(self):
        before = self.state()
        for act in (
            lambda: self.cache.crop(-1), lambda: self.cache.batch_repeat_interleave(2),
            lambda: self.cache.batch_select_indices(torch.zeros(self.size + 1, dtype=torch.int64)),
        ):  # fmt: skip
            with pytest.raises(UnsupportedError):
                act()
        with pytest.raises(IndexError):
            self.cache.batch_select_indices(torch.full((self.size,), self.size))
        assert self.state() == before


TestPagedHistories, TestStaticHistories = PagedHistories.TestCase, StaticHistories.TestCase
TestPagedHistories.settings = settings(deadline=None, max_examples=60, stateful_step_count=20)
TestStaticHistories.settings = settings(deadline=None, max_examples=60, stateful_step_count=20)


@pytest.fixture
def ids():
    return torch.randint(2, VOCABULARY, (2, 14), generator=torch.Generator().manual_seed(6))


def test_beams_that_found_no_page_still_read_what_they_share(ids):
    model = tiny("llama")
    caches = [TersekvCache(model.config, "bf16", page_size=4, num_pages=n) for n in (3, None)]
    for cache in caches:
        model(ids[:1, :6], **over(cache))
        cache.reorder_cache(torch.tensor([0, 0, 0]))
    with pytest.raises(OutOfPagesError, match=r"^num_pages: want more than 3 pages .*want 2 free pages, got 1"):
        model(ids[:1, 6:7].expand(3, 1), **over(caches[0]))
    for cache in caches:
        cache.reorder_cache(torch.tensor([0, 1]))
    got, want = (model(ids[:, 6:8], **over(cache)).logits for cache in caches)
    assert torch.equal(got, want)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "deepseek_v3"])
def test_after_a_crop_of_everything_comes_any_batch(family, ids):
    model = tiny(family)
    cache = TersekvCache(model.config, page_size=4)
    for batch in (1, 2, 1):
        assert cache.batch_size == -1
        want = model(ids[:batch], **over(TersekvCache(model.config, page_size=4))).logits
        assert torch.equal(model(ids[:batch], **over(cache)).logits, want)
        cache.crop(-14)


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_rows_that_found_no_page_to_be_repeated_in_stay_as_they_were(family, ids):
    model = tiny(family)
    limited, free = (TersekvCache(model.config, page_size=4, num_pages=n) for n in (14, None))
    for cache in (limited, free):
        model(ids, **over(cache))
    with pytest.raises(OutOfPagesError, match=r"^num_pages: want more than 14 pages"):
        limited.batch_repeat_interleave(3)
    assert limited.batch_size == 2
    assert torch.equal(model(ids, **over(limited)).logits, model(ids, **over(free)).logits)


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
@pytest.mark.parametrize("layer", [0, 1])
def test_memory_that_runs_out_while_a_layer_grows_costs_no_token(family, layer, ids, monkeypatch):
    model = tiny(family)
    cache, want = (TersekvCache(model.config, page_size=4) for _ in range(2))
    for each in (cache, want):
        model(ids[:, :6], **over(each))

    def no_room(num_pages):
        raise torch.OutOfMemoryError(f"{num_pages} pages")

    with monkeypatch.context() as patch:
        patch.setattr(cache.paged[layer].store, "grow", no_room)
        with pytest.raises(torch.OutOfMemoryError):
            model(ids.repeat(1, 3), **over(cache))
        assert cache.get_seq_length() == 6
        assert torch.equal(model(ids[:, 6:7], **over(cache)).logits, model(ids[:, 6:7], **over(want)).logits)
    assert torch.equal(model(ids.repeat(1, 3), **over(cache)).logits, model(ids.repeat(1, 3), **over(want)).logits)


def test_a_static_cache_without_memory_takes_another_batch(ids, monkeypatch):
    model = tiny("llama")
    cache = TersekvStaticCache(model.config, page_size=4, max_tokens=20)
    make, made = TersekvStaticCache.make_store, []

    def room_for_one(*args):
        made.append(1)
        if len(made) == 2:
            raise torch.OutOfMemoryError("no room")
        return make(*args)

    monkeypatch.setattr(TersekvStaticCache, "make_store", room_for_one)
    with pytest.raises(torch.OutOfMemoryError):
        model(ids, **over(cache))
    assert cache.batch_size == -1
    assert cache.nbytes == 0
    want = model(ids[:1], **over(TersekvCache(model.config, page_size=4))).logits
    assert torch.equal(model(ids[:1], **over(cache)).logits, want)
