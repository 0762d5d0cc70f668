"""FlashInfer's merges of attention results, whose LSE is base 2. Imported through `tersekv.compat.flashinfer`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..calls import MergeCall
from ..ops.registry import dispatch_call
from ._adapt import dtype_name, lookup_cached, tensor, with_caller_names

_LN2 = math.log(2.0)


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """`flashinfer.merge_state`: merge two attention results over disjoint keys.

        >>> v_a, v_b = torch.randn(2, 7, 8, 64)
        >>> s_a, s_b = torch.randn(2, 7, 8)
        >>> v, s = merge_state(v_a, s_a, v_b, s_b)
        >>> v.shape, s.shape
        (torch.Size([7, 8, 64]), torch.Size([7, 8]))

        v_a, v_b:  [T, H, D]  bf16 | fp16 | fp32
        s_a, s_b:  [T, H]     fp32 LSE, base 2

    Returns (v [T, H, D], s [T, H]), s base 2. Raises ValueError for tensors that do not fit together.
    """
    for name, x, shape in (
        ("v_a", v_a, "T, H, D"),
        ("s_a", s_a, "T, H"),
        ("v_b", v_b, "T, H, D"),
        ("s_b", s_b, "T, H"),
    ):
        tensor(name, x, shape)
    for name, a, b in (("v_b", v_a, v_b), ("s_b", s_a, s_b)):
        if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
            raise ValueError(
                f"{name}: want {list(a.shape)} {dtype_name(a.dtype)} on {a.device}, "
                f"got {list(b.shape)} {dtype_name(b.dtype)} on {b.device}"
            )
    names = {"outs": "v_a", "lses": "s_a"}
    return _merge(names, torch.stack((v_a, v_b)), torch.stack((s_a, s_b)))


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """`flashinfer.merge_states`: merge any number of attention results over disjoint keys.

        >>> v, s = merge_states(torch.randn(7, 3, 8, 64), torch.randn(7, 3, 8))
        >>> v.shape, s.shape
        (torch.Size([7, 8, 64]), torch.Size([7, 8]))

        v:  [T, n, H, D]  bf16 | fp16 | fp32
        s:  [T, n, H]     fp32 LSE, base 2

    Returns (v [T, H, D], s [T, H]), s base 2. Raises ValueError for tensors that do not fit together.
    """
    tensor("v", v, "T, n, H, D"), tensor("s", s, "T, n, H")
    return _merge({"outs": "v", "lses": "s"}, v.transpose(0, 1), s.transpose(0, 1))


def _merge(names: dict[str, str], outs: Tensor, base2: Tensor) -> tuple[Tensor, Tensor]:
    if base2.dtype != torch.float32:  # a product with a number may be one
        raise ValueError(f"{names['lses']}: want float32, got {dtype_name(base2.dtype)}")
    # NOTE: FlashInfer's LSE is base 2, tersekv's natural: two multiplications of a tensor as small as the LSE.
    lses = base2 * _LN2
    signature, found = lookup_cached(names, "merge_states", ("merge",), (outs, lses, None, None))
    if found is not None:
        return found[0], found[1].mul_(1 / _LN2)
    out = torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device)
    lse = torch.empty(outs.shape[1:3], dtype=torch.float32, device=outs.device)
    call = MergeCall(outs, lses, out, lse)
    with_caller_names(
        names, dispatch_call, "merge_states", call, None, signature._replace(outputs={"out": out, "lse": lse})
    )
    return out, lse.mul_(1 / _LN2)
