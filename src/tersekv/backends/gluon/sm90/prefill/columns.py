"""The second consumer warpgroup of prefill where heads are wider than 256 (`cfg.COLUMN_SPLIT`): columns of the output.

It has the same 64 rows as the first consumer (`mainloop`), whose acc_o holds the first half of V's columns; this one
holds the second. The first computes QK, mask and softmax and publishes P, rescale and acc_scale.

Mask: in P, and `wait_v_columns_and_zero_oob_rows`; full stage: of P, and the same; rescale:
`rescale_and_add_pv_half_then_release`; combine: none.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ...versions import reinterpret, thread_barrier
from ..parts.pipeline import consumer_release, consumer_wait
from .epilogue import store_output_columns
from .mainloop import (
    init_acc,
    release_v_columns,
    tokens_heads_and_mask_of_output_rows,
    view_column_half_of_v_tile,
    view_stages_as,
    wait_v_columns_and_zero_oob_rows,
)
from .tile_scheduler import I_SECOND_CONSUMER, read_work_tile_and_cached_range

I_CONSUMER = gl.constexpr(1)  # of the halves of the columns


@gluon.jit
def rescale_and_add_pv_half_then_release(
    acc_o, shared_p, v_stages, iter, key_begin_in_tile, key_end_in_tile, cfg: gl.constexpr
):
    """Returns acc_o × rescale + PV of a block, once P and V are there; releases both."""
    P_STAGES: gl.constexpr = shared_p.tiles.shape[0]
    DTYPE: gl.constexpr = v_stages.tiles.dtype
    stage = consumer_wait(shared_p.full_barriers, iter, P_STAGES)
    acc_o = acc_o * shared_p.rescales.index(stage).load(gl.SliceLayout(1, acc_o.type.layout))[:, None]
    wait_v_columns_and_zero_oob_rows(v_stages, iter, key_begin_in_tile, key_end_in_tile, I_CONSUMER, cfg)
    p = reinterpret(shared_p.tiles, DTYPE, shared_p.tiles.shape, shared_p.tiles.layout).index(stage)
    acc_o = warpgroup_mma(p, view_column_half_of_v_tile(v_stages, I_CONSUMER, cfg), acc_o, is_async=True)
    acc_o = warpgroup_mma_wait(0, [acc_o])
    thread_barrier()  # all threads have read rescale
    consumer_release(shared_p.empty_barriers, iter, P_STAGES)
    release_v_columns(v_stages, I_CONSUMER, cfg)
    return acc_o


@gluon.jit
def add_pv_half_of_key_range_to_acc_o(acc_o, shared_p, v_stages, first_iter, key_range, cfg: gl.constexpr):
    """Returns acc_o after all blocks of a range of keys. key_range: a WorkTile or a CachedKeyRange"""
    n_start = (key_range.n_block_end - 1) * cfg.BLOCK_N
    for i in range(key_range.num_n_blocks):
        acc_o = rescale_and_add_pv_half_then_release(
            acc_o, shared_p, v_stages, first_iter + i, key_range.key_begin - n_start, key_range.key_end - n_start, cfg
        )
        n_start -= cfg.BLOCK_N
    return acc_o


@gluon.jit
def wait_acc_scale_and_store_second_column_half(OUT, acc_o, work_tile, shared_p, num_done, strides, cfg: gl.constexpr):
    """Epilogue: stores the second half of the output's columns, once the first consumer knows acc_scale."""
    ROW: gl.constexpr = gl.SliceLayout(1, acc_o.type.layout)
    mbarrier.wait(shared_p.acc_full_barrier.index(0), num_done & 1)
    acc_scale = shared_p.acc_scales.load(ROW)
    thread_barrier()  # one thread releases it for all
    mbarrier.arrive(shared_p.acc_empty_barrier.index(0))
    store_output_columns(
        OUT, acc_o, acc_scale, tokens_heads_and_mask_of_output_rows(work_tile, ROW, cfg), strides, cfg.ACC_COLUMNS,
        cfg,
    )  # fmt: skip


@gluon.jit
def second_column_half_consumer(args, cfg: gl.constexpr):
    """Computes half of the columns of every work tile of this CTA."""
    OUT, strides, q_stages, tile_info, v_stages, shared_p = args
    num_done, iter = 0, 0
    mbarrier.wait(q_stages.full_barriers.index(I_SECOND_CONSUMER), 0)
    work_tile, _cached_range = read_work_tile_and_cached_range(tile_info.index(I_SECOND_CONSUMER), True)
    while work_tile.num_n_blocks > 0:
        mbarrier.arrive(q_stages.empty_barriers.index(I_SECOND_CONSUMER), count=cfg.CONSUMER_WARPS)
        acc_o = add_pv_half_of_key_range_to_acc_o(init_acc(cfg), shared_p, v_stages, iter, work_tile, cfg)
        iter += work_tile.num_n_blocks
        wait_acc_scale_and_store_second_column_half(OUT, acc_o, work_tile, shared_p, num_done, strides, cfg)
        num_done += 1
        mbarrier.wait(q_stages.full_barriers.index(I_SECOND_CONSUMER), num_done & 1)
        work_tile, _cached_range = read_work_tile_and_cached_range(tile_info.index(I_SECOND_CONSUMER), True)


@gluon.jit
def second_column_half_consumer_new_then_cached(
    args, NEW_DTYPE: gl.constexpr, cfg: gl.constexpr, new_cfg: gl.constexpr
):
    """Does `second_column_half_consumer` where K and V of the new tokens are arguments of the call."""
    OUT, strides, q_stages, tile_info, v_stages, shared_p = args
    num_done, iter = 0, 0
    new_v_stages = view_stages_as(v_stages, NEW_DTYPE)
    mbarrier.wait(q_stages.full_barriers.index(I_SECOND_CONSUMER), 0)
    work_tile, cached_range = read_work_tile_and_cached_range(tile_info.index(I_SECOND_CONSUMER), True)
    while work_tile.num_n_blocks > 0:
        acc_o = add_pv_half_of_key_range_to_acc_o(init_acc(cfg), shared_p, new_v_stages, iter, work_tile, new_cfg)
        iter += work_tile.num_n_blocks
        acc_o = add_pv_half_of_key_range_to_acc_o(acc_o, shared_p, v_stages, iter, cached_range, cfg)
        iter += cached_range.num_n_blocks
        wait_acc_scale_and_store_second_column_half(OUT, acc_o, work_tile, shared_p, num_done, strides, cfg)
        # NOTE: only here: the producer infers that all stages of the work tile are free.
        mbarrier.arrive(q_stages.empty_barriers.index(I_SECOND_CONSUMER), count=cfg.CONSUMER_WARPS)
        num_done += 1
        mbarrier.wait(q_stages.full_barriers.index(I_SECOND_CONSUMER), num_done & 1)
        work_tile, cached_range = read_work_tile_and_cached_range(tile_info.index(I_SECOND_CONSUMER), True)
