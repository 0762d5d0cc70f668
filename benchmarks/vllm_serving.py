"""tersekv inside vLLM, beside vLLM's own attention: whether it is right there, and what it buys.

    python benchmarks/vllm_serving.py --json PATH [--only speed] [--formats auto fp8] [--gpus 2] [--seconds 300]

Speed (`vllm_speed.py`): 8 layers with the sizes of Llama-3-8B ("speed"), of a Qwen3.5 with one MoE layer ("hybrid"), of
gpt-oss-20b ("sinks") or of DeepSeek-V3 without experts ("mla"), random weights, full CUDA graphs of decode steps:
prefill rate, time to the first token, a decode step of 32 requests of 8192 tokens, and the tokens a second of many
requests at a fixed memory. A case whose first tokens' log-probabilities are not the reference's is not timed; one in
which a kernel is compiled after the engine began is a failure of tersekv.
Acceptance (`vllm_accept.py`): perplexity of a text, windows and sinks, two ranks.
--starts 3: of the speed cases the engine's start alone, three times with empty caches, then once with what the last
one compiled.

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
import statistics
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


def cases(kinds: list[str], formats: list[str], peers: bool, tiny: bool, judged: bool = True) -> list[Case]:
    """The reference of each kind before what is judged by it, if anything is."""
    found = []
    for kind in kinds:
        others = PEERS_OF.get(kind, PEERS[:1]) if peers and not tiny else ()
        made = [Case(kind, *p, tiny) for p in [*((OURS, f) for f in formats), *others]]
        if judged and not any(c.is_reference for c in made):
            made.append(Case(kind, *((OURS, "auto") if tiny else reference_of(kind)), tiny))
        found += sorted(made, key=lambda c: not c.is_reference)
    return found


def one(case: Case, work: Path) -> dict[str, Any]:
    """Run a case in this process."""
    prepare(case)
    return vllm_speed.run(case, work) if case.kind in vllm_speed.MODELS else vllm_accept.run(case, work)


def start(case: Case, work: Path) -> dict[str, Any]:
    """Start a case's engine in this process, and end it."""
    prepare(case)
    return vllm_speed.start(case, work)


def starts(case: Case, work: Path, gpus: str | None, limit: float, times: int) -> dict[str, Any]:
    """Starts with empty caches, and one more with what the last compiled."""
    record: dict[str, Any] = {"starts_s": []}
    for i in range(times + 1):
        if i < times:
            home = Path(tempfile.mkdtemp(dir=work))
        got = child(case, work, gpus, limit, "--start", {"TRITON_CACHE_DIR": str(home / "triton"), "HOME": str(home)})
        if "reason" in got:
            return record | got
        if i < times:
            record |= {"starts_s": [*record["starts_s"], got["start_s"]], "compiled": got["compiled"]}
        record |= {"again_s": got["start_s"], "gpu": got["gpu"]}
    return record | {"start_s": statistics.median(record["starts_s"])}


def child(
    case: Case, work: Path, gpus: str | None, limit: float, what: str = "--case", more_env: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run a case, or with what="--start" its engine's start alone, in a process of its own; what ails it is its
    `reason`."""
    told = json.dumps(asdict(case))
    env = os.environ | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus is not None else {}) | (more_env or {})
    command = [sys.executable, __file__, what, told, "--work", str(work)]
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


def run_all(todo: list[Case], work: Path, kept: Kept, gpus: int, limit: float, times: int = 0) -> list[Case]:
    """References and what needs every GPU alone and first, then the others, one a GPU. Returns what failed."""
    failed: list[Case] = []

    def run(case: Case, devices: str | None) -> None:
        record = starts(case, work, devices, limit, times) if times else child(case, work, devices, limit)
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
    parser.add_argument("--starts", type=int, default=0, metavar="TIMES", help="the engine's start alone, so often")
    for hidden in ("--case", "--start"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if told := args.case or args.start:
        case = Case(**json.loads(told))
        print(RESULT + json.dumps(one(case, args.work) if args.case else start(case, args.work)), flush=True)
        return 0
    work = args.work or Path(tempfile.mkdtemp(prefix="tersekv-vllm-"))
    work.mkdir(parents=True, exist_ok=True)
    kinds = [k for k in args.only or KINDS if k != "ranks" or args.gpus > 1 or args.tiny]
    if args.starts:
        kinds = [k for k in kinds if k in vllm_speed.MODELS]
    todo = cases(kinds, args.formats, not args.no_peers, args.tiny, judged=not args.starts)
    try:
        failed = run_all(todo, work, Kept(args.json), args.gpus, args.seconds, args.starts)
    finally:
        for process in list(RUNNING):
            end(process)
    return int(any(c.backend == OURS for c in failed))


if __name__ == "__main__":
    sys.exit(main())
