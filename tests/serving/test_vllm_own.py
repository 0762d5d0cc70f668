"""benchmarks/vllm_own.py without an engine: distributions of which vLLM names a few tokens, and needles."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from script import script

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
own = script("benchmarks/vllm_own.py")


def test_tokens_that_are_not_named_count_together():
    p, q = ({t: math.log(x) for t, x in enumerate(row)} for row in ((0.5, 0.3, 0.2), (0.4, 0.4, 0.2)))
    whole = 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.4)
    assert own.divergence([p], [q]) == pytest.approx(whole)
    del p[2], q[1]  # named by one side: left to the rest
    assert own.divergence([p], [q]) == pytest.approx(0.5 * math.log(0.5 / 0.4) + 0.5 * math.log(0.5 / 0.6))
    assert own.divergence([p], [p]) == pytest.approx(0, abs=1e-9)


def test_needles_lie_at_different_depths_of_texts_of_one_length():
    args = SimpleNamespace(needles=3, length=400)
    keys, asked = own.needles(args, [46] * 400, lambda text: list(text.encode()))
    texts = [bytes(x).decode() for x in asked]
    assert {len(t) for t in texts} == {400}
    at = [t.index(k) for t, k in zip(texts, keys, strict=True)]
    assert at == sorted(at)
    assert at[-1] - at[0] > 150
    assert all(t.endswith(own.ASK) and t.count(k) == 1 for t, k in zip(texts, keys, strict=True))
