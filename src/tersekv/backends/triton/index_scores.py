"""index_scores: an indexer's scores of all keys that rows see, in one launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ..host.bind import BoundLaunches, HostAction, LaunchSequence, TensorArg
from .parts.index_scores import index_score_launch, why_not_scores


def why_not(f: SimpleNamespace) -> str | None:
    return why_not_scores(f)


def configure(f: SimpleNamespace) -> LaunchSequence | HostAction:
    rows, width = f.out.shape[0], f.out.shape[-1]
    if 0 in f.out.shape:
        return LaunchSequence()
    if f.seq_lens.shape[0] == 0 or f.page_table.shape[1] == 0 or f.k_cache.shape[0] == 0:
        return HostAction(_fill_minus_inf_scores)
    strides = f.out.stride[0], f.out.stride[1] if f.each else 0
    return LaunchSequence(index_score_launch(f, TensorArg("out"), strides, range(rows), width))


def _fill_minus_inf_scores(call: Any) -> None:
    call.out.fill_(float("-inf"))


def run(call: Any, config: LaunchSequence | HostAction) -> None:
    config(call)


def bind(config: LaunchSequence | HostAction, at: dict[str, int]) -> BoundLaunches | None:
    return config.bind(at)
