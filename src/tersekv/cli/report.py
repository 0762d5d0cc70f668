"""`--report FILE` of `tersekv verify` and `tersekv bench`: what a machine is, and what came out on it, in one file.

A file has a list of runs, and each run appends one: both commands, and runs under several options, go into one file.
docs/support.md says how to send it; scripts/reports_table.py makes its table of such files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..testing.bench import report as bench_report
from ..testing.bench.engine import Limits
from ..testing.bench.engine import Result as Timed
from ..testing.case_text import text_of
from ..testing.cases import Case

KIND = "tersekv report"
# Of the options: names of files on the machine.
_FILES = {"json", "plot", "report"}
# What nvidia-smi is asked for, of the device alone: MHz, W.
_CLOCKS = "clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit"


def add_option(parser: argparse.ArgumentParser) -> None:
    what = "append this run, its results and what this machine is to FILE, to send (docs: What runs where)"
    parser.add_argument("--report", metavar="FILE", help=what)


def unfit(path: str | None) -> str | None:
    """Why a run cannot be appended to a file; None: it can."""
    if path is None or not os.path.exists(path):
        return None
    if not os.path.isfile(path):  # to open a pipe would wait for its writer
        return f"--report {path}: want a file"
    try:
        _runs(path)
    except (OSError, ValueError) as e:
        return f"--report {path}: want a new file or a report, got one that is none ({e})"
    return None


def append(path: str | None, args: argparse.Namespace, device: torch.device | str, **found: Any) -> None:
    """Append what a command found to the report; without a path nothing."""
    if path is None:
        return
    runs = _runs(path) if os.path.exists(path) else []
    run = {"command": args.command, "options": dict(_options(args)), "machine": machine(torch.device(device)), **found}
    text = json.dumps({"kind": KIND, "runs": [*runs, run]}, indent=1)
    with open(f"{path}.new", "w") as f:
        f.write(text + "\n")
    os.replace(f"{path}.new", path)  # whole, or as it was


def _runs(path: str) -> list[dict[str, Any]]:
    with open(path) as f:
        report = json.load(f)
    if not isinstance(report, dict) or report.get("kind") != KIND or not isinstance(report.get("runs"), list):
        raise ValueError(f'no "kind": "{KIND}"')
    return report["runs"]


def _options(args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """What was asked for, as far as it was set."""
    for name, value in vars(args).items():
        if name != "command" and name not in _FILES and value not in (None, False, ()):
            yield name, text_of(value) if isinstance(value, Case) else value


def machine(device: torch.device) -> dict[str, Any]:
    """Chip, clocks, driver and versions; neither the machine's name nor its user's."""
    of_device = _gpu(device) if device.type == "cuda" else _cpu()
    versions = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    system = f"{platform.system()} {platform.machine()}"
    return {**bench_report.environment(device, ()), **versions, "system": system, **of_device}


def _gpu(device: torch.device) -> dict[str, Any]:
    p = torch.cuda.get_device_properties(device)
    told = {
        "arch": getattr(p, "gcnArchName", "") if torch.version.hip else f"sm_{p.major}{p.minor}",
        "processors": p.multi_processor_count,
        "memory_gib": round(p.total_memory / 2**30, 1),
    }
    # By its identity: torch counts only the devices that this process may see.
    uuid = getattr(p, "uuid", None)
    if torch.version.hip or uuid is None:
        return told
    query = ("nvidia-smi", f"--query-gpu={_CLOCKS}", "--format=csv,noheader,nounits", f"--id=GPU-{uuid}")
    values = (bench_report.command_output(*query) or "").split(", ")
    return told | {"clocks": dict(zip(_CLOCKS.split(","), values, strict=False))}


def _cpu() -> dict[str, Any]:
    return {"arch": torch.backends.cpu.get_cpu_capability(), "processors": os.cpu_count()}


def timed(results: Iterable[Timed], limits: Limits) -> dict[str, Any]:
    """What `tersekv bench` found: beside what the chip itself copies and multiplies."""
    copy, product = limits.copy / 1e12, limits.matmul / 1e12
    return {"copy_tb_s": copy, "matmul_tflop_s": product, "results": [bench_report.outcome(r, limits) for r in results]}
