"""A model computes the same whatever torch's default device is; the cache's numbers may be NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from transformers_models import over, tiny

from tersekv.integrations.transformers import TersekvCache
from tersekv.integrations.transformers_pages import Book
from tersekv.integrations.transformers_requests import Capacity


def step(model, **options):
    """Logits of a token after a padded prefill in chunks, and after beams have changed places."""
    cache = TersekvCache(model.config, **{"page_size": 4, "chunk": 16, **options})
    ids = torch.arange(2, 82).view(2, 40)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    beams = torch.tensor([1, 1])
    with torch.no_grad():
        model(ids, **over(cache), attention_mask=mask)
        cache.reorder_cache(beams)
        mask = torch.cat((mask[1:].expand(2, -1), mask[:, -1:]), 1)
        return model(ids[:, :1], **over(cache), attention_mask=mask).logits


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_numpy_number_is_a_number(family):
    model = tiny(family)
    want = step(model, max_tokens=60, num_pages=40, k_scale=0.5)
    given = {"page_size": np.int64(4), "chunk": np.int32(16), "max_tokens": np.int64(60), "num_pages": np.int16(40)}
    assert torch.equal(step(model, **given, k_scale=np.float32(0.5)), want)


def test_the_pages_are_counted_on_the_host_whatever_the_default_device():
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[1, :9] = 0

    def pieces():
        book = Book(Capacity(4, 16, None, None), [12])
        first = book.step(12, 0, 2, 40, mask, torch.device("cpu")).pieces
        book.select([1, 1])
        return [*first, *book.step(12, 40, 2, 1, None, torch.device("cpu")).pieces]

    want = pieces()
    with torch.device("meta"):
        got = pieces()
    for a, b in zip(want, got, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


@pytest.mark.parametrize("tokens", [-1.5, "1", True])
def test_half_a_token_is_not_cropped(tokens):
    cache = TersekvCache(tiny("llama").config)
    with pytest.raises(TypeError, match=r"^tokens_to_remove: want int, got "):
        cache.crop(tokens)
