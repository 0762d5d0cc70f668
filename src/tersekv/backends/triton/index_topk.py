"""index_topk: the columns of the largest scores, in one launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ..host import launch
from ..host.bind import BoundLaunches, LaunchSequence, TensorArg, tensor_args
from .parts.index_topk import index_topk_launch


def why_not(f: SimpleNamespace) -> str | None:
    reason = launch.why_not(f)
    return reason or ("wants fewer than 2^31 columns" if f.scores.shape[-1] >= 2**31 - 1 else None)


def configure(f: SimpleNamespace) -> LaunchSequence:
    if 0 in f.out.shape:
        return LaunchSequence()
    arguments = tensor_args(VISIBLE="visible", OPEN_GROUP="open_group") | {
        "SEQ_LENS": None, "CU_SEQLENS_Q": None, "B": 0, "KEYS": 1, "HAS_GROUP": f.open_group is not None, "cfg": None,
    }  # fmt: skip
    strides = f.scores.stride[0], f.scores.stride[1] if len(f.scores.shape) == 3 else 0
    rows = range(f.out.shape[0])
    return LaunchSequence(index_topk_launch(f, TensorArg("scores"), strides, rows, f.scores.shape[-1], arguments))


def run(call: Any, config: LaunchSequence) -> None:
    config(call)


def bind(config: LaunchSequence, at: dict[str, int]) -> BoundLaunches | None:
    return config.bind(at)
