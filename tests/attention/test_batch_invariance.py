"""batch_invariant on CPUs: a request's bits alone and among others, by the native kernels and by the oracle."""

from __future__ import annotations

import pytest
import torch
from alone import attend, changed, of_request, problem

import tersekv
from tersekv import decode
from tersekv.backends.cpu import library

LENS, ONE = (5000, 3, 2049, 700, 0, 2048), (1,) * 6
DRAFTS = (2, 3, 1, 40, 1, 9)  # few rows and many
NATIVE = pytest.mark.skipif(library.why_no_library() is not None, reason="no native library here")


@pytest.fixture
def _threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@NATIVE
@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("q_lens", [ONE, DRAFTS], ids=["one row", "drafts"])
@pytest.mark.parametrize(
    ("op", "format"),
    [("decode", "fp8_e4m3"), ("decode", "int4_per_token_head"), ("decode", "nvfp4"), ("decode", "fp16"),
     ("prefill", "int8_per_token_head"), ("mla_decode", "bf16"), ("mla_decode", "fp8_ds_mla")],
)  # fmt: skip
def test_native_kernels_keep_the_bits_of_a_request(op, format, q_lens):
    case, q = problem(op, format, LENS, q_lens)
    assert changed(op, case, q, q_lens, backend="cpu", batch_invariant=True) == []


@NATIVE
@pytest.mark.usefixtures("_threads")
def test_without_the_option_they_do_not():
    case, q = problem("decode", "fp8_e4m3", (9000, *LENS), (1, *ONE))
    assert changed("decode", case, q, (1, *ONE), backend="cpu")
    plain, kept, again = (
        attend("decode", case, q, (1, *ONE), backend="cpu", batch_invariant=on) for on in (False, True, False)
    )
    assert all(map(torch.equal, plain, again))  # calls that are like one before are told apart by it
    assert not all(map(torch.equal, plain, kept))


@NATIVE
def test_the_number_of_threads_does_not_count():
    case, q = problem("decode", "fp8_e4m3", LENS, ONE)
    found, before = [], torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(attend("decode", case, q, ONE, backend="cpu", batch_invariant=True)[0])
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("op", ["decode", "prefill", "mla_decode"])
def test_the_oracle_keeps_the_bits_of_a_request(op):
    case, q = problem(op, "bf16", (700, 3, 0, 65), (1, 3, 2, 5))
    assert changed(op, case, q, (1, 3, 2, 5), backend="torch", batch_invariant=True) == []


@NATIVE
@pytest.mark.usefixtures("_threads")
def test_windows_and_sinks_are_kept_too():
    case, q = problem("decode", "fp8_e4m3", LENS, DRAFTS)
    options = {"window": 2500, "sinks": torch.randn(q.shape[1]), "backend": "cpu", "batch_invariant": True}
    assert changed("decode", case, q, DRAFTS, **options) == []


@NATIVE
@pytest.mark.parametrize("op", ["decode", "prefill", "mla_decode"])
def test_results_are_right(op):
    case, q = problem(op, "bf16", LENS, DRAFTS)
    want, lse = attend(op, case, q, DRAFTS, backend="torch")
    got, sums = attend(op, case, q, DRAFTS, backend="cpu", batch_invariant=True)
    assert (got.float() - want.float()).norm() <= 4e-3 * want.float().norm()
    assert torch.allclose(sums, lse, atol=1e-4)


def test_a_backend_that_cannot_is_refused_by_name():
    case, q = problem("decode", "bf16", (40,), (1,))
    where = (q, case.layer, case.page_table, case.seq_lens)
    facts = tersekv.dispatch.plan.facts("decode", _call(*where), arch=90)
    assert tersekv.dispatch.plan.why_not(facts, "gluon") == "takes no batch invariance yet"
    facts.device = torch.device("cuda")
    assert tersekv.dispatch.plan.why_not(facts, "torch") == (
        "takes the requests of a call together on cuda, which is no batch invariance"
    )
    with pytest.raises(TypeError, match="batch_invariant: want bool, got int"):
        decode(*where, batch_invariant=1)


def _call(q, layer, table, lens):
    from tersekv.calls import AttentionCall

    return AttentionCall(
        q=q, k_cache=layer.k, v_cache=layer.v, page_table=table, seq_lens=lens, out=torch.empty_like(q), format="bf16",
        max_q_len=1, softmax_scale=1.0, batch_invariant=True,
    )  # fmt: skip


def test_alone_means_that_other_requests_are_gone():
    case, _ = problem("decode", "bf16", (40, 3), (1, 1))
    assert of_request(case, 1).page_table.shape == (1, 1)
