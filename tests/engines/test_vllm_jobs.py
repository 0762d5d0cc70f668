"""Which kernels of a warm-up vLLM's batches wait for: graphs for those of graphs, where other batches follow."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from test_vllm_drafts import DIM, HEADS, KV_HEADS, LENGTHS, SCALE, metadata, pages

from tersekv.integrations import vllm_attention, vllm_warm_up
from tersekv.integrations.vllm_attention import TersekvImpl, TersekvMetadataBuilder
from tersekv.integrations.vllm_warm_up import JOBS

ONE = torch.ones(())


@pytest.fixture
def done(monkeypatch):
    """The jobs that a warm-up on a GPU would do, in their order."""
    jobs = []
    monkeypatch.setattr(
        vllm_attention, "first_jobs", lambda kind, device, wanted: [job for job in wanted if job not in jobs]
    )
    monkeypatch.setattr(vllm_warm_up, "_postponed", [])
    monkeypatch.setattr(vllm_attention, "warm_up", lambda q, pages, m, own, options, windows, these: jobs.extend(these))
    return jobs


def forward(builder, counts, captured=False):
    impl = TersekvImpl(HEADS, DIM, SCALE, KV_HEADS, None, kv_cache_dtype="auto")
    m, layer = metadata(builder, counts, LENGTHS, True, captured=captured), SimpleNamespace(_k_scale=ONE, _v_scale=ONE)
    q, k, v = (torch.randn(sum(counts), h, DIM).bfloat16() for h in (HEADS, KV_HEADS, KV_HEADS))
    impl.forward(layer, q, k, v, pages("auto"), m, torch.zeros(sum(counts), HEADS * DIM).bfloat16())


def builder_of(runner_2, kind="generate", warms_up=True):
    config = SimpleNamespace(
        use_v2_model_runner=runner_2, scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
        model_config=SimpleNamespace(runner_type=kind), kernel_config=SimpleNamespace(enable_jit_warmup=warms_up),
    )  # fmt: skip
    return TersekvMetadataBuilder(None, ["layer"], config, torch.device("cpu"))


def test_kernels_of_prompts_are_waited_for_by_the_batch_behind(done):
    """vLLM's second runner warms up by graphs and two batches of few rows."""
    builder, (uniform, ragged, prefill) = builder_of(True), JOBS
    forward(builder, (1, 1, 1), captured=True)
    assert done == [uniform]
    forward(builder, (2, 2, 2))
    assert done == [uniform, ragged]
    metadata(builder, (1, 1, 1), LENGTHS, True)
    assert done == [uniform, ragged, prefill]
    forward(builder, (1, 1, 20))
    assert len(done) == 3


def test_prompts_wait_for_their_kernels_themselves(done):
    builder = builder_of(True)
    forward(builder, (1, 1, 20))
    assert done == [*JOBS]
    metadata(builder, (1, 1, 1), LENGTHS, True)
    assert done == [*JOBS]


@pytest.mark.parametrize("without", [(False,), (True, "pooling"), (True, "generate", False)])
def test_without_batches_of_vllms_own_graphs_wait_for_all(done, without):
    forward(builder_of(*without), (1, 1, 1), captured=True)
    assert done == [*JOBS]
