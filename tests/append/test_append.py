"""append on the oracle: every byte of the cache against a slow reference."""

from __future__ import annotations

import numpy as np
import pytest
import slow_reference as slow
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from no_sync import NoHostReads

from tersekv import KV_FORMATS, PagedKVCache, PagedKVLayer, PagedLatentCache, append, mla_append
from tersekv.calls import AppendCall
from tersekv.dispatch.plan import dispatch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INDEX = (torch.int32, torch.int64, torch.uint32)
SCALED = ("fp8_e4m3", "fp8_e5m2", "nvfp4")
HALF = ("bf16", "fp16")  # a NaN stays one, but which of their NaNs it becomes is left open


def memory_of(layer: PagedKVLayer) -> slow.Memory:
    return slow.Memory(layer.k, layer.v, layer.k_scale_cache, layer.v_scale_cache)


def longer_rows(layer: PagedKVLayer) -> PagedKVLayer:
    """The same geometry inside rows that are longer than the head, in pages that are farther apart."""

    def inside(t):
        if t is None:
            return None
        bigger = torch.zeros(t.shape[0], t.shape[1] + 1, t.shape[2] + 1, *[n + 8 for n in t.shape[3:]], dtype=t.dtype)
        return bigger[:, 1:, 1:][(..., *[slice(0, n) for n in t.shape[3:]])]

    return PagedKVLayer(
        *map(inside, (layer.k, layer.v)), layer.format, layer.k_scale, layer.v_scale,
        *map(inside, (layer.k_scale_cache, layer.v_scale_cache)),
    )  # fmt: skip


@st.composite
def cases(draw):
    format = draw(st.sampled_from(list(KV_FORMATS)))
    packed = draw(st.booleans())
    step = 16 if format == "nvfp4" else 8
    d = step * draw(st.integers(1, 3))
    heads = draw(st.integers(1, 3))

    def scale():
        if format not in SCALED:
            return 1.0
        kind = draw(st.sampled_from(["one", "float", "tensor", "heads"]))
        size = heads if kind == "heads" and format != "nvfp4" else 1
        values = [draw(st.sampled_from([0.25, 0.037, 3.3, 1e-3])) for _ in range(size)]
        return {"one": 1.0, "float": values[0]}.get(kind, torch.tensor(values))

    options = {
        "format": format,
        "head_dim_v": d if packed else step * draw(st.integers(1, 3)),
        "layout": draw(st.sampled_from(["NHD", "HND"])),
        "packed": packed,
        "scales": draw(st.sampled_from(["apart", "inline", "tail"])),
        "k_scale": scale(),
        "v_scale": scale(),
    }
    layer = PagedKVCache.allocate(1, draw(st.integers(1, 3)), draw(st.integers(1, 5)), heads, d, **options)[0]
    if draw(st.booleans()) and not packed:
        layer = longer_rows(layer)
    last = layer.num_pages * layer.page_size
    slots = draw(st.lists(st.integers(-2, last + 1), max_size=9))
    dtypes = INDEX if min(slots, default=0) >= 0 else INDEX[:2]
    slot_mapping = torch.tensor(slots, dtype=draw(st.sampled_from(dtypes)))
    return layer, slots, slot_mapping, draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))


def multiplier(scale) -> tuple:
    """(multiplier, global scale) of a layer's dequantising scale, for the slow reference."""
    if isinstance(scale, torch.Tensor):
        return np.float32(1) / scale.numpy()[:, None], scale.numpy()[:, None]
    return (np.float32(1) / np.float32(scale),)


@settings(deadline=None, max_examples=150)
@given(case=cases(), seed=st.integers(0, 2**32), dense=st.booleans())
def test_every_byte_is_the_slow_reference_and_no_other_byte_is_touched(case, seed, dense):
    layer, slots, slot_mapping, dtype = case
    rng = np.random.default_rng(seed)
    heads, d, dv = (
        layer.k.shape[2],
        *(t.shape[-1] * KV_FORMATS[layer.format].values_per_element for t in (layer.k, layer.v)),
    )
    nan = layer.format not in HALF
    if dense:
        k, v = (slow.spicy(rng, (len(slots), heads, n), dtype, nan) for n in (d, dv))
    else:  # both are cut from one projection, as in a model
        k, v = slow.spicy(rng, (len(slots), heads, d + dv + 3), dtype, nan)[..., 3:].split([d, dv], -1)
    memory = memory_of(layer)
    slow.poke_kv(
        memory,
        layer,
        slow.fp32(k),
        slow.fp32(v),
        slots,
        k_scale=multiplier(layer.k_scale),
        v_scale=multiplier(layer.v_scale),
    )
    append(k, v, layer, slot_mapping, backend="torch")
    memory.check()


@settings(deadline=None, max_examples=100)
@given(data=st.data(), index=st.sampled_from(INDEX), format=st.sampled_from(["fp8_e4m3", "nvfp4", "bf16"]))
def test_flashinfer_places_go_through_the_request_s_own_pages_and_nowhere_else(data, index, format):
    pages, size, heads, d = 5, 3, 2, 16
    layer = PagedKVCache.allocate(1, pages, size, heads, d, format=format)[0]
    page_ids = data.draw(st.permutations(range(pages)))[: data.draw(st.integers(0, pages))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(page_ids)), min_size=0, max_size=3)))
    indptr = [0, *cuts, len(page_ids)]
    low = 0 if index == torch.uint32 else -1
    n = data.draw(st.integers(0, 8))
    batch = data.draw(st.lists(st.integers(low, len(indptr)), min_size=n, max_size=n))
    pos = data.draw(st.lists(st.integers(low, pages * size + 1), min_size=n, max_size=n))
    page_ids = [p if data.draw(st.integers(0, 9)) else 2**31 - 1 for p in page_ids]  # now and then a wild page

    def slot(b: int, i: int) -> int:
        if not 0 <= b < len(indptr) - 1 or not 0 <= i < (indptr[b + 1] - indptr[b]) * size:
            return -1
        page = page_ids[indptr[b] + i // size]
        return page * size + i % size if page < pages else -1

    rng = np.random.default_rng(n)
    k, v = (slow.spicy(rng, (n, heads, d), torch.bfloat16, format not in HALF) for _ in range(2))
    memory = memory_of(layer)
    slow.poke_kv(memory, layer, slow.fp32(k), slow.fp32(v), [slot(b, i) for b, i in zip(batch, pos, strict=True)])
    place = [torch.tensor(x, dtype=index) for x in (batch, pos, indptr, page_ids)]
    call = AppendCall(
        k,
        v,
        layer.k,
        layer.v,
        layer.k_scale_cache,
        layer.v_scale_cache,
        None,
        *place,
        format,
        1.0,
        None,
        1.0,
        None,
        False,
    )
    dispatch("append", call, "torch")
    memory.check()


@pytest.mark.parametrize("page", [2**62, -(2**62), -1, 2])
def test_a_wild_page_is_dropped_even_where_its_slot_would_overflow_into_the_cache(page):
    layer = PagedKVCache.allocate(1, 2, 4, 1, 8, format="bf16")[0]
    memory = memory_of(layer)
    x, zero = torch.ones(1, 1, 8), torch.tensor([0])
    place = (zero, zero, torch.tensor([0, 1]), torch.tensor([page]))
    call = AppendCall(x, x, layer.k, layer.v, None, None, None, *place, "bf16", 1.0, None, 1.0, None, False)
    dispatch("append", call, "torch")
    memory.check()


def test_codes_of_nvfp4_divide_by_the_global_scale_itself_not_by_its_reciprocal_s_reciprocal():
    """The two differ by one bit for some scales; values on the ties of e2m1 tell."""
    ties = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 2)
    differ = 0
    for i in range(60):
        g = torch.tensor([1.4 + i / 101])
        m = multiplier(g)
        x = (ties * (g * (1 + i % 8 / 8))).view(1, 1, 16)
        layer = PagedKVCache.allocate(1, 1, 1, 1, 16, format="nvfp4", k_scale=g, v_scale=g)[0]
        memory = memory_of(layer)
        slow.poke_kv(memory, layer, slow.fp32(x), slow.fp32(x), [0], k_scale=m, v_scale=m)
        append(x, x, layer, torch.tensor([0]), backend="torch")
        memory.check()
        differ += (slow.rows(slow.fp32(x), "nvfp4", *m)[0] != slow.rows(slow.fp32(x), "nvfp4", m[0])[0]).any()
    assert differ


@pytest.mark.parametrize("format", SCALED)
def test_a_tensor_may_quantise_instead(format):
    layer = PagedKVCache.allocate(1, 1, 4, 2, 16, format=format)[0]
    rng = np.random.default_rng(0)
    k, v = (slow.spicy(rng, (4, 2, 16), torch.float32) for _ in range(2))
    memory = memory_of(layer)
    m = torch.tensor([3.7])
    slow.poke_kv(
        memory, layer, slow.fp32(k), slow.fp32(v), [3, 2, 1, 0], k_scale=(np.float32(3.7),), v_scale=(np.float32(0.3),)
    )
    call = AppendCall(
        k, v, layer.k, layer.v, layer.k_scale_cache, layer.v_scale_cache, torch.tensor([3, 2, 1, 0]),
        None, None, None, None, format, 9.0, m, float(np.float32(0.3)), None, True,
    )  # fmt: skip
    dispatch("append", call, "torch")
    memory.check()


@settings(deadline=None, max_examples=20)
@given(st.sampled_from(list(KV_FORMATS)), st.integers(0, 2**32))
@example("nvfp4", 0)
def test_one_buffer_holds_keys_values_and_scales_of_a_page(format, seed):
    """A page of a pool is one run of bytes: all of K, then all of V, then their scales."""
    f, (pages, size, heads, d) = KV_FORMATS[format], (3, 2, 2, 32)
    code, scale = size * heads * f.code_bytes(d), size * heads * f.scale_bytes(d)
    pool = torch.zeros(pages, 2 * code + 2 * scale, dtype=torch.uint8)

    def view(start, dtype, *tail):
        count = int(np.prod([size, heads, *tail])) * dtype.itemsize
        return pool[:, start : start + count].view(dtype).view(pages, size, heads, *tail)

    tail = () if f.scale_block is None else (f.scales(d),)
    scales = [view(2 * code + i * scale, f.scale_dtype, *tail) if scale else None for i in range(2)]
    layer = PagedKVLayer(*(view(i * code, f.storage, f.elements(d)) for i in range(2)), format, 1.0, 1.0, *scales)
    rng = np.random.default_rng(seed)
    k, v = (slow.spicy(rng, (3, heads, d), torch.float16, format not in HALF) for _ in range(2))
    memory = memory_of(layer)
    slow.poke_kv(memory, layer, slow.fp32(k), slow.fp32(v), [5, -1, 0])
    append(k, v, layer, torch.tensor([5, -1, 0]), backend="torch")
    memory.check()


@pytest.mark.parametrize("format", KV_FORMATS)
def test_nothing_is_written_for_no_tokens_or_only_dropped_ones(format):
    layer = PagedKVCache.allocate(1, 2, 3, 2, 16, format=format)[0]
    memory = memory_of(layer)
    append(torch.zeros(0, 2, 16), torch.zeros(0, 2, 16), layer, torch.zeros(0, dtype=torch.int32), backend="torch")
    append(torch.ones(3, 2, 16), torch.ones(3, 2, 16), layer, torch.tensor([-1, 6, 2**62]), backend="torch")
    append(
        torch.ones(1, 2, 16), torch.ones(1, 2, 16), layer, torch.tensor([2**32 - 1]).to(torch.uint32), backend="torch"
    )
    memory.check()


def test_a_cache_without_pages_takes_nothing():
    empty = torch.zeros(0, 4, 2, 16, dtype=torch.bfloat16)
    append(torch.ones(1, 2, 16), torch.ones(1, 2, 16), (empty, empty.clone()), torch.tensor([0]), backend="torch")


@pytest.mark.parametrize("format", HALF)
def test_nan_stays_nan_and_inf_stays_inf_in_16_bits(format):
    layer = PagedKVCache.allocate(1, 1, 1, 1, 8, format=format)[0]
    x = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 1.0, -0.0, 3e38, 1e-45]).view(1, 1, 8)
    append(x, x, layer, torch.tensor([0]), backend="torch")
    want = x.to(layer.k.dtype)
    assert torch.equal(layer.k.isnan()[0], x.isnan())
    assert torch.equal(layer.k[0, 0, 0, 2:], want[0, 0, 2:])


def test_of_two_tokens_with_one_slot_the_last_stays_whole():
    layer = PagedKVCache.allocate(1, 1, 4, 1, 16, format="int8_per_token_head")[0]
    k = torch.stack([torch.full((1, 16), n) for n in (1.0, 2.0, 3.0, 4.0)])
    append(k, k, layer, torch.tensor([2, 2, 0, 2]), backend="torch")
    assert torch.equal(layer.k_scale_cache[0, :, 0] * 127, torch.tensor([3.0, 0.0, 4.0, 0.0]))


REFUSED_CODES = [("fp8_e4m3", E5M2), ("fp8_e5m2", E4M3), ("fp8_per_token_head", E4M3), ("bf16", E4M3), ("nvfp4", E4M3)]


@pytest.mark.parametrize(("format", "dtype"), REFUSED_CODES, ids=str)
def test_codes_go_into_an_fp8_cache_of_their_dtype_only(format, dtype):
    layer = PagedKVCache.allocate(1, 2, 4, 2, 32, format=format)[0]
    rows, slots = torch.zeros(3, 2, 32).to(dtype), torch.arange(3)
    with pytest.raises(ValueError, match=r"^k: want \[T, H, D\] bfloat16 \| float16 \| float32.*, got .* float8_"):
        append(rows, rows, layer, slots)


def test_codes_of_latent_rows_cannot_be_rotated_and_have_no_group_scales():
    rows, slots, table = torch.zeros(3, 576).to(E4M3), torch.arange(3), torch.zeros(9, 64)
    parts = rows[:, :512], rows[:, 512:]
    fp8, grouped = (PagedLatentCache.allocate(1, 2, 4, format=f)[0] for f in ("fp8_e4m3", "fp8_ds_mla"))
    mla_append(*parts, fp8, slots)
    for layer, turn in ((fp8, {"cos_sin_cache": table, "positions": slots}), (grouped, {})):
        with pytest.raises(
            ValueError, match=r"^kv_c: want \[T, L\] bfloat16 \| float16 \| float32, got .* float8_e4m3fn"
        ):
            mla_append(*parts, layer, slots, **turn)


def test_gradients_do_not_follow_into_the_cache():
    cache = torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8)
    layer = PagedKVLayer.of([t.to(torch.bfloat16) for t in cache])
    append(torch.ones(1, 1, 8, requires_grad=True), torch.ones(1, 1, 8), layer, torch.tensor([1]), backend="torch")
    assert not layer.k.requires_grad
    assert layer.k[0, 1].eq(1).all()


@pytest.mark.parametrize("format", KV_FORMATS)
def test_no_device_value_is_read_on_the_host(format):
    scale = torch.tensor([0.5]) if format in SCALED else 1.0
    layer = PagedKVCache.allocate(1, 2, 3, 2, 16, format=format, k_scale=scale)[0]
    with NoHostReads():
        append(torch.ones(3, 2, 16), torch.ones(3, 2, 16), layer, torch.tensor([4, -1, 0]), backend="torch")


def test_checked_mode_names_the_slot_beyond_the_cache(monkeypatch):
    monkeypatch.setenv("TERSEKV_CHECKED", "1")
    layer = PagedKVCache.allocate(1, 2, 3, 1, 8, format="bf16")[0]
    with pytest.raises(ValueError, match=r"^slot_mapping: want every entry below 6, got 6 at 1$"):
        append(torch.ones(2, 1, 8), torch.ones(2, 1, 8), layer, torch.tensor([-1, 6]), backend="torch")
