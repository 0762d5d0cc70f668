"""A cache of transformers is copied and pickled in the middle of a generation, in every format."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers_models import over, tiny

from tersekv import KV_FORMATS
from tersekv.integrations.transformers import TersekvCache

WAYS = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("family", "format"), [*[("llama", name) for name in KV_FORMATS], ("deepseek_v3", "fp8_e4m3")]
)  # fmt: skip
def test_a_copy_goes_on_as_the_cache_does(family, format, way):
    model, ids = tiny(family), torch.arange(5, 25)[None]
    cache = TersekvCache(model.config, format=format)
    with torch.inference_mode():
        model(ids, **over(cache))
        other = WAYS[way](cache)
        want = [model(ids[:, i : i + 1], **over(cache)).logits for i in range(3)]
        got = [model(ids[:, i : i + 1], **over(other)).logits for i in range(3)]
    assert torch.equal(torch.cat(want), torch.cat(got))
