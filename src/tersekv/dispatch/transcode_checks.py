"""Checks of `transcode`: the facts of a layer's pages on both sides, and the values of page lists."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..attributes import block_of
from ..calls import LAYER_COLUMNS, TranscodeCall
from ..formats import ALL_FORMATS, BLOCK, TENSOR, KVFormat
from ..scalars import round_to_fp32
from ..shapes import ShapeChecker, argument_of_field, require

INDEX = (torch.int32, torch.int64, torch.uint32)
_F32 = (torch.float32,)


def check(f: SimpleNamespace) -> None:
    """Raise ValueError unless the facts of a call fit together."""
    s = ShapeChecker(f)
    names = (("src_", "src_k", "src_v", f.src_format, f.src_v_format), ("", "k_cache", "v_cache", f.format, f.v_format))
    for prefix, k, v, k_format, v_format in names:
        for letter in "PS":  # of each side its own
            s.dims.pop(letter, None)
        for side, cache, dim, format in (("k", k, "D", k_format), ("v", v, "Dv", v_format)):
            require(format in ALL_FORMATS, "format", f"one of {', '.join(ALL_FORMATS)}", repr(format))
            _check_side(f, s, prefix + side, cache, dim, ALL_FORMATS[format])
        require(s["S"] > 0, argument_of_field(TranscodeCall, k), "at least one slot a page", s["S"])
    s.see("src_pages", "n", INDEX)
    s.see("dst_pages", "m", INDEX)
    s.see("num_tokens_t", "1", INDEX)
    _check_room(f)
    if s.see("layers", f"layers {len(LAYER_COLUMNS)}", [torch.int64]):
        require(f.layers.stride == (len(LAYER_COLUMNS), 1), "layers", "dense rows", list(f.layers.stride))


def _check_side(f: SimpleNamespace, s: ShapeChecker, name: str, cache: str, dim: str, fmt: KVFormat) -> None:
    """K or V of one side: codes, stored scales, scale of the tensor, attributes."""
    codes = getattr(f, cache)
    size = s.dims.get(dim, codes.shape[-1] * fmt.values_per_element if len(codes.shape) == 4 else 0)
    step = fmt.scale_block or fmt.values_per_element
    want = f"rows of a positive multiple of {step} values for {fmt.name}"
    require(
        len(codes.shape) != 4 or (size > 0 and size % step == 0), argument_of_field(TranscodeCall, cache), want, size
    )
    s.dims[dim] = fmt.elements(size)
    s.see(cache, f"P S H {dim}", [fmt.storage])
    s.dims[dim] = size
    stored = f"{name}_scale_cache"
    there, of = getattr(f, stored) is not None, argument_of_field(TranscodeCall, stored)
    want = f"the stored scales of {fmt.name}" if fmt.scale_dtype else f"None for {fmt.name}"
    require(there == (fmt.scale_dtype is not None), of, want, "a tensor" if there else None)
    if fmt.scale_dtype is not None:
        blocks = "" if fmt.scale_block is None else f" {fmt.scales(size)}"
        s.see(stored, f"P S H{blocks}", [fmt.scale_dtype], last_dim_dense=bool(blocks))
    _check_scale(f, s, f"{name}_scale", fmt)
    s.see(f"{name}_signs", str(block_of(size)), _F32)
    s.see(f"{name}_channel_scale", f"H {size}", _F32)


def _check_scale(f: SimpleNamespace, s: ShapeChecker, name: str, fmt: KVFormat) -> None:
    """The scale of a tensor, which dequantises: a number, or one of the device."""
    value, tensor, of = getattr(f, name), getattr(f, f"{name}_t"), argument_of_field(TranscodeCall, name)
    if fmt.scale not in (TENSOR, BLOCK):
        want = f"1.0 for {fmt.name}, which has no scale of the tensor"
        require(tensor is None and value == 1.0, of, want, "a tensor" if tensor else value)
    stored = round_to_fp32(value)
    fits = 0 < stored < float("inf") and 0 < round_to_fp32(1 / stored) < float("inf")
    require(fits, of, "a positive number that fp32 holds, and its reciprocal too", value)
    if tensor is not None:
        s.see(f"{name}_t", "1" if fmt.scale == BLOCK or tensor.shape[:1] == (1,) else "H", _F32)


def _check_room(f: SimpleNamespace) -> None:
    """Both lists hold the tokens."""
    require(f.num_tokens >= 0, "num_tokens", "0 or more", f.num_tokens)
    for name, size in (("src_pages", f.src_k.shape[1]), ("dst_pages", f.k_cache.shape[1])):
        pages, wanted = getattr(f, name).shape[0], -(-f.num_tokens // size)
        require(pages >= wanted, name, f"at least {wanted} pages of {size} slots for {f.num_tokens} tokens", pages)


def check_values(call: Any) -> None:
    """Raise ValueError for a page outside its cache, one that is written twice, and a number of tokens that the lists
    do not hold. Reads the device."""
    tokens = call.num_tokens
    if call.num_tokens_t is not None:
        tokens = int(call.num_tokens_t)
        require(0 <= tokens <= call.num_tokens, "num_tokens", f"0 to {call.num_tokens}, what both lists hold", tokens)
    sides = (("src_pages", call.src_pages, call.src_k), ("dst_pages", call.dst_pages, call.k_cache))
    for name, pages, cache in sides:
        used = pages[: -(-tokens // cache.shape[1])].to(torch.int64)
        wrong = (used < 0) | (used >= cache.shape[0])
        if wrong.any():
            i = int(wrong.nonzero()[0, 0])
            raise ValueError(f"{name}: want pages in [0, {cache.shape[0]}), got {int(used[i])} at {i}")
    if len(used.unique()) < len(used):
        raise ValueError(f"dst_pages: want each page once, got {_first_repeat(used)} again")


def _first_repeat(pages: Tensor) -> int:
    seen: set[int] = set()
    return next(page for page in pages.tolist() if page in seen or seen.add(page))  # type: ignore[func-returns-value]
