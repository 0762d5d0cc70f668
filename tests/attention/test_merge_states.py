"""merge_states on the oracle, against fp64 attention over all keys at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from no_sync import NoHostReads

from tersekv import merge_states


def attention(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """scores [T, H, N], values [N, H, D] → out [T, H, D], lse [T, H]; nothing seen: 0 and −inf."""
    lse = scores.logsumexp(-1)
    weights = (scores - torch.where(lse.isinf(), 0.0, lse)[..., None]).exp()
    return torch.einsum("thn,nhd->thd", weights, values), lse


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    t=st.integers(0, 3),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    shift=st.sampled_from([0.0, 300.0, -300.0]),
    as_lists=st.booleans(),
)
def test_parts_merge_to_attention_over_all_their_keys(lengths, t, seed, dtype, shift, as_lists):
    g = torch.Generator().manual_seed(seed)
    h, d, n = 2, 8, sum(lengths)
    scores = torch.randn(t, h, n, generator=g, dtype=torch.float64) * 5 + shift
    scores[torch.rand(t, h, n, generator=g) < 0.2] = -torch.inf
    values = torch.randn(n, h, d, generator=g, dtype=torch.float64)
    parts = [attention(s, v) for s, v in zip(scores.split(lengths, -1), values.split(lengths), strict=True)]
    outs = [torch.where(lse.isinf()[..., None], torch.nan, out).to(dtype) for out, lse in parts]  # empty: poison
    lses = [lse.float() for _, lse in parts]
    want_out, want_lse = attention(scores, values)
    if not as_lists:
        outs, lses = torch.stack(outs), torch.stack(lses)
    out, lse = merge_states(outs, lses, backend="torch")
    assert out.dtype == dtype
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    assert torch.allclose(out.double(), want_out, rtol=tolerance, atol=tolerance)
    assert torch.equal(lse.isinf(), want_lse.isinf())
    assert torch.allclose(lse.double(), want_lse, rtol=1e-6, atol=1e-5)


def test_all_parts_empty_give_zero_and_minus_inf():
    outs, lses = torch.full((3, 2, 2, 4), torch.nan), torch.full((3, 2, 2), -torch.inf)
    out, lse = merge_states(outs, lses, backend="torch")
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_one_part_is_itself():
    out0, lse0 = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 2)
    out, lse = merge_states(out0, lse0, backend="torch")
    assert torch.equal(out, out0[0])
    assert torch.equal(lse, lse0[0])


def test_results_go_into_given_tensors_of_any_strides_even_into_a_part():
    outs, lses = torch.randn(2, 3, 2, 8), torch.randn(2, 3, 2)
    want = merge_states(outs, lses, backend="torch")
    out, lse = torch.full((3, 4, 12), torch.nan)[:, ::2, 2:10], torch.full((2, 3), torch.nan).T
    got = merge_states(outs, lses, out=out, lse=lse, backend="torch")
    assert got[0] is out
    assert got[1] is lse
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    merge_states(outs, lses, out=outs[0], lse=lses[1], backend="torch")
    assert torch.equal(outs[0], want[0])
    assert torch.equal(lses[1], want[1])


def test_the_order_of_parts_does_not_matter_and_merging_in_two_steps_is_the_same():
    outs, lses = torch.randn(4, 3, 2, 8), torch.randn(4, 3, 2) * 4
    out, lse = merge_states(outs, lses, backend="torch")
    turned = merge_states(outs.flip(0), lses.flip(0), backend="torch")
    halves = [merge_states(outs[i : i + 2], lses[i : i + 2], backend="torch") for i in (0, 2)]
    steps = merge_states([o for o, _ in halves], [s for _, s in halves], backend="torch")
    for other in (turned, steps):
        assert torch.allclose(other[0], out, atol=1e-6)
        assert torch.allclose(other[1], lse, atol=1e-6)


def test_no_device_value_is_read_on_the_host():
    with NoHostReads():
        merge_states(torch.ones(2, 3, 1, 4), torch.ones(2, 3, 1), backend="torch")


@pytest.mark.parametrize("parts", [([], []), (torch.zeros(0, 2, 1, 4), torch.zeros(0, 2, 1))], ids=["list", "tensor"])
def test_no_part_at_all_is_refused(parts):
    with pytest.raises(ValueError, match=r"^outs: want at least one part, got none$"):
        merge_states(*parts, backend="torch")
