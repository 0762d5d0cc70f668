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
SIZES = ((256, 64), (256, 32), (384, 64), (384, 48), (128, 16), (496, 64), (512, 32))
LENS = (700, 9, 0, 64, 3000)


def case(fmt: str, rank: int, rope: int, heads: int, **options: Any) -> Case:
    fields = {"lens": LENS, "page": 64, "spread": True, **options}
    return Case("mla_decode", fmt, "ranks", rank=rank, rope=rope, heads=1, group=heads, **fields)


def has_kernel(fmt: str, rank: int, heads: int) -> bool:
    """In 8 bits the kernel of up to 32 rows takes no columns past the rank."""
    return fmt == "bf16" or heads > 32 or rank in (256, 512)


def passes(c: Case) -> None:
    result = run(c, "cuda", "gluon")
    assert result.status == PASSED, result.message


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize(("rank", "rope"), SIZES)
def test_a_token(fmt, rank, rope):
    for heads in (5, 16, 32, 40, 128):
        if has_kernel(fmt, rank, heads):
            passes(case(fmt, rank, rope, heads))


@pytest.mark.parametrize(("rank", "rope"), SIZES)
def test_an_8_bit_query_and_output(rank, rope):
    for heads in (16, 64):
        if has_kernel("fp8_e4m3", rank, heads):
            passes(case("fp8_e4m3", rank, rope, heads, dtype="float8_e4m3fn", out_dtype="float8_e4m3fn"))


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize(("rank", "rope"), [(256, 32), (384, 64)])
def test_ragged_drafts_of_long_requests(fmt, rank, rope):
    for heads in (8, 64):
        if has_kernel(fmt, rank, 4 * heads):
            passes(case(fmt, rank, rope, heads, lens=(9000, 300, 0, 70), q_lens=(3, 1, 0, 4), ragged=True, page=16))


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize(("rank", "rope"), [(256, 32), (384, 64)])
def test_what_lies_behind_a_row_and_an_output_stays_out(fmt, rank, rope):
    """Behind a latent lies its rotary part, and in 16 bits more columns; outputs are columns of wider rows."""
    call = make(
        case(fmt, rank, rope, 16 if has_kernel(fmt, rank, 16) else 64, gaps="columns" if fmt == "bf16" else ""), "cuda"
    )
    want = plan("mla_decode", call, "torch")
    want.run(call, want.config)
    expected = call.out.clone()
    wide = torch.full((*call.out.shape[:2], rank + 64), 7.0, dtype=call.out.dtype, device="cuda")
    call = call._replace(out=wide[..., :rank])
    found = plan("mla_decode", call, "gluon")
    found.run(call, found.config)
    assert bool((wide[..., rank:] == 7).all())
    torch.testing.assert_close(wide[..., :rank].float(), expected.float(), rtol=2e-2, atol=2e-2)
