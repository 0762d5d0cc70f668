"""What compile_tools reports of a kernel."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from compile_tools import ARCHS, compile_kernel, compile_launches


@triton.jit
def outer_kernel(p_x, p_y, N: tl.constexpr):
    """A product that keeps N * N numbers alive."""
    i = tl.arange(0, N)
    xy = tl.load(p_x + i)[:, None] * tl.load(p_y + i)[None, :]
    tl.debug_barrier()
    tl.store(p_x + i, tl.sum(xy, 0) + tl.sum(xy * xy, 1))


SIGNATURE = {"p_x": "*fp32", "p_y": "*fp32"}


@pytest.mark.parametrize("arch", ARCHS)
def test_a_small_kernel_does_not_spill(arch):
    kernel = compile_kernel(outer_kernel, SIGNATURE, {"N": 16}, arch)
    assert kernel["n_spills"] == 0
    assert 8 <= kernel["n_regs"] < 64
    assert kernel["name"] == "outer_kernel"
    assert kernel["metadata"].num_warps == 4
    assert ("ptx" in kernel) == isinstance(arch, int)


def test_a_large_kernel_spills():
    assert compile_kernel(outer_kernel, SIGNATURE, {"N": 128}, 90, num_warps=1)["n_spills"] > 0


def test_launches_are_compiled_as_they_would_be_specialised():
    def run(call, config):
        outer_kernel[(config,)](call[0], call[1], 16, num_warps=2)

    x = torch.zeros(33)
    aligned, skewed = (compile_launches(run, (a, x[:16]), 7, 90) for a in (x[:16], x[1:17]))
    assert [k["grid"] for k in aligned] == [(7,)]
    assert aligned[0]["metadata"].num_warps == 2
    assert aligned[0]["ttir"].count("tt.divisibility = 16") == 2
    assert skewed[0]["ttir"].count("tt.divisibility = 16") == 1


@triton.jit
def strided_kernel(p_x, so_h, sk_s, N: tl.constexpr, WIDE: tl.constexpr):
    """A row of a head each; sk_s: of slots in a page, of which 32 bits count the elements."""
    head = tl.program_id(0)
    if WIDE:
        head = head.to(tl.int64)
    tl.store(p_x + (head * so_h + (tl.program_id(1) % N) * sk_s) + tl.arange(0, N), 0.0)


@triton.jit
def strided_rows_kernel(p_x, so_h, N: tl.constexpr, WIDE: tl.constexpr):
    heads = tl.arange(0, N)
    if WIDE:
        heads = heads.to(tl.int64)
    tl.store(p_x + (heads * so_h)[:, None] + tl.arange(0, N)[None, :], tl.zeros([N, N], tl.float32))


@pytest.mark.parametrize("kind", ["i32", "i64"])
@pytest.mark.parametrize("kernel", [strided_kernel, strided_rows_kernel])
def test_strides_that_are_multiplied_in_32_bits_raise(kernel, kind):
    signature = {"p_x": "*fp32", "so_h": kind, "sk_s": "i32"}
    compile_kernel(kernel, signature, {"N": 16, "WIDE": True}, 90)
    if kind == "i64":  # as strides of 2^31 and more come: the product is as wide
        compile_kernel(kernel, signature, {"N": 16, "WIDE": False}, 90)
    else:
        with pytest.raises(AssertionError, match="an index times so_h in 32 bits"):
            compile_kernel(kernel, signature, {"N": 16, "WIDE": False}, 90)
