"""vLLM's real engine over checkpoints that say what their cache is: formats by layer, and scales, good or not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from checkpoints import deepseek, llama, text
from reference import Reference, hold
from safetensors.torch import load_file, save_file
from vllm_cpu import engine, generate

from tersekv.integrations import vllm_attention
from tersekv.integrations.vllm import MLA_NAME
from tersekv.integrations.vllm_checkpoint import require_scales

PROMPTS = [text(2200 * i + 60, n) for i, n in enumerate((5, 47, 48, 150))]
LAYERS = 4
ALGORITHMS = {"FP8": "fp8_e4m3", "NVFP4": "nvfp4", "FP8_K_NVFP4_V": "fp8_e4m3/nvfp4", None: "fp16"}


def add(folder, tensors):
    """More tensors in a checkpoint."""
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file)


def modelopt(folder, algorithms, *, whole, nested, **more):
    """A checkpoint as ModelOpt exports it, its weights in 16 bits; the scales (k, v) of each layer."""
    told = {
        "quant_algo": "FP8", "kv_cache_quant_algo": whole, "kv_cache_schema_version": 1,
        "kv_cache_quantized_layers": {
            f"model.layers.{i}.self_attn": {"quant_algo": a} for i, a in enumerate(algorithms) if a
        }, **more,
    }  # fmt: skip
    ignored = {"exclude_modules" if nested else "ignore": ["*"]}
    told = {"quantization": told | ignored} if nested else told | ignored
    llama(folder, quantization_config={"quant_method": "modelopt", **told})
    g = torch.Generator().manual_seed(4)
    scales = [tuple((0.002 + 0.01 * torch.rand(1, generator=g)) for _ in "kv") for _ in algorithms]
    add(folder, {
        f"model.layers.{i}.self_attn.{side}_proj.{side}_scale": s[0]
        for i, both in enumerate(scales) for side, s in zip("kv", both, strict=True) if algorithms[i]
    })  # fmt: skip
    return scales


def judge(llm, *references):
    """Equal to the first, and to no other; in 16 bits, whose prompts see their own rows as they came."""
    results = generate(llm, PROMPTS, 10)
    own = [len(p) if len(p) > vllm_attention.DECODE_ROWS else 0 for p in PROMPTS]
    for i, reference in enumerate(references):
        scored = [reference.score(p, r[0], n) for p, r, n in zip(PROMPTS, results, own, strict=True)]
        if i == 0:
            hold(results, scored, 2e-2, 1e-3)
        else:
            with pytest.raises(AssertionError, match=r"KL|behind"):
                hold(results, scored, 2e-2, 1e-3)


def dtypes(llm):
    layers = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model.model.layers
    return [layer.self_attn.attn.kv_cache_dtype for layer in layers]


CASES = {
    "some layers FP8": (["FP8", None, None, "FP8"], "FP8", False, "auto"),
    "every other NVFP4": (["NVFP4", None, "NVFP4", None], "NVFP4", True, "auto"),
    "each another": (["FP8", "NVFP4", None, "FP8_K_NVFP4_V"], "MIXED_PRECISION", False, "fp8"),
    "K and V": (["FP8_K_NVFP4_V"] * 4, "FP8_K_NVFP4_V", True, "fp8_e4m3/nvfp4"),
}


@pytest.mark.parametrize("name", CASES)
def test_layers_have_the_formats_and_scales_that_modelopt_gave_them(name, tmp_path):
    algorithms, whole, nested, asked = CASES[name]
    scheme = {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}} if whole == "FP8" else {}
    scales = modelopt(tmp_path / "model", algorithms, whole=whole, nested=nested, **scheme)
    plain, formats = llama(tmp_path / "plain"), [ALGORITHMS[a] for a in algorithms]
    with engine(tmp_path / "model", dtype="float16", kv_cache_dtype=asked) as llm:
        assert dtypes(llm) == [f if f != "fp16" else "auto" for f in formats]
        judge(
            llm, Reference(plain, formats, scales=scales), Reference(plain, formats[::-1], scales=scales[::-1]),
            Reference(plain, ["fp16"] * LAYERS),
        )  # fmt: skip


def test_another_cache_dtype_is_the_users_word(tmp_path):
    modelopt(tmp_path, ["FP8", None, None, "FP8"], whole="FP8", nested=False)
    with engine(tmp_path, dtype="float16", kv_cache_dtype="int8_per_token_head") as llm:
        assert dtypes(llm) == ["int8_per_token_head"] * LAYERS


def test_a_layer_that_the_user_leaves_in_16_bits_stays_so(tmp_path):
    modelopt(tmp_path, ["FP8", "FP8", None, "FP8"], whole="FP8", nested=True)
    with engine(tmp_path, dtype="float16", kv_cache_dtype="auto", kv_cache_dtype_skip_layers=["0"]) as llm:
        assert dtypes(llm) == ["auto", "fp8_e4m3", "auto", "fp8_e4m3"]


@pytest.mark.parametrize(("algorithms", "whole", "more", "words"), [
    (["FP8", "NVFP4"], "MIXED_PRECISION", {}, "kv_cache_dtype: want one of fp8_e4m3, nvfp4, .* got auto"),
    (["FP8", "INT8"], "FP8", {}, "kv_cache_quantized_layers: .* got 'model.layers.1.self_attn' with 'INT8'"),
    (["FP8"], "FP8", {"kv_cache_quantized_layers": {"lm_head": {"quant_algo": "FP8"}}}, "got 'lm_head' with 'FP8'"),
    (["FP8"], "FP8", {
        "quant_algo": "MIXED_PRECISION", "quantized_layers": {"lm_head": {"quant_algo": "FP8"}},
    }, r"layers.0.self_attn.attn.k_scale: want the checkpoint's \[\[0.0.*for fp8_e4m3, got 1"),
])  # fmt: skip
def test_maps_that_cannot_be_followed_are_refused(tmp_path, algorithms, whole, more, words):
    modelopt(tmp_path, algorithms, whole=whole, nested=False, **more)
    with pytest.raises(ValueError, match=words), engine(tmp_path, dtype="float16", kv_cache_dtype="auto"):
        pass


def compressed(folder, scales, write=llama):
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    write(folder, quantization_config={
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}, "ignore": [],
        "kv_cache_scheme": scheme, "quantization_status": "compressed",
    })  # fmt: skip
    add(folder, {f"model.layers.{i}.self_attn.{side}_scale": torch.tensor(s) for (i, side), s in scales.items()})
    return folder


GOOD = {(i, side): [0.01] for i in range(LAYERS) for side in "kv"}


@pytest.mark.parametrize(("bad", "words"), [
    ({(2, "v"): [0.0]}, r"layers.2.self_attn.attn.v_scale: want finite numbers above 0 for fp8_e4m3, got \[0.0\]"),
    ({(1, "k"): [-0.5]}, r"layers.1.self_attn.attn.k_scale: want finite .* got \[-0.5\]"),
    ({(0, "k"): [float("nan")]}, r"layers.0.self_attn.attn.k_scale: want finite .* got \[nan\]"),
    ({(3, "v"): [float("inf")]}, r"layers.3.self_attn.attn.v_scale: want finite .* got \[inf\]"),
    ({(2, "v"): None}, r"layers.2.self_attn.attn.v_scale: want it in the checkpoint, .* got none for"),
])  # fmt: skip
def test_scales_that_are_none_are_refused_by_name(tmp_path, bad, words):
    scales = {where: s for where, s in {**GOOD, **bad}.items() if s is not None}
    with (
        pytest.raises(ValueError, match=words),
        engine(compressed(tmp_path, scales), kv_cache_dtype="auto", dtype="float32"),
    ):
        pass


def test_a_scale_of_one_that_is_there_counts_and_formats_with_scales_of_their_own_need_none(tmp_path):
    ones = compressed(tmp_path / "ones", {**GOOD, (2, "v"): [1.0]})
    with engine(ones, kv_cache_dtype="auto", dtype="float32") as llm:
        assert dtypes(llm) == ["fp8"] * LAYERS
    none = compressed(tmp_path / "none", {})
    with engine(none, kv_cache_dtype="int8_per_token_head", dtype="float32") as llm:
        assert dtypes(llm) == ["int8_per_token_head"] * LAYERS


@pytest.mark.parametrize("method", ["compressed-tensors", "modelopt"])
def test_latents_whose_scales_vllm_passes_over_are_refused(method, tmp_path):
    if method == "modelopt":
        told = {"quant_method": method, "quant_algo": "FP8", "ignore": ["*"], "kv_cache_quant_algo": "FP8"}
        deepseek(tmp_path, quantization_config=told)
        add(tmp_path, {"model.layers.0.self_attn.k_proj.k_scale": torch.tensor([0.5])})
    else:
        compressed(tmp_path, {(0, "k"): [0.5]}, deepseek)
    options = {"attention_backend": MLA_NAME, "kv_cache_dtype": "fp8", "dtype": "float16"}
    words = r"layers.0.self_attn.attn.k_scale: want the checkpoint's \[\[0.5\]\] for fp8_e4m3, got 1: this vLLM"
    with pytest.raises(ValueError, match=words), engine(tmp_path, **options):
        pass


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_of_latents_that_is_none_is_refused(bad):
    layer = SimpleNamespace(_k_scale=torch.tensor(bad))
    config = SimpleNamespace(model_config=None, load_config=SimpleNamespace(load_format="auto"))
    with pytest.raises(ValueError, match=r"layers.0.k_scale: want finite numbers above 0 for fp8_e4m3, got"):
        require_scales("layers.0", layer, "fp8", config, sides="k")


@pytest.mark.parametrize("name", ["mlp.weight_block_scale", "self_attn.qk_scale", "self_attn.sink_scale"])
def test_scales_of_something_else_are_none_of_keys(tmp_path, name):
    save_file({f"model.layers.0.{name}": torch.tensor([0.5])}, tmp_path / "model.safetensors")
    hf = SimpleNamespace(quantization_config={"quant_method": "modelopt"})
    config = SimpleNamespace(
        model_config=SimpleNamespace(model=str(tmp_path), revision=None, model_arch_config=hf),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
    )
    one = torch.tensor(1.0)
    require_scales("layers.0", SimpleNamespace(_k_scale=one, _v_scale=one, quant_config=hf), "fp8", config)


def test_layers_of_latents_in_several_formats_are_refused(tmp_path):
    told = {"model.layers.0.self_attn": {"quant_algo": "FP8"}}
    deepseek(tmp_path, quantization_config={
        "quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*"], "kv_cache_quant_algo": "FP8",
        "kv_cache_quantized_layers": told,
    })  # fmt: skip
    words = r"kv_cache_quantized_layers: want \d+ layers alike for latent attention, got fp8_e4m3 in 1"
    with (
        pytest.raises(NotImplementedError, match=words),
        engine(tmp_path, attention_backend=MLA_NAME, kv_cache_dtype="fp8", dtype="float16"),
    ):
        pass
