"""A pytest plugin of peer_suites.py: puts tersekv.compat into a peer's package, and writes down what comes of items."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import random
import re
import sys
import time
import traceback
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import peer_stand_ins as stand_ins
import pytest

import tersekv
from tersekv import UnsupportedError

OURS = str(Path(tersekv.__file__).parent)
# The peer's modules in which a function is found -> the module of ours that has it.
REPLACED = {
    "flashinfer": ("tersekv.compat.flashinfer", ["flashinfer", *(f"flashinfer.{m}" for m in (
        "cascade", "decode", "mla", "page", "rope", "xqa",
    ))]),
    "vllm": ("tersekv.compat.vllm", ["vllm.v1.attention.ops.triton_reshape_and_cache_flash"]),
}  # fmt: skip


class Suite:
    """One worker's share of a peer's suite."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told, self.calls, self.names = told, 0, set()
        self.log = Path(told["log"]).open("a", buffering=1)  # noqa: SIM115 - open as long as the process
        self.done = {
            r["id"] for r in map(json.loads, Path(told["log"]).read_text().splitlines()) if r["event"] == "end"
        }
        self.item = ""

    def write(self, **record: Any) -> None:
        self.log.write(json.dumps(record) + "\n")

    def replace(self) -> None:
        """Every function of ours in place of the peer's of the same name."""
        ours, modules = REPLACED[self.told["peer"]]
        ours = importlib.import_module(ours)
        for module in map(importlib.import_module, modules):
            for name in ours.__all__ if hasattr(ours, "__all__") else dir(ours):
                function = getattr(ours, name)
                if inspect.isfunction(function) and hasattr(module, name) and not name.startswith("_"):
                    setattr(module, name, self.counted(function))
                    self.names.add(name)

    def counted(self, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return function(*args, **kwargs)

        return call

    @functools.cache  # noqa: B019 - lives as long as the process
    def calls_ours(self, function: Any) -> bool:
        return bool(re.search(rf"\b({'|'.join(self.names)})\(", inspect.getsource(inspect.unwrap(function))))


# Parameters of the peers' tests that reach a kernel as numbers, or not at all.
SIZES = {"batch_size", "enable_pdl", "kv_scale", "max_in_kv_len", "num_tokens", "q_scale", "scale", "seed", "seq_len"}
SUITE: Suite
STARTED = time.time()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--peer-config")


def pytest_configure(config: pytest.Config) -> None:
    global SUITE
    told = json.loads(Path(config.getoption("--peer-config")).read_text())
    SUITE = Suite(told)
    if told["device"] == "cpu":
        stand_ins.cuda_is_the_cpu()
    if told["peer"] == "vllm":
        stand_ins.vllm(Path(told["checkout"]))
    else:
        stand_ins.every_chip()
        if told["references"] == "dense":
            stand_ins.dense_references()
    SUITE.replace()
    sys.path.insert(0, told["checkout"])  # behind the import of the peer, which lies there too


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    told = SUITE.told
    files = {}
    for item in items:
        files.setdefault(item.nodeid.split("::")[0], Counter())["items"] += 1
    ours = [item for item in items if SUITE.calls_ours(item.function)]
    chosen = in_turn(ours, random.Random(told["seed"]), told["sample"] or len(ours))
    for name, some in (("ours", ours), ("chosen", chosen)):
        for item in some:
            files[item.nodeid.split("::")[0]][name] += 1
    SUITE.write(
        event="collected", files={n: {k: c[k] for k in ("items", "ours", "chosen")} for n, c in files.items()},
        versions=stand_ins.versions(told["peer"]), seconds=round(time.time() - STARTED, 1),
    )  # fmt: skip
    items[:] = [i for i in chosen if share(i) % told["shares"] == told["share"] and i.nodeid not in SUITE.done]


def share(item: pytest.Item) -> int:
    """Equal for items that run the same compiled kernels, so that one worker compiles them and no other waits."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return zlib.crc32(
        repr([item.function.__name__, *[(k, params[k]) for k in sorted(params) if k not in SIZES]]).encode()
    )


def in_turn(items: list[pytest.Item], order: random.Random, most: int) -> list[pytest.Item]:
    """Up to `most` items of each test function, drawn at random: a first one of each, a second one of each, and so on,
    so that whatever the time suffices for, it is a sample of every test."""
    drawn: dict[Any, int] = {}
    order.shuffle(items)
    turns = []
    for item in items:
        turn = drawn[item.function] = drawn.get(item.function, 0) + 1
        if turn <= most:
            turns.append((turn, item))
    return [item for _, item in sorted(turns, key=lambda pair: pair[0])]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if time.time() > SUITE.told["deadline"]:
        item.session.shouldstop = "the time is over"
        return True
    SUITE.item, SUITE.calls = item.nodeid, 0
    SUITE.write(event="start", id=item.nodeid)
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Any:
    report = yield
    if report.when == "teardown" and report.passed:
        return report
    if report.when == "setup" and report.passed:
        return report
    outcome, reason = judged(report, call)
    SUITE.write(event="end", id=item.nodeid, outcome=outcome, reason=reason)
    if "CUDA error" in reason:  # of this process nothing else can be believed
        os._exit(SUITE.told["gave_up"])
    return report


def judged(report: pytest.TestReport, call: pytest.CallInfo) -> tuple[str, str]:
    """(outcome, reason) of an item."""
    if report.passed:
        return ("passed", "") if SUITE.calls else ("failed", "passed without a call of a function of ours")
    if report.skipped:
        return "skipped", str(report.longrepr[2]).removeprefix("Skipped: ")
    error = call.excinfo.value
    frames = [f.filename for f in traceback.extract_tb(call.excinfo.tb)]
    text = " ".join(f"{type(error).__name__}: {error}".split())
    within = frames and frames[-1].startswith(OURS)
    if isinstance(error, UnsupportedError) or (
        within and isinstance(error, (ValueError, TypeError)) and re.search(r": want .*, got ", str(error))
    ):
        return "refused", plain(text)
    where = next((f for f in reversed(frames) if "/torch/" not in f and not f.startswith(("<", "/usr"))), "?")
    return "failed", plain(f"{text[:300]} ({Path(where).name})")


def plain(reason: str) -> str:
    """A reason without the numbers that differ from item to item."""
    return re.sub(r"(?<![\w.])-?\d[\d.]*(e[-+]?\d+)?%?", "N", reason)
