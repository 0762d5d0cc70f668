"""Tables and long lines on narrow terminals: what would be cut is listed instead."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

_WIDE = 10_000


class Fitted:
    """A table where it can be shown without cutting a word, else its rows one below the other.

    heads:  leading columns that name a row
    """

    def __init__(self, table: Table, heads: int = 1) -> None:
        self._table, self._heads = table, heads

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._least(console, options) <= options.max_width and not self._cut(console, options):
            yield self._table
            return
        if self._table.title:
            yield Text(plain(self._table.title), style="bold")
        for heads, pairs in self._rows():
            if not any(plain(c.header) for c in self._table.columns):
                pairs = [f"{heads}: {' '.join(pairs)}"]
            else:
                yield Text(heads, style="bold")
            yield Text("\n".join(flowed(pairs, options.max_width, "  ", " · ")))
        yield ""

    def _least(self, console: Console, options: ConsoleOptions) -> int:
        """Columns of the terminal that the table needs."""
        columns = self._table.columns
        natural = console.measure(self._table, options=options.update(width=_WIDE)).maximum
        return natural - sum(_width(c, True) for c in columns) + sum(_width(c, bool(c.no_wrap)) for c in columns)

    def _cut(self, console: Console, options: ConsoleOptions) -> bool:
        """Whether a word would be cut all the same: columns are narrowed by their widths, not by their words."""
        lines = console.render_lines(self._table, options, pad=False)
        return any("…" in segment.text for line in lines for segment in line)

    def _rows(self) -> Iterator[tuple[str, list[str]]]:
        columns = self._table.columns
        names = [re.sub(r"(?<=/)\n|-\n", "", plain(c.header)).replace("\n", " ").strip() for c in columns]
        for cells in zip(*(c.cells for c in columns), strict=True):
            texts = [plain(cell) for cell in cells]
            values = zip(names[self._heads :], texts[self._heads :], strict=True)
            yield " ".join(texts[: self._heads]), [f"{name}: {text}" if name else text for name, text in values]


def plain(cell: RenderableType) -> str:
    """The letters of a cell."""
    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain


def say(line: str) -> None:
    """Print a line; on a terminal that is narrower, as several."""
    console = Console()
    print(folded(line, console.width) if console.is_terminal else line, flush=True)


def folded(line: str, width: int) -> str:
    """A line whose parts are two blanks or more apart, as several if it is wider than the terminal."""
    if cell_len(line) <= width:
        return line
    begin = line[: len(line) - len(line.lstrip())]
    first, *more = re.split(r" {2,}", line.strip())
    return "\n".join(flowed([first, *more], width, begin, "  ", "    "))


def flowed(parts: Sequence[str], width: int, begin: str, between: str, deeper: str = "") -> Iterator[str]:
    """Lines of as many parts as fit; a part that is wider than a line goes on in the next.

    deeper:  indentation of all lines but the first
    """
    line = ""
    for part in parts:
        if line and cell_len(line + between + part) <= width:
            line += between + part
            continue
        if line:
            yield line
            begin, deeper = begin + deeper, ""
        *full, line = textwrap.wrap(begin + part, width, subsequent_indent=begin + "  ", break_on_hyphens=False) or [""]
        yield from full
    if line:
        yield line


def _width(column: Column, whole: bool) -> int:
    """The widest line of a column, or if it may be wrapped, its widest word."""
    texts = [plain(x) for x in (column.header, *column.cells)]
    pieces = (piece for text in texts for piece in (text.splitlines() if whole else text.split()))
    return max(map(cell_len, pieces), default=0)
