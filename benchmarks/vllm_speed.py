"""One backend and format in vLLM's engine, 8 layers of a Llama with the sizes of Llama-3-8B: right, then fast."""

from __future__ import annotations

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
    draw_weights,
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
TINY_MODEL = {**MODEL, "vocab_size": 256, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64}  # fmt: skip
BLOCK = 64


class Sizes:
    """What is asked of the engine; `tiny`: so little that a CPU does it."""

    def __init__(self, tiny: bool) -> None:
        self.model = TINY_MODEL if tiny else MODEL
        self.batch, self.prompt, self.steps, self.repeats = (4, 256, 8, 1) if tiny else (32, 8192, 128, 3)
        # As much as this batch takes in 16 bits, its new tokens included, and an eighth more.
        self.memory = (6 << 20) if tiny else (9 << 30)
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

    s, compiled = Sizes(case.tiny), Compiled()
    began = time.perf_counter()
    options: dict[str, Any] = {
        "load_format": "dummy", "max_model_len": s.prompt + 256, "max_num_seqs": s.most, "block_size": BLOCK,
        "max_num_batched_tokens": 96 if case.tiny else 8192, "enable_prefix_caching": True,
        "max_logprobs": s.model["vocab_size"], "kv_cache_memory_bytes": s.memory,
        "compilation_config": {
            "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": s.graphs,
        },
    }  # fmt: skip
    if case.tiny:  # on a CPU the platform counts in its own unit
        options |= {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": 64}
    with engine(config(work / "model", **s.model), case, **options) as llm:
        llm.apply_model(draw_weights)
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


def check(llm: Any, case: Case, s: Sizes, work: Path) -> dict[str, Any]:
    """First tokens of prompts of many lengths beside the reference's: as prompts, then as rows over cached pages."""
    import torch

    vocabulary, rows = s.model["vocab_size"], []
    asked = prompts(s, 1, s.checked)
    for _ in range(2):
        outs = generate(llm, asked, 1, logprobs=vocabulary)
        rows.append(torch.stack([log_probabilities(o.outputs[0].logprobs[0], vocabulary) for o in outs]))
    path = work / f"reference{'_tiny' if case.tiny else ''}.pt"
    if case.is_reference or not path.exists():
        torch.save(rows[0], path)
    want = torch.load(path)
    return {
        "apart": apart(rows[0], want), "apart_cached": apart(rows[1], want), "prompts": len(want),
        "same_tokens": int((rows[0].argmax(-1) == want.argmax(-1)).sum()),
        "same_tokens_cached": int((rows[1].argmax(-1) == want.argmax(-1)).sum()),
    }  # fmt: skip


def time_to_first_token(llm: Any, s: Sizes) -> dict[str, Any]:
    """Of one prompt alone, which no request had before."""
    found = [seconds(llm, prompts(s, 100 + i, [s.prompt]), 1) for i in range(1 + s.repeats)][1:]
    return {"first_token_ms": statistics.median(found) * 1e3}


def prefill_and_step(llm: Any, s: Sizes) -> dict[str, Any]:
    """Prompts that are new, twice; then the time that more tokens of cached ones take."""
    found = []
    for seed in (2, 3):
        asked = prompts(s, seed, [s.prompt] * s.batch)
        found.append(s.batch * s.prompt / seconds(llm, asked, 1))
    seconds(llm, asked, s.steps + 1)
    steps = [
        (seconds(llm, asked, s.steps + 1) - seconds(llm, asked, 1)) / s.steps * 1e3 for _ in range(max(s.repeats, 1))
    ]
    return {"prefill_tokens_s": found[1], "prefill_first": found[0], "step_ms": statistics.median(steps)}


def at_fixed_memory(llm: Any, s: Sizes) -> dict[str, Any]:
    """Many requests at once: how many run together is for the format to decide."""
    asked = prompts(s, 4, [s.short] * s.requests)
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


def prompts(s: Sizes, seed: int, lengths: list[int]) -> list[list[int]]:
    import torch

    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, s.model["vocab_size"], (n,), generator=g).tolist() for n in lengths]


def tokens_of(llm: Any) -> int:
    """Those that the cache holds."""
    c = llm.llm_engine.vllm_config.cache_config
    return int(c.num_gpu_blocks) * int(c.block_size)


def gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
