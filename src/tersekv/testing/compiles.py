"""Compiles the kernels of a backend's operation for a chip that need not be there: does this Triton compile them?"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from typing import Any

from ..dispatch import plan
from .cases import Case
from .make import make

# Calls that between them reach every kernel: few, since each takes seconds.
_MLA = Case("mla_decode", "fp8_e4m3", "", heads=1, group=16, page=64)
_SOME, _MANY = (8,) * 4, (40,) * 4  # query rows: of a decode, of a prefill
_LONG = (4096, *(1,) * 7)
PROBES = {
    "decode": (
        Case("decode", "fp8_e4m3", "", heads=8, dim=128, page=64),
        Case("decode", "nvfp4", "", heads=8, dim=128, page=64),
        Case("decode", "int8_per_token_head", "", heads=2, group=8, dim=128, page=64, lens=_SOME, q_lens=_SOME),
        Case("decode", "fp8_e4m3", "", heads=2, group=8, dim=256, page=64, lens=_SOME, q_lens=_SOME),
    ),
    "prefill": (
        Case("prefill", "fp8_e4m3", "", heads=8, dim=128, page=64, lens=_MANY, q_lens=_MANY),
        Case("prefill", "int8_per_token_head", "", heads=2, group=8, dim=128, page=64, lens=_MANY, q_lens=_MANY),
    ),
    "mla_decode": (
        _MLA,
        replace(_MLA, group=128, lens=(400,) * 40),
        replace(_MLA, format="bf16"),
        replace(_MLA, format="bf16", group=128, lens=(400,) * 40),
    ),
    "mla_decode_branch": (
        Case("mla_decode_branch", "fp8_e4m3", "", heads=1, group=128, page=64, dim_v=128, lens=(400,)),
    ),
    "mla_prefill": (
        Case("mla_prefill", "bf16", "", heads=1, group=16, page=64, dim_v=128, lens=_LONG, q_lens=_LONG),
    ),
    "index_topk": (Case("index_topk", "fp32", "", lens=(9000, 40), top=9),),
    "index_select": (
        Case("index_select", "index_fp8", "", lens=(9000, 40), q_lens=(2, 1), ragged=True, dim=128, heads=32, page=64,
             dtype="float8_e4m3fn", top=9),
    ),
}  # fmt: skip


def main(op: str) -> None:
    """Say it as a line of JSON: this runs in a process of its own."""
    sys.stdout.write(json.dumps({"reason": why_not(op)}) + "\n")


def why_not(op: str, backend: str = "gluon", arch: int = 90, tried: set[str] | None = None) -> str | None:
    """Why a kernel of the operation does not compile; None: all do. Nothing is launched, and no GPU is needed.

    tried: gets the names of the kernels
    """
    tried = set() if tried is None else tried
    try:
        module: Any = plan._module(backend, op)
        compile_only: Any = importlib.import_module("tersekv.backends.host.compile_only")
        with compile_only.compiling(arch, lambda fn, _: tried.add(f"{fn.__module__}.{fn.__name__}")):
            for case in PROBES[op]:
                call = make(case)
                f = plan.facts(op, call, arch)
                reason = module.why_not(f)
                assert reason is None, reason
                module.run(call, module.configure(f))
    except Exception as e:  # of whatever kind: it would reach the caller of the operation
        return _root_cause(e)
    return None


def _root_cause(e: BaseException) -> str:
    """The first cause, in a line."""
    while (cause := e.__cause__ or e.__context__) is not None:
        e = cause
    said = str(e).strip() or "nothing was said"
    return f"{type(e).__name__}: {said.splitlines()[-1].strip()}"
