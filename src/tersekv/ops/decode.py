"""Attention over a K/V cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ..calls import DecodeCall
from ..dispatch.checks import FLOAT, dtype_name, joined, tensor
from ..dispatch.checks import dtype as check_dtype
from ..dispatch.launch_cache import CallSignature, lookup
from ..formats import FP8
from ..layers import PagedKVLayer
from ..scalars import as_bool, as_float, as_int
from .append import KVLike
from .registry import dispatch_call
from .scales import attributes, float_and_tensor


def decode(
    q: Tensor,
    cache: KVLike,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    softmax_scale: float | Tensor | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_q_len: int | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: float | Tensor = 1.0,
    lse: Tensor | None = None,
    return_lse: bool = False,
    precision: str = "exact",
    batch_invariant: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Paged attention of a few new tokens per request: MHA, GQA or MQA, any cache format.

    Many new tokens work too: on a GPU, without a mask, they run the kernels of `prefill`.

        q:              [T, Hq, D]  bf16 | fp16 | fp32 | e4m3 | e5m2; T = B × drafts, or ragged by cu_seqlens_q
        cache:          PagedKVLayer, or bare tensors as `PagedKVLayer.of` reads them; Hq a multiple of its heads
        page_table:     [B, max_pages]  int32 | int64 | uint32; entries past ceil(seq_len / S) are never read
        seq_lens:       [B]  tokens in the cache, the new ones included; 0: output 0, lse −inf
        softmax_scale:  float or fp32 tensor [1]; default 1 / sqrt(D)
        window:         keys that a query sees, its own included; None: all before it
        sinks:          [Hq] fp32; one more score per head (scaled-logit units, natural log) with a zero value
        softcap:        c > 0: scores become c × tanh(score / c), before masking; None or 0: they stay
        mask:           [T, W] or [B, drafts, W] uint16, W = 2 × ceil(drafts / 32): bit j of row i (LSB first):
                        draft i sees draft j; the prefix is always visible. None: causal
        cu_seqlens_q:   [B + 1]  first query row of each request, beginning with 0; None: T / B rows each
        max_q_len:      with cu_seqlens_q: the host's bound on the rows of a request; the closer, the faster; default T
        out:            [T, Hq, Dv] to write into; out_dtype: bf16 | fp16 | fp32 | e4m3 | e5m2 (saturating);
                        default: q's dtype, bf16 for an 8-bit q
        out_scale:      multiplies the output before its cast: float or fp32 tensor [1]
        lse:            [T, Hq] fp32 to write into; return_lse returns it too; natural log, sinks included
        precision:      "exact"; "fast" is a permission: a backend may then hold probabilities in 8 bits where
                        arithmetic is the bound (about 2.5e-2 relative norm), as in `prefill` where it runs the
                        kernels of `prefill`; all else is computed exactly
        batch_invariant:  a request's bits do not depend on the other requests: its keys are split by its own length
                        alone. On one device and backend, for equal sizes, strides and options; docs/serving.md has
                        the cost

    Returns out, or (out, lse) with `return_lse`. No host synchronisation; safe under CUDA graphs when lengths and
    tables change between replays. Raises ValueError or TypeError for arguments that do not fit together.
    """
    c = cache if isinstance(cache, PagedKVLayer) else PagedKVLayer.of(cache)
    k_scale, k_scale_t = float_and_tensor(c.k_scale, "k_scale")
    v_scale, v_scale_t = float_and_tensor(c.v_scale, "v_scale")
    o_scale, o_scale_t = float_and_tensor(out_scale, "out_scale")
    scale, scale_t = (None, None) if softmax_scale is None else float_and_tensor(softmax_scale, "softmax_scale")
    softcap = softcap_value(softcap)
    max_q_len = None if max_q_len is None else as_int("max_q_len", max_q_len)
    window = None if window is None else as_int("window", window)
    batch_invariant = as_bool("batch_invariant", batch_invariant)
    format, v_format, more = attributes(c)
    inputs = (
        q, c.k, c.v, c.k_scale_cache, c.v_scale_cache, page_table, seq_lens, cu_seqlens_q, mask, sinks, out, lse,
        scale_t, k_scale_t, v_scale_t, o_scale_t, *more,
    )  # fmt: skip
    options = (
        c.format, max_q_len, window, softcap, scale, k_scale, v_scale, o_scale, out_dtype, return_lse, precision,
        batch_invariant, backend,
    )  # fmt: skip
    cached = lookup("decode", options, inputs)
    if cached is not None:
        return attention_outputs(cached, out, lse, return_lse)

    tensor("q", q, "T Hq D")
    tensor("v_cache", c.v, "P S H Dv")
    t, heads, d = q.shape
    dv = c.head_dim_v
    out, lse, made_outputs = allocate_outputs(q, (t, heads, dv), out, out_dtype, lse, return_lse)
    if isinstance(mask, Tensor):
        mask = mask_rows(mask, seq_lens, t)
    if scale is None:
        scale = max(d, 1) ** -0.5  # the checks report D = 0
    call = DecodeCall(
        q, c.k, c.v, c.k_scale_cache, c.v_scale_cache, page_table, seq_lens, cu_seqlens_q, mask, sinks, out, lse,
        format, max_query_rows(t, seq_lens, cu_seqlens_q, max_q_len), window_size(window), softcap,
        scale, scale_t, k_scale, k_scale_t, v_scale, v_scale_t, o_scale, o_scale_t, precision, v_format, *more,
        batch_invariant,
    )  # fmt: skip
    dispatch_call("decode", call, backend, CallSignature(options, inputs, made_outputs))
    return attention_outputs([], out, lse, return_lse)


def attention_outputs(
    made_outputs: list[Tensor], out: Tensor | None, lse: Tensor | None, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns the results of an attention: the caller's tensors, or those of `made_outputs` where it passed none."""
    out = made_outputs[0] if out is None else out
    if not return_lse:
        return out
    return out, made_outputs[-1] if lse is None else lse


def allocate_outputs(
    q: Tensor, shape: tuple[int, ...], out: Tensor | None, dtype: torch.dtype | None, lse: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:  # fmt: skip
    """Returns out and lse, the caller's or new ones, and the outputs by name for a `CallSignature`."""
    made_outputs = {"out": output_tensor(q, shape, out, dtype)}
    if as_bool("return_lse", return_lse) and lse is None:
        lse = made_outputs["lse"] = torch.empty(*shape[:2], dtype=torch.float32, device=q.device)
    return made_outputs["out"], lse, made_outputs


def softcap_value(softcap: float | None) -> float:
    """Returns `softcap` as the call record stores it."""
    if type(softcap) is float:
        return softcap
    return 0.0 if softcap is None else as_float("softcap", softcap, "a number or None")


def window_size(window: int | None) -> int:
    """Returns `window` as the call record stores it."""
    if window is not None and window <= 0:
        raise ValueError(f"window: want a positive number of keys (own included) or None, got {window}")
    return window or 0


def mask_rows(mask: Tensor, seq_lens: Tensor, t: int) -> Tensor:
    """Returns a mask [T, W] unchanged, or [B, drafts, W] as [T, W] without copying; B must match."""
    tensor("seq_lens", seq_lens, "B")
    b, split = seq_lens.shape[0], mask.dim() == 3
    rows = mask.shape[:2].numel() if split else len(mask) if mask.dim() == 2 else None
    if rows != t or (split and mask.shape[0] != b) or mask.dtype != torch.uint16:
        by_request = f" or [B={b}, drafts={t // b}, W]" if b and t % b == 0 else ""
        raise ValueError(
            f"mask: want [T={t}, W]{by_request} uint16, W = 2 × ceil(drafts / 32), "
            f"got {list(mask.shape)} {dtype_name(mask.dtype)}"
        )
    return joined("mask", mask) if split else mask


def max_query_rows(t: int, seq_lens: Tensor, cu_seqlens_q: Tensor | None, max_q_len: int | None) -> int:
    """Returns a bound on the query rows of a request; without `cu_seqlens_q` their number, at most `max_q_len`."""
    if max_q_len is not None:
        max_q_len = as_int("max_q_len", max_q_len)
    if cu_seqlens_q is not None:
        if max_q_len is None:
            return t
        if max_q_len <= 0 < t:
            raise ValueError(f"max_q_len: want a positive bound on the rows of a request, got {max_q_len}")
        # A launch has CTAs for every row that the bound allows.
        return min(max_q_len, t) if t > 0 else max_q_len
    tensor("seq_lens", seq_lens, "B")
    b = seq_lens.shape[0]
    rows = t // b if b else 0
    if max_q_len is not None and max_q_len < rows:
        raise ValueError(f"max_q_len: want at least T / B = {rows}, or None without cu_seqlens_q, got {max_q_len}")
    return rows


def output_tensor(q: Tensor, shape: tuple[int, ...], out: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """Returns the tensor that receives an attention's output: `out`, or a new one."""
    if out is not None:
        if dtype is not None and isinstance(out, Tensor):
            check_dtype("out_dtype", dtype, (), out.dtype, "out")
        return out
    if dtype is None and q.dtype not in FP8 and q.is_contiguous() and q.shape == shape:
        return torch.empty_like(q)  # half a microsecond less
    check_dtype("out_dtype", dtype, FLOAT + FP8)
    return torch.empty(*shape, dtype=dtype or (torch.bfloat16 if q.dtype in FP8 else q.dtype), device=q.device)
