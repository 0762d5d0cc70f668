"""vLLM's real engine over latents without a rotary part: pages of 512 columns, as GLM-5.3-Flash has, whose own linear
attention and indexer vLLM runs on GPUs alone."""

from __future__ import annotations

import pytest
import vllm_cpu  # noqa: F401 (before anything of vLLM)
from checkpoints import text, without_rotary
from reference import hold, score_latents
from vllm.model_executor.models import deepseek_v2
from vllm_cpu import count, engine, generate

from tersekv.integrations.vllm import MLA_NAME


@pytest.mark.parametrize(("name", "dtype", "format"), [
    ("fp8", "float32", "fp8_e4m3"), ("fp8_ds_mla", "float32", "fp8_ds_mla"), ("auto", "float16", "fp16"),
])  # fmt: skip
def test_pages_chunks_and_prefix_hits(tmp_path, monkeypatch, name, dtype, format):
    monkeypatch.setattr(deepseek_v2, "get_rope", lambda *args, **kwargs: None)
    prompts = [text(3000 * i + 7, n) for i, n in enumerate((1, 63, 64, 97, 200))]
    options = {"attention_backend": MLA_NAME, "kv_cache_dtype": name, "dtype": dtype, "block_size": 64}
    with engine(without_rotary(tmp_path), max_num_batched_tokens=96, **options) as llm:
        results = generate(llm, prompts, 12)
        prompts.append(prompts[-1] + results[-1][0] + text(500, 30))
        results += generate(llm, prompts[-1:], 8)
        assert count(llm, "prefix_cache_hits") >= 192
    scored = [score_latents(p, r[0], format, rotated=False) for p, r in zip(prompts, results, strict=True)]
    hold(results, scored)
