"""One matching key among 131071 others, in every format."""

from __future__ import annotations

import pytest
import torch
from needle import LIMIT, errors, latent_errors

from tersekv import KV_FORMATS, LATENT_FORMATS

TOKENS = 131072 - 29  # the last page is filled in part


@pytest.mark.parametrize("fmt", KV_FORMATS)
def test_decode_finds_one_key_among_many(fmt):
    torch.manual_seed(1)
    assert max(errors(fmt, TOKENS, "cuda")) <= LIMIT


@pytest.mark.parametrize("fmt", LATENT_FORMATS)
def test_mla_decode_finds_one_key_among_many(fmt):
    torch.manual_seed(2)
    assert max(latent_errors(fmt, TOKENS, "cuda")) <= LIMIT
