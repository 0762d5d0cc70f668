"""The shipped demo model as a Hugging Face checkpoint: a trained model has clear logits, a random one has ties."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tersekv.demo import models
from tersekv.demo.text import encode, heldout_text

_NAMES = {
    "embed.": "model.embed_tokens.", "layers.": "model.layers.", "norm.": "model.norm.", "lm_head.": "lm_head.",
}  # fmt: skip
_PARTS = {
    "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj", "v_proj": "self_attn.v_proj", "o_proj": "self_attn.o_proj",
    "kv_a_proj": "self_attn.kv_a_proj_with_mqa", "kv_norm_gamma": "self_attn.kv_a_layernorm.weight",
    "kv_b_proj": "self_attn.kv_b_proj.weight",
}  # fmt: skip

# SGLang's CPU engine turns latent models by yarn alone; a factor of 1 changes nothing.
YARN = {
    "rope_type": "deepseek_yarn", "factor": 1.0, "rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def llama(folder: Path, model_type: str = "llama", architecture: str = "LlamaForCausalLM", **config) -> Path:
    """Write the byte-level Llama; `config`: further entries of its config.json."""
    model = models.load("llama", dtype=torch.bfloat16)
    c = model.config
    folder.mkdir(parents=True, exist_ok=True)
    save_file({_renamed(n): x.contiguous() for n, x in model.state_dict().items()}, folder / "model.safetensors")
    entries = {
        "architectures": [architecture], "model_type": model_type, "vocab_size": c.vocab_size, "hidden_size": c.dim,
        "intermediate_size": c.mlp_dim, "num_hidden_layers": c.num_layers, "num_attention_heads": c.num_q_heads,
        "num_key_value_heads": c.num_kv_heads, "head_dim": c.head_dim, "max_position_embeddings": c.max_pos,
        "rms_norm_eps": c.norm_eps, "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": None,
        "eos_token_id": None, **config,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(entries))
    return folder


def eagle(folder: Path) -> Path:
    """Write a layer that drafts for the Llama, its first: of a token and of what the model made of the one before."""
    llama(folder, architecture="LlamaForCausalLMEagle", num_hidden_layers=1)
    every = load_file(folder / "model.safetensors")
    own = _first_layer(every)
    del own["layers.0.input_layernorm.weight"]
    eye = torch.eye(models.load("llama").config.dim, dtype=torch.bfloat16)
    own |= {"fc.weight": torch.cat([eye, 0.01 * eye], 1), "fc.bias": torch.zeros(len(eye), dtype=torch.bfloat16)}
    save_file(own, folder / "model.safetensors")
    return folder


def eagle3(folder: Path) -> Path:
    """Likewise of a token and of three of the model's layers."""
    aux = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    config = {"num_hidden_layers": 1, "draft_vocab_size": 256, "eagle_config": aux}
    llama(folder, architecture="LlamaForCausalLMEagle3", **config)
    every = load_file(folder / "model.safetensors")
    own = _first_layer(every)
    own["layers.0.hidden_norm.weight"] = own["layers.0.input_layernorm.weight"].clone()
    for name in (f"layers.0.self_attn.{x}_proj.weight" for x in "qkv"):
        own[name] = torch.cat([own[name], 0.01 * own[name]], 1)
    eye = torch.eye(models.load("llama").config.dim, dtype=torch.bfloat16)
    own |= {"fc.weight": torch.cat([eye] * 3, 1), "norm.weight": every["model.norm.weight"]}
    save_file(own | {"lm_head.weight": every["lm_head.weight"]}, folder / "model.safetensors")
    return folder


def _first_layer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n.removeprefix("model."): x for n, x in tensors.items() if n.startswith("model.layers.0.")}


def deepseek(folder: Path, **config) -> Path:
    """Write the byte-level DeepSeek: latent attention, plain feed-forward layers; `config` as in `llama`."""
    model = models.load("deepseek", dtype=torch.bfloat16)
    c = model.config
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {_renamed(n): x.contiguous() for n, x in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    entries = {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": c.vocab_size,
        "hidden_size": c.dim, "intermediate_size": c.mlp_dim, "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads, "num_key_value_heads": c.num_heads, "q_lora_rank": None,
        "kv_lora_rank": c.kv_lora_rank, "qk_nope_head_dim": c.qk_nope_head_dim, "v_head_dim": c.head_dim_v,
        "qk_rope_head_dim": c.qk_rope_head_dim, "max_position_embeddings": c.max_pos, "rms_norm_eps": c.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta}, "hidden_act": "silu",
        "first_k_dense_replace": c.num_layers, "moe_layer_freq": 1,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": None, "eos_token_id": None, **config,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(entries))
    return folder


def without_rotary(folder: Path) -> Path:
    """Write the byte-level DeepSeek without the columns that are rotated, of queries and beside latents."""
    deepseek(folder, qk_rope_head_dim=0)
    c, file = models.load("deepseek").config, folder / "model.safetensors"
    tensors = load_file(file)
    for name, x in tensors.items():
        if name.endswith("q_proj.weight"):
            tensors[name] = x.unflatten(0, (c.num_heads, -1))[:, : c.qk_nope_head_dim].flatten(0, 1).contiguous()
        elif name.endswith("kv_a_proj_with_mqa.weight"):
            tensors[name] = x[: c.kv_lora_rank].contiguous()
    save_file(tensors, file)
    return folder


def _renamed(name: str) -> str:
    for mine, theirs in _NAMES.items():
        if name.startswith(mine):
            name = theirs + name.removeprefix(mine)
            break
    parts = name.split(".")
    return ".".join(_PARTS.get(p, p) for p in parts)


def text(start: int, n: int) -> list[int]:
    """n bytes of a text that the model has not seen."""
    return encode(heldout_text())[start : start + n].tolist()
