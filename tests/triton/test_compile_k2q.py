"""Prefill over lists of blocks by k2q, compiled for chips that are not there."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
from compile_tools import ARCHS, compile_launches, since

from tersekv.backends.host import launch
from tersekv.backends.triton import attention
from tersekv.backends.triton.prefill import entry as prefill
from tersekv.dispatch import checks
from tersekv.dispatch.plan import facts
from tersekv.testing.cases import Case
from tersekv.testing.make import make

BASE = Case(
    "prefill", "bf16", "k2q", lens=(4096,), q_lens=(2048,), ragged=True, heads=8, group=4, dim=128, page=64, listed=16,
    block_size=128, each_head=True,
)  # fmt: skip


@cache
def compiled(case: Case, arch: int | str) -> dict[str, dict]:
    call = make(case)
    f = facts("prefill", call, arch=arch if isinstance(arch, int) else None)
    checks.facts(f)
    config = prefill.configure(f)
    assert config.constants.K2Q_PARTIALS
    kernels = {k["name"]: k for k in compile_launches(attention.run, call, config, arch)}
    limit = launch.shared_memory_of(arch) if isinstance(arch, int) else 65536
    assert all(k["shared"] <= limit for k in kernels.values())
    return kernels


@pytest.mark.parametrize(("fmt", "spills"), [
    ("bf16", 256), ("fp8_e4m3", 160), ("int8_per_token_head", 560), ("nvfp4", 300), ("int4_per_token_head", 600),
])  # fmt: skip
def test_on_hopper_two_programs_share_a_multiprocessor(fmt, spills):
    """K, V and queries in shared memory; warpgroup products, in a loop of their own where nothing is masked."""
    kernel = compiled(replace(BASE, format=fmt), 90)["k2q_attention_kernel"]
    assert kernel["shared"] <= (228 * 1024 - 2 * 1024) // 2
    assert kernel["ptx"].count("wgmma.mma_async") == 2 * (8 + 8)
    assert kernel["n_spills"] <= since({(3, 6): spills, (3, 7): 2 * spills})


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("fmt", ["bf16", "int4_per_token_head"])
def test_on_every_chip(arch, fmt):
    names = ["list_blocks_of_m_blocks", "count_listed_blocks", "schedule_k2q", "fill_k2q", "k2q_attention", "prefill"]
    assert list(compiled(replace(BASE, format=fmt), arch)) == [f"{name}_kernel" for name in names]


@pytest.mark.parametrize(("changed", "arch"), [
    ({"dim": 256}, 90), ({"dim": 256, "format": "fp8_e4m3", "page": 16}, 80), ({"group": 12, "heads": 2}, 90),
    ({"group": 1, "block_size": 192}, 89), ({"dtype": "float16"}, 90), ({"dim": 80, "rotation": "kv"}, 90),
], ids=str)  # fmt: skip
def test_other_shapes(changed, arch):
    compiled(replace(BASE, **changed), arch)


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3", "int8_per_token_head"])
def test_with_and_without_a_mask_as_many_multiply_adds_are_fused(fmt):
    """Of the work tiles of a block some may be masked, by the order of atomics: rows have the same bits in both."""
    ptx = compiled(replace(BASE, format=fmt), 90)["k2q_attention_kernel"]["ptx"]
    products = [m.start() for m in re.finditer(r"wgmma\.mma_async", ptx)]
    of_loop = [ptx[products[8 * i + 7] : products[8 * i + 8]].count("fma.rn.f32") for i in (0, 2)]
    assert of_loop[0] == of_loop[1]
