"""FlashMLA's functions: attention over latent caches, dense and over lists of slots.

FlashMLA's LSE leaves the sinks out and is +inf for a row without keys; tersekv's has them in and is −inf.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import env
from ..calls import MLADecodeCall
from ..layers import PagedLatentLayer
from ..ops.registry import dispatch_call
from ..scalars import as_bool, as_float
from ._adapt import as_host_int, dtype_name, lookup_cached, tensor, with_caller_names

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]

_JOINED = {  # of one tensor each
    "q_pe": "q_nope", "kpe": "ckv", "ckv_scale_cache": "ckv", "extra_kpe": "extra_ckv",
    "extra_ckv_scale_cache": "extra_ckv",
}  # fmt: skip
_NAMES = {
    **dict.fromkeys(("q_nope", "q_pe"), "q"),
    **dict.fromkeys(("ckv", "kpe", "ckv_scale_cache", "cache"), "k_cache"),
    "page_table": "block_table",
    "seq_lens": "cache_seqlens",
    "index_lens": "topk_length",
    "sinks": "attn_sink",
    "extra.index_lens": "extra_topk_length",
    "extra.indices": "extra_indices_in_kvcache",
    **dict.fromkeys(("extra.ckv", "extra.kpe", "extra.ckv_scale_cache"), "extra_k_cache"),
}
_EXTRA_NAMES = {"cache": "extra_k_cache"}
_SPARSE_NAMES = _NAMES | dict.fromkeys(("ckv", "kpe", "cache"), "kv") | {"softmax_scale": "sm_scale"}
_RECORDS = {656: ("fp8_ds_mla", 576), 584: ("fp8_v4", 512)}  # bytes of a token → format, columns of queries


class FlashMLASchedMeta:
    """`flash_mla.FlashMLASchedMeta`: nothing, since tersekv needs no plan of a batch.

    >>> FlashMLASchedMeta()
    FlashMLASchedMeta()
    """

    def __repr__(self) -> str:
        return "FlashMLASchedMeta()"


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """`flash_mla.get_mla_metadata`: what `flash_mla_with_kvcache` takes and does not need.

        >>> get_mla_metadata()
        (FlashMLASchedMeta(), None)

    args, kwargs:  accepted, without effect
    """
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: object = None,
    num_splits: object = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`flash_mla.flash_mla_with_kvcache`: absorbed MLA attention over a paged latent cache.

        >>> q = torch.randn(2, 1, 16, 576).bfloat16()
        >>> k_cache = torch.zeros(16, 64, 1, 656, dtype=torch.uint8)  # records of fp8_ds_mla
        >>> slots = torch.tensor([[[70, 3, -1]], [[5, -1, -1]]], dtype=torch.int32)
        >>> out, lse = flash_mla_with_kvcache(q, k_cache, None, None, 512, is_fp8_kvcache=True, indices=slots)
        >>> out.shape, lse.shape
        (torch.Size([2, 1, 16, 512]), torch.Size([2, 16, 1]))

        q:               [B, Q, H, L + R]  bf16 | fp16 | e4m3 | e5m2, any H; requests that do not lie evenly are copied
        k_cache:         [P, S, 1, L + R] bf16 | fp16; with is_fp8_kvcache of one byte each: records of fp8_ds_mla
                         [P, S, 1, 656], with any scales, or of fp8_v4 [P, S, 1, 584]
        block_table, cache_seqlens:  [B, max_pages], [B]; not looked at with indices
        head_dim_v:      L
        softmax_scale:   None: (L + R)^-0.5
        causal:          row i of Q sees cache_seqlens - Q + i + 1 keys; False: all
        indices:         [B, Q, n]  slots, page * S + offset; negative: padding. Not with causal
        attn_sink:       [H] fp32, with indices: one more score, with a zero value
        extra_k_cache, extra_indices_in_kvcache:  [P', S', 1, …], [B, Q, n']  keys of a second cache in the same softmax
        topk_length, extra_topk_length:  [B]  used entries of each request's lists
        out:             [B, Q, H, L], contiguous, to write into; default: new, in q's dtype, bf16 for an 8-bit q
        tile_scheduler_metadata, num_splits:  accepted, without effect

    Returns (out, lse [B, H, Q] fp32): natural log, without sinks, +inf where a row has no key; its output is 0. A slot
    outside the cache is skipped; on a CPU and in checked mode it raises. Raises ValueError or TypeError for a bad
    argument.
    """
    if indices is not None:
        block_table = cache_seqlens = None  # slots need none
        topk_length = _each_row("topk_length", topk_length, q)
        extra_topk_length = _each_row("extra_topk_length", extra_topk_length, q)
    lists = (indices, topk_length, attn_sink, extra_indices_in_kvcache, extra_topk_length)
    signature, found = lookup_cached(
        _NAMES, "mla_decode", ("flash_mla", head_dim_v, softmax_scale, causal, is_fp8_kvcache),
        (q, None, k_cache, None, None, block_table, cache_seqlens, None, out, None, None, None, None, *lists[:3],
         extra_k_cache, None, None, None, *lists[3:], None, None), _JOINED,
    )  # fmt: skip
    if found is None:
        causal, fp8 = as_bool("causal", causal), as_bool("is_fp8_kvcache", is_fp8_kvcache)
        _check_lists(q, causal, extra_k_cache, *lists)
        latent = with_caller_names(_NAMES, _latent_layer, k_cache, q, head_dim_v, fp8)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else as_float("softmax_scale", softmax_scale)
        out, lse, made = _outputs(q, head_dim_v, out)
        # Rows that see the same keys are heads of one row.
        merged = 0 if causal or indices is not None else 1
        call = _call(
            [x.flatten(merged, merged + 1) for x in (q, out, lse)], latent, scale, page_table=block_table,
            seq_lens=cache_seqlens, max_q_len=q.shape[1] if causal else 1, indices=_rows(indices),
            index_lens=topk_length, sinks=attn_sink,
        )  # fmt: skip
        if extra_k_cache is not None:
            extra = with_caller_names(_EXTRA_NAMES, _latent_layer, extra_k_cache, q, head_dim_v, fp8)
            call = call._replace(
                extra_ckv=extra.ckv, extra_kpe=extra.kpe, extra_ckv_scale_cache=extra.ckv_scale_cache,
                extra_indices=_rows(extra_indices_in_kvcache), extra_index_lens=extra_topk_length,
                extra_format=extra.format,
            )  # fmt: skip
        with_caller_names(_NAMES, dispatch_call, "mla_decode", call, None, signature._replace(outputs=made))
    else:
        lse, out = found[-1], found[0] if out is None else out
    return out, _inf_if_empty(lse).transpose(1, 2)


def _each_row(name: str, lens: Tensor | None, q: Tensor) -> Tensor | None:
    """Lengths of the lists of each row, of those of requests."""
    if lens is None or tensor("q", q, "B, Q, H, L + R").shape[1] == 1:
        return lens
    count, rows = q.shape[:2]
    if tensor(name, lens, "B").shape[0] != count:
        raise ValueError(f"{name}: want [B={count}], got {list(lens.shape)}")
    return lens.repeat_interleave(rows, output_size=rows * count)


def _rows(indices: Tensor | None) -> Tensor | None:
    """Lists [B, Q, n] as [B * Q, n]."""
    return None if indices is None else indices.flatten(0, 1)


def _check_lists(
    q: Tensor, causal: bool, extra: Tensor | None, indices: Tensor | None, lens: Tensor | None, sinks: Tensor | None,
    extra_indices: Tensor | None, extra_lens: Tensor | None,
) -> None:  # fmt: skip
    """Raise for what belongs to lists without them, and for lists that are none."""
    tensor("q", q, "B, Q, H, L + R")
    given = {"attn_sink": sinks, "topk_length": lens, "extra_k_cache": extra}
    if indices is None:
        for name, x in given.items():
            if x is not None:
                raise ValueError(f"{name}: want None without indices, got a tensor")
    elif causal:
        raise ValueError("causal: want False with indices, whose rows see all that they list, got True")
    for name, x in (("extra_indices_in_kvcache", extra_indices), ("extra_topk_length", extra_lens)):
        if extra is None and x is not None:
            raise ValueError(f"{name}: want None without extra_k_cache, got a tensor")
    if extra is not None and extra_indices is None:
        raise ValueError("extra_indices_in_kvcache: want the lists of extra_k_cache, got None")
    for name, x in (("indices", indices), ("extra_indices_in_kvcache", extra_indices)):
        if x is not None and tensor(name, x, "B, Q, n").shape[:2] != q.shape[:2]:
            raise ValueError(f"{name}: want [B={q.shape[0]}, Q={q.shape[1]}, n], got {list(x.shape)}")


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`flash_mla.flash_mla_sparse_fwd`: each row over the latents that it lists, of a prompt.

        >>> q, kv = torch.randn(3, 16, 576).bfloat16(), torch.randn(100, 1, 576).bfloat16()
        >>> indices = torch.tensor([[[0, -1]], [[1, 0]], [[2, 100]]], dtype=torch.int32)
        >>> out, max_logits, lse = flash_mla_sparse_fwd(q, kv, indices, sm_scale=576**-0.5)
        >>> out.shape, max_logits.shape, lse.shape
        (torch.Size([3, 16, 512]), torch.Size([3, 16]), torch.Size([3, 16]))

        q:            [T, H, L + R]  bf16 | fp16 | e4m3 | e5m2, any H
        kv:           [N, 1, L + R]  bf16 | fp16
        indices:      [T, 1, n]  rows of kv; negative, or N and more: padding
        d_v:          L
        attn_sink:    [H] fp32: one more score, with a zero value
        topk_length:  [T]  used entries of each list
        out:          [T, H, L], contiguous, to write into; default: a new tensor in q's dtype, bf16 for an 8-bit q

    Returns (out, max_logits [T, H], lse [T, H]), fp32: the largest scaled score, −inf without a key, and the LSE,
    natural log, without sinks, +inf without a key. Raises ValueError or TypeError for a bad argument.
    """
    signature, found = lookup_cached(
        _SPARSE_NAMES, "mla_decode", ("flash_mla_sparse", sm_scale, d_v),
        (q, None, kv, None, None, None, None, None, out, None, None, None, None, indices, topk_length, attn_sink,
         *[None] * 8), _JOINED,
    )  # fmt: skip
    if found is None:
        tensor("q", q, "T, H, L + R"), tensor("kv", kv, "N, 1, L + R")
        if tensor("indices", indices, "T, 1, n").shape[1] != 1 or kv.shape[1] != 1:
            name, x = ("kv", kv) if kv.shape[1] != 1 else ("indices", indices)
            raise ValueError(f"{name}: want one head, got {list(x.shape)}")
        if indices.device.type == "cpu" or env.checked():  # where slots outside the cache raise
            # PyTorch does not compare uint32.
            wide = indices.long() if indices.dtype == torch.uint32 else indices
            indices = wide.masked_fill(wide >= kv.shape[0], -1)
        latent = with_caller_names(_SPARSE_NAMES, _latent_layer, kv, q, d_v, False, "d_v")
        out, lse, made = _outputs(q, d_v, out)
        max_logits = torch.empty_like(lse)
        call = _call(
            [q, out, lse], latent, as_float("sm_scale", sm_scale), page_table=None, seq_lens=None, max_q_len=1,
            indices=indices[:, 0], index_lens=topk_length, sinks=attn_sink,
        )._replace(max_logits=max_logits)  # fmt: skip
        made["max_logits"] = max_logits
        with_caller_names(_SPARSE_NAMES, dispatch_call, "mla_decode", call, None, signature._replace(outputs=made))
    else:
        *made_out, lse, max_logits = found
        out = made_out[0] if out is None else out
    return out, max_logits, _inf_if_empty(lse)


def _call(rows: list[Tensor], latent: PagedLatentLayer, scale: float, **fields: Any) -> MLADecodeCall:
    """The record of a call; rows: q, out and lse [T, H, …]."""
    (q, out, lse), rank = rows, latent.kv_lora_rank
    return MLADecodeCall(
        q_nope=q[..., :rank], q_pe=q[..., rank:] if latent.qk_rope_head_dim else None, ckv=latent.ckv, kpe=latent.kpe,
        ckv_scale_cache=latent.ckv_scale_cache, cu_seqlens_q=None, out=out, lse=lse, format=latent.format,
        softmax_scale=scale, softmax_scale_t=None, kv_scale=1.0, kv_scale_t=None, out_scale=1.0, out_scale_t=None,
        precision="exact", lse_of_keys=True, **fields,
    )  # fmt: skip


def _latent_layer(cache: Tensor, q: Tensor, rank: int, fp8: bool, name: str = "head_dim_v") -> PagedLatentLayer:
    """The cache of queries [..., L + R] as a layer."""
    rank, width = as_host_int(name, rank, 1), q.shape[-1]
    row = tensor("cache", cache).shape[-1] if cache.dim() else 0
    got = f"{list(cache.shape)} {dtype_name(cache.dtype)}"
    if not fp8:
        if row != width:
            raise ValueError(f"cache: want rows of {width} as in q, got {got}")
        if width < rank:
            raise ValueError(f"{name}: want at most the {width} columns of q, got {rank}")
        if cache.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"cache: want bfloat16 or float16 without is_fp8_kvcache, got {got}")
        return PagedLatentLayer.of(cache, kv_lora_rank=rank)
    if cache.element_size() != 1 or row not in _RECORDS:
        sizes = " or ".join(map(str, _RECORDS))
        raise ValueError(f"cache: want records of {sizes} bytes with is_fp8_kvcache, got {got}")
    format, columns = _RECORDS[row]
    if (width, rank) != (columns, 512):
        want = f"512, and {columns} columns of q, over records of {row} bytes"
        raise ValueError(f"{name}: want {want}, got {rank}, {width}")
    return PagedLatentLayer.of(cache.view(torch.uint8), format=format)


def _outputs(q: Tensor, rank: int, out: Tensor | None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output [..., H, L] and LSE [..., H], and those that are new."""
    shape = (*q.shape[:-1], rank)
    lse = torch.empty(shape[:-1], dtype=torch.float32, device=q.device)
    if out is None:
        dtype = q.dtype if q.element_size() > 1 else torch.bfloat16
        out = torch.empty(shape, dtype=dtype, device=q.device)
        return out, lse, {"out": out, "lse": lse}
    if tensor("out", out).shape != shape or not out.is_contiguous():
        raise ValueError(f"out: want contiguous {list(shape)}, got {list(out.shape)} with strides {list(out.stride())}")
    return out, lse, {"lse": lse}


def _inf_if_empty(lse: Tensor) -> Tensor:
    """lse in place, with +inf for −inf."""
    return lse.nan_to_num_(nan=torch.nan, posinf=torch.inf, neginf=torch.inf)
