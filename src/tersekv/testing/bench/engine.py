"""Judge, then time, then the peers: one Result per case. Nothing is timed that is wrong."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from ...errors import UnsupportedError
from . import compat, measure, peers
from .append import Append
from .block_sparse import BlockSparse
from .cases import Case
from .data import Problem
from .decode import Branch, Decode, MLADecode
from .index import IndexScores, IndexSelect, IndexTopk
from .merge_states import MergeStates
from .mla_prefill import MLAPrefill
from .mla_project import MLAProject
from .prefill import Prefill
from .shapes import ShapeDecode
from .sparse import Sparse
from .transcode import Transcode

OK, UNSUPPORTED, RED, FAILED = "ok", "unsupported", "red", "failed"
PROBLEMS: dict[str, Callable[[Case, torch.device, str | None], Problem]] = {
    "append": Append,
    "rope_append": Append,
    "mla_append": Append,
    "decode": Decode,
    "prefill": Prefill,
    "merge_states": MergeStates,
    "mla_decode": MLADecode,
    "mla_decode_branch": Branch,
    "mla_prefill": MLAPrefill,
    "mla_project": MLAProject,
    "transcode": Transcode,
    "index_scores": IndexScores,
    "index_topk": IndexTopk,
    "index_select": IndexSelect,
    "sparse": Sparse,
    "sparse_prefill": Sparse,
    "block_decode": BlockSparse,
    "block_prefill": BlockSparse,
    "shape": ShapeDecode,  # type: ignore[dict-item]
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the device does at best: bytes per second copied, FLOP per second of a bf16 product."""

    copy: float
    matmul: float

    @staticmethod
    def of(device: torch.device) -> Limits:
        return Limits(measure.copy_rate(device), measure.matmul_rate(device))


@dataclass(frozen=True, slots=True)
class Peer:
    """Another library on the same case. reason: why it has no time; spread, waited: see `measure.Timing`."""

    name: str
    us: float | None = None
    error: float | None = None
    reason: str = ""
    spread: float = 0.0
    waited: float = 0.0

    @property
    def steady(self) -> bool:
        return steady(self)


@dataclass(frozen=True, slots=True)
class Result:
    """One case. peers_format: the format of the peers, where none of them has the case's own; spread, waited: see
    `measure.Timing`."""

    case: Case
    status: str
    us: float | None = None
    error: float | None = None
    reason: str = ""
    nbytes: int = 0
    flops: int = 0
    peers: tuple[Peer, ...] = field(default=())
    peers_format: str | None = None
    spread: float = 0.0
    waited: float = 0.0

    @property
    def steady(self) -> bool:
        return steady(self)

    @property
    def unsteady_times(self) -> int:
        """How many of its times, the peers' included, no comparison stands on."""
        return (not self.steady) + sum(not p.steady for p in self.peers)

    @property
    def best_peer(self) -> Peer | None:
        timed = [p for p in self.peers if p.us is not None]
        return min(timed, key=lambda p: p.us or 0.0, default=None)

    @property
    def ratio(self) -> float | None:
        """The best peer's time over ours; None: one of them has none, or none that is steady."""
        best = self.best_peer
        if best is None or not (self.us and best.us and self.steady and best.steady):
            return None
        return best.us / self.us

    def bound(self, limits: Limits) -> str:
        """What the case is bound by at best: "bytes" or "flops"."""
        return "bytes" if self.nbytes / limits.copy >= self.flops / limits.matmul else "flops"

    def share(self, limits: Limits) -> float | None:
        """Share of the limit that is reached: the time that the bytes or the FLOP take at best, over the time."""
        if self.us is None or self.case.host:
            return None
        return max(self.nbytes / limits.copy, self.flops / limits.matmul) * 1e6 / self.us


def steady(x: Peer | Result) -> bool:
    return x.us is None or measure.Timing(x.us, x.spread, x.waited).steady


def bench(
    cases: Iterable[Case], device: torch.device, libraries: Sequence[str] = (), backend: str | None = None
) -> Iterator[Result]:
    """Run the cases one by one. Peers over fp8_e4m3 count beside those of other formats of 8 bits or less; where these
    have none, they stand in."""
    of_e4m3: dict[Case, tuple[Peer, ...]] = {}
    for case in cases:
        result = run(case, device, libraries, backend)
        twin = replace(case, format="fp8_e4m3", precision="exact", query="bf16", scales="apart", batch_invariant=False)
        if case == twin and result.best_peer is not None:
            of_e4m3[twin] = result.peers
        stands_in = result.status == OK and not (case.batch_invariant or case.through)
        if stands_in and case.format not in ("bf16", "fp8_e4m3") and twin in of_e4m3:
            if result.best_peer is None:
                result = replace(result, peers=of_e4m3[twin], peers_format="fp8_e4m3")
            else:
                own = {p.name for p in result.peers}  # a peer that reads a copy in 16 bits is here already
                beside = (replace(p, name=f"{p.name} on fp8_e4m3") for p in of_e4m3[twin] if p.name not in own)
                result = replace(result, peers=(*result.peers, *beside))
        yield result


def run(case: Case, device: torch.device, libraries: Sequence[str] = (), backend: str | None = None) -> Result:
    """One case. An error that is no UnsupportedError is told in the result, and the other cases are to run."""
    result = Result(case, FAILED)
    try:
        problem = problem_of(case, device, backend)
        result = replace(result, nbytes=problem.nbytes, flops=problem.flops)
        problem.poison()
        error = problem.error(problem.calls[0]())
        result = replace(result, error=error)
        if not error <= problem.limit:
            wrong = f"want error <= {problem.limit:g} before anything is timed, got {error:.2e}"
            return replace(result, status=RED, reason=wrong)
        result = replace(result, status=OK, **time_of(problem.calls, case, device)._asdict())
        # A peer promises nothing of the kind; of its time beside the same case without the option there is a line.
        return replace(result, peers=() if case.batch_invariant else tuple(rivals(problem, device, libraries)))
    except UnsupportedError as e:
        return replace(result, status=UNSUPPORTED, reason="; ".join(line.strip() for line in str(e).splitlines()))
    except Exception as e:
        return replace(result, status=FAILED, us=None, reason=first_line(e))
    finally:
        problem = None  # type: ignore[assignment]
        release(device)


def problem_of(case: Case, device: torch.device, backend: str | None) -> Problem:
    if case.through:
        return compat.through(case, PROBLEMS.get(case.op), device, backend)
    return PROBLEMS[case.op](case, device, backend)


def time_of(calls: Sequence[measure.Call], case: Case, device: torch.device) -> measure.Timing:
    once = measure.host_time if case.host else measure.device_time
    return measure.steadiest(lambda: once(calls, device))


def peers_of(case: Case, device: torch.device, libraries: Sequence[str]) -> tuple[Peer, ...]:
    """The peers of a case alone."""
    problem = None
    try:
        problem = problem_of(case, device, None)
        return tuple(rivals(problem, device, libraries))
    except Exception as e:
        return (Peer("peers", reason=first_line(e)),)
    finally:
        problem = None
        release(device)


def rivals(problem: Problem, device: torch.device, libraries: Sequence[str]) -> Iterator[Peer]:
    """Every peer that has the problem's case, judged before it is timed."""
    for library in libraries:
        for name, build, back, limit in peers.LIBRARIES[library].peers(problem):
            try:
                calls = build()
                problem.poison()
                result = calls[0]()
                error = problem.error(result if back is None else back(result))
                if error <= (problem.peer_limit if limit is None else limit):
                    yield Peer(name, error=error, **time_of(calls, problem.case, device)._asdict())
                else:
                    yield Peer(name, None, error, f"its result is wrong: error {error:.2e}")
            except Exception as e:
                yield Peer(name, reason=first_line(e))
            calls = []
            release(device)


def first_line(e: Exception) -> str:
    lines = [line for line in str(e).splitlines() if line.strip()]
    return f"{type(e).__name__}: {lines[0].strip()[:300] if lines else ''}"


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
