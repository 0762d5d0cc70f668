"""The first launch of MLA's decode branch: everything that attention waits for. Programs that rotate queries, norm and
store the new tokens' rows, and programs that project queries run concurrently: they are independent."""

from __future__ import annotations

from types import SimpleNamespace

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ...host.bind import BYTES, KernelLaunch, stride_args, tensor_args
from ...host.launch import next_power_of_2
from ..mla_project import ProjectionConfig, project_head_constexprs
from ..parts.latent_rows import (
    MAX_HEADS_PER_PROGRAM,
    REQUESTS_PER_STEP,
    latent_append_and_rope_args,
    store_latent_or_roped_heads_return_valid,
    store_seq_lens,
)
from ..parts.project import project_head
from ..parts.token_rows import pdl_early_launch_and_wait


@triton.jit(do_not_specialize=["T", "B", "max_pages"])
def rope_store_project_kernel(
    Q, Q_PE_OUT, Q_NOPE_OUT, SEQ_LENS_OUT, W, W_SCALE, KV_C, K_PE, CKV, KPE, SCALES, PAGE_TABLE, CACHE_LENS,
    CU_SEQLENS_Q,
    FREQS_CIS, NORM_GAMMA, KV_SCALE,
    kv_scale, epsilon, T, B, H, max_pages, num_pages, max_pos, stride_qt, stride_qh, stride_wh, stride_wn, stride_vh,
    stride_vn,
    stride_c, stride_pe, stride_cp, stride_cs, stride_kp, stride_ks, stride_sp, stride_ss, stride_table,
    stride_freqs_cis,
    TOKENS_PER_REQUEST: tl.constexpr, PAGE: tl.constexpr, DN: tl.constexpr, R: tl.constexpr, L: tl.constexpr,
    L_PAD: tl.constexpr,
    R_PAD: tl.constexpr, BLOCK_H: tl.constexpr, FORMAT: tl.constexpr, K_PE_KIND: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP_AB: tl.constexpr, PREFETCH_GROUPS: tl.constexpr,
    NATIVE_FP8_MMA: tl.constexpr,
    NATIVE_FP8_CAST: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """The first 1 + ⌈H / BLOCK_H⌉ programs a token run `store_latent_or_roped_heads_return_valid`, and one stores the
    lengths; the others project BLOCK_N columns of a head for BLOCK_M tokens."""
    i_program, programs_per_token = tl.program_id(0), 1 + (H + BLOCK_H - 1) // BLOCK_H
    if i_program <= T * programs_per_token:
        pdl_early_launch_and_wait(USE_PDL)
        if i_program == T * programs_per_token:
            store_seq_lens(SEQ_LENS_OUT, CACHE_LENS, CU_SEQLENS_Q, B, TOKENS_PER_REQUEST, BLOCK_B)
        else:
            store_latent_or_roped_heads_return_valid(
                (i_program // programs_per_token).to(tl.int64), i_program % programs_per_token - 1, H,
                (Q, stride_qt, stride_qh), (Q_PE_OUT, H * R, R),
                (KV_C, K_PE, stride_c, stride_pe),
                (CKV, KPE, SCALES, stride_cp, stride_cs, stride_kp, stride_ks, stride_sp, stride_ss),
                (NORM_GAMMA, epsilon, KV_SCALE, kv_scale),
                (PAGE_TABLE, CACHE_LENS, CU_SEQLENS_Q, FREQS_CIS, B, max_pages, num_pages, max_pos, stride_table,
                 stride_freqs_cis),
                TOKENS_PER_REQUEST, PAGE, DN, R, L, L_PAD, R_PAD, BLOCK_H, FORMAT, K_PE_KIND, NATIVE_FP8_CAST, BLOCK_B,
            )  # fmt: skip
    else:
        if USE_PDL:
            gdc_launch_dependents()
        COLUMNS: tl.constexpr = (L + BLOCK_N - 1) // BLOCK_N
        i_program -= T * programs_per_token + 1
        h, i_column_block, i_row_block = (
            (i_program % H).to(tl.int64), i_program // H % COLUMNS, i_program // (H * COLUMNS),
        )  # fmt: skip
        project_head(
            (Q, stride_qt, stride_qh), (W, stride_wh, stride_wn, W_SCALE, stride_vh, stride_vn),
            (Q_NOPE_OUT, H * L, L), h, i_column_block * BLOCK_N, i_row_block * BLOCK_M, T, L, DN, BLOCK_M, BLOCK_N,
            SWAP_AB, PREFETCH_GROUPS, NATIVE_FP8_MMA,
            NATIVE_FP8_CAST, USE_PDL,
        )  # fmt: skip


def make_rope_store_project_launch(f: SimpleNamespace, projection: ProjectionConfig) -> KernelLaunch:
    """Returns the launch. projection: of q_nope through w_uk. Tensors in capitals: the branch's workspace."""
    tokens, heads, dq = f.q.shape
    rank, rope, tile = f.ckv.shape[-1], f.kpe.shape[-1], projection.tile
    block_h, columns = min(MAX_HEADS_PER_PROGRAM, next_power_of_2(heads)), -(-rank // tile.block_n)
    tensors = tensor_args(
        BYTES, Q_PE_OUT="Q_PE", Q_NOPE_OUT="Q_NOPE", SEQ_LENS_OUT="SEQ_LENS", W="w_uk", W_SCALE="w_uk_scale"
    )
    arguments = latent_append_and_rope_args(f) | tensors | project_head_constexprs(projection) | {
        "T": tokens, **stride_args(f.w_uk, stride_w="hn"), **stride_args(f.w_uk_scale, stride_v="hn"),
        "TOKENS_PER_REQUEST": 0 if f.cu_seqlens_q is not None else f.max_q_len, "DN": dq - rope, "BLOCK_H": block_h,
        "BLOCK_B": REQUESTS_PER_STEP,
    }  # fmt: skip
    programs = 1 + tokens * (1 + -(-heads // block_h)) + heads * columns * -(-tokens // tile.block_m)
    options = {"launch_pdl": True} if projection.uses_pdl else {}
    # Without fused multiply-adds, so that rotated values have the oracle's bits.
    return KernelLaunch(
        rope_store_project_kernel, (programs,), arguments, num_warps=tile.warps, enable_fp_fusion=False, **options
    )
