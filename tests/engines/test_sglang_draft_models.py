"""SGLang's real engine with a model that drafts, in a pool of its own: chains and trees of several branches."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from checkpoints import eagle, eagle3, llama, text
from dense_reference import dequantise
from reference import Reference, hold
from sglang.srt.environ import envs
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins import load_plugins
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from sglang.srt.speculative.eagle_utils import per_step_draft_out_cache_loc
from sglang_cpu import batch_of, engine, generate, runner_of
from sglang_drafts import stand_in
from test_sglang_drafts import HEADS, KV_HEADS, attend, drafts_of, pool_of, trees
from torch._subclasses.fake_tensor import FakeTensorMode

from tersekv.formats import KV_FORMATS
from tersekv.integrations import sglang as plugin
from tersekv.integrations import sglang_pool
from tersekv.integrations.sglang_attention import TersekvBackend
from tersekv.integrations.sglang_batch import REFUSED_BESIDE_A_DRAFT_MODEL
from tersekv.integrations.sglang_drafts import DraftSteps
from tersekv.integrations.sglang_mla import TersekvMLABackend
from tersekv.integrations.sglang_pool import TersekvDraftPool, TersekvPool

STEPS, TOKENS = 3, 40
MODELS = {"STANDALONE": llama, "EAGLE": eagle, "EAGLE3": eagle3}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {name: write(tmp_path_factory.mktemp(name)) for name, write in MODELS.items()}


@pytest.mark.parametrize(("algorithm", "format", "topk", "page", "more"), [
    ("STANDALONE", "int8_per_token_head", 1, 16, {}),
    ("STANDALONE", "nvfp4", 4, 1, {}),
    ("EAGLE", "bf16", 1, 16, {}),
    ("EAGLE", "fp8_e4m3/int4_per_token_head", 3, 1, {"speculative_draft_kv_cache_dtype": "bf16"}),
    ("EAGLE3", "int8_per_token_head+rotated", 1, 1, {}),
], ids=str)  # fmt: skip
def test_a_draft_model_changes_nothing_but_the_number_of_steps(
    models, algorithm, format, topk, page, more, monkeypatch
):
    stand_in(monkeypatch)
    prompts = [text(2200 * i + 60, n) * 2 for i, n in enumerate((9, 40, 75))]
    options = {"page_size": page, "chunked_prefill_size": 64}
    drafts = {
        "speculative_algorithm": algorithm, "speculative_draft_model_path": str(models[algorithm]),
        "speculative_num_steps": STEPS, "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": STEPS + 1 if topk == 1 else 8, **more,
    }  # fmt: skip
    with engine(models["STANDALONE"], format, **options) as made:
        plain, _ = generate(made, prompts, TOKENS)
    with engine(models["STANDALONE"], format, **options, **drafts) as made:
        drafted, told = generate(made, prompts, TOKENS)
    assert [tokens for tokens, _ in drafted] == [tokens for tokens, _ in plain]
    reference = Reference(models["STANDALONE"], format)
    hold(drafted, [reference.score(p, tokens) for p, (tokens, _) in zip(prompts, plain, strict=True)])
    steps = [x["spec_verify_ct"] for x in told]
    if algorithm == "STANDALONE" and topk == 1:  # the model itself, whose drafts are all right
        assert steps == [TOKENS // (STEPS + 1)] * 3
    else:
        assert all(x["spec_num_correct_drafts"] > 0 for x in told), steps


def runner_with(monkeypatch, format: str = "int8_per_token_head", topk: int = 1, page: int = 16, **more):
    pool = pool_of(format, monkeypatch, page_size=page)
    given = {
        "speculative_algorithm": "EAGLE", "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": STEPS + 1 if topk == 1 else 8,
    }  # fmt: skip
    return runner_of(pool, **given | more)


def draft_batch(runner, lens: list[int], topk: int) -> SimpleNamespace:
    """As SGLang has it: every slot of all branches."""
    n = topk * STEPS
    batch = batch_of(runner, ForwardMode.DECODE, [m + n for m in lens], [n] * len(lens))
    batch.seq_lens = torch.tensor(lens)
    return batch


@pytest.mark.parametrize(("format", "topk", "page"), [
    *((format, 1, 16) for format in KV_FORMATS), ("int8_per_token_head", 3, 1), ("int4_per_token_head", 2, 1),
], ids=str)  # fmt: skip
def test_in_each_step_a_draft_sees_its_own_branch_and_all_before(format, topk, page, monkeypatch):
    runner, lens = runner_with(monkeypatch, format, topk, page), [60, 1, 90]
    steps = DraftSteps(TersekvBackend(runner), topk, STEPS)
    prompts = TersekvBackend(runner)
    prompt = batch_of(runner, ForwardMode.EXTEND, lens, lens)
    prompts.init_forward_metadata(prompt)
    attend(prompts, prompt, 1)
    batch, slots = draft_batch(runner, lens, topk), runner.req_to_token_pool.req_to_token
    steps.init_forward_metadata(batch)
    every = batch.out_cache_loc.view(len(lens), topk, STEPS)
    columns = per_step_draft_out_cache_loc(batch.out_cache_loc, len(lens), topk, STEPS)
    assert len(steps.attn_backends) == STEPS - 1
    for i, backend in enumerate(steps.attn_backends):
        batch.out_cache_loc = columns[i]
        q, got = attend(backend, batch, 2 + i)
        k_all, v_all = (
            x.flatten(0, 1).repeat_interleave(HEADS // KV_HEADS, 1).double()
            for x in dequantise(runner.token_to_kv_pool.layer(0))
        )
        for row, out in enumerate(got):
            b, branch = divmod(row, topk)
            at = torch.cat([slots[b, : lens[b]].long(), every[b, branch, : i + 1]])
            s = torch.einsum("hd,khd->hk", q[row].double(), k_all[at]) * 0.125
            want = torch.einsum("hk,khd->hd", s.softmax(-1), v_all[at])
            assert (out.double() - want).norm() < 5e-3 * want.norm()


@pytest.mark.parametrize(("topk", "page"), [(1, 16), (3, 1)])
def test_a_graph_of_steps_makes_its_tables_itself(topk, page, monkeypatch):
    runner, lens = runner_with(monkeypatch, topk=topk, page=page), [60, 17, 90]
    steps, batch = DraftSteps(TersekvBackend(runner), topk, STEPS), draft_batch(runner, lens, topk)
    steps.init_cuda_graph_state(4, 4 * topk)
    steps.init_forward_metadata_out_graph(batch, in_capture=True)
    assert all(x.forward_metadata is None for x in steps.attn_backends)
    # No value is read on the host.
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        for name in ("seq_lens", "req_pool_indices", "out_cache_loc"):
            setattr(batch, name, fake.from_tensor(getattr(batch, name)))
        steps.init_forward_metadata_in_graph(batch)
        assert all(x.forward_metadata.table.shape[0] == 3 * topk for x in steps.attn_backends)


def test_a_chain_is_verified_without_a_mask_and_extended(monkeypatch):
    lens, n = [60, 17, 90], STEPS + 1
    wanted, seen = None, torch.ones(n, n, dtype=torch.bool).tril().repeat(3, 1, 1)
    for algorithm in ("NGRAM", "EAGLE"):
        runner = runner_with(monkeypatch, speculative_algorithm=algorithm)
        backend, batch = TersekvBackend(runner), drafts_of(runner, lens, n, seen)
        backend.init_forward_metadata(batch)
        got = attend(backend, batch, 7)[1]
        assert (backend.forward_metadata.rows is None) == (algorithm == "EAGLE")
        torch.testing.assert_close(got, got if wanted is None else wanted)
        wanted = got
    # The draft model then has the same rows, and lengths with them.
    after = batch_of(runner, ForwardMode.DRAFT_EXTEND_V2, [m + n for m in lens], [n] * 3)
    backend.init_forward_metadata(after)
    torch.testing.assert_close(attend(backend, after, 7)[1], wanted)
    # And a graph of chains needs no mask either.
    backend.init_cuda_graph_state(4, 4 * n)
    batch.spec_info = None
    backend.init_forward_metadata_out_graph(batch)
    backend.init_forward_metadata_in_graph(batch)
    torch.testing.assert_close(attend(backend, batch, 7)[1], wanted)


def test_sglang_writes_masks_of_trees_into_a_tensor_that_may_be_longer(monkeypatch):
    runner, lens = runner_with(monkeypatch, topk=3, page=1), [60, 17]
    backend, seen = TersekvBackend(runner), trees(2, 8, 3)
    assert backend.verify_mask.fits(4)
    buffer = backend.verify_mask.buffer
    assert buffer.numel() == 4 * 8 * 8
    batch = drafts_of(runner, lens, 8, seen)
    backend.init_forward_metadata(batch)
    want = attend(backend, batch, 5)[1]
    buffer[: seen.numel()] = seen.flatten()
    batch.spec_info.custom_mask = buffer
    backend.init_forward_metadata(batch)
    assert torch.equal(attend(backend, batch, 5)[1], want)
    runner.is_draft_worker = True
    assert TersekvBackend(runner).verify_mask is None


@pytest.mark.parametrize(
    ("option", "got"), [(name, 3 if off is None else True) for name, off in REFUSED_BESIDE_A_DRAFT_MODEL.items()]
)
def test_what_is_refused_beside_a_draft_model(option, got, monkeypatch):
    with pytest.raises(NotImplementedError, match=f"{option}: want .*, got {got}"):
        TersekvBackend(runner_with(monkeypatch, **{option: got}))


def test_who_may_attend(monkeypatch):
    with pytest.raises(NotImplementedError, match="speculative_draft_attention_backend: want 'tersekv', got 'fa3'"):
        TersekvBackend(runner_with(monkeypatch, speculative_draft_attention_backend="fa3"))
    TersekvBackend(runner_with(monkeypatch, speculative_draft_attention_backend="tersekv"))
    with pytest.raises(NotImplementedError, match=r"speculative_algorithm: want None .*, got 'EAGLE'"):
        TersekvMLABackend(runner_with(monkeypatch))
    stream = envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.override(True)
    with stream, pytest.raises(NotImplementedError, match="SGLANG_ENABLE_OVERLAP_PLAN_STREAM: want 0"):
        TersekvBackend(runner_with(monkeypatch))
    monkeypatch.setattr("sglang.srt.runtime_context.attention_backends", lambda: ("tersekv", "tersekv"))
    for drafts, want in ((False, TersekvPool), (True, TersekvDraftPool)):
        told = SimpleNamespace(is_draft_worker=drafts)
        assert plugin._pool_class(None, told, kind="mha", default=MHATokenToKVPool) is want


@pytest.mark.parametrize("steps", [1, 3])
def test_sglang_makes_a_draft_models_backends(steps, monkeypatch):
    runner = runner_with(monkeypatch, is_draft_worker=True)
    runner.draft_attention_backend = None
    runner.model_config.hf_config = runner.model_config.hf_text_config = None
    monkeypatch.setattr("sglang.srt.speculative.draft_utils.attention_backends", lambda: ("tersekv", "tersekv"))
    monkeypatch.setattr("sglang.srt.speculative.draft_utils.get_spec", lambda: SimpleNamespace(
        speculative_attention_mode="prefill"
    ))  # fmt: skip
    load_plugins()
    factory = DraftBackendFactory(runner, 1, steps)
    extends, decodes = factory.create_draft_extend_backend(), factory.create_decode_backend()
    assert isinstance(extends, TersekvBackend)
    assert extends.prefill_attention_backend_str == plugin.NAME
    if steps == 1:
        assert decodes is None
    else:
        assert [x.decode_attention_backend_str for x in decodes.attn_backends] == [plugin.NAME] * 2


def test_the_format_of_a_draft_models_pool(tmp_path, monkeypatch):
    kept = tmp_path / "kept.safetensors"
    kept.touch()

    def of(word: str, own: str | None) -> str:
        monkeypatch.setenv("TERSEKV_SGLANG_FORMAT", word)
        monkeypatch.setattr(sglang_pool, "get_spec", lambda: SimpleNamespace(speculative_draft_kv_cache_dtype=own))
        return sglang_pool.chosen(torch.bfloat16, 1, draft=True).kinds[0].k.name

    assert of("nvfp4", None) == "nvfp4"
    assert of("nvfp4", "bf16") == of(str(kept), "bf16") == "bf16"
    with pytest.raises(ValueError, match="want a recipe, or a format for the draft model by --speculative-draft-kv"):
        of(str(kept), None)
