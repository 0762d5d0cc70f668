"""SGLang's real engine over every format of the pool: borders of pages and chunks, mixed batches, prefix hits."""

from __future__ import annotations

import pytest
from checkpoints import llama, text
from reference import Reference, hold
from sglang_cpu import engine, generate

FORMATS = {  # of the pool, and a size of page
    "fp8_e4m3": 1,
    "fp8_e5m2": 16,
    "fp8_per_token_head": 16,
    "int8_per_token_head": 64,
    "int4_per_token_head": 8,
    "nvfp4": 32,
    "int4_per_token_head+rotated": 16,
    "fp8_e4m3/int4_per_token_head": 16,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("format", FORMATS)
def test_pages_chunks_mixed_batches_and_prefix_hits(model, format):
    page = FORMATS[format]
    reference = Reference(model, format)
    lengths = (1, max(page - 1, 2), page + 2, page + 1, 95, 96, 97, 200)
    prompts = [text(3000 * i + 7, n) for i, n in enumerate(lengths)]
    with engine(model, format, page_size=page, chunked_prefill_size=-(-96 // page) * page) as made:
        first, _ = generate(made, prompts, 20)
        # The longest three again, with what was said and more: what their pages hold is not computed again.
        longer = [p + tokens + text(500, 30) for p, (tokens, _) in zip(prompts[-3:], first[-3:], strict=True)]
        again, told = generate(made, longer, 12)
    assert all(x["cached_tokens"] >= len(p) // page * page for x, p in zip(told, prompts[-3:], strict=True))
    hold(first, [reference.score(p, tokens) for p, (tokens, _) in zip(prompts, first, strict=True)])
    hold(again, [reference.score(p, tokens) for p, (tokens, _) in zip(longer, again, strict=True)])
