"""Runs peers' own test suites, whole or a sample of them, with tersekv.compat in place of the peers' functions.

    python scripts/peer_suites.py --flashinfer CHECKOUT --vllm CHECKOUT --json counts.json
    python scripts/peer_suites.py --flashinfer CHECKOUT --sample 200 --seed 7 --seconds 200 --workers 15

CHECKOUT is a directory of the peer's sources of which the tests are read; nothing of it is kept. FlashInfer has to be
installed; vLLM does not: where it is missing, stand-ins take the place of the few names that its test imports.
Every item that calls a replaced function runs, whatever chip the peer wants for it. What comes of an item:

    passed    and a function of ours was called in it
    refused   by name: an UnsupportedError of ours, or a ValueError or TypeError of ours that says "want …, got …"
    skipped   by the peer, for the peer's reason
    failed    all else

`--references dense`: where a test compares with another kernel of the peer's, plain fp32 arithmetic takes its place:
no nvcc is needed. `--device cpu` runs what a CPU has the time for. Python 3.12 and no network suffice.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = str(HERE.parent / "src")
FILES = {
    "flashinfer": [f"tests/attention/{n}.py" for n in (
        "test_rope", "test_xqa", "test_xqa_batch_decode", "test_xqa_mla_batch_decode",
    )],
    "vllm": ["tests/quantization/test_per_token_kv_cache.py"],
}  # fmt: skip
KILLED, GAVE_UP = "the process ended", 77
GRACE = 30.0  # seconds past the deadline for items that have begun


class Worker:
    """A pytest process over one share of the items; started anew behind an item that ends it."""

    def __init__(
        self, peer: str, checkout: Path, share: int, shares: int, options: argparse.Namespace, folder: Path
    ) -> None:
        self.log, self.output = folder / f"{peer}{share}.jsonl", folder / f"{peer}{share}.txt"
        self.config, self.files = folder / f"{peer}{share}.json", [str(checkout / f) for f in FILES[peer]]
        self.told = {
            "peer": peer, "checkout": str(checkout), "share": share, "shares": shares,
            "log": str(self.log), "deadline": options.deadline, "device": options.device,
            "references": options.references, "gave_up": GAVE_UP, "sample": options.sample, "seed": options.seed,
        }  # fmt: skip
        self.log.touch()
        self.start()

    def start(self) -> None:
        self.config.write_text(json.dumps(self.told))
        arguments = [
            "-q", "--noconftest", "--runxfail", "-c", "/dev/null", "--rootdir", self.told["checkout"],
            "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "peer_plugin", f"--peer-config={self.config}",
            "--tb=no", *self.files,
        ]  # fmt: skip
        # Not `-m pytest`, which would put the folder that it starts in before the peer on the path.
        code = (
            f"import sys; sys.path[:0] = {[str(HERE), SOURCE]!r}; import pytest; sys.exit(pytest.main({arguments!r}))"
        )
        with self.output.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code], stdout=out, stderr=subprocess.STDOUT, cwd=self.config.parent
            )

    def ended(self) -> bool:
        """Whether the share is done. A process that ended in the midst of an item is started again behind it."""
        code = self.process.poll()
        if code is None and time.time() < self.told["deadline"] + GRACE:
            return False
        if code is None:  # the item that it is in counts as not run
            self.process.kill()
            self.process.wait()
            return True
        records = self.records()
        unfinished = {r["id"] for r in records if r["event"] == "start"} - {
            r["id"] for r in records if r["event"] == "end"
        }
        for item in unfinished:
            with self.log.open("a") as log:
                record = {"event": "end", "id": item, "outcome": "failed", "reason": f"{KILLED} with {code}"}
                log.write(json.dumps(record) + "\n")
        # The plugin gives a process up whose GPU context a kernel has spoilt.
        if (unfinished or code == GAVE_UP) and time.time() < self.told["deadline"]:
            self.start()
            return False
        return True

    def records(self) -> list[dict]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


def run(options: argparse.Namespace, peers: dict[str, Path]) -> dict:
    """Run all shares; the counts of each file."""
    options.deadline = time.time() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        shares = {"flashinfer": options.workers, "vllm": 1}
        workers = [
            Worker(peer, checkout, share, shares[peer], options, Path(folder))
            for peer, checkout in peers.items()
            for share in range(shares[peer])
        ]
        live = workers
        while live:
            time.sleep(0.5)
            live = [w for w in live if not w.ended()]
        records = [r for w in workers for r in w.records()]
        silent = [w for w in workers if not any(r["event"] == "collected" for r in w.records())]
        if silent:
            print(silent[0].output.read_text()[-6000:], file=sys.stderr)
            raise SystemExit(f"peer_suites: {len(silent)} of {len(workers)} workers collected nothing")
    return counts(records)


def counts(records: list[dict]) -> dict:
    """What came of the items, file by file. Workers of one peer collect alike: one of them speaks for all."""
    files: dict[str, dict] = {}
    for r in records:
        if r["event"] == "collected":
            for name, n in r["files"].items():
                files[name] = {
                    **n,
                    "passed": 0,
                    "refused": Counter(),
                    "skipped": Counter(),
                    "failed": defaultdict(list),
                }
    versions = next(r["versions"] for r in records if r["event"] == "collected")
    for r in records:
        if r["event"] != "end":
            continue
        file = files[r["id"].split("::")[0]]
        if r["outcome"] == "passed":
            file["passed"] += 1
        elif r["outcome"] == "failed":
            file["failed"][r["reason"]].append(r["id"])
        else:
            file[r["outcome"]][r["reason"]] += 1
    for file in files.values():
        done = file["passed"] + sum(file["refused"].values()) + sum(file["skipped"].values())
        file["failed"] = {
            reason: {"count": len(ids), "first": sorted(ids)[:3]} for reason, ids in file["failed"].items()
        }
        done += sum(f["count"] for f in file["failed"].values())
        file["not_run"] = file["chosen"] - done
        file["refused"], file["skipped"] = dict(file["refused"]), dict(file["skipped"])
    return {"versions": versions, "files": files}


def table(files: dict) -> str:
    """A line for each file, then the reasons."""
    heads = ("items", "ours", "chosen", "passed", "refused", "skipped", "failed", "not_run")
    lines, reasons = [" ".join([f"{'file':32}", *[f"{h:>8}" for h in heads]])], []
    for path, f in sorted(files.items()):
        name = Path(path).name
        failed = {reason: x["count"] for reason, x in f["failed"].items()}
        sums = {"failed": sum(failed.values()), **{k: sum(f[k].values()) for k in ("refused", "skipped")}}
        lines.append(" ".join([f"{name:32}", *[f"{(f | sums)[h]:8}" for h in heads]]))
        for kind, why in (("refused", f["refused"]), ("skipped", f["skipped"]), ("failed", failed)):
            reasons += [f"{name}: {kind} {n}: {reason}" for reason, n in why.items()]
        reasons += [f"    {x['first'][0]}" for x in f["failed"].values()]
    return "\n".join([*lines, *reasons])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flashinfer", type=Path, metavar="CHECKOUT")
    parser.add_argument("--vllm", type=Path, metavar="CHECKOUT")
    parser.add_argument("--workers", type=int, default=1, help="processes of FlashInfer's suite (vLLM's takes one)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after these, no further item is begun")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="items of each test function; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample, and of the order")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--references", choices=("peer", "dense"), default="peer")
    parser.add_argument("--json", type=Path, help="where the counts are kept")
    options = parser.parse_args()
    peers = {n: getattr(options, n).resolve() for n in FILES if getattr(options, n) is not None}
    if not peers:
        parser.error("want --flashinfer CHECKOUT or --vllm CHECKOUT, got neither")
    start = time.time()
    result = run(options, peers)
    keep = ("workers", "seconds", "sample", "seed", "device", "references")
    told = {k: getattr(options, k) for k in keep} | {"checkouts": {n: p.name for n, p in peers.items()}}
    result = {"options": told, "took_s": round(time.time() - start, 1), **result}
    print(table(result["files"]))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    return int(any(f["failed"] for f in result["files"].values()))


if __name__ == "__main__":
    sys.exit(main())
