"""FlashInfer's signatures over tersekv's operations. They rename and convert units; kernels are tersekv's own.

    from tersekv.compat.flashinfer import xqa_batch_decode_with_kv_cache

Units that differ from tersekv's own (docs/units.md): `quant_scale_*` multiply where tersekv's scales dequantise; LSE is
base 2; `window_left` does not count the query's own token; `xqa` divides by sqrt(D) itself, the others do not.
Workspaces, semaphores, `enable_pdl` and `sm_count` are accepted and have no effect: nothing needs to be zeroed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..calls import MLADecodeCall, attention_inputs
from ..formats import FP8
from ..layers import PagedLatentLayer
from ..ops.registry import dispatch_call, same_address
from ..ops.scales import float_and_tensor
from ._adapt import as_host_int, dtype_name, joined, lookup_cached, number_or_tensor, scalar, tensor, with_caller_names
from ._flashinfer_append import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
    rope_quantize_fp8_append_paged_kv_cache,
)
from ._flashinfer_decode import (
    Scale,
    as_inputs,
    decode_call,
    has_scales,
    spread,
    times,
    trtllm_batch_decode_with_kv_cache,
    xqa_batch_decode_with_kv_cache,
)
from ._flashinfer_merge import merge_state, merge_states
from ._flashinfer_single import single_decode_with_kv_cache, single_prefill_with_kv_cache
from ._flashinfer_topk import TopKTieBreak, top_k, top_k_page_table_transform, top_k_ragged_transform
from ._flashinfer_views import beam_lens, beam_rows, draft_rows, halves, head_rows, latent_layer, latent_rows, layer
from ._flashinfer_wrappers import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "TopKTieBreak",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_states",
    "rope_quantize_fp8_append_paged_kv_cache",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "top_k",
    "top_k_page_table_transform",
    "top_k_ragged_transform",
    "trtllm_batch_decode_with_kv_cache",
    "xqa",
    "xqa_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache_mla",
    "xqa_mla",
]

# FlashInfer's names that are not here, and what to use instead.
ABSENT = {
    "BatchAttention": "tersekv.prefill, which takes decodes and prompts of one batch",
    "BatchAttentionWithAttentionSinkWrapper": "BatchPrefillWithPagedKVCacheWrapper, with sinks= of its run",
    "BatchDecodeMlaWithPagedKVCacheWrapper": "xqa_batch_decode_with_kv_cache_mla, or tersekv.mla_decode",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper": "one wrapper for the prefix and one for the rest, each with "
    "return_lse=True, and merge_state",
    "BatchMLAPagedAttentionWrapper": "xqa_batch_decode_with_kv_cache_mla, or tersekv.mla_decode and "
    "tersekv.mla_prefill",
    "BatchPODWithPagedKVCacheWrapper": "tersekv.prefill, which takes decodes and prompts of one batch",
    "BatchPrefillWithRaggedKVCacheWrapper": "tersekv.prefill with the rows as k= and v=, over pages that hold the "
    "tokens before them; single_prefill_with_kv_cache for one request without pages",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper": "one wrapper for the prefix (causal=False) and one for the rest "
    "(causal=True), each with return_lse=True, and merge_state",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper": "BatchDecodeWithPagedKVCacheWrapper with use_cuda_graph=True",
    "MultiLevelCascadeAttentionWrapper": "a wrapper for each level with return_lse=True, and merge_states; requests "
    "that share pages need no cascade to be right",
    "PODWithPagedKVCacheWrapper": "tersekv.prefill, which takes decodes and prompts of one batch",
    "cudnn_batch_decode_with_kv_cache": "trtllm_batch_decode_with_kv_cache",
    "fast_decode_plan": "plan of BatchDecodeWithPagedKVCacheWrapper",
    "merge_state_in_place": "merge_state, which returns its result, or tersekv.merge_states with out=",
    "nvfp4_quantize_append_paged_kv_cache": 'tersekv.append to a cache of format="nvfp4"',
    "single_prefill_with_kv_cache_return_lse": "single_prefill_with_kv_cache with return_lse=True",
    "trtllm_batch_context_with_kv_cache": "BatchPrefillWithPagedKVCacheWrapper, or tersekv.prefill",
    "trtllm_batch_decode_with_kv_cache_mla": "xqa_batch_decode_with_kv_cache_mla, or tersekv.mla_decode",
}


def __getattr__(name: str) -> object:
    # `from ... import` would drop the words of an AttributeError.
    if name in ABSENT:
        raise ImportError(f"tersekv.compat.flashinfer has no {name}: use {ABSENT[name]}", name=__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_JOINED = {"q_pe": "q_nope", "kpe": "ckv", "ckv_scale_cache": "ckv"}  # of one tensor each
_NO_LISTS = (None,) * 11  # of `mla_decode`: indices, index_lens, sinks, a second set of keys, max_logits
_XQA_NAMES = {
    "out": "output",
    "kv_cache": "k_cache",
    "scale_cache": "k_sf_cache",
    "cu_seqlens_q": "q_cu_seq_lens",
    "max_q_len": "q_seq_len",
    "layout": "kv_layout",
    "k_scale_cache": "k_sf_cache",
    "v_scale_cache": "v_sf_cache",
    "softmax_scale": "q_scale",
    "k_scale": "kv_scale",
    "v_scale": "kv_scale",
    "out_scale": "kv_scale",
    "q_nope": "q",
    "q_pe": "q",
    "ckv": "k_cache",
    "kpe": "k_cache",
    "cache": "k_cache",
}
_DECODE_MLA_NAMES = {
    **dict.fromkeys(("q_nope", "q_pe"), "query"),
    **dict.fromkeys(("ckv", "kpe", "cache"), "kv_cache"),
    "page_table": "block_tables",
    "softmax_scale": "bmm1_scale",
    "out_scale": "bmm2_scale",
}


def xqa(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    workspace_buffer: Tensor,
    semaphores: Tensor,
    num_kv_heads: int,
    page_size: int,
    sinks: Tensor | None = None,
    q_scale: float | Tensor = 1.0,
    kv_scale: float | Tensor = 1.0,
    sliding_win_size: int = 0,
    kv_layout: str = "NHD",
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
    rcp_out_scale: float = 1.0,
    q_seq_len: int = 1,
    mask: Tensor | None = None,
    *,
    k_sf_cache: Tensor | None = None,
    v_sf_cache: Tensor | None = None,
    q_cu_seq_lens: Tensor | None = None,
) -> None:
    """`flashinfer.xqa.xqa`: output = softmax(q·k · q_scale · kv_scale / sqrt(D)) · v · kv_scale, in place.

        >>> q = torch.randn(2, 1, 8, 64, dtype=torch.bfloat16)
        >>> output = torch.empty_like(q)
        >>> xqa(q, k_cache, v_cache, page_table, seq_lens, output, workspace_buffer, semaphores, 2, page_size=16)

        q:                 [B, 1, Hq, D]; drafts [B, 1, q_seq_len, Hq, D]; ragged drafts [T, Hq, D] with q_cu_seq_lens
        k_cache, v_cache:  [P, S, H, D] (HND [P, H, S, D]), or [P × S × H, D]
        page_table:        [B, max_pages]; seq_lens [B, 1] or [B], the drafts included
        output:            as q, with Dv columns; 16-bit or fp8, written in place
        sinks:             [H, Hq / H] fp32
        sliding_win_size:  keys that a query sees, its own included, as tersekv's `window`; 0: all
        rcp_out_scale:     multiplies an fp8 output only
        mask:              [B, q_seq_len, 2 × ceil(q_seq_len / 32)] uint16; None: causal (FlashInfer needs one)
        k_sf_cache, v_sf_cache:  e4m3 or uint8 block scales of NVFP4, in the layout of the cache

    NOTE: unlike `xqa_batch_decode_with_kv_cache` and `xqa_mla`, this one divides the scores by sqrt(D) itself.
    FlashInfer ignores `kv_scale` beside a 16-bit cache; here the formula is the same for every dtype. Raises ValueError
    or TypeError for a bad argument.
    """
    sf = None if k_sf_cache is v_sf_cache is None else (k_sf_cache, v_sf_cache)
    (_, _, k_scales, v_scales), parts = halves((k_cache, v_cache), sf)
    numbers: tuple = q_scale, kv_scale, rcp_out_scale
    tensors: dict[str, Tensor] = {}
    if isinstance(q_scale, Tensor) or isinstance(kv_scale, Tensor):
        scales = _xqa_scales(q, k_cache, output, *numbers)
        numbers, tensors = as_inputs(scales)
    signature, found = lookup_cached(
        _XQA_NAMES, "decode", ("xqa", num_kv_heads, page_size, sliding_win_size, kv_layout, q_seq_len, *numbers),
        attention_inputs(
            q=q, k_cache=k_cache, v_cache=v_cache, k_scale_cache=k_scales, v_scale_cache=v_scales,
            page_table=page_table, seq_lens=seq_lens, cu_seqlens_q=q_cu_seq_lens, mask=mask, sinks=sinks, out=output,
            **tensors,
        ),
        parts,
    )  # fmt: skip
    if found is not None:
        return
    rows = q_seq_len if q_cu_seq_lens is None else None
    query, result = beam_rows("q", q, rows), beam_rows("output", output, rows)
    lens = beam_lens(seq_lens)
    k, v = (
        head_rows(n, t, num_kv_heads, page_size, kv_layout) for n, t in (("k_cache", k_cache), ("v_cache", v_cache))
    )
    sf = None
    if k_sf_cache is not None or v_sf_cache is not None:
        pair = (("k_sf_cache", k_sf_cache), ("v_sf_cache", v_sf_cache))
        k_sf, v_sf = (head_rows(n, t, num_kv_heads, page_size, kv_layout) for n, t in pair)
        sf = (k_sf, v_sf)
    kv = with_caller_names(_XQA_NAMES, layer, (k, v), "NHD", sf)
    rows = draft_rows("q", "q_seq_len", query.shape[0], lens.shape[0], q_seq_len, q_cu_seq_lens)
    if sinks is not None and tensor("sinks", sinks).dim() == 2:
        per_head = [k.shape[2], query.shape[1] // max(k.shape[2], 1)]
        if list(sinks.shape) != per_head:
            raise ValueError(f"sinks: want [H, Hq / H] = {per_head}, got {list(sinks.shape)}")
        sinks = joined("sinks", sinks)
    window = as_host_int("sliding_win_size", sliding_win_size)
    if window < 0:
        raise ValueError(f"sliding_win_size: want a number of keys, or 0 for all, got {window}")
    if not tensors:
        scales = _xqa_scales(q, k_cache, output, q_scale, kv_scale, rcp_out_scale)
    call = decode_call(query, kv, page_table, lens, q_cu_seq_lens, mask, sinks, result, None, rows, window, scales)
    with_caller_names(_XQA_NAMES, dispatch_call, "decode", call, None, signature)


def _xqa_scales(
    q: Tensor, k_cache: Tensor, output: Tensor, q_scale: Scale, kv_scale: Scale, rcp_out_scale: Scale
) -> dict[str, Scale]:
    """A record's scales. Made before the launch cache is asked where one is a tensor: a product is its input too."""
    device = tensor("q", q).device
    scalar("rcp_out_scale", rcp_out_scale, device)
    outputs = {"kv_scale": kv_scale}
    if tensor("output", output).dtype in FP8:
        outputs["rcp_out_scale"] = rcp_out_scale
    logits = {"q_scale": q_scale, "kv_scale": kv_scale, "sqrt(D)": max(q.shape[-1], 1) ** -0.5}
    return spread(has_scales(k_cache), logits, outputs, device)


def xqa_mla(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    workspace_buffer: Tensor,
    semaphores: Tensor,
    page_size: int,
    q_scale: float | Tensor = 1.0,
    kv_scale: float | Tensor = 1.0,
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
) -> None:
    """`flashinfer.xqa.xqa_mla`: output = softmax(q·k · q_scale · kv_scale) · v · kv_scale, in place; no 1 / sqrt(D).

        >>> q, rows = torch.randn(2, 1, 16, 576).bfloat16(), torch.zeros(16, 16, 576).bfloat16()
        >>> output = torch.empty(2, 1, 16, 512, dtype=torch.bfloat16)
        >>> xqa_mla(q, rows, rows, page_table, seq_lens, output, workspace_buffer, semaphores, 16, 192**-0.5)

        q:           [B, 1, H, L + R]  e4m3 | e5m2 | bf16 | fp16; any H
        k_cache:     rows of L + R: [tokens, L + R], [P, S, L + R] or [P, S, 1, L + R]; or uint8 rows of fp8_ds_mla
        v_cache:     the same rows, or their first L columns: one latent row is key and value. Other memory is
                     read as its own values, by the op for K/V caches; under torch.compile, which cannot compare
                     addresses, so is all but k_cache itself
        page_table:  [B, max_pages]; seq_lens [B, 1] or [B]
        output:      [B, 1, H, L]  bf16 | fp16 | fp32 | fp8, written in place; it says what L is
        page_size:   S, any that the backend takes

    Raises ValueError or TypeError for a bad argument.
    """
    value_rows = _value_rows_key(k_cache, v_cache)
    apart = value_rows is not None and not value_rows[0]
    numbers: tuple = q_scale, kv_scale
    tensors: dict[str, Tensor] = {}
    if isinstance(q_scale, Tensor) or isinstance(kv_scale, Tensor):
        scales = _xqa_mla_scales(q, k_cache, apart, q_scale, kv_scale)
        numbers, tensors = as_inputs(scales)
    options = ("xqa_mla", page_size, value_rows, *numbers)
    if apart:
        inputs = attention_inputs(
            q=q, k_cache=k_cache, v_cache=v_cache, page_table=page_table, seq_lens=seq_lens, out=output, **tensors
        )
        signature, found = lookup_cached(_XQA_NAMES, "decode", options, inputs)
    else:
        scale_tensors = [tensors.get(f"{name}_t") for name in ("softmax_scale", "kv_scale", "out_scale")]
        inputs = (q, None, k_cache, None, None, page_table, seq_lens, None, output, None, *scale_tensors, *_NO_LISTS)
        signature, found = lookup_cached(_XQA_NAMES, "mla_decode", options, inputs, _JOINED)
    if found is not None:
        return
    query, result = beam_rows("q", q, 1), beam_rows("output", output, 1)
    lens = beam_lens(seq_lens)
    rank = output.shape[-1]
    k, v = latent_rows("k_cache", k_cache, page_size), latent_rows("v_cache", v_cache, page_size)
    columns = min(query.shape[-1], k.shape[-1])
    if not 0 < rank < columns:
        raise ValueError(f"output: want [B, 1, H, L], L below the {columns} columns of a row, got {list(output.shape)}")
    if k.dtype != v.dtype or v.shape[-1] < min(rank, k.shape[-1]) or v.shape[0] != k.shape[0]:
        raise ValueError(
            f"v_cache: want the rows of k_cache {list(k.shape)} {dtype_name(k.dtype)}, or their first {rank} columns, "
            f"got {list(v.shape)} {dtype_name(v.dtype)}"
        )
    as_kv = v_cache is not k_cache and not _same_rows(k, v)
    if not tensors or as_kv != apart:
        scales = _xqa_mla_scales(q, k_cache, as_kv, q_scale, kv_scale)
    if as_kv:
        if k.dtype == torch.uint8:
            raise ValueError("v_cache: want k_cache itself, or a view of its rows, for rows of fp8_ds_mla, got a copy")
        kv = with_caller_names(_XQA_NAMES, layer, (k[:, :, None], v[:, :, None, :rank]), "NHD", None)
        call: tuple = decode_call(query, kv, page_table, lens, None, None, None, result, None, 1, 0, scales)
        with_caller_names(_XQA_NAMES, dispatch_call, "decode", call, None, signature if apart else None)
        return
    latent = with_caller_names(_XQA_NAMES, latent_layer, k, rank)
    if query.shape[-1] != rank + latent.kpe.shape[-1]:
        raise ValueError(f"q: want rows of {rank} + {latent.kpe.shape[-1]}, got {list(q.shape)}")
    call = _mla_call(query, latent, page_table, lens, result, 1, **scales)
    with_caller_names(_XQA_NAMES, dispatch_call, "mla_decode", call, None, signature)


def _xqa_mla_scales(q: Tensor, k_cache: Tensor, as_kv: bool, q_scale: Scale, kv_scale: Scale) -> dict[str, Scale]:
    """A record's scales, as `_xqa_scales` has them. as_kv: of the op for K/V caches."""
    device, scaled = tensor("q", q).device, tensor("k_cache", k_cache).dtype in FP8
    factors = {"q_scale": q_scale, "kv_scale": kv_scale}
    if as_kv:
        return spread(scaled, factors, {"kv_scale": kv_scale}, device)
    for name, x in factors.items():
        scalar(name, x, device)
    if scaled:
        return {"softmax_scale": q_scale, "kv_scale": kv_scale, "out_scale": 1.0}
    return {"softmax_scale": times(q_scale, kv_scale), "kv_scale": 1.0, "out_scale": kv_scale}


def xqa_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    out: Tensor | None = None,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    sinks: list[Tensor] | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    """`flashinfer.mla.xqa_batch_decode_with_kv_cache_mla`: out = softmax(bmm1_scale · q·k) · v · bmm2_scale.

        >>> query, kv_cache = torch.randn(2, 1, 16, 576).bfloat16(), torch.zeros(16, 16, 576).bfloat16()
        >>> xqa_batch_decode_with_kv_cache_mla(
        ...     query, kv_cache, workspace_buffer, 128, 512, 64, block_tables, seq_lens, 60, bmm1_scale=192**-0.5
        ... ).shape
        torch.Size([2, 1, 16, 512])

        query:             [B, Q, H, L + R]  e4m3 | e5m2 | bf16 | fp16; any H; Q > 1 rows of a request are causal drafts
        kv_cache:          [P, S, L + R] or [P, 1, S, L + R]: one latent row is key and value
        kv_lora_rank, qk_rope_head_dim:  L and R
        block_tables:      [B, max_pages]; seq_lens [B], the drafts included
        out:               [B, Q, H, L], or [B, H, L] where Q is 1; default: a new tensor [B, Q, H, L] in bf16
        sinks:             None
        qk_nope_head_dim, max_seq_len, workspace_buffer, enable_pdl:  accepted, without effect

    NOTE: FlashInfer multiplies the scores by bmm2_scale too; here it multiplies the output alone, as documented.
    Raises ValueError or TypeError for a bad argument.
    """
    (bmm1, bmm1_t), (bmm2, bmm2_t) = number_or_tensor(bmm1_scale), number_or_tensor(bmm2_scale)
    signature, found = lookup_cached(
        _DECODE_MLA_NAMES, "mla_decode", ("xqa_batch_mla", kv_lora_rank, qk_rope_head_dim, sinks, bmm1, bmm2),
        (query, None, kv_cache, None, None, block_tables, seq_lens, None, out, None, bmm1_t, None, bmm2_t, *_NO_LISTS),
        _JOINED,
    )  # fmt: skip
    if found is not None:
        return found[0] if out is None else out
    tensor("query", query, "B, Q, H, L + R"), tensor("kv_cache", kv_cache)
    rank, rope = as_host_int("kv_lora_rank", kv_lora_rank, 1), as_host_int("qk_rope_head_dim", qk_rope_head_dim, 1)
    rows = kv_cache[:, 0] if kv_cache.dim() == 4 and kv_cache.shape[1] == 1 else kv_cache
    for name, x, width, shape in (
        ("query", query, query.shape[-1], "[B, Q, H, L + R]"),
        ("kv_cache", kv_cache, rows.shape[-1] if rows.dim() == 3 else 0, "[P, S, L + R] or [P, 1, S, L + R]"),
    ):
        if width != rank + rope:
            raise ValueError(f"{name}: want {shape} with L={rank}, R={rope}, got {list(x.shape)}")
    if sinks is not None:
        raise ValueError(f"sinks: want None for MLA, got {type(sinks).__name__}")
    b, q_len, heads = query.shape[:3]
    if out is None:
        out = torch.empty(b, q_len, heads, rank, dtype=torch.bfloat16, device=query.device)
    own = [b, heads, rank] if tensor("out", out).dim() == 3 and q_len == 1 else [b, q_len, heads, rank]
    if list(out.shape) != own:
        raise ValueError(f"out: want [B, Q, H, L] = {[b, q_len, heads, rank]}, got {list(out.shape)}")
    result = out if out.dim() == 3 else joined("out", out)
    scalar("bmm1_scale", bmm1_scale, query.device), scalar("bmm2_scale", bmm2_scale, query.device)
    latent = with_caller_names(_DECODE_MLA_NAMES, latent_layer, rows, rank)
    call = _mla_call(joined("query", query), latent, block_tables, seq_lens, result, q_len, bmm1_scale, 1.0, bmm2_scale)
    with_caller_names(
        _DECODE_MLA_NAMES, dispatch_call, "mla_decode", call, None, signature._replace(outputs={"out": out})
    )
    return out


def _mla_call(
    q: Tensor,
    latent: PagedLatentLayer,
    page_table: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    q_len: int,
    softmax_scale: Scale,
    kv_scale: Scale,
    out_scale: Scale,
) -> MLADecodeCall:
    rank = latent.ckv.shape[-1]
    return MLADecodeCall(
        q[..., :rank], q[..., rank:], latent.ckv, latent.kpe, latent.ckv_scale_cache, page_table, seq_lens, None,
        out, None, latent.format, q_len, *float_and_tensor(softmax_scale), *float_and_tensor(kv_scale),
        *float_and_tensor(out_scale), "exact",
    )  # fmt: skip


def _value_rows_key(k_cache: Tensor, v_cache: Tensor) -> tuple | None:
    """What `xqa_mla` looks at of values that are not k_cache itself."""
    if v_cache is k_cache or not isinstance(v_cache, Tensor):
        return None if v_cache is k_cache else (type(v_cache),)
    return same_address(k_cache, v_cache), v_cache.shape, v_cache.stride(), v_cache.dtype


def _same_rows(k: Tensor, v: Tensor) -> bool:
    """Whether two views have the same first element and strides; while tracing, where this is unknown, False."""
    return same_address(k, v) and v.stride() == k.stride()
