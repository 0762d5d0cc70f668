"""MLA prefill from a paged latent cache, step by step: append, then for each chunk gather, up-project, attend, merge.

Attention is computed in fp32 from inputs in q's dtype. Heads and queries are processed in blocks, so that intermediates
stay below `_BLOCK` elements, or at what one head of a chunk, or one query of a request, needs. Lengths are read on the
host; a token outside the page table, the cache or freqs_cis raises before anything is written.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tersekv.formats import LATENT_GROUP, latent_format

from .exact import without_grad_and_autocast
from .mla_latents import (
    At,
    checked_page_and_slot,
    load_and_dequantize_latents,
    quantize_and_store_latents,
    quantize_gemm_input_by_128_columns,
    rms_norm,
)
from .quantize import why_no_codec
from .rope import apply_rope

_BLOCK = 1 << 24  # elements of an intermediate (64 MiB in fp32)


def why_not(f: SimpleNamespace) -> str | None:
    return why_no_codec(latent_format(f.format))


def configure(f: SimpleNamespace) -> None:
    return None


@without_grad_and_autocast
def run(call: Any, config: None) -> None:
    cu_seqlens_q = call.cu_seqlens_q.tolist()
    new = positions_and_slots_of_new_tokens(call, cu_seqlens_q)
    chunks = [(i, positions_and_slots_of_chunk(call, i, n)) for i, n in enumerate(call.buffer_lengths) if n]
    store_roped_queries_and_new_latents(call, new)
    out = torch.zeros(call.out.shape, dtype=torch.float32, device=call.out.device)
    lse = torch.full(out.shape[:2], -torch.inf, dtype=torch.float32, device=out.device)
    for chunk, slots in chunks:
        _merge_causal_attention_to_chunk(call, chunk, slots, cu_seqlens_q, out, lse)
    call.out.copy_(out)
    if call.lse is not None:
        call.lse.copy_(lse)


class RowSlots(NamedTuple):
    """Pages and slots of cache rows: those of the new tokens, or of a chunk."""

    position: Tensor  # [n] int64: position in the request
    at: At
    first: list[int]  # [B + 1] first row of each request


def positions_and_slots_of_new_tokens(call: Any, cu_seqlens_q: list[int]) -> RowSlots:
    """Returns pages and slots of the new tokens. Raises ValueError for one outside the cache or freqs_cis."""
    if cu_seqlens_q != sorted(cu_seqlens_q) or cu_seqlens_q[0] < 0 or cu_seqlens_q[-1] > call.q.shape[0]:
        raise ValueError(f"cu_seqlens_q: want rows in [0, {call.q.shape[0]}] that never fall, got {cu_seqlens_q}")
    cached = call.cache_lens.to(torch.int64)
    if (cached < 0).any():
        i = int((cached < 0).nonzero()[0, 0])
        raise ValueError(f"cache_lens: want at least 0, got {int(cached[i])} at {i}")
    request, index = request_and_index_of_rows(cu_seqlens_q, call.q.device)
    position = cached[request] + index
    at = checked_page_and_slot(call.page_table, request, position, call.ckv)
    if call.freqs_cis is not None and (position >= call.freqs_cis.shape[0]).any():
        raise ValueError(f"freqs_cis: want at least {int(position.max()) + 1} rows, got {call.freqs_cis.shape[0]}")
    return RowSlots(position, at, cu_seqlens_q)


def store_roped_queries_and_new_latents(call: Any, new_slots: RowSlots) -> None:
    """Rotate q; store the new tokens' rotated k_pe and normed latents. Not idempotent."""
    position, at, first = new_slots
    rows = slice(first[0], first[-1])
    kv_c = call.ckv[at] if call.kv_c is None else call.kv_c[rows]
    k_pe = kv_c[:, :0]
    if call.freqs_cis is not None:
        cos, sin = call.freqs_cis[position].unflatten(-1, (-1, 2)).unbind(-1)
        k_pe = call.kpe[at] if call.kv_c is None else call.k_pe[rows]
        k_pe = apply_rope(k_pe.to(cos.dtype), cos, sin, interleaved=True)
        q_pe = call.q[rows, :, call.q.shape[2] - call.kpe.shape[2] :]
        to = q_pe if call.q_pe_out is None else call.q_pe_out[rows]
        to.copy_(apply_rope(q_pe.to(cos.dtype), cos, sin, interleaved=True))
    if call.seq_lens_out is not None:
        call.seq_lens_out.copy_(call.cache_lens.to(torch.int64) + call.cu_seqlens_q.to(torch.int64).diff())
    quantize_and_store_latents(
        rms_norm(kv_c, call.kv_norm_gamma, call.epsilon), k_pe, call.ckv, call.kpe, call.ckv_scale_cache, at,
        latent_format(call.format), _kv_scale_tensor(call),
    )  # fmt: skip


def positions_and_slots_of_chunk(call: Any, i_chunk: int, max_rows: int) -> RowSlots:
    """Returns pages and slots of a chunk's tokens. Raises ValueError for one outside the cache."""
    rows = [min(row, max_rows) for row in call.buffer_row_offsets[i_chunk].tolist()]
    if rows != sorted(rows):
        raise ValueError(f"plan.buffer_row_offsets: want rows that never fall, got {rows} in chunk {i_chunk}")
    if rows[0] < 0:
        raise ValueError(f"plan.buffer_row_offsets: want rows from 0 on, got {rows} in chunk {i_chunk}")
    request, index = request_and_index_of_rows(rows, call.q.device)
    position = call.cache_offsets[i_chunk].to(torch.int64)[request] + index
    try:
        at = checked_page_and_slot(call.page_table, request, position, call.ckv)
    except ValueError:
        lens = call.cache_lens.to(torch.int64) + call.cu_seqlens_q.to(torch.int64).diff()
        beyond = (position < 0) | (position >= lens[request])
        if not beyond.any():
            raise
        b = int(request[beyond.nonzero()[0, 0]])
        got = f"{int(position[request == b].min())} to {int(position[request == b].max())} in chunk {i_chunk}"
        raise ValueError(f"plan: want tokens in [0, {int(lens[b])}) of request {b}, got {got}") from None
    return RowSlots(position, at, rows)


def gather_latents(call: Any, i_chunk: int, max_rows: int) -> tuple[Tensor, Tensor, list[int]]:
    """Returns dequantized latents [M, L], rotary parts [M, R] and the requests' first rows [B + 1] of a chunk."""
    slots = positions_and_slots_of_chunk(call, i_chunk, max_rows)
    return *_load_dequantized_latents(call, slots), slots.first


def _load_dequantized_latents(call: Any, slots: RowSlots) -> tuple[Tensor, Tensor]:
    return load_and_dequantize_latents(
        call.ckv, call.kpe, call.ckv_scale_cache, slots.at, latent_format(call.format), _kv_scale_tensor(call)
    )


def up_project_latents_to_fp32(
    latents: Tensor, latent_scales: Tensor | None, weight: Tensor, weight_scales: Tensor | None
) -> Tensor:
    """Returns codes [M, L] × weight [N, L] → [M, N] fp32. With scales (of codes [M, L/128], of weight [N, L/128]) the
    partial sums of 128 columns are scaled before they are added.
    """
    latents, weight = latents.to(torch.float32), weight.to(torch.float32)
    if latent_scales is None or weight_scales is None:
        return latents @ weight.T
    out = torch.zeros(latents.shape[0], weight.shape[0], dtype=torch.float32, device=latents.device)
    for group in range(latent_scales.shape[1]):
        columns = slice(group * LATENT_GROUP, (group + 1) * LATENT_GROUP)
        partial = latents[:, columns] @ weight[:, columns].T
        out += partial * (latent_scales[:, group, None] * weight_scales[:, group])
    return out


def causal_attention_and_lse(
    q: Tensor, k: Tensor, k_pe: Tensor, v: Tensor, causal_offset: int, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Returns out [h, m, Dv] and lse [h, m], fp32, of queries i over keys j <= i + causal_offset; no key: 0 and -inf.

    q: [h, m, Dn + R]; k: [h, n, Dn]; k_pe: [n, R], shared by the heads; v: [h, n, Dv]
    """
    m, n, dn = q.shape[1], k.shape[1], k.shape[2]
    last_visible = torch.arange(m, device=q.device) + causal_offset
    hidden = torch.arange(n, device=q.device) > last_visible[:, None]
    scores = (q[..., :dn] @ k.transpose(1, 2) + q[..., dn:] @ k_pe.T) * softmax_scale
    scores = scores.masked_fill(hidden, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    p = torch.exp(scores - top.masked_fill(top == -torch.inf, 0.0))
    total = p.sum(-1)
    if v.isfinite().all():
        out = p @ v
    else:
        # 0 times an infinite or NaN value is NaN: multiply each query with its visible keys only.
        counts = (last_visible + 1).clamp(0, n).tolist()
        out = torch.stack([(p[:, i : i + 1, :c] @ v[:, :c])[:, 0] for i, c in enumerate(counts)], 1)
    none = total == 0
    out = (out / total.masked_fill(none, 1.0)[..., None]).masked_fill(none[..., None], 0.0)
    return out, (top[..., 0] + total.log()).masked_fill(none, -torch.inf)


def merge_partial_in_place(out: Tensor, lse: Tensor, partial_o: Tensor, partial_lse: Tensor) -> None:
    """Merge a partial result over other keys into (out [..., Dv], lse), in place."""
    total = torch.logaddexp(lse, partial_lse)
    base = total.masked_fill(total == -torch.inf, 0.0)
    out.mul_((lse - base).exp()[..., None]).add_((partial_lse - base).exp()[..., None] * partial_o)
    lse.copy_(total)


def _merge_causal_attention_to_chunk(
    call: Any, i_chunk: int, slots: RowSlots, cu_seqlens_q: list[int], out: Tensor, lse: Tensor
) -> None:
    """Merge the attention over one chunk's rows into (out, lse)."""
    dtype, heads, dim_v = call.q.dtype, call.q.shape[1], call.out.shape[2]
    dim = call.q.shape[2] - call.kpe.shape[2] + dim_v
    (latent, k_pe), rows = _load_dequantized_latents(call, slots), slots.first
    scales = weight_scales = None
    if call.kv_b_proj_scale is None:
        latent = latent.to(dtype)
    else:
        latent, scales = quantize_gemm_input_by_128_columns(latent)
        weight_scales = call.kv_b_proj_scale.repeat_interleave(LATENT_GROUP, 0)
    k_pe = k_pe.to(dtype).to(torch.float32)
    cached, first = call.cache_lens.tolist(), call.cache_offsets[i_chunk].tolist()
    step = max(1, _BLOCK // max(1, rows[-1] * dim))
    for head in range(0, heads, step):
        some = slice(head, head + step)
        w = slice(some.start * dim, min(some.stop, heads) * dim)
        kv = up_project_latents_to_fp32(
            latent, scales, call.kv_b_proj[w], None if weight_scales is None else weight_scales[w]
        )
        kv = kv.to(dtype).to(torch.float32).unflatten(1, (-1, dim)).transpose(0, 1)  # [h, M, Dn + Dv]
        for b in range(len(cached)):
            keys = slice(rows[b], rows[b + 1])
            _merge_attention_of_request(
                call, slice(cu_seqlens_q[b], cu_seqlens_q[b + 1]), some, kv[:, keys, :-dim_v], k_pe[keys], kv[:, keys,
                -dim_v:], cached[b] - first[b], out, lse,
            )  # fmt: skip


def _merge_attention_of_request(
    call: Any,
    tokens: slice,
    heads: slice,
    k: Tensor,
    k_pe: Tensor,
    v: Tensor,
    causal_offset: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Merge one request's attention for some heads, in blocks of queries; query i sees keys j <= i + causal_offset."""
    step = max(1, _BLOCK // max(1, k.shape[0] * k.shape[1]))
    for t in range(tokens.start, tokens.stop, step):
        block = slice(t, min(t + step, tokens.stop))
        shift = causal_offset + t - tokens.start
        n = min(k.shape[1], shift + block.stop - t)  # keys that the last of these queries sees
        if n <= 0:
            continue
        q = call.q[block, heads].transpose(0, 1).to(torch.float32)
        part, part_lse = causal_attention_and_lse(q, k[:, :n], k_pe[:n], v[:, :n], shift, call.softmax_scale)
        merge_partial_in_place(out[block, heads], lse[block, heads], part.transpose(0, 1), part_lse.transpose(0, 1))


def request_and_index_of_rows(cu_rows: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the request, and the index within it, of rows cu_rows[0] … cu_rows[-1]."""
    bounds = torch.tensor(cu_rows, device=device)
    request = torch.repeat_interleave(torch.arange(len(cu_rows) - 1, device=device), bounds.diff())
    return request, torch.arange(cu_rows[0], cu_rows[-1], device=device) - bounds[request]


def _kv_scale_tensor(call: Any) -> Tensor:
    """Returns the dequantizing scale of the cache, fp32 [1]; 1 for formats without one."""
    if call.kv_scale_t is not None:
        return call.kv_scale_t
    return torch.tensor([call.kv_scale], dtype=torch.float32, device=call.ckv.device)
