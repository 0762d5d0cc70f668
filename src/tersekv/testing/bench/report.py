"""Results as lines, as means, and as JSON records."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import geometric_mean

import torch

from ... import __version__
from ...scalars import counted
from .engine import FAILED, OK, RED, UNSUPPORTED, Limits, Peer, Result
from .measure import MOST_SPREAD, MOST_WAITED, ROUNDS

_WHERE = Path(__file__).parent


def line(r: Result, limits: Limits) -> str:
    """One case: time, rate, share of the limit, error, peers."""
    c = r.case
    shape = [f"{c.verb:<17}  {c.format:<19} {c.cell:>11} tokens", *(f"{_spelt(words):<8}" for words in c.sizes)]
    shape += ["uneven"] * c.uneven + ["fast"] * (c.precision == "fast") + ["host"] * c.host
    shape += [f"q {c.query}"] * (c.query != "bf16") + [c.scales] * (c.scales != "apart")
    shape += ["batch invariant"] * c.batch_invariant + ["rotated"] * c.rotated + [c.through] * bool(c.through)
    shape += [f"from {c.source}"] * bool(c.source)
    head = "  ".join(shape)
    if r.status == UNSUPPORTED:
        return f"{head}  not run: {r.reason}"
    if r.us is None:
        return f"{head}  {r.status.upper()}: {r.reason}"
    parts = [head, f"{r.us:>9.2f} us"]
    share = r.share(limits)
    if share is not None:
        rate = speed(r.nbytes / r.us, "B/s") if r.bound(limits) == "bytes" else speed(r.flops / r.us, "FLOP/s")
        parts.append(f"{rate:>12}  {share:4.0%} of limit")
    parts.append(f"error {r.error:.1e}" if r.error else "error 0")
    of = f" on {r.peers_format}" if r.peers_format else ""
    if doubt(r):
        parts.append(doubt(r))
    for p in r.peers:
        if p.us is None:
            continue
        name = f"{p.name}{of}"
        if r.steady and p.steady:
            parts.append(f"{p.us / r.us:.3g}x as fast as {name} ({p.us:.2f} us)")
        else:
            parts.append(f"{name}: {p.us:.2f} us" + (f", {doubt(p)}" if doubt(p) else ""))
    return "  ".join(parts)


def _spelt(words: str) -> str:
    """Of a case's sizes: H is a letter of shapes."""
    return f"{words[2:]} heads" if words.startswith("H ") else words


def doubt(x: Result | Peer) -> str:
    """Why nothing can be said of a time beside another; empty: it is steady."""
    if x.steady:
        return ""
    why = [f"runs differ by {x.spread:.0%}"] if x.spread > MOST_SPREAD else []
    why += [f"threads waited for a core {x.waited:.0%} of their time"] * (x.waited > MOST_WAITED)
    return f"UNSTEADY, {' and '.join(why)}"


def advice(results: Iterable[Result], device: torch.device) -> Iterator[str]:
    """How many times cannot be compared, and what would help."""
    results = list(results)
    times = sum((r.us is not None) + sum(p.us is not None for p in r.peers) for r in results)
    unsteady = sum(r.unsteady_times for r in results)
    if not unsteady:
        return
    yield (
        f"{unsteady} of {counted(times, 'time')} unsteady, {ROUNDS} times over: runs differ by more than "
        f"{MOST_SPREAD:.0%}, or threads waited for a core more than {MOST_WAITED:.0%} of their time. No ratio is made "
        "of them. What helps:"
    )
    if device.type == "cuda":
        yield "  no other process on this GPU (nvidia-smi), and fixed clocks (nvidia-smi --lock-gpu-clocks=...)"
        return
    load = f" (load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs)" if hasattr(os, "getloadavg") else ""
    yield f"  fewer other processes on this machine{load}, and fixed clocks"
    yield "  OMP_WAIT_POLICY=passive in the environment: threads that wait for others then leave their core"


def notes(r: Result) -> Iterator[str]:
    """Why a peer of the case has no time."""
    if not r.peers_format:
        for p in r.peers:
            if p.us is None:
                yield f"    {p.name}: {p.reason}"


def speed(per_us: float, unit: str) -> str:
    """Bytes or FLOP per microsecond, to read."""
    return f"{per_us / 1e6:.3g} T{unit}" if per_us >= 1e5 else f"{per_us / 1e3:.3g} G{unit}"


def tb_s(r: Result) -> float:
    return r.nbytes / (r.us or math.inf) / 1e6


def tflop_s(r: Result) -> float:
    return r.flops / (r.us or math.inf) / 1e6


def summary(results: Sequence[Result], limits: Limits) -> Iterator[str]:
    """Geometric means by operation and format, every case that a peer wins, and counts."""
    groups: dict[tuple[str, ...], list[Result]] = defaultdict(list)
    for r in results:
        if r.us is not None:
            more = ["host"] * r.case.host + ["batch invariant"] * r.case.batch_invariant + ["rotated"] * r.case.rotated
            more += [r.case.through] * bool(r.case.through) + [f"from {r.case.source}"] * bool(r.case.source)
            more += [r.case.lists] * bool(r.case.lists)
            key = (r.case.verb, r.case.format, *more)
            groups[key].append(r)
    width = max((len(" ".join(key)) for key in groups), default=0)
    if groups:
        yield "geometric means"
    for key, group in groups.items():
        parts = [f"  {' '.join(key):<{max(width, 34)}} {counted(len(group), 'case'):>9}"]
        shares = [s for r in group if (s := r.share(limits)) is not None]
        if shares:
            parts.append(f"{geometric_mean(shares):4.0%} of limit")
        ratios = [x for r in group if (x := r.ratio) is not None]
        if ratios:
            parts.append(f"{geometric_mean(ratios):.3g}x as fast as the best peer ({counted(len(ratios), 'case')})")
        yield "  ".join(parts)
    for option in ("batch_invariant", "rotated"):
        costs = cost_of(option, results)
        if costs:
            worst = max(costs, key=costs.__getitem__)
            yield (
                f"{option.replace('_', ' ')}: {geometric_mean(costs.values()):.3g}x the time of the same calls without "
                f"it ({counted(len(costs), 'case')}), at most {costs[worst]:.3g}x: {worst}"
            )
    yield from beside_dense(results)
    lost = list(losses(results))
    if lost:
        yield "slower than a peer"
    for r in lost:
        best = r.best_peer
        if best is not None and best.us and r.us:
            yield f"  {r.case.id}: {r.us:.2f} us, {best.name} {best.us:.2f} us ({best.us / r.us:.3g}x as fast)"
    count = {s: sum(r.status == s for r in results) for s in (OK, UNSUPPORTED, RED, FAILED)}
    yield f"{count[OK]} timed, {count[UNSUPPORTED]} not run, {count[RED]} red, {count[FAILED]} failed"


def cost_of(option: str, results: Iterable[Result]) -> dict[str, float]:
    """Time of each case with the option over that of the same case without it, by its id."""
    us = {r.case: r.us for r in results if r.us is not None and r.steady}
    plain = {case: us.get(replace(case, batch_invariant=False, rotated=False)) for case in us if getattr(case, option)}
    return {case.id: us[case] / x for case, x in plain.items() if x is not None}


def beside_dense(results: Iterable[Result]) -> Iterator[str]:
    """Of decodes over lists of blocks, by format and lists: keys per second over those of the dense decode."""
    timed = {r.case: r for r in results if r.us is not None and r.steady and r.flops}
    groups: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for case, r in timed.items():
        dense = timed.get(case.dense) if case.dense else None
        if dense is not None:  # their FLOP are as their keys
            groups[case.format, case.lists][case.id] = tflop_s(r) / tflop_s(dense)
    if groups:
        yield "keys per second over those of the dense decode over as many keys"
    for (format, lists), ratios in groups.items():
        worst = min(ratios, key=ratios.__getitem__)
        yield (
            f"  {format:<19} {lists:<15}  {geometric_mean(ratios.values()):.3g}x ({counted(len(ratios), 'case')}), "
            f"at least {ratios[worst]:.3g}x: {worst}"
        )


def losses(results: Iterable[Result]) -> Iterator[Result]:
    for r in results:
        if r.ratio is not None and r.ratio < 1:
            yield r


def record(r: Result, limits: Limits, where: dict) -> dict:
    """One JSON line: the case, what came out, and the environment."""
    limit = {"copy_tb_s": limits.copy / 1e12, "matmul_tflop_s": limits.matmul / 1e12}
    return {**outcome(r, limits), **limit, **where}


def outcome(r: Result, limits: Limits) -> dict:
    """The case, and what came out."""
    share, timed = r.share(limits), r.us is not None and not r.case.host
    return {
        **r.case.as_dict(),
        "status": r.status,
        "reason": r.reason,
        "us": r.us,
        "spread": r.spread,
        "waited": r.waited,
        "bytes": r.nbytes,
        "flops": r.flops,
        "tb_s": tb_s(r) if timed else None,
        "tflop_s": tflop_s(r) if timed and r.flops else None,
        "bound": r.bound(limits),
        "share_of_limit": share,
        "error": r.error if r.error is None or math.isfinite(r.error) else str(r.error),
        "peers": {
            p.name: {
                "us": p.us,
                "ratio": p.us / r.us if r.steady and p.steady else None,
                "spread": p.spread,
                "waited": p.waited,
            }
            if p.us and r.us
            else {"us": p.us, "reason": p.reason}
            for p in r.peers
        },
        "peers_format": r.peers_format,
    }


def environment(device: torch.device, libraries: Sequence[str]) -> dict:
    """What a stored result was made with."""
    return {
        "chip": chip(device),
        "driver": command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
        if device.type == "cuda"
        else None,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "tersekv": __version__,
        "versions": {name: v for name in libraries if (v := _version(name) or _version(f"{name}-python"))},
        "python": platform.python_version(),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
    }


def chip(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    names = cpuinfo.read_text().split("model name") if cpuinfo.exists() else []
    name = names[1].splitlines()[0].strip(" \t:") if len(names) > 1 else platform.processor() or platform.machine()
    return f"CPU {name}"


def commit() -> str | None:
    """The commit that this file is checked out from; "+" where files of the package differ from it."""
    tracked = command_output("git", "-C", str(_WHERE), "ls-files", "--error-unmatch", "report.py")
    head = command_output("git", "-C", str(_WHERE), "rev-parse", "--short", "HEAD") if tracked else None
    if not head:
        return None
    package = str(_WHERE.parent.parent)
    return head + ("+" if command_output("git", "-C", package, "status", "--porcelain", "-uno", "--", ".") else "")


def command_output(*argv: str) -> str | None:
    """What a program prints; None: it is not there, or fails."""
    if shutil.which(argv[0]) is None:
        return None
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20)
    except (subprocess.TimeoutExpired, OSError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
