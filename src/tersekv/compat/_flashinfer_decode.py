"""FlashInfer's decode over pages: `xqa_batch_decode_with_kv_cache`, `trtllm_batch_decode_with_kv_cache`, and the record
that these and `xqa` fill."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..calls import AttentionCall, attention_inputs
from ..errors import UnsupportedError
from ..formats import FP8, kv_format
from ..layers import PagedKVLayer
from ..ops.attention import allocate_outputs, attention_outputs, mask_rows
from ..ops.registry import dispatch_call
from ..ops.scales import float_and_tensor
from ..scalars import as_bool
from ._adapt import as_host_int, lookup_cached, number_or_tensor, scalar, tensor, with_caller_names
from ._flashinfer_views import beam_lens, draft_rows, halves, layer

Scale = float | Tensor
LOG2E = math.log2(math.e)
_DECODE_NAMES = {
    "q": "query",
    "page_table": "block_tables",
    "cu_seqlens_q": "q_cu_seq_lens",
    "max_q_len": "q_len_per_req",
    "k_cache": "kv_cache[0]",
    "v_cache": "kv_cache[1]",
    "layout": "kv_layout",
    "scale_cache": "kv_cache_sf",
    "k_scale_cache": "kv_cache_sf[0]",
    "v_scale_cache": "kv_cache_sf[1]",
    "softmax_scale": "bmm1_scale",
    "k_scale": "bmm1_scale",
    "v_scale": "bmm2_scale",
    "out_scale": "bmm2_scale",
}
_TRTLLM_NAMES = {**_DECODE_NAMES, "cu_seqlens_q": "cum_seq_lens_q", "max_q_len": "max_q_len"}


def xqa_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Tensor | tuple[Tensor, Tensor],
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    window_left: int = -1,
    out: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Tensor | None = None,
    kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    q_cu_seq_lens: Tensor | None = None,
) -> Tensor:
    """`flashinfer.decode.xqa_batch_decode_with_kv_cache`: out = softmax(bmm1_scale · q·k) · v · bmm2_scale.

        >>> query = torch.randn(2, 8, 64, dtype=torch.bfloat16)
        >>> xqa_batch_decode_with_kv_cache(
        ...     query, (k_cache, v_cache), workspace_buffer, block_tables, seq_lens, 60, bmm1_scale=64**-0.5
        ... ).shape
        torch.Size([2, 8, 64])

        query:            [B × q_len_per_req, Hq, D]  fp16 | bf16 | fp8
        kv_cache:         (k, v) of 4-D tensors, or one 5-D tensor [P, 2, ...]; [P, 1, ...]: K is V. fp16, bf16, e4m3,
                          e5m2, int8, or uint8 NVFP4 (two e2m1, low nibble first), of which the raw codes count
        block_tables:     [B, max_pages]; entries past the request's pages are never read
        seq_lens:         [B]  int32 | int64 | uint32, the drafts included
        bmm1_scale:       all that multiplies q·k: q_scale × k_scale / sqrt(D), natural-log softmax
        bmm2_scale:       all that multiplies the output, for every cache dtype
        window_left:      keys seen before the query's own, for each draft row; -1: all. NOTE: tersekv's `window` counts
                          the query's own too
        out:              [B × q_len_per_req, Hq, Dv]; default: a new tensor in query's dtype; FlashInfer's is
                          4-D for drafts
        sinks:            [Hq] fp32, one more score in the softmax, with a zero value
        o_scale:          multiplies a 16-bit output too; not an fp8 output, which holds real / o_scale where the caller
                          puts 1 / o_scale into bmm2_scale
        mask:             [B, q_len_per_req, 2 × ceil(q_len_per_req / 32)] uint16: bit j of row i: draft i sees draft j;
                          None: causal. FlashInfer ignores a mask for q_len_per_req=1
        kv_cache_sf:      e4m3 block scales of NVFP4 (k, v), [..., D/16] in the layout of the cache
        q_cu_seq_lens:    [B + 1] ragged drafts: query and mask rows are packed by it, q_len_per_req is the largest
        max_seq_len, workspace_buffer, enable_pdl:  accepted, without effect

    Scales are floats or 1-element fp32 tensors on the device. A tensor bmm2_scale with o_scale != 1 and a cache of
    bf16, fp16 or int8 costs one more tiny kernel. Raises ValueError or TypeError for a bad argument.
    """
    return _batch_decode(
        _DECODE_NAMES, ("xqa_batch", q_len_per_req), query, kv_cache, block_tables, seq_lens, q_cu_seq_lens,
        lambda b: draft_rows("query", "q_len_per_req", query.shape[0], b, q_len_per_req, q_cu_seq_lens),
        bmm1_scale, bmm2_scale, window_left, out, None, None, False, sinks, kv_layout, o_scale, mask, kv_cache_sf,
    )  # fmt: skip


def trtllm_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Tensor | tuple[Tensor, Tensor],
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    window_left: int = -1,
    out: Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: Tensor | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: Tensor | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    enable_block_sparse_attention: bool = False,
    bf16q_fp8kv_transform_mode: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flashinfer.decode.trtllm_batch_decode_with_kv_cache`: `xqa_batch_decode_with_kv_cache`, whose arguments mean the
    same here, with pages in HND by default, an output dtype, and an LSE.

        >>> query = torch.randn(2, 8, 64, dtype=torch.bfloat16)
        >>> kv_cache = torch.zeros(16, 2, 2, 16, 64, dtype=torch.bfloat16)  # [P, 2, H, S, D]
        >>> trtllm_batch_decode_with_kv_cache(
        ...     query, kv_cache, workspace_buffer, block_tables, seq_lens, 60, bmm1_scale=64**-0.5
        ... ).shape
        torch.Size([2, 8, 64])

        out, out_dtype:   [T, Hq, Dv] to write into, or the dtype of a new tensor (bf16 | fp16 | fp32 | e4m3 | e5m2);
                          default: query's, an 8-bit one too
        cum_seq_lens_q:   [B + 1] ragged drafts, with max_q_len, the largest number of a request's; q_len_per_req is
                          None then, or its default
        lse, return_lse:  [T, Hq] fp32, base 2; a given one is written with or without return_lse
        backend:          auto | xqa | trtllm-gen, which is tersekv either way; o_scale, which is xqa's, has no effect
                          with "trtllm-gen"
        max_seq_len, workspace_buffer, enable_pdl, multi_ctas_kv_counter_buffer, bf16q_fp8kv_transform_mode:  accepted,
                          without effect

    Returns out, or (out, lse) with return_lse. Raises UnsupportedError for an nvfp4 output (out_dtype, o_sf_scale,
    o_sf_vec_size), skip_softmax_threshold_scale_factor, bmm1_scale_log2 (pass bmm1_scale), page tables apart for K and
    V (uses_shared_paged_kv_idx) and enable_block_sparse_attention; ValueError or TypeError for a bad argument.
    """
    _refuse_trtllm(
        out, out_dtype, o_sf_scale, o_sf_vec_size, skip_softmax_threshold_scale_factor, bmm1_scale_log2,
        as_bool("uses_shared_paged_kv_idx", uses_shared_paged_kv_idx),
        as_bool("enable_block_sparse_attention", enable_block_sparse_attention),
    )  # fmt: skip
    if backend not in ("auto", "xqa", "trtllm-gen"):
        raise ValueError(f"backend: want auto, xqa or trtllm-gen, got {backend!r}")
    if (cum_seq_lens_q is None) != (max_q_len is None):
        raise ValueError("cum_seq_lens_q, max_q_len: want both or neither, got one of them")

    def rows(b: int) -> int:
        if cum_seq_lens_q is None:
            return draft_rows("query", "q_len_per_req", query.shape[0], b, q_len_per_req, None)
        if q_len_per_req not in (None, 1):
            raise ValueError(f"q_len_per_req: want None beside cum_seq_lens_q, got {q_len_per_req}")
        return as_host_int("max_q_len", max_q_len, 1)

    o_scale = 1.0 if backend == "trtllm-gen" else o_scale
    return _batch_decode(
        _TRTLLM_NAMES, ("trtllm", q_len_per_req, max_q_len), query, kv_cache, block_tables, seq_lens, cum_seq_lens_q,
        rows, bmm1_scale, bmm2_scale, window_left, out, out_dtype, lse, return_lse, sinks, kv_layout, o_scale, mask,
        kv_cache_sf,
    )  # fmt: skip


def _refuse_trtllm(
    out: Any, out_dtype: Any, o_sf_scale: Any, o_sf_vec_size: Any, skip: Any, log2: Any, shared: bool, sparse: bool
) -> None:
    """What FlashInfer's function takes and no kernel of tersekv does, each by its name."""
    if isinstance(out_dtype, str) or (out is not None and not isinstance(out, Tensor)):
        name, got = ("out_dtype", repr(out_dtype)) if isinstance(out_dtype, str) else ("out", type(out).__name__)
        raise UnsupportedError(f"{name}: want a torch.dtype, or a Tensor of one, not an nvfp4 output, got {got}")
    for name, x, want in (
        ("o_sf_scale", o_sf_scale, "None: no output is nvfp4"),
        ("o_sf_vec_size", o_sf_vec_size, "None: no output is nvfp4"),
        ("skip_softmax_threshold_scale_factor", skip, "None: no key is skipped"),
        ("bmm1_scale_log2", log2, "None, and the scale itself as bmm1_scale"),
    ):
        if x is not None:
            raise UnsupportedError(f"{name}: want {want}, got a value")
    if not shared:
        raise UnsupportedError("uses_shared_paged_kv_idx: want True: K and V share a page table, got False")
    if sparse:
        raise UnsupportedError("enable_block_sparse_attention: want False: heads share a page table, got True")


def _batch_decode(
    names: dict[str, str], function: tuple, query: Tensor, kv_cache: Tensor | tuple[Tensor, Tensor],
    block_tables: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor | None, rows: Callable[[int], int],
    bmm1_scale: Scale, bmm2_scale: Scale, window_left: int, out: Tensor | None, out_dtype: Any,
    lse: Tensor | None, return_lse: bool, sinks: Tensor | None, kv_layout: str, o_scale: float | None,
    mask: Tensor | None, kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None,
) -> Any:  # fmt: skip
    """What both functions do; function: its name and what else only it has; rows(B): the most rows of a request."""
    (k, v, k_scales, v_scales), parts = halves(kv_cache, kv_cache_sf)
    if isinstance(bmm2_scale, Tensor) and isinstance(o_scale, (int, float)) and o_scale != 1 and not has_scales(k):
        bmm2_scale, o_scale = _times_o_scale(bmm2_scale, o_scale, query, out, out_dtype)
    (bmm1, bmm1_t), (bmm2, bmm2_t) = number_or_tensor(bmm1_scale), number_or_tensor(bmm2_scale)
    signature, cached = lookup_cached(
        names, "decode", (*function, window_left, kv_layout, bmm1, bmm2, o_scale, out_dtype, return_lse),
        attention_inputs(
            q=query, k_cache=k, v_cache=v, k_scale_cache=k_scales, v_scale_cache=v_scales,
            page_table=block_tables, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q, mask=mask, sinks=sinks, out=out,
            lse=lse, softmax_scale_t=bmm1_t, out_scale_t=bmm2_t,
        ),
        parts,
    )  # fmt: skip
    if cached is None:
        cached = []
        tensor("query", query, "T, Hq, D")
        kv = with_caller_names(names, layer, kv_cache, kv_layout, kv_cache_sf)
        lens = beam_lens(seq_lens)
        most = rows(lens.shape[0])
        if out is not None:
            tensor("out", out, "T, Hq, Dv")
        shape = (*query.shape[:2], kv.v.shape[-1] * kv_format(kv.formats[0]).values_per_element)
        dtype = query.dtype if out is None and out_dtype is None else out_dtype
        out, lse, made = with_caller_names(names, allocate_outputs, query, shape, out, dtype, lse, return_lse)
        factors: dict[str, Scale] = {"bmm2_scale": bmm2_scale}
        if o_scale is not None and out.dtype not in FP8:
            factors["o_scale"] = o_scale
        scales = spread(has_scales(kv.k), {"bmm1_scale": bmm1_scale}, factors, query.device)
        window = as_host_int("window_left", window_left) + 1
        if window < 0:
            raise ValueError(f"window_left: want a number of keys, or -1 for all, got {window_left}")
        call = decode_call(query, kv, block_tables, lens, cu_seqlens_q, mask, sinks, out, lse, most, window, scales)
        with_caller_names(names, dispatch_call, "decode", call, None, signature._replace(outputs=made))
    found = attention_outputs(cached, out, lse, return_lse)
    if lse is not None:  # NOTE: FlashInfer's LSE is base 2, tersekv's natural.
        lse.mul_(LOG2E)
    elif return_lse:
        found[1].mul_(LOG2E)
    return found


def _times_o_scale(
    bmm2_scale: Tensor, o_scale: float, query: Tensor, out: Tensor | None, out_dtype: Any
) -> tuple[Tensor, float]:
    """The product, and 1, where the output is multiplied by both: an input of the launch, which a repeated call must
    find."""
    if (out_dtype or getattr(query if out is None else out, "dtype", None)) in FP8:
        return bmm2_scale, o_scale
    scalar("bmm2_scale", bmm2_scale, tensor("query", query).device)
    return bmm2_scale * o_scale, 1.0


def decode_call(
    q: Tensor, kv: PagedKVLayer, page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor | None,
    mask: Tensor | None, sinks: Tensor | None, out: Tensor, lse: Tensor | None, max_q_len: int, window: int,
    scales: dict[str, Scale],
) -> AttentionCall:  # fmt: skip
    """The record of a call; scales: of `spread`."""
    if mask is not None:
        mask = mask_rows(tensor("mask", mask), seq_lens, q.shape[0])
    fields: dict[str, Any] = {}
    for name, x in scales.items():
        fields[name], fields[f"{name}_t"] = float_and_tensor(x)
    return AttentionCall(
        q=q, k_cache=kv.k, v_cache=kv.v, k_scale_cache=kv.k_scale_cache, v_scale_cache=kv.v_scale_cache,
        page_table=page_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q, mask=mask, sinks=sinks, out=out, lse=lse,
        format=kv.formats[0], max_q_len=max_q_len, window=window, **fields,
    )  # fmt: skip


def has_scales(cache: object) -> bool:
    """Whether the format of a cache has k_scale and v_scale: e4m3 and e5m2, and NVFP4's bytes."""
    return isinstance(cache, Tensor) and cache.dtype in (*FP8, torch.uint8)


def spread(
    scaled: bool, logit_factors: dict[str, Scale], out_factors: dict[str, Scale], device: torch.device
) -> dict[str, Scale]:
    """A record's scales, of factors of the scores and of the outputs by the caller's names; scaled: `has_scales`."""
    softmax_scale, k_scale = _spread(scaled, logit_factors, device)
    out_scale, v_scale = _spread(scaled, out_factors, device)
    return {"softmax_scale": softmax_scale, "k_scale": k_scale, "v_scale": v_scale, "out_scale": out_scale}


def as_inputs(scales: dict[str, Scale]) -> tuple[tuple, dict[str, Tensor]]:
    """(numbers, tensors by field) of `spread`'s scales, for the launch cache."""
    tensors = {f"{name}_t": x for name, x in scales.items() if isinstance(x, Tensor)}
    return tuple(None if isinstance(x, Tensor) else x for x in scales.values()), tensors


def _spread(scaled: bool, factors: dict[str, Scale], device: torch.device) -> tuple[Scale, Scale]:
    """Two scales whose product is that of `factors`; the second is 1.0 unless the cache format has one (`scaled`).

    Floats are multiplied here and a tensor takes a place of its own, so that the device multiplies only where there
    are more factors than places.
    """
    number, parts = 1.0, []
    for name, factor in factors.items():
        if isinstance(scalar(name, factor, device), Tensor):
            parts.append(factor)
        else:
            number *= float(factor)
    if number != 1.0 or not parts:
        parts.append(number)
    while len(parts) > (2 if scaled else 1):
        parts[-2:] = [times(parts[-2], parts[-1])]
    return parts[0], (parts[1] if len(parts) > 1 else 1.0)


def times(a: Scale, b: Scale) -> Scale:
    """a × b, without a kernel where one of them is a plain 1."""
    if not isinstance(a, Tensor) and a == 1.0:
        return b
    return a if not isinstance(b, Tensor) and b == 1.0 else a * b
