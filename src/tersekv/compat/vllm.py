"""vLLM's cache-writing and indexer's signatures over tersekv's operations. They rename and convert units; nothing is
computed here but the rotation of its int4 rows.

    from tersekv.compat.vllm import triton_reshape_and_cache_flash_per_token_head_quant

The length of `slot_mapping` is the number of tokens: key and value may be longer, as vLLM pads them and not the slots.
Scales dequantise, as tersekv's do. vLLM hands out fp8 caches as uint8; `kv_cache_dtype` says what is in them.
"""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

from ..calls import AppendCall, MLAAppendCall
from ..formats import latent_bytes_per_token
from ..layers import PagedLatentLayer
from ..ops.registry import dispatch_call
from ..ops.scales import multiplying_scale
from ._adapt import as_float, dtype_name, first_rows, lookup_cached, number_or_tensor, tensor, with_caller_names
from ._vllm_indexer import (
    cp_gather_indexer_k_quant_cache,
    indexer_k_quant_and_cache,
    top_k_per_row_decode,
    top_k_per_row_prefill,
)
from ._vllm_rotation import rotated

__all__ = [
    "concat_and_cache_mla",
    "cp_gather_indexer_k_quant_cache",
    "indexer_k_quant_and_cache",
    "reshape_and_cache_flash",
    "top_k_per_row_decode",
    "top_k_per_row_prefill",
    "triton_reshape_and_cache_flash_per_token_head_quant",
]

_PER_TOKEN_HEAD = {
    torch.int8: "int8_per_token_head",
    torch.float8_e4m3fn: "fp8_per_token_head",
    torch.uint8: "int4_per_token_head",
}
_QUANT_MODE = {  # members of vLLM's KVQuantMode
    "int8_per_token_head": 2,
    "fp8_per_token_head": 3,
    "int4_per_token_head": 4,
}
_HALF = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_NAMED_HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16, "half": torch.float16}
_NAMED_FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_FP8_FORMAT = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
_JOINED = {"kpe": "ckv", "ckv_scale_cache": "ckv"}  # of one tensor
_NAMES = {
    "k": "key",
    "v": "value",
    "k_cache": "key_cache",
    "v_cache": "value_cache",
    "head_dim": "head_dim of key",
    "head_dim_v": "head_dim of value",
}
_MLA_NAMES = {
    "ckv": "kv_cache",
    "kpe": "kv_cache",
    "ckv_scale_cache": "kv_cache",
    "cache": "kv_cache",
    "kv_lora_rank": "kv_c",
    "qk_rope_head_dim": "k_pe",
    "kv_scale": "scale",
}


def triton_reshape_and_cache_flash_per_token_head_quant(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    k_scale_cache: Tensor,
    v_scale_cache: Tensor,
    slot_mapping: Tensor,
    kv_quant_mode: object = None,
) -> None:
    """`vllm.v1.attention.ops.triton_reshape_and_cache_flash`'s function: quantise per token and head, and write.

        >>> key_cache, value_cache = torch.zeros(2, 16, 16, 2, 64, dtype=torch.int8)
        >>> k_scale_cache, v_scale_cache = torch.zeros(2, 16, 16, 2)
        >>> triton_reshape_and_cache_flash_per_token_head_quant(
        ...     key, value, key_cache, value_cache, k_scale_cache, v_scale_cache, slot_mapping
        ... )

        key, value:                    [T, H, D], [T, H, Dv]  bf16 | fp16 | fp32; longer than slot_mapping is padding
        key_cache, value_cache:        [P, S, H, D], [P, S, H, Dv]  int8 | e4m3, or uint8 [P, S, H, D/2] of int4, in
                                       place; longer rows are allowed (vLLM keeps the scales after them)
        k_scale_cache, v_scale_cache:  [P, S, H]  fp32, any strides, in place; scale = max(absmax / QMAX, 1e-6); int4:
                                       max((max - min) / 15, 1e-6), its four lowest bits the zero point
        slot_mapping:                  [T]  page * S + offset; negative: neither codes nor scales are written
        kv_quant_mode:                 newer vLLM's, by name or number: the one of the cache's dtype; or None, but with
                                       uint8, which is not int4's alone

    int8 codes round half away from zero. int4 rows are rotated first, as vLLM's readers expect, by fp32 butterflies and
    one rounding to their dtype; D and Dv are powers of 2 up to 512. Their range is not widened to hold 0, so that a row
    whose rotated values have one sign loses them, as it does there: bytes are vLLM's.

    Raises ValueError that lists the supported cache dtypes, and ValueError or TypeError for other bad arguments.
    """
    four_bits = isinstance(key_cache, Tensor) and key_cache.dtype == torch.uint8
    if four_bits:  # rotated rows are inputs of the launch, which a repeated call must find
        _check_mode(key_cache, kv_quant_mode)
        key, value = _token_rows(key, value, slot_mapping)
        key, value = rotated("key", key), rotated("value", value)
    caches = key_cache, value_cache, k_scale_cache, v_scale_cache
    signature, found = lookup_cached(
        _NAMES, "append", ("per_token_head", kv_quant_mode), (key, value, *caches, slot_mapping, *[None] * 10)
    )
    if found is not None:
        return
    own = _check_mode(key_cache, kv_quant_mode)
    key, value = _token_rows(key, value, slot_mapping)
    k_cache = _row_heads("key_cache", key_cache, key.shape[2] // (1 + four_bits))
    v_cache = _row_heads("value_cache", value_cache, value.shape[2] // (1 + four_bits))
    call = AppendCall(
        key, value, k_cache, v_cache, k_scale_cache, v_scale_cache, slot_mapping, None, None, None, None, own,
        1.0, None, 1.0, None, False, widen=not four_bits,
    )  # fmt: skip
    with_caller_names(_NAMES, dispatch_call, "append", call, None, signature)


def _check_mode(key_cache: Tensor, kv_quant_mode: object) -> str:
    """The format of a cache with scales per token and head; raises unless it is the one of `kv_quant_mode`."""
    dtype = tensor("key_cache", key_cache).dtype
    if dtype not in _PER_TOKEN_HEAD:
        raise ValueError(
            f"key_cache: want one of {', '.join(map(dtype_name, _PER_TOKEN_HEAD))} for scales per token and head, "
            f"got {dtype_name(dtype)}"
        )
    mode, own = getattr(kv_quant_mode, "name", kv_quant_mode), _PER_TOKEN_HEAD[dtype]
    named = mode.lower() if isinstance(mode, str) else mode
    fits = isinstance(named, (str, Integral)) and named in (own, _QUANT_MODE[own])
    if not fits and (kv_quant_mode is not None or dtype == torch.uint8):
        or_none = "" if dtype == torch.uint8 else ", or None"
        want = f"{own.upper()} ({_QUANT_MODE[own]}) beside a {dtype_name(dtype)} cache{or_none}"
        raise ValueError(f"kv_quant_mode: want {want}, got {type(kv_quant_mode).__name__ if mode is None else mode}")
    return own


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: float | Tensor,
    v_scale: float | Tensor,
) -> None:
    """`vllm._custom_ops.reshape_and_cache_flash`: write rows into the paged cache, with a scale per tensor or head.

        >>> key_cache, value_cache = torch.zeros(2, 16, 16, 2, 64, dtype=torch.uint8)
        >>> reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, "fp8", k_scale, v_scale)

        key, value:              [T, H, D], [T, H, Dv]  bf16 | fp16 | fp32, or the dtype of an fp8 cache: codes, which
                                 are copied; longer than slot_mapping is padding
        key_cache, value_cache:  [P, S, H, D], [P, S, H, Dv], any strides; longer rows are allowed
        slot_mapping:            [T]  page * S + offset; negative: skipped
        kv_cache_dtype:          "auto", "bfloat16", "float16", "half": a 16-bit cache, the scales are ignored;
                                 "fp8", "fp8_e4m3", "fp8_e5m2": a cache of that dtype, or of uint8
        k_scale, v_scale:        float, or fp32 tensor [], [1] or [H]; they dequantise

    x is multiplied by the correctly rounded 1 / scale, where vLLM divides. Raises ValueError or TypeError for a bad
    argument.
    """
    scaled = isinstance(kv_cache_dtype, str) and kv_cache_dtype in _NAMED_FP8
    (k_number, k_t), (v_number, v_t) = (number_or_tensor(x) if scaled else (None, None) for x in (k_scale, v_scale))
    parts = {"v_scale_t": "k_scale_t"} if k_t is v_t is not None else {}
    signature, found = lookup_cached(
        _NAMES, "append", ("reshape_and_cache", kv_cache_dtype, k_number, v_number),
        (key, value, key_cache, value_cache, None, None, slot_mapping, None, None, None, None, k_t,
         None if parts else v_t, None, None, None, None),
        parts,
    )  # fmt: skip
    if found is not None:
        return
    key, value = _token_rows(key, value, slot_mapping)
    format, stored = _cache_format(kv_cache_dtype, "key_cache", tensor("key_cache", key_cache))
    k_cache = _row_heads("key_cache", _view_as("key_cache", key_cache, stored), key.shape[2])
    v_cache = _row_heads("value_cache", _view_as("value_cache", value_cache, stored), value.shape[2])
    scales = _scale("k_scale", k_scale, scaled), _scale("v_scale", v_scale, scaled)
    call = AppendCall(
        key, value, k_cache, v_cache, None, None, slot_mapping, None, None, None, None, format,
        *scales[0], *scales[1], False,
    )  # fmt: skip
    with_caller_names(_NAMES, dispatch_call, "append", call, None, signature)


def concat_and_cache_mla(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    scale: float | Tensor,
) -> None:
    """`vllm._custom_ops.concat_and_cache_mla`: write latent rows [kv_c | k_pe] into the paged MLA cache.

        >>> kv_cache = torch.zeros(16, 16, 656, dtype=torch.uint8)
        >>> concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, "fp8_ds_mla", scale=1.0)

        kv_c, k_pe:      [T, L], [T, R] or [T, 1, R]  bf16 | fp16 | fp32, or the dtype of an fp8 cache: codes, which
                         are copied; longer than slot_mapping is padding
        kv_cache:        [P, S, L + R]; "fp8_ds_mla": uint8 [P, S, 656] (L 512, R 64)
        slot_mapping:    [T]  page * S + offset; negative: skipped
        kv_cache_dtype:  as `reshape_and_cache_flash`, and "fp8_ds_mla"
        scale:           float, or fp32 tensor [] or [1]; it dequantises; ignored by 16-bit and fp8_ds_mla caches

    fp8_ds_mla group scales are rounded up to powers of two, which every reader of the format takes. Raises ValueError
    or TypeError for a bad argument.
    """
    scaled = isinstance(kv_cache_dtype, str) and kv_cache_dtype in _NAMED_FP8
    scale_number, scale_t = number_or_tensor(scale) if scaled else (None, None)
    nothing = None, None, None, None
    signature, found = lookup_cached(
        _MLA_NAMES, "mla_append", ("concat_and_cache", kv_cache_dtype, scale_number),
        (None, None, kv_c, k_pe, *nothing, kv_cache, None, None, slot_mapping, *nothing, None, scale_t), _JOINED,
    )  # fmt: skip
    if found is not None:
        return
    tokens = tensor("slot_mapping", slot_mapping, "T").shape[0]
    kv_c = first_rows("kv_c", tensor("kv_c", kv_c), tokens, "slot_mapping")
    k_pe = first_rows("k_pe", tensor("k_pe", k_pe), tokens, "slot_mapping")
    k_pe = k_pe[:, 0] if k_pe.dim() == 3 and k_pe.shape[1] == 1 else k_pe
    if kv_c.dim() != 2:
        raise ValueError(f"kv_c: want [T, L], got {list(kv_c.shape)}")
    if kv_cache_dtype == "fp8_ds_mla":
        format, rows = "fp8_ds_mla", tensor("kv_cache", kv_cache)
    else:
        format, stored = _cache_format(kv_cache_dtype, "kv_cache", tensor("kv_cache", kv_cache), ", fp8_ds_mla")
        rows = _view_as("kv_cache", kv_cache, stored)
    row = with_caller_names(_MLA_NAMES, latent_bytes_per_token, format, kv_c.shape[1], k_pe.shape[-1])
    if rows.dim() > 0 and rows.shape[-1] * rows.element_size() != row:
        sizes = f"{kv_c.shape[1]} (kv_c) and {k_pe.shape[-1]} (k_pe)"
        got = f"{list(rows.shape)} {dtype_name(rows.dtype)}"
        raise ValueError(f"kv_cache: want rows of {row} bytes for {sizes} in {format}, got {got}")
    layer: PagedLatentLayer = with_caller_names(_MLA_NAMES, _latent_layer, rows, format, kv_c.shape[1])
    call = MLAAppendCall(
        None, None, kv_c, k_pe, *nothing, layer.ckv, layer.kpe, layer.ckv_scale_cache, slot_mapping, *nothing,
        format, True, 1.0, None, *_scale("scale", scale, scaled), False, False,
    )  # fmt: skip
    with_caller_names(_MLA_NAMES, dispatch_call, "mla_append", call, None, signature)


def _cache_format(name: str, cache_name: str, cache: Tensor, more: str = "") -> tuple[str, torch.dtype]:
    """tersekv's format and the stored dtype of a cache that vLLM calls `name`."""
    if not isinstance(name, str):
        raise TypeError(f"kv_cache_dtype: want str, got {type(name).__name__}")
    if name == "auto" or name in _NAMED_HALF:
        if cache.dtype not in _HALF or cache.dtype != _NAMED_HALF.get(name, cache.dtype):
            want = "bfloat16 or float16" if name == "auto" else name
            raise ValueError(f"{cache_name}: want {want} for kv_cache_dtype={name!r}, got {dtype_name(cache.dtype)}")
        return _HALF[cache.dtype], cache.dtype
    if name not in _NAMED_FP8:
        known = ", ".join(("auto", *_NAMED_HALF, *_NAMED_FP8))
        raise ValueError(
            f"kv_cache_dtype: want one of {known}{more}, got {name!r} (scales per token and head: "
            "triton_reshape_and_cache_flash_per_token_head_quant)"
        )
    return _FP8_FORMAT[_NAMED_FP8[name]], _NAMED_FP8[name]


def _view_as(name: str, cache: Tensor, stored: torch.dtype) -> Tensor:
    """A view of the cache in its stored dtype; vLLM's fp8 caches come as uint8."""
    if tensor(name, cache).dtype == stored:
        return cache
    if cache.dtype != torch.uint8 or stored not in _FP8_FORMAT:
        or_bytes = " or uint8" if stored in _FP8_FORMAT else ""
        raise ValueError(f"{name}: want {dtype_name(stored)}{or_bytes}, got {dtype_name(cache.dtype)}")
    return cache.view(stored)


def _token_rows(key: Tensor, value: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
    n = tensor("slot_mapping", slot_mapping, "T").shape[0]
    tensor("key", key, "T, H, D"), tensor("value", value, "T, H, Dv")
    return first_rows("key", key, n, "slot_mapping"), first_rows("value", value, n, "slot_mapping")


def _row_heads(name: str, cache: Tensor, dim: int) -> Tensor:
    """The first `dim` columns of cache rows that hold more."""
    if tensor(name, cache).dim() != 4 or cache.shape[3] < dim:
        raise ValueError(f"{name}: want [P, S, heads, {dim} or more], got {list(cache.shape)}")
    return cache if cache.shape[3] == dim else cache[..., :dim]


def _scale(name: str, x: float | Tensor, scaled: bool) -> tuple[float, Tensor | None]:
    """(multiplier, tensor) of a scale for a call record; a cache that is not `scaled` has none."""
    if not scaled:
        return 1.0, None
    return multiplying_scale(x if isinstance(x, Tensor) else as_float(name, x, "a number or Tensor"), name)


def _latent_layer(rows: Tensor, format: str, rank: int) -> PagedLatentLayer:
    return PagedLatentLayer.of(rows, format=format, kv_lora_rank=rank)
