"""SGLang's real engine over layers of many kinds and rows of 16 bits: windows, sinks, softcap, scales, long answers."""

from __future__ import annotations

import pytest
import torch
import transformers
from checkpoints import llama, text
from reference import Reference, Rows, hold
from safetensors.torch import load_file, save_file
from sglang_cpu import engine, generate

from tersekv.integrations.sglang_attention import DECODE_ROWS
from tersekv.integrations.transformers_layers import CACHE_ARGUMENT

PROMPTS = [text(2200 * i + 60, n) for i, n in enumerate((5, 47, 48, 49, 150))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("llama"))


def add(folder, tensors):
    """More tensors in a checkpoint."""
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file)


def judge(made, reference, most=1e-3, mean=1e-4):
    results, _ = generate(made, PROMPTS, 12)
    hold(results, [reference.score(p, r[0]) for p, r in zip(PROMPTS, results, strict=True)], most, mean)


def test_windows_and_sinks_beside_full_attention(tmp_path, model):
    """A Granite with layers of a window of 48, which have a pool of their own, and sinks in all."""
    layers = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    folder = llama(
        tmp_path, "granite_swa", "GraniteSWAForCausalLM", layer_types=layers, sliding_window=48,
        attention_multiplier=64**-0.5, embedding_multiplier=1.0, residual_multiplier=1.0, logits_scaling=1.0,
        layer_rope_theta=[10000.0] * 4,
    )  # fmt: skip
    sinks = {i: torch.randn(8, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(4)}
    add(folder, {f"model.layers.{i}.self_attn.sinks": s for i, s in sinks.items()})
    reference = Reference(model, "fp8_per_token_head", windows={0: 48, 2: 48}, sinks=sinks)
    with engine(folder, "fp8_per_token_head", chunked_prefill_size=64) as made:
        judge(made, reference)


def test_softcap(tmp_path):
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, sliding_window=48, attn_logit_softcapping=3.0, query_pre_attn_scalar=4,
        eos_token_id=None, hidden_act="gelu_pytorch_tanh",
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM._from_config(config, attn_implementation="eager").float().eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=1.5 * weight.shape[-1] ** -0.5)
    model.save_pretrained(tmp_path)
    with engine(tmp_path, "int8_per_token_head", chunked_prefill_size=64) as made:
        results, _ = generate(made, PROMPTS, 8)
    wanted = []
    for prompt, (tokens, _) in zip(PROMPTS, results, strict=True):
        cache = Rows(["int8_per_token_head"] * 2, [(1.0, 1.0)] * 2, {}, False)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens[:-1]]), **{CACHE_ARGUMENT: cache}).logits[0]
        wanted.append(logits[len(prompt) - 1 :].double().log_softmax(-1))
    hold(results, wanted)


def test_scales_of_the_checkpoint(tmp_path, model):
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    folder = llama(tmp_path, quantization_config={
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}, "ignore": [],
        "kv_cache_scheme": scheme, "quantization_status": "compressed",
    })  # fmt: skip
    scales = [(torch.rand(1) * 0.01 + 0.002, torch.rand(1) * 0.01 + 0.002) for _ in range(4)]
    add(folder, {
        f"model.layers.{i}.self_attn.{side}_scale": s
        for i, both in enumerate(scales) for side, s in zip("kv", both, strict=True)
    })  # fmt: skip
    reference, prompts = Reference(model, "fp8_e4m3", scales=scales), PROMPTS[1:]
    # On a CPU, SGLang's "auto" is refused for such a checkpoint by SGLang itself.
    with engine(folder, "fp8_e4m3", dtype="float16", kv_cache_dtype="bf16") as made:
        results, _ = generate(made, prompts, 12)
    assert all(len(p) > DECODE_ROWS for p in prompts)  # so that they attend to their own rows
    hold(results, [reference.score(p, r[0], len(p)) for p, r in zip(prompts, results, strict=True)], 3e-3, 3e-4)


@pytest.mark.parametrize(("dtype", "format", "most"), [("bfloat16", "bf16", 2e-2), ("float16", "fp16", 1e-4)])
def test_pools_of_16_bits(model, dtype, format, most):
    """The model computes in 16 bits too, so that distributions are near the reference's and not equal to it."""
    with engine(model, dtype=dtype, chunked_prefill_size=96) as made:
        judge(made, Reference(model, format), most=most, mean=most / 20)


def test_a_prompt_attends_to_its_own_rows_as_they_came(model):
    reference = Reference(model, "nvfp4")
    prompts = [text(2500 * i + 90, n) for i, n in enumerate((65, 200))]
    with engine(model, "nvfp4", dtype="float16", disable_radix_cache=True) as made:
        results, _ = generate(made, prompts, 8)
    assert all(len(p) > DECODE_ROWS for p in prompts)
    hold(results, [reference.score(p, r[0], len(p)) for p, r in zip(prompts, results, strict=True)], 2e-2, 2e-3)
    with pytest.raises(AssertionError, match=r"KL|behind"):
        hold(results, [reference.score(p, r[0]) for p, r in zip(prompts, results, strict=True)], 2e-2, 2e-3)


def test_several_hundred_tokens_while_requests_give_way_to_each_other(model):
    """The pool has no room for all: some are taken back, and go on later as if they had not been."""
    reference = Reference(model, "fp8_per_token_head")
    prompts = [text(1500 * i + 11, 40 + i) for i in range(4)]
    options = {"max_total_tokens": 960, "schedule_conservativeness": 0.0}
    with engine(model, "fp8_per_token_head", **options) as made:
        results, told = generate(made, prompts, 300)
    assert sum(x["num_retractions"] for x in told) > 0
    hold(results, [reference.score(p, tokens) for p, (tokens, _) in zip(prompts, results, strict=True)])
