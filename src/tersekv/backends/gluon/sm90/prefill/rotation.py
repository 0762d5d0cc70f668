"""Rotation and channel scales in prefill, of queries and of acc_o in registers, by `parts/hadamard`.

Heads change with the work tile, and shared memory is full: signs and channel scales are loaded where they are used.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts.hadamard import blockwise_hadamard, load_rotation_scales


class RotationTensors(NamedTuple):
    """Signs and channel scales of K and V; None where the cache has none."""

    K_SIGNS: gl.tensor
    V_SIGNS: gl.tensor
    K_CHANNEL_SCALES: gl.tensor
    V_CHANNEL_SCALES: gl.tensor


@gluon.jit
def rotate_query(x, rotation, kv_head, cfg: gl.constexpr):
    """Returns query rows [rows, columns] fp32, rotated and scaled like the cache's keys."""
    ROTATION: gl.constexpr = cfg.K_ROTATION
    o_d = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    x = (
        x
        * load_rotation_scales(rotation.K_SIGNS, rotation.K_CHANNEL_SCALES, kv_head, o_d, cfg.HEAD_DIM, ROTATION)[
            None, :
        ]
    )
    if ROTATION.ROTATED:
        x = blockwise_hadamard(x, 1, cfg.HEAD_DIM & -cfg.HEAD_DIM)
    return x


@gluon.jit
def unrotate_acc(acc, rotation, kv_head, cfg: gl.constexpr):
    """Returns acc_o [rows, columns] with the cache's V rotation undone."""
    ROTATION: gl.constexpr = cfg.V_ROTATION
    if ROTATION.ROTATED:
        acc = blockwise_hadamard(acc, 1, cfg.HEAD_DIM_V & -cfg.HEAD_DIM_V)
    o_d = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    return (
        acc
        * load_rotation_scales(rotation.V_SIGNS, rotation.V_CHANNEL_SCALES, kv_head, o_d, cfg.HEAD_DIM_V, ROTATION)[
            None, :
        ]
    )


@gluon.jit
def rotate_acc(acc, rotation, kv_head, cfg: gl.constexpr):
    """Returns acc_o of new V, rotated to be added to that of cached V."""
    ROTATION: gl.constexpr = cfg.V_ROTATION
    o_d = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    acc = (
        acc
        * load_rotation_scales(
            rotation.V_SIGNS, rotation.V_CHANNEL_SCALES, kv_head, o_d, cfg.HEAD_DIM_V, ROTATION, True
        )[None, :]
    )
    if ROTATION.ROTATED:
        acc = blockwise_hadamard(acc, 1, cfg.HEAD_DIM_V & -cfg.HEAD_DIM_V)
    return acc
