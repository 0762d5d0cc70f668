"""MLA decode over two sets of listed keys in one softmax: each set is a pass of its own, without sinks, into outputs in
fp32 and their LSEs; `merge_sets_kernel` makes one output of both and of the sinks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from ...host import launch
from ...host.attention_launches import output_and_workspace_args, output_lse_and_softmax_scale_constants
from ...host.bind import HostAction, KernelLaunch, LaunchSequence, Workspace, tensor_args
from ...host.kernel_config import KernelConfig
from ..parts.combine import cast_output, load_device_scale_else_host_scale

_MAX_CACHED_WORKSPACE = 64 << 20  # bytes of workspace kept for the next call
_SET_FIELDS = ("ckv", "kpe", "ckv_scale_cache", "page_table", "indices", "index_lens", "kv_scale_t")
EXTRA_NAMES = {name: f"extra_{name}" for name in _SET_FIELDS}  # of the second set's tensors


@dataclass(frozen=True)
class MergeConstants(KernelConfig):
    HAS_LSE: bool
    HAS_OUT_SCALE: bool
    HAS_SINKS: bool
    LSE_OF_KEYS: bool
    OUT_MAX: float
    OUT_KIND: str
    L: int
    BLOCK_L: int


@triton.jit
def merge_sets_kernel(
    OUT_1, LSE_1, OUT_2, LSE_2, SINKS, OUT, LSE, out_scale, OUT_SCALE, H, stride_out_t, stride_out_h, stride_lse_t,
    stride_lse_h, cfg: tl.constexpr
):  # fmt: skip
    """Merges one row of one head. A row without keys in either set: 0 and −inf, whatever its sink."""
    i_row = tl.program_id(0).to(tl.int64)
    token, head = i_row // H, i_row % H
    o_l = tl.arange(0, cfg.BLOCK_L)
    m_l = o_l < cfg.L
    lse_1, lse_2 = tl.load(LSE_1 + i_row), tl.load(LSE_2 + i_row)
    acc_1 = tl.load(OUT_1 + i_row * cfg.L + o_l, mask=m_l, other=0.0)
    acc_2 = tl.load(OUT_2 + i_row * cfg.L + o_l, mask=m_l, other=0.0)
    empty = (lse_1 == float("-inf")) & (lse_2 == float("-inf"))
    row_max = tl.where(empty, 0.0, tl.maximum(lse_1, lse_2))
    sink_p = row_max * 0.0
    if cfg.HAS_SINKS:
        sink = tl.load(SINKS + head)
        row_max = tl.maximum(row_max, sink)
        # A sink of +inf takes all; inf − inf would be NaN.
        sink_p = tl.where(sink == row_max, 1.0, tl.exp(sink - row_max))
    p_1, p_2 = tl.exp(lse_1 - row_max), tl.exp(lse_2 - row_max)
    denominator = tl.where(empty, 1.0, p_1 + p_2 + sink_p)
    scale = load_device_scale_else_host_scale(out_scale, OUT_SCALE, 0, cfg.HAS_OUT_SCALE) / denominator
    acc_o = (acc_1 * p_1 + acc_2 * p_2) * scale
    p_out = OUT + token * stride_out_t + head * stride_out_h + o_l
    tl.store(p_out, cast_output(tl.where(empty, 0.0, acc_o), OUT, cfg), mask=m_l)
    if cfg.HAS_LSE:
        if cfg.LSE_OF_KEYS:
            row_max = tl.where(empty, 0.0, tl.maximum(lse_1, lse_2))
            denominator = tl.where(empty, 1.0, tl.exp(lse_1 - row_max) + tl.exp(lse_2 - row_max))
        lse = tl.where(empty, float("-inf"), row_max + tl.log(denominator))
        tl.store(LSE + token * stride_lse_t + head * stride_lse_h, lse)


def facts_with_dense_fp32_out_and_lse(f: SimpleNamespace) -> SimpleNamespace:
    """Returns the facts of one set's pass."""
    t, heads, rank = f.out.shape
    out = f.out._replace(dtype=torch.float32, stride=(heads * rank, rank, 1), aligned=True)
    lse = out._replace(shape=(t, heads), stride=(heads, 1))
    return SimpleNamespace(**vars(f) | {"out": out, "lse": lse})


def launches_with_renamed_tensors(
    launches: LaunchSequence | HostAction, names: Mapping[str, str | None]
) -> LaunchSequence | HostAction:
    """Returns the same launches over other tensors."""
    if isinstance(launches, HostAction):
        return launches
    return LaunchSequence(
        *(kernel.with_renamed_tensors(names) for kernel in launches.kernel_launches), workspace=launches.workspace
    )


def pass_and_merge_launches(f: SimpleNamespace, launches_of_passes: list[Any]) -> LaunchSequence | HostAction:
    """Returns the launches of the passes, in the order of the sets, and of the merge."""
    t, heads, rank = f.out.shape
    kernels: list[KernelLaunch] = []
    num_floats, slices = 0, dict[str, tuple[tuple[int, ...], torch.dtype] | None]()
    for i, (launches, names) in enumerate(zip(launches_of_passes, ({}, EXTRA_NAMES), strict=True), 1):
        if isinstance(launches, HostAction):  # no rows: nothing to compute
            return launches
        slices |= {f"OUT_{i}": ((t, heads, rank), torch.float32), f"LSE_{i}": ((t, heads), torch.float32)}
        own = {"out": f"OUT_{i}", "lse": f"LSE_{i}", "sinks": None, "out_scale_t": None}
        kernels += [kernel.with_renamed_tensors(names | own) for kernel in launches.kernel_launches]
        num_floats = max(num_floats, launches.workspace.num_floats if launches.workspace else 0)
    constants = output_lse_and_softmax_scale_constants(f)
    constants.pop("HAS_SOFTMAX_SCALE")
    block = launch.next_power_of_2(rank)
    cfg = MergeConstants(**constants, HAS_SINKS=f.sinks is not None, LSE_OF_KEYS=f.lse_of_keys, L=rank, BLOCK_L=block)
    arguments = output_and_workspace_args(f, cfg.OUT_KIND != "float")
    arguments.pop("SPLIT_WORKSPACE")
    tensors = tensor_args(OUT_1="OUT_1", LSE_1="LSE_1", OUT_2="OUT_2", LSE_2="LSE_2", SINKS="sinks")
    merge = KernelLaunch(merge_sets_kernel, (t * heads,), arguments | tensors | {"H": heads, "cfg": cfg}, num_warps=2)
    return LaunchSequence(*kernels, merge, workspace=Workspace(num_floats, slices, _MAX_CACHED_WORKSPACE))
