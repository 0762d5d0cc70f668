"""The cases of an indexer's operations, as `cases` lists them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ..formats import INDEX_FORMATS

if TYPE_CHECKING:
    from .case import Case


def _index_append(base: Case, i: int) -> Iterator[Case]:
    base = replace(base, lens=(20, 3, 0, 40), q_lens=(5, 3, 0, 9), skip=True, dim=128, page=64, rotary=64)
    yield replace(base, norm=True)
    for case in (
        replace(base, name="no tokens", lens=(4, 0), q_lens=(0, 0)),
        replace(base, name="last columns interleaved", rope_last=True, interleaved=True, index="int64", gaps="pages"),
        replace(base, name="rotated fp16 round16", rotation="k", round16=True, norm=True, dtype="float16", page=3),
        replace(base, name="rows only fp32 D 64", rotate=False, dtype="float32", dim=64, strided=True, page=1),
        replace(base, name="D 256 rotated", dim=256, rotation="k", index="uint32", page=16, norm=True),
        replace(base, name="D 40", dim=40, rotary=24, gaps="slots", norm=True, interleaved=True, epsilon=1e-3),
    ):
        yield replace(case, quick=False)
    if base.format in ("index_fp8", "fp8_e4m3"):
        yield replace(base, name="nan and inf", special=True, rotate=False, quick=False)


def _index_query(base: Case, i: int) -> Iterator[Case]:
    base = replace(base, lens=(20, 3, 0, 40), q_lens=(5, 3, 0, 9), skip=True, dim=128, heads=16, rotary=64)
    yield base
    for case in (
        replace(base, name="no tokens", lens=(4, 0), q_lens=(0, 0)),
        replace(base, name="last columns interleaved", rope_last=True, interleaved=True, index="int64", weighted=False),
        replace(base, name="rotated round16 fp16", rotation="k", round16=True, dtype="float16", heads=64),
        replace(base, name="rows only fp32 D 256", rotate=False, dtype="float32", dim=256, strided=True, heads=3),
        replace(base, name="D 40 head major", dim=40, rotary=24, head_major=True, heads=5),
    ):
        yield replace(case, quick=False)


def _index_scores(base: Case, i: int) -> Iterator[Case]:
    yield from _index_scored(base, top=8)
    spans = replace(_index_base(base), starts=True, quick=False)
    yield replace(spans, name="starts and ends", lens=(270, 700, 30), q_lens=(3, 3, 3), page=1, heads=8)
    yield replace(spans, name="starts and ends each", lens=(300, 1), page=128, each=True, heads=3, index="int64")


def _index_select(base: Case, i: int) -> Iterator[Case]:
    yield from _index_scored(base, top=40)
    base = replace(_index_base(base), quick=False)
    yield replace(base, name="open groups kept", ratio=4, q_lens=(3, 2, 0, 3), ragged=True, open_group=True, top=9,
                  keep_first=2, keep_last=3)  # fmt: skip
    yield replace(base, name="k beyond N", top=300, whole=True)


def _index_base(base: Case) -> Case:
    half = {"bf16": "bfloat16", "fp16": "float16"}.get(base.format, "float8_e4m3fn")
    return replace(base, dtype=half, dim=128, heads=32, page=64, lens=(37, 4, 0, 270))


def _index_scored(base: Case, top: int) -> Iterator[Case]:
    base = replace(_index_base(base), top=top)
    yield base
    drafts = replace(base, lens=(37, 4, 2, 70), q_lens=(3, 3, 3, 3), page=16)
    ragged = replace(base, lens=(137, 4, 0, 70), q_lens=(2, 9, 1, 0), ragged=True)
    eight = base.format in ("index_fp8", "fp8_e4m3")
    for case in (
        replace(base, name="whole numbers", whole=True, heads=64, lens=(130, 64, 1)),
        replace(drafts, name="drafts H 16 pages of 16", heads=16, index="int64", spread=True),
        replace(drafts, name="drafts each no ReLU", heads=5, each=True, relu=False, weighted=False, index="uint32"),
        replace(ragged, name="ragged strided", strided=True, page=3, scale="float"),
        replace(ragged, name="ratio 4 ragged whole", ratio=4, whole=True, gaps="pages", slack=3),
        replace(base, name="blocks of 128 each", block=128, each=True, heads=4, page=128, lens=(300, 129, 0),
                weighted=False),
        replace(base, name="blocks of 3", block=3, whole=True, page=16, gaps="slots"),
        replace(base, name="D 256 H 8", dim=256, heads=8, spread=True),
        replace(base, name="D 40 H 130 width 50", dim=40, heads=130, width=50, gaps="columns", lens=(90, 4)),
        replace(base, name="no requests", lens=(), q_lens=()),
    ):  # fmt: skip
        yield replace(case, quick=False)
    if eight:
        yield replace(base, name="bf16 query", dtype="bfloat16", quick=False)
        yield replace(drafts, name="fp16 query", dtype="float16", quick=False)


def _index_topk(base: Case, i: int) -> Iterator[Case]:
    base = replace(base, lens=(300, 1, 0, 8, 9, 128), top=8)
    yield base
    for case in (
        replace(base, name="equal scores", whole=True, top=100),
        replace(base, name="nan inf and -0", special=True, top=64, strided=True, lens=(300, 70, 65, 64)),
        replace(base, name="k 2048", top=2048, lens=(5000, 2048, 2047, 2049, 0), index="int64"),
        replace(base, name="rounds", top=2048, lens=(40000, 3, 20000)),
        replace(base, name="rounds of equal scores kept", top=700, lens=(40000, 800), whole=True, keep_last=5),
        replace(base, name="kept", keep_first=3, keep_last=4, top=6, whole=True, index="uint32"),
        replace(base, name="more kept than k", keep_first=9, keep_last=20, special=True),
        replace(base, name="open groups of heads", open_group=True, each=True, heads=3, top=5),
        replace(base, name="negative groups", open_group=True, lens=(-1, 0, -9, 8, 300, -1, 3, -2, 5)),
        replace(base, name="k 1 width 60 no lens", top=1, width=60, lse=False),
        replace(base, name="no rows", lens=()),
        replace(
            base, name="starts kept", starts=True, keep_first=2, keep_last=3, lens=(300, 1, 0, 8, 600), special=True
        ),
        replace(base, name="starts of heads", starts=True, each=True, heads=3, top=50, strided=True, index="int64"),
    ):
        yield replace(case, quick=False)


VARIANTS = {
    "index_append": (tuple(INDEX_FORMATS), _index_append),
    "index_query": (tuple(INDEX_FORMATS), _index_query),
    "index_scores": (tuple(INDEX_FORMATS), _index_scores),
    "index_topk": (("fp32",), _index_topk),
    "index_select": (tuple(INDEX_FORMATS), _index_select),
}
