"""vLLM's real engine where tokens come to a batch otherwise: as drafts, or with a cache from elsewhere."""

from __future__ import annotations

from checkpoints import llama, text
from reference import Reference, hold
from vllm_cpu import count, engine, generate


def test_rows_of_drafts(tmp_path):
    folder = llama(tmp_path)
    prompts = [text(2100 * i + 20, n) * 2 for i, n in enumerate((20, 31, 64, 80))]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    with engine(folder, kv_cache_dtype="nvfp4", dtype="float32", speculative_config=drafts) as llm:
        results = generate(llm, prompts, 40)
        drafted, taken = (count(llm, f"spec_decode_num_{what}_tokens") for what in ("draft", "accepted"))
    assert 0 < taken < drafted
    reference = Reference(folder, "nvfp4")
    hold(results, [reference.score(p, r[0]) for p, r in zip(prompts, results, strict=True)])


def test_a_cache_that_a_connector_brings(tmp_path):
    folder, prompt = llama(tmp_path / "model"), text(2120, 100)
    connector = {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "kv")},
    }  # fmt: skip
    options = {"kv_cache_dtype": "int8_per_token_head", "dtype": "float32", "kv_transfer_config": connector}
    reference, hits = Reference(folder, "int8_per_token_head"), []
    for _ in range(2):  # two engines: the second has seen nothing
        with engine(folder, **options) as llm:
            results = generate(llm, [prompt], 10)
            hits.append(count(llm, "external_prefix_cache_hits"))
        hold(results, [reference.score(prompt, results[0][0])])
    assert hits == [0, 96]
