"""What outlier channels of keys cost each format, and what a rotation and channel scales give back: K alone in few bits
on the shipped Llama-style model as it is, and with outliers made by a change that keeps its function. Minutes on a CPU.

    python scripts/outliers.py --json outliers.json

Channel scales are calibrated on the end of the shipped text, the beginning is scored. `format_tables.py` writes the
tables of docs/ from benchmarks/results/outliers_cpu.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

import tersekv
from tersekv.demo import text
from tersekv.demo.measure import Settings, measure
from tersekv.demo.outliers import FACTOR, PAIRS, make_outliers
from tersekv.demo.subject import BuiltIn

FORMATS = (
    "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head", "nvfp4", "int4_per_token_head",
)  # fmt: skip
WAYS = ("", "+rotated", "+channels", "+rotated+channels")
OTHER_PAIRS = ((0, 1), (3, 11), (5, 6), (30, 31))
CALIBRATION = 4096


def kl(pairs: tuple[int, ...], words: list[str], scored: int) -> dict[str, float | None]:
    """KL in nats a byte of each cache. pairs: the rotary pairs that are made outliers; none: the model as it is."""
    subject, tokens = BuiltIn("llama"), text.encode(text.heldout_text())
    make_outliers(subject.model, pairs)
    assert scored + 1 + CALIBRATION < len(tokens), "text is left to calibrate on"
    found = measure(subject, tokens[: scored + 1], Settings(generate=1), words, other=tokens[-CALIBRATION - 1 :])
    return {m.format: m.kl for m in found.formats}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", default="outliers.json", help="results; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=4096, help="bytes to score; default: %(default)s")
    args = parser.parse_args()
    torch.set_num_threads(1)
    all_words = [f"{f}/bf16{way}" for f in FORMATS for way in WAYS]
    few = [f"int4_per_token_head/bf16{way}" for way in WAYS]
    runs = [((), all_words), (PAIRS, all_words), *((pairs, few) for pairs in OTHER_PAIRS)]
    stored = {
        "tersekv": tersekv.__version__, "torch": torch.__version__, "factor": FACTOR, "bytes_scored": args.tokens,
        "bytes_calibrated": CALIBRATION, "models": [],
    }  # fmt: skip
    for pairs, words in runs:
        found = kl(pairs, words, args.tokens)
        stored["models"].append({"pairs": list(pairs), "kl": found})
        print(f"\noutlier pairs {pairs}" if pairs else "the model as it is")
        for word in words:
            print(f"{word:45s} {found[word]:.2e}", flush=True)
    Path(args.json).write_text(json.dumps(stored, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
