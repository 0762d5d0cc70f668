"""The records of native/api.h, field by field, and their values from facts. Strides are in bytes."""

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
E8M0 = 11  # of stored scales, in bytes
NO_SCALE, TENSOR_SCALE, ROW_SCALE, BLOCK_SCALE, GROUP_SCALE, UE8M0_SCALE, INDEX_SCALE = range(7)
NONE = -1  # index of an absent tensor
TRANSFORMS = ("k_signs", "v_signs", "k_channel_scale", "v_channel_scale")


def _enum_values(*names: str) -> list[tuple[str, Any]]:
    return [(name, c_int64) for name in names]


class IndexTensor(Structure):
    _fields_ = _enum_values("tensor", "dtype", "stride")


class StridedTensor(Structure):
    _fields_ = [("tensor", c_int64), ("strides", c_int64 * 3)]


class LayerNorm(Structure):
    _fields_ = [*_enum_values("weight", "bias", "weight_dtype", "bias_dtype"), ("epsilon", c_double)]


class HeadWeights(Structure):
    _fields_ = [("input", StridedTensor), ("out", StridedTensor), ("dtype", c_int64), ("scale", c_double)]


class Scale(Structure):
    _fields_ = [("value", c_double), *_enum_values("tensor", "stride")]


class PagedMatrix(Structure):
    _fields_ = [
        ("codes", StridedTensor), *_enum_values("first_byte", "dtype", "columns"), ("scales", StridedTensor),
        *_enum_values("width", "scale_dtype"), ("query", StridedTensor), *_enum_values("query_column"),
    ]  # fmt: skip


class KeyLists(Structure):
    _fields_ = [
        ("entries", StridedTensor), ("lens", StridedTensor),
        *_enum_values("dtype", "lens_dtype", "length", "heads", "block", "causal"),
    ]  # fmt: skip


class KeySet(Structure):
    _fields_ = [
        *_enum_values("num_keys", "num_values"), ("keys", PagedMatrix * 2), ("values", PagedMatrix * 2),
        ("page_table", IndexTensor), *_enum_values("max_pages", "num_pages", "page_size"), ("k_scale", Scale),
        ("v_scale", Scale), ("lists", KeyLists),
    ]  # fmt: skip


class RowTransform(Structure):
    _fields_ = _enum_values("signs", "block", "channels", "stride")


class Attention(Structure):
    _fields_ = [
        ("num_sets", c_int64), ("sets", KeySet * 2), ("new_keys", PagedMatrix), ("new_values", PagedMatrix),
        ("seq_lens", IndexTensor), ("cu_seqlens_q", IndexTensor),
        *_enum_values("requests", "rows", "heads", "group", "max_q_len", "query_dtype"), ("mask", IndexTensor),
        *_enum_values("window", "sinks"), ("out", StridedTensor), ("lse", StridedTensor), ("max_logits", StridedTensor),
        *_enum_values("out_dtype", "lse_of_keys"), ("softcap", c_double), ("softmax_scale", Scale),
        ("out_scale", Scale), ("key_transform", RowTransform), ("value_transform", RowTransform),
        *_enum_values("batch_invariant", "prefill_invariant"),
    ]  # fmt: skip


class RowWrite(Structure):
    _fields_ = [
        ("first", StridedTensor), ("second", StridedTensor), *_enum_values("first_columns", "second_columns", "rotated",
                                                                           "heads", "cached"),
        ("out", StridedTensor), *_enum_values("out_dtype", "scale_kind"), ("scales", StridedTensor),
        *_enum_values("width", "stored_scales", "tail"), ("multiplier", Scale),
        ("transform", RowTransform), ("norm", LayerNorm), *_enum_values("rotary_column", "round_dtype"),
        ("weights", HeadWeights),
    ]  # fmt: skip


class Append(Structure):
    _fields_ = [
        ("num_row_writes", c_int64), ("row_writes", RowWrite * 4), *_enum_values("tokens", "dtype", "page_size",
        "num_pages"),
        ("slots", IndexTensor), ("batch", IndexTensor), ("kv_positions", IndexTensor), ("indptr", IndexTensor),
        ("indices", IndexTensor),
        *_enum_values("num_requests", "num_indices", "cos_sin", "cos_sin_stride", "max_position", "rotary"),
        ("positions", IndexTensor), *_enum_values("interleaved", "zero_padding", "scales_quantize", "widen"),
    ]  # fmt: skip


class Merge(Structure):
    _fields_ = [
        *_enum_values("parts", "rows", "heads", "columns", "dtype", "out_dtype", "outs"), ("outs_strides", c_int64 * 3),
        ("lses", c_int64), ("lses_strides", c_int64 * 3), ("out", StridedTensor), ("lse", StridedTensor),
    ]  # fmt: skip


class IndexScores(Structure):
    _fields_ = [
        ("keys", PagedMatrix), ("page_table", IndexTensor), ("seq_lens", IndexTensor), ("cu_seqlens_q", IndexTensor),
        *_enum_values("requests", "rows", "heads", "max_q_len", "max_pages", "num_pages", "page_size", "query_dtype"),
        ("weights", StridedTensor), *_enum_values("ratio", "relu", "each", "block", "width"), ("scale", c_double),
        ("out", StridedTensor), ("lens", StridedTensor), ("starts", IndexTensor), ("ends", IndexTensor),
        *_enum_values("select", "k", "keep_first", "keep_last", "open_group"),
    ]  # fmt: skip


class IndexTopk(Structure):
    _fields_ = [
        *_enum_values("rows", "lines", "width", "columns"), ("scores", StridedTensor), ("visible", IndexTensor),
        ("open_group", IndexTensor), ("starts", IndexTensor), ("out", StridedTensor), ("lens", StridedTensor),
        *_enum_values("k", "keep_first", "keep_last"),
    ]  # fmt: skip


NO_TENSOR, NO_TRANSFORM, NO_NORM = StridedTensor(NONE), RowTransform(NONE, 0, NONE, 0), LayerNorm(NONE, NONE)
NO_WEIGHTS = HeadWeights(NO_TENSOR, NO_TENSOR)
NO_MATRIX = PagedMatrix(StridedTensor(NONE), 0, 0, 0, StridedTensor(NONE))


def paged_matrix(codes: StridedTensor, dtype: int, columns: int, query: StridedTensor | None = None) -> PagedMatrix:
    """Returns rows without scales of their own, from the first byte on."""
    return PagedMatrix(codes, 0, dtype, columns, StridedTensor(NONE), 0, 0, query or StridedTensor(NONE))


class Report(Structure):
    _fields_ = [*_enum_values("fault", "request"), ("values", c_int64 * 2), ("at", c_int64 * 3)]


class CallFacts:
    """The facts of a call, and the indices of its tensors in the list of addresses."""

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

    def address_index_and_strides(self, name: str, *, has_heads: bool = True) -> StridedTensor:
        """Returns a tensor [page, slot, head, …] or [token, head, …]; of one head without `has_heads` or in 2 dims."""
        if self.at(name) == NONE:
            return StridedTensor(NONE)
        strides = self.strides(name)
        dims = 3 if name.endswith(("_cache", "ckv", "kpe")) else 2
        if not has_heads or (dims == 2 and len(strides) == 2 and name not in ("lse", "max_logits")):
            dims -= 1
        return StridedTensor(self.at(name), (c_int64 * 3)(*strides[:dims]))

    def index_tensor(self, name: str) -> IndexTensor:
        if self.at(name) == NONE:
            return IndexTensor(NONE)
        return IndexTensor(self.at(name), self.dtype(name), self.strides(name)[0])

    def key_lists(self, tensor_prefix: str, *, causal: bool) -> KeyLists:
        """Returns the lists [T, n] or [T, Hx, n] of a set of keys."""
        lists = getattr(self.f, f"{tensor_prefix}indices")
        if lists is None:
            return KeyLists(StridedTensor(NONE))
        token, *head, entry = self.strides(f"{tensor_prefix}indices")
        lens = self.strides(f"{tensor_prefix}index_lens")
        heads = lists.shape[1] if head else 1
        return KeyLists(
            StridedTensor(self.at(f"{tensor_prefix}indices"), (token, head[0] if heads > 1 else 0, entry)),
            StridedTensor(self.at(f"{tensor_prefix}index_lens"), (c_int64 * 3)(*lens[: 2 if heads > 1 else 1])),
            self.dtype(f"{tensor_prefix}indices"), self.dtype(f"{tensor_prefix}index_lens") if lens else 0,
            lists.shape[-1], heads, 1 if tensor_prefix else self.f.block_size, causal,
        )  # fmt: skip

    def row_transform(self, k_or_v: str) -> RowTransform:
        """Returns the rotation and channel scales of stored rows of "k" or "v"."""
        signs, channels = f"{k_or_v}_signs", f"{k_or_v}_channel_scale"
        b, stride = getattr(self.f, signs), self.strides(channels)
        return RowTransform(
            self.at(signs), 0 if b is None else b.shape[0], self.at(channels), stride[0] if stride else 0
        )

    def scale(self, name: str) -> Scale:
        """Returns a scale: a float, or the tensor [1] or [H] that overrides it."""
        tensor = getattr(self.f, f"{name}_t")
        stride = 0 if tensor is None or tensor.shape[0] == 1 else 1
        return Scale(getattr(self.f, name), self.at(f"{name}_t"), stride)
