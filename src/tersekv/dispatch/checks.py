"""Checks of a call. Every message names the argument, what is wanted and what it got.

They read no tensor values and run once per distinct set of facts; `value_checks` reads values.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .. import attributes
from ..calls import CALLS
from ..formats import FP8, MAX_HEAD_DIM, MAX_HEAD_DIM_V, UE8M0, KVFormat, kv_format, latent_format, pair_of
from ..scalars import round_to_fp32
from ..shapes import ShapeChecker, argument_of, argument_of_field, dtype_name, overlaps, require
from . import list_checks, transcode_checks
from .cache_checks import finite, kv_caches, latent_cache, positive, rotary_part, scalar

INDEX = list_checks.INDEX
F32 = (torch.float32,)
HALF = (torch.bfloat16, torch.float16)
FLOAT = (*HALF, torch.float32)


def tensor(name: str, x: Any, pattern: str) -> None:
    """Raise unless x is a tensor with one dimension per word of the pattern: for tensors that an op indexes itself."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: want Tensor, got {type(x).__name__}")
    if x.layout != torch.strided:
        raise TypeError(f"{name}: want a dense Tensor, got one of {x.layout}")
    if x.dim() != pattern.count(" ") + 1:
        raise ValueError(f"{name}: want [{pattern.replace(' ', ', ')}], got {list(x.shape)}")


def joined(name: str, x: Tensor) -> Tensor:
    """Returns x with its first two dimensions merged, without copying."""
    try:
        return x.view(x.shape[0] * x.shape[1], *x.shape[2:])
    except RuntimeError:
        raise ValueError(
            f"{name}: want strides that let the first two dimensions be viewed as one, "
            f"got shape {list(x.shape)} with strides {list(x.stride())}"
        ) from None


def dtype(name: str, d: Any, allowed: Iterable[torch.dtype], own: torch.dtype | None = None, of: str = "") -> None:
    """Raise unless an argument that chooses a dtype is None or allowed; beside a tensor `of` it is the tensor's own."""
    if d is None or (own is None and d in allowed) or d == own:
        return
    if not isinstance(d, torch.dtype):
        raise TypeError(f"{name}: want a torch.dtype or None, got {d!r}")
    want = " | ".join(map(dtype_name, allowed)) if own is None else f"{of}'s own {dtype_name(own)} or None"
    raise ValueError(f"{name}: want {want}, got {dtype_name(d)}")


def facts(f: SimpleNamespace) -> None:
    """Raise ValueError unless the facts fit together."""
    CHECKS[f.op](f)
    record, written = CALLS[f.op]
    for name in record._fields:  # type: ignore[attr-defined]
        negated = getattr(getattr(f, name), "negated", False)
        require(not negated, argument_of(f.op, f, name), "memory as it reads", "a negated view (x.resolve_neg())")
    for name in written:
        x = getattr(f, name)
        if x is not None and overlaps(x.shape, x.stride):
            what = argument_of(f.op, f, name)
            raise ValueError(f"{what}: want memory for each element, got strides {list(x.stride)}")


def _both(name: str, x: Any, other: str, y: Any) -> None:
    """Raise unless both arguments are None, or neither is."""
    require(x is None or y is not None, name, f"None without {other}", "a tensor")
    require(x is not None or y is None, name, f"a tensor beside {other}", None)


def _append(f: SimpleNamespace) -> None:
    s = ShapeChecker(f)
    s.see("k", "T H D", _rows(kv_format(f.format)))
    s.see("v", "T H Dv", [f.k.dtype])
    attributes.check_no_attributes(f)
    kv_caches(f, s, s["D"], s["Dv"], "k", "v")
    _place(f, s)


def _rows(fmt: KVFormat) -> tuple[torch.dtype, ...]:
    """Returns the dtypes of rows stored without rotation: floats, or an fp8 cache's own codes if it keeps the scale."""
    return (*FLOAT, fmt.storage) if fmt.scale == "tensor" else FLOAT


def _rope_append(f: SimpleNamespace) -> None:
    own = f.slot_mapping is not None  # tersekv's own function takes undivided q and k, FlashInfer's divided ones
    if own:
        whole = {"k": (f.k_rope, f.k_nope), "q": (f.q_rope, f.q_nope), "q_out": (f.q_rope_out, f.q_nope_out)}
        f = SimpleNamespace(**vars(f), **{name: _joined(*parts) for name, parts in whole.items()})
    s = ShapeChecker(f)
    if own:
        _both("q_out", f.q_out, "q", f.q)
        s.see("k", "T H D", FLOAT)
        if s.see("q", "T Hq Dq", [f.k.dtype]):
            r = f.k_rope.shape[-1]
            require(s["Dq"] >= r, "q", f"rows of at least R={r} as in cos_sin_cache", s["Dq"])
        s.see("q_out", "T Hq Dq", FLOAT + FP8)
    s.see("k_rope", "T H R", HALF + F32)
    dtype = [f.k_rope.dtype]
    s.see("k_nope", "T H N", dtype)
    s.dims.setdefault("N", 0)
    s.see("v", "T H Dv", dtype)
    _queries(f, s, dtype)
    _rotary(f, s)
    kv_caches(f, s, s["R"] + s["N"], s["Dv"], "k", "v")
    _place(f, s)


def _joined(rope: Any, nope: Any) -> Any:
    """Returns the fact of the tensor whose columns are these two."""
    if nope is None:
        return rope
    return rope._replace(shape=(*rope.shape[:-1], rope.shape[-1] + nope.shape[-1]))


def _mla_append(f: SimpleNamespace) -> None:
    s = ShapeChecker(f)
    s.see("kv_c", "T L", FLOAT if f.cos_sin_cache is not None else _rows(latent_format(f.format)))
    dtype = [f.kv_c.dtype]
    rotary_part(f, "k_pe", f.k_pe)
    s.see("k_pe", "T R", dtype)
    rotates = f.cos_sin_cache is not None and f.kpe.shape[-1:] == (0,)
    require(not rotates, "cos_sin_cache", "None without a rotary part", "a tensor")
    _queries(f, s, dtype)
    if f.cos_sin_cache is not None:
        require(f.positions is not None, "positions", "a tensor [T] beside cos_sin_cache", None)
        _rotary(f, s)
    else:
        queries = f.q_rope is not None or f.q_nope is not None
        require(not queries, "cos_sin_cache", "a tensor when a query is given", None)
        require(f.positions is None, "positions", "None without cos_sin_cache", "a tensor")
    latent_cache(f, s)
    _place(f, s)


def _decode(f: SimpleNamespace) -> None:
    require(f.k is f.v is None, "k, v", "None in decode, whose keys all lie in the cache", "a tensor")
    s = _kv_attention(f)
    if s.see("mask", "T W", [torch.uint16]):
        words = 2 * -(-f.max_q_len // 32)
        require(s["W"] >= words, "mask", f"at least {words} uint16 words a row for {f.max_q_len} drafts", s["W"])


def _prefill(f: SimpleNamespace) -> None:
    require(f.mask is None, "mask", "None in prefill, whose rows are causal", "a tensor")
    s = _kv_attention(f)
    _both("v", f.v, "k", f.k)
    s.see("k", "T H D", [f.q.dtype] if f.q.dtype in HALF else HALF)
    s.see("v", "T H Dv", [f.k.dtype] if f.k is not None else HALF)


def _kv_attention(f: SimpleNamespace) -> ShapeChecker:
    s = ShapeChecker(f)
    s.see("q", "T Hq D", FLOAT + FP8)
    # 576 for joined latent rows whose values are a separate tensor; a backend may stop at 512.
    fits = s["D"] % 8 == 0 and 0 < s["D"] <= MAX_HEAD_DIM
    require(fits, "q", f"head_dim a multiple of 8 up to {MAX_HEAD_DIM}", s["D"])
    dv = f.v_cache.shape[-1] * pair_of(f)[1].values_per_element
    fits = dv % 8 == 0 and 0 < dv <= MAX_HEAD_DIM_V
    require(fits, "v_cache", f"head_dim_v a multiple of 8 up to {MAX_HEAD_DIM_V}", dv)
    kv_caches(f, s, s["D"], dv, "q")
    require(s["Hq"] > 0, "q", "at least one head", s["Hq"])
    require(s["H"] > 0 and s["Hq"] % s["H"] == 0, "q", f"num_q_heads a multiple of num_kv_heads={s['H']}", s["Hq"])
    for name in ("mask", "k", "indices") if f.prefill_invariant else ():
        require(getattr(f, name) is None, name, 'None with batch_invariant="prefill"', "a tensor")
    _requests(f, s)
    list_checks.block_lists(f, s)
    s.see("sinks", "Hq", F32)
    s.see("out", "T Hq Dv", FLOAT + FP8)
    s.see("lse", "T Hq", F32, last_dim_dense=False)
    require(f.window >= 0, "window", "a positive number of keys (own included), or None", f.window)
    finite(
        "softcap", "0 (none) or a positive, finite number", f.softcap, f.softcap == 0 or round_to_fp32(f.softcap) > 0
    )
    _output_scales(f, s)
    return s


def _mla_decode(f: SimpleNamespace) -> None:
    s = ShapeChecker(f)
    s.see("q_nope", "T H L", FLOAT + FP8)
    rotary_part(f, "q_pe", f.q_pe)
    s.see("q_pe", "T H R", [f.q_nope.dtype])
    latent_cache(f, s)
    list_checks.latent_lists(f, s)
    if not list_checks.by_slot(f):
        _requests(f, s)
    _extra_keys(f, s)
    s.see("sinks", "H", F32)
    s.see("out", "T H L", FLOAT + FP8)
    s.see("lse", "T H", F32, last_dim_dense=False)
    s.see("max_logits", "T H", F32, last_dim_dense=False)
    if f.max_logits is not None:
        fits = f.indices is not None and f.lse is not None and f.max_logits.stride == f.lse.stride
        require(fits, "max_logits", "None without indices and an lse with its strides", "a tensor")
        require(f.extra_indices is None, "max_logits", "None beside a second set of keys", "a tensor")
    _output_scales(f, s)


def _extra_keys(f: SimpleNamespace, s: ShapeChecker) -> None:
    """Check the second set of keys of an mla_decode: another cache of the same rows, its lists and its table."""
    if f.extra_ckv is None:
        return
    require(f.extra_indices is not None, "extra.indices", "a tensor [T, n]", None)
    require(f.indices is not None, "extra", "None without indices", "a Selected")
    sets = (f.format, f.ckv, f.kpe), (f.extra_format, f.extra_ckv, f.extra_kpe)
    (rank, rope), got = ((latent_format(name).values(a.shape[-1]), b.shape[-1]) for name, a, b in sets)
    require((rank, rope) == got, "extra", f"a cache with L={rank}, R={rope} as cache has", f"{got[0]}, {got[1]}")
    for letter in "PS":
        s.dims.pop(letter)
    latent_cache(f, s, "extra_")
    s.see("extra_indices", "T extra_n", INDEX, last_dim_dense=False)
    s.see("extra_index_lens", "T", INDEX, last_dim_dense=False)
    if s.see("extra_page_table", "B extra_pages", INDEX):
        _query_rows(f, s)


def _mla_prefill(f: SimpleNamespace) -> None:
    s = ShapeChecker(f)
    s.see("q", "T H Dq", HALF)
    half = [f.q.dtype]
    nope = _new_latents(f, s)
    s.see("out", "T H Dv", half)
    rows = s["H"] * (nope + s["Dv"])
    s.dims["N"] = rows
    if f.kv_b_proj.shape[0] % max(s["H"], 1) == 0:  # whole heads: the output's size may be the wrong one
        s.seen_in["N"] = "out"
    if f.kv_b_proj.dtype == torch.float8_e4m3fn:
        require(f.kv_b_proj_scale is not None, "kv_b_proj_scale", "a tensor beside an e4m3 kv_b_proj", None)
        s.see("kv_b_proj", "N L", [torch.float8_e4m3fn])
        require(s["L"] % 128 == 0 and rows % 128 == 0, "kv_b_proj", "both sizes multiples of 128", [rows, s["L"]])
        s.see("kv_b_proj_scale", "N/128 L/128", F32)
    else:
        s.see("kv_b_proj", "N L", half)
        require(f.kv_b_proj_scale is None, "kv_b_proj_scale", "None beside a 16-bit kv_b_proj", "a tensor")
    s.see("buffer_row_offsets", "C B+1", INDEX)
    extra = 1 if len(f.cache_offsets.shape) == 2 and f.cache_offsets.shape[1] == s["B"] + 1 else 0
    s.see("cache_offsets", "C B+1" if extra else "C B", INDEX)
    lengths, name = f.buffer_lengths, "plan.buffer_lengths"
    require(len(lengths) == s["C"], name, f"C={s['C']} numbers", len(lengths))
    require(all(n >= 0 for n in lengths), name, "no negative number", list(lengths))
    s.see("lse", "T H", F32, last_dim_dense=False)
    for name, sizes, dtypes in (("q_pe_out", "T H R", half), ("seq_lens_out", "B", [torch.int32])):
        attends = any(f.buffer_lengths) and getattr(f, name) is not None
        require(not attends, name, "None with a plan that holds rows", "a tensor")
        s.see(name, sizes, dtypes)
    _softmax_scale(f)
    finite("epsilon", "a finite number, not negative", f.epsilon, f.epsilon >= 0)
    _precision(f)


def _new_latents(f: SimpleNamespace, s: ShapeChecker) -> int:
    """Check unrotated queries, raw latents, their cache, and the rotary and norm tensors. Returns Dn."""
    half = [f.q.dtype]
    if f.kv_c is None or f.kpe.shape[-1:] != (0,):
        _both("k_pe", f.k_pe, "kv_c", f.kv_c)
    s.see("kv_c", "T L", half)
    s.see("k_pe", "T R", half)
    fmt = latent_format(f.format)
    require(fmt.scale != UE8M0, "cache", f"a format other than {f.format}, which has no projected prefill", f.format)
    if f.kv_c is None:
        require(fmt.scale == "none", "kv_c", f"the raw latents for a {f.format} cache (it holds no raw rows)", None)
    latent_cache(f, s)
    nope = s["Dq"] - s["R"]
    require(nope > 0, "q", f"rows longer than the rotary part R={s['R']}", s["Dq"])
    require(s["R"] % 2 == 0, "kpe", "an even rotary part", s["R"])
    s.see("page_table", "B max_pages", INDEX)
    s.see("cache_lens", "B", INDEX)
    s.see("cu_seqlens_q", "B+1", INDEX)
    rotary_part(f, "freqs_cis", f.freqs_cis)
    s.see("freqs_cis", "max_pos R", FLOAT)
    s.see("kv_norm_gamma", "L", FLOAT)
    return nope


def _mla_project(f: SimpleNamespace) -> None:
    s, half = ShapeChecker(f), [torch.bfloat16, torch.float16]
    s.see("x", "T H K", half)
    _weight(f, s, "weight", "H N K", f.x.dtype)
    s.see("out", "T H N", [f.x.dtype])


def _weight(f: SimpleNamespace, s: ShapeChecker, name: str, sizes: str, half: torch.dtype) -> None:
    """Check a matrix per head, "H N K": e4m3 with scales per block, or the rows' dtype."""
    heads, n, k = sizes.split()
    scale = f"{name}_scale"
    if getattr(f, name).dtype == torch.float8_e4m3fn:
        require(getattr(f, scale) is not None, scale, f"a tensor beside an e4m3 {name}", None)
        s.see(name, sizes, [torch.float8_e4m3fn])
        require(s[n] % 128 == 0 and s[k] % 128 == 0, name, f"{n} and {k} multiples of 128", [s[n], s[k]])
        s.see(scale, f"{heads} {n}/128 {k}/128", F32)
    else:
        s.see(name, sizes, [half])
        require(getattr(f, scale) is None, scale, f"None beside a 16-bit {name}", "a tensor")


def _mla_decode_branch(f: SimpleNamespace) -> None:
    s = ShapeChecker(f)
    s.see("q", "T H Dq", HALF)
    s.dims["Dn"], s.seen_in["Dn"] = _new_latents(f, s), "q"
    _query_rows(f, s)
    _weight(f, s, "w_uk", "H L Dn", f.q.dtype)
    _weight(f, s, "w_uv", "H Dv L", f.q.dtype)
    s.see("out", "T H Dv", [f.q.dtype])
    require(s["H"] > 0, "q", "at least one head", s["H"])
    require(s["Dv"] > 0, "w_uv", "at least one value column", s["Dv"])
    _softmax_scale(f)
    scalar(f, s, "softmax_scale_t")
    finite("epsilon", "a finite number, not negative", f.epsilon, f.epsilon >= 0)


def _merge_states(f: SimpleNamespace) -> None:
    s = ShapeChecker(f)
    s.see("outs", "n T H D", FLOAT)
    require(s["n"] > 0, "outs", "at least one part", "none")
    s.see("lses", "n T H", F32, last_dim_dense=False)
    s.see("out", "T H D", FLOAT)
    s.see("lse", "T H", F32, last_dim_dense=False)


CHECKS = {
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
    "transcode": transcode_checks.check,
}


def _queries(f: SimpleNamespace, s: ShapeChecker, dtype: list) -> None:
    q, out = (argument_of_field(CALLS[f.op][0], name) for name in ("q_rope", "q_rope_out"))
    _both(out, f.q_rope_out, q, f.q_rope)
    _both("q_nope_out", f.q_nope_out, "q_nope", f.q_nope)
    s.see("q_rope", "T Hq R", dtype)
    s.see("q_nope", "T Hq Nq", dtype)
    s.see("q_rope_out", "T Hq R", FLOAT + FP8)
    if f.q_nope is not None:
        s.see("q_nope_out", "T Hq Nq", [f.q_rope_out.dtype] if f.q_rope_out is not None else FLOAT + FP8)
    positive(f, "q_scale")
    scalar(f, s, "q_scale_t")


def _rotary(f: SimpleNamespace, s: ShapeChecker) -> None:
    s.see("cos_sin_cache", "max_pos R", F32)
    require(s["R"] % 2 == 0 and s["R"] > 0, "cos_sin_cache", "[max_pos, R] with R positive and even", s["R"])
    s.see("positions", "T", INDEX)


def _place(f: SimpleNamespace, s: ShapeChecker) -> None:
    ragged = (f.batch_indices, f.kv_positions, f.kv_indptr, f.kv_indices)
    if f.slot_mapping is not None:
        require(all(x is None for x in ragged), "slot_mapping", "either slot_mapping or kv_indices, not both", "both")
        s.see("slot_mapping", "T", INDEX)
        return
    require(all(x is not None for x in ragged), "slot_mapping", "a tensor [T] of page * S + offset", None)
    s.see("batch_indices", "T", INDEX)
    s.see("kv_positions", "T", INDEX)
    s.see("kv_indptr", "B1", INDEX)
    s.see("kv_indices", "num_indices", INDEX)


def _requests(f: SimpleNamespace, s: ShapeChecker) -> None:
    s.see("seq_lens", "B", INDEX)
    s.see("page_table", "B max_pages", INDEX)
    _query_rows(f, s)


def _query_rows(f: SimpleNamespace, s: ShapeChecker) -> None:
    t, b = s["T"], s["B"]
    if f.cu_seqlens_q is not None:
        s.see("cu_seqlens_q", "B+1", INDEX)
        require(f.max_q_len >= 0, "max_q_len", "the largest number of query rows of a request", f.max_q_len)
    else:
        require(t == b * f.max_q_len, "q", f"T a multiple of B={b} (or cu_seqlens_q for ragged drafts)", f"T={t}")


def _output_scales(f: SimpleNamespace, s: ShapeChecker) -> None:
    _softmax_scale(f)
    finite("out_scale", "a finite number", f.out_scale)
    _precision(f)
    scalar(f, s, "softmax_scale_t", "out_scale_t")


def _softmax_scale(f: SimpleNamespace) -> None:
    finite("softmax_scale", "a finite number, not negative", f.softmax_scale, f.softmax_scale >= 0)


def _precision(f: SimpleNamespace) -> None:
    require(f.precision in ("exact", "fast"), "precision", "'exact' or 'fast'", repr(f.precision))
