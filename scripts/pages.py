"""What the scripts that write parts of the docs share: tables between markers, and the choice to check or to write."""

from __future__ import annotations

import argparse
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent


def table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def renewed(text: str, tables: Mapping[str, Callable[[], str]], names: Iterable[str]) -> str:
    """`text` with what lies between the markers of each name, `<!-- name:begin -->` and `<!-- name:end -->`, anew."""
    for name in names:
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        before, rest = text.split(begin)
        text = before + begin + tables[name]() + end + rest.split(end)[1]
    return text


def main(about: str, wanted: Callable[[], Mapping[Path, str]], alike: Callable[[str, str], bool] = operator.eq) -> int:
    """Check files, or with --write bring them up to date. Returns 1 if one is found that is not.

    wanted:  path → what it should hold
    alike:   whether what a file holds (first) may stay as it is
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--write", action="store_true", help="bring the files up to date")
    args = parser.parse_args()
    stale = False
    for path, new in wanted().items():
        old = path.read_text() if path.exists() else ""
        if args.write:
            if new != old:
                path.write_text(new)
        elif not alike(old, new):
            print(f"{path.relative_to(ROOT)} is out of date; run python scripts/{Path(sys.argv[0]).name} --write")
            stale = True
    return 1 if stale else 0
