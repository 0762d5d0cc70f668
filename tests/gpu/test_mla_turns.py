"""On Hopper: MLA decode whose two warpgroups take turns on tiles, where those of one come later than the other's."""

from __future__ import annotations

import pytest
import torch

from tersekv.backends.gluon import mla_decode
from tersekv.cache import PagedLatentCache
from tersekv.calls import MLADecodeCall
from tersekv.dispatch import plan
from tersekv.testing.compare import relative

pytestmark = pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90")
PAGE = 64  # a tile's keys


def call_of(slow: int, requests: int = 64, tiles: int = 128) -> MLADecodeCall:
    """Tiles that are `slow` (mod 2) lie in pages of their own, all others in one page, which stays in the L2 cache."""
    g = torch.Generator("cuda").manual_seed(slow)
    pages = requests * tiles // 2 + 1
    c = PagedLatentCache.allocate(1, pages, PAGE, format="fp8_ds_mla", device="cuda")[0]
    for first in range(0, pages, 512):
        codes, rotary, scales = (
            c.ckv[first : first + 512],
            c.kpe[first : first + 512],
            c.ckv_scale_cache[first : first + 512],
        )
        codes.copy_(torch.randn(codes.shape, device="cuda", generator=g).to(codes.dtype))
        rotary.copy_(torch.randn(rotary.shape, device="cuda", generator=g))
        scales.copy_(0.5 + torch.rand(scales.shape, device="cuda", generator=g))
    table = torch.zeros(requests, tiles, dtype=torch.int32, device="cuda")
    far = 1 + torch.randperm(pages - 1, device="cuda", generator=g)
    table[:, slow::2] = far.view(requests, -1).int()
    q = torch.randn(requests, 32, 576, device="cuda", generator=g).bfloat16()
    lens = tiles * PAGE - torch.arange(requests, device="cuda", dtype=torch.int32) * 67
    return MLADecodeCall(
        q[..., :512], q[..., 512:], c.ckv, c.kpe, c.ckv_scale_cache, table, lens, None,
        torch.empty(requests, 32, 512, device="cuda", dtype=torch.bfloat16), torch.empty(requests, 32, device="cuda"),
        "fp8_ds_mla", 1, 576**-0.5, None, 1.0, None, 1.0, None, "exact",
    )  # fmt: skip


@pytest.mark.parametrize("slow", [0, 1])
def test_a_warpgroup_takes_no_tile_for_its_own_that_is_the_others(slow):
    call = call_of(slow)
    f = plan.facts("mla_decode", call)
    assert mla_decode.choose_config(f).num_consumers == 2
    alone = mla_decode.configure(
        f, mla_decode.MLADecodeConfig(block_m=16, num_stages=2, ctas_per_sm=2, heads_per_block=16)
    )
    mla_decode.run(call, alone)
    out, lse = call.out.clone(), call.lse.clone()
    config = mla_decode.configure(f)
    mla_decode.run(call, config)
    first, first_lse = call.out.clone(), call.lse.clone()
    assert relative(first.double(), out.double()) < 5e-3  # one wrong tile: 0.015
    torch.testing.assert_close(first_lse, lse, rtol=0, atol=1e-3)
    for _ in range(200):
        call.out.fill_(float("nan"))
        mla_decode.run(call, config)
        assert torch.equal(call.out, first)
        assert torch.equal(call.lse, first_lse)
