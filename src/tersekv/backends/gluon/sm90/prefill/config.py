"""Compile-time configuration and tensor maps of the prefill kernel, made from facts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from .....formats import BLOCK, E4M3_MAX, E5M2_MAX, TENSOR, TOKEN_HEAD, KVFormat, kv_format, pair_of
from ....host import launch
from ....host.kernel_config import KernelConfig
from ..parts.hadamard import Rotation, rotation_config
from ..parts.tensor_maps import TypedAddress, make_tensor_map, why_no_tensor_map

ROWS_PER_WARPGROUP = 64  # query rows of a warpgroup
PART_COLUMNS = 128  # columns of a stage where heads are wider than 256
COLUMN_SHIFT = 16  # columns: 8 bytes of 4-bit codes
_OUT_MAX = {torch.float8_e4m3fn: E4M3_MAX, torch.float8_e5m2: E5M2_MAX}
_SWIZZLE = 128  # bytes: the widest panel of a row in shared memory


@dataclass(frozen=True)
class StoredFormat(KernelConfig):
    """How K or V is stored."""

    CODE: str  # KVFormat.code
    PACK: int  # codes in 16 bits
    TOKEN_SCALES: bool
    BLOCK_SCALES: bool
    PACKED_HEAD_STRIDE: int  # packed columns from head to head, which a tensor map has in one row; 0: it has heads


@dataclass(frozen=True)
class PrefillConfig(KernelConfig):
    """Constants that the kernel is compiled for."""

    K: StoredFormat
    V: StoredFormat
    CONVERTS_KV: bool  # codes are dequantized; else keys and values are multiplied as stored
    QK_8BIT: bool  # keys are multiplied as stored, e4m3 or int8, by an 8-bit query: only V is converted
    INT8_Q: bool  # then: a 16-bit query is quantized, to int8 times a scale of its row
    SCALES_FILL_K: bool  # then: a K stage is full once its tile's stored scales are in shared memory, too
    FP8_PV: bool  # P in e4m3 is multiplied by e4m3 V, which is transposed
    BF16: bool  # multiply in bf16; else fp16
    D: int  # columns of a key in shared memory, the head's rounded up
    DV: int  # of a value
    HEAD_DIM: int
    HEAD_DIM_V: int
    K_COLUMNS: int  # of a stage of K: all D, or a part
    V_COLUMNS: int
    PACKED_K: int  # packed columns (16 bits) of a stage of K
    PACKED_V: int
    COLUMN_SPLIT: bool  # heads wider than 256: both consumers have the same 64 rows, each half of V's columns
    CONSUMER_WARPS: int  # of a consumer: two warpgroups, or one of COLUMN_SPLIT
    CONSUMER_ROWS: int  # its query rows, 64 of a warpgroup
    ACC_COLUMNS: int  # columns of V that a consumer multiplies
    K_PARTS: int  # stages of a K tile
    V_PARTS: int
    BLOCK_N: int  # keys
    KEYS_PER_COPY: int  # of one TMA copy, all of one page
    PAGE: int
    STAGES: int  # of the pipelines of scales, and of P where warpgroups share it
    K_STAGES: int  # of the pipeline of 16-bit K tiles or their parts
    V_STAGES: int  # of V
    CODE_STAGES: int  # of the pipelines of packed codes; 0: none
    PING_PONG: bool  # warpgroups issue their MMAs in turns
    EARLY_PV: bool  # the last PV of a work tile starts before the wait for the next query
    HEADS: int
    GROUP: int
    HEADS_PER_TILE: int  # query heads of a work tile: adjacent rows of one token
    TOKENS_PER_TILE: int  # of a work tile
    HEAD_TILES: int  # work tiles of a block of tokens
    HAS_NEW_KV: bool  # K and V of the new tokens are arguments of the call
    WINDOW: int
    HAS_SINKS: bool
    HAS_LSE: bool
    HAS_SOFTCAP: bool
    HAS_SOFTMAX_SCALE: bool
    HAS_K_SCALE: bool
    K_SCALE_STRIDE: int
    HAS_V_SCALE: bool
    V_SCALE_STRIDE: int
    HAS_OUT_SCALE: bool
    OUT_MAX: float
    K_RESIDUAL_SCALE: float
    V_RESIDUAL_SCALE: float
    CONSUMER_REGISTERS: int  # of a thread of the first consumer
    SECOND_CONSUMER_REGISTERS: int
    STORED_K_SCALE_STRIDES: tuple[int, ...]  # of pages, slots and heads
    STORED_V_SCALE_STRIDES: tuple[int, ...]
    K_ROTATION: Rotation
    V_ROTATION: Rotation


def make_prefill_config(f: SimpleNamespace) -> PrefillConfig:
    """Returns the kernel's configuration for these facts."""
    k = kv_format(f.format)
    heads, group = f.k_cache.shape[2], f.q.shape[1] // f.k_cache.shape[2]
    heads_per_tile = min(group & -group, ROWS_PER_WARPGROUP)
    d, dv = _power_of_2_head_dims(f)
    max_head_dim = max(d, dv)
    qk_8bit, int8_q = _has_8bit_qk_and_int8_q(f, max_head_dim)
    block_n = 128 if max_head_dim <= 128 else 64
    has_codes = k.storage.itemsize == 1
    tiles = _column_and_stage_config_fields(f, d, dv, has_codes)
    k_side, v_side = _stored_formats(f, d, dv)
    registers = _first_and_second_consumer_registers(f, k_side, v_side, max_head_dim)
    return PrefillConfig(
        K=k_side,
        V=v_side,
        CONVERTS_KV=has_codes,
        QK_8BIT=qk_8bit,
        INT8_Q=int8_q,
        SCALES_FILL_K=qk_8bit and (k_side.TOKEN_SCALES or v_side.TOKEN_SCALES),
        FP8_PV=_has_fp8_pv(f, max_head_dim),
        BF16=k.storage == torch.bfloat16,
        D=d,
        DV=dv,
        HEAD_DIM=f.q.shape[2],
        HEAD_DIM_V=f.out.shape[2],
        PACKED_K=tiles["K_COLUMNS"] // k_side.PACK,
        PACKED_V=tiles["V_COLUMNS"] // v_side.PACK,
        **tiles,
        BLOCK_N=block_n,
        KEYS_PER_COPY=min(block_n, f.k_cache.shape[1] & -f.k_cache.shape[1]),
        PAGE=f.k_cache.shape[1],
        STAGES=2,
        CODE_STAGES=_num_code_stages(f, has_codes, max_head_dim),
        PING_PONG=_is_ping_pong(f, k_side, max_head_dim),
        EARLY_PV=_is_pv_early(f, max_head_dim),
        HEADS=heads,
        GROUP=group,
        HEADS_PER_TILE=heads_per_tile,
        TOKENS_PER_TILE=tiles["CONSUMER_ROWS"] // heads_per_tile,
        HEAD_TILES=f.q.shape[1] // heads_per_tile,
        HAS_NEW_KV=f.k is not None,
        WINDOW=f.window,
        HAS_SINKS=f.sinks is not None,
        HAS_LSE=f.lse is not None,
        HAS_SOFTCAP=f.softcap > 0,
        HAS_SOFTMAX_SCALE=f.softmax_scale_t is not None,
        HAS_K_SCALE=f.k_scale_t is not None,
        K_SCALE_STRIDE=_per_head_stride(f.k_scale_t),
        HAS_V_SCALE=f.v_scale_t is not None,
        V_SCALE_STRIDE=_per_head_stride(f.v_scale_t),
        HAS_OUT_SCALE=f.out_scale_t is not None,
        OUT_MAX=_OUT_MAX.get(f.out.dtype, 0.0),
        K_RESIDUAL_SCALE=_residual_scale(k_side),
        V_RESIDUAL_SCALE=_residual_scale(v_side),
        CONSUMER_REGISTERS=registers[0],
        SECOND_CONSUMER_REGISTERS=registers[1],
        STORED_K_SCALE_STRIDES=_stored_scale_strides(f.k_scale_cache),
        STORED_V_SCALE_STRIDES=_stored_scale_strides(f.v_scale_cache),
        K_ROTATION=rotation_config(f.k_signs, f.k_channel_scale),
        V_ROTATION=rotation_config(f.v_signs, f.v_channel_scale),
    )


def is_column_split(f: SimpleNamespace) -> bool:
    """Returns whether both consumers have the same rows: acc_o of 64 rows and 512 columns fits no warpgroup."""
    return max(f.q.shape[2], f.out.shape[2]) > 256


def _power_of_2_head_dims(f: SimpleNamespace) -> tuple[int, int]:
    """Returns the columns of K and V in shared memory."""
    least = (PART_COLUMNS, 2 * PART_COLUMNS) if is_column_split(f) else (32, 32)
    d, dv = (
        max(n, launch.next_power_of_2(columns))
        for n, columns in zip(least, (f.q.shape[2], f.out.shape[2]), strict=True)
    )
    return d, dv


def _column_and_stage_config_fields(f: SimpleNamespace, d: int, dv: int, has_codes: bool) -> dict[str, Any]:
    """Returns how tiles lie in stages: whole, or in parts of PART_COLUMNS, and then one tile of V."""
    if not is_column_split(f):
        return {
            "COLUMN_SPLIT": False, "CONSUMER_WARPS": 8, "CONSUMER_ROWS": 2 * ROWS_PER_WARPGROUP, "ACC_COLUMNS": dv,
            "K_COLUMNS": d, "K_PARTS": 1, "K_STAGES": 2, "V_COLUMNS": dv, "V_PARTS": 1, "V_STAGES": 2,
        }  # fmt: skip
    k_parts, v_parts = -(-f.q.shape[2] // PART_COLUMNS), dv // PART_COLUMNS
    return {
        "COLUMN_SPLIT": True, "CONSUMER_WARPS": 4, "CONSUMER_ROWS": ROWS_PER_WARPGROUP, "ACC_COLUMNS": dv // 2,
        "K_COLUMNS": PART_COLUMNS, "K_PARTS": k_parts, "K_STAGES": 3 if has_codes else 5,
        "V_COLUMNS": PART_COLUMNS, "V_PARTS": v_parts, "V_STAGES": v_parts,
    }  # fmt: skip


def _stored_formats(f: SimpleNamespace, d: int, dv: int) -> tuple[StoredFormat, StoredFormat]:
    k, v = pair_of(f)
    k_stride, v_stride = 0, 0
    if not is_column_split(f):
        k_stride = _packed_head_stride(k, f.k_cache, f.q.shape[2], d)
        v_stride = _packed_head_stride(v, f.v_cache, f.out.shape[2], dv)
    return _stored_format(k, k_stride), _stored_format(v, v_stride)


def _stored_format(fmt: KVFormat, packed_head_stride: int) -> StoredFormat:
    pack = 2 * fmt.values_per_element // fmt.storage.itemsize
    return StoredFormat(fmt.code, pack, fmt.scale == TOKEN_HEAD, fmt.scale == BLOCK, packed_head_stride)


def _packed_head_stride(fmt: KVFormat, cache: Any, head_dim: int, columns: int) -> int:
    """Returns StoredFormat.PACKED_HEAD_STRIDE, other than 0 for 4-bit codes alone.

    TMA wants strides and inner coordinates of 16 bytes. Rows of an odd number of 8 bytes, of every other head, begin in
    the middle of 16: a copy begins 8 bytes earlier, and the row 16 columns later in its tile (`first_column_of_head`).
    """
    row_bytes = head_dim // 2
    adjacent = cache.shape[2] > 1 and cache.stride[2] == row_bytes
    shiftable = fmt.values_per_element == 2 and row_bytes % 16 == 8 and head_dim + COLUMN_SHIFT <= columns
    return row_bytes // 2 if adjacent and shiftable else 0


def _residual_scale(side: StoredFormat) -> float:
    """Returns the power of two that dequantizing nvfp4 leaves out: see `parts/dequant.dequant_e2m1_to_4_operands`."""
    return 64.0 if side.BLOCK_SCALES else 1.0


def _has_fp8_pv(f: SimpleNamespace, max_head_dim: int) -> bool:
    """Returns whether PV runs in e4m3. With 256 columns both halves of acc_o and of PV spill: 414 TFLOP/s against 725
    of PV in fp16 (8192 tokens, 24/4 heads, H100, 2026-11-26)."""
    qk_8bit, int8_q = _has_8bit_qk_and_int8_q(f, max_head_dim)
    are_e4m3_of_tensors = all((side.code, side.scale) == ("e4m3", TENSOR) for side in pair_of(f))
    return qk_8bit and not int8_q and are_e4m3_of_tensors and f.precision == "fast" and max_head_dim <= 128


def _is_ping_pong(f: SimpleNamespace, k: StoredFormat, max_head_dim: int) -> bool:
    """Returns whether warpgroups issue their MMAs in turns: over 16-bit caches.

    H200, 2026-11-28, TFLOP/s without and with turns: bf16 8192 599 and 615, 8 × 1024 440 and 473. Beside a converter
    registers spill: fp8 548 and 504, int8 438 and 382.
    """
    return f.k is None and k.PACK == 1 and max_head_dim <= 256


def _is_pv_early(f: SimpleNamespace, max_head_dim: int) -> bool:
    """Returns whether the last PV of a work tile starts before the next query is prepared. acc_o takes registers while
    it is; and V of COLUMN_SPLIT is waited for later."""
    return max_head_dim <= 128 and not _has_fp8_pv(f, max_head_dim)


def _num_code_stages(f: SimpleNamespace, has_codes: bool, max_head_dim: int) -> int:
    """Returns the stages of packed codes: two where they fit, and where QK reads them as they are."""
    if not has_codes:
        return 0
    qk_8bit, _ = _has_8bit_qk_and_int8_q(f, max_head_dim)
    if max_head_dim > 256:
        return 4 if qk_8bit else 2
    return 2 if max_head_dim <= 128 or qk_8bit else 1


def _first_and_second_consumer_registers(
    f: SimpleNamespace, k: StoredFormat, v: StoredFormat, max_head_dim: int
) -> tuple[int, int]:
    """Returns the registers of a thread of each consumer; the converter gets what is left.

    Heads of 256: with 216 the converter spills, with 200 ptxas serializes the MMAs.

    QK in 8 bits with token scales, heads of 128: bytes that spill, outside long loops, with 208, 216 and 224: int8 80,
    48 and 120 (Triton 3.6).

    16/4 heads of 512 with 208 and 176, 216 and 168, 232 and 160: fp8 339, 345 and 346; int8 294, 299 with the last two.
    """
    if k.PACK == 1:
        return 240, 240
    if max_head_dim > 256:  # the second one computes no scores
        return 232, 160
    qk_8bit, _ = _has_8bit_qk_and_int8_q(f, max_head_dim)
    registers = 216 if (qk_8bit and k.TOKEN_SCALES) or _has_fp8_pv(f, max_head_dim) else 208
    if max_head_dim > 128:
        registers = 216 if qk_8bit else 208
    return registers, registers


def _has_8bit_qk_and_int8_q(f: SimpleNamespace, max_head_dim: int) -> tuple[bool, bool]:
    """Returns whether QK runs in 8 bits, and INT8_Q: not with new K and V, which are 16 bits.

    An e4m3 query, unless it is rotated: 8-bit WGMMA keeps about 14 bits of its e4m3 sums. Of up to 128 columns, four
    steps, a score of 12 is off by 0.02 (H100, 2026-11-27); longer sums only with precision="fast".

    precision="fast", int8 keys with a scale each: a 16-bit query is quantized per row, which moves outputs by 6.5e-3
    where scores are N(0, 1). Over e4m3 keys one e4m3 number would move them by 2.7e-2, 4.7e-2 at twice the scores, and
    the sum of two gains 3% (444 → 456 TFLOP/s, H200, 2026-11-28): a 16-bit query meets converted keys.
    """
    k, is_fast = kv_format(f.format), f.precision == "fast"
    if f.k is not None:
        return False, False
    if (k.code, f.q.dtype) == ("e4m3", torch.float8_e4m3fn):
        is_as_stored = not rotation_config(f.k_signs, f.k_channel_scale).ENABLED
        return is_as_stored and (max_head_dim <= 128 or is_fast), False
    int8_q = is_fast and (k.code, k.scale) == ("int8", TOKEN_HEAD) and f.q.dtype.itemsize == 2 and max_head_dim <= 256
    return int8_q, int8_q


def config_of_new_kv(cfg: PrefillConfig) -> PrefillConfig:
    """Returns `cfg` for tiles of new K and V: 16 bits, no scales, no rotation."""
    plain = rotation_config(None, None)
    k, v = (replace(side, TOKEN_SCALES=False, BLOCK_SCALES=False) for side in (cfg.K, cfg.V))
    return replace(cfg, CONVERTS_KV=False, K=k, V=v, K_ROTATION=plain, V_ROTATION=plain)


def max_work_tiles(f: SimpleNamespace, cfg: PrefillConfig) -> int:
    """Returns an upper bound of the number of work tiles."""
    return (-(-f.q.shape[0] // cfg.TOKENS_PER_TILE) + f.seq_lens.shape[0]) * cfg.HEAD_TILES


def why_not_tensor_maps(f: SimpleNamespace) -> str | None:
    """Returns why TMA cannot copy these tensors, or None."""
    cfg = make_prefill_config(f)
    for name, x in ((name, getattr(f, name)) for name in tma_tensor_names(f)):
        if not x.aligned:
            return f"wants {name} on a multiple of 16 bytes"
        dtype, shape, strides, box = _dtype_shape_strides_and_box(x, name, cfg)
        why_not = why_no_tensor_map(shape, strides, box, dtype.itemsize, _SWIZZLE)
        if why_not is not None:
            return f"wants {name} as the copy engine takes it, got {why_not}"
    return None


def tma_tensor_names(f: Any) -> tuple[str, ...]:
    """Returns the names of the tensors that TMA reads."""
    return ("q", "k_cache", "v_cache") + (() if f.k is None else ("k", "v"))


def tensor_map_of_argument(x: torch.Tensor, arg_name: str, cfg: PrefillConfig) -> Any:
    """Returns the tensor map of the tensor `arg_name`."""
    dtype, shape, strides, box = _dtype_shape_strides_and_box(x, arg_name, cfg)
    width = min(box[-1] * dtype.itemsize, _SWIZZLE)
    layout = gl.NVMMASharedLayout(width, 8 * dtype.itemsize, len(box))
    return make_tensor_map(TypedAddress(x, dtype), shape, strides, box, layout)


def _dtype_shape_strides_and_box(
    x: Any, arg_name: str, cfg: PrefillConfig
) -> tuple[torch.dtype, list[int], list[int], list[int]]:
    """Returns (dtype, shape, strides, box): rows [tokens, heads, columns], a cache [pages, heads, slots, packed].

    Pages are a dimension of their own: their stride may be any multiple of 16 bytes.
    """
    strides = x.stride() if callable(x.stride) else x.stride
    size = x.dtype.itemsize
    if arg_name in ("q", "k", "v"):
        num_tokens, heads, d = x.shape
        # The stride of a single token or head may be anything, which a tensor map refuses.
        s_t, s_h = strides[0] if num_tokens > 1 else heads * d, strides[1] if heads > 1 else d
        query_box = [cfg.TOKENS_PER_TILE, cfg.HEADS_PER_TILE] if arg_name == "q" else [cfg.BLOCK_N, 1]
        return (
            x.dtype, [num_tokens, heads, d], [s_t, s_h, 1],
            [*query_box, min(cfg.DV if arg_name == "v" else cfg.D, _SWIZZLE // size)],
        )  # fmt: skip
    pages, slots, heads, width = x.shape
    columns_16bit, columns_packed = (cfg.D, cfg.PACKED_K) if arg_name == "k_cache" else (cfg.DV, cfg.PACKED_V)
    dtype, elements_per_view = (torch.int16, 2 // size) if cfg.CODE_STAGES else (x.dtype, 1)
    s_p, s_s, s_h = (0 if n % elements_per_view else n // elements_per_view for n in strides[:3])  # 0: TMA refuses it
    columns = min(columns_packed if cfg.CODE_STAGES else columns_16bit, _SWIZZLE // 2)
    s_p, s_h = (
        s_p if pages > 1 else slots * heads * width // elements_per_view,
        s_h if heads > 1 else width // elements_per_view,
    )
    if (cfg.K if arg_name == "k_cache" else cfg.V).PACKED_HEAD_STRIDE > 0:
        heads, width, s_h = 1, heads * width, s_s
    return (
        dtype, [pages, heads, slots, width // elements_per_view], [s_p, s_h, s_s, 1],
        [1, 1, cfg.KEYS_PER_COPY, columns],
    )  # fmt: skip


def _stored_scale_strides(x: Any) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else tuple(x.stride[:3])


def _per_head_stride(t: Any) -> int:
    return 1 if t is not None and t.shape[0] > 1 else 0
