"""Latents beside which columns lie that nobody rotated, as Kimi-Linear's 64, or none, as GLM-5.3-Flash's."""

from __future__ import annotations

import pytest
import torch
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers_models import VOCABULARY, SamePrecision, distance, over, tiny

from tersekv import UnsupportedError
from tersekv.integrations.transformers import TersekvCache


@pytest.mark.parametrize("columns", [64, 0])
@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3", "fp8_ds_mla"])
def test_chunks_and_steps_are_those_of_the_models_own_cache(columns, format):
    model = tiny("kimi_linear", kv_lora_rank=512, qk_rope_head_dim=columns, qk_nope_head_dim=32)
    ids = torch.randint(2, VOCABULARY, (2, 37), generator=torch.Generator().manual_seed(2))
    got, want = TersekvCache(model.config, format, page_size=4, chunk=16), SamePrecision(model.config, format)
    for begin, end in ((0, 30), (30, 31), (31, 37)):
        logits = []
        for cache, attention in ((got, "tersekv"), (want, "eager")):
            model.set_attn_implementation(attention)
            logits.append(model(ids[:, begin:end], **over(cache)).logits)
        assert distance(*logits) < 1e-5, (begin, end)


def test_an_indexer_of_pools_is_refused_by_name():
    config = Glm5NextTextConfig(num_hidden_layers=4)
    with pytest.raises(UnsupportedError, match="of glm5_next_text, got indexed_attention in layer 3"):
        TersekvCache(config, "bf16")
