"""Paged MLA decode in Triton: two launches, the split pass and decode's combine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ....formats import (
    BATCH_INVARIANCE,
    GROUP,
    LATENT_SINKS,
    LISTS,
    LSE_OF_KEYS,
    MAX_LOGITS,
    TWO_SETS,
    UE8M0,
    KVFormat,
    latent_format,
)
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
    BoundLaunches,
    HostAction,
    KernelLaunch,
    LaunchSequence,
    TensorMapArg,
    stride_args,
    stride_unit_to_prove_alignment,
    tensor_args,
)
from ...host.kernel_config import KernelConfig
from ...host.key_lists import (
    NO_LISTS,
    KeyListConfig,
    facts_of_extra_key_set,
    facts_with_listed_rows_as_requests,
    key_list_args,
    key_list_config,
)
from ..parts.combine import combine_batch_invariant_kernel, combine_by_split_metadata_kernel
from ..parts.tile_scheduler import METADATA_FIELDS
from .config import TileConfig, choose_tile_config
from .kernels import stream_k_mla_decode_kernel
from .two_sets import (
    EXTRA_NAMES,
    facts_with_dense_fp32_out_and_lse,
    launches_with_renamed_tensors,
    pass_and_merge_launches,
)

MAX_RANK, MAX_ROPE = 512, 128


@dataclass(frozen=True)
class Constants(KernelConfig):
    """Compile-time configuration of the kernels, under the kernels' names; shared ones have decode's."""

    CODE: str  # KVFormat.code
    PACK: int  # codes in a 16-bit word of the latent part
    PACK_PE: int  # of the rotary part
    GROUP_SCALES: bool
    EXPONENT_SCALES: bool  # group scales are exponents, in bytes
    TAIL: int  # last columns of a row in bf16, which are a rotary part that is a value too
    USE_PTX: bool  # dequantize by PTX
    E4M3_BY_HAND: bool  # there is no type for e4m3
    BF16: bool  # multiply latents in bf16; else fp16
    BF16_PE: bool  # rotary parts
    TWO_TERM_Q: bool  # over bf16 latents an fp16 query is the sum of two bf16 tiles
    TWO_TERM_Q_PE: bool
    Q_SCALED: bool  # a power of two is divided out of each query row, which fp16 would not hold
    Q_AS_BYTES: bool  # the query is e4m3 and comes as bytes
    HEADS: int  # blocks of query heads
    GROUP: int  # query heads of a block
    DV: int
    PACKED_V: int
    PACKED_PE: int
    BLOCK_DV: int
    BLOCK_PE: int
    CHUNK: int  # 16-bit words of the latent part in one tile
    CHUNKS: int
    PAGE: int
    BLOCK_N: int
    ONE_PAGE_PER_BLOCK: bool
    USE_TMA: bool
    REGISTER_PREFETCH: bool  # rows are loaded an iteration ahead, where Triton would not pipeline it
    CKV_ROWS_PER_PAGE: int  # rows of a descriptor per page
    KPE_ROWS_PER_PAGE: int
    BLOCK_M: int
    BLOCK_B: int
    MIN_BLOCKS_PER_RANGE: int
    MAX_SEQLEN_Q: int
    VARLEN_Q: bool
    HAS_LSE: bool
    HAS_SOFTMAX_SCALE: bool
    HAS_V_SCALE: bool
    HAS_OUT_SCALE: bool
    OUT_MAX: float
    OUT_KIND: str  # "e4m3" or "e5m2": the output is written as bytes, by bit arithmetic; "float": by the chip's cast
    PARTIAL_ROWS: int  # of a partial result
    PARTIAL_COLUMNS: int
    COMBINE_COLUMNS: int
    COMBINE_SPLITS: int = 16
    WINDOW: int = 0
    HAS_SINKS: bool = False
    LSE_OF_KEYS: bool = False  # the LSE leaves the sinks out
    V_SCALE_STRIDE: int = 0
    V_RESIDUAL_SCALE: float = 1.0
    SPLIT_BLOCKS: int = 0  # least key blocks of a split, by request length; 0: equal ranges
    INT64_OFFSETS: bool = False  # a page is longer than int32 counts
    CKV_STRIDE_UNIT: int = 1  # of the latent rows' strides, in 16-bit words, by `stride_unit_to_prove_alignment`
    KPE_STRIDE_UNIT: int = 1  # of the rotary parts' strides
    UNSPLIT: bool = False  # of the Gluon kernels: a CTA has one work tile, and nothing is split
    GATHER_ROWS: bool = False  # of the Gluon kernels: rows of listed keys are copied by pointer
    LIST: KeyListConfig = NO_LISTS


class CacheMatrix(NamedTuple):
    """The layout of a matrix that a tensor descriptor reads, in 16-bit words."""

    rows: int
    pitch: int
    columns: int


class Config(NamedTuple):
    constants: Constants
    cache_matrices: tuple[CacheMatrix, ...]  # of ckv and kpe; empty: pointers
    launches: LaunchSequence | HostAction


SUPPORTS = (BATCH_INVARIANCE, LISTS, LATENT_SINKS, TWO_SETS, LSE_OF_KEYS, MAX_LOGITS)


def why_not(f: SimpleNamespace) -> str | None:
    reason = _why_not_one_key_set(f)
    if reason is None and f.extra_indices is not None:
        reason = _why_not_one_key_set(facts_of_extra_key_set(f))
    return reason


def _why_not_one_key_set(f: SimpleNamespace) -> str | None:
    reason = launch.why_not_format_or_device(f)
    if reason:
        return reason
    fmt = latent_format(f.format)
    rank, rope = fmt.values(f.ckv.shape[2]), f.kpe.shape[2]
    if rank % 16 or not 0 < rank <= MAX_RANK:
        return f"wants a latent rank that is a multiple of 16 up to {MAX_RANK}, got {rank}"
    if rope % 8 or rope > MAX_ROPE:
        return f"wants a rotary part that is a multiple of 8 up to {MAX_ROPE}, got {rope}"
    for name in ("ckv", "kpe") if rope else ("ckv",):
        x = getattr(f, name)
        if any(n * x.dtype.itemsize % 2 for n in x.stride[:2]):
            return f"wants {name} with strides of whole 16-bit words, got {list(x.stride)}"
        if not x.even:
            return f"wants {name} to begin with a whole 16-bit word, got an odd address"
    if f.q_nope.dtype == torch.float32:
        return "wants a 16-bit or 8-bit q, got float32"
    if f.max_logits is not None and latent_format(f.format).scale in (GROUP, UE8M0):  # row_max has a key's scale in it
        return f"takes no max_logits of {f.format}"
    return None


def configure(f: SimpleNamespace) -> Config:
    if f.extra_indices is None:
        return configure_one_key_set(f)
    first, second = SimpleNamespace(**vars(f) | {"extra_indices": None}), facts_of_extra_key_set(f)
    if f.extra_indices.shape[-1] == 0:
        return configure_one_key_set(first)
    if f.indices.shape[-1] == 0:
        alone = configure_one_key_set(second)
        return alone._replace(launches=launches_with_renamed_tensors(alone.launches, EXTRA_NAMES))
    # The merge applies sinks and the output's scale.
    unscaled = [
        SimpleNamespace(**vars(x) | {"sinks": None, "out_scale": 1.0, "out_scale_t": None}) for x in (first, second)
    ]
    passes = [configure_one_key_set(facts_with_dense_fp32_out_and_lse(x)) for x in unscaled]
    return passes[0]._replace(launches=pass_and_merge_launches(f, [x.launches for x in passes]))


def configure_one_key_set(f: SimpleNamespace) -> Config:
    """Returns the configuration of a call over one set of keys."""
    lists = key_list_config(f)
    list_args = key_list_args(f, f.ckv.shape[1] * (f.ckv.shape[0] if lists.CAUSAL else f.page_table.shape[1]))
    f, fmt = facts_with_listed_rows_as_requests(f, f.ckv.shape[1]), latent_format(f.format)
    t = choose_tile_config(facts_for_kernel_choice(f), fmt)
    heads = f.q_nope.shape[1]
    # Blocks of heads read the same rows side by side; where heads do not fill them, rows form more work tiles.
    blocks = heads // t.block_m if heads and heads % t.block_m == 0 else 1
    cache_matrices = _ckv_and_kpe_matrices_for_tma_or_empty(f, t.block_n) if t.use_tma else ()
    cfg = Constants(
        **_latent_format_and_operand_constants(f, fmt), **_shape_tile_and_partial_layout_constants(f, fmt, t, blocks,
        bool(cache_matrices)), **output_lse_softmax_scale_and_varlen_constants(f), **_sinks_and_v_scale_constants(f),
        LIST=lists,
    )  # fmt: skip
    options: dict[str, Any] = {"num_warps": t.num_warps, "num_stages": t.num_stages}
    if launch.has_ptx(f):
        options["maxnreg"] = t.max_registers
    num_programs = max(launch.num_sms(f) * t.programs_per_sm // blocks, 1) * blocks
    both = (
        output_and_workspace_args(f, cfg.OUT_KIND != "float")
        | tensor_args(SINKS="sinks", MAX_LOGITS="max_logits")
        | {"cfg": cfg}
    )
    split = (both | kv_scale_and_query_tensor_args(f, BYTES if cfg.Q_AS_BYTES else "")
             | page_table_lengths_and_softmax_scale_args(f) | _ckv_and_kpe_stride_args_in_stride_units(f)
             | stride_args(f.ckv_scale_cache, stride_scales_="ps") | {
        **tensor_args(WORDS, CKV="ckv", KPE="ckv" if cfg.TAIL else "kpe"), "CKV_MAP": None, "KPE_MAP": None,
        **_ckv_and_kpe_host_descriptor_args(cache_matrices, cfg),
        **tensor_args(SCALES="ckv_scale_cache"), "max_splits": 0, **list_args,
    })  # fmt: skip
    merge = both | tensor_args(V_SCALE="kv_scale_t") | {"v_scale": f.kv_scale}
    if cfg.TAIL:  # behind the codes, as columns of their tiles
        merge["cfg"] = replace(cfg, PACKED_V=cfg.DV // cfg.PACK)
    first = KernelLaunch(stream_k_mla_decode_kernel, (num_programs,), split, **options)
    if cfg.SPLIT_BLOCKS:
        merge |= {name: split[name] for name in ("SEQ_LENS", "CU_SEQLENS_Q")}
        return Config(
            cfg, cache_matrices, split_and_combine_launches(f, first, combine_batch_invariant_kernel, merge, cfg.PAGE)
        )
    merge_rows = min(t.block_m, f.max_q_len * cfg.GROUP)
    return Config(cfg, cache_matrices,
                  attention_launches( f, first, KernelLaunch(combine_by_split_metadata_kernel,
                                                             (num_programs, merge_rows), merge, num_warps=4),
                                     num_programs * (2 * cfg.BLOCK_M * cfg.PARTIAL_COLUMNS + METADATA_FIELDS.value),
                                     ))  # fmt: skip


def kv_scale_and_query_tensor_args(f: SimpleNamespace, view_queries_as: str = "") -> dict[str, Any]:
    """Returns arguments of any split pass: queries, and the scale of latents."""
    tensors = tensor_args(view_queries_as, Q_NOPE="q_nope", Q_PE="q_pe") | tensor_args(KV_SCALE="kv_scale_t")
    return (
        tensors
        | stride_args(f.q_nope, stride_q_nope_="th")
        | stride_args(f.q_pe, stride_q_pe_="th")
        | {"kv_scale": f.kv_scale}
    )


def _latent_format_and_operand_constants(f: SimpleNamespace, fmt: KVFormat) -> dict[str, Any]:
    by_hand, q = launch.emulates_e4m3(f), f.q_nope.dtype
    bf16, bf16_r = f.ckv.dtype == torch.bfloat16, fmt.tail > 0 or f.kpe.dtype == torch.bfloat16
    return {
        "CODE": fmt.code,
        "PACK": 2 // fmt.storage.itemsize,
        "PACK_PE": 1 if fmt.tail else 2 // f.kpe.dtype.itemsize,
        "GROUP_SCALES": fmt.scale in (GROUP, UE8M0),
        "EXPONENT_SCALES": fmt.scale == UE8M0,
        "TAIL": fmt.tail,
        "USE_PTX": launch.has_ptx(f),
        "E4M3_BY_HAND": by_hand,
        "BF16": bf16,
        "BF16_PE": bf16_r,
        "TWO_TERM_Q": bf16 and q == torch.float16,
        "TWO_TERM_Q_PE": bf16_r and q == torch.float16,
        "Q_SCALED": not bf16 and q == torch.bfloat16,
        "Q_AS_BYTES": by_hand and q == torch.float8_e4m3fn,
    }


def _shape_tile_and_partial_layout_constants(
    f: SimpleNamespace, fmt: KVFormat, tile: TileConfig, num_head_blocks: int, use_tma: bool
) -> dict[str, Any]:
    rank, page, pack = fmt.values(f.ckv.shape[2]), f.ckv.shape[1], 2 // fmt.storage.itemsize
    words, words_r = (rank - fmt.tail) // pack, fmt.tail or f.kpe.shape[2] * f.kpe.dtype.itemsize // 2
    block_dv = max(16, launch.next_power_of_2(rank // pack))
    group = fmt.scale_block if fmt.scale in (GROUP, UE8M0) else None
    chunk = min(group // pack if group else tile.chunk_columns, block_dv)
    return {
        "HEADS": num_head_blocks,
        "GROUP": f.q_nope.shape[1] // num_head_blocks,
        "DV": rank,
        "PACKED_V": words,
        "PACKED_PE": words_r,
        "BLOCK_DV": block_dv,
        "BLOCK_PE": max(16, launch.next_power_of_2(words_r)),
        "CHUNK": chunk,
        "CHUNKS": -(-words // chunk),
        "PAGE": page,
        "BLOCK_N": tile.block_n,
        "ONE_PAGE_PER_BLOCK": page % tile.block_n == 0,
        "USE_TMA": use_tma,
        "REGISTER_PREFETCH": pack > 1 and not use_tma,
        "CKV_ROWS_PER_PAGE": f.ckv.stride[0] // f.ckv.stride[1] if use_tma else 0,
        "KPE_ROWS_PER_PAGE": f.kpe.stride[0] // f.kpe.stride[1] if use_tma and words_r else 0,
        "BLOCK_M": tile.block_m,
        "BLOCK_B": min(1024, launch.next_power_of_2(max(f.seq_lens.shape[0], 1))),
        "MIN_BLOCKS_PER_RANGE": tile.min_blocks,
        "PARTIAL_ROWS": min(tile.block_m, f.max_q_len * (f.q_nope.shape[1] // num_head_blocks))
        if f.batch_invariant
        else tile.block_m,
        "PARTIAL_COLUMNS": pack * block_dv + 2,
        "COMBINE_COLUMNS": pack * block_dv,
        "SPLIT_BLOCKS": min_split_blocks_if_batch_invariant(f, tile.block_n),
        "INT64_OFFSETS": launch.offsets_within_page_exceed_int32((f.ckv, f.kpe, f.ckv_scale_cache)),
        "CKV_STRIDE_UNIT": stride_unit_to_prove_alignment(f.ckv, _packed_strides(f.ckv), 8),
        "KPE_STRIDE_UNIT": stride_unit_to_prove_alignment(_rotary_part(f), _packed_strides(_rotary_part(f)), 8),
    }


def _sinks_and_v_scale_constants(f: SimpleNamespace) -> dict[str, Any]:
    sinks = f.sinks is not None
    return {"HAS_V_SCALE": f.kv_scale_t is not None, "HAS_SINKS": sinks, "LSE_OF_KEYS": sinks and f.lse_of_keys}


def _ckv_and_kpe_stride_args_in_stride_units(f: SimpleNamespace) -> dict[str, int]:
    """Returns strides of page and slot, in CKV_STRIDE_UNITs and KPE_STRIDE_UNITs."""
    found: dict[str, int] = {}
    for prefix, x in (("stride_ckv_", f.ckv), ("stride_kpe_", _rotary_part(f))):
        distances = _packed_strides(x)
        step = stride_unit_to_prove_alignment(x, distances, 8)
        found |= {prefix + letter: n // step for letter, n in zip("ps", distances, strict=True)}
    return found


def run(call: Any, config: Config) -> None:
    config.launches(call)


def bind(config: Config, at: dict[str, int]) -> BoundLaunches | None:
    return config.launches.bind(at)


def _ckv_and_kpe_host_descriptor_args(
    cache_matrices: tuple[CacheMatrix, ...], cfg: Constants
) -> dict[str, TensorMapArg]:
    """Returns both parts of a cache as tensor descriptors of 16-bit words; nothing without matrices."""
    matrices = zip(("CKV_MAP", "KPE_MAP"), ("ckv", "kpe"), cache_matrices, (cfg.CHUNK, cfg.BLOCK_PE), strict=False)
    return {
        argument: TensorMapArg(
            name,
            partial(
                _host_descriptor_of_16bit_words, matrix_layout=matrix_layout, block_n=cfg.BLOCK_N, block_words=block
            ),
        )
        for argument, name, matrix_layout, block in matrices
    }


def _rotary_part(f: SimpleNamespace) -> Any:
    """Returns the tensor that holds the 16-bit end of rows: a rotary part, or a tail."""
    return f.ckv if latent_format(f.format).tail else f.kpe


def _packed_strides(x: Any) -> tuple[int, int]:
    """Returns strides of page and slot in 16-bit words."""
    return x.stride[0] * x.dtype.itemsize // 2, x.stride[1] * x.dtype.itemsize // 2


def _ckv_and_kpe_matrices_for_tma_or_empty(f: SimpleNamespace, block_n: int) -> tuple[CacheMatrix, ...]:
    """Returns matrices of ckv and kpe; none where a key block spans pages or a part is no matrix."""
    scales = latent_format(f.format).scale
    if f.indices is not None or scales == UE8M0 or f.ckv.shape[1] % block_n or not launch.has_tma(f):
        return ()
    found = [_matrix_layout_in_16bit_words_or_none(x) for x in ((f.ckv, f.kpe) if f.kpe.shape[2] else (f.ckv,))]
    matrices = tuple(x for x in found if x is not None)
    return matrices if len(matrices) == len(found) else ()


def _matrix_layout_in_16bit_words_or_none(cache: Any) -> CacheMatrix | None:
    """Returns a part of a latent cache as one matrix of slots, in 16-bit words. Descriptors load 0 past its columns."""
    pages, slots, columns = cache.shape
    s_p, s_s = _packed_strides(cache)
    words = columns * cache.dtype.itemsize // 2
    if not cache.aligned or s_s % 8 or s_s < words or s_p % s_s or pages == 0:
        return None
    rows = (pages - 1) * (s_p // s_s) + slots
    return CacheMatrix(rows, s_s, words) if rows < 2**31 else None


def _host_descriptor_of_16bit_words(
    cache: torch.Tensor, matrix_layout: CacheMatrix, block_n: int, block_words: int
) -> TensorDescriptor:
    words = cache.view(torch.int16) if cache.element_size() == 1 else cache
    base = words if launch.interpreting() else launch.RawAddress(words)
    return TensorDescriptor(
        base, [matrix_layout.rows, matrix_layout.columns], [matrix_layout.pitch, 1], [block_n, block_words]
    )
