"""Turns a case into the call record of its operation, poisoned wherever nothing may be read.

Dead slots of a cache are 0xFF bytes (NaN), dead entries of a page table huge, outputs start as NaN, gaps between
strided rows are NaN. A case always makes the same tensors; `make(case, "cuda")` holds what `make(case)` holds.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..attributes import signs
from ..cache import PagedKVCache, PagedKVLayer, PagedLatentCache, PagedLatentLayer
from ..calls import (
    AppendCall,
    AttentionCall,
    MergeCall,
    MLAAppendCall,
    MLADecodeBranchCall,
    MLADecodeCall,
    MLAPrefillCall,
    MLAProjectCall,
    RopeAppendCall,
    TranscodeCall,
)
from ..formats import FP8, LATENT_FORMATS, kv_format, latent_format
from ..ops.mla import mla_prefill_plan
from ..ops.scales import ATTRIBUTE_FIELDS, attributes, float_and_tensor, multiplying_scale
from ..ops.transcode import layer_fields
from . import make_index
from .cases import Case
from .codes import column, encode, write_rows
from .lists import Lists
from .memory import POISON, as_bytes, moved, poisoned, put, storage_bytes
from .other_cases import extra_case, source_case
from .requests import FAR, Requests

Scale = float | Tensor
NO_PARTS: tuple[Tensor | None, Tensor | None] = (None, None)


def make(case: Case, device: torch.device | str = "cpu") -> tuple:
    """The call record of `case` on `device`."""
    call = _MAKERS[case.op](_Maker(case))
    return call if torch.device(device).type == "cpu" else moved(call, device)


class _Maker:
    """Random numbers and tensors of one case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.random = torch.Generator().manual_seed(zlib.crc32(case.id.encode()))
        self.requests = Requests(case, self.random)
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.out_dtype: torch.dtype = getattr(torch, case.out_dtype or case.dtype)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.random) * (high - low) + low

    def by_token(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """As `view`; [T, H, D] head by head, if the case has that."""
        if not self.case.head_major or len(shape) != 3:
            return self.view(*shape, dtype=dtype)
        return self.view(shape[1], shape[0], shape[2], dtype=dtype).transpose(0, 1)

    def view(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Poisoned memory; if the case is strided, a part of wider memory that starts off a 16-byte boundary."""
        if not self.case.strided:
            return poisoned(*shape, dtype=dtype)
        wide = poisoned(shape[0], *[n + 1 for n in shape[1:-1]], shape[-1] + 8, dtype=dtype)
        for dim in range(1, len(shape) - 1):
            wide = wide.narrow(dim, 0, shape[dim])
        return wide[..., 4 : 4 + shape[-1]]

    def rows(self, *shape: int, spread: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
        """Rows of normal numbers, in the case's dtype if none is named; `spread`: of sizes that differ by that many
        powers of ten."""
        x = self.normal(*shape)
        if spread:
            x = x * 10.0 ** self.uniform(-spread, 0.5, *shape[:-1], 1)
        return self.placed(encode(x, dtype or self.dtype))

    def new_rows(self, *shape: int) -> Tensor:
        """Rows to append: the first is zero, the second of one sign, the third overflows every 8-bit format; `special`:
        the fifth holds what is not finite. In an 8-bit dtype: codes, any bytes."""
        if self.dtype in FP8:
            return self.placed(torch.randint(256, shape, generator=self.random, dtype=torch.uint8).view(self.dtype))
        x = _with_extremes(self.normal(*shape))
        if self.case.special:
            x[4, ..., 0], x[4, ..., 1] = torch.nan, -0.0
            # In the first head only, which may have two values.
            x.flatten(1)[4, :4][-2:] = torch.tensor([torch.inf, -torch.inf])
        return self.placed(encode(x, self.dtype))

    def placed(self, x: Tensor) -> Tensor:
        out = self.by_token(*x.shape, dtype=x.dtype)
        as_bytes(out).copy_(as_bytes(x))
        return out

    def scale(self, base: float, heads: int | None, kind: str) -> Scale:
        """A scale as the case gives it; 1 where the format's `kind` of scale is not the caller's to give."""
        how = self.case.scale
        if kind not in ("tensor", "block") or how == "one":
            return 1.0
        if how == "float":
            return base
        return torch.full((1,), base) if how == "tensor" or heads is None else torch.linspace(base, 2 * base, heads)

    def kv_layer(self, page: int) -> PagedKVLayer:
        c, dim_v = self.case, self.case.dim_v or self.case.dim
        more = {name: name == c.gaps for name in ("slots", "heads", "columns")}
        formats = [kv_format(c.format), kv_format(c.v_format or c.format)]
        step = max(f.scale_block or 8 for f in formats)
        columns = step * more["columns"]
        layer = PagedKVCache.allocate(
            1, self.requests.num_pages, page + 3 * more["slots"], c.heads + more["heads"], c.dim + columns,
            head_dim_v=dim_v + columns, format=[f.name for f in formats], layout=c.layout, packed=c.packed,
            scales=c.scales,
        )[0]  # fmt: skip
        for t in (layer.k, layer.v, layer.k_scale_cache, layer.v_scale_cache):
            if t is not None:
                storage_bytes(t).fill_(POISON)
        sides = ((layer.k, layer.k_scale_cache, c.dim), (layer.v, layer.v_scale_cache, dim_v))
        codes, stored = [], []
        for f, (x, s, d) in zip(formats, sides, strict=True):
            codes.append(x[:, :page, : c.heads, : f.elements(d)])
            if s is not None:  # [P, S, H] or [P, S, H, blocks]
                s = s[:, :page, : c.heads] if f.scale_block is None else s[:, :page, : c.heads, : f.scales(d)]
            stored.append(s)
        scales = [self.scale(base, c.heads, f.scale) for base, f in zip((0.7, 1.3), formats, strict=True)]
        turns = [signs(d) if side in c.rotation else None for side, d in (("k", c.dim), ("v", dim_v))]
        channels = [
            10.0 ** self.uniform(-1, 1, c.heads, d) if side in c.channels else None
            for side, d in (("k", c.dim), ("v", dim_v))
        ]
        return PagedKVLayer(
            codes[0], codes[1], (formats[0].name, formats[1].name), scales[0], scales[1], stored[0], stored[1],
            turns[0], turns[1], channels[0], channels[1],
        )  # fmt: skip

    def latent_layer(self) -> PagedLatentLayer:
        c = self.case
        more = c.gaps == "slots", c.gaps == "columns" and c.format in LATENT_FORMATS
        layer = PagedLatentCache.allocate(
            1, self.requests.num_pages, c.page + 3 * more[0], format=c.format, kv_lora_rank=c.rank,
            qk_rope_head_dim=c.rope + 8 * more[1], split=c.split,
        )[0]  # fmt: skip
        storage_bytes(layer.ckv).fill_(POISON)
        storage_bytes(layer.kpe).fill_(POISON)
        scale, stored = self.scale(0.7, None, latent_format(c.format).scale), layer.ckv_scale_cache
        ckv, kpe = layer.ckv[:, : c.page], layer.kpe[:, : c.page, : c.rope]
        return PagedLatentLayer(ckv, kpe, c.format, scale, None if stored is None else stored[:, : c.page])

    def output(self, *shape: int) -> Tensor:
        return self.by_token(*shape, dtype=self.out_dtype)

    def lse(self, tokens: int, heads: int) -> Tensor | None:
        if not self.case.lse:
            return None
        turned = self.case.strided or self.case.head_major
        lse = poisoned(*((heads, tokens) if turned else (tokens, heads)), dtype=torch.float32)
        return lse.T if turned else lse

    def quantising(self, scale: Scale) -> tuple[float, Tensor | None]:
        """(float, tensor) of a scale for an append's record."""
        value, tensor = multiplying_scale(scale)
        return value, (1.0 / tensor if tensor is not None and self.case.reciprocal else tensor)

    def query_scale(self) -> tuple[float, Tensor | None]:
        c = self.case
        base = torch.full((1,), 0.3) if c.scale == "tensor" else 0.3 if c.scale == "float" else 1.0
        return self.quantising(base)


def _append(m: _Maker) -> AppendCall:
    c, r = m.case, m.requests
    k, v = m.new_rows(r.tokens, c.heads, c.dim), m.new_rows(r.tokens, c.heads, c.dim_v or c.dim)
    a = m.kv_layer(c.page)
    format, v_format, more = attributes(a)
    return AppendCall(
        k, v, a.k, a.v, a.k_scale_cache, a.v_scale_cache, *r.place(),
        format, *m.quantising(a.k_scale), *m.quantising(a.v_scale), c.reciprocal, v_format, *more, c.widen,
    )  # fmt: skip


def _rope_append(m: _Maker) -> RopeAppendCall:
    c, r = m.case, m.requests
    rotary = c.rotary or c.dim
    k, v = m.new_rows(r.tokens, c.heads, c.dim), m.new_rows(r.tokens, c.heads, c.dim_v or c.dim)
    q_parts = out_parts = NO_PARTS
    if c.query:
        heads = c.heads * c.group
        q_parts = _halves(m.new_rows(r.tokens, heads, c.dim), rotary)
        out_parts = _halves(m.output(r.tokens, heads, c.dim), rotary)
    a = m.kv_layer(c.page)
    format, v_format, more = attributes(a)
    return RopeAppendCall(
        *q_parts, k[..., :rotary], _halves(k, rotary)[1], v, r.cos_sin(rotary), r.positions(), *out_parts,
        a.k, a.v, a.k_scale_cache, a.v_scale_cache, *r.place(), format, c.interleaved,
        *m.query_scale(), *m.quantising(a.k_scale), *m.quantising(a.v_scale), c.reciprocal, c.zero_padding,
        v_format, *more,
    )  # fmt: skip


def _mla_append(m: _Maker) -> MLAAppendCall:
    c, r = m.case, m.requests
    kv_c, k_pe = m.new_rows(r.tokens, c.rank), m.new_rows(r.tokens, c.rope) if c.rope else None
    q_rope = q_nope = q_rope_out = q_nope_out = None
    if c.query:
        shapes = (r.tokens, c.group, c.rope), (r.tokens, c.group, c.q_nope)
        (q_rope, q_nope), (q_rope_out, q_nope_out) = [m.new_rows(*s) for s in shapes], [m.output(*s) for s in shapes]
    a = m.latent_layer()
    rope = (r.cos_sin(c.rope), r.positions()) if c.rotate else NO_PARTS
    return MLAAppendCall(
        q_rope, q_nope, kv_c, k_pe, *rope, q_rope_out, q_nope_out, a.ckv, a.kpe, a.ckv_scale_cache, *r.place(),
        c.format, c.interleaved, *m.query_scale(), *m.quantising(a.kv_scale), c.reciprocal, c.zero_padding,
    )  # fmt: skip


def _decode(m: _Maker) -> AttentionCall:
    c, r = m.case, m.requests
    mask = r.mask() if c.mask else None
    return AttentionCall(**_kv_attention(m), cu_seqlens_q=r.cu_seqlens() if c.ragged else None, mask=mask)


def _prefill(m: _Maker) -> AttentionCall:
    c, r = m.case, m.requests
    k = v = None
    if c.new_rows:
        half = m.dtype if m.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
        k = m.rows(r.tokens, c.heads, c.dim, spread=2.0 * c.spread, dtype=half)
        v = m.rows(r.tokens, c.heads, c.dim_v or c.dim, spread=3.0 * c.spread, dtype=half)
    return AttentionCall(**_kv_attention(m), k=k, v=v, cu_seqlens_q=r.cu_seqlens())


def _kv_attention(m: _Maker) -> dict[str, Any]:
    """The fields that decode and prefill share."""
    c, r = m.case, m.requests
    a, dv = m.kv_layer(c.page), c.dim_v or c.dim
    format, v_format, more = attributes(a)
    lists = Lists(c, r, c.heads if c.each_head else 1) if c.listed >= 0 else None
    _fill_kv(m, a, *(r.live(new=not c.new_rows) if lists is None else lists.live()))
    heads = c.heads * c.group
    scales: dict[str, Scale] = {
        "softmax_scale": c.dim**-0.5,
        "out_scale": 1.0,
        "k_scale": a.k_scale,
        "v_scale": a.v_scale,
    }
    if c.scale == "tensor":
        scales |= {"softmax_scale": torch.full((1,), c.dim**-0.5), "out_scale": torch.full((1,), 3.0)}
    if c.scale == "float":
        scales["out_scale"] = 0.4
    given: dict[str, Any] = dict(zip(ATTRIBUTE_FIELDS, more, strict=True))
    for name, scale in scales.items():
        given[name], given[f"{name}_t"] = float_and_tensor(scale)
    return given | {
        "q": m.rows(r.tokens, heads, c.dim), "k_cache": a.k, "v_cache": a.v, "k_scale_cache": a.k_scale_cache,
        "v_scale_cache": a.v_scale_cache, "page_table": r.page_table(new=not c.new_rows), "seq_lens": r.seq_lens(),
        "sinks": _sinks(m, heads) if c.sinks else None, "out": m.output(r.tokens, heads, dv),
        "lse": m.lse(r.tokens, heads), "format": format, "max_q_len": r.max_q_len, "window": c.window,
        "softcap": c.softcap, "precision": c.precision, "v_format": v_format,
        "batch_invariant": c.batch_invariant, "block_size": c.block_size,
        "indices": None if lists is None else lists.indices(),
        "index_lens": None if lists is None else lists.index_lens(),
    }  # fmt: skip


def _mla_decode(m: _Maker) -> MLADecodeCall:
    c, r = m.case, m.requests
    a = m.latent_layer()
    lists = Lists(c, r) if c.listed >= 0 else None
    pages, slots = r.live() if lists is None else lists.live()
    _fill_latents(m, a, pages, slots)
    heads = c.heads * c.group
    q = m.rows(r.tokens, heads, c.rank + c.rope)
    softmax_scale: Scale = 192**-0.5
    out_scale: Scale = 1.0
    if c.scale == "tensor":
        softmax_scale, out_scale = torch.full((1,), 192**-0.5), torch.full((1,), 3.0)
    if c.scale == "float":
        out_scale = 0.4
    by_slot = c.by_slot and (c.extra_listed < 0 or c.extra_by_slot)  # no request of a row is looked at
    return MLADecodeCall(
        q[..., : c.rank], q[..., c.rank :] if c.rope else None, a.ckv, a.kpe, a.ckv_scale_cache,
        None if c.by_slot else r.page_table(),
        None if c.by_slot else r.seq_lens(), r.cu_seqlens() if c.ragged and not by_slot else None,
        m.output(r.tokens, heads, c.rank), m.lse(r.tokens, heads),
        c.format, 1 if by_slot else r.max_q_len, *float_and_tensor(softmax_scale), *float_and_tensor(a.kv_scale),
        *float_and_tensor(out_scale), c.precision, c.batch_invariant,
        None if lists is None else lists.indices()[:, 0], None if lists is None else lists.index_lens(), c.block_size,
        _sinks(m, heads) if c.sinks else None, lse_of_keys=c.lse_of_keys,
        max_logits=m.lse(r.tokens, heads) if c.max_logits else None, **_extra_keys(c),
    )  # fmt: skip


def _extra_keys(c: Case) -> dict[str, Any]:
    """The fields of a second set of keys: other tokens of the same requests, all of which rows see, in other pages."""
    if c.extra_listed < 0:
        return {}
    m = _Maker(extra_case(c))
    a, r = m.latent_layer(), m.requests
    lists = Lists(m.case, r, causal=False)
    _fill_latents(m, a, *lists.live())
    scale, scale_t = float_and_tensor(a.kv_scale)
    return {
        "extra_ckv": a.ckv, "extra_kpe": a.kpe, "extra_ckv_scale_cache": a.ckv_scale_cache,
        "extra_page_table": None if m.case.by_slot else r.page_table(), "extra_indices": lists.indices()[:, 0],
        "extra_index_lens": lists.index_lens(), "extra_format": m.case.format, "extra_kv_scale": scale,
        "extra_kv_scale_t": scale_t,
    }  # fmt: skip


def _sinks(m: _Maker, heads: int) -> Tensor:
    """A sink of each head; those of another size are every other one."""
    sinks = m.normal(heads) + 1
    sizes = {"inf": (torch.inf,), "-inf": (-torch.inf,), "far": (1e4, -1e4)}.get(m.case.sink, ())
    for i, size in enumerate(sizes):
        sinks[i :: 2 * len(sizes)] = size
    return sinks


def _mla_prefill(m: _Maker) -> MLAPrefillCall:
    c, r = m.case, m.requests
    heads, dv, dtype = c.heads * c.group, c.dim_v or 128, m.dtype
    if c.format in ("bf16", "fp16") and c.raw_in_cache:
        dtype = latent_format(c.format).storage
        m.dtype = m.out_dtype = dtype
    a = m.latent_layer()
    _fill_latents(m, a, *r.live(new=c.raw_in_cache))
    spread = 1.0 if c.spread else 0.0
    raw = NO_PARTS
    if not c.raw_in_cache:
        raw = m.rows(r.tokens, c.rank, spread=spread), m.rows(r.tokens, c.rope) if c.rope else None
    weight, weight_scale = m.normal(heads * (c.nope + dv), c.rank) * c.rank**-0.5, None
    if c.weight:
        weight = encode(weight * 100, getattr(torch, c.weight))
        weight_scale = m.uniform(0.005, 0.015, weight.shape[0] // 128, c.rank // 128)
    q = m.rows(r.tokens, heads, c.nope + c.rope)
    if c.sharp:  # by the columns whose keys are stored: those made of latents are rounded, which scores would show
        q[..., c.nope :] *= 32
    plan = mla_prefill_plan(c.lens, r.q_lens, c.chunk or None)
    starts = torch.nn.functional.pad(plan.cache_offsets, (0, 1), value=2**31 - 1)  # the last column is never read
    return MLAPrefillCall(
        q, *raw, a.ckv, a.kpe, a.ckv_scale_cache, r.page_table(),
        r.index([n - q for n, q in zip(c.lens, r.q_lens, strict=True)]), r.cu_seqlens(),
        r.freqs_cis(c.rope, torch.float32 if c.weight else dtype), (1 + 0.1 * m.normal(c.rank)).to(dtype),
        weight if c.weight else weight.to(dtype), weight_scale, r.index(plan.buffer_row_offsets), r.index(starts),
        m.output(r.tokens, heads, dv), m.lse(r.tokens, heads), plan.buffer_lengths, c.format, r.max_q_len,
        (c.nope + c.rope) ** -0.5, c.epsilon, *float_and_tensor(a.kv_scale), c.precision,
    )  # fmt: skip


def _mla_project(m: _Maker) -> MLAProjectCall:
    """lens[0] tokens through matrices of dim columns and dim_v rows; an e4m3 weight for its format, else x's dtype."""
    c, tokens, heads = m.case, m.case.lens[0], m.case.heads * m.case.group
    m.dtype = m.out_dtype = torch.float16 if c.format == "fp16" else torch.bfloat16
    weight, scale = m.normal(heads, c.dim_v, c.dim) * c.dim**-0.5, None
    if c.format == "fp8_e4m3":
        weight = encode(weight * 100, torch.float8_e4m3fn)
        scale = m.uniform(0.005, 0.015, heads, c.dim_v // 128, c.dim // 128)
    x = m.rows(tokens, heads, c.dim, spread=1.0 if c.spread else 0.0)
    return MLAProjectCall(x, weight.to(m.dtype) if scale is None else weight, scale, m.output(tokens, heads, c.dim_v))


def _mla_decode_branch(m: _Maker) -> MLADecodeBranchCall:
    c, r = m.case, m.requests
    heads, dv = c.heads * c.group, c.dim_v or 128
    if c.raw_in_cache:
        m.dtype = m.out_dtype = latent_format(c.format).storage
    a = m.latent_layer()
    _fill_latents(m, a, *r.live(new=c.raw_in_cache))
    raw = NO_PARTS
    if not c.raw_in_cache:
        raw = m.rows(r.tokens, c.rank), m.rows(r.tokens, c.rope) if c.rope else None
    weights = _head_weight(m, heads, c.rank, c.nope), _head_weight(m, heads, dv, c.rank)
    scale = (c.nope + c.rope) ** -0.5
    return MLADecodeBranchCall(
        m.rows(r.tokens, heads, c.nope + c.rope), *raw, a.ckv, a.kpe, a.ckv_scale_cache, r.page_table(),
        r.index([n - q for n, q in zip(c.lens, r.q_lens, strict=True)]), r.cu_seqlens() if c.ragged else None,
        r.freqs_cis(c.rope, torch.float32 if c.weight else m.dtype), (1 + 0.1 * m.normal(c.rank)).to(m.dtype),
        *weights[0], *weights[1], m.output(r.tokens, heads, dv), c.format, r.max_q_len,
        *float_and_tensor(torch.full((1,), scale) if c.scale == "tensor" else scale), c.epsilon,
        *float_and_tensor(a.kv_scale),
    )  # fmt: skip


def _head_weight(m: _Maker, heads: int, n: int, k: int) -> tuple[Tensor, Tensor | None]:
    """A matrix [n, k] of each head, and the scales of its blocks if the case's weights have some."""
    weight = m.normal(heads, n, k) * k**-0.5
    if not m.case.weight:
        return weight.to(m.dtype), None
    scale = m.uniform(0.005, 0.015, heads, n // 128, k // 128)
    return encode(weight * 100, getattr(torch, m.case.weight)), scale


def _merge_states(m: _Maker) -> MergeCall:
    """One request of lens[0] tokens. Some parts are empty, with NaN values; token 0 has only empty parts."""
    c, tokens = m.case, m.case.lens[0]
    heads = c.heads * c.group
    lses = m.normal(c.parts, tokens, heads) * 3
    lses[m.uniform(0, 1, c.parts, tokens, heads) < 0.2] = -torch.inf
    lses[:, :1] = -torch.inf
    outs = m.rows(c.parts, tokens, heads, c.dim)
    outs[lses == -torch.inf] = torch.nan
    return MergeCall(outs, lses, m.output(tokens, heads, c.dim), m.lse(tokens, heads))


def _transcode(m: _Maker) -> TranscodeCall:
    """lens[0] tokens. `ragged`: the device holds their number, and both lists have room for `slack` more."""
    c, tokens = m.case, m.case.lens[0]
    source = _Maker(source_case(c))
    a, b = (x.latent_layer() if c.latents else x.kv_layer(x.case.page) for x in (source, m))
    if isinstance(a, PagedLatentLayer):
        _fill_latents(source, a, *source.requests.live())
    else:
        _fill_kv(source, a, *source.requests.live())
    fields = {**layer_fields(a, "src_"), **layer_fields(b, "")}
    for name in [f"{side}_{what}" for side in "kv" for what in ("signs", "channel_scale", "scale", "scale_t")]:
        mine, given = fields[name], fields[f"src_{name}"]
        if isinstance(mine, Tensor) and isinstance(given, Tensor):
            if c.alike and mine.shape == given.shape:
                fields[f"src_{name}"] = mine.clone()
            elif name.endswith("signs"):
                fields[f"src_{name}"] = torch.where(torch.arange(len(mine)) % 3 == 0, -mine, mine)
        elif not c.alike and mine == given and mine not in (1.0, None):
            fields[f"src_{name}"] = mine * 1.5
    more = -(-c.slack // min(c.page, c.src_page)) + 1  # pages of each list that are not looked at
    lists = {
        name: x.requests.index([*x.requests.pages[0], *[FAR] * more])
        for name, x in (("src_pages", source), ("dst_pages", m))
    }
    fields |= lists | {"num_tokens": tokens, "num_tokens_t": None}
    if c.ragged:
        fields |= {"num_tokens": tokens + c.slack, "num_tokens_t": m.requests.index([tokens])}
    return TranscodeCall(**fields)


def _fill_kv(m: _Maker, a: PagedKVLayer, pages: Tensor, slots: Tensor) -> None:
    """Rows of normal numbers; of a transcode some that are extreme."""
    c = m.case
    for name, codes, stored, scale, dim, spread in (
        (a.formats[0], a.k, a.k_scale_cache, a.k_scale, c.dim, 2.0),
        (a.formats[1], a.v, a.v_scale_cache, a.v_scale, c.dim_v or c.dim, 3.0),
    ):
        x = m.normal(len(pages), c.heads, dim)
        if c.spread:
            x = x * 10.0 ** m.uniform(-spread, 0.5, len(pages), c.heads, 1)
        x = _with_extremes(x) if c.op == "transcode" else x
        write_rows(codes, stored, pages, slots, x, kv_format(name), column(scale))


def _with_extremes(x: Tensor) -> Tensor:
    """The first row zero, the second of one sign, the third beyond every 8-bit format."""
    x[:1] = 0
    x[1:2] = x[1:2].abs() + 2
    x[2:3] *= 1e4
    return x.clamp(-6e4, 6e4)


def _fill_latents(m: _Maker, a: PagedLatentLayer, pages: Tensor, slots: Tensor) -> None:
    c, f = m.case, latent_format(m.case.format)
    x, rope = m.normal(len(pages), c.rank), m.normal(len(pages), c.rope)
    if c.spread:
        size = m.uniform(-2, 0.5, len(pages), -(-c.rank // 128), 1).expand(-1, -1, 128).flatten(1)
        x = x * 10.0 ** size[:, : c.rank]
    scale = column(a.kv_scale)
    write_rows(a.ckv, a.ckv_scale_cache, pages, slots, x, f, scale)
    put(a.kpe, pages, slots, encode(rope / scale if f.scale == "tensor" else rope, a.kpe.dtype))


def _halves(x: Tensor, r: int) -> tuple[Tensor | None, Tensor | None]:
    return x[..., :r], (x[..., r:] if x.shape[-1] > r else None)


_MAKERS: dict[str, Callable[[_Maker], tuple]] = {
    "append": _append,
    "rope_append": _rope_append,
    "mla_append": _mla_append,
    "decode": _decode,
    "prefill": _prefill,
    "mla_decode": _mla_decode,
    "mla_prefill": _mla_prefill,
    "mla_project": _mla_project,
    "mla_decode_branch": _mla_decode_branch,
    "merge_states": _merge_states,
    "transcode": _transcode,
    **make_index.MAKERS,
}
