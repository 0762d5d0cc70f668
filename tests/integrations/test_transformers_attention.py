"""Logits of Hugging Face models over `TersekvCache` against eager attention over a cache of the same precision."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV4Config, DynamicCache, Gemma4TextConfig, MambaConfig
from transformers_models import FAMILIES, LATENT, VOCABULARY, WINDOW, SamePrecision, distance, over, tiny

from tersekv import KV_FORMATS, LATENT_FORMATS, OutOfPagesError, UnsupportedError
from tersekv.integrations.transformers import TersekvCache
from tersekv.integrations.transformers_layers import CACHE_ARGUMENT
from tersekv.integrations.transformers_pages import Book
from tersekv.integrations.transformers_requests import Capacity

# fp32 models: what is left is the order of sums, and a rounding here and there that falls on the other side.
CLOSE = 2e-3


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def model(family):
    return tiny(family)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(1, VOCABULARY, (2, 61), generator=torch.Generator().manual_seed(1))


def formats(family):
    return LATENT_FORMATS if family in LATENT else KV_FORMATS


def logits(model, ids, cache, sizes, mask=None):
    """Of all tokens, brought in pieces of these sizes."""
    outs, done = [], 0
    for n in sizes:
        here = None if mask is None else mask[:, : done + n]
        positions = None if here is None else (here.cumsum(1) - 1).clamp(min=0)[:, done:]
        out = model(ids[:, done : done + n], attention_mask=here, position_ids=positions, **over(cache))
        outs.append(out.logits)
        done += n
    assert done == ids.shape[1]
    return torch.cat(outs, 1)


def eager(model, ids, format, sizes, mask=None, **scales):
    """The same by eager attention."""
    model.set_attn_implementation("eager")
    try:
        return logits(model, ids, SamePrecision(model.config, format, **scales), sizes, mask)
    finally:
        model.set_attn_implementation("tersekv")


def test_prefill_and_decode_see_what_the_cache_holds_in_every_format(family, model, ids):
    sizes = [50, 1, 1, 5, 1, 3]
    for format in formats(family):
        want = eager(model, ids, format, sizes)
        got = logits(model, ids, TersekvCache(model.config, format, page_size=8), sizes)
        assert distance(got, want) < CLOSE, format


def test_a_format_changes_the_logits(family, model, ids):
    exact = eager(model, ids, "bf16", [61])
    rough = logits(model, ids, TersekvCache(model.config, "fp8_e5m2", page_size=8), [61])
    assert distance(rough, exact) > 10 * CLOSE


@pytest.mark.parametrize("chunk", [5, 8, 64])
def test_the_chunk_of_the_prefill_changes_nothing(family, model, ids, chunk):
    sizes = [40, 1, 20]
    want = eager(model, ids, "fp8_e4m3", sizes)
    got = logits(model, ids, TersekvCache(model.config, "fp8_e4m3", page_size=4, chunk=chunk), sizes)
    assert distance(got, want) < CLOSE


@pytest.mark.parametrize("options", [{}, {"page_size": 4, "chunk": 7}])
def test_an_exact_prefill_sees_16_bits_and_later_tokens_what_is_stored(family, model, ids, options):
    first, rest = ids[:, :50], ids[:, 50:]

    class Late(SamePrecision):
        def update(self, key_states, value_states, *args, **kwargs):
            held = super().update(key_states, value_states, *args, **kwargs)
            half = (key_states.bfloat16().float(), value_states.bfloat16().float())
            return half if key_states.shape[2] == 50 else held

    model.set_attn_implementation("eager")
    want = logits(model, ids, Late(model.config, "fp8_e5m2"), [50, 11])
    model.set_attn_implementation("tersekv")
    cache = TersekvCache(model.config, "fp8_e5m2", exact_prefill=True, **options)
    got = torch.cat((model(first, **over(cache)).logits, model(rest, **over(cache)).logits), 1)
    assert distance(got, want) < CLOSE
    assert {layer.store.cache.format for layer in cache.layers} == {"fp8_e5m2"}


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_padding_is_not_seen_and_takes_no_room(family, model, ids, side):
    mask = torch.ones_like(ids)
    start = {"left": 0, "right": 33, "middle": 20}[side]
    mask[1, start : start + 17] = 0
    real = mask.bool()
    cache = TersekvCache(model.config, "fp8_e4m3", page_size=4, chunk=16)
    sizes = [50, 1, 10]
    got = logits(model, ids, cache, sizes, mask)
    # A row without its padding: windows count tokens, not columns.
    alone = ids[1][real[1]][None]
    want = eager(model, alone, "fp8_e4m3", [alone.shape[1]])
    assert distance(got[1][real[1]], want[0]) < CLOSE
    assert distance(got[:1], eager(model, ids[:1], "fp8_e4m3", [61])) < CLOSE
    assert cache.book.counts == [61, 44]
    assert got.isfinite().all()


def test_a_padded_batch_is_what_eager_attention_makes_of_it(family, model, ids):
    mask = torch.ones_like(ids)
    mask[1, :19] = 0
    sizes = [50, 1, 10]
    want = eager(model, ids, "bf16", sizes, mask)
    got = logits(model, ids, TersekvCache(model.config, "bf16", page_size=8), sizes, mask)
    assert distance(got[mask.bool()], want[mask.bool()]) < CLOSE


def test_a_row_of_padding_alone_is_zero_and_no_nan(model, ids):
    mask = torch.ones_like(ids)
    mask[1, :50] = 0
    cache = TersekvCache(model.config, "fp8_e4m3", page_size=8, chunk=16)
    got = logits(model, ids, cache, [48, 1, 12], mask)
    assert got.isfinite().all()
    alone = ids[1:, 50:]
    assert distance(got[1:, 50:], eager(model, alone, "fp8_e4m3", [11])) < CLOSE


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_scales_are_those_of_each_layer(name, ids):
    model = tiny(name)
    scale = [0.25, 0.03125]
    options = {"kv_scale": scale} if name in LATENT else {"k_scale": scale, "v_scale": 0.5}
    cache = TersekvCache(model.config, "fp8_e4m3", **options)
    logits(model, ids, cache, [61])
    layers = [layer.store.cache[0] for layer in cache.layers]
    if name in LATENT:
        assert [layer.kv_scale for layer in layers] == scale
    else:
        assert [(layer.k_scale, layer.v_scale) for layer in layers] == [(s, 0.5) for s in scale]
    one = dict.fromkeys(options, 0.25)
    pair = {"k_scale": 0.25, "v_scale": 0.25}
    got = logits(model, ids, TersekvCache(model.config, "fp8_e4m3", **one), [61])
    assert distance(got, eager(model, ids, "fp8_e4m3", [61], **pair)) < CLOSE


def test_a_16_bit_model_runs(family, ids):
    model = tiny(family, dtype=torch.bfloat16)
    want = eager(model, ids, "bf16", [60, 1]).float()
    got = logits(model, ids, TersekvCache(model.config, "bf16"), [60, 1])
    assert got.dtype == torch.bfloat16
    assert distance(got.float(), want) < 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_followed_as_other_attentions_follow_it(family, model, ids, dtype):
    own = "fp16" if dtype == torch.float16 else "bf16"
    with torch.autocast("cpu", dtype=dtype):
        got = logits(model, ids, cache := TersekvCache(model.config, own), [50, 1, 10])
        model.set_attn_implementation("eager")
        try:
            want = logits(model, ids, DynamicCache(config=model.config), [50, 1, 10])
        finally:
            model.set_attn_implementation("tersekv")
    exact = eager(model, ids, own, [50, 1, 10])
    assert distance(got, exact) < 1.5 * distance(want, exact)  # experts may be chosen otherwise: large, in both
    with torch.autocast("cpu", dtype=dtype):
        assert model(ids[:, :1], **over(cache)).logits.isfinite().all()


def test_a_layer_that_brings_two_dtypes_is_told_by_their_names(ids):
    model = tiny("llama")
    model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda module, args, out: out.bfloat16())
    with pytest.raises(UnsupportedError, match=r"query, key, value: want one dtype .* got float32, float32, bfloat16"):
        model(ids, **over(TersekvCache(model.config)))


def test_a_window_bounds_the_pages(ids):
    model = tiny("mistral")
    long = ids.repeat(1, 5)
    cache = TersekvCache(model.config, "bf16", page_size=4, chunk=8)
    got = logits(model, long, cache, [long.shape[1] - 3, 1, 1, 1])
    assert distance(got, eager(model, long, "bf16", [long.shape[1]])) < CLOSE
    ring = -(-(WINDOW - 1 + 8) // 4) + 1
    assert {layer.store.cache.num_pages for layer in cache.layers} == {2 * ring}


def test_the_cache_grows_as_tokens_come(family, model, ids):
    cache = TersekvCache(model.config, "fp8_e4m3", page_size=4, chunk=16)
    got = logits(model, ids, cache, [3] + [1] * 58)
    assert distance(got, eager(model, ids, "fp8_e4m3", [61])) < CLOSE
    assert cache.nbytes >= cache.bytes_per_token * 2 * min(61, WINDOW)
    assert cache.get_seq_length() == 61


def test_room_from_the_start_is_not_copied(ids):
    model = tiny("llama")
    cache = TersekvCache(model.config, "bf16", page_size=8, max_tokens=61)
    logits(model, ids[:, :3], cache, [3])
    before = cache.layers[0].store.cache[0].k.data_ptr()
    model(ids[:, 3:], **over(cache))
    assert cache.layers[0].store.cache[0].k.data_ptr() == before


def test_a_limit_of_pages_is_kept(ids):
    model = tiny("llama")
    cache = TersekvCache(model.config, "bf16", page_size=8, num_pages=15)
    with pytest.raises(OutOfPagesError, match="num_pages: want more than 15 pages of 8 tokens"):
        model(ids, **over(cache))
    # As if it had not come: shorter ones may, and tokens that came before stay.
    assert cache.get_seq_length() == 0
    first = logits(model, ids[:, :30], cache, [30])
    with pytest.raises(OutOfPagesError, match="num_pages: want more than 15 pages of 8 tokens"):
        model(ids[:, 30:], **over(cache))
    assert cache.get_seq_length() == 30
    both = torch.cat((first, logits(model, ids[:, 30:56], cache, [26])), 1)
    assert distance(both, eager(model, ids[:, :56], "bf16", [30, 26])) < CLOSE
    cache.reset()
    assert distance(logits(model, ids[:, :56], cache, [56]), eager(model, ids[:, :56], "bf16", [56])) < CLOSE


def test_another_attention_is_told_to_the_user(ids):
    model = tiny("llama", attention="sdpa")
    cache = TersekvCache(model.config, "bf16")
    with pytest.raises(RuntimeError, match="attn_implementation: want 'tersekv'"):
        model(ids, **over(cache))
    model.set_attn_implementation("tersekv")
    cache.reset()
    model(ids, **over(cache))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("part", ["", "v_proj"])
def test_a_forward_that_wants_gradients_is_refused(ids, training, part):
    model = tiny("llama").train(training)
    for name, weight in model.named_parameters():
        weight.requires_grad_(part in name)
    with pytest.raises(UnsupportedError, match=r"requires_grad: want a forward under torch.no_grad\(\)"):
        model(ids, **over(TersekvCache(model.config, "bf16")))
    with torch.no_grad():
        model(ids, **over(TersekvCache(model.config, "bf16")))


def test_a_latent_format_for_a_model_without_latents_is_refused_at_once():
    with pytest.raises(
        ValueError, match=r"format: want one of bf16, .* for llama, which caches K and V, got 'fp8_ds_mla'"
    ):
        TersekvCache(tiny("llama").config, "fp8_ds_mla")


@pytest.mark.parametrize(("name", "scale"), [("llama", "kv_scale"), ("deepseek_v3", "v_scale")])
def test_scales_of_the_other_kind_of_cache_are_refused(name, scale, ids):
    model = tiny(name)
    with pytest.raises(ValueError, match=f"{scale}: want 1.0 for a model that does not cache"):
        model(ids, **over(TersekvCache(model.config, "fp8_e4m3", **{scale: 0.5})))


def test_fitted_scales_want_a_16_bit_cache(ids):
    model = tiny("llama")
    cache = TersekvCache(model.config, "fp8_e4m3")
    model(ids, **over(cache))
    with pytest.raises(ValueError, match="fitted_scales: want a cache in bf16 or fp16, got fp8_e4m3"):
        cache.fitted_scales("nvfp4")
    cache = TersekvCache(model.config, "bf16")
    model(ids, **over(cache))
    cache.reset()  # its pages keep the rows of the tokens that are gone
    for observe in (lambda: cache.fitted_scales("nvfp4"), cache.channel_scales):
        with pytest.raises(ValueError, match="_scales: want a cache that a forward has written, got an empty one"):
            observe()


@pytest.mark.parametrize("cache", [None, DynamicCache])
def test_another_cache_is_told_to_the_user(ids, cache):
    model = tiny("llama")
    with pytest.raises(RuntimeError, match=rf"^{CACHE_ARGUMENT}: want a TersekvCache"):
        model(ids, **over(cache and cache(config=model.config)), use_cache=cache is not None)


def test_a_failed_forward_leaves_no_tokens_for_another_cache(ids):
    model = tiny("llama")
    cache = TersekvCache(model.config, "bf16")
    with pytest.raises(UnsupportedError, match="dropout"):
        model.train()(ids, **over(cache)) if _with_dropout(model) else None
    with pytest.raises(RuntimeError, match="want a TersekvCache"):
        model.eval()(ids, use_cache=False)
    cache.reset()
    model(ids, **over(cache))


def _with_dropout(model):
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    return True


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"format": "int3"}, ValueError, "format: want one of bf16, .*got 'int3'"),
        ({"page_size": 0}, ValueError, "page_size: want a positive number, got 0"),
        ({"chunk": 2.5}, TypeError, "chunk: want int, got float 2.5"),
        ({"exact_prefill": "yes"}, TypeError, "exact_prefill: want True or False, got 'yes'"),
        ({"k_scale": [1.0]}, ValueError, "k_scale: want a positive number, or one for each of 2 layers"),
        ({"k_scale": torch.tensor(2.0)}, ValueError, "k_scale: want a positive number, or one for each of 2 layers"),
        ({"config": 7}, TypeError, "config: want a transformers config such as model.config, got int"),
    ],
)
def test_bad_arguments_are_named(options, error, message):
    arguments = {"config": tiny("llama").config, **options}
    with pytest.raises(error, match=message):
        TersekvCache(**arguments)


@pytest.mark.parametrize("name", ["llama", "deepseek_v2"])
def test_formats_of_the_other_kind_of_cache_are_refused(name, ids):
    model = tiny(name)
    wrong = "nvfp4" if name in LATENT else "fp8_ds_mla"
    with pytest.raises(ValueError, match=f"format: want one of .*got '{wrong}'"):
        model(ids, **over(TersekvCache(model.config, wrong)))


def test_models_with_other_layers_are_refused():
    for config, why in (
        (MambaConfig(), "mamba keeps a state instead of keys and values"),
        (DeepseekV4Config(), r"of deepseek_v4, got \w+ in layer 0"),
        (Gemma4TextConfig(num_hidden_layers=6, num_kv_shared_layers=6), "got layers that share them in another way"),
    ):
        with pytest.raises(UnsupportedError, match=f"config: .*{why}"):
            TersekvCache(config)


def test_masks_of_another_shape_are_refused(ids):
    model = tiny("llama")
    mask = torch.ones(2, 1, 61, 61, dtype=torch.bool)
    with pytest.raises(UnsupportedError, match=r"attention_mask: want \[B, tokens\]"):
        model(ids, attention_mask=mask, **over(TersekvCache(model.config)))


def test_a_past_that_is_hidden_later_is_refused(ids):
    model = tiny("llama")
    cache, mask = TersekvCache(model.config), torch.ones_like(ids)
    model(ids[:, :60], attention_mask=mask[:, :60], **over(cache))
    mask[0, 3] = 0
    with pytest.raises(ValueError, match=r"attention_mask: want the past as it was"):
        model(ids[:, 60:], attention_mask=mask, **over(cache))
    cache.reset()
    with pytest.raises(ValueError, match=r"attention_mask: want \[2, 61\]"):
        model(ids, attention_mask=mask[:, :9], **over(cache))


def test_a_batch_of_another_size_is_refused(ids):
    model = tiny("llama")
    cache = TersekvCache(model.config)
    model(ids, **over(cache))
    with pytest.raises(ValueError, match="input_ids: want a batch of 2, which the cache holds, got 1"):
        model(ids[:1], **over(cache))


def test_attention_that_is_not_causal_is_refused(ids):
    model = tiny("llama")
    cache = TersekvCache(model.config)
    model.model.layers[0].self_attn.is_causal = False
    with pytest.raises(UnsupportedError, match="LlamaAttention of llama is not causal"):
        model(ids, **over(cache))


def test_layers_on_several_devices_share_the_same_pages():
    book = Book(Capacity(4, 16, None, None), [None])
    here, there = torch.device("cpu"), torch.device("meta")
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, :3] = False
    first = book.step(None, 0, 2, 7, mask, here)
    assert book.step(None, 0, 2, 7, mask, here) is first
    moved = book.step(None, 0, 2, 7, mask, there)
    assert moved.num_pages == first.num_pages
    assert book.counts == [4, 7]
    for a, b in zip(first.pieces[0], moved.pieces[0], strict=True):
        assert (a.shape, b.device.type) == (b.shape, "meta") if isinstance(a, torch.Tensor) else a == b
    book.select([1, 1])
    copies = [book.step(None, 7, 2, 1, None, d).copies for d in (here, there)]
    assert copies[0] == copies[1] != []
