"""Is what an operation wrote what it should have written? Codes and scales by bytes, attention by a relative norm.

Memory is compared whole: a byte written outside the rows of a view, or to what is only read, is found too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..calls import CALLS
from .codes import decode, encode
from .memory import as_bytes, put, storage_bytes
from .reference import Expected, latent_rows

EXACT = 3e-3  # relative norm of a 16- or 32-bit output, against fp64
FAST = 3e-2  # with precision="fast"
SCORES = 1e-3  # relative norm of an indexer's scores
LSE_ROUNDING = 6  # times an LSE's own rounding that are accepted beside LSE
REQUANTISED = 2e-2  # of what was quantised on the way: a code may differ by one where what it is made of is rounded
STORED = 1e-2  # rows that an MLA prefill norms and stores: a code may differ by one where sums differ in order
STEP = {
    torch.float8_e4m3fn: 1 / 8,
    torch.float8_e5m2: 1 / 4,
}  # from a code to the next, in shares of the larger one, at most
LSE = 2e-3  # absolute
PER_TOKEN = 2.0  # one token may err by this many times the limit of the whole


class Report(NamedTuple):
    """error: a relative norm, or the share of elements that differ; bound: the largest that is accepted, 0 where bytes
    have to be equal; message: None where all is well."""

    error: float
    message: str | None
    bound: float = 0.0


def compare(op: str, got: Any, want: Any, expected: Expected) -> Report:
    """Compare the written fields of two call records on the CPU. Overwrites both. Error and bound are of the field that
    is nearest to its bound.

    got:       after the operation
    want:      after `reference.run`, which returned `expected`
    """
    reports = []
    precision = getattr(got, "precision", "exact")
    for name, values in expected.values.items():
        tensor = getattr(got, name)
        if name in ("lse", "max_logits"):
            reports.append(_lse(name, decode(tensor), values, expected.lse_rounding))
        elif expected.bounds is not None:
            reports.append(_bounded(name, decode(tensor), values, expected.bounds[name]))
        else:
            limit = REQUANTISED if expected.requantised else limit_of(name, precision)
            reports.append(_values(name, decode(tensor), values, limit, tensor.dtype))
        for call in (got, want):  # what is left must be equal to the byte
            getattr(call, name).zero_()
    if expected.rows is not None:
        rows = zip(latent_rows(got, *expected.rows), latent_rows(want, *expected.rows), strict=True)
        steps = [STEP.get(cache.dtype, 0.0) for cache in (got.ckv, got.kpe)]
        reports += [
            _values(f"{n} rows", g, w, STORED, step=step)
            for n, (g, w), step in zip(("ckv", "kpe"), rows, steps, strict=True)
        ]
        for call in (got, want):
            _clear_rows(call, *expected.rows)
    for name in CALLS[op][1]:
        if getattr(got, name) is not None:
            reports.append(_bytes(name, getattr(got, name), getattr(want, name)))
    reports += [_unchanged(n, g, w) for n, g, w in zip(got._fields, got, want, strict=True) if n not in CALLS[op][1]]
    messages = dict.fromkeys(r.message for r in reports if r.message)
    nearest = max(reports, key=lambda r: share_of_bound(r.error, r.bound))
    return Report(nearest.error, "\n".join(messages) or None, nearest.bound)


def share_of_bound(error: float, bound: float) -> float:
    """How near an error is to what is accepted: from 1 on it is beyond."""
    return error / bound if bound else torch.inf if error else 0.0


def limit_of(name: str, precision: str) -> float:
    """The largest relative error of a written field that is accepted, before an 8-bit output's own rounding."""
    return FAST if precision == "fast" and name == "out" else EXACT


def relative(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖; the plain norm of `got` where `want` is 0."""
    norm = float(want.norm())
    return float((got - want).norm()) / (norm or 1.0)


def _values(
    name: str, got: Tensor, want: Tensor, limit: float, dtype: torch.dtype | None = None, step: float = 0.0
) -> Report:
    """dtype: of an output. One of 8 bits may be the nearest code of anything within the limit, so that its own rounding
    comes on top: |code(y) − want| <= |code(want) − want| + 2 |y − want|, among subnormals too. Of fp16 it does so among
    subnormals only, where it is no small share of a value.

    step: of stored rows. One code of a row may be the next one whatever it weighs in the row, since the sum that it is
    rounded from may lie on either side of a border; of all rows together one, too.
    """
    if not want.numel():
        return Report(0.0, None)
    wrong = ~got.isfinite()
    if wrong.any():
        i = _first(wrong)
        return Report(torch.inf, f"{name}: want finite values, got {float(got[i])} at {list(i)}", limit)
    own = torch.zeros_like(want)
    if dtype is not None and dtype.itemsize == 1:
        own, limit = decode(encode(want, dtype)) - want, 2 * limit
    elif dtype == torch.float16:
        own = torch.where(want.abs() < torch.finfo(dtype).tiny, want.to(dtype).to(want.dtype) - want, 0.0)
    error, far, size = relative(got, want), (got - want).flatten(1), want.flatten(1).norm(dim=1)
    single = torch.where(far.abs() <= step * torch.maximum(got.abs(), want.abs()).flatten(1), far.abs(), 0.0).amax(1)
    excess = (far.norm(dim=1) - own.flatten(1).norm(dim=1) - single) / torch.where(size == 0, 1.0, size)
    token, worst = int(excess.argmax()), float(excess.max())
    whole = float(size.norm()) or 1.0
    accepted = float(own.norm()) + float(single.max()) + limit * whole
    bound = accepted / whole
    if float(far.norm()) <= accepted and worst <= PER_TOKEN * limit:
        return Report(error, None, bound)
    i = _largest(got - want)
    rounding = " beside its own rounding" if own.any() else ""
    return Report(
        error,
        f"{name}: want relative error <= {limit:g} (one token: {PER_TOKEN * limit:g}){rounding}, got {error:.2e} "
        f"(token {token}: {worst:.2e}); at {list(i)} want {float(want[i]):.6g}, got {float(got[i]):.6g}",
        bound,
    )


def _lse(name: str, got: Tensor, want: Tensor, rounding: Tensor | None) -> Report:
    """Absolute; −inf exactly where nothing is seen, inf where a sink of inf takes all. An error in it is in the
    message, not in the relative norm."""
    wrong = got.isnan() | ((got.isinf() | want.isinf()) & (got != want))
    difference = torch.where(want.isinf(), 0.0, got - want)
    limit = LSE if rounding is None else LSE + LSE_ROUNDING * rounding
    over = difference.abs() - limit
    if not wrong.any() and (not want.numel() or float(over.max()) <= 0):
        return Report(0.0, None)
    i = _first(wrong) if wrong.any() else _largest_of(over)
    accepted = float(limit if rounding is None else limit[i])  # type: ignore[index]
    return Report(0.0, f"{name}: want {float(want[i]):.6g} (± {accepted:.2g}), got {float(got[i]):.6g} at {list(i)}")


def _bounded(name: str, got: Tensor, want: Tensor, bounds: Tensor) -> Report:
    """Scores: −inf exactly where nothing is seen, each number within its bound, and all within SCORES."""
    wrong = (got == -torch.inf) != (want == -torch.inf)
    wrong |= got.isnan() != want.isnan()
    off = torch.where(want.isfinite(), (got - want).abs(), 0.0).nan_to_num(nan=0.0, posinf=0.0)
    wrong |= off > bounds + torch.finfo(torch.float32).eps * want.abs().nan_to_num(posinf=0.0)
    if wrong.any():
        i = _first(wrong)
        told = f"{float(want[i]):.6g} (± {float(bounds[i]):.2g}), got {float(got[i]):.6g} at {list(i)}"
        return Report(torch.inf, f"{name}: want {told}", SCORES)
    number = want.isfinite()
    error = relative(torch.where(number, got, 0.0), torch.where(number, want, 0.0))
    message = f"{name}: want relative error <= {SCORES:g}, got {error:.2e}" if error > SCORES else None
    return Report(error, message, SCORES)


def _bytes(name: str, got: Tensor, want: Tensor) -> Report:
    wrong = (as_bytes(got) != as_bytes(want)).any(-1)
    if wrong.any():
        i, n = _first(wrong), int(wrong.sum())
        a, b = ("0x" + "".join(f"{n:02x}" for n in reversed(as_bytes(t)[i].tolist())) for t in (want, got))
        return Report(
            n / wrong.numel(), f"{name}: {n} of {wrong.numel()} elements differ; at {list(i)} want {a}, got {b}"
        )
    stray = _differing(storage_bytes(got), storage_bytes(want))
    return Report(0.0, f"{name}: {stray} bytes of its memory outside the view were overwritten" if stray else None)


def _unchanged(name: str, got: Any, want: Any) -> Report:
    """What an operation only reads."""
    changed = _differing(storage_bytes(got), storage_bytes(want)) if isinstance(got, Tensor) else 0
    return Report(0.0, f"{name}: want it unchanged, got {changed} bytes of its memory overwritten" if changed else None)


def _differing(got: Tensor, want: Tensor) -> int:
    """How many numbers differ; nearly always none, which is known faster than counted."""
    return 0 if torch.equal(got, want) else int((got != want).sum())


def _clear_rows(call: Any, pages: Tensor, slots: Tensor) -> None:
    for t in (call.ckv, call.kpe, call.ckv_scale_cache):
        if t is not None:
            put(t, pages, slots, torch.zeros(len(pages), t.shape[-1], dtype=t.dtype))


def _first(wrong: Tensor) -> tuple[int, ...]:
    return tuple(int(n) for n in wrong.nonzero()[0])


def _largest(x: Tensor) -> tuple[int, ...]:
    return _largest_of(x.abs())


def _largest_of(x: Tensor) -> tuple[int, ...]:
    return tuple(int(n) for n in torch.unravel_index(x.argmax(), x.shape))
