"""batch_invariant="prefill" on CPUs: a token's bits through chunks of prefill and steps of decode, by both backends."""

from __future__ import annotations

import pytest
import torch
from alone import attend, problem
from chunks import rows_that_differ, same

from tersekv import decode, prefill
from tersekv.backends.cpu import library

NATIVE = pytest.mark.skipif(library.why_no_library() is not None, reason="no native library here")
LENS, ROWS = (5000, 3, 2049, 700, 40), (2, 3, 70, 9, 40)
CHUNKS = ((64, 6), (1, 69), (4, 5), (2, 1), (33, 7))
FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_per_token_head", "int8_per_token_head", "nvfp4", "int4_per_token_head")


@NATIVE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("format", FORMATS)
def test_native_kernels(format, dtype):
    case, q = problem("prefill", format, LENS, ROWS, dtype)
    assert rows_that_differ(case, q, ROWS, CHUNKS, backend="cpu") == []


@NATIVE
def test_native_kernels_with_windows_and_sinks():
    case, q = problem("prefill", "fp8_e4m3", LENS, ROWS)
    case.page_table[0, : (5000 - 2 - 2300) // case.layer.page_size] = -1  # nobody reads what is before all windows
    options = {"window": 2300, "sinks": torch.randn(q.shape[1]), "softcap": 20.0}
    assert rows_that_differ(case, q, ROWS, CHUNKS, backend="cpu", **options) == []


@NATIVE
def test_batch_invariance_alone_does_not_do_it_with_avx512():
    """AVX2's kernels have one order for few rows and many."""
    case, q = problem("prefill", "fp8_e4m3", (3000,), (70,))
    whole = attend("prefill", case, q, (70,), backend="cpu", batch_invariant=True)
    last = attend("decode", case, q[-1:], (1,), backend="cpu", batch_invariant=True)
    one_order = library.load_compiled_library_or_reason().level() in ("plain", "avx2")
    assert same(last, tuple(x[-1:] for x in whole)) == one_order


@NATIVE
def test_results_are_right():
    case, q = problem("prefill", "fp8_e4m3", LENS, ROWS)
    want, lse = attend("prefill", case, q, ROWS, backend="torch")
    got, sums = attend("prefill", case, q, ROWS, backend="cpu", batch_invariant="prefill")
    assert (got.float() - want.float()).norm() <= 4e-3 * want.float().norm()
    assert torch.allclose(sums, lse, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"window": 40, "softcap": 20.0}], ids=["causal", "window"])
def test_the_oracle(options):
    case, q = problem("prefill", "int4_per_token_head", (300, 3, 65), (70, 3, 2))
    assert rows_that_differ(case, q, (70, 3, 2), ((64, 6), (1, 69), (2, 1)), backend="torch", **options) == []


def test_what_it_cannot_be_beside():
    case, q = problem("prefill", "bf16", (40,), (2,))
    where, starts = (q, case.layer, case.page_table, case.seq_lens), torch.tensor([0, 2], dtype=torch.int32)
    rows = torch.zeros(2, case.layer.num_kv_heads, q.shape[2], dtype=q.dtype)
    wrong = (
        (lambda: prefill(*where, starts, k=rows, v=rows, batch_invariant="prefill"), "k: want None with batch_inv"),
        (lambda: decode(*where, mask=torch.ones(2, 2, dtype=torch.uint16), batch_invariant="prefill"), "mask: want No"),
        (lambda: decode(*where, batch_invariant="decode"), 'batch_invariant: want True, False or "prefill"'),
    )
    for call, message in wrong:
        with pytest.raises(ValueError, match=message):
            call()
