"""The demo's results as tables, samples, JSON and a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..formats import ALL_FORMATS, KV_FORMATS
from .measure import Measured, ModelResult
from .search import REFERENCE
from .subject import TITLES

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#332288", "#882255", "#117733")
_SPOTS = ((1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1), (0, 1), (0, -1), (1, 2), (1, -2), (-1, 2), (-1, -2))


def table(result: ModelResult) -> Table:
    """A row per format."""
    title = f"{_title(result)}: {result.bytes_scored} {result.unit}s, context {result.context}"
    t = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False
    )
    t.add_column("\nformat", no_wrap=True)
    heads = (
        "bytes/\ntoken",
        "times\nsmaller",
        "per-\nplexity",
        f"KL, nats\nper {result.unit}",
        "same\ntop-1",
    )
    for head in heads:  # in two lines: the table fits into 80 columns
        t.add_column(head, justify="right", no_wrap=True)
    if result.needles is not None:
        t.add_column("needles\nfound", justify="right", no_wrap=True)
    for m in result.formats:
        t.add_row(m.format, *_cells(m), *_found(m, result))
    return t


def _found(m: Measured, result: ModelResult) -> list[str]:
    """The cell of the needles, where some were looked for."""
    if result.needles is None:
        return []
    return ["-" if m.needles is None else f"{m.needles}/{result.needles}"]


def frontier(result: ModelResult) -> list[Measured]:
    """The caches that no other one is both as small and as near as, the smallest first."""
    known = [m for m in result.formats if m.kl is not None and m.bytes_per_token is not None]
    found: list[Measured] = []
    for m in sorted(known, key=lambda m: (m.bytes_per_token, m.kl)):
        if not found or m.kl < found[-1].kl:  # type: ignore[operator]
            found.append(m)
    return found


def frontier_table(result: ModelResult) -> Table:
    """The frontier, a row a cache."""
    t = Table(
        title=f"{_title(result)}: nothing else is as small and as near", title_justify="left", title_style="bold",
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False,
    )  # fmt: skip
    t.add_column("cache", no_wrap=True)
    found = [] if result.needles is None else ["needles found"]
    for head in ("bytes/token", f"KL, nats per {result.unit}", "perplexity", *found):
        t.add_column(head, justify="right", no_wrap=True)
    for m in frontier(result):
        size, _, perplexity, kl, *_ = _cells(m)
        t.add_row(m.format, size, kl, perplexity, *_found(m, result))
    return t


def smallest(result: ModelResult, within: float) -> Measured | None:
    """The smallest cache within a distance of the reference."""
    return next((m for m in frontier(result) if m.kl is not None and m.kl <= within), None)


def smallest_within(result: ModelResult, within: float) -> Text:
    """`smallest`, in words."""
    near = smallest(result, within)
    if near is None:
        return Text(f"none is within {within:g} nats per {result.unit}", style="yellow")
    told = f"the smallest within {within:g} nats per {result.unit}: {near.format}, {near.bytes_per_token} bytes a token"
    return Text(told, style="bold")


def _title(result: ModelResult) -> str:
    return result.title or TITLES.get(result.model, result.model)


def _cells(m: Measured) -> list[str]:
    if m.unsupported is not None or m.perplexity is None or m.kl is None or m.top1 is None:
        return ["refused", *["-"] * 4]
    kl = "(ref.)" if m.format == REFERENCE else f"{m.kl:.1e}"
    perplexity = f"{m.perplexity:.4f}" if m.perplexity < 1000 else f"{m.perplexity:.5g}"
    return [str(m.bytes_per_token), f"{m.times_smaller:.2f}x", perplexity, kl, agreement(m.top1)]


def agreement(top1: float) -> str:
    """A share of places where both find the same one the likeliest, as tables tell it: 100% where all are."""
    return "100%" if top1 == 1 else f"{top1:.1%}"


def samples(result: ModelResult) -> RenderableType:
    """What each format writes after the prompt; formats that write the same share a line."""
    writers: dict[str, list[Measured]] = {}
    for m in result.formats:
        if m.sample is not None:
            writers.setdefault(m.sample, []).append(m)
    lines = [Text.assemble("After “… ", _one_line(result.prompt[-40:].lstrip()), "” they write:")]
    for written, who in writers.items():
        lines.append(Text(f"  {_one_line(written)}", style="bold"))
        lines.append(Text(f"      {', '.join(m.format for m in who)}"))
    return Group(*lines)


def refusals(result: ModelResult) -> list[Text]:
    """What each refused format was refused for."""
    refused = [m for m in result.formats if m.unsupported is not None]
    return [Text(f"{m.format} is refused: {m.unsupported}", style="yellow") for m in refused]


def _one_line(written: str) -> str:
    return written.replace("\n", "↵").replace("\t", " ")


def as_json(results: Sequence[ModelResult]) -> list[dict[str, Any]]:
    """Plain data; a number that is not finite becomes null, since JSON has no name for it."""
    models = []
    for r in results:
        data = asdict(r)
        for m in data["formats"]:
            for key, value in m.items():
                if isinstance(value, float) and not math.isfinite(value):
                    m[key] = None
        models.append({**data, "reference": REFERENCE})
    return models


def plot(results: Sequence[ModelResult], title: str, path: str) -> None:
    """Write the picture: distance to the 16-bit cache over bytes per token. ImportError without matplotlib.

    A search has more points than names have room: of these it names those that no other beats. Names of formats stand
    beside their points, longer ones in a legend below.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    entries = max(sum(_named(r).values()) + 1 if _legend(r) else 0 for r in results)
    figure = Figure(figsize=(6.4 * len(results), 5.2 + 0.2 * entries), layout="constrained")
    FigureCanvasAgg(figure)
    names = list(dict.fromkeys(name for r in results for name, shown in _named(r).items() if shown))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    panels = [
        (figure.add_subplot(1, len(results), i + 1), result) for i, result in enumerate(results)
    ]  # all exist before labels are placed: the layout depends on every panel
    points = [_panel(axes, result, _named(result), colours) for axes, result in panels]
    figure.suptitle(title, fontsize=11)
    figure.draw_without_rendering()  # fixes the layout, in whose pixels the labels are placed
    for (axes, result), here in zip(panels, points, strict=True):
        if not _legend(result):
            _label(axes, here, _named(result), colours)
    figure.savefig(path, dpi=150)


def _named(result: ModelResult) -> dict[str, bool]:
    """The points of a picture, and whether each is named."""
    known = [m.format for m in result.formats if m.kl is not None and m.bytes_per_token is not None]
    best = {m.format for m in frontier(result)} if len(known) > len(KV_FORMATS) else known
    return {name: name in best for name in known}


def _legend(result: ModelResult) -> bool:
    """Whether names stand below the picture: some are too long to stand in it."""
    return not {*_named(result)} <= {*ALL_FORMATS}


def _panel(
    axes: Any, result: ModelResult, named: dict[str, bool], colours: dict[str, str]
) -> dict[str, tuple[float, float]]:
    """Draw the points of a model; returns where they lie."""
    known = [m for m in result.formats if m.kl is not None and m.bytes_per_token is not None]
    # A KL of 0 has no place on a log axis: the reference, and whatever equals it, lies on the floor.
    seen = [m.kl for m in known if m.kl]
    floor = 10.0 ** math.floor(math.log10(min(seen, default=1e-6)) - 0.3)
    top = 10.0 ** math.ceil(math.log10(max(seen, default=1e-3)) + 0.3)
    points = {m.format: (float(m.bytes_per_token or 0), m.kl or floor) for m in known}
    for name, (x, y) in sorted(points.items(), key=lambda point: point[1]):
        if not named[name]:
            axes.plot(x, y, "o", color="0.72", markersize=6, markeredgewidth=0, zorder=2.5)
            continue
        hollow = y == floor
        axes.plot(
            x, y, "o", color=colours[name], markersize=9, markerfacecolor="white" if hollow else colours[name],
            markeredgewidth=2 if hollow else 0, clip_on=False, zorder=5, label=_text(name),
        )  # fmt: skip
    if not all(named.values()):  # a search: what the line leaves above it is beaten
        steps = [points[m.format] for m in frontier(result)]
        axes.plot(*zip(*steps, strict=True), "-", color="0.6", linewidth=1, zorder=2, drawstyle="steps-post")
        axes.plot([], [], "o", color="0.72", markersize=6, label="beaten by one that is as small and nearer")
    if _legend(result):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), frameon=False, fontsize=9)
    axes.set_yscale("log")
    axes.set_ylim(floor, top)
    axes.set_xlim(0, 1.25 * max((x for x, _ in points.values()), default=1.0))
    axes.set_xlabel("bytes per token, all layers (less is smaller)")
    axes.set_ylabel(f"KL divergence from the bf16 cache, nats per {result.unit}")
    axes.set_title(_title(result), fontsize=11)
    axes.grid(True, which="major", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    return points


def _text(name: str) -> str:
    return f"{name} (reference, KL = 0)" if name == REFERENCE else name


def _label(axes: Any, points: dict[str, tuple[float, float]], named: dict[str, bool], colours: dict[str, str]) -> None:
    """Name points at the first spot around each where nothing lies yet."""
    renderer = axes.figure.canvas.get_renderer()
    dots = [axes.transData.transform(p) for p in points.values()]
    frame = axes.get_window_extent(renderer)
    taken: list[Any] = []
    for name, point in points.items():
        if not named[name]:
            continue
        text = None
        for dx, dy in _SPOTS:
            if text is not None:
                text.remove()
            text = axes.annotate(
                _text(name), point, (9 * dx, 11 * dy), textcoords="offset points", color=colours[name], fontsize=10,
                ha={1: "left", 0: "center", -1: "right"}[dx], va={0: "center"}.get(dy, "bottom" if dy > 0 else "top"),
                bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}, zorder=4,
            )  # fmt: skip
            extent = text.get_window_extent(renderer)
            near = extent.expanded(1.02, 1.1)
            clear = not any(near.overlaps(other) for other in taken)
            clear = clear and not any(extent.expanded(1.04, 1.7).contains(*dot) for dot in dots)
            if clear and frame.x0 <= extent.x0 and extent.x1 <= frame.x1 and frame.y0 < near.y0 and near.y1 < frame.y1:
                break
        if text is not None:
            taken.append(text.get_window_extent(renderer))
