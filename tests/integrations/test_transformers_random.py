"""Random histories of a cache: families, formats, pages, chunks, batches, padding, beams and crops, drawn from a seed.

After every forward each row is compared with eager attention over its real tokens alone, in one piece.
"""

from __future__ import annotations

import random

import pytest
import torch
from transformers_models import FAMILIES, LATENT, VOCABULARY, SamePrecision, distance, over, tiny

from tersekv.integrations.transformers import TersekvCache

FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2")
# In fp32 models what is left is the order of sums, and, of histories without end, a code that falls on the other side:
# of 8 bits one step is up to a quarter of a value. A wrong token or page is of order 1.
CLOSE = {"bf16": 2e-3, "fp16": 2e-3}
CODES = 2e-2


class History:
    """A cache, and what it should hold: for each row its columns, None for padding."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.name = self.draw.choice(list(FAMILIES))
        self.model = tiny(self.name)
        of_keys = () if self.name in LATENT else ("fp8_per_token_head", "int8_per_token_head")
        self.format = self.draw.choice((*FORMATS, *of_keys))
        self.chunk = self.draw.choice((1, 3, 8, 16, 64))
        options = {
            "page_size": self.draw.choice((1, 2, 3, 8, 16, 64)),
            "chunk": self.chunk,
            "max_tokens": self.draw.choice((None, 40)),
        }
        self.cache = TersekvCache(self.model.config, self.format, **options)
        self.rows = [[] for _ in range(self.draw.randint(1, 4))]
        self.told = [self.name, self.format, options, len(self.rows)]

    def padded(self, length):
        """New columns of a row: real ones and padding on either side, or anywhere."""
        kind = self.draw.choice(("none", "none", "left", "right", "anywhere", "all"))
        real = [True] * length
        if kind in ("left", "right"):
            gone = self.draw.randint(0, length)
            real = [False] * gone + real[gone:]
            real = real if kind == "left" else real[::-1]
        elif kind == "anywhere":
            real = [self.draw.random() < 0.7 for _ in real]
        elif kind == "all":
            real = [False] * length
        return [self.draw.randint(1, VOCABULARY - 1) if r else None for r in real]

    def forward(self):
        length = self.draw.choice((1, 1, 2, 5, 9, 17, 31))
        self.told.append(("forward", length))
        before = [len([c for c in row if c is not None]) for row in self.rows]
        self.rows = [row + self.padded(length) for row in self.rows]
        mask = torch.tensor([[c is not None for c in row] for row in self.rows]).long()
        ids = torch.tensor([[c or 0 for c in row[-length:]] for row in self.rows])
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -length:]
        given = None if bool(mask.all()) and self.draw.random() < 0.5 else mask
        out = self.model(ids, attention_mask=given, position_ids=positions, **over(self.cache)).logits
        for row, had, got, new in zip(self.rows, before, out, mask[:, -length:].bool(), strict=True):
            alone = torch.tensor([[c for c in row if c is not None]])
            if new.any():
                assert distance(got[new], self.eager(alone)[0, had:]) < CLOSE.get(self.format, CODES), self.told
        assert out.isfinite().all(), self.told
        assert self.cache.book.counts == [sum(c is not None for c in row) for row in self.rows]

    def eager(self, ids):
        self.model.set_attn_implementation("eager")
        try:
            return self.model(ids, **over(SamePrecision(self.model.config, self.format))).logits
        finally:
            self.model.set_attn_implementation("tersekv")

    def beams(self):
        sources = [self.draw.randrange(len(self.rows)) for _ in range(self.draw.randint(1, 4))]
        self.told.append(("beams", sources))
        self.cache.batch_select_indices(torch.tensor(sources))
        self.rows = [list(self.rows[s]) for s in sources]

    def crop(self):
        """Of the last forward at most `chunk` tokens: as far back as a window reaches."""
        columns = self.draw.randint(0, min(self.chunk, self.told[-1][1]))
        self.told.append(("crop", columns))
        self.cache.crop(-columns)
        self.rows = [row[: len(row) - columns] for row in self.rows]


@pytest.mark.parametrize("seed", range(30))
def test_a_random_history_is_what_eager_attention_makes_of_each_row(seed):
    history = History(seed)
    for _ in range(history.draw.randint(2, 5)):
        history.forward()
        after = history.draw.choice((None, history.beams, history.crop))
        if after:
            after()
    history.cache.reset()
    history.rows = [[]]
    history.forward()


def test_the_histories_draw_every_kind():
    drawn = [History(seed) for seed in range(30)]
    assert {h.name for h in drawn} == set(FAMILIES)
    assert {h.chunk for h in drawn} == {1, 3, 8, 16, 64}
    assert {h.format for h in drawn} >= set(FORMATS)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_forward_of_padding_alone_stores_nothing_and_gives_finite_logits(name):
    model = tiny(name)
    cache = TersekvCache(model.config)
    ids, mask = torch.ones(2, 5, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int64)
    assert model(ids, attention_mask=mask, **over(cache)).logits.isfinite().all()
    assert cache.book.counts == [0, 0]
