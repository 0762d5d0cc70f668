"""mla_project compiled for chips that are not there."""

from __future__ import annotations

import pytest
import torch
from compile_tools import ARCHS, compile_launches, record

from tersekv import plan
from tersekv.backends.triton import mla_project
from tersekv.calls import MLAProjectCall


def call_of(tokens: int = 64, fp8: bool = True, columns: int = 128, rows: int = 512) -> MLAProjectCall:
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    weight, scale = torch.empty(16, rows, columns, dtype=dtype), torch.empty(16, rows // 128, columns // 128)
    x, out = (torch.empty(tokens, 16, n, dtype=torch.bfloat16) for n in (columns, rows))
    return MLAProjectCall(x, weight, scale if fp8 else None, out)


def config_of(call: MLAProjectCall, arch: int | str) -> mla_project.Config:
    return mla_project.configure(plan.facts("mla_project", call, None if isinstance(arch, str) else arch))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("fp8", [True, False], ids=["e4m3", "bf16"])
def test_every_chip_compiles_one_kernel_without_spills(arch, fp8):
    call = call_of(fp8=fp8)
    (kernel,) = compile_launches(mla_project.run, call, config_of(call, arch), arch)
    assert kernel["n_spills"] == 0
    assert kernel["grid"] == (16, 8, 1)


def test_codes_are_multiplied_as_they_are_where_the_chip_can():
    call = call_of()
    for arch, native in ((80, False), (90, True)):
        (kernel,) = compile_launches(mla_project.run, call, config_of(call, arch), arch)
        assert ("e4m3.e4m3" in kernel["ptx"]) == native


def test_few_rows_take_small_tiles():
    heights = [config_of(call_of(tokens), 90).block_m for tokens in (1, 17, 64, 500)]
    assert heights == [16, 32, 64, 64]
    call = call_of(500)
    assert [grid for _, grid, _, _ in record(mla_project.run, call, config_of(call, 90))] == [(16, 8, 8)]
