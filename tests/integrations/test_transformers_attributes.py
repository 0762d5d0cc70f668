"""A cache of transformers with K and V of different formats, formats by layer, rotated rows and channel scales."""

from __future__ import annotations

import pytest
import torch
from transformers_models import distance, over, tiny

from tersekv import kv_bytes_per_token
from tersekv.integrations.transformers import TersekvCache

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
    k, v = cache.channel_scales()[1]
    rows = cache.paged[1].store.cache[0].k.float().abs().amax((0, 1))
    torch.testing.assert_close(k, rows / rows.mean(-1, keepdim=True))
    assert v.shape == (2, 16)
    with pytest.raises(ValueError, match="channel_scales: want a cache in bf16 or fp16, got nvfp4"):
        TersekvCache(model.config, "nvfp4").channel_scales()
    latents = TersekvCache(tiny("deepseek_v3").config, "bf16")
    logits(tiny("deepseek_v3"), latents)
    with pytest.raises(ValueError, match="channel_scales: want a cache of K and V, got one of latents"):
        latents.channel_scales()


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
