"""DeepSeek V3.2 and GLM-5 in vLLM's real engine: its indexer's positions into tersekv's sparse latent attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers
import vllm_cpu  # noqa: F401 (before anything of vLLM)
import vllm_indexer_cpu
from checkpoints import text
from reference import given_back
from transformers.models.deepseek_v32 import modeling_deepseek_v32
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.models import ModelRegistry, deepseek_v2
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm_cpu import count, engine, generate

from tersekv.formats import BF16, FP8_DS_MLA, latent_format
from tersekv.integrations.vllm import MLA_SPARSE_NAME
from tersekv.integrations.vllm_mla_sparse import (
    TersekvMLASparseBackend,
    TersekvMLASparseImpl,
    TersekvMLASparseMetadataBuilder,
)

TOPK, LAYERS, RANK, ROTARY = 24, 3, 512, 64
V32, GLM = "deepseek_v32", "glm_moe_dsa"
PREFIX = {V32: "DeepseekV32", GLM: "GlmMoeDsa"}
MODELING = {V32: modeling_deepseek_v32, GLM: modeling_glm_moe_dsa}
ModelRegistry.register_model("DeepseekV32ForCausalLM", deepseek_v2.DeepseekV3ForCausalLM)
ModelRegistry.register_model("GlmMoeDsaForCausalLM", deepseek_v2.GlmMoeDsaForCausalLM)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Small models with random weights, by family. GLM's second layer reads what the first one's indexer chose."""

    def write(family):
        made = tmp_path_factory.getbasetemp() / family
        if made.exists():
            return made
        own = {"index_topk_pattern": "FSF", "indexer_rope_interleave": True} if family == GLM else {}
        config = getattr(transformers, f"{PREFIX[family]}Config")(
            vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS, num_attention_heads=4,
            num_key_value_heads=4, q_lora_rank=64, kv_lora_rank=RANK, qk_nope_head_dim=64, qk_rope_head_dim=ROTARY,
            v_head_dim=64, index_n_heads=32, index_head_dim=128, index_topk=TOPK, first_k_dense_replace=LAYERS,
            max_position_embeddings=512, num_nextn_predict_layers=0, eos_token_id=None, bos_token_id=None,
            pad_token_id=None, initializer_range=0.15, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            **own,
        )  # fmt: skip
        torch.manual_seed(0)
        getattr(transformers, f"{PREFIX[family]}ForCausalLM")(config).bfloat16().save_pretrained(made)
        return made

    return write


@pytest.mark.parametrize(("family", "name", "format"), [
    (V32, "fp8_ds_mla", "fp8_ds_mla"), (V32, "fp8", "fp8_e4m3"),
    (GLM, "fp8_ds_mla", "fp8_ds_mla"),
])  # fmt: skip
def test_chunks_mixed_batches_and_prefix_hits(folder, monkeypatch, family, name, format):
    vllm_indexer_cpu.stand_in(monkeypatch)
    prompts = [text(3000 * i + 7, n) for i, n in enumerate((1, TOPK, 63, 64, 65, 200))]
    options = {"attention_backend": MLA_SPARSE_NAME, "kv_cache_dtype": name, "block_size": 64, "dtype": "float32"}
    with engine(folder(family), max_num_batched_tokens=96, **options) as llm:
        first = generate(llm, prompts, 12)
        longer = [p + tokens + text(500, 30) for p, (tokens, _) in zip(prompts[-2:], first[-2:], strict=True)]
        again = generate(llm, longer, 8)
        assert count(llm, "prefix_cache_hits") >= 64 + 192
    results, asked = first + again, prompts + longer
    reference = Reference(folder(family), family, format)
    apart = torch.cat([
        (want.exp() * (want - got)).sum(-1)
        for (_, got), want in ((r, reference.score(p, r[0])) for p, r in zip(asked, results, strict=True))
    ])  # fmt: skip
    # Where two keys tie for the last place to fp32 rounding, either is right, and the model goes on otherwise.
    assert apart.median() < 1e-5
    assert (apart > 1e-4).float().mean() < 0.05
    assert apart.max() < 0.3
    # Attention to all keys is something else.
    dense = Reference(folder(family), family, format, topk=512).score(asked[-1], results[-1][0])
    assert (dense.exp() * (dense - results[-1][1])).sum(-1).median() > 1e-2


class Reference:
    """transformers' model in fp32, whose rows, and whose indexer's queries and keys, went through their codecs."""

    def __init__(self, folder, family, format, topk=TOPK):
        self.modeling, self.format = MODELING[family], latent_format(format)
        self.model = getattr(transformers, f"{PREFIX[family]}ForCausalLM").from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        for layer in self.model.model.layers:
            attention = layer.self_attn
            attention.expand_kv = self._stored(attention.expand_kv)
            if attention.indexer is not None:
                rotate = "apply_rotary_pos_emb" + "_interleave" * (family == GLM)
                attention.indexer.forward = _select(attention.indexer, getattr(self.modeling, rotate), topk)

    @torch.no_grad()
    def score(self, prompt, tokens):
        logits = self.model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0]
        return logits[len(prompt) - 1 :].double().log_softmax(-1)

    def _stored(self, expand):
        rotary = BF16 if self.format is FP8_DS_MLA else self.format
        return lambda latent, k_pe: expand(given_back(latent, self.format, 1.0), given_back(k_pe, rotary, 1.0))


def _select(indexer, rotate, topk):
    def codes(x):
        scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(-1, keepdim=True).clamp(1e-4) / 448)))
        return (x / scale).to(torch.float8_e4m3fn).float() * scale

    def forward(hidden_states, q_resid, position_embeddings, attention_mask, *args, **kwargs):
        q = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, -1))
        k = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
        turned = rotate(q[..., :ROTARY], k[..., :ROTARY], *position_embeddings, unsqueeze_dim=2)
        q, k = (codes(torch.cat([r, x[..., ROTARY:]], -1)) for r, x in zip(turned, (q, k), strict=True))
        products = torch.einsum("bthd,bsd->bhts", q, k[:, :, 0]).relu()
        scores = torch.einsum("bhts,bth->bts", products, indexer.weights_proj(hidden_states))
        n = scores.shape[-1]
        scores = scores.masked_fill(~torch.ones(n, n).tril().bool(), -torch.inf)
        return scores.topk(min(topk, n), -1).indices.to(torch.int32)

    return forward


HEADS, PAGE = 4, 64


def made(kv_cache_dtype, chosen, **options):
    given = {"alibi_slopes": None, "sliding_window": None, "logits_soft_cap": None, "sharing": None, **options}
    positional = [given.pop(n) for n in ("alibi_slopes", "sliding_window", "logits_soft_cap", "sharing")]
    with set_current_vllm_config(given.pop("config", VllmConfig())):
        return TersekvMLASparseImpl(
            HEADS, RANK + ROTARY, 0.1, 1, *positional[:2], kv_cache_dtype, positional[2], "decoder", positional[3],
            q_lora_rank=64, kv_lora_rank=RANK, qk_nope_head_dim=64, qk_rope_head_dim=ROTARY, qk_head_dim=128,
            v_head_dim=64, kv_b_proj=None, indexer=None, topk_indices_buffer=chosen, **given,
        )  # fmt: skip


@pytest.mark.parametrize(("name", "format"), [
    ("auto", "bf16"), ("bfloat16", "bf16"), ("fp8", "fp8_e4m3"), ("fp8_ds_mla", "fp8_ds_mla"),
])  # fmt: skip
@pytest.mark.parametrize("joined", [False, True])
def test_rows_of_prompts_decodes_and_drafts_over_chosen_positions(name, format, joined):
    """vLLM's own builder's metadata, pages of a larger tensor, lists whose padding stands anywhere."""
    g = torch.Generator().manual_seed(3)
    lens, rows = [70, 5, 64, 130], [2, 1, 1, 9]
    chosen = torch.full((40, 16), 7, dtype=torch.int32)  # rows past the batch's are not looked at
    impl, dtype = made(name, chosen), torch.uint8 if name.startswith("fp8") else torch.bfloat16
    width = {"fp8_ds_mla": 656, "fp8_e4m3": 576, "bf16": 576}[format]
    # Blocks of two layers beside each other: the stride of a page is more than its bytes.
    pages = torch.full((12, 2, PAGE, width), 255, dtype=torch.uint8).to(dtype)[:, 1]
    tables = torch.tensor([[7, 2, 0], [11, 99, 99], [1, 99, 99], [4, 8, 3]], dtype=torch.int32)
    scale, latents, rotaries = torch.tensor(0.5), [], []
    for table, n in zip(tables, lens, strict=True):
        kv_c, k_pe = (torch.randn(n, *shape, generator=g).bfloat16() for shape in ((RANK,), (1, ROTARY)))
        slots = (table.long()[:, None] * PAGE + torch.arange(PAGE)).flatten()[:n]
        impl.do_kv_cache_update(kv_c, k_pe, pages, slots, name, scale)
        rotary = "bf16" if format == "fp8_ds_mla" else format
        each = 0.5 if format == "fp8_e4m3" else 1.0
        latents.append(given_back(kv_c.float(), latent_format(format), each).double())
        rotaries.append(given_back(k_pe[:, 0].float(), latent_format(rotary), each).double())
    total, ends = sum(rows), torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
    q = [torch.randn(total, HEADS, n, generator=g).bfloat16() for n in (RANK, ROTARY)]
    want, t = torch.zeros(total, HEADS, RANK, dtype=torch.float64), 0
    for request, (n, new) in enumerate(zip(lens, rows, strict=True)):
        for position in range(n - new, n):
            taken = torch.randperm(position + 1, generator=g)[: 0 if t == 2 else 10]
            entries = torch.full((16,), -1, dtype=torch.int32)
            entries[torch.randperm(16, generator=g)[: len(taken)]] = taken.to(torch.int32)
            chosen[t] = entries
            k = torch.cat([latents[request], rotaries[request]], 1)[taken]
            p = (torch.cat([x[t] for x in q], 1).double() @ k.T * 0.1).softmax(-1)
            want[t] = p @ k[:, :RANK]
            t += 1
    common = SimpleNamespace(
        causal=True, num_reqs=4, num_actual_tokens=total, max_query_len=max(rows), max_seq_len=max(lens),
        query_start_loc=ends, seq_lens=torch.tensor(lens, dtype=torch.int32), block_table_tensor=tables,
        slot_mapping=torch.zeros(total),
    )  # fmt: skip
    m = TersekvMLASparseMetadataBuilder(None, [], VllmConfig(), torch.device("cpu")).build(0, common)
    assert (m.num_decodes, m.num_decode_tokens, m.num_prefills, m.prefill) == (4, total, 0, None)
    if format == "fp8_e4m3":
        pages = pages.view(torch.float8_e4m3fn)
    query = torch.cat(q, -1) if joined else tuple(q)
    got, lse = impl.forward_mqa(query, pages, m, SimpleNamespace(_k_scale=scale))
    assert lse is None
    assert (got[2] == 0).all()
    assert (got.double() - want).norm() < 5e-3 * want.norm()
    common.causal = False
    with pytest.raises(NotImplementedError, match="causal: want True"):
        TersekvMLASparseMetadataBuilder(None, [], VllmConfig(), torch.device("cpu")).build(0, common)


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"sliding_window": 4}, NotImplementedError, "no sliding_window for sparse latent attention"),
    ({"logits_soft_cap": 3.0}, NotImplementedError, "no logits_soft_cap"),
    ({"alibi_slopes": [1.0]}, NotImplementedError, "no alibi_slopes"),
    ({"sharing": "layer"}, NotImplementedError, "no kv_sharing_target_layer_name"),
    ({"attn_sink": torch.zeros(4)}, NotImplementedError, "no attn_sink"),
    ({"kv_cache_dtype": "nvfp4_ds_mla"}, ValueError, "kv_cache_dtype: want auto, .* for MLA, got 'nvfp4_ds_mla'"),
    ({"chosen": None}, ValueError, "topk_indices_buffer: want the positions"),
])  # fmt: skip
def test_what_is_refused(options, error, words):
    with pytest.raises(error, match=words):
        made(**{"kv_cache_dtype": "fp8", "chosen": torch.zeros(8, 16, dtype=torch.int32), **options})


def test_a_scale_that_is_none_is_refused():
    config = VllmConfig()
    attention = made("fp8", torch.zeros(8, 16, dtype=torch.int32), config=config)
    layer = SimpleNamespace(impl=attention, _k_scale=torch.tensor(0.0))
    config.compilation_config.static_forward_context["layers.0"] = layer
    with pytest.raises(ValueError, match=r"layers.0.k_scale: want finite numbers above 0 for fp8_e4m3, got"):
        attention.process_weights_after_loading(torch.bfloat16)


def test_a_cache_that_is_partly_on_the_host_is_refused():
    config = VllmConfig()
    config.attention_config.hisparse_config = object()
    with pytest.raises(NotImplementedError, match=r"no attention_config\.hisparse_config"):
        made("fp8", torch.zeros(8, 16, dtype=torch.int32), config=config)


def test_what_the_selector_is_told():
    asked = {
        "head_size": RANK + ROTARY, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8_ds_mla", "block_size": 64,
        "use_mla": True, "has_sink": False, "use_sparse": True, "use_mm_prefix": False, "device_capability": None,
        "use_per_head_quant_scales": False, "attn_type": "decoder",
    }  # fmt: skip
    assert AttentionBackendEnum[MLA_SPARSE_NAME].get_class() is TersekvMLASparseBackend
    assert TersekvMLASparseBackend.validate_configuration(**asked) == []
    for more, reason in (
        ({"use_sparse": False}, "sparse"), ({"use_mla": False}, "MLA"), ({"block_size": 8}, "block_size"),
        ({"kv_cache_dtype": "nvfp4_ds_mla"}, "kv_cache_dtype"), ({"head_size": 320}, "head_size"),
        ({"use_pcp": True}, "PCP"), ({"use_dcp": True}, "DCP"), ({"has_sink": True}, "sinks"),
        ({"use_non_causal": True}, "non-causal"),
    ):  # fmt: skip
        assert [r for r in TersekvMLASparseBackend.validate_configuration(**{**asked, **more}) if reason in r], more
