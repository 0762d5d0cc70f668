"""Attention over a K/V cache with many new tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .append import KVLike
from .attention import attend

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
    batch_invariant: bool | Literal["prefill"] = False,
    indices: Tensor | None = None,
    index_lens: Tensor | None = None,
    block_size: int = 1,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Paged attention of many new tokens, causal: prompts, and chunks of them, over any cache format.

        >>> q = torch.randn(100, 8, 64)  # prompts of 60 and 40 tokens
        >>> cu_seqlens_q = torch.tensor([0, 60, 100])
        >>> tersekv.prefill(q, cache[0], page_table, seq_lens, cu_seqlens_q, max_q_len=60).shape
        torch.Size([100, 8, 64])

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
        precision:      "exact"; "fast" is a permission: a backend may then hold probabilities or queries in 8 bits
                        where arithmetic is the bound (up to 3e-2 relative norm). Hopper's does without `k` and `v`.
                        e4m3 queries over an fp8_e4m3 cache: probabilities, with heads up to 128 (2.5e-2); with wider
                        heads QK runs in 8 bits, over fp8_per_token_head too. bf16 and fp16 queries, heads up to 256:
                        over int8_per_token_head, rows become int8 codes times a scale (6.5e-3 of outputs where
                        scores are N(0, 1), and `lse` moves by as much of its scores). All else is computed exactly
        batch_invariant:  a request's bits do not depend on the other requests: its keys are split by its own length
                        alone. On one device and backend, for equal sizes, strides and options; docs/serving.md has
                        the cost. "prefill": nor on the rows beside it: a token has the same bits through `decode` and
                        through `prefill`, in a chunk of any length. Not beside k, v or indices
        indices:        [T, Hx, n]  int32 | int64 | uint32, any strides, Hx 1 or the cache's heads: the keys of each row
                        (and KV head), in any order. Entry x stands for positions c * x to c * x + c - 1 of the request,
                        c = block_size, of which a row sees those up to its own; negative entries (uint32: 0xFFFFFFFF)
                        are padding. Nothing else is seen: docs/sparse.md. Not beside window, k or v
        index_lens:     [T] or [T, Hx]  used entries of each list; None: n

    Returns out, or (out, lse) with `return_lse`. No host synchronisation; safe under CUDA graphs when lengths and
    tables change between replays. Raises ValueError or TypeError for arguments that do not fit together.
    """
    return attend(
        "prefill", q, cache, page_table, seq_lens, cu_seqlens_q, k, v, None, softmax_scale, window, sinks, softcap,
        max_q_len, out, out_dtype, out_scale, lse, return_lse, precision, batch_invariant, indices,
        index_lens, block_size, backend,
    )  # fmt: skip
