"""A kernel that fails in the interpreter is reported as one that fails on a GPU."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import tersekv
from tersekv.backends.host import bind
from tersekv.backends.triton import append
from tersekv.dispatch import plan


@triton.jit
def wrong_kernel(X):
    tl.static_assert(X is None, "want nothing")


def test_the_error_says_the_call_and_the_cause(monkeypatch):
    k = torch.zeros(2, 3, 24, dtype=torch.float16)
    layer = tersekv.PagedKVCache.allocate(1, 4, 5, 3, 24, format="int8_per_token_head")[0]
    for memory in ("_plans", "_recent"):
        monkeypatch.setattr(plan, memory, {})
    launches = bind.LaunchSequence(bind.KernelLaunch(wrong_kernel, (1,), bind.tensor_args(X="k")))
    monkeypatch.setattr(append, "configure", lambda f: launches)
    with pytest.raises(tersekv.KernelError) as raised:
        tersekv.append(k, k, layer, torch.arange(2), backend="triton")
    head, call, versions, why, _ = str(raised.value).splitlines()
    assert head == "append on cpu by backend triton: kernel wrong_kernel cannot be compiled or launched"
    assert call.startswith("  call: k [2, 3, 24] float16, v [2, 3, 24] float16, k_cache [4, 5, 3, 24] int8")
    assert versions.startswith(f"  with: Triton {triton.__version__}, torch ")
    assert why == "  why: AssertionError: want nothing"
