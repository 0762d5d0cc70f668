"""Paged MLA decode on Hopper: chooses the kernel, CTAs and work tiles; combines only where keys are split."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ...formats import LATENT_SINKS, LISTS, LSE_OF_KEYS, UE8M0, latent_format
from ..host import launch
from ..host.attention_launches import (
    attention_launches,
    output_and_workspace_args,
    output_lse_softmax_scale_and_varlen_constants,
    page_table_lengths_and_softmax_scale_args,
)
from ..host.bind import (
    BoundLaunches,
    HostAction,
    KernelLaunch,
    LaunchSequence,
    TensorArg,
    TensorMapArg,
    Workspace,
    tensor_args,
)
from ..host.key_lists import facts_with_listed_rows_as_requests
from ..triton.mla_decode import entry as portable
from ..triton.mla_decode.config import TileConfig
from ..triton.parts.listed_rows import LENS, ROWS, compact_listed_rows_launch, listed_rows_slices
from .sm90.mla_decode.combine import combine_kernel
from .sm90.parts.tensor_maps import make_tensor_map

BLOCK_N = 64  # keys
CHUNK = 64  # packed columns (16 bits) of a latent row in one copy tile, 128 bytes
MAX_RANK, MAX_ROPE = 512, 64
MAX_UNSPLIT_BLOCKS = 4  # n_blocks of a work tile that is never split
_SMALL_M_ROWS = 32  # with 16-bit latents, up to this many query rows are not padded to 64
SMALL_PAGES = (16, 32)  # and multiples of BLOCK_N
MAX_LISTED_KEYS = 1 << 26  # of all rows: 256 MB of workspace
_TESTED_CODES = ("bf16", "e4m3")  # run on a GPU
_QUERY_DTYPES = (torch.bfloat16, torch.float8_e4m3fn)

SUPPORTS = (LISTS, LATENT_SINKS, LSE_OF_KEYS)


class MLADecodeConfig(NamedTuple):
    block_m: int  # query rows of a work tile
    num_stages: int  # KV tiles in shared memory
    ctas_per_sm: int = 1
    num_consumers: int = 1  # warpgroups that alternate over tiles of 8-bit latents
    min_blocks: int = 1  # smallest CTA range
    three_warpgroups: bool = False  # one warpgroup for QK and softmax, two for PV
    heads_per_block: int = 0  # heads of a block, where it has fewer than `block_m` rows


class Config(NamedTuple):
    constants: portable.Constants
    num_ctas: int  # of the split pass
    max_m_blocks: int  # of a request, for one block of heads
    combine_cfg: portable.Constants  # of the combine kernel
    cache_matrices: tuple[portable.CacheMatrix, ...]  # of ckv, kpe and stored scales
    launches: LaunchSequence | HostAction  # without a combine where nothing is split


def why_not(f: SimpleNamespace) -> str | None:
    fmt = latent_format(f.format)
    if fmt.code not in _TESTED_CODES or fmt.scale == UE8M0 or launch.why_not_format_or_device(f):
        return f"has no {f.format}"
    rank, rope = f.ckv.shape[2], f.kpe.shape[2]
    if rank > MAX_RANK or rank % 16 or not 0 < rope <= MAX_ROPE or rope % 16:
        return f"wants latents of multiples of 16, up to {MAX_RANK} + {MAX_ROPE}, got {rank} + {rope}"
    if (f.indices is not None or f.ckv_scale_cache is not None) and (rank, rope) != (MAX_RANK, MAX_ROPE):
        what = "lists" if f.indices is not None else f.format  # rows of listed keys are copied whole, by pointer
        return f"wants latents of {MAX_RANK} + {MAX_ROPE} with {what}, got {rank} + {rope}"
    page, q = f.ckv.shape[1], f.q_nope.dtype
    if f.indices is not None and f.out.shape[0] * f.indices.shape[-1] * f.block_size > MAX_LISTED_KEYS:
        return (
            f"wants lists of {MAX_LISTED_KEYS} keys in all, got {f.out.shape[0] * f.indices.shape[-1] * f.block_size}"
        )
    if f.indices is None and page % BLOCK_N and page not in SMALL_PAGES:
        return f"wants pages of {', '.join(map(str, SMALL_PAGES))} or a multiple of {BLOCK_N}, got {page}"
    if q not in _QUERY_DTYPES:
        return f"wants a bfloat16 or float8_e4m3fn q, got {str(q).removeprefix('torch.')}"
    caches = [x for x in (f.ckv, f.kpe, f.ckv_scale_cache) if x is not None]
    # `_ckv_kpe_and_scale_matrices` counts 16-bit elements, and would round.
    if any(n * x.dtype.itemsize % 16 for x in caches for n in x.stride[:2]) or None in _ckv_kpe_and_scale_matrices(f):
        return "wants a cache whose rows lie at equal distances, multiples of 16 bytes"
    return None


def choose_config(f: SimpleNamespace) -> MLADecodeConfig:
    """Returns the kernel's shape. Measured on an H200, 2026-11-21, 128 × 8K (notes/mla.md has more):

    fp8_e4m3, 32 heads: two CTAs of 32 rows 188 µs, with an e4m3 query 165; one CTA with two alternating warpgroups 182
    and 161, but 60 requests of up to 1024 43 for 34; three_warpgroups with 64 rows, half of them padding, 254 and 197.
    Few tiles of 32 heads are not compute-bound, and go in two blocks of 16 rows: 1 × 8K 15.7 → 12.0 µs, 4 × 4K
    19.6 → 13.5, 16 × 8K 42.5 → 38.9, but 64 × 4K 63.8 → 67.1; fp8_ds_mla 18.8 → 14.1, 21.4 → 16.4, 50.2 → 47.8, and 41
    of up to 4260 (2026-11-28) 70.3 → 50.5.

    Lists of 16 heads, H100, 128 × 2048: two alternating warpgroups of one CTA, so that more tiles are in flight,
    fp8_ds_mla 95 → 86 µs, fp8_e4m3 79 → 72; 100 × 2048 88 → 82.

    bf16, up to 32 query rows: a kernel that does not pad them to 64. 16 heads, 1 × 8K 12.6 → 10.8 µs, 16 × 8K 47.8 →
    45.2, 64 × 4K 81.9 → 79.8, 60 requests of up to 1024 31.0 → 24.7; 128 × 8K 285.6 → 282.3; 32 heads, 16 × 8K 51.7 →
    49.0, 64 × 4K and 128 × 8K even.
    """
    heads, has_group_scales = f.q_nope.shape[1], f.ckv_scale_cache is not None
    rows, stages = f.max_q_len * heads, 2 * MAX_RANK // _padded_rank(f)
    if f.ckv.dtype.itemsize == 2:
        n = choose_num_head_blocks_16bit(f)
        rows //= n
        return MLADecodeConfig(
            block_m=16 if rows <= 16 else 32 if rows <= _SMALL_M_ROWS else 64,
            num_stages=stages if rows <= _SMALL_M_ROWS else 2,
            heads_per_block=heads // n if n > 1 else 0,
        )
    if rows <= 16 and f.indices is not None and max_total_blocks(f) >= 8 * launch.num_sms(f):
        return MLADecodeConfig(block_m=16, num_stages=4 if has_group_scales else 5, num_consumers=2)
    if (
        16 < rows <= 32
        and heads % 2 == 0
        and max_total_blocks(f) <= (24 if has_group_scales else 16) * launch.num_sms(f)
    ):
        return MLADecodeConfig(block_m=16, num_stages=stages, ctas_per_sm=2, heads_per_block=heads // 2)
    if rows <= 16 or (rows <= 32 and not has_group_scales):
        return MLADecodeConfig(block_m=16 if rows <= 16 else 32, num_stages=stages, ctas_per_sm=2)
    if rows <= 32:
        return MLADecodeConfig(block_m=32, num_stages=3, num_consumers=2)
    # As many stages as fit: the query takes 36 KB, or 72 as two terms.
    stages = 4 if f.q_nope.dtype == torch.float8_e4m3fn and not has_group_scales else 3
    return MLADecodeConfig(
        block_m=64, num_stages=stages, three_warpgroups=True, heads_per_block=32 if uses_head_blocks_of_32(f) else 0
    )


def _padded_rank(f: SimpleNamespace) -> int:
    """Returns the columns of a latent row in shared memory: those past the rank are out of bounds, and TMA fills them
    with zeros. `three_warpgroups` has MAX_RANK."""
    return MAX_RANK if f.ckv.shape[2] > MAX_RANK // 2 else MAX_RANK // 2


def _padded_row_constants(padded_rank: int, pack: int, pack_pe: int) -> dict[str, Any]:
    """Returns constants of a padded row in shared memory, and of rows of partial results. These start at 32-byte
    sectors: 5 µs less at 1 × 8K, 128 heads."""
    words = padded_rank // pack
    return {
        "BLOCK_DV": words, "CHUNKS": words // CHUNK, "BLOCK_PE": MAX_ROPE // pack_pe, "PARTIAL_COLUMNS": padded_rank + 8
    }  # fmt: skip


def configure(f: SimpleNamespace, chosen_config: MLADecodeConfig | None = None) -> Config:
    """Returns the launches of these facts."""
    listed_rows, f = _listed_rows(f), facts_with_listed_rows_as_requests(f, f.ckv.shape[1])
    config, is_16_bit = chosen_config or choose_config(f), f.ckv.dtype.itemsize == 2
    heads, requests = f.q_nope.shape[1], f.seq_lens.shape[0]
    num_head_blocks = (
        heads // config.heads_per_block
        if config.heads_per_block
        else choose_num_head_blocks(f, config.block_m, launch.num_sms(f) * config.ctas_per_sm)
    )
    cache_matrices = tuple(matrix for matrix in _ckv_kpe_and_scale_matrices(f) if matrix is not None)
    fmt, tile_config = (
        latent_format(f.format),
        TileConfig(BLOCK_N, config.block_m, CHUNK, config.num_stages, 4, None, 1, config.min_blocks, True),
    )
    padded_rank = MAX_RANK if config.three_warpgroups else _padded_rank(f)
    constants = (
        portable._latent_format_and_operand_constants(f, fmt)
        | portable._shape_tile_and_partial_layout_constants(f, fmt, tile_config, num_head_blocks, True)
        | output_lse_softmax_scale_and_varlen_constants(f)
        | portable._sinks_and_v_scale_constants(f)
    )
    constants |= _padded_row_constants(padded_rank, constants["PACK"], constants["PACK_PE"])
    constants["BLOCK_B"] = max(constants["BLOCK_B"], 128)  # one kernel for all small batches
    if listed_rows:  # pages are no longer looked up
        constants |= {"GATHER_ROWS": True, "PAGE": BLOCK_N}
    max_m_blocks = -(-f.max_q_len * constants["GROUP"] // config.block_m)
    num_work_tiles = max(requests, 1) * max_m_blocks * num_head_blocks
    num_ctas = max(launch.num_sms(f) * config.ctas_per_sm // num_head_blocks, 1) * num_head_blocks
    one_work_tile_per_cta = assigns_whole_work_tiles_to_ctas(f, num_work_tiles, num_ctas)
    if one_work_tile_per_cta:
        num_ctas = num_work_tiles
    cfg = portable.Constants(**constants, UNSPLIT=one_work_tile_per_cta)
    combine_cfg = (
        replace(cfg, PACK=1, BLOCK_DV=padded_rank) if config.three_warpgroups else cfg
    )  # three_warpgroups stores columns in order
    kernel, outputs = _select_kernel(is_16_bit, config), output_and_workspace_args(f) | tensor_args(SINKS="sinks")
    arguments = (
        portable.kv_scale_and_query_tensor_args(f)
        | page_table_lengths_and_softmax_scale_args(f)
        | outputs
        | _tensor_map_and_oob_row_args(f, cfg, cache_matrices)
    )
    arguments |= _listed_row_gather_args_or_placeholders(f, bool(listed_rows))
    arguments |= {"max_m_blocks": max_m_blocks, "STAGES": config.num_stages, "cfg": cfg}
    if "NUM_CONSUMERS" in kernel.arg_names:  # of `small_m`
        arguments["NUM_CONSUMERS"] = config.num_consumers
    max_registers = _choose_max_registers(is_16_bit, config)
    split_launch = KernelLaunch(kernel, (num_ctas,), arguments, num_warps=4, maxnreg=max_registers, launch_pdl=True)
    combine_launch = (
        None
        if one_work_tile_per_cta
        else _make_combine_launch(f, config, combine_cfg, max_m_blocks, num_work_tiles, num_ctas)
    )
    # Partial states of splits, then SPLIT_METADATA.
    workspace_floats = 2 * num_ctas * cfg.BLOCK_M * cfg.PARTIAL_COLUMNS + 2 * requests * max_m_blocks * num_head_blocks
    launches = attention_launches(f, split_launch, combine_launch, workspace_floats)
    launches = _prepend_listed_rows_launch(f, listed_rows, launches, workspace_floats)
    return Config(cfg, num_ctas, max_m_blocks, combine_cfg, cache_matrices, launches)


def _listed_rows(f: SimpleNamespace) -> list[KernelLaunch]:
    """Returns the launch that turns lists into rows of the cache; none without lists."""
    return [] if f.indices is None or 0 in f.indices.shape else [compact_listed_rows_launch(f, _rows_per_page(f.ckv))]


def _prepend_listed_rows_launch(
    f: SimpleNamespace,
    listed_rows_launches: list[KernelLaunch],
    launches: LaunchSequence | HostAction,
    workspace_floats: int,
) -> LaunchSequence | HostAction:
    """Returns the launches behind that of listed rows, which shares their workspace."""
    if not listed_rows_launches or not launches.kernel_launches:
        return launches
    workspace = Workspace(workspace_floats, listed_rows_slices(f))
    return LaunchSequence(*listed_rows_launches, *launches.kernel_launches, workspace=workspace)


def _choose_max_registers(is_16_bit: bool, config: MLADecodeConfig) -> int:
    """Returns the registers of a thread. The producer warp has three idle ones beside it: registers are allocated by
    warpgroup. Of two warpgroups the consumer takes 232 (`small_m`): 168 each leave 104 to the producer."""
    if config.three_warpgroups:
        warpgroups = 4
    else:
        warpgroups = 3 if (is_16_bit and config.block_m > _SMALL_M_ROWS) or config.num_consumers == 2 else 2
    return min(65536 // (128 * warpgroups * config.ctas_per_sm), 168) // 8 * 8


def _listed_row_gather_args_or_placeholders(f: SimpleNamespace, has_listed_rows: bool) -> dict[str, Any]:
    """Returns the arguments by which rows of listed keys are copied, None and 0 without; pitches in 16 bytes."""
    parts = {"ckv": f.ckv, "kpe": f.kpe, "scale": f.ckv_scale_cache}
    pitches = {
        f"{name}_row_pitch_16_bytes": x.stride[1] * x.dtype.itemsize // 16 if has_listed_rows and x is not None else 0
        for name, x in parts.items()
    }
    if not has_listed_rows:
        return pitches | {"CKV": None, "KPE": None, "SCALES": None}
    tables = {"PAGE_TABLE": TensorArg(ROWS), "SEQ_LENS": TensorArg(LENS)}
    num_keys = f.indices.shape[-1] * f.block_size
    return pitches | tensor_args(CKV="ckv", KPE="kpe", SCALES="ckv_scale_cache") | tables | {"stride_table_b": num_keys}


def _tensor_map_and_oob_row_args(
    f: SimpleNamespace, cfg: portable.Constants, cache_matrices: tuple[portable.CacheMatrix, ...]
) -> dict[str, Any]:
    """Returns tensor maps of ckv, kpe and stored scales, where present, as arguments of the split pass."""
    names, words = ("ckv", "kpe", "ckv_scale_cache"), (CHUNK, cfg.BLOCK_PE, cache_matrices[-1].columns)
    maps = zip(("CKV_MAP", "KPE_MAP", "SCALES_MAP"), names, cache_matrices, words, strict=False)
    found: dict[str, Any] = {
        argument: TensorMapArg(
            name, partial(_make_tensor_map, cache_matrix=matrix, rows_per_copy=min(cfg.PAGE, BLOCK_N), words=n)
        )
        for argument, name, matrix, n in maps
    }
    oob_row = max((matrix.rows for matrix in cache_matrices), default=0)
    return {"SCALES_MAP": None} | found | {"oob_row": oob_row, "scale_rows_per_page": _rows_per_page(f.ckv_scale_cache)}


def _make_combine_launch(
    f: SimpleNamespace, config: MLADecodeConfig, combine_cfg: portable.Constants, max_m_blocks: int,
    num_work_tiles: int, num_ctas: int,
) -> KernelLaunch:  # fmt: skip
    num_rows = min(config.block_m, f.max_q_len * combine_cfg.GROUP)
    padded_rank = combine_cfg.PACK * combine_cfg.BLOCK_DV
    rows, num_splits, columns, warps = _choose_combine_rows_splits_columns_warps(
        num_rows, num_work_tiles, num_ctas, padded_rank
    )
    tensors = tensor_args(CU_SEQLENS_Q="cu_seqlens_q", SINKS="sinks", KV_SCALE="kv_scale_t")
    arguments = output_and_workspace_args(f) | tensors | {
        "kv_scale": f.kv_scale, "num_ctas": num_ctas, "max_m_blocks": max_m_blocks,
        "COMBINE_ROWS": rows, "SPLITS_PER_STEP": num_splits, "COMBINE_COLUMNS": columns, "cfg": combine_cfg,
    }  # fmt: skip
    grid = (num_work_tiles, -(-num_rows // rows), padded_rank // columns)
    return KernelLaunch(combine_kernel, grid, arguments, num_warps=warps, launch_pdl=True)


def choose_num_head_blocks(f: SimpleNamespace, rows_per_work_tile: int, num_ctas: int) -> int:
    """Returns the number of head blocks for which a CTA computes the fewest tiles of `rows_per_work_tile` query rows.

    Adjacent blocks read a tile from the L2 cache. Rows of a block beyond `rows_per_work_tile` are another work tile,
    which reads the cache again. On an H200, 2026-11-21, bf16, 128 × 8K: 96 heads in one block (64 + 32 rows) 579 µs, in
    two of 48 455; 32 heads of 4 query tokens, one block (64 + 64 rows) 581, two 461. Ragged rows count as one token
    each.
    """
    heads, tokens = f.q_nope.shape[1], 1 if f.cu_seqlens_q is not None else f.max_q_len

    def cost(n: int) -> tuple[float, int]:
        return n * -(-tokens * (heads // n) // rows_per_work_tile) / (num_ctas // n * n), -n

    return min((n for n in range(1, min(heads, num_ctas) + 1) if heads % n == 0), key=cost, default=1)


def max_total_blocks(f: SimpleNamespace) -> int:
    """Returns an upper bound, from the page table, of the n_blocks of all requests for one m_block."""
    return f.seq_lens.shape[0] * -(-f.page_table.shape[1] * f.ckv.shape[1] // BLOCK_N)


def is_never_split(f: SimpleNamespace) -> bool:
    """Returns whether page tables are so short that no work tile is split."""
    return f.page_table.shape[1] * f.ckv.shape[1] <= MAX_UNSPLIT_BLOCKS * BLOCK_N


def choose_num_head_blocks_16bit(f: SimpleNamespace) -> int:
    """Returns the number of head blocks of 16-bit latents where n_blocks are few; else 1.

    More CTAs read a tile, but each request has fewer splits, whose combine dominates few tiles. The page table bounds
    the n_blocks. On an H200, 2026-11-21: 32 heads, 1 × 8K 14.3 → 11.6 µs, 8 × 4K 21.2 → 19.8, 12 × 4K
    30.9 → 29.7, but 16 × 4K 30.6 → 31.5; 48 heads, 1 × 8K 16.6 → 13.7, 8 × 4K 26.4 → 24.0; 64 heads, 2 × 4K 18.2 →
    14.0, 8 × 4K 28.6 → 25.0, but 16 × 8K 57.9 → 60.2; 96 heads, 1 × 8K 18.2 → 14.9, but 8 × 4K 30.3 → 33.2; 128 heads,
    1 × 8K 19.6 → 15.9, 2 × 8K 23.4 → 22.3, but 1 × 32K 31.1 → 33.2.
    """
    heads, sms = f.q_nope.shape[1], launch.num_sms(f)
    rows, work = f.max_q_len * heads, max_total_blocks(f) * heads
    if rows <= _SMALL_M_ROWS:
        return 2 if rows > 16 and heads % 2 == 0 and work <= 192 * sms else 1
    if f.max_q_len != 1 or is_never_split(f) or work > 256 * sms:
        return 1
    return next((n for n in (2, 3, 4) if heads % n == 0 and heads // n <= _SMALL_M_ROWS), 1)


def uses_head_blocks_of_32(f: SimpleNamespace) -> bool:
    """Returns whether 64 or 128 heads of 8-bit latents go in blocks of 32, though work tiles of 64 rows are half empty.

    As `choose_num_head_blocks_16bit`. On an H200, 2026-11-21: fp8_e4m3 with an e4m3 query: 128 heads, 1 × 4K 20.0 →
    17.1 µs, 1 × 8K 19.7 → 18.2, but 2 × 8K 24.5 → 26.2; 64 heads, 1 × 8K 18.2 → 16.2. With a bf16 query: 1 × 4K 20.8 →
    18.5, 1 × 8K 21.9 → 21.4; fp8_ds_mla 1 × 4K 21.5 → 19.6, 1 × 8K even.
    """
    heads, sms = f.q_nope.shape[1], launch.num_sms(f)
    if is_never_split(f) or heads not in (64, 128) or f.max_q_len != 1:
        return False
    tiles = max_total_blocks(f)
    return tiles < 2 * sms and tiles * heads < 192 * sms


def assigns_whole_work_tiles_to_ctas(f: SimpleNamespace, num_work_tiles: int, num_ctas: int) -> bool:
    """Returns whether each CTA computes one whole work tile: the page table has room for only a few n_blocks.

    One launch instead of two, −4 µs on the host. On an H200, 4 × 256: fp8_e4m3 with 128 heads 22.1 → 17.8 µs, with 16
    heads 8.8 → 10.7; bf16 18.3 → 15.1 and 11.3 → 13.6; 4 × 128, fp8_e4m3, 16 heads 8.4 → 7.8; 60 requests of up to 256,
    128 heads 50.2 → 20.2. With 8 tiles: 22.6 → 24.9 and 9.1 → 16.6.
    """
    return f.page_table.shape[1] * f.ckv.shape[1] <= MAX_UNSPLIT_BLOCKS * BLOCK_N and num_work_tiles <= num_ctas


def _choose_combine_rows_splits_columns_warps(
    rows_per_tile: int, num_work_tiles: int, num_ctas: int, padded_rank: int
) -> tuple[int, int, int, int]:
    """Returns (rows, splits read at once, columns, warps) of a CTA of the combine kernel.

    With many rows a CTA waits once for several. Few rows have many splits: small CTAs read many at once, but where all
    splits fit in about one round, fewer CTAs are faster (bf16, 16 heads, 64 × 4K: 91 → 84 µs).
    CTAs of one warp: fp8_e4m3, 16 heads, 16 × 8K 32.6 → 31.0 µs, 8 × 8K 21.0 → 20.2, 4 × 8K 15.9 → 15.0.
    """
    if num_work_tiles * rows_per_tile > 1024:
        return 4, 2, padded_rank, 4
    num_splits = num_ctas // max(num_work_tiles, 1)  # of a work tile, if lengths are equal
    if num_splits <= 4 or (num_splits <= 12 and num_work_tiles * rows_per_tile > 512):
        return 1, 8, padded_rank, 4
    if num_splits <= 16:
        return 1, 8 if num_splits <= 8 else 16, 128, 1
    return (1, 32, 64, 1) if num_splits < 96 else (1, 128, 32, 4)


def _select_kernel(is_16_bit: bool, config: MLADecodeConfig) -> Any:
    # Imported on first use: there are many.
    from .sm90.mla_decode.small_m import mla_decode_small_m_kernel
    from .sm90.mla_decode.three_warpgroups import mla_decode_three_warpgroups_kernel
    from .sm90.mla_decode.two_warpgroups import mla_decode_two_warpgroups_kernel

    if config.three_warpgroups:
        return mla_decode_three_warpgroups_kernel
    if is_16_bit and config.block_m > _SMALL_M_ROWS:
        return mla_decode_two_warpgroups_kernel
    return mla_decode_small_m_kernel


def _ckv_kpe_and_scale_matrices(f: SimpleNamespace) -> list[portable.CacheMatrix | None]:
    """Returns the matrices of ckv, kpe and, if present, the scale cache."""
    return [
        portable._matrix_layout_in_16bit_words_or_none(x) for x in (f.ckv, f.kpe, f.ckv_scale_cache) if x is not None
    ]


def _rows_per_page(x: Any) -> int:
    """Returns the rows of a cache's matrix from one page to the next."""
    return 0 if x is None else x.stride[0] // x.stride[1]


def run(call: Any, config: Config) -> None:
    config.launches(call)


def bind(config: Config, at: dict[str, int]) -> BoundLaunches | None:
    return config.launches.bind(at)


def _make_tensor_map(tensor: torch.Tensor, cache_matrix: portable.CacheMatrix, rows_per_copy: int, words: int) -> Any:
    """Returns a tensor map with copy tiles of `rows_per_copy` slots by `words` of 16 bits, which may pass a row's
    end."""
    from triton.experimental.gluon import language as gl

    size = tensor.element_size()
    columns = words * 2 // size
    gluon_dtypes = {torch.float8_e4m3fn: gl.float8e4nv, torch.float16: gl.float16, torch.float32: gl.float32}
    layout = gl.NVMMASharedLayout.get_default_for([rows_per_copy, columns], gluon_dtypes.get(tensor.dtype, gl.bfloat16))
    shape, strides = [cache_matrix.rows, cache_matrix.columns * 2 // size], [cache_matrix.pitch * 2 // size, 1]
    return make_tensor_map(launch.RawAddress(tensor), shape, strides, [rows_per_copy, columns], layout)
