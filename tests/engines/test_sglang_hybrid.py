"""SGLang's real engine over Qwen3-Next: layers with states beside layers with pages."""

from __future__ import annotations

import pytest
import sglang_linear  # noqa: F401
import torch
import transformers
from checkpoints import text
from reference import hold, through
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang_cpu import engine, generate

from tersekv.recipe import recipe

PROMPTS = [text(2100 * i + 20, n) for i, n in enumerate((3, 40, 75))]
# SGLang keeps states in its prefix tree on a CPU for pages of one token alone.
OPTIONS = {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True, "chunked_prefill_size": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, layer_types=["linear_attention", "full_attention"] * 2,
        full_attention_interval=2, eos_token_id=None, bos_token_id=None, max_position_embeddings=2048,
    )  # fmt: skip
    made = transformers.Qwen3NextForCausalLM._from_config(config).float()
    for weight in made.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=1.5 * weight.shape[-1] ** -0.5)
    folder = tmp_path_factory.mktemp("qwen3_next")
    made.save_pretrained(folder)
    return folder


def run(model, format=None, **options):
    with engine(model, format, **OPTIONS, **options) as made:
        first, _ = generate(made, PROMPTS, 12)
        # The longest again, with what was said and more.
        prompt = PROMPTS[-1] + first[-1][0] + text(500, 10)
        again, told = generate(made, [prompt], 8)
    return first + again, told[0]["cached_tokens"]


@pytest.fixture(scope="module")
def theirs(model):
    """By SGLang's own attention, over its own pool."""
    return run(model, attention_backend="torch_native", kv_cache_dtype="bf16", page_size=1)


def test_tokens_are_those_of_sglangs_own_attention(model, theirs):
    (want, cached), (got, ours) = theirs, run(model, "bf16", page_size=1)
    assert ours == cached > 0
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]
    hold(got, [rows for _, rows in want], 1e-5, 1e-5)


@pytest.mark.parametrize("format", ["int8_per_token_head", "fp8_e4m3/int4_per_token_head", "nvfp4+rotated"])
def test_distributions_are_those_of_its_own_attention_over_the_formats_rows(model, format, monkeypatch):
    made, write = recipe(format), MHATokenToKVPool.set_kv_buffer

    def coded(pool, layer, where, k, v, *args, **options):
        k, v = (
            through(x.transpose(0, 1)[None], f, 1.0, made.rotated)[0].transpose(0, 1)
            for x, f in zip((k, v), made.formats, strict=True)
        )
        write(pool, layer, where, k, v, *args, **options)

    got, _ = run(model, format, page_size=1)
    monkeypatch.setattr(MHATokenToKVPool, "set_kv_buffer", coded)
    want, _ = run(model, attention_backend="torch_native", page_size=1)
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]
    hold(got, [rows for _, rows in want])


def test_pages_of_many_tokens(model, theirs):
    got, _ = run(model, "bf16", page_size=16, disable_radix_cache=True)
    assert [tokens for tokens, _ in got[:3]] == [tokens for tokens, _ in theirs[0][:3]]
