"""Models with indexers: the same tokens over pages as over transformers' own cache, which scores every key."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from transformers_models import SPARSE, SamePrecision, distance, over, tiny

from tersekv import UnsupportedError
from tersekv.integrations.transformers import ATTENTION, TersekvCache, TersekvStaticCache
from tersekv.integrations.transformers_layers import INDEXERS

IDS = torch.randint(2, 97, (2, 60), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, :9] = 0


def bf16(x):
    return x.to(torch.bfloat16).to(x.dtype)


class OwnCache(SamePrecision):
    """transformers' own cache, its index keys in bf16, too."""

    def update_indexer(self, indexer_key_states, layer_idx):
        return super().update_indexer(bf16(indexer_key_states), layer_idx)


@pytest.fixture
def model(request, monkeypatch):
    """In fp32, so that no order of sums decides what is chosen; an indexer's queries and keys are rounded to 16 bits
    where a 16-bit model rounds them."""
    family = request.param
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    rope = INDEXERS[family][1]
    rotate = getattr(modeling, rope)
    monkeypatch.setattr(modeling, rope, lambda *args, **kwargs: tuple(map(bf16, rotate(*args, **kwargs))))
    made = tiny(family)
    for layer in made.model.layers:
        if layer.self_attn.indexer is not None:
            for part in (layer.self_attn.indexer.wq_b, layer.self_attn.indexer.k_norm):
                part.register_forward_hook(lambda module, args, out: bf16(out))
    return made


def every(test):
    return pytest.mark.parametrize("model", SPARSE, indirect=True)(test)


def generated(model, cache, attention=ATTENTION, ids=IDS, mask=MASK, new=12, **options):
    model.set_attn_implementation(attention)
    out = model.generate(
        ids, attention_mask=mask, **over(cache), max_new_tokens=new, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, 1)


@every
def test_the_tokens_are_those_of_the_models_own_cache(model):
    want = generated(model, OwnCache(model.config, "bf16"), "eager")
    cache = TersekvCache(model.config, "bf16", page_size=8, chunk=24)
    got = generated(model, cache)
    assert torch.equal(got[0], want[0])
    assert distance(got[1], want[1]) < 1e-3  # a rounding here and there that falls on the other side
    # The lists matter: over all keys the logits are others.
    model.config.index_topk = 1000
    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.index_topk = 1000
    assert distance(generated(model, TersekvCache(model.config, "bf16"))[1], want[1]) > 1e-2


@every
def test_keys_of_indexers_lie_in_pages_beside_the_latents(model):
    cache = TersekvCache(model.config, "bf16", page_size=8)
    fp8 = TersekvCache(model.config, "bf16", page_size=8, index_format="index_fp8")
    own = [layer.self_attn.indexer is not None for layer in model.model.layers]
    for c in (cache, fp8):
        generated(model, c, new=2)
        assert [len(layer.store.caches) == 2 for layer in c.paged] == own
    latent, layers = 2 * (128 + 16), len(own)
    assert cache.bytes_per_token == layers * latent + sum(own) * 2 * 32
    assert fp8.bytes_per_token == layers * latent + sum(own) * (32 + 4)


@every
def test_pieces_turns_beams_crops_and_copies_choose_alike(model):
    """What one forward over all tokens gives, forwards over parts of them give, too."""
    ids = IDS[:1]

    def logits(cache, *parts):
        with torch.inference_mode():
            return torch.cat([model(part, **over(cache)).logits for part in parts], 1)

    whole = logits(TersekvCache(model.config, "bf16", page_size=8, chunk=256), ids)
    cache = TersekvCache(model.config, "bf16", page_size=4, chunk=7)
    got = [logits(cache, ids[:, :31])]
    logits(cache, IDS[1:, :9])
    cache.crop(-9)
    cache.batch_repeat_interleave(3)
    got.append(logits(cache, ids[:, 31:40].repeat(3, 1))[2:])
    cache.batch_select_indices(torch.tensor([1]))
    cache = copy.deepcopy(cache).offload()
    got.append(logits(cache, *ids[:, 40:].split(1, 1)))
    assert distance(torch.cat(got, 1), whole) < 1e-4
    cache.reset()
    assert distance(logits(cache, ids), whole) < 1e-4


@every
def test_beams_share_pages(model):
    want = generated(model, OwnCache(model.config, "bf16"), "eager", num_beams=3)[0]
    assert torch.equal(generated(model, TersekvCache(model.config, "bf16", page_size=4), num_beams=3)[0], want)


@every
def test_pages_on_the_host_give_the_same(model):
    want = generated(model, TersekvCache(model.config, "fp8_e4m3", page_size=4, index_format="index_fp8"))
    cache = TersekvCache(model.config, "fp8_e4m3", page_size=4, index_format="index_fp8").offload()
    got = generated(model, cache)
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("family", SPARSE)
def test_a_model_in_16_bits_chooses_the_keys_that_its_own_indexer_does(family):
    """Its first layer: beyond, other roundings of the attention before it move what is chosen."""
    model = tiny(family, dtype=torch.bfloat16, num_hidden_layers=1, indexer_types=["full"])
    chosen, logits = [], []
    model.model.layers[0].self_attn.indexer.register_forward_hook(lambda module, args, out: chosen.append(out))
    for cache, attention in (
        (TersekvCache(model.config, "bf16", page_size=8, chunk=24), ATTENTION),
        (transformers_cache(model.config), "eager"),
    ):
        model.set_attn_implementation(attention)
        with torch.inference_mode():
            logits.append(model(IDS, attention_mask=MASK, **over(cache)).logits.float()[MASK.bool()])
    for b, padded in enumerate((0, 9)):
        for t in range(padded, IDS.shape[1]):
            ours = [x + padded for x in chosen[0][b, t].tolist() if x >= 0]
            assert ours == sorted(x for x in chosen[1][b, t].tolist() if padded <= x <= t)
    assert distance(*logits) < 2e-2


def transformers_cache(config):
    from transformers import DynamicCache

    return DynamicCache(config=config)


def test_the_models_own_cache_is_served_as_before():
    model = tiny("deepseek_v32", attention="eager")
    want = model.generate(IDS, max_new_tokens=4, do_sample=False)
    generated(model, TersekvCache(model.config), new=2)
    model.set_attn_implementation("eager")
    assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False), want)


def test_a_failed_forward_is_undone(monkeypatch):
    from tersekv.integrations.transformers_indexer import IndexedStore

    model = tiny("deepseek_v32")
    cache, other = (TersekvCache(model.config, page_size=4) for _ in range(2))
    with torch.inference_mode():
        for c in (cache, other):
            model(IDS, **over(c))
        for name in ("select", "attend", "append_index"):
            with monkeypatch.context() as m:
                m.setattr(IndexedStore, name, lambda *args: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    model(IDS[:, :3], **over(cache))
        assert torch.equal(model(IDS[:, :3], **over(cache)).logits, model(IDS[:, :3], **over(other)).logits)


def test_what_cannot_be_says_so():
    model = tiny("deepseek_v32")
    with pytest.raises(UnsupportedError, match="indexers of deepseek_v32"):
        TersekvStaticCache(model.config, max_tokens=8)
    with pytest.raises(ValueError, match="index_format: want None for llama, which has no indexer, got 'bf16'"):
        TersekvCache(tiny("llama").config, index_format="bf16")
    with pytest.raises(ValueError, match=r"index_format: want one of .*, got 'nvfp4'"):
        TersekvCache(model.config, index_format="nvfp4")
    with pytest.raises(UnsupportedError, match="update_indexer: want one of the indexers"):
        TersekvCache(model.config).update_indexer(torch.zeros(1, 1, 32), 0)
    cache = TersekvCache(model.config)
    with pytest.raises(UnsupportedError, match="attention_mask"), torch.inference_mode():
        model(IDS, attention_mask=torch.ones(2, 1, 60, 60, dtype=torch.bool), **over(cache))
    with torch.inference_mode():
        model(IDS, **over(cache))
