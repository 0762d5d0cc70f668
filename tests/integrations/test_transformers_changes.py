"""What happens between a cache's update and its attention, outside of the cache: changes, other caches, compilation."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils import parametrize
from transformers import StaticCache
from transformers_models import VOCABULARY, distance, over, tiny

from tersekv import UnsupportedError
from tersekv.integrations.transformers import TersekvCache


@pytest.fixture(scope="module")
def ids():
    return torch.randint(1, VOCABULARY, (2, 21), generator=torch.Generator().manual_seed(1))


def changed(cache, change):
    """The cache, whose first layer's keys and values a model changes before it attends to them."""
    layer = cache.layers[0]
    update = layer.update
    layer.update = lambda *args, **kwargs: change(*update(*args, **kwargs))
    return cache


def turned(k, v):
    return k, v.mul_(1.5)


CHANGES = {
    "key": ("key", lambda k, v: (k * 2, v)),
    "value": ("value", lambda k, v: (k, v * 2)),
    "a copy of the value": ("value", lambda k, v: (k, v.clone())),
    "value in place": ("value", turned),
    "heads of the value": ("value", lambda k, v: (k, v.flip(1))),
    "a view of the value": ("value", lambda k, v: (k, v[:, :1].expand(-1, 2, -1, -1))),
    "more heads": ("key", lambda k, v: (k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))),
    "fewer tokens": ("key", lambda k, v: (k[:, :, 1:], v[:, :, 1:])),
    "exchanged": ("key", lambda k, v: (v, k)),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("past", [0, 8])
def test_rows_that_are_not_those_of_the_update_are_refused(ids, name, past):
    model = tiny("llama")
    what, change = CHANGES[name]
    cache = TersekvCache(model.config)
    if past:
        model(ids[:, :past], **over(cache))
    message = rf"^{what}: want \[2, 2, .* as LlamaAttention of llama gave it .*'sdpa'"
    with pytest.raises(UnsupportedError, match=message):
        model(ids[:, past:], **over(changed(cache, change)))
    del cache.layers[0].update
    cache.reset()
    want = model(ids, **over(TersekvCache(model.config))).logits
    assert torch.equal(model(ids, **over(cache)).logits, want)


def test_rows_in_inference_mode_are_told_by_their_identity(ids):
    model = tiny("llama")
    with torch.inference_mode():
        model(ids, **over(TersekvCache(model.config)))
        with pytest.raises(UnsupportedError, match=r"^value: want \[2, 2, 21, 16\]"):
            model(ids, **over(changed(TersekvCache(model.config), CHANGES["value"][1])))


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize(("part", "rows"), [("key", slice(0, 24)), ("value", slice(24, None))])
def test_latents_that_are_expanded_otherwise_are_refused(name, part, rows, ids):
    model = tiny(name)
    module = model.model.layers[1].self_attn

    # As an adapter beside the weight does: the weight alone does not tell.
    def adapt(projection, args, out):
        out.unflatten(-1, (4, -1))[..., rows].mul_(1.05)

    module.kv_b_proj.register_forward_hook(adapt)
    message = rf"^{part}: want what kv_b_proj makes of the latents that DeepseekV.Attention of {name} gave"
    with pytest.raises(UnsupportedError, match=message):
        model(ids, **over(TersekvCache(model.config)))


class Adapter(torch.nn.Module):
    """What a low-rank adapter does to a weight."""

    def forward(self, weight):
        return weight + 0.2 * weight.roll(1, 0)


def test_a_changed_weight_is_absorbed_as_it_is(ids):
    model = tiny("deepseek_v3")
    want = tiny("deepseek_v3")
    for layer, other in zip(model.model.layers, want.model.layers, strict=True):
        other.self_attn.kv_b_proj.weight.copy_(Adapter()(layer.self_attn.kv_b_proj.weight))
        parametrize.register_parametrization(layer.self_attn.kv_b_proj, "weight", Adapter())
    got = model(ids, **over(TersekvCache(model.config, "bf16"))).logits
    assert distance(got, want(ids, **over(TersekvCache(want.config, "bf16"))).logits) < 1e-5


@pytest.mark.parametrize("tokens", [21, 1])
def test_a_static_cache_is_named(ids, tokens):
    model = tiny("llama")
    cache = StaticCache(config=model.config, max_cache_len=64)
    message = rf"got another cache or none.* LlamaAttention of llama 64 keys for {tokens} queries"
    with pytest.raises(RuntimeError, match=message):
        model(ids[:, :tokens], **over(cache))
    with pytest.raises(RuntimeError, match=r"'sdpa'\) for every other cache \(StaticCache"):
        model.generate(ids, attention_mask=torch.ones_like(ids), cache_implementation="static", max_new_tokens=2)


def test_attention_to_another_sequence_is_refused(ids):
    model = tiny("llama")
    cache = TersekvCache(model.config)
    update = cache.layers[0].update
    cache.layers[0].update = lambda k, v, *args, **kwargs: update(k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1))
    with pytest.raises(UnsupportedError, match=r"^query: want .*LlamaAttention of llama .*got \[2, 4, 21, 16\]"):
        model(ids, **over(cache))


DENSE = {"llama": {}, "deepseek_v3": {"first_k_dense_replace": 2}}


@pytest.mark.parametrize(("name", "whole"), [("llama", True), ("deepseek_v3", False)])
def test_a_compiled_model_generates_the_same(name, whole, ids):
    torch._dynamo.reset()
    model, mask = tiny(name, num_hidden_layers=1 if whole else 2, **DENSE[name]), torch.ones_like(ids)
    mask[1, :9] = 0

    def generate():
        options = {"max_new_tokens": 3, "do_sample": False, **over(TersekvCache(model.config, page_size=8))}
        return model.generate(ids, attention_mask=mask, **options)

    want = generate()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    # Layer by layer is quicker, and passes by what the model itself does with its cache.
    for module in [model] if whole else model.model.layers:
        module.forward = torch.compile(module.forward, backend=backend)
    assert torch.equal(generate(), want)
    assert len(graphs) > 2


def test_one_whole_graph_is_refused_with_the_reason(ids):
    torch._dynamo.reset()
    model = torch.compile(tiny("llama"), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a TersekvCache counts tokens and pages on the host"):
        model(ids, **over(TersekvCache(model.config)))
