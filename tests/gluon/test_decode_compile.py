"""Gluon's paged decode, compiled for a GPU that is not there: what matters in the machine code."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from compile_tools import compile_launches, since
from test_mla_prefill_compile import loops

from tersekv.backends.gluon import attention, decode
from tersekv.cache import PagedKVCache
from tersekv.calls import AttentionCall
from tersekv.dispatch import checks
from tersekv.dispatch.plan import facts

FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head", "nvfp4")
FORMATS += ("int4_per_token_head",)
FOUR_BITS = ("nvfp4", "int4_per_token_head")


def call_of(
    fmt: str, *, page_size: int = 64, head_dim: int = 128, requests: int = 64, drafts: int = 1, max_pages: int = 128,
    heads: int = 8, group: int = 4, layout: str = "NHD", scales: str = "apart", **changes,
) -> AttentionCall:  # fmt: skip
    """fmt: a name, or "K's/V's"."""
    names = (fmt.split("/") * 2)[:2]
    c = PagedKVCache.allocate(1, 8, page_size, heads, head_dim, format=names, layout=layout, scales=scales)[0]
    changes = {"v_format": names[1] if names[1] != names[0] else "", **changes}
    q = torch.empty(requests * drafts, heads * group, head_dim, dtype=torch.bfloat16)
    table, lens = torch.empty(requests, max_pages, dtype=torch.int32), torch.empty(requests, dtype=torch.int32)
    return AttentionCall(
        q=q, k_cache=c.k, v_cache=c.v, k_scale_cache=c.k_scale_cache, v_scale_cache=c.v_scale_cache, page_table=table,
        seq_lens=lens, out=torch.empty_like(q), format=names[0], max_q_len=drafts, softmax_scale=0.1,
    )._replace(**changes)  # fmt: skip


def why_not(call: AttentionCall, arch: int = 90) -> str | None:
    return decode.why_not(facts("decode", call, arch=arch))


def compiled(call: AttentionCall) -> list[dict]:
    f = facts("decode", call, arch=90)
    checks.facts(f)
    assert decode.why_not(f) is None
    return compile_launches(attention.run, call, decode.configure(f), 90)


@cache
def tuned(fmt: str) -> list[dict]:
    return compiled(call_of(fmt))


@pytest.mark.parametrize("fmt", FORMATS)
def test_tuned_for_hopper(fmt):
    """No spills; tensor copies; operands of both products in registers; codes cross lanes only when loaded."""
    split, *merge = tuned(fmt)
    assert [x["n_spills"] for x in (split, *merge)] == [0] * (1 + len(merge))
    assert split["shared"] <= 232448
    sass = split["sass"]()
    assert "UTMALDG.4D" in sass
    assert "HMMA.16816.F32" in sass
    assert "LDS.128" in sass, "keys come by whole stretches of their rows"
    assert "LDSM.16.MT88.4" in sass, "values are transposed on their way"
    assert "MOVM.16.MT88" in sass, "probabilities are transposed in registers"
    # Where a warp copies, one byte says what the other warps of its four are to do. Zero points of values are the low
    # halves of scales: four a box of 16 keys, in tiles that are whole and in others.
    zero_points = 4 * 4 * 2 if fmt == "int4_per_token_head" else 0
    assert len(re.findall(r"LDS\.[US](8|16) ", sass)) <= (fmt in FOUR_BITS) + zero_points


@pytest.mark.parametrize(("fmt", "limit"), [("fp8_e4m3", 210), ("fp8_per_token_head", 240), ("nvfp4", 325),
                                            ("int4_per_token_head", 225)])  # fmt: skip
def test_few_instructions_a_step(fmt, limit):
    """Two products, their conversions and their share of the softmax: instructions of a warp per 16 keys."""
    assert instructions_of_a_step(tuned(fmt)[0]["sass"]()) <= limit


@pytest.mark.parametrize(
    ("pair", "options", "limit"),
    [
        ("fp8_e4m3/int4_per_token_head", {}, 215),
        ("int8_per_token_head/int4_per_token_head", {}, 270),
        ("fp8_per_token_head/nvfp4", {"scales": "tail"}, 255),
        ("int4_per_token_head/fp8_e4m3", {"heads": 2}, 175),
        ("nvfp4/int4_per_token_head", {"head_dim": 64, "layout": "HND"}, None),
        ("fp8_e4m3/int8_per_token_head", {"page_size": 32}, None),
        ("fp8_e4m3/int4_per_token_head", {"drafts": 8, "heads": 2}, None),
    ],
)
def test_keys_and_values_may_have_formats_of_their_own(pair, options, limit):
    split, *merge = compiled(call_of(pair, **options))
    assert split["shared"] <= 232448
    assert all(x["n_spills"] == 0 for x in (split, *merge))
    if limit is not None:
        assert instructions_of_a_step(split["sass"]()) <= limit


def turned(call: AttentionCall, rotation: str, channels: str) -> AttentionCall:
    """The call over a cache whose keys ("k") and values ("v") lie rotated, or divided by channel scales."""
    heads, d = call.k_cache.shape[2], call.q.shape[2]
    signs = {f"{side}_signs": torch.empty(d) for side in rotation}
    return call._replace(**signs, **{f"{side}_channel_scale": torch.empty(heads, d) for side in channels})


@pytest.mark.parametrize(
    ("fmt", "options", "turn"),
    [
        ("fp8_e4m3", {}, ("kv", "kv")),
        ("int4_per_token_head", {}, ("kv", "kv")),
        ("fp8_e4m3/int4_per_token_head", {"page_size": 32}, ("k", "v")),
        ("bf16", {"group": 8}, ("v", "v")),
        ("int4_per_token_head", {"drafts": 8}, ("kv", "k")),
        ("int8_per_token_head", {"drafts": 8, "group": 8}, ("kv", "kv")),
        ("fp8_e4m3", {"drafts": 8, "group": 8, "head_dim": 256}, ("kv", "")),
    ],
    ids=str,
)
def test_rotated_rows_and_channel_scales(fmt, options, turn):
    """Queries are turned as they are loaded, values as they are stored, in registers; nothing is launched for it."""
    call = call_of(fmt, **options)
    plain = decode.configure(facts("decode", call, arch=90)).launches.kernel_launches
    split, *merge = compiled(turned(call, *turn))
    assert [x["name"] for x in (split, *merge)] == [x.launch.fn.__name__ for x in plain]
    assert split["grid"] == plain[0].grid
    assert split["shared"] <= 232448
    assert split["n_spills"] <= (since({(3, 6): 64, (3, 8): 128}) if "drafts" in options else 0)
    assert all(x["n_spills"] == 0 for x in merge)
    sass = split["sass"]()
    assert "SHFL.BFLY" in sass
    if "group" in options:  # what spills does so where a segment begins or ends
        steps = [run for run in straight_runs(sass) if any(op.startswith(("HGMMA", "HMMA")) for op in run)]
        assert not any(op.startswith(("LDL", "STL")) for run in steps for op in run)


def test_threads_meet_three_times_a_tile():
    """More barriers between the copies of a tile would say that they share a buffer or a barrier of arrival."""
    # From 3.8 on there is one between the scales of keys and of values.
    assert since({(3, 6): "cccc", (3, 8): "|ccc|c|"}) in copies_and_barriers(
        compiled(call_of("nvfp4", heads=2))[0]["sass"]()
    )


def test_a_warp_of_its_own_copies_four_bits():
    """Where four warps attend; they wait once and meet twice a tile, and start no copies."""
    split = tuned("nvfp4")[0]
    assert split["name"] == "decode_producer_warp_kernel"
    sass = split["sass"]()
    assert copies_and_barriers(sass).count("c") == 4, "where the other kernel starts copies before and in its loop"
    steps = [x for x in straight_runs(sass) if sum(op.startswith("HMMA") for op in x) >= 64]
    assert len(steps) == 2, "whole tiles, and tiles at an edge"
    assert not any(op.startswith(("UTMALDG", "MEMBAR")) for x in steps for op in x)
    assert compiled(call_of("nvfp4", heads=2))[0]["name"] == "decode_small_m_or_shared_tiles_kernel"
    for x in ({"head_dim": 256}, {"group": 16}):  # twice the accumulators
        split = compiled(call_of("nvfp4", **x))[0]
        assert (split["name"], split["n_spills"]) == ("decode_producer_warp_kernel", 0)


def test_two_heads_of_four_bits_lie_in_a_row_of_128_bytes():
    """Where they lie side by side in the cache."""
    specs = [
        decode.configure(facts("decode", call_of("nvfp4", layout=x), arch=90)).tensor_map_specs["K"]
        for x in ("NHD", "HND")
    ]
    assert [spec.box for spec in specs] == [[4, 2, 16, 64], [4, 4, 16, 32]]
    assert [spec.swizzle for spec in specs] == [128, 64]


def copies_and_barriers(sass: str) -> str:
    """The order of tensor copies (c) and of barriers between threads (|)."""
    lines = [x for x in sass.splitlines() if "UTMALDG" in x or "BAR.SYNC" in x]
    return "".join("c" if "UTMALDG" in x else "|" for x in lines)


def instructions_of_a_step(sass: str) -> float:
    """Instructions of the shortest straight run that holds whole products, per 16 keys (16 matrix instructions)."""
    products = [(len(run), sum(x.startswith("HMMA") for x in run)) for run in straight_runs(sass)]
    return min(16 * n / matrix for n, matrix in products if matrix >= 16)


def straight_runs(sass: str) -> list[list[str]]:
    """Instructions between one branch and the next."""
    runs, here = [], []
    for line in sass.splitlines():
        found = re.search(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9.]*)", line)
        if found is None:
            continue
        here.append(found[1])
        if found[1] in ("BRA", "EXIT"):
            runs.append(here)
            here = []
    return runs


@pytest.mark.parametrize(
    ("fmt", "options"),
    [
        ("nvfp4", {"page_size": 16}),
        ("nvfp4", {"head_dim": 64, "layout": "HND"}),
        ("int4_per_token_head", {"heads": 2, "head_dim": 64}),
        ("int4_per_token_head", {"page_size": 16, "scales": "tail"}),
        ("fp8_per_token_head", {"scales": "tail"}),
        ("int8_per_token_head", {"scales": "tail", "layout": "HND", "group": 8}),
        ("nvfp4", {"scales": "tail"}),
        ("nvfp4", {"head_dim": 256}),
        ("fp8_e4m3", {"group": 16, "window": 100, "softcap": 20.0}),
        ("fp8_per_token_head", {"head_dim": 256}),
        ("fp8_e4m3", {"drafts": 8}),
        ("fp8_e4m3", {"head_dim": 512, "layout": "HND"}),
        ("int8_per_token_head", {"head_dim": 512, "heads": 4}),
        ("int4_per_token_head", {"head_dim": 512, "heads": 4, "layout": "HND"}),
        ("nvfp4", {"head_dim": 512, "heads": 1}),
        ("bf16", {"head_dim": 512, "heads": 2}),
    ],
    ids=str,
)
def test_compiles_with(fmt, options):
    split, *merge = compiled(call_of(fmt, **options))
    assert split["shared"] <= 232448
    # Four copies a tile carry four page ids and as many addresses: some wait in local memory. Of 64 rows, on Triton
    # 3.9, two registers before the main loop.
    some = options.get("head_dim") == 512 or "drafts" in options
    assert split["n_spills"] <= (64 if options.get("page_size") == 16 else 8 if some else 0)
    assert all(x["n_spills"] == 0 for x in merge)


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "int8_per_token_head", "nvfp4"])
def test_a_wide_head_is_two_warps_that_share_scores(fmt):
    """Each has 256 columns; scores and scales of tokens are the head's, and so are queries, outputs and sinks."""
    f = facts("decode", call_of(fmt, head_dim=512, heads=4), arch=90)
    config = decode.configure(f)
    cfg, shape = config.constants, config.shape
    assert (shape.HEAD_DIM_PARTS, cfg.HEADS, cfg.GROUP, cfg.D, cfg.DV) == (2, 8, 4, 256, 256)
    token_scales = fmt == "int8_per_token_head"
    heads = 8 if token_scales else 4
    assert heads == shape.HEADS_PER_CTA
    if token_scales:
        assert shape.K.SCALE_SMEM_SHAPE[1:] in ((16, 4), (4, 16))


@pytest.mark.parametrize(
    ("fmt", "options"),
    [
        ("bf16", {"page_size": 8, "heads": 1}),
        ("fp8_e4m3", {"page_size": 40, "head_dim": 256}),
        ("fp8_per_token_head", {"page_size": 8}),
        ("int8_per_token_head", {"page_size": 24, "layout": "HND"}),
        ("nvfp4", {"page_size": 8}),
        ("nvfp4", {"page_size": 8, "layout": "HND", "heads": 2}),
        ("int4_per_token_head", {"page_size": 24, "scales": "tail"}),
        ("fp8_e4m3", {"page_size": 8, "drafts": 8, "group": 8}),
        ("fp8_e4m3", {"page_size": 8, "drafts": 8, "group": 8, "head_dim": 256}),
    ],
    ids=str,
)
def test_copies_of_8_keys(fmt, options):
    """A box of 16 keys takes two; what attends does not see it."""
    split, *merge = compiled(call_of(fmt, **options))
    assert split["shared"] <= 232448
    assert split["n_spills"] <= 64
    assert all(x["n_spills"] == 0 for x in merge)
    sass = split["sass"]()
    if "drafts" not in options:
        assert "LDSM.16.MT88.4" in sass
        whole, *_ = compiled(call_of(fmt, **{**options, "page_size": 16}))
        steps = [instructions_of_a_step(x) for x in (sass, whole["sass"]())]
        assert steps[0] <= steps[1] + 2


@pytest.mark.parametrize(
    ("fmt", "options", "launches"),
    [
        ("fp8_e4m3", {"requests": 1024}, 1),
        ("fp8_per_token_head", {"requests": 22}, 1),
        ("int8_per_token_head", {"drafts": 2}, 1),
        ("fp8_e4m3", {"requests": 21}, 2),
        ("fp8_e4m3", {"requests": 1}, 2),
        ("fp8_e4m3", {"requests": 1, "max_pages": 4}, 1),  # there are no more than four
        ("fp8_per_token_head", {"requests": 4, "max_pages": 4}, 1),
        ("fp8_e4m3", {"requests": 4, "max_pages": 5}, 2),
        ("fp8_e4m3", {"group": 16}, 2),
        ("fp8_e4m3", {"heads": 2}, 2),
        ("fp8_e4m3", {"page_size": 16}, 2),
        ("nvfp4", {}, 2),
    ],
    ids=str,
)
def test_few_pieces_are_merged_where_they_arise(fmt, options, launches):
    f = facts("decode", call_of(fmt, **options), arch=90)
    assert len(decode.configure(f).launches.kernel_launches) == launches


def test_whoever_arrives_last_sees_every_piece():
    """Threads meet before one of them counts, which orders what they wrote; pieces are then read behind L1."""
    ptx = tuned("fp8_e4m3")[0]["ptx"]
    counts = re.findall(r"bar\.sync(?:(?!ld\.global|st\.global).)*?atom\.global\.gpu\.acq_rel\.add\.u64", ptx, re.S)
    assert len(counts) == ptx.count("acq_rel.add.u64") == 2
    last = ptx.index("acq_rel.add.u64")
    assert "ld.global.cg.v4" in ptx[last:]
    assert ptx.index("ld.relaxed.gpu.global.b64") < ptx.index("mma.sync") < last, "looked at before the tiles"


def rows_compiled(fmt: str, **options) -> tuple[dict, str]:
    """(split pass, its machine code) for many query rows; what is common to its kernels is asserted."""
    split, merge = compiled(call_of(fmt, drafts=8, **options))
    assert split["shared"] <= 232448
    assert merge["n_spills"] == 0
    sass = split["sass"]()
    assert "HGMMA.64x" in sass
    assert "HMMA.16816" not in sass
    return split, sass


@pytest.mark.parametrize(
    ("fmt", "options"),
    [
        ("fp8_e4m3", {"group": 8}),
        ("fp8_e4m3", {"group": 8, "page_size": 16, "head_dim": 64}),
        ("fp8_e5m2", {"group": 16}),
        ("fp8_per_token_head", {"group": 16, "heads": 2}),
        ("int8_per_token_head", {"group": 8, "window": 100, "softcap": 20.0}),
        ("nvfp4", {"group": 16}),
        ("nvfp4", {"group": 4, "layout": "HND", "heads": 2}),
        ("int4_per_token_head", {"group": 8, "scales": "tail"}),
        ("int4_per_token_head", {"group": 16, "page_size": 16, "head_dim": 64}),
    ],
    ids=str,
)
def test_many_rows_are_attended_while_codes_are_converted(fmt, options):
    """Up to 128 query rows of a KV head: by warpgroups of their own, in one or two programs a multiprocessor."""
    split, sass = rows_compiled(fmt, **options)
    assert split["name"] == "decode_64_rows_per_warpgroup_kernel"
    # ptxas 13 has 88 bytes of nvfp4 where 12.9 has none, 168 of int4 where that has 32.
    assert split["n_spills"] <= since({(3, 6): 64, (3, 9): 176 if fmt == "int4_per_token_head" else 96})
    programs = 1 if options["group"] == 16 else 2
    assert programs * (split["shared"] + 1024) <= 233472
    assert split["grid"][0] >= 128 * programs
    # A wait between the instructions of a product would say that ptxas lets none run beside others.
    waits, products = sass.count("WARPGROUP.DEPBAR"), len(re.findall(r"HGMMA\.64x64x16\.F32", sass))
    assert products >= (4 if options.get("head_dim") == 64 else 8)
    assert waits <= products // 2
    assert "STS.128" in sass, "fp16 tiles are written by whole stretches of their rows"
    assert not re.search(r"STS\.[US]?(8|16) ", sass)


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "nvfp4"])
def test_many_rows_of_large_heads_share_what_is_converted(fmt):
    split, sass = rows_compiled(fmt, group=8, head_dim=256)
    assert split["name"] == "decode_small_m_or_shared_tiles_kernel"
    assert split["n_spills"] <= 64
    assert not re.search(r"LDS\.[US]16 ", sass)


def test_few_rows_of_four_bits_are_fewer_where_heads_do_not_come_by_fours():
    """What 17 query rows of a KV head go by."""
    names = {}
    for fmt, heads in (("fp8_e4m3", 8), ("nvfp4", 8), ("nvfp4", 2)):
        for drafts, group in ((4, 4), (8, 4), (8, 8)):
            f = facts("decode", call_of(fmt, drafts=drafts, group=group, heads=heads), arch=90)
            names[fmt, heads, drafts * group] = decode.configure(f).launches.kernel_launches[0].launch.fn.__name__
    many = {k for k, v in names.items() if v == "decode_64_rows_per_warpgroup_kernel"}
    assert many == {("fp8_e4m3", 8, 32), ("fp8_e4m3", 8, 64), ("nvfp4", 8, 64), ("nvfp4", 2, 32), ("nvfp4", 2, 64)}


@pytest.mark.parametrize(
    ("fmt", "options"),
    [
        ("nvfp4", {}),
        ("nvfp4", {"head_dim": 64}),
        ("nvfp4", {"page_size": 16, "window": 40}),
        ("int4_per_token_head", {"window": 40}),
    ],
    ids=str,
)
def test_a_warp_unpacks_four_bits_once_for_32_rows(fmt, options):
    split, merge = compiled(call_of(fmt, drafts=8, **options))
    assert split["name"] == "decode_producer_warp_kernel"
    assert split["n_spills"] <= since({(3, 6): 16, (3, 8): 128})  # 80, and 112 with small pages
    assert merge["n_spills"] == 0
    assert 2 * (split["shared"] + 1024) <= 233472
    # Of a box's 16 keys the second product's are as many as the first's, in tiles that are whole and in others.
    assert split["sass"]().count("HMMA.16816.F32") == 4 * 32 * options.get("head_dim", 128) // 128


@pytest.mark.parametrize(("fmt", "options"), [("nvfp4", {}), ("nvfp4", {"drafts": 8})])
def test_a_query_that_is_not_copied_comes_by_whole_stretches(fmt, options):
    sass = compiled(call_of(fmt, **options))[0]["sass"]()
    assert "LDG.E.128" in sass
    assert "LDG.E.U16" not in sass


def test_64_rows_a_warpgroup_load_their_query_as_a_fragment():
    """A thread's part of the left operand, two columns at a time."""
    split = compiled(call_of("fp8_e4m3", drafts=8))[0]
    assert split["name"] == "decode_64_rows_per_warpgroup_kernel"
    sass = split["sass"]()
    assert len(re.findall(r"\bLDG\.E R", sass)) >= 32, "64 rows of 128 columns, by 128 threads"
    assert "LDG.E.U16" not in sass


@pytest.mark.parametrize(
    ("fmt", "options"),
    [
        ("fp8_e4m3", {}),
        ("int8_per_token_head", {"page_size": 16}),
        ("fp8_per_token_head", {"heads": 1}),
        ("int4_per_token_head", {"heads": 1, "page_size": 16}),
        ("nvfp4", {"heads": 2}),
        ("int4_per_token_head", {}),
        ("bf16", {}),
    ],
    ids=str,
)
def test_16_rows_of_wide_heads_are_dealt_to_two_warps(fmt, options):
    """One's registers do not hold their accumulators: it spilled, and took up to twice the time."""
    call = call_of(fmt, head_dim=256, group=16, **options)
    split, *merge = compiled(call)
    assert decode.configure(facts("decode", call, arch=90)).shape.WARPS_PER_HEAD == 2
    # What waits in local memory is for a segment's begin and end.
    assert split["n_spills"] <= since({(3, 6): 40, (3, 7): 48, (3, 8): 40})
    tiles = loops(split["sass"](), "HMMA")
    assert tiles
    for tile in tiles:
        assert sum(op.startswith(("LDL", "STL")) for op in tile) <= since({(3, 6): 0, (3, 8): 2, (3, 9): 0})
    assert all(x["n_spills"] == 0 for x in merge)
    assert split["shared"] <= 232448


def of_sizes(fmt: str, d: int, dv: int, **options) -> AttentionCall:
    """A call whose values have another size than its keys."""
    call, values = call_of(fmt, head_dim=d, **options), call_of(fmt, head_dim=dv, **options)
    return call._replace(v_cache=values.v_cache, v_scale_cache=values.v_scale_cache, out=values.out)


@pytest.mark.parametrize(
    ("fmt", "dims", "options"),
    [
        ("fp8_e4m3", (96, 96), {"group": 8}),
        ("fp8_e4m3", (192, 128), {}),
        ("fp8_e4m3", (192, 192), {"heads": 2, "layout": "HND"}),
        ("bf16", (80, 80), {}),
        ("int8_per_token_head", (112, 112), {"drafts": 8}),
        ("fp8_per_token_head", (80, 80), {"page_size": 16, "group": 16}),
        ("int4_per_token_head", (96, 96), {"drafts": 4}),
        ("int4_per_token_head", (80, 80), {}),
        ("int4_per_token_head", (112, 112), {"drafts": 4, "page_size": 16}),
        ("nvfp4", (192, 192), {"heads": 4}),
        ("nvfp4", (160, 160), {"page_size": 16}),
        ("nvfp4", (96, 96), {"layout": "HND"}),
        ("nvfp4", (80, 80), {"drafts": 4}),
        ("nvfp4", (112, 112), {"heads": 2}),
        ("nvfp4", (192, 192), {"group": 16, "layout": "HND"}),
        ("nvfp4/int4_per_token_head", (96, 96), {}),
        ("fp8_e4m3/nvfp4", (192, 192), {"scales": "tail"}),
    ],
)
def test_rows_that_are_no_power_of_two_lie_in_rows_that_are(fmt, dims, options):
    """Copies fill the rest (zeros or neighbours); no spills, and no columns of a row beyond it are loaded or stored."""
    call = of_sizes(fmt, *dims, **options)
    config = decode.configure(facts("decode", call, arch=90))
    for side, d in zip("KV", dims, strict=True):
        spec, codes = config.tensor_map_specs[side], getattr(config.shape, side).PACK
        assert spec.shape[-1] == (d // codes if spec.padded_heads == 1 else spec.box[-1])
        assert spec.box[-1] == (128 if d < 128 else 1 << (d - 1).bit_length()) // codes
    assert dims == (config.shape.Q_HEAD_DIM, config.constants.DV)
    split, *merge = compiled(call)
    assert split["shared"] <= 232448
    # int4 with 16 rows; 16 bytes where rows are not padded. Where scales are copied by word, two numbers that are read
    # again before the producer's loop.
    by_word = config.shape.K.SCALE_BLOCKS + config.shape.V.SCALE_BLOCKS > 0
    assert split["n_spills"] <= since({(3, 6): 8 * by_word, (3, 9): 24 if by_word else 8})
    assert all(x["n_spills"] == 0 for x in merge)
    assert "UTMALDG" in split["sass"]()
