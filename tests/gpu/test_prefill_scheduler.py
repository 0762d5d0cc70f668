"""On Hopper: prefill's work tiles, taken by a counter in memory that holds anything before a launch."""

from __future__ import annotations

import pytest
import torch

from tersekv.backends.gluon.sm90.decode import combine
from tersekv.backends.gluon.sm90.prefill import tile_scheduler
from tersekv.backends.host import launch
from tersekv.dispatch import plan
from tersekv.testing.cases import Case
from tersekv.testing.make import make
from tersekv.testing.memory import moved

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not ON_HOPPER, reason="needs sm_90")

# Fewer work tiles than SMs; many more, unevenly long; more requests than one search step.
BATCHES = {
    "few": ((70, 9), (64, 9)),
    "uneven": ((4096, 2500, 10, 1), (4096, 700, 10, 1)),
    "many": ((300,) * 70, (300,) * 70),
}
# The counter's own zero, and what other kernels leave: numbers, and decode's counters.
LEFT_OVER = {
    "zero": 0, "ones": -1, "own zero": tile_scheduler.COUNTER_ZERO.value, "a float": 0x3F8000003F800000,
    "decode's zero": combine.COUNTER_ZERO.value,
}  # fmt: skip


@pytest.mark.parametrize("left_over", LEFT_OVER)
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("batch", BATCHES)
def test_every_launch_finds_all_work_tiles_and_leaves_a_count_of_zero(batch, fmt, left_over):
    lens, q_lens = BATCHES[batch]
    case = Case("prefill", fmt, batch, ragged=True, heads=2, group=4, dim=128, page=64, lens=lens, q_lens=q_lens)
    call = moved(make(case), torch.device("cuda"))
    plan.dispatch("prefill", call, "gluon")
    want = call.out.clone()
    counter = launch.workspace(2, call.q).view(torch.int64)
    for _ in range(3):  # the later launches find what the earlier ones left
        call.out.fill_(float("nan"))
        counter[0] = LEFT_OVER[left_over]
        for _ in range(2):
            plan.dispatch("prefill", call, "gluon")
        torch.testing.assert_close(call.out, want, rtol=0, atol=0)
        assert counter[0].item() == tile_scheduler.COUNTER_ZERO.value


def test_a_graph_has_a_counter_of_its_own():
    case = Case(
        "prefill", "fp8_e4m3", "", ragged=True, heads=2, group=4, dim=128, page=64, lens=(2000,), q_lens=(2000,)
    )
    call = moved(make(case), torch.device("cuda"))
    plan.dispatch("prefill", call, "gluon")
    want, graph = call.out.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.dispatch("prefill", call, "gluon")
    for _ in range(3):
        call.out.fill_(float("nan"))
        graph.replay()
        plan.dispatch("prefill", call, "gluon")  # beside it on the same stream
        graph.replay()
        torch.testing.assert_close(call.out, want, rtol=0, atol=0)
