"""What MLA decode's kernels hand around, by name; and what all of them begin with."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts.schedule import LOG2E, deal, locate, scalar, share


class Tensors(NamedTuple):
    """What consumers read and write. META: see `schedule.meta_of`."""

    QN: gl.tensor
    QP: gl.tensor
    LENS: gl.tensor
    CU: gl.tensor
    OUT: gl.tensor
    LSE: gl.tensor
    PART: gl.tensor
    META: gl.tensor


class Strides(NamedTuple):
    qn_t: gl.tensor
    qn_h: gl.tensor
    qp_t: gl.tensor
    qp_h: gl.tensor
    out_t: gl.tensor
    out_h: gl.tensor
    lse_t: gl.tensor
    lse_h: gl.tensor


class Tables(NamedTuple):
    """What says where keys lie."""

    TABLE: gl.tensor
    LENS: gl.tensor
    CU: gl.tensor
    stride: gl.tensor  # of the page table's rows
    nowhere: gl.tensor  # a row behind the cache, which reads as 0
    s_pitch: gl.tensor  # rows of group scales of a page


class Boxes(NamedTuple):
    """Tensor maps of latents, their rotary part and their group scales."""

    latents: gl.tensor
    rotary: gl.tensor
    scales: gl.tensor


class Rings(NamedTuple):
    """Where their copies go; without group scales, `scales` is any of the others."""

    latents: gl.shared_memory_descriptor
    rotary: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor


class Query(NamedTuple):
    """In shared memory, by pieces of columns."""

    latents: gl.shared_memory_descriptor
    rotary: gl.shared_memory_descriptor


class Scales(NamedTuple):
    score: gl.tensor  # of scores, in powers of two
    value: gl.tensor  # of values in the output


class Share(NamedTuple):
    """Tiles [x, end) of all, for a block of heads."""

    max_segments: gl.tensor  # of a request
    p: gl.tensor  # the program
    per: gl.tensor  # tiles of every share
    x: gl.tensor
    end: gl.tensor
    b: gl.tensor  # request that holds tile x
    base: gl.tensor  # flat index of the request's first tile


class State(NamedTuple):
    """Of query rows: references of the powers, sums of these, and values summed with them."""

    m: gl.tensor
    l: gl.tensor
    acc: gl.tensor


@gluon.jit
def scales_of(softmax_scale, SOFTMAX_T, kv_scale, KV_T, out_scale, OUT_T, c: gl.constexpr):
    scale_kv = scalar(kv_scale, KV_T, c.V_T)
    score_scale = scalar(softmax_scale, SOFTMAX_T, c.SOFTMAX_T) * LOG2E * scale_kv
    return Scales(score_scale, scale_kv * scalar(out_scale, OUT_T, c.OUT_T))


@gluon.constexpr_function
def holds_all(c):
    """Whether BLOCK_B holds all requests, so that their lengths can be loaded early (`load_tiles`)."""
    return c.BLOCK_B < 1024 and not c.WHOLE


@gluon.jit
def share_of(LENS, CU, B, loaded, i_share, num_shares, max_segments, p, c: gl.constexpr):
    """This program's Share. loaded: by `load_tiles`, if BLOCK_B holds all requests."""
    if holds_all(c):
        x, end, per, b, base = deal(loaded, i_share, num_shares, c)
    else:
        x, end, per = share(LENS, CU, B, i_share, num_shares, c)
        b, base = locate(LENS, CU, B, gl.minimum(x, end - 1), c)
    return Share(max_segments, p, per, x, end, b, base)


@gluon.jit
def through_memory(box, i: gl.constexpr, x):
    """x, from shared memory: then the compiler sees that it is the same in all threads, and so are loops over it."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    box.index(i).store(gl.full([1], x, gl.int32, L))
    return gl.max(box.index(i).load(L), 0)
