"""Small random models of every family, and a cache that gives eager attention what the paged cache would hold."""

from __future__ import annotations

import torch
import transformers
from transformers import DynamicCache

from tersekv.formats import kv_format, latent_format
from tersekv.integrations.transformers import ATTENTION
from tersekv.integrations.transformers_layers import CACHE_ARGUMENT
from tersekv.testing.codes import column, decode_row, encode_row

VOCABULARY = 97
WINDOW = 24
_BASE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 128, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 32, "num_key_value_heads": 4,
    "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": (transformers.Qwen3Config, {}),
    "mistral": (transformers.MistralConfig, {"sliding_window": WINDOW}),
    "gemma2": (transformers.Gemma2Config, {"sliding_window": WINDOW, "attn_logit_softcapping": 3.0}),
    "gemma3": (transformers.Gemma3TextConfig, {"sliding_window": WINDOW, "_sliding_window_pattern": 2}),
    "gpt_oss": (
        transformers.GptOssConfig,
        {
            "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek_v2": (transformers.DeepseekV2Config, {**_LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "deepseek_v3": (transformers.DeepseekV3Config, {**_LATENT, "q_lora_rank": 32, "n_group": 2, "topk_group": 1}),
}  # fmt: skip
LATENT = ("deepseek_v2", "deepseek_v3")
CHUNK = 24
_SHARED = {
    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "sliding_window": WINDOW,
    "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
}  # fmt: skip
_MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
# Models with layers that keep a state, attend within chunks, or attend to the keys and values of others.
HYBRIDS = {
    "qwen3_5": (
        transformers.Qwen3_5TextConfig,
        {
            "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 256, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "kimi_linear": (
        transformers.KimiLinearConfig,
        {
            **_LATENT, "layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 2, "n_group": 1,
            "linear_head_dim": 16, "num_local_experts": 4, "topk_group": 1,
        },
    ),
    "lfm2": (transformers.Lfm2Config, {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}),
    "falcon_h1": (transformers.FalconH1Config, _MAMBA),
    "llama4": (
        transformers.Llama4TextConfig,
        {
            "layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": CHUNK,
            "no_rope_layers": [1, 0], "num_local_experts": 2, "intermediate_size_mlp": 96, "floor_scale": 16,
        },
    ),
    "gemma3n": (transformers.Gemma3nTextConfig, _SHARED),
    "gemma4": (transformers.Gemma4TextConfig, {**_SHARED, "global_head_dim": 16}),
}  # fmt: skip
# Models whose indexers choose the keys that a row reads; of GLM-5's, some layers read what an earlier one chose. Enough
# heads that no two scores are equal, as they are where none is positive.
_SPARSE = {
    **_LATENT, "q_lora_rank": 32, "n_group": 1, "topk_group": 1, "index_topk": 16, "index_n_heads": 16,
    "index_head_dim": 32,
}  # fmt: skip
_SHARED_LISTS = {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]}
SPARSE = {
    family: (getattr(transformers, config), {**_SPARSE, **more})
    for family, config, more in (
        ("deepseek_v32", "DeepseekV32Config", {}),
        ("glm_moe_dsa", "GlmMoeDsaConfig", _SHARED_LISTS),
        ("axk2", "AXK2Config", {}),
    )
    if hasattr(transformers, config) and hasattr(transformers.cache_utils, "DynamicIndexedLayer")
}
OTHERS = {
    "minimax": (
        transformers.MiniMaxConfig,
        {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "recurrent_gemma": (transformers.RecurrentGemmaConfig, {}),
}


def tiny(family, attention=ATTENTION, dtype=torch.float32, seed=0, **more):
    """A model with weights whose logits differ, in eval mode."""
    make, options = (FAMILIES | HYBRIDS | SPARSE | OTHERS)[family]
    torch.manual_seed(seed)
    config = make(**{**_BASE, **options, **more})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1 or "sinks" in name:
            torch.nn.init.normal_(weight, std=1.0 if "sinks" in name else 1.5 * weight.shape[-1] ** -0.5)
    return model.to(dtype).requires_grad_(False)


def over(cache):
    """The argument by which a model, or its `generate`, gets a cache."""
    return {CACHE_ARGUMENT: cache}


class SamePrecision(DynamicCache):
    """transformers' own cache whose rows went through a format's codec, by the references of `tersekv.testing`."""

    def __init__(self, config, format, k_scale=1.0, v_scale=1.0):
        super().__init__(config=config)
        self.format, self.scales = format, (k_scale, v_scale)
        self.latent = getattr(config, "kv_lora_rank", None) is not None

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        f = latent_format(self.format) if self.latent else kv_format(self.format)
        k, v = (_through(x, f, column(s)) for x, s in zip((key_states, value_states), self.scales, strict=True))
        if f.name == "fp8_ds_mla":
            v = value_states.to(torch.bfloat16).to(value_states.dtype)  # the rotary part is not quantised
        return super().update(k, v, layer_idx, *args, **kwargs)


def _through(x, f, scale):
    if f.name == "fp8_ds_mla" and x.shape[-1] % 128:
        return x
    codes, stored = encode_row(x.float(), f, scale)
    if f.scale == "block":  # the codes of the reference are packed
        assert codes.dtype == torch.uint8
    return decode_row(codes, stored, f, scale).to(x.dtype)


def distance(got, want):
    return ((got - want).norm() / want.norm()).item()
