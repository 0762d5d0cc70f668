"""`TersekvStaticCache`: one graph for every token of a compiled model, the same tokens as a `TersekvCache`."""

from __future__ import annotations

import copy

import pytest
import torch
from no_sync import NoHostReads
from torch._dynamo.backends.common import aot_autograd
from transformers import CompileConfig
from transformers_models import FAMILIES, LATENT, VOCABULARY, distance, over, tiny

from tersekv import KV_FORMATS, OutOfPagesError, UnsupportedError
from tersekv.integrations import transformers_store
from tersekv.integrations.transformers import TersekvCache, TersekvStaticCache

FORMATS = list(KV_FORMATS)
PAIRS = list(zip(FORMATS[::2], FORMATS[1::2], strict=True))  # every format, on one side
ATTRIBUTES = {
    "rotation": ("hadamard", None),
    "k_channel_scale": torch.linspace(0.2, 5, len(PAIRS) * 2 * 16).view(-1, 2, 16),
    "v_channel_scale": torch.linspace(5, 0.2, len(PAIRS) * 2 * 16).view(-1, 2, 16),
}
ROOM = {"page_size": 8, "chunk": 16}


@pytest.fixture(scope="module")
def ids():
    return torch.randint(1, VOCABULARY, (3, 37), generator=torch.Generator().manual_seed(3))


def padded(ids, **columns):
    """A mask with padding in row 1, where the slices say."""
    mask = torch.ones_like(ids)
    for where in columns.values():
        mask[1, where] = 0
    return mask


def static(model, **options):
    return TersekvStaticCache(model.config, **{**ROOM, "max_tokens": 128, **options})


def tokens(model, ids, mask, cache, **options):
    options = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True, **options}
    return model.generate(ids, attention_mask=mask, **over(cache), **options)[:, ids.shape[1] :]


def compiled(graphs):
    """How generate compiles: one whole graph, which a backend collects after it was made functional."""

    def collect(graph, inputs):
        graphs.append(graph)
        return graph.forward

    config = CompileConfig(fullgraph=True, backend=aot_autograd(fw_compiler=collect), mode=None)
    config._compile_all_devices = True  # without it, generate compiles on GPUs alone
    return {"disable_compile": False, "compile_config": config}


CASES = {
    "pairs, rotated, with channel scales": (
        "llama", {"num_hidden_layers": len(PAIRS)}, {"layer_formats": PAIRS, **ATTRIBUTES}
    ),
    "windows, and a softcap": ("gemma2", {}, {"format": "fp8_per_token_head"}),
    "latents": ("deepseek_v3", {"first_k_dense_replace": 2}, {"layer_formats": ["fp8_ds_mla", "fp8_e4m3"]}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_one_graph_writes_every_token(case, ids):
    torch._dynamo.reset()
    family, sizes, options = CASES[case]
    model = tiny(family, **sizes)
    graphs, cache = [], static(model, **options)
    how = compiled(graphs)
    for prompt, new in ((ids, 66), (ids[:, 4:31], 4)):  # another prompt in the same pages: nothing is compiled again
        mask = padded(prompt, left=slice(9))
        want = tokens(model, prompt, mask, TersekvCache(model.config, **ROOM, **options), max_new_tokens=new)
        with torch._dynamo.config.patch(error_on_recompile=True):
            got = tokens(model, prompt, mask, cache, max_new_tokens=new, **how)
        assert got.tolist() == want.tolist()
        assert int(cache.get_seq_length()) == prompt.shape[1] + new - 1
        assert cache.book.counts.tolist() == (mask.sum(1) + new - 1).tolist()
        cache.reset()
    assert len(graphs) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_outside_of_graphs_the_tokens_are_the_same(family, ids):
    model = tiny(family)
    mask = padded(ids, left=slice(11))
    format = "fp8_ds_mla" if family in LATENT else "int8_per_token_head"
    options = {"format": format, "exact_prefill": True}
    want = tokens(model, ids, mask, TersekvCache(model.config, **ROOM, **options), max_new_tokens=40)
    got = tokens(model, ids, mask, static(model, **options), max_new_tokens=40)
    assert got.tolist() == want.tolist()


@pytest.mark.parametrize("columns", [
    {"right": slice(30, None)}, {"within": slice(8, 27)}, {"left": slice(20), "right": slice(35, None)},
    {"all": slice(None)}, {},
], ids=lambda columns: " and ".join(columns) or "nowhere")  # fmt: skip
def test_padding_anywhere_takes_no_room(columns, ids):
    model = tiny("gemma2")
    mask = padded(ids, **columns)
    outs = []
    for cache in (TersekvCache(model.config, **ROOM), static(model)):
        first = model(ids[:, :30], attention_mask=mask[:, :30], **over(cache)).logits
        later = [model(ids[:, [i]], attention_mask=mask[:, : i + 1], **over(cache)).logits for i in (30, 31)]
        rest = model(ids[:, 32:], attention_mask=mask, **over(cache)).logits
        outs.append(torch.cat((first, *later, rest), 1))
    assert cache.book.counts.tolist() == mask.sum(1).tolist()
    real = mask.bool()
    assert distance(outs[1][real], outs[0][real]) < 1e-5


@pytest.mark.parametrize("masked", [False, True])
def test_no_token_asks_the_host_and_nothing_moves(masked, ids, monkeypatch):
    # The operations are judged elsewhere; some backends of a CPU read lengths and pages.
    monkeypatch.setattr(transformers_store, "append", lambda *args: None)
    for name in ("decode", "prefill"):
        monkeypatch.setattr(transformers_store, name, lambda q, *args, **kwargs: q.clone())
    model = tiny("gemma2")
    cache = static(model, format="nvfp4")

    def places():
        stores = [layer.store for layer in cache.paged]
        return [x.data_ptr() for x in (*cache.book.tensors(), *(t for s in stores for t in s.tensors()))]

    def step(n, total):
        mask = padded(ids, left=slice(5))[:, :total] if masked else None
        places = torch.arange(total - n, total)[None]
        with NoHostReads():
            model(ids[:, total - n : total], attention_mask=mask, position_ids=places, **over(cache))

    seen = []
    for _ in range(2):
        step(30, 30)
        seen.append(places())
        for total in range(31, 38):
            step(1, total)
        seen.append(places())
        cache.reset()
    assert seen == seen[:1] * 4


def test_beams_take_their_rows_along(ids):
    mask, options = padded(ids, left=slice(9)), {"num_beams": 3, "max_new_tokens": 30}
    for family in ("gemma2", "deepseek_v3"):
        model = tiny(family)
        want = tokens(model, ids, mask, TersekvCache(model.config, **ROOM), **options)
        assert tokens(model, ids, mask, static(model), **options).tolist() == want.tolist()


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_copy_goes_its_own_way(family, ids):
    model = tiny(family)
    cache = static(model)
    model(ids[:, :20], **over(cache))
    other = copy.deepcopy(cache)
    want = model(ids[:, 20:21], **over(cache)).logits
    model(ids[:, 21:25], **over(cache))
    assert torch.equal(model(ids[:, 20:21], **over(other)).logits, want)
    assert int(other.get_seq_length()) == 21
    marked = [*other.book.tensors(), *(x for layer in other.paged for x in layer.store.tensors())]
    assert all(x._dynamo_static_input_type == "unguarded" for x in marked)


def test_a_prompt_is_compiled_too_once_there_are_pages(ids):
    torch._dynamo.reset()
    model = tiny("llama", num_hidden_layers=1)
    want = model(ids, **over(TersekvCache(model.config, **ROOM))).logits
    whole = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"run it eagerly, as generate does, or call early_init"):
        whole(ids, **over(static(model)))
    torch._dynamo.reset()
    cache = static(model)
    cache.early_initialization(3, 2, 16, torch.float32, ids.device)
    assert torch.equal(whole(ids, **over(cache)).logits, want)
    with pytest.raises(UnsupportedError, match=r"^early_initialization: want a model that caches K and V"):
        static(tiny("deepseek_v3")).early_initialization(3, 4, 16, torch.float32, ids.device)


def test_a_full_cache_is_named(ids):
    model = tiny("llama")
    with pytest.raises(OutOfPagesError, match=r"^max_tokens: want at least 41 in TersekvStaticCache, .* got 40$"):
        tokens(model, ids, padded(ids, left=slice(9)), static(model, max_tokens=40), max_new_tokens=10)
    with pytest.raises(OutOfPagesError, match=r"^max_tokens: want room for 37 new tokens of a request, got 32"):
        model(ids, **over(static(model, max_tokens=25)))
    cache = static(model, max_tokens=37)
    model(ids, **over(cache))
    for _ in range(3):
        model(ids[:, :1], **over(cache))
    with pytest.raises(OutOfPagesError, match=r"^max_tokens: want room for 41 tokens of a request, got 40"):
        model(ids[:, :1], **over(cache))


def test_what_a_fixed_room_cannot_do_is_refused(ids):
    model = tiny("llama")
    with pytest.raises(ValueError, match=r"^num_pages: want None for a TersekvStaticCache"):
        static(model, num_pages=8)
    with pytest.raises(ValueError, match=r"^max_tokens: want a positive"):
        static(model, max_tokens=0)
    cache = static(model)
    model(ids, **over(cache))
    with pytest.raises(UnsupportedError, match=r"^crop: want a TersekvCache to take tokens back from"):
        cache.crop(-1)
    with pytest.raises(ValueError, match=r"^input_ids: want a batch of 3, which the cache holds, got 2"):
        model(ids[:2], **over(cache))
    cache.reset()
    with pytest.raises(UnsupportedError, match=r"^indices: want a row for each of 3, .* got \[2\]"):
        cache.batch_select_indices(torch.tensor([0, 1]))
    with pytest.raises(UnsupportedError, match=r"^indices: want .* got \[3\] torch.bool"):
        cache.batch_select_indices(torch.tensor([True, False, True]))
    with pytest.raises(UnsupportedError, match=r"^indices: want .* got \[3\] torch.uint8"):
        cache.batch_select_indices(torch.tensor([0, 1, 2], dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"^indices: want Tensor, got list"):
        cache.batch_select_indices([0, 1, 2])
    with pytest.raises(UnsupportedError, match=r"^repeats: want 1, .* got 2"):
        cache.batch_repeat_interleave(2)
    cache.batch_repeat_interleave(1)
    with pytest.raises(UnsupportedError, match=r"^attention_mask: want"):
        model(ids, attention_mask=torch.ones(3, 1, 37, 37, dtype=torch.bool), **over(cache))
    # transformers 5.24 asks `is_croppable` before it crops, and speaks first.
    with pytest.raises(
        (UnsupportedError, ValueError), match=r"^crop: want a TersekvCache|requires a cache that can be cropped"
    ):
        tokens(model, ids[:1], None, static(model), prompt_lookup_num_tokens=3)


def test_a_forward_that_broke_off_counts_nothing(ids):
    model = tiny("llama")
    cache = static(model)
    hook = model.model.layers[1].register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids, **over(cache))
    hook.remove()
    with pytest.raises(RuntimeError, match=r"want layer 1, since a forward goes .* got layer 0; call reset"):
        model(ids, **over(cache))
    cache.reset()
    want = model(ids, **over(TersekvCache(model.config, **ROOM))).logits
    assert torch.equal(model(ids, **over(cache)).logits, want)
