"""SGLang's real engine over a model with latent attention, and its pool and backend called by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from checkpoints import YARN, deepseek, text
from reference import given_back, hold, score_latents
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from sglang_cpu import batch_of, engine, generate, runner_of
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tersekv.formats import LATENT_FORMATS, latent_format
from tersekv.integrations import sglang as plugin
from tersekv.integrations.sglang_mla import TersekvMLABackend
from tersekv.integrations.sglang_mla_pool import TersekvMLAPool

PAGES = {"bf16": 1, "fp8_e4m3": 16, "fp8_e5m2": 32, "fp8_ds_mla": 64}
HEADS, RANK, ROTARY, PAGE, SIZE = 4, 512, 64, 16, 640


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return deepseek(tmp_path_factory.mktemp("deepseek"), rope_parameters=YARN)


@pytest.mark.parametrize("format", PAGES)
def test_pages_chunks_mixed_batches_and_prefix_hits(model, format):
    page = PAGES[format]
    lengths = (1, max(page - 1, 2), page + 2, page + 1, 95, 96, 97, 200)
    prompts = [text(3000 * i + 7, n) for i, n in enumerate(lengths)]
    with engine(model, format, page_size=page, chunked_prefill_size=-(-96 // page) * page) as made:
        first, _ = generate(made, prompts, 20)
        longer = [p + tokens + text(500, 30) for p, (tokens, _) in zip(prompts[-3:], first[-3:], strict=True)]
        again, told = generate(made, longer, 12)
    assert all(x["cached_tokens"] >= len(p) // page * page for x, p in zip(told, prompts[-3:], strict=True))
    for results, asked in ((first, prompts), (again, longer)):
        hold(results, [score_latents(p, tokens, format) for p, (tokens, _) in zip(asked, results, strict=True)])


def test_prompts_attend_to_their_own_keys(model):
    """In 16 bits, with chunks of 96 tokens and prefix hits; latents in bf16 are too coarse for what is asserted."""
    prompts = [text(3000 * i + 7, n) for i, n in enumerate((15, 64, 90, 200))]
    with engine(model, "fp16", dtype="float16", chunked_prefill_size=96) as made:
        first, _ = generate(made, prompts, 8)
        longer = [p + tokens + text(500, 30) for p, (tokens, _) in zip(prompts[-2:], first[-2:], strict=True)]
        again, _ = generate(made, longer, 8)
    for results, asked in ((first, prompts), (again, longer)):
        hold(results, [score_latents(p, tokens, "fp16") for p, (tokens, _) in zip(asked, results, strict=True)])


def test_tokens_are_those_of_sglangs_own_attention(model, monkeypatch):
    """Its torch_native attends to latents too, where the layer absorbs prompts; what it wants else, no CPU has."""
    absorbed = {**AttentionBackendRegistry._handlers, "torch_native": lambda *_: AttnForwardMethod.MLA}
    monkeypatch.setattr(AttentionBackendRegistry, "_handlers", absorbed)
    prompts = [text(2100 * i + 20, n) for i, n in enumerate((3, 40, 130))]
    results = []
    for options in ({"format": "bf16"}, {"attention_backend": "torch_native", "kv_cache_dtype": "bf16"}):
        with engine(model, **options) as made:
            results.append(generate(made, prompts, 16)[0])
    for (mine, p), (theirs, q) in zip(*results, strict=True):
        assert mine == theirs
        torch.testing.assert_close(p, q, atol=2e-3, rtol=0)


def pool_of(format: str, monkeypatch, **options) -> TersekvMLAPool:
    monkeypatch.setenv("TERSEKV_SGLANG_FORMAT", format)
    sizes = {"kv_lora_rank": RANK, "qk_rope_head_dim": ROTARY, "layer_num": 2, **options}
    return TersekvMLAPool(
        size=SIZE, page_size=PAGE, dtype=torch.bfloat16, device="cpu", enable_memory_saver=False, **sizes
    )


def backend_of(pool, **given):
    runner = runner_of(pool, **given)
    runner.use_mla_backend, runner.model_config.dtype = True, torch.bfloat16
    return runner, TersekvMLABackend(runner)


def rows_of(n: int, heads: int, dim: int, seed: int) -> torch.Tensor:
    return torch.randn(n, heads, dim, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("format", LATENT_FORMATS)
def test_the_pool_holds_what_the_format_gives_back_and_moves_all_of_a_row(format, monkeypatch):
    pool, slots, more = pool_of(format, monkeypatch), torch.tensor([PAGE, 35, 600, 17]), torch.tensor([300, 40, 41, 99])
    kv_c, k_pe = rows_of(4, 1, RANK, 1), rows_of(4, 1, ROTARY, 2)
    pool.set_mla_kv_buffer(SimpleNamespace(layer_id=0), KVWriteLoc(slots), kv_c, k_pe)
    pool.set_kv_buffer(SimpleNamespace(layer_id=1), KVWriteLoc(slots), torch.cat([kv_c, k_pe], -1), None)
    pool.move_kv_cache(more, slots)
    f, rotary = latent_format(format), latent_format("bf16" if format == "fp8_ds_mla" else format)
    for layer in range(2):
        pages = pool.layer(layer)
        got = pages.ckv.flatten(0, 1).float(), pages.kpe.flatten(0, 1).float()
        if pages.ckv_scale_cache is not None:
            got = got[0] * pages.ckv_scale_cache.flatten(0, 1).repeat_interleave(128, -1), got[1]
        for have, want, how in ((got[0], kv_c, f), (got[1], k_pe, rotary)):
            want = given_back(want[:, 0].float(), how, 1.0)
            assert torch.equal(have[slots], want)
            assert torch.equal(have[more], want)
    monkeypatch.setattr(plugin, "_chosen", lambda: True)
    model = SimpleNamespace(kv_lora_rank=RANK, qk_rope_head_dim=ROTARY)
    kvc = SimpleNamespace(kv_cache_dtype=torch.bfloat16, use_mla_backend=True, model_config=model)
    told = plugin._bytes_per_token(lambda *_: 0, None, kvc, 2)
    assert pool.get_kv_size_bytes() == (SIZE + PAGE) * told


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_ds_mla"])
def test_a_graph_of_decodes_reads_no_value_on_the_host_and_attends_as_without(format, monkeypatch):
    runner, backend = backend_of(pool_of(format, monkeypatch))
    layer = RadixAttention(HEADS, RANK + ROTARY, 0.1, 1, 0, v_head_dim=RANK)

    def attend(batch, seed):
        n = len(batch.out_cache_loc)
        q, k = rows_of(n, HEADS, RANK + ROTARY, seed), rows_of(n, 1, RANK + ROTARY, seed + 1)
        return backend.forward(q.view(n, -1), k, k[..., :RANK], layer, batch)

    prompts = batch_of(runner, ForwardMode.EXTEND, [60, 150, 17], [60, 150, 17])
    backend.init_forward_metadata(prompts)
    attend(prompts, 10)
    batch = batch_of(runner, ForwardMode.DECODE, [61, 151, 18, 1], [1] * 4)
    backend.init_forward_metadata(batch)
    want = attend(batch, 20)
    backend.init_cuda_graph_state(4, 4)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.forward_metadata = None
    backend.init_forward_metadata_in_graph(batch)
    assert torch.equal(attend(batch, 20), want)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:  # raises where a value is asked for
        like = SimpleNamespace(**vars(batch))
        for name in ("seq_lens", "req_pool_indices", "out_cache_loc"):
            setattr(like, name, fake.from_tensor(getattr(batch, name)))
        backend.init_forward_metadata_in_graph(like)
        with pytest.raises(DataDependentOutputException):
            like.seq_lens.max().item()


def test_what_is_refused(monkeypatch):
    for word in ("int8_per_token_head", "fp8_e4m3+rotated", "bf16/fp16", "kept.safetensors"):
        with pytest.raises(ValueError, match=r"TERSEKV_SGLANG_FORMAT: want one of .* for latent attention, got '"):
            pool_of(word, monkeypatch)
    ours = pool_of("fp8_ds_mla", monkeypatch)
    with pytest.raises(NotImplementedError, match=r"get_mla_kv_buffer: .* gives back no rows"):
        ours.get_mla_kv_buffer(None, torch.tensor([1]))
    with pytest.raises(NotImplementedError, match="token_to_kv_pool: want tersekv's, got SimpleNamespace"):
        backend_of(SimpleNamespace())
    with pytest.raises(NotImplementedError, match=r"speculative_algorithm: want None for .* got 'NGRAM'"):
        backend_of(ours, speculative_algorithm="NGRAM")
    runner, backend = backend_of(ours)
    batch = batch_of(runner, ForwardMode.DECODE, [5], [1])
    backend.init_forward_metadata(batch)
    q, k = rows_of(1, HEADS, RANK + ROTARY, 1), rows_of(1, 1, RANK + ROTARY, 2)
    for option, value in (("logit_cap", 30.0), ("sliding_window_size", 64)):
        layer = RadixAttention(HEADS, RANK + ROTARY, 0.1, 1, 0, v_head_dim=RANK, **{option: value})
        with pytest.raises(NotImplementedError, match=f"{option}: want .* for tersekv, got {value}"):
            backend.forward(q, k, k[..., :RANK], layer, batch)
    layer = RadixAttention(HEADS, RANK + ROTARY, 0.1, 1, 0, v_head_dim=RANK)
    with pytest.raises(NotImplementedError, match="tersekv has no topk_indices"):
        backend.forward(q, k, k[..., :RANK], layer, batch, topk_indices=torch.zeros(1, 8))
