"""Every wrong argument of an indexer's operations, told by name."""

from __future__ import annotations

import re

import pytest
import torch

import tersekv
from tersekv import PagedIndexCache, PagedIndexLayer
from tersekv.errors import UnsupportedError

E4M3 = torch.float8_e4m3fn
FLOAT = "bfloat16 | float16 | float32"
Q = "float8_e4m3fn | bfloat16 | float16"


def good() -> dict:
    return {
        "q": torch.zeros(2, 4, 128).to(E4M3), "weights": torch.ones(2, 4),
        "cache": PagedIndexCache.allocate(1, 4, 16)[0], "page_table": torch.zeros(2, 2, dtype=torch.int32),
        "seq_lens": torch.tensor([20, 3]),
    }  # fmt: skip


SCORED = [
    ({"q": torch.zeros(2, 128)}, "q: want [T, Hi, Di], got [2, 128]"),
    ({"q": torch.zeros(2, 4, 64).to(E4M3)}, f"q: want [T, Hi, D=128] {Q}, got [2, 4, 64] "
     "float8_e4m3fn (D as in k_cache)"),
    ({"q": torch.zeros(2, 4, 128)}, f"q: want [T, Hi, D=128] {Q}, got [2, 4, 128] float32"),
    ({"q": torch.zeros(2, 0, 128).to(E4M3), "weights": None}, "q: want at least one head, got 0"),
    ({"weights": torch.ones(2, 3)}, "weights: want [T=2, Hi=4] float32, got [2, 3] float32 (Hi as in q)"),
    ({"weights": torch.ones(2, 4).bfloat16()}, "weights: want [T=2, Hi=4] float32, got [2, 4] bfloat16"),
    ({"page_table": torch.zeros(3, 2, dtype=torch.int32)}, "page_table: want [B=2, max_pages]"),
    ({"seq_lens": torch.tensor([1.0, 2.0])}, "seq_lens: want [B] int32 | int64 | uint32, got [2] float32"),
    ({"seq_lens": torch.tensor([20, 3, 1]), "page_table": torch.zeros(3, 2, dtype=torch.int32)},
     "q: want T a multiple of B=3 (or cu_seqlens_q for ragged drafts), got T=2"),
    ({"ratio": 0}, "ratio: want a positive number, got 0"),
    ({"reduce_blocks": 0}, "reduce_blocks: want a positive number, got 0"),
    ({"heads": "max"}, "heads: want 'sum' or 'each', got 'max'"),
    ({"width": -1}, "width: want 0 or more, got -1"),
    ({"scale": float("nan")}, "scale: want a finite number, got nan"),
    ({"seq_lens": torch.tensor([33, 3])}, "seq_lens: want at most 32 keys (max_pages * S), got 33 at 0"),
    ({"page_table": torch.tensor([[0, 4], [0, 0]])}, "page_table: want page ids in [0, 4), got 4 at request 0"),
    ({"cu_seqlens_q": torch.tensor([0, 1, 3])}, "cu_seqlens_q: want rows in [0, 2], got [1, 3) at 1"),
    ({"cu_seqlens_q": torch.tensor([0, 2, 2]), "max_q_len": 1},
     "max_q_len: want at least 2, the rows of request 0, got 1"),
]  # fmt: skip


@pytest.mark.parametrize("backend", [None, "torch"])
@pytest.mark.parametrize(("wrong", "message"), SCORED)
def test_scores_and_selections(wrong, message, backend):
    for call in (
        lambda given: tersekv.index_scores(**given, backend=backend),
        lambda given: tersekv.index_select(**given, k=3, backend=backend),
    ):
        with pytest.raises(ValueError, match=re.escape(message)) as told:
            call(good() | wrong)
        assert str(told.value).startswith(message)


@pytest.mark.parametrize(("wrong", "message"), [
    ({"out": torch.zeros(2, 31).half()}, "out: want [T=2, W] float32, got [2, 31] float16"),
    ({"out": torch.zeros(2, 31), "width": 32}, "out: want 32 columns as in width, got [2, 31]"),
    ({"heads": "each", "out": torch.zeros(2, 32)}, "out: want [T=2, Hi=4, W] float32, got [2, 32] float32"),
    ({"relu": 1}, "relu: want bool, got int"),
    ({"cache": torch.zeros(4, 16, 132, dtype=torch.uint8)}, "cache: want PagedIndexLayer, got Tensor"),
    ({"cache": PagedIndexCache.allocate(1, 4, 16)},
     "cache: want PagedIndexLayer, got PagedIndexCache, the cache of all layers (take one: cache[i])"),
    ({"ratio": 2.0}, "ratio: want int, got float 2.0"),
])  # fmt: skip
def test_scores(wrong, message):
    with pytest.raises((ValueError, TypeError)) as told:
        tersekv.index_scores(**(good() | wrong))
    assert str(told.value).startswith(message)


@pytest.mark.parametrize(("wrong", "message"), [
    ({"k": 0}, "k: want a positive number, got 0"),
    ({"k": 2.5}, "k: want int, got float 2.5"),
    ({"keep_first": -1}, "keep_first: want 0 or more, got -1"),
    ({"keep_last": -1}, "keep_last: want 0 or more, got -1"),
    ({"open_group": 1}, "open_group: want bool, got int"),
    ({"open_group": True, "ratio": 2, "reduce_blocks": 4}, "open_group: want False with reduce_blocks, got True"),
    ({"out": torch.zeros(2, 4, dtype=torch.int32)}, "out: want [T=2, K=3] int32, got [2, 4] int32"),
    ({"out": torch.zeros(2, 3, dtype=torch.int64)}, "out: want [T=2, K=3] int32, got [2, 3] int64"),
    ({"out_lens": torch.zeros(3, dtype=torch.int32)}, "out_lens: want [T=2] int32, got [3] int32 (T as in q)"),
])  # fmt: skip
def test_selections(wrong, message):
    with pytest.raises((ValueError, TypeError)) as told:
        tersekv.index_select(**(good() | {"k": 3} | wrong))
    assert str(told.value).startswith(message)


@pytest.mark.parametrize(("wrong", "message"), [
    ({"scores": torch.zeros(5)}, "scores: want [T, W], got [5]"),
    ({"scores": torch.zeros(2, 5).half()}, "scores: want [T, W] float32, got [2, 5] float16"),
    ({"visible": torch.tensor([1.0, 2.0])}, "visible: want [T=2] int32 | int64 | uint32, got [2] float32"),
    ({"visible": torch.tensor([1])}, "visible: want [T=2] int32 | int64 | uint32, got [1] int64"),
    ({"open_group": torch.tensor([1, 0])}, "open_group: want [T=2] bool, got [2] int64"),
    ({"out": torch.zeros(2, 2, dtype=torch.int32)}, "out: want [T=2, K=3] int32, got [2, 2] int32"),
    ({"out_lens": torch.zeros(2, 3, dtype=torch.int32)}, "out_lens: want [T=2] int32, got [2, 3] int32"),
])  # fmt: skip
def test_topk(wrong, message):
    with pytest.raises((ValueError, TypeError)) as told:
        tersekv.index_topk(**({"scores": torch.zeros(2, 5), "visible": torch.tensor([5, 3]), "k": 3} | wrong))
    assert str(told.value).startswith(message)


ROPE = {"cos_sin_cache": torch.ones(9, 64), "positions": torch.arange(2)}


@pytest.mark.parametrize(("wrong", "message"), [
    ({"k": torch.zeros(2, 64)}, f"k: want [T, D=128] {FLOAT}, got [2, 64] float32 (D as in k_cache)"),
    ({"k": torch.zeros(2, 128, dtype=E4M3)}, f"k: want [T, D=128] {FLOAT}, got [2, 128] float8_e4m3fn"),
    ({"slot_mapping": torch.arange(3)}, "slot_mapping: want [T=2] int32 | int64 | uint32, got [3] int64"),
    ({"norm": torch.ones(128)}, "norm: want (weight, bias, eps) or None, got Tensor"),
    ({"norm": (torch.ones(128), None, 1e-6)}, "norm[1]: want a tensor beside norm[0], got None"),
    ({"norm": (torch.ones(64), torch.ones(64), 1e-6)}, f"norm[0]: want [D=128] {FLOAT}, got [64]"),
    ({"norm": (torch.ones(128), torch.ones(128), -1.0)}, "norm[2]: want a finite number, not negative, got -1.0"),
    ({"cos_sin_cache": torch.ones(9, 64)}, "positions: want a tensor beside cos_sin_cache, got None"),
    ({"positions": torch.arange(2)}, "positions: want None without cos_sin_cache, got a tensor"),
    (ROPE | {"cos_sin_cache": torch.ones(9, 130)}, "cos_sin_cache: want at most D=128 rotary columns, got 130"),
    (ROPE | {"cos_sin_cache": torch.ones(9, 63)}, "cos_sin_cache: want [max_pos, R] with R positive and even, got 63"),
    (ROPE | {"rope": "middle"}, "rope: want 'first' or 'last', got 'middle'"),
    ({"round16": 1}, "round16: want bool, got int"),
    ({"interleaved": None}, "interleaved: want bool, got NoneType"),
])  # fmt: skip
def test_append(wrong, message):
    given = {"k": torch.zeros(2, 128), "cache": PagedIndexCache.allocate(1, 4, 16)[0], "slot_mapping": torch.arange(2)}
    with pytest.raises((ValueError, TypeError)) as told:
        tersekv.index_append(**(given | wrong))
    assert str(told.value).startswith(message)


@pytest.mark.parametrize(("wrong", "message"), [
    ({"q": torch.zeros(2, 128)}, "q: want [T, Hi, Di], got [2, 128]"),
    ({"q": torch.zeros(2, 4, 12)}, "q: want [T, Hi, Di=128 as in cache], got [2, 4, 12]"),
    ({"weights": torch.zeros(2, 3)}, "weights: want [T=2, Hi=4] bfloat16 | float16 | float32, got [2, 3] float32"),
    ({"weight_scale": "1"}, "weight_scale: want a number or None, got str"),
    ({"weight_scale": float("inf")}, "weight_scale: want a finite number, got inf"),
    ({"cache": None}, "cache: want PagedIndexLayer, got NoneType"),
])  # fmt: skip
def test_query(wrong, message):
    given = {"q": torch.zeros(2, 4, 128), "cache": PagedIndexCache.allocate(1, 4, 16)[0]}
    with pytest.raises((ValueError, TypeError)) as told:
        tersekv.index_query(**(given | wrong))
    assert str(told.value).startswith(message)


PAGES = torch.zeros(2, 4, 132, dtype=torch.uint8)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: PagedIndexLayer.from_buffer([1]), "pages: want Tensor, got list"),
    (lambda: PagedIndexLayer.from_buffer(PAGES.view(torch.int8)),
     "pages: want [P, S, n] or [P, S, 1, n] uint8, got [2, 4, 132] int8"),
    (lambda: PagedIndexLayer.from_buffer(PAGES[:, :, :130]),
     "pages: want Di + 4 * ceil(Di / 128) bytes a token for index_fp8, Di a multiple of 8 up to 256, got 130"),
    (lambda: PagedIndexLayer.from_buffer(torch.zeros(2, 4, 144, dtype=torch.uint8)[:, :, :132]),
     "pages: want the bytes of a page without gaps, got strides [576, 144, 1]"),
    (lambda: PagedIndexLayer.from_buffer(torch.zeros(2, 530, dtype=torch.uint8)[:, :528].unflatten(1, (4, 132))),
     "pages: want pages that begin at multiples of 4 bytes"),
    (lambda: PagedIndexLayer.from_buffer(PAGES, "ue8m0"), "format: want one of index_fp8, bf16, fp16, fp8_e4m3 for"),
    (lambda: PagedIndexLayer.from_buffer(PAGES, rotation="random"), "rotation: want None or 'hadamard', got 'random'"),
    (lambda: PagedIndexLayer(torch.zeros(2, 4, 128).to(E4M3), None, "index_fp8"),
     "scale: want the stored scales of index_fp8, got None"),
    (lambda: PagedIndexLayer(torch.zeros(2, 4, 128).half(), torch.zeros(2, 4), "fp16"),
     "scale: want None for fp16, got a tensor"),
    (lambda: PagedIndexCache.allocate(1, 4, 16, head_dim=260),
     "head_dim: want a positive multiple of 8 for index keys, at most 256, got 260"),
    (lambda: PagedIndexCache.allocate(1, 4, 0), "page_size: want a positive number, got 0"),
    (lambda: tersekv.index_bytes_per_token("nvfp4"), "format: want one of index_fp8, bf16, fp16, fp8_e4m3 for index"),
])  # fmt: skip
def test_layers_and_caches(make, message):
    with pytest.raises((ValueError, TypeError)) as told:
        make()
    assert str(told.value).startswith(message)


def test_a_backend_that_lacks_them_says_so():
    with pytest.raises(UnsupportedError, match="gluon: has no index_scores"):
        tersekv.index_scores(**good(), backend="gluon")


def test_checked_mode_knows_slots_positions_and_pages(monkeypatch):
    monkeypatch.setenv("TERSEKV_CHECKED", "1")
    cache = PagedIndexCache.allocate(1, 4, 16)[0]
    with pytest.raises(ValueError, match="slot_mapping: want every entry below 64, got 64"):
        tersekv.index_append(torch.zeros(1, 128), cache, torch.tensor([64]))
    with pytest.raises(ValueError, match=r"positions: want every entry in \[0, 9\), got 9"):
        tersekv.index_query(
            torch.zeros(1, 4, 128), cache=cache, cos_sin_cache=torch.ones(9, 64), positions=torch.tensor([9])
        )
    with pytest.raises(ValueError, match=r"page_table: want page ids in \[0, 4\), got 9 at \[1, 0\]"):
        tersekv.index_select(**(good() | {"page_table": torch.tensor([[0, 1], [9, 0]])}), k=3)


def test_a_backend_that_lacks_the_device_says_so():
    with pytest.raises(tersekv.UnsupportedError, match=r"index_topk has no backend for scores=\[2, 5\]"):
        tersekv.index_topk(torch.zeros(2, 5), torch.tensor([5, 3]), 3, backend="gluon")
