"""Paged prefill on Hopper: by a kernel of its own where there are many query rows, else by those of decode."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ...formats import BATCH_INVARIANCE, CHANNELS, PAIRS, ROTATION, kv_format, pair_of
from ..host import launch
from ..host.bind import Bound, Described, Launches, Template, given, strides
from ..host.split_merge import is_empty, rows_of
from . import decode
from .sm90.decode.boxes import PAGE_KEYS
from .sm90.parts.turn import turn_of
from .sm90.prefill.kernel import prefill_kernel
from .sm90.prefill.shape import Shape, descriptor, items_of, of_new_rows, shape_of, why_not_copied

_FORMATS = (
    *("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head", "nvfp4"),
    "int4_per_token_head",
)
_DESCRIBED = {"Q": "q", "K": "k_cache", "V": "v_cache", "KN": "k", "VN": "v"}
_MANY_KEYS = 16384
# Pairs go by decode's kernels alone; batch invariance by the one for many rows, in which nothing is cut.
TAKES = (PAIRS, ROTATION, CHANNELS, BATCH_INVARIANCE)


class Config(NamedTuple):
    shape: Shape
    launches: Launches


def why_not(f: SimpleNamespace) -> str | None:
    reason = _why_not_own(f)
    if reason is None or f.k is not None or f.batch_invariant:
        return reason
    by_decode = decode.why_not(as_decode(f))
    return None if by_decode is None else f"{reason}; of decode's kernels: {by_decode}"


def _why_not_own(f: SimpleNamespace) -> str | None:
    """What the kernel for many query rows does not take."""
    if f.format not in _FORMATS:
        return f"has no kernel for many query rows of {f.format}"
    k, v = pair_of(f)
    if k != v:
        return f"has no kernel for many query rows of {k.name} and {v.name}"
    if is_empty(f) or 0 in f.q.shape:
        return "wants a query row"
    fmt = kv_format(f.format)
    if f.q.dtype == torch.float32:
        return "wants a 16-bit or 8-bit q, got float32"
    if fmt.storage == torch.bfloat16 and f.q.dtype == torch.float16:  # Triton's multiplies it in two tiles
        return "wants a bfloat16 or 8-bit q with bf16, got float16"
    if fmt.storage == torch.bfloat16 and turn_of(f.k_signs, f.k_channel_scale).ANY:
        return "wants keys that lie as they are with bf16, got rotated ones or such with channel scales"
    widest = 128 if fmt.storage.itemsize == 1 else 256
    d, dv = f.q.shape[2], f.out.shape[2]
    if d > widest or dv > widest:
        return f"wants head sizes up to {widest} with {f.format}, got {d} and {dv}"
    if f.k_cache.shape[1] % PAGE_KEYS:
        return f"wants pages of a multiple of {PAGE_KEYS}, got {f.k_cache.shape[1]}"
    return why_not_copied(f)


def configure(f: SimpleNamespace) -> Any:
    if f.k is None and not f.batch_invariant and (_why_not_own(f) is not None or _few_rows(f)):
        return decode.configure(as_decode(f))
    c = shape_of(f)
    arguments: dict[str, Any] = {
        n: Described(name, partial(descriptor, name=name, c=c)) for n, name in _DESCRIBED.items()
    }
    if f.k is None:
        arguments |= {"KN": None, "VN": None}
    arguments |= {
        **given(KS="k_scale_cache", VS="v_scale_cache", TABLE="page_table", LENS="seq_lens"),
        **given(K_SIGNS="k_signs", V_SIGNS="v_signs", K_CHANNELS="k_channel_scale", V_CHANNELS="v_channel_scale"),
        **rows_of(f), **given(SINKS="sinks", OUT="out", LSE="lse"),
        **given(SOFTMAX_T="softmax_scale_t", K_T="k_scale_t", V_T="v_scale_t", OUT_T="out_scale_t"),
        **strides(f.out, so_="th"), **strides(f.lse, sl_="th"), "st_b": f.page_table.stride[0],
        "softmax_scale": f.softmax_scale, "k_scale": f.k_scale, "v_scale": f.v_scale, "out_scale": f.out_scale,
        "softcap": f.softcap, "B": f.seq_lens.shape[0], "T": f.q.shape[0], "c": c, "n": of_new_rows(c),
    }  # fmt: skip
    programs = min(launch.num_sms(f), items_of(f, c))
    return Config(c, Launches(Template(prefill_kernel, (programs,), arguments, num_warps=4, launch_pdl=True)))


def _few_rows(f: SimpleNamespace) -> bool:
    """Decode's kernels are made for these, and take them.

    They cut a request's keys among programs. The other does not: with fewer blocks of rows than multiprocessors, it
    leaves the rest of these idle, which counts where there may be many keys.
    """
    c = shape_of(f)
    many_keys = f.page_table.shape[1] * f.k_cache.shape[1] >= _MANY_KEYS
    idle = 4 * -(-f.q.shape[0] // c.TOKENS) * c.BUNDLES < 3 * launch.num_sms(f)
    return (f.max_q_len * c.GROUP <= 32 or (many_keys and idle)) and decode.why_not(as_decode(f)) is None


def as_decode(f: SimpleNamespace) -> SimpleNamespace:
    """The facts as decode's: without a mask its rows are causal."""
    return SimpleNamespace(**vars(f), mask=None)


def run(call: Any, config: Any) -> None:
    config.launches(call)


def bind(config: Any, at: dict[str, int]) -> Bound | None:
    return config.launches.bind(at)
