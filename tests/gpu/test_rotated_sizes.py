"""On a GPU: rotated rows and channel scales of many head sizes, by the portable kernels, in processes of their own.

A block of columns that is rotated together is the largest power of two that divides a head's size, so that sizes differ
in how columns lie among threads.
"""

from __future__ import annotations

import pytest

from tersekv.formats import kv_format
from tersekv.testing import verify
from tersekv.testing.cases import Case
from tersekv.testing.workers import Workers

SECONDS = 150.0
PROCESSES = 18
SIZES = (16, 24, 40, 48, 64, 80, 96, 112, 120, 128, 192)
FORMATS = ("bf16", "fp8_e4m3", "int8_per_token_head", "nvfp4", "int4_per_token_head")
_LENS, _NEW = (37, 4, 0, 70), (20, 4, 0, 33)


def cases() -> list[Case]:
    found = []
    for fmt in FORMATS:
        for dim in SIZES:
            if dim % (kv_format(fmt).scale_block or 8):
                continue
            at = {"dim": 112, "dim_v": dim, "heads": 2, "rotation": "kv", "channels": "kv"}
            found.append(Case("prefill", fmt, f"new rows, Dv {dim}", lens=_LENS, q_lens=_NEW, ragged=True, group=4,
                              new_rows=True, **at))  # fmt: skip
            found.append(Case("decode", fmt, f"Dv {dim}", lens=_LENS, group=8, **at))
    return found


@pytest.fixture(scope="module")
def results() -> dict[str, verify.Result]:
    with Workers(PROCESSES, "cuda", "triton", seconds=SECONDS) as pool:
        return {r.case.id: r for r in pool.results(cases())}


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)
def test_what_the_reference_says(case, results):
    assert results[case.id].status == verify.PASSED, results[case.id].message
