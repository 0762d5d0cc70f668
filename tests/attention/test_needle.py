"""The needle test on the CPU, in few tokens; tests/gpu runs it at 128K."""

from __future__ import annotations

import pytest
import torch
from needle import LIMIT, MIXED, errors, latent_errors

from tersekv import KV_FORMATS, LATENT_FORMATS

TOKENS = 3001


@pytest.mark.parametrize("fmt", [*KV_FORMATS, *MIXED])
def test_decode_finds_one_key_among_many(fmt):
    torch.manual_seed(1)
    assert max(errors(fmt, TOKENS, "cpu")) <= LIMIT


@pytest.mark.parametrize("fmt", LATENT_FORMATS)
def test_mla_decode_finds_one_key_among_many(fmt):
    torch.manual_seed(2)
    assert max(latent_errors(fmt, TOKENS, "cpu")) <= LIMIT
