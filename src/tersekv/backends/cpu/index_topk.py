"""index_topk, natively."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from . import library, records
from .index_scores import address_index_and_first_strides
from .library import BoundLaunch, NativeLaunch
from .records import CallFacts, IndexTensor, IndexTopk

_TENSORS = ("scores", "visible", "open_group", "starts", "out", "out_lens")


def why_not(f: SimpleNamespace) -> str | None:
    return library.why_not(f)


def configure(f: SimpleNamespace) -> NativeLaunch:
    facts, each = CallFacts(f, _TENSORS), len(f.scores.shape) == 3
    lines, num_strides = (f.scores.shape[1], 2) if each else (1, 1)
    is_open = IndexTensor(records.NONE)
    if f.open_group is not None:
        is_open = IndexTensor(facts.at("open_group"), 0, facts.strides("open_group")[0])
    record = IndexTopk(
        f.scores.shape[0], lines, f.scores.shape[-1], f.out.shape[-1],
        address_index_and_first_strides(facts, "scores", num_strides), facts.index_tensor("visible"), is_open,
        facts.index_tensor("starts"), address_index_and_first_strides(facts, "out", num_strides),
        address_index_and_first_strides(facts, "out_lens", num_strides), f.k, f.keep_first, f.keep_last,
    )  # fmt: skip
    return NativeLaunch("index_topk", record, _TENSORS)


def run(call: Any, config: NativeLaunch) -> None:
    config.run(call)


def bind(config: NativeLaunch, at: dict[str, int]) -> BoundLaunch:
    return config.bind(at)
