"""MLA prefill with much to do: what three warpgroups could not hold in fp32 is computed again."""

from __future__ import annotations

import pytest
import torch

from tersekv.backends.gluon.sm90.mla_prefill import three_warpgroups as mla_prefill_trio
from tersekv.backends.gluon.sm90.mla_prefill.attention import OVERFLOWED
from tersekv.backends.host.bind import Workspace
from tersekv.dispatch import plan
from tersekv.testing.cases import Case
from tersekv.testing.make import make
from tersekv.testing.memory import moved

CASE = Case("mla_prefill", "bf16", "many heads", lens=(2100,), q_lens=(2000,), page=64, heads=1, group=128, dim_v=128)


ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.skipif(not ON_HOPPER, reason="needs sm_90")
@pytest.mark.parametrize("times", [1.0, 60.0], ids=["alike", "far apart"])
def test_scores_however_far_apart_give_what_the_portable_kernels_give(times, monkeypatch):
    monkeypatch.setattr(mla_prefill_trio, "_MIN_WORK_TILES_PER_SM", 1)  # of a smaller call than those that it is for
    want = make(CASE)
    want = want._replace(softmax_scale=want.softmax_scale * times)
    calls = {backend: moved(want, torch.device("cuda")) for backend in ("gluon", "triton")}
    scratches, views = [], Workspace.slice_views
    monkeypatch.setattr(Workspace, "slice_views", lambda *given: scratches.append(views(*given)) or scratches[-1])
    plan.dispatch("mla_prefill", calls["triton"], "triton")
    launches = plan.dispatch("mla_prefill", calls["gluon"], "gluon").config.launches
    assert "attention_three_warpgroups_kernel" in [t.launch.fn.__name__ for t in launches.kernel_launches]
    failed = bool(scratches[-1]["WORK_COUNTER"][OVERFLOWED].item())
    assert failed == (times > 1), "what three warpgroups could not hold is computed again, and only that"
    a, b = (calls[backend].out.double() for backend in ("gluon", "triton"))
    assert (a - b).norm() <= (3e-3 if times == 1 else 2e-2) * b.norm()
    a, b = (calls[backend].lse for backend in ("gluon", "triton"))
    assert (a - b).abs().max() <= 2e-3 * times
