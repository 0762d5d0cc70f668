"""Attention over a K/V cache: what `decode` and `prefill` do with their arguments."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..calls import AttentionCall
from ..dispatch.checks import FLOAT, dtype_name, joined, tensor
from ..dispatch.checks import dtype as check_dtype
from ..dispatch.launch_cache import CallSignature, lookup
from ..formats import FP8
from ..layers import PagedKVLayer
from ..scalars import as_bool, as_float, as_int
from .append import KVLike
from .registry import dispatch_call
from .scales import attributes, float_and_tensor


def attend(
    op: str, q: Tensor, cache: KVLike, page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor | None,
    k: Tensor | None, v: Tensor | None, mask: Tensor | None, softmax_scale: float | Tensor | None, window: int | None,
    sinks: Tensor | None, softcap: float | None, max_q_len: int | None, out: Tensor | None,
    out_dtype: torch.dtype | None, out_scale: float | Tensor, lse: Tensor | None, return_lse: bool, precision: str,
    batch_invariant: bool | Literal["prefill"], indices: Tensor | None, index_lens: Tensor | None, block_size: int,
    backend: str | None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Runs `decode` or `prefill`, by the contracts of these; op: its name."""
    c = cache if isinstance(cache, PagedKVLayer) else PagedKVLayer.of(cache)
    k_scale, k_scale_t = float_and_tensor(c.k_scale, "k_scale")
    v_scale, v_scale_t = float_and_tensor(c.v_scale, "v_scale")
    o_scale, out_scale_t = float_and_tensor(out_scale, "out_scale")
    scale, scale_t = (None, None) if softmax_scale is None else float_and_tensor(softmax_scale, "softmax_scale")
    softcap = softcap_value(softcap)
    max_q_len = None if max_q_len is None else as_int("max_q_len", max_q_len)
    window = None if window is None else as_int("window", window)
    invariant, prefill_invariant = invariances(batch_invariant)
    block_size = as_int("block_size", block_size)
    inputs = (  # as `attention_inputs`, without a call's 0.6 µs
        q, c.k, c.v, page_table, seq_lens, out, k, v, c.k_scale_cache, c.v_scale_cache, cu_seqlens_q, mask, sinks, lse,
        scale_t, k_scale_t, v_scale_t, out_scale_t, c.k_signs, c.v_signs, c.k_channel_scale, c.v_channel_scale,
        indices, index_lens,
    )  # fmt: skip
    options = (
        c.format, max_q_len, window, softcap, scale, k_scale, v_scale, o_scale, out_dtype, return_lse,
        type(return_lse), precision, invariant, prefill_invariant, block_size, backend,  # 1 is no bool
    )  # fmt: skip
    cached = lookup(op, options, inputs)
    if cached is not None:
        return attention_outputs(cached, out, lse, return_lse)

    tensor("q", q, "T Hq D")
    tensor("v_cache", c.v, "P S H Dv")
    if op == "prefill":
        tensor("cu_seqlens_q", cu_seqlens_q, "B+1")
    t, heads, d = q.shape
    out, lse, made_outputs = allocate_outputs(q, (t, heads, c.head_dim_v), out, out_dtype, lse, return_lse)
    if isinstance(mask, Tensor):
        mask = mask_rows(mask, seq_lens, t)
    format, v_format, _ = attributes(c)
    call = AttentionCall(
        q=q, k=k, v=v, k_cache=c.k, v_cache=c.v, k_scale_cache=c.k_scale_cache, v_scale_cache=c.v_scale_cache,
        page_table=page_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q, mask=mask, sinks=sinks, out=out, lse=lse,
        format=format, v_format=v_format, max_q_len=max_query_rows(t, seq_lens, cu_seqlens_q, max_q_len),
        window=window_size(window), softcap=softcap,
        softmax_scale=max(d, 1) ** -0.5 if scale is None else scale,  # the checks report D = 0
        softmax_scale_t=scale_t, k_scale=k_scale, k_scale_t=k_scale_t, v_scale=v_scale, v_scale_t=v_scale_t,
        out_scale=o_scale, out_scale_t=out_scale_t, precision=precision, k_signs=c.k_signs, v_signs=c.v_signs,
        k_channel_scale=c.k_channel_scale, v_channel_scale=c.v_channel_scale, batch_invariant=invariant,
        prefill_invariant=prefill_invariant, indices=indices, index_lens=index_lens, block_size=block_size,
    )  # fmt: skip
    dispatch_call(op, call, backend, CallSignature(options, inputs, made_outputs))
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


def invariances(batch_invariant: bool | str) -> tuple[bool, bool]:
    """Returns `batch_invariant` as the call record stores it: (batch_invariant, prefill_invariant)."""
    if isinstance(batch_invariant, str):
        if batch_invariant != "prefill":
            raise ValueError(f'batch_invariant: want True, False or "prefill", got {batch_invariant!r}')
        return True, True
    return as_bool("batch_invariant", batch_invariant), False


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


def max_query_rows(t: int, seq_lens: Tensor | None, cu_seqlens_q: Tensor | None, max_q_len: int | None) -> int:
    """Returns a bound on the query rows of a request; without `cu_seqlens_q` their number, at most `max_q_len`."""
    if cu_seqlens_q is not None:
        return max_rows_of_requests(t, 0, cu_seqlens_q, max_q_len)
    tensor("seq_lens", seq_lens, "B")
    return max_rows_of_requests(t, seq_lens.shape[0], None, max_q_len)  # type: ignore[union-attr]


def max_rows_of_requests(t: int, b: int, cu_seqlens_q: Tensor | None, max_q_len: int | None) -> int:
    """Returns `max_query_rows` of b requests, which is not looked at beside `cu_seqlens_q`."""
    if max_q_len is not None:
        max_q_len = as_int("max_q_len", max_q_len)
    if cu_seqlens_q is not None:
        if max_q_len is None:
            return t
        if max_q_len <= 0 < t:
            raise ValueError(f"max_q_len: want a positive bound on the rows of a request, got {max_q_len}")
        # A launch has CTAs for every row that the bound allows.
        return min(max_q_len, t) if t > 0 else max_q_len
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
    if dtype is None and q.dtype not in FP8 and q.is_contiguous() and q.shape == shape and not q.is_meta:
        return torch.empty_like(q)  # half a microsecond less; of a meta tensor it would import sympy, half a second
    check_dtype("out_dtype", dtype, FLOAT + FP8)
    return torch.empty(*shape, dtype=dtype or (torch.bfloat16 if q.dtype in FP8 else q.dtype), device=q.device)
