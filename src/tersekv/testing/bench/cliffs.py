"""Does any shape of decode fall off a cliff? Its rate over the rate of the plain case with as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from .engine import Result
from .report import doubt, speed
from .shapes import Shape

CLIFF = 0.6  # of the plain case's rate


def compared(cases: Iterable[Shape], run: Callable[[Shape], Result]) -> Iterator[tuple[Result, Result, float | None]]:
    """(result, result of its plain case, ratio of their rates) of each shape; no ratio where a time is unsteady. run:
    case → engine.Result."""
    plains: dict[Shape, Result] = {}
    for case in cases:
        plain = case.plain
        if plain not in plains:
            plains[plain] = run(plain)
        r, p = run(case), plains[plain]
        ratio = (r.nbytes / r.us) / (p.nbytes / p.us) if r.us and p.us and r.steady and p.steady else None
        yield r, p, ratio


def line(r: Result, plain: Result, ratio: float | None) -> str:
    """One shape: time, rate, and its rate over the plain case's."""
    c = r.case
    assert isinstance(c, Shape)
    head = f"{c.name:<19} {c.format:<19} {c.cell:>12}  {'  '.join(f'{words:<8}' for words in c.sizes)}"
    if r.us is None:
        return f"{head}  {r.status.upper()}: {r.reason}"
    told = f"{head}  {r.us:>9.2f} us  {speed(r.nbytes / r.us, 'B/s'):>12}  error {r.error:.1e}"
    if c.drafts > 1:
        told += f"  {speed(r.flops / r.us, 'FLOP/s')}"
    unsteady = doubt(r) or doubt(plain)
    if unsteady:
        return f"{told}  {unsteady}"
    if ratio is None:
        return f"{told}  plain {plain.case.cell}: {plain.status.upper()}"
    cliff = f"  UNDER {CLIFF:.0%}" if ratio < CLIFF else ""
    return f"{told}  {ratio:4.0%} of plain {plain.case.cell} ({plain.us:.2f}){cliff}"
