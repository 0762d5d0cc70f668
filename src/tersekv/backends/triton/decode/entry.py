"""Paged decode in Triton: two launches, the split pass and the combine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ....formats import pair_of
from ...host import launch
from ...host.attention_launches import (
    attention_launches,
    facts_for_kernel_choice,
    min_split_blocks_if_batch_invariant,
    output_and_workspace_args,
    output_lse_softmax_scale_and_varlen_constants,
    page_table_lengths_and_softmax_scale_args,
    split_and_combine_launches,
)
from ...host.bind import (
    BYTES,
    WORDS,
    HostAction,
    KernelLaunch,
    LaunchSequence,
    TensorMapArg,
    stride_args,
    tensor_args,
)
from ...host.kernel_config import KernelConfig
from ...host.key_lists import (
    NO_LISTS,
    KeyListConfig,
    facts_with_listed_rows_as_requests,
    key_list_args,
    key_list_config,
)
from ...host.row_programs import uses_pdl
from ..parts.combine import combine_batch_invariant_kernel, combine_by_split_metadata_kernel
from ..parts.kv_cache_args import (
    StoredRowFormat,
    format_constants,
    head_dim_and_packed_width_constants,
    kv_and_scale_cache_strides_in_stride_units,
    mask_args,
    pack_factor,
    packed_strides,
    request_block_size,
    rotation_args,
    why_not_kv_cache,
    window_sinks_softcap_and_scale_constants,
)
from ..parts.listed_pages import (
    facts_of_listed_pages,
    listed_pages_args,
    listed_pages_config,
    prepend_list_pages_launch,
    why_not_listed_pages,
)
from ..parts.tile_scheduler import METADATA_FIELDS
from .config import TileConfig, choose_tile_config
from .kernels import stream_k_decode_kernel


@dataclass(frozen=True)
class Constants(KernelConfig):
    """Compile-time configuration of the kernels, under the kernels' names."""

    K: StoredRowFormat  # keys; the fields that follow describe values, and PACK outputs
    CODE: str
    PACK: int
    TOKEN_SCALES: bool
    BLOCK_SCALES: bool
    E4M3_BY_HAND: bool
    USE_PTX: bool
    STRIDE_UNIT: int
    SCALE_STRIDE_UNIT: int
    BF16: bool  # multiply in bf16; else fp16
    TWO_TERM_Q: bool  # the query is multiplied as the sum of two bf16 tiles
    Q_AS_BYTES: bool  # the query is e4m3 and comes as bytes
    HEADS: int
    GROUP: int
    D: int
    DV: int
    PACKED_K: int  # D / K.PACK
    PACKED_V: int
    BLOCK_D: int
    BLOCK_DV: int
    PAGE: int
    BLOCK_N: int
    ONE_PAGE_PER_BLOCK: bool
    USE_TMA: bool
    REGISTER_PREFETCH: bool  # V is loaded an iteration ahead, where Triton would not pipeline it
    K_ROWS_PER_PAGE: int
    V_ROWS_PER_PAGE: int
    K_ROWS_PER_HEAD: int
    V_ROWS_PER_HEAD: int
    UNROLL: int
    BLOCK_M: int
    BLOCK_B: int
    MIN_BLOCKS_PER_RANGE: int
    MAX_SEQLEN_Q: int
    VARLEN_Q: bool
    WINDOW: int
    HAS_MASK: bool
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
    OUT_KIND: str  # "e4m3" or "e5m2": the output is written as bytes, by bit arithmetic; "float": by the chip's cast
    K_RESIDUAL_SCALE: float
    V_RESIDUAL_SCALE: float
    PARTIAL_ROWS: int  # of a partial result
    PARTIAL_COLUMNS: int
    COMBINE_SPLITS: int
    COMBINE_COLUMNS: int
    SPLIT_BLOCKS: int = 0  # least key blocks of a split, by request length; 0: equal ranges
    INT64_OFFSETS: bool = False  # a page is longer than int32 counts
    LSE_OF_KEYS: bool = False  # of MLA's, with which it shares the combine
    LIST: KeyListConfig = NO_LISTS
    USE_PDL: bool = False  # the launch of listed pages goes before, which starts this one early


class Config(NamedTuple):
    constants: Constants
    launches: LaunchSequence | HostAction


def why_not(f: SimpleNamespace) -> str | None:
    return why_not_kv_cache(f)


def reads_listed_pages(f: SimpleNamespace) -> bool:
    """Returns whether a launch writes lists as page tables first, which are read as those of dense decode; else the
    split pass looks up every key of a list: where blocks are neither whole pages nor equal parts of them, where the
    tables would take much memory, and batch invariant calls, whose choice of kernels may not depend on the number of
    rows."""
    return (
        f.indices is not None
        and f.indices.shape[-1] > 0
        and not f.batch_invariant
        and why_not_listed_pages(f) is None
    )  # fmt: skip


def configure(f: SimpleNamespace) -> Config:
    call_facts, as_pages, lists, list_args = f, reads_listed_pages(f), key_list_config(f), key_list_args(f, 0)
    f = facts_of_listed_pages(f) if as_pages else facts_with_listed_rows_as_requests(f, f.k_cache.shape[1])
    if as_pages:
        lists, list_args = listed_pages_config(call_facts), key_list_args(f, 0) | listed_pages_args(call_facts)
    t = choose_tile_config(facts_for_kernel_choice(f), pair_of(f)[0])
    caches = _kv_host_descriptor_args_or_empty(call_facts, f, t)
    cfg = replace(kernel_constants(f, t, bool(caches)), LIST=lists, USE_PDL=as_pages and uses_pdl(f))
    options: dict[str, Any] = {"num_warps": t.num_warps, "num_stages": t.num_stages}
    if launch.has_ptx(f):
        options["maxnreg"] = t.max_registers
    if cfg.USE_PDL:
        options["launch_pdl"] = True
    num_programs = max(launch.num_sms(f) * t.programs_per_sm // max(cfg.HEADS, 1), 1) * cfg.HEADS
    both = (
        output_and_workspace_args(f, cfg.OUT_KIND != "float")
        | tensor_args(SINKS="sinks", V_SCALE="v_scale_t")
        | {"v_scale": f.v_scale, "cfg": cfg}
    )
    split = (both | page_table_lengths_and_softmax_scale_args(f) | _stride_args(f) | rotation_args(f)
             | (caches or tensor_args(WORDS, K="k_cache", V="v_cache")) | {
        **tensor_args(BYTES if cfg.Q_AS_BYTES else "", Q="q"),
        **tensor_args(BYTES if cfg.E4M3_BY_HAND else "", K_SCALES="k_scale_cache", V_SCALES="v_scale_cache"),
        **tensor_args(K_SCALE="k_scale_t"), **mask_args(f), "k_scale": f.k_scale, "softcap": f.softcap, "max_splits": 0,
        **list_args,
    })  # fmt: skip
    first = KernelLaunch(stream_k_decode_kernel, (num_programs,), split, **options)
    combine = both | {"MAX_LOGITS": None}
    if cfg.SPLIT_BLOCKS:
        combine |= {name: split[name] for name in ("SEQ_LENS", "CU_SEQLENS_Q")}
        return Config(cfg, split_and_combine_launches(f, first, combine_batch_invariant_kernel, combine, cfg.PAGE))
    # It reads neither lengths nor lists: else every BLOCK_B would compile another.
    combine |= {"cfg": replace(cfg, BLOCK_B=0, LIST=NO_LISTS, USE_PDL=False)}
    grid = num_programs, min(t.block_m, f.max_q_len * cfg.GROUP)
    second = KernelLaunch(combine_by_split_metadata_kernel, grid, combine, num_warps=4)
    size = num_programs * (2 * cfg.BLOCK_M * cfg.PARTIAL_COLUMNS + METADATA_FIELDS.value)
    launches = attention_launches(f, first, second, size)
    return Config(cfg, prepend_list_pages_launch(call_facts, launches, size) if as_pages else launches)


def kernel_constants(f: SimpleNamespace, tile: TileConfig, use_tma: bool) -> Constants:
    return Constants(
        **format_constants(f),
        **_shape_tile_and_split_constants(f, tile, use_tma),
        **output_lse_softmax_scale_and_varlen_constants(f),
        HAS_MASK=f.mask is not None,
        **window_sinks_softcap_and_scale_constants(f),
    )


def _shape_tile_and_split_constants(f: SimpleNamespace, tile: TileConfig, use_tma: bool) -> dict[str, Any]:
    page, heads, pack, columns = (
        f.k_cache.shape[1],
        f.k_cache.shape[2],
        pack_factor(pair_of(f)[1]),
        head_dim_and_packed_width_constants(f),
    )
    return {
        **columns,
        "HEADS": heads,
        "GROUP": f.q.shape[1] // max(heads, 1),
        "PAGE": page,
        "BLOCK_N": tile.block_n,
        "ONE_PAGE_PER_BLOCK": page % tile.block_n == 0,
        "USE_TMA": use_tma,
        "REGISTER_PREFETCH": pack > 1 and not use_tma,
        "K_ROWS_PER_PAGE": _rows_per_page(f.k_cache) if use_tma else 0,
        "V_ROWS_PER_PAGE": _rows_per_page(f.v_cache) if use_tma else 0,
        "K_ROWS_PER_HEAD": _rows_per_head(f.k_cache) if use_tma else 0,
        "V_ROWS_PER_HEAD": _rows_per_head(f.v_cache) if use_tma else 0,
        "UNROLL": tile.blocks_per_step,
        "BLOCK_M": tile.block_m,
        "BLOCK_B": request_block_size(f.seq_lens.shape[0]),
        "MIN_BLOCKS_PER_RANGE": tile.min_blocks,
        "PARTIAL_ROWS": min(tile.block_m, f.max_q_len * (f.q.shape[1] // max(heads, 1)))
        if f.batch_invariant
        else tile.block_m,
        "PARTIAL_COLUMNS": pack * columns["BLOCK_DV"] + 2,
        "COMBINE_SPLITS": 16,
        "COMBINE_COLUMNS": pack * columns["BLOCK_DV"],
        "SPLIT_BLOCKS": min_split_blocks_if_batch_invariant(f, tile.block_n),
        "INT64_OFFSETS": launch.offsets_within_page_exceed_int32(
            (f.k_cache, f.v_cache, f.k_scale_cache, f.v_scale_cache)
        ),
    }


def _stride_args(f: SimpleNamespace) -> dict[str, int]:
    """Returns strides of the split pass's tensors; of caches by `kv_and_scale_cache_strides_in_stride_units`."""
    found = stride_args(f.q, stride_q_="th") | kv_and_scale_cache_strides_in_stride_units(f)
    return found | {"stride_mask_t": f.mask.stride[0] if f.mask is not None else 0}


def _kv_host_descriptor_args_or_empty(
    call_facts: SimpleNamespace, f: SimpleNamespace, tile: TileConfig
) -> dict[str, TensorMapArg]:
    """Returns K and V as tensor descriptors of 16-bit words where each is a matrix; else nothing (pointers).

    call_facts: with the cache's own pages, not listed parts of them
    """
    if f.indices is not None or not tile.use_tma or f.k_cache.shape[1] % tile.block_n or not launch.has_tma(f):
        return {}
    found = {}
    sides = zip(("K", "V"), ("k_cache", "v_cache"), (f.q, f.out), pair_of(f), strict=True)
    for argument, name, x, fmt in sides:
        pack = pack_factor(fmt)
        words = x.shape[2] // pack
        rows_pitch_columns = _rows_pitch_columns_in_16bit_words_or_none(getattr(call_facts, name), words)
        if rows_pitch_columns is None:
            return {}
        block = max(16, launch.next_power_of_2(words))
        found[argument] = TensorMapArg(
            name,
            partial(
                _host_descriptor_of_16bit_words,
                rows_pitch_columns=rows_pitch_columns,
                codes_per_word=pack,
                block_n=tile.block_n,
                block_words=block,
            ),
        )
    return found


def _rows_per_page(x: Any) -> int:
    """Returns the rows of a descriptor per page."""
    return x.stride[0] // x.stride[1]


def _rows_per_head(x: Any) -> int:
    """Returns the rows of a descriptor per head (HND), or 0 where heads lie along the columns (NHD)."""
    return x.stride[2] // x.stride[1] if x.stride[2] >= x.stride[1] else 0


def _rows_pitch_columns_in_16bit_words_or_none(cache: Any, words_per_head: int) -> tuple[int, int, int] | None:
    """Returns a cache as one matrix of slots, in 16-bit words: (rows, row pitch, columns); None where strides do not
    allow it.

    NHD puts heads along the columns, HND along the rows; K and V in one tensor only widen the pages.
    """
    pages, slots, heads, _ = cache.shape
    s_p, s_s, s_h = packed_strides(cache)
    if (
        not cache.aligned
        or words_per_head < 16
        or words_per_head != launch.next_power_of_2(words_per_head)
        or s_s % 8
        or s_s == 0
        or s_p % s_s
    ):
        return None
    if s_h >= s_s:  # HND
        if s_h % s_s:
            return None
        width, last = words_per_head, (heads - 1) * (s_h // s_s) + slots
    else:
        if (heads > 1 and s_h < words_per_head) or s_h % 8:
            return None
        width, last = (heads - 1) * s_h + words_per_head, slots
    rows = (pages - 1) * (s_p // s_s) + last
    return (rows, s_s, width) if width <= s_s and rows < 2**31 else None


def _host_descriptor_of_16bit_words(
    cache: torch.Tensor, rows_pitch_columns: tuple[int, int, int], codes_per_word: int, block_n: int, block_words: int
) -> TensorDescriptor:
    rows, pitch, columns = rows_pitch_columns
    words = cache.view(torch.int16) if codes_per_word > 1 else cache
    base = words if launch.interpreting() else launch.RawAddress(words)
    return TensorDescriptor(base, [rows, columns], [pitch, 1], [block_n, block_words])
