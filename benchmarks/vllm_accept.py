"""Whether tersekv is right in vLLM on a GPU: a trained model's perplexity of a text it has not seen; windows and sinks,
as gpt-oss has them; two ranks with one KV head each, and with two.

Prompts come in chunks, so that later chunks read the pages of earlier ones; then tokens are decoded. All is beside the
reference, position by position, as long as both have seen the same tokens.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from vllm_engine import Case, Compiled, divergence, engine, generate, log_probabilities, of_ours

VOCABULARY, BLOCK, WINDOW = 256, 64, 48
# KL from the reference, nats a byte, and the change of the perplexity's logarithm, by bits of the cache: `tersekv demo`
# finds 2.2e-3 and 4e-4 for fp8, 1.8e-2 and 1e-2 for nvfp4. Without its windows and sinks the Llama is 1.8e-2 away.
DIVERGES = {16: 2e-3, 8: 5e-3, 4: 5e-2}
PERPLEXITY = {16: 3e-3, 8: 5e-3, 4: 3e-2}
KINDS = ("perplexity", "windows", "ranks")


def run(case: Case, work: Path) -> dict[str, Any]:
    from checkpoints import llama

    folder = llama(work / "llama")
    # With --tiny one rank has both models: vLLM's workers do not start with the operators that stand in on a CPU.
    ranks = 2 if case.kind == "ranks" and not case.is_reference and not case.tiny else 1
    models = {"": folder}
    if case.kind == "ranks":
        models = {"1 KV head a rank": folder, "2 KV heads a rank": more_kv_heads(folder, work / "llama_4")}
    if case.kind == "windows":
        add_windows_and_sinks()
    record: dict[str, Any] = {}
    for what, model in models.items():
        found = measure(case, model, ranks)
        compiled = found.pop("compiled")
        path = work / f"{case.kind}{'_tiny' if case.tiny else ''}{what.replace(' ', '_')}.pt"
        record |= {f"{k}, {what}" if what else k: v for k, v in judged(case, found, path).items()}
        if of_ours(compiled):
            record["reason"] = f"want no kernel compiled after the engine began, got {of_ours(compiled)}"
    return record


def measure(case: Case, model: Path, ranks: int) -> dict[str, Any]:
    """Log-probabilities of every position of some texts, and greedy tokens after each with theirs."""
    import torch
    from checkpoints import text

    windows, length, new = (3, 200, 8) if case.tiny else (16, 1024, 32)
    asked = [text(2200 * i, length - 5 * i) for i in range(windows)]
    options: dict[str, Any] = {
        "max_model_len": 2048, "max_num_seqs": 16, "block_size": BLOCK, "max_num_batched_tokens": 128,
        "max_logprobs": VOCABULARY, "enable_prefix_caching": False, "tensor_parallel_size": ranks,
        "compilation_config": {
            "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
        },
        "num_gpu_blocks_override": 64 if case.tiny else None,
    }  # fmt: skip
    if not case.tiny:
        # By its bytes: what vLLM measures to be free is not, where another engine starts on the same GPU.
        options |= {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 1 << 30}
    if case.kind == "ranks" and not case.tiny:
        # A worker of its own for each model, with one rank too: vLLM captures all graphs of a process in one pool, and
        # PyTorch refuses the pool ("use_count > 0") to a second engine once the first one's graphs are gone.
        options |= {"distributed_executor_backend": "mp", "disable_custom_all_reduce": True}
    compiled = Compiled()
    with engine(model, case, **options) as llm:
        compiled.clear()
        outs = generate(llm, asked, new, logprobs=VOCABULARY, prompt_logprobs=VOCABULARY)
    texts, likely = [], []
    for prompt, out in zip(asked, outs, strict=True):
        rows = torch.stack([log_probabilities(found, VOCABULARY) for found in out.prompt_logprobs[1:]])
        texts.append(rows)
        likely.append(rows[range(len(rows)), prompt[1:]])
    return {
        "perplexity": math.exp(-float(torch.cat(likely).mean())), "texts": texts, "compiled": compiled.clear(),
        "tokens": [list(o.outputs[0].token_ids) for o in outs],
        "after": [
            torch.stack([log_probabilities(found, VOCABULARY) for found in o.outputs[0].logprobs]) for o in outs
        ],
    }  # fmt: skip


def judged(case: Case, found: dict[str, Any], path: Path) -> dict[str, Any]:
    import torch

    if case.is_reference or not path.exists():
        torch.save(found, path)
    want = torch.load(path)
    after = []
    for got, tokens, other, others in zip(found["after"], found["tokens"], want["after"], want["tokens"], strict=True):
        same = next((i for i, both in enumerate(zip(tokens, others, strict=True)) if both[0] != both[1]), len(tokens))
        after.append((got[: same + 1], other[: same + 1]))
    kl = divergence(torch.cat(found["texts"]), torch.cat(want["texts"]))
    kl_after = divergence(*(torch.cat(x) for x in zip(*after, strict=True)))
    moved = math.log(found["perplexity"] / want["perplexity"])
    record = {
        "perplexity": found["perplexity"], "kl": kl, "kl_decoded": kl_after,
        "decoded": sum(len(got) for got, _ in after), "tokens": sum(map(len, found["texts"])),
    }  # fmt: skip
    for name, x, most in (
        ("KL", kl, DIVERGES), ("KL of decoded tokens", kl_after, DIVERGES), ("log of perplexity", moved, PERPLEXITY),
    ):  # fmt: skip
        if not abs(x) <= most[case.bits]:
            record["reason"] = f"{name}: want within {most[case.bits]:g} of the reference's, got {x:.3g}"
    return record


def add_windows_and_sinks() -> None:
    """vLLM's Llama with windows in every second layer and sinks in all: gpt-oss without its experts."""
    import torch
    from vllm.model_executor.models import llama

    attention = llama.Attention

    def made(num_heads: int, *args: Any, prefix: str = "", **options: Any) -> Any:
        layer = int(prefix.split(".layers.")[1].split(".")[0])
        # vLLM builds its models with the GPU as the default.
        g, device = torch.Generator("cpu").manual_seed(layer), torch.get_default_device()
        sinks = torch.randn(num_heads, generator=g, device="cpu").bfloat16()
        if layer % 2 == 0:
            options["per_layer_sliding_window"] = WINDOW
        return attention(num_heads, *args, prefix=prefix, sinks=sinks.to(device), **options)

    llama.Attention = made


def more_kv_heads(folder: Path, target: Path) -> Path:
    """The same model, each of whose KV heads stands there twice."""
    from safetensors.torch import load_file, save_file

    target.mkdir(parents=True, exist_ok=True)
    entries = json.loads((folder / "config.json").read_text())
    dim = entries["head_dim"]
    tensors = load_file(folder / "model.safetensors")
    for name, x in tensors.items():
        if ".k_proj." in name or ".v_proj." in name:
            tensors[name] = x.unflatten(0, (-1, dim)).repeat_interleave(2, 0).flatten(0, 1).contiguous()
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps({**entries, "num_key_value_heads": 4}))
    return target
