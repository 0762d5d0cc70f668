"""FlashInfer's attention of one request whose keys lie in no cache: its rows are seen as pages."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..calls import AttentionCall, attention_inputs
from ..ops.attention import allocate_outputs, attention_outputs
from ..ops.registry import dispatch_call
from ..ops.scales import float_and_tensor
from ..tracing import tracing
from ._adapt import as_float, as_host_int, lookup_cached, number_or_tensor, tensor, with_caller_names
from ._flashinfer_decode import LOG2E
from ._flashinfer_views import halves, layer
from ._flashinfer_wrappers import BatchPrefillWithPagedKVCacheWrapper, multiplied, refuse, refuse_positions

_PAGE = 64  # kernels are compiled for a page size, so that it must not follow the number of keys
_NAMES = {
    "k_cache": "k", "v_cache": "v", "cache": "k, v", "kv_cache": "k, v", "softmax_scale": "sm_scale",
    "softcap": "logits_soft_cap", "out_scale": "v_scale", "layout": "kv_layout", "scale_cache": "k, v",
}  # fmt: skip
_PREFILL_NAMES = {
    "q_scale": "scale_q", "k_scale": "scale_k", "v_scale": "scale_v", "paged_kv_cache": "k, v",
    "paged_kv_cache[0]": "k", "paged_kv_cache[1]": "v", "kv_cache_sf": "k, v", "q, paged_kv_cache": "q, k, v",
}  # fmt: skip


def single_decode_with_kv_cache(
    q: Tensor, k: Tensor, v: Tensor, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False, q_scale: float | Tensor | None = None, k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None, window_left: int = -1, logits_soft_cap: float | None = None,
    sm_scale: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`flashinfer.single_decode_with_kv_cache`: one new token over k, v [N, H, D] (HND: [H, N, D]) of no cache.

        >>> single_decode_with_kv_cache(q[-1], k, v).shape
        torch.Size([8, 64])

        q:                [Hq, D]  fp16 | bf16 | fp8
        k, v:             of any dtype that a cache may have without scales of its own; v may have another D; strides
                          are honoured
        q_scale, k_scale: multiply sm_scale, whose default is 1 / sqrt(D); v_scale multiplies the output
        window_left:      keys seen before the last one; -1: all
        use_tensor_cores, rope_scale, rope_theta:  accepted, without effect

    Returns out [Hq, Dv] in q's dtype, with return_lse also lse [Hq] in base 2. Raises UnsupportedError for a
    pos_encoding_mode other than "NONE", ValueError or TypeError for a bad argument.
    """
    refuse_positions(pos_encoding_mode)
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f"kv_layout: want 'NHD' or 'HND', got {kv_layout!r}")
    tensor("q", q, "Hq, D"), tensor("k", k, "N, H, D"), tensor("v", v, "N, H, D")
    if k.shape[:2] != v.shape[:2]:
        shapes = [list(x.shape[:2]) if kv_layout == "NHD" else list(x.shape[:2])[::-1] for x in (k, v)]
        raise ValueError(f"v: want N and H of k, {shapes[0]} (as NHD), got {shapes[1]}")
    rows = 0 if kv_layout == "NHD" else 1
    n, seen = k.shape[rows], as_host_int("window_left", window_left, -1) + 1
    if 0 < seen < n:
        k, v, n = k.narrow(rows, n - seen, seen), v.narrow(rows, n - seen, seen), seen
    scale: Any = q.shape[-1] ** -0.5 if sm_scale is None else as_float("sm_scale", sm_scale)
    scale, out_scale = (
        multiplied(multiplied(scale, q_scale, "q_scale"), k_scale, "k_scale"),
        multiplied(1.0, v_scale, "v_scale"),
    )
    cap = 0.0 if logits_soft_cap is None else as_float("logits_soft_cap", logits_soft_cap)

    table, lens = _pages_of(q.device, n)
    (scale_number, scale_t), (out_number, out_t) = number_or_tensor(scale), number_or_tensor(out_scale)
    (_, _, k_ones, v_ones), parts = halves((k, v))
    # By the tensors themselves, not by what they are seen as: their pages begin where they do.
    signature, cached = lookup_cached(
        _NAMES, "decode", ("single", kv_layout, cap, scale_number, out_number, return_lse),
        attention_inputs(
            q=q, k_cache=k, v_cache=v, k_scale_cache=k_ones, v_scale_cache=v_ones, page_table=table,
            seq_lens=lens, softmax_scale_t=scale_t, out_scale_t=out_t,
        ),
        parts,
    )  # fmt: skip
    lse = None
    if cached is None:
        if kv_layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        row, kv = q[None], (_as_pages(k), _as_pages(v))
        cached, pages = [], with_caller_names(_NAMES, layer, kv, "NHD", None)
        shape = (*row.shape[:2], pages.head_dim_v)
        out, lse, made = allocate_outputs(row, shape, None, q.dtype, None, return_lse)
        softmax_number, softmax_t = with_caller_names(_NAMES, float_and_tensor, scale, "softmax_scale")
        out_number, out_t = with_caller_names(_NAMES, float_and_tensor, out_scale, "out_scale")
        call = AttentionCall(
            q=row, k_cache=pages.k, v_cache=pages.v, k_scale_cache=pages.k_scale_cache,
            v_scale_cache=pages.v_scale_cache, page_table=table, seq_lens=lens, out=out, lse=lse,
            format=pages.formats[0], max_q_len=1, softcap=cap, softmax_scale=softmax_number, softmax_scale_t=softmax_t,
            out_scale=out_number, out_scale_t=out_t,
        )  # fmt: skip
        with_caller_names(_NAMES, dispatch_call, "decode", call, None, signature._replace(outputs=made))
    else:
        out = None
    found = attention_outputs(cached, out, lse, return_lse)
    if not return_lse:
        return found[0]
    return found[0][0], found[1].mul_(LOG2E)[0]  # NOTE: FlashInfer's LSE is base 2, tersekv's natural.


def _page_size(n: int) -> int:
    """_PAGE, or for fewer keys the largest power of two that they fill."""
    return min(_PAGE, 1 << max(n.bit_length() - 1, 0))


def _as_pages(x: Tensor) -> Tensor:
    """[N, H, D] as pages that overlap, one from each row on; `_pages_of` says which of them hold each row once."""
    if not len(x):
        return x[:, None]
    return x.unfold(0, _page_size(len(x)), 1).permute(0, 3, 1, 2)


def _pages_of(device: torch.device, n: int) -> tuple[Tensor, Tensor]:
    """(page table, length) of one query over n rows seen as pages; kept for each stream, as its layers need the same.

    What no whole page holds are the first rows: a page cannot reach beyond the last. They come last in the table, where
    a page may be partly filled; without a window, a query does not see in which order its keys lie.
    """
    cuda = device.type == "cuda"
    # NOTE: memory that a CUDA graph's capture allocates is the graph's, and a traced tensor is of its trace.
    if tracing() or (cuda and torch.cuda.is_current_stream_capturing()):
        return _made_pages_of(device, n)
    return _kept_pages_of(device, n, torch.cuda.current_stream(device).stream_id if cuda else 0)


def _made_pages_of(device: torch.device, n: int) -> tuple[Tensor, Tensor]:
    size = _page_size(n)
    table = torch.arange(n % size, n + 1, size, dtype=torch.int32, device=device)  # n itself stands for page 0
    return table.remainder_(max(n, 1))[None], torch.full((1,), n, dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=64)
def _kept_pages_of(device: torch.device, n: int, stream: int) -> tuple[Tensor, Tensor]:
    return _made_pages_of(device, n)


def single_prefill_with_kv_cache(
    q: Tensor, k: Tensor, v: Tensor, scale_q: Tensor | None = None, scale_k: Tensor | None = None,
    scale_v: Tensor | None = None, o_dtype: torch.dtype | None = None, custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None, causal: bool = False, kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False, sm_scale: float | None = None,
    window_left: int = -1, logits_soft_cap: float | None = None, rope_scale: float | None = None,
    rope_theta: float | None = None, backend: str = "auto", return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`flashinfer.single_prefill_with_kv_cache`: the last rows q [T, Hq, D] of one request over k, v [N, H, D] (HND:
    [H, N, D]) that lie in no cache, of any dtype that a cache may have. One page holds them all. LSE in base 2.

        >>> single_prefill_with_kv_cache(q, k, v, causal=True).shape
        torch.Size([100, 8, 64])
    """
    refuse(custom_mask=custom_mask, packed_custom_mask=packed_custom_mask)
    heads = 1 if kv_layout == "NHD" else 0
    (t, q_heads, d), ks = tensor("q", q, "T, Hq, D").shape, tensor("k", k, "N, H, D").shape
    dv = tensor("v", v, "N, H, D").shape[2]
    sm_scale = None if sm_scale is None else as_float("sm_scale", sm_scale)
    cap = None if logits_soft_cap is None else as_float("logits_soft_cap", logits_soft_cap)
    make = _planned.__wrapped__ if tracing() else _planned  # a traced tensor is of its trace alone
    wrapper: Any = make(
        q.device, str(kv_layout), str(pos_encoding_mode), t, ks[1 - heads], (q_heads, ks[heads], d, dv), bool(causal),
        sm_scale, as_host_int("window_left", window_left), cap, (q.dtype, k.dtype, o_dtype or q.dtype),
    )  # fmt: skip
    pages, scales = tuple(_page(x, 1 - heads) for x in (k, v)), (scale_q, scale_k, scale_v)
    return with_caller_names(_PREFILL_NAMES, lambda: wrapper.run(q, pages, *scales, return_lse=return_lse))


def _page(x: Tensor, keys: int) -> Tensor:
    """Keys, which are dimension `keys`, as one page; none of them as no page, whose size would be 1."""
    return x[None] if x.shape[keys] else x.reshape(0, *(n if d != keys else 1 for d, n in enumerate(x.shape)))


@functools.lru_cache(maxsize=64)
def _planned(
    device: torch.device, layout: str, positions: str, t: int, n: int, heads: tuple[int, int, int, int], causal: bool,
    sm_scale: float | None, window_left: int, softcap: float | None, kinds: tuple[torch.dtype, ...],
) -> BatchPrefillWithPagedKVCacheWrapper:  # fmt: skip
    """A wrapper planned for t rows of one request over n keys in one page. Kept: to plan copies to the device."""
    wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, device=device), layout)
    wrapper.plan(
        torch.tensor([0, t]), torch.tensor([0, min(n, 1)]), torch.tensor([0]), torch.tensor([n]), *heads[:3], max(n, 1),
        head_dim_vo=heads[3], causal=causal, pos_encoding_mode=positions, sm_scale=sm_scale,
        window_left=window_left, logits_soft_cap=softcap, q_data_type=kinds[0], kv_data_type=kinds[1],
        o_data_type=kinds[2],
    )  # fmt: skip
    return wrapper
