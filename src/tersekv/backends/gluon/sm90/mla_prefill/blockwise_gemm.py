"""Up-projection of latents: e4m3 codes [M, L] x [N, L] -> [M, N], 16-bit out, fp32 sums, for sm_90.

Both operands have scales, per (row, 128 columns) and per 128 x 128 block; partial sums of 128 columns are scaled before
they are added in fp32. A persistent CTA walks over a range of 128 x 128 tiles, those of one weight panel after each
other: the panel stays in shared memory, and the next one is copied meanwhile. A producer warp copies by TMA; two
consumer warpgroups have 64 latents each, and scale one half of their columns while the MMA of the other runs.

Wait for a free stage: `latent_and_weight_panel_producer`; scales and their prefetch: `consumer`; no mask, no combine.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ....host.bind import KernelLaunch, tensor_args
from ...versions import thread_barrier, tma_load, tma_store
from ..parts.pipeline import allocate_mbarrier_groups, pdl_launch_dependents, pdl_wait
from ..parts.tensor_maps import tensor_map_arg

STAGES = 4

ROWS_PER_WARPGROUP = gl.constexpr(64)  # latents of one warpgroup
BLOCK = gl.constexpr(128)  # latents and weight rows of a tile, and columns of a scale
HALF_BLOCK_N = gl.constexpr(64)  # weight rows of one MMA


class SmemBuffers(NamedTuple):
    a: gl.shared_memory_descriptor  # latents
    w: gl.shared_memory_descriptor  # two panels
    out: gl.shared_memory_descriptor


class Mbarriers(NamedTuple):
    a_full: gl.shared_memory_descriptor
    a_empty: gl.shared_memory_descriptor
    w_full: gl.shared_memory_descriptor
    w_empty: gl.shared_memory_descriptor


class BlockScales(NamedTuple):
    A: gl.tensor
    W: gl.tensor
    a_stride: gl.tensor
    w_stride: gl.tensor


# Tile scheduler.


@gluon.jit
def cta_tile_range(num_tiles):
    """Returns this CTA's range of tiles: begin and end."""
    return gl.program_id(0) * num_tiles // gl.num_programs(0), (gl.program_id(0) + 1) * num_tiles // gl.num_programs(0)


# Producer: weight panels and latents, as stages become free.


@gluon.jit
def latent_and_weight_panel_producer(
    A, W, num_m_blocks, num_tiles, buffers, mbarriers, K_BLOCKS: gl.constexpr, STAGES: gl.constexpr
):
    """Copies each weight panel once, and for each tile the latents in blocks of 128 columns."""
    a_s, w_s = buffers.a, buffers.w
    a_full, a_empty, w_full, w_empty = mbarriers
    tile_begin, tile_end = cta_tile_range(num_tiles)
    k_iter = 0  # iterations of 128 columns
    num_panels = 0
    i_panel = -1
    for i_tile in range(tile_begin, tile_end):
        if i_tile // num_m_blocks != i_panel:
            i_panel = i_tile // num_m_blocks
            panel_stage = num_panels % 2
            # Weight panel: wait for a free stage, copy
            mbarrier.wait(w_empty.index(panel_stage), ((num_panels // 2) & 1) ^ 1)
            mbarrier.expect(w_full.index(panel_stage), K_BLOCKS * BLOCK * BLOCK)
            for k_block in gl.static_range(K_BLOCKS):
                tma_load(
                    W, [i_panel * BLOCK, k_block * BLOCK], w_full.index(panel_stage),
                    w_s.index(panel_stage * K_BLOCKS + k_block),
                )  # fmt: skip
            num_panels += 1
        a_row = i_tile % num_m_blocks * BLOCK
        for k_block in range(K_BLOCKS):
            stage = k_iter % STAGES
            # Latents: wait for a free stage, copy
            mbarrier.wait(a_empty.index(stage), ((k_iter // STAGES) & 1) ^ 1)
            mbarrier.expect(a_full.index(stage), BLOCK * BLOCK)
            tma_load(A, [a_row, k_block * BLOCK], a_full.index(stage), a_s.index(stage))
            k_iter += 1


# Main loop and epilogue of a consumer warpgroup.


@gluon.jit
def start_mma_of_weight_row_half(a, w, I_HALF: gl.constexpr, ACC_LAYOUT: gl.constexpr):
    """Starts the MMA of 128 columns of latents with half of the panel's rows."""
    zero = gl.full([ROWS_PER_WARPGROUP, HALF_BLOCK_N], 0.0, gl.float32, ACC_LAYOUT)
    return warpgroup_mma(
        a, w.slice(I_HALF * HALF_BLOCK_N, HALF_BLOCK_N).permute((1, 0)), zero, use_acc=False, is_async=True
    )


@gluon.jit
def load_latent_scales_and_weight_scale(scales, m_block, i_panel, k_block, o_m, num_rows):
    """Loads scales of an iteration: of its latents, and of its weight block."""
    p_a = scales.A + k_block * scales.a_stride.to(gl.int64) + m_block * BLOCK + o_m
    a_scale = gl.load(p_a, mask=m_block * BLOCK + o_m < num_rows, other=0.0)
    return a_scale, gl.load(scales.W + i_panel.to(gl.int64) * scales.w_stride + k_block)


@gluon.jit
def consumer(
    OUT, scales, num_rows, num_m_blocks, num_tiles, buffers, mbarriers,
    I_CONSUMER: gl.constexpr, K_BLOCKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Computes, as one warpgroup, 64 rows of every tile of this CTA."""
    a_s, w_s, out_s = buffers
    a_full, a_empty, w_full, w_empty = mbarriers
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF_BLOCK_N, 32]
    )
    o_m = gl.arange(0, ROWS_PER_WARPGROUP, gl.SliceLayout(1, ACC)) + I_CONSUMER * ROWS_PER_WARPGROUP
    tile_begin, tile_end = cta_tile_range(num_tiles)
    k_iter = 0
    num_panels = 0  # begun
    m_block, i_panel = tile_begin % num_m_blocks, tile_begin // num_m_blocks
    is_new_panel = True  # this tile's panel differs from the last tile's
    panel_stage = 0
    # Scales are loaded one iteration ahead, so that no MMA waits for them.
    a_scale, w_scale = load_latent_scales_and_weight_scale(scales, m_block, i_panel, 0, o_m, num_rows)
    for i_tile in range(tile_begin, tile_end):
        # Wait for the tile's weight panel; release the last one
        if is_new_panel:
            if num_panels > 0:
                mbarrier.arrive(w_empty.index(panel_stage), count=1)
            panel_stage = num_panels % 2
            mbarrier.wait(w_full.index(panel_stage), (num_panels // 2) & 1)
            num_panels += 1
        is_new_panel = m_block + 1 == num_m_blocks
        next_m_block = gl.where(is_new_panel, 0, m_block + 1)
        next_panel = gl.where(i_tile + 1 < tile_end, i_panel + is_new_panel.to(gl.int32), i_panel)
        # While one half is scaled, the MMA of the other runs.
        acc_left = gl.full([ROWS_PER_WARPGROUP, HALF_BLOCK_N], 0.0, gl.float32, ACC)
        acc_right = acc_left
        product_right, prev_scale = acc_left, a_scale
        for k_block in gl.static_range(K_BLOCKS):
            scale = a_scale * w_scale
            a_scale, w_scale = load_latent_scales_and_weight_scale(
                scales, next_m_block if k_block == K_BLOCKS - 1 else m_block,
                next_panel if k_block == K_BLOCKS - 1 else i_panel,
                (k_block + 1) % K_BLOCKS, o_m, num_rows,
            )  # fmt: skip
            # Wait for the latents
            stage = k_iter % STAGES
            mbarrier.wait(a_full.index(stage), (k_iter // STAGES) & 1)
            a = a_s.index(stage).slice(I_CONSUMER * ROWS_PER_WARPGROUP, ROWS_PER_WARPGROUP)
            w = w_s.index(panel_stage * K_BLOCKS + k_block)
            # Left half, while the right half of the last iteration is scaled and added
            product_left = start_mma_of_weight_row_half(a, w, 0, ACC)
            if k_block > 0:
                product_right = warpgroup_mma_wait(1, [product_right])
                mbarrier.arrive(a_empty.index((k_iter - 1) % STAGES), count=1)
                acc_right = gl.fma(product_right, gl.broadcast(prev_scale[:, None], acc_right)[0], acc_right)
            # Right half, while the left one is scaled and added
            product_right = start_mma_of_weight_row_half(a, w, 1, ACC)
            product_left = warpgroup_mma_wait(1, [product_left])
            acc_left = gl.fma(product_left, gl.broadcast(scale[:, None], acc_left)[0], acc_left)
            prev_scale = scale
            k_iter += 1
        product_right = warpgroup_mma_wait(0, [product_right])
        mbarrier.arrive(a_empty.index((k_iter - 1) % STAGES), count=1)
        acc_right = gl.fma(product_right, gl.broadcast(prev_scale[:, None], acc_right)[0], acc_right)
        # Epilogue: store both halves by TMA
        tma.store_wait(0)
        thread_barrier()  # one thread waited for all
        for j in gl.static_range(2):
            out_stage = out_s.index(2 * I_CONSUMER + j)
            out_stage.store((acc_right if j else acc_left).to(out_stage.dtype))
        fence_async_shared()
        for j in gl.static_range(2):
            tma_store(
                OUT,
                [m_block * BLOCK + I_CONSUMER * ROWS_PER_WARPGROUP, i_panel * BLOCK + j * HALF_BLOCK_N],
                out_s.index(2 * I_CONSUMER + j),
            )
        m_block, i_panel = next_m_block, next_panel
    tma.store_wait(0)


# The kernel.


@gluon.jit(do_not_specialize=["num_rows"])
def blockwise_gemm_kernel(
    A, W, OUT, A_SCALE, W_SCALE, num_rows, N, stride_as, stride_ws,
    K_BLOCKS: gl.constexpr, STAGES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """Computes a range of tiles per CTA: a producer warp and two consumer warpgroups."""
    a_s = gl.allocate_shared_memory(A.dtype, [STAGES, BLOCK, BLOCK], A.layout)
    w_s = gl.allocate_shared_memory(W.dtype, [2 * K_BLOCKS, BLOCK, BLOCK], W.layout)
    out_s = gl.allocate_shared_memory(OUT.dtype, [4, ROWS_PER_WARPGROUP, HALF_BLOCK_N], OUT.layout)
    a_full, a_empty = allocate_mbarrier_groups(STAGES, (1, 2))
    w_full, w_empty = allocate_mbarrier_groups(2, (1, 2))
    fence_async_shared()
    if USE_PDL:
        pdl_launch_dependents()
        pdl_wait()
    buffers, mbarriers = SmemBuffers(a_s, w_s, out_s), Mbarriers(a_full, a_empty, w_full, w_empty)
    num_m_blocks = gl.cdiv(num_rows, BLOCK)
    num_tiles = num_m_blocks * (N // BLOCK)
    scales = BlockScales(A_SCALE, W_SCALE, stride_as, stride_ws)
    gl.warp_specialize(
        [
            (consumer, (OUT, scales, num_rows, num_m_blocks, num_tiles, buffers, mbarriers, 0, K_BLOCKS, STAGES)),
            (consumer, (OUT, scales, num_rows, num_m_blocks, num_tiles, buffers, mbarriers, 1, K_BLOCKS, STAGES)),
            (latent_and_weight_panel_producer, (A, W, num_m_blocks, num_tiles, buffers, mbarriers, K_BLOCKS, STAGES)),
        ],
        [4, 1], [232, 24],
    )  # fmt: skip


# Its launch.


def make_kv_up_projection_launch(
    f: SimpleNamespace, num_rows: int, max_rows: int, num_sms: int, use_pdl: bool
) -> KernelLaunch:
    """Returns the launch for a chunk of `num_rows` rows, in buffers for `max_rows`: KV = CODES @ kv_b_proj.T"""
    n, rank = f.kv_b_proj.shape
    tile_shape = [BLOCK.value, BLOCK.value]
    layout = gl.NVMMASharedLayout.get_default_for(tile_shape, gl.float8e4nv)
    out_layout = gl.NVMMASharedLayout.get_default_for([ROWS_PER_WARPGROUP.value, HALF_BLOCK_N.value], gl.bfloat16)
    arguments = tensor_args(A_SCALE="SCALES", W_SCALE="kv_b_proj_scale") | {
        "A": tensor_map_arg("CODES", [num_rows, rank], [rank, 1], tile_shape, layout),
        "W": tensor_map_arg("kv_b_proj", [n, rank], [f.kv_b_proj.stride[0], 1], tile_shape, layout),
        "OUT": tensor_map_arg("KV", [num_rows, n], [n, 1], [ROWS_PER_WARPGROUP.value, HALF_BLOCK_N.value], out_layout),
        "num_rows": num_rows, "N": n, "stride_as": max_rows, "stride_ws": f.kv_b_proj_scale.stride[0],
        "K_BLOCKS": rank // BLOCK.value, "STAGES": STAGES, "USE_PDL": use_pdl,
    }  # fmt: skip
    num_tiles = -(-num_rows // BLOCK.value) * (n // BLOCK.value)
    return KernelLaunch(blockwise_gemm_kernel, (min(num_sms, num_tiles),), arguments, num_warps=4, launch_pdl=use_pdl)
