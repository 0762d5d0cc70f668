"""Tile configuration of MLA prefill, from facts. Nothing is timed at run time.

`attention_tile_candidates` and `gemm_tile_candidates` list what is worth measuring on a chip;
`choose_mla_prefill_config` picks the first. Entries of sm_90 for heads of up to 128 dims and for fp8 are ordered by
time on an H200; the others by registers, shared memory and instructions of the compiled kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from ...host.launch import emulates_e4m3, has_exact_fp8_cast, next_power_of_2


@dataclass(frozen=True, slots=True)
class AttentionTile:
    block_m: int  # queries
    block_n: int  # keys
    num_warps: int
    num_stages: int
    tma: bool


@dataclass(frozen=True, slots=True)
class GemmTile:
    block_m: int  # rows of latents
    block_n: int  # rows of the weight
    block_k: int
    num_warps: int
    num_stages: int
    tma: bool


@dataclass(frozen=True, slots=True)
class MLAPrefillConfig:
    attention: AttentionTile
    product: GemmTile
    native_fp8: bool  # the chip multiplies e4m3 (else: bytes, converted to fp16)
    native_casts: bool  # its casts to fp8 give the nearest code (else: bit arithmetic)


# Candidates of each chip, best guess first; 0: chips that are not listed (AMD). Attention: (block_m, block_n, warps,
# stages), for heads of up to 128 dims and of up to 256. An H200, 4096 tokens, 128 and 16 heads of 192 and 128 dims, µs:
# 1559 and 223, 1594 and 249, 1841 and 293, 2068 and 271 in the order of the first row.
_ATTENTION_TILES = {
    90: ((128, 64, 8, 3), (128, 128, 8, 2), (128, 64, 8, 2), (64, 128, 4, 2)),
    80: ((128, 64, 8, 3), (128, 32, 8, 3), (64, 32, 4, 2)),
    89: ((128, 32, 8, 2), (64, 32, 4, 2), (64, 32, 4, 1)),
    0: ((128, 64, 8, 1), (64, 32, 4, 1)),
}
_ATTENTION_TILES_WIDE_HEADS = {
    90: ((64, 64, 8, 2), (64, 32, 8, 2)),
    80: ((64, 32, 8, 2), (64, 32, 8, 1)),
    89: ((64, 32, 8, 1), (32, 32, 4, 1)),
    0: ((64, 32, 8, 1),),
}
# GEMMs: (block_m, block_n, block_k, warps, stages). An H200, 4096 × 32768 × 512, µs: (64, 128, 128, 4, 3) 189,
# (128, 128, 128, 8, 4) 268. Programs that keep their rows of the weight in shared memory and walk over the latents were
# slower: 206 with blocks of 64 latents, 247 of 128; at 4096 × 4096 × 512 30.4, where the first entry takes 27.6.
_GEMM_TILES_FP8 = {
    90: ((64, 128, 128, 4, 3), (128, 128, 128, 8, 4), (128, 128, 128, 8, 3)),
    80: ((128, 128, 32, 8, 3), (128, 128, 64, 8, 3)),
    89: ((128, 128, 64, 8, 3), (128, 128, 128, 8, 2)),
    0: ((64, 64, 64, 4, 1),),
}
_GEMM_TILES_16_BIT = {
    90: ((128, 256, 64, 8, 3), (128, 128, 64, 8, 4)),
    80: ((128, 128, 32, 8, 4),),
    89: ((128, 128, 32, 8, 3),),
    0: ((64, 64, 32, 4, 1),),
}
_SHARED_MEMORY_BYTES = {90: 227 << 10, 80: 163 << 10, 89: 99 << 10, 0: 1 << 20}  # bytes of a block


def attention_tile_candidates(f: SimpleNamespace) -> list[AttentionTile]:
    """Returns the tiles that fit, best guess first."""
    arch, table_arch, rope = f.arch or 0, _arch_of_table(f.arch or 0), f.kpe.shape[-1]
    dims = (f.q.shape[2] - rope, rope, f.out.shape[2])
    tma = arch >= 90 and all(d >= 16 and d & (d - 1) == 0 for d in dims)
    tiles = (_ATTENTION_TILES_WIDE_HEADS if max(dims) > 128 else _ATTENTION_TILES)[table_arch]
    if table_arch == 90 and not tma:
        tiles = tuple(t for t in tiles if t[:2] != (128, 128))  # spills where loads are masked
    dims = tuple(max(16, next_power_of_2(d)) for d in dims)
    return [
        AttentionTile(*t, tma)
        for t in tiles
        if _attention_smem_bytes(table_arch, t, dims) <= _SHARED_MEMORY_BYTES[table_arch]
    ]


def gemm_tile_candidates(f: SimpleNamespace) -> list[GemmTile]:
    """Returns the up-projection's tiles, best guess first."""
    arch, weight = f.arch or 0, f.kv_b_proj
    tma = (
        arch >= 90
        and weight.aligned
        and all(n * weight.dtype.itemsize % 16 == 0 for n in (f.ckv.shape[-1], weight.stride[0]))
        and weight.shape[0] % 8 == 0
    )
    tiles = (_GEMM_TILES_FP8 if weight.dtype.itemsize == 1 else _GEMM_TILES_16_BIT)[_arch_of_table(arch)]
    return [GemmTile(*t, tma) for t in tiles]


def choose_mla_prefill_config(f: SimpleNamespace) -> MLAPrefillConfig:
    attention, product = attention_tile_candidates(f)[0], gemm_tile_candidates(f)[0]
    return MLAPrefillConfig(attention, product, not emulates_e4m3(f), has_exact_fp8_cast(f))


def _arch_of_table(arch: int) -> int:
    """Returns the chip whose table serves: with the same instructions and no more shared memory."""
    if arch >= 120 or 80 < arch < 90:
        return 89
    return 90 if arch >= 90 else 80 if arch == 80 else 0


def _attention_smem_bytes(table_arch: int, tile: tuple[int, int, int, int], dims: tuple[int, ...]) -> int:
    """Returns shared memory of the attention kernel, fitted to compiled ones: wgmma reads every stage of K from it."""
    block_m, block_n, _, stages = tile
    nope, rope, dim_v = dims
    q, kv = 2 * block_m * (nope + rope), 2 * block_n * (nope + rope + dim_v)
    if table_arch == 90:
        return q + stages * kv + 2048
    return q + (stages - 1) * kv + 2 * block_n * (dim_v + block_m)
