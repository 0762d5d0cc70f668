"""vLLM's real engine over every cache format: borders of pages and chunks, mixed batches, prefix hits, preemption."""

from __future__ import annotations

import pytest
from checkpoints import llama, text
from reference import Reference, hold
from vllm_cpu import count, engine, generate

from tersekv.integrations import vllm_attention

FORMATS = {  # vLLM's name → ours, and a size of block
    "fp8": ("fp8_e4m3", 16),
    "fp8_e5m2": ("fp8_e5m2", 32),
    "fp8_per_token_head": ("fp8_per_token_head", 16),
    "int8_per_token_head": ("int8_per_token_head", 64),
    "nvfp4": ("nvfp4", 8),
    "int4_per_token_head+rotated": ("int4_per_token_head+rotated", 24),
    "fp8_e4m3/int4_per_token_head": ("fp8_e4m3/int4_per_token_head", 16),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("name", FORMATS)
def test_pages_chunks_mixed_batches_and_prefix_hits(model, name):
    format, block = FORMATS[name]
    reference = Reference(model, format)
    lengths = (1, block - 1, block, block + 1, 95, 96, 97, 200)
    prompts = [text(3000 * i + 7, n) for i, n in enumerate(lengths)]
    options = {"kv_cache_dtype": name, "block_size": block, "dtype": "float32", "max_num_batched_tokens": 96}
    with engine(model, **options) as llm:
        first = generate(llm, prompts, 20)
        # The longest three again, with what was said and more: what their blocks hold is not computed again.
        longer = [p + tokens + text(500, 30) for p, (tokens, _) in zip(prompts[-3:], first[-3:], strict=True)]
        again = generate(llm, longer, 12)
        assert count(llm, "prefix_cache_hits") >= sum(len(p) // block * block for p in prompts[-3:])
    hold(first, [reference.score(p, tokens) for p, (tokens, _) in zip(prompts, first, strict=True)])
    hold(again, [reference.score(p, tokens) for p, (tokens, _) in zip(longer, again, strict=True)])


@pytest.mark.parametrize(("dtype", "format", "most"), [("bfloat16", "bf16", 2e-2), ("float16", "fp16", 1e-4)])
def test_pages_of_16_bits(model, dtype, format, most):
    """The model computes in 16 bits too, so that distributions are near the reference's and not equal to it."""
    reference = Reference(model, format)
    prompts = [text(2000 * i + 40, n) for i, n in enumerate((1, 15, 16, 17, 63, 64, 65, 200))]
    with engine(model, kv_cache_dtype="auto", dtype=dtype, max_num_batched_tokens=96) as llm:
        results = generate(llm, prompts, 20)
    hold(
        results, [reference.score(p, tokens) for p, (tokens, _) in zip(prompts, results, strict=True)], most, most / 20
    )


def test_a_prompt_attends_to_its_own_rows_as_they_came(model):
    reference = Reference(model, "nvfp4")
    prompts = [text(2500 * i + 90, n) for i, n in enumerate((16, 65, 200))]
    with engine(model, kv_cache_dtype="nvfp4", dtype="float16", enable_prefix_caching=False) as llm:
        results = generate(llm, prompts, 8)
    own = [len(p) if len(p) > vllm_attention.DECODE_ROWS else 0 for p in prompts]
    hold(results, [reference.score(p, r[0], n) for p, r, n in zip(prompts, results, own, strict=True)], 2e-2, 2e-3)
    with pytest.raises(AssertionError, match=r"KL|behind"):
        hold(results[1:], [reference.score(p, r[0]) for p, r in zip(prompts[1:], results[1:], strict=True)], 2e-2, 2e-3)


def test_requests_that_are_preempted_go_on_as_if_they_had_not_been(model):
    reference = Reference(model, "int8_per_token_head")
    prompts = [text(1500 * i + 11, 40 + i) for i in range(6)]
    options = {"kv_cache_dtype": "int8_per_token_head", "dtype": "float32", "enable_prefix_caching": False}
    with engine(
        model, num_gpu_blocks_override=34, max_model_len=256, **options
    ) as llm:  # 33 blocks of 16: 88 tokens each
        results = generate(llm, prompts, 60)
        assert count(llm, "num_preemptions") > 0
    hold(results, [reference.score(p, tokens) for p, (tokens, _) in zip(prompts, results, strict=True)])
