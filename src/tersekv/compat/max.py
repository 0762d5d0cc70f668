"""MAX's fused MLA branches over tersekv's operations, in MAX's argument order.

    from tersekv.compat.max import PagedKVCacheCollection, mla_prefill_branch_fp8

MAX's type parameters are keywords: granularities 1, 128, 128, mask "causal", score mod "no_pos", and `target` "cpu" or
"gpu" as the tensors' device is; others raise. What MAX infers (dtypes, the collection's type) the tensors say. `ctx` is
accepted and not used. Every branch writes `output` in place.

NOTE: no branch is idempotent. The new tokens' raw rows lie in the cache already, and are rotated and normed there; the
prefill branches rotate q in place too. Newer MAX hands the raw rows over instead: `kv_input` [T, kv_lora_rank + rope]
does that here, and with it the cache may be fp8.
"""

from __future__ import annotations

from torch import Tensor

from ._adapt import as_host_int, tensor
from ._max_branches import Step, check_granularity, check_variant, decode, prefill
from ._max_cache import PagedKVCache, PagedKVCacheCollection, plan_into

__all__ = [
    "PagedKVCache",
    "PagedKVCacheCollection",
    "mla_decode_branch_bf16",
    "mla_decode_branch_fp8",
    "mla_prefill_branch_bf16",
    "mla_prefill_branch_fp8",
    "mla_prefill_decode_graph_bf16",
    "mla_prefill_decode_graph_fp8",
    "mla_prefill_plan",
]


def mla_prefill_branch_fp8(
    output: Tensor, q: Tensor, input_row_offsets: Tensor, freqs_cis: Tensor, kv_norm_gamma: Tensor,
    kv_collection: PagedKVCacheCollection, layer_idx: int, scale: float, epsilon: float, buffer_row_offsets: Tensor,
    cache_offsets: Tensor, buffer_length: int, kv_b_proj: Tensor, kv_b_proj_scale: Tensor, ctx: object = None,
    *, m_scale_granularity: int = 1, n_scale_granularity: int = 128, k_scale_granularity: int = 128,
    mask_str: str = "causal", score_mod_str: str = "no_pos", target: str | None = None,
    kv_input: Tensor | None = None, backend: str | None = None,
) -> None:  # fmt: skip
    """Rotate q and the new keys, norm the new latents, gather, quantise, up-project and attend, in one go.

        >>> mla_prefill_branch_fp8(
        ...     output, q, input_row_offsets, freqs_cis, kv_norm_gamma, kv_collection, 0, 192**-0.5, 1e-6,
        ...     buffer_row_offsets, cache_offsets, buffer_length, kv_b_proj, kv_b_proj_scale,
        ... )

        output:              [T, H, v_head_dim]  written
        q:                   [T, H, nope + rope]  bf16 | fp16; its rotary part is rotated in place
        input_row_offsets:   [B + 1]  first new token of each request
        freqs_cis:           [max_pos, rope]  cos0, sin0, cos1, sin1, …; the rotation is computed in its dtype
        kv_norm_gamma:       [kv_lora_rank]; epsilon: RMSNorm's constant
        kv_collection:       rows of the new tokens are rewritten in place; layer_idx: which layer
        scale:               of the scores
        buffer_row_offsets:  [B + 1]  rows of each request in the up-projection buffer
        cache_offsets:       [B + 1]  first cached token of each request in the buffer; only B are read
        buffer_length:       rows of the buffer; 0: nothing happens, `output` stays as it is. With fewer than the
                             requests hold, `output` is attention to the tokens in the buffer alone
        kv_b_proj:           [H * (nope + v_head_dim), kv_lora_rank]  e4m3, per head [nope | v]
        kv_b_proj_scale:     [N/128, K/128]  fp32

    One call handles one buffer. Requests that hold more tokens than it raise ValueError in checked mode; elsewhere the
    tokens beyond it are not seen, as in MAX, since only the device knows the lengths (`tersekv.mla_prefill` runs in
    chunks). Raises ValueError or TypeError for arguments that do not fit.
    """
    check_granularity(m_scale_granularity, n_scale_granularity, k_scale_granularity)
    check_variant(mask_str, score_mod_str, target, q)
    step = Step(
        output, q, input_row_offsets, freqs_cis, kv_norm_gamma, kv_collection, layer_idx, scale, epsilon, kv_input,
        backend,
    )  # fmt: skip
    kv_b_proj_scale = tensor("kv_b_proj_scale", kv_b_proj_scale)
    prefill(step, buffer_row_offsets, cache_offsets, buffer_length, kv_b_proj, kv_b_proj_scale)


def mla_prefill_branch_bf16(
    output: Tensor, q: Tensor, input_row_offsets: Tensor, freqs_cis: Tensor, kv_norm_gamma: Tensor,
    kv_collection: PagedKVCacheCollection, layer_idx: int, scale: float, epsilon: float, buffer_row_offsets: Tensor,
    cache_offsets: Tensor, buffer_length: int, kv_b_proj: Tensor, ctx: object = None,
    *, mask_str: str = "causal", score_mod_str: str = "no_pos", target: str | None = None,
    kv_input: Tensor | None = None, backend: str | None = None,
) -> None:  # fmt: skip
    """`mla_prefill_branch_fp8` with kv_b_proj in q's dtype; latents are not quantised.

    >>> mla_prefill_branch_bf16(
    ...     output, q, input_row_offsets, freqs_cis, kv_norm_gamma, kv_collection, 0, 192**-0.5, 1e-6,
    ...     buffer_row_offsets, cache_offsets, buffer_length, kv_b_proj,
    ... )
    """
    check_variant(mask_str, score_mod_str, target, q)
    step = Step(
        output, q, input_row_offsets, freqs_cis, kv_norm_gamma, kv_collection, layer_idx, scale, epsilon, kv_input,
        backend,
    )  # fmt: skip
    prefill(step, buffer_row_offsets, cache_offsets, buffer_length, kv_b_proj, None)


def mla_decode_branch_fp8(
    output: Tensor, q: Tensor, input_row_offsets: Tensor, freqs_cis: Tensor, kv_norm_gamma: Tensor,
    kv_collection: PagedKVCacheCollection, layer_idx: int, scale: float, epsilon: float, w_uk: Tensor,
    w_uk_scale: Tensor, w_uv: Tensor, w_uv_scale: Tensor, ctx: object = None,
    *, m_scale_granularity: int = 1, n_scale_granularity: int = 128, k_scale_granularity: int = 128,
    mask_str: str = "causal", score_mod_str: str = "no_pos", target: str | None = None,
    kv_input: Tensor | None = None, backend: str | None = None,
) -> None:  # fmt: skip
    """Rotate and norm as the prefill branch does, then q_nope · w_uk → absorbed attention → · w_uv.

        >>> mla_decode_branch_fp8(
        ...     output, q, input_row_offsets, freqs_cis, kv_norm_gamma, kv_collection, 0, 192**-0.5, 1e-6,
        ...     w_uk, w_uk_scale, w_uv, w_uv_scale,
        ... )

        output … epsilon:        as in `mla_prefill_branch_fp8`; q is not written
        w_uk, w_uk_scale:        [H, kv_lora_rank, nope] e4m3, [H, kv_lora_rank/128, nope/128] fp32
        w_uv, w_uv_scale:        [H, v_head_dim, kv_lora_rank] e4m3, [H, v_head_dim/128, kv_lora_rank/128] fp32

    The input of each projection is quantised per token, head and 128 columns (amax capped at 1200), its result rounded
    to q's dtype. The rotary part of q is rotated, rounded to q's dtype and not quantised. Zero tokens: nothing happens.
    Raises ValueError or TypeError for arguments that do not fit.
    """
    check_granularity(m_scale_granularity, n_scale_granularity, k_scale_granularity)
    check_variant(mask_str, score_mod_str, target, q)
    step = Step(
        output, q, input_row_offsets, freqs_cis, kv_norm_gamma, kv_collection, layer_idx, scale, epsilon, kv_input,
        backend,
    )  # fmt: skip
    decode(step, w_uk, tensor("w_uk_scale", w_uk_scale), w_uv, tensor("w_uv_scale", w_uv_scale))


def mla_decode_branch_bf16(
    output: Tensor, q: Tensor, input_row_offsets: Tensor, freqs_cis: Tensor, kv_norm_gamma: Tensor,
    kv_collection: PagedKVCacheCollection, layer_idx: int, scale: float, epsilon: float, w_uk: Tensor,
    w_uv: Tensor, ctx: object = None,
    *, mask_str: str = "causal", score_mod_str: str = "no_pos", target: str | None = None,
    kv_input: Tensor | None = None, backend: str | None = None,
) -> None:  # fmt: skip
    """`mla_decode_branch_fp8` with w_uk and w_uv in q's dtype; nothing is quantised.

    >>> mla_decode_branch_bf16(
    ...     output, q, input_row_offsets, freqs_cis, kv_norm_gamma, kv_collection, 0, 192**-0.5, 1e-6, w_uk, w_uv
    ... )
    """
    check_variant(mask_str, score_mod_str, target, q)
    step = Step(
        output, q, input_row_offsets, freqs_cis, kv_norm_gamma, kv_collection, layer_idx, scale, epsilon, kv_input,
        backend,
    )  # fmt: skip
    decode(step, w_uk, None, w_uv, None)


def mla_prefill_decode_graph_fp8(
    output: Tensor, q: Tensor, input_row_offsets: Tensor, freqs_cis: Tensor, kv_norm_gamma: Tensor,
    kv_collection: PagedKVCacheCollection, layer_idx: int, scale: float, epsilon: float, buffer_row_offsets: Tensor,
    cache_offsets: Tensor, buffer_length: int, max_seq_len: int, kv_b_proj: Tensor, kv_b_proj_scale: Tensor,
    w_uk: Tensor, w_uk_scale: Tensor, w_uv: Tensor, w_uv_scale: Tensor, ctx: object = None,
    *, m_scale_granularity: int = 1, n_scale_granularity: int = 128, k_scale_granularity: int = 128,
    mask_str: str = "causal", score_mod_str: str = "no_pos", target: str | None = None,
    kv_input: Tensor | None = None, backend: str | None = None,
) -> None:  # fmt: skip
    """The decode branch where max_seq_len (most new tokens of one request) is 1, else the prefill branch.

        >>> mla_prefill_decode_graph_fp8(
        ...     output, q, input_row_offsets, freqs_cis, kv_norm_gamma, kv_collection, 0, 192**-0.5, 1e-6,
        ...     buffer_row_offsets, cache_offsets, buffer_length, max_seq_len, kv_b_proj, kv_b_proj_scale,
        ...     w_uk, w_uk_scale, w_uv, w_uv_scale,
        ... )

    Arguments as in `mla_prefill_branch_fp8` and `mla_decode_branch_fp8`.
    """
    check_granularity(m_scale_granularity, n_scale_granularity, k_scale_granularity)
    check_variant(mask_str, score_mod_str, target, q)
    step = Step(
        output, q, input_row_offsets, freqs_cis, kv_norm_gamma, kv_collection, layer_idx, scale, epsilon, kv_input,
        backend,
    )  # fmt: skip
    if as_host_int("max_seq_len", max_seq_len) == 1:
        decode(step, w_uk, tensor("w_uk_scale", w_uk_scale), w_uv, tensor("w_uv_scale", w_uv_scale))
    else:
        kv_b_proj_scale = tensor("kv_b_proj_scale", kv_b_proj_scale)
        prefill(step, buffer_row_offsets, cache_offsets, buffer_length, kv_b_proj, kv_b_proj_scale)


def mla_prefill_decode_graph_bf16(
    output: Tensor, q: Tensor, input_row_offsets: Tensor, freqs_cis: Tensor, kv_norm_gamma: Tensor,
    kv_collection: PagedKVCacheCollection, layer_idx: int, scale: float, epsilon: float, buffer_row_offsets: Tensor,
    cache_offsets: Tensor, buffer_length: int, max_seq_len: int, kv_b_proj: Tensor, w_uk: Tensor, w_uv: Tensor,
    ctx: object = None, *, mask_str: str = "causal", score_mod_str: str = "no_pos", target: str | None = None,
    kv_input: Tensor | None = None, backend: str | None = None,
) -> None:  # fmt: skip
    """`mla_prefill_decode_graph_fp8` with every weight in q's dtype.

    >>> mla_prefill_decode_graph_bf16(
    ...     output, q, input_row_offsets, freqs_cis, kv_norm_gamma, kv_collection, 0, 192**-0.5, 1e-6,
    ...     buffer_row_offsets, cache_offsets, buffer_length, max_seq_len, kv_b_proj, w_uk, w_uv,
    ... )
    """
    check_variant(mask_str, score_mod_str, target, q)
    step = Step(
        output, q, input_row_offsets, freqs_cis, kv_norm_gamma, kv_collection, layer_idx, scale, epsilon, kv_input,
        backend,
    )  # fmt: skip
    if as_host_int("max_seq_len", max_seq_len) == 1:
        decode(step, w_uk, None, w_uv, None)
    else:
        prefill(step, buffer_row_offsets, cache_offsets, buffer_length, kv_b_proj, None)


def mla_prefill_plan(
    buffer_row_offsets: Tensor, cache_offsets: Tensor, buffer_lengths: Tensor, input_row_offsets: Tensor,
    k_cache: PagedKVCache | PagedKVCacheCollection, buffer_token_size: int, ctx: object = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Plan the chunks of a prefill on the device. Writes its first three arguments, and returns them.

        >>> buffer_row_offsets, cache_offsets = torch.zeros(2, 2, 3, dtype=torch.int32)
        >>> buffer_lengths = torch.zeros(2, dtype=torch.int32)
        >>> mla_prefill_plan(buffer_row_offsets, cache_offsets, buffer_lengths, input_row_offsets, kv_collection, 64)[2]
        tensor([64, 36], dtype=torch.int32)

        buffer_row_offsets:  [max_chunks, B + 1]  rows of each request in each chunk
        cache_offsets:       [max_chunks, B + 1]  first cached token of each request; the last column is not written
        buffer_lengths:      [max_chunks]  rows of each chunk; -1 after the last (signed)
        input_row_offsets:   [B + 1]  first new token of each request
        k_cache:             of a layer, or the whole collection: its cache_lengths count
        buffer_token_size:   rows of the buffer

    Lengths [10, 30] and a buffer of 32 give row offsets [[0, 10, 32], [0, 0, 8]], cache offsets [[0, 0], [10, 22]] and
    lengths [32, 8]. Tokens beyond max_chunks are in no chunk; in checked mode they raise ValueError, as shapes that do
    not fit do everywhere. `tersekv.mla_prefill_plan` plans on the host.
    """
    size = as_host_int("buffer_token_size", buffer_token_size)
    if size <= 0:
        raise ValueError(f"buffer_token_size: want a positive number, got {size}")
    lens = getattr(k_cache, "cache_lengths", None)
    if lens is None:
        raise TypeError(f"k_cache: want a cache with cache_lengths, got {type(k_cache).__name__}")
    plan_into(buffer_row_offsets, cache_offsets, buffer_lengths, input_row_offsets, lens, size)
    return buffer_row_offsets, cache_offsets, buffer_lengths
