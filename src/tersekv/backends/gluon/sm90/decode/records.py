"""What decode's kernels hand around, by name.

NOTE: Triton's cache knows the source of functions, not of these: who changes the order of fields clears it.
"""

from typing import NamedTuple

from triton.experimental.gluon import language as gl


class Tensors(NamedTuple):
    """What attending reads and writes. META: of each segment, its pieces and the share in which it begins."""

    Q: gl.tensor
    LENS: gl.tensor
    CU: gl.tensor
    MASK: gl.tensor
    SINKS: gl.tensor
    OUT: gl.tensor
    LSE: gl.tensor
    PART: gl.tensor
    META: gl.tensor


class Scales(NamedTuple):
    """Numbers of a call; of keys and values, device tensors that may stand for them."""

    score: gl.tensor  # the softmax's, times log2(e)
    k: gl.tensor
    K_T: gl.tensor
    v: gl.tensor
    V_T: gl.tensor
    out: gl.tensor
    softcap: gl.tensor


class Strides(NamedTuple):
    q_t: gl.tensor
    q_h: gl.tensor
    mask_t: gl.tensor
    out_t: gl.tensor
    out_h: gl.tensor
    lse_t: gl.tensor
    lse_h: gl.tensor


class Tables(NamedTuple):
    """What says where keys lie. stride: of the page table's rows."""

    TABLE: gl.tensor
    LENS: gl.tensor
    CU: gl.tensor
    stride: gl.tensor


class Boxes(NamedTuple):
    """Tensor maps; of stored scales pointers, where they are loaded one by one."""

    K: gl.tensor
    V: gl.tensor
    KS: gl.tensor
    VS: gl.tensor


class Rings(NamedTuple):
    """Of codes and stored scales: a buffer for each copy of a turn, with all stages of it."""

    k: tuple
    k_scales: tuple
    v: tuple
    v_scales: tuple


class Share(NamedTuple):
    """Tiles [x, end) of all, for a group of heads."""

    i: gl.tensor  # its number
    group: gl.tensor
    per: gl.tensor  # tiles of every share
    x: gl.tensor
    end: gl.tensor
    b: gl.tensor  # request that holds tile x
    base: gl.tensor  # flat index of the request's first tile


class Turns(NamedTuple):
    """What columns of queries and of weighted values are multiplied by (`turns`), where rows lie rotated or scaled."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor


class Cursor(NamedTuple):
    """Where the copies are: ahead of the tiles in use, over the ends of segments and requests."""

    x: gl.tensor  # flat index of the tile
    b: gl.tensor  # request
    t: gl.tensor  # tile in its segment
    segment: gl.tensor
    tiles: gl.tensor  # of a segment
    segments: gl.tensor
    first: gl.tensor  # tile of the request that a segment begins with
    keys: gl.tensor
    pages: tuple  # of the tile's copies


class SeenBy(NamedTuple):
    """What says which keys a segment's query rows see."""

    keys: gl.tensor
    rows: gl.tensor  # of the request's query
    r0: gl.tensor  # the segment's first row, all heads of a group counted
    q0: gl.tensor  # the request's first query row
    MASK: gl.tensor
    mask_t: gl.tensor


class Query(NamedTuple):
    """Of a segment: the right operands of the products with keys' parts, and sums of its rows, for int4 keys."""

    parts: tuple  # or their image in shared memory
    total: gl.tensor


class State(NamedTuple):
    """Of query rows: references of the powers, sums of these, and values summed with them."""

    m: gl.tensor
    l: gl.tensor
    acc: gl.tensor


class Cut(NamedTuple):
    """A segment that several shares have a piece of."""

    i_share: gl.tensor  # this one
    first: gl.tensor  # in which it begins
    pieces: gl.tensor


class Hand(NamedTuple):
    """What the converting warpgroup hands over, and when."""

    tiles: gl.shared_memory_descriptor  # fp16: keys and values in turn
    columns: gl.shared_memory_descriptor  # kinds of stored scales of some tiles
    ready: gl.shared_memory_descriptor  # barriers: an item has come
    empty: gl.shared_memory_descriptor  # its place may be filled again


class Buffers(NamedTuple):
    """fp16 operands in shared memory, and the stored scales of a tile."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    scales: tuple
