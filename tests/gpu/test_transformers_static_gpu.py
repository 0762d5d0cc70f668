"""A compiled model over a `TersekvStaticCache` on the device itself: CUDA graphs that are captured and replayed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

pytest.importorskip("transformers", reason="the cache is of Hugging Face transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))
from transformers_models import VOCABULARY, distance, over, tiny

from tersekv import KV_FORMATS
from tersekv.integrations.transformers import TersekvCache, TersekvStaticCache

PROMPT, NEW = 41, 70  # over borders of pages, and over a window of 24
LATENTS = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "first_k_dense_replace": 2,
}  # fmt: skip
CASES = {
    "every format, one a layer": ("llama", {"num_hidden_layers": len(KV_FORMATS)}, {"layer_formats": list(KV_FORMATS)}),
    "windows, and a softcap": ("gemma2", {}, {"format": "int8_per_token_head"}),
    "sinks": ("gpt_oss", {}, {"format": "fp8_e4m3"}),
    "latents": ("deepseek_v3", LATENTS, {"layer_formats": ["fp8_ds_mla", "fp8_e4m3"]}),
    "a recurrent state, and heads of 256": ("qwen3_5", {"head_dim": 256}, {"format": "fp8_e4m3"}),
    "a state beside attention": ("falcon_h1", {}, {"format": "int8_per_token_head"}),
    "convolutions": ("lfm2", {}, {"format": "fp8_e4m3"}),
    "chunks": ("llama4", {"attention_chunk_size": 32}, {"format": "int8_per_token_head"}),
    "shared keys": ("gemma4", {"global_head_dim": 64}, {"format": "fp8_e4m3"}),
}


@pytest.fixture(params=CASES)
def case(request):
    """A model, the options of its caches, tokens of three requests, and where they are padding."""
    torch._dynamo.reset()
    family, sizes, options = CASES[request.param]
    model = tiny(family, dtype=torch.bfloat16, **{"hidden_size": 256, "head_dim": 64, **sizes}).cuda()
    model.set_experts_implementation("batched_mm")  # others ask the host which experts have tokens
    ids = torch.randint(1, VOCABULARY, (3, PROMPT + NEW), device="cuda")
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    return model, {"page_size": 16, "chunk": 32, **options}, ids, mask


def static(model, options):
    return TersekvStaticCache(model.config, max_tokens=PROMPT + NEW, **options)


def prefilled(model, cache, ids, mask):
    places = (mask.cumsum(1) - 1).clamp(min=0)
    model(ids[:, :PROMPT], attention_mask=mask[:, :PROMPT], position_ids=places[:, :PROMPT], **over(cache))
    return places


def stepped(step, ids, places):
    """Logits of the tokens behind the prompt, one by one."""
    return [step(ids[:, [i]], places[:, [i]]).clone() for i in range(PROMPT, PROMPT + NEW)]


def wanted(case):
    """What a `TersekvCache` makes of them, outside of graphs."""
    model, options, ids, mask = case
    cache = TersekvCache(model.config, **options)
    places = prefilled(model, cache, ids, mask)
    return stepped(lambda x, at: model(x, position_ids=at, **over(cache)).logits, ids, places)


@torch.no_grad()
def test_a_captured_token_is_replayed_for_those_after_it(case):
    model, options, ids, mask = case
    want = wanted(case)
    cache = static(model, options)
    places = prefilled(model, cache, ids, mask)
    x, at = ids[:, [PROMPT]].clone(), places[:, [PROMPT]].clone()
    counts, columns = cache.book.counts.clone(), cache.book.columns.clone()
    states = [state.clone() for state in cache.states.tensors()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles kernels; the token is written again below
        model(x, position_ids=at, **over(cache))
    torch.cuda.current_stream().wait_stream(side)
    cache.book.counts.copy_(counts)
    cache.book.columns.copy_(columns)
    cache.states.put(states)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(x, position_ids=at, **over(cache)).logits

    def replay(token, place):
        x.copy_(token)
        at.copy_(place)
        graph.replay()
        return logits

    got = stepped(replay, ids, places)
    assert int(cache.get_seq_length()) == PROMPT + NEW
    assert cache.book.counts.tolist() == mask.sum(1).tolist()
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        assert distance(one.float(), other.float()) < 2e-2, i


@torch.no_grad()
def test_reduce_overhead_records_one_graph_and_waits_for_nothing(case):
    model, options, ids, mask = case
    want = wanted(case)
    cache = static(model, options)
    compiled = torch.compile(model.__call__, mode="reduce-overhead", fullgraph=True)
    counters.clear()

    def step(x, at):
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(x, position_ids=at, **over(cache)).logits

    for turn in range(2):  # the same pages again
        places = prefilled(model, cache, ids, mask)
        tokens = [(ids[:, [i]], places[:, [i]]) for i in range(PROMPT, PROMPT + NEW)]
        # The first is compiled, the first three are warmed up, recorded and replayed.
        got = [step(*token).clone() for token in tokens[:3]] if turn == 0 else []
        with torch._dynamo.config.patch(error_on_recompile=True):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                got += [step(*token).clone() for token in tokens[len(got) :]]
            finally:
                torch.cuda.set_sync_debug_mode("default")
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            # Fused operations round otherwise; a wrong page or length is off by its whole size.
            assert distance(one.float(), other.float()) < 5e-2, (turn, i)
        cache.reset()
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_generate_compiles_by_itself(case):
    model, options, ids, mask = case
    counters.clear()
    cache = static(model, options)
    model.generate(ids[:, :PROMPT], attention_mask=mask[:, :PROMPT], **over(cache), max_new_tokens=NEW, do_sample=False)
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert int(cache.get_seq_length()) == PROMPT + NEW - 1
