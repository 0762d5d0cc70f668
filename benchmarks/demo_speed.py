"""Tokens a second of the demo's models on a CPU: native kernels against eager PyTorch, in turns.

    python benchmarks/demo_speed.py [--rounds 5] [--json PATH]

Each round runs `tersekv demo` twice in processes of their own, once as it is and once with TERSEKV_BACKEND=torch; of
each format the fastest round counts. One request generates 48 tokens with one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

WAYS = {"native": "", "eager": "torch"}


def demo(backend: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "demo.json"
        command = [sys.executable, "-m", "tersekv", "demo", "--tokens", "64", "--plot", "none", "--json", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "TERSEKV_BACKEND": backend})
        return json.loads(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    best: dict[tuple[str, str], dict[str, float]] = {}
    for _ in range(args.rounds):
        for way, backend in WAYS.items():
            told = demo(backend)
            for model in told["models"]:
                for f in model["formats"]:
                    row = best.setdefault((model["model"], f["format"]), {})
                    row[way] = max(row.get(way, 0.0), f["tokens_per_s"])
    print(f"{'model':<10}{'format':<22}{'eager':>8}{'native':>8}{'times':>8}   tokens/s")
    rows = []
    for (name, format), row in best.items():
        print(f"{name:<10}{format:<22}{row['eager']:>8.0f}{row['native']:>8.0f}{row['native'] / row['eager']:>8.2f}")
        rows.append({"model": name, "format": format, "tokens_per_s": row})
    if args.json:
        about = {"environment": told["environment"], "options": told["options"], "rounds": args.rounds}
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
