"""The planner of mla_prefill: which cached tokens lie in which chunk."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tersekv import MLAPrefillPlan, mla_prefill_plan

REQUESTS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6)


def test_the_known_answer():
    plan = mla_prefill_plan([10, 30], [10, 30], 32)
    assert plan.buffer_row_offsets.tolist() == [[0, 10, 32], [0, 0, 8]]
    assert plan.cache_offsets.tolist() == [[0, 0], [10, 22]]
    assert plan.buffer_lengths == [32, 8]
    assert plan.max_q_len == 30
    assert plan.buffer_row_offsets.dtype == plan.cache_offsets.dtype == torch.int32


@settings(max_examples=200, deadline=None)
@given(REQUESTS, st.integers(1, 40) | st.none())
def test_every_cached_token_lies_in_exactly_one_chunk(requests, buffer):
    lens, news = [c + n for c, n in requests], [n for _, n in requests]
    plan = mla_prefill_plan(lens, news, buffer)
    chunks = len(plan.buffer_lengths)
    assert plan.buffer_row_offsets.shape == (chunks, len(lens) + 1)
    assert plan.cache_offsets.shape == (chunks, len(lens))
    seen = {b: [] for b in range(len(lens))}
    for rows, starts, length in zip(
        plan.buffer_row_offsets.tolist(), plan.cache_offsets.tolist(), plan.buffer_lengths, strict=True
    ):
        assert rows[0] == 0
        assert rows[-1] == length
        assert buffer is None or length <= buffer
        for b in range(len(lens)):
            seen[b] += range(starts[b], starts[b] + rows[b + 1] - rows[b])
    assert seen == {b: list(range(n)) for b, n in enumerate(lens)}
    full = sum(lens) if buffer is None else buffer
    assert all(length == full for length in plan.buffer_lengths[:-1]), "only the last chunk may have room left"
    assert plan.max_q_len == max(news, default=0)


@pytest.mark.parametrize("lens", [[], [0], [0, 0, 0]])
@pytest.mark.parametrize("buffer", [None, 8, 0])
def test_nothing_to_plan_gives_one_empty_chunk(lens, buffer):
    plan = mla_prefill_plan(lens, lens, buffer)
    assert plan.buffer_lengths == [0]
    assert plan.buffer_row_offsets.tolist() == [[0] * (len(lens) + 1)]
    assert plan.cache_offsets.tolist() == [[0] * len(lens)]


def test_no_buffer_size_means_one_chunk():
    plan = mla_prefill_plan([7, 0, 5], [1, 0, 5])
    assert plan.buffer_lengths == [12]
    assert plan.buffer_row_offsets.tolist() == [[0, 7, 7, 12]]


def test_lengths_may_be_anything_that_counts():
    plan = mla_prefill_plan(torch.tensor([3, 2]), torch.tensor([1, 2]), 4)
    assert plan.buffer_lengths == [4, 1]


def test_moving_a_plan_keeps_the_numbers_of_the_host():
    plan = mla_prefill_plan([3, 2], [1, 2], 4)
    moved = plan.to("cpu")
    assert isinstance(moved, MLAPrefillPlan)
    assert moved.buffer_lengths is plan.buffer_lengths
    assert moved.max_q_len == plan.max_q_len
    assert torch.equal(moved.buffer_row_offsets, plan.buffer_row_offsets)


@pytest.mark.parametrize(
    ("lens", "news", "buffer", "message"),
    [
        ([3], [4], None, "q_lens: want one number in"),
        ([3], [-1], None, "q_lens: want one number in"),
        ([3], [1, 2], None, "q_lens: want one number in"),
        ([3], [1], 0, "buffer_tokens: want a positive number, got 0"),
        ([3], [1], -5, "buffer_tokens: want a positive number, got -5"),
        ([0], [0], -5, "buffer_tokens: want a positive number, got -5"),
        ([2**40], [1], 2**20, rf"seq_lens: want less than 2\*\*31 tokens, as int32 holds them, got {2**40}"),
        ([2**30] * 2, [1] * 2, None, rf"buffer_tokens: want less than 2\*\*31 tokens, .* got {2**31}"),
    ],
)
def test_a_contradiction_raises(lens, news, buffer, message):
    with pytest.raises(ValueError, match=message):
        mla_prefill_plan(lens, news, buffer)


@pytest.mark.parametrize(("given", "error", "message"), [
    (([10.9], [2]), TypeError, "seq_lens: want int, got float 10.9"),
    (([10], torch.tensor([2.9])), TypeError, "q_lens: want int, got Tensor tensor(2.9000)"),
    ((10, 5), TypeError, "seq_lens: want a number for each request, got int 10"),
    (([10], [2], 3.5), TypeError, "buffer_tokens: want int, got float 3.5"),
    (([10], [2], None, "gpu"), ValueError,
     "device: want a device of torch such as 'cuda', 'cuda:1' or 'cpu', got 'gpu'"),
])  # fmt: skip
def test_what_does_not_count_is_named(given, error, message):
    with pytest.raises(error) as caught:
        mla_prefill_plan(*given[:3], device=given[3] if len(given) > 3 else None)
    assert str(caught.value) == message
