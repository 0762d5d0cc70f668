"""What transformers calls the cache: `past_key_values` before 5.24, then `cache`; the old name works, and warns."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from script import ROOT
from transformers_models import VOCABULARY, over, tiny

from tersekv.integrations.transformers import TersekvCache, TersekvStaticCache
from tersekv.integrations.transformers_eval import PagedModel
from tersekv.integrations.transformers_layers import CACHE_ARGUMENT

NAMES = sorted({"past_key_values", CACHE_ARGUMENT})
CACHES = {
    "paged": lambda config: TersekvCache(config, page_size=8),
    "static": lambda config: TersekvStaticCache(config, page_size=8, max_tokens=64),
}
cache_of = pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)


@pytest.fixture
def ids():
    return torch.randint(2, VOCABULARY, (2, 21), generator=torch.Generator().manual_seed(4))


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@cache_of
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
def test_generate_and_forward_take_a_cache_by_each_name(family, name, make, ids):
    model, options = tiny(family), {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    cache = make(model.config)
    tokens = model.generate(ids, **{name: cache}, **options)
    assert cache.get_seq_length() == 26
    assert torch.equal(tokens, model.generate(ids, **over(make(model.config)), **options))
    cache, other = make(model.config), make(model.config)
    for part in (ids[:, :20], ids[:, 20:]):
        assert torch.equal(model(part, **{name: cache}).logits, model(part, **over(other)).logits)


@cache_of
def test_no_deprecated_name_is_ours(make, ids, caplog):
    model = tiny("llama")
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache = make(model.config)
            model.generate(ids, attention_mask=torch.ones_like(ids), **over(cache), max_new_tokens=3, do_sample=False)
            cache.reset()
            model(ids, **over(cache))
            PagedModel(model, {"format": "bf16"}).step({"request": ids[0]})
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert "deprecated" not in caplog.text


def test_examples_say_what_the_newest_transformers_says():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
    old = [page.name for page in pages if "past_key_values=" in page.read_text()]
    assert not old
