"""One backend and format in vLLM's engine, 8 layers with a known model's sizes and random weights: right, then fast.

`speed`: Llama-3-8B's sizes. `hybrid`: Qwen3.5-27B's, a layer of four with attention and heads of 256; vLLM's class
requires an MoE layer: the last of eight has two experts and routes each token to one.
`sinks`: gpt-oss-20b's, heads of 64, sinks, a window of 128 in every other layer, 8 experts.
`mla`: DeepSeek-V3's, 128 heads over latents of 512 + 64, no experts.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from pathlib import Path
from typing import Any

from vllm_engine import (
    LIMITS,
    Case,
    Compiled,
    apart,
    config,
    drawn_weights,
    engine,
    generate,
    log_probabilities,
    of_ours,
    phase,
)

MODEL = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
HYBRID = {
    **MODEL, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "rms_norm_eps": 1e-6,
    "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 24, "num_key_value_heads": 4,
    "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4, "decoder_sparse_step": 8,
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 17408, "shared_expert_intermediate_size": 0,
    "norm_topk_prob": True, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 48, "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
SINKS = {
    **MODEL, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880,
    "intermediate_size": 2880, "num_attention_heads": 64, "head_dim": 64, "num_local_experts": 8,
    "num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True, "attention_dropout": 0.0,
    "layer_types": ["sliding_attention", "full_attention"] * 4, "swiglu_limit": 7.0, "router_aux_loss_coef": 0.9,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    },
}  # fmt: skip
MLA = {
    "vocab_size": 32000, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "rms_norm_eps": 1e-6,
    "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 8, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 8, "moe_layer_freq": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
MODELS = {"speed": MODEL, "hybrid": HYBRID, "sinks": SINKS, "mla": MLA}
TINY_MODEL = {**MODEL, "vocab_size": 256, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64}  # fmt: skip
TINY_MLA = {**MLA, "vocab_size": 256, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 128}  # fmt: skip
BLOCK = 64


class Sizes:
    """What is asked of the engine; `tiny`: so little that a CPU does it."""

    def __init__(self, kind: str, tiny: bool) -> None:
        self.model = MODELS[kind] if not tiny else TINY_MLA if kind == "mla" else TINY_MODEL
        self.has_prefixes = kind != "hybrid"  # a hybrid's prefixes are cached by whole states, of many tokens
        self.batch, self.prompt, self.steps, self.repeats = (4, 256, 8, 1) if tiny else (32, 8192, 128, 3)
        # As much as this batch takes in 16 bits, its new tokens included, and an eighth more.
        self.memory = (
            (6 << 20) if tiny else {"speed": 9 << 30, "hybrid": 5 << 29, "sinks": 9 << 29, "mla": 11 << 28}[kind]
        )
        self.requests, self.short, self.new = (12, 128, 16) if tiny else (512, 2048, 512)
        self.most = 16 if tiny else 512
        few = [1, self.batch // 4, self.batch]
        self.graphs = few if tiny else [*few, *range(64, 257, 32), *range(320, 513, 64)]
        # A row beyond a border of blocks: asked again, each prompt has one row to decode and all others in the cache.
        blocks = (1, 2, 3, 3) if tiny else (1, 2, 3, 16, 32, 64, 100, 127)
        self.checked = [n * BLOCK + 1 for n in blocks]


def run(case: Case, work: Path) -> dict[str, Any]:
    """Everything of one case; a wrong result is not timed."""
    import torch

    s, compiled = Sizes(case.kind, case.tiny), Compiled()
    began = time.perf_counter()
    with engine_of_sizes(case, s, work) as llm:
        record: dict[str, Any] = {"init_s": time.perf_counter() - began, "compiled_before": len(compiled.clear())}
        record |= {"cache_tokens": tokens_of(llm), "gpu": gpu(), "torch": torch.__version__}
        phase("first tokens beside the reference's")
        record |= check(llm, case, s, work)
        record["compiled_at_first"] = compiled.clear()
        if record["apart"] > LIMITS[case.bits] or record["apart_cached"] > LIMITS[case.bits]:
            return {**record, "reason": f"want log-probabilities within {LIMITS[case.bits]:g} before anything is timed"}
        for measure in (time_to_first_token, prefill_and_step, at_fixed_memory):
            phase(measure.__name__.replace("_", " "))
            record |= measure(llm, s)
        record["compiled_after"] = compiled.clear()
    late = of_ours(record["compiled_at_first"] + record["compiled_after"])
    if late:
        record["reason"] = f"want no kernel compiled after the engine began, got {len(late)}"
    return record


def start(case: Case, work: Path) -> dict[str, Any]:
    """The engine's start alone."""
    began, compiled = time.perf_counter(), Compiled()
    with engine_of_sizes(case, Sizes(case.kind, case.tiny), work):
        return {"start_s": time.perf_counter() - began, "compiled": len(compiled.clear()), "gpu": gpu()}


def engine_of_sizes(case: Case, s: Sizes, work: Path) -> contextlib.AbstractContextManager[Any]:
    """A case's engine: decode steps in CUDA graphs, a fixed memory for the cache."""
    options: dict[str, Any] = {
        "load_format": drawn_weights(), "max_model_len": s.prompt + 256, "max_num_seqs": s.most,
        "max_num_batched_tokens": 96 if case.tiny else 8192, "enable_prefix_caching": s.has_prefixes,
        "max_logprobs": s.model["vocab_size"], "kv_cache_memory_bytes": s.memory,
        "compilation_config": {
            "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": s.graphs,
        },
    }  # fmt: skip
    if s.has_prefixes:
        options["block_size"] = BLOCK
    else:  # the engine chooses a hybrid's block size, as large as a state; the other GDN prefill backend needs nvcc
        options["gdn_prefill_backend"] = "triton"
    if case.tiny:  # on a CPU the platform counts in its own unit
        options |= {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": 64}
    return engine(config(work / case.kind, **s.model), case, **options)


def check(llm: Any, case: Case, s: Sizes, work: Path) -> dict[str, Any]:
    """Two tokens of prompts of many lengths beside the reference's: of the prompts' rows, and of one row over pages.

    With prefixes the second row is the first once more, its prompt but one token cached; else it is the next token's,
    where the tokens before it are equal. vLLM computes latent attention in another order when it decodes: there the
    reference's own second row counts.
    """
    import torch

    vocabulary, asked = s.model["vocab_size"], prompts(s.model, 1, s.checked)

    def rows(outs: list[Any], token: int) -> Any:
        return torch.stack([log_probabilities(o.outputs[0].logprobs[token], vocabulary) for o in outs])

    outs = generate(llm, asked, 1 if s.has_prefixes else 2, logprobs=vocabulary)
    got = [rows(outs, 0), rows(generate(llm, asked, 1, logprobs=vocabulary), 0) if s.has_prefixes else rows(outs, 1)]
    path = work / f"reference_{case.kind}{'_tiny' if case.tiny else ''}.pt"
    if case.is_reference or not path.exists():
        torch.save([got[0], got[0]] if s.has_prefixes and case.kind != "mla" else got, path)
    want = torch.load(path)
    same = [got[i].argmax(-1) == want[i].argmax(-1) for i in range(2)]
    asked_alike = same[0] if not s.has_prefixes else torch.ones_like(same[0])
    if asked_alike.sum() < len(asked) / 2:
        raise RuntimeError(f"want the reference's first token of half the prompts, got {int(same[0].sum())}")
    return {
        "apart": apart(got[0], want[0]), "apart_cached": apart(got[1][asked_alike], want[1][asked_alike]),
        "prompts": len(asked), "same_tokens": int(same[0].sum()), "same_tokens_cached": int(same[1].sum()),
    }  # fmt: skip


def time_to_first_token(llm: Any, s: Sizes) -> dict[str, Any]:
    """Of one prompt alone, which no request had before."""
    found = [seconds(llm, prompts(s.model, 100 + i, [s.prompt]), 1) for i in range(1 + s.repeats)][1:]
    return {"first_token_ms": statistics.median(found) * 1e3}


def prefill_and_step(llm: Any, s: Sizes) -> dict[str, Any]:
    """Prompts that are new, twice; then steps in which all of them decode."""
    found = []
    for seed in (2, 3):
        asked = prompts(s.model, seed, [s.prompt] * s.batch)
        found.append(s.batch * s.prompt / seconds(llm, asked, 1))
    steps = [step_seconds(llm, asked, s.steps) * 1e3 for _ in range(s.repeats)]
    return {"prefill_tokens_s": found[1], "prefill_first": found[0], "step_ms": statistics.median(steps)}


def step_seconds(llm: Any, asked: list[list[int]], steps: int) -> float:
    """A step's time, once all requests have decoded a token: no prompt is among what is timed."""
    from vllm import SamplingParams

    engine, names = llm.llm_engine, [f"step-{i}" for i in range(len(asked))]
    params = SamplingParams(max_tokens=steps + len(asked) + 64, temperature=0, detokenize=False, ignore_eos=True)
    for name, prompt in zip(names, asked, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    counts = dict.fromkeys(names, 0)

    def step_until_each_has(tokens: dict[str, int]) -> None:
        while any(counts[name] < n for name, n in tokens.items()):
            counts.update({o.request_id: len(o.outputs[0].token_ids) for o in engine.step()})

    step_until_each_has(dict.fromkeys(names, 2))
    began, first = time.perf_counter(), dict(counts)
    step_until_each_has({name: n + steps for name, n in first.items()})
    took = time.perf_counter() - began
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return took / steps


def at_fixed_memory(llm: Any, s: Sizes) -> dict[str, Any]:
    """Many requests at once: how many run together is for the format to decide."""
    asked = prompts(s.model, 4, [s.short] * s.requests)
    took = seconds(llm, asked, s.new)
    return {"serve_tokens_s": s.requests * s.new / took, "serve_s": took}


def seconds(llm: Any, asked: list[list[int]], tokens: int) -> float:
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    began = time.perf_counter()
    outs = generate(llm, asked, tokens)
    wait()
    took = time.perf_counter() - began
    got = sum(len(o.outputs[0].token_ids) for o in outs)
    if got != tokens * len(asked):
        raise RuntimeError(f"want {tokens} tokens of each of {len(asked)} requests, got {got} in all")
    return took


def prompts(sizes: dict[str, Any], seed: int, lengths: list[int]) -> list[list[int]]:
    import torch

    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, sizes["vocab_size"], (n,), generator=g).tolist() for n in lengths]


def tokens_of(llm: Any) -> int:
    """Those that the cache holds."""
    c = llm.llm_engine.vllm_config.cache_config
    return int(c.num_gpu_blocks) * int(c.block_size)


def gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
