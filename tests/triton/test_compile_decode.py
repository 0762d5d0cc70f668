"""Paged decode, compiled for chips that are not there: the tuned configurations pipeline, and do not spill."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from compile_tools import FEW_SPILLS, compile_launches, since
from loops import main_loop

from tersekv.backends.host import launch
from tersekv.backends.triton import attention
from tersekv.backends.triton.decode import entry as decode
from tersekv.cache import PagedKVCache
from tersekv.calls import AttentionCall
from tersekv.dispatch import checks
from tersekv.dispatch.plan import facts
from tersekv.testing.cases import Case, cases
from tersekv.testing.make import make


def call_of(
    fmt: str, *, page_size: int = 64, head_dim: int = 128, drafts: int = 1, max_pages: int = 128
) -> AttentionCall:
    c = PagedKVCache.allocate(1, 8, page_size, 8, head_dim, format=fmt)[0]
    q = torch.empty(2 * drafts, 32, head_dim, dtype=torch.bfloat16)
    table, lens = torch.empty(2, max_pages, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
    return AttentionCall(
        q=q, k_cache=c.k, v_cache=c.v, k_scale_cache=c.k_scale_cache, v_scale_cache=c.v_scale_cache, page_table=table,
        seq_lens=lens, out=torch.empty_like(q), format=fmt, max_q_len=drafts, softmax_scale=0.1,
    )  # fmt: skip


def compiled(call: AttentionCall, arch: int | str) -> list[dict]:
    f = facts("decode", call, arch=arch if isinstance(arch, int) else None)
    checks.facts(f)
    return compile_launches(attention.run, call, decode.configure(f), arch)


@pytest.mark.parametrize(
    ("fmt", "max_pages"),
    [
        ("fp8_e4m3", 128),
        ("fp8_e4m3", 16),
        ("fp8_per_token_head", 128),
        ("int8_per_token_head", 128),
        ("bf16", 128),
    ],
)
def test_tuned_for_hopper(fmt, max_pages):
    """No spills, warpgroup products, tensor copies that run ahead of the loop in at least two buffers."""
    split, merge = compiled(call_of(fmt, max_pages=max_pages), 90)
    assert split["n_spills"] <= FEW_SPILLS
    assert merge["n_spills"] == 0
    assert "wgmma.mma_async" in split["ptx"]
    copies = re.findall(r"ttng\.async_tma_copy_global_to_local|scf\.for", split["ttgir"])
    before_a_loop = [a for a, b in pairwise(copies) if b == "scf.for"]
    assert "ttng.async_tma_copy_global_to_local" in before_a_loop, "nothing is copied ahead of any loop"
    assert re.search(r"memdesc<[2-9]x64x\d+x(i16|bf16)", split["ttgir"])


@pytest.mark.parametrize(
    ("k", "v", "arch"),
    [
        ("fp8_e4m3", "int4_per_token_head", 80),
        ("fp8_e4m3", "int4_per_token_head", 90),
        ("int4_per_token_head", "int4_per_token_head", 90),
        ("bf16", "nvfp4", 120),
        ("int8_per_token_head", "fp16", "gfx942"),
    ],
)
def test_turned_rows_in_two_formats_take_no_launch_more(k, v, arch):
    case = Case(
        "decode", k, "turned", lens=(9000,) * 4, heads=8, dim=128, page=64, v_format="" if v == k else v,
        scales="tail", rotation="kv", channels="kv",
    )  # fmt: skip
    split, merge = compiled(make(case), arch)
    assert (split["name"], merge["name"]) == ("stream_k_decode_kernel", "combine_by_split_metadata_kernel")
    assert split["shared"] <= (launch.shared_memory_of(arch) if isinstance(arch, int) else 65536)
    if arch == 90:
        assert split["n_spills"] <= FEW_SPILLS


@pytest.mark.parametrize(
    ("fmt", "dtype", "arch"),
    [
        ("bf16", torch.float16, 90),
        ("bf16", torch.float16, 80),
        ("nvfp4", torch.bfloat16, 120),
        ("fp8_e4m3", torch.float16, 89),
        ("bf16", torch.bfloat16, 120),
    ],
)
def test_many_wide_rows_fit_the_shared_memory(fmt, dtype, arch):
    case = Case(
        "decode", fmt, "wide", lens=(300,), heads=1, group=64, dim=464, page=144, dtype=str(dtype).split(".")[1]
    )
    split, _ = compiled(make(case), arch)
    assert split["shared"] <= launch.shared_memory_of(arch)


@pytest.mark.parametrize(
    ("fmt", "arch", "page_size"),
    [
        ("fp8_e4m3", 80, 16),
        ("nvfp4", 80, 64),
        ("fp8_per_token_head", 89, 16),
        ("nvfp4", 90, 64),
        ("int4_per_token_head", 80, 16),
        ("int4_per_token_head", 89, 64),
        ("int4_per_token_head", 120, 64),
        ("int4_per_token_head", "gfx942", 64),
        ("int8_per_token_head", 100, 64),
        ("fp8_e4m3", 120, 64),
        ("bf16", 89, 64),
        ("fp8_e5m2", 90, 3),
        ("fp8_e4m3", "gfx942", 16),
        ("bf16", "gfx942", 64),
    ],
)
def test_compiles_elsewhere(fmt, arch, page_size):
    split, merge = compiled(call_of(fmt, page_size=page_size, drafts=2), arch)
    assert merge["n_spills"] == 0
    assert split["shared"] <= (65536 if arch == "gfx942" else 101376)


@pytest.mark.parametrize("out", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3 out", "e5m2 out"])
@pytest.mark.parametrize("arch", [80, 89, 90, "gfx942"])
def test_fp8_queries_and_outputs(arch, out):
    call = call_of("fp8_e4m3", drafts=2)
    split, merge = compiled(call._replace(q=call.q.to(torch.float8_e4m3fn), out=call.out.to(out)), arch)
    kind = "e4m3x2" if out == torch.float8_e4m3fn else "e5m2x2"
    for k in (split, merge):
        # Only sm_90 and newer have a cast that rounds fp32 to the nearest code; others compute it.
        assert (f"cvt.rn.satfinite.{kind}.f32" in k.get("ptx", "")) == (arch == 90)
        assert f"cvt.rn.satfinite.{kind}.f16x2" not in k.get("ptx", "")
    if arch in (80, "gfx942"):
        assert "f8E4M3FN" not in split["ttir"]


def test_8_bit_codes_become_fp16_by_the_pair():
    """One conversion instruction for two codes, and no transposition of single bytes through shared memory."""
    split, _ = compiled(call_of("fp8_e4m3"), 90)
    sass = split["sass"]()
    assert "LDSM.16.MT88" in sass
    assert "F2FP.F16.E4M3.UNPACK_B" in sass
    assert "LDS.U8" not in sass


def test_nibbles_become_fp16_by_masks_alone():
    """No integer is converted; of keys a mask suffices, of values a zero point is subtracted from each."""
    split, _ = compiled(call_of("int4_per_token_head"), 90)
    ptx = split["ptx"]
    masks = re.findall(r"and\.b32 .*, 0x00(?:0F000F|F000F0);", ptx)
    assert len(masks) == 2 * len(re.findall(r"sub\.f16x2", ptx)) > 0
    assert not re.search(r"cvt\.rn\.f16\.[su]\d+|fma\.rn\.f16x2", ptx)


# Instructions of all threads, with loads, products and softmax; behind each bound the number where four warps share a
# key block and codes are converted by shifts, masks and additions.
@pytest.mark.parametrize(
    ("fmt", "arch", "most"),
    [
        ("int4_per_token_head", 80, since({(3, 6): 2.9, (3, 9): 3.1})),  # 2.99
        ("int4_per_token_head", 90, 2.4),  # 4.65
        ("int4_per_token_head", 100, 2.3),  # 3.87
        ("int4_per_token_head", 120, 2.6),  # 5.76
        ("nvfp4", 80, 4.0),  # 4.32
        ("nvfp4", 89, 3.9),  # 5.61
        ("nvfp4", 90, 3.6),  # 6.63
        ("nvfp4", 100, 3.5),  # 5.03
        ("nvfp4", 120, 3.8),  # 7.66
    ],
)
def test_instructions_per_4_bit_code(fmt, arch, most):
    call = call_of(fmt)
    cfg = decode.configure(facts("decode", call, arch=arch))
    split, _ = compiled(call, arch)
    threads = 32 * cfg.launches.kernel_launches[0].launch.options["num_warps"]
    codes = cfg.constants.BLOCK_N * cfg.constants.UNROLL * (cfg.constants.D + cfg.constants.DV)
    assert len(main_loop(split)) * threads / codes <= most


def test_a_changing_bound_on_ragged_rows_compiles_nothing_new():
    constants = set()
    for bound in (5, 6, 8):
        call = call_of("fp8_e4m3", drafts=4)._replace(cu_seqlens_q=torch.empty(3, dtype=torch.int32), max_q_len=bound)
        constants.add(decode.configure(facts("decode", call, arch=90)).constants)
    assert len(constants) == 1


@pytest.mark.parametrize(
    ("fmt", "dim", "scales", "nbytes"),
    [
        ("fp8_e4m3", 80, "apart", 16),
        ("int4_per_token_head", 80, "apart", 8),
        ("nvfp4", 112, "apart", 8),
        ("int8_per_token_head", 128, "inline", 4),
    ],
)
def test_rows_at_no_multiples_of_32_bytes_are_copied_in_wide_pieces(fmt, dim, scales, nbytes):
    """Triton knows of multiples of 16 elements alone, and loads the words of others one by one, unless it is told."""
    split, _ = compiled(make(Case("decode", fmt, "", lens=(900,) * 8, heads=8, dim=dim, page=64, scales=scales)), 80)
    sizes = re.findall(r"cp\.async\.c\w\.shared\.global \[[^\]]*\], *\[[^\]]*\], *(\w+)", split["ptx"])
    assert sizes
    assert {int(n, 0) for n in sizes} == {nbytes}


def test_block_scales_are_loaded_by_words():
    split, _ = compiled(call_of("nvfp4"), 80)
    assert "ld.global.b8" not in split["ptx"]
    assert "ld.global.u8" not in split["ptx"]


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("case", ["fp8_e4m3/listed tokens V of another format", "nvfp4/listed blocks"])
def test_lists_of_keys_compile(case, arch):
    """Triton 3.6 fails at constant bounds of loops, and at block scales in programs of one warp."""
    (listed,) = (c for c in cases(("decode",)) if c.id == f"decode/{case}")
    call = make(listed)
    f = facts("decode", call, arch=arch)
    checks.facts(f)
    split, *_ = compile_launches(attention.run, call, attention.configure(f), arch)
    assert split["n_spills"] <= 64
