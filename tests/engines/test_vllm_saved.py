"""vLLM's real engine with a file of attributes: formats, rotation, channel scales and fitted scales of each layer."""

from __future__ import annotations

import pytest
import torch
from checkpoints import deepseek, llama, text
from reference import Reference, hold
from safetensors.torch import load_file, save_file
from saved_files import write
from vllm_cpu import engine, generate, share_cache_of_layer_2

from tersekv.integrations.vllm import MLA_NAME

PROMPTS = [text(2300 * i + 80, n) for i, n in enumerate((5, 47, 48, 150))]
INT, TNI = "int8_per_token_head/int4_per_token_head", "int4_per_token_head/int8_per_token_head"
CASES = {
    "alike": ([INT] * 4, {"kv_cache_dtype": INT}),
    "each another": (["bf16", "fp8_e4m3/nvfp4", INT, "fp8_e4m3"], {}),
    "wider ends": ([INT, "int4_per_token_head", "int4_per_token_head", INT], {"max_num_seqs": 2}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("name", CASES)
def test_layers_have_the_files_attributes(name, model, tmp_path):
    formats, options = CASES[name]
    kept = tmp_path / "kept.safetensors"
    told = write(kept, formats)
    saved = {"additional_config": {"tersekv": {"saved": str(kept)}}}
    with engine(model, **{"dtype": "float32", "max_num_batched_tokens": 64, **options, **saved}) as llm:
        results = generate(llm, PROMPTS, 12)
    scored, plain = Reference(model, **told), Reference(model, formats)
    hold(results, [scored.score(p, r[0]) for p, r in zip(PROMPTS, results, strict=True)])
    with pytest.raises(AssertionError, match=r"KL|behind"):
        hold(results, [plain.score(p, r[0]) for p, r in zip(PROMPTS, results, strict=True)])


def test_layers_with_windows_and_without_share_pages_of_one_size(tmp_path):
    plain, kept = llama(tmp_path / "llama"), tmp_path / "kept.safetensors"
    folder = llama(
        tmp_path / "granite", "granite", "GraniteForCausalLM", sliding_window=48,
        layer_types=["sliding_attention", "full_attention"] * 2, attention_multiplier=64**-0.5,
        embedding_multiplier=1.0, residual_multiplier=1.0, logits_scaling=1.0,
    )  # fmt: skip
    sinks = {i: torch.randn(8, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(4)}
    weights = folder / "model.safetensors"
    save_file({**load_file(weights), **{f"model.layers.{i}.self_attn.sinks": s for i, s in sinks.items()}}, weights)
    told = write(kept, [INT, "int8_per_token_head", "nvfp4", INT])
    saved = {"additional_config": {"tersekv": {"saved": str(kept)}}}
    with engine(folder, dtype="float32", max_num_batched_tokens=64, **saved) as llm:
        results = generate(llm, PROMPTS, 12)
    reference = Reference(plain, **told, windows={0: 48, 2: 48}, sinks=sinks)
    hold(results, [reference.score(p, r[0]) for p, r in zip(PROMPTS, results, strict=True)])


def test_a_layer_that_shares_anothers_pages_reads_them_as_that_one_wrote_them(model, tmp_path, monkeypatch):
    share_cache_of_layer_2(monkeypatch)
    kept = tmp_path / "kept.safetensors"
    told = write(kept, [INT] * 4)
    saved = {"additional_config": {"tersekv": {"saved": str(kept)}}}
    with engine(model, dtype="float32", kv_cache_dtype=INT, **saved) as llm:
        results = generate(llm, PROMPTS, 12)
    reference = Reference(model, **told, shared={3: 2})
    hold(results, [reference.score(p, r[0]) for p, r in zip(PROMPTS, results, strict=True)])


def test_cache_dtypes_that_are_not_the_files_are_refused_before_weights_are_loaded(tmp_path):
    folder, kept = llama(tmp_path / "llama"), tmp_path / "kept.safetensors"
    (folder / "model.safetensors").write_bytes(b"none")
    write(kept, ["bf16", INT, INT, "bf16"])
    saved = {"additional_config": {"tersekv": {"saved": str(kept)}}}
    with (
        pytest.raises(
            ValueError, match=r"kv_cache_dtype: want auto or bfloat16, .*kept.safetensors' has .* got fp8 with"
        ),
        engine(folder, dtype="float32", kv_cache_dtype="fp8", **saved),
    ):
        pass


def test_latent_attention_has_no_attributes(tmp_path):
    folder, kept = deepseek(tmp_path / "deepseek"), tmp_path / "kept.safetensors"
    options = {"attention_backend": MLA_NAME, "additional_config": {"tersekv": {"saved": str(kept)}}}
    with (
        pytest.raises(NotImplementedError, match=r"additional_config.tersekv.saved: want none for latent attention"),
        engine(folder, dtype="float32", kv_cache_dtype="fp8", **options),
    ):
        pass
