"""What one process compiled, the next one finds in Triton's cache on disk."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tersekv.backends.host.launch import CompiledKernel

# Every kernel that warm_up would launch on an sm_90, compiled through Triton's cache; prints {kernel: from disk?}.
COMPILE_ALL = """
import json, sys
import torch, triton
sys.path.insert(0, sys.argv[1])
import compile_tools
import tersekv
from tersekv.dispatch import plan

torch.set_num_threads(1)
found = {}
triton.knobs.compilation.listener = lambda *, src, cache_hit, **more: found.setdefault(src.name, []).append(cache_hit)

def compile_only(op, call, backend, way=None):
    p = plan.plan(op, call, backend, arch=90)
    compile_tools.compile_launches(p.run, call, p.config, 90)

for module in ("append", "attention", "mla"):
    __import__(f"tersekv.ops.{module}", fromlist=["dispatch_call"]).dispatch_call = compile_only
kv = tersekv.PagedKVCache.allocate(2, 8, 64, 2, 64, format="int8_per_token_head")
tersekv.warm_up(kv, 8, batch_sizes=(2,), cos_sin_cache=torch.zeros(128, 64))
latent = tersekv.PagedLatentCache.allocate(1, 8, 64, format="fp8_e4m3")
tersekv.warm_up(latent, 16, batch_sizes=(2,), softmax_scale=0.1)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory) -> list[dict[str, list[bool]]]:
    environment = dict(os.environ, TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("kernels")))
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", COMPILE_ALL, str(Path(__file__).parent)],
            env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return found


KERNELS = {"rope_append_kernel", "mla_append_kernel"}
COMBINE = {"combine_kernel", "combine_by_split_metadata_kernel"}  # of Gluon, with Triton 3.6; the portable one


def test_the_first_process_compiles_each_kernel_once_for_all_layers(two_processes):
    first, _ = two_processes
    assert set(first) >= KERNELS
    assert set(first) & COMBINE
    assert any(kernel in ("decode_small_m_or_shared_tiles_kernel", "stream_k_decode_kernel") for kernel in first)
    assert any("mla_decode" in kernel for kernel in first)
    for kernel, from_disk in first.items():
        # COMBINE serves both kinds of decode; a second layer with equal facts launches what the first compiled
        assert from_disk.count(False) <= (2 if kernel in COMBINE else 1), (kernel, from_disk)
        assert from_disk[0] is False


def test_the_second_process_compiles_nothing(two_processes):
    first, second = two_processes
    assert second.keys() == first.keys()
    assert all(all(from_disk) for from_disk in second.values()), second


def test_a_first_launch_is_logged(caplog):
    class Kernel:
        __name__ = "some_kernel"

        def __getitem__(self, grid):
            return lambda *args, **options: None

    with caplog.at_level(logging.DEBUG, logger="tersekv"):
        CompiledKernel(Kernel()).compile_launch_and_keep_launcher((1,), ("an argument",))
    (line,) = [r.getMessage() for r in caplog.records]
    assert re.fullmatch(r"some_kernel ready after 0\.\d{3} s", line)
