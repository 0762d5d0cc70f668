"""The records of native/api.h, field by field, and what facts become in them. Strides are in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_double, c_int64
from typing import Any

import torch

DTYPES = {
    torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3, torch.float8_e5m2: 4,
    torch.int32: 8, torch.int64: 9, torch.uint32: 10, torch.uint16: 2,
}  # fmt: skip
CODES = {"bf16": 1, "fp16": 2, "e4m3": 3, "e5m2": 4, "int8": 5, "e2m1": 6, "int4": 7}  # of a format
NO_SCALE, TENSOR_SCALE, ROW_SCALE, BLOCK_SCALE, GROUP_SCALE = range(5)
NONE = -1  # in place of a tensor
TURNS = ("k_signs", "v_signs", "k_channel_scale", "v_channel_scale")


def _numbers(*names: str) -> list[tuple[str, Any]]:
    return [(name, c_int64) for name in names]


class Indices(Structure):
    _fields_ = _numbers("tensor", "dtype", "stride")


class Place(Structure):
    _fields_ = [("tensor", c_int64), ("strides", c_int64 * 3)]


class Scale(Structure):
    _fields_ = [("value", c_double), *_numbers("tensor", "stride")]


class Matrix(Structure):
    _fields_ = [
        ("codes", Place), *_numbers("dtype", "columns"), ("factors", Place), *_numbers("width", "factor_dtype"),
        ("query", Place),
    ]  # fmt: skip


class Turn(Structure):
    _fields_ = _numbers("signs", "block", "channels", "stride")


class Attention(Structure):
    _fields_ = [
        ("num_keys", c_int64), ("keys", Matrix * 2), ("values", Matrix), ("new_keys", Matrix), ("new_values", Matrix),
        ("page_table", Indices), ("seq_lens", Indices), ("cu_seqlens_q", Indices),
        *_numbers("requests", "rows", "heads", "group", "max_q_len", "max_pages", "num_pages", "page_size"),
        ("query_dtype", c_int64), ("mask", Indices), *_numbers("window", "sinks"), ("out", Place), ("lse", Place),
        ("out_dtype", c_int64), ("softcap", c_double), ("softmax_scale", Scale), ("k_scale", Scale),
        ("v_scale", Scale), ("out_scale", Scale), ("key_turn", Turn), ("value_turn", Turn),
        ("batch_invariant", c_int64),
    ]  # fmt: skip


class Stream(Structure):
    _fields_ = [
        ("first", Place), ("second", Place), *_numbers("first_columns", "second_columns", "rotated", "heads", "cached"),
        ("out", Place), *_numbers("out_dtype", "scale_kind"), ("scales", Place), ("multiplier", Scale),
        ("turn", Turn),
    ]  # fmt: skip


class Append(Structure):
    _fields_ = [
        ("num_streams", c_int64), ("streams", Stream * 4), *_numbers("tokens", "dtype", "page_size", "num_pages"),
        ("slots", Indices), ("batch", Indices), ("kv_positions", Indices), ("indptr", Indices), ("indices", Indices),
        *_numbers("num_requests", "num_indices", "cos_sin", "cos_sin_stride", "max_position", "rotary"),
        ("positions", Indices), *_numbers("interleaved", "zero_padding", "scales_quantize", "widen"),
    ]  # fmt: skip


class Merge(Structure):
    _fields_ = [
        *_numbers("parts", "rows", "heads", "columns", "dtype", "out_dtype", "outs"), ("outs_strides", c_int64 * 3),
        ("lses", c_int64), ("lses_strides", c_int64 * 3), ("out", Place), ("lse", Place),
    ]  # fmt: skip


NO_TURN = Turn(NONE, 0, NONE, 0)


class Report(Structure):
    _fields_ = [*_numbers("fault", "request"), ("values", c_int64 * 2)]


class Facts:
    """The facts of a call, and the places of its tensors in the list of addresses."""

    def __init__(self, f: Any, names: Sequence[str]) -> None:
        self.f = f
        self._at = {name: i for i, name in enumerate(names) if getattr(f, name) is not None}

    def at(self, name: str) -> int:
        return self._at.get(name, NONE)

    def strides(self, name: str) -> list[int]:
        fact = getattr(self.f, name)
        return [] if fact is None else [n * fact.dtype.itemsize for n in fact.stride]

    def dtype(self, name: str) -> int:
        return DTYPES[getattr(self.f, name).dtype]

    def place(self, name: str, *, heads: bool = True) -> Place:
        """A tensor [page, slot, head, …] or [token, head, …]; without `heads`, or in two dimensions, of one head."""
        if self.at(name) == NONE:
            return Place(NONE)
        strides = self.strides(name)
        dims = 3 if name.endswith("_cache") or name in ("ckv", "kpe") else 2
        if not heads or (dims == 2 and len(strides) == 2 and name != "lse"):
            dims -= 1
        return Place(self.at(name), (c_int64 * 3)(*strides[:dims]))

    def indices(self, name: str) -> Indices:
        if self.at(name) == NONE:
            return Indices(NONE)
        return Indices(self.at(name), self.dtype(name), self.strides(name)[0])

    def turn(self, side: str) -> Turn:
        """What the rows of K or V, "k" or "v", lie turned by."""
        signs, channels = f"{side}_signs", f"{side}_channel_scale"
        b, stride = getattr(self.f, signs), self.strides(channels)
        return Turn(self.at(signs), 0 if b is None else b.shape[0], self.at(channels), stride[0] if stride else 0)

    def scale(self, name: str) -> Scale:
        """A float, or the tensor [1] or [H] that wins over it."""
        tensor = getattr(self.f, f"{name}_t")
        stride = 0 if tensor is None or tensor.shape[0] == 1 else 1
        return Scale(getattr(self.f, name), self.at(f"{name}_t"), stride)
