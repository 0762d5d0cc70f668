"""vLLM's real engine over a model with Mamba layers beside attention with heads of 256, in the block sizes that vLLM
chooses there: those whose pages are as large as a state."""

from __future__ import annotations

import mamba_cpu  # noqa: F401 (the operators)
import pytest
import torch
import transformers
from checkpoints import text
from reference import hold, through
from vllm.model_executor.models import ModelRegistry, falcon_h1
from vllm_cpu import count, engine, generate

from tersekv.recipe import recipe

ModelRegistry.register_model("FalconH1ForCausalLM", falcon_h1.FalconH1ForCausalLM)
# vLLM's name → ours, the model's dtype, and tokens of a block: the fewest, in steps of 16, that take a state's bytes
CASES = {
    "auto": ("fp16", "float16", 272), "fp8": ("fp8_e4m3", "float32", 1056),
    "int8_per_token_head": ("int8_per_token_head", "float32", 1040),
    "int4_per_token_head": ("int4_per_token_head", "float32", 2048), "nvfp4": ("nvfp4", "float32", 1888),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder, and the model of it in fp32, whose attention sees what a format gives back."""
    torch.manual_seed(0)
    config = transformers.FalconH1Config(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=256, mamba_d_ssm=1024, mamba_n_heads=16, mamba_d_head=64, mamba_d_state=128,
        mamba_n_groups=1, mamba_d_conv=4, mamba_chunk_size=16, max_position_embeddings=4096, pad_token_id=None,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.FalconH1ForCausalLM._from_config(config, attn_implementation="eager").float().eval()
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=(3.0 if "head" in name else 1.0) * weight.shape[-1] ** -0.5)
    folder = tmp_path_factory.mktemp("falcon")
    model.save_pretrained(folder)
    return folder, model


@torch.no_grad()
def score(model, prompt, tokens, format):
    made = recipe(format)

    def attend(module, q, k, v, mask, scaling=None, **kwargs):
        k, v = (through(x, f, 1.0) for x, f in zip((k, v), made.formats, strict=True))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        return out.transpose(1, 2), None

    transformers.AttentionInterface.register("hybrid", attend)
    model.config._attn_implementation = "hybrid"
    logits = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :].double().log_softmax(-1)


@pytest.mark.parametrize("name", CASES)
def test_blocks_as_large_as_a_state(model, name):
    """Prompts end in the middle of a block; a later one finds the states and blocks of an earlier."""
    (folder, reference), (format, dtype, block) = model, CASES[name]
    prompts = [text(0, 2100), text(3000, 30)]
    options = {
        "kv_cache_dtype": name, "dtype": dtype, "max_model_len": 4096, "num_gpu_blocks_override": 20,
        "enable_prefix_caching": True, "max_num_batched_tokens": block,  # vLLM's CPU scan stores no states on its way
    }  # fmt: skip
    with engine(folder, **options) as llm:
        assert llm.llm_engine.vllm_config.cache_config.block_size == block
        results = generate(llm, prompts, 6)
        prompts.append(prompts[0] + results[0][0] + text(5000, 9))
        results += generate(llm, prompts[2:], 6)
        assert count(llm, "prefix_cache_hits") >= block
    scored = [score(reference, p, r[0], format) for p, r in zip(prompts, results, strict=True)]
    within = (2e-2, 1e-3) if dtype == "float16" else (1e-5, 1e-6)
    hold(results, scored, *within)
    if dtype == "float32":
        plain = [score(reference, p, r[0], "bf16") for p, r in zip(prompts, results, strict=True)]
        with pytest.raises(AssertionError, match=r"KL|behind"):
            hold(results, plain, *within)
