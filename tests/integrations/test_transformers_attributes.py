"""A cache of transformers with K and V of different formats, formats by layer, rotated rows and channel scales."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from transformers_models import distance, over, tiny

from tersekv import PagedKVCache, kv_bytes_per_token
from tersekv.integrations.transformers import TersekvCache, TersekvStaticCache

PAIR = ("int8_per_token_head", "nvfp4")
ATTRIBUTES = {
    "rotation": ("hadamard", None),
    "k_channel_scale": torch.linspace(0.2, 5, 2 * 2 * 16).view(2, 2, 16),
    "v_channel_scale": torch.linspace(5, 0.2, 2 * 2 * 16).view(2, 2, 16),
}


def logits(model, cache) -> torch.Tensor:
    ids = torch.arange(5, 45)[None]
    with torch.inference_mode():
        return torch.cat([model(x, **over(cache)).logits for x in (ids[:, :39], ids[:, 39:])], 1)


def test_attributes_change_the_rounding_alone():
    model = tiny("llama")
    want = logits(model, TersekvCache(model.config, "bf16"))
    got = logits(model, TersekvCache(model.config, "bf16", **ATTRIBUTES))
    assert not torch.equal(got, want)
    assert distance(got, want) < 2e-2


def test_channel_scales_without_a_dimension_of_layers_are_those_of_every_layer():
    model, scale = tiny("llama"), torch.linspace(0.2, 5, 2 * 16).view(2, 16)
    one = logits(model, TersekvCache(model.config, "int4_per_token_head", k_channel_scale=scale))
    each = logits(model, TersekvCache(model.config, "int4_per_token_head", k_channel_scale=scale.expand(2, 2, 16)))
    assert torch.equal(one, each)
    with pytest.raises(ValueError, match=r"k_channel_scale: want \[2, 16\] .*, got \[3, 16\]"):
        logits(model, TersekvCache(model.config, "int4_per_token_head", k_channel_scale=torch.ones(3, 16)))
    for layers in (1, 3):
        with pytest.raises(ValueError, match=r"k_channel_scale: .* one for each of 2 layers, got \[., 2, 16\]"):
            TersekvCache(model.config, "int4_per_token_head", k_channel_scale=torch.ones(layers, 2, 16))


def test_layers_have_formats_of_their_own_and_keep_attributes_as_they_grow():
    model = tiny("llama")
    each = ["bf16", PAIR]
    caches = [TersekvCache(model.config, layer_formats=each, page_size=4, max_tokens=n, **ATTRIBUTES) for n in (4, 64)]
    grown, roomy = (logits(model, cache) for cache in caches)
    assert torch.equal(grown, roomy)
    assert caches[0].formats == each
    assert caches[0].bytes_per_token == sum(kv_bytes_per_token(f, 2, 16) for f in each)


def test_channel_scales_come_of_the_rows_of_a_16_bit_cache():
    model = tiny("llama")
    cache = TersekvCache(model.config, "bf16", page_size=8)
    logits(model, cache)
    k, v = (side[1] for side in cache.channel_scales().values())
    rows = cache.paged[1].store.cache[0].k.float().abs().amax((0, 1))
    torch.testing.assert_close(k, rows / rows.mean(-1, keepdim=True))
    assert v.shape == (2, 16)
    with pytest.raises(ValueError, match="channel_scales: want a cache in bf16 or fp16, got nvfp4"):
        TersekvCache(model.config, "nvfp4").channel_scales()
    latents = TersekvCache(tiny("deepseek_v3").config, "bf16")
    logits(tiny("deepseek_v3"), latents)
    with pytest.raises(ValueError, match="channel_scales: want a cache of K and V, got one of latents"):
        latents.channel_scales()


KINDS = [TersekvCache, lambda *a, **k: TersekvStaticCache(*a, max_tokens=64, **k)]


@pytest.mark.parametrize("make", KINDS, ids=["dynamic", "static"])
def test_a_word_is_a_cache_made_by_keywords(make):
    model = tiny("llama")
    word = make(model.config, "nvfp4/int4_per_token_head+rotated+ends=fp8_e4m3/bf16")
    keywords = make(model.config, layer_formats=[("fp8_e4m3", "bf16")] * 2, rotation="hadamard")
    assert word.formats == keywords.formats == [("fp8_e4m3", "bf16")] * 2  # two layers: the first and the last
    assert torch.equal(logits(model, word), logits(model, keywords))
    assert not torch.equal(logits(model, make(model.config, ("fp8_e4m3", "bf16"))), logits(model, make(model.config)))


@pytest.mark.parametrize("make", KINDS, ids=["dynamic", "static"])
@pytest.mark.parametrize("format", ["nvfp4", "fp8_e4m3"])
def test_what_a_16_bit_cache_observed_is_what_another_takes(make, format, tmp_path):
    model = tiny("llama")
    seen = TersekvCache(model.config, "bf16")
    with pytest.raises(ValueError, match="channel_scales: want a cache that a forward has written, got an empty one"):
        seen.channel_scales()
    logits(model, seen)
    for numbers in (seen.channel_scales(), seen.fitted_scales(format)):
        direct = logits(model, make(model.config, format, rotation="hadamard", **numbers))
        kept = PagedKVCache.allocate(
            2, 1, 1, 2, 16, format=format, rotation="hadamard",
            **{n: x for n, x in numbers.items() if isinstance(x, torch.Tensor)},
        )  # fmt: skip
        each = zip(kept.layers, *(numbers.get(n, [1.0] * 2) for n in ("k_scale", "v_scale")), strict=True)
        layers = [replace(layer, k_scale=k, v_scale=v) for layer, k, v in each]
        PagedKVCache(layers, 16, 16).save_attributes(tmp_path / "x")
        assert torch.equal(logits(model, make(model.config, saved=tmp_path / "x")), direct)


def test_a_saved_cache_keeps_its_attributes_as_it_grows(tmp_path):
    model = tiny("llama")
    made = PagedKVCache.allocate(2, 1, 1, 2, 16, format="int8_per_token_head", rotation="hadamard")
    made[0].k_signs[1] *= -1  # another's signs: those of the file count
    made.save_attributes(tmp_path / "x")
    caches = [TersekvCache(model.config, saved=tmp_path / "x", page_size=4, max_tokens=n) for n in (4, 64)]
    assert torch.equal(*(logits(model, cache) for cache in caches))
    for cache in caches:
        assert cache.paged[0].store.cache[0].k_signs.equal(made[0].k_signs)


def test_a_file_of_another_model_is_refused(tmp_path):
    model = tiny("llama")
    sizes = r"saved: want \(H, D, Dv\) = \(2, 16, 16\), as the model has, got \(4, 16, 16\)"
    for layers, heads, message in ((3, 2, "saved: want attributes of 2 layers, got 3 in"), (2, 4, sizes)):
        PagedKVCache.allocate(layers, 1, 1, heads, 16, format="nvfp4").save_attributes(tmp_path / "x")
        with pytest.raises(ValueError, match=message):
            logits(model, TersekvCache(model.config, saved=tmp_path / "x"))


@pytest.mark.parametrize("make", KINDS, ids=["dynamic", "static"])
@pytest.mark.parametrize(("options", "message"), [
    ({"format": "nvfp4", "saved": "x"}, "format: want it or saved='x', which holds it, got both"),
    ({"saved": "x", "k_scale": [2.0, 3.0]}, "k_scale: want it or saved='x', which holds it, got both"),
    ({"format": "nvfp4", "layer_formats": ["bf16"] * 2}, "format: want it or layer_formats, got both"),
    ({"format": "nvfp4+rotated", "rotation": "hadamard"}, "rotation: want it or +rotated of format='nvfp4+rotated'"),
    ({"format": "nvfp4+ends=bf16", "layer_formats": ["bf16"] * 2}, "layer_formats: want it or format='nvfp4+ends="),
    ({"format": "nvfp4+fitted", "v_scale": [2.0, 3.0]}, "v_scale: want it or +fitted of format='nvfp4+fitted', got "),
    ({"format": "nvfp4+fitted"}, "format: want the numbers of +fitted by saved=FILE, a file that `tersekv eval "),
    ({"format": "nvfp4+channels"}, "format: want the numbers of +channels by saved=FILE, a file that `tersekv eval "),
    ({"format": "nvfp4+turned"}, "format: want +rotated, +channels, +fitted or +ends=FORMAT once each, got +turned"),
])  # fmt: skip
def test_what_is_said_twice_or_half_is_refused(options, message, make):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(tiny("llama").config, **options)


@pytest.mark.parametrize(("options", "message"), [
    ({"format": PAIR}, "format: want one and no attributes for a model that caches latents, got format="),
    ({"rotation": "hadamard"}, "format: want one and no attributes for a model that caches latents, got rotation"),
    ({"layer_formats": ["bf16"]}, "layer_formats: want 2 entries, one a layer, got 1"),
    ({"format": ("bf16", "int3")}, "format: want one of bf16, .* got 'int3'"),
])  # fmt: skip
def test_what_a_model_cannot_have_is_named(options, message):
    model = tiny("deepseek_v3")
    with pytest.raises(ValueError, match=message):
        logits(model, TersekvCache(model.config, **options))
