"""The producer of listed keys: copies rows of the cache by pointer (cp.async, 16 bytes a lane) into the shared memory
that tensor copies fill elsewhere. Page table and lengths are `listed_rows`, which holds visible keys only; rows past
the last are filled with 0.

Every thread arrives at a full barrier once its copies are there (`copy_arrivals`). They are not MMA's kind of writes:
who multiplies fences after the wait.

Wait for a free stage: `listed_rows_producer_with_scale_prep`, on `empty`; mask, rescale, combine: none here.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...versions import async_load

COPY_BYTES = gl.constexpr(16)  # of a lane's copy


class CacheRows(NamedTuple):
    """The rows of latents, rotary part and group scales in memory; pitches from row to row in COPY_BYTES."""

    CKV: gl.tensor
    KPE: gl.tensor
    SCALES: gl.tensor
    ckv_row_pitch_16_bytes: gl.tensor
    kpe_row_pitch_16_bytes: gl.tensor
    scale_row_pitch_16_bytes: gl.tensor


@gluon.constexpr_function
def copy_layout(columns, bits, num_warps):
    """Layout of a tile's copies: neighbouring lanes copy a row, 16 bytes each."""
    lanes = columns * bits // 8 // 16
    return gl.BlockedLayout([1, columns // lanes], [32 // lanes, lanes], [num_warps, 1], [1, 0])


@gluon.jit
def load_row_indices(p_row_indices, n_block, num_keys, COLUMNS: gl.constexpr, BITS: gl.constexpr, cfg: gl.constexpr):
    """Loads the rows of n_block for copies of such a tile; −1 past the last key."""
    LAYOUT: gl.constexpr = copy_layout(COLUMNS, BITS, gl.num_warps())
    o_n = n_block * cfg.BLOCK_N + gl.arange(0, cfg.BLOCK_N, gl.SliceLayout(1, LAYOUT))
    return gl.load(p_row_indices + o_n, mask=o_n < num_keys, other=-1)


@gluon.jit
def start_copy_of_gathered_rows(X, row_pitch_16_bytes, rows, first_column, smem_tile):
    """Starts the copies of a tile's columns, from `first_column` on."""
    COLUMNS: gl.constexpr = smem_tile.shape[1]
    BITS: gl.constexpr = smem_tile.dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = copy_layout(COLUMNS, BITS, gl.num_warps())
    rows = gl.convert_layout(rows, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    o_d = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    p_row = X + rows.to(gl.int64) * row_pitch_16_bytes * (8 * COPY_BYTES // BITS)
    async_load(smem_tile, p_row[:, None] + o_d[None, :], mask=(rows >= 0)[:, None])


@gluon.jit
def signal_copies(full_barrier):
    """Lets this thread arrive once its copies so far are in shared memory."""
    async_copy.mbarrier_arrive(full_barrier, increment_count=False)


@gluon.constexpr_function
def copy_arrivals(cfg):
    """Arrivals that a full barrier counts: of tensor copies that of their bytes alone."""
    return 128 if cfg.GATHER_ROWS else 1


@gluon.jit
def fence_async_shared_if_gathered(cfg: gl.constexpr):
    """Orders copies that a barrier has shown before MMAs."""
    if cfg.GATHER_ROWS:
        fence_async_shared()


@gluon.jit
def wait_full_and_fence_if_gathered(full_barrier, phase, cfg: gl.constexpr):
    """Waits for copies that MMAs read."""
    mbarrier.wait(full_barrier, phase)
    fence_async_shared_if_gathered(cfg)
