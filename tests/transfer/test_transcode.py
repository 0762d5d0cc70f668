"""transcode of whole caches: what dequantising and appending gives, to the byte, and nothing beside."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from no_sync import NoHostReads

import tersekv
from tersekv import KV_FORMATS, LATENT_FORMATS, PagedKVCache, PagedLatentCache, env
from tersekv.backends.torch import transcode as oracle
from tersekv.backends.torch.quantize import dequantize
from tersekv.formats import kv_format
from tersekv.testing.cases import cases
from tersekv.testing.make import make
from tersekv.testing.memory import as_bytes, storage_bytes

H, D, LAYERS, TOKENS = 2, 64, 2, 37
SRC, DST = [4, 1, 6, 0, 3], [2, 5]  # pages of 8 and of 24


def kv(format, pages=8, size=8, layers=LAYERS, **options) -> PagedKVCache:
    named = {"layer_formats": format} if isinstance(format, list) else {"format": format}
    return PagedKVCache.allocate(layers, pages, size, H, D, **named, **options)


def filled(cache):
    """Every slot of it written."""
    torch.manual_seed(1)
    n = cache.num_pages * cache.page_size
    for layer in cache.layers:
        if isinstance(cache, PagedKVCache):
            k, v = torch.randn(2, n, H, D) * 10 ** torch.empty(2, n, H, 1).uniform_(-2, 1)
            tersekv.append(k, v, layer, torch.arange(n))
        else:
            tersekv.mla_append(torch.randn(n, cache.kv_lora_rank), torch.randn(n, 64), layer, torch.arange(n))
    return cache


def contents(cache) -> list[torch.Tensor]:
    return [storage_bytes(x).clone() for layer in cache.layers for x in tensors(layer)]


def tensors(layer) -> list[torch.Tensor]:
    names = ("k", "v", "k_scale_cache", "v_scale_cache", "ckv", "kpe", "ckv_scale_cache")
    return [x for x in (getattr(layer, name, None) for name in names) if x is not None]


def slots(pages: list[int], size: int, tokens: int = TOKENS) -> torch.Tensor:
    at = torch.arange(tokens)
    return torch.tensor(pages)[at // size] * size + at % size


def rows(x: torch.Tensor, pages: list[int], tokens: int = TOKENS) -> torch.Tensor:
    """Bytes of the first tokens of these pages."""
    at = torch.arange(tokens)
    return as_bytes(x)[torch.tensor(pages)[at // x.shape[1]], at % x.shape[1]]


def values(layer, side: str) -> torch.Tensor:
    """The tokens of SRC as fp32."""
    f = kv_format(layer.formats["kv".index(side)])
    codes, stored = getattr(layer, side), getattr(layer, f"{side}_scale_cache")
    stored = None if stored is None else rows(stored, SRC).view(stored.dtype)[..., 0]
    return dequantize(rows(codes, SRC).view(codes.dtype)[..., 0], stored, f, getattr(layer, f"{side}_scale"))


@pytest.mark.parametrize(("src", "dst"), [*product(KV_FORMATS, KV_FORMATS)])
def test_a_transcode_appends_what_was_dequantised(src, dst):
    """In any pair of formats, and of page sizes, layouts and places of scales; other slots stay as they were."""
    a = filled(kv(src, scales="tail"))
    b, want = (filled(kv(dst, pages=6, size=24, layout="HND", scales="inline")) for _ in range(2))
    tersekv.transcode(a, SRC, b, DST, num_tokens=TOKENS)
    for old, new in zip(a.layers, want.layers, strict=True):
        if src == dst:
            for x, y in zip(tensors(old), tensors(new), strict=True):
                at = torch.arange(TOKENS)
                as_bytes(y)[torch.tensor(DST)[at // 24], at % 24] = rows(x, SRC)
        else:
            where = slots(DST, 24)
            tersekv.append(values(old, "k"), values(old, "v"), new, where, backend="torch")
    assert all(map(torch.equal, contents(b), contents(want)))


@pytest.mark.parametrize(("src", "dst"), [*product(LATENT_FORMATS, LATENT_FORMATS)])
def test_latents_in_any_pair_of_formats(src, dst):
    a = filled(PagedLatentCache.allocate(2, 8, 8, format=src, kv_lora_rank=128))
    b, want = (filled(PagedLatentCache.allocate(2, 6, 24, format=dst, kv_lora_rank=128)) for _ in range(2))
    tersekv.transcode(a, SRC, b, DST, num_tokens=TOKENS)
    for old, new in zip(a.layers, want.layers, strict=True):
        stored = old.ckv_scale_cache
        stored = None if stored is None else rows(stored, SRC).view(stored.dtype)[..., 0]
        f = LATENT_FORMATS[src]
        latent = dequantize(rows(old.ckv, SRC).view(old.ckv.dtype)[..., 0], stored, f)
        rotary = rows(old.kpe, SRC).view(old.kpe.dtype)[..., 0].float()
        if src != dst:
            tersekv.mla_append(latent, rotary, new, slots(DST, 24), backend="torch")
        else:
            for x, y in zip(tensors(old), tensors(new), strict=True):
                at = torch.arange(TOKENS)
                as_bytes(y)[torch.tensor(DST)[at // 24], at % 24] = rows(x, SRC)
    assert all(map(torch.equal, contents(b), contents(want)))


def test_layers_of_many_formats_scales_and_attributes():
    """Each layer as if it were alone."""
    torch.manual_seed(0)
    mixed = ["bf16", ("fp8_e4m3", "int4_per_token_head"), "fp8_e4m3", "nvfp4"]
    a = filled(kv(mixed, layers=4, k_channel_scale=torch.rand(4, H, D) + 0.5, rotation=("hadamard", None)))
    b = kv(["int4_per_token_head", "nvfp4", "fp8_e4m3", "nvfp4"], layers=4, size=16, rotation="hadamard")
    layers = [replace(layer, k_scale=0.5 + i) if layer.formats[0] == "fp8_e4m3" else layer for i, layer in enumerate(b)]
    b = PagedKVCache(layers, D, D)
    one_by_one = filled(PagedKVCache([replace(layer, **clones(layer)) for layer in layers], D, D))
    filled(b)
    tersekv.transcode(a, SRC, b, DST[::-1] + [7], num_tokens=TOKENS)
    for old, new in zip(a.layers, one_by_one.layers, strict=True):
        tersekv.transcode(old, torch.tensor(SRC), new, torch.tensor([*DST[::-1], 7]), num_tokens=TOKENS)
    assert all(map(torch.equal, contents(b), contents(one_by_one)))


def clones(layer) -> dict:
    names = ("k", "v", "k_scale_cache", "v_scale_cache")
    return {n: None if getattr(layer, n) is None else getattr(layer, n).clone() for n in names}


@pytest.mark.parametrize("format", KV_FORMATS)
def test_there_and_back_between_page_sizes_changes_no_byte(format):
    a = filled(kv(format, rotation="hadamard"))
    b, c = kv(format, size=3, pages=20, layout="HND", rotation="hadamard"), kv(format, rotation="hadamard")
    tersekv.transcode(a, SRC, b, [*range(14)], num_tokens=40)
    tersekv.transcode(b, [*range(14)], c, SRC, num_tokens=40)
    for old, new in zip(a.layers, c.layers, strict=True):
        for x, y in zip(tensors(old), tensors(new), strict=True):
            assert torch.equal(as_bytes(x)[SRC], as_bytes(y)[SRC])


def test_the_number_of_tokens_may_lie_on_the_device():
    a, b, want = filled(kv("fp8_e4m3")), kv("int8_per_token_head", size=24), kv("int8_per_token_head", size=24)
    far = 2**31 - 1
    number = torch.tensor([9], dtype=torch.int32)
    pages = torch.tensor([4, 1, far, far], dtype=torch.int32), torch.tensor([2, far], dtype=torch.int32)
    tersekv.transcode(a, pages[0], b, pages[1], num_tokens=number)
    tersekv.transcode(a, [4, 1], want, [2], num_tokens=9)
    assert all(map(torch.equal, contents(b), contents(want)))
    with pytest.raises(ValueError, match=r"num_tokens: want 0 to 32, what both lists hold, got 33"):
        tersekv.transcode(a, pages[0], b, pages[1], num_tokens=number + 24)


def of_shape(*shape: int) -> PagedKVCache:
    return PagedKVCache.from_tensors([torch.zeros(2, *shape, dtype=torch.bfloat16).unbind()] * LAYERS)


WRONG = [
    ({"src": 3}, TypeError, "src: want a cache or a layer of one, got int"),
    ({"dst": PagedLatentCache.allocate(2, 8, 8, format="bf16")}, TypeError, "dst: want PagedKVCache as src is, got"),
    ({"dst": kv("bf16", layers=3)}, ValueError, "dst: want num_layers 2 as src has, got 3"),
    ({"dst": PagedKVCache.allocate(2, 8, 8, 3, D, format="bf16")}, ValueError, "want num_kv_heads 2 as src has, got 3"),
    ({"dst": PagedKVCache.allocate(2, 8, 8, H, D, head_dim_v=32, format="bf16")}, ValueError, "head_dim_v 64 as src"),
    ({"dst": kv("bf16", device="meta")}, ValueError, "dst: want device cpu as src has, got meta"),
    ({"src_pages": [0, 8]}, ValueError, r"src_pages: want pages in \[0, 8\), got 8 at 1"),
    ({"src_pages": torch.tensor([0, -1])}, ValueError, r"src_pages: want pages in \[0, 8\), got -1 at 1"),
    ({"dst_pages": [1, 1]}, ValueError, "dst_pages: want each page once, got 1 again"),
    ({"dst_pages": torch.tensor([7, 7])}, ValueError, "dst_pages: want each page once, got 7 again"),
    ({"dst_pages": torch.tensor([9, 7])}, ValueError, r"dst_pages: want pages in \[0, 8\), got 9 at 0"),
    ({"dst_pages": [1]}, ValueError, "dst_pages: want at least 2 pages of 8 slots for 16 tokens, got 1"),
    ({"src": of_shape(8, 0, H, D)}, ValueError, "src: want at least one slot a page, got 0"),
    ({"dst": of_shape(8, 0, H, D)}, ValueError, "dst: want at least one slot a page, got 0"),
    ({"src": of_shape(8, 8, 0, D), "dst": of_shape(8, 8, 0, D)}, ValueError, "src: want rows, got num_kv_heads 0"),
    ({"num_tokens": 17}, ValueError, "src_pages: want at least 3 pages of 8 slots for 17 tokens, got 2"),
    ({"num_tokens": -1}, ValueError, "num_tokens: want 0 or more, got -1"),
    ({"num_tokens": 1.5}, TypeError, "num_tokens: want int, got float"),
    ({"num_tokens": torch.tensor([1.0])}, ValueError, r"num_tokens: want \[1\] int32"),
    ({"src_pages": torch.tensor([0.0, 1.0])}, ValueError, r"src_pages: want \[n\] int32 .* got \[2\] float32"),
    ({"src_pages": torch.tensor([[0]])}, ValueError, r"src_pages: want \[n\], got \[1, 1\]"),
    ({"src_pages": "ab"}, TypeError, "src_pages: want Tensor or a list of ints, got str"),
    ({"src_pages": [True, 0]}, TypeError, "src_pages: want int, got bool"),
    ({"src_pages": torch.tensor([0, 1], device="meta")}, ValueError, "src_pages: want device cpu, got meta"),
    ({"backend": "cuda"}, ValueError, "backend: want one of"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG, ids=[m[:50] for _, _, m in WRONG])
def test_bad_calls_raise_and_write_nothing(wrong, error, message):
    a, b = filled(kv("fp8_e4m3")), filled(kv("nvfp4"))
    args = {"src": a, "src_pages": [0, 1], "dst": b, "dst_pages": [1, 2]} | wrong
    before = contents(b)
    with pytest.raises(error, match=message):
        tersekv.transcode(args.pop("src"), args.pop("src_pages"), args.pop("dst"), args.pop("dst_pages"), **args)
    assert all(map(torch.equal, contents(b), before))


def test_a_wrong_layer_leaves_the_ones_before_it_unwritten():
    a, b = filled(kv("fp8_e4m3")), kv("fp8_e4m3")
    b = PagedKVCache([b[0], replace(b[1], k_scale=torch.ones(3))], D, D)
    with pytest.raises(ValueError, match=r"dst.k_scale: want \[H=2\] float32, got \[3\] float32"):
        tersekv.transcode(a, [0], b, [1])
    assert not b[0].k.view(torch.uint8).any()


def test_a_cache_is_not_transcoded_into_itself():
    a = filled(kv("fp8_e4m3"))
    with pytest.raises(ValueError, match="dst: want memory of its own, got some of src's"):
        tersekv.transcode(a, [0], a, [1])
    with pytest.raises(ValueError, match="dst: want memory of its own, got some of src's"):
        tersekv.transcode(a[0], [0], PagedKVCache([a[0]], D, D)[0], [1])


def test_two_caches_may_lie_in_one_buffer():
    size = tersekv.kv_page_bytes("int8_per_token_head", 8, H, D)
    arena = torch.zeros(6, size, dtype=torch.uint8)
    a, b = (
        tersekv.PagedKVLayer.from_buffer(part, 8, H, D, format="int8_per_token_head") for part in (arena[:3], arena[3:])
    )
    tersekv.append(torch.randn(24, H, D), torch.randn(24, H, D), a, torch.arange(24))
    tersekv.transcode(a, [2, 0], b, [1, 2])
    assert torch.equal(arena[[2, 0]], arena[[4, 5]])
    with pytest.raises(ValueError, match="dst: want memory of its own"):
        tersekv.transcode(a, [2], tersekv.PagedKVLayer.from_buffer(arena, 8, H, D, format="int8_per_token_head"), [5])


@pytest.mark.parametrize(("scale", "same"), [(torch.ones(1), True), (0.5, False), (torch.full((1,), 0.5), False)])
def test_rows_are_copied_if_the_scale_of_the_tensor_is_equal(scale, same):
    """A number or not; with another one stored scales differ."""
    a = filled(kv("nvfp4"))
    b = PagedKVCache([replace(layer, k_scale=scale, v_scale=scale) for layer in kv("nvfp4")], D, D)
    tersekv.transcode(a, [2], b, [3])
    for old, new in zip(tensors(a[1]), tensors(b[1]), strict=True):
        if same or new.dtype != torch.uint8:
            assert torch.equal(as_bytes(old)[2], as_bytes(new)[3]) == same


def test_the_oracle_reads_no_value_of_the_device():
    for case in (c for c in cases(("transcode",), ("nvfp4", "fp8_e4m3"))):
        call = make(case)
        with NoHostReads():
            oracle.run(call, None)


def test_pages_outside_are_skipped_where_values_are_not_looked_at():
    a, b = filled(kv("bf16", layers=1)), kv("fp8_e4m3", layers=1)
    call = make(next(c for c in cases(("transcode",), ("bf16",)) if c.name == "next format"))
    pages = call.src_pages.clone()
    pages[0] = -5
    before = storage_bytes(call.k_cache).clone()
    oracle.run(call._replace(src_pages=pages[:1], num_tokens=16), None)
    oracle.run(call._replace(dst_pages=pages[:1], num_tokens=16), None)
    assert torch.equal(storage_bytes(call.k_cache), before)
    with pytest.raises(ValueError, match="got -5 at 0"):
        tersekv.transcode(a, torch.tensor([-5]), b, torch.tensor([0]))


def test_signs_and_channel_scales_of_both_sides_are_looked_at_in_checked_mode(monkeypatch):
    monkeypatch.setattr(env, "checked", lambda: True)
    a, b = kv("bf16", rotation="hadamard"), kv("fp8_e4m3")
    a[1].k_signs[3] = 0.5
    with pytest.raises(ValueError, match=r"src_k_signs: want 1 or -1, got 0\.5"):
        tersekv.transcode(a, [0], b, [0])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_transcode_compiles_whole(backend):
    torch._dynamo.reset()
    a = filled(kv("fp8_e4m3", rotation="hadamard"))
    b, want = (kv("int8_per_token_head", size=16, rotation="hadamard") for _ in range(2))

    def step(src, src_pages, dst, dst_pages, tokens):
        tersekv.transcode(src, src_pages, dst, dst_pages, num_tokens=tokens)
        return dst[1].k.float() * 2

    args = a, torch.tensor(SRC), b, torch.tensor([*DST, 0]), torch.tensor([33])
    got = torch.compile(step, fullgraph=True, backend=backend)(*args)
    step(args[0], args[1], want, *args[3:])
    assert torch.equal(got, want[1].k.float() * 2)
    assert all(map(torch.equal, contents(b), contents(want)))
