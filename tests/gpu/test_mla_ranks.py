"""Hopper's MLA decode over latents of fewer than 512 + 64 columns: shared memory holds zeros past them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tersekv.dispatch.plan import plan
from tersekv.testing.cases import Case
from tersekv.testing.make import make
from tersekv.testing.verify import PASSED, run

pytestmark = pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="kernels for Hopper")
SIZES = ((256, 64), (256, 32), (320, 64), (384, 64), (384, 48), (128, 16), (496, 64), (512, 32))
LENS = (700, 9, 0, 64, 3000)


def case(fmt: str, rank: int, rope: int, heads: int, **options: Any) -> Case:
    fields = {"lens": LENS, "page": 64, "spread": True, **options}
    return Case("mla_decode", fmt, "ranks", rank=rank, rope=rope, heads=1, group=heads, **fields)


def passes(c: Case) -> None:
    result = run(c, "cuda", "gluon")
    assert result.status == PASSED, result.message


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize(("rank", "rope"), SIZES)
def test_a_token(fmt, rank, rope):
    for heads in (5, 16, 32, 40, 128):
        passes(case(fmt, rank, rope, heads))


@pytest.mark.parametrize(("rank", "rope"), SIZES)
def test_an_8_bit_query_and_output(rank, rope):
    for heads in (16, 64):
        passes(case("fp8_e4m3", rank, rope, heads, dtype="float8_e4m3fn", out_dtype="float8_e4m3fn"))


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize(("rank", "rope"), [(256, 32), (384, 64)])
def test_ragged_drafts_of_long_requests(fmt, rank, rope):
    for heads in (8, 64):
        passes(case(fmt, rank, rope, heads, lens=(9000, 300, 0, 70), q_lens=(3, 1, 0, 4), ragged=True, page=16))


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize(("rank", "rope"), [(256, 32), (384, 64)])
def test_what_lies_behind_a_row_and_an_output_stays_out(fmt, rank, rope):
    """Behind a latent lies its rotary part, and in 16 bits more columns; outputs are columns of wider rows."""
    call = make(case(fmt, rank, rope, 16, gaps="columns" if fmt == "bf16" else ""), "cuda")
    want = plan("mla_decode", call, "torch")
    want.run(call, want.config)
    expected = call.out.clone()
    wide = torch.full((*call.out.shape[:2], rank + 64), 7.0, dtype=call.out.dtype, device="cuda")
    call = call._replace(out=wide[..., :rank])
    found = plan("mla_decode", call, "gluon")
    found.run(call, found.config)
    assert bool((wide[..., rank:] == 7).all())
    torch.testing.assert_close(wide[..., :rank].float(), expected.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("rank", "rope"), [(128, 16), (320, 64), (384, 48), (384, 64)])
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_columns_past_the_rank_count_nothing_whatever_memory_held(rank, rope, heads):
    """Products of other programs leave NaN in shared memory and registers."""
    call = make(case("fp8_e4m3", rank, rope, heads, lens=(700,) * 5), "cuda")
    want = plan("mla_decode", call, "torch")
    want.run(call, want.config)
    expected, found = call.out.clone(), plan("mla_decode", call, "gluon")
    nan = torch.full((4096, 4096), float("nan"), dtype=torch.bfloat16, device="cuda")
    for _ in range(10):
        nan @ nan
        found.run(call, found.config)
        torch.testing.assert_close(call.out.float(), expected.float(), rtol=2e-2, atol=2e-2)
