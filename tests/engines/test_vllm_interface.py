"""The classes that vLLM is given, called with its own specs, pages and metadata: batches padded for a graph, pages in
every layout, scales that change; against dense attention over what pages hold."""

from __future__ import annotations

import copy
import math
import pickle
import random
from types import SimpleNamespace

import pytest
import torch
import vllm_cpu  # noqa: F401 (before anything of vLLM)
from dense_reference import dequantise
from vllm.config.cache import is_known_kv_cache_dtype
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    KVQuantMode,
    compute_layout_strides,
    create_kv_cache_views,
    get_kv_quant_mode,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

import tersekv
from tersekv.integrations import vllm_attention
from tersekv.integrations.vllm import register
from tersekv.integrations.vllm_attention import TersekvBackend, TersekvImpl, TersekvMetadataBuilder
from tersekv.integrations.vllm_pages import OWN, pages_of, pages_shape

HEADS, KV_HEADS, DIM, PAGE, PAGES = 4, 2, 32, 16, 24
SCALE = 0.2
MODES = {
    "auto": torch.bfloat16, "float16": torch.float16, "fp8": torch.uint8, "fp8_e5m2": torch.uint8,
    "fp8_per_token_head": torch.uint8, "int8_per_token_head": torch.int8, "nvfp4": torch.uint8,
    "int4_per_token_head": torch.uint8, "nvfp4+rotated": torch.uint8, "fp8_e4m3/int4_per_token_head": torch.uint8,
    "int8_per_token_head/nvfp4+rotated": torch.uint8, "int8_per_token_head+rotated": torch.uint8,
    "fp8_e4m3+rotated": torch.float8_e4m3fn,
}  # fmt: skip
UNEVEN = "int8_per_token_head/nvfp4+rotated"  # its rows, of 36 and 18 bytes, can not each have aligned scales behind it
WHOLE = TersekvBackend.supported_kv_cache_layouts()


def pages(mode: str, layout: KVCacheLayout = KVCacheLayout.LBHNC, size_v: int = DIM) -> torch.Tensor:
    """One layer's pages as vLLM makes them, those of two other layers around them, all poisoned."""
    spec = TersekvBackend.customize_spec(
        FullAttentionSpec(
            block_size=PAGE, num_kv_heads=KV_HEADS, head_size=DIM, head_size_v=size_v, dtype=MODES[mode],
            kv_quant_mode=get_kv_quant_mode(mode),
        )
    )  # fmt: skip
    size = 3 * PAGES * spec.page_size_bytes
    per_layer, per_block, *_ = compute_layout_strides(spec, PAGES, 3, layout)
    place = KVCacheTensor(size, ["a", "b", "c"], per_layer, per_block)
    raw = torch.full((size,), -1, dtype=torch.int8)
    return create_kv_cache_views(raw, spec, PAGES, layout, place)[1]


class Model:
    """One attention layer and its requests: pages at random, lengths kept."""

    def __init__(self, mode: str, layout: KVCacheLayout = KVCacheLayout.LBHNC, **options) -> None:
        self.mode = mode
        self.dtype = torch.float16 if mode == "float16" else torch.bfloat16
        self.layer = SimpleNamespace(_k_scale=torch.tensor(0.02), _v_scale=torch.tensor(0.03))
        self.cache = pages(mode, layout)
        self.impl = TersekvImpl(HEADS, DIM, SCALE, KV_HEADS, None, kv_cache_dtype=mode, **options)
        self.builder = TersekvMetadataBuilder(None, ["layer"], None, torch.device("cpu"))
        free = list(range(PAGES))
        random.Random(1).shuffle(free)
        self.free, self.tables, self.lens = free, {}, {}

    def step(self, new: dict[str, int], pad: tuple[int, int] = (0, 0)):
        """new rows of each request → (query, key, value, metadata, output). pad: requests and rows of padding."""
        torch.manual_seed(sum(new.values()))
        slots = []
        for name, n in new.items():
            table, old = self.tables.setdefault(name, []), self.lens.get(name, 0)
            while len(table) * PAGE < old + n:
                table.append(self.free.pop())
            slots += [table[i // PAGE] * PAGE + i % PAGE for i in range(old, old + n)]
            self.lens[name] = old + n
        counts, total, (empty, unused) = [*new.values()], sum(new.values()), pad
        starts = torch.tensor([0, *counts, *[0] * empty]).cumsum(0).to(torch.int32)
        table = torch.full((len(new) + empty, 8), 2**30, dtype=torch.int32)
        for i, name in enumerate(new):
            table[i, : len(self.tables[name])] = torch.tensor(self.tables[name])
        lens = torch.tensor([*[self.lens[n] for n in new], *[0] * empty], dtype=torch.int32)
        q, k, v = (torch.randn(total + unused, h, DIM, dtype=self.dtype) for h in (HEADS, KV_HEADS, KV_HEADS))
        common = CommonAttentionMetadata(
            starts, starts.clone(), lens, len(new) + empty, total + unused, max(counts), max(lens.tolist()), table,
            torch.tensor([*slots, *[-1] * unused]), True,
        )  # fmt: skip
        m = self.builder.build(0, common)
        out = torch.full((total + unused, HEADS * DIM), math.nan, dtype=self.dtype)
        self.impl.do_kv_cache_update(self.layer, k, v, self.cache, common.slot_mapping)
        returned = self.impl.forward(self.layer, q, k, v, self.cache, m, out)
        assert returned is out
        return q, k, v, m, out.view(-1, HEADS, DIM)

    def dense(self, q, new: dict[str, int], window=None, sinks=None, softcap=0.0, own=None) -> torch.Tensor:
        """fp64 attention over what the pages hold; own: (k, v) of this step, as prefill sees them."""
        layer = self.impl._layer(self.layer, self.cache)
        k_all, v_all = (x.flatten(0, 1) for x in dequantise(layer))
        outs, start, many = [], 0, False
        for name, n in new.items():
            length = self.lens[name]
            at = torch.tensor([self.tables[name][i // PAGE] * PAGE + i % PAGE for i in range(length)])
            k, v = k_all[at], v_all[at]
            many = many or n > vllm_attention.DECODE_ROWS  # from this request on
            if own is not None and many:
                k[length - n :], v[length - n :] = (x[start : start + n].double() for x in own)
            k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
            rows = q[start : start + n].double()
            s = torch.einsum("qhd,khd->hqk", rows, k) * SCALE
            s = softcap * torch.tanh(s / softcap) if softcap else s
            mine, key = torch.arange(length - n, length)[:, None], torch.arange(length)
            seen = (key <= mine) & (key > mine - (window or length))
            s = s.masked_fill(~seen, -math.inf)
            if sinks is not None:
                s = torch.cat([s, sinks.double()[:, None, None].expand(-1, n, 1)], -1)
            outs.append(torch.einsum("hqk,khd->qhd", s.softmax(-1)[..., :length], v))
            start += n
        return torch.cat(outs)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 5e-3) -> bool:
    return float((got.double() - want).norm() / want.norm()) < tolerance


STEPS = ({"a": 20, "b": 3}, {"a": 1, "b": 1, "c": 30}, {"a": 1, "b": 1, "c": 1}, {"c": 4, "a": 4, "b": 4})


@pytest.mark.parametrize("layout", WHOLE, ids=lambda layout: layout.name)
@pytest.mark.parametrize("mode", MODES)
def test_every_format_in_every_layout(mode, layout):
    model = Model(mode, layout)
    for new in STEPS:
        q, k, v, _, out = model.step(new)
        assert close(out, model.dense(q, new, own=(k, v))), new


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != UNEVEN])
def test_where_a_connector_moves_tokens_each_has_its_scales(mode, monkeypatch):
    """In any layout; a token's bytes are copied to another place of another block, and what they mean goes along."""
    monkeypatch.setattr(vllm_attention, "has_kv_transfer_group", lambda: True)
    for layout in KVCacheLayout:
        model = Model(mode, layout)
        for new in STEPS[:2]:
            q, k, v, _, out = model.step(new)
            assert close(out, model.dense(q, new, own=(k, v))), new
    (page, *_), there = model.tables["a"], model.free[0]
    model.cache.view(torch.uint8)[there, :, 9] = model.cache.view(torch.uint8)[page, :, 3]
    for x in dequantise(model.impl._layer(model.layer, model.cache)):
        assert torch.equal(x[there, 9], x[page, 3])
    with pytest.raises(ValueError, match=r"want stored scales at multiples of 4 bytes, got int8_per_token_head/nvfp4"):
        Model(UNEVEN).step({"a": 3})


@pytest.mark.parametrize("mode", [m for m in MODES if MODES[m].itemsize == 1])
def test_rows_lie_at_multiples_of_16_bytes(mode):
    layer = Model(mode, KVCacheLayout.BLNHC).impl._layer(
        SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(())), pages(mode)
    )
    for rows in (layer.k, layer.v):
        assert not any(s % 16 for s in rows.stride()[:3])
        assert not rows.storage_offset() % 16


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.BLHNC, KVCacheLayout.LHBNC])
@pytest.mark.parametrize("mode", [m for m in MODES if MODES[m].itemsize == 1])
def test_a_head_of_a_block_is_one_piece_that_holds_all_of_it(mode, layout):
    """Of heads whose bytes lie together in vLLM's view a connector may bring one to another place of another block."""
    model = Model(mode, layout)
    model.step({"a": 20})
    (page, *_), there = model.tables["a"], model.free[0]
    every = model.cache.view(torch.uint8)
    every[there, 1] = every[page, 0]
    for x in dequantise(model.impl._layer(model.layer, model.cache)):
        assert torch.equal(x[there, :, 1], x[page, :, 0])


def test_names_of_its_own_are_known_to_all_of_vllm():
    for name in OWN:
        assert is_known_kv_cache_dtype(name)
        mode = get_kv_quant_mode(name)
        assert (mode.name, pickle.loads(pickle.dumps(mode))) == (name, mode)
        assert not any((mode.is_per_token_head, mode.is_nvfp4, mode.is_octave))
        assert mode not in [*KVQuantMode]
    with pytest.raises(ValueError, match=r"kv_cache_dtype: want auto, .* got 'fp8_e4m3/bf16'"):
        TersekvImpl(HEADS, DIM, SCALE, KV_HEADS, kv_cache_dtype="fp8_e4m3/bf16")


@pytest.mark.parametrize("mode", MODES)
def test_the_pages_hold_the_codes_of_append(mode):
    model = Model(mode)
    _, k, v, *_ = model.step({"a": 40})
    layer = pages_of(model.cache, mode, DIM, model.layer._k_scale, model.layer._v_scale)
    plain = tersekv.PagedKVCache.allocate(
        1, PAGES, PAGE, KV_HEADS, DIM, format=layer.format, rotation=layer.rotation, k_scale=layer.k_scale,
        v_scale=layer.v_scale,
    )[0]  # fmt: skip
    table = model.tables["a"]
    slots = torch.tensor([table[i // PAGE] * PAGE + i % PAGE for i in range(40)])
    tersekv.append(k, v, plain, slots)
    for mine, want in zip(
        (layer.k, layer.v, layer.k_scale_cache, layer.v_scale_cache),
        (plain.k, plain.v, plain.k_scale_cache, plain.v_scale_cache),
        strict=True,
    ):
        if want is not None:
            mine, want = (x.flatten(0, 1)[slots].contiguous().view(torch.uint8) for x in (mine, want))
            assert torch.equal(mine, want)


@pytest.mark.parametrize("mode", ["auto", "fp8", "int8_per_token_head", "nvfp4", "fp8_e4m3/int4_per_token_head"])
def test_a_page_takes_the_bytes_of_its_format(mode):
    cache = pages(mode)
    format = pages_of(cache, mode, DIM, torch.ones(()), torch.ones(())).format
    want = tersekv.kv_bytes_per_token(format, KV_HEADS, DIM)
    assert cache[0].numel() * cache.element_size() == PAGE * want
    shape = TersekvBackend.get_kv_cache_shape(PAGES, PAGE, KV_HEADS, DIM, mode)
    assert shape == tuple(cache.shape), "releases that ask for a shape get the same pages"


@pytest.mark.parametrize(
    "options",
    [{"sliding_window": 5}, {"sinks": torch.randn(HEADS, dtype=torch.bfloat16)}, {"logits_soft_cap": 3.0}],
    ids=lambda o: next(iter(o)),
)
def test_window_sinks_and_softcap(options):
    model = Model("fp8", **options)
    names = {"sliding_window": "window", "sinks": "sinks", "logits_soft_cap": "softcap"}
    for new in ({"a": 100}, *STEPS[1:3]):
        q, k, v, _, out = model.step(new)
        assert close(out, model.dense(q, new, own=(k, v), **{names[o]: x for o, x in options.items()}))


def read(model: Model) -> torch.Tensor:
    """One more row of a request of 20 tokens, read from pages that nobody writes any more."""
    q = torch.randn(1, HEADS, DIM, generator=torch.Generator().manual_seed(5)).to(model.dtype)
    m = model.builder.build(0, CommonAttentionMetadata(
        torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 1]), torch.tensor([20], dtype=torch.int32), 1, 1, 1,
        20, torch.tensor([model.tables["a"]], dtype=torch.int32), torch.tensor([-1]), True,
    ))  # fmt: skip
    out = torch.full((1, HEADS * DIM), math.nan, dtype=model.dtype)
    return model.impl.forward(model.layer, q, None, None, model.cache, m, out).clone()


@pytest.mark.parametrize("side", ["_k_scale", "_v_scale"])
@pytest.mark.parametrize("change", ["another tensor", "in place"])
def test_scales_that_change_after_the_first_step_count(side, change):
    model = Model("fp8")
    model.step({"a": 20})
    before = read(model)
    if change == "in place":
        getattr(model.layer, side).fill_(0.5)
    else:
        setattr(model.layer, side, torch.tensor(0.5))
    after = read(model)
    fresh = Model("fp8")
    fresh.cache, fresh.layer, fresh.tables = model.cache, model.layer, model.tables
    assert torch.equal(after, read(fresh))
    assert not torch.equal(after, before)


def test_scales_of_each_head():
    model = Model("fp8")
    model.layer = SimpleNamespace(_k_scale=torch.tensor([0.02, 0.05]), _v_scale=torch.tensor([[0.03], [0.01]]))
    for new in STEPS:
        q, k, v, _, out = model.step(new)
        assert close(out, model.dense(q, new, own=(k, v))), new


@pytest.mark.parametrize(("scale", "mode", "got"), [
    (torch.tensor(0.02, dtype=torch.bfloat16), "fp8", r"1 or 2 elements for fp8_e4m3, got \[\] torch.bfloat16"),
    (torch.ones(3), "fp8", r"1 or 2 elements for fp8_e4m3, got \[3\] torch.float32"),
    (torch.ones(2), "nvfp4", r"1 elements for nvfp4, got \[2\] torch.float32"),
])  # fmt: skip
@pytest.mark.parametrize("side", ["_k_scale", "_v_scale"])
def test_a_scale_that_would_have_to_be_copied_or_does_not_fit_is_refused(side, scale, mode, got):
    model = Model(mode)
    setattr(model.layer, side, scale)
    with pytest.raises(ValueError, match=rf"layer\.{side}: want contiguous float32 with {got}"):
        model.step({"a": 3})


def test_pages_of_another_dtype_at_the_same_place_are_looked_at_anew():
    model = Model("auto")
    model.step({"a": 20})
    model.cache, model.dtype = model.cache.view(torch.float16), torch.float16
    q, *_, out = model.step({"b": 5})
    assert close(out, model.dense(q, {"b": 5}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sinks_that_are_loaded_anew_in_place_count(dtype):
    sinks = torch.nn.Parameter(torch.zeros(HEADS, dtype=dtype), requires_grad=False)
    model = Model("fp8", sinks=sinks)
    model.step({"a": 20})
    before = read(model)
    sinks.data.fill_(20.0)
    after = read(model)
    assert after.norm() < 1e-3 * before.norm()


def test_prompts_and_chunks_attend_to_their_own_rows_and_to_pages_before_them():
    model = Model("nvfp4")
    model.step({"old": 70, "chunked": 30})
    new = {"old": 1, "short": 16, "first": 64, "chunked": 40, "late": 2, "second": 80}
    q, k, v, m, out = model.step(new)
    assert (m.few, m.few_rows, m.most_rows) == (2, 17, 80)
    seen = model.dense(q, new, own=(k, v))
    assert close(out, seen)
    codes = model.dense(q, new)
    for part in (slice(17, 81), slice(81, 121), slice(123, 203)):
        assert not close(codes[part], seen[part], 2e-2), "the pages have lost digits"


def test_a_float32_model_reads_codes_alone():
    model = Model("nvfp4")
    model.dtype = torch.float32
    q, *_, m, out = model.step({"a": 90})
    assert (m.few, m.few_rows) == (0, 0)
    assert close(out, model.dense(q, {"a": 90}))


@pytest.mark.parametrize(("rows", "pad", "uniform"), [(1, (1, 1), True), (3, (2, 6), True), (3, (1, 2), False)])
def test_a_batch_that_is_padded_for_a_graph(rows, pad, uniform):
    model = Model("fp8")
    drafts = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=rows - 1))
    model.builder = TersekvMetadataBuilder(None, ["layer"], drafts, torch.device("cpu"))
    model.step({"a": 20, "b": 7})
    before = model.cache.clone()
    new = {"a": rows, "b": rows}
    q, _, _, m, out = model.step(new, pad=pad)
    real = 2 * rows
    assert close(out[:real], model.dense(q[:real], new))
    changed = (model.cache.view(torch.uint8) != before.view(torch.uint8)).any(-1).any(1).sum()
    assert changed == real, "padding writes nothing"
    assert (m.rows == {}) == uniform
    assert m.few == len(new) + pad[0]


def test_profiling_fills_the_output():
    impl, out = Model("fp8").impl, torch.full((3, HEADS, DIM), math.nan)
    assert impl.forward(None, out, out, out, torch.empty(0), None, out) is out
    assert not out.any()


def test_requests_without_rows_between_others():
    model = Model("int8_per_token_head")
    model.step({"a": 20, "b": 7, "c": 33})
    new = {"a": 2, "b": 0, "c": 1}
    q, _, _, m, out = model.step(new)
    assert m.rows
    assert close(out, model.dense(q, new))


def test_values_of_another_head_size():
    size_v = 64
    cache = pages("int8_per_token_head", size_v=size_v)
    layer = SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(()), head_size_v=size_v)
    impl = TersekvImpl(HEADS, DIM, SCALE, KV_HEADS, kv_cache_dtype="int8_per_token_head")
    builder = TersekvMetadataBuilder(None, ["layer"], None, torch.device("cpu"))
    k, v, q = torch.randn(9, KV_HEADS, DIM), torch.randn(9, KV_HEADS, size_v), torch.randn(9, HEADS, DIM)
    slots, starts, lens = torch.arange(9) + 2 * PAGE, torch.tensor([0, 9], dtype=torch.int32), torch.tensor([9])
    m = builder.build(0, CommonAttentionMetadata(
        starts, starts, lens.int(), 1, 9, 9, 9, torch.tensor([[2]], dtype=torch.int32), slots,
    ))  # fmt: skip
    impl.do_kv_cache_update(layer, k, v, cache, slots)
    out = impl.forward(layer, q, k, v, cache, m, torch.full((9, HEADS * size_v), math.nan)).view(9, HEADS, size_v)
    k, v = (x[2, :9].repeat_interleave(HEADS // KV_HEADS, 1) for x in dequantise(
        pages_of(cache, "int8_per_token_head", DIM, layer._k_scale, layer._v_scale, size_v)))  # fmt: skip
    a, b, c = (x.transpose(0, 1).double() for x in (q, k, v))
    assert close(
        out, torch.nn.functional.scaled_dot_product_attention(a, b, c, is_causal=True, scale=SCALE).transpose(0, 1)
    )


def test_a_layer_that_shares_anothers_cache_reads_nothing_but_the_cache():
    writer = Model("fp8")
    reader = Model("fp8", kv_sharing_target_layer_name="writer")
    q, k, v, m, out = writer.step({"a": 90})
    for rows in ((k + 1, v + 1), (None, None)):
        got = reader.impl.forward(writer.layer, q, *rows, writer.cache, m, torch.full_like(out, math.nan))
        assert close(got.view_as(out), writer.dense(q, {"a": 90}))


REFUSED_BATCHES = {
    "causal": [torch.tensor([True, False])],
    "dcp_local_seq_lens": [torch.ones(1)],
    "rswa_prefix_lens": [torch.ones(1)],
    "mm_req_doc_ranges": [{0: [(0, 3)]}],
    "encoder_seq_lens": [torch.ones(1)],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in REFUSED_BATCHES.items() for v in values])
def test_a_batch_in_which_rows_see_something_else_is_refused_by_name(field, value):
    common = CommonAttentionMetadata(*[None] * 9, **{field: value})
    with pytest.raises(NotImplementedError, match=f"{field}: want"):
        Model("fp8").builder.build(0, common)


def test_what_is_refused():
    make = TersekvImpl
    with pytest.raises(NotImplementedError, match="alibi_slopes"):
        make(HEADS, DIM, SCALE, KV_HEADS, [0.5] * HEADS)
    for option, value in (("chunk_lookback", 2), ("rel_bias", torch.zeros(HEADS))):
        with pytest.raises(NotImplementedError, match=f"tersekv has no {option}"):
            make(HEADS, DIM, SCALE, KV_HEADS, **{option: value})
    with pytest.raises(NotImplementedError, match="attn_type"):
        make(HEADS, DIM, SCALE, KV_HEADS, attn_type="encoder_only")
    with pytest.raises(ValueError, match="turboquant_4bit_nc"):
        make(HEADS, DIM, SCALE, KV_HEADS, kv_cache_dtype="turboquant_4bit_nc")
    with pytest.raises(ValueError, match="turboquant_4bit_nc"):
        pages_shape(PAGES, PAGE, KV_HEADS, DIM, "turboquant_4bit_nc")
    with pytest.raises(ValueError, match=r"want \[blocks, heads, tokens, 72 bytes\]"):
        pages_of(torch.zeros(2, 2, 16, 64, dtype=torch.int8), "int8_per_token_head", DIM, None, None)
    with pytest.raises(NotImplementedError, match="quantises no output"):
        Model("fp8").impl.forward(None, None, None, None, None, None, None, output_scale=torch.ones(1))
    sharing = SimpleNamespace(cache_config=SimpleNamespace(kv_sharing_fast_prefill=True))
    with pytest.raises(NotImplementedError, match="kv_sharing_fast_prefill: want False"):
        TersekvMetadataBuilder(None, ["layer"], sharing, torch.device("cpu"))


ASKED = {
    "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8", "block_size": 16, "use_mla": False,
    "has_sink": True, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": True,
    "device_capability": None, "attn_type": "decoder", "has_sliding_window": True, "use_kv_connector": True,
}  # fmt: skip


@pytest.mark.parametrize(("more", "reason"), [
    ({}, None),
    ({"head_size": 100}, "head_size"),
    ({"kv_cache_dtype": "turboquant_4bit_nc"}, "kv_cache_dtype"),
    ({"kv_cache_dtype": "nvfp4", "head_size": 40}, "multiple of 16, got 40"),
    ({"dtype": torch.float64}, "dtype"),
    ({"use_mla": True}, "MLA"),
    ({"use_sparse": True}, "sparse"),
    ({"attn_type": "encoder"}, "attention type"),
    ({"use_mm_prefix": True}, "multimodal"),
    ({"use_rswa": True}, "R-SWA"),
    ({"use_non_causal": True}, None),
    ({"use_batch_invariant": True}, None),
    ({"use_pcp": True}, "PCP"),
    ({"use_dcp": True}, "DCP"),
    ({"use_adaptive_verification": True}, "adaptive verification"),
])  # fmt: skip
def test_what_the_selector_is_told(more, reason):
    reasons = TersekvBackend.validate_configuration(**{**ASKED, **more})
    assert len(reasons) == (reason is not None), reasons
    assert reason is None or reason in reasons[0]


@pytest.mark.parametrize("flag", [False, True])
def test_batch_invariance_is_asked_of_every_call(flag, monkeypatch):
    monkeypatch.setattr(vllm_attention, "is_batch_invariant", lambda: flag)
    asked, run = [], vllm_attention.decode
    monkeypatch.setattr(vllm_attention, "decode", lambda *a, **o: asked.append(o["batch_invariant"]) or run(*a, **o))
    Model("fp8").step({"a": 1, "b": 1})
    assert asked == [flag]


def test_a_float32_query_is_for_cpus(monkeypatch):
    assert TersekvBackend.supports_dtype(torch.float32)
    monkeypatch.setattr(vllm_attention, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    assert not TersekvBackend.supports_dtype(torch.float32)
    assert TersekvBackend.supports_dtype(torch.bfloat16)


def test_the_backend_has_a_name_of_its_own_and_is_custom_too():
    register()
    register()
    assert TersekvBackend.get_name() == "TERSEKV"
    for name in ("TERSEKV", "CUSTOM"):
        assert AttentionBackendEnum[name].get_class() is TersekvBackend
    assert TersekvMetadataBuilder._cudagraph_support is AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.parametrize("name", ["TERSEKV", "TERSEKV_MLA", "TERSEKV_MLA_SPARSE"])
def test_a_process_that_has_loaded_no_plugin_unpickles_the_name(name):
    known, names = AttentionBackendEnum[name], AttentionBackendEnum._member_map_
    assert copy.deepcopy(known) is known
    config = pickle.dumps({"backend": known})
    del names[name]
    delattr(AttentionBackendEnum, name)
    try:
        backend = pickle.loads(config)["backend"]
        assert backend is AttentionBackendEnum[name]
        assert (backend is known, backend.get_path()) == (False, known.get_path())
    finally:
        names[name] = AttentionBackendEnum._value2member_map_[known.value] = known
        type.__setattr__(AttentionBackendEnum, name, known)
