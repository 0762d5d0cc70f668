"""What SGLang is given, called by hand: the pool, what it tells of its size, graphs, refusals.

No engine on a CPU comes to these.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from dense_reference import dequantise
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator, HybridSWAPoolConfigurator
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, record_fields
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from sglang_cpu import batch_of, runner_of
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import tersekv
from tersekv.integrations import sglang as plugin
from tersekv.integrations import sglang_batch, sglang_pool
from tersekv.integrations.sglang_attention import TersekvBackend
from tersekv.integrations.sglang_pool import TersekvPool, chosen

HEADS, KV_HEADS, DIM, DIM_V, PAGE, SIZE, LAYERS = 4, 2, 64, 32, 16, 640, 2
FORMATS = [
    *tersekv.KV_FORMATS, "nvfp4+rotated", "fp8_e4m3/int4_per_token_head", "int8_per_token_head/nvfp4+rotated",
    "bf16/nvfp4",
]  # fmt: skip


def pool_of(format: str, monkeypatch, page: int = PAGE, **options) -> TersekvPool:
    monkeypatch.setenv("TERSEKV_SGLANG_FORMAT", format)
    sizes = {"head_num": KV_HEADS, "head_dim": DIM, "v_head_dim": DIM_V, "layer_num": LAYERS}
    return TersekvPool(
        size=SIZE, page_size=page, dtype=torch.bfloat16, device="cpu", enable_memory_saver=False, **sizes | options
    )


def rows_of(n: int, heads: int, dim: int, seed: int) -> torch.Tensor:
    return torch.randn(n, heads, dim, generator=torch.Generator().manual_seed(seed)).bfloat16()


def attend(backend, layer, batch, seed: int, **more) -> torch.Tensor:
    n = batch.out_cache_loc.shape[0]
    q, k, v = (
        rows_of(n, h, d, seed + i) for i, (h, d) in enumerate(((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM_V)))
    )
    return backend.forward(q.view(n, -1), k, v, layer, batch, **more)


def layer_of(index: int = 0, **options) -> RadixAttention:
    return RadixAttention(HEADS, DIM, 0.125, KV_HEADS, index, v_head_dim=DIM_V, **options)


@pytest.mark.parametrize("format", FORMATS)
def test_the_pool_holds_the_codes_of_append_and_no_bytes_more(format, monkeypatch):
    pool = pool_of(format, monkeypatch)
    what = chosen(torch.bfloat16, LAYERS)
    (k, v), rotated = what.kinds[0], what.rotated
    slots = torch.tensor([PAGE, 35, 600, 17])
    rows = rows_of(4, KV_HEADS, DIM, 1), rows_of(4, KV_HEADS, DIM_V, 2)
    for i in range(LAYERS):
        pool.set_kv_buffer(layer_of(i), KVWriteLoc(slots), *rows, 0.02, 0.03)
    # Formats without a scale of the tensor take no notice of the checkpoint's.
    scales = {n: s for n, s, f in (("k_scale", 0.02, k), ("v_scale", 0.03, v)) if f.scale in ("tensor", "block")}
    own = tersekv.PagedKVCache.allocate(
        1, SIZE // PAGE + 1, PAGE, KV_HEADS, DIM, head_dim_v=DIM_V, format=(k.name, v.name),
        rotation="hadamard" if rotated else None, **scales,
    )  # fmt: skip
    tersekv.append(*rows, own[0], slots)
    for i in range(LAYERS):
        for got, want in zip(dequantise(pool.layer(i, 0.02, 0.03)), dequantise(own[0]), strict=True):
            assert torch.equal(got, want)
    assert sum(pool.get_kv_size_bytes()) == (SIZE + PAGE) * LAYERS * own.bytes_per_token


@pytest.mark.parametrize("format", ["int8_per_token_head", "nvfp4", "fp8_e4m3/int4_per_token_head"])
def test_what_moves_slots_moves_all_of_a_row(format, monkeypatch):
    monkeypatch.setenv("SGLANG_NATIVE_MOVE_KV_CACHE", "1")
    pool = pool_of(format, monkeypatch)
    slots = torch.tensor([20, 21])
    pool.set_kv_buffer(layer_of(), KVWriteLoc(slots), rows_of(2, KV_HEADS, DIM, 1), rows_of(2, KV_HEADS, DIM_V, 2))
    pool.move_kv_cache(torch.tensor([300, 40]), slots)
    for x in dequantise(pool.layer(0)):
        rows = x.flatten(0, 1)
        assert rows[slots].any()
        assert torch.equal(rows[[300, 40]], rows[slots])


def test_sglang_is_told_what_a_token_takes(monkeypatch):
    model = SimpleNamespace(
        get_num_kv_heads=lambda tp, dcp=1: 8 // tp, head_dim=128, v_head_dim=128, is_hybrid_swa=True,
        get_swa_num_kv_heads=lambda tp: 4 // tp, swa_head_dim=64, swa_v_head_dim=64, num_hidden_layers=32,
    )  # fmt: skip
    kvc = SimpleNamespace(
        kv_cache_dtype=torch.bfloat16, use_mla_backend=False, model_config=model,
        layer_info=SimpleNamespace(start_layer=0, end_layer=32),
    )  # fmt: skip
    parallel = SimpleNamespace(attn_tp_size=2, attn_dcp_size=1, pp_size=1)
    monkeypatch.setattr(sglang_pool, "get_parallel", lambda: parallel)
    monkeypatch.setattr(plugin, "_chosen", lambda: True)
    for format, full, window in (("nvfp4", 4 * 2 * 72, 2 * 2 * 36), ("int8_per_token_head", 4 * 2 * 132, 2 * 2 * 68)):
        monkeypatch.setenv("TERSEKV_SGLANG_FORMAT", format)
        assert plugin._bytes_per_token(lambda *a: 7, None, kvc, 32) == 32 * full
        told = SimpleNamespace(_recompute_cell_size=lambda: None)
        plugin._bytes_of_both_pools(lambda *a: None, told, kvc)
        assert (told._full_per_token, told._swa_per_token) == (full, window)
    monkeypatch.setattr(plugin, "_chosen", lambda: False)
    assert plugin._bytes_per_token(lambda *a: 7, None, kvc, 32) == 7


def test_installing_is_enough():
    load_plugins()
    plugin.register()  # again
    assert plugin.NAME in ATTENTION_BACKENDS
    for seam in (
        KVCacheConfigurator._resolve_kv_pool_class, DefaultPoolConfigurator._compute_cell_size,
        HybridSWAPoolConfigurator.__init__, DraftBackendFactory._create_backend,
    ):  # fmt: skip
        assert not hasattr(seam.__wrapped__, "__wrapped__")


@pytest.mark.parametrize("backends", [("tersekv", "triton"), ("fa3", "tersekv")])
def test_a_backend_that_would_read_a_pool_of_ours_is_refused(backends, monkeypatch):
    monkeypatch.setattr("sglang.srt.runtime_context.attention_backends", lambda: backends)
    with pytest.raises(ValueError, match="attention_backend: want tersekv for prefill and decode"):
        plugin._pool_class(None, None, kind="mha", default=MHATokenToKVPool)


def test_a_pool_stays_sglangs_where_another_backend_attends(monkeypatch):
    monkeypatch.setattr("sglang.srt.runtime_context.attention_backends", lambda: ("fa3", "fa3"))
    given = {"kind": "mha", "default": MHATokenToKVPool}
    assert plugin._pool_class(lambda self, kind, default: default, None, **given) is MHATokenToKVPool


class Model:
    """Two layers, the second with a window: over one pool, or each over its own."""

    def __init__(self, two_pools: bool, monkeypatch) -> None:
        pool = pool_of("int8_per_token_head", monkeypatch)
        if two_pools:
            sizes = {"head_num": KV_HEADS, "head_dim": DIM, "v_head_dim": DIM_V}
            pool = SWAKVPool(
                SIZE, SIZE, PAGE, torch.bfloat16, swa_attention_layer_ids=[1], full_attention_layer_ids=[0],
                device="cpu", token_to_kv_pool_class=TersekvPool, **sizes,
            )  # fmt: skip
            # Pages of the other pool lie in the opposite order; 0 stays.
            n = torch.arange(SIZE + PAGE)
            pool.register_mapping(torch.where(n < PAGE, n, (SIZE // PAGE + 1 - n // PAGE) * PAGE + n % PAGE))
        self.runner, self.layers = runner_of(pool), [layer_of(), layer_of(1, sliding_window_size=39)]
        self.backend = TersekvBackend(self.runner)

    def step(self, mode: ForwardMode, lens: list[int], new: list[int], seed: int):
        batch = batch_of(self.runner, mode, lens, new)
        self.backend.init_forward_metadata(batch)
        return batch, self.attend(batch, seed)

    def attend(self, batch, seed: int) -> list[torch.Tensor]:
        return [attend(self.backend, layer, batch, seed) for layer in self.layers]


def test_layers_with_a_window_attend_alike_over_a_pool_of_their_own(monkeypatch):
    one, two = Model(False, monkeypatch), Model(True, monkeypatch)
    for mode, lens, new in (
        (ForwardMode.EXTEND, [60, 150, 17], [60, 150, 17]),
        (ForwardMode.MIXED, [61, 152, 18, 40], [1, 2, 1, 40]),
        (ForwardMode.DECODE, [62, 153, 19, 41], [1] * 4),
    ):
        (_, want), (_, got) = (model.step(mode, lens, new, seed=lens[0]) for model in (one, two))
        assert all(map(torch.equal, got, want))
        assert not torch.equal(*got)


@pytest.mark.parametrize("two_pools", [False, True])
def test_a_graph_of_decodes_reads_no_value_on_the_host_and_attends_as_without(two_pools, monkeypatch):
    model = Model(two_pools, monkeypatch)
    prompts, _ = model.step(ForwardMode.EXTEND, [60, 150, 17], [60, 150, 17], 10)
    batch, want = model.step(ForwardMode.DECODE, [61, 151, 18, 1], [1, 1, 1, 1], 20)
    model.backend.init_cuda_graph_state(4, 4)
    model.backend.forward_metadata = None
    model.backend.init_forward_metadata_in_graph(batch)
    assert all(map(torch.equal, model.attend(batch, 20), want))
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:  # raises where a value is asked for
        like = SimpleNamespace(**vars(batch))
        for name in ("seq_lens", "req_pool_indices", "out_cache_loc"):
            setattr(like, name, fake.from_tensor(getattr(batch, name)))
        model.backend.init_forward_metadata_in_graph(like)
        with pytest.raises(DataDependentOutputException):
            like.seq_lens.max().item()
    with pytest.raises(NotImplementedError, match="forward_mode: want DECODE in a graph, got EXTEND"):
        model.backend.init_forward_metadata_in_graph(prompts)


def test_rows_that_the_model_wrote_itself_are_read_from_the_pool(monkeypatch):
    """On CUDA, models do that where the pool's dtype is bfloat16."""
    pool = pool_of("bf16", monkeypatch)
    assert pool.dtype == torch.bfloat16
    assert all(pool_of(f, monkeypatch).dtype != torch.bfloat16 for f in FORMATS if f != "bf16")
    runner, layer = runner_of(pool), layer_of()
    backend = TersekvBackend(runner)
    batch = batch_of(runner, ForwardMode.EXTEND, [40, 33], [40, 33])
    backend.init_forward_metadata(batch)
    want = attend(backend, layer, batch, 5)
    keys, values = (x[batch.out_cache_loc].clone() for x in pool.get_kv_buffer(0))
    for x in (*pool.k_buffer, *pool.v_buffer):
        x.zero_()
    pool.get_key_buffer(0).view(SIZE + PAGE, -1)[batch.out_cache_loc] = keys.flatten(1)
    pool.get_value_buffer(0).view(SIZE + PAGE, -1)[batch.out_cache_loc] = values.flatten(1)
    q = rows_of(73, HEADS, DIM, 5).view(73, -1)
    got = backend.forward(q, torch.full_like(keys, torch.nan), values, layer, batch, save_kv_cache=False)
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-2)


def test_no_request_is_no_work(monkeypatch):
    runner = runner_of(pool_of("nvfp4", monkeypatch))
    backend = TersekvBackend(runner)
    idle = batch_of(runner, ForwardMode.IDLE, [1], [1])
    idle.seq_lens = idle.req_pool_indices = torch.empty(0, dtype=torch.int64)
    backend.init_forward_metadata(idle)
    assert backend.forward(torch.empty(0, HEADS * DIM), None, None, layer_of(), idle).shape == (0, HEADS * DIM_V)


@pytest.mark.parametrize(("option", "value"), [
    ("speculative_algorithm", "DFLASH"), ("dllm_algorithm", "LowConfidence"), ("disaggregation_mode", "prefill"),
    ("hicache_storage_backend", "mooncake"), ("enable_lmcache", True), ("enable_unified_memory", True), ("dcp_size", 2),
    ("enable_page_major_kv_layout", True), ("enable_two_batch_overlap", True),
])  # fmt: skip
def test_options_are_refused_by_name(option, value, monkeypatch):
    with pytest.raises(NotImplementedError, match=f"{option}: want .* for attention_backend=tersekv, got {value!r}"):
        TersekvBackend(runner_of(pool_of("nvfp4", monkeypatch), **{option: value}))


def test_every_option_that_is_refused_is_one_of_sglangs():
    fields = {f.name for f in record_fields(ServerArgs)}
    read = {"kv_cache_dtype", "cuda_graph_config", "speculative_eagle_topk", "speculative_draft_attention_backend"}
    assert {*sglang_batch.REFUSED, *sglang_batch.REFUSED_BESIDE_A_DRAFT_MODEL, *read} <= fields


def test_pools_and_graphs_that_are_refused(monkeypatch):
    ours = pool_of("nvfp4", monkeypatch)
    with pytest.raises(NotImplementedError, match="token_to_kv_pool: want tersekv's, got SimpleNamespace"):
        TersekvBackend(runner_of(SimpleNamespace()))
    full = SimpleNamespace(prefill=SimpleNamespace(backend="full"))
    with pytest.raises(NotImplementedError, match=r"cuda_graph_backend_prefill: want .* got 'full'"):
        TersekvBackend(runner_of(ours, cuda_graph_config=full))
    with pytest.raises(ValueError, match=r"kv_cache_dtype: want 'auto' .* got 'fp8_e5m2'"):
        TersekvBackend(runner_of(ours, kv_cache_dtype="fp8_e5m2"))
    with pytest.raises(NotImplementedError, match="SGLANG_ENABLE_POST_CAPTURE_KV_SIZING: want 0"):
        pool_of("nvfp4", monkeypatch, post_capture_active=True)
    with pytest.raises(NotImplementedError, match="layout 'nhd'"):
        pool_of("nvfp4", monkeypatch, kv_cache_layout="page_major")
    with pytest.raises(ValueError, match="head_dim: want a positive multiple of 16 for nvfp4, got 40"):
        pool_of("nvfp4", monkeypatch, head_dim=40)


@pytest.mark.parametrize("word", ["int8", "nvfp4+", "nvfp4+turned", "a/b", "nvfp4/nvfp4/nvfp4", "fp8_ds_mla"])
def test_a_format_that_is_none_is_refused(word, monkeypatch):
    with pytest.raises(ValueError, match=r"TERSEKV_SGLANG_FORMAT: want .*, got '"):
        pool_of(word, monkeypatch)


def test_a_pool_in_fp32_wants_a_format(monkeypatch):
    monkeypatch.delenv("TERSEKV_SGLANG_FORMAT", raising=False)
    assert chosen(torch.float8_e5m2, 1).kinds[0].k.name == "fp8_e5m2"
    with pytest.raises(ValueError, match=r"got None for a pool of torch\.float32"):
        chosen(torch.float32, 1)


@pytest.mark.parametrize("word", ["bf16+rotated", "fp16+rotated"])
def test_models_do_not_write_rows_that_lie_otherwise_than_they_come(word, monkeypatch):
    """SGLang's models do so on CUDA, where the pool or its buffers are in bfloat16."""
    pool = pool_of(word, monkeypatch)
    assert pool.dtype == pool.store_dtype == pool.get_key_buffer(0).dtype == torch.uint8
    assert pool_of("bf16", monkeypatch).dtype == torch.bfloat16


@pytest.mark.parametrize("new", [1, 40])
def test_a_layer_without_rows_reads_anothers_by_the_scales_of_that_one(new, monkeypatch):
    runner = runner_of(pool_of("fp8_e4m3", monkeypatch))
    backend = TersekvBackend(runner)
    writer, reader = layer_of(), layer_of()
    writer.k_scale, writer.v_scale, reader.k_scale = 0.02, 0.03, 0.5
    batch = batch_of(runner, ForwardMode.EXTEND, [40], [40])
    backend.init_forward_metadata(batch)
    attend(backend, writer, batch, 1)
    if new == 1:
        batch = batch_of(runner, ForwardMode.DECODE, [40], [1])
        backend.init_forward_metadata(batch)
    q = rows_of(new, HEADS, DIM, 9).view(new, -1)
    want = backend.forward(
        q, rows_of(new, KV_HEADS, DIM, 2), rows_of(new, KV_HEADS, DIM_V, 3), writer, batch, save_kv_cache=False
    )
    got = backend.forward(q, None, None, reader, batch, save_kv_cache=False)
    assert torch.equal(got, want)


@pytest.mark.parametrize(("option", "value"), [
    ("is_cross_attention", True), ("attn_type", AttentionType.ENCODER_ONLY), ("logit_capping_method", "sigmoid"),
    ("pos_encoding_mode", "ALIBI"),
])  # fmt: skip
def test_layers_are_refused_by_name(option, value, monkeypatch):
    runner = runner_of(pool_of("nvfp4", monkeypatch))
    backend, batch = TersekvBackend(runner), batch_of(runner, ForwardMode.DECODE, [5], [1])
    backend.init_forward_metadata(batch)
    with pytest.raises(NotImplementedError, match=f"{option}: want .* for tersekv"):
        attend(backend, layer_of(**{option: value}), batch, 1)


def test_calls_are_refused_by_name(monkeypatch):
    runner = runner_of(pool_of("nvfp4", monkeypatch))
    backend, batch = TersekvBackend(runner), batch_of(runner, ForwardMode.DECODE, [5], [1])
    backend.init_forward_metadata(batch)
    with pytest.raises(NotImplementedError, match="tersekv has no k_rope"):
        attend(backend, layer_of(), batch, 1, k_rope=torch.zeros(1))
    batch.encoder_lens = torch.tensor([3, 4])
    with pytest.raises(NotImplementedError, match="tersekv has no encoder_lens"):
        attend(backend, layer_of(), batch, 1)
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    with pytest.raises(
        NotImplementedError, match="forward_mode: want DECODE, EXTEND, MIXED or SPLIT_PREFILL, got TARGET"
    ):
        backend.init_forward_metadata(batch)
    backend.chunked = True
    with pytest.raises(NotImplementedError, match="use_irope: want False"):
        attend(backend, layer_of(use_irope=True), batch_of(runner, ForwardMode.DECODE, [5], [1]), 1)
