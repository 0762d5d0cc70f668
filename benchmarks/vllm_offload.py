"""Prompts whose blocks vLLM has moved to the host's memory: brought back, beside computed anew.

    python benchmarks/vllm_offload.py [--formats auto int8_per_token_head …] [--json PATH]

vLLM's OffloadingConnector over tersekv's pages, and the same engine without it, each in a process of its own: prompts,
others that take their blocks, and the first again. A line a cache dtype: seconds of the first prompts again without and
with it, tokens that came back, and how far the log-probabilities of their first tokens lie apart. Exit code 1 if
nothing came back, or if they lie farther apart than the format's limit. --tiny: on a CPU, with the engine of
tests/engines and its copies; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from vllm_engine import LIMITS, OURS, Case, apart, config, drawn_weights, engine, generate, log_probabilities, prepare
from vllm_speed import BLOCK, MODEL, TINY_MODEL, gpu

FORMATS = ("auto", "fp8", "int8_per_token_head", "fp8_per_token_head", "nvfp4", "int4_per_token_head")
RESULT = "RESULT "


def run(case: Case, offload: bool, work: Path) -> dict[str, Any]:
    """One engine. Leaves the log-probabilities of the first tokens, asked again, in `work`."""
    import torch

    model, (requests, prompt, memory) = (TINY_MODEL, (2, 192, 0)) if case.tiny else (MODEL, (8, 8192, 2 << 30))
    options: dict[str, Any] = {
        "load_format": drawn_weights(), "max_model_len": prompt + 256, "max_num_seqs": requests, "block_size": BLOCK,
        "max_num_batched_tokens": 96 if case.tiny else 8192, "enable_prefix_caching": True,
        "max_logprobs": model["vocab_size"], "kv_cache_memory_bytes": memory or None, "enforce_eager": True,
    }  # fmt: skip
    if case.tiny:
        options["num_gpu_blocks_override"] = 8
    if offload:
        options["kv_transfer_config"] = transfer_config(case.tiny)
    with engine(config(work / "model", **model), case, **options) as llm:
        asked = [drawn(i, prompt, model["vocab_size"]) for i in range(requests)]
        generate(llm, asked, 1)
        c = llm.llm_engine.vllm_config.cache_config
        others = -(-int(c.num_gpu_blocks) * BLOCK // (prompt * requests)) + 1  # until no block of the first is left
        took = []
        for again in range(1 if case.tiny else 3):
            for i in range(others):
                seeds = range(1000 * (again + 1) + i * requests, 1000 * (again + 1) + (i + 1) * requests)
                generate(llm, [drawn(seed, prompt, model["vocab_size"]) for seed in seeds], 1)
            began = time.perf_counter()
            outs = generate(llm, asked, 1)
            took.append(time.perf_counter() - began)
        # vLLM's counter of a connector's hits misses those of steps that only load.
        cached = sum(o.num_cached_tokens for o in outs)
        record = {"seconds": statistics.median(took), "came_back": cached, "asked": requests * prompt}
        # Over the same pages; not timed, since all log-probabilities take vLLM's front end longer than the prompts.
        outs = generate(llm, asked, 1, logprobs=model["vocab_size"])
    rows = [log_probabilities(o.outputs[0].logprobs[0], model["vocab_size"]) for o in outs]
    torch.save(torch.stack(rows), work / f"offload-{offload}.pt")
    return {**record, "gpu": gpu(), "torch": torch.__version__}


def transfer_config(tiny: bool) -> dict[str, Any]:
    if not tiny:
        extra = {"cpu_bytes_to_use": 16 << 30}
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    import offload_cpu
    import pytest

    offload_cpu.offload_on_cpus(pytest.MonkeyPatch())
    return offload_cpu.transfer_config()


def drawn(seed: int, n: int, vocabulary: int) -> list[int]:
    import torch

    return torch.randint(3, vocabulary, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def beside(case: Case, limit: float) -> dict[str, Any]:
    """Both engines of a cache dtype."""
    import torch

    found: dict[str, Any] = {"dtype": case.dtype, "tiny": case.tiny}
    with tempfile.TemporaryDirectory() as work:
        for offload in (False, True):
            command = [sys.executable, __file__, "--one", case.dtype, "--work", work]
            command += ["--offload"] * offload + ["--tiny"] * case.tiny
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
            lines = [x.removeprefix(RESULT) for x in done.stdout.splitlines() if x.startswith(RESULT)]
            if done.returncode or not lines:
                return {**found, "reason": f"exit code {done.returncode}: {done.stderr.strip()[-600:]}"}
            record = json.loads(lines[-1])
            found["with_s" if offload else "without_s"] = record["seconds"]
            if not offload and record["came_back"]:
                return {**found, "reason": f"want no token left without offloading, got {record['came_back']}"}
        found |= {n: record[n] for n in ("came_back", "asked", "gpu", "torch")}
        got, want = (torch.load(Path(work) / f"offload-{x}.pt") for x in (True, False))
    found["apart"], most = apart(got, want), LIMITS[case.bits]
    if found["came_back"] < 0.9 * found["asked"]:
        found["reason"] = f"want {found['asked']} tokens from the host's memory, got {found['came_back']}"
    elif found["apart"] > most:
        found["reason"] = f"want log-probabilities within {most:g}, got {found['apart']:.3g}"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=FORMATS, metavar="DTYPE", help="of --kv-cache-dtype")
    parser.add_argument("--seconds", type=float, default=300, help="limit of an engine; default: %(default)g")
    parser.add_argument("--json", type=Path, metavar="PATH", help="add a line of each to this file")
    parser.add_argument("--tiny", action="store_true", help="on a CPU")
    for hidden in ("--one", "--work"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--offload", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        case = Case("offload", OURS, args.one, args.tiny)
        prepare(case)
        print(RESULT + json.dumps(run(case, args.offload, Path(args.work))), flush=True)
        return 0
    failed = 0
    for dtype in args.formats:
        record = beside(Case("offload", OURS, dtype, args.tiny), args.seconds)
        failed += "reason" in record
        print(json.dumps(record), flush=True)
        if args.json is not None:
            with args.json.open("a") as file:
                file.write(json.dumps(record) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
