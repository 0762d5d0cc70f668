"""The first launch of MLA's decode branch: what attention waits for. Programs that rotate queries, norm and store the
new tokens' rows, and programs that project queries, beside each other: none needs what another makes.
"""

from __future__ import annotations

from types import SimpleNamespace

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ...host.bind import BYTES, Template, given, strides
from ...host.launch import next_power_of_2
from ..mla_project import Choice, constants
from ..parts.latent_rows import MOST_HEADS, REQUESTS, of_rows, prepare_part, write_lengths
from ..parts.project import project
from ..parts.rows import take_turn


@triton.jit(do_not_specialize=["T", "B", "max_pages"])
def enter_kernel(
    Q, Q_PE, Q_NOPE, SEQ_LENS, W, W_SCALE, KV_C, K_PE, CKV, KPE, SCALES, TABLE, LENS, CU, FREQS, GAMMA, KV_SCALE,
    kv_scale, epsilon, T, B, H, max_pages, P, max_pos, stride_qt, stride_qh, stride_wh, stride_wn, stride_vh, stride_vn,
    stride_c, stride_pe, stride_cp, stride_cs, stride_kp, stride_ks, stride_sp, stride_ss, stride_table, stride_freqs,
    EACH: tl.constexpr, S: tl.constexpr, DN: tl.constexpr, R: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr,
    R_PAD: tl.constexpr, BLOCK_H: tl.constexpr, FORMAT: tl.constexpr, ROPE_KIND: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TURNED: tl.constexpr, AHEAD: tl.constexpr, NATIVE: tl.constexpr,
    NATIVE_CASTS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """First 1 + ⌈H / BLOCK_H⌉ programs a token as `prepare_part` has them, and one for the lengths; then programs that
    make BLOCK_N columns of a head for BLOCK_M tokens."""
    i, parts = tl.program_id(0), 1 + (H + BLOCK_H - 1) // BLOCK_H
    if i <= T * parts:
        take_turn(OVERLAPS)
        if i == T * parts:
            write_lengths(SEQ_LENS, LENS, CU, B, EACH, BLOCK_B)
        else:
            prepare_part(
                (i // parts).to(tl.int64), i % parts - 1, H, (Q, stride_qt, stride_qh), (Q_PE, H * R, R),
                (KV_C, K_PE, stride_c, stride_pe),
                (CKV, KPE, SCALES, stride_cp, stride_cs, stride_kp, stride_ks, stride_sp, stride_ss),
                (GAMMA, epsilon, KV_SCALE, kv_scale),
                (TABLE, LENS, CU, FREQS, B, max_pages, P, max_pos, stride_table, stride_freqs),
                EACH, S, DN, R, L, L_PAD, R_PAD, BLOCK_H, FORMAT, ROPE_KIND, NATIVE_CASTS, BLOCK_B,
            )  # fmt: skip
    else:
        if OVERLAPS:
            gdc_launch_dependents()
        COLUMNS: tl.constexpr = (L + BLOCK_N - 1) // BLOCK_N
        i -= T * parts + 1
        h, column, row = (i % H).to(tl.int64), i // H % COLUMNS, i // (H * COLUMNS)
        project(
            (Q, stride_qt, stride_qh), (W, stride_wh, stride_wn, W_SCALE, stride_vh, stride_vn),
            (Q_NOPE, H * L, L), h, column * BLOCK_N, row * BLOCK_M, T, L, DN, BLOCK_M, BLOCK_N, TURNED, AHEAD, NATIVE,
            NATIVE_CASTS, OVERLAPS,
        )  # fmt: skip


def prepared(f: SimpleNamespace, projection: Choice) -> Template:
    """The launch. projection: of q_nope through w_uk. In capitals: what the branch keeps between its launches."""
    tokens, heads, dq = f.q.shape
    rank, rope, tile = f.ckv.shape[-1], f.kpe.shape[-1], projection.tile
    block_h, columns = min(MOST_HEADS, next_power_of_2(heads)), -(-rank // tile.block_n)
    tensors = given(BYTES, Q_PE="Q_PE", Q_NOPE="Q_NOPE", SEQ_LENS="SEQ_LENS", W="w_uk", W_SCALE="w_uk_scale")
    arguments = of_rows(f) | tensors | constants(projection) | {
        "T": tokens, **strides(f.w_uk, stride_w="hn"), **strides(f.w_uk_scale, stride_v="hn"),
        "EACH": 0 if f.cu_seqlens_q is not None else f.max_q_len, "DN": dq - rope, "BLOCK_H": block_h,
        "BLOCK_B": REQUESTS,
    }  # fmt: skip
    programs = 1 + tokens * (1 + -(-heads // block_h)) + heads * columns * -(-tokens // tile.block_m)
    options = {"launch_pdl": True} if projection.overlaps else {}
    # Without fused multiply-adds: rotated values have the oracle's bits.
    return Template(enter_kernel, (programs,), arguments, num_warps=tile.warps, enable_fp_fusion=False, **options)
