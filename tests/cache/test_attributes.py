"""What a K/V cache may have beside its formats: pairs of formats, formats by layer, rotated rows, channel scales."""

from __future__ import annotations

import importlib
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tersekv
from tersekv import PagedKVCache, PagedKVLayer, PagedLatentCache, UnsupportedError, kv_bytes_per_token
from tersekv.attributes import signs

PAIR = ("fp8_e4m3", "nvfp4")
HEADS, GROUP, DIM, DIM_V, TOKENS = 2, 3, 96, 64, 70
BACKENDS = ["torch", "cpu"]


def rows(seed: int, outliers: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of fp32 rows; channels 3 and 40 of each key are larger, of each query smaller."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(*s, generator=g) for s in ( (1, HEADS * GROUP, DIM), (TOKENS, HEADS, DIM),
                                                      (TOKENS, HEADS, DIM_V) ))  # fmt: skip
    for channel in (3, 40):
        k[..., channel] *= outliers
        q[..., channel] /= outliers
    return q, k, v


def attended(q, k, v, backend, **options) -> tuple[torch.Tensor, torch.Tensor]:
    cache = PagedKVCache.allocate(1, 5, 16, HEADS, DIM, head_dim_v=DIM_V, **options)
    tersekv.append(k, v, cache[0], torch.arange(TOKENS), backend=backend)
    table, lens = torch.arange(5, dtype=torch.int32)[None], torch.tensor([TOKENS])
    return tersekv.decode(q, cache[0], table, lens, return_lse=True, backend=backend)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def truth(q, k, v) -> torch.Tensor:
    scores = torch.einsum("hgd,nhd->hgn", q[0].unflatten(0, (HEADS, GROUP)).double(), k.double()) * DIM**-0.5
    return torch.einsum("hgn,nhd->hgd", scores.softmax(-1), v.double()).flatten(0, 1)[None].float()


def scales(heads: int, dim: int) -> torch.Tensor:
    return 10 ** torch.linspace(-1.5, 1.5, heads * dim).view(heads, dim)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [
    {"rotation": "hadamard"}, {"rotation": ("hadamard", None)}, {"rotation": (None, "hadamard")},
    {"k_channel_scale": scales(HEADS, DIM)}, {"v_channel_scale": scales(HEADS, DIM_V)},
    {"rotation": "hadamard", "k_channel_scale": scales(HEADS, DIM), "v_channel_scale": scales(HEADS, DIM_V)},
], ids=str)  # fmt: skip
def test_an_attention_undoes_what_an_append_did(options, backend):
    q, k, v = rows(0)
    want, want_lse = attended(q, k, v, backend, format="bf16")
    got, lse = attended(q, k, v, backend, format="bf16", **options)
    assert error(got, want) < 1e-2
    assert (lse - want_lse).abs().max() < 2e-2
    assert not torch.equal(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_outlier_channels_cost_less_where_rows_are_rotated_and_nothing_where_channels_are_scaled(backend):
    q, k, v = rows(1, outliers=50.0)
    want = truth(q, k, v)
    plain = error(attended(q, k, v, backend, format="int8_per_token_head")[0], want)
    rotated = error(attended(q, k, v, backend, format="int8_per_token_head", rotation="hadamard")[0], want)
    own = tersekv.channel_scale(k)
    scaled = error(attended(q, k, v, backend, format="int8_per_token_head", k_channel_scale=own)[0], want)
    untouched = error(attended(*rows(1), backend, format="int8_per_token_head")[0], truth(*rows(1)))
    assert rotated < 0.6 * plain
    assert scaled < 1.3 * untouched < 0.2 * plain


def test_channel_scales_are_largest_magnitudes_of_mean_1_a_head():
    k = torch.randn(500, 2, 8, dtype=torch.float64) * torch.tensor([1.0, 10.0])[:, None]
    k[..., 5] *= 30
    k[:, 1, 2] = 0
    got = tersekv.channel_scale(k.bfloat16())
    assert (got.shape, got.dtype) == ((2, 8), torch.float32)
    torch.testing.assert_close(got.mean(-1), torch.ones(2))
    assert (got > 0).all()
    largest = k.bfloat16().double().abs().amax(0)
    torch.testing.assert_close((got[0, 5] / got[0, 4]).double(), largest[0, 5] / largest[0, 4])
    with pytest.raises(ValueError, match=r"^rows: want \[T, H, D\] with at least one token, got \[0, 2, 8\]"):
        tersekv.channel_scale(k[:0])
    for value in (float("inf"), float("nan")):
        k[3, 1, 4] = value
        with pytest.raises(ValueError, match=f"^rows: want finite numbers, got {value}$"):
            tersekv.channel_scale(k)


@pytest.mark.parametrize("block", [8, 32, 512])
def test_signs_are_the_same_at_every_call_and_for_every_size_that_has_the_power_of_two(block):
    g = torch.Generator("cpu").manual_seed(0x9E3779B9)
    want = 2 * torch.bernoulli(torch.full((block,), 0.5), generator=g) - 1
    assert signs(block).equal(want)
    assert signs(3 * block).equal(want)
    assert set(want.tolist()) == {-1.0, 1.0}


def test_longer_blocks_than_there_are_signs_for_are_refused():
    with pytest.raises(ValueError, match=r"^rotation: want heads in blocks of at most 512 columns, got 1024 of 3072$"):
        PagedKVLayer.of((torch.zeros(1, 1, 1, 3072).bfloat16(),) * 2, rotation="hadamard")


@pytest.mark.parametrize("how", ["make_fx", "export", "compile"])
def test_a_layer_made_in_a_traced_program_has_the_same_signs_at_every_run(how):
    def rotated(k):
        return PagedKVLayer.of((k, k), rotation="hadamard").k_signs * 1

    k, want = torch.zeros(1, 1, 1, 16).bfloat16(), signs(16)
    if how == "make_fx":
        run = make_fx(rotated, tracing_mode="fake")(k)
    elif how == "compile":
        run = torch.compile(rotated, fullgraph=True, backend="aot_eager")
    else:
        module = torch.nn.Module()
        module.forward = rotated
        run = torch.export.export(module, (k,)).module()
    assert [run(k).equal(want) for _ in range(3)] == [True] * 3


@pytest.mark.parametrize("place", ["apart", "inline", "tail"])
def test_a_pair_is_two_formats_side_by_side(place):
    cache = PagedKVCache.allocate(2, 3, 4, HEADS, DIM, head_dim_v=DIM_V, format=PAIR, scales=place)
    layer = cache[1]
    assert (cache.format, layer.format, layer.formats) == (PAIR, PAIR, PAIR)
    assert (layer.head_dim, layer.head_dim_v, layer.k.shape[-1], layer.v.shape[-1]) == (DIM, DIM_V, DIM, DIM_V // 2)
    assert layer.k_scale_cache is None
    assert layer.v_scale_cache is not None
    assert cache.bytes_per_token == 2 * HEADS * (DIM + DIM_V // 2 + DIM_V // 16)
    assert cache.bytes_per_token == 2 * kv_bytes_per_token(PAIR, HEADS, DIM, DIM_V)
    same = PagedKVCache.allocate(1, 3, 4, 1, 64, format=("bf16", "bf16"))
    assert (same.format, same[0].formats) == ("bf16", ("bf16", "bf16"))


def test_bare_tensors_may_be_of_two_formats():
    k, v = torch.zeros(3, 4, 2, 32, dtype=torch.float8_e4m3fn), torch.zeros(3, 4, 2, 16, dtype=torch.uint8)
    stored = torch.zeros(3, 4, 2, 2, dtype=torch.float8_e4m3fn)
    layer = PagedKVLayer.of((k, v), format=PAIR, scale_cache=(None, stored), rotation=(None, "hadamard"))
    assert (layer.formats, layer.rotation, layer.head_dim_v) == (PAIR, (None, "hadamard"), 32)
    assert layer.v_scale_cache is stored


def test_layers_may_have_formats_of_their_own():
    each = ["bf16", PAIR, ("nvfp4", "nvfp4")]
    cache = PagedKVCache.allocate(3, 3, 4, HEADS, 64, layer_formats=each)
    assert cache.layer_formats == ("bf16", PAIR, "nvfp4")
    assert cache.bytes_per_token == sum(kv_bytes_per_token(f, HEADS, 64) for f in each)
    assert cache.nbytes == cache.bytes_per_token * 12
    with pytest.raises(ValueError, match=r"^format: want layers of one, got bf16, \('fp8_e4m3', 'nvfp4'\), nvfp4$"):
        cache.format  # noqa: B018


def test_a_cache_with_everything_comes_back_from_pickle():
    cache = PagedKVCache.allocate(
        2, 3, 4, HEADS, 64, layer_formats=["bf16", PAIR], rotation=("hadamard", None), scales="tail",
        v_channel_scale=scales(2 * HEADS, 64).view(2, HEADS, 64),
    )  # fmt: skip
    back = pickle.loads(pickle.dumps(cache))
    for mine, its in zip(cache.layers, back.layers, strict=True):
        assert (its.format, its.rotation, repr(its)) == (mine.format, mine.rotation, repr(mine))
        assert its.k_signs.equal(mine.k_signs)
        assert its.v_channel_scale.equal(mine.v_channel_scale)
    assert back[0].k_signs.data_ptr() == back[1].k_signs.data_ptr()  # once, as they were


def everything() -> PagedKVCache:
    return PagedKVCache.allocate(
        2, 3, 4, HEADS, 64, head_dim_v=96, layer_formats=["fp8_e5m2", PAIR], rotation=("hadamard", None), k_scale=0.1,
        v_scale=torch.full((1,), 3.0), v_channel_scale=scales(2 * HEADS, 96).view(2, HEADS, 96),
    )  # fmt: skip


def test_attributes_are_saved_and_an_empty_cache_is_made_of_them(tmp_path):
    cache, path = everything(), tmp_path / "attributes.safetensors"
    cache[1].k_signs[3] *= -1  # another's signs: what is saved counts, not what is drawn
    cache.save_attributes(path)
    back = PagedKVCache.allocate_saved(path, 7, 16, scales="tail", layout="HND")
    assert (back.num_pages, back.page_size, back.layer_formats) == (7, 16, ("fp8_e5m2", PAIR))
    assert (back.num_kv_heads, back.head_dim, back.head_dim_v) == (HEADS, 64, 96)
    for mine, its in zip(cache.layers, back.layers, strict=True):
        assert (its.k_scale, its.rotation, its.k_channel_scale) == (0.1, ("hadamard", None), None)
        for name in ("v_scale", "k_signs", "v_channel_scale"):
            assert getattr(its, name).equal(getattr(mine, name))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_the_file_is_safetensors(tmp_path):
    cache, path = everything(), tmp_path / "attributes.safetensors"
    cache.save_attributes(path)
    read = load_file(path)
    assert read["1.v_channel_scale"].equal(cache[1].v_channel_scale)
    assert set(read) == {f"{i}.{name}" for i in (0, 1) for name in ("v_scale", "k_signs", "v_channel_scale")}
    save_file({"x": torch.ones(3)}, tmp_path / "other")
    with pytest.raises(ValueError, match="other: want a file that save_attributes wrote, got another's"):
        PagedKVCache.allocate_saved(tmp_path / "other", 1, 1)


def test_a_place_that_cannot_be_written_is_an_error_of_the_system(tmp_path):
    for path in (tmp_path, tmp_path / "none" / "x"):
        with pytest.raises(OSError, match=str(path)):
            everything().save_attributes(path)


@pytest.mark.parametrize("data", [b"", b"\xff" * 40, b"\x02\0\0\0\0\0\0\0[]", b'\x10\0\0\0\0\0\0\0{"x":{"dtype":3}}'])
def test_a_file_of_another_kind_is_named(data, tmp_path):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ValueError, match="x: want a safetensors file, got "):
        PagedKVCache.allocate_saved(tmp_path / "x", 1, 1)


def test_a_folder_is_no_file_of_attributes(tmp_path):
    with pytest.raises(ValueError, match=f"^{tmp_path}: want a file that save_attributes wrote, got a folder$"):
        PagedKVCache.allocate_saved(tmp_path, 1, 1)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_channel_scales_that_rows_cannot_be_divided_by_are_refused_where_a_cache_is_made(value, tmp_path):
    scale = torch.ones(2, 1, 16)
    made = PagedKVCache.allocate(2, 2, 4, 1, 16, format="bf16", v_channel_scale=scale)
    made[1].v_channel_scale[0, 3] = value
    told = rf"^{{}}v_channel_scale: want positive, finite numbers, got {value} at \[{{}}0, 3\]$"
    with pytest.raises(ValueError, match=told.format("", "1, ")):
        PagedKVCache.allocate(2, 2, 4, 1, 16, format="bf16", v_channel_scale=scale)
    made.save_attributes(tmp_path / "x")
    with pytest.raises(ValueError, match=told.format(f"{tmp_path}/x: 1.", "")):
        PagedKVCache.allocate_saved(tmp_path / "x", 2, 4)


def test_channel_scales_without_values_are_taken():
    meta = torch.empty(1, 16, device="meta")
    assert PagedKVCache.allocate(1, 2, 4, 1, 16, format="bf16", k_channel_scale=meta, device="meta")
    with FakeTensorMode():
        assert PagedKVCache.allocate(1, 2, 4, 1, 16, format="bf16", k_channel_scale=torch.ones(1, 16))
        cuda = torch.ones(1, 16, device="cuda")
        assert PagedKVCache.allocate(1, 2, 4, 1, 16, format="bf16", k_channel_scale=cuda, device="cuda")
    traced = make_fx(lambda x: PagedKVCache.allocate(1, 2, 4, 1, 16, format="bf16", k_channel_scale=x)[0].k * 1)
    assert traced(torch.ones(1, 16))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("options", "what"), [
    ({"format": PAIR}, "K and V of different formats"),
    ({"format": "bf16", "rotation": (None, "hadamard")}, "rotated rows"),
    ({"format": "bf16", "k_channel_scale": scales(HEADS, 64)}, "channel scales"),
], ids=["pair", "rotation", "channels"])  # fmt: skip
def test_a_backend_that_does_not_say_it_takes_an_attribute_refuses_it(options, what, backend, monkeypatch):
    module = importlib.import_module(f"tersekv.backends.{backend}.append")
    layer = PagedKVCache.allocate(1, 2, 4, HEADS, 64, **options)[0]
    k, slots = torch.zeros(1, HEADS, 64), torch.zeros(1, dtype=torch.int32)
    tersekv.append(k, k, layer, slots, backend=backend)
    monkeypatch.delattr(module, "SUPPORTS")
    with pytest.raises(UnsupportedError, match=f"{backend}: takes no {what} yet"):
        tersekv.append(k.half(), k.half(), layer, slots, backend=backend)


def test_codes_that_are_stored_as_they_are_go_to_no_cache_that_would_change_them():
    layer = PagedKVCache.allocate(1, 2, 4, 1, 16, format="fp8_e4m3", rotation="hadamard")[0]
    k = torch.zeros(1, 1, 16, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"^k: want values for a cache with rotated rows, got float8_e4m3fn codes$"):
        tersekv.append(k, k, layer, torch.zeros(1, dtype=torch.int32))


def test_checked_mode_looks_at_signs_and_scales(monkeypatch):
    monkeypatch.setenv("TERSEKV_CHECKED", "1")
    layer = PagedKVCache.allocate(
        1, 2, 4, 1, 16, format="bf16", rotation="hadamard", v_channel_scale=torch.ones(1, 16)
    )[0]
    k, slots = torch.zeros(1, 1, 16), torch.zeros(1, dtype=torch.int32)
    tersekv.append(k, k, layer, slots)
    layer.v_channel_scale[0, 3] = -1
    with pytest.raises(ValueError, match=r"^v_channel_scale: want positive, finite numbers, got -1.0$"):
        tersekv.append(k, k, layer, slots)
    layer.v_channel_scale.fill_(1)
    layer.k_signs[2] = 0.5
    with pytest.raises(ValueError, match=r"^k_signs: want 1 or -1, got 0.5$"):
        tersekv.append(k, k, layer, slots)


def allocate(**options) -> PagedKVCache:
    return PagedKVCache.allocate(2, 2, 4, 1, 16, **options)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: allocate(), "format: want it, or layer_formats with an entry for each layer, got neither; formats are "
     "bf16, fp16, fp8_e4m3, fp8_e5m2, fp8_per_token_head, int8_per_token_head, nvfp4, int4_per_token_head"),
    (lambda: allocate(format="bf16", layer_formats=["bf16"] * 2),
     "format: want it, or layer_formats with an entry for each layer, got both"),
    (lambda: allocate(layer_formats=["bf16"]), "layer_formats: want 2 entries, one a layer, got ['bf16']"),
    (lambda: allocate(format=("bf16",)), "format: want one for both, or K's and V's, got 1 entries"),
    (lambda: allocate(format=PAIR, packed=True), "packed: want K and V of one format, got fp8_e4m3 and nvfp4"),
    (lambda: allocate(format="bf16", rotation="dct"),
     "rotation: want None or 'hadamard', or one each for K and V, got 'dct'"),
    (lambda: allocate(format="bf16", k_channel_scale=torch.ones(16)),
     "k_channel_scale: want [1, 16] or [2, 1, 16] float32 on cpu, got [16] float32 on cpu"),
    (lambda: allocate(format=("bf16", "fp8_e4m3"), k_scale=0.5),
     "k_scale: want 1.0 for bf16, which has no scale of the tensor, got 0.5"),
    (lambda: PagedLatentCache.allocate(1, 2, 4, format="bf16", rotation="hadamard"),
     "rotation: want None for a latent cache, got 'hadamard'"),
    (lambda: PagedLatentCache.allocate(1, 2, 4, format=("bf16", "fp16")),
     "format: want one of bf16, fp16, fp8_e4m3, fp8_e5m2, fp8_ds_mla, fp8_v4, fp8_v41 for latent caches, "
        "got ('bf16', 'fp16')"),
])  # fmt: skip
def test_a_wrong_argument_is_named(make, message):
    with pytest.raises(ValueError, match="want") as told:
        make()
    assert str(told.value) == message


@pytest.mark.parametrize(("change", "message"), [
    ({"k_signs": torch.ones(8)}, "k_signs: want [16] float32, got [8] float32"),
    ({"v_channel_scale": torch.ones(2, 16)}, "v_channel_scale: want [H=1, 16] float32, got [2, 16] float32"),
])  # fmt: skip
def test_attributes_that_do_not_fit_a_call_are_named(change, message):
    layer = PagedKVLayer(torch.zeros(2, 4, 1, 16), torch.zeros(2, 4, 1, 16), "bf16", **change)
    layer = PagedKVLayer.of((layer.k.bfloat16(), layer.v.bfloat16()))
    layer = PagedKVLayer(layer.k, layer.v, "bf16", **change)
    k = torch.zeros(1, 1, 16)
    with pytest.raises(ValueError, match="want") as told:
        tersekv.append(k, k, layer, torch.zeros(1, dtype=torch.int32))
    assert str(told.value).startswith(message)
