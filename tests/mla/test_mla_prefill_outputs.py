"""mla_prefill on a CPU looks at every place before it writes anything: a call that failed can be made again."""

import pytest
import torch
from mla_cases import Case

from tersekv import mla_decode_branch, mla_prefill_plan


def untouched(case, match, **changed):
    """The call raises, and neither the cache nor q has changed."""
    raw, q = case.raw.clone(), case.t["q"].clone()
    with pytest.raises(ValueError, match=match):
        case.run(**changed)
    assert torch.equal(case.raw, raw)
    assert torch.equal(case.t["q"], q)


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch):
    """Messages are those of the backend."""
    monkeypatch.delenv("TERSEKV_CHECKED", raising=False)


@pytest.mark.parametrize("cached", [-1, -5, -4000])
def test_a_negative_length_is_no_place_at_the_end_of_the_table(cached):
    case = Case(requests=((0, 5), (9, 3)))
    case.t["page_table"][case.t["page_table"] > 100] = 0  # pages of somebody else
    case.t["cache_lens"][1] = cached
    untouched(case, rf"^cache_lens: want at least 0, got {cached} at 1$")


def test_a_plan_of_longer_requests_is_named_and_nothing_written():
    case = Case(requests=((10, 20), (0, 10)))
    untouched(case, r"^plan: want tokens in \[0, 30\) of request 0, got 0 to 299 in chunk 0$",
              plan=mla_prefill_plan([300, 10], [20, 10]))  # fmt: skip
    assert case.run()[0].isfinite().all()


def test_a_later_chunk_is_looked_at_too():
    case = Case(requests=((10, 20), (0, 10)))
    untouched(case, r"^plan: want tokens in \[0, 10\) of request 1, got \d+ to \d+ in chunk \d$",
              plan=mla_prefill_plan([30, 100], [20, 10], 40))  # fmt: skip


def test_rows_of_a_plan_that_fall_are_named_and_nothing_written():
    case, plan = Case(), mla_prefill_plan([5, 12, 5], [5, 3, 1])
    plan.buffer_row_offsets[0, 1] = 19
    untouched(
        case, r"^plan.buffer_row_offsets: want rows that never fall, got \[0, 19, 17, 22\] in chunk 0$", plan=plan
    )


def test_a_page_of_the_past_that_does_not_exist_is_still_the_tables_fault():
    case = Case(requests=((9, 3),))
    case.t["page_table"][0, 0] = 77
    untouched(case, r"^page_table: want page ids in \[0, \d+\), got 77 at \[0, 0\]$")


def test_lengths_do_not_go_to_the_memory_that_they_are_read_from():
    case = Case(dtype=torch.bfloat16)
    empty = mla_prefill_plan([0, 0, 0], [0, 0, 0])._replace(max_q_len=5)
    lens = case.t["cache_lens"]
    for same in (lens, lens.view(-1), lens[:]):
        untouched(case, r"^seq_lens_out: want memory of its own", plan=empty, seq_lens_out=same)


def no_branch(case, match):
    """The decode branch raises, and has written nothing."""
    raw, t = case.raw.clone(), case.t
    w = torch.randn(2, 128, 128).to(torch.bfloat16)
    with pytest.raises(ValueError, match=match):
        mla_decode_branch(
            t["q"], case.layer(), t["page_table"], t["cache_lens"], t["freqs"], t["gamma"], w, w, softmax_scale=0.1,
            kv_c=t["kv_c"], k_pe=t["k_pe"],
        )  # fmt: skip
    assert torch.equal(case.raw, raw)


def test_the_decode_branch_takes_no_negative_length():
    case = Case(requests=((0, 1), (9, 1)), fp8_weights=False, dn=128, dv=128)
    case.t["page_table"][case.t["page_table"] > 100] = 0
    case.t["cache_lens"][1] = -5
    no_branch(case, r"^cache_lens: want at least 0, got -5 at 1$")


def test_the_decode_branch_looks_at_the_pages_of_the_past_first():
    case = Case(requests=((0, 1), (9, 1)), fp8_weights=False, dn=128, dv=128)
    case.t["page_table"][1, 0] = 77
    no_branch(case, r"^page_table: want page ids in \[0, \d+\), got 77 at \[1, 0\]$")
