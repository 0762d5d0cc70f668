"""Drafts that see each other, as vLLM's DFlash has them: batches whose metadata says `causal=False`."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import vllm_cpu  # noqa: F401 (before anything of vLLM)
from dense_reference import dequantise
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
    get_kv_quant_mode,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from tersekv.integrations.vllm_attention import MASKED_ROWS, TersekvBackend, TersekvImpl, TersekvMetadataBuilder

HEADS, KV_HEADS, DIM, PAGE, SCALE = 4, 2, 32, 16, 0.2
MODES = {
    "auto": torch.bfloat16, "fp8": torch.uint8, "int8_per_token_head": torch.int8, "nvfp4": torch.uint8,
    "int4_per_token_head": torch.uint8,
}  # fmt: skip
LENGTHS = (40, 17, 90)  # before the drafts
TABLES = torch.tensor([[3, 9, 1, 7, 0, 0, 0, 0, 0, 0], [11, 2, 4, 5] + [0] * 6, [6, 8, 10, 12, 13, 14, 15, 16, 17, 18]])


def pages(mode):
    spec = TersekvBackend.customize_spec(
        FullAttentionSpec(
            block_size=PAGE, num_kv_heads=KV_HEADS, head_size=DIM, dtype=MODES[mode],
            kv_quant_mode=get_kv_quant_mode(mode),
        )
    )  # fmt: skip
    size = 20 * spec.page_size_bytes
    per_layer, per_block, *_ = compute_layout_strides(spec, 20, 1, KVCacheLayout.LBHNC)
    place = KVCacheTensor(size, ["a"], per_layer, per_block)
    return create_kv_cache_views(torch.zeros(size, dtype=torch.int8), spec, 20, KVCacheLayout.LBHNC, place)[0]


def metadata(builder, counts, before, causal, padding=0, captured=False):
    """A batch of requests with these new rows, and requests without any behind them."""
    starts = torch.tensor([0, *counts, *[0] * padding]).cumsum(0).to(torch.int32)
    lens = torch.tensor([n + c for n, c in zip(before, counts, strict=True)] + [0] * padding, dtype=torch.int32)
    slots = [
        int(TABLES[b, i // PAGE]) * PAGE + i % PAGE
        for b, (n, c) in enumerate(zip(before, counts, strict=True)) for i in range(n, n + c)
    ]  # fmt: skip
    table = torch.cat([TABLES[: len(counts)], TABLES.new_zeros(padding, TABLES.shape[1])]).int()
    common = CommonAttentionMetadata(
        starts, starts.clone(), lens, len(lens), sum(counts), max(counts), int(lens.max()), table, torch.tensor(slots),
        causal,
    )  # fmt: skip
    return builder.build_for_cudagraph_capture(common) if captured else builder.build(0, common)


@pytest.mark.parametrize("counts", [(4, 4, 4), (17, 17, 17), (5, 1, 33)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_every_draft_sees_all_of_its_request(mode, counts):
    torch.manual_seed(3)
    impl = TersekvImpl(HEADS, DIM, SCALE, KV_HEADS, None, kv_cache_dtype=mode)
    drafts = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=counts[0] - 1))
    builder = TersekvMetadataBuilder(None, ["layer"], drafts, torch.device("cpu"))
    layer, cache = SimpleNamespace(_k_scale=torch.tensor(0.02), _v_scale=torch.tensor(0.03)), pages(mode)
    for new, before, causal in ((LENGTHS, (0, 0, 0), True), (counts, LENGTHS, False)):
        m = metadata(builder, new, before, causal, padding=1)
        q, k, v = (torch.randn(sum(new), h, DIM).bfloat16() for h in (HEADS, KV_HEADS, KV_HEADS))
        impl.do_kv_cache_update(layer, k, v, cache, m.slot_mapping)
        out = torch.full((sum(new), HEADS * DIM), math.nan).bfloat16()
        impl.forward(layer, q, k, v, cache, m, out)
    assert m.causal is False  # DFlash asks for it
    k_all, v_all = (x.flatten(0, 1) for x in dequantise(impl._layer(layer, cache)))
    start = 0
    for b, n in enumerate(counts):
        at = torch.tensor([int(TABLES[b, i // PAGE]) * PAGE + i % PAGE for i in range(LENGTHS[b] + n)])
        rows = slice(start, start + n)
        k, v = (x[at].repeat_interleave(HEADS // KV_HEADS, 1) for x in (k_all, v_all))
        s = torch.einsum("qhd,khd->hqk", q[rows].double(), k) * SCALE
        want = torch.einsum("hqk,khd->qhd", s.softmax(-1), v)
        got = out.view(-1, HEADS, DIM)[rows].double()
        assert (got - want).norm() < 5e-3 * want.norm(), b
        seen = torch.arange(LENGTHS[b] + n) <= torch.arange(LENGTHS[b], LENGTHS[b] + n)[:, None]
        causal_out = torch.einsum("hqk,khd->qhd", s.masked_fill(~seen, -math.inf).softmax(-1), v)
        assert n == 1 or (got - causal_out).norm() > 2e-2 * want.norm()
        start += n


def test_a_graph_finds_its_mask_where_it_was():
    limits = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64))
    builder = TersekvMetadataBuilder(None, ["layer"], limits, torch.device("cpu"))
    masks = [metadata(builder, counts, LENGTHS, False).rows["mask"] for counts in ((4, 4, 4), (4, 2, 4), (4, 4, 4))]
    assert {m.data_ptr() for m in masks} == {masks[0].data_ptr()}


def test_what_is_refused():
    builder = TersekvMetadataBuilder(None, ["layer"], None, torch.device("cpu"))
    with pytest.raises(NotImplementedError, match=f"causal: want True for requests of more than {MASKED_ROWS} rows"):
        metadata(builder, (MASKED_ROWS + 1, 1, 1), (0, 0, 0), False)
    impl = TersekvImpl(HEADS, DIM, SCALE, KV_HEADS, None, 8)
    m, rows = metadata(builder, (2, 2, 2), LENGTHS, False), torch.zeros(6, HEADS, DIM)
    with pytest.raises(NotImplementedError, match="sliding_window: want none where drafts see each other, got 8"):
        impl.forward(None, rows, None, None, torch.empty(1), m, torch.zeros(6, HEADS * DIM))
