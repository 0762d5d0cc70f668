"""SGLang's real engine with drafts from n-grams of what was said: trees, which the model verifies in one step."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from checkpoints import llama, text
from dense_reference import dequantise
from reference import Reference, hold
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_cpu import batch_of, engine, generate, runner_of
from sglang_drafts import stand_in
from torch._subclasses.fake_tensor import FakeTensorMode

from tersekv.integrations.sglang_attention import TersekvBackend
from tersekv.integrations.sglang_drafts import draft_mask
from tersekv.integrations.sglang_pool import TersekvPool

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(("format", "page", "breadth"), [
    ("int8_per_token_head", 1, 10), ("fp8_e4m3/int4_per_token_head", 1, 4), ("nvfp4", 16, 1),
], ids=str)  # fmt: skip
def test_drafts_change_nothing_but_the_number_of_steps(model, format, page, breadth, monkeypatch):
    stand_in(monkeypatch)
    prompts = [text(2200 * i + 60, n) * 2 for i, n in enumerate((9, 40, 75))]
    drafts = {
        "speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 12,
        "speculative_ngram_max_bfs_breadth": breadth,
    }  # fmt: skip
    options = {"page_size": page, "chunked_prefill_size": 64}
    with engine(model, format, **options) as made:
        plain, _ = generate(made, prompts, 40)
    with engine(model, format, **options, **drafts) as made:
        first, _ = generate(made, prompts, 40)
        # Again, with n-grams of all that was said.
        again, told = generate(made, prompts, 40)
    reference = Reference(model, format)
    wanted = [reference.score(p, tokens) for p, (tokens, _) in zip(prompts, plain, strict=True)]
    for results in (first, again):
        assert [tokens for tokens, _ in results] == [tokens for tokens, _ in plain]
        hold(results, wanted)
    assert all(x["spec_verify_ct"] < 20 for x in told), [x["spec_verify_ct"] for x in told]


def trees(requests: int, drafts: int, seed: int) -> torch.Tensor:
    """Which draft sees which [B, drafts, drafts]: itself, and all that its parent sees."""
    gen = torch.Generator().manual_seed(seed)
    seen = torch.eye(drafts, dtype=torch.bool).repeat(requests, 1, 1)
    for tree in seen:
        for i in range(1, drafts):
            tree[i] |= tree[int(torch.randint(i, (), generator=gen))]
    return seen


def pool_of(format: str, monkeypatch, **options) -> TersekvPool:
    monkeypatch.setenv("TERSEKV_SGLANG_FORMAT", format)
    options = {"head_num": KV_HEADS, "head_dim": DIM, "layer_num": 1, "page_size": PAGE, **options}
    return TersekvPool(size=640, dtype=torch.bfloat16, device="cpu", enable_memory_saver=False, **options)


def runner_with(drafts: int, monkeypatch):
    pool = pool_of("int8_per_token_head", monkeypatch)
    return runner_of(pool, speculative_algorithm="NGRAM", speculative_num_draft_tokens=drafts)


def drafts_of(runner, lens: list[int], drafts: int, seen: torch.Tensor) -> SimpleNamespace:
    """As SGLang has them: lengths are without the drafts."""
    batch = batch_of(runner, ForwardMode.TARGET_VERIFY, [n + drafts for n in lens], [drafts] * len(lens))
    batch.seq_lens, batch.spec_info = torch.tensor(lens), SimpleNamespace(custom_mask=seen.flatten())
    return batch


def attend(backend, batch, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    n, gen = len(batch.out_cache_loc), torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, h, DIM, generator=gen).bfloat16() for h in (HEADS, KV_HEADS, KV_HEADS))
    layer = RadixAttention(HEADS, DIM, 0.125, KV_HEADS, 0)
    return q, backend.forward(q.view(n, -1), k, v, layer, batch).view(n, HEADS, DIM)


@pytest.mark.parametrize("drafts", [5, 16, 33])
def test_a_draft_sees_its_own_branch_and_all_before(drafts, monkeypatch):
    runner, lens = runner_with(drafts, monkeypatch), [60, 17, 90]
    backend = TersekvBackend(runner)
    prompts = batch_of(runner, ForwardMode.EXTEND, lens, lens)
    backend.init_forward_metadata(prompts)
    attend(backend, prompts, 1)
    seen = trees(3, drafts, 2)
    batch = drafts_of(runner, lens, drafts, seen)
    backend.init_forward_metadata(batch)
    q, got = attend(backend, batch, 3)
    k_all, v_all = (
        x.flatten(0, 1).repeat_interleave(HEADS // KV_HEADS, 1) for x in dequantise(runner.token_to_kv_pool.layer(0))
    )
    for b, n in enumerate(lens):
        at = runner.req_to_token_pool.req_to_token[b, : n + drafts].long()
        rows = slice(b * drafts, (b + 1) * drafts)
        s = torch.einsum("qhd,khd->hqk", q[rows].double(), k_all[at].double()) * 0.125
        mask = torch.cat([torch.ones(drafts, n, dtype=torch.bool), seen[b]], 1)
        want = torch.einsum("hqk,khd->qhd", s.masked_fill(~mask, -math.inf).softmax(-1), v_all[at].double())
        assert (got[rows].double() - want).norm() < 5e-3 * want.norm()


@pytest.mark.parametrize("drafts", [5, 33])
def test_the_mask_of_a_gpu_has_earlier_tokens_too(drafts):
    lens, seen = [60, 1, 90], trees(3, drafts, 4)
    full = [
        torch.cat([torch.ones(drafts, n, dtype=torch.bool), x], 1).flatten() for n, x in zip(lens, seen, strict=True)
    ]
    want = draft_mask(seen.flatten(), torch.tensor(lens), drafts, full=False)
    assert want.shape == (3 * drafts, 2 * -(-drafts // 32))
    # The last request pads a graph's batch.
    got = draft_mask(torch.cat(full), torch.tensor([*lens, 1]), drafts, full=True)
    assert torch.equal(got[: 3 * drafts].int(), want.int())
    assert len(got) == 4 * drafts


def test_a_graph_of_drafts_reads_the_mask_that_its_replay_brings(monkeypatch):
    runner, lens, drafts = runner_with(8, monkeypatch), [60, 17, 90], 8
    backend = TersekvBackend(runner)
    batches = [drafts_of(runner, lens, drafts, trees(3, drafts, seed)) for seed in (5, 6)]
    wanted = []
    for batch in batches:
        backend.init_forward_metadata(batch)
        wanted.append(attend(backend, batch, 7)[1])
    assert not torch.equal(*wanted)
    backend.init_cuda_graph_state(4, 4 * drafts)
    backend.init_forward_metadata_in_graph(batches[0])
    for batch, want in zip(batches, wanted, strict=True):
        backend.init_forward_metadata_out_graph(batch)
        assert torch.equal(attend(backend, batch, 7)[1], want)
    # No value is read on the host.
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        like = SimpleNamespace(**vars(batches[0]))
        like.spec_info = SimpleNamespace(custom_mask=fake.from_tensor(batches[0].spec_info.custom_mask))
        for name in ("seq_lens", "req_pool_indices", "out_cache_loc"):
            setattr(like, name, fake.from_tensor(getattr(like, name)))
        draft_mask(like.spec_info.custom_mask, like.seq_lens, drafts, full=True)
        backend.init_forward_metadata_in_graph(like)


def test_what_is_refused(monkeypatch):
    runner = runner_with(4, monkeypatch)
    backend, batch = TersekvBackend(runner), batch_of(runner, ForwardMode.DECODE, [5], [1])
    backend.init_forward_metadata(batch)
    windowed = RadixAttention(HEADS, DIM, 0.125, KV_HEADS, 0, sliding_window_size=39)
    with pytest.raises(NotImplementedError, match="sliding_window_size: want -1 for tersekv, got 39"):
        backend.forward(torch.zeros(1, HEADS * DIM).bfloat16(), None, None, windowed, batch)
    hybrid = HybridLinearKVPool.__new__(HybridLinearKVPool)
    hybrid.full_kv_pool = runner.token_to_kv_pool
    runner.token_to_kv_pool = hybrid
    with pytest.raises(NotImplementedError, match="speculative_algorithm: want None for a hybrid model"):
        TersekvBackend(runner)


def test_sglangs_kernel_moves_the_widest_rows_whole(monkeypatch):
    """It cuts rows into tiles, as many as it is told, for all buffers alike."""
    stand_in(monkeypatch)
    pool = pool_of("int4_per_token_head/bf16", monkeypatch, head_num=8, enable_kv_cache_copy=True)
    config = pool._kv_copy_config
    widest = max(x.stride(0) * x.itemsize for x in (*pool.k_buffer, *pool.v_buffer))
    assert config["byte_tiles"] * config["bytes_per_tile"] >= widest
    assert 0 not in pool.data_ptrs.tolist()  # of V, which has no scales
