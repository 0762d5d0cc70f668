"""Models of several kinds of layer over `TersekvCache` and `TersekvStaticCache`: linear attention, convolutions, layers
that mix them with attention, attention within chunks, and layers that attend to the keys and values of others.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import CompileConfig, DynamicCache, RecurrentGemmaConfig
from transformers.models.minimax.modeling_minimax import MiniMaxCache
from transformers_models import CHUNK, HYBRIDS, VOCABULARY, SamePrecision, distance, over, tiny

from tersekv import UnsupportedError
from tersekv.integrations.transformers import TersekvCache, TersekvStaticCache

NEW = 12
STATES = ("qwen3_5", "kimi_linear", "lfm2", "falcon_h1")
RECURRENT = ("qwen3_5", "kimi_linear", "falcon_h1")
CLOSE = 2e-3  # of fp32 models: another order of sums, and a rounding here and there on the other side

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated")


@pytest.fixture(params=HYBRIDS)
def model(request):
    return tiny(request.param)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(2, VOCABULARY, (2, 37), generator=torch.Generator().manual_seed(2))


def paged(model, format="bf16", **options):
    return TersekvCache(model.config, format, **{"page_size": 4, "chunk": 16, **options})


def static(model, format="bf16", **options):
    options = {"page_size": 4, "chunk": 16, "max_tokens": 96, **options}
    return TersekvStaticCache(model.config, format, **options)


def logits(model, ids, cache, **options):
    model.set_attn_implementation("tersekv" if isinstance(cache, TersekvCache) else "eager")
    return model(ids, **over(cache), **options).logits


def generate(model, ids, cache=None, **options):
    """The new tokens [B, n] over a cache; None: eager attention over transformers' own of the same precision."""
    model.set_attn_implementation("tersekv" if isinstance(cache, TersekvCache) else "eager")
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    out = model.generate(ids, **over(cache or SamePrecision(model.config, "bf16")), **options)
    return out[:, ids.shape[1] :]


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "llama4", "gemma4"])
def test_a_decode_step_is_one_graph(name, ids):
    torch._dynamo.reset()
    model = tiny(name)
    compiled = CompileConfig(fullgraph=True, backend="eager", mode=None)
    compiled._compile_all_devices = True  # without it, generate compiles on GPUs alone
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = generate(model, ids, static(model), compile_config=compiled)
    assert got.tolist() == generate(model, ids).tolist()


@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("kind", [paged, static])
def test_a_padded_batch_in_two_turns_is_that_of_the_models_own_cache(model, ids, kind, format):
    mask = torch.ones(2, 72, dtype=torch.int64)
    mask[1, :11] = 0
    if "sliding_attention" not in model.config.layer_types:  # whose windows are columns in transformers, tokens here
        mask[0, 70] = 0
    turns = torch.cat((ids, ids.flip(0)[:, :35]), 1).where(mask.bool(), 0)
    got, want = kind(model, format), SamePrecision(model.config, format)
    for begin, end in ((0, 37), (37, 38), (38, 71), (71, 72)):
        options = {"attention_mask": mask[:, :end], "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, begin:end]}
        real = mask[:, begin:end].bool()
        out = [logits(model, turns[:, begin:end], cache, **options)[real] for cache in (got, want)]
        assert distance(*out) < CLOSE, (begin, end)


def test_tokens_in_16_bits_are_those_of_the_models_own_cache(model, ids):
    model.to(torch.bfloat16)
    want = logits(model, ids, DynamicCache(config=model.config))
    best = want.float().topk(2).values
    got = logits(model, ids, paged(model))
    assert distance(got.float(), want.float()) < 0.03
    clear = best[..., 0] - best[..., 1] > 0.2
    assert clear.float().mean() > 0.5
    assert torch.equal(got.argmax(-1)[clear], want.argmax(-1)[clear])


def test_beams_are_those_of_the_models_own_cache(model, ids):
    want = generate(model, ids, num_beams=3)
    assert generate(model, ids, paged(model), num_beams=3).tolist() == want.tolist()
    assert generate(model, ids, static(model), num_beams=3, disable_compile=True).tolist() == want.tolist()


@pytest.mark.parametrize("kind", [paged, static])
def test_a_copy_goes_its_own_way_and_reset_begins_anew(model, ids, kind):
    cache = kind(model)
    want = [logits(model, ids, kind(model)), logits(model, ids, cache)]
    other = copy.deepcopy(cache)
    one, two = ids[:, :5], ids[:, 5:10]
    logits(model, two, other)
    assert distance(logits(model, one, cache), logits(model, torch.cat((ids, one), 1), kind(model))[:, 37:]) < CLOSE
    cache.reset()
    assert cache.get_seq_length() == 0
    assert distance(logits(model, ids, cache), want[0]) < CLOSE
    if kind is paged:  # a static one keeps the size of its batch
        cache.reset()
        assert distance(logits(model, ids[1:], cache), logits(model, ids[1:], paged(model))) < CLOSE


def test_rows_are_repeated_and_selected(model, ids):
    cache = paged(model)
    logits(model, ids[:, :30], cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0, 1]))
    cache.batch_select_indices(torch.tensor([True, True, False]))
    again = ids[[1, 0]]
    assert distance(logits(model, again[:, 30:], cache), logits(model, again, paged(model))[:, 30:]) < CLOSE
    fixed = static(model)
    logits(model, ids[:, :30], fixed)
    held = [x.data_ptr() for x in fixed.states.tensors()]
    fixed.batch_select_indices(torch.tensor([1, 1]))
    again = ids[[1, 1]]
    assert distance(logits(model, again[:, 30:], fixed), logits(model, again, static(model))[:, 30:]) < CLOSE
    assert [x.data_ptr() for x in fixed.states.tensors()] == held


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_state_goes_back_to_nothing_alone(name, ids):
    model, cache = tiny(name), paged(tiny(name))
    logits(model, ids, cache)
    cache.activate_past_recording()
    logits(model, ids[:, :5], cache)
    with pytest.raises(UnsupportedError, match="crop: want layers that can go back, got a recurrent state"):
        cache.crop(-2)
    assert (cache.get_seq_length(), cache.is_croppable) == (42, False)
    cache.crop(0)
    cache.crop(-42)
    assert distance(logits(model, ids, cache), logits(model, ids, paged(model))) < CLOSE
    with pytest.raises(ValueError, match=r"assisted generation is not supported|Assisted decoding requires"):
        generate(model, ids[:1], paged(model), prompt_lookup_num_tokens=3)


def test_a_convolution_goes_back_as_far_as_it_was_recorded(ids):
    model = tiny("lfm2")
    cache = paged(model)
    logits(model, ids[:, :30], cache)
    with pytest.raises(UnsupportedError, match=r"crop: want activate_past_recording\(\) before the tokens that go"):
        cache.crop(-1)
    cache.activate_past_recording()
    logits(model, ids[:, 30:], cache)
    with pytest.raises(UnsupportedError, match="a convolution that keeps 10 columns, of which 8 are to go"):
        cache.crop(-8)
    cache.crop(-4)
    assert distance(logits(model, ids[:, 33:], cache), logits(model, ids, paged(model))[:, 33:]) < CLOSE
    prompt = ids[:1, :9].repeat(1, 4)
    got = generate(model, prompt, paged(model), prompt_lookup_num_tokens=3, max_new_tokens=24)
    assert got.tolist() == generate(model, prompt, max_new_tokens=24).tolist()


@pytest.mark.parametrize("name", ["llama4", "gemma3n"])
def test_drafts_change_nothing(name, ids):
    model = tiny(name)
    prompt = ids[:1, :9].repeat(1, 4)
    got = generate(model, prompt, paged(model), prompt_lookup_num_tokens=3, max_new_tokens=24)
    assert got.tolist() == generate(model, prompt, max_new_tokens=24).tolist()


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("kind", [paged, static])
def test_a_forward_that_failed_is_not_in_the_state(name, kind, ids):
    model, cache = tiny(name), kind(tiny(name))
    strange = torch.ones(2, 1, 37, 37)
    with pytest.raises(UnsupportedError, match="attention_mask"):
        logits(model, ids, cache, attention_mask=strange)
    assert distance(logits(model, ids, cache), logits(model, ids, kind(model))) < CLOSE
    with pytest.raises(UnsupportedError, match="attention_mask"):
        logits(model, ids, cache, attention_mask=strange)
    with pytest.raises(RuntimeError, match=r"the state of a layer, a failed call has .* call reset\(\)"):
        logits(model, ids, cache)
    cache.reset()
    assert distance(logits(model, ids, cache), logits(model, ids, kind(model))) < CLOSE


@pytest.mark.parametrize("kind", [paged, static])
@pytest.mark.parametrize("options", [{"chunk": 64}, {"chunk": 5}, {"page_size": 24}, {"exact_prefill": True}])
def test_attention_stays_within_chunks(ids, kind, options):
    model = tiny("llama4")
    long = torch.cat((ids, ids.flip(1)), 1)
    want = logits(model, long, SamePrecision(model.config, "fp8_e4m3"))
    got = logits(model, long, kind(model, "fp8_e4m3", **options))
    if "exact_prefill" in options:
        want = logits(model, long, SamePrecision(model.config, "bf16"))
    assert distance(got, want) < CLOSE
    # A first token changes nothing behind its chunk, in the layer that has chunks alone.
    assert model.config.layer_types[0] == "chunked_attention"
    other = long.clone()
    other[:, 0] += 1
    layer = []
    model.model.layers[0].register_forward_hook(lambda module, args, out: layer.append(out))
    for tokens in (long, other):
        logits(model, tokens % VOCABULARY, kind(model, **options))
    same = (layer[0] == layer[1]).all(-1).all(0)
    assert same[CHUNK:].all()
    assert not same[:CHUNK].any()


def test_chunks_keep_what_they_need_and_begin_with_a_page(ids):
    model = tiny("llama4")
    cache = paged(model)
    for _ in range(4):
        logits(model, ids, cache)
    chunked, full = (layer.store.cache.nbytes for layer in cache.paged)
    assert chunked < full / 2
    with pytest.raises(ValueError, match="page_size: want a divisor of attention_chunk_size = 24, got 16"):
        TersekvCache(model.config, page_size=16)


@pytest.mark.parametrize("options", [{}, {"chunk": 5}, {"exact_prefill": True}])
def test_layers_attend_to_the_keys_of_others(ids, options):
    model = tiny("gemma3n")
    format = "bf16" if "exact_prefill" in options else "fp8_e4m3"
    long = torch.cat((ids, ids.flip(1)), 1)
    want = logits(model, long, SamePrecision(model.config, format))
    cache = paged(model, "fp8_e4m3", **options)
    assert distance(logits(model, long, cache), want) < CLOSE
    assert [layer.lent for layer in cache.paged] == [None, None]
    assert len(cache.paged) == 2


@pytest.mark.parametrize("kind", [paged, static])
def test_the_last_queries_alone_attend_to_the_keys_of_others(ids, kind):
    model = tiny("gemma4")
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    options = {"attention_mask": mask, "logits_to_keep": 3}
    want = logits(model, ids, SamePrecision(model.config, "bf16"), **options)
    lengths = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda module, args, out: lengths.append(out[0].shape[1]))
    assert distance(logits(model, ids, kind(model), **options), want) < CLOSE
    assert lengths in ([37, 37, 3, 3], [37] * 4)  # older transformers do not cut them


@pytest.mark.parametrize("kind", [paged, static])
def test_a_layer_that_fails_to_read_the_keys_of_others_takes_the_forward_back(ids, kind):
    model, cache = tiny("gemma3n"), kind(tiny("gemma3n"))
    last = model.model.layers[3].self_attn
    last.sliding_window = 5
    with pytest.raises(UnsupportedError, match="sliding_window: want None in attention layer 1"):
        logits(model, ids, cache)
    last.sliding_window = None
    assert cache.get_seq_length() == 0
    assert distance(logits(model, ids, cache), logits(model, ids, kind(model))) < CLOSE
    last.sliding_window = 5
    with pytest.raises(UnsupportedError, match="sliding_window"):
        logits(model, ids[:, :3], cache)
    last.sliding_window = None
    if kind is static:  # which tokens were counted, only the device knows
        with pytest.raises(RuntimeError, match=r"call reset\(\) and start again"):
            logits(model, ids[:, :3], cache)
        return
    again = torch.cat((ids, ids[:, :3]), 1)
    assert distance(logits(model, ids[:, :3], cache), logits(model, again, kind(model))[:, 37:]) < CLOSE


@pytest.mark.skipif(
    not getattr(RecurrentGemmaConfig(), "layer_types", None), reason="older transformers tell no layers of it"
)
def test_a_state_in_the_modules_of_a_model_follows_no_beams(ids):
    sizes = {"num_hidden_layers": 2, "block_types": ["recurrent", "attention"], "attention_window_size": 24}
    model = tiny("recurrent_gemma", **sizes)
    assert generate(model, ids, paged(model)).tolist() == generate(model, ids).tolist()
    with pytest.raises(UnsupportedError, match="beam_idx: want a model that leaves its state to its cache"):
        generate(model, ids, paged(model), num_beams=2)


@pytest.mark.parametrize("kind", [paged, static])
def test_a_model_that_wants_a_cache_of_its_own_class_gets_one(ids, kind):
    model = tiny("minimax")
    cache = kind(model)
    logits(model, ids, cache)
    other = pickle.loads(pickle.dumps(copy.deepcopy(cache)))
    assert isinstance(other, MiniMaxCache)
    other.batch_select_indices(torch.tensor([1, 0]))
    again = torch.cat((ids.flip(0), ids), 1)
    assert distance(logits(model, ids, other), logits(model, again, kind(model))[:, 37:]) < CLOSE
    other.reset()
    assert distance(logits(model, ids, other), logits(model, ids, kind(model))) < CLOSE
