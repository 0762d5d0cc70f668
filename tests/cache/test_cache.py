"""Caches: every layout is a view of the same geometry, and no byte is unaccounted for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tersekv
from tersekv import (
    KV_FORMATS,
    LATENT_FORMATS,
    PagedKVCache,
    PagedKVLayer,
    PagedLatentCache,
    PagedLatentLayer,
    kv_bytes_per_token,
    kv_page_bytes,
    latent_bytes_per_token,
)


def parts(layer) -> list[torch.Tensor]:
    values = (getattr(layer, name) for name in layer.__slots__)
    return [x for x in values if isinstance(x, torch.Tensor)]


def byte_offsets(t: torch.Tensor) -> set[int]:
    """Every byte of its storage that t covers."""
    offsets = torch.tensor([t.storage_offset()])
    for size, stride in zip(t.shape, t.stride(), strict=True):
        offsets = (offsets[:, None] + torch.arange(size) * stride).flatten()
    base = t.untyped_storage().data_ptr()
    return {base + o * t.element_size() + i for o in offsets.tolist() for i in range(t.element_size())}


@settings(deadline=None, max_examples=60)
@given(
    format=st.sampled_from(list(KV_FORMATS)),
    layout=st.sampled_from(["NHD", "HND"]),
    packed=st.booleans(),
    scales=st.sampled_from(["apart", "inline", "tail"]),
    sizes=st.tuples(*[st.integers(1, 3)] * 4),
)
def test_all_layouts_have_one_geometry_and_use_every_byte_once(format, layout, packed, scales, sizes):
    pages, size, heads, blocks = sizes
    d, dv, f = 16 * blocks, 16 * (blocks if packed else 1), KV_FORMATS[format]
    cache = PagedKVCache.allocate(
        2, pages, size, heads, d, format=format, head_dim_v=dv, layout=layout, packed=packed, scales=scales
    )
    layer = cache[1]
    assert layer.k.shape == (pages, size, heads, f.elements(d))
    assert layer.v.shape == (pages, size, heads, f.elements(dv))
    assert layer.k.dtype == f.storage
    if f.scale_dtype is None:
        assert layer.k_scale_cache is None
    else:
        tail = () if f.scale_block is None else (f.scales(d),)
        assert layer.k_scale_cache.shape == (pages, size, heads, *tail)
        assert layer.k_scale_cache.dtype == f.scale_dtype
    seen = [byte_offsets(t) for t in parts(layer)]
    covered = set().union(*seen)
    assert len(covered) == sum(map(len, seen))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in parts(layer)}
    assert len(covered) == pages * size * kv_bytes_per_token(format, heads, d, dv)
    whole = len(covered) if scales != "tail" else pages * kv_page_bytes(format, size, heads, d, dv)
    assert sum(storages.values()) == whole
    assert whole - len(covered) < 16 * pages
    assert cache.nbytes == 2 * len(covered)
    assert cache.bytes_per_token * pages * size == cache.nbytes
    assert (len(cache), cache.format, cache.page_size, cache.num_pages) == (2, format, size, pages)
    for whole in (cache, layer):
        assert (whole.num_kv_heads, whole.head_dim, whole.head_dim_v) == (heads, d, dv)
        assert whole.device == torch.device("cpu")
    assert cache.num_layers == 2
    assert not any(t.view(torch.uint8).any() for t in parts(layer) if t.stride(-1) == 1)


@settings(deadline=None, max_examples=30)
@given(format=st.sampled_from(list(LATENT_FORMATS)), split=st.booleans(), size=st.integers(1, 4))
def test_latent_caches_use_every_byte_once(format, split, size):
    split = split and format != "fp8_ds_mla"
    cache = PagedLatentCache.allocate(3, 2, size, format=format, kv_lora_rank=128, qk_rope_head_dim=8, split=split)
    layer = cache[2]
    assert layer.ckv.shape == (2, size, 128)
    assert layer.kpe.shape == (2, size, 8)
    seen = [byte_offsets(t) for t in parts(layer)]
    covered = set().union(*seen)
    assert len(covered) == sum(map(len, seen)) == 2 * size * latent_bytes_per_token(format, 128, 8)
    assert cache.nbytes == 3 * len(covered)
    assert (len(cache), cache.format, cache.page_size, cache.num_pages) == (3, format, size, 2)
    for whole in (cache, layer):
        assert (whole.kv_lora_rank, whole.qk_rope_head_dim, whole.device) == (128, 8, torch.device("cpu"))
    assert cache.num_layers == 3
    assert (layer.ckv_scale_cache is not None) == (format == "fp8_ds_mla")


def test_a_row_of_fp8_ds_mla_is_codes_then_scales_then_rotary():
    rows = torch.zeros(1, 2, 656, dtype=torch.uint8)
    layer = PagedLatentLayer.of(rows)
    assert layer.format == "fp8_ds_mla"
    layer.ckv.view(torch.uint8)[0, 1] = 1
    layer.ckv_scale_cache[0, 1] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    layer.kpe[0, 1] = 5
    assert rows[0, 0].eq(0).all()
    assert rows[0, 1, :512].eq(1).all()
    assert rows[0, 1, 512:528].view(torch.float32).tolist() == [1, 2, 3, 4]
    assert rows[0, 1, 528:].view(torch.bfloat16).eq(5).all()


@pytest.mark.parametrize("shape", [(3, 4, 576), (3, 4, 1, 576)])
def test_joined_latent_rows_are_512_latent_then_64_rotary(shape):
    rows = torch.zeros(shape, dtype=torch.bfloat16)
    layer = PagedLatentLayer.of(rows)
    assert layer.ckv.data_ptr() == rows.data_ptr()
    assert layer.kpe.data_ptr() == rows.data_ptr() + 2 * 512
    assert (layer.page_size, layer.num_pages) == (4, 3)
    pair = PagedLatentLayer.of((layer.ckv, layer.kpe), kv_scale=0.5)
    assert pair.kv_scale == 0.5
    assert PagedLatentLayer.of(pair) is pair


def test_bare_tensors_are_read_without_copying():
    k, v = torch.zeros(3, 2, 4, 8, dtype=torch.float8_e5m2), torch.zeros(3, 2, 4, 16, dtype=torch.float8_e5m2)
    hnd = PagedKVLayer.of((k, v), layout="HND")
    assert hnd.k.shape == (3, 4, 2, 8)
    assert hnd.format == "fp8_e5m2"
    assert hnd.v.data_ptr() == v.data_ptr()
    both = torch.zeros(3, 2, 4, 5, 8, dtype=torch.int8)
    scales = torch.zeros(3, 2, 4, 5)
    packed = PagedKVLayer.of(both, scale_cache=scales)
    assert packed.format == "int8_per_token_head"
    assert packed.v.data_ptr() == both[:, 1].data_ptr()
    assert packed.v_scale_cache.data_ptr() == scales[:, 1].data_ptr()
    same = PagedKVLayer.of(both[:, :1], scale_cache=scales[:, :1])
    assert same.k.data_ptr() == same.v.data_ptr()
    assert PagedKVLayer.of(packed) is packed
    fp4 = PagedKVLayer.of(
        torch.zeros(3, 2, 5, 4, 8, dtype=torch.uint8),
        scale_cache=torch.zeros(3, 2, 5, 4, 1, dtype=torch.float8_e4m3fn),
        layout="HND",
    )
    assert fp4.format == "nvfp4"
    assert fp4.k_scale_cache.shape == (3, 4, 5, 1)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("format", ["int8_per_token_head", "nvfp4"])
def test_a_page_with_a_tail_is_codes_of_k_and_of_v_then_their_scales(format, layout):
    f, (size, heads, d, dv) = KV_FORMATS[format], (3, 2, 32, 48)
    nbytes = kv_page_bytes(format, size, heads, d, dv)
    assert nbytes % 16 == 0
    wide = torch.full((5, nbytes + 32), 0xFF, dtype=torch.uint8).view(torch.int8)
    buffer = wide[1:, 16 : 16 + nbytes]
    layer = PagedKVLayer.from_buffer(buffer, size, heads, d, dv, format=format, layout=layout, k_scale=1)
    for i, x in enumerate((layer.k, layer.v, layer.k_scale_cache, layer.v_scale_cache)):
        x.copy_(torch.full(x.shape, i + 1.0).to(x.dtype))
        mine = x[2] if layout == "NHD" else x[2].transpose(0, 1)  # in the order of memory
        assert mine.is_contiguous()
    rows = size * heads
    ends = [rows * n for n in (f.code_bytes(d), f.code_bytes(dv), f.scale_bytes(d), f.scale_bytes(dv))]
    at = 0
    for x, n in zip((layer.k, layer.v, layer.k_scale_cache, layer.v_scale_cache), ends, strict=True):
        assert x[2].data_ptr() == buffer[2].data_ptr() + at
        at += n
    assert (wide[0] == wide[0, 0]).all()
    assert (buffer[:, at:] == -1).all()
    assert layer.page_size == size


def test_the_older_name_of_inline_scales_warns():
    with pytest.warns(DeprecationWarning, match="inline_scales is scales='inline' now"):
        old = PagedKVCache.allocate(1, 2, 4, 1, 16, format="nvfp4", inline_scales=True)[0]
    new = PagedKVCache.allocate(1, 2, 4, 1, 16, format="nvfp4", scales="inline")[0]
    assert (old.k.stride(), old.k_scale_cache.stride()) == (new.k.stride(), new.k_scale_cache.stride())


def test_a_layer_equals_itself_alone():
    for cache in (
        PagedKVCache.allocate(2, 2, 4, 1, 16, format="bf16"), PagedLatentCache.allocate(2, 2, 4, format="bf16"),
    ):  # fmt: skip
        a, b = cache.layers
        assert a in (b, a)
        assert a != b
        assert len({a, b, a}) == 2


def test_sizes_may_be_numpy_integers():
    cache = PagedKVCache.allocate(np.int64(1), np.int64(2), np.int32(4), 1, np.int64(64), format="bf16")
    assert cache[0].k.shape == (2, 4, 1, 64)


def test_a_cache_of_existing_tensors_is_a_cache():
    tensors = [torch.zeros(3, 2, 4, 5, 8, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.zeros(3, 2, 4, 5, 1, dtype=torch.float8_e4m3fn) for _ in range(2)]
    cache = PagedKVCache.from_tensors(tensors, scale_caches=scales, k_scale=0.5)
    assert (cache.head_dim, cache.head_dim_v, cache[1].k_scale) == (16, 16, 0.5)
    assert cache.nbytes == sum(t.nbytes for t in tensors + scales)
    latents = [torch.zeros(3, 4, 576, dtype=torch.float16) for _ in range(2)]
    assert PagedLatentCache.from_tensors(latents).nbytes == sum(t.nbytes for t in latents)


BF = torch.bfloat16


def ready() -> PagedKVLayer:
    return PagedKVCache.allocate(1, 2, 4, 1, 16, format="fp8_e4m3")[0]


def test_a_ready_layer_may_stand_beside_options_that_say_nothing():
    layer = ready()
    assert PagedKVLayer.of(layer, format=None, k_scale=float("1"), v_scale=1) is layer


def test_a_cache_is_printed_in_one_line_without_values():
    cache = PagedKVCache.allocate(2, 3, 4, 1, 16, format="nvfp4")
    assert repr(cache[0]) == "PagedKVLayer('nvfp4', k=[3, 4, 1, 8], v=[3, 4, 1, 8], 'cpu')"
    assert repr(cache) == f"PagedKVCache(2 layers, the first {cache[0]!r})"
    latents = PagedLatentCache.allocate(1, 3, 4, format="bf16")
    assert repr(latents[0]) == "PagedLatentLayer('bf16', ckv=[3, 4, 512], kpe=[3, 4, 64], 'cpu')"
    assert repr(latents) == f"PagedLatentCache(1 layers, the first {latents[0]!r})"


WRONG = [
    *(
        (
            lambda pair=pair: PagedKVLayer(*torch.zeros(2, 1, 1, 1, 8, dtype=BF), format=pair),
            f"format: want one of {', '.join(KV_FORMATS)} for K/V caches, got {wrong!r}",
        )
        for pair, wrong in ((None, None), (3, 3), (("bf16", None), None), ((torch.bfloat16, "bf16"), torch.bfloat16))
    ),
    (lambda: PagedKVCache.allocate(1, 2, 0, 1, 16, format="bf16"), "page_size: want a positive number, got 0"),
    (
        lambda: PagedKVCache.allocate(1, 2, 4, 1, 12, format="bf16"),
        "head_dim: want a positive multiple of 8 for bf16, at most 576, got 12",
    ),
    (
        lambda: PagedKVCache.allocate(1, 2, 4, 1, 16, format="nvfp4", head_dim_v=24),
        "head_dim_v: want a positive multiple of 16 for nvfp4, at most 512, got 24",
    ),
    (
        lambda: PagedKVCache.allocate(1, 2, 4, 1, 8, format="bf16", layout="DHN"),
        "layout: want 'NHD' or 'HND', got 'DHN'",
    ),
    (
        lambda: PagedKVCache.allocate(1, 2, 4, 1, 8, format="bf16", head_dim_v=16, packed=True),
        "packed: want head_dim_v == head_dim=8, got 16",
    ),
    (
        lambda: PagedKVCache.allocate(1, 2, 4, 1, 1024, format="bf16"),
        "head_dim: want a positive multiple of 8 for bf16, at most 576, got 1024",
    ),
    (
        lambda: PagedKVCache.allocate(1, 2, 4, 1, 576, format="bf16"),
        "head_dim_v: want a positive multiple of 8 for bf16, at most 512, got 576",
    ),
    (
        lambda: PagedKVCache.allocate(1, 2, 4, 1, 16, format="bf16", k_scale=2.0),
        "k_scale: want 1.0 for bf16, which has no scale of the tensor, got 2",
    ),
    (
        lambda: PagedKVCache.allocate(1, 2, 4, 1, 16, format="int8_per_token_head", v_scale=torch.ones(1)),
        "v_scale: want 1.0 for int8_per_token_head, which has no scale of the tensor, got a tensor",
    ),
    (
        lambda: PagedLatentCache.allocate(1, 2, 4, format="fp8_e4m3", kv_scale=float("nan")),
        "kv_scale: want a positive, finite number, got nan",
    ),
    (
        lambda: PagedKVCache.allocate(1, 2, 4, 2, 16, format="fp8_e4m3", k_scale=torch.ones(3)),
        "k_scale: want float32 with 1 or 2 elements on cpu, got [3] float32 on cpu",
    ),
    (
        lambda: PagedKVCache.allocate(1, 2, 4, 2, 16, format="nvfp4", v_scale=torch.ones(2)),
        "v_scale: want float32 with 1 elements on cpu, got [2] float32 on cpu",
    ),
    (
        lambda: PagedKVCache.allocate(1, 2, 4, 2, 16, format="fp8_e4m3", v_scale=torch.ones(2).double()),
        "v_scale: want float32 with 1 or 2 elements on cpu, got [2] float64 on cpu",
    ),
    (
        lambda: PagedLatentCache.allocate(1, 2, 4, format="fp8_e4m3", kv_scale=torch.ones(1, device="meta")),
        "kv_scale: want float32 with 1 elements on cpu, got [1] float32 on meta",
    ),
    (
        lambda: PagedLatentCache.allocate(1, 2, 4, format="fp8_e4m3", kv_scale=torch.ones(2)),
        "kv_scale: want float32 with 1 elements on cpu, got [2] float32 on cpu",
    ),
    (
        lambda: PagedLatentLayer.of(torch.zeros(1, 2, 656, dtype=torch.bool), format="fp8_ds_mla"),
        "cache: want uint8 rows of 528 bytes and a torch.bfloat16 rotary part for fp8_ds_mla, "
        "got [1, 2, 656] torch.bool",
    ),
    (
        lambda: PagedKVCache.allocate(1, 2, 4, 1, 16, format="nvfp4", scales="row"),
        "scales: want 'apart', 'inline' or 'tail', got 'row'",
    ),
    (
        lambda: PagedKVCache.allocate(1, 2, 4, 1, 16, format="nvfp4", scales="tail", inline_scales=True),
        "inline_scales: want it without scales='tail', whose older name it is, got True",
    ),
    (
        lambda: PagedKVLayer.from_buffer(
            torch.zeros(2, 159, dtype=torch.uint8), 4, 1, 16, format="int8_per_token_head"
        ),
        "buffer: want [P, 160 or more] of one byte each for int8_per_token_head, got [2, 159] uint8",
    ),
    (
        lambda: PagedKVLayer.from_buffer(torch.zeros(2, 160), 4, 1, 16, format="int8_per_token_head"),
        "buffer: want [P, 160 or more] of one byte each for int8_per_token_head, got [2, 160] float32",
    ),
    (
        lambda: PagedKVLayer.from_buffer(
            torch.zeros(2, 162, dtype=torch.uint8)[:, 2:], 4, 1, 16, format="int8_per_token_head"
        ),
        "buffer: want dense pages that begin at multiples of 4 bytes, got strides [162, 1] from byte 2",
    ),
    (lambda: PagedKVCache([], 8, 8), "layers: want at least one, got none"),
    (lambda: PagedLatentCache([]), "layers: want at least one, got none"),
    (
        lambda: PagedKVCache.from_tensors([torch.zeros(1, 2, 1, 1, 8, dtype=BF)], scale_caches=[]),
        "scale_caches: want 1 layers, got 0",
    ),
    (
        lambda: PagedKVLayer.of(torch.zeros(1, 3, 1, 1, 8, dtype=BF)),
        "cache: want (k, v) or one 5-D tensor [P, 2, ...], got [1, 3, 1, 1, 8]",
    ),
    (lambda: PagedKVLayer.of([torch.zeros(1)] * 3), "cache: want (k, v), got 3 entries"),
    (lambda: PagedKVLayer.of([torch.zeros(1)] * 2), "cache: want (k, v), each 4-D, got [1]"),
    (lambda: PagedKVLayer.of([torch.zeros(1, 1, 1, 8)] * 2, layout="X"), "layout: want 'NHD' or 'HND', got 'X'"),
    (
        lambda: PagedKVLayer.of([torch.zeros(1, 1, 1, 8)] * 2),
        "cache: want one of torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, "
        "torch.uint8, got torch.float32",
    ),
    (
        lambda: PagedLatentCache.allocate(1, 2, 4, format="fp8_ds_mla", split=True),
        "split: want False for fp8_ds_mla, which keeps a token's parts in one row, got True",
    ),
    (
        lambda: PagedLatentCache.allocate(1, 2, 4, format="fp8_ds_mla", kv_lora_rank=500),
        "kv_lora_rank: want a positive multiple of 128 for fp8_ds_mla, got 500",
    ),
    (
        lambda: PagedLatentCache.allocate(1, 2, 4, format="bf16", qk_rope_head_dim=3),
        "qk_rope_head_dim: want an even number, or 0 for none, got 3",
    ),
    (
        lambda: PagedLatentLayer.of(torch.zeros(1, 2, 511, dtype=BF)),
        "cache: want rows of kv_lora_rank=512 or more, got [1, 2, 511]",
    ),
    (
        lambda: PagedLatentLayer.of(torch.zeros(1313, dtype=torch.uint8)[1:].view(1, 2, 656)),
        "cache: want dense rows that begin at multiples of 4 bytes for fp8_ds_mla, "
        "got strides [1312, 656, 1] from byte 1",
    ),
    (
        lambda: PagedLatentLayer.of(torch.zeros(1, 2, 658, dtype=torch.uint8)),
        "cache: want dense rows that begin at multiples of 4 bytes for fp8_ds_mla, "
        "got strides [1316, 658, 1] from byte 0",
    ),
    (
        lambda: PagedLatentLayer.of(torch.zeros(1, 2, 3, 576, dtype=BF)),
        "cache: want [P, S, dim] or [P, S, 1, dim], got [1, 2, 3, 576]",
    ),
    (
        lambda: PagedLatentLayer.of(torch.zeros(1, 2, 527, dtype=torch.uint8)),
        "cache: want uint8 rows of 528 bytes and a torch.bfloat16 rotary part for fp8_ds_mla, "
        "got [1, 2, 527] torch.uint8",
    ),
    (
        lambda: PagedKVCache.allocate(1, 2, 4, 1, 16, format="bf16", device="gpu"),
        "device: want a device of torch such as 'cuda', 'cuda:1' or 'cpu', got 'gpu'",
    ),
    (
        lambda: PagedLatentCache.allocate(1, 2, 4, format="bf16", device=2.5),
        "device: want a device of torch such as 'cuda', 'cuda:1' or 'cpu', got 2.5",
    ),
    (
        lambda: PagedKVLayer.of(ready(), k_scale=3.0, layout="HND", format="bf16"),
        "cache: want tensors beside format, k_scale, layout, got a layer, which has its own",
    ),
    (
        lambda: PagedKVLayer.of(ready(), v_scale=torch.ones(2)),
        "cache: want tensors beside v_scale, got a layer, which has its own",
    ),
    (
        lambda: PagedLatentLayer.of(PagedLatentCache.allocate(1, 2, 4, format="bf16")[0], kv_lora_rank=256),
        "cache: want tensors beside kv_lora_rank, got a layer, which has its own",
    ),
    (lambda: kv_bytes_per_token("nvfp4", 8, 100), "head_dim: want a positive multiple of 16 for nvfp4, got 100"),
    (lambda: kv_bytes_per_token("bf16", 8, 64, 0), "head_dim_v: want a positive multiple of 1 for bf16, got 0"),
    (
        lambda: latent_bytes_per_token("fp8_ds_mla", 500),
        "kv_lora_rank: want a positive multiple of 128 for fp8_ds_mla, got 500",
    ),
    (lambda: kv_bytes_per_token("bf16", -8, 128), "num_kv_heads: want a positive number, got -8"),
    (lambda: latent_bytes_per_token("bf16", 512, -64), "qk_rope_head_dim: want 0 or more, got -64"),
    (lambda: PagedKVCache.from_tensors([]), "tensors: want at least one layer, got none"),
    (lambda: PagedLatentCache.from_tensors([]), "tensors: want at least one layer, got none"),
    (
        lambda: PagedLatentCache.allocate(1, 2, 4, format=["bf16"]),
        "format: want one of bf16, fp16, fp8_e4m3, fp8_e5m2, fp8_ds_mla, fp8_v4, fp8_v41 for latent caches, "
        "got ['bf16']",
    ),
]


@pytest.mark.parametrize(("make", "message"), WRONG, ids=[m[:40] for _, m in WRONG])
def test_a_wrong_argument_is_named(make, message):
    with pytest.raises(ValueError, match="want") as error:
        make()
    assert str(error.value) == message


@pytest.mark.parametrize(("make", "message"), [
    (lambda: PagedKVLayer.of(None), "cache: want (k, v) or one 5-D tensor, got NoneType"),
    (lambda: PagedKVLayer.of((torch.zeros(1, 1, 1, 8), 3)), "cache: want (k, v), each a Tensor, got int"),
    (lambda: PagedLatentLayer.of(3.0), "cache: want Tensor or (ckv, kpe), got float"),
    (lambda: PagedKVLayer.of(PagedKVCache.allocate(1, 1, 1, 1, 8, format="bf16")),
     "cache: want (k, v) or one 5-D tensor, got PagedKVCache, the cache of all layers (take one: cache[i])"),
    (lambda: PagedLatentLayer.of(PagedLatentCache.allocate(1, 1, 1, format="bf16")),
     "cache: want Tensor or (ckv, kpe), got PagedLatentCache, the cache of all layers (take one: cache[i])"),
    (lambda: PagedLatentLayer.of((None, torch.zeros(1, 1, 8))), "cache: want Tensor, got NoneType"),
    (lambda: PagedKVLayer.from_buffer(None, 4, 1, 16, format="bf16"), "buffer: want Tensor, got NoneType"),
    (lambda: PagedKVLayer.of(np.zeros((1, 2, 1, 1, 8))), "cache: want (k, v) or one 5-D tensor, got ndarray"),
    (lambda: PagedKVLayer.of([np.zeros((1, 1, 1, 8))] * 2), "cache: want (k, v), each a Tensor, got ndarray"),
    (lambda: PagedLatentLayer.of(np.zeros((1, 1, 576))), "cache: want Tensor or (ckv, kpe), got ndarray"),
    (lambda: PagedKVCache.allocate(1, 2, 4, 1, "64", format="bf16"), "head_dim: want int, got str '64'"),
    (lambda: PagedKVCache.allocate(1, 2.0, 4, 1, 64, format="bf16"), "num_pages: want int, got float 2.0"),
    (
        lambda: PagedKVCache.allocate(1, 2, 4, 1, 64, format="bf16", head_dim_v=[8]),
        "head_dim_v: want int, got list [8]",
    ),
    (lambda: PagedKVCache.allocate(1, 2, 4, 1, 64, format="bf16", packed=1), "packed: want bool, got int"),
    (
        lambda: PagedKVCache.allocate(1, 2, 4, 1, 64, format="nvfp4", inline_scales="no"),
        "inline_scales: want bool, got str",
    ),
    (lambda: PagedLatentCache.allocate(1, 2, 4, format="bf16", split="no"), "split: want bool, got str"),
    (
        lambda: PagedKVCache.from_tensors(torch.zeros(1, 2, 1, 1, 8, dtype=BF) for _ in range(2)),
        "tensors: want a sequence with an entry for each layer, got generator",
    ),
    (
        lambda: PagedLatentCache.from_tensors(torch.zeros(1, 1, 576, dtype=BF) for _ in range(2)),
        "tensors: want a sequence with an entry for each layer, got generator",
    ),
    (lambda: PagedLatentCache.allocate(1, 2, None, format="bf16"), "page_size: want int, got NoneType None"),
    (lambda: PagedLatentLayer.of(torch.zeros(1, 1, 576, dtype=BF), kv_lora_rank="512"),
     "kv_lora_rank: want int, got str '512'"),
    (lambda: PagedKVCache.allocate(1, 2, 4, 1, 64, format="fp8_e4m3", k_scale="a"),
     "k_scale: want a number or a Tensor, got str"),
    (lambda: kv_bytes_per_token("bf16", 8, 128.0), "head_dim: want int, got float 128.0"),
    (lambda: latent_bytes_per_token("bf16", 512.0), "kv_lora_rank: want int, got float 512.0"),
])  # fmt: skip
def test_a_wrong_type_is_named(make, message):
    with pytest.raises(TypeError, match="want") as error:
        make()
    assert str(error.value) == message


@pytest.mark.parametrize("scale", [torch.ones(()), torch.ones(1), torch.ones(2)], ids=lambda x: str(list(x.shape)))
def test_a_scale_on_the_device_may_be_one_or_one_a_head(scale):
    assert PagedKVCache.allocate(2, 2, 4, 2, 16, format="fp8_e4m3", k_scale=scale)[1].k_scale is scale


@pytest.mark.parametrize("layer", [2, 5, -3])
def test_a_layer_that_a_cache_does_not_have_is_named(layer):
    cache = tersekv.PagedKVCache.allocate(2, 4, 16, 2, 32, format="bf16")
    with pytest.raises(IndexError, match=f"^layer: want 0 to 1, the cache's layers, got {layer}$"):
        cache[layer]
    assert len([*cache]) == 2, "what ends a loop over a cache is an IndexError"
    assert cache[-1] is cache[1]
