"""Paged decode on Hopper: a split pass, and a second launch to combine splits unless the first one does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ...formats import BATCH_INVARIANCE, BLOCK, pair_of
from ..host import launch
from ..host.attention_launches import (
    attention_launches,
    output_and_workspace_args,
    page_table_lengths_and_softmax_scale_args,
)
from ..host.bind import (
    HostAction,
    KernelLaunch,
    LaunchSequence,
    TensorMapArg,
    stride_args,
    tensor_args,
)
from ..host.kernel_config import KernelConfig
from ..host.key_lists import facts_with_listed_rows_as_requests, has_list_per_head
from ..triton.decode import config as portable_tune
from ..triton.decode import entry as portable
from ..triton.parts.kv_cache_args import mask_args, needs_two_term_query
from ..triton.parts.listed_pages import (
    listed_pages_args,
    listed_pages_config,
    prepend_list_pages_launch,
    why_not_listed_pages,
)
from .sm90.decode.combine import combine_kernel
from .sm90.decode.config import (
    MAX_PART_COLUMNS,
    MAX_ROWS_16BIT,
    SMALL_M_ROWS,
    TileConfig,
    assigns_one_request_per_cta,
    can_have_key_parts,
    choose_block_m,
    choose_combine_rows_splits_columns,
    choose_fused_combine_rows_splits_columns,
    choose_heads_per_cta,
    choose_tile_config,
    facts_with_head_dim_parts_as_heads,
    has_padded_head_dims,
    head_dims_fit_kernel_of_rows_64,
    is_large_m,
    max_small_m_rows,
    num_keys_per_copy,
    num_prefetched_query_stages,
    num_query_rows,
    padded_head_dims,
    uses_fused_combine,
)
from .sm90.decode.kernel import decode_small_m_or_shared_tiles_kernel
from .sm90.decode.kernel_producer_warp import decode_producer_warp_kernel
from .sm90.decode.rows_64 import decode_64_rows_per_warpgroup_kernel
from .sm90.decode.scale_words import why_scales_cannot_be_copied_by_word, with_scales_by_word
from .sm90.parts.dequant import INT4_RESIDUAL_SCALE
from .sm90.parts.hadamard import rotation_config
from .sm90.parts.tensor_maps import (
    MIN_KEYS_PER_COPY,
    MMA_KEYS,
    KVLayout,
    TensorMapSpec,
    are_scales_copied_by_word,
    kv_copy_spec_or_none,
    make_kv_and_scale_map_specs,
    make_kv_layout,
    min_keys_per_copy,
    num_scale_heads_of_head_parts,
    pack_heads_into_swizzle_128b_rows,
    scale_map_spec_or_none,
    tensor_map_from_spec,
)


@dataclass(frozen=True)
class DecodeTileConfig(KernelConfig):
    """Compile-time configuration of the split pass, beyond the Triton kernels' constants. The names are the
    kernel's."""

    HEADS_PER_CTA: int  # KV heads, or parts of them, of columns or of keys
    HEAD_DIM_PARTS: int  # parts of a head's columns, each of which counts as a head
    WARPS_PER_HEAD: int  # they share its keys; its query rows are divided among them
    LARGE_M: bool  # by shared_tiles or rows_64: one head per CTA, 64 rows per warpgroup
    HEAD_GROUPS: int  # CTAs that process the same n_block
    MMA_KEYS: int  # keys of one MMA tile
    NUM_MMA_TILES: int  # of an n_block
    KEYS_PER_BUFFER: int  # keys of one tensor copy, from one page, or of two
    NUM_BUFFERS: int  # of an n_block
    COPIES_PER_BUFFER: (
        int  # tensor copies of a buffer: two of 8 keys each, where pages hold no multiple of 16; else one
    )
    STAGES: int
    Q_HEAD_DIM: int  # columns of a query row; D is a power of two
    NUM_QUERY_STAGES: int  # of prefetched queries; 0: a work tile loads its query when it begins
    CONVERTED_STAGES: int  # of rows_64: fp16 tiles of K or V
    K: KVLayout
    V: KVLayout
    MAX_M_BLOCKS: int  # of a request, at most
    VALID_ROWS: int  # of BLOCK_M
    COMBINE_ROWS: int
    COMBINE_SPLITS: int
    COMBINE_COLUMNS: int
    FUSED_COMBINE_ROWS: int  # of a head, where the split pass combines; 0: a second launch does
    FUSED_COMBINE_SPLITS: int  # loaded at once
    FUSED_COMBINE_COLUMNS: int  # loaded at once
    UNSPLIT: bool  # a CTA takes one request; nothing is split
    KEY_PARTS: int = 1  # parts of one head's keys, each of which takes the place of a head

    @property
    def KV_HEADS_PER_CTA(self) -> int:
        """KV heads of a CTA, or parts of their columns."""
        return self.HEADS_PER_CTA // self.KEY_PARTS


SUPPORTED_CODES = ("bf16", "fp16", "e4m3", "e5m2", "int8", "e2m1", "int4")


class Config(NamedTuple):
    constants: portable.Constants
    shape: DecodeTileConfig
    tensor_map_specs: dict[str, TensorMapSpec]  # by kernel argument
    launches: LaunchSequence | HostAction  # without a combine where the split pass does it


def why_not(f: SimpleNamespace) -> str | None:
    if f.indices is not None and (reason := _why_not_with_lists(f)):
        return reason
    f = facts_with_head_dim_parts_as_heads(facts_with_listed_rows_as_requests(f, f.k_cache.shape[1]))
    if f.batch_invariant:  # they split a request's keys by the whole batch
        return f"takes no {BATCH_INVARIANCE} yet"
    fmt, v_fmt = pair_of(f)
    for x in (fmt, v_fmt):
        if x.code not in SUPPORTED_CODES:
            return f"has no {x.name}"
    if reason := launch.why_not_format_or_device(f):
        return reason
    if fmt != v_fmt and 2 in (fmt.storage.itemsize, v_fmt.storage.itemsize):
        return f"takes no pairs with 16 bits, got {fmt.name} and {v_fmt.name}"
    if is_large_m(f) and fmt != v_fmt:
        want, got = max_small_m_rows(f), num_query_rows(f)
        return f"wants at most {want} query rows of a KV head with {fmt.name} and {v_fmt.name}, got {got}"
    if is_large_m(f) and fmt.code == "int4" and not head_dims_fit_kernel_of_rows_64(f):
        return f"wants equal head sizes up to 128 with {num_query_rows(f)} query rows of a KV head and {fmt.name}"
    if fmt.storage.itemsize == 2 and num_query_rows(f) > MAX_ROWS_16BIT:
        return f"wants at most {MAX_ROWS_16BIT} query rows of a KV head with {f.format}, got {num_query_rows(f)}"
    if needs_two_term_query(f, fmt):  # Triton's kernel multiplies Q in two terms
        if f.q.dtype == torch.float16:
            return "wants a bfloat16 or 8-bit q with bf16, got float16"
        return "wants keys that lie as they are with bf16, got rotated ones or such with channel scales"
    if f.head_dim_parts > 1 and (reason := _why_not_with_head_dim_parts(f)):
        return reason
    d, dv = f.q.shape[2], f.out.shape[2]
    if any(n % 16 or not 64 <= n <= MAX_PART_COLUMNS for n in (d, dv)):
        return f"wants head sizes that are multiples of 16 from 64 to 256, or 512 both, got {d} and {dv}"
    if has_padded_head_dims(f) and is_large_m(f):
        return f"wants head sizes of 64, 128 or 256 with {num_query_rows(f)} query rows of a KV head, got {d} and {dv}"
    if has_padded_head_dims(f) and any(
        x is not None for x in (f.k_signs, f.v_signs, f.k_channel_scale, f.v_channel_scale)
    ):
        return f"wants head sizes of 64, 128 or 256 with rotated rows or channel scales, got {d} and {dv}"
    if f.k_cache.shape[1] % MIN_KEYS_PER_COPY:
        return f"wants pages of a multiple of {MIN_KEYS_PER_COPY}, got {f.k_cache.shape[1]}"
    if f.q.dtype == torch.float32:
        return "wants a 16-bit or 8-bit q, got float32"
    return _why_not_list_per_head(f) if has_list_per_head(f) else _why_not_tensor_maps(f)


def _why_not_tensor_maps(f: SimpleNamespace) -> str | None:
    """Returns why the caches cannot be copied by tensor maps."""
    keys, parts, heads = min_keys_per_copy(f.k_cache.shape[1]), f.head_dim_parts, choose_heads_per_cta(f)
    if parts > 1:
        heads = choose_heads_per_cta(f, choose_tile_config(f, choose_block_m(f)).heads_per_cta)
    for name in ("k_cache", "v_cache"):
        if kv_copy_spec_or_none(getattr(f, name), heads, keys, parts) is None:
            apart = "multiples of 16 bytes, or of 8 where rows are odd ones, in pages of a multiple of 16"
            return f"wants {name} with rows at equal distances that are {apart}"
    return None if is_large_m(f) else _why_stored_scales_cannot_be_copied(f, heads, keys)


def _why_stored_scales_cannot_be_copied(f: SimpleNamespace, heads_per_cta: int, keys_per_copy: int) -> str | None:
    """Returns why not, or None."""
    for fmt, name in zip(pair_of(f), ("k_scale_cache", "v_scale_cache"), strict=True):
        scales = getattr(f, name)
        if scales is None:
            continue
        if are_scales_copied_by_word(fmt, scales):
            if reason := why_scales_cannot_be_copied_by_word(f, name):
                return reason
            continue
        heads = num_scale_heads_of_head_parts(fmt, heads_per_cta, f.head_dim_parts)
        if scale_map_spec_or_none(scales, heads, keys_per_copy, fmt.scale == BLOCK) is None:
            beside = "wants stored scales with heads or slots side by side, at multiples of 16 bytes"
            return (
                beside
                if keys_per_copy == MMA_KEYS
                else f"{beside}, and 128 bytes of {keys_per_copy} keys in pages of no multiple of {MMA_KEYS}"
            )
    return None


def _why_not_with_lists(f: SimpleNamespace) -> str | None:
    """Returns why these kernels cannot read lists of blocks."""
    page = f.k_cache.shape[1]
    if f.block_size % page:
        return f"wants lists of whole pages, of {page} tokens, got blocks of {f.block_size}"
    if reason := why_not_listed_pages(f):
        return reason
    group = f.q.shape[1] // max(f.k_cache.shape[2], 1)
    if group > SMALL_M_ROWS:
        return f"wants lists for at most {SMALL_M_ROWS} query heads of a KV head, got {group}"
    return None


def _why_not_list_per_head(f: SimpleNamespace) -> str | None:
    """Returns what these kernels want of a list per KV head: that key parts can read one head."""
    if can_have_key_parts(f, choose_block_m(f)):
        return None
    return (
        "wants, with a list per KV head, at most 16 query rows of each, heads of 64, 128 or 256, rows that lie as they "
        "are, pages of a multiple of 16, and stored scales that can be copied for one head"
    )


def _why_not_with_head_dim_parts(f: SimpleNamespace) -> str | None:
    """Returns what else these kernels want of heads that are divided in column parts."""
    d = f.q.shape[2] * f.head_dim_parts
    if is_large_m(f):
        return f"wants at most {max_small_m_rows(f)} query rows of a KV head with heads of {d}, got {num_query_rows(f)}"
    if any(x is not None for x in (f.k_signs, f.v_signs, f.k_channel_scale, f.v_channel_scale)):
        return f"wants heads of up to {MAX_PART_COLUMNS} with rotated rows or channel scales, got {d}"
    for name, fmt in zip(("k_scale_cache", "v_scale_cache"), pair_of(f), strict=True):
        scales = getattr(f, name)
        if fmt.scale == BLOCK and scales.stride[2] != scales.shape[3]:
            return f"wants {name} with heads side by side with heads of {d}"
    return None


def configure(f: SimpleNamespace) -> Config:
    call_facts, f = f, facts_with_head_dim_parts_as_heads(facts_with_listed_rows_as_requests(f, f.k_cache.shape[1]))
    tuned, (d, dv) = choose_tile_config(f, choose_block_m(f)), padded_head_dims(f)
    base_cfg = portable.kernel_constants(f, portable_tune.choose_tile_config(f, pair_of(f)[0]), True)
    heads, cta_heads, requests = f.k_cache.shape[2], choose_heads_per_cta(f, tuned.heads_per_cta), f.seq_lens.shape[0]
    keys, block_m, groups = num_keys_per_copy(f, tuned), choose_block_m(f), heads // cta_heads
    kv_specs, scales = make_kv_and_scale_map_specs(
        f, cta_heads, keys, tuned.shared_tiles, f.head_dim_parts, tuned.key_parts
    )
    if tuned.producer_warp:
        kv_specs = [pack_heads_into_swizzle_128b_rows(spec) for spec in kv_specs]
    k, v = _make_kv_layouts(f, tuned, cta_heads, kv_specs, scales)
    ranges = _max_cta_ranges(f, tuned, cta_heads)
    valid_rows = block_m if f.cu_seqlens_q is not None else min(block_m, num_query_rows(f))
    # A power of two, so that a bound on ragged rows that changes with the batch does not recompile every time.
    m_blocks = launch.next_power_of_2(-(-num_query_rows(f) // block_m))
    packed_v = dv // v.PACK
    block_dv = max(16, launch.next_power_of_2(packed_v))
    partial_columns = v.PACK * block_dv
    unsplit = assigns_one_request_per_cta(f, tuned, ranges * groups, groups)
    ranges, fused_tile = requests if unsplit else ranges, (0, 0, 0)
    size = cta_heads * valid_rows * partial_columns
    if unsplit or uses_fused_combine(f, tuned.block_n, ranges * groups, ranges, size):
        fused_tile = choose_fused_combine_rows_splits_columns(valid_rows, partial_columns)
    cfg = replace(
        base_cfg, LIST=listed_pages_config(f), BLOCK_M=block_m, BLOCK_N=tuned.block_n,
        MIN_BLOCKS_PER_RANGE=tuned.min_blocks_per_range, K_ROWS_PER_PAGE=kv_specs[0].rows_per_page,
        V_ROWS_PER_PAGE=kv_specs[1].rows_per_page, D=d, PACK=v.PACK, PACKED_K=d // k.PACK, PACKED_V=packed_v,
        BLOCK_DV=block_dv, K_RESIDUAL_SCALE=_residual_scale(k.CODE, tuned.shared_tiles),
        V_RESIDUAL_SCALE=_residual_scale(v.CODE, tuned.shared_tiles),
        PARTIAL_COLUMNS=partial_columns + (4 if any(fused_tile) else 2),
    )  # fmt: skip
    num_splits, num_rows = ranges // max(requests, 1) + 2, cta_heads * valid_rows
    combine_tile = choose_combine_rows_splits_columns(num_splits, num_rows, partial_columns)
    tiles = m_blocks, valid_rows, *combine_tile, *fused_tile, unsplit, tuned.key_parts
    shape = _make_tile_config(f, tuned, k, v, kv_specs[0], (cta_heads, f.head_dim_parts), tiles)
    specs = zip(("K", "V", "K_SCALES", "V_SCALES"), (*kv_specs, *scales), strict=True)
    tensor_map_specs = {n: spec for n, spec in specs if spec is not None and not spec.chunks}
    grid = requests * m_blocks * groups, -(-num_rows // combine_tile[0]) * (partial_columns // combine_tile[2])
    kernel, options = _select_kernel_and_options(tuned, cta_heads * tuned.key_parts)
    shared_args = output_and_workspace_args(f) | tensor_args(SINKS="sinks", V_SCALE="v_scale_t")
    shared_args["v_scale"] = f.v_scale
    # Neither kernel gets constants that only the other reads: the number of requests would recompile it.
    split_configs = {"cfg": cfg, "tile_cfg": replace(shape, COMBINE_ROWS=0, COMBINE_SPLITS=0, COMBINE_COLUMNS=0)}
    split_pass = KernelLaunch(
        kernel, (ranges * groups,), shared_args | split_configs | _split_pass_args(f, tensor_map_specs),
        launch_pdl=True, **options,
    )  # fmt: skip
    combine, metadata_size = None, 8 * ranges * groups  # of counters
    if not any(fused_tile):
        sizes = {"num_workspace_ranges": ranges, "cfg": replace(cfg, BLOCK_B=0), "tile_cfg": shape}
        args = shared_args | _cu_seqlens_q_arg(f) | sizes
        combine = KernelLaunch(combine_kernel, grid, args, num_warps=4, launch_pdl=True)
        metadata_size = 2 * grid[0]
    scratch = 2 * ranges * heads * block_m * cfg.PARTIAL_COLUMNS + metadata_size
    return Config(
        cfg, shape, tensor_map_specs,
        prepend_list_pages_launch(call_facts, attention_launches(f, split_pass, combine, scratch), scratch),
    )  # fmt: skip


def _make_kv_layouts(
    f: SimpleNamespace, tuned: TileConfig, heads_per_cta: int, codes: list[TensorMapSpec],
    scales: list[TensorMapSpec | None],
) -> list[KVLayout]:  # fmt: skip
    """Returns the layouts of K and V."""
    rotations = rotation_config(f.k_signs, f.k_channel_scale), rotation_config(f.v_signs, f.v_channel_scale)
    sides = zip(pair_of(f), codes, scales, rotations, strict=True)
    layouts = [
        make_kv_layout(*side, heads_per_cta, tuned.num_stages, f.head_dim_parts, tuned.key_parts) for side in sides
    ]
    caches = f.k_scale_cache, f.v_scale_cache
    return [
        with_scales_by_word(layout, spec, fmt, cache, heads_per_cta, d)
        for layout, spec, fmt, cache, d in zip(layouts, codes, pair_of(f), caches, padded_head_dims(f), strict=True)
    ]


def _max_cta_ranges(f: SimpleNamespace, tuned: TileConfig, heads_per_cta: int) -> int:
    """Returns the CTA ranges of each group of heads, of which all CTAs run at once."""
    num_warps = heads_per_cta * tuned.key_parts * tuned.warps_per_head
    num_ctas = launch.num_sms(f) * tuned.ctas_per_sm * max(4 // num_warps, 1)
    return max(num_ctas // (f.k_cache.shape[2] // heads_per_cta), 1)


def _select_kernel_and_options(tuned: TileConfig, heads_per_cta: int) -> tuple[Any, dict[str, Any]]:
    """Returns the split pass's kernel and its compile options."""
    if tuned.rows_64:
        max_registers = 65536 // (32 * (4 + tuned.warps_per_head) * tuned.ctas_per_sm) // 8 * 8
        return decode_64_rows_per_warpgroup_kernel, {"num_warps": 4, "maxnreg": max_registers}
    warps = {"num_warps": heads_per_cta * tuned.warps_per_head}
    if tuned.producer_warp:  # it adds three idle warps; registers are allocated per four warps
        return decode_producer_warp_kernel, warps | {"maxnreg": 65536 // (256 * tuned.ctas_per_sm) // 8 * 8}
    return decode_small_m_or_shared_tiles_kernel, warps if tuned.max_registers is None else warps | {
        "maxnreg": tuned.max_registers
    }


def _residual_scale(code: str, shared_tiles: bool) -> float:
    """Returns the scale left over by `parts/dequant`, for scores and values."""
    if code == "e2m1":
        return 64.0 if shared_tiles else 16384.0
    return INT4_RESIDUAL_SCALE.value if code == "int4" and not shared_tiles else 1.0


def _split_pass_args(f: SimpleNamespace, tensor_map_specs: dict[str, TensorMapSpec]) -> dict[str, Any]:
    """Returns the arguments of the split pass; those with a spec are passed as tensor maps."""
    cache_names = {"K": "k_cache", "V": "v_cache", "K_SCALES": "k_scale_cache", "V_SCALES": "v_scale_cache"}
    tensor_map_args = {
        n: TensorMapArg(cache_names[n], partial(tensor_map_from_spec, spec=spec))
        for n, spec in tensor_map_specs.items()
    }
    tensors = tensor_args(Q="q", K_SCALE="k_scale_t", **cache_names) | mask_args(f)
    tensors |= tensor_args(
        K_SIGNS="k_signs", V_SIGNS="v_signs", K_CHANNEL_SCALES="k_channel_scale", V_CHANNEL_SCALES="v_channel_scale"
    )
    scalar_args = {
        "k_scale": f.k_scale,
        "softcap": f.softcap,
        "stride_mask_t": f.mask.stride[0] if f.mask is not None else 0,
    }
    return (
        page_table_lengths_and_softmax_scale_args(f)
        | ({} if f.indices is None else listed_pages_args(f))
        | tensors
        | tensor_map_args
        | scalar_args
        | stride_args(f.q, stride_q_="th")
    )


def _cu_seqlens_q_arg(f: SimpleNamespace) -> dict[str, Any]:
    """Returns CU_SEQLENS_Q; None with lists, whose rows are requests."""
    return {"CU_SEQLENS_Q": None} if f.indices is not None else tensor_args(CU_SEQLENS_Q="cu_seqlens_q")


def _make_tile_config(
    f: SimpleNamespace,
    tuned: TileConfig,
    k_layout: KVLayout,
    v_layout: KVLayout,
    k_map_spec: TensorMapSpec,
    heads_per_cta_and_dim_parts: tuple[int, int],
    m_blocks_and_combine_tiles: tuple[Any, ...],
) -> DecodeTileConfig:
    """Returns the record of constants, of which two parameters hold the first and the last ones."""
    heads_per_cta, head_dim_parts = heads_per_cta_and_dim_parts
    tile_keys, keys_per_copy = MMA_KEYS * tuned.key_parts, k_map_spec.tiles_per_copy * k_map_spec.box[-2]
    copies_per_buffer = max(tile_keys // keys_per_copy, 1)
    keys_per_buffer = keys_per_copy * copies_per_buffer
    if tuned.shared_tiles and f.k_scale_cache is not None:
        k_layout, v_layout = (
            replace(x, SCALE_STRIDES=s.stride[:3])
            for x, s in ((k_layout, f.k_scale_cache), (v_layout, f.v_scale_cache))
        )
    return DecodeTileConfig(
        heads_per_cta * tuned.key_parts, head_dim_parts, tuned.warps_per_head, tuned.shared_tiles,
        f.k_cache.shape[2] // heads_per_cta, MMA_KEYS, tuned.block_n // tile_keys, keys_per_buffer,
        tuned.block_n // keys_per_buffer, copies_per_buffer,
        tuned.num_stages,
        f.q.shape[2],
        num_prefetched_query_stages(f, tuned, heads_per_cta),
        tuned.converted_stages,
        k_layout, v_layout, *m_blocks_and_combine_tiles,
    )  # fmt: skip
