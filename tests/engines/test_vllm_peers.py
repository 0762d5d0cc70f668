"""vLLM's Triton kernels as the benchmark's peers: right by its judge, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETER = Path(__file__).parents[1] / "interpreter"
SCRIPT = """
import json, sys
import interpret
interpret.install()
import torch
from tersekv.testing.bench import data, engine, measure
from tersekv.testing.bench.cases import Case
from tersekv.testing.bench.shapes import Shape
data.ROTATE, measure.device_time = {"cpu": 1.0}, lambda calls, device: measure.Timing(1.0)
cpu, (op, fmt, *sizes) = torch.device("cpu"), sys.argv[1:]
case = Case(op, fmt, *map(int, sizes), heads=8, page=16)
if op == "D 80":
    case = Shape("shape", fmt, *map(int, sizes), heads=8, page=16, kv_heads=2, head_dim=80)
rivals = engine.rivals(engine.problem_of(case, cpu, None), cpu, ["vllm"])
print(json.dumps([(p.name, p.us, p.error, p.reason) for p in rivals]))
"""


@pytest.mark.parametrize(
    ("op", "fmt", "found"),
    [
        ("decode", "fp8_per_token_head", {"vllm triton": 1e-2}),
        ("decode", "int4_per_token_head", {"vllm triton": 1e-2, "vllm turboquant_4bit_nc": 0.25}),
        ("decode", "fp8_e4m3/int4_per_token_head", {"vllm turboquant_k8v4": 2e-2}),
        ("D 80", "fp8_per_token_head", {"vllm triton": 1e-2}),
        ("append", "fp8_per_token_head", {"vllm": 0.02}),
    ],
)
def test_is_right_before_it_is_timed(op, fmt, found):
    """TurboQuant rounds values that were rounded already: its errors are those of its own 4 bits."""
    where = os.pathsep.join([*sys.path, str(INTERPRETER)])
    # An empty list of devices lets vLLM have Triton where no driver is active.
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": where}
    sizes = ("0", "20") if op == "append" else ("2", "40")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, op, fmt, *sizes], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    peers = {name: (us, error, reason) for name, us, error, reason in json.loads(done.stdout.splitlines()[-1])}
    assert peers.keys() == found.keys()
    for name, limit in found.items():
        us, error, reason = peers[name]
        assert us == 1.0, reason
        assert error <= limit
