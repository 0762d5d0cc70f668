"""tersekv.compat.flashinfer: the appends, byte for byte, and FlashInfer's index helpers."""

import numpy as np
import pytest
import torch
from compat_reference import BF16, E4M3, E5M2, FP16, cast, poisoned, raw, same_bytes

from tersekv.compat import flashinfer as fi


def rope(x, table_row, neox):
    """x [..., R] fp32 rotated by one row [cos | sin] of the table."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for i in range(half):
        a, b = (i, i + half) if neox else (2 * i, 2 * i + 1)
        c, s = table_row[i], table_row[half + i]
        out[..., a] = x[..., a] * c - x[..., b] * s
        out[..., b] = x[..., b] * c + x[..., a] * s
    return out


def place(b, position, indptr, indices, page_size):
    """(page, entry), or None where the token has no place."""
    if b < 0 or position < 0 or indptr[b] + position // page_size >= indptr[b + 1]:
        return None
    return int(indices[indptr[b] + position // page_size]), position % page_size


class Ragged:
    """7 tokens of 3 requests in pages of 4: unsorted pages, a request without new tokens, one padding token."""

    page_size, num_pages, max_pos = 4, 8, 64
    indptr, indices = (0, 2, 3, 6), (6, 1, 4, 0, 7, 2)
    batch, positions = (0, 0, 2, 2, 2, -1, 2), (3, 4, 0, 7, 8, 0, 11)
    pos_ids = (9, 10, 0, 63, 8, 5, 2)

    def indices_of(self, dtype):
        names = ("indices", "indptr", "batch", "positions")
        return [torch.tensor(getattr(self, n), dtype=dtype) for n in names]

    def place(self, t):
        return place(self.batch[t], self.positions[t], self.indptr, self.indices, self.page_size)


RAGGED = Ragged()
T = len(RAGGED.batch)


def gqa_inputs(dtype, n, heads=(4, 2), r=8, scale=40.0):
    hq, h = heads
    make = lambda *s: (torch.randn(*s) * scale).to(dtype)  # noqa: E731
    nopes = (make(T, hq, n), make(T, h, n)) if n else (None, None)
    table = torch.randn(RAGGED.max_pos, r)
    return make(T, hq, r), make(T, h, r), *nopes, make(T, h, r + n), table


def expect_gqa(q_rope, k_rope, q_nope, k_nope, v, table, *, neox, dtype, sq, skv, pos_ids=None, places=None):
    """(q_rope_out, q_nope_out, {(page, entry): (k row, v row)})"""
    q_out, n_out, rows = [], [], {}
    for t in range(T):
        p = (pos_ids or RAGGED.pos_ids)[t]
        at = RAGGED.place(t) if places is None else places[t]
        known = 0 <= p < len(table)
        live_q = known and RAGGED.batch[t] >= 0
        turn = lambda x, p=p: rope(x.float(), table[p], neox)  # noqa: E731
        q_out.append(cast(turn(q_rope[t]) * sq, dtype) if live_q else torch.zeros_like(q_rope[t]).to(dtype))
        if q_nope is not None:
            n_out.append(cast(q_nope[t].float() * sq, dtype) if live_q else torch.zeros_like(q_nope[t]).to(dtype))
        if at is None or not known:
            continue
        k = turn(k_rope[t])
        if k_nope is not None:
            k = torch.cat((k, k_nope[t].float()), -1)
        rows[at] = cast(k * skv, dtype), cast(v[t].float() * skv, dtype)
    stack = lambda x: torch.stack([raw(y) for y in x]).view(dtype)  # noqa: E731
    return stack(q_out), stack(n_out) if n_out else None, rows


def expect_caches(caches, rows):
    out = [raw(c).clone().view(c.shape[:-1] + (-1,)) for c in caches]
    for (page, entry), pair in rows.items():
        for cache, row in zip(out, pair, strict=True):
            cache[page, entry] = raw(row)
    return out


def check_caches(caches, before, rows):
    for got, want in zip(caches, expect_caches(before, rows), strict=True):
        assert torch.equal(raw(got).view(want.shape), want)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("dtype", "stored", "neox", "n"),
    [(BF16, E4M3, True, 8), (FP16, E4M3, False, 24), (BF16, E5M2, False, 0), (FP16, E5M2, True, 5)],
)
def test_gqa_append_stores_rope_first_rows_and_returns_q_to_the_bit(layout, dtype, stored, neox, n):
    inputs = gqa_inputs(dtype, n)
    shape = (RAGGED.num_pages, RAGGED.page_size, 2, 8 + n)
    k_cache, v_cache = (poisoned(*shape, dtype=stored) for _ in range(2))
    given = (k_cache, v_cache)
    if layout == "HND":
        given = tuple(torch.empty(shape[0], shape[2], shape[1], shape[3], dtype=stored) for _ in given)
        for g, c in zip(given, (k_cache, v_cache), strict=True):
            g.view(torch.uint8).copy_(c.transpose(1, 2).view(torch.uint8))
    before = (k_cache.clone(), v_cache.clone())
    indices, indptr, batch, positions = RAGGED.indices_of(torch.int32)
    got = fi.rope_quantize_fp8_append_paged_kv_cache(
        *inputs, torch.tensor(RAGGED.pos_ids, dtype=torch.int32), given, indices, indptr, batch, positions,
        is_neox=neox, quantize_dtype=stored, quant_scale_q=0.7, quant_scale_kv=3.1, page_size=4, kv_layout=layout,
    )  # fmt: skip
    q_rope, q_nope, rows = expect_gqa(*inputs, neox=neox, dtype=stored, sq=0.7, skv=3.1)
    assert len(rows) == 6
    assert same_bytes(got[0], q_rope)
    assert same_bytes(got[1], q_nope) if n else got[1].shape == (T, 4, 0)
    assert not raw(got[0][5]).any()  # the padding token
    caches = given if layout == "NHD" else [g.transpose(1, 2) for g in given]
    check_caches(caches, before, rows)


def test_tokens_without_a_place_write_nothing_and_others_are_untouched():
    inputs = gqa_inputs(BF16, 8)
    positions = [8, -1, 12, 4, 2**31 - 1, 0, 3]  # past the pages of the request (twice), negative, far out
    places = [None, None, None, (7, 0), None, None, (0, 3)]
    pos_ids = [0, 1, 2, 64, 4, 5, 6]  # token 3 stands outside the RoPE table
    caches = [poisoned(8, 4, 2, 16, dtype=E4M3) for _ in range(2)]
    before = [c.clone() for c in caches]
    indices, indptr, batch, _ = RAGGED.indices_of(torch.int64)
    got = fi.rope_quantize_fp8_append_paged_kv_cache(
        *inputs, torch.tensor(pos_ids), tuple(caches), indices, indptr, batch, torch.tensor(positions), page_size=4
    )
    want = expect_gqa(*inputs, neox=True, dtype=E4M3, sq=1.0, skv=1.0, pos_ids=pos_ids, places=places)
    assert set(want[2]) == {(0, 3)}
    assert same_bytes(got[0], want[0])
    assert same_bytes(got[1], want[1])
    check_caches(caches, before, want[2])


def test_strided_inputs_given_outputs_and_tensor_scales():
    qkv = (torch.randn(T, 2 * (4 + 2 + 2), 16) * 20).to(BF16)[:, ::2]  # heads of one fused projection
    q, k, v = qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]
    inputs = q[..., :8], k[..., :8], q[..., 8:], k[..., 8:], v, torch.randn(64, 8)
    both = poisoned(8, 4, 2, 2, 20, dtype=E4M3)  # K and V in one page, rows longer than the head
    caches = both[:, :, 0, :, :16], both[:, :, 1, :, 2:18]
    before = [c.clone() for c in caches]
    q_out = poisoned(T, 4, 16, dtype=E4M3)
    indices, indptr, batch, positions = RAGGED.indices_of(torch.uint32)
    batch = torch.tensor(RAGGED.batch, dtype=torch.int32)  # -1 has no uint32
    got = fi.rope_quantize_fp8_append_paged_kv_cache(
        *inputs, torch.tensor(RAGGED.pos_ids, dtype=torch.uint32), caches, indices, indptr, batch, positions,
        quant_scale_q=torch.tensor(2.3), quant_scale_kv=torch.tensor([0.9]), page_size=4,
        q_rope_out=q_out[..., :8], q_nope_out=q_out[..., 8:],
    )  # fmt: skip
    sq, skv = torch.tensor(2.3), torch.tensor(0.9)
    want = expect_gqa(*inputs, neox=True, dtype=E4M3, sq=sq, skv=skv)
    assert got[0].data_ptr() == q_out.data_ptr()
    assert same_bytes(q_out, torch.cat((raw(want[0]), raw(want[1])), -1).view(E4M3))
    check_caches(caches, before, want[2])
    assert (raw(both[..., 18:]) == 0xFF).all()


@pytest.mark.parametrize("stored", [E4M3, E5M2])
@pytest.mark.parametrize("joined_rows", [True, False])
def test_mla_append_writes_both_parts_and_ignores_the_layout(stored, joined_rows):
    latent, r, hq = 32, 8, 3
    q_rope, q_nope = (torch.randn(T, hq, d).to(BF16) for d in (r, latent))
    k_rope, k_nope = (torch.randn(T, d).to(BF16) for d in (r, latent))
    table = torch.randn(64, r)
    rows_buffer = poisoned(8, 4, latent + r, dtype=stored)
    pair = rows_buffer[..., :latent], rows_buffer[..., latent:]
    if not joined_rows:
        pair = tuple(p.clone(memory_format=torch.contiguous_format) for p in pair)
    before = [p.clone() for p in pair]
    indices, indptr, batch, positions = RAGGED.indices_of(torch.int32)
    got = fi.rope_quantize_fp8_append_paged_kv_cache(
        q_rope, k_rope, q_nope, k_nope, None, table, torch.tensor(RAGGED.pos_ids), pair, indices, indptr, batch,
        positions, False, stored, 1.5, 50.0, 4, "HND",
    )  # fmt: skip
    heads = (x[:, None] for x in (k_rope, k_nope))
    k_rope3, k_nope3 = heads
    q_want, n_want, rows = expect_gqa(
        q_rope, k_rope3, q_nope, None, k_nope3, table, neox=False, dtype=stored, sq=1.5, skv=50.0
    )
    assert same_bytes(got[0], q_want)
    assert same_bytes(got[1], n_want)
    check_caches(pair, before, {at: (c[0], p[0]) for at, (p, c) in rows.items()})


@pytest.mark.parametrize(
    ("asked", "rope_out", "nope_out", "want"),
    [(None, None, None, E4M3), (None, E5M2, E5M2, E5M2), (None, None, E5M2, E5M2), (E5M2, None, None, E5M2)],
)
def test_quantize_dtype_follows_the_outputs_then_e4m3(asked, rope_out, nope_out, want):
    inputs = gqa_inputs(BF16, 8)
    outs = [None if d is None else torch.empty(T, 4, 8, dtype=d) for d in (rope_out, nope_out)]
    caches = tuple(torch.zeros(8, 4, 2, 16, dtype=want) for _ in range(2))
    indices, indptr, batch, positions = RAGGED.indices_of(torch.int32)
    got = fi.rope_quantize_fp8_append_paged_kv_cache(
        *inputs, torch.tensor(RAGGED.pos_ids), caches, indices, indptr, batch, positions, quantize_dtype=asked,
        page_size=4, q_rope_out=outs[0], q_nope_out=outs[1],
    )  # fmt: skip
    assert [g.dtype for g in got] == [want, want]


def test_no_tokens_is_no_work():
    q, k, _, _, v, table = gqa_inputs(BF16, 0)
    caches = tuple(poisoned(8, 4, 2, 8, dtype=E4M3) for _ in range(2))
    before = [c.clone() for c in caches]
    none = torch.empty(0, dtype=torch.int32)
    got = fi.rope_quantize_fp8_append_paged_kv_cache(
        q[:0], k[:0], None, None, v[:0], table, none, caches, none, torch.zeros(1, dtype=torch.int32), none, none,
        page_size=4,
    )  # fmt: skip
    assert [list(g.shape) for g in got] == [[0, 4, 8], [0, 4, 0]]
    check_caches(caches, before, {})


BAD_APPENDS = {
    "v missing": ({"v": None}, ValueError, "v: "),
    "page_size": ({"page_size": 16}, ValueError, "page_size: want the cache's own 4, got 16"),
    "layout": ({"kv_layout": "DHN"}, ValueError, "kv_layout: want 'NHD' or 'HND'"),
    "quantize dtype": ({"quantize_dtype": BF16}, ValueError, "quantize_dtype: "),
    "cache dtype": ({"quantize_dtype": E5M2}, ValueError, "paged_kv_cache[0]: "),
    "cache not a pair": ({"paged_kv_cache": torch.zeros(8, 2, 4, 2, 16, dtype=E4M3)}, TypeError, "paged_kv_cache: "),
    "cache head": (
        {"paged_kv_cache": tuple(torch.zeros(8, 4, 2, 24, dtype=E4M3) for _ in range(2))},
        ValueError,
        "k_rope, k_nope: want head_dim 24 as in paged_kv_cache[0] ",
    ),
    "pos_ids length": ({"pos_ids": torch.zeros(T + 1, dtype=torch.int32)}, ValueError, "pos_ids: "),
    "positions dtype": ({"positions": torch.zeros(T)}, ValueError, "positions: "),
    "batch_indices dtype": ({"batch_indices": torch.zeros(T, dtype=torch.int16)}, ValueError, "batch_indices: "),
    "kv_indptr rank": ({"kv_indptr": torch.zeros(2, 2, dtype=torch.int32)}, ValueError, "kv_indptr: "),
    "table dtype": ({"cos_sin_cache": torch.zeros(64, 8, dtype=BF16)}, ValueError, "cos_sin_cache: "),
    "k heads": ({"k_nope": torch.zeros(T, 3, 8, dtype=BF16)}, ValueError, "k_nope: "),
    "q_rope_out shape": ({"q_rope_out": torch.empty(T, 4, 9, dtype=E4M3)}, ValueError, "q_rope_out: "),
    "q_rope_out dtype": (
        {"q_rope_out": torch.empty(T, 4, 8, dtype=E5M2), "quantize_dtype": E4M3},
        ValueError,
        f"q_rope_out: want [{T}, 4, 8] float8_e4m3fn, got [{T}, 4, 8] float8_e5m2",
    ),
    "scale dtype": ({"quant_scale_q": torch.ones(1, dtype=FP16)}, ValueError, "quant_scale_q: "),
    "q scale sign": ({"quant_scale_q": -1.0}, ValueError, "quant_scale_q: want a positive, finite number, got -1"),
    "kv scale size": ({"quant_scale_kv": torch.ones(5)}, ValueError, "quant_scale_kv: "),
    "no tensor": ({"q_rope": None}, TypeError, "q_rope: want Tensor, got NoneType"),
    "list of positions": ({"positions": [0] * T}, TypeError, "positions: "),
}


@pytest.mark.parametrize("case", BAD_APPENDS)
def test_bad_appends_name_the_callers_argument(case):
    change, error, start = BAD_APPENDS[case]
    indices, indptr, batch, positions = RAGGED.indices_of(torch.int32)
    names = ("q_rope", "k_rope", "q_nope", "k_nope", "v", "cos_sin_cache")
    call = dict(zip(names, gqa_inputs(BF16, 8), strict=True)) | {
        "pos_ids": torch.tensor(RAGGED.pos_ids),
        "paged_kv_cache": tuple(torch.zeros(8, 4, 2, 16, dtype=E4M3) for _ in range(2)),
        "kv_indices": indices,
        "kv_indptr": indptr,
        "batch_indices": batch,
        "positions": positions,
        "page_size": 4,
    }
    with pytest.raises(error) as caught:
        fi.rope_quantize_fp8_append_paged_kv_cache(**(call | change))
    assert str(caught.value).startswith(start)


@pytest.mark.parametrize(
    ("change", "start"),
    [
        ({"positions": torch.tensor([3, 4, 0, 7, 12, 0, 11])}, "positions: want in [0, 12) for request 2, got 12"),
        ({"pos_ids": torch.tensor([9, 10, 0, 64, 8, 5, 2])}, "pos_ids: want every entry in [0, 64), got 64 at 3"),
        ({"kv_indices": torch.tensor([6, 1, 4, 8, 7, 2])}, "kv_indices: "),
    ],
)
def test_checked_mode_names_the_callers_argument_that_points_outside(change, start, monkeypatch):
    monkeypatch.setenv("TERSEKV_CHECKED", "1")
    indices, indptr, batch, positions = RAGGED.indices_of(torch.int32)
    call = {"kv_indices": indices, "positions": positions, "pos_ids": torch.tensor(RAGGED.pos_ids)} | change
    caches = tuple(torch.zeros(8, 4, 2, 16, dtype=E4M3) for _ in range(2))
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        fi.rope_quantize_fp8_append_paged_kv_cache(
            *gqa_inputs(BF16, 8), paged_kv_cache=caches, kv_indptr=indptr, batch_indices=batch, page_size=4, **call
        )
    assert str(caught.value).startswith(start)


@pytest.mark.parametrize("extra", [{"v": torch.zeros(T, 32, dtype=BF16)}, {"k_nope": None}])
def test_mla_refuses_values_and_needs_latents(extra):
    indices, indptr, batch, positions = RAGGED.indices_of(torch.int32)
    call = {
        "q_rope": torch.zeros(T, 3, 8, dtype=BF16),
        "k_rope": torch.zeros(T, 8, dtype=BF16),
        "q_nope": torch.zeros(T, 3, 32, dtype=BF16),
        "k_nope": torch.zeros(T, 32, dtype=BF16),
        "v": None,
    } | extra
    caches = torch.zeros(8, 4, 32, dtype=E4M3), torch.zeros(8, 4, 8, dtype=E4M3)
    (name,) = extra
    with pytest.raises(ValueError, match=f"^{name}: want"):
        fi.rope_quantize_fp8_append_paged_kv_cache(
            **call, cos_sin_cache=torch.zeros(64, 8), pos_ids=positions, paged_kv_cache=caches, kv_indices=indices,
            kv_indptr=indptr, batch_indices=batch, positions=positions, page_size=4,
        )  # fmt: skip


@pytest.mark.parametrize("stored", [BF16, FP16, E4M3, E5M2])
@pytest.mark.parametrize("form", ["pair", "one tensor", "HND"])
def test_append_paged_kv_cache_casts_rows_without_a_scale(stored, form):
    key, value = ((torch.randn(T, 2, 8) * 300).to(stored if stored.itemsize == 2 else BF16) for _ in range(2))
    both = poisoned(8, 2, 4, 2, 8, dtype=stored)
    if form == "HND":
        both = both.transpose(2, 3)
    pages = both[:, 0], both[:, 1]
    caches = [p.transpose(1, 2) for p in pages] if form == "HND" else list(pages)
    before = [c.clone() for c in caches]
    given = both if form == "one tensor" else pages
    indices, indptr, batch, positions = RAGGED.indices_of(torch.int32)
    layout = "HND" if form == "HND" else "NHD"
    fi.append_paged_kv_cache(key, value, batch, positions, given, indices, indptr, None, layout)
    places = [RAGGED.place(t) for t in range(T)]
    rows = {p: tuple(cast(x[t].float(), stored) for x in (key, value)) for t, p in enumerate(places) if p}
    check_caches(caches, before, rows)


@pytest.mark.parametrize("stored", [BF16, E4M3, E5M2])
def test_append_paged_mla_kv_cache_writes_two_views_of_one_buffer(stored):
    ckv, kpe = torch.randn(T, 32).to(BF16), torch.randn(T, 8).to(BF16)
    buffer = poisoned(8, 4, 40, dtype=stored)
    pair = buffer[..., :32], buffer[..., 32:]
    before = [p.clone() for p in pair]
    indices, indptr, batch, positions = RAGGED.indices_of(torch.int32)
    fi.append_paged_mla_kv_cache(ckv, kpe, batch, positions, *pair, indices, indptr, None)
    places = [RAGGED.place(t) for t in range(T)]
    rows = {p: tuple(cast(x[t].float(), stored) for x in (ckv, kpe)) for t, p in enumerate(places) if p}
    check_caches(pair, before, rows)


UNSCALED = r"bfloat16 \| float16 \| float8_e4m3fn \| float8_e5m2"


@pytest.mark.parametrize("stored", [E4M3, E5M2])
def test_plain_appends_copy_codes_of_an_fp8_cache_byte_for_byte(stored):
    """All 256 codes, NaNs among them."""
    indices, indptr, batch, positions = RAGGED.indices_of(torch.int32)
    codes = torch.arange(2 * T * 80).to(torch.uint8).view(2, T, 2, 40)
    places = [RAGGED.place(t) for t in range(T)]
    both = poisoned(8, 2, 4, 2, 40, dtype=stored)
    pages = both[:, 0], both[:, 1]
    before = [p.clone() for p in pages]
    fi.append_paged_kv_cache(*codes.view(stored), batch, positions, both, indices, indptr, None)
    check_caches(pages, before, {p: (codes[0, t], codes[1, t]) for t, p in enumerate(places) if p})
    buffer = poisoned(8, 4, 80, dtype=stored)
    pair = buffer[..., :64], buffer[..., 64:]
    before = [p.clone() for p in pair]
    rows = codes[0].reshape(T, 80).split([64, 16], 1)
    fi.append_paged_mla_kv_cache(*(x.view(stored) for x in rows), batch, positions, *pair, indices, indptr, None)
    check_caches(pair, before, {p: (rows[0][t], rows[1][t]) for t, p in enumerate(places) if p})


def test_bad_plain_appends_name_the_callers_argument():
    indices, indptr, batch, positions = RAGGED.indices_of(torch.int32)
    rows = torch.zeros(T, 2, 8, dtype=BF16)
    cache = torch.zeros(8, 2, 4, 2, 8, dtype=BF16)
    with pytest.raises(ValueError, match=r"^append_value: "):
        fi.append_paged_kv_cache(rows, rows[:3], batch, positions, cache, indices, indptr, None)
    with pytest.raises(ValueError, match=rf"^paged_kv_cache: want {UNSCALED}, got int8"):
        fi.append_paged_kv_cache(rows, rows, batch, positions, cache.to(torch.int8), indices, indptr, None)
    with pytest.raises(ValueError, match=rf"^paged_kv_cache: want {UNSCALED}, got float32"):
        fi.append_paged_kv_cache(rows, rows, batch, positions, cache.float(), indices, indptr, None)
    with pytest.raises(TypeError, match=r"^paged_kv_cache: "):
        fi.append_paged_kv_cache(rows, rows, batch, positions, None, indices, indptr, None)
    with pytest.raises(ValueError, match=r"^ckv_cache: want one of .*, got torch.float32$"):
        fi.append_paged_mla_kv_cache(
            rows[:, 0], rows[:, 0], batch, positions, cache[:, 0, :, 0].float(), cache[:, 0, :, 0], indices, None, None
        )
    with pytest.raises(ValueError, match=r"^append_kpe: want a rotary size of 4 as in kpe_cache "):
        fi.append_paged_mla_kv_cache(
            rows[:, 0], rows[:, 0], batch, positions, cache[:, 0, :, 0], cache[:, 0, :, 0, :4], indices, indptr, None
        )


def test_seq_lens_and_positions_as_flashinfer_documents_them():
    indptr = torch.tensor([0, 3, 4, 6, 6, 8], dtype=torch.int32)
    lens = fi.get_seq_lens(indptr, torch.tensor([13, 8, 9, 0, 6], dtype=torch.int32), 16)
    assert lens.tolist() == [45, 8, 25, 0, 22]
    batch, positions = fi.get_batch_indices_positions(torch.tensor([0, 1, 3, 3, 6]), torch.tensor([5, 5, 9, 3]), 9)
    assert batch.tolist() == [0, 1, 1, 3, 3, 3, -1, -1, -1]
    assert positions.tolist() == [4, 3, 4, 0, 1, 2, 0, 0, 0]
    assert batch.dtype == positions.dtype == torch.int32
    unsigned = [torch.tensor(x, dtype=torch.uint32) for x in ([0, 1, 3, 3, 6], [5, 5, 9, 3])]
    assert torch.equal(fi.get_batch_indices_positions(*unsigned, 9)[1], positions)
    assert fi.get_seq_lens(indptr.to(torch.uint32), torch.tensor([13, 8, 9, 0, 6]), 16).tolist() == lens.tolist()
    empty = fi.get_batch_indices_positions(torch.zeros(1, dtype=torch.int32), torch.empty(0, dtype=torch.int32), 2)
    assert [x.tolist() for x in empty] == [[-1, -1], [0, 0]]


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: fi.get_seq_lens(torch.tensor([0, 2, 4]), torch.tensor([3]), 16), ValueError,
     "kv_last_page_len: want [2] on cpu, got [1] on cpu"),
    (lambda: fi.get_seq_lens(torch.tensor([0.0, 2.0]), torch.tensor([3]), 16), ValueError,
     "kv_indptr: want int32, int64 or uint32, got float32"),
    (lambda: fi.get_seq_lens(torch.tensor([0, 2]), torch.tensor([3]), 0), ValueError,
     "page_size: want 1 or more, got 0"),
    (lambda: fi.get_seq_lens(torch.tensor([0, 2]), torch.tensor([3]), torch.tensor(16)), TypeError,
     "page_size: want int, got Tensor"),
    (lambda: fi.get_batch_indices_positions(torch.tensor([0, 1]), torch.tensor([5, 5]), 9), ValueError,
     "seq_lens: want [1] on cpu, got [2] on cpu"),
    (lambda: fi.get_batch_indices_positions(torch.tensor([0, 1]), torch.tensor([5]), -1), ValueError,
     "nnz: want 0 or more, got -1"),
    (lambda: fi.get_seq_lens(torch.tensor([0, 2]), torch.tensor([3]), 10**30), ValueError,
     f"page_size: want an int that 64 bits hold, got {10**30}"),
    (lambda: fi.get_batch_indices_positions(torch.tensor([0, 1]), torch.tensor([5]), 10**30), ValueError,
     f"nnz: want an int that 64 bits hold, got {10**30}"),
])  # fmt: skip
def test_the_index_helpers_broadcast_nothing_and_name_a_wrong_argument(make, error, message):
    with pytest.raises(error) as caught:
        make()
    assert str(caught.value) == message


def test_the_index_helper_writes_what_it_is_given():
    call = torch.tensor([0, 2, 3]), torch.tensor([5, 4]), 5
    given = [torch.full((5,), 77, dtype=torch.int32) for _ in range(2)]
    got = fi.get_batch_indices_positions(*call, *given)
    assert got[0] is given[0]
    assert got[1] is given[1]
    assert [x.tolist() for x in given] == [[0, 0, 1, -1, -1], [3, 4, 3, 0, 0]]
    for name, bad in (("batch_indices", given[0][:4]), ("positions", given[0].long())):
        with pytest.raises(ValueError, match=rf"^{name}: want \[5\] int32 on cpu, got"):
            fi.get_batch_indices_positions(*call, **{name: bad})


def test_the_index_helpers_take_numpy_integers():
    assert fi.get_seq_lens(torch.tensor([0, 2]), torch.tensor([3]), np.int64(16)).tolist() == [19]
