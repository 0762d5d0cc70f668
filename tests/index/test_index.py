"""An indexer's caches and operations: bytes by a second writer, identities, the law of selections, every error."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

import tersekv
from tersekv import PagedIndexCache, PagedIndexLayer
from tersekv.testing import verify
from tersekv.testing.cases import cases
from tersekv.testing.compare import relative

BACKENDS = [None, "torch"]
OPS = ("index_append", "index_query", "index_scores", "index_topk", "index_select")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [*cases(OPS)], ids=lambda c: c.id)
def test_cases(case, backend):
    result = verify.run(case, "cpu", backend)
    assert result.status == verify.PASSED, result.message


def filled(format="index_fp8", tokens=(60, 40), dim=128, page=16, rotation=None):
    """A layer that holds two requests, its keys by token, page table and lengths."""
    torch.manual_seed(1)
    pool = tersekv.PagePool(num_pages=32, page_size=page)
    for name, n in zip("ab", tokens, strict=True):
        pool.add(name, n)
    layer = PagedIndexCache.allocate(1, 32, page, head_dim=dim, format=format, rotation=rotation)[0]
    k = torch.randn(sum(tokens), dim)
    tersekv.index_append(k, layer, pool.slot_mapping(["a", "b"], list(tokens)))
    return layer, k, pool.page_table(["a", "b"]), pool.seq_lens(["a", "b"])


def query(layer, t=2, heads=16):
    q, w = torch.randn(t, heads, layer.head_dim), torch.randn(t, heads)
    return tersekv.index_query(q, w, cache=layer)


# Pages


def written(rows, d):
    """A page of index_fp8, byte by byte: codes, then scales; NumPy and the text of the format alone."""
    values = {}
    for code in range(127):
        e, m = code >> 3, code & 7
        values[code] = m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
    table = np.array([values[c] for c in range(127)])
    codes, scales = [], []
    for row in rows:
        for block in np.split(row, range(128, d, 128)):
            amax = max(float(np.abs(block).max()), float(np.float32(1e-4)))
            scale = 2.0 ** np.ceil(np.log2(np.float32(amax) / np.float32(448)))
            scales.append(np.float32(scale))
            for x in block / scale:
                size = abs(float(x))
                order = np.lexsort((np.arange(127) % 2, np.abs(table - size)))
                codes.append(int(order[0]) | (128 if np.signbit(x) else 0))
    return bytes(codes) + np.array(scales, "<f4").tobytes()


@pytest.mark.parametrize(("d", "page"), [(128, 3), (40, 2), (200, 2)])
def test_bytes_of_a_page_against_a_second_writer(d, page):
    k = np.random.default_rng(0).normal(size=(page, d)).astype(np.float32)
    k[0] = 0
    for i, x in enumerate((448 * 2.0**-3, np.nextafter(np.float32(448 * 2.0**-3), np.float32(1e9)))):
        k[1, i] = x if i == page % 2 else 0.5  # at and just above a power of two times 448
    pages = torch.full(
        (2, page, PagedIndexCache.allocate(1, 1, 1, head_dim=d).bytes_per_token), 0xFF, dtype=torch.uint8
    )
    layer = PagedIndexLayer.from_buffer(pages)
    tersekv.index_append(torch.from_numpy(k), layer, torch.arange(page) + page)
    assert bytes(pages[1].flatten().tolist()) == written(k, d)
    assert (pages[0] == 0xFF).all()


def test_a_zero_row_and_rows_that_are_skipped_or_outside():
    layer = PagedIndexCache.allocate(1, 2, 4)[0]
    layer.scale.fill_(7)
    slots = torch.tensor([3, -1, 8, 2**40])
    tersekv.index_append(torch.zeros(4, 128), layer, slots)
    assert layer.scale[0, 3] == 2.0**-22
    assert (layer.scale == 7).sum() == 7


def test_a_buffer_s_pages_may_lie_apart_and_hold_a_head():
    whole = torch.zeros(3, 64 * 132 + 20, dtype=torch.uint8)
    rows = whole[:, : 64 * 132].unflatten(1, (64, 1, 132))
    layer = PagedIndexLayer.from_buffer(rows)
    layer.scale[2, 63] = 1.5
    assert bytes(whole[2, 64 * 132 - 4 : 64 * 132].tolist()) == np.float32(1.5).tobytes()
    assert (layer.num_pages, layer.page_size, layer.head_dim) == (3, 64, 128)


@pytest.mark.parametrize(("format", "n"), [("index_fp8", 132), ("bf16", 256), ("fp16", 256), ("fp8_e4m3", 128)])
def test_bytes_per_token_and_copies(format, n):
    assert tersekv.index_bytes_per_token(format) == n
    cache = PagedIndexCache.allocate(3, 4, 16, format=format, rotation="hadamard")
    assert (cache.bytes_per_token, cache.nbytes) == (3 * n, 3 * n * 64)
    cache[1].k.view(torch.uint8).random_()
    for other in (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
        assert torch.equal(other[1].k.view(torch.uint8), cache[1].k.view(torch.uint8))
        assert (other.format, other[0].rotation, other.head_dim) == (format, "hadamard", 128)
    tersekv.copy_pages(cache, [(1, 3)])
    assert torch.equal(cache[1].k[3].view(torch.uint8), cache[1].k[1].view(torch.uint8))


# Identities


@pytest.mark.parametrize("format", tersekv.INDEX_FORMATS)
def test_scores_are_those_of_the_rows_before_they_were_stored(format):
    layer, k, table, lens = filled(format)
    torch.manual_seed(5)
    q, w = torch.randn(2, 16, 128), torch.randn(2, 16)
    scores = tersekv.index_scores(*tersekv.index_query(q, w, cache=layer), layer, table, lens)
    want = (torch.relu(q[0] @ k[:60].T) * w[0][:, None]).sum(0) * (16 * 128) ** -0.5
    assert relative(scores[0, :60], want) < (0.06 if "8" in format else 0.01)


def test_both_rotated_is_neither_but_for_rounding():
    found = []
    for rotation in (None, "hadamard"):
        layer, _, table, lens = filled(rotation=rotation)
        torch.manual_seed(5)
        found.append(tersekv.index_scores(*query(layer), layer, table, lens))
    assert relative(found[1][0, :60], found[0][0, :60]) < 0.06
    assert not torch.equal(*found)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [
    {}, {"heads": "each"}, {"reduce_blocks": 3}, {"ratio": 4, "open_group": True}, {"keep_first": 2, "keep_last": 3},
    {"width": 30}, {"relu": False, "scale": -2.0}, {"ratio": 4, "open_group": True, "heads": "each", "keep_last": 1},
])  # fmt: skip
@pytest.mark.parametrize("k", [1, 5, 60])
def test_select_is_topk_of_scores(options, k, backend):
    layer, _, table, lens = filled()
    q, w = query(layer, t=6)
    common = {n: options[n] for n in ("heads", "reduce_blocks", "ratio", "width", "relu", "scale") if n in options}
    scores = tersekv.index_scores(q, w, layer, table, lens, **common, backend=backend)
    got, got_lens = tersekv.index_select(q, w, layer, table, lens, k, **options, backend=backend)
    position = torch.cat([n - 3 + torch.arange(3) for n in lens.tolist()])
    ratio = options.get("ratio", 1)
    keys = (position + 1) // ratio
    visible = -(-keys // options.get("reduce_blocks", 1))
    kept = {n: options[n] for n in ("keep_first", "keep_last") if n in options}
    is_open = (position + 1) % ratio > 0 if options.get("open_group") else None
    lens_of = torch.empty_like(got_lens)
    if is_open is not None and "width" not in options:
        assert int(visible.max()) <= scores.shape[-1]
    want = tersekv.index_topk(scores, visible, k, **kept, open_group=is_open, out_lens=lens_of, backend=backend)
    assert torch.equal(got, want)
    assert torch.equal(got_lens, lens_of)


def test_a_needle_in_the_last_slot_is_found_and_what_is_not_seen_moves_nothing():
    layer, _, table, lens = filled(tokens=(64, 40))
    q, w = query(layer, t=2)
    k = q[0, 0].float() * 50
    tersekv.index_append(k[None], layer, (table[0, 63 // 16] * 16 + 15)[None])
    got, _ = tersekv.index_select(q, torch.ones_like(w), layer, table, lens, 3)
    assert 63 in got[0].tolist()
    before = tersekv.index_scores(q, w, layer, table, lens)
    storage = torch.zeros(0, dtype=torch.uint8).set_(layer.k.untyped_storage())
    used = {int(p) for b, n in enumerate(lens.tolist()) for p in table[b, : -(-n // 16)]}
    for page in set(range(32)) - used:
        storage[page * layer.k.stride(0) :][: 16 * 132] = 0xFF
    layer.scale[table[1, 2], 8:] = torch.nan  # past 40 tokens
    table[0, 4:], table[1, 3:] = 2**30, 2**30
    assert torch.equal(tersekv.index_scores(q, w, layer, table, lens), before)


def test_a_nan_code_is_a_nan_score_and_ranks_last():
    layer, _, table, lens = filled()
    layer.k.view(torch.uint8)[table[0, 1], 3, 5] = 0x7F
    q, w = query(layer)
    scores = tersekv.index_scores(q, w, layer, table, lens)
    assert scores[0].isnan().nonzero().tolist() == [[19]]
    assert 19 not in tersekv.index_select(q, w, layer, table, lens, 59)[0][0].tolist()
    assert tersekv.index_select(q, w, layer, table, lens, 60)[0][0].tolist() == [*range(60)]


def test_rows_before_the_first_token_and_of_no_request_see_nothing():
    layer, _, table, _ = filled()
    q, w = query(layer, t=5)
    lens, starts = torch.tensor([2, 0]), torch.tensor([0, 4, 4])
    scores = tersekv.index_scores(q, w, layer, table, lens, cu_seqlens_q=starts)
    assert scores.isfinite().sum(-1).tolist() == [0, 0, 1, 2, 0]
    indices, index_lens = tersekv.index_select(q, w, layer, table, lens, 2, cu_seqlens_q=starts)
    assert indices.tolist() == [[-1, -1], [-1, -1], [0, -1], [0, 1], [-1, -1]]
    assert index_lens.tolist() == [0, 0, 1, 2, 0]


def test_select_goes_through_rows_in_parts(monkeypatch):
    from tersekv.backends.torch import index_select

    layer, _, table, lens = filled()
    q, w = query(layer, t=20)
    want = tersekv.index_select(q, w, layer, table, lens, 7, backend="torch")
    monkeypatch.setattr(index_select, "MAX_SCORES", 3 * table.shape[1] * 16)
    got = tersekv.index_select(q, w, layer, table, lens, 7, backend="torch")
    assert torch.equal(got[0], want[0])


# The law of selections


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_zeros_and_nan(backend):
    nan, inf = torch.nan, torch.inf

    def take(scores, k, **options):
        x = torch.tensor([scores])
        visible = options.pop("visible", len(scores))
        return tersekv.index_topk(x, torch.tensor([visible]), k, **options, backend=backend)[0].tolist()

    assert take([1.0] * 6, 4) == [0, 1, 2, 3]
    assert take([-0.0, 0.0, -0.0], 2) == [0, 1]
    assert take([nan, 1.0, nan, -3e38], 3) == [0, 1, 3]
    assert take([nan, -inf, 2.0, inf], 4) == [0, 2, 3, -1]
    assert take([5.0, 4.0, 3.0, 2.0, 1.0], 3, keep_last=2) == [0, 3, 4]
    assert take([1.0, 4.0, 3.0, 2.0, 1.0], 3, keep_first=2, keep_last=2) == [0, 3, 4]
    assert take([1.0, 4.0, 3.0, 2.0, 9.0], 2, keep_first=9, keep_last=1) == [0, 4]
    assert take([1.0, -inf, 3.0, 2.0], 2, keep_last=3) == [2, 3]
    assert take([1.0, 9.0], 3, visible=1) == [0, -1, -1]
    assert take([1.0, 9.0], 3, visible=0) == [-1, -1, -1]
    assert take([1.0, 9.0], 1, visible=2, open_group=torch.tensor([True])) == [1, 2]
    assert take([1.0, 9.0], 2, visible=1, open_group=torch.tensor([True])) == [0, 1, -1]
    assert take([1.0, 9.0], 1, visible=2, open_group=torch.tensor([False])) == [1, -1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_negative_group_is_no_entry_of_a_list(backend):
    scores, visible = torch.tensor([[1.0, 9.0]] * 4), torch.tensor([-1, -(2**31), 0, 2], dtype=torch.int32)
    lens = torch.full((4,), 99, dtype=torch.int32)
    got = tersekv.index_topk(scores, visible, 1, open_group=torch.tensor([True] * 4), out_lens=lens, backend=backend)
    assert got.tolist() == [[-1, -1], [-1, -1], [0, -1], [1, 2]]
    assert lens.tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_topk_of_random_rows_is_a_sort_s(backend):
    torch.manual_seed(3)
    for k in (1, 2, 511, 512, 2048):
        scores = torch.randn(3, 5000).round(decimals=2)
        got = tersekv.index_topk(scores, torch.tensor([5000, 2048, 600]), k, backend=backend)
        for row, n in enumerate((5000, 2048, 600)):
            want = scores[row, :n].sort(descending=True, stable=True).indices[:k].sort().values.tolist()
            assert got[row].tolist() == want + [-1] * (k - len(want))
