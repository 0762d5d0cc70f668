"""index_topk, compiled for chips that are not there: rounds, registers, and scans that stay within a warp."""

from __future__ import annotations

import pytest
import torch
from compile_tools import ARCHS, VERSION, compile_launches

from tersekv.backends.triton import index_topk
from tersekv.calls import IndexTopkCall
from tersekv.dispatch.plan import facts


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("width", "k", "rounds"), [(65536, 2048, 1), (65536, 512, 1), (1 << 19, 2048, 2), (4000, 9, 0)]
)
def test_a_split_stays_in_registers(width, k, rounds, arch):
    out = torch.empty(64, k, dtype=torch.int32)
    call = IndexTopkCall(torch.empty(64, width), torch.empty(64, dtype=torch.int32), None, out, None, k, 0, 0)
    f = facts("index_topk", call, None if isinstance(arch, str) else arch)
    if VERSION > (3, 6) and k == 2048:  # half as many columns a split
        rounds += 1
    kernels = compile_launches(index_topk.run, call, index_topk.configure(f), arch)
    names, of_rows = [k["name"] for k in kernels], ["index_candidates_kernel"] * rounds + ["index_topk_kernel"]
    assert names == of_rows * (
        1 if VERSION == (3, 6) else len(names) // len(of_rows)
    )  # by as many rows as scratch is for
    for kernel in kernels:
        # Sums of warps; after 3.6 the layout of stores is unlike that of loads.
        assert kernel["shared"] <= (4096 if VERSION == (3, 6) else 1 << 16)
        if arch in (80, 90):
            assert kernel["n_spills"] <= 192  # of 64 registers a thread of 32 warps
