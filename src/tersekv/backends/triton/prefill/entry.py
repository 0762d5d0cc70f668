"""Paged prefill in Triton: one launch; one program attends to all keys of its rows, in order. Where decode has to give
the same bits, few rows take two: a split pass and a combine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from ....formats import pair_of
from ...host import launch
from ...host.attention_launches import (
    facts_for_kernel_choice,
    has_no_work,
    output_lse_and_softmax_scale_constants,
    query_offset_args,
    write_empty_outputs,
)
from ...host.bind import (
    BYTES,
    WORDS,
    WORKSPACE,
    HostAction,
    KernelLaunch,
    LaunchSequence,
    Workspace,
    stride_args,
    tensor_args,
)
from ...host.kernel_config import KernelConfig
from ..parts.kv_cache_args import (
    StoredRowFormat,
    format_constants,
    head_dim_and_packed_width_constants,
    kv_and_scale_cache_strides_in_stride_units,
    request_block_size,
    rotation_args,
    why_not_kv_cache,
    window_sinks_softcap_and_scale_constants,
)
from .config import TileConfig, choose_tile_config, choose_tile_config_of_listed_blocks
from .k2q_args import k2q_launches, keys_of_partial
from .kernels import combine_in_order_kernel, prefill_kernel
from .listed_blocks_args import (
    MAX_CACHED_BYTES,
    group_of,
    has_shared_blocks,
    listed_blocks_args,
    listed_blocks_launches,
    listed_blocks_slices,
    padded_tokens,
)

_BATCH_INVARIANT_ROWS = 1 << 10  # of a request, where BLOCK_M must not depend on the other requests
# Where a row's bits must not depend on the rows beside it, one tile serves steps of decode and chunks of prefill.
_PREFILL_INVARIANT_ROWS = 64
_SPLIT_KEYS = 1024  # keys of a split in that case
_MAX_WORKSPACE = 1 << 26  # floats of partial results; beyond it a program attends to all splits of its rows


@dataclass(frozen=True)
class Constants(KernelConfig):
    """Compile-time configuration of the kernel, under the kernel's names."""

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
    HAS_NEW_KV: bool  # k and v hold the new tokens' rows
    HEADS: int
    GROUP: int
    D: int
    DV: int
    PACKED_K: int  # D / K.PACK
    PACKED_V: int
    BLOCK_D: int
    BLOCK_DV: int
    PAGE: int
    BLOCK_M: int
    BLOCK_N: int
    ONE_PAGE_PER_BLOCK: bool
    BLOCK_B: int
    SCALE_COPIES: int  # of each stored scale, when it is loaded
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
    OUT_KIND: str  # "e4m3" or "e5m2": the output is written as bytes, by bit arithmetic; "float": by the chip's cast
    K_RESIDUAL_SCALE: float
    V_RESIDUAL_SCALE: float
    INT64_OFFSETS: bool  # a page is longer than int32 counts
    SPLIT_KEYS: int = 0  # keys are split at its multiples; 0: not at all
    PARTIAL_ROWS: int = 0  # of a partial result
    LISTED_BLOCK: int = 0  # keys of a block that rows list; 0: they list none, and see all keys before them
    LISTED_TOKENS: int = 0  # that an m_block may have rows of, padded
    K2Q_LENGTH: int = 0  # entries of a list, where few rows' blocks are left to `k2q`
    K2Q_PARTIALS: int = 0  # of a listed block; 0: none is left
    K2Q_GROUP_PAD: int = 0  # rows of a partial result


class Config(NamedTuple):
    constants: Constants
    launches: LaunchSequence | HostAction


def why_not(f: SimpleNamespace) -> str | None:
    return why_not_kv_cache(f)


def prefers_decode(f: SimpleNamespace) -> bool:
    """Returns whether the query rows are too few to fill a GPU: decode's kernels split keys."""
    if f.indices is not None and not (keys_of_partial(f) or has_shared_blocks(f)):
        return True
    return _num_m_blocks(f, _tile_config(f)) * f.k_cache.shape[2] < launch.num_sms(f)


def _tile_config(f: SimpleNamespace) -> TileConfig:
    if f.indices is not None:
        return choose_tile_config_of_listed_blocks(f, *pair_of(f))
    rows = _BATCH_INVARIANT_ROWS
    if f.prefill_invariant:
        rows = max(1, _PREFILL_INVARIANT_ROWS // group_of(f))
    return choose_tile_config(facts_for_kernel_choice(f, rows), *pair_of(f))


def _num_m_blocks(f: SimpleNamespace, t: TileConfig) -> int:
    """Returns a bound on the M blocks of all requests, for a KV head."""
    return f.q.shape[0] * group_of(f) // t.block_m + f.seq_lens.shape[0]


def configure(f: SimpleNamespace) -> Config:
    t = _tile_config(f)
    cfg = kernel_constants(f, t)
    if has_no_work(f):
        return Config(cfg, HostAction(write_empty_outputs))
    arguments = _stride_args(f) | rotation_args(f) | {
        **tensor_args(K_NEW="k", V_NEW="v", PAGE_TABLE="page_table", SEQ_LENS="seq_lens", SINKS="sinks", LSE="lse"),
        **query_offset_args(f),
        **tensor_args(SOFTMAX_SCALE="softmax_scale_t", K_SCALE="k_scale_t", V_SCALE="v_scale_t",
                      OUT_SCALE="out_scale_t"),
        **tensor_args(WORDS, K="k_cache", V="v_cache"),
        **tensor_args(BYTES if cfg.Q_AS_BYTES else "", Q="q"),
        **tensor_args(BYTES if cfg.E4M3_BY_HAND else "", K_SCALES="k_scale_cache", V_SCALES="v_scale_cache"),
        **tensor_args(BYTES if cfg.OUT_KIND != "float" else "", OUT="out"),
        "softmax_scale": f.softmax_scale, "k_scale": f.k_scale, "v_scale": f.v_scale, "out_scale": f.out_scale,
        "softcap": f.softcap, "B": f.seq_lens.shape[0], "T": f.q.shape[0], "cfg": cfg,
    }  # fmt: skip
    num_programs = _num_m_blocks(f, t) * f.k_cache.shape[2]
    arguments |= listed_blocks_args(f, cfg.LISTED_TOKENS)
    arguments |= dict.fromkeys(("K2Q_NUM_PAIRS", "K2Q_SORTED_IDS", "K2Q_STATES", "K2Q_ACCS", "first_tile"))
    arguments |= {"max_pairs": 0}
    if f.prefill_invariant:
        return Config(cfg, _fixed_split_launches(f, cfg, num_programs, arguments, t))
    arguments["SPLIT_WORKSPACE"] = None
    prefill = KernelLaunch(prefill_kernel, (num_programs,), arguments, num_warps=t.num_warps, num_stages=t.num_stages)
    if f.indices is None:
        return Config(cfg, LaunchSequence(prefill))
    if cfg.K2Q_PARTIALS:
        return Config(cfg, k2q_launches(f, cfg, num_programs // cfg.HEADS, prefill))
    slices = listed_blocks_slices(f, cfg.LISTED_TOKENS, num_programs)
    return Config(
        cfg,
        LaunchSequence(
            *listed_blocks_launches(f, cfg, num_programs), prefill, workspace=Workspace(0, slices, MAX_CACHED_BYTES)
        ),
    )


def _fixed_split_launches(
    f: SimpleNamespace, cfg: Constants, num_programs: int, arguments: dict[str, Any], tile: TileConfig
) -> LaunchSequence:
    """Returns the launches of a prefill-invariant call: a program for each split where whole rows would leave
    multiprocessors idle, and the combine; else a program for all splits. Contracted to fused multiply-adds, expressions
    with and without a mask would round differently."""
    options: dict[str, Any] = {"enable_fp_fusion": False}
    of_prefill = options | {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    rows = min(cfg.BLOCK_M, f.max_q_len * cfg.GROUP)
    splits = max(1, -(-f.page_table.shape[1] * cfg.PAGE // cfg.SPLIT_KEYS))
    workspace = num_programs * splits * rows * (cfg.PACK * cfg.BLOCK_DV + 2)
    if splits == 1 or num_programs >= launch.num_sms(f) or workspace > _MAX_WORKSPACE:
        arguments = arguments | {"SPLIT_WORKSPACE": None}
        return LaunchSequence(KernelLaunch(prefill_kernel, (num_programs,), arguments, **of_prefill))
    cfg = replace(cfg, PARTIAL_ROWS=rows)
    split = arguments | tensor_args(SPLIT_WORKSPACE=WORKSPACE) | {"cfg": cfg}
    names = ("SEQ_LENS", "CU_SEQLENS_Q", "SINKS", "OUT", "LSE", "SPLIT_WORKSPACE", "v_scale", "V_SCALE", "out_scale",
             "OUT_SCALE", "B", "stride_out_t", "stride_out_h", "stride_lse_t", "stride_lse_h", "cfg")  # fmt: skip
    merge = {name: split[name] for name in names} | {"num_splits": splits}
    return LaunchSequence(
        KernelLaunch(prefill_kernel, (num_programs, splits), split, **of_prefill),
        KernelLaunch(combine_in_order_kernel, (num_programs, rows), merge, num_warps=4, **options),
        workspace=Workspace(workspace),
    )


def kernel_constants(f: SimpleNamespace, tile: TileConfig) -> Constants:
    return Constants(
        **format_constants(f),
        **window_sinks_softcap_and_scale_constants(f),
        **output_lse_and_softmax_scale_constants(f),
        **_shape_and_tile_constants(f, tile),
    )


def _shape_and_tile_constants(f: SimpleNamespace, tile: TileConfig) -> dict[str, Any]:
    page = f.k_cache.shape[1]
    keys_of_k2q = 0 if f.indices is None else keys_of_partial(f)
    return {
        **head_dim_and_packed_width_constants(f),
        "HAS_NEW_KV": f.k is not None,
        "HEADS": f.k_cache.shape[2],
        "GROUP": group_of(f),
        "PAGE": page,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "ONE_PAGE_PER_BLOCK": page % tile.block_n == 0,
        "BLOCK_B": request_block_size(f.seq_lens.shape[0]),
        "SCALE_COPIES": max(1, 32 * tile.num_warps // tile.block_n),
        "INT64_OFFSETS": launch.offsets_within_page_exceed_int32(
            (f.k_cache, f.v_cache, f.k_scale_cache, f.v_scale_cache)
        ),
        "SPLIT_KEYS": _SPLIT_KEYS if f.prefill_invariant else 0,
        "LISTED_BLOCK": 0 if f.indices is None else f.block_size,
        "LISTED_TOKENS": 0 if f.indices is None else padded_tokens(f, tile.block_m),
        "K2Q_LENGTH": f.indices.shape[-1] if keys_of_k2q else 0,
        "K2Q_PARTIALS": f.block_size // keys_of_k2q if keys_of_k2q else 0,
        "K2Q_GROUP_PAD": launch.next_power_of_2(group_of(f)) if keys_of_k2q else 0,
    }


def _stride_args(f: SimpleNamespace) -> dict[str, int]:
    """Returns strides of all tensors but the caches (`kv_and_scale_cache_strides_in_stride_units`)."""
    found = (
        stride_args(f.q, stride_q_="th") | stride_args(f.k, stride_k_new_="th") | stride_args(f.v, stride_v_new_="th")
    )
    return (
        found
        | kv_and_scale_cache_strides_in_stride_units(f)
        | stride_args(f.out, stride_out_="th")
        | stride_args(f.lse, stride_lse_="th")
        | {"stride_table_b": f.page_table.stride[0]}
    )
