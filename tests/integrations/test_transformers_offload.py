"""Pages on the host: the same tokens as a cache on its device gives, whatever happens to the cache between them."""

from __future__ import annotations

import copy
import pickle
from itertools import count

import pytest
import torch
from transformers_models import FAMILIES, HYBRIDS, over, tiny

from tersekv import KV_FORMATS, UnsupportedError
from tersekv.integrations import transformers_offload
from tersekv.integrations.transformers import TersekvCache, TersekvStaticCache
from tersekv.integrations.transformers_store import KVStore

PROMPT = torch.arange(4, 64).reshape(2, 30)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What a buffer held before, no layer may read: a layer that comes finds codes and scales that are NaN."""
    load = transformers_offload.OffloadedStore.load

    def load_into_poison(self, buffer, pages):
        if pages is self.held_pages():  # all, not some more
            buffer.fill_(0xFF)
        load(self, buffer, pages)

    monkeypatch.setattr(transformers_offload.OffloadedStore, "load", load_into_poison)


def both(model, format="bf16", **options):
    made = [TersekvCache(model.config, format=format, page_size=4, chunk=16, **options) for _ in range(2)]
    return made[0], made[1].offload()


def tokens(model, cache, ids=PROMPT, new=6, **options):
    return model.generate(ids, **over(cache), max_new_tokens=new, do_sample=False, **options)


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_every_family_writes_the_tokens_of_a_cache_on_its_device(family):
    model = tiny(family)
    cache, offloaded = both(model)
    mask = torch.ones_like(PROMPT)
    mask[1, :7] = 0
    with torch.inference_mode():
        want = model(PROMPT, attention_mask=mask, **over(cache)).logits
        got = model(PROMPT, attention_mask=mask, **over(offloaded)).logits
        assert torch.equal(got, want)
        for i in range(20):
            mask = torch.cat((mask, mask[:, :1] * 0 + 1), 1)
            new = PROMPT[:, i : i + 1] + 3
            want = model(new, attention_mask=mask, **over(cache)).logits
            assert torch.equal(model(new, attention_mask=mask, **over(offloaded)).logits, want)
    assert offloaded.nbytes == cache.nbytes


@pytest.mark.parametrize("format", [*KV_FORMATS, "int8_per_token_head/nvfp4+rotated"])
def test_every_format(format):
    model = tiny("llama")
    cache, offloaded = both(model, format)
    assert torch.equal(tokens(model, offloaded), tokens(model, cache))


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_ds_mla"])
def test_latents(format):
    model = tiny("deepseek_v3")
    cache, offloaded = both(model, format)
    assert torch.equal(tokens(model, offloaded), tokens(model, cache))


def test_two_buffers_serve_all_layers_and_each_comes_one_layer_ahead(monkeypatch):
    model = tiny("llama", num_hidden_layers=5)
    _, cache = both(model)
    tokens(model, cache, new=3)
    seen = []
    load = transformers_offload.OffloadedStore.load
    opened = transformers_offload.Pipe.open
    monkeypatch.setattr(
        transformers_offload.OffloadedStore,
        "load",
        lambda self, *args: (seen.append(("load", self._layer.index)), load(self, *args))[1],
    )
    monkeypatch.setattr(
        transformers_offload.Pipe,
        "open",
        lambda self, store: (seen.append(("run", store._layer.index)), opened(self, store))[1],
    )
    with torch.inference_mode():
        model(PROMPT[:, :1], **over(cache))
        seen.clear()
        model(PROMPT[:, :1], **over(cache))
    assert seen == [step for i in range(5) for step in (("run", i), ("load", (i + 1) % 5))]
    (pipe,) = cache._pipes.values()
    assert len(pipe._buffers) == 2
    assert len(pipe._buffers[0]) == max(layer.store.nbytes for layer in cache.paged)


@pytest.mark.parametrize("family", ["mistral", "llama", "gemma2", "lfm2"])
def test_beams(family):
    model = tiny(family)
    cache, offloaded = both(model)
    options = {"num_beams": 3, "num_return_sequences": 3, "new": 24}
    assert torch.equal(tokens(model, offloaded, **options), tokens(model, cache, **options))


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gemma3n", "deepseek_v3"])
def test_turns_crops_growth_copies_and_resets(family):
    model = tiny(family)
    cache, offloaded = both(model)

    def same(ids):
        with torch.inference_mode():
            assert torch.equal(*(model(ids, **over(c)).logits for c in (cache, offloaded)))

    same(PROMPT)
    same(PROMPT[:, :5])
    for c in (cache, offloaded):
        c.crop(-3)
    same(PROMPT[:, :70])
    for c in (cache, offloaded):
        c.batch_select_indices(torch.tensor([1, 1, 0]))
        c.batch_select_indices(torch.tensor([2, 0]))
    same(PROMPT[:, 3:6])
    for way in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        other = way(offloaded)
        assert other.offloaded
        with torch.inference_mode():
            got = model(PROMPT[:, 1:2], **over(other)).logits
            assert torch.equal(got, model(PROMPT[:, 1:2], **over(copy.deepcopy(cache))).logits)
    same(PROMPT[:, 2:4])
    for c in (cache, offloaded):
        c.reset()
    same(PROMPT[:1, 9:])
    same(PROMPT[:1, :1])


@pytest.mark.parametrize("family", ["mistral", "deepseek_v3", "qwen3_5"])
def test_a_filled_cache_moves_to_the_host(family):
    model = tiny(family)
    cache, offloaded = (TersekvCache(model.config, page_size=4, max_tokens=8) for _ in range(2))
    with torch.inference_mode():
        for c in (cache, offloaded):
            model(PROMPT, **over(c))
        assert offloaded.offload() is offloaded
        for i in range(4):
            new = PROMPT[:, i : i + 1]
            assert torch.equal(model(new, **over(offloaded)).logits, model(new, **over(cache)).logits)


@pytest.mark.parametrize("family", ["mistral", "llama", "deepseek_v3"])
def test_a_row_goes_on_from_a_page_that_nobody_has_any_more(family):
    model = tiny(family)
    cache, offloaded = (TersekvCache(model.config, page_size=4) for _ in range(2))
    with torch.inference_mode():
        for c in (cache, offloaded):
            model(PROMPT, **over(c))
        offloaded.offload()
        for c in (cache, offloaded):
            c.batch_select_indices(torch.tensor([0, 0]))
            c.batch_select_indices(torch.tensor([1]))
        new = PROMPT[:1, :1]
        assert torch.equal(model(new, **over(offloaded)).logits, model(new, **over(cache)).logits)


def test_memory_of_the_host_that_runs_out_can_be_asked_for_again(monkeypatch):
    model = tiny("llama")
    cache, offloaded = (TersekvCache(model.config, page_size=4) for _ in range(2))
    pinned, calls = transformers_offload._pinned, count()

    def pinned_once(x, device):
        if next(calls) == 1:
            raise RuntimeError("no memory to pin")
        return pinned(x, device)

    monkeypatch.setattr(transformers_offload, "_pinned", pinned_once)
    with torch.inference_mode():
        for c in (cache, offloaded):
            model(PROMPT, **over(c))
        with pytest.raises(RuntimeError, match="no memory to pin"):
            offloaded.offload()
        for i in range(3):
            new = PROMPT[:, i : i + 1]
            assert torch.equal(model(new, **over(offloaded)).logits, model(new, **over(cache)).logits)
            offloaded.offload()
            assert {type(layer.store) for layer in offloaded.paged} == {transformers_offload.OffloadedStore}


def test_a_failed_forward_changes_nothing(monkeypatch):
    model = tiny("mistral", num_hidden_layers=3)
    cache, offloaded = both(model)
    attend, calls = KVStore.attend, count()
    with torch.inference_mode():
        for c in (cache, offloaded):
            model(PROMPT, **over(c))
            c.batch_select_indices(torch.tensor([1, 1]))
        with monkeypatch.context() as m:
            m.setattr(KVStore, "attend", lambda self, *args: attend(self, *args) if next(calls) < 1 else 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(PROMPT[:, :2], **over(offloaded))
        for i in range(2):
            new = PROMPT[:, i : i + 1]
            assert torch.equal(model(new, **over(offloaded)).logits, model(new, **over(cache)).logits)


def test_scales_are_fitted_to_what_the_host_holds():
    model = tiny("llama")
    cache, offloaded = both(model)
    with torch.inference_mode():
        for c in (cache, offloaded):
            for part in (PROMPT, *PROMPT[:, :4].split(1, 1)):  # into pages that come after their layer did
                model(part, **over(c))
    assert offloaded.fitted_scales("fp8_e4m3") == cache.fitted_scales("fp8_e4m3")
    for name, x in offloaded.channel_scales().items():
        assert torch.equal(x, cache.channel_scales()[name])


def test_an_exact_prefill():
    model = tiny("llama")
    cache, offloaded = both(model, "nvfp4", exact_prefill=True)
    assert torch.equal(tokens(model, offloaded), tokens(model, cache))


def test_what_cannot_be_offloaded_says_so():
    model = tiny("llama")
    with pytest.raises(UnsupportedError, match="offload: want a TersekvCache, whose pages the host knows"):
        TersekvStaticCache(model.config, max_tokens=8).offload()
    with pytest.raises(UnsupportedError, match="offload: call it on the TersekvCache"):
        TersekvCache(model.config).layers[0].offload()
