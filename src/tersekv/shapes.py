"""Shapes with letters: binds each letter at first sight, and says in the caller's words what does not fit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

from .calls import CALLS, IndexAppendCall, MLAAppendCall, MLADecodeCall, MLAPrefillCall, TranscodeCall

# Record → field → the argument of the public function, where the names differ.
_ARGUMENTS: dict[type, dict[str, str]] = {
    MLAAppendCall: {"q_rope": "q_pe", "q_rope_out": "q_pe_out"},
    MLADecodeCall: {n: n.replace("_", ".", 1) for n in MLADecodeCall._fields if n.startswith("extra_")},
    IndexAppendCall: {"norm_weight": "norm[0]", "norm_bias": "norm[1]"},
    MLAPrefillCall: {n: f"plan.{n}" for n in ("buffer_row_offsets", "cache_offsets", "buffer_lengths")},
    TranscodeCall: {"src_k": "src.k", "src_v": "src.v", "k_cache": "dst.k", "v_cache": "dst.v"}
    | {
        f"{name}{side}{what}": f"{of}.{side}{what}"
        for name, of in (("src_", "src"), ("", "dst"))
        for side in "kv"
        for what in ("_scale_cache", "_scale", "_scale_t", "_signs", "_channel_scale")
    },
}


def require(ok: bool, name: str, want: str, got: Any) -> None:
    if not ok:
        raise ValueError(f"{name}: want {want}, got {got}")


def argument_of_field(record: type, field: str) -> str:
    """The argument that a field comes from. A scale's tensor goes by the name of the scale."""
    return _ARGUMENTS.get(record, {}).get(field, field).removesuffix("_t")


def argument_of(op: str, call: Any, field: str) -> str:
    """As `argument_of_field`, of a call or its facts: tersekv's own rope_append takes whole what FlashInfer's takes in
    parts."""
    name = argument_of_field(CALLS[op][0], field)
    whole = op == "rope_append" and call.slot_mapping is not None
    return name.replace("_rope", "").replace("_nope", "") if whole else name


class ShapeChecker:
    """Binds dimension letters at first sight and compares at every later one."""

    def __init__(self, f: SimpleNamespace) -> None:
        self.f = f
        self.dims: dict[str, int] = {}
        self.seen_in: dict[str, str] = {}  # letter → the tensor that bound it

    def see(self, name: str, pattern: str, dtypes: Iterable[torch.dtype], *, last_dim_dense: bool = True) -> bool:
        """Check tensor `name` (None passes: returns False) against a pattern such as "P S H D".

        A token of the pattern is a letter (bound or to be bound), a number, or a letter with "/n" or "+n".
        """
        fact = getattr(self.f, name)
        if fact is None:
            return False
        name = argument_of_field(CALLS[self.f.op][0], name)
        tokens = pattern.split()
        wanted = [self._size(t) for t in tokens]
        dtypes = tuple(dtypes)
        fits = len(fact.shape) == len(tokens) and all(
            w is None or w == got for w, got in zip(wanted, fact.shape, strict=False)
        )
        if not fits or fact.dtype not in dtypes:
            dims = ", ".join(
                t if w is None else (str(w) if t.isdigit() else f"{t}={w}") for t, w in zip(tokens, wanted, strict=True)
            )
            raise ValueError(
                f"{name}: want [{dims}] {' | '.join(map(dtype_name, dtypes))}, "
                f"got {list(fact.shape)} {dtype_name(fact.dtype)}{self._whose(tokens, wanted, fact.shape)}"
            )
        # Strides of an empty tensor mean nothing.
        if last_dim_dense and fact.shape and fact.shape[-1] > 1 and 0 not in fact.shape and fact.stride[-1] != 1:
            raise ValueError(f"{name}: want stride 1 in the last dimension, got strides {list(fact.stride)}")
        if fact.device != self.f.device:
            raise ValueError(find_other_device(self.f))
        for token, got in zip(tokens, fact.shape, strict=True):
            if token.isidentifier():
                self.dims.setdefault(token, got)
                self.seen_in.setdefault(token, name)
        return True

    def _whose(self, tokens: list[str], wanted: list[int | None], got: tuple[int, ...]) -> str:
        """Where the sizes come from that differ: the other tensor may be the odd one out."""
        owners: dict[str, list[str]] = {}
        for letter, w, g in zip(tokens, wanted, got, strict=False):
            if w not in (None, g) and letter in self.seen_in and len(tokens) == len(got):
                owners.setdefault(self.seen_in[letter], []).append(letter)
        told = [f"{', '.join(letters)} as in {owner}" for owner, letters in owners.items()]
        return f" ({'; '.join(told)})" if told else ""

    def _size(self, token: str) -> int | None:
        if token.isdigit():
            return int(token)
        for sep, op in (("/", int.__floordiv__), ("+", int.__add__)):
            if sep in token:
                letter, n = token.split(sep)
                size = self._size(letter)
                other = self._size(n)
                return None if size is None or other is None else op(size, other)
        return self.dims.get(token)

    def __getitem__(self, letter: str) -> int:
        return self.dims[letter]


def find_other_device(f: SimpleNamespace) -> str:
    """Which tensor is not where most of them are."""
    record = CALLS[f.op][0]
    where = {name: x.device for name, x in vars(f).items() if hasattr(x, "aligned")}
    most = Counter(where.values()).most_common(1)[0][0]
    # Tensors that a check put together again come after the record's own, and are what the caller knows.
    name = min((n for n in where if where[n] != most), key=lambda n: n in record._fields)  # type: ignore[attr-defined]
    return f"{argument_of_field(record, name)}: want device {most}, got {where[name]}"


def overlaps(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether two elements that differ in one index, or in two, lie in one place."""
    dims = [(n, step) for n, step in zip(shape, stride, strict=True) if n > 1]
    if 0 in shape or any(step == 0 for _, step in dims):
        return 0 not in shape
    pairs = ((*a, *b, math.gcd(a[1], b[1])) for i, a in enumerate(dims) for b in dims[:i])
    return any(step_b // common < n_a and step_a // common < n_b for n_a, step_a, n_b, step_b, common in pairs)


def dtype_name(d: torch.dtype) -> str:
    return str(d).removeprefix("torch.")
