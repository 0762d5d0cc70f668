"""One matching key among 131071 others, in every format, mixed and rotated ones among them."""

from __future__ import annotations

import pytest
import torch
from needle import FAST, LIMIT, MIXED, errors, errors_of_many_rows, latent_errors

from tersekv import KV_FORMATS, LATENT_FORMATS

TOKENS = 131072 - 29  # the last page is filled in part


@pytest.mark.parametrize("fmt", [*KV_FORMATS, *MIXED])
def test_decode_finds_one_key_among_many(fmt):
    torch.manual_seed(1)
    assert max(errors(fmt, TOKENS, "cuda")) <= LIMIT


@pytest.mark.parametrize(("fmt", "dtype"), [("bf16", torch.bfloat16), ("fp8_e4m3", torch.float8_e4m3fn)])
def test_prefill_finds_one_key_among_many(fmt, dtype):
    """Of an 8-bit query scores are sums of 8-bit products."""
    torch.manual_seed(3)
    assert max(errors_of_many_rows(fmt, TOKENS, "cuda", dtype)) <= LIMIT


def test_prefill_finds_it_with_probabilities_in_8_bits():
    """Of one key, and of all the others: their probabilities are 2^-17 of its."""
    torch.manual_seed(4)
    assert max(errors_of_many_rows("fp8_e4m3", TOKENS, "cuda", torch.float8_e4m3fn, precision="fast")) <= FAST


def test_prefill_finds_it_with_a_query_in_8_bits():
    torch.manual_seed(5)
    assert max(errors_of_many_rows("int8_per_token_head", TOKENS, "cuda", precision="fast")) <= FAST


@pytest.mark.parametrize("fmt", LATENT_FORMATS)
def test_mla_decode_finds_one_key_among_many(fmt):
    torch.manual_seed(2)
    assert max(latent_errors(fmt, TOKENS, "cuda")) <= LIMIT
