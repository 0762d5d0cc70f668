"""FlashMLA's sparse decode out of vLLM's wheel: one shared library on Python's path, which needs nothing but torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from .data import Problem, Rival
from .sparse import Sparse

FILE = "_flashmla_C.abi3.so"
_HEADS, _STEP = (64, 128), 64  # its kernels have so many heads, and lists in such steps
_OF_ROUNDING = 1e-2  # it rounds code × scale to bf16


def library() -> Path | None:
    """The file, in a directory of Python's path or in the package `vllm` there."""
    places = (Path(room or ".") / name for room in sys.path for name in (FILE, f"vllm/{FILE}"))
    return next((path for path in places if path.is_file()), None)


def missing() -> str | None:
    """Why it cannot be called; None: it can."""
    path = library()
    if path is None:
        return f"Python's path has no {FILE}, which vLLM's wheel holds"
    try:
        torch.ops.load_library(str(path))
    except Exception as e:  # of another version of torch or CUDA
        return f"{path} cannot be loaded: {type(e).__name__}: {e}"
    return None


def peers(problem: Problem) -> Iterator[Rival]:
    if not isinstance(problem, Sparse) or problem.format.name != "fp8_ds_mla" or problem.indices.shape[1] % _STEP:
        return
    if problem.case.requests and not problem.case.uneven:  # decodes whose lists are full
        heads = problem.q.shape[1]
        if heads <= _HEADS[-1]:
            yield Rival("flashmla", lambda: _sparse_decode(problem), lambda out: out[:, 0, :heads], _OF_ROUNDING)


def _sparse_decode(p: Sparse) -> list[Callable[[], Tensor]]:
    """A call for each page table. Its first call makes a plan, which the later ones take."""
    layer, page, heads = p.layer, p.layer.page_size, p.q.shape[1]
    padded = next(n for n in _HEADS if n >= heads)
    q = torch.nn.functional.pad(p.q, (0, 0, 0, padded - heads))[:, None]
    codes = layer.ckv.view(torch.float8_e4m3fn)
    records = codes.as_strided((*codes.shape[:2], 1, codes.stride(1)), (*codes.stride()[:2], codes.stride(1), 1))
    listed = p.indices.long()

    def call(table: Tensor) -> Callable[[], Tensor]:
        slots = (table.long().gather(1, listed // page) * page + listed % page).to(torch.int32)[:, None]
        plan: list[Tensor | None] = [None, None]

        def run() -> Tensor:
            out, _, *plan[:] = torch.ops._flashmla_C.sparse_decode_fwd(
                q, records, slots, None, None, *plan, None, None, None, layer.kv_lora_rank, p.scale, None
            )
            return out

        return run

    return [call(table) for table in p.tables]
