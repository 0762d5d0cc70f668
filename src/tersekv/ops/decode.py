"""Attention over a K/V cache."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .append import KVLike
from .attention import attend


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
    batch_invariant: bool | Literal["prefill"] = False,
    indices: Tensor | None = None,
    index_lens: Tensor | None = None,
    block_size: int = 1,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Paged attention of a few new tokens per request: MHA, GQA or MQA, any cache format.

        >>> q = torch.randn(2, 8, 64)  # one new token of each of two requests
        >>> tersekv.decode(q, cache[0], page_table, seq_lens).shape
        torch.Size([2, 8, 64])

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
        precision:      "exact"; "fast" is a permission: a backend may then hold probabilities or queries in 8 bits
                        where arithmetic is the bound (up to 3e-2 relative norm), as in `prefill` where it runs the
                        kernels of `prefill`; all else is computed exactly
        batch_invariant:  a request's bits do not depend on the other requests: its keys are split by its own length
                        alone. On one device and backend, for equal sizes, strides and options; docs/serving.md has
                        the cost. "prefill": nor on the rows beside it: a token has the same bits through `decode` and
                        through `prefill`, in a chunk of any length. Not beside mask or indices
        indices:        [T, Hx, n]  int32 | int64 | uint32, any strides, Hx 1 or the cache's heads: the keys of each row
                        (and KV head), in any order. Entry x stands for positions c * x to c * x + c - 1 of the request,
                        c = block_size, of which a row sees those up to its own; negative entries (uint32: 0xFFFFFFFF)
                        are padding. Nothing else is seen: docs/sparse.md. Not beside window or mask
        index_lens:     [T] or [T, Hx]  used entries of each list; None: n

    Returns out, or (out, lse) with `return_lse`. No host synchronisation; safe under CUDA graphs when lengths and
    tables change between replays. Raises ValueError or TypeError for arguments that do not fit together.
    """
    return attend(
        "decode", q, cache, page_table, seq_lens, cu_seqlens_q, None, None, mask, softmax_scale, window, sinks, softcap,
        max_q_len, out, out_dtype, out_scale, lse, return_lse, precision, batch_invariant, indices,
        index_lens, block_size, backend,
    )  # fmt: skip
