"""index_topk: columns of the largest scores, of so many rows at a time as their candidates fit into the workspace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ..host import launch
from ..host.bind import BoundLaunches, LaunchSequence, TensorArg, Workspace, tensor_args
from .parts.index_topk import (
    Kernels,
    candidate_workspace_slices,
    index_topk_launches,
    triton_index_topk_kernels,
    words_of_candidates,
)

_MAX_WORDS = 1 << 24  # of the workspace: 64 MB


def why_not(f: SimpleNamespace) -> str | None:
    reason = launch.why_not_format_or_device(f)
    return reason or ("wants fewer than 2^31 columns" if f.scores.shape[-1] >= 2**31 - 1 else None)


def configure(f: SimpleNamespace, kernels: Kernels | None = None) -> LaunchSequence:
    if 0 in f.out.shape:
        return LaunchSequence()
    kernels = kernels or triton_index_topk_kernels(f)
    arguments = tensor_args(STARTS="starts", VISIBLE="visible", OPEN_GROUP="open_group") | {
        "SEQ_LENS": None, "CU_SEQLENS_Q": None, "B": 0, "KEYS_PER_COLUMN": 1, "HAS_GROUP": f.open_group is not None,
        "cfg": None,
    }  # fmt: skip
    strides = f.scores.stride[0], f.scores.stride[1] if len(f.scores.shape) == 3 else 0
    num_rows, width, lines = f.out.shape[0], f.scores.shape[-1], f.out.shape[1] if len(f.out.shape) == 3 else 1
    words = lines * words_of_candidates(width, f.k)
    step = max(1, min(num_rows, _MAX_WORDS // max(words, 1)))
    launches = [
        x
        for start in range(0, num_rows, step)
        for x in index_topk_launches(
            f,
            TensorArg("scores", row=start),
            strides,
            range(start, min(start + step, num_rows)),
            width,
            arguments,
            kernels,
        )
    ]
    workspace = Workspace(0, candidate_workspace_slices(step * lines, width, f.k)) if words else None
    return LaunchSequence(*launches, workspace=workspace)


def run(call: Any, config: LaunchSequence) -> None:
    config(call)


def bind(config: LaunchSequence, at: dict[str, int]) -> BoundLaunches | None:
    return config.bind(at)
