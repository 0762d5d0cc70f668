"""Reference appends: plain fp32 arithmetic, one rounding per operation, codes by search (`codes.py`).

Each function writes into the tensors of a call record on the CPU, as the operation does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..calls import AppendCall, MLAAppendCall, RopeAppendCall
from ..formats import latent_format, pair_of
from . import reference_rotation
from .codes import column, encode, write_rows
from .memory import as_bytes, put

AnyAppend = AppendCall | RopeAppendCall | MLAAppendCall


def append(call: AppendCall) -> None:
    _write_kv(call, call.k, call.v, *places(call, call.k_cache)[:3])


def rope_append(call: RopeAppendCall) -> None:
    pages, slots, live, skipped = places(call, call.k_cache)
    cos, sin, known = _angles(call.cos_sin_cache, call.positions)
    k = rotate(call.k_rope.float(), cos, sin, call.interleaved)
    if call.k_nope is not None:
        k = torch.cat([k, call.k_nope.float()], -1)
    _write_kv(call, k, call.v, pages, slots, live & known)
    _write_query(call, cos, sin, known & ~skipped if call.zero_padding else known)


def mla_append(call: MLAAppendCall) -> None:
    pages, slots, live, skipped = places(call, call.ckv)
    k_pe = call.kv_c[:, :0].float() if call.k_pe is None else call.k_pe.float()
    cos, sin, known = None, None, torch.ones_like(live)
    if call.cos_sin_cache is not None:
        assert call.positions is not None
        cos, sin, known = _angles(call.cos_sin_cache, call.positions)
        k_pe = rotate(k_pe[:, None], cos, sin, call.interleaved)[:, 0]
    live = live & known
    f = latent_format(call.format)
    scale, inverse = _scales(call.kv_scale, call.kv_scale_t, call.scales_quantize)
    pages, slots = pages[live], slots[live]
    write_rows(call.ckv, call.ckv_scale_cache, pages, slots, call.kv_c[live], f, scale, inverse)
    if call.k_pe is not None and call.k_pe.dtype == call.kpe.dtype and f.scale == "tensor":
        put(call.kpe, pages, slots, call.k_pe[live])
    else:
        scaled = k_pe[live] * inverse if f.scale == "tensor" else k_pe[live]
        put(call.kpe, pages, slots, encode(scaled, call.kpe.dtype))
    _write_query(call, cos, sin, known & ~skipped if call.zero_padding else known)


def places(call: AnyAppend, cache: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Page, slot, "inside the cache" and "skipped" of every new token."""
    num_pages, size = cache.shape[:2]
    if call.slot_mapping is not None:
        place = call.slot_mapping.to(torch.int64)
        return place // size, place % size, (place >= 0) & (place < num_pages * size), place < 0
    assert call.batch_indices is not None
    assert call.kv_positions is not None
    assert call.kv_indptr is not None
    assert call.kv_indices is not None
    batch, pos = call.batch_indices.to(torch.int64), call.kv_positions.to(torch.int64)
    starts, indices = call.kv_indptr.to(torch.int64), call.kv_indices.to(torch.int64)
    pages, live = torch.zeros_like(pos), torch.zeros_like(pos, dtype=torch.bool)
    for i, (b, p) in enumerate(zip(batch.tolist(), pos.tolist(), strict=True)):
        if 0 <= b < len(starts) - 1 and 0 <= p < (starts[b + 1] - starts[b]) * size:
            pages[i] = indices[starts[b] + p // size]
            live[i] = 0 <= pages[i] < num_pages
    return pages, pos % size, live, batch < 0


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """RoPE of [T, H, R] in the dtype of x, cos [T, R/2] and sin."""
    half = x.shape[-1] // 2
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    cos, sin = cos[:, None], sin[:, None]
    pair = a * cos - b * sin, b * cos + a * sin
    return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)


def _angles(table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """cos, sin [T, R/2], and which positions lie inside the table."""
    positions = positions.to(torch.int64)
    known = (positions >= 0) & (positions < len(table))
    rows, half = table[torch.where(known, positions, 0)], table.shape[1] // 2
    return rows[:, :half], rows[:, half:], known


def _scales(value: float, tensor: Tensor | None, quantise: bool) -> tuple[Tensor, Tensor]:
    """Dequantising scale and multiplier, each a `column`, of an append's pair."""
    given = column(value if tensor is None else tensor)
    return (1.0 / given, given) if tensor is None or quantise else (given, 1.0 / given)


def _write_kv(
    call: AppendCall | RopeAppendCall, k: Tensor, v: Tensor, pages: Tensor, slots: Tensor, live: Tensor
) -> None:
    k_format, v_format = pair_of(call)
    k_scales = _scales(call.k_scale, call.k_scale_t, call.scales_quantize)
    v_scales = _scales(call.v_scale, call.v_scale_t, call.scales_quantize)
    where, widen = (pages[live], slots[live]), getattr(call, "widen", True)
    k = reference_rotation.row(k[live], call.k_signs, call.k_channel_scale)
    v = reference_rotation.row(v[live], call.v_signs, call.v_channel_scale)
    write_rows(call.k_cache, call.k_scale_cache, *where, k, k_format, *k_scales, widen=widen)
    write_rows(call.v_cache, call.v_scale_cache, *where, v, v_format, *v_scales, widen=widen)


def _write_query(call: RopeAppendCall | MLAAppendCall, cos: Tensor | None, sin: Tensor | None, keep: Tensor) -> None:
    _, multiplier = _scales(call.q_scale, call.q_scale_t, call.scales_quantize)
    for q, out in ((call.q_rope, call.q_rope_out), (call.q_nope, call.q_nope_out)):
        if q is None:
            continue
        assert out is not None
        x = q.float()
        if q is call.q_rope and cos is not None and sin is not None:
            x = rotate(x, cos, sin, call.interleaved)
        x = torch.where(keep[:, None, None], x * multiplier, 0.0)
        as_bytes(out).copy_(as_bytes(encode(x, out.dtype)))
