"""The text the demo models learn from: the documentation that comes with the running Python.

`train_demo_models.py` needs this; running a shipped model needs the package's `heldout.txt` alone.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data import topics as pydoc_topics

# Whole topics that no other topic repeats, of three kinds: a command reference, a type's methods, prose.
HELDOUT_TOPICS = ("typesmapping", "debugger", "objects")
# Tests and vendored tools say little in English, and `pydoc_data` is read on its own.
SKIPPED_FOLDERS = frozenset(
    ("test", "tests", "site-packages", "idlelib", "lib2to3", "pydoc_data", "turtledemo", "ensurepip")
)
SHINGLE_WORDS = 8
SHORTEST_DOCSTRING = 100
# Short paragraphs ("For example:") may recur; longer ones are kept once.
REPEATABLE_CHARS = 40


def heldout_topics() -> str:
    """The held-out topics of the running Python as one text."""
    return "\n".join(pydoc_topics.topics[name].strip() + "\n" for name in HELDOUT_TOPICS)


def shingles(text: str) -> set[tuple[str, ...]]:
    """Every run of SHINGLE_WORDS words, case and punctuation aside."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + SHINGLE_WORDS]) for i in range(len(words) - SHINGLE_WORDS + 1)}


def training_topics(heldout: str) -> str:
    """pydoc's topics less what they share with `heldout` and with each other."""
    # Longest first: short topics are often a section of a long one.
    names = sorted(pydoc_topics.topics, key=lambda name: (-len(pydoc_topics.topics[name]), name))
    return _unseen((pydoc_topics.topics[name] for name in names if name not in HELDOUT_TOPICS), heldout)


def training_docstrings(heldout: str) -> str:
    """The standard library's docstrings less what they share with `heldout` and with each other."""
    return _unseen(_docstrings(Path(sysconfig.get_paths()["stdlib"])), heldout)


def _docstrings(root: Path) -> Iterator[str]:
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.intersection(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= SHORTEST_DOCSTRING:
                    yield text


def _unseen(documents: Iterable[str], heldout: str) -> str:
    """Join the documents without paragraphs that share a shingle with `heldout` or were met before."""
    forbidden, met, kept = shingles(heldout), set(), []
    for document in documents:
        paragraphs = []
        for paragraph in re.split(r"\n\s*\n", document.strip()):
            key = " ".join(paragraph.split())
            if key in met or not forbidden.isdisjoint(shingles(paragraph)):
                continue
            if len(key) > REPEATABLE_CHARS:
                met.add(key)
            paragraphs.append(paragraph)
        text = "\n\n".join(paragraphs)
        # A paragraph boundary must not rebuild what the paragraphs alone do not hold.
        if text and forbidden.isdisjoint(shingles(text)):
            kept.append(text)
    return "\n\n\n".join(kept)
