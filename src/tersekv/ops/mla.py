"""Multi-head latent attention: `mla_append`, `mla_decode`, `mla_project`, `mla_prefill` and its planner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache import device_of
from ..calls import MLAAppendCall, MLADecodeCall, MLAPrefillCall, MLAProjectCall
from ..dispatch.checks import tensor
from ..dispatch.launch_cache import CallSignature, lookup
from ..layers import PagedLatentLayer
from ..scalars import as_bool, as_float, as_int, as_positive_int
from .append import query_output
from .attention import (
    allocate_outputs,
    attention_outputs,
    max_query_rows,
    max_rows_of_requests,
    output_tensor,
)
from .registry import dispatch_call
from .scales import float_and_tensor, multiplying_scale

_JOINED = {"q_pe": "q_nope"}  # as one tensor

_Optional = Tensor | None
_SetTensors = tuple[_Optional, _Optional, _Optional, _Optional, _Optional, _Optional]

LatentLike = PagedLatentLayer | Tensor | Sequence[Tensor]


class Selected(NamedTuple):
    """A second set of listed keys for `mla_decode`, of a cache of its own: its `extra`.

        >>> chosen = torch.tensor([[3, 0], [7, -1]])  # slots, for two query rows
        >>> compressed = tersekv.Selected(latent_cache[0], chosen)
        >>> tersekv.mla_decode(
        ...     torch.randn(2, 16, 512 + 64), latent_cache[0], page_table, seq_lens, softmax_scale=192**-0.5,
        ...     indices=torch.tensor([[5, 2], [1, 6]]), extra=compressed,
        ... ).shape
        torch.Size([2, 16, 512])

    cache:       PagedLatentLayer, or bare tensors, of any format and page size; L and R are those of the first cache
    indices:     [T, n]  int32 | int64 | uint32: as those of `mla_decode`, but that a row sees all that it lists
    page_table:  [B, max_pages] of this cache: entries are positions; None: slots
    index_lens:  [T]  used entries of each list; None: n
    """

    cache: LatentLike
    indices: Tensor
    page_table: Tensor | None = None
    index_lens: Tensor | None = None


def mla_append(
    kv_c: Tensor,
    k_pe: Tensor | None,
    cache: LatentLike,
    slot_mapping: Tensor,
    *,
    cos_sin_cache: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = True,
    q_nope: Tensor | None = None,
    q_pe: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    q_pe_out: Tensor | None = None,
    q_dtype: torch.dtype | None = None,
    q_scale: float | Tensor = 1.0,
    backend: str | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Quantise latent rows and write them into the paged cache, in place; with `cos_sin_cache`, rotate first.

        >>> tersekv.mla_append(kv_c, k_pe, latent_cache[0], torch.arange(100))
        (None, None)

        kv_c, k_pe:      [T, L], [T, R]  bf16 | fp16 | fp32; kv_c is normed already. Without cos_sin_cache also the
                         dtype of an `fp8_e4m3` or `fp8_e5m2` cache: codes, copied as they are, no scale applied.
                         k_pe None: the cache has no rotary part (R = 0), nor is there a cos_sin_cache
        cache:           PagedLatentLayer, or bare tensors as `PagedLatentLayer.of` reads them
        slot_mapping:    [T]  page * S + offset; negative skips the row; beyond the cache: dropped
        cos_sin_cache:   [max_pos, R] fp32, [cos(R/2) | sin(R/2)]; None: k_pe is stored as it is
        positions:       [T]  rows of cos_sin_cache
        interleaved:     pairs (2i, 2i + 1), DeepSeek's; False: (i, i + R/2)
        q_nope, q_pe:    [T, H, Nq], [T, H, R]; with cos_sin_cache also rotate q_pe and cast both to q_dtype
        q_scale:         dequantising scale of an 8-bit q; a wider one is divided by it too

    Returns (q_nope_out, q_pe_out): new tensors of the shapes given in q_dtype, or those to write into; q_pe_out is
    rotated; None without a query. docs/operations.md has a complete decode step. Raises ValueError or
    TypeError for arguments that do not fit together.
    """
    c = cache if isinstance(cache, PagedLatentLayer) else PagedLatentLayer.of(cache)
    (q_mul, q_scale_t), (kv_mul, kv_scale_t) = (
        multiplying_scale(q_scale, "q_scale"),
        multiplying_scale(c.kv_scale, "kv_scale"),
    )
    inputs = (
        q_pe, q_nope, kv_c, k_pe, cos_sin_cache, positions, q_pe_out, q_nope_out, c.ckv, c.kpe, c.ckv_scale_cache,
        slot_mapping, None, None, None, None, q_scale_t, kv_scale_t,
    )  # fmt: skip
    options = (c.format, interleaved, type(interleaved), q_mul, kv_mul, q_dtype, backend)  # 1 is no bool
    cached = lookup("mla_append", options, inputs)
    if cached is not None:
        return cached[-1] if q_nope is not None and q_nope_out is None else q_nope_out, (
            cached[0] if q_pe is not None and q_pe_out is None else q_pe_out
        )

    k_pe = rotary_part(k_pe)
    q_pe_out = query_output(q_pe, q_pe_out, q_dtype, "q_pe_out")
    q_nope_out = query_output(q_nope, q_nope_out, q_dtype, "q_nope_out")
    call = MLAAppendCall(
        q_pe, q_nope, kv_c, k_pe, cos_sin_cache, positions, q_pe_out, q_nope_out, c.ckv, c.kpe, c.ckv_scale_cache,
        slot_mapping, None, None, None, None, c.format, interleaved, q_mul, q_scale_t, kv_mul, kv_scale_t, False, False,
    )  # fmt: skip
    made_outputs = {n: x for n, x in (("q_rope_out", q_pe_out), ("q_nope_out", q_nope_out)) if x is not None}
    dispatch_call("mla_append", call, backend, CallSignature(options, inputs, made_outputs))
    return q_nope_out, q_pe_out


def mla_decode(
    q: Tensor | tuple[Tensor, Tensor],
    cache: LatentLike,
    page_table: Tensor | None,
    seq_lens: Tensor | None,
    *,
    softmax_scale: float | Tensor,
    indices: Tensor | None = None,
    index_lens: Tensor | None = None,
    block_size: int = 1,
    sinks: Tensor | None = None,
    extra: Selected | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_q_len: int | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: float | Tensor = 1.0,
    lse: Tensor | None = None,
    return_lse: bool = False,
    precision: str = "exact",
    batch_invariant: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Absorbed MLA attention over a paged latent cache: one latent row is key and value of every head.

        >>> q = torch.randn(2, 16, 512 + 64)  # absorbed queries of two requests
        >>> tersekv.mla_decode(q, latent_cache[0], page_table, seq_lens, softmax_scale=192**-0.5).shape
        torch.Size([2, 16, 512])

        q:              [T, H, L + R], or (q_nope [T, H, L], q_pe [T, H, R]; None: R is 0); bf16 | fp16 | fp32 | e4m3
                        | e5m2
        cache:          PagedLatentLayer, or bare tensors as `PagedLatentLayer.of` reads them
        page_table:     [B, max_pages]; entries past ceil(seq_len / S) are never read
        seq_lens:       [B]  tokens in the cache, the new ones included; 0: output 0, lse −inf
        softmax_scale:  float or fp32 tensor [1]; there is no default, since L + R is not the model's head size
        indices:        [T, n]  int32 | int64 | uint32, any strides: the keys of each row, in any order; negative
                        entries (uint32: 0xFFFFFFFF) are padding. Positions in the request, of which a row sees those
                        up to its own; without a page_table slots, page * S + offset, all of which it sees (seq_lens
                        may be None). docs/sparse.md has the rules; many rows are a sparse prefill
        index_lens:     [T]  used entries of each list; None: n
        block_size:     c: entry x of `indices` stands for positions c * x to c * x + c - 1
        sinks:          [H] fp32; one more score per head (scaled-logit units, natural log) with a zero value
        extra:          `Selected` keys of another cache, in the same softmax; beside `indices` only. Either list may be
                        empty
        cu_seqlens_q:   [B + 1] ragged query rows, beginning with 0; None: T / B rows each; several rows are causal
        out:            [T, H, L]; out_dtype default q's, bf16 for an 8-bit q; out_scale multiplies it
        lse:            [T, H] fp32, natural log, sinks included; a row without keys: output 0, lse −inf
        precision:      "exact"; "fast" is a permission to compute less exactly, as in `decode`; unused today
        batch_invariant:  a request's bits do not depend on the other requests, as in `decode`

    Returns out, or (out, lse) with `return_lse`. Raises ValueError or TypeError for arguments that do not fit.
    Entries of `indices` are looked at on the device alone: a slot outside the cache is skipped there, and raises
    ValueError on a CPU and in checked mode, which also finds positions past a request's end and entries that repeat.
    """
    c = cache if isinstance(cache, PagedLatentLayer) else PagedLatentLayer.of(cache)
    kv_scale, kv_scale_t = float_and_tensor(c.kv_scale, "kv_scale")
    o_scale, o_scale_t = float_and_tensor(out_scale, "out_scale")
    scale, scale_t = float_and_tensor(softmax_scale, "softmax_scale")
    max_q_len = None if max_q_len is None else as_int("max_q_len", max_q_len)
    batch_invariant, block_size = as_bool("batch_invariant", batch_invariant), as_int("block_size", block_size)
    extra_tensors, extra_format, extra_scale, extra_scale_t = _second_set(extra)
    joined = isinstance(q, Tensor)
    q_nope, q_pe = q if isinstance(q, (tuple, list)) and len(q) == 2 else (q, None)
    inputs = (
        q_nope, q_pe, c.ckv, c.kpe, c.ckv_scale_cache, page_table, seq_lens, cu_seqlens_q, out, lse,
        scale_t, kv_scale_t, o_scale_t, indices, index_lens, sinks, *extra_tensors, extra_scale_t, None,
    )  # fmt: skip
    options = (
        c.format, joined, max_q_len, scale, kv_scale, o_scale, out_dtype, return_lse, type(return_lse), precision,
        batch_invariant, block_size, extra_format, extra_scale, backend,
    )  # fmt: skip
    cached = lookup("mla_decode", options, inputs)
    if cached is not None:
        return attention_outputs(cached, out, lse, return_lse)

    if isinstance(q, Tensor):
        for name, x, dims in (("q", q, "T H L+R"), ("ckv", c.ckv, "P S L"), ("kpe", c.kpe, "P S R")):
            tensor(name, x, dims)
        rank, rope = c.kv_lora_rank, c.kpe.shape[-1]
        if q.shape[-1] != rank + rope:
            raise ValueError(f"q: want [T, H, {rank} + {rope}], got {list(q.shape)}")
        q_nope, q_pe = q.split_with_sizes((rank, rope), -1) if rope else (q, None)
    elif isinstance(q, (tuple, list)) and len(q) == 2:
        q_nope, q_pe = q
        tensor("q_nope", q_nope, "T H L")
        q_pe = rotary_part(q_pe)
    else:
        raise TypeError(f"q: want Tensor or (q_nope, q_pe), got {type(q).__name__}")
    shape = q_nope.shape
    out, lse, made_outputs = allocate_outputs(q_nope, shape, out, out_dtype, lse, return_lse)
    if indices is None:
        tensor("page_table", page_table, "B max_pages")
    by_slot = page_table is None and indices is not None
    rows = 1 if by_slot else max_query_rows(shape[0], seq_lens, cu_seqlens_q, max_q_len)
    if by_slot and extra is not None and extra.page_table is not None:
        tensor("extra.page_table", extra.page_table, "B max_pages")
        rows = max_rows_of_requests(shape[0], len(extra.page_table), cu_seqlens_q, max_q_len)
    call = MLADecodeCall(
        q_nope, q_pe, c.ckv, c.kpe, c.ckv_scale_cache, page_table, seq_lens, cu_seqlens_q, out, lse,
        c.format, rows, scale, scale_t, kv_scale, kv_scale_t, o_scale, o_scale_t, precision, batch_invariant, indices,
        index_lens, block_size, sinks, *extra_tensors, extra_format, extra_scale, extra_scale_t,
    )  # fmt: skip
    dispatch_call("mla_decode", call, backend, CallSignature(options, inputs, made_outputs, _JOINED if joined else {}))
    return attention_outputs([], out, lse, return_lse)


def _second_set(extra: Selected | None) -> tuple[_SetTensors, str, float, Tensor | None]:
    """What a record has of a second set of keys: its tensors, its format, and the scale of its cache."""
    if extra is None:
        return (None, None, None, None, None, None), "", 1.0, None
    if not isinstance(extra, Selected):
        raise TypeError(f"extra: want Selected or None, got {type(extra).__name__}")
    c = extra.cache
    if not isinstance(c, PagedLatentLayer):
        try:
            c = PagedLatentLayer.of(c)
        except (TypeError, ValueError) as e:
            raise type(e)(f"extra.{e}") from None
    tensors = c.ckv, c.kpe, c.ckv_scale_cache, extra.page_table, extra.indices, extra.index_lens
    return tensors, c.format, *float_and_tensor(c.kv_scale, "extra.kv_scale")


def rotary_part(x: Tensor | None) -> Tensor | None:
    """The rotary part of rows as records hold it: None without columns."""
    return None if isinstance(x, Tensor) and x.shape[-1:] == (0,) else x


def mla_project(
    x: Tensor,
    weight: Tensor,
    *,
    weight_scale: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Multiply each head's rows by its own matrix: the projections before and after an absorbed MLA decode.

        >>> q_nope = torch.randn(2, 16, 128, dtype=torch.bfloat16)
        >>> tersekv.mla_project(q_nope, w_uk).shape  # w_uk [16, 512, 128]
        torch.Size([2, 16, 512])

        x:             [T, H, K]  bf16 | fp16
        weight:        [H, N, K]  x's dtype; or e4m3 with weight_scale [H, N/128, K/128] fp32: rows are then quantised
                       per 128 columns as mla_prefill quantises latents, sums are fp32
        out:           [T, H, N] in x's dtype

    NOTE: on Hopper weight and weight_scale are read while earlier launches may still be running, which may not write
    them: synchronise once after weights are written.

    Returns out. Raises ValueError or TypeError for arguments that do not fit together.
    """
    options, inputs = (backend,), (x, weight, weight_scale, out)
    cached = lookup("mla_project", options, inputs)
    if cached is not None:
        return cached[0] if out is None else out
    tensor("x", x, "T H K")
    tensor("weight", weight, "H N K")
    out = output_tensor(x, (*x.shape[:2], weight.shape[1]), out, None)
    dispatch_call(
        "mla_project", MLAProjectCall(x, weight, weight_scale, out), backend,
        CallSignature(options, inputs, {"out": out}),
    )  # fmt: skip
    return out


class MLAPrefillPlan(NamedTuple):
    """Which cached tokens go into the up-projection buffer, chunk by chunk (C chunks, B requests).

        >>> plan = tersekv.mla_prefill_plan(seq_lens=[10, 30], q_lens=[10, 30], buffer_tokens=32)
        >>> plan.buffer_lengths, plan.cache_offsets.tolist()
        ([32, 8], [[0, 0], [10, 22]])

    buffer_row_offsets:  [C, B + 1] int32; rows of request b in chunk c: from [c, b] to [c, b + 1]
    cache_offsets:       [C, B] int32; cached position of the first of them
    buffer_lengths:      C host numbers; rows of each chunk
    max_q_len:           most new tokens of one request

    The empty plan, with which `mla_prefill` only appends: MLAPrefillPlan(nothing, nothing, [0], max_q_len), where
    nothing is torch.zeros(1, B + 1, dtype=torch.int32) on the device. No length has to be known on the host.
    """

    buffer_row_offsets: Tensor
    cache_offsets: Tensor
    buffer_lengths: list[int]
    max_q_len: int

    def to(self, device: torch.device | str) -> MLAPrefillPlan:
        """The plan with its tensors on a device."""
        rows, starts = (t.to(device, non_blocking=True) for t in self[:2])
        return MLAPrefillPlan(rows, starts, self.buffer_lengths, self.max_q_len)


def mla_prefill_plan(
    seq_lens: Iterable[int],
    q_lens: Iterable[int],
    buffer_tokens: int | None = None,
    *,
    device: torch.device | str | None = None,
) -> MLAPrefillPlan:
    """Plan an `mla_prefill` on the host. Requests fill a buffer of `buffer_tokens` rows in order.

        >>> plan = tersekv.mla_prefill_plan(seq_lens=[60, 40], q_lens=[60, 40], buffer_tokens=64)
        >>> plan.buffer_lengths
        [64, 36]

        seq_lens:       B host numbers: tokens of each request in the cache, the new ones included
        q_lens:         B host numbers: the new ones
        buffer_tokens:  rows of the up-projection buffer; None: one chunk that holds everything

    Lengths [10, 30] with a buffer of 32 give row offsets [[0, 10, 32], [0, 0, 8]], cache offsets [[0, 0], [10, 22]]
    and lengths [32, 8]. Raises ValueError for lengths that contradict each other or a buffer of 0, and TypeError for
    what is no integer.
    """
    seq_lens, q_lens = _counts("seq_lens", seq_lens), _counts("q_lens", q_lens)
    if len(seq_lens) != len(q_lens) or any(not 0 <= n <= s for s, n in zip(seq_lens, q_lens, strict=False)):
        raise ValueError(f"q_lens: want one number in [0, seq_len] for each of {seq_lens}, got {q_lens}")
    total, device = sum(seq_lens), device_of(device)
    buffer_tokens = total if buffer_tokens is None else as_int("buffer_tokens", buffer_tokens)
    if buffer_tokens < 0 or (not buffer_tokens and total):
        raise ValueError(f"buffer_tokens: want a positive number, got {buffer_tokens}")
    for name, most in (("seq_lens", max(seq_lens, default=0)), ("buffer_tokens", min(buffer_tokens, total))):
        if most >= 2**31:
            raise ValueError(f"{name}: want less than 2**31 tokens, as int32 holds them, got {most}")
    rows: list[list[int]] = []
    starts: list[list[int]] = []
    lengths: list[int] = []
    cached = [0] * len(seq_lens)
    while cached != seq_lens or not lengths:
        offsets, room = [0], buffer_tokens
        starts.append(list(cached))
        for b, n in enumerate(seq_lens):
            take = min(n - cached[b], room)
            cached[b] += take
            room -= take
            offsets.append(offsets[-1] + take)
        rows.append(offsets)
        lengths.append(offsets[-1])
    offsets_t, starts_t = (torch.tensor(x, dtype=torch.int32).view(len(lengths), -1).to(device) for x in (rows, starts))
    return MLAPrefillPlan(offsets_t, starts_t, lengths, max(q_lens, default=0))


def _counts(name: str, values: Iterable[int]) -> list[int]:
    if not isinstance(values, Iterable):
        raise TypeError(f"{name}: want a number for each request, got {type(values).__name__} {values!r}")
    return [as_int(name, n) for n in values]


def mla_prefill(
    q: Tensor,
    cache: LatentLike,
    page_table: Tensor,
    cache_lens: Tensor,
    cu_seqlens_q: Tensor,
    freqs_cis: Tensor | None,
    kv_norm_gamma: Tensor,
    kv_b_proj: Tensor,
    plan: MLAPrefillPlan,
    *,
    softmax_scale: float,
    kv_b_proj_scale: Tensor | None = None,
    kv_c: Tensor | None = None,
    k_pe: Tensor | None = None,
    epsilon: float = 1e-6,
    head_dim_v: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
    q_pe_out: Tensor | None = None,
    seq_lens_out: Tensor | None = None,
    precision: str = "exact",
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Fused MLA prefill from the paged latent cache: rope, norm, append, gather, quantise, up-project, attend.

        >>> q, cache_lens = torch.randn(100, 16, 128 + 64, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int32)
        >>> tersekv.mla_prefill(
        ...     q, latent_cache[0], page_table, cache_lens, cu_seqlens_q, freqs_cis, kv_norm_gamma, kv_b_proj,
        ...     tersekv.mla_prefill_plan([60, 40], [60, 40]), softmax_scale=192**-0.5, kv_c=kv_c, k_pe=k_pe,
        ... ).shape
        torch.Size([100, 16, 128])

        q:                [T, H, Dn + R]  bf16 | fp16, unrotated; its rotary part is rotated in place
        cache:            PagedLatentLayer, or bare tensors; the new tokens' rows are written: normed latent,
                          rotated k_pe (interleaved pairs)
        page_table:       [B, max_pages]; entries past the request's tokens are never read
        cache_lens:       [B]  tokens cached before this step; new token i of request b stands at cache_lens[b] + i
        cu_seqlens_q:     [B + 1]  first new token of each request, beginning with 0
        freqs_cis:        [max_pos, R]  cos0, sin0, cos1, sin1, …; the rotation is computed in its dtype. None: there
                          is no rotary part (R = 0), in q and k_pe neither
        kv_norm_gamma:    [L]  RMSNorm weight; epsilon its constant
        kv_b_proj:        [H * (Dn + Dv), L], per head [nope | v]; e4m3 with kv_b_proj_scale [N/128, L/128] fp32
                          (blockwise product with the latents quantised per token and 128 columns), or q's dtype
        plan:             from `mla_prefill_plan`; several chunks are merged through their LSE; buffer_lengths all 0:
                          rotate, norm and append only (out 0, lse −inf). A plan of another step, which contradicts
                          cache_lens or cu_seqlens_q, gives wrong results; checked mode (TERSEKV_CHECKED=1) raises,
                          and a CPU where it reaches past the tables, before anything is written
        kv_c, k_pe:       [T, L], [T, R]  raw latents of the new tokens; None: they lie in the cache already, raw
                          (16-bit caches only; the op is then not idempotent)
        head_dim_v:       Dv; default: rows of kv_b_proj / H − Dn
        out:              [T, H, Dv] in q's dtype; lse [T, H] fp32, natural log
        q_pe_out:         [T, H, R] in q's dtype; the rotated parts go here and q stays. With buffer_lengths all 0 only,
                          as is seq_lens_out [B] int32: gets cache_lens plus the new tokens, as `mla_decode` wants them;
                          not the memory of cache_lens
        precision:        "exact"; "fast" is a permission to compute less exactly, as in `decode`. Every backend is
                          exact with it too: on Hopper 8-bit P and V were not faster

    Query i of request b sees key j iff j <= cache_lens[b] + i. Returns out, or (out, lse) with `return_lse`.
    Raises ValueError or TypeError for arguments that do not fit together.
    """
    c = cache if isinstance(cache, PagedLatentLayer) else PagedLatentLayer.of(cache)
    if not isinstance(plan, MLAPrefillPlan):
        raise TypeError(f"plan: want an MLAPrefillPlan, as mla_prefill_plan makes it, got {type(plan).__name__}")
    kv_scale, kv_scale_t = float_and_tensor(c.kv_scale, "kv_scale")
    scale, epsilon = as_float("softmax_scale", softmax_scale), as_float("epsilon", epsilon)
    inputs = (
        q, kv_c, k_pe, c.ckv, c.kpe, c.ckv_scale_cache, page_table, cache_lens, cu_seqlens_q, freqs_cis, kv_norm_gamma,
        kv_b_proj, kv_b_proj_scale, plan.buffer_row_offsets, plan.cache_offsets, out, lse, kv_scale_t, q_pe_out,
        seq_lens_out,
    )  # fmt: skip
    lengths = [as_int("plan.buffer_lengths", n) for n in plan.buffer_lengths]
    longest = as_int("plan.max_q_len", plan.max_q_len)
    head_dim_v = None if head_dim_v is None else as_positive_int("head_dim_v", head_dim_v)
    options = (
        c.format, *lengths, longest, scale, epsilon, head_dim_v, kv_scale, return_lse, type(return_lse), precision,
        backend,
    )  # fmt: skip
    cached = lookup("mla_prefill", options, inputs)
    if cached is not None:
        return attention_outputs(cached, out, lse, return_lse)

    tensor("q", q, "T H Dq")
    tensor("kv_b_proj", kv_b_proj, "N L")
    tensor("kpe", c.kpe, "P S R")
    t, heads, dq = q.shape
    if head_dim_v is None:
        head_dim_v = kv_b_proj.shape[0] // max(heads, 1) - (dq - c.kpe.shape[-1])
    elif out is not None and out.shape[-1:] != (head_dim_v,):
        raise ValueError(f"out: want rows of head_dim_v={head_dim_v}, got {list(out.shape)}")
    if head_dim_v <= 0:
        nope_rows = heads * (dq - c.kpe.shape[-1])
        raise ValueError(f"kv_b_proj: want more than H * Dn = {nope_rows} rows, got {len(kv_b_proj)}")
    out, lse, made_outputs = allocate_outputs(q, (t, heads, head_dim_v), out, None, lse, return_lse)
    call = MLAPrefillCall(
        q, kv_c, rotary_part(k_pe), c.ckv, c.kpe, c.ckv_scale_cache, page_table, cache_lens, cu_seqlens_q,
        rotary_part(freqs_cis),
        kv_norm_gamma, kv_b_proj, kv_b_proj_scale, plan.buffer_row_offsets, plan.cache_offsets, out, lse,
        lengths, c.format, longest, scale, epsilon, kv_scale, kv_scale_t, precision, q_pe_out, seq_lens_out,
    )  # fmt: skip
    dispatch_call("mla_prefill", call, backend, CallSignature(options, inputs, made_outputs))
    return attention_outputs([], out, lse, return_lse)
