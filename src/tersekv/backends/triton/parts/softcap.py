"""Logit softcap, as precise for a cap of a million as for one of thirty."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def apply_softcap_to_log2_scores(s_log2, softcap):
    """Returns softcap × tanh(s / softcap), in units of log2, of scores s in units of log2; softcap in natural units.

    tanh is 1 − 2 / (e^2x + 1), whose digits cancel near 0: there, s is multiplied by tanh(x) / x, a polynomial in the
    square of x × log2(e) (fitted for the least relative error, 3.2e-7).
    """
    ratio_to_cap = s_log2 * (1.0 / softcap)
    square = ratio_to_cap * ratio_to_cap
    tanh_over_x = (
        ((7.488054e-4 * square - 5.668405e-3) * square + 3.0677834e-2) * square - 1.6014094e-1
    ) * square + 1.0
    capped_by_tanh = (softcap * LOG2E) * (1.0 - 2.0 / (tl.exp2(ratio_to_cap + ratio_to_cap) + 1.0))
    return tl.where(tl.abs(ratio_to_cap) < 1.0, s_log2 * tanh_over_x, capped_by_tanh)
