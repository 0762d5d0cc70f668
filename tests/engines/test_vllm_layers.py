"""vLLM's real engine over layers of many kinds: windows, sinks, softcap, scales, other formats, shared caches."""

from __future__ import annotations

import argparse
import json

import pytest
import torch
import transformers
from checkpoints import llama, text
from reference import Reference, Rows, hold
from safetensors.torch import load_file, save_file
from vllm_cpu import engine, generate, share_cache_of_layer_2

from tersekv.cli.warm_up import add_arguments, calls_of
from tersekv.integrations import vllm_attention, vllm_warm_up
from tersekv.integrations.transformers_layers import CACHE_ARGUMENT
from tersekv.ops.compile_workers import Chip, outline

PROMPTS = [text(2200 * i + 60, n) for i, n in enumerate((5, 47, 48, 49, 150))]


def add(folder, tensors):
    """More tensors in a checkpoint."""
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file)


def judge(llm, reference, tokens=12, most=1e-3, mean=1e-4):
    results = generate(llm, PROMPTS, tokens)
    hold(results, [reference.score(p, r[0]) for p, r in zip(PROMPTS, results, strict=True)], most, mean)


def test_windows_and_sinks_beside_full_attention(tmp_path):
    """A Granite with layers of a window of 48 and sinks in all: two groups of layers with block tables of their own."""
    layers = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    plain = llama(tmp_path / "llama")
    folder = llama(
        tmp_path / "granite", "granite", "GraniteForCausalLM", layer_types=layers, sliding_window=48,
        attention_multiplier=64**-0.5, embedding_multiplier=1.0, residual_multiplier=1.0, logits_scaling=1.0,
    )  # fmt: skip
    sinks = {i: torch.randn(8, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(4)}
    add(folder, {f"model.layers.{i}.self_attn.sinks": s for i, s in sinks.items()})
    reference = Reference(plain, "fp8_per_token_head", windows={0: 48, 2: 48}, sinks=sinks)
    options = {"kv_cache_dtype": "fp8_per_token_head", "dtype": "float32", "max_num_batched_tokens": 64}
    with engine(folder, **options) as llm:
        judge(llm, reference)


def gemma2(folder):
    """Two layers, the first with a window of 48, and a softcap."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, sliding_window=48, attn_logit_softcapping=3.0, query_pre_attn_scalar=4,
        eos_token_id=None,
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM._from_config(config, attn_implementation="eager").float().eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=1.5 * weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


def test_softcap(tmp_path):
    model = gemma2(tmp_path)
    options = {"kv_cache_dtype": "int8_per_token_head", "dtype": "float32", "max_num_batched_tokens": 64}
    with engine(tmp_path, **options) as llm:
        results = generate(llm, PROMPTS, 8)
    wanted = []
    for prompt, (tokens, _) in zip(PROMPTS, results, strict=True):
        cache = Rows(["int8_per_token_head"] * 2, [(1.0, 1.0)] * 2, {}, False)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens[:-1]]), **{CACHE_ARGUMENT: cache}).logits[0]
        wanted.append(logits[len(prompt) - 1 :].double().log_softmax(-1))
    hold(results, wanted)


def with_scales(folder, strategy="tensor", layers=range(4)):
    """A checkpoint with scales of these layers; the scales (k, v) of each of four layers."""
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    llama(folder, quantization_config={
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}, "ignore": [],
        "kv_cache_scheme": scheme, "quantization_status": "compressed",
    })  # fmt: skip
    n = 1 if strategy == "tensor" else 2
    scales = [(torch.rand(n) * 0.01 + 0.002, torch.rand(n) * 0.01 + 0.002) for _ in range(4)]
    shape = (1,) if n == 1 else (n, 1, 1)
    add(folder, {
        f"model.layers.{i}.self_attn.{side}_scale": s.view(shape)
        for i in layers for side, s in zip("kv", scales[i], strict=True)
    })  # fmt: skip
    return scales


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_scales_of_the_checkpoint(tmp_path, strategy):
    scales = with_scales(tmp_path, strategy)
    plain = llama(tmp_path / "plain")
    with engine(tmp_path, kv_cache_dtype="fp8", dtype="float32") as llm:
        judge(llm, Reference(plain, "fp8_e4m3", scales=scales))


def test_layers_that_are_left_in_16_bits(tmp_path):
    folder = llama(tmp_path)
    formats = ["fp16", "int8_per_token_head", "int8_per_token_head", "fp16"]
    options = {"kv_cache_dtype": "int8_per_token_head", "kv_cache_dtype_skip_layers": ["0", "3"], "dtype": "float16"}
    with engine(folder, **options) as llm:
        judge(llm, Reference(folder, formats), most=3e-3, mean=3e-4)
        kinds = [str(layer.self_attn.attn.kv_cache.dtype) for layer in model_of(llm).model.layers]
    assert kinds == ["torch.float16", "torch.int8", "torch.int8", "torch.float16"]


def test_a_layer_that_reads_the_cache_of_the_one_before_it(tmp_path, monkeypatch):
    """vLLM gives such a layer keys and values of its own, which nobody stores: they must not count."""
    share_cache_of_layer_2(monkeypatch)
    folder = llama(tmp_path)
    with engine(folder, kv_cache_dtype="int8_per_token_head", dtype="float32") as llm:
        judge(llm, Reference(folder, "int8_per_token_head", shared={3: 2}))


@pytest.mark.parametrize("own", [True, False])
def test_a_layer_that_reads_anothers_cache_reads_it_by_the_scales_it_was_written_with(tmp_path, monkeypatch, own):
    """Whether or not the checkpoint has scales for that layer too."""
    share_cache_of_layer_2(monkeypatch)
    scales = with_scales(tmp_path, layers=range(4 if own else 3))
    plain = llama(tmp_path / "plain")
    with engine(tmp_path, kv_cache_dtype="fp8", dtype="float32") as llm:
        judge(llm, Reference(plain, "fp8_e4m3", scales=scales, shared={3: 2}))


def model_of(llm):
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model


def test_layers_of_all_windows_ask_for_what_the_command_has_compiled(tmp_path, monkeypatch):
    """`tersekv warm-up` fills the folder of an engine that then starts no process to compile; and so do processes that
    the engine starts before weights come."""
    gemma2(tmp_path)
    kinds, jobs, begun, chip = set(), [], [], Chip(90, 132)
    process_weights = vllm_attention.TersekvImpl.process_weights_after_loading

    def first_jobs(kind, device, wanted):
        return [job for job in wanted if (repr(kind), job) not in kinds and not kinds.add((repr(kind), job))]

    def note_begun(impl, act_dtype):
        begun.append(len(early))
        process_weights(impl, act_dtype)

    monkeypatch.setattr(vllm_attention, "first_jobs", first_jobs)
    monkeypatch.setattr(vllm_attention.TersekvImpl, "process_weights_after_loading", note_begun)
    monkeypatch.setattr(vllm_warm_up, "_early", early := {})
    monkeypatch.setattr(vllm_warm_up, "chip_of", lambda device: chip)
    monkeypatch.setattr(vllm_warm_up, "compile_ahead", lambda calls, chip, say: jobs.append(outline((calls, chip))))
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 48, "max_model_len": 256, "block_size": 32}
    with engine(tmp_path, kv_cache_dtype="fp8", dtype="bfloat16", **sizes) as llm:
        generate(llm, PROMPTS[:2], 4)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = [x for name, n in sizes.items() for x in (f"--{name.replace('_', '-')}", str(n))]
    args = parser.parse_args(["--model", str(tmp_path), "--out", str(tmp_path), *options])
    made = calls_of(json.loads((tmp_path / "config.json").read_text()), "fp8", args)
    assert (len(kinds), begun[0], len(early)) == (2 * len(vllm_warm_up.JOBS), 1, 1)
    assert sorted(jobs) == sorted([outline((calls, chip)) for calls in made] * 3)  # threads compile early
