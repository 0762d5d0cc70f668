"""What TERSEKV_MLA calls for with its first batch compiles every kernel that batches to come need, Hopper's and other;
`tersekv warm-up` asks for the same."""

from __future__ import annotations

import importlib
import json
import random
from types import SimpleNamespace

import pytest
import torch

from tersekv.cli.main import main
from tersekv.integrations.vllm_latents import latents_of
from tersekv.integrations.vllm_warm_up import ANY_SCALE, Limits, latent_calls, query_signature, warm_up_latents
from tersekv.ops.compile_workers import on_meta
from tersekv.ops.mla import mla_append, mla_decode

LIMITS = Limits(requests=70, rows=300, decode_rows=3)
HEADS, RANK, ROTARY, NOPE, PAGE, COLUMNS = 16, 512, 64, 128, 64, 32


def queries(n, dcp=False, rotary=ROTARY, head_major=False):
    """As vLLM's layer gives them: absorbed, and cut out of the projection; of all ranks' heads in one tensor. Releases
    before 0.32 absorb into a tensor by heads."""
    nope, rope = torch.zeros(n, HEADS, RANK).bfloat16(), torch.zeros(n, HEADS, NOPE + rotary).bfloat16()[..., NOPE:]
    if head_major:
        nope = torch.zeros(HEADS, n, RANK).bfloat16().transpose(0, 1)
    return (torch.cat((nope, rope), -1),) if dcp else (nope, rope)


def pages(name, rotary=ROTARY):
    dtype, row = {"fp8": (torch.float8_e4m3fn, RANK + rotary), "fp8_ds_mla": (torch.uint8, 656)}.get(
        name, (torch.bfloat16, RANK + rotary)
    )
    return latents_of(torch.zeros(4, PAGE, row, dtype=dtype), name, RANK, torch.ones(()), rotary)


def index(requests):
    return SimpleNamespace(
        limits=LIMITS, block_table=torch.zeros(requests, COLUMNS, dtype=torch.int32),
        seq_lens=torch.zeros(requests, dtype=torch.int32), slot_mapping=torch.zeros(1, dtype=torch.int64),
    )  # fmt: skip


@pytest.mark.parametrize(("compiled", "name", "dcp", "rotary", "head_major"), [
    (80, "auto", False, ROTARY, False), (90, "auto", False, ROTARY, False), (90, "fp8", False, ROTARY, True),
    (90, "fp8_ds_mla", True, ROTARY, False), (90, "auto", False, 0, False),
], indirect=["compiled"])  # fmt: skip
def test_no_kernel_is_compiled_after_the_warm_up(compiled, name, dcp, rotary, head_major):
    cache, options = pages(name, rotary), {"softmax_scale": 0.1, "return_lse": dcp}
    for call in latent_calls(queries(2, dcp, rotary, head_major), cache, index(2), options):
        call()
    assert 0 < len(compiled) <= 60  # an engine waits for each
    warm, draw = set(compiled), random.Random(0)
    for _ in range(30):
        b, n = draw.randint(1, LIMITS.requests), draw.choice((1, LIMITS.decode_rows))
        m, t = index(b), draw.randint(1, LIMITS.rows)
        kpe = torch.zeros(t, RANK + rotary).bfloat16()[:, RANK:] if rotary else None
        mla_append(torch.zeros(t, RANK).bfloat16(), kpe, cache, torch.full((t,), -1))
        q = queries(b * n, dcp, rotary, head_major)
        mla_decode(q[0] if dcp else q, cache, m.block_table, m.seq_lens, **options)
        assert compiled == warm, ((b, n, t), compiled - warm)


@pytest.mark.parametrize("head_major", [False, True])
def test_the_number_of_rows_does_not_change_a_layers_kind(head_major):
    one, two, many = ([query_signature(x) for x in queries(n, head_major=head_major)] for n in (1, 2, 512))
    assert one == two == many


@pytest.mark.parametrize("name", ["auto", "fp8", "fp8_ds_mla"])
def test_the_cache_stays_as_it_is(name, monkeypatch):
    monkeypatch.setattr(importlib.import_module(__name__), "LIMITS", Limits(2, 5, 2))
    cache = pages(name)
    cache.ckv.view(torch.uint8).fill_(1)
    before = cache.ckv.clone()
    warm_up_latents(queries(1), cache, index(1), {"softmax_scale": 0.1, "return_lse": False})
    assert torch.equal(cache.ckv.view(torch.uint8), before.view(torch.uint8))


def test_the_command_compiles_a_models_kernels(tmp_path, capsys, monkeypatch):
    config = {
        "num_attention_heads": 2 * HEADS, "kv_lora_rank": RANK, "qk_rope_head_dim": ROTARY, "qk_nope_head_dim": NOPE,
        "max_position_embeddings": PAGE * COLUMNS,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked: list[list] = []
    monkeypatch.setattr("tersekv.cli.warm_up.compile_ahead", lambda calls, chip, **_: asked.append(calls))
    options = ["--model", str(tmp_path), "--out", str(tmp_path / "out"), "--block-size", str(PAGE)]
    more = ["--max-num-seqs", "70", "--max-num-batched-tokens", "300", "--drafts", "2", "--tensor-parallel-size", "2"]
    names = ["auto", "fp8", "fp8_ds_mla"]
    assert main(["warm-up", *options, *more, "--formats", ",".join(names)]) == 0
    for name, made in zip(names, asked, strict=True):
        q, like = tuple(map(on_meta, queries(1))), index(1)
        options_of = {"softmax_scale": ANY_SCALE, "return_lse": False}
        mine = [*latent_calls(q, on_meta(pages(name)), like, options_of)]
        for a, b in zip(made, mine, strict=True):
            assert (a.func, a.keywords) == (b.func, b.keywords)
            assert [described(x) for x in a.args] == [described(x) for x in b.args]
    assert main(["warm-up", *options, "--formats", "nvfp4"]) == 2
    assert "want --formats of auto, bfloat16, float16, fp8, fp8_e4m3, fp8_ds_mla" in capsys.readouterr().err


def described(x):
    if isinstance(x, tuple):
        return [described(y) for y in x]
    if isinstance(x, torch.Tensor):
        return x.dtype, x.shape, x.stride()
    return x.format, described(x.ckv), described(x.kpe)
