"""Paged prefill, compiled for chips that are not there: tiles are copied ahead, and nothing spills."""

from __future__ import annotations

import pytest
import torch
import triton
from compile_tools import compile_launches, since
from loops import main_loop

from tersekv.backends.host import launch
from tersekv.backends.triton import attention
from tersekv.backends.triton.prefill import entry as prefill
from tersekv.cache import PagedKVCache
from tersekv.calls import AttentionCall
from tersekv.dispatch import checks
from tersekv.dispatch.plan import facts
from tersekv.testing.cases import Case
from tersekv.testing.make import make

BF, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def call_of(
    fmt: str, *, page: int = 64, d: int = 128, dv: int | None = None, rows: int = 4096, new: bool = False, **changed
) -> AttentionCall:
    c = PagedKVCache.allocate(1, 8, page, 8, d, head_dim_v=dv or d, format=fmt)[0]
    k, v = (torch.empty(rows, 8, n, dtype=BF) if new else None for n in (d, dv or d))
    call = AttentionCall(
        q=torch.empty(rows, 32, d, dtype=BF), k=k, v=v, k_cache=c.k, v_cache=c.v, k_scale_cache=c.k_scale_cache,
        v_scale_cache=c.v_scale_cache, page_table=torch.empty(2, 128, dtype=torch.int32),
        seq_lens=torch.empty(2, dtype=torch.int32), cu_seqlens_q=torch.empty(3, dtype=torch.int32),
        out=torch.empty(rows, 32, dv or d, dtype=BF), format=fmt, max_q_len=rows, softmax_scale=0.1,
    )  # fmt: skip
    return call._replace(**changed)


def compiled(call: AttentionCall, arch: int | str) -> dict:
    f = facts("prefill", call, arch=arch if isinstance(arch, int) else None)
    checks.facts(f)
    (kernel,) = compile_launches(attention.run, call, prefill.configure(f), arch)
    limit = launch.shared_memory_of(arch) if isinstance(arch, int) else 65536
    assert kernel["shared"] <= limit
    return kernel


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3", "int8_per_token_head", "nvfp4", "int4_per_token_head"])
def test_for_hopper(fmt):
    """Warpgroup products, hardly a spill in the main loop, keys and values copied ahead of it."""
    kernel = compiled(call_of(fmt), 90)
    loop = main_loop(kernel)
    assert sum("LDL" in x or "STL" in x for x in loop) <= since({(3, 6): 0.03, (3, 9): 0.04}) * len(loop)
    assert "wgmma.mma_async" in kernel["ptx"]
    assert kernel["ttgir"].count("ttg.async_copy_global_to_local") >= 4


@pytest.mark.parametrize(("fmt", "most"), [("fp8_e4m3", 0.3), ("int8_per_token_head", 0.6), ("nvfp4", 0.2)])
def test_codes_are_not_put_in_order(fmt, most):
    """Byte permutes per code: those of the conversion alone. Interleaved tiles take half a permute more."""
    call = call_of(fmt)
    cfg = prefill.configure(facts("prefill", call, arch=90))
    threads = 32 * cfg.launches.kernel_launches[0].launch.options["num_warps"]
    codes = cfg.constants.BLOCK_N * (cfg.constants.D + cfg.constants.DV)
    assert sum("PRMT" in x for x in main_loop(compiled(call, 90))) * threads / codes <= most


@pytest.mark.parametrize(
    ("arch", "fmt", "options"),
    [
        (80, "fp8_e4m3", {"page": 16}),
        (80, "int4_per_token_head", {"new": True}),
        (80, "bf16", {"d": 192, "dv": 128, "new": True}),
        (100, "int8_per_token_head", {"new": True, "window": 100}),
        (120, "nvfp4", {"d": 80, "softcap": 20.0}),
        (89, "bf16", {"d": 512}),
        ("gfx942", "fp8_per_token_head", {"page": 3}),
        ("gfx942", "nvfp4", {"d": 256}),
    ],
)
def test_elsewhere(arch, fmt, options):
    compiled(call_of(fmt, **options), arch)


@pytest.mark.parametrize(
    ("k", "v", "arch"),
    [
        ("fp8_e4m3", "int4_per_token_head", 80),
        ("int4_per_token_head", "int8_per_token_head", 90),
        ("bf16", "nvfp4", "gfx942"),
    ],
)
def test_turned_rows_in_two_formats(k, v, arch):
    case = Case(
        "prefill", k, "turned", lens=(4200,), q_lens=(4096,), ragged=True, heads=8, dim=128, page=64, v_format=v,
        scales="tail", rotation="kv", channels="kv", new_rows=True,
    )  # fmt: skip
    compiled(make(case), arch)


def test_products_of_wide_heads_keep_their_descriptors_with_new_rows():
    """`compile_tools` looks at them: ptxas 12.8 loses one of 16-bit values after 8-bit keys in larger tiles."""
    case = Case(
        "prefill", "fp8_e5m2", "wide", lens=(3100,) * 3, q_lens=(3000,) * 3, heads=4, group=16, dim=256, page=64,
        v_format="bf16", layout="HND", rotation="kv", new_rows=True, softcap=20.0, sinks=True, strided=True,
        dtype="float8_e4m3fn", out_dtype="float8_e4m3fn", scale="float",
    )  # fmt: skip
    compiled(make(case), 90)


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3", "int8_per_token_head", "nvfp4"])
@pytest.mark.parametrize(("arch", "by_k2q"), [(80, False), (90, False), (90, True), ("gfx942", False)])
def test_lists_of_blocks(arch, by_k2q, fmt, monkeypatch):
    """The union of an m_block's lists, what its tokens list of it, and its attention, whose loads are copied ahead."""
    if not by_k2q:  # as where few rows list the same block
        monkeypatch.setattr(prefill, "keys_of_partial", lambda f: 0)
    call = call_of(fmt, indices=torch.empty(4096, 8, 16, dtype=torch.int32), block_size=128)
    f = facts("prefill", call, arch=arch if isinstance(arch, int) else None)
    checks.facts(f)
    lists, counts, *k2q, attend = compile_launches(attention.run, call, attention.configure(f), arch)
    assert [x["name"] for x in (lists, counts, attend)] == [
        "list_blocks_of_m_blocks_kernel", "count_listed_blocks_kernel", "prefill_kernel"
    ]  # fmt: skip
    assert bool(k2q) == by_k2q
    if arch == 90:
        loop = main_loop(attend)
        assert sum("LDL" in x or "STL" in x for x in loop) <= since({(3, 6): 0.03, (3, 9): 0.04}) * len(loop)
        assert attend["ttgir"].count("ttg.async_copy_global_to_local") >= 4


@pytest.mark.parametrize("arch", [80, "gfx942"])
def test_8_bit_queries_and_outputs_where_there_is_no_such_type(arch):
    call = call_of("fp8_e4m3", d=64)
    kernel = compiled(call._replace(q=call.q.to(E4M3), out=call.out.to(E4M3)), arch)
    assert "f8E4M3FN" not in kernel["ttir"]


def test_other_numbers_of_rows_and_requests_compile_nothing_new():
    found = set()
    for rows in (4096, 5001, 1 << 15):
        call = call_of("fp8_e4m3", rows=rows)
        kernel = prefill.configure(facts("prefill", call, arch=90)).launches.kernel_launches[0]
        found.add((kernel.launch.fn, kernel.arguments["cfg"]))
    assert len({(fn, tuple(cfg.items())) for fn, cfg in found}) == 1
    assert {p.name for p in prefill.prefill_kernel.params if p.do_not_specialize} == {
        "PAGE_TABLE",
        "SEQ_LENS",
        "CU_SEQLENS_Q",
        "B",
        "T",
        "first_tile",
        "max_listed_blocks",
        "max_pairs",
    }


@pytest.mark.parametrize(
    ("fmt", "dv", "tile"), [("bf16", 32, 32), ("bf16", 64, 64), ("fp8_e4m3", 32, 32), ("fp8_e4m3", 64, 128)]
)
def test_narrow_values_are_taken_in_small_tiles_on_hopper(fmt, dv, tile):
    f = facts("prefill", call_of(fmt, dv=dv), arch=90)
    assert tile == prefill.configure(f).constants.BLOCK_N


def test_a_place_that_the_assembler_lost_is_found(monkeypatch):
    """The kernel that these tiles are for, in larger ones, as ptxas 12.8 compiles it."""
    real = prefill.choose_tile_config
    monkeypatch.setattr(prefill, "choose_tile_config", lambda *given: real(*given)._replace(block_n=64))
    if triton.knobs.nvidia.ptxas.version == "12.8":
        with pytest.raises(AssertionError, match=r"HGMMA.* at 0x"):
            compiled(call_of("bf16", d=64, dv=32, new=True), 90)
    else:
        compiled(call_of("bf16", d=64, dv=32, new=True), 90)
