"""Attention over a K/V cache with many new tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ..calls import PrefillCall
from ..dispatch.checks import tensor
from ..dispatch.launch_cache import CallSignature, lookup
from ..layers import PagedKVLayer
from ..scalars import as_bool, as_int
from .append import KVLike
from .decode import allocate_outputs, attention_outputs, max_query_rows, softcap_value, window_size
from .registry import dispatch_call
from .scales import attributes, float_and_tensor

# New tokens of a request from which on engines should call `prefill` instead of `decode`: with groups of 4 heads they
# fill one BLOCK_M of its kernels.
MANY_ROWS = 32


def prefill(
    q: Tensor,
    cache: KVLike,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    softmax_scale: float | Tensor | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
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
    """Paged attention of many new tokens, causal: prompts, and chunks of them, over any cache format.

    The new rows of a request are its last tokens: row i of n sees keys 0 to seq_len - n + i. A row before the first
    token sees nothing.

        q:              [T, Hq, D]  bf16 | fp16 | fp32 | e4m3 | e5m2; the rows of all requests, one after the other
        cache:          PagedKVLayer, or bare tensors as `PagedKVLayer.of` reads them; Hq a multiple of its heads
        page_table:     [B, max_pages]  int32 | int64 | uint32; entries past ceil(seq_len / S) are never read
        seq_lens:       [B]  tokens of each request, the new ones included; 0: output 0, lse −inf
        cu_seqlens_q:   [B + 1]  first query row of each request, beginning with 0
        k, v:           [T, H, D], [T, H, Dv]  bf16 | fp16, q's dtype where that is one of them: the new tokens' own
                        rows, after their rotation. With them new tokens attend to these and not to their codes, and the
                        cache holds the tokens before them: neither the new slots nor table entries past
                        ceil((seq_len - n) / S) are read, so the rows may be appended before or after
        softmax_scale:  float or fp32 tensor [1]; default 1 / sqrt(D)
        window:         keys that a query sees, its own included; None: all before it
        sinks:          [Hq] fp32; one more score per head (scaled-logit units, natural log) with a zero value
        softcap:        c > 0: scores become c × tanh(score / c), before masking; None or 0: they stay
        max_q_len:      the host's bound on the rows of a request; default T
        out:            [T, Hq, Dv] to write into; out_dtype: bf16 | fp16 | fp32 | e4m3 | e5m2 (saturating);
                        default: q's dtype, bf16 for an 8-bit q
        out_scale:      multiplies the output before its cast: float or fp32 tensor [1]
        lse:            [T, Hq] fp32 to write into; return_lse returns it too; natural log, sinks included
        precision:      "exact"; "fast" is a permission: a backend may then hold probabilities in 8 bits where
                        arithmetic is the bound (about 2.5e-2 relative norm). Hopper's does for e4m3 queries over an
                        fp8_e4m3 cache without `k` and `v`; all else is computed exactly
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
        q, k, v, c.k, c.v, c.k_scale_cache, c.v_scale_cache, page_table, seq_lens, cu_seqlens_q, sinks, out, lse,
        scale_t, k_scale_t, v_scale_t, o_scale_t, *more,
    )  # fmt: skip
    options = (
        c.format, max_q_len, window, softcap, scale, k_scale, v_scale, o_scale, out_dtype, return_lse, precision,
        batch_invariant, backend,
    )  # fmt: skip
    cached = lookup("prefill", options, inputs)
    if cached is not None:
        return attention_outputs(cached, out, lse, return_lse)

    tensor("q", q, "T Hq D")
    tensor("v_cache", c.v, "P S H Dv")
    tensor("cu_seqlens_q", cu_seqlens_q, "B+1")
    t, heads, d = q.shape
    out, lse, made_outputs = allocate_outputs(q, (t, heads, c.head_dim_v), out, out_dtype, lse, return_lse)
    if scale is None:
        scale = max(d, 1) ** -0.5  # the checks report D = 0
    call = PrefillCall(
        q, k, v, c.k, c.v, c.k_scale_cache, c.v_scale_cache, page_table, seq_lens, cu_seqlens_q, sinks, out, lse,
        format, max_query_rows(t, seq_lens, cu_seqlens_q, max_q_len), window_size(window), softcap,
        scale, scale_t, k_scale, k_scale_t, v_scale, v_scale_t, o_scale, o_scale_t, precision, v_format, *more,
        batch_invariant,
    )  # fmt: skip
    dispatch_call("prefill", call, backend, CallSignature(options, inputs, made_outputs))
    return attention_outputs([], out, lse, return_lse)
