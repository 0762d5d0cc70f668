"""`model.generate` over `TersekvCache`: greedy, sampled, padded, beams, drafts, chunks, and one cache used again."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache
from transformers_models import FAMILIES, VOCABULARY, SamePrecision, distance, over, tiny

from tersekv import UnsupportedError
from tersekv.integrations.transformers import TersekvCache

NEW = 12


@pytest.fixture(params=FAMILIES)
def model(request):
    return tiny(request.param)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(2, VOCABULARY, (2, 37), generator=torch.Generator().manual_seed(2))


def paged(model, format="bf16", **options):
    return TersekvCache(model.config, format, **{"page_size": 8, **options})


def generate(model, ids, cache=None, **options):
    """The new tokens [B, n] over a cache; None: eager attention over one of the same precision."""
    model.set_attn_implementation("tersekv" if isinstance(cache, TersekvCache) else "eager")
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    out = model.generate(ids, **over(cache or SamePrecision(model.config, "bf16")), **options)
    return out[:, ids.shape[1] :]


def test_greedy_tokens_are_those_of_the_default_cache(model, ids):
    model.set_attn_implementation("eager")
    options = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    out = model.generate(ids, **over(DynamicCache(config=model.config)), **options)
    want, got = out.sequences[:, ids.shape[1] :], generate(model, ids, paged(model))
    best = torch.stack(out.logits, 1).topk(2).values
    # Random models are often undecided between two tokens; from there on, 16 bits and 32 may go different ways.
    clear = (best[..., 0] - best[..., 1] > 0.05).long().cumprod(1).bool()
    assert clear.sum() >= NEW // 2
    assert got[clear].tolist() == want[clear].tolist()


@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3"])
def test_greedy_tokens_are_those_of_a_cache_of_the_same_precision(model, ids, format):
    want = generate(model, ids, SamePrecision(model.config, format))
    assert generate(model, ids, paged(model, format)).tolist() == want.tolist()


def test_a_batch_padded_on_the_left_writes_what_each_prompt_writes_alone(model, ids):
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    got = generate(model, ids.where(mask.bool(), 0), paged(model), attention_mask=mask)
    assert got[:1].tolist() == generate(model, ids[:1], paged(model)).tolist()
    assert got[1:].tolist() == generate(model, ids[1:, 11:], paged(model)).tolist()


@pytest.mark.parametrize("options", [{}, {"chunk": 4, "page_size": 4}])
def test_beams_are_those_of_a_cache_of_the_same_precision(model, ids, options):
    want = generate(model, ids, num_beams=4, max_new_tokens=20)
    cache = paged(model, **options)
    assert generate(model, ids, cache, num_beams=4, max_new_tokens=20).tolist() == want.tolist()


def test_beams_share_the_pages_of_their_prompt(ids):
    model = tiny("llama")
    cache = paged(model, page_size=4)
    generate(model, ids[:1], cache, num_beams=4, max_new_tokens=5)
    pool = cache.book._requests[None].pool
    tables = [pool.pages(r) for r in cache.book._requests[None]._ids]
    shared = len(ids[0]) // 4
    assert len({t[: shared - 1] for t in tables}) == 1
    assert pool.num_pages - pool.num_free_pages < 4 * len(tables[0]) - 2 * shared


@pytest.mark.parametrize("seed", [0, 7], ids=["a good assistant", "a bad assistant"])
def test_drafts_of_an_assistant_change_nothing(model, ids, seed):
    want = generate(model, ids[:1], max_new_tokens=24)
    assistant = model if seed == 0 else tiny("llama", attention="eager", seed=seed)
    if assistant is model:
        assistant = copy.deepcopy(model)
        assistant.set_attn_implementation("eager")
    cache = paged(model, page_size=4, chunk=32)
    got = generate(model, ids[:1], cache, assistant_model=assistant, max_new_tokens=24)
    assert got.tolist() == want.tolist()


def test_drafts_from_the_prompt_change_nothing(ids):
    model = tiny("llama")
    prompt = ids[:1, :9].repeat(1, 4)
    want = generate(model, prompt)
    assert generate(model, prompt, paged(model), prompt_lookup_num_tokens=3).tolist() == want.tolist()


def test_a_prompt_in_chunks_changes_nothing(model, ids):
    want = generate(model, ids)
    assert generate(model, ids, paged(model), prefill_chunk_size=10).tolist() == want.tolist()


def test_sampling_with_a_seed_is_the_same(ids):
    model = tiny("qwen3")
    outs = []
    for cache in (None, paged(model)):
        torch.manual_seed(3)  # both draw the same numbers
        outs.append(generate(model, ids, cache, do_sample=True, num_return_sequences=2).tolist())
    assert outs[0] == outs[1]


def test_a_conversation_goes_on_where_the_cache_stands(model, ids):
    cache = paged(model)
    first = torch.cat((ids, generate(model, ids, cache)), 1)
    assert cache.get_seq_length() == first.shape[1] - 1
    more = torch.cat((first, ids[:, :5]), 1)
    mask = torch.ones_like(more)
    got = generate(model, more, cache, attention_mask=mask)
    assert got.tolist() == generate(model, more, attention_mask=mask).tolist()


def test_a_copied_prompt_serves_several_continuations(ids):
    model = tiny("gemma3")
    prompt = paged(model, page_size=4, chunk=8)
    model(ids, **over(prompt))
    for tail in (ids[:, :3], ids[:, 3:8]):
        whole = torch.cat((ids, tail), 1)
        got = generate(model, whole, copy.deepcopy(prompt))
        assert got.tolist() == generate(model, whole).tolist()


def test_reset_makes_room_for_another_batch(model, ids):
    cache = paged(model, page_size=4, chunk=8)
    generate(model, ids, cache)
    before = cache.nbytes
    cache.reset()
    assert (cache.get_seq_length(), cache.batch_size) == (0, -1)
    assert generate(model, ids[:1], cache).tolist() == generate(model, ids[:1]).tolist()
    assert cache.nbytes == before


def test_crop_forgets_the_last_tokens(model, ids):
    cache = paged(model, page_size=4, chunk=16)
    model.set_attn_implementation("tersekv")
    model(ids, **over(cache))
    cache.crop(-9)
    assert cache.get_seq_length() == 28
    want = model(ids, **over(paged(model))).logits[:, 28:]
    assert distance(model(ids[:, 28:], **over(cache)).logits, want) < 2e-3
    with pytest.raises(ValueError, match="tokens_to_remove: want 0 or a negative number, got 3"):
        cache.crop(3)
    with pytest.raises(ValueError, match="crop: want at most 37 tokens to remove, got 99"):
        cache.crop(-99)
    assert cache.get_seq_length() == 37


def test_a_prompt_of_inference_mode_goes_on_outside_of_it(ids):
    model = tiny("llama")
    cache, want = (paged(model, page_size=4) for _ in range(2))
    with torch.inference_mode():
        model(ids[:, :2], **over(cache))
        model(ids[:, 2:], **over(cache))  # in pages that the first did not need
    model(ids, **over(want))
    for c in (cache, want):
        c.batch_repeat_interleave(2)
    again = ids[:, :1].repeat_interleave(2, 0)  # into copies of the pages that are shared now
    assert distance(model(again, **over(cache)).logits, model(again, **over(want)).logits) < 2e-3


def test_crop_over_padding_keeps_the_real_tokens(ids):
    model = tiny("llama")
    mask = torch.ones_like(ids)
    mask[1, 30:34] = 0
    cache = paged(model)
    model(ids, attention_mask=mask, **over(cache))
    cache.crop(-5)
    assert cache.book.counts == [32, 30]
    with pytest.raises(ValueError, match="attention_mask"):
        model(ids[:, 32:], **over(cache), attention_mask=torch.ones_like(ids))


def test_a_window_says_when_it_cannot_go_back(ids):
    model = tiny("mistral")
    long = ids.repeat(1, 4)
    cache = paged(model, page_size=4, chunk=8)
    model(long, **over(cache))
    with pytest.raises(ValueError, match=r"crop: want at least .* tokens kept in request 0, since a window of 24"):
        cache.crop(-60)
    assert cache.get_seq_length() == long.shape[1]
    cache.batch_select_indices(torch.tensor([1, 0]))
    with pytest.raises(ValueError, match=r"crop: want at least .* tokens kept in request 0"):
        cache.crop(-60)
    cache.crop(-long.shape[1])
    assert distance(model(ids, **over(cache)).logits, model(ids, **over(paged(model))).logits) < 2e-3
    cache.crop(-5)
    assert cache.get_seq_length() == 32


@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek_v3"])
def test_rows_are_repeated_and_selected(name, ids):
    model = tiny(name)
    cache = paged(model, page_size=4, chunk=8)
    model(ids[:, :36], **over(cache))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0, 1]))
    again = ids[[1, 0, 0]]
    want = model(again, **over(paged(model))).logits[:, 36:]
    assert distance(model(again[:, 36:], **over(cache)).logits, want) < 2e-3
    cache.batch_select_indices(torch.tensor([False, True, True]))
    assert cache.batch_size == 2
    with pytest.raises(ValueError, match=r"beam_idx: want rows in \[0, 2\)"):
        cache._select([2])


def test_rows_that_are_not_there_cannot_be_selected(ids):
    model = tiny("llama")
    cache = TersekvCache(model.config)
    model(ids[:2, :5], **over(cache))
    with pytest.raises(TypeError, match="indices: want Tensor, got list"):
        cache.batch_select_indices([0])
    no_rows = torch.tensor([0, 1], dtype=torch.uint8), torch.tensor([[0, 1]]), torch.tensor(1), torch.tensor(True)
    for wrong in (torch.tensor([0, 2]), torch.tensor([-1]), torch.ones(3, dtype=torch.bool), *no_rows):
        with pytest.raises(ValueError, match=r"indices: want rows in \[0, 2\), or a mask of all, got"):
            cache.batch_select_indices(wrong)
    assert cache.batch_size == 2
    cache.batch_select_indices(torch.tensor([False, True]))
    assert cache.batch_size == 1


def test_what_runs_the_model_without_the_cache_is_told_what_to_do(ids):
    model, cache = tiny("llama"), TersekvCache(tiny("llama").config)
    mask = torch.ones_like(ids[:1])
    options = {"attention_mask": mask, **over(cache), "max_new_tokens": 2, "do_sample": False}
    for more, word in (
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"assistant_model": tiny("llama")}, "assistant_model"),
    ):
        with pytest.raises(RuntimeError, match=rf"want a TersekvCache .*sdpa.*{word}"):
            model.generate(ids[:1], **options, **more)
        cache.reset()


def test_a_layer_alone_cannot_be_reset():
    cache = paged(tiny("llama"))
    for call in (cache.layers[0].reset, cache.layers[0].offload, lambda: cache.layers[0].reorder_cache(None)):
        with pytest.raises(UnsupportedError, match=r"call it on the TersekvCache|stays on its device"):
            call()
