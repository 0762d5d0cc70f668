"""index_select: scores and what is taken of them, for so many rows at a time as their scores fit into the workspace."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ..host.bind import WORKSPACE, BoundLaunches, HostAction, KernelLaunch, LaunchSequence, TensorArg, Workspace
from ..host.kernel_config import KernelConfig
from .parts.index_scores import index_score_launch, request_search_args, request_search_constants, why_not_scores
from .parts.index_topk import (
    Kernels,
    candidate_workspace_slices,
    index_topk_launches,
    triton_index_topk_kernels,
    words_of_candidates,
)

MAX_SCORES = 1 << 26  # of the workspace, with what is taken of them: 256 MB
_MAX_CACHED_BYTES = 64 << 20  # a workspace that is kept between calls


@dataclass(frozen=True)
class RowConfig(KernelConfig):
    """What finds the request of a row, under the names of `ScoreConfig`."""

    RATIO: int
    VARLEN_Q: bool
    Q_LEN: int
    BLOCK_B: int


def why_not(f: SimpleNamespace) -> str | None:
    return why_not_scores(f)


def configure(f: SimpleNamespace, kernels: Kernels | None = None) -> LaunchSequence | HostAction:
    if 0 in f.out.shape:
        return LaunchSequence()
    kernels = kernels or triton_index_topk_kernels(f)
    if f.seq_lens.shape[0] == 0:
        return HostAction(_fill_empty_selection)
    lines = f.q.shape[1] if f.each else 1
    num_rows, width = f.out.shape[0], f.width if f.page_table.shape[1] and f.k_cache.shape[0] else 0
    words = lines * (width + words_of_candidates(width, f.k))
    step = max(1, min(num_rows, MAX_SCORES // max(words, 1)))
    scores, strides = TensorArg(WORKSPACE), (width * lines, width)
    arguments = request_search_args(f) | {
        "STARTS": None, "VISIBLE": None, "OPEN_GROUP": None, "HAS_GROUP": f.open_group, "KEYS_PER_COLUMN": f.block,
        "cfg": RowConfig(**request_search_constants(f)),
    }  # fmt: skip
    launches: list[KernelLaunch] = []
    for start in range(0, num_rows, step):
        rows = range(start, min(start + step, num_rows))
        if width:
            launches.append(index_score_launch(f, scores, strides, rows, width))
        launches += index_topk_launches(f, scores, strides, rows, width, arguments, kernels)
    slices = candidate_workspace_slices(step * lines, width, f.k)
    return LaunchSequence(*launches, workspace=Workspace(max(step * width * lines, 1), dict(slices), _MAX_CACHED_BYTES))


def _fill_empty_selection(call: Any) -> None:
    call.out.fill_(-1)
    call.out_lens.zero_()


def run(call: Any, config: LaunchSequence | HostAction) -> None:
    config(call)


def bind(config: LaunchSequence | HostAction, at: dict[str, int]) -> BoundLaunches | None:
    return config.bind(at)
