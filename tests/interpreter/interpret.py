"""Exact casts for Triton's CPU interpreter.

The interpreter of Triton 3.6 rounds fp32 → fp8 ties away from zero, drops carries, does not saturate, truncates
fp32 → bf16 and reads an e4m3 NaN as 480. `install()` replaces its one float-conversion function by torch's casts,
saturating where the destination is fp8, as `cvt.rn.satfinite` does. It touches a private function, so it refuses an
interpreter that it does not know; test_casts.py checks every bf16 value and every fp8 code.

TRITON_INTERPRET=1 must be set before triton is imported: it changes what `@triton.jit` returns.
"""

from __future__ import annotations

import inspect

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

_PARAMETERS = ["input", "input_dtype", "output_dtype", "rounding_mode"]


def install() -> None:
    """Make the interpreter's float conversions exact. Raises RuntimeError for an interpreter that looks different."""
    original = getattr(interpreter, "_convert_float", None)
    if original is convert:
        return
    if original is None or list(inspect.signature(original).parameters) != _PARAMETERS:
        raise RuntimeError(f"the interpreter of Triton {triton.__version__} converts floats in an unknown way")
    interpreter._convert_float = convert
    _index_scalars()
    _multiply_bf16()
    _bool_masks()


def _index_scalars() -> None:
    """NumPy from 2.4 turns only 0-d arrays into numbers; the interpreter's scalars are arrays of one element."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: object) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

    interpreter._patch_lang_tensor = patched


def _multiply_bf16() -> None:
    """The interpreter's dot takes bf16 for the integers that carry its bits."""
    dot = interpreter.InterpreterBuilder.create_dot

    def exact(self, a, b, d, input_precision, max_num_imprecise_acc):  # type: ignore[no-untyped-def]
        a, b = (_widen(x) if x.dtype == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, d, input_precision, max_num_imprecise_acc)

    interpreter.InterpreterBuilder.create_dot = exact


def _bool_masks() -> None:
    """Triton 3.9 loads with masks of NumPy bools only, but its own int1 arithmetic may leave integers."""
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def masked_load(self, ptrs, mask, *rest, **options):  # type: ignore[no-untyped-def]
        return load(self, ptrs, _as_bool(mask), *rest, **options)

    def masked_store(self, ptrs, value, mask, *rest, **options):  # type: ignore[no-untyped-def]
        return store(self, ptrs, value, _as_bool(mask), *rest, **options)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store


def _as_bool(mask):  # type: ignore[no-untyped-def]
    data = np.asarray(mask.data)  # descriptors give plain arrays, whose data are a memoryview
    return mask if data.dtype == np.bool_ else interpreter.TensorHandle(data.astype(np.bool_), tl.int1)


def _widen(x: interpreter.TensorHandle) -> interpreter.TensorHandle:
    return interpreter.TensorHandle(convert(x.data, x.dtype, tl.float32, None).view(np.float32), tl.float32)


def convert(input: np.ndarray, input_dtype: tl.dtype, output_dtype: tl.dtype, rounding_mode: object) -> np.ndarray:
    """Bits of `input`, an array that holds values of `input_dtype`, converted to `output_dtype` (RNE)."""
    source, to = _torch_dtype(input_dtype), _torch_dtype(output_dtype)
    bits = np.ascontiguousarray(input).view(_BITS[source.itemsize])
    x = torch.from_numpy(bits.copy()).view(source)
    if to.itemsize == 1:
        limit = torch.finfo(to).max
        x = x.to(torch.float64 if source == torch.float64 else torch.float32).clamp(-limit, limit)
        x = x.where(~x.isnan(), torch.nan)  # the instruction gives one NaN, without a sign
    return x.to(to).view(_BITS_TORCH[to.itemsize]).numpy().view(f"uint{8 * to.itemsize}").reshape(input.shape)


_BITS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_BITS_TORCH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TORCH = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def _torch_dtype(dtype: tl.dtype) -> torch.dtype:
    name = str(dtype)
    if name not in _TORCH:
        raise ValueError(f"the interpreter's casts: want one of {', '.join(_TORCH)}, got {name}")
    return _TORCH[name]
