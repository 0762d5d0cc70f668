"""The decode branch of MLA, from unrotated queries and raw latents to the heads' values: `mla_decode_branch`."""

from __future__ import annotations

from torch import Tensor

from ..calls import MLADecodeBranchCall
from ..dispatch.checks import tensor
from ..dispatch.launch_cache import CallSignature, lookup
from ..layers import PagedLatentLayer
from ..scalars import as_float, as_int
from .attention import max_query_rows, output_tensor
from .mla import LatentLike, rotary_part
from .registry import dispatch_call
from .scales import float_and_tensor


def mla_decode_branch(
    q: Tensor,
    cache: LatentLike,
    page_table: Tensor,
    cache_lens: Tensor,
    freqs_cis: Tensor | None,
    kv_norm_gamma: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    softmax_scale: float | Tensor,
    w_uk_scale: Tensor | None = None,
    w_uv_scale: Tensor | None = None,
    kv_c: Tensor | None = None,
    k_pe: Tensor | None = None,
    epsilon: float = 1e-6,
    cu_seqlens_q: Tensor | None = None,
    max_q_len: int | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The decode branch of MLA: rope, norm and append, q_nope · w_uk, absorbed attention, · w_uv.

        >>> q = torch.randn(2, 16, 128 + 64, dtype=torch.bfloat16)  # one new token of each of two requests
        >>> tersekv.mla_decode_branch(
        ...     q, latent_cache[0], page_table, seq_lens - 1, freqs_cis, kv_norm_gamma, w_uk, w_uv,
        ...     softmax_scale=192**-0.5, kv_c=kv_c[:2], k_pe=k_pe[:2],
        ... ).shape
        torch.Size([2, 16, 128])

        q:                [T, H, Dn + R]  bf16 | fp16, unrotated; not written
        cache:            PagedLatentLayer, or bare tensors; the new tokens' rows are written: normed latent,
                          rotated k_pe (interleaved pairs)
        page_table:       [B, max_pages]; entries past the request's tokens are never read
        cache_lens:       [B]  tokens cached before this step; new token i of request b stands at cache_lens[b] + i
        freqs_cis:        [max_pos, R]  cos0, sin0, cos1, sin1, …; the rotation is computed in its dtype. None: there
                          is no rotary part (R = 0), in q and k_pe neither
        kv_norm_gamma:    [L]  RMSNorm weight; epsilon its constant
        w_uk, w_uv:       [H, L, Dn], [H, Dv, L]  q's dtype; or e4m3 with w_uk_scale [H, L/128, Dn/128] and w_uv_scale
                          [H, Dv/128, L/128] fp32, as in `mla_project`
        softmax_scale:    float or fp32 tensor [1]; there is no default, since L + R is not the model's head size
        kv_c, k_pe:       [T, L], [T, R]  raw latents of the new tokens; None: they lie in the cache already, raw
                          (16-bit caches only; the op is then not idempotent)
        cu_seqlens_q:     [B + 1]  first new token of each request, 0 the first; None: T / B each; several are causal
        max_q_len:        host bound on the new tokens of a request, for ragged ones: the closer the faster (default T)
        out:              [T, H, Dv] in q's dtype; not where another argument begins

    What `mla_prefill` with an empty plan, `mla_project`, `mla_decode` and `mla_project` compute, in one call: projected
    and rotated queries and the attended latents are rounded to q's dtype. Zero tokens: nothing happens.

    NOTE: as in `mla_project`, earlier launches that may still be running may not write the weights or their scales:
    synchronise once after they are written.

    Returns out. No host synchronisation; safe under CUDA graphs. Raises ValueError or TypeError for arguments that do
    not fit together, before anything is written.
    """
    c = cache if isinstance(cache, PagedLatentLayer) else PagedLatentLayer.of(cache)
    kv_scale, kv_scale_t = float_and_tensor(c.kv_scale, "kv_scale")
    scale, scale_t = float_and_tensor(softmax_scale, "softmax_scale")
    epsilon = as_float("epsilon", epsilon)
    max_q_len = None if max_q_len is None else as_int("max_q_len", max_q_len)
    inputs = (
        q, kv_c, k_pe, c.ckv, c.kpe, c.ckv_scale_cache, page_table, cache_lens, cu_seqlens_q, freqs_cis, kv_norm_gamma,
        w_uk, w_uk_scale, w_uv, w_uv_scale, out, scale_t, kv_scale_t,
    )  # fmt: skip
    options = (c.format, max_q_len, scale, epsilon, kv_scale, backend)
    cached = lookup("mla_decode_branch", options, inputs)
    if cached is not None:
        return cached[0] if out is None else out
    tensor("q", q, "T H Dq")
    tensor("w_uv", w_uv, "H Dv L")
    tensor("cache_lens", cache_lens, "B")
    out = output_tensor(q, (*q.shape[:2], w_uv.shape[1]), out, None)
    call = MLADecodeBranchCall(
        q, kv_c, rotary_part(k_pe), c.ckv, c.kpe, c.ckv_scale_cache, page_table, cache_lens, cu_seqlens_q,
        rotary_part(freqs_cis), kv_norm_gamma,
        w_uk, w_uk_scale, w_uv, w_uv_scale, out, c.format, max_query_rows(q.shape[0], cache_lens, cu_seqlens_q,
                                                                          max_q_len),
        scale, scale_t, epsilon, kv_scale, kv_scale_t,
    )  # fmt: skip
    dispatch_call("mla_decode_branch", call, backend, CallSignature(options, inputs, {"out": out}))
    return out
