"""`TersekvCache` against transformers' own caches: bytes, prefill and decode time of one random Llama-style model.

    python benchmarks/transformers_cache.py [--tokens 2048,8192] [--batch 1] [--device cpu] [--compiled | --offload]
                                            [--json PATH]

Every cache runs in a process of its own. `DynamicCache` is the default one, 16 bits, with SDPA; `QuantizedCache` is
transformers' own with its backends fp8, quanto and hqq (the latter two need `optimum-quanto` and `hqq`; a cache that is
not installed is said to be missing). The weights are random, so that the error of the logits compares formats with each
other and says nothing of a trained model. All of them attend to exact keys and values in the first forward (tersekv
with `exact_prefill`). What is timed: the whole forward, of which attention is a part. "beside it" is the most memory
that decoding takes on top of the cache and the weights.

--compiled times caches of fixed room instead, transformers' own `StaticCache` with SDPA and `TersekvStaticCache`, with
a decode step that runs eagerly and with a compiled one, which on a GPU is a CUDA graph. --offload times caches whose
pages lie in the host's memory, transformers' own and `TersekvCache.offload()`, beside those on the device.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tersekv.integrations.transformers_layers import CACHE_ARGUMENT

CACHES = (
    "dynamic", "fp8", "quanto int4", "quanto int2", "hqq int8", "hqq int4", "tersekv bf16", "tersekv fp8_e4m3",
    "tersekv fp8_per_token_head", "tersekv int8_per_token_head", "tersekv nvfp4",
)  # fmt: skip
STATIC = ("static", "static bf16", "static fp8_e4m3", "static int8_per_token_head", "static nvfp4")
COMPILED = " compiled"
GRAPHS = ("dynamic", *(name + how for name in STATIC for how in ("", COMPILED)))
OFFLOADED = " offloaded"
HOST = ("dynamic", *(name + OFFLOADED for name in ("dynamic", "tersekv bf16", "tersekv fp8_e4m3", "tersekv nvfp4")))
STEPS, WARM = 24, 4
SIZES = {
    "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 1 << 17,
}  # fmt: skip
MISSING = "is not installed"


def model_of(device: str) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    return model.to(device).eval().requires_grad_(False)


def cache_of(name: str, model: Any, tokens: int) -> Any:
    """A fresh cache; the model is set to the attention that goes with it."""
    kind, _, what = name.removesuffix(OFFLOADED).partition(" ")
    if kind == "tersekv":
        from tersekv.integrations.transformers import TersekvCache

        model.set_attn_implementation("tersekv")
        cache = TersekvCache(model.config, what, max_tokens=tokens, exact_prefill=True)
        return cache.offload() if name.endswith(OFFLOADED) else cache
    if kind == "static" and what:
        from tersekv.integrations.transformers import TersekvStaticCache

        model.set_attn_implementation("tersekv")
        return TersekvStaticCache(model.config, what, max_tokens=tokens, exact_prefill=True)
    if kind == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=tokens)
    if kind == "dynamic":
        return transformers.DynamicCache(config=model.config, offloading=name.endswith(OFFLOADED))
    options = {} if kind == "fp8" else {"nbits": int(what[3:])}
    if kind == "hqq":
        options |= {"axis_key": 1, "axis_value": 1}
    return transformers.QuantizedCache(kind, model.config, **options)


_PLAIN = (str, int, float, type, torch.dtype, torch.device, transformers.PreTrainedConfig)


def tensors(x: Any, seen: dict[int, Any]) -> Iterator[Tensor]:
    """Every plain tensor that an object holds, in lists, dicts, attributes and tensor subclasses."""
    if id(x) in seen or isinstance(x, _PLAIN):
        return
    seen[id(x)] = x  # kept alive, so that no other object gets its id
    if type(x) is Tensor:
        yield x
        return
    if isinstance(x, Tensor):
        held = [getattr(x, name) for name in x.__tensor_flatten__()[0]]
    elif isinstance(x, dict):
        held = list(x.values())
    elif isinstance(x, (list, tuple)):
        held = list(x)
    else:
        names = [*getattr(x, "__dict__", {}), *getattr(type(x), "__slots__", ())]
        held = [getattr(x, n, None) for n in names]
    for part in held:
        yield from tensors(part, seen)


def stored_bytes(cache: Any) -> int:
    """Bytes of the memory behind a cache's tensors, each block once."""
    blocks = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(cache.layers, {})}
    return sum(blocks.values())


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (the most since `clear`) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def step_of(name: str, model: Any, device: str) -> Any:
    """What decodes a token."""
    if not name.endswith(COMPILED):
        return model
    return torch.compile(model.__call__, mode="default" if device == "cpu" else "reduce-overhead", fullgraph=True)


def timed(model: Any, ids: Tensor, cache: Any, position: int) -> tuple[Tensor, float, float]:
    """Logits of the last token, seconds, and seconds of the processor, which other programs disturb less."""
    start, work = time.perf_counter(), time.process_time()
    places = torch.arange(position, position + ids.shape[1], device=ids.device)[None]
    out = model(ids, **{CACHE_ARGUMENT: cache}, logits_to_keep=1, position_ids=places).logits[:, -1].float().cpu()
    return out, time.perf_counter() - start, time.process_time() - work


@torch.inference_mode()
def run(name: str, tokens: int, batch: int, device: str) -> dict[str, Any]:
    model = model_of(device)
    cache = cache_of(name.removesuffix(COMPILED), model, tokens + STEPS)
    step = step_of(name, model, device)
    ids = torch.randint(1024, (batch, tokens + STEPS), device=device)
    _, prefill, prefill_cpu = timed(model, ids[:, :tokens], cache, 0)
    gc.collect()
    before = 0
    if device == "cpu":
        ctypes.CDLL(None).malloc_trim(0)  # freed memory of the prefill would hide what decoding takes
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
    else:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    logits, seconds, work = [], [], []
    for i in range(tokens, tokens + STEPS):
        out, took, cpu = timed(step, ids[:, i : i + 1], cache, i)
        logits.append(out)
        seconds.append(took)
        work.append(cpu)
    after = resident("VmHWM") if device == "cpu" else torch.cuda.max_memory_allocated()
    return {
        "cache": name, "tokens": tokens, "batch": batch, "cache_bytes": stored_bytes(cache), "prefill_s": prefill,
        "prefill_cpu_s": prefill_cpu, "decode_ms_median": statistics.median(seconds[WARM:]) * 1e3,
        "decode_ms_min": min(seconds[WARM:]) * 1e3, "decode_cpu_ms_median": statistics.median(work[WARM:]) * 1e3,
        "decode_extra_bytes": max(0, after - before), "logits": torch.stack(logits).tolist(),
    }  # fmt: skip


def one(name: str, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """A case in a process of its own; {"why": ...} if it failed."""
    argv = [sys.executable, __file__, "--one", name, "--tokens", str(tokens), "--batch", str(args.batch)]
    argv += ["--device", args.device, "--threads", str(args.threads)]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1]
        missing = "ImportError" in last or "ModuleNotFoundError" in last
        return {"cache": name, "tokens": tokens, "why": MISSING if missing else last}
    return json.loads(done.stdout.splitlines()[-1])


def report(row: dict[str, Any], base: dict[str, Any]) -> str:
    if "why" in row:
        return f"{row['cache']:28} {row['why']}"
    return (
        f"{row['cache']:28} {row['cache_bytes'] / 2**20:8.1f} MiB {base['cache_bytes'] / row['cache_bytes']:5.2f}x   "
        f"decode {row['decode_ms_median']:7.2f} ms, {row['batch'] / row['decode_ms_median'] * 1e3:7.1f} tokens/s "
        f"(least {row['decode_ms_min']:.2f} ms, processor "
        f"{row['decode_cpu_ms_median']:.1f})   beside it {row['decode_extra_bytes'] / 2**20:6.1f} MiB   "
        f"prefill {row['prefill_s']:6.2f} s (processor {row['prefill_cpu_s']:.2f})   logits off by {row['error']:.1e}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="2048,8192")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compiled", action="store_true", help="caches of fixed room, eager and compiled")
    parser.add_argument("--offload", action="store_true", help="caches in the host's memory")
    parser.add_argument("--json")
    names = (*CACHES, *GRAPHS, *HOST)
    parser.add_argument("--one", choices=names, help="run this cache alone and print one line of JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.one:
        print(json.dumps(run(args.one, int(args.tokens), args.batch, args.device)))
        return 0
    rows = []
    for tokens in map(int, args.tokens.split(",")):
        print(f"\n{args.batch} x {tokens} tokens")
        base = None
        for name in GRAPHS if args.compiled else HOST if args.offload else CACHES:
            row = one(name, tokens, args)
            if "why" not in row:
                logits = torch.tensor(row.pop("logits"))
                base = base or {**row, "logits": logits}
                row["error"] = ((logits - base["logits"]).norm() / base["logits"].norm()).item()
            print(report(row, base or row), flush=True)
            rows.append(row)
    if args.json:
        machine = {
            "torch": torch.__version__, "transformers": transformers.__version__, "machine": platform.machine(),
            "device": args.device, "threads": args.threads, "date": time.strftime("%Y-%m-%d"),
        }  # fmt: skip
        told = {"machine": machine, "model": SIZES, "steps": STEPS, "rows": rows}
        Path(args.json).write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
