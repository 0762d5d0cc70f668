"""Writes the table of docs/transformers.md that says what comes of every family of causal language models, from what
`benchmarks/transformers_families.py --json` kept in benchmarks/results/.

    python scripts/families_table.py            check: exit code 1 if the page is out of date
    python scripts/families_table.py --write    bring the page up to date
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import pages
from pages import ROOT, table

KEPT = ROOT / "benchmarks" / "results" / "transformers_families.json"
COMPILES = "one graph"
PAGE = ROOT / "docs" / "transformers.md"
# What a refusal says -> what the table says. The first that fits; a refusal that none fits is an error.
REASONS = (
    (r"in every layer of \S+ got (\w+) in layer", "layers: `{}`"),
    (r"got layers that run in loops", "layers that run several times in a forward"),
    (r"got layers that share", "keys and values shared in another way than by later layers of the same kind"),
    (r"in its own code, past", "attention past `AttentionInterface`"),
    (r"keeps a state instead", "a state instead of keys and values"),
    (r"which does not tell them", "a config that does not tell its layers"),
    (r"rearranges or changes keys or values", "keys or values rearranged or changed after the cache's update"),
    (r"causal, sliding-window and chunked masks alone", "a mask that is neither causal, window, chunks nor padding"),
    (r"^position_bias:", "a position bias, which no paged kernel adds"),
    (r"a window has to reach", "a window that its attention function is not told of"),
    (r"is not causal", "attention that is not causal"),
)


# The same, of what compilers and models raise where a decode step is not one graph.
NO_GRAPH = (
    (r"data-dependent expression.*expert", "its code asks the host which experts have tokens"),
    (r"^Unsupported: .*Dynamo", "torch's compiler does not take its code"),
    (r"TersekvStaticCache, got indexers", "keys of its indexer need a `TersekvCache`"),
    (r"^RecompileError: ", "a state that it keeps in its modules is compiled twice"),
)


def no_graph(why: str) -> str:
    """Why a decode step is not one graph, in a few words."""
    for pattern, words in NO_GRAPH:
        if re.search(pattern, why):
            return words
    raise ValueError(f"no words for {why!r}")


def reason(why: str) -> str:
    """A refusal in a few words."""
    for pattern, words in REASONS:
        found = re.search(pattern, why)
        if found:
            return words.format(*found.groups())
    raise ValueError(f"no words for the refusal {why!r}")


def families(kept: dict[str, Any]) -> str:
    """Markdown: what comes of each family."""
    works, refused, other = [], defaultdict(list), []
    graphs: dict[str, list[str]] = defaultdict(list)
    parts: dict[str, list[str]] = defaultdict(list)
    for row in kept["rows"]:
        name = f"`{row['family']}`"
        inner = re.fullmatch(r"its language model is (\S+)", row.get("why", ""))
        if row["found"] == "works":
            works.append(name)
            graphs[row["compiled"] if row["compiled"] == COMPILES else no_graph(row["compiled"])].append(name)
        elif row["found"] == "refused":
            refused[reason(row["why"])].append(name)
        elif inner:
            parts[f"`{inner[1]}`"].append(name)
        elif row["found"] == "not built":
            other.append(name)
        else:
            raise ValueError(f"{row['family']} fails: {row['why']}")
    inside = [f"{', '.join(names)}: see {model}" for model, names in parts.items()]
    rows = [(f"works ({len(works)})", "every other")]
    whole = len(graphs.pop(COMPILES, []))
    broken = "; ".join(f"{joined(names)}: {why}" for why, names in graphs.items())
    which = f"all but {broken}" if broken else "all"
    rows.append((f"of these, a decode step over a `TersekvStaticCache` is one graph ({whole})", which))
    rows += [(f"refused ({len(names)}): {why}", joined(names)) for why, names in sorted(refused.items())]
    if other:
        rows.append((f"not tried ({len(other)}): not built, or not run by eager attention either", joined(other)))
    rows.append((f"a language model inside a larger one ({len(inside)})", "; ".join(inside)))
    versions = ", ".join(f"{name} {version}" for name, version in kept["versions"].items())
    return f"\nOf {versions}, {kept['date']}:\n\n" + table(("what comes of it", "families"), rows) + "\n"


def joined(names: Iterable[str]) -> str:
    return ", ".join(names)


def wanted() -> dict[Path, str]:
    tables = {"families": lambda: families(json.loads(KEPT.read_text()))}
    return {PAGE: pages.renewed(PAGE.read_text(), tables, tables)}


if __name__ == "__main__":
    sys.exit(pages.main("Table of docs/transformers.md.", wanted))
