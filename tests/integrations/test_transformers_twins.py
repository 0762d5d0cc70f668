"""Random histories of two caches: one stays as it is, its twin is offloaded, saved, copied and pickled in between."""

from __future__ import annotations

import copy
import pickle
import random
from functools import lru_cache

import pytest
import torch
from transformers_models import VOCABULARY, over, tiny

from tersekv.integrations.transformers import TersekvCache

# A window, K and V, latents, states that cannot go back, keys and values of other layers.
FAMILIES = ("mistral", "llama", "gemma3", "deepseek_v3", "lfm2", "gemma3n", "qwen3_5")
FORMATS = ("bf16", "fp8_e4m3")
KV_FORMATS = ("int8_per_token_head", "nvfp4", "int4_per_token_head+rotated")
model_of = lru_cache(tiny)


class Twins:
    def __init__(self, seed, folder):
        self.draw, self.path = random.Random(seed), folder / "cache"
        family = self.draw.choice(FAMILIES)
        self.model = model_of(family)
        format = self.draw.choice(FORMATS if family == "deepseek_v3" else FORMATS + KV_FORMATS)
        options = {
            "page_size": self.draw.choice((1, 3, 4, 16)),
            "chunk": self.draw.choice((1, 8, 16)),
            "max_tokens": self.draw.choice((None, 8)),
            "exact_prefill": self.draw.random() < 0.2,
        }
        self.kept, self.moved = (TersekvCache(self.model.config, format, **options) for _ in range(2))
        self.mask = torch.ones(self.draw.randint(1, 3), 0, dtype=torch.int64)
        self.told = [family, format, options]

    def both(self, act):
        """Of each cache what an action gives, or the error that it refuses with."""
        found = []
        for cache in (self.kept, self.moved):
            try:
                found.append((act(cache), None))
            except (ValueError, RuntimeError) as e:
                found.append((None, f"{type(e).__name__}: {e}"))
        (want, refused), (got, why) = found
        assert why == refused, self.told
        if want is not None:
            assert torch.equal(got, want), self.told
        return refused is None

    def forward(self):
        rows, length = len(self.mask), self.draw.choice((1, 1, 2, 5, 19))
        ids = torch.tensor([[self.draw.randrange(1, VOCABULARY) for _ in range(length)] for _ in range(rows)])
        new = torch.ones(rows, length, dtype=torch.int64)
        if not self.mask.shape[1]:
            new[-1, : self.draw.randrange(length)] = 0  # padding on the left
        mask = torch.cat((self.mask, new), 1)
        if self.both(lambda cache: self.model(ids, attention_mask=mask, **over(cache)).logits):
            self.mask = mask

    def crop(self):
        columns = self.draw.randint(0, min(6, self.mask.shape[1]))
        if self.both(lambda cache: cache.crop(-columns)):
            self.mask = self.mask[:, : self.mask.shape[1] - columns]

    def beams(self):
        rows = torch.tensor([self.draw.randrange(len(self.mask)) for _ in range(self.draw.randint(1, 4))])
        act = self.draw.choice(("batch_select_indices", "reorder_cache"))
        if self.both(lambda cache: getattr(cache, act)(rows)):
            self.mask = self.mask[rows]

    def reset(self):
        self.both(lambda cache: cache.reset())
        self.mask = self.mask[:, :0]

    def offload(self):
        assert self.moved.offload() is self.moved

    def load(self):
        if not self.kept.book.columns:
            return
        self.moved.save(self.path)
        self.moved = TersekvCache.load(self.path, self.model.config, offload=self.draw.random() < 0.5)

    def copied(self):
        old, self.moved = self.moved, copy.deepcopy(self.moved)
        self.draw.choice((old.reset, lambda: None))()  # of which a copy shares nothing

    def pickled(self):
        self.moved = pickle.loads(pickle.dumps(self.moved))


KEPT = (Twins.forward,) * 4 + (Twins.crop, Twins.beams, Twins.beams, Twins.reset)
MOVED = (Twins.offload, Twins.load, Twins.copied, Twins.pickled)


@pytest.mark.parametrize("seed", [*range(24), 73])
def test_a_twin_that_moves_about_gives_what_the_cache_that_stays_gives(seed, tmp_path):
    twins = Twins(seed, tmp_path)
    steps = [step for _ in range(9) for step in (twins.draw.choice(KEPT), twins.draw.choice(MOVED))]
    with torch.inference_mode():
        for step in (Twins.forward, *steps, Twins.forward):
            twins.told.append(step.__name__)
            step(twins)
        assert twins.moved.get_seq_length() == twins.kept.get_seq_length() == twins.mask.shape[1]
