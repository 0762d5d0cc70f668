"""FlashMLA's and DeepGEMM's own tests over `tersekv.compat`: cases drawn from theirs, judged by their references.

    python benchmarks/deepseek_suites.py CHECKOUT            # of github.com/deepseek-ai/FlashMLA, or DeepGEMM
    python benchmarks/deepseek_suites.py CHECKOUT --device cpu --cases 10 --tokens 5000

Their files are imported from CHECKOUT, with our functions as the module `flash_mla` or `deep_gemm`. FlashMLA's cases of
512 columns are theirs of records of 584 bytes. DeepGEMM's tests are those of the indexer's scores, as on Hopper; cases
of more tokens are made smaller. Prints a line a case that fails and the counts; exits with 1 if one failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import random
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tersekv.compat import deep_gemm, flash_mla
from tersekv.errors import UnsupportedError

Cases = list[tuple[str, Any, Callable[[Any], bool]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of FlashMLA or DeepGEMM")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--cases", type=int, default=60, help="cases of each test")
    parser.add_argument("--tokens", type=int, default=1 << 20, help="most cached tokens and listed entries of a case")
    parser.add_argument("--seconds", type=float, default=600, help="no case begins later")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", help="comma-separated; default: all")
    args = parser.parse_args()
    tests = (deep_gemm_tests if (args.checkout / "deep_gemm").is_dir() else flash_mla_tests)(args)
    dice, begun, failed = random.Random(args.seed), time.time(), 0
    for test in args.tests.split(",") if args.tests else tests:
        every, counts = tests[test](), Counter[str]()
        for name, case, run in dice.sample(every, min(args.cases, len(every))):
            if time.time() - begun > args.seconds:
                break
            how, message = judged(run, case)
            counts[how] += 1
            if how == "failed":
                print(f"failed: {name} {case}\n{message}")
        failed += counts["failed"]
        print(f"{test}: {len(every)} cases fit, {counts.total()} run: {dict(counts)}", flush=True)
    sys.exit(bool(failed))


class OnCPU(TorchFunctionMode):
    """What asks for "cuda" by name is made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"device": "cpu"} if kwargs.get("device") == "cuda" else kwargs))


def without_cuda(device: str) -> None:
    """What their files call and a CPU has not."""
    if torch.device(device).type == "cpu":
        for name in ("synchronize", "empty_cache", "manual_seed", "reset_peak_memory_stats"):
            setattr(torch.cuda, name, lambda *_: None)
        torch.Tensor.cuda = lambda x, *_: x  # type: ignore[method-assign,assignment]
        OnCPU().__enter__()


def judged(run: Callable[[Any], bool], case: Any) -> tuple[str, str]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), torch.inference_mode():
            return ("passed" if run(case) else "failed"), said.getvalue()
    except UnsupportedError as e:
        return f"refused ({str(e).splitlines()[0][:80]})", ""
    except Exception as e:
        return "failed", f"{said.getvalue()}{type(e).__name__}: {e}"


def flash_mla_tests(args: argparse.Namespace) -> dict[str, Callable[[], Cases]]:
    sys.modules["flash_mla"] = flash_mla
    for name in ("rich", "rich.console", "rich.table"):  # which print tables
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
            continue
        sys.modules[name] = types.ModuleType(name)
    torch.set_default_device(args.device)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_float32_matmul_precision("high")
    without_cuda(args.device)
    sys.path.insert(0, str(args.checkout / "tests"))

    def fitting(cases: Callable[[], Cases]) -> Callable[[], Cases]:
        return lambda: [x for x in cases() if size(x[1]) <= args.tokens]

    return {"decode": fitting(decode), "prefill": fitting(prefill), "dense": fitting(dense)}


def size(case: Any) -> int:
    """Cached tokens, or entries of lists, whichever are more."""
    b = getattr(case, "b", None) or (case.decode.b if case.decode else 1)
    s_kv = case.s_k if hasattr(case, "s_k") else case.s_kv
    return max(b * s_kv * (2 if b > 1 else 1), b * case.s_q * getattr(case, "topk", 0))


def decode() -> Cases:
    theirs = importlib.import_module("test_flash_mla_sparse_decoding")
    each = (replace(x.to_test_param(), num_runs=0, check_correctness=True) for x in theirs.gen_testcase())
    return [("decode", x, lambda x: theirs.test_flash_mla(x).is_correct) for x in each]


def prefill() -> Cases:
    theirs = importlib.import_module("test_flash_mla_sparse_prefill")

    def each() -> Iterator[Any]:
        shapes = [(128, 128), (592, 128), (1840, 256), (1592, 384), (1521, 512), (95, 128), (153, 256), (114, 384)]
        shapes += [(32, 2048), (64, 8192), (4321, 4096)]
        for d, h, s, (s_kv, topk) in itertools.product((512, 576), (64, 128), (1, 62, 213), shapes):
            for sink, lens, invalid in itertools.product((False, True), repeat=3):
                yield theirs.TestParam(
                    s, s_kv, topk, h_q=h, d_qk=d, num_runs=0, have_attn_sink=sink, have_topk_length=lens,
                    is_all_indices_invalid=invalid,
                )  # fmt: skip

    return [("prefill", x, theirs.run_test) for x in each()]


def dense() -> Cases:
    theirs = importlib.import_module("test_flash_mla_dense_decoding")

    def run(x: Any) -> bool:
        theirs.test_flash_mla(x)  # which asserts
        return True

    each = itertools.product(
        (1, 2, 6, 64), (1, 2, 4), (20, 140, 4096), (False, True), (False, True), (False, True),
        (1, 3, 9, 63, 64, 126, 128),
    )  # fmt: skip
    return [
        ("dense", theirs.TestParam(b, s_q, s_k, varlen, causal, False, zero, h_q=h), run)
        for b, s_q, s_k, varlen, causal, zero, h in each
    ]


def deep_gemm_tests(args: argparse.Namespace) -> dict[str, Callable[[], Cases]]:
    """Their helpers in Python are theirs; of what is compiled, our functions are here, and nothing else."""
    module = types.ModuleType("deep_gemm")
    module.__path__ = [str(args.checkout / "deep_gemm")]
    vars(module).update({name: getattr(deep_gemm, name) for name in deep_gemm.__all__}, get_num_sms=lambda: 132)
    compiled: Any = types.ModuleType("deep_gemm._C")
    compiled.__getattr__ = lambda name: None if name.startswith("__") else no_such_function
    sys.modules |= {"deep_gemm": module, "deep_gemm._C": compiled}
    torch.set_float32_matmul_precision("highest")
    without_cuda(args.device)
    sys.path.insert(0, str(args.checkout / "tests"))
    theirs: Any = importlib.import_module("test_attention")
    theirs.get_arch_major = lambda: 9
    theirs.bench_kineto = lambda *_, **__: (1.0, 1.0)

    def cases(test: str, fit: Callable[[tuple], tuple]) -> Cases:
        every: list[tuple] = []
        theirs.sample_mqa_cases = lambda name, cases: every.extend(cases) or []
        run = getattr(theirs, f"test_{test}")
        run()

        def one(case: tuple) -> bool:
            theirs.sample_mqa_cases = lambda name, cases: [case]
            run()  # which asserts
            return True

        return [(test, x, one) for x in dict.fromkeys(map(fit, every))]

    def ragged(case: tuple) -> tuple:
        *before, rows, keys, heads, dim, whole = case
        times = max(1, keys // args.tokens)
        return *before, max(2, rows // times), keys // times, heads, dim, whole

    def paged(case: tuple) -> tuple:
        *before, batch, next_n, most, heads, dim, keys = case
        keys = min(keys, args.tokens)
        return *before, max(1, min(batch, args.tokens // keys)), next_n, most, heads, dim, keys

    return {
        name: lambda n=name, f=fit: cases(n, f) for name, fit in (("mqa_logits", ragged), ("paged_mqa_logits", paged))
    }


def no_such_function(*args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError("deep_gemm._C: not here")


if __name__ == "__main__":
    main()
