"""vLLM's real engine over a model with latent attention: formats, chunks, prefix hits, mixed batches, drafts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import vllm_cpu  # noqa: F401 (before anything of vLLM)
from checkpoints import deepseek, text
from reference import given_back, hold, score_latents
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm_cpu import count, engine, generate

from tersekv.formats import latent_format
from tersekv.integrations import vllm_mla, vllm_mla_prefill, vllm_warm_up
from tersekv.integrations.vllm import MLA_NAME
from tersekv.integrations.vllm_mla import TersekvMLABackend, TersekvMLAImpl


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return deepseek(tmp_path_factory.mktemp("deepseek"))


@pytest.mark.parametrize(("name", "format", "block"), [("fp8", "fp8_e4m3", 16), ("fp8_ds_mla", "fp8_ds_mla", 64)])
def test_pages_chunks_mixed_batches_and_prefix_hits(model, name, format, block):
    prompts = [text(3000 * i + 7, n) for i, n in enumerate((1, block - 1, block, block + 1, 95, 96, 97, 200))]
    options = {
        "attention_backend": MLA_NAME, "kv_cache_dtype": name, "block_size": block, "dtype": "float32",
        "max_num_batched_tokens": 96,
    }  # fmt: skip
    with engine(model, **options) as llm:
        first = generate(llm, prompts, 20)
        longer = [p + tokens + text(500, 30) for p, (tokens, _) in zip(prompts[-3:], first[-3:], strict=True)]
        again = generate(llm, longer, 12)
        assert count(llm, "prefix_cache_hits") >= sum(len(p) // block * block for p in prompts[-3:])
    for results, asked in ((first, prompts), (again, longer)):
        hold(results, [score_latents(p, tokens, format) for p, (tokens, _) in zip(asked, results, strict=True)])


@pytest.mark.parametrize("most", [2 << 30, 1 << 17], ids=["all heads at once", "some heads at a time"])
def test_prompts_attend_to_their_own_rows_and_to_pages_before_them(model, monkeypatch, most):
    """In 16 bits, chunks of 96 tokens and prefix hits."""
    monkeypatch.setattr(vllm_mla_prefill, "BYTES", most)
    prompts = [text(3000 * i + 7, n) for i, n in enumerate((63, 64, 65, 200))]
    options = {"attention_backend": MLA_NAME, "dtype": "float16", "max_num_batched_tokens": 96}
    with engine(model, **options) as llm:
        first = generate(llm, prompts, 8)
        longer = [p + tokens + text(500, 30) for p, (tokens, _) in zip(prompts[-2:], first[-2:], strict=True)]
        again = generate(llm, longer, 8)
        assert count(llm, "prefix_cache_hits") >= 64 + 192
    for results, asked in ((first, prompts), (again, longer)):
        hold(results, [score_latents(p, tokens, "fp16") for p, (tokens, _) in zip(asked, results, strict=True)])


@pytest.mark.parametrize(("name", "format"), [("auto", "bf16"), ("fp8", "fp8_e4m3"), ("fp8_ds_mla", "fp8_ds_mla")])
def test_rows_are_gathered_as_the_format_gives_them_back(name, format):
    impl, g = made(name), torch.Generator().manual_seed(5)
    dtype, row = (torch.bfloat16, RANK + ROTARY) if name == "auto" else (torch.uint8, 656 if "ds" in name else 576)
    pages, scale = torch.full((12, PAGE, row), 255, dtype=torch.uint8).to(dtype), torch.tensor(0.5)
    kv_c, k_pe = (torch.randn(80, *n, generator=g).bfloat16() for n in ((RANK,), (1, ROTARY)))
    tables = torch.tensor([[7, 2, 9, 3, 5], [11, 99, 99, 99, 99], [1, 99, 99, 99, 99]], dtype=torch.int32)
    slots = torch.cat([tables[0].long()[:, None] * PAGE + torch.arange(PAGE)]).flatten()
    slots = torch.cat([slots[:70], 11 * PAGE + torch.arange(10)])
    impl.do_kv_cache_update(kv_c, k_pe, pages, slots, name, scale)
    if name == "fp8":
        pages = pages.view(torch.float8_e4m3fn)
    latent, rotary = vllm_mla_prefill.gathered(impl._layer(pages, scale), tables, [70, 9, 0], torch.float32)
    assert [len(latent), len(rotary)] == [192, 192]
    rotary_format = "bf16" if name == "fp8_ds_mla" else format
    for got, given, how in ((latent, kv_c, format), (rotary, k_pe[:, 0], rotary_format)):
        want = given_back(given.float(), latent_format(how), 0.5 if how == "fp8_e4m3" else 1.0)
        assert torch.equal(got[:70], want[:70])
        assert torch.equal(got[128:137], want[70:79])
        assert torch.equal(got[69].expand(58, -1), got[70:128])


def test_rows_of_drafts(model):
    prompts = [text(2100 * i + 20, n) * 2 for i, n in enumerate((20, 31, 64))]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    options = {"attention_backend": MLA_NAME, "kv_cache_dtype": "auto", "dtype": "float16"}
    with engine(model, speculative_config=drafts, **options) as llm:
        results = generate(llm, prompts, 30)
        drafted, taken = (count(llm, f"spec_decode_num_{what}_tokens") for what in ("draft", "accepted"))
    assert 0 < taken < drafted
    hold(results, [score_latents(p, r[0], "fp16") for p, r in zip(prompts, results, strict=True)], 1e-3, 1e-4)


def test_the_first_batch_that_a_kind_of_layer_decodes_compiles_for_all(model, monkeypatch):
    """On a GPU; layers are of one kind."""
    kinds, asked = set(), []

    def first_time(kind, device):
        return repr(kind) not in kinds and not kinds.add(repr(kind))

    def note(q, pages, metadata, options):
        asked.append(metadata.limits)
        vllm_warm_up.warm_up_latents(q, pages, metadata, options)

    monkeypatch.setattr(vllm_mla, "first_time", first_time)
    monkeypatch.setattr(vllm_mla, "warm_up_latents", note)
    prompts = [text(3000 * i + 7, 40) for i in range(2)]
    options = {"attention_backend": MLA_NAME, "dtype": "float16", "max_num_seqs": 3, "max_num_batched_tokens": 48}
    with engine(model, **options) as llm:
        results = generate(llm, prompts, 6)
    assert asked == [(3, 48, 1)]
    hold(results, [score_latents(p, r[0], "fp16") for p, r in zip(prompts, results, strict=True)])


@pytest.mark.parametrize(("name", "row"), [("auto", 576), ("fp8", 576), ("fp8_ds_mla", 656)])
def test_releases_that_ask_the_backend_get_the_shape_of_its_pages(name, row):
    assert TersekvMLABackend.get_kv_cache_shape(3, 64, 1, 576, name) == (3, 64, row)


HEADS, RANK, ROTARY, PAGE = 4, 512, 64, 16


def attend(impl, pages, q, tables, lens):
    """forward_mqa with a layer's scale and a batch's metadata."""
    layer = SimpleNamespace(_k_scale=torch.tensor(0.5))
    return impl.forward_mqa(q, pages, SimpleNamespace(decode=SimpleNamespace(block_table=tables, seq_lens=lens)), layer)


def made(kv_cache_dtype, **options):
    given = {"alibi_slopes": None, "sliding_window": None, "logits_soft_cap": None, **options}
    with set_current_vllm_config(VllmConfig()):
        return TersekvMLAImpl(
            HEADS, RANK + ROTARY, 0.1, 1, given["alibi_slopes"], given["sliding_window"], kv_cache_dtype,
            given["logits_soft_cap"], "decoder", None, q_lora_rank=None, kv_lora_rank=RANK, qk_nope_head_dim=64,
            qk_rope_head_dim=ROTARY, qk_head_dim=128, v_head_dim=64, kv_b_proj=None, indexer=given.get("indexer"),
        )  # fmt: skip


@pytest.mark.parametrize("name", ["auto", "fp8", "fp8_ds_mla"])
def test_a_cache_dealt_to_two_ranks_is_joined_by_the_lse(name):
    """As context parallelism has it: a rank holds every other page of a request, or none of a short one."""
    impl, g = made(name), torch.Generator().manual_seed(3)
    dtype, row = (torch.bfloat16, RANK + ROTARY) if name == "auto" else (torch.uint8, 656 if "ds" in name else 576)
    pages, scale = torch.zeros(8, PAGE, row, dtype=dtype), torch.tensor(0.5)
    kv_c, k_pe = (torch.randn(6 * PAGE, *n, generator=g).bfloat16() for n in ((RANK,), (1, ROTARY)))
    impl.do_kv_cache_update(kv_c, k_pe, pages, torch.arange(6 * PAGE), name, scale)
    if dtype == torch.uint8 and name == "fp8":
        pages = pages.view(torch.float8_e4m3fn)
    q = tuple(torch.randn(3, HEADS, n, generator=g).bfloat16() for n in (RANK, ROTARY))
    tables = torch.tensor([[0, 1, 2, 3], [4, 5, 0, 0], [5, 0, 0, 0]], dtype=torch.int32)
    whole, none = attend(impl, pages, q, tables, torch.tensor([64, 29, 9]))
    assert none is None
    impl.need_to_return_lse_for_decode = True
    parts = [
        attend(impl, pages, torch.cat(q, -1), tables[:, rank::2].contiguous(), torch.tensor(lens))
        for rank, lens in enumerate(([32, 16, 9], [32, 13, 0]))
    ]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    assert (lses[1, 2] == -torch.inf).all()
    joined = (outs.double() * lses.double().softmax(0)[..., None]).sum(0)
    assert (joined - whole.double()).norm() < 5e-3 * whole.double().norm()


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"sliding_window": 4}, NotImplementedError, "no sliding_window for latent attention"),
    ({"logits_soft_cap": 3.0}, NotImplementedError, "no logits_soft_cap"),
    ({"indexer": object()}, NotImplementedError, "no indexer"),
    ({"kv_cache_dtype": "fp8_e5m2"}, ValueError, "kv_cache_dtype: want auto, .* for MLA, got 'fp8_e5m2'"),
])  # fmt: skip
def test_what_is_refused(options, error, words):
    with pytest.raises(error, match=words):
        made(**{"kv_cache_dtype": "fp8", **options})


def test_what_the_selector_is_told():
    asked = {
        "head_size": RANK + ROTARY, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8_ds_mla", "block_size": 64,
        "use_mla": True, "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "device_capability": None,
        "use_per_head_quant_scales": False, "attn_type": "decoder", "use_dcp": True,
    }  # fmt: skip
    assert AttentionBackendEnum[MLA_NAME].get_class() is TersekvMLABackend
    assert TersekvMLABackend.validate_configuration(**asked) == []
    for more, reason in (
        ({"use_sparse": True}, "sparse"), ({"use_mla": False}, "MLA"), ({"block_size": 8}, "block_size"),
        ({"kv_cache_dtype": "nvfp4_ds_mla"}, "kv_cache_dtype"), ({"head_size": 320}, "head_size"),
        ({"use_pcp": True}, "PCP"), ({"has_sink": True}, "sinks"), ({"use_non_causal": True}, "non-causal"),
    ):  # fmt: skip
        assert [r for r in TersekvMLABackend.validate_configuration(**{**asked, **more}) if reason in r], more
