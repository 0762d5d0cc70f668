"""`tersekv verify` over the Triton backend, interpreted: the cases that a GPU runs, as far as a CPU has the time."""

from __future__ import annotations

import pytest

from tersekv.testing import verify
from tersekv.testing.cases import cases

APPENDS = list(cases(("append", "rope_append", "mla_append", "merge_states"), quick=True))
CODES = [c for c in cases(("append", "mla_append"), ("fp8_e4m3", "fp8_e5m2")) if c.name.startswith("codes")]
INT4 = [
    c
    for c in cases(("decode",), ("int4_per_token_head",))
    if c.name in ("8 drafts tree", "drafts tree mask", "D 72 Dv 72 G 5 pages of 3")
]
DECODES = [
    c
    for op, formats in (
        ("decode", ("bf16", "fp8_per_token_head", "nvfp4", "int4_per_token_head")),
        ("mla_decode", ("bf16", "fp8_ds_mla")),
    )
    for c in cases((op,), formats)
    if c.name == "plain"
]
TAILS = [c for c in cases(("append", "decode"), ("int8_per_token_head", "nvfp4")) if c.name.startswith("tail hnd")]
LISTED = [
    c
    for op, format, names in (
        ("mla_decode", "fp8_ds_mla", ("listed sinks of inf", "listed drafts uint32", "listed sinks, lse of keys")),
        ("mla_decode", "bf16", ("listed positions", "listed slots sinks", "sinks of -inf ragged")),
        (
            "mla_decode",
            "bf16",
            ("sinks, lse of keys", "largest scores", "largest scores of splits", "two sets, lse of keys"),
        ),
        ("decode", "fp8_per_token_head", ("listed blocks", "listed tokens V of another format")),
        ("decode", "int4_per_token_head", ("lists of each head sinks",)),
    )
    for c in cases((op,), (format,))
    if c.name in names
]
PREFILLS = [c for c in cases(("mla_prefill",), ("bf16", "fp8_ds_mla")) if c.name == "one token"]


INDEX_OPS = ("index_append", "index_query", "index_scores", "index_topk", "index_select")
INDEX_NAMES = ("ratio 4 ragged whole", "blocks of 3", "nan inf and -0", "more kept than k", "open groups of heads",
               "open groups kept", "D 40 H 130 width 50", "D 256 rotated", "rotated fp16 round16", "starts kept",
               "starts and ends", "starts and ends each")  # fmt: skip
INDEXERS = [c for c in cases(INDEX_OPS) if c.quick or (c.format in ("index_fp8", "fp32") and c.name in INDEX_NAMES)]


JUDGED = [*APPENDS, *CODES, *INT4, *DECODES, *TAILS, *LISTED, *PREFILLS, *INDEXERS]


@pytest.mark.parametrize("case", JUDGED, ids=lambda c: c.id)
def test_case(case):
    result = verify.run(case, "cpu", "triton")
    assert result.status == verify.PASSED, result.message
