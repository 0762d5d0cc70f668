"""What a K/V cache may have beside its formats: rotated rows, scales of channels, and another format for V.

Rotation: rows are multiplied by the orthogonal R = diag(signs) · H / sqrt(b), H Sylvester's Hadamard matrix, in blocks
of b columns, so that outliers are spread over a block. Channel scales: rows are divided by one number a head and
channel. An append does both, the scales first; an attention does the same to its queries (multiplying by the scales),
and undoes it in its output.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from .formats import (
    BATCH_INVARIANCE,
    BLOCK,
    CHANNELS,
    FP8,
    LATENT_SINKS,
    LISTS,
    LSE_OF_KEYS,
    MAX_LOGITS,
    PAIRS,
    ROTATION,
    TENSOR,
    TWO_SETS,
    KVFormat,
)
from .scalars import as_float, round_to_fp32
from .shapes import ShapeChecker, dtype_name, require
from .tracing import tracing

HADAMARD = "hadamard"
# After the leading 1, a bit a column, 1 for +1: vLLM's 2 * bernoulli(0.5) - 1 with seed 0x9E3779B9. Written down, since
# a traced program that drew them would draw others each time it runs.
_SIGNS = bin(
    0x1B09ACEA68DAC010136BC22651C2AFED681D125528223F5D51219D04C05C2045F << 256
    | 0xCC3876B2D3E395155BB8A9D89ACDC019769E1C0C700464B36E2405939D35B951
)[3:]
MAX_BLOCK = len(_SIGNS)  # columns that are rotated together
_SMALLEST = 1e-3  # of a channel scale, before a head's are normalised
_F32 = (torch.float32,)


def block_of(dim: int) -> int:
    """The columns that are rotated together: the largest power of two that divides a head's size."""
    return dim & -dim


def signs(dim: int, device: torch.device | None = None) -> Tensor:
    """[b] fp32, ±1: the signs of a rotation of rows of `dim`, the same at every call. They are vLLM's."""
    block = block_of(dim)
    if block > MAX_BLOCK:
        raise ValueError(f"rotation: want heads in blocks of at most {MAX_BLOCK} columns, got {block} of {dim}")
    drawn = [1.0 if bit == "1" else -1.0 for bit in _SIGNS[:block]]
    return torch.tensor(drawn, dtype=torch.float32, device=device or torch.get_default_device())


_shared_signs: WeakValueDictionary[tuple[int, torch.device], Tensor] = WeakValueDictionary()


def shared_signs(dim: int, device: torch.device | None = None) -> Tensor:
    """`signs`, one tensor on a device as long as some cache has it: so equal rotations are known without a look."""
    if tracing():
        return signs(dim, device)
    key = block_of(dim), torch.empty(0, device=device).device  # with its index
    found = _shared_signs.get(key)
    if found is None:
        with torch.inference_mode(False):  # caches outside of it share them
            found = _shared_signs[key] = signs(dim, device)
    return found


def channel_scale(rows: Tensor) -> Tensor:
    """[H, D] fp32: each channel's largest magnitude over rows [T, H, D], normalised to mean 1 a head: channel scales.

        >>> k_channel_scale = tersekv.channel_scale(k)
        >>> k_channel_scale.shape
        torch.Size([2, 64])

    Rows are what an append gets, keys after their rotary embedding: of some text that is like what will be cached. A
    channel counts with a thousandth of the head's mean at least. Raises ValueError for rows of another
    rank, for none, and for rows that hold an infinity or a NaN: a calibration looks at values on the host.
    """
    if rows.dim() != 3 or not len(rows):
        raise ValueError(f"rows: want [T, H, D] with at least one token, got {list(rows.shape)}")
    # Not the root mean square: what is uneven within a channel would cost the whole row its steps (docs/choosing.md).
    size = rows.to(torch.float64).abs().amax(0)
    if not size.isfinite().all():
        raise ValueError(f"rows: want finite numbers, got {rows[~rows.isfinite()][0].item()}")
    mean = size.mean(-1, keepdim=True)
    size = torch.where(mean > 0, torch.maximum(size / mean, torch.full_like(size, _SMALLEST)), 1.0)
    return (size / size.mean(-1, keepdim=True)).to(torch.float32)


def channel_scales(
    name: str, scale: Tensor | None, layers: int, shape: tuple[int, int], device: torch.device | None
) -> Sequence[Tensor] | None:
    """Channel scales of each layer."""
    if scale is None:
        return None
    if not isinstance(scale, Tensor):
        raise TypeError(f"{name}: want Tensor or None, got {type(scale).__name__}")
    kind = (device or torch.get_default_device()).type
    if scale.shape not in (shape, (layers, *shape)) or scale.dtype != torch.float32 or scale.device.type != kind:
        got = f"{list(scale.shape)} {dtype_name(scale.dtype)} on {scale.device}"
        want = f"{list(shape)} or {[layers, *shape]} float32 on {kind}"
        raise ValueError(f"{name}: want {want}, got {got}")
    all_positive(name, scale)
    return [scale] * layers if scale.dim() == 2 else scale.unbind()


def all_positive(name: str, scale: Tensor) -> None:
    """Raise ValueError for a channel scale that rows cannot be divided by. Values are looked at here, where a cache is
    made, and not in calls; where there are none to look at, checked mode finds them."""
    if scale.is_meta or isinstance(scale, FakeTensor) or tracing():
        return
    if scale.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    wrong = ~((scale > 0) & scale.isfinite())
    if wrong.any():
        i = wrong.nonzero()[0].tolist()
        raise ValueError(f"{name}: want positive, finite numbers, got {float(scale[tuple(i)])} at {i}")


def all_signs(name: str, signs: Tensor) -> None:
    """Raise ValueError for signs of a rotation that are not."""
    wrong = signs.abs() != 1
    if wrong.any():
        i = wrong.nonzero()[0].tolist()
        raise ValueError(f"{name}: want 1 or -1, got {float(signs[tuple(i)])} at {i}")


def fitting_scale(
    name: str, scale: float | Tensor, f: KVFormat, device: torch.device | None, heads: int = 1
) -> float | Tensor:
    """The scale, a number as Python's own. Raises unless the format has such a scale, and fp32 holds the number and its
    reciprocal, or a tensor is fp32 on such a device, of one element or one a head; what it holds is for the calls."""
    value = None if isinstance(scale, Tensor) else as_float(name, scale, "a number or a Tensor")
    if f.scale not in (TENSOR, BLOCK) and value != 1:
        given = "a tensor" if value is None else f"{value:.6g}"
        raise ValueError(f"{name}: want 1.0 for {f.name}, which has no scale of the tensor, got {given}")
    if isinstance(scale, Tensor):
        kind = (device or torch.get_default_device()).type
        if scale.shape not in ((), (1,), (heads,)) or scale.dtype != torch.float32 or scale.device.type != kind:
            want = f"float32 with {' or '.join(map(str, sorted({1, heads})))} elements on {kind}"
            got = f"{list(scale.shape)} {str(scale.dtype).removeprefix('torch.')} on {scale.device}"
            raise ValueError(f"{name}: want {want}, got {got}")
        return scale
    assert value is not None
    if not 0 < value < float("inf"):
        raise ValueError(f"{name}: want a positive, finite number, got {value:.6g}")
    if tracing():  # a symbol has no fp32 value yet: that is for the calls
        return value
    stored = round_to_fp32(value)
    if not stored or not 0 < round_to_fp32(1 / stored) < float("inf"):
        raise ValueError(f"{name}: want a positive number that fp32 holds, and its reciprocal too, got {value:.6g}")
    return value


def required_features(f: Any) -> list[str]:
    """What of these a call's facts have, and what else it asks for that a backend's file may not take."""
    asked = [BATCH_INVARIANCE] if getattr(f, "batch_invariant", False) else []
    asked += [LISTS] if getattr(f, "indices", None) is not None else []
    asked += [TWO_SETS] if getattr(f, "extra_indices", None) is not None else []
    if not hasattr(f, "v_format"):
        sinks = getattr(f, "sinks", None) is not None
        asked += [LATENT_SINKS] if sinks else []
        asked += [LSE_OF_KEYS] if sinks and f.lse_of_keys else []
        return asked + ([MAX_LOGITS] if getattr(f, "max_logits", None) is not None else [])
    has = {
        PAIRS: f.v_format not in ("", f.format),
        ROTATION: f.k_signs is not None or f.v_signs is not None,
        CHANNELS: f.k_channel_scale is not None or f.v_channel_scale is not None,
    }
    return [what for what, there in has.items() if there] + asked


def check_attributes(f: SimpleNamespace, s: ShapeChecker, dims: tuple[int, int]) -> None:
    """Raise ValueError unless signs and scales of channels fit heads of these sizes, K's and V's."""
    for side, dim in zip("kv", dims, strict=True):
        s.see(f"{side}_signs", str(block_of(dim)), _F32)
        s.see(f"{side}_channel_scale", f"H {dim}", _F32)


def check_no_attributes(f: SimpleNamespace) -> None:
    """Raise ValueError for rows of codes, which are stored as they are, where the cache has something of these."""
    for what in required_features(f):
        require(f.k.dtype not in FP8, "k", f"values for a cache with {what}", f"{dtype_name(f.k.dtype)} codes")
