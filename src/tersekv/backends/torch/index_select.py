"""index_select: the scores of a few rows at a time, and what is taken of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from .exact import without_grad_and_autocast
from .index_scores import (
    compute_max_scores_of_key_blocks,
    iterate_rows_by_request_on_cpu_else_singly,
    request_and_position_of_rows,
)
from .index_topk import store_ascending_topk_columns_and_counts

MAX_SCORES = 1 << 26  # in memory at a time: 256 MB


def why_not(f: SimpleNamespace) -> str | None:
    return None


def configure(f: SimpleNamespace) -> None:
    return None


@without_grad_and_autocast
def run(call: Any, config: None) -> None:
    _, position = request_and_position_of_rows(call)
    is_open = (position + 1) % call.ratio > 0
    lines = call.q.shape[1] if call.each else 1
    step = max(MAX_SCORES // max(call.width * lines, 1), 1)
    for group in iterate_rows_by_request_on_cpu_else_singly(call):
        for start in range(group.rows.start, group.rows.stop, step):
            rows = slice(start, min(start + step, group.rows.stop))
            keys = group.visible[rows.start - group.rows.start : rows.stop - group.rows.start]
            scores = compute_max_scores_of_key_blocks(call, group._replace(rows=rows, visible=keys), call.width)
            columns = -(-keys // call.block)
            store_ascending_topk_columns_and_counts(
                call, scores, columns.clamp(max=call.width), keys, is_open[rows] if call.open_group else None,
                call.out[rows], call.out_lens[rows],
            )  # fmt: skip
