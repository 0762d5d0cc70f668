"""An indexer's operations in the native kernels, beside the oracle: rows byte by byte, spans of keys and columns."""

from __future__ import annotations

import pytest
import torch

import tersekv
from tersekv import PagedIndexCache
from tersekv.backends.cpu import build
from tersekv.calls import IndexScoresCall
from tersekv.dispatch.plan import dispatch
from tersekv.testing import verify

pytestmark = pytest.mark.usefixtures("native")
OPS = ("index_append", "index_query", "index_scores", "index_topk", "index_select")
I32, BF = torch.int32, torch.bfloat16
ROWS = {
    "norm and rope": {"norm": 1e-6, "rotary": 64},
    "rotated, last columns, round16": {
        "norm": 1e-6, "rotary": 64, "rope": "last", "rotation": "hadamard", "round16": True,
    },
    "D 200 interleaved": {"dim": 200, "rotary": 200, "interleaved": True, "rotation": "hadamard"},
    "D 8": {"dim": 8, "rotation": "hadamard", "norm": 0.5},
}  # fmt: skip


def numbers(tokens, dim):
    """Rows of all sizes, with powers of two times 448 and their neighbours, and rows of zeros."""
    x = torch.randn(tokens, dim) * 10.0 ** torch.randint(-7, 5, (tokens, 1))
    edges = torch.tensor([1 - 2**-24, 1.0, 1 + 2**-23]) * 448.0
    x[:3], x[3] = edges[:, None] * 2.0 ** torch.randint(-9, 1, (3, dim)), 0.0
    return x


def rope_options(what, tokens):
    if "rotary" not in what:
        return {}
    position = torch.randint(0, 50, (tokens,))
    position[5:8] = torch.tensor([-1, 50, 2**40])
    angle = torch.randn(50, what["rotary"] // 2)
    return {
        "cos_sin_cache": torch.cat([angle.cos(), angle.sin()], -1), "positions": position,
        "interleaved": what.get("interleaved", False), "rope": what.get("rope", "first"),
    }  # fmt: skip


@pytest.mark.parametrize("level", build._LEVELS)
@pytest.mark.parametrize("dtype", [BF, torch.float16, torch.float32])
@pytest.mark.parametrize("what", ROWS)
def test_bytes_of_keys_and_queries_are_the_oracles(what, dtype, level, native):
    if level not in native.levels():
        pytest.skip(f"this machine has no {level}")
    native.use_level(level)
    torch.manual_seed(0)
    what, tokens, heads = ROWS[what], 96, 5
    dim, round16 = what.get("dim", 128), what.get("round16", False)
    rope = rope_options(what, tokens)
    norm = (torch.randn(dim).to(dtype), torch.randn(dim), what["norm"]) if "norm" in what else None
    k, q = numbers(tokens, dim + 3).to(dtype)[:, :dim], numbers(tokens * heads, dim).to(dtype).view(heads, tokens, dim)
    weights, slots = torch.randn(heads, tokens).T.to(dtype), torch.randperm(tokens + 20)[:tokens]
    slots[::9], slots[10] = -1, slots[11]  # of two tokens with one slot the last is stored
    for format in tersekv.INDEX_FORMATS:
        pages, queries = [], []
        for backend, threads in (("torch", 1), ("cpu", 1), ("cpu", 3)):
            torch.set_num_threads(threads)
            layer = PagedIndexCache.allocate(1, 7, 16, head_dim=dim, format=format, rotation=what.get("rotation"))[0]
            layer.k.view(torch.uint8).fill_(7)
            tersekv.index_append(k, layer, slots, norm=norm, round16=round16, backend=backend, **rope)
            pages.append([x.view(torch.uint8) for x in (layer.k, layer.scale) if x is not None])
            q8, w = tersekv.index_query(
                q.transpose(0, 1), weights, cache=layer, round16=round16, backend=backend, **rope
            )
            queries.append([q8.view(torch.uint8), w])
        for want, *others in (pages, queries):
            for got in others:
                assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), format


@pytest.mark.parametrize("level", build._LEVELS)
def test_rows_of_any_bits_are_the_oracles(level, native):
    if level not in native.levels():
        pytest.skip(f"this machine has no {level}")
    native.use_level(level)
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (512, 128), dtype=torch.int64).to(I32).view(torch.float32)
    stored, asked = [], []
    for backend in ("cpu", "torch"):
        layer = PagedIndexCache.allocate(1, 8, 64)[0]
        tersekv.index_append(bits, layer, torch.arange(512), backend=backend)
        q8, w = tersekv.index_query(bits.view(32, 16, 128), cache=layer, backend=backend)
        stored.append((layer.k.view(torch.uint8), layer.scale))
        asked.append((q8.view(torch.uint8), w))
    torch.testing.assert_close(stored[0], stored[1], rtol=0, atol=0)
    torch.testing.assert_close(asked[0], asked[1], rtol=0, atol=0)


def span_call(starts, ends, block=1, each=False, pages=12, width=None):
    """Scores of two requests, of as many rows each as there are pairs of starts and ends for."""
    torch.manual_seed(0)
    layer = PagedIndexCache.allocate(1, 12, 64)[0]
    tersekv.index_append(torch.randn(12 * 64, 128), layer, torch.arange(12 * 64))
    rows = len(starts if ends is None else ends)
    q8, w = tersekv.index_query(torch.randn(rows, 4, 128), torch.randn(rows, 4), cache=layer)
    table = torch.stack([torch.randperm(12)[:pages] for _ in range(2)]).to(I32)
    layer.scale[table[0, 0], 5] = torch.nan
    width = width or -(-pages * 64 // block)
    out = torch.full((rows, *([4] if each else []), width), 7.0)
    return IndexScoresCall(
        q8, w, layer.k, layer.scale, table, torch.tensor([600, 90], dtype=I32), None, out, "index_fp8", rows // 2, 1,
        True, 1.0, each, block, *(None if x is None else torch.tensor(x) for x in (starts, ends)),
    )  # fmt: skip


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("block", [1, 3, 100])
@pytest.mark.parametrize("which", ["both", "starts", "ends"])
def test_rows_see_the_keys_between_their_starts_and_ends(which, block, each):
    starts = [-(2**40), 0, 130, 5, 700, 63, 2**40, 64, 64, 0] if which != "ends" else None
    ends = [768, 1, 400, 6, 3, 64, 768, -(2**40), 129, 0] if which != "starts" else None
    results = []
    for backend, threads in (("torch", 1), ("cpu", 1), ("cpu", 3)):
        torch.set_num_threads(threads)
        for width in (None, 2):
            call = span_call(starts, ends, block, each, width=width)
            dispatch("index_scores", call, backend)
            results.append(call.out)
    for i in range(2, 6):
        torch.testing.assert_close(results[i], results[i % 2], rtol=1e-4, atol=1e-4, equal_nan=True)
    assert results[0].isneginf().any()
    assert which != "both" or results[0][3].isnan().any()  # it sees one key, whose scale is NaN


def test_ends_outside_the_table_are_refused_in_the_oracles_words():
    told = []
    for backend in ("torch", "cpu"):
        call = span_call([0, 0, 0, 0], [3, 300, 2, 1], pages=4)
        with pytest.raises(ValueError, match="ends: want at most 256 keys") as e:
            dispatch("index_scores", call, backend)
        told.append(str(e.value))
        assert (call.out == 7.0).all()
    assert told[0] == told[1]


@pytest.mark.parametrize("kept", [0, 3])
def test_columns_are_taken_and_counted_from_starts(kept):
    torch.manual_seed(0)
    scores = torch.randn(6, 3, 5004).mul(20).round()[..., 1:5001]  # many are equal
    starts = torch.tensor([0, -5, 4990, 17, 6000, 100])
    visible = torch.tensor([5000, 2**40, 5000, 17, 5000, 99], dtype=torch.int64)
    for k in (1, 40, 2048):
        pair = [
            tersekv.index_topk(scores, visible, k, starts=starts, keep_first=kept, keep_last=kept, backend=backend)
            for backend in ("cpu", "torch")
        ]
        assert torch.equal(*pair)


@pytest.mark.parametrize("k", [2994, 2996, 2999, 3000])
def test_no_more_columns_are_kept_than_are_seen(k, native):
    scores, visible, lens = torch.randn(2, 3000), torch.tensor([2993, 2985]), torch.empty(2, dtype=I32)
    for level in native.levels():
        native.use_level(level)
        got = tersekv.index_topk(scores, visible, k, keep_first=k, out_lens=lens, backend="cpu")
        assert torch.equal(got, tersekv.index_topk(scores, visible, k, keep_first=k, backend="torch"))
        assert torch.equal(lens, visible.int())


@pytest.mark.parametrize("op", OPS)
def test_a_cpu_runs_every_operation_natively(op):
    for case in verify.cases((op,)):
        if case.quick or case.starts:
            assert verify.run(case, "cpu").backend == "cpu", case.id
