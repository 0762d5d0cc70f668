"""Capped scores, as precise for a cap of a million as for one of thirty."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def softcapped(s, softcap):
    """softcap × tanh(s / softcap) of scores s; both in units of log2, softcap in those of scores.

    tanh is 1 − 2 / (e^2x + 1), whose digits cancel near 0: below, s is multiplied by tanh(x) / x, a polynomial in the
    square of x × log2(e) (fitted for the least relative error, 3.2e-7).
    """
    t = s * (1.0 / softcap)
    u = t * t
    ratio = (((7.488054e-4 * u - 5.668405e-3) * u + 3.0677834e-2) * u - 1.6014094e-1) * u + 1.0
    far = (softcap * LOG2E) * (1.0 - 2.0 / (tl.exp2(t + t) + 1.0))
    return tl.where(tl.abs(t) < 1.0, s * ratio, far)
