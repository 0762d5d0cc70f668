"""tersekv inside SGLang on a GPU, beside SGLang's own attention: first tokens alike, then steps and prompts timed.

    python benchmarks/sglang_speed.py --json PATH [--formats bf16 int8_per_token_head] [--seconds 200]

8 layers with the sizes of Llama-3-8B and drawn weights, pages of 64, CUDA graphs of decode steps, 32 requests of 8192
tokens in a memory that holds them in 16 bits. Every case is a process of its own with a time limit. A case whose first
decoded log-probabilities are not those of SGLang's Triton backend over bf16 is not timed. --tiny: on a CPU, as a test
of this script; its times mean nothing. Exit code 1 if one of tersekv's failed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from vllm_engine import ENGINES, LIMITS, apart, config
from vllm_speed import MODEL, TINY_MODEL, prompts

sys.path.insert(0, str(ENGINES))
from stand_in import stand_in

REFERENCE = ("triton", "bf16")
PEERS = (REFERENCE, ("triton", "fp8_e4m3"))
FORMATS = ("bf16", "fp8_e4m3", "int8_per_token_head", "nvfp4", "int4_per_token_head")
RESULT = "RESULT "
TOP = 256  # log-probabilities that are compared, of the reference's first tokens


# For a kernel of Blackwell only. SGLang spawns processes, which import this file again.
stand_in("cutlass", decorators=True)


def checkpoint(folder: Path, sizes: dict[str, Any]) -> Path:
    """Weights of a size at which attention counts; queries are twice as large as usual, so that softmax picks keys."""
    import torch
    from safetensors.torch import save_file

    if (folder / "model.safetensors").exists():
        return folder
    config(folder, **sizes)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    g = torch.Generator(device).manual_seed(0)
    width, inner, dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    q, kv = sizes["num_attention_heads"] * dim, sizes["num_key_value_heads"] * dim

    def drawn(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        made = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
        return made.normal_(0, scale * columns**-0.5, generator=g).cpu()

    weights = {"lm_head.weight": drawn(sizes["vocab_size"], width), "model.norm.weight": torch.ones(width).bfloat16()}
    weights["model.embed_tokens.weight"] = drawn(sizes["vocab_size"], width, width**0.5)
    for i in range(sizes["num_hidden_layers"]):
        at = f"model.layers.{i}."
        weights |= {
            f"{at}self_attn.q_proj.weight": drawn(q, width, 2), f"{at}self_attn.k_proj.weight": drawn(kv, width),
            f"{at}self_attn.v_proj.weight": drawn(kv, width), f"{at}self_attn.o_proj.weight": drawn(width, q),
            f"{at}mlp.gate_proj.weight": drawn(inner, width), f"{at}mlp.up_proj.weight": drawn(inner, width),
            f"{at}mlp.down_proj.weight": drawn(width, inner),
            f"{at}input_layernorm.weight": torch.ones(width).bfloat16(),
            f"{at}post_attention_layernorm.weight": torch.ones(width).bfloat16(),
        }  # fmt: skip
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def run(backend: str, format: str, work: Path, tiny: bool) -> dict[str, Any]:
    """Everything of one case, in this process."""
    if tiny:
        import sglang_cpu  # noqa: F401
    import torch

    sizes = TINY_MODEL if tiny else MODEL
    batch, prompt, steps, memory = (4, 200, 8, 4 << 20) if tiny else (32, 8192, 128, 9 << 30)
    folder = checkpoint(work / "model", sizes)
    if backend == "tersekv":
        os.environ["TERSEKV_SGLANG_FORMAT"] = format
    os.environ.setdefault("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK", "1")  # the last built with PyTorch 2.11 is older
    os.environ.setdefault("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")  # the other is built with a newer PyTorch
    import sglang

    bits16 = 4 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"]
    options: dict[str, Any] = {
        "attention_backend": backend, "kv_cache_dtype": "auto" if format == "bf16" or backend == "tersekv" else format,
        "page_size": 64, "skip_tokenizer_init": True, "max_running_requests": batch, "log_level": "warning",
        "context_length": prompt + 256, "sampling_backend": "pytorch", "dtype": "bfloat16", "random_seed": 0,
        "max_total_tokens": memory // bits16, "chunked_prefill_size": 8192, "cuda_graph_max_bs_decode": batch,
        "mem_fraction_static": 0.6,
    }  # fmt: skip
    if tiny:
        options |= {"device": "cpu", "disable_cuda_graph": True, "page_size": 16}
    began = time.perf_counter()
    engine = sglang.Engine(model_path=str(folder), **options)
    try:
        record: dict[str, Any] = {"init_s": time.perf_counter() - began, "torch": torch.__version__}
        record["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        record |= check(engine, work, format, backend, sizes, 200 if tiny else 2048)
        if record["apart"] > record["limit"]:
            return {**record, "reason": f"want log-probabilities within {record['limit']:g} before anything is timed"}
        return record | timed(engine, sizes, batch, prompt, steps)
    finally:
        engine.shutdown()


def check(engine: Any, work: Path, format: str, backend: str, sizes: dict[str, Any], longest: int) -> dict[str, Any]:
    """Log-probabilities of the second token, decoded over pages, where the first is the reference's."""
    import torch

    path = work / "reference.json"
    lengths = [max(1, longest * i // 8) for i in range(1, 9)]
    asked = prompts(sizes, 1, lengths)
    reference = json.loads(path.read_text()) if path.exists() else None
    top = None if reference is None else [r["top"] for r in reference]
    sampling_params = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
    outs = engine.generate(
        input_ids=asked, sampling_params=sampling_params, return_logprob=True, top_logprobs_num=TOP,
        token_ids_logprob=top,
    )  # fmt: skip
    found = []
    for i, out in enumerate(outs):
        meta_info = out["meta_info"]
        if top is None:
            rows = [(token, logprob) for logprob, token, _ in meta_info["output_top_logprobs"][1]]
        else:
            rows = [(token, logprob) for logprob, token, _ in meta_info["output_token_ids_logprobs"][1]]
            rows.sort(key=lambda row: top[i].index(row[0]))
        found.append({"first": out["output_ids"][0], "top": [t for t, _ in rows], "logprobs": [x for _, x in rows]})
    if reference is None:
        path.write_text(json.dumps(found))
        reference = found
    same = [i for i in range(len(asked)) if found[i]["first"] == reference[i]["first"]]
    if len(same) < len(asked) / 2:
        raise RuntimeError(f"want the reference's first token of half the prompts, got {len(same)} of {len(asked)}")
    got, want = (torch.tensor([of[i]["logprobs"] for i in same], dtype=torch.float64) for of in (found, reference))
    bits = {"bf16": 16, "nvfp4": 4, "int4_per_token_head": 4}.get(format, 8)
    return {"same_first": len(same), "prompts": len(asked), "apart": apart(got, want), "limit": LIMITS[bits]}


def timed(engine: Any, sizes: dict[str, Any], batch: int, prompt: int, steps: int) -> dict[str, Any]:
    """Prompts that are new; then the time that more tokens of cached ones take."""
    rates = []
    for seed in (2, 3, 4):
        asked = prompts(sizes, seed, [prompt] * batch)
        rates.append(batch * prompt / seconds(engine, asked, 1))
    seconds(engine, asked, steps + 1)
    found = [(seconds(engine, asked, steps + 1) - seconds(engine, asked, 1)) / steps * 1e3 for _ in range(3)]
    return {
        "prefill_tokens_s": statistics.median(rates[1:]),
        "prefill_first": rates[0],
        "step_ms": statistics.median(found),
    }


def seconds(engine: Any, asked: list[list[int]], tokens: int) -> float:
    began = time.perf_counter()
    outs = engine.generate(
        input_ids=asked, sampling_params={"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    )
    took = time.perf_counter() - began
    got = sum(len(out["output_ids"]) for out in outs)
    if got != tokens * len(asked):
        raise RuntimeError(f"want {tokens} tokens of each of {len(asked)} requests, got {got} in all")
    return took


def child(backend: str, format: str, work: Path, tiny: bool, limit: float) -> dict[str, Any]:
    """A case in a process of its own; what ails it is its `reason`, and its log is in the folder of work."""
    log = work / f"{backend}_{format}.log"
    command = [sys.executable, __file__, "--case", backend, format, "--work", str(work), *(["--tiny"] if tiny else [])]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return {"reason": f"took more than {limit:g} s"}
    said = log.read_text(errors="replace").splitlines()
    for line in reversed(said):
        if line.startswith(RESULT):
            return json.loads(line.removeprefix(RESULT))
    return {"reason": f"exit code {process.returncode}: {' | '.join(x.strip() for x in said if x.strip())[-600:]}"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), help="tersekv's")
    parser.add_argument("--no-peers", action="store_true", help="the reference alone beside tersekv")
    parser.add_argument("--seconds", type=float, default=200, help="of a case, at most")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, help="lines to keep")
    parser.add_argument("--work", type=Path, help="folder for the model, the reference and logs; default: a new one")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(RESULT + json.dumps(run(*args.case, args.work, args.tiny)), flush=True)
        return 0
    work = args.work or Path(tempfile.mkdtemp(prefix="tersekv-sglang-"))
    work.mkdir(parents=True, exist_ok=True)
    peers = [("tersekv", "bf16")] if args.tiny else [REFERENCE] if args.no_peers else list(PEERS)
    failed = False
    for backend, format in dict.fromkeys([*peers, *(("tersekv", f) for f in args.formats)]):
        record = {"backend": backend, "format": format, **child(backend, format, work, args.tiny, args.seconds)}
        failed |= backend == "tersekv" and "reason" in record
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(record) + "\n")
        print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in record.items()), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
