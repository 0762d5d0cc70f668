"""Capped scores of Gluon's kernels, over ten decades of caps: Gluon has no interpreter, so numpy is in its place."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from tersekv.backends.gluon.sm90.parts import online_softmax

EX2 = 2.0**-22  # relative error of the hardware's power of two, and of its quotient


@pytest.mark.parametrize("error", [-EX2, 0.0, EX2])
@pytest.mark.parametrize("cap", [10.0**n for n in range(-2, 9)])
def test_every_score_has_its_digits(cap, error, monkeypatch):
    def power(x):
        return np.exp2(x) * np.float32(1 + error)

    monkeypatch.setattr(online_softmax, "gl", SimpleNamespace(exp2=power, where=np.where, abs=np.abs))
    monkeypatch.setattr(online_softmax, "LOG2E", math.log2(math.e))
    x = np.logspace(-9, 2, 4096)
    scores = (np.concatenate((x, -x)) * cap / math.log(2)).astype(np.float32)
    cap = np.float32(cap)
    with np.errstate(over="ignore"):
        got = online_softmax.apply_softcap_to_log2_scores.fn(scores, cap)
    assert got.dtype == np.float32
    want = float(cap) * np.tanh(scores.astype(np.float64) * (math.log(2) / float(cap))) / math.log(2)
    assert np.abs(got / want - 1).max() < 6e-7
