"""The demo's text: bytes as tokens, and a held-out part that the training text does not hold."""

from __future__ import annotations

import pytest
import torch
from script import script

from tersekv.demo import text


@pytest.fixture(scope="module")
def corpus():
    return script("scripts/corpus.py")


def test_bytes_are_tokens():
    assert text.decode(text.encode("naïve → 3")) == "naïve → 3"
    assert text.encode("é").tolist() == [0xC3, 0xA9]
    assert text.decode(torch.tensor([0xC3])) == "\ufffd"


def test_the_training_topics_hold_no_passage_of_the_heldout_text(corpus):
    heldout = text.heldout_text()
    assert len(heldout.encode()) >= 32 * 1024
    topics = corpus.training_topics(heldout)
    assert len(topics) > 200_000
    assert not corpus.shingles(topics) & corpus.shingles(heldout)


def test_the_filter_drops_shared_and_repeated_paragraphs(corpus):
    heldout = "one two three four five six seven eight nine"
    long = "a paragraph that is longer than forty characters and occurs twice"
    shared = "Here: One, two (three) four\nfive six seven EIGHT!"
    assert corpus._unseen([f"{long}\n\n{shared}\n\nFor example:", f"{long}\n\nFor example:"], heldout) == (
        f"{long}\n\nFor example:\n\n\nFor example:"
    )
    split = "one two three four\n\nfive six seven eight"
    assert corpus._unseen([split], heldout) == ""
