"""The picture: time over the bytes that a case must move, with the line of a copy; needs matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from .engine import Limits, Result
from .report import speed

_COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#332288",
    "#882255",
    "#999933",
    "#000000",
    "#aa4499",
    "#117733",
)
_MARKERS: dict[str, Any] = {
    "append": "^",
    "rope_append": "v",
    "mla_append": "<",
    "decode": "o",
    "prefill": "*",
    "mla_decode": "s",
    "mla_decode_branch": "P",
    "mla_prefill": "D",
    "mla_project": "h",
    "merge_states": "X",
    "transcode": "d",
    "index_scores": ">",
    "index_topk": "p",
    "index_select": "H",
    "sparse": "8",
    "sparse_prefill": (4, 1, 0),  # stars of so many points
    "block_decode": (6, 1, 0),
    "block_prefill": (8, 1, 0),
}


def plot(results: Sequence[Result], limits: Limits, title: str, path: str) -> None:
    """Write the picture: on the left what the bytes bound, on the right what arithmetic bounds. ImportError without
    matplotlib; ValueError where nothing was timed."""
    drawn(results, limits, title).savefig(path, dpi=150)


def drawn(results: Sequence[Result], limits: Limits, title: str) -> Any:
    """The picture as a figure of matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    timed = [r for r in results if r.us is not None and not r.case.host]
    if not timed:
        raise ValueError("results: want at least one timed case, got none")
    panels = [(b, here) for b in ("bytes", "flops") if (here := [r for r in timed if r.bound(limits) == b])]
    formats, ops = (list(dict.fromkeys(x)) for x in ((r.case.format for r in timed), (r.case.op for r in timed)))
    height = max(6.0, 1.5 + 0.22 * (len(formats) + len(ops)))  # of the legend, in inches
    figure = Figure(figsize=(2 + 6 * len(panels), height), layout="constrained")
    FigureCanvasAgg(figure)
    for i, (bound, here) in enumerate(panels):
        _panel(figure.add_subplot(1, len(panels), i + 1), bound, here, limits, formats)
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        handles.update(dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)))
    # A marker for each operation and a colour for each format: one entry for each pair would not fit beside them.
    dot: dict[str, Any] = {"linestyle": "", "markersize": 6, "markeredgewidth": 0}
    for op in ops:
        handles[op] = Line2D([], [], marker=_MARKERS[op], color="0.45", **dot)
    for name in formats:
        handles[name] = Line2D([], [], marker="s", color=_colour(name, formats), **dot)
    figure.legend(list(handles.values()), list(handles), loc="outside right center", fontsize=9, frameon=False)
    figure.suptitle(textwrap.fill(title, 70 * len(panels)), fontsize=11)
    return figure


def _panel(axes: Any, bound: str, here: Sequence[Result], limits: Limits, formats: Sequence[str]) -> None:
    rate, unit = (limits.copy, "bytes") if bound == "bytes" else (limits.matmul, "FLOP")
    work = [_work(r, bound) for r in here]
    ends = min(work) / 1.5, max(work) * 1.5
    what = f"copy, {speed(rate / 1e6, 'B/s')}" if bound == "bytes" else f"bf16 product, {speed(rate / 1e6, 'FLOP/s')}"
    axes.plot(ends, [x / rate * 1e6 for x in ends], color="black", linewidth=1.2, label=what)
    for r in here:
        best = r.best_peer
        if best is not None and best.us is not None and r.peers_format is None:
            axes.plot(_work(r, bound), best.us, "x", color="0.45", markersize=7, zorder=2, label="best peer")
        axes.plot(
            _work(r, bound), r.us, marker=_MARKERS[r.case.op], linestyle="", color=_colour(r.case.format, formats),
            markersize=6, alpha=0.85, markeredgewidth=0, zorder=3,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    shown = [us for r in here for us in (r.us, r.best_peer.us if r.best_peer else None) if us is not None]
    # The line is seen too, where it is long because cases are short, and where no case is near it.
    axes.set_ylim(min(*shown, ends[0] / rate * 1e6) / 1.6, 2 * max(*shown, ends[1] / rate * 1e6))
    axes.set_xlabel(f"{unit} of one call")
    axes.set_ylabel("microseconds")
    axes.set_title(f"bound by {'memory' if bound == 'bytes' else 'arithmetic'}", fontsize=11)
    axes.grid(True, which="major", color="0.88", linewidth=0.8)
    axes.set_axisbelow(True)


def _colour(name: str, formats: Sequence[str]) -> str:
    return _COLOURS[formats.index(name) % len(_COLOURS)]


def _work(r: Result, bound: str) -> int:
    return r.nbytes if bound == "bytes" else r.flops
