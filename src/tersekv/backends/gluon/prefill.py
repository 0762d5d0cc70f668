"""Paged prefill on Hopper, for many query rows; keys are never split, so it is batch invariant."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ...formats import pair_of
from ..host import launch
from ..host.attention_launches import has_no_work, query_offset_args
from ..host.bind import KernelLaunch, LaunchSequence, TensorMapArg, Workspace, stride_args, tensor_args
from .sm90.parts.hadamard import rotation_config
from .sm90.parts.tensor_maps import MIN_KEYS_PER_COPY
from .sm90.prefill.config import (
    PrefillConfig,
    config_of_new_kv,
    is_column_split,
    make_prefill_config,
    max_work_tiles,
    tensor_map_of_argument,
    why_not_tensor_maps,
)
from .sm90.prefill.kernel import prefill_kernel

_FORMATS = (
    *("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head", "nvfp4"),
    "int4_per_token_head",
)
_TENSOR_MAP_ARGS = {"Q": "q", "K": "k_cache", "V": "v_cache", "K_NEW": "k", "V_NEW": "v"}
_LONG_CONTEXT = 16384
_UNEVEN_WAVES_CONTEXT = 4096  # keys, from which on few rows are split where prefill's last wave of tiles is a small one


class Config(NamedTuple):
    shape: PrefillConfig
    launches: LaunchSequence


def why_not(f: SimpleNamespace) -> str | None:
    k, v = pair_of(f)
    for fmt in (k, v):
        if fmt.name not in _FORMATS:
            return f"has no kernel for many query rows of {fmt.name}"
    if k != v and 2 in (k.storage.itemsize, v.storage.itemsize):
        return f"takes no pairs with 16 bits, got {k.name} and {v.name}"
    if has_no_work(f) or 0 in f.q.shape:
        return "wants a query row"
    if f.q.dtype == torch.float32:
        return "wants a 16-bit or 8-bit q, got float32"
    if k.storage == torch.bfloat16 and f.q.dtype == torch.float16:  # Triton's kernel multiplies it as two tiles
        return "wants a bfloat16 or 8-bit q with bf16, got float16"
    if k.storage == torch.bfloat16 and rotation_config(f.k_signs, f.k_channel_scale).ENABLED:
        return "wants keys that lie as they are with bf16, got rotated ones or such with channel scales"
    d, dv = f.q.shape[2], f.out.shape[2]
    if max(d, dv) > 512:
        return f"wants head sizes up to 512, got {d} and {dv}"
    if is_column_split(f) and any(
        rotation_config(*x).ENABLED for x in ((f.k_signs, f.k_channel_scale), (f.v_signs, f.v_channel_scale))
    ):  # a Hadamard transform would cross the two warpgroups, each with half of the columns
        return f"wants rows that lie as they are with head sizes above 256, got rotated or scaled ones of {d} and {dv}"
    if f.k_cache.shape[1] % MIN_KEYS_PER_COPY:
        return f"wants pages of a multiple of {MIN_KEYS_PER_COPY}, got {f.k_cache.shape[1]}"
    reason = why_not_tensor_maps(f)
    if reason is None and is_column_split(f) and f.k is None and not f.batch_invariant and prefers_decode(f):
        # Where decode's kernels do not take them either, Triton's are left, which split keys too.
        return f"wants more query rows of a request with head sizes above 256, got {f.max_q_len} tokens of {d} and {dv}"
    return reason


def configure(f: SimpleNamespace) -> Config:
    cfg = make_prefill_config(f)
    arguments: dict[str, Any] = {
        argument: TensorMapArg(name, partial(tensor_map_of_argument, arg_name=name, cfg=cfg))
        for argument, name in _TENSOR_MAP_ARGS.items()
    }
    if f.k is None:
        arguments |= {"K_NEW": None, "V_NEW": None}
    arguments |= {
        **tensor_args(K_SCALES="k_scale_cache", V_SCALES="v_scale_cache", PAGE_TABLE="page_table", SEQ_LENS="seq_lens"),
        **tensor_args(K_SIGNS="k_signs", V_SIGNS="v_signs", K_CHANNEL_SCALES="k_channel_scale",
                      V_CHANNEL_SCALES="v_channel_scale"),
        **query_offset_args(f), **tensor_args(SINKS="sinks", OUT="out", LSE="lse", WORK_COUNTER="WORK_COUNTER"),
        **tensor_args(SOFTMAX_SCALE="softmax_scale_t", K_SCALE="k_scale_t", V_SCALE="v_scale_t",
                      OUT_SCALE="out_scale_t"),
        **stride_args(f.out, stride_out_="th"), **stride_args(f.lse, stride_lse_="th"),
        "stride_table_b": f.page_table.stride[0],
        "softmax_scale": f.softmax_scale, "k_scale": f.k_scale, "v_scale": f.v_scale, "out_scale": f.out_scale,
        "softcap": f.softcap, "B": f.seq_lens.shape[0], "T": f.q.shape[0], "cfg": cfg, "new_cfg": config_of_new_kv(cfg),
    }  # fmt: skip
    num_ctas = min(launch.num_sms(f), max_work_tiles(f, cfg))
    num_warps = 4 if cfg.CODE_STAGES else cfg.CONSUMER_WARPS  # of the first role
    prefill = KernelLaunch(prefill_kernel, (num_ctas,), arguments, num_warps=num_warps, launch_pdl=True)
    return Config(cfg, LaunchSequence(prefill, workspace=Workspace(0, {"WORK_COUNTER": ((1,), torch.int64)})))


def prefers_decode(f: SimpleNamespace) -> bool:
    """Returns whether decode's kernels are faster.

    They split a request's keys among CTAs, and their tiles have 64 query rows at most. The prefill kernel does not
    split: with fewer work tiles than SMs it leaves SMs idle, which matters where there may be many keys.

    64 × 4096 keys, 32/8 heads, H100, 2026-11-26, time of decode's kernels by time of prefill's: 64 rows 0.76 to 0.95
    with heads of 128, 0.96 to 1.14 with heads of 256; 96 rows 1.03 to 1.21; 128 rows of 256 columns 1.6 to 1.8. Those
    512 work tiles fill four waves; 192 of 24 × 6000 fill one and a half: 128 rows then take 163 µs by decode's kernels
    (fp8) where prefill's took 191 on an H200, int8 216 and 248.

    Heads above 256: decode's kernels take 32 rows at most, and more are Triton's, at about a quarter of the
    rate (fp8, heads of 256: 136 of 537 TFLOP/s).
    """
    cfg = make_prefill_config(f)
    wide = max(cfg.D, cfg.DV) > 128
    if f.max_q_len * cfg.GROUP <= (64 if cfg.CONVERTS_KV and not wide else 32):
        return True
    max_keys, sms = f.page_table.shape[1] * f.k_cache.shape[1], launch.num_sms(f)
    many_keys = max_keys >= _LONG_CONTEXT
    work_tiles = -(-f.q.shape[0] // cfg.TOKENS_PER_TILE) * cfg.HEAD_TILES
    is_8bit = cfg.CONVERTS_KV and pair_of(f)[0].values_per_element == pair_of(f)[1].values_per_element == 1
    if is_8bit and not wide and f.max_q_len * cfg.GROUP <= 128 and max_keys >= _UNEVEN_WAVES_CONTEXT:
        return work_tiles < 0.8 * sms * -(-work_tiles // sms)
    least = 0.25 if cfg.COLUMN_SPLIT else 0.55 if wide and cfg.CONVERTS_KV else 0.75
    return many_keys and work_tiles < least * sms
