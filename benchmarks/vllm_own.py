"""What cache formats cost a model of yours in vLLM with tersekv: perplexity, KL and needles, beside its 16-bit cache.

    python benchmarks/vllm_own.py --model MODEL --formats fp8,int8_per_token_head,nvfp4 --text FILE

KL is of the likeliest tokens and of all others together, so at least this. A needle is a number in the middle of the
text that the model is asked for at its end. Rows come 16 at a time, so that all read what the cache holds. On a machine
without a GPU: --cpu; --bytes: tokens are bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_engine import OURS, Case, engine, generate, prepare

ASK, TELL = "The pass key is", " The pass key is {}. Remember it. "


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder, or a name on the Hugging Face Hub")
    parser.add_argument("--formats", default="fp8,int8_per_token_head,nvfp4", help="values of --kv-cache-dtype")
    parser.add_argument("--text", type=Path, help="that the model has not seen; default: the demo's")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window; default: %(default)s")
    parser.add_argument("--windows", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--needles", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--likeliest", type=int, default=64, help="tokens that KL compares; default: %(default)s")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--bytes", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a format, in a process of its own; its results go to --out
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.one:
        args.out.write_text(json.dumps(measure(args)))
        return
    with tempfile.TemporaryDirectory() as work:
        found = {}
        for name in dict.fromkeys(["auto", *args.formats.split(",")]):
            out = Path(work) / "found.json"
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--one", name, "--out", str(out)], check=True)
            found[name] = json.loads(out.read_text())
    print("| --kv-cache-dtype | perplexity | KL, nats/token | needles found |\n| --- | --- | --- | --- |")
    for name, one in found.items():
        kl = divergence(found["auto"]["likely"], one["likely"])
        print(f"| {name} | {one['perplexity']:.4f} | {kl:.1e} | {one['needles']} of {args.needles} |")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    prepare(Case("own", OURS, args.one, args.cpu))
    from tersekv.demo.text import heldout_text

    text = args.text.read_text() if args.text else heldout_text()
    encode, decode = tokenizer(args)
    tokens = encode(text)
    if len(tokens) < args.length + 1:
        raise SystemExit(f"--text: want at least {args.length + 1} tokens, got {len(tokens)}")
    step = min(args.length, max(1, (len(tokens) - args.length) // args.windows))
    windows = [tokens[i * step : i * step + args.length] for i in range(args.windows)]
    keys, asked = needles(args, tokens, encode)
    options: dict[str, Any] = {
        "dtype": "auto", "max_model_len": args.length + 64, "max_logprobs": args.likeliest, "block_size": 64,
        "skip_tokenizer_init": True, "enable_prefix_caching": False, "max_num_seqs": 16,
        "max_num_batched_tokens": 16,  # more rows of a request would see their own keys and values as they came
    }  # fmt: skip
    if args.cpu:
        options["num_gpu_blocks_override"] = 20 * (args.length // 64 + 2)
    with engine(args.model, Case("own", OURS, args.one, args.cpu), **options) as llm:
        outs = generate(llm, windows, 1, prompt_logprobs=args.likeliest)
        answers = generate(llm, asked, 16)
    own, likely = [], []
    for window, out in zip(windows, outs, strict=True):
        for token, row in zip(window[1:], out.prompt_logprobs[1:], strict=True):
            own.append(row[token].logprob)
            likely.append({t: x.logprob for t, x in row.items()})
    said = [decode(list(a.outputs[0].token_ids)) for a in answers]
    return {
        "perplexity": math.exp(-sum(own) / len(own)), "likely": likely,
        "needles": sum(key in answer for key, answer in zip(keys, said, strict=True)),
    }  # fmt: skip


def tokenizer(args: argparse.Namespace) -> tuple[Any, Any]:
    if args.bytes:
        return lambda text: list(text.encode()), lambda tokens: bytes(tokens).decode(errors="replace")
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(args.model)
    return lambda text: own.encode(text, add_special_tokens=False), own.decode


def needles(args: argparse.Namespace, tokens: list[int], encode: Any) -> tuple[list[str], list[list[int]]]:
    """Numbers, and texts of `length` tokens that have them at different depths and end with the question."""
    draw, keys, asked = random.Random(0), [], []
    for i in range(args.needles):
        key = str(draw.randint(10000, 99999))
        told, ask = encode(TELL.format(key)), encode(ASK)
        hay = tokens[: args.length - len(told) - len(ask)]
        at = len(hay) * (i + 1) // (args.needles + 1)
        keys.append(key)
        asked.append(hay[:at] + told + hay[at:] + ask)
    return keys, asked


def divergence(wanted: list[dict[str, float]], got: list[dict[str, float]]) -> float:
    """The mean KL of distributions whose tokens that either does not name are one."""
    every = []
    for p, q in zip(wanted, got, strict=True):
        both = [t for t in p if t in q]
        rest = [max(1 - sum(math.exp(x[t]) for t in both), 1e-12) for x in (p, q)]
        kl = sum(math.exp(p[t]) * (p[t] - q[t]) for t in both) + rest[0] * math.log(rest[0] / rest[1])
        every.append(max(kl, 0.0))
    return sum(every) / len(every)


if __name__ == "__main__":
    main()
