"""tersekv inside vLLM, beside vLLM's own attention: whether it is right there, and what it buys.

    python benchmarks/vllm_serving.py --json PATH [--only speed] [--formats auto fp8] [--gpus 2] [--seconds 300]

Speed (`vllm_speed.py`): 8 layers with the sizes of Llama-3-8B ("speed"), of a Qwen3.5 with one MoE layer ("hybrid"), of
gpt-oss-20b ("sinks") or of DeepSeek-V3 without experts ("mla"), random weights, full CUDA graphs of decode steps:
prefill rate, time to the first token, a decode step of 32 requests of 8192 tokens, and the tokens a second of many
requests at a fixed memory. A case whose first tokens' log-probabilities are not the reference's is not timed; one in
which a kernel is compiled after the engine began is a failure of tersekv.
Acceptance (`vllm_accept.py`): perplexity of a text, windows and sinks, two ranks.

Every case is a process of its own with a time limit: what fails costs itself. Lines are kept as they come, in place of
those of the same case, so an interrupt loses the running case alone. What a case says as it runs lies in --work/logs,
apart from models and tensors; one that its limit ends tells how far it came. Exit code 1 if one of tersekv's failed.
--tiny: everything on a CPU, with the engine of tests/engines; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from queue import Empty, Queue
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import vllm_accept
import vllm_speed
from vllm_engine import OURS, PHASE, Case, prepare, reference_of

PEERS = (("FLASH_ATTN", "auto"), ("FLASH_ATTN", "fp8"), ("TRITON_ATTN", "int8_per_token_head"), ("FLASHINFER", "fp8"))
PEERS_OF = {
    "speed": PEERS, "hybrid": PEERS[:2], "sinks": PEERS[:2],
    "mla": (("FLASH_ATTN_MLA", "auto"), ("TRITON_MLA", "fp8")),
}  # fmt: skip
FORMATS = ("auto", "fp8", "fp8_per_token_head", "int8_per_token_head", "nvfp4", "int4_per_token_head")
KINDS = (*vllm_speed.MODELS, *vllm_accept.KINDS)
RESULT = "RESULT "
RUNNING: set[subprocess.Popen[str]] = set()


def cases(kinds: list[str], formats: list[str], peers: bool, tiny: bool) -> list[Case]:
    """The reference of each kind before what is judged by it."""
    found = []
    for kind in kinds:
        others = PEERS_OF.get(kind, PEERS[:1]) if peers and not tiny else ()
        made = [Case(kind, *p, tiny) for p in [*((OURS, f) for f in formats), *others]]
        if not any(c.is_reference for c in made):
            made.append(Case(kind, *((OURS, "auto") if tiny else reference_of(kind)), tiny))
        found += sorted(made, key=lambda c: not c.is_reference)
    return found


def one(case: Case, work: Path) -> dict[str, Any]:
    """Run a case in this process."""
    prepare(case)
    return vllm_speed.run(case, work) if case.kind in vllm_speed.MODELS else vllm_accept.run(case, work)


def child(case: Case, work: Path, gpus: str | None, limit: float) -> dict[str, Any]:
    """Run a case in a process of its own; what ails it is its `reason`."""
    told = json.dumps(asdict(case))
    env = os.environ | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus is not None else {})
    command = [sys.executable, __file__, "--case", told, "--work", str(work)]
    log = work / "logs" / f"{case.name.replace('/', '+').replace(' ', '_')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    RUNNING.add(process)
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        end(process)
        return {"reason": f"took more than {limit:g} s{how_far(log)}"}
    finally:
        RUNNING.discard(process)
    said = log.read_text(errors="replace").splitlines()
    for line in reversed(said):
        if line.startswith(RESULT):
            return json.loads(line.removeprefix(RESULT))
    last = [line.strip() for line in said if line.strip()][-3:]
    return {"reason": f"exit code {process.returncode}: {' | '.join(last)[-600:]}"}


def how_far(log: Path) -> str:
    """The last phase that began."""
    phases = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(PHASE)]
    return f"; since {phases[-1].removeprefix(PHASE)}" if phases else ""


def end(process: subprocess.Popen[str]) -> None:
    """With what it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Kept:
    """The lines of a file: one a case."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.lock = path, threading.Lock()
        old = path.read_text().splitlines() if path is not None and path.exists() else []
        self.lines = {key(r): r for r in map(json.loads, old)}

    def add(self, case: Case, record: dict[str, Any]) -> None:
        whole = {**asdict(case), **record}
        with self.lock:
            self.lines[key(whole)] = whole
            if self.path is not None:
                self.path.write_text("".join(json.dumps(r) + "\n" for r in self.lines.values()))
            print(line(case, record), flush=True)


def key(record: dict[str, Any]) -> tuple[Any, ...]:
    return record["kind"], record["backend"], record["dtype"], record["tiny"]


def line(case: Case, record: dict[str, Any]) -> str:
    numbers = [f"{k} {v:.4g}" for k, v in record.items() if isinstance(v, (int, float)) and not isinstance(v, bool)]
    return f"{case.name}: {', '.join(numbers)}" + (f"; FAILED: {record['reason']}" if "reason" in record else "")


def run_all(todo: list[Case], work: Path, kept: Kept, gpus: int, limit: float) -> list[Case]:
    """References and what needs every GPU alone and first, then the others, one a GPU. Returns what failed."""
    failed: list[Case] = []

    def run(case: Case, devices: str | None) -> None:
        record = child(case, work, devices, limit)
        kept.add(case, record)
        if "reason" in record:
            failed.append(case)

    alone = [c for c in todo if c.is_reference or c.kind == "ranks"]
    for case in alone:
        run(case, None if case.kind == "ranks" or gpus == 1 else "0")
    left: Queue[Case] = Queue()
    for case in todo:
        if case not in alone:
            left.put(case)

    def work_off(device: int) -> None:
        while True:
            try:
                case = left.get_nowait()
            except Empty:
                return
            run(case, str(device) if gpus > 1 else None)

    threads = [threading.Thread(target=work_off, args=(i,), daemon=True) for i in range(gpus)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return failed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=KINDS, help="default: all; ranks want two GPUs")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), help="tersekv's, as --kv-cache-dtype")
    parser.add_argument("--no-peers", action="store_true", help="the reference alone beside tersekv")
    parser.add_argument("--gpus", type=int, default=1, help="cases at a time, one a GPU")
    parser.add_argument("--seconds", type=float, default=300, help="of a case, at most")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, as a test of this script")
    parser.add_argument("--json", type=Path, help="lines to keep")
    parser.add_argument("--work", type=Path, help="folder for models, the reference and logs; default: a new one")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.case:
        print(RESULT + json.dumps(one(Case(**json.loads(args.case)), args.work)), flush=True)
        return 0
    work = args.work or Path(tempfile.mkdtemp(prefix="tersekv-vllm-"))
    work.mkdir(parents=True, exist_ok=True)
    kinds = [k for k in args.only or KINDS if k != "ranks" or args.gpus > 1 or args.tiny]
    todo = cases(kinds, args.formats, not args.no_peers, args.tiny)
    try:
        failed = run_all(todo, work, Kept(args.json), args.gpus, args.seconds)
    finally:
        for process in list(RUNNING):
            end(process)
    return int(any(c.backend == OURS for c in failed))


if __name__ == "__main__":
    sys.exit(main())
