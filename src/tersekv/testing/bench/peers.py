"""Other libraries, where they are installed. Each yields `Rival`s.

A call writes into the problem's own output, or returns its output. A build or a call that raises is told beside the
case and ends nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from ..memory import storage_bytes
from . import compat, flashinfer, flashmla, vllm
from .cases import Case
from .data import Problem, Rival, rotations
from .decode import Decode
from .prefill import Prefill, PrefillShape, Prompts
from .shapes import ShapeDecode


class Library(Protocol):
    """`missing` None: it can be used; else why not. any_format: its peers take the values of any cache."""

    any_format: bool

    def missing(self) -> str | None: ...

    def peers(self, problem: Problem) -> Iterator[Rival]: ...


class FlashInfer:
    any_format = False

    def missing(self) -> str | None:
        return not_importable("flashinfer")

    def peers(self, problem: Problem) -> Iterator[Rival]:
        return compat.peers("flashinfer", problem) if problem.case.through else flashinfer.peers(problem)


class VLLM:
    any_format = False

    def missing(self) -> str | None:
        return not_importable("vllm")

    def peers(self, problem: Problem) -> Iterator[Rival]:
        return compat.peers("vllm", problem) if problem.case.through else vllm.peers(problem)


class FlashMLA:
    any_format = False

    def missing(self) -> str | None:
        return flashmla.missing()

    def peers(self, problem: Problem) -> Iterator[Rival]:
        return flashmla.peers(problem)


class SDPA:
    """PyTorch's own attention over a contiguous bf16 copy of the same values: decodes of equal lengths, heads grouped;
    whole prompts of equal lengths, heads repeated."""

    any_format = True

    def missing(self) -> str | None:
        return None

    def peers(self, problem: Problem) -> Iterator[Rival]:
        if flashinfer.is_decode(problem) and not problem.case.through and not problem.case.uneven:
            yield Rival("sdpa on bf16", lambda: self._decode(problem))
        elif isinstance(problem, Prefill) and self.has(problem.prompts):
            yield Rival("sdpa on bf16", lambda: self.prompt(problem))

    @staticmethod
    def _decode(problem: Decode | ShapeDecode) -> list:
        each = [[x.bfloat16().transpose(0, 1) for x in problem.kv(b)] for b in range(problem.case.requests)]
        k, v = (torch.stack([kv[i] for kv in each]) for i in range(2))
        copies = rotations(k.device, storage_bytes(k).nbytes * 2)
        q = problem.q.unflatten(1, (k.shape[1], -1))

        def call(k: torch.Tensor, v: torch.Tensor) -> Callable:
            sdpa = torch.nn.functional.scaled_dot_product_attention
            return lambda: sdpa(q, k, v, scale=problem.scale)

        return [call(k.clone(), v.clone()) for _ in range(copies)]

    @staticmethod
    def has(prompts: Prompts) -> bool:
        """Whether all rows of all requests are new, and as many of each: what needs no mask but SDPA's own."""
        return len({*prompts.new, *prompts.total}) == 1 and not prompts.window

    @staticmethod
    def prompt(problem: Prefill) -> list:
        """The calls for such requests. Repeated heads take the fast kernels on every device."""
        requests, group = len(problem.prompts.new), problem.shape.heads // problem.shape.kv_heads
        q = problem.q.bfloat16().unflatten(0, (requests, -1)).transpose(1, 2).contiguous()

        def repeated(x: torch.Tensor) -> torch.Tensor:
            return x.bfloat16().transpose(0, 1).repeat_interleave(group, 0)

        kv = [[repeated(x) for x in problem.kv(b)] for b in range(requests)]
        k, v = (torch.stack([each[i] for each in kv]) for i in range(2))
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return [lambda: sdpa(q, k, v, is_causal=True, scale=problem.scale).transpose(1, 2).flatten(0, 1)]


LIBRARIES: dict[str, Library] = {"flashinfer": FlashInfer(), "vllm": VLLM(), "flashmla": FlashMLA(), "sdpa": SDPA()}


def default(device: torch.device, cases: Sequence[Case] = ()) -> list[str]:
    """The libraries that a device is compared with, where they are installed; in drawn prefills SDPA too."""
    if device.type == "cpu":
        return ["sdpa"]
    drawn = bool(cases) and all(isinstance(case, PrefillShape) for case in cases)
    return ["flashinfer", *(["sdpa"] if drawn else ["vllm"])]


def not_importable(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    try:
        importlib.import_module(package)
    except Exception as e:  # an installed library may fail in its own imports in any way
        return f"{package} cannot be imported: {type(e).__name__}: {e}"
    return None
