"""Checks of caches in calls: K/V and latent ones, their stored scales and those that are given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from .. import attributes
from ..calls import CALLS
from ..formats import UE8M0, KVFormat, latent_format, pair_of, rope_dtype
from ..scalars import round_to_fp32
from ..shapes import ShapeChecker, argument_of_field, dtype_name, require

_F32 = (torch.float32,)
_SIZES = {"k": "head_dim", "v": "head_dim_v"}


def finite(name: str, want: str, value: float, fits: bool = True, got: Any = None) -> None:
    """Raise unless a number is finite, in fp32 too, and `fits`. NaN never fits."""
    got = value if got is None else got
    require(fits and abs(value) < float("inf"), name, want, got)
    require(abs(round_to_fp32(value)) < float("inf"), name, f"{want} in fp32", got)


def kv_caches(f: SimpleNamespace, s: ShapeChecker, d: int, dv: int, k_rows: str, v_rows: str = "") -> None:
    """Check K/V caches and scales. k_rows, v_rows: names of the arguments with rows of size d and dv, or ""."""
    if len(f.k_cache.shape) == 4 and "H" in s.dims:
        _as_cache(k_rows, "num_kv_heads", s["H"], "k_cache", f.k_cache, f.k_cache.shape[2])
    sides = list(zip("kv", (k_rows, v_rows), (d, dv), pair_of(f), strict=True))
    for side, rows, dim, fmt in sides:
        cache, size = getattr(f, f"{side}_cache"), _SIZES[side]
        if rows and len(cache.shape) == 4:
            _as_cache(rows, size, dim, f"{side}_cache", cache, cache.shape[-1] * fmt.values_per_element)
    for side, _, dim, fmt in sides:
        _head_dim(fmt, _SIZES[side], dim)
    for side, _, dim, fmt in sides:
        letter = "D" if side == "k" else "Dv"
        s.dims[letter] = fmt.elements(dim)
        s.see(f"{side}_cache", f"P S H {letter}", [fmt.storage])
        s.dims[letter] = dim
        _stored_scales(f, s, f"{side}_scale_cache", fmt, dim)
        _scale_tensor(f, s, f"{side}_scale", fmt)
    attributes.check_attributes(f, s, (d, dv))
    require(s["S"] > 0, "k_cache", "at least one slot a page", s["S"])


def _as_cache(rows: str, what: str, got: int, name: str, cache: Any, want: int) -> None:
    """Check a size that rows share with a cache. The error blames the rows, since the cache is older."""
    require(got == want, rows, f"{what} {want} as in {name} {list(cache.shape)}", got)


def _head_dim(fmt: KVFormat, name: str, d: int) -> None:
    step = fmt.scale_block or fmt.values_per_element
    require(d > 0 and d % step == 0, name, f"a positive multiple of {step} for {fmt.name}", d)


def _stored_scales(f: SimpleNamespace, s: ShapeChecker, name: str, fmt: KVFormat, dim: int) -> None:
    if fmt.scale_dtype is None:
        require(getattr(f, name) is None, name, f"None for {fmt.name}", "a tensor")
        return
    require(getattr(f, name) is not None, name, f"the stored {dtype_name(fmt.scale_dtype)} scales of {fmt.name}", None)
    if fmt.scale_block is None:
        s.see(name, "P S H", [fmt.scale_dtype], last_dim_dense=False)
    else:
        s.see(name, f"P S H {fmt.scales(dim)}", [fmt.scale_dtype])


def _scale_tensor(f: SimpleNamespace, s: ShapeChecker, name: str, fmt: KVFormat) -> None:
    given = getattr(f, f"{name}_t")
    if fmt.scale not in ("tensor", "block"):
        want = f"1.0 for {fmt.name}, which has no scale of the tensor"
        require(given is None and getattr(f, name) == 1.0, name, want, _as_passed(f, name))
    positive(f, name)
    if given is not None:
        sizes = list(dict.fromkeys((1, s["H"]) if fmt.scale == "tensor" else (1,)))
        want = f"float32 with {' or '.join(map(str, sizes))} elements on {f.device}"
        fits = given.dtype == torch.float32 and given.shape in [(n,) for n in sizes] and given.device == f.device
        require(fits, name, want, f"{list(given.shape)} {dtype_name(given.dtype)} on {given.device}")
        require(given.shape[0] == 1 or given.stride == (1,), name, "stride 1", list(given.stride))


def _as_passed(f: SimpleNamespace, name: str) -> str:
    """Returns a scale as the caller passed it; records of appends may hold its reciprocal."""
    if getattr(f, f"{name}_t") is not None:
        return "a tensor"
    value = getattr(f, name)
    return f"{1 / value if value and getattr(f, 'scales_quantize', None) is False else value:.6g}"


def positive(f: SimpleNamespace, name: str, shown: str = "") -> None:
    value, shown = getattr(f, name), shown or name
    finite(shown, "a positive, finite number", value, value > 0, _as_passed(f, name))
    require(round_to_fp32(value) > 0, shown, "a positive number that fp32 holds", _as_passed(f, name))


def latent_cache(f: SimpleNamespace, s: ShapeChecker, of: str = "") -> None:
    """Check a latent cache: the fields whose names begin with `of`."""
    format = getattr(f, f"{of}format")
    fmt, ckv, kpe, stored, scale = (
        latent_format(format),
        *[of + n for n in ("ckv", "kpe", "ckv_scale_cache", "kv_scale")],
    )
    shown = {name: argument_of_field(CALLS[f.op][0], name) for name in (ckv, kpe, stored, scale)}
    for letter, what, name in (("L", "a latent rank of", ckv), ("R", "a rotary size of", kpe)):
        cache = getattr(f, name)
        if letter in s.dims and len(cache.shape) == 3:
            width = fmt.values(cache.shape[-1]) if letter == "L" else cache.shape[-1]
            _as_cache(s.seen_in[letter], what, s[letter], shown[name], cache, width)
    rank = s.dims.get("L", 0)
    if fmt.tail:
        require(rank > 0, shown[ckv], f"rows whose size another argument gives, for {format}", "none")
        s.dims["L"] = fmt.elements(rank)
    s.see(ckv, "P S L", [fmt.storage])
    if fmt.tail:
        s.dims["L"] = rank
    s.see(kpe, "P S R", [rope_dtype(fmt)])
    require(fmt.scale != UE8M0 or s["R"] == 0, of[:-1] or "cache", f"a layer with R = 0 for {format}", f"R = {s['R']}")
    step, given = fmt.scale_block or 1, getattr(f, stored) is not None
    require(s["L"] % step == 0, shown[ckv], f"a latent rank that is a multiple of {step} for {format}", s["L"])
    if fmt.scale_dtype is None:
        require(not given, shown[stored], f"None for {format}", "a tensor")
    else:
        require(given, shown[stored], f"the stored scales of {format}", None)
        s.see(stored, f"P S {fmt.scales(s['L'])}", [fmt.scale_dtype])
    require(s["S"] > 0, shown[ckv], "at least one slot a page", s["S"])
    plain = getattr(f, f"{scale}_t") is None and getattr(f, scale) == 1.0
    want = f"1.0 for {format}, which has no scale of the tensor"
    require(fmt.scale == "tensor" or plain, shown[scale], want, _as_passed(f, scale))
    positive(f, scale, shown[scale])
    scalar(f, s, f"{scale}_t")


def rotary_part(f: SimpleNamespace, name: str, x: Any) -> None:
    """Raise for an argument that is missing though the cache's rows have a rotary part."""
    require(x is not None or f.kpe.shape[-1:] == (0,), name, "a tensor for a cache with a rotary part", None)


def scalar(f: SimpleNamespace, s: ShapeChecker, *names: str) -> None:
    for name in names:
        if getattr(f, name) is not None:
            s.see(name, "1", _F32)
