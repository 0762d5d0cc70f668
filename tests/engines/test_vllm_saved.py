"""vLLM's real engine with a file of attributes: formats, rotation, channel scales and fitted scales of each layer."""

from __future__ import annotations

import pytest
from checkpoints import deepseek, llama, text
from reference import Reference, hold
from saved_files import write
from vllm_cpu import engine, generate, llama_model

from tersekv.integrations.vllm import MLA_NAME

PROMPTS = [text(2300 * i + 80, n) for i, n in enumerate((5, 47, 48, 150))]
INT, TNI = "int8_per_token_head/int4_per_token_head", "int4_per_token_head/int8_per_token_head"
CASES = {
    "alike": ([INT] * 4, {"kv_cache_dtype": INT}),
    "others of as many bytes": ([TNI, INT, INT, TNI], {"kv_cache_dtype": f"{INT}+rotated"}),
    "scales of heads": (["fp8_e4m3"] * 4, {"kv_cache_dtype": "fp8_e4m3+rotated"}),
    "ends of 16 bits": (
        ["fp16", INT, INT, "fp16"],
        {"kv_cache_dtype": INT, "kv_cache_dtype_skip_layers": ["0", "3"], "dtype": "float16"},
    ),
}  # fmt: skip


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
    # A float16 model is near the reference and not equal to it: its prompts attend to their own rows.
    bounds = (2e-2, 2e-3) if options.get("dtype") == "float16" else (1e-3, 1e-4)
    scored = Reference(model, **told)
    hold(results, [scored.score(p, r[0]) for p, r in zip(PROMPTS, results, strict=True)], *bounds)
    plain = Reference(model, formats)
    with pytest.raises(AssertionError, match=r"KL|behind"):
        hold(results, [plain.score(p, r[0]) for p, r in zip(PROMPTS, results, strict=True)], *bounds)


def test_a_layer_that_shares_anothers_pages_reads_them_as_that_one_wrote_them(model, tmp_path, monkeypatch):
    attention = llama_model.Attention

    def sharing(*args, prefix="", **options):
        if prefix == "model.layers.3.self_attn.attn":
            options["kv_sharing_target_layer_name"] = "model.layers.2.self_attn.attn"
        return attention(*args, prefix=prefix, **options)

    monkeypatch.setattr(llama_model, "Attention", sharing)
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
    want = f"kv_cache_dtype: want {INT} with kv_cache_dtype_skip_layers 0 3, as .*kept.safetensors"
    with (
        pytest.raises(ValueError, match=rf"{want}' has its layers, got auto with kv_cache_dtype_skip_layers none"),
        engine(folder, dtype="float32", **saved),
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
