"""Gluon's prefill, compiled for a GPU that is not there: what matters in the machine code, and who gets a plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from compile_tools import compile_launches, since
from test_mla_prefill_compile import SHARED, count, loops

from tersekv.backends.gluon import attention, decode, prefill
from tersekv.backends.gluon.sm90.decode import combine
from tersekv.backends.gluon.sm90.prefill import tile_scheduler
from tersekv.backends.gluon.sm90.prefill.config import (
    make_prefill_config,
    max_work_tiles,
    tensor_map_of_argument,
    tma_tensor_names,
)
from tersekv.cache import PagedKVCache
from tersekv.calls import AttentionCall
from tersekv.dispatch import checks
from tersekv.dispatch.plan import facts, plan

FORMATS = (
    *("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head", "nvfp4"),
    "int4_per_token_head",
)


def call_of(
    fmt: str, *, tokens: int = 512, requests: int = 2, page_size: int = 64, head_dim: int = 128, heads: int = 8,
    group: int = 4, layout: str = "NHD", dtype: torch.dtype = torch.bfloat16, new: bool = False, **changes,
) -> AttentionCall:  # fmt: skip
    """A call whose tensors are never read."""
    c = PagedKVCache.allocate(1, 8, page_size, heads, head_dim, format=fmt, layout=layout)[0]
    q = torch.empty(tokens, heads * group, head_dim, dtype=dtype)
    rows = torch.empty(tokens, heads, head_dim, dtype=torch.bfloat16) if new else None
    i32 = torch.int32
    return AttentionCall(
        q=q, k=rows, v=rows, k_cache=c.k, v_cache=c.v, k_scale_cache=c.k_scale_cache, v_scale_cache=c.v_scale_cache,
        page_table=torch.empty(requests, 128, dtype=i32), seq_lens=torch.empty(requests, dtype=i32),
        cu_seqlens_q=torch.empty(requests + 1, dtype=i32), out=q.bfloat16(), format=fmt, max_q_len=tokens,
        softmax_scale=0.1,
    )._replace(**changes)  # fmt: skip


def facts_of(call: AttentionCall, arch: int = 90) -> SimpleNamespace:
    f = facts("prefill", call, arch=arch)
    checks.facts(f)
    return f


def _grid(config: prefill.Config) -> tuple[int, ...]:
    (kernel,) = config.launches.kernel_launches
    return kernel.grid


def turned(call: AttentionCall, rotation: str = "kv", channels: str = "kv") -> AttentionCall:
    """The call over a cache whose keys ("k") and values ("v") lie rotated, or divided by channel scales."""
    heads, d = call.k_cache.shape[2], call.q.shape[2]
    signs = {f"{side}_signs": torch.empty(d & -d) for side in rotation}
    return call._replace(**signs, **{f"{side}_channel_scale": torch.empty(heads, d) for side in channels})


@cache
def compiled(fmt: str, dtype: torch.dtype = torch.bfloat16, precision: str = "exact", lies: str = "") -> dict:
    call = call_of(fmt, dtype=dtype, precision=precision)
    if lies:
        call = turned(call)
    (kernel,) = compile_launches(attention.run, call, attention.configure(facts_of(call)), 90)
    return kernel


def has_more_shuffles(kernel: dict, other: dict) -> bool:
    return kernel["sass"]().count("SHFL.BFLY") > other["sass"]().count("SHFL.BFLY")


@pytest.mark.parametrize(
    ("fmt", "lies"), [("bf16", ""), ("int8_per_token_head", ""), ("int8_per_token_head", "turned")]
)
def test_products_stay_in_flight_and_nothing_spills_in_the_long_loop(fmt, lies):
    """The loop over tiles without a mask: sixteen products are started, and waited for twice."""
    k = compiled(fmt, lies=lies)
    assert k["shared"] <= SHARED
    sass = k["sass"]()
    tiles = loops(sass, "HGMMA")
    assert all(count(tile, "HGMMA") == 16 for tile in tiles)
    long = [tile for tile in tiles if not count(tile, "ISETP.") or count(tile, "FSEL") == 0]
    assert len(long) == 1, "one for both warpgroups"
    for tile in long:
        waits = [line for line in tile if "WARPGROUP.DEPBAR" in line]
        assert len(waits) == 2, "where ptxas serialises products, each has a wait of its own"
        assert sum("0x0" in line for line in waits) == 1, "weights are computed while values are added"
        assert count(tile, "LDL") + count(tile, "STL") <= since({(3, 6): 0, (3, 7): 1, (3, 9): 3 if lies else 2})
        assert count(tile, "MUFU.EX2") <= 66  # 64 weights a thread, and what sums shrink by
    # Once an item, and in tiles at the causal edge: bf16 40 bytes a thread, int8 104, turned 112 and on 3.9 552.
    assert k["n_spills"] <= since({(3, 6): 112, (3, 7): 256, (3, 9): 560 if lies else 256})
    assert "UTMALDG.4D" in sass
    assert sass.count("STG.E.128") == 8, "of a warpgroup 64 rows of 256 bytes, 16 bytes a lane"
    assert not lies or has_more_shuffles(k, compiled(fmt)), "butterflies whose partners are in other lanes"


def test_turned_values_meet_those_of_new_rows():
    """Sums of new rows' values are turned as the cache's rows are, and all are turned back: in one launch."""
    call = turned(call_of("fp8_e4m3", new=True), "kv", "v")
    (k,) = compile_launches(attention.run, call, attention.configure(facts_of(call)), 90)
    assert k["shared"] <= SHARED
    assert k["n_spills"] <= since({(3, 6): 112, (3, 7): 256})
    plain = call_of("fp8_e4m3", new=True)
    assert has_more_shuffles(k, *compile_launches(attention.run, plain, attention.configure(facts_of(plain)), 90))


def test_a_pair_takes_the_kernel_of_many_rows_too():
    def chosen(rows: int, **changes):
        call = call_of("fp8_e4m3", tokens=rows, requests=1)
        call = call._replace(v_format="fp8_e5m2", v_cache=call.v_cache.view(torch.float8_e5m2), **changes)
        return facts_of(call)

    assert isinstance(attention.configure(chosen(8)), decode.Config)
    for f in (chosen(9), chosen(8, batch_invariant=True)):
        assert attention.why_not(f) is None
        assert isinstance(attention.configure(f), prefill.Config)
    wide = call_of("fp8_e4m3", tokens=9, requests=1)
    wide = wide._replace(v_format="bf16", v_cache=wide.v_cache.bfloat16())
    assert "takes no pairs with 16 bits, got fp8_e4m3 and bf16" in attention.why_not(facts_of(wide))


PAIRS = (
    ("fp8_e4m3", "int4_per_token_head", 128),
    ("int4_per_token_head", "nvfp4", 256),
    ("nvfp4", "fp8_per_token_head", 128),
)


@pytest.mark.parametrize(("k_format", "v_format", "dim"), PAIRS)
def test_a_pair_compiles_as_its_formats_do(k_format, v_format, dim):
    v = call_of(v_format, head_dim=dim)
    call = call_of(k_format, head_dim=dim)._replace(v_format=v_format, v_cache=v.v_cache, v_scale_cache=v.v_scale_cache)
    (k,) = compile_launches(attention.run, call, attention.configure(facts_of(call)), 90)
    assert k["shared"] <= SHARED
    assert k["n_spills"] <= since(
        {(3, 6): 112 if dim == 128 else 500, (3, 7): 256 if dim == 128 else 700, (3, 9): 256 if dim == 128 else 960}
    )
    # One loop for both warpgroups, where each had one with up to 12.
    assert_products_stay_in_flight(k, spills=since({(3, 6): 0 if dim == 128 else 16, (3, 7): 24}))


def assert_products_stay_in_flight(k: dict, spills: int) -> None:
    """Of each loop over tiles: products are waited for twice, and few registers spill in that without a mask."""
    tiles = loops(k["sass"](), "GMMA")
    for tile in tiles:
        assert sum("WARPGROUP.DEPBAR" in line for line in tile) == 2
    for tile in (tile for tile in tiles if count(tile, "FSEL") == 0):
        assert count(tile, "LDL") + count(tile, "STL") <= spills


@pytest.mark.parametrize("fmt", FORMATS[2:])
def test_heads_of_256_columns_compile_with_few_spills(fmt):
    call = call_of(fmt, head_dim=256)
    (k,) = compile_launches(attention.run, call, attention.configure(facts_of(call)), 90)
    assert k["shared"] <= SHARED
    assert_products_stay_in_flight(k, spills=since({(3, 6): 20, (3, 7): 32}))


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3", "int8_per_token_head", "nvfp4"])
def test_heads_of_512_columns_share_rows_between_warpgroups(fmt):
    """Products of each part of K, and of P and each half of V: nothing spills in loops without a mask."""
    call = call_of(fmt, head_dim=512)
    cfg = attention.configure(facts_of(call)).shape
    assert (cfg.COLUMN_SPLIT, cfg.ACC_COLUMNS, cfg.K_PARTS, cfg.V_PARTS, cfg.TOKENS_PER_TILE) == (True, 256, 4, 4, 16)
    (k,) = compile_launches(attention.run, call, attention.configure(facts_of(call)), 90)
    assert k["shared"] <= SHARED
    assert k["n_spills"] <= since({(3, 6): 96, (3, 7): 512})
    tiles = loops(k["sass"](), "GMMA")  # QK of a part, four times; the second warpgroup's PV
    assert len(tiles) == 5
    for tile in tiles:
        assert sum("WARPGROUP.DEPBAR" in line for line in tile) == 1, "ptxas did not serialise products"
        assert count(tile, "LDL") + count(tile, "STL") == 0


def test_fast_does_not_multiply_wide_values_in_8_bits():
    call = call_of("fp8_e4m3", head_dim=256, dtype=torch.float8_e4m3fn, precision="fast")
    cfg = attention.configure(facts_of(call)).shape
    assert (cfg.QK_8BIT, cfg.FP8_PV, cfg.CODE_STAGES) == (True, False, 2)


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_per_token_head"])
@pytest.mark.parametrize(("head_dim", "precision", "qk_8bit"), [
    (128, "exact", True), (192, "exact", False), (256, "exact", False), (512, "exact", False), (256, "fast", True),
    (512, "fast", True),
])  # fmt: skip
def test_sums_of_8_bit_products_have_four_steps_unless_precision_is_fast(fmt, head_dim, precision, qk_8bit):
    """Hopper keeps about 14 bits of them."""
    call = call_of(fmt, head_dim=head_dim, heads=2, dtype=torch.float8_e4m3fn, precision=precision)
    assert attention.why_not(facts_of(call)) is None
    assert qk_8bit == make_prefill_config(facts_of(call)).QK_8BIT


def test_counters_of_prefill_and_decode_do_not_pass_for_each_other():
    """A workspace holds whatever was there before."""
    prefill_zero, decode_zero = tile_scheduler.COUNTER_ZERO.value, combine.COUNTER_ZERO.value
    assert prefill_zero >> 24 != decode_zero >> 24
    assert prefill_zero >> 16 != decode_zero >> 16


def test_the_last_product_of_a_work_tile_starts_early_where_its_values_are_there():
    """Not where values are waited for just before: keys of 512 columns, also beside values of 256."""
    wide, narrow = call_of("bf16", head_dim=512), call_of("bf16", head_dim=256)
    mixed = wide._replace(v_cache=narrow.v_cache, out=narrow.out)
    cfg = make_prefill_config(facts_of(mixed))
    assert (cfg.COLUMN_SPLIT, cfg.ACC_COLUMNS, cfg.EARLY_PV) == (True, 128, False)
    early = {d: make_prefill_config(facts_of(call_of("fp8_e4m3", head_dim=d))).EARLY_PV for d in (64, 128, 256, 512)}
    assert early == {64: True, 128: True, 256: False, 512: False}
    (k,) = compile_launches(attention.run, mixed, attention.configure(facts_of(mixed)), 90)
    assert k["shared"] <= SHARED


def test_a_wide_e4m3_query_becomes_16_bits():
    call = call_of("fp8_e4m3", head_dim=256, heads=2, dtype=torch.float8_e4m3fn)
    (k,) = compile_launches(attention.run, call, attention.configure(facts_of(call)), 90)
    assert k["shared"] <= SHARED
    assert "QGMMA" not in k["sass"]()
    (bf16,) = compile_launches(
        attention.run, (c := call_of("fp8_e4m3", head_dim=256, heads=2)), attention.configure(facts_of(c)), 90
    )
    assert k["n_spills"] <= bf16["n_spills"]


def test_a_turned_query_is_no_code_and_bf16_keys_leave_it_to_triton():
    call = turned(call_of("fp8_e4m3", dtype=torch.float8_e4m3fn, precision="fast"))
    assert attention.why_not(facts_of(call)) is None
    c = make_prefill_config(facts_of(call))
    assert (c.QK_8BIT, c.FP8_PV, c.K_ROTATION.ROTATED, c.V_ROTATION.CHANNEL_SCALES_STRIDE) == (False, False, True, 128)
    assert make_prefill_config(facts_of(turned(call_of("fp8_e4m3", dtype=torch.float8_e4m3fn), "v", "v"))).QK_8BIT
    for rotation, channels in (("k", ""), ("", "k"), ("kv", "kv")):
        call = turned(call_of("bf16"), rotation, channels)
        assert "wants keys that lie as they are with bf16" in attention.why_not(facts_of(call))
    assert attention.why_not(facts_of(turned(call_of("bf16"), "v", "v"))) is None


def test_an_e4m3_query_meets_codes_of_keys():
    """Four products of 32 columns a tile: as many as Hopper's sums of 8-bit products may hold. No spills there."""
    k = compiled("fp8_e4m3", torch.float8_e4m3fn)
    assert k["shared"] <= SHARED
    tiles = loops(k["sass"](), "GMMA")
    assert all((count(tile, "QGMMA"), count(tile, "HGMMA")) == (4, 8) for tile in tiles)
    long = [tile for tile in tiles if not count(tile, "ISETP.") or count(tile, "FSEL") == 0]
    assert len(long) == 1, "one for both warpgroups"
    for tile in long:
        waits = [line for line in tile if "WARPGROUP.DEPBAR" in line]
        assert len(waits) == 2
        assert sum("0x0" in line for line in waits) == 1, "weights are computed while values are added"
        assert count(tile, "LDL") + count(tile, "STL") <= since({(3, 6): 0, (3, 7): 1})
    assert k["n_spills"] <= since({(3, 6): 112, (3, 7): 256})  # as of queries in 16 bits


def test_with_precision_fast_values_meet_weights_in_8_bits():
    """Values in two halves, of sums of their own; transposed by loads and stores of matrices and one permute a word."""
    k = compiled("fp8_e4m3", torch.float8_e4m3fn, "fast")
    assert k["shared"] <= SHARED
    sass = k["sass"]()
    tiles = loops(sass, "GMMA")
    assert all((count(tile, "QGMMA"), count(tile, "HGMMA")) == (12, 0) for tile in tiles)
    long = [tile for tile in tiles if not count(tile, "ISETP.") or count(tile, "FSEL") == 0]
    assert len(long) == 1, "one for both warpgroups"
    for tile in long:
        waits = [line for line in tile if "WARPGROUP.DEPBAR" in line]
        assert len(waits) == 3, "where ptxas serialises products, each has a wait of its own"
        assert sum("0x0" in line for line in waits) == 1, "weights are computed while values are multiplied"
        assert count(tile, "LDL") + count(tile, "STL") <= since({(3, 6): 0, (3, 9): 70})
        assert count(tile, "PRMT") + count(tile, "SHFL") <= 4, "weights become an operand where they are"
    assert k["n_spills"] <= since({(3, 6): 64, (3, 8): 264, (3, 9): 352})  # at the causal edge, on 3.9 everywhere
    assert "LDSM.16.MT88.4" in sass
    assert "STSM.16.M88.4" in sass


def test_only_e4m3_queries_over_e4m3_codes_are_multiplied_in_8_bits_unless_precision_is_fast():
    e4m3 = torch.float8_e4m3fn

    def cfg(fmt: str, q: torch.dtype, precision: str = "exact", **changes):
        return make_prefill_config(facts_of(call_of(fmt, dtype=q, precision=precision, **changes)))

    eights = [fmt for fmt in FORMATS if fmt not in ("bf16", "fp16")]
    assert [f for f in eights if cfg(f, e4m3).QK_8BIT] == ["fp8_e4m3", "fp8_per_token_head"]
    assert not any(cfg(f, e4m3).FP8_PV for f in eights), "a permission that was not given"
    assert [f for f in eights if cfg(f, e4m3, "fast").FP8_PV] == ["fp8_e4m3"]
    for q in (torch.bfloat16, torch.float16, torch.float8_e5m2):
        assert not any(cfg(f, q).QK_8BIT for f in eights)
        direct = [f for f in eights if (c := cfg(f, q, "fast")).QK_8BIT and c.INT8_Q]
        assert direct == (["int8_per_token_head"] if q.itemsize == 2 else [])
    for fmt, precision in (("fp8_e4m3", "exact"), ("int8_per_token_head", "fast")):
        q = e4m3 if precision == "exact" else torch.bfloat16
        assert not cfg(fmt, q, precision, new=True).QK_8BIT, "new rows are in 16 bits"
    assert cfg("int8_per_token_head", torch.bfloat16, "fast", head_dim=256).QK_8BIT
    assert not cfg("int8_per_token_head", torch.bfloat16, "fast", head_dim=512).QK_8BIT, "a query in parts"


# Products of a tile, and bytes of local memory that the whole kernel and each loop without a mask may spill.
_DIRECT = {
    "int8": (("int8_per_token_head", torch.bfloat16, 128, ""), (4, 0, 8), 48, 0),
    "int8, turned": (("int8_per_token_head", torch.bfloat16, 128, "turned"), (4, 0, 8), 48, 0),
    "int8, D 64": (("int8_per_token_head", torch.float16, 64, ""), (2, 0, 8), 0, 0),
    "int8, D 256": (("int8_per_token_head", torch.bfloat16, 256, ""), (8, 0, 8), 64, 0),
    "e4m3": (("fp8_per_token_head", torch.float8_e4m3fn, 128, ""), (0, 4, 8), 48, 0),
}


@pytest.mark.parametrize("name", _DIRECT)
def test_keys_with_a_scale_each_are_multiplied_in_8_bits(name):
    """With precision="fast" a 16-bit query is quantised to int8. An e4m3 one is not."""
    (fmt, dtype, dim, lies), products, spills, in_loops = _DIRECT[name]
    call = call_of(fmt, head_dim=dim, dtype=dtype, precision="exact" if dtype.itemsize == 1 else "fast")
    call = turned(call) if lies else call
    (k,) = compile_launches(attention.run, call, attention.configure(facts_of(call)), 90)
    assert k["shared"] <= SHARED
    assert k["n_spills"] <= since({(3, 6): spills, (3, 7): spills + 256, (3, 9): spills + (384 if lies else 256)})
    assert_products_stay_in_flight(k, spills=since({(3, 6): in_loops, (3, 7): in_loops + 8}))
    for tile in loops(k["sass"](), "GMMA"):
        assert tuple(count(tile, kind) for kind in ("IGMMA", "QGMMA", "HGMMA")) == products
        assert count(tile, "I2FP.F32.S32") == count(tile, "I2F"), "at the rate of additions, not of exponentials"


def test_scales_fill_the_stages_of_keys_that_are_not_converted():
    """Else consumers could read those of an earlier tile: of K, or of V beside keys with one scale for all."""

    def fills(fmt: str, v_fmt: str | None = None, q: torch.dtype = torch.float8_e4m3fn, **changes) -> bool:
        call = call_of(fmt, dtype=q, **changes)
        if v_fmt is not None:
            v = call_of(v_fmt, **changes)
            call = call._replace(v_format=v_fmt, v_cache=v.v_cache, v_scale_cache=v.v_scale_cache)
        return make_prefill_config(facts_of(call)).SCALES_FILL_K

    assert fills("fp8_per_token_head")
    assert fills("fp8_per_token_head", "fp8_e4m3")
    assert fills("fp8_e4m3", "int8_per_token_head")
    assert fills("int8_per_token_head", q=torch.bfloat16, precision="fast")
    assert not fills("fp8_e4m3")
    assert not fills("int8_per_token_head"), "the converter fills them"
    for k_format, v_format in (("fp8_e4m3", "int8_per_token_head"), ("fp8_per_token_head", "fp8_per_token_head")):
        v = call_of(v_format, head_dim=512)
        call = call_of(k_format, head_dim=512, dtype=torch.float8_e4m3fn, precision="fast")
        call = call._replace(v_format=v_format, v_cache=v.v_cache, v_scale_cache=v.v_scale_cache)
        (k,) = compile_launches(attention.run, call, attention.configure(facts_of(call)), 90)
        assert k["shared"] <= SHARED
        assert k["n_spills"] <= since({(3, 6): 0, (3, 7): 256})


def test_the_converting_warps_meet_seldom_and_sort_no_halves_of_registers():
    """A tile of keys and one of values: codes of four, two permutes, and scales are multiplied as pairs."""
    tiles = [tile for tile in loops(compiled("int8_per_token_head")["sass"](), "STS.128") if not count(tile, "UTMALDG")]
    (tile,) = tiles
    assert count(tile, "LDS.128") == 16
    assert count(tile, "STS.128") == 32
    assert count(tile, "PRMT") <= since({(3, 6): 136, (3, 7): 144})
    assert count(tile, "BAR.SYNC") <= 9
    assert count(tile, "LDL") + count(tile, "STL") <= since({(3, 6): 0, (3, 7): 4})


def test_page_ids_are_loaded_together_a_tile_ahead():
    call = call_of("bf16", page_size=16)
    (k,) = compile_launches(attention.run, call, attention.configure(facts_of(call)), 90)
    (tile,) = loops(k["sass"](), "UTMALDG.4D")
    assert count(tile, "UTMALDG.4D") == 32
    assert count(tile, "LDG.E") == 1


def test_a_plan_needs_no_gpu():
    call = call_of("fp8_e4m3")
    f = facts_of(call)
    assert attention.why_not(f) is None
    config = attention.configure(f)
    assert isinstance(config, prefill.Config)
    assert _grid(config) == (132, 1, 1)
    # Every request may end in a block that is not full: 512 tokens in blocks of 32, of 8 KV heads.
    assert max_work_tiles(f, config.shape) == (16 + 2) * 8
    few = facts_of(call_of("fp8_e4m3", tokens=17, requests=1, heads=1, group=8))
    assert _grid(attention.configure(few)) == (3, 1, 1)


@pytest.mark.parametrize(("group", "packed"), [(1, 1), (4, 4), (5, 1), (6, 2), (12, 4), (64, 64), (128, 64)])
def test_as_many_heads_share_a_block_as_fill_it_evenly(group, packed):
    c = make_prefill_config(facts_of(call_of("bf16", heads=1, group=group)))
    assert (packed, 128 // packed, group // packed) == (c.HEADS_PER_TILE, c.TOKENS_PER_TILE, c.HEAD_TILES)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("page_size", [8, 16, 40, 48, 256])
def test_pages_are_a_dimension_of_the_maps(fmt, page_size):
    """A copy is of one page, and takes its place in panels of 128 bytes."""
    call = call_of(fmt, page_size=page_size, layout="HND", new=True)
    c = make_prefill_config(facts_of(call))
    q, k, v, *new = (tensor_map_of_argument(getattr(call, name), name, c) for name in tma_tensor_names(call))
    assert list(q.block_shape) == [32, 4, 64]
    assert k.block_shape[:3] == v.block_shape[:3] == [1, 1, min(page_size & -page_size, 128)]
    assert k.shape[0] == 8
    assert k.block_shape[3] * k.base.dtype.itemsize == (64 if fmt in ("nvfp4", "int4_per_token_head") else 128)
    assert [list(x.block_shape) for x in new] == [[128, 1, 64]] * 2


def test_refusals_say_what_was_wanted():
    def why_not(**changes):
        return attention.why_not(facts_of(call_of("bf16", **changes)))

    assert "pages of a multiple of 8, got 12" in why_not(page_size=12)
    for lies in ("k", "v"):
        f = facts_of(turned(call_of("fp8_e4m3", head_dim=512, heads=1), lies, ""))
        assert "wants rows that lie as they are with head sizes above 256" in attention.why_not(f)
    few = call_of("bf16", head_dim=512, max_q_len=8)
    reason = attention.why_not(facts_of(few))
    assert "wants more query rows of a request with head sizes above 256" in reason
    assert "at most 16 query rows of a KV head with bf16, got 32" in reason
    assert attention.why_not(facts_of(few._replace(batch_invariant=True))) is None
    assert "bfloat16 or 8-bit q" in why_not(dtype=torch.float16)
    wide = torch.empty(512 * 4096 + 4, dtype=torch.bfloat16)[4:].view(512, 32, 128)
    assert "wants q on a multiple of 16 bytes" in why_not(q=wide)
    for fmt in ("nvfp4", "int4_per_token_head"):
        f = facts_of(call_of(fmt, head_dim=32))
        assert "wants k_cache as the copy engine takes it, got rows of 16 bytes" in attention.why_not(f)
        assert attention.why_not(facts_of(call_of(fmt, head_dim=64))) is None


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_has_a_kernel_for_many_rows(fmt):
    call = call_of(fmt, new=True)
    assert attention.why_not(facts_of(call)) is None
    if fmt == "nvfp4":
        assert attention.why_not(facts_of(call._replace(k_scale_t=torch.ones(1)))) is None


def test_few_rows_are_decodes():
    for dim, most in ((128, 16), (256, 8), (512, 8)):
        f = facts_of(call_of("fp8_e4m3", max_q_len=most, head_dim=dim))
        assert isinstance(attention.configure(f), decode.Config)
        more = facts_of(call_of("fp8_e4m3", max_q_len=most + 1, head_dim=dim))
        assert isinstance(attention.configure(more), prefill.Config)
    new = call_of("fp8_e4m3", max_q_len=8, new=True)
    assert isinstance(attention.configure(facts_of(new)), prefill.Config), "decode would not read them"


def as_decode(call: AttentionCall, requests: int, even: bool, **changes) -> AttentionCall:
    fields = {n: x for n, x in call._asdict().items() if n not in ("k", "v")} | changes
    rows = {"cu_seqlens_q": None, "max_q_len": call.q.shape[0] // requests} if even else {}
    return AttentionCall(**fields | rows)


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("even", [False, True])
def test_a_decode_of_many_rows_takes_the_kernel_of_many(fmt, even):
    """With groups of 4: no number of rows between 1 and 8192 is left to portable kernels, or reads keys twice. 17 rows
    of 16 requests would be 72 work tiles for 132 SMs: in 8 bits decode's kernels split them."""
    most = {"bf16": 4, "fp8_e4m3": 17}[fmt]
    for rows in (1, 4, 8, 16, 17, 64, 100, 2048, 8192):
        call = as_decode(call_of(fmt, tokens=16 * rows, requests=16), 16, even, max_q_len=rows)
        p = plan("decode", call, "gluon", arch=90)
        assert isinstance(p.config, prefill.Config if rows > most else decode.Config), rows
        if rows == 64:  # no argument that the record of a decode lacks
            (kernel,) = compile_launches(p.run, call, p.config, 90)
            assert "HGMMA" in kernel["sass"]()
    call = as_decode(call_of(fmt, tokens=16, requests=16), 16, False)
    p = plan("decode", call, arch=90)
    assert not isinstance(p.config, prefill.Config), "the bound says no more than that all rows may be one request's"


def test_a_tree_mask_stays_with_decodes_kernels():
    call = as_decode(call_of("fp8_e4m3", tokens=1600, requests=16), 16, True)
    call = call._replace(mask=torch.zeros(1600, 8, dtype=torch.uint16))
    assert isinstance(plan("decode", call, "gluon", arch=90).config, decode.Config)


def test_few_blocks_over_many_keys_are_cut_by_decode():
    table = torch.empty(2, 2048, dtype=torch.int32)
    some, enough = (facts_of(call_of("fp8_e4m3", tokens=n, page_table=table)) for n in (256, 512))
    assert isinstance(attention.configure(some), decode.Config)
    assert isinstance(attention.configure(enough), prefill.Config)
    assert isinstance(attention.configure(facts_of(call_of("bf16", tokens=256, page_table=table))), prefill.Config)
    few, more = (facts_of(call_of("fp8_e4m3", tokens=n, head_dim=512, page_table=table)) for n in (64, 80))
    assert "wants more query rows" in attention.why_not(few), "decode's kernels take 32 of a head of 512"
    assert isinstance(attention.configure(more), prefill.Config)


def test_a_batchs_lengths_do_not_compile_anew():
    """What the kernel is compiled for holds neither the number of tokens nor of requests."""
    shapes = [make_prefill_config(facts_of(call_of("bf16", tokens=n, requests=b))) for n, b in ((512, 2), (4000, 70))]
    assert shapes[0] == shapes[1] == replace(shapes[0])
