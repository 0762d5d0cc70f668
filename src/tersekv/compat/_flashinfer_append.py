"""FlashInfer's appends and their index helpers. Imported through `tersekv.compat.flashinfer`.

FlashInfer places a token by `batch_indices` and `positions`: page = kv_indices[kv_indptr[b] + positions // S], entry =
positions % S. That place is computed where the token is written; there is no slot mapping in between.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..calls import AppendCall, MLAAppendCall, RopeAppendCall
from ..formats import FP8
from ..layers import PagedLatentLayer
from ..ops.registry import dispatch_call
from ..ops.scales import float_and_tensor
from ._adapt import (
    as_host_int,
    dtype_name,
    index_tensor,
    lookup_cached,
    number_or_tensor,
    scalar,
    tensor,
    with_caller_names,
)
from ._flashinfer_views import halves, layer

_UNSCALED = (torch.bfloat16, torch.float16, *FP8)  # caches that can be written without stored scales
_ROPE_NAMES = {
    "positions": "pos_ids",
    "kv_positions": "positions",
    "k": "k_rope, k_nope",
    "k_cache": "paged_kv_cache[0]",
    "v_cache": "paged_kv_cache[1]",
    "ckv": "paged_kv_cache[0]",
    "kpe": "paged_kv_cache[1]",
    "kv_cache": "paged_kv_cache",
    "layout": "kv_layout",
    "kv_c": "k_nope",
    "k_pe": "k_rope",
    "q_pe": "q_rope",
    "q_pe_out": "q_rope_out",
    "q_scale": "quant_scale_q",
    "k_scale": "quant_scale_kv",
    "v_scale": "quant_scale_kv",
    "kv_scale": "quant_scale_kv",
}
_APPEND_NAMES = {
    "k": "append_key",
    "v": "append_value",
    "kv_c": "append_ckv",
    "k_pe": "append_kpe",
    "kv_positions": "positions",
    "k_cache": "paged_kv_cache[0]",
    "v_cache": "paged_kv_cache[1]",
    "kv_cache": "paged_kv_cache",
    "layout": "kv_layout",
    "ckv": "ckv_cache",
    "kpe": "kpe_cache",
}


def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor | None,
    k_nope: Tensor | None,
    v: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    paged_kv_cache: tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float | Tensor = 1.0,
    quant_scale_kv: float | Tensor = 1.0,
    page_size: int = 16,
    kv_layout: str = "NHD",
    q_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """`flashinfer.rope.rope_quantize_fp8_append_paged_kv_cache`: rotate q and k, quantise, write k and v to the cache.

        >>> q_fp8, _ = rope_quantize_fp8_append_paged_kv_cache(
        ...     q, k, None, None, v, cos_sin_cache, positions, fp8_kv_cache,
        ...     kv_indices, kv_indptr, batch_indices, positions,
        ... )
        >>> q_fp8.shape, q_fp8.dtype
        (torch.Size([100, 8, 64]), torch.float8_e4m3fn)

        q_rope, q_nope:     [T, Hq, R], [T, Hq, N] or None  fp16 | bf16
        k_rope, k_nope:     GQA/MHA [T, H, R], [T, H, N] or None; MLA [T, R], [T, L]
        v:                  GQA/MHA [T, H, Dv]; MLA None
        cos_sin_cache:      [max_pos, R] fp32, [cos | sin]; pos_ids [T] its rows
        paged_kv_cache:     GQA/MHA (k, v) [P, S, H, D] (HND [P, H, S, D]), a K row is [rope | nope];
                            MLA (ckv [P, S, L], kpe [P, S, R]), `kv_layout` is ignored; in `quantize_dtype`
        batch_indices:      [T]  negative: padding: the cache is untouched and the q rows are 0
        positions:          [T]  place in the request; outside its pages: dropped (in checked mode it raises)
        quantize_dtype:     e4m3 | e5m2; None: that of q_rope_out, else of q_nope_out, else e4m3
        quant_scale_q, _kv: what is multiplied before the cast: float, or fp32 tensor [1] on the device
        enable_pdl:         accepted, without effect

    NOTE: `quant_scale_kv` is the inverse of tersekv's `k_scale` and `v_scale`, which dequantise.
    RoPE and scaling are fp32 with no 16-bit rounding before the saturating cast. Returns (q_rope_out, q_nope_out);
    q_nope_out is [T, Hq, 0] where there is no q_nope. Raises ValueError or TypeError for a bad argument.
    """
    op, options, given, parts = _rope_tensors(
        (q_rope, q_nope, k_rope, k_nope, v, cos_sin_cache, pos_ids, q_rope_out, q_nope_out), paged_kv_cache,
        (batch_indices, positions, kv_indptr, kv_indices), quant_scale_q, quant_scale_kv,
    )  # fmt: skip
    options = (is_neox, quantize_dtype, page_size, kv_layout, *options)
    signature, found = lookup_cached(_ROPE_NAMES, op, ("rope", *options), given, parts)
    if found is not None:
        return _made_query(found, q_rope, q_nope, q_rope_out, q_nope_out)
    dtype = _quantize_dtype(quantize_dtype, q_rope_out, q_nope_out)
    tensor("q_rope", q_rope, "T, Hq, R")
    if tensor("k_rope", k_rope).dim() not in (2, 3):
        raise ValueError(f"k_rope: want [T, H, R] for GQA/MHA or [T, R] for MLA, got {list(k_rope.shape)}")
    q_rope_out = _receiver(q_rope, q_rope_out, dtype, "q_rope_out")
    q_rest = q_rope[..., :0] if q_nope is None else tensor("q_nope", q_nope, "T, Hq, N")
    q_nope_out = _receiver(q_rest, q_nope_out, dtype, "q_nope_out")
    # What has no columns is not there: kernels see None.
    has_rest = q_rest.shape[-1] > 0
    q_parts = (q_rope, q_rest if has_rest else None)
    out_parts = (q_rope_out, q_nope_out if has_rest else None)
    made = {"q_rope_out": q_rope_out} | ({"q_nope_out": q_nope_out} if has_rest else {})
    signature = signature._replace(outputs=made)
    place = _place(batch_indices, positions, kv_indptr, kv_indices)
    mul_q = float_and_tensor(scalar("quant_scale_q", quant_scale_q, q_rope.device))
    mul_kv = float_and_tensor(scalar("quant_scale_kv", quant_scale_kv, q_rope.device))
    interleaved = not (is_neox if isinstance(is_neox, bool) else as_host_int("is_neox", is_neox))
    if k_rope.dim() == 2:
        if v is not None:
            raise ValueError("v: want None for MLA (a 2-D k_rope), got a tensor")
        if k_nope is None:
            raise ValueError("k_nope: want the latents [T, L] for MLA (a 2-D k_rope), got None")
        tensor("k_nope", k_nope, "T, L")
        _cache_fits(paged_kv_cache, 3, dtype, page_size, 1)
        latent = with_caller_names(_ROPE_NAMES, PagedLatentLayer.of, paged_kv_cache)
        call: tuple = MLAAppendCall(
            *q_parts, k_nope, k_rope, cos_sin_cache, pos_ids, *out_parts, latent.ckv, latent.kpe, None, *place,
            latent.format, interleaved, *mul_q, *mul_kv, True, True,
        )  # fmt: skip
        with_caller_names(_ROPE_NAMES, dispatch_call, "mla_append", call, None, signature)
        return q_rope_out, q_nope_out
    if v is None:
        raise ValueError("v: want a tensor [T, H, Dv] for GQA/MHA (a 3-D k_rope), got None")
    _cache_fits(paged_kv_cache, 4, dtype, page_size, 2 if kv_layout == "HND" else 1)
    kv = with_caller_names(_ROPE_NAMES, layer, paged_kv_cache, kv_layout, None)
    if k_nope is not None and tensor("k_nope", k_nope, "T, H, N").shape[-1] == 0:
        k_nope = None
    call = RopeAppendCall(
        *q_parts, k_rope, k_nope, v, cos_sin_cache, pos_ids, *out_parts, kv.k, kv.v, None, None, *place,
        kv.formats[0], interleaved, *mul_q, *mul_kv, *mul_kv, True, True,
    )  # fmt: skip
    with_caller_names(_ROPE_NAMES, dispatch_call, "rope_append", call, None, signature)
    return q_rope_out, q_nope_out


def _rope_tensors(
    rows: tuple, caches: object, place: tuple, scale_q: float | Tensor, scale_kv: float | Tensor
) -> tuple[str, tuple, tuple, dict[str, str]]:
    """The operation, numbers, tensors in the order of its record, and the parts of these."""
    (q_number, q_t), (kv_number, kv_t) = number_or_tensor(scale_q), number_or_tensor(scale_kv)
    q_rope, q_nope, k_rope, k_nope, v, cos_sin, pos_ids, *outs = rows
    batch_indices, positions, kv_indptr, kv_indices = place
    # What is given twice is one tensor, of which the other field is a part.
    parts = {"kv_positions": "positions"} if positions is pos_ids else {}
    place = (None, batch_indices, None if parts else positions, kv_indptr, kv_indices)
    # What has no columns is in no record; of the call only its facts are kept.
    q_nope_out = outs[1]
    empty = _empty(q_nope), _empty(k_nope), _empty(q_nope_out)
    if empty != (None, None, None):
        q_nope, k_nope, q_nope_out = (
            None if e else x for e, x in zip(empty, (q_nope, k_nope, q_nope_out), strict=True)
        )
    options, (k, kpe, *_) = (bool(parts), q_number, kv_number, empty), halves(caches)[0]
    if v is None:
        rows = (q_rope, q_nope, k_nope, k_rope, cos_sin, pos_ids, outs[0], q_nope_out)
        return "mla_append", options, (*rows, k, kpe, None, *place, q_t, kv_t), parts
    if kv_t is not None:
        parts["v_scale_t"] = "k_scale_t"
    given = (
        q_rope, q_nope, k_rope, k_nope, v, cos_sin, pos_ids, outs[0], q_nope_out, k, kpe, None, None, *place, q_t, kv_t,
        None, None, None, None, None,
    )  # fmt: skip
    return "rope_append", options, given, parts


def _empty(x: object) -> tuple | None:
    """What a call may depend on of a tensor without columns; None of any other."""
    return (x.shape, x.dtype, x.device) if isinstance(x, Tensor) and x.shape[-1:] == (0,) else None


def _made_query(
    made: list[Tensor], q_rope: Tensor, q_nope: Tensor | None, q_rope_out: Tensor | None, q_nope_out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(q_rope_out, q_nope_out) of a call like one before: the caller's, or those that it made."""
    if q_rope_out is None:
        q_rope_out, *made = made
    if q_nope_out is None:
        rest = q_rope[..., :0] if q_nope is None else q_nope
        q_nope_out = made[0] if made else torch.empty(rest.shape, dtype=q_rope_out.dtype, device=rest.device)
    return q_rope_out, q_nope_out


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Tensor | tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """`flashinfer.append_paged_kv_cache`: write rows into a paged K/V cache, without a scale.

        >>> append_paged_kv_cache(
        ...     k, v, batch_indices, positions, (k_cache, v_cache), kv_indices, kv_indptr, kv_last_page_len
        ... )

        append_key, append_value:  [T, H, D], [T, H, Dv]  bf16 | fp16 | fp32, or an fp8 cache's own dtype
        batch_indices, positions:  [T]  as `get_batch_indices_positions` gives them; negative batch: skipped
        paged_kv_cache:            (k, v) of 4-D tensors or one 5-D tensor [P, 2, ...]; bf16, fp16, e4m3 or e5m2
        kv_last_page_len:          accepted, without effect: `positions` says it all

    An fp8 cache gets the saturating cast of the rows; codes of its own dtype are copied, NaN too. Raises ValueError or
    TypeError for a bad argument.
    """
    (k, v, *_), parts = halves(paged_kv_cache)
    place = batch_indices, positions, kv_indptr, kv_indices
    signature, found = lookup_cached(
        _APPEND_NAMES, "append", ("append", kv_layout),
        (append_key, append_value, k, v, None, None, None, *place, None, None, None, None, None, None), parts,
    )  # fmt: skip
    if found is not None:
        return
    for t in paged_kv_cache if isinstance(paged_kv_cache, (tuple, list)) else (paged_kv_cache,):
        if isinstance(t, Tensor) and t.dtype not in _UNSCALED:
            want = " | ".join(map(dtype_name, _UNSCALED))
            raise ValueError(f"paged_kv_cache: want {want}, got {dtype_name(t.dtype)}")
    kv = with_caller_names(_APPEND_NAMES, layer, paged_kv_cache, kv_layout, None)
    call = AppendCall(
        append_key, append_value, kv.k, kv.v, None, None, *_place(*place), kv.formats[0], 1.0, None, 1.0, None, True,
    )  # fmt: skip
    with_caller_names(_APPEND_NAMES, dispatch_call, "append", call, None, signature)


def append_paged_mla_kv_cache(
    append_ckv: Tensor,
    append_kpe: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    """`flashinfer.append_paged_mla_kv_cache`: write latent rows into a paged MLA cache, without a scale.

        >>> append_paged_mla_kv_cache(
        ...     ckv, kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr, kv_last_page_len
        ... )

        append_ckv, append_kpe:  [T, L], [T, R]  bf16 | fp16 | fp32, or an fp8 cache's own dtype; any L and R
        ckv_cache, kpe_cache:    [P, S, L], [P, S, R]  bf16, fp16, e4m3 or e5m2; two tensors or views of one
        kv_last_page_len:        accepted, without effect

    An fp8 cache gets the saturating cast of the rows; codes of its own dtype are copied, NaN too. Raises ValueError or
    TypeError for a bad argument.
    """
    place = batch_indices, positions, kv_indptr, kv_indices
    nothing = None, None, None, None
    signature, found = lookup_cached(
        _APPEND_NAMES, "mla_append", ("append_mla",),
        (None, None, append_ckv, append_kpe, *nothing, ckv_cache, kpe_cache, None, None, *place, None, None),
    )  # fmt: skip
    if found is not None:
        return
    pair = tensor("ckv_cache", ckv_cache, "P, S, L"), tensor("kpe_cache", kpe_cache, "P, S, R")
    latent = with_caller_names(_APPEND_NAMES, PagedLatentLayer.of, pair)
    call = MLAAppendCall(
        None, None, append_ckv, append_kpe, *nothing, latent.ckv, latent.kpe, None, *_place(*place), latent.format,
        False, 1.0, None, 1.0, None, True, False,
    )  # fmt: skip
    with_caller_names(_APPEND_NAMES, dispatch_call, "mla_append", call, None, signature)


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """`flashinfer.get_seq_lens`: tokens of each request [B], from its pages and the entries of its last page.

        >>> kv_indptr, kv_last_page_len = torch.tensor([0, 4, 7]), torch.tensor([12, 8])
        >>> get_seq_lens(kv_indptr, kv_last_page_len, page_size=16).tolist()
        [60, 40]

    Raises ValueError or TypeError for a bad argument.
    """
    pages = _signed("kv_indptr", kv_indptr, "B + 1").diff()
    last = _alike("kv_last_page_len", kv_last_page_len, pages)
    return (pages - 1).clamp(min=0) * as_host_int("page_size", page_size, 1) + last


def get_batch_indices_positions(
    append_indptr: Tensor,
    seq_lens: Tensor,
    nnz: int,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`flashinfer.get_batch_indices_positions`: the request and the cache position of each of `nnz` ragged tokens.

        >>> append_indptr, seq_lens = torch.tensor([0, 3, 5]), torch.tensor([10, 2])
        >>> batch_indices, positions = get_batch_indices_positions(append_indptr, seq_lens, nnz=5)
        >>> batch_indices.tolist(), positions.tolist()
        ([0, 0, 0, 1, 1], [7, 8, 9, 0, 1])

        append_indptr:  [B + 1]  first new token of each request
        seq_lens:       [B]      tokens of each request in the cache, the new ones included
        batch_indices, positions:  [nnz] int32, written; default: new tensors

    Returns int32 (batch_indices [nnz], positions [nnz]); tokens past append_indptr[-1] get -1 and 0. Raises ValueError
    or TypeError for a bad argument.
    """
    ends = _signed("append_indptr", append_indptr, "B + 1")[1:]
    lens = _alike("seq_lens", seq_lens, ends)
    token = torch.arange(as_host_int("nnz", nnz, 0), dtype=ends.dtype, device=ends.device)
    given = (("batch_indices", batch_indices), ("positions", positions))
    indices, places = (_index_receiver(name, x, token) for name, x in given)
    if ends.numel() == 0:
        return indices.fill_(-1), places.zero_()
    # Each line is a launch.
    torch.searchsorted(ends, token, right=True, out_int32=True, out=indices)
    behind = indices >= ends.numel()
    position = (lens - ends).index_select(0, indices.clamp(max=ends.numel() - 1)).add_(token)
    return indices.masked_fill_(behind, -1), places.copy_(position.masked_fill_(behind, 0))


def _index_receiver(name: str, out: Tensor | None, token: Tensor) -> Tensor:
    """[nnz] int32: the caller's tensor, or a new one."""
    if out is None:
        return torch.empty_like(token, dtype=torch.int32)
    if tensor(name, out).dtype != torch.int32 or out.shape != token.shape or out.device != token.device:
        got = f"{list(out.shape)} {dtype_name(out.dtype)} on {out.device}"
        raise ValueError(f"{name}: want [{len(token)}] int32 on {token.device}, got {got}")
    return out


def _quantize_dtype(
    lookup_cached: torch.dtype | None, q_rope_out: Tensor | None, q_nope_out: Tensor | None
) -> torch.dtype:
    dtype, name = lookup_cached, "quantize_dtype"
    for out_name, out in (("q_rope_out", q_rope_out), ("q_nope_out", q_nope_out)):
        if out is not None:
            tensor(out_name, out)
            if dtype is None:
                dtype, name = out.dtype, out_name
    if dtype is None:
        return torch.float8_e4m3fn
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"quantize_dtype: want torch.dtype, got {type(dtype).__name__}")
    if dtype not in FP8:
        raise ValueError(f"{name}: want float8_e4m3fn or float8_e5m2, got {dtype_name(dtype)}")
    return dtype


def _place(
    batch_indices: Tensor, positions: Tensor, kv_indptr: Tensor, kv_indices: Tensor
) -> tuple[None, Tensor, Tensor, Tensor, Tensor]:
    """The fields of a call record that say where tokens go."""
    return (
        None,
        tensor("batch_indices", batch_indices),
        tensor("positions", positions),
        tensor("kv_indptr", kv_indptr),
        tensor("kv_indices", kv_indices),
    )


def _receiver(x: Tensor, out: Tensor | None, dtype: torch.dtype, name: str) -> Tensor:
    if out is None:
        return torch.empty(x.shape, dtype=dtype, device=x.device)
    if out.dtype != dtype or out.shape != x.shape:
        raise ValueError(
            f"{name}: want {list(x.shape)} {dtype_name(dtype)}, got {list(out.shape)} {dtype_name(out.dtype)}"
        )
    return out


def _cache_fits(pair: tuple[Tensor, Tensor], rank: int, dtype: torch.dtype, page_size: int, page_dim: int) -> None:
    """Raise unless the pair has the quantised dtype, the rank and the page size that the caller states."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        got = f"{len(pair)} entries" if isinstance(pair, (tuple, list)) else type(pair).__name__
        raise TypeError(f"paged_kv_cache: want a tuple of two tensors, got {got}")
    for i, t in enumerate(pair):
        name = f"paged_kv_cache[{i}]"
        if tensor(name, t).dim() != rank or t.dtype != dtype:
            raise ValueError(
                f"{name}: want {rank} dimensions in {dtype_name(dtype)}, got {list(t.shape)} {dtype_name(t.dtype)}"
            )
    if pair[0].shape[page_dim] != as_host_int("page_size", page_size):
        raise ValueError(f"page_size: want the cache's own {pair[0].shape[page_dim]}, got {page_size}")


def _signed(name: str, x: Tensor, shape: str) -> Tensor:
    """Indices that can be computed with: PyTorch has no arithmetic on uint32."""
    x = index_tensor(name, x, shape)
    return x.to(torch.int64) if x.dtype == torch.uint32 else x


def _alike(name: str, x: Tensor, other: Tensor) -> Tensor:
    """Indices [B], one for each entry of `other`."""
    x = _signed(name, x, "B")
    if x.shape != other.shape or x.device != other.device:
        raise ValueError(f"{name}: want [{len(other)}] on {other.device}, got {list(x.shape)} on {x.device}")
    return x
