"""Constants and arguments of the kernels over a K/V cache, from facts: what decode and prefill share."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from ....formats import BLOCK, TOKEN_HEAD, KVFormat, pair_of
from ...host import launch
from ...host.bind import stride_args, stride_unit_to_prove_alignment, tensor_args
from ...host.kernel_config import KernelConfig


def why_not_kv_cache(f: SimpleNamespace) -> str | None:
    """Returns why these kernels cannot read the caches and the query, or None."""
    reason = launch.why_not_format_or_device(f)
    if reason:
        return reason
    for name in ("k_cache", "v_cache"):
        if any(n * getattr(f, name).dtype.itemsize % 2 for n in getattr(f, name).stride[:3]):
            return f"wants {name} with strides of whole 16-bit words, got {list(getattr(f, name).stride)}"
        if not getattr(f, name).even:
            return f"wants {name} to begin with a whole 16-bit word, got an odd address"
    if f.q.dtype == torch.float32:
        return "wants a 16-bit or 8-bit q, got float32"
    return None


@dataclass(frozen=True)
class StoredRowFormat(KernelConfig):
    """How rows of K or V are stored."""

    CODE: str  # KVFormat.code
    PACK: int  # codes in a 16-bit word
    TOKEN_SCALES: bool
    BLOCK_SCALES: bool
    E4M3_BY_HAND: bool  # there is no type for e4m3: block scales come as uint8
    USE_PTX: bool  # dequantize by PTX
    STRIDE_UNIT: int  # in packed words, by `stride_unit_to_prove_alignment`
    SCALE_STRIDE_UNIT: int  # strides of block scales, in bytes


def mask_args(f: SimpleNamespace) -> dict[str, Any]:
    """Returns the tree mask as an argument."""
    return {"MASK": None} if f.mask is None else tensor_args(MASK="mask")


def rotation_args(f: SimpleNamespace) -> dict[str, Any]:
    """Returns signs and channel scales as arguments."""
    found = tensor_args(
        K_SIGNS="k_signs", V_SIGNS="v_signs", K_CHANNEL_SCALES="k_channel_scale", V_CHANNEL_SCALES="v_channel_scale"
    )
    return (
        found
        | stride_args(f.k_channel_scale, stride_k_channel_scales_="h")
        | stride_args(f.v_channel_scale, stride_v_channel_scales_="h")
    )


def pack_factor(fmt: KVFormat) -> int:
    """Returns the codes in a 16-bit word."""
    return 2 * fmt.values_per_element // fmt.storage.itemsize


def format_constants(f: SimpleNamespace) -> dict[str, Any]:
    """Returns constants of the stored codes, the query, and dequantization."""
    by_hand, (k, v) = launch.emulates_e4m3(f), pair_of(f)
    k_codes, v_codes = (
        StoredRowFormat(
            CODE=fmt.code,
            PACK=pack_factor(fmt),
            TOKEN_SCALES=fmt.scale == TOKEN_HEAD,
            BLOCK_SCALES=fmt.scale == BLOCK,
            E4M3_BY_HAND=by_hand,
            USE_PTX=launch.has_ptx(f),
            STRIDE_UNIT=stride_unit_to_prove_alignment(x, packed_strides(x), 8),
            SCALE_STRIDE_UNIT=stride_unit_to_prove_alignment(s, s.stride[:3], 16) if fmt.scale == BLOCK else 1,
        )
        for fmt, x, s in ((k, f.k_cache, f.k_scale_cache), (v, f.v_cache, f.v_scale_cache))
    )
    return {
        "K": k_codes,
        **v_codes,
        "BF16": k.code == "bf16",
        "TWO_TERM_Q": needs_two_term_query(f, k),
        "Q_AS_BYTES": by_hand and f.q.dtype == torch.float8_e4m3fn,
        # Left over by `dequant_16bit_words_to_tiles`; of int4 values nothing: the main loop multiplies accumulators.
        "K_RESIDUAL_SCALE": _inverse_power_of_2_dequant_factor(k, launch.has_ptx(f)),
        "V_RESIDUAL_SCALE": _inverse_power_of_2_dequant_factor(v, launch.has_ptx(f)) if v.code != "int4" else 1.0,
    }


def _inverse_power_of_2_dequant_factor(fmt: KVFormat, has_ptx: bool) -> float:
    """Returns the inverse of `dequant.dequant_tile_power_of_2_factor`; of int4, that of tiles with an odd number."""
    if fmt.code == "e2m1":
        return 2.0**14 if has_ptx else 2.0**7
    return 2.0**20 if fmt.code == "int4" and has_ptx else 1.0


def head_dim_and_packed_width_constants(f: SimpleNamespace) -> dict[str, int]:
    """Returns row sizes, in columns and in packed words."""
    d, dv, (k, v) = f.q.shape[2], f.out.shape[2], map(pack_factor, pair_of(f))
    return {
        "D": d,
        "DV": dv,
        "PACKED_K": d // k,
        "PACKED_V": dv // v,
        "BLOCK_D": max(16, launch.next_power_of_2(d // k)),
        "BLOCK_DV": max(16, launch.next_power_of_2(dv // v)),
    }


def request_block_size(requests: int) -> int:
    """Returns how many requests a kernel scans at once. Few sizes, since each is a kernel to compile."""
    return next((n for n in (1, 16, 64, 256, 512) if requests <= n), 1024)


def window_sinks_softcap_and_scale_constants(f: SimpleNamespace) -> dict[str, Any]:
    return {
        "WINDOW": f.window,
        "HAS_SINKS": f.sinks is not None,
        "HAS_SOFTCAP": f.softcap > 0,
        "HAS_K_SCALE": f.k_scale_t is not None,
        "K_SCALE_STRIDE": per_head_stride(f.k_scale_t),
        "HAS_V_SCALE": f.v_scale_t is not None,
        "V_SCALE_STRIDE": per_head_stride(f.v_scale_t),
    }


def kv_and_scale_cache_strides_in_stride_units(f: SimpleNamespace) -> dict[str, int]:
    """Returns strides of pages, slots and heads: packed codes in STRIDE_UNITs, stored scales in SCALE_STRIDE_UNITs."""
    found: dict[str, int] = {}
    constants = format_constants(f)
    keys = constants["K"]
    for side, x, scales, step, scale_step in (
        ("k", f.k_cache, f.k_scale_cache, keys.STRIDE_UNIT, keys.SCALE_STRIDE_UNIT),
        ("v", f.v_cache, f.v_scale_cache, constants["STRIDE_UNIT"], constants["SCALE_STRIDE_UNIT"]),
    ):
        found |= {f"stride_{side}_{letter}": n // step for letter, n in zip("psh", packed_strides(x), strict=True)}
        found |= {name: n // scale_step for name, n in stride_args(scales, **{f"stride_{side}_scales_": "psh"}).items()}
    return found


def per_head_stride(t: Any) -> int:
    return 1 if t is not None and t.shape[0] > 1 else 0


def packed_strides(x: Any) -> tuple[int, ...]:
    """Returns strides of page, slot and head in 16-bit words."""
    return tuple(n * x.dtype.itemsize // 2 for n in x.stride[:3])


def needs_two_term_query(f: SimpleNamespace, fmt: KVFormat) -> bool:
    """Whether q is multiplied as the sum of two bf16 tiles: over bf16 keys, where bf16 would round it."""
    turned = f.k_signs is not None or f.k_channel_scale is not None
    return fmt.code == "bf16" and (turned or f.q.dtype == torch.float16)
