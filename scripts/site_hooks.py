"""What `mkdocs build` does for this site beyond Markdown: the API page is written from the docstrings, drawings are put
into their pages (so that they follow the page's light and dark colours), pages of other hands join the navigation."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from html import escape
from operator import attrgetter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
API = "<!-- api -->"
GROUPS = {
    "Operations": ("append", "rope_append", "decode", "mla_append", "mla_decode", "mla_decode_branch", "mla_prefill",
                   "mla_prefill_plan", "MLAPrefillPlan", "mla_project", "merge_states"),
    "Choosing keys": ("index_append", "index_query", "index_scores", "index_topk", "index_select"),
    "Caches": ("PagedKVCache", "PagedKVLayer", "PagedLatentCache", "PagedLatentLayer", "PagedIndexCache",
               "PagedIndexLayer"),
    "Pages": ("PagePool", "copy_pages", "transcode", "export_pages", "import_pages"),
    "Before the first request": ("warm_up",),
    "Formats": ("KV_FORMATS", "LATENT_FORMATS", "INDEX_FORMATS", "kv_bytes_per_token", "latent_bytes_per_token",
                "index_bytes_per_token"),
    "Errors": ("UnsupportedError", "KernelError", "OutOfPagesError"),
}  # fmt: skip
OTHERS = {
    "Caches dealt across ranks": "tersekv.ops.context_parallel",
    "Hugging Face transformers": "tersekv.integrations.transformers",
    "Signatures of FlashInfer": "tersekv.compat.flashinfer",
    "Signatures of vLLM": "tersekv.compat.vllm",
    "Signatures of MAX": "tersekv.compat.max",
}
EXAMPLE = re.compile(r"(^ *>>> .*(?:\n *\S.*)*)", re.MULTILINE)  # up to the next empty line
SHOWN = {"tersekv.integrations.transformers": ("TersekvCache",)}  # the other names are for transformers itself


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace(API, "\n".join(api())) if API in markdown else markdown


def on_page_content(html: str, **_: Any) -> str:
    return re.sub(r'<p><img alt="([^"]*)" src="([^"]*pictures/([\w]+\.svg))" ?/?></p>', _inline, html)


def on_post_page(output: str, **_: Any) -> str:
    """What the theme loads from elsewhere to search without a server, the site has itself: docs/search_worker.js."""
    return output.replace("https://unpkg.com/iframe-worker/shim", "search_worker.js")


def on_post_template(output_content: str, **_: Any) -> str:
    return on_post_page(output_content)


def _inline(match: re.Match) -> str:
    svg = (ROOT / "docs" / "pictures" / match[3]).read_text()
    return f'<figure class="drawing" role="figure" aria-label="{match[1]}">{svg}</figure>'


def api() -> Iterator[str]:
    """The API page: every public name, from its signature and docstring."""
    package = importlib.import_module("tersekv")
    listed = {name for names in GROUPS.values() for name in names}
    groups = {**GROUPS, "More": tuple(n for n in package.__all__ if n not in listed)}
    for title, names in groups.items():
        if names:
            yield f"## {title}\n"
        for name in names:
            yield from _entry(name.rpartition(".")[2], attrgetter(name)(package), f"tersekv.{name}")
    for title, home in OTHERS.items():
        module = importlib.import_module(home)
        yield f"## {title}\n\n`{home}`: {_text(inspect.getdoc(module) or '')}\n"
        for name in SHOWN.get(home, module.__all__):
            yield from _entry(name, getattr(module, name), name)
    env = importlib.import_module("tersekv.env")
    yield "## Environment\n\n| variable | meaning |\n| --- | --- |"
    yield from (f"| `{name}` | {_cell(text)} |" for name, text in env.VARIABLES.items())


def _entry(name: str, thing: Any, title: str, level: int = 3) -> Iterator[str]:
    yield f"{'#' * level} {name}\n"
    if isinstance(thing, dict):
        yield f"`{title}`: {', '.join(f'`{key}`' for key in thing)}\n"
        return
    yield f"```python\n{_signature(thing, title)}\n```\n"
    yield from _prose(thing)
    if inspect.isclass(thing) and not issubclass(thing, Exception):
        for key, member in vars(thing).items():
            if not key.startswith("_") and not isinstance(member, property):
                function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
                if inspect.isfunction(function):
                    yield from _entry(f"{name}.{key}", getattr(thing, key), f"{title}.{key}", level + 1)


def _signature(thing: Any, title: str) -> str:
    """On one line where it fits, else an argument a line."""
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return f"class {title}({thing.__base__.__name__})"
    s = inspect.signature(thing)
    parts, star = [], False
    for p in s.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not star:
            parts.append("*")
        star = star or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        hint = "" if p.annotation is p.empty else f": {_hint(p.annotation)}"
        default = "" if p.default is p.empty else f" = {p.default!r}"
        mark = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        parts.append(f"{mark}{p.name}{hint}{default}")
    end = "" if s.return_annotation is s.empty else f" -> {_hint(s.return_annotation)}"
    one = f"{title}({', '.join(parts)}){end}"
    return one if len(one) <= 96 else f"{title}(\n" + "".join(f"    {p},\n" for p in parts) + f"){end}"


def _hint(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _prose(thing: Any) -> Iterator[str]:
    """The docstring as Markdown, its examples as code."""
    names = _names(thing)
    for i, part in enumerate(EXAMPLE.split(inspect.getdoc(thing) or "")):
        if i % 2:
            yield f"```pycon\n{inspect.cleandoc(part)}\n```\n"
        else:
            yield from _paragraphs(part, names)


def _paragraphs(text: str, names: set[str]) -> Iterator[str]:
    """Paragraphs of a docstring; its lines "name:  text" become a table of the arguments."""
    rows: list[list[str]] = []
    paragraph: list[str] = []
    deep = -1  # indentation of the row that goes on
    for line in [*text.splitlines(), ""]:
        indent = len(line) - len(line.lstrip())
        head = re.match(r"\s*([A-Za-z_][\w, ]*):\s+(\S.*)", line)
        if head and all(word.strip() in names for word in head[1].split(",")):
            if paragraph:
                yield _paragraph(" ".join(paragraph)) + "\n"
                paragraph = []
            rows.append([head[1], head[2]])
            deep = indent
        elif rows and line and indent > deep:
            rows[-1][1] += " " + line.strip()
        else:
            if rows:
                yield "| argument | meaning |\n| --- | --- |"
                yield from (f"| {_code(k)} | {_cell(v)} |" for k, v in rows)
                yield ""
                rows = []
            if line:
                paragraph.append(line.strip())
            elif paragraph:
                yield _paragraph(" ".join(paragraph)) + "\n"
                paragraph = []


def _names(thing: Any) -> set[str]:
    try:
        own = set(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        own = set()
    return own | set(getattr(thing, "__annotations__", {})) | set(getattr(thing, "_fields", ()))


def _code(names: str) -> str:
    return ", ".join(f"`{name.strip()}`" for name in names.split(","))


def _cell(text: str) -> str:
    return _paragraph(text).replace("|", "\\|")


def _text(doc: str) -> str:
    """A docstring as Markdown, its indented lines as code, in which a backslash would be seen."""
    parts = re.split(r"((?:^(?: {4}.*)?\n)*^ {4}.*$)", doc, flags=re.M)
    return "".join(
        f"\n```python\n{inspect.cleandoc(part)}\n```\n" if i % 2 else _paragraph(part) for i, part in enumerate(parts)
    )


def _paragraph(text: str) -> str:
    """Text of a docstring as Markdown: what looks like markup outside of backticks is text."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([*_\[\]])", r"\\\1", escape(p, quote=False)) for p in parts)
