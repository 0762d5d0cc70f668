"""Dense fp64 references of the attention operations, and the one door to all references.

Plain loops over requests; no code shared with a backend. `run` takes a call record on the CPU, writes what the
operation stores exactly, and returns what it computes to a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..calls import (
    AttentionCall,
    IndexScoresCall,
    IndexSelectCall,
    MergeCall,
    MLADecodeBranchCall,
    MLADecodeCall,
    MLAPrefillCall,
    MLAProjectCall,
)
from ..formats import TOKEN_HEAD, latent_format, pair_of
from . import reference_append, reference_index, reference_lists, reference_rotation, reference_transcode
from .codes import column, decode, encode, quantise_latents, read_rows, write_rows
from .memory import put, take

# How far products of a score are off, of themselves, where sums have an order of their own: Hopper sums up products of
# 8-bit codes with some 14 bits, and a prefill rounds keys to 16 bits, here and there to the other side (on an H200).
PRODUCT = 2.0**-10
# How far a query is off, of itself, where it is scaled and rotated to meet keys that are, and then rounded to fp16.
TURNED = 2.0**-12
# How far a column of a query is off, of a step of its row's int8 codes: uniformly rounded.
ROUNDED = 12**-0.5


class Expected(NamedTuple):
    """values: fp64, by name of a written field. rows: (pages, slots) of latent rows that are right to a tolerance.
    requantised: values were quantised on the way, where a code may differ by one. lse_rounding: how far each LSE moves
    if products of a score are off by PRODUCT of themselves, or a query by TURNED or by ROUNDED, at random; None where
    none is.
    bounds: of values that may be infinite, how far each may be off."""

    values: dict[str, Tensor]
    rows: tuple[Tensor, Tensor] | None = None
    requantised: bool = False
    lse_rounding: Tensor | None = None
    bounds: dict[str, Tensor] | None = None


def run(op: str, call: Any, done: Any = None) -> Expected:
    """What `op` makes of a call record on the CPU; see the module.

    done:  the record after the operation. What it stored to a tolerance and then attends to, new latents and rotated
           queries, is read there: in 8 bits a row that differs in its last bit has other codes, and so other scores.
    """
    if op in _STORES_AND_ATTENDS:
        return _STORES_AND_ATTENDS[op](call, call if done is None else done)
    return _REFERENCES[op](call) or Expected({})


def _decode(call: AttentionCall) -> Expected:
    return _kv_attention(call, eight_bit_products=False)


def _prefill(call: AttentionCall) -> Expected:
    return _kv_attention(call, eight_bit_products=call.q.dtype == call.k_cache.dtype == torch.float8_e4m3fn)


def _has_int8_query(call: AttentionCall) -> bool:
    """Whether precision="fast" permits to quantise a 16-bit query: keys are int8 with a scale each."""
    k = pair_of(call)[0]
    return (
        call.precision == "fast"
        and call.q.dtype.itemsize == 2
        and call.k is None
        and (k.code, k.scale) == ("int8", TOKEN_HEAD)
    )


def _kv_attention(call: AttentionCall, eight_bit_products: bool) -> Expected:
    heads = call.k_cache.shape[2]
    group = call.q.shape[1] // heads
    out, lse = _empty(call.out)
    turn = call.k_signs, call.k_channel_scale
    # A decode multiplies in 16 bits; one of many rows, which prefill's kernels take, holds its tighter bound too.
    rounding = torch.zeros_like(lse)
    for b, (start, stop) in enumerate(_rows(call)):
        n = int(call.seq_lens[b])
        k, v = _keys_and_values(call, b, n, start, stop)
        if call.indices is not None:  # what no list names may be anything
            named = reference_lists.block_counts(call, start, stop, n).sum((0, 1)) > 0
            k, v = (torch.where(named[:, None, None], x, 0.0) for x in (k, v))
        q = decode(call.q[start:stop]).unflatten(1, (heads, group))
        scale = float(_pick(call, "softmax_scale"))
        scores = torch.einsum("rhgd,nhd->rhgn", q, k).flatten(1, 2) * scale
        if call.softcap:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        mask = None if call.mask is None else call.mask[start:stop]
        visible = _visible(stop - start, n, mask, call.window)
        if call.indices is not None:
            counts = reference_lists.block_counts(call, start, stop, n).repeat_interleave(group, 1)
            scores, visible = scores + counts.log(), counts > 0
        p, lse[start:stop] = _softmax(scores, visible, call.sinks)
        o = torch.einsum("rhgn,nhd->rhgd", p.unflatten(1, (heads, group)), v)
        out[start:stop] = o.flatten(1, 2)
        if eight_bit_products:
            products = torch.einsum("rhgd,nhd->rhgn", q.square(), k.square()).flatten(1, 2)
            rounding[start:stop] = _moved(p, products, scale)
        int8_query = _has_int8_query(call)
        if turn != (None, None) or int8_query:
            q, k = (q, k) if turn == (None, None) else reference_rotation.together(q, k, *turn)
            mean_key = torch.einsum("rhgn,nhd->rhgd", p.unflatten(1, (heads, group)), k)
            step = q.abs().amax(-1, keepdim=True) / 127 if int8_query else torch.zeros(())
            each = (TURNED * q * (turn != (None, None)), ROUNDED * step)
            rounding[start:stop] += sum(scale * (x * mean_key).norm(dim=-1).flatten(1) for x in each)
    return _attention(call, out * float(_pick(call, "out_scale")), lse)._replace(lse_rounding=rounding)


def _keys_and_values(call: Any, b: int, n: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """fp64 rows of the n tokens of request b with query rows [start, stop), as they were before they were scaled and
    rotated; the last the call's own if given."""
    found = []
    for side, f in zip("kv", pair_of(call), strict=True):
        given = getattr(call, side, None)
        new = 0 if given is None else min(stop - start, n)
        where = _places(call.page_table[b], n - new, call.k_cache.shape[1])
        scale = column(_pick(call, f"{side}_scale"))
        rows = read_rows(getattr(call, f"{side}_cache"), getattr(call, f"{side}_scale_cache"), *where, f, scale)
        turn = getattr(call, f"{side}_signs"), getattr(call, f"{side}_channel_scale")
        rows = reference_rotation.back(rows, *turn)
        found.append(rows if given is None else torch.cat([rows, decode(given[stop - new : stop])]))
    return found[0], found[1]


def _mla_decode(call: MLADecodeCall) -> Expected:
    if call.indices is not None:
        return _mla_decode_lists(call)
    assert call.page_table is not None
    assert call.seq_lens is not None
    out, lse = _empty(call.out)
    rounding = torch.zeros_like(lse) if call.ckv.dtype.itemsize == 1 else None
    scale = float(_pick(call, "softmax_scale"))
    for b, (start, stop) in enumerate(_rows(call)):
        n = int(call.seq_lens[b])
        ckv, kpe = latent_rows(call, *_places(call.page_table[b], n, call.ckv.shape[1]))
        q_nope, q_pe = _latent_query(call, start, stop)
        scores = (q_nope @ ckv.T + q_pe @ kpe.T) * scale
        visible = _visible(stop - start, n, None, 0)
        p, lse[start:stop] = _softmax(scores, visible, call.sinks)
        if call.lse_of_keys:
            lse[start:stop] = _softmax(scores, visible, None)[1]
        out[start:stop] = p @ ckv
        if rounding is not None:
            rounding[start:stop] = _moved(p, q_nope.square() @ ckv.square().T + q_pe.square() @ kpe.square().T, scale)
    return _attention(call, out * float(_pick(call, "out_scale")), lse)._replace(lse_rounding=rounding)


_OF_A_SET = ("ckv", "kpe", "ckv_scale_cache", "format", "kv_scale", "kv_scale_t")


def _mla_decode_lists(call: MLADecodeCall) -> Expected:
    """Row by row over the keys that its lists name, as often as they do."""
    out, lse = _empty(call.out)
    largest = lse.clone()
    caches = [call.ckv] if call.extra_ckv is None else [call.ckv, call.extra_ckv]
    rounding = torch.zeros_like(lse) if any(x.dtype.itemsize == 1 for x in caches) else None
    scale = float(_pick(call, "softmax_scale"))
    first, other = reference_lists.latent_keys(call), [list[tuple[int, int]]()] * len(out)
    second = call
    if call.extra_ckv is not None:
        other = reference_lists.extra_keys(call)
        second = call._replace(**{name: getattr(call, f"extra_{name}") for name in _OF_A_SET})
    for t, sets in enumerate(zip(first, other, strict=True)):
        stacked = [
            latent_rows(of, *torch.tensor(keys).T) for of, keys in zip((call, second), sets, strict=True) if keys
        ]
        if not stacked:
            continue
        ckv, kpe = (torch.cat(parts) for parts in zip(*stacked, strict=True))
        q_nope, q_pe = _latent_query(call, t, t + 1)
        scores = (q_nope @ ckv.T + q_pe @ kpe.T) * scale
        p, lse[t : t + 1] = _softmax(scores, torch.ones(1, len(ckv), dtype=torch.bool), call.sinks)
        if call.lse_of_keys:
            lse[t] = torch.logsumexp(scores[0], -1)
        largest[t] = scores[0].amax(-1)
        out[t : t + 1] = p @ ckv
        if rounding is not None:
            products = q_nope.square() @ ckv.square().T + q_pe.square() @ kpe.square().T
            rounding[t : t + 1] = _moved(p, products, scale)
    expected = _attention(call, out * float(_pick(call, "out_scale")), lse)._replace(lse_rounding=rounding)
    if call.max_logits is not None:
        expected.values["max_logits"] = largest
    return expected


def _latent_query(call: MLADecodeCall, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """fp64 parts of query rows; the rotary one may have no columns."""
    q_nope = decode(call.q_nope[start:stop])
    return q_nope, q_nope[..., :0] if call.q_pe is None else decode(call.q_pe[start:stop])


def _moved(p: Tensor, products: Tensor, scale: float) -> Tensor:
    """How far an LSE [r, H] moves if products are off at random; squares summed over a score's products [r, H, n]."""
    return PRODUCT * scale * (p.square() * products).sum(-1).sqrt()


def _mla_prefill(call: MLAPrefillCall, done: MLAPrefillCall) -> Expected:
    rope, heads, dv = call.kpe.shape[-1], call.q.shape[1], call.out.shape[-1]
    nope = call.q.shape[-1] - rope
    out, lse = _empty(call.out)
    rounding = torch.zeros_like(lse)
    q, weight = decode(call.q).clone(), _weight(call)
    pages, slots = [], []
    for b, (start, stop) in enumerate(_rows(call)):
        where, new, freqs = _store_new(call, b, start, stop)
        pages.append(new[0])
        slots.append(new[1])
        q[start:stop, :, nope:] = _rotated(call.q[start:stop, :, nope:], freqs).to(call.q.dtype).double()
        rotated = q[start:stop] if done is call else decode(done.q[start:stop])
        ckv, kpe = latent_rows(done, *where)
        k_nope, v = _up_project(call, ckv, weight).unflatten(-1, (heads, -1)).split([nope, dv], -1)
        kpe = kpe.to(call.q.dtype).double()
        k = torch.cat([k_nope, kpe[:, None].expand(-1, heads, -1)], -1)
        scores = torch.einsum("rhd,nhd->rhn", rotated, k) * call.softmax_scale
        p, lse[start:stop] = _softmax(scores, _visible(stop - start, len(ckv), None, 0), None)
        out[start:stop] = torch.einsum("rhn,nhd->rhd", p, v)
        products = torch.einsum("rhd,nhd->rhn", rotated[..., :nope].square(), k_nope.square())
        rounding[start:stop] = _moved(p, products, call.softmax_scale)
    rows = (torch.cat(pages), torch.cat(slots)) if pages else None
    return Expected({**_attention(call, out, lse).values, "q": q}, rows, lse_rounding=rounding)


def _mla_project(call: MLAProjectCall) -> Expected:
    return Expected({"out": _by_head(call.x, call.weight, call.weight_scale)})


def _by_head(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """fp64 rows [T, H, K] through each head's matrix [H, N, K], quantised where that is."""
    x, weight = decode(x), decode(weight)
    if scale is not None:
        weight = weight * scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
        x = quantise_latents(x)
    return torch.einsum("thk,hnk->thn", x, weight)


def _mla_decode_branch(call: MLADecodeBranchCall, done: MLADecodeBranchCall) -> Expected:
    nope, half = call.q.shape[-1] - call.kpe.shape[-1], call.q.dtype
    q_nope = _by_head(call.q[..., :nope], call.w_uk, call.w_uk_scale).to(half).double()
    latent = torch.zeros(q_nope.shape, dtype=half)
    pages, slots = [], []
    for b, (start, stop) in enumerate(_rows(call)):
        where, new, freqs = _store_new(call, b, start, stop)
        pages.append(new[0])
        slots.append(new[1])
        ckv, kpe = latent_rows(done, *where)
        q_pe = _rotated(call.q[start:stop, :, nope:], freqs).to(half).double()
        scores = (q_nope[start:stop] @ ckv.T + q_pe @ kpe.T) * float(_pick(call, "softmax_scale"))
        p, _ = _softmax(scores, _visible(stop - start, len(ckv), None, 0), None)
        latent[start:stop] = (p @ ckv).to(half)
    out = _by_head(latent, call.w_uv, call.w_uv_scale)
    rows = (torch.cat(pages), torch.cat(slots)) if pages else None
    return Expected({"out": out}, rows, call.w_uv_scale is not None)


def _merge_states(call: MergeCall) -> Expected:
    lses = call.lses.double()
    lse = torch.logsumexp(lses, 0)
    weight = torch.where(lses == -torch.inf, 0.0, torch.exp(lses - lse))[..., None]
    parts = torch.where(weight == 0, 0.0, call.outs.double())
    return _attention(call, (weight * parts).sum(0), lse)


def _index_scores(call: IndexScoresCall) -> Expected:
    found = reference_index.index_scores(call)
    return Expected({"out": found.values}, bounds={"out": found.bounds})


def _index_select(call: IndexSelectCall, done: IndexSelectCall) -> Expected:
    reference_index.index_select(call, done)
    return Expected({})


_REFERENCES: dict[str, Callable[[Any], Expected | None]] = {
    "append": reference_append.append,
    "rope_append": reference_append.rope_append,
    "mla_append": reference_append.mla_append,
    "decode": _decode,
    "prefill": _prefill,
    "mla_decode": _mla_decode,
    "mla_project": _mla_project,
    "merge_states": _merge_states,
    "transcode": reference_transcode.transcode,
    "index_append": reference_index.index_append,
    "index_query": reference_index.index_query,
    "index_scores": _index_scores,
    "index_topk": reference_index.index_topk,
}
_STORES_AND_ATTENDS: dict[str, Callable[[Any, Any], Expected]] = {
    "mla_prefill": _mla_prefill,
    "mla_decode_branch": _mla_decode_branch,
    "index_select": _index_select,
}


Where = tuple[Tensor, Tensor]  # pages and slots


def _store_new(call: Any, b: int, start: int, stop: int) -> tuple[Where, Where, Tensor]:
    """Norm and rotate the new tokens of request b, and store them: where all its tokens are, and the new ones; their
    rows of freqs_cis."""
    old = int(call.cache_lens[b])
    n = old + stop - start
    where = _places(call.page_table[b], n, call.ckv.shape[1])
    new = where[0][old:], where[1][old:]
    freqs = torch.zeros(n - old, 0) if call.freqs_cis is None else call.freqs_cis[old:n]
    f, scale = latent_format(call.format), column(_pick(call, "kv_scale"))
    raw = take(call.ckv, *new) if call.kv_c is None else call.kv_c[start:stop]
    k_pe = take(call.kpe, *new) if call.k_pe is None else call.k_pe[start:stop]
    x = raw.double()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + call.epsilon)
    gamma = call.kv_norm_gamma
    normed = x.to(gamma.dtype) * gamma
    write_rows(call.ckv, call.ckv_scale_cache, *new, normed.float(), f, scale)
    k_pe = _rotated(k_pe[:, None], freqs)[:, 0].float()  # no rounding to 16 bits before that of the cache
    put(call.kpe, *new, encode(k_pe * (1.0 / scale) if f.scale == "tensor" else k_pe, call.kpe.dtype))
    return where, new, freqs


def _rotated(x: Tensor, freqs: Tensor) -> Tensor:
    """RoPE of [T, H, R], interleaved pairs, in the dtype of freqs [T, R]."""
    return reference_append.rotate(x.to(freqs.dtype), freqs[:, 0::2], freqs[:, 1::2], True)


def _weight(call: MLAPrefillCall) -> Tensor:
    """kv_b_proj [H * (Dn + Dv), L] in fp64."""
    w = decode(call.kv_b_proj)
    if call.kv_b_proj_scale is None:
        return w
    return w * call.kv_b_proj_scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)


def _up_project(call: MLAPrefillCall, ckv: Tensor, weight: Tensor) -> Tensor:
    """Latents [n, L] through kv_b_proj; operands of 16 bits and the result are in q's dtype."""
    ckv = ckv.to(call.q.dtype).double() if call.kv_b_proj_scale is None else quantise_latents(ckv)
    return (ckv @ weight.T).to(call.q.dtype).double()


def latent_rows(call: Any, pages: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """fp64 latent and rotary parts of cached rows."""
    f, scale = latent_format(call.format), column(_pick(call, "kv_scale"))
    ckv = read_rows(call.ckv, call.ckv_scale_cache, pages, slots, f, scale)
    kpe = decode(take(call.kpe, pages, slots))
    return ckv, kpe * scale.double() if f.scale == "tensor" else kpe


def _places(table: Tensor, n: int, size: int) -> tuple[Tensor, Tensor]:
    """Page and slot of the first n tokens of a request."""
    j = torch.arange(n)
    return table[: -(-n // size)].to(torch.int64)[j // size], j % size


def _rows(call: Any) -> list[tuple[int, int]]:
    """First and last + 1 query row of each request."""
    requests = call.page_table.shape[0]
    if call.cu_seqlens_q is None:
        return [(b * call.max_q_len, (b + 1) * call.max_q_len) for b in range(requests)]
    cu = call.cu_seqlens_q.tolist()
    return list(pairwise(cu))


def _visible(rows: int, n: int, mask: Tensor | None, window: int) -> Tensor:
    """Which of n keys each of the last `rows` tokens sees: [rows, n] bool."""
    i, j = torch.arange(n - rows, n)[:, None], torch.arange(n)
    if mask is None or not rows:
        visible = j <= i
    else:
        bits = (mask.to(torch.int64)[..., None] >> torch.arange(16) & 1).flatten(1).bool()
        draft = j - (n - rows)
        visible = (draft < 0) | bits[:, draft.clamp(min=0)]
        visible = visible & (i >= 0)
    return visible & (j > i - window) if window else visible


def _softmax(scores: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities [r, H, n] and lse [r, H]; a row that sees nothing: 0 and −inf. visible: [r, n], or [r, H, n]."""
    visible = visible[:, None] if visible.dim() == 2 else visible
    scores = torch.where(visible, scores, -torch.inf)
    every = scores
    if sinks is not None:
        every = torch.cat([scores, sinks.double()[:, None].expand(len(scores), -1, 1)], -1)
    lse = torch.where(visible.any(-1), torch.logsumexp(every, -1), -torch.inf)
    p = torch.exp(scores - lse[..., None])  # 0 beside a sink of inf
    return torch.where(visible, p, 0.0), lse


def _attention(call: Any, out: Tensor, lse: Tensor) -> Expected:
    values = {"out": out}
    if call.out.dtype.itemsize == 1:
        values["out"] = out.clamp(-torch.finfo(call.out.dtype).max, torch.finfo(call.out.dtype).max)
    return Expected(values if call.lse is None else {**values, "lse": lse})


def _empty(out: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros(out.shape, dtype=torch.float64), torch.full(out.shape[:2], -torch.inf, dtype=torch.float64)


def _pick(call: Any, name: str) -> float | Tensor:
    """A scale of a call: the tensor wins."""
    tensor = getattr(call, f"{name}_t")
    return getattr(call, name) if tensor is None else tensor
