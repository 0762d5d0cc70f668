"""mla_project compiled for chips that are not there."""

from __future__ import annotations

import pytest
import torch
from compile_tools import ARCHS, FEW_SPILLS, compile_launches, record
from drawn import half

from tersekv.backends.host.bind import LaunchSequence
from tersekv.backends.triton import mla_project
from tersekv.calls import MLAProjectCall
from tersekv.dispatch import plan


def call_of(tokens: int = 64, fp8: bool = True, columns: int = 128, rows: int = 512) -> MLAProjectCall:
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    weight, scale = torch.empty(16, rows, columns, dtype=dtype), torch.empty(16, rows // 128, columns // 128)
    x, out = (torch.empty(tokens, 16, n, dtype=torch.bfloat16) for n in (columns, rows))
    return MLAProjectCall(x, weight, scale if fp8 else None, out)


def tile_of(call: MLAProjectCall) -> mla_project.ProjectionTile:
    return mla_project.choose_projection_config(plan.facts("mla_project", call, 90)).tile


def config_of(call: MLAProjectCall, arch: int | str) -> LaunchSequence:
    return mla_project.configure(plan.facts("mla_project", call, None if isinstance(arch, str) else arch))


SIZES = [(64, 128, 512), (1, 128, 512), (16, 512, 128), (32, 512, 128), (64, 512, 128)]


@pytest.mark.parametrize(("sizes", "fp8", "arch"), half(SIZES, [True, False], ARCHS))
def test_every_chip_compiles_one_kernel_without_spills(sizes, fp8, arch):
    tokens, columns, rows = sizes
    call = call_of(tokens, fp8, columns, rows)
    (kernel,) = compile_launches(mla_project.run, call, config_of(call, arch), arch)
    assert kernel["n_spills"] <= FEW_SPILLS
    assert kernel["shared"] <= {80: 163, 90: 227, 100: 227, "gfx942": 64}.get(arch, 99) << 10


@pytest.mark.parametrize("fp8", [True, False], ids=["e4m3", "bf16"])
@pytest.mark.parametrize(("columns", "rows"), [(128, 512), (512, 128)])
def test_weights_are_asked_for_before_the_wait_and_rows_behind_it(columns, rows, fp8):
    call = call_of(1, fp8, columns, rows)
    (kernel,) = compile_launches(mla_project.run, call, config_of(call, 90), 90)
    before, behind = kernel["ptx"].split("griddepcontrol.wait")
    tile = tile_of(call)
    wanted = tile.block_n * columns * (1 if fp8 else 2) // (16 * 32 * tile.warps)  # 16 bytes a thread and load
    assert before.count("ld.global.v4") == wanted
    assert 0 < behind.count("ld.global") <= wanted
    assert "griddepcontrol.launch_dependents" in before


@pytest.mark.parametrize("tokens", [1, 8])
def test_programs_of_few_tokens_fit_beside_those_of_the_launch_in_front(tokens):
    """Little shared memory, and half of the registers of a multiprocessor at 128 heads, with the Triton that they were
    chosen with; with a newer one, all of them."""
    call = call_of(tokens, columns=512, rows=128)
    (kernel,) = compile_launches(mla_project.run, call, config_of(call, 90), 90)
    assert kernel["shared"] <= 16 << 10
    programs = kernel["grid"][1] * 128 / 132
    assert kernel["n_regs"] * 32 * mla_project.choose_projection_config(
        plan.facts("mla_project", call, 90)
    ).tile.warps * programs <= 65536 >> (FEW_SPILLS == 0)


def test_codes_are_multiplied_as_they_are_where_the_chip_can():
    call = call_of()
    for arch, native in ((80, False), (90, True)):
        (kernel,) = compile_launches(mla_project.run, call, config_of(call, arch), arch)
        assert ("e4m3.e4m3" in kernel["ptx"]) == native


def test_few_rows_take_small_tiles():
    heights = [tile_of(call_of(tokens)).block_m for tokens in (1, 17, 64, 500)]
    assert heights == [16, 32, 64, 64]
    call = call_of(500)
    assert [grid for _, grid, _, _ in record(mla_project.run, call, config_of(call, 90))] == [(16, 4, 8)]


def test_columns_beyond_those_asked_for_at_once_are_read_in_a_loop():
    call = call_of(1, columns=1024, rows=128)
    (kernel,) = compile_launches(mla_project.run, call, config_of(call, 90), 90)
    assert kernel["n_spills"] == 0
    assert "scf.for" in kernel["ttgir"]
