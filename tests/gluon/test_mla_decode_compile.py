"""MLA decode in Gluon compiled for sm_90: instructions, spills, shared memory; its facts → choice; what it refuses."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from compile_tools import compile_launch, record, since

from tersekv.backends.gluon import mla_decode
from tersekv.backends.host.launch import CompiledKernel
from tersekv.cache import PagedLatentCache
from tersekv.calls import MLADecodeCall
from tersekv.dispatch import plan
from tersekv.testing.cases import Case
from tersekv.testing.make import make as made

SHARED = 227 << 10
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def make(format="fp8_e4m3", heads=16, page=64, q_dtype=BF16, drafts=1, rank=512, rope=64) -> MLADecodeCall:
    """A call of four requests whose tensors are never read."""
    c = PagedLatentCache.allocate(1, 4, page, format=format, kv_lora_rank=rank, qk_rope_head_dim=rope)[0]
    rows = 4 * drafts
    q = torch.empty(rows, heads, rank + rope, dtype=q_dtype)
    return MLADecodeCall(
        q[..., :rank], q[..., rank:], c.ckv, c.kpe, c.ckv_scale_cache, torch.empty(4, 64, dtype=torch.int32),
        torch.empty(4, dtype=torch.int32), None, torch.empty(rows, heads, rank, dtype=BF16),
        torch.empty(rows, heads), format, drafts, 0.1, None, 1.0, None, 1.0, None, "exact",
    )  # fmt: skip


def facts(call: MLADecodeCall, arch: int = 90):
    return plan.facts("mla_decode", call, arch)


def compiled(call: MLADecodeCall) -> dict[str, dict]:
    config = mla_decode.configure(facts(call))
    launches = record(mla_decode.run, call, config)
    return {fn.fn.__name__: compile_launch(fn, args, kwargs, 90) for fn, _, args, kwargs in launches}


def loop_of_tiles(sass: str, least: int = 31) -> list[str]:
    """Instructions of the smallest loop with `least` products: it both scores tiles and adds their values."""
    code = [(int(a, 16), text) for a, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)]
    loops = []
    for address, text in code:
        jump = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        if jump and int(jump[1], 16) < address:
            body = [t for a, t in code if int(jump[1], 16) <= a <= address]
            if sum("GMMA" in t for t in body) >= least:
                loops.append(body)
    return min(loops, key=len)


def count(code: list[str], *names: str) -> int:
    return sum(any(re.match(rf"(@!?U?P\w+ )?{n}\b", t) for n in names) for t in code)


@pytest.mark.parametrize(
    ("format", "heads", "q_dtype"),
    [("fp8_e4m3", 16, BF16), ("fp8_e4m3", 32, E4M3), ("fp8_ds_mla", 16, BF16), ("bf16", 128, BF16)],
)
def test_the_loop_multiplies_on_the_matrix_unit_and_spills_nothing(format, heads, q_dtype):
    kernels = compiled(replace_requests(make(format, heads, q_dtype=q_dtype), 512))
    assert all(k["shared"] <= SHARED for k in kernels.values())
    split = next(k for name, k in kernels.items() if name != "combine_kernel")
    loop = loop_of_tiles(split["sass"](), 20 if format == "bf16" else 31)
    assert count(loop, "STL", "LDL") <= 2 * (format == "fp8_ds_mla")  # a counter of tiles
    if format == "bf16":
        # Scores of one tile, a quarter of the columns at a time and the rotary part; a half of the values of two.
        assert count(loop, "HGMMA") == 2 * 4 + 4 + 2 * 4
        assert count(loop, "WARPGROUP.DEPBAR") == 3  # the matrix unit's products are not waited for one by one
    else:
        # Scores straight from the codes: 128 columns at a time, and the rotary part, of 8 or 16 bits.
        rotary = format == "fp8_e4m3"
        assert count(loop, "QGMMA") == 4 * 4 + 2 * rotary
        # Values: 8 tiles of 64 columns × 4 steps of 16 keys, each code converted once, two in one instruction.
        assert count(loop, "HGMMA") == 8 * 4 + 4 * (not rotary)
        assert 128 <= count(loop, "F2FP") < 150


@pytest.mark.parametrize("heads", [16, 32])
def test_16_bit_latents_of_few_heads_are_multiplied_where_they_lie_and_not_padded(heads):
    split = compiled(replace_requests(make("bf16", heads), 512))["mla_decode_small_m_kernel"]
    assert split["shared"] <= SHARED
    loop = loop_of_tiles(split["sass"](), 60)
    # Scores: 9 boxes of 64 columns × 4 steps. Values: 8 boxes × 4 steps of 16 keys, transposed. All 64 keys × heads.
    assert count(loop, rf"HGMMA\.64x{heads}x16\.F32\.BF16") == 9 * 4 + 8 * 4
    assert sum(".tnspA" in t for t in loop) == 8 * 4
    assert count(loop, r"WARPGROUP\.DEPBAR") == 2
    assert count(loop, "STL", "LDL", "LDSM") == 0


@pytest.mark.parametrize(
    ("format", "heads", "q_dtype", "rank", "rope", "spills"),
    [
        ("bf16", 16, BF16, 256, 64, 0), ("bf16", 32, BF16, 384, 64, 16), ("bf16", 128, BF16, 256, 32, 0),
        ("bf16", 128, BF16, 384, 64, 0), ("bf16", 16, BF16, 128, 48, 0), ("fp8_e4m3", 16, BF16, 256, 32, 0),
        ("fp8_e4m3", 32, E4M3, 256, 64, 0), ("fp8_e4m3", 128, BF16, 256, 64, 48),
        ("fp8_e4m3", 128, E4M3, 384, 48, 40), ("fp8_e4m3", 16, BF16, 384, 64, 0), ("fp8_e4m3", 32, E4M3, 320, 48, 8),
        ("fp8_e4m3", 16, BF16, 128, 16, 0),
    ],
)  # fmt: skip
def test_narrower_latents_take_the_same_kernels(format, heads, q_dtype, rank, rope, spills):
    """Rows of up to rank 256 take half of the shared memory; three_warpgroups has 512 columns."""
    call = replace_requests(make(format, heads, q_dtype=q_dtype, rank=rank, rope=rope), 512)
    config = mla_decode.configure(facts(call))
    c = config.constants
    three = config.launches.kernel_launches[0].launch.fn.fn.__name__ == "mla_decode_three_warpgroups_kernel"
    assert c.PACK * c.BLOCK_DV == c.PACK * c.CHUNK * c.CHUNKS == (256 if rank <= 256 and not three else 512)
    kernels = compiled(call)
    assert all(k["shared"] <= SHARED for k in kernels.values())
    assert next(k for name, k in kernels.items() if name != "combine_kernel")["n_spills"] <= since(
        {(3, 6): spills, (3, 7): spills + 64}
    )


def test_lists_over_narrower_latents_are_refused():
    call = make(rank=256)._replace(indices=torch.zeros(4, 64, dtype=torch.int32))
    assert "latents of 512 + 64 with lists, got 256 + 64" in mla_decode.why_not(facts(call))


@pytest.mark.parametrize(("heads", "drafts", "rows"), [(16, 1, 16), (5, 3, 16), (17, 1, 32), (8, 4, 32), (33, 1, 64)])
def test_a_query_of_16_bit_latents_is_padded_to_what_its_kernel_takes(heads, drafts, rows):
    f = facts(make("bf16", heads, drafts=drafts)._replace(page_table=torch.empty(4, 1024, dtype=torch.int32)))
    kernel = mla_decode.configure(f).launches.kernel_launches[0].launch.fn.fn.__name__
    assert mla_decode.choose_config(f).block_m == rows
    assert kernel == ("mla_decode_two_warpgroups_kernel" if rows == 64 else "mla_decode_small_m_kernel")


@pytest.mark.parametrize("q_dtype", [BF16, E4M3])
@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_ds_mla"])
def test_warpgroups_of_many_heads_keep_their_products_under_way(format, q_dtype):
    kernels = compiled(make(format, 128, q_dtype=q_dtype))
    assert all(k["shared"] <= SHARED for k in kernels.values())
    sass = kernels["mla_decode_three_warpgroups_kernel"]["sass"]()
    terms, rotary = 2 if q_dtype == BF16 else 1, format == "fp8_e4m3"
    values, scores = loop_of_tiles(sass, 16), loop_of_tiles(sass, terms * 4 * 4 + 2)
    # 4 tiles of 64 columns × 4 steps of 16 keys, each code converted once, two in one instruction; four waits.
    assert (count(values, "HGMMA"), count(values, "QGMMA"), count(values, "F2FP")) == (16, 0, 64)
    # ptxas finds too few registers in what 3.7 and 3.8 make of it, and has each product wait.
    serial = since({(3, 6): False, (3, 7): format == "fp8_e4m3", (3, 8): True, (3, 9): False})
    assert count(values, r"WARPGROUP\.DEPBAR") == (16 if serial else 4)
    assert count(values, "STL", "LDL") <= 10  # counters of tiles and segments
    # Straight from the codes: four pieces of 128 columns, and the rotary part, of 8 or 16 bits; a wait for each.
    assert count(scores, "QGMMA") == terms * (4 * 4 + 2 * rotary)
    assert count(scores, "HGMMA") == 4 * (not rotary)
    assert serial or count(scores, r"WARPGROUP\.DEPBAR") == 5
    assert count(scores, "SHFL") == 4  # where a reference is raised, which is rare


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_ds_mla"])
def test_few_heads_vote_once_a_tile_and_convert_values_beside_the_scores(format):
    loop = loop_of_tiles(compiled(make(format))["mla_decode_small_m_kernel"]["sass"]())
    places = [i for i, t in enumerate(loop) if "VOTE.ANY" in t or t.startswith("STSM")]
    first, last = places[0], places[-1]
    # Whether a reference is raised is known from a byte of each warp; shuffles are behind the branch.
    assert count(loop[:first], "SHFL") == 0
    assert count(loop[last:], "SHFL") == 0
    # Scores of 128 columns each, and of the rotary part, are under way together, beside the first values.
    assert count(loop[:first], r"WARPGROUP\.DEPBAR") == 1
    assert count(loop[:first], "LDSM") == (4 if format == "fp8_e4m3" else 0)


@pytest.mark.parametrize(("format", "heads"), [("fp8_e4m3", 16), ("fp8_ds_mla", 16), ("fp8_e4m3", 32)])
def test_two_programs_of_few_heads_fit_a_multiprocessor(format, heads):
    split = compiled(replace_requests(make(format, heads), 512))["mla_decode_small_m_kernel"]
    assert 2 * (split["shared"] + 1024) <= 228 << 10
    assert 2 * split["n_regs"] * 256 <= 65536


def test_two_warpgroups_take_turns_where_two_programs_do_not_fit():
    split = compiled(replace_requests(make("fp8_ds_mla", 32), 512))["mla_decode_small_m_kernel"]
    assert split["shared"] <= SHARED
    assert split["n_regs"] * 384 <= 65536
    # Three places, and for each a barrier of either: whoever waits has waited for the phase before.
    assert "memdesc<6x1xi64" in split["ttgir"]


@pytest.mark.parametrize(("format", "heads"), [("fp8_e4m3", 16), ("fp8_ds_mla", 128), ("bf16", 16), ("bf16", 128)])
def test_what_partitions_are_given_is_written_when_all_warps_have_read_what_lay_there(format, heads):
    for requests in (4, 2000):
        kernels = compiled(replace_requests(make(format, heads), requests))
        sass = next(k for name, k in kernels.items() if name != "combine_kernel")["sass"]()
        shared = re.findall(r"\b(?:STS|LDS|BAR\.SYNC|USETMAXREG)\b.*?;", sass)
        # Where partitions begin: what they are given, a barrier of all warps, and registers given back.
        befores = []
        for i, t in enumerate(shared):
            if "DEALLOC" in t and re.search(r"SYNC\S* 0x1\b", shared[i - 1]) and shared[i - 2].startswith("STS"):
                befores.append([t for t in shared[: i - 1] if not t.startswith("STS")][-1])
        (before,) = [t for t in befores if "TRY_ALLOC" not in t]  # that is where they end
        assert before.startswith("BAR.SYNC")


@pytest.mark.parametrize(("format", "heads"), [("fp8_e4m3", 16), ("fp8_ds_mla", 32), ("bf16", 16), ("bf16", 128)])
def test_every_barrier_has_memory_of_its_own(format, heads):
    # What nobody waits for would lie where sums are exchanged before the partitions begin.
    kernels = compiled(replace_requests(make(format, heads), 512))
    sass = next(k for name, k in kernels.items() if name != "combine_kernel")["sass"]()
    places = re.findall(r"SYNCS\.EXCH\.64 URZ, \[(.*?)\]", sass)
    assert len(places) == len(set(places)) >= 4


@pytest.mark.parametrize(("heads", "rank", "rope"), [(32, 128, 16), (8, 384, 64), (64, 320, 64)])
def test_the_zeros_past_a_rank_are_hidden_from_ptxas(heads, rank, rope):
    """With ragged drafts it mistook other converted zeros than with one token: `merges.faults`."""
    lens: dict = {"lens": (9000, 300, 0, 70), "q_lens": (3, 1, 0, 4), "ragged": True, "page": 16, "spread": True}
    case = Case("mla_decode", "fp8_e4m3", "ranks", rank=rank, rope=rope, heads=1, group=heads, **lens)
    assert all(k["shared"] <= SHARED for k in compiled(made(case, "cpu")).values())


@pytest.mark.parametrize(
    ("heads", "drafts", "rows", "blocks"),
    [(1, 1, 16, 1), (16, 1, 16, 1), (16, 4, 64, 1), (32, 1, 32, 1), (64, 1, 64, 1), (128, 1, 64, 2), (24, 1, 32, 1),
     (40, 1, 64, 1), (16, 2, 32, 1), (21, 1, 32, 1), (96, 1, 64, 2), (96, 2, 64, 3), (24, 4, 64, 2), (128, 4, 64, 4),
     (33, 4, 64, 3), (128, 3, 64, 2), (67, 1, 64, 1)],
)  # fmt: skip
def test_heads_are_dealt_in_blocks_that_fill_their_rows(heads, drafts, rows, blocks):
    # The page table has room for many tiles.
    f = facts(make(heads=heads, drafts=drafts)._replace(page_table=torch.empty(4, 1024, dtype=torch.int32)))
    k, config = mla_decode.choose_config(f), mla_decode.configure(f)
    c = config.constants
    assert (k.block_m, c.HEADS) == (rows, blocks)
    assert heads == c.HEADS * c.GROUP
    assert config.launches.kernel_launches[0].grid[0] % c.HEADS == 0
    segments = -(-drafts * c.GROUP // rows)
    assert config.launches.kernel_launches[1].grid[0] == 4 * segments * c.HEADS  # of four requests


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": "fp8_e5m2"}, "fp8_e5m2"),
        ({"page": 3}, "pages"),
        ({"page": 8}, "pages"),
        ({"q_dtype": torch.float32}, "got float32"),
        ({"q_dtype": torch.float16}, "got float16"),
        ({"format": "fp16"}, "fp16"),
        ({"rank": 264}, "up to 512 + 64, got 264 + 64"),
        ({"rank": 528}, "up to 512 + 64, got 528 + 64"),
        ({"rope": 72}, "up to 512 + 64, got 512 + 72"),
        ({"rope": 0}, "up to 512 + 64, got 512 + 0"),
        ({"format": "fp8_ds_mla", "rank": 256}, "latents of 512 + 64 with fp8_ds_mla, got 256 + 64"),
    ],
)
def test_what_it_refuses_it_says(changes, reason):
    assert reason in mla_decode.why_not(facts(make(**changes)))


def pitched(x: torch.Tensor, pitch: int, first: int = 0) -> torch.Tensor:
    """A tensor like x whose slots lie `pitch` elements apart, from byte `first` on."""
    memory = torch.empty(x.shape[0] * x.shape[1] * pitch * x.itemsize + 64, dtype=torch.uint8)[first:]
    memory = memory[: len(memory) // x.itemsize * x.itemsize].view(x.dtype)
    return memory.as_strided(x.shape, (x.shape[1] * pitch, pitch, 1), memory.storage_offset())


@pytest.mark.parametrize(
    ("part", "pitch", "first"),
    [("ckv", 577, 0), ("ckv", 520, 0), ("ckv", 576, 8), ("kpe", 65, 0), ("kpe", 72, 0), ("kpe", 64, 1)],
)
def test_rows_that_a_tensor_map_cannot_hold_are_refused(part, pitch, first):
    call = make()
    x = pitched(getattr(call, part), pitch, first)
    assert "multiples of 16 bytes" in mla_decode.why_not(facts(call._replace(**{part: x})))
    x = pitched(getattr(call, part), -(-pitch // 16) * 16)
    assert mla_decode.why_not(facts(call._replace(**{part: x}))) is None


def test_caches_that_share_memory_but_not_their_scales_have_descriptors_of_their_own(monkeypatch):
    call = make("fp8_ds_mla")
    first, second = (call._replace(ckv_scale_cache=torch.empty(4, 64, 4)) for _ in range(2))
    split = mla_decode.configure(facts(first)).launches.kernel_launches[0]
    monkeypatch.setattr(
        CompiledKernel, "launcher_args_of_tensor_maps", lambda self, made: [(d.base.data_ptr(),) for d in made]
    )
    for c in (first, second, first):
        addresses = [x.data_ptr() for x in (c.ckv, c.kpe, c.ckv_scale_cache)]
        found = split.cached_launcher_args_without_addresses(SimpleNamespace(**c._asdict(), part=c.out))
        assert [x for x in found if x in addresses] == addresses


@pytest.mark.parametrize("page", [16, 32, 64, 128])
def test_pages_of_many_sizes_are_taken(page):
    f = facts(make(page=page))
    assert mla_decode.why_not(f) is None
    assert page == mla_decode.configure(f).constants.PAGE


def test_few_requests_are_merged_by_many_small_programs():
    call = make()
    one = replace_requests(call, 1)
    many = replace_requests(call, 512)
    assert mla_decode.configure(facts(one)).launches.kernel_launches[1].grid[2] > 1
    assert mla_decode.configure(facts(many)).launches.kernel_launches[1].grid[2] == 1


def replace_requests(call: MLADecodeCall, n: int) -> MLADecodeCall:
    heads = call.q_nope.shape[1]
    q = torch.empty(n, heads, 576, dtype=call.q_nope.dtype)
    return call._replace(
        q_nope=q[..., :512], q_pe=q[..., 512:], page_table=torch.empty(n, 64, dtype=torch.int32),
        seq_lens=torch.empty(n, dtype=torch.int32), out=torch.empty(n, heads, 512, dtype=BF16),
        lse=torch.empty(n, heads),
    )  # fmt: skip


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_ds_mla"])
@pytest.mark.parametrize(
    ("requests", "pages", "heads"), [(1, 64, 32), (1, 128, 32), (3, 64, 32), (1, 256, 64), (8, 64, 64), (4, 4, 64)]
)
def test_few_tiles_of_many_heads_go_in_more_blocks_and_fewer_pieces(requests, pages, heads, format):
    call = make(format, 128)._replace(
        page_table=torch.empty(requests, pages, dtype=torch.int32), seq_lens=torch.empty(requests, dtype=torch.int32)
    )
    c = mla_decode.configure(facts(call)).constants
    assert heads == c.GROUP
    assert 128 // heads == c.HEADS
    assert c.BLOCK_M == 64


@pytest.mark.parametrize(
    ("heads", "requests", "rows", "blocks"),
    [(32, 12, 16, 2), (32, 13, 32, 1), (17, 1, 32, 1), (48, 11, 32, 2), (64, 8, 32, 2), (64, 9, 64, 1), (96, 5, 32, 3),
     (128, 4, 32, 4), (128, 5, 64, 2), (37, 1, 64, 1)],
)  # fmt: skip
def test_few_tiles_of_16_bit_latents_go_in_blocks_that_are_not_padded(heads, requests, rows, blocks):
    c = mla_decode.configure(facts(replace_requests(make("bf16", heads), requests))).constants
    assert (rows, blocks) == (c.BLOCK_M, c.HEADS)


@pytest.mark.parametrize(
    ("format", "requests", "rows", "blocks"),
    [
        ("fp8_e4m3", 33, 16, 2),
        ("fp8_e4m3", 34, 32, 1),
        ("fp8_ds_mla", 49, 16, 2),
        ("fp8_ds_mla", 50, 32, 1),
    ],
)
def test_few_tiles_of_32_heads_go_in_two_blocks(format, requests, rows, blocks):
    c = mla_decode.configure(facts(replace_requests(make(format, 32), requests))).constants
    assert (rows, blocks) == (c.BLOCK_M, c.HEADS)


@pytest.mark.parametrize("heads", [16, 128])
def test_the_split_pass_and_the_merge_wait_for_the_launch_in_front_before_they_read(heads):
    call = make("bf16", heads)
    config = mla_decode.configure(facts(call))
    for i, (fn, _, args, kwargs) in enumerate(record(mla_decode.run, call, config)):
        assert kwargs["launch_pdl"]
        before, behind = compile_launch(fn, args, kwargs, 90)["ptx"].split("griddepcontrol.wait")
        assert "ld.global" not in before
        assert "ld.global" in behind
        # Programs of the merge would crowd on the multiprocessors that are free first; what comes next may prepare.
        assert ("griddepcontrol.launch_dependents" in before) == (i == 1)


@pytest.mark.parametrize(("pages", "page", "whole"), [(4, 64, True), (5, 64, False), (1, 256, True), (16, 16, True)])
@pytest.mark.parametrize(("format", "heads"), [("fp8_e4m3", 16), ("fp8_e4m3", 32), ("fp8_ds_mla", 128), ("bf16", 128)])
def test_segments_that_a_page_table_bounds_are_not_cut(format, heads, pages, page, whole):
    f = facts(make(format, heads, page)._replace(page_table=torch.empty(4, pages, dtype=torch.int32)))
    config = mla_decode.configure(f)
    assert whole == config.constants.UNSPLIT
    assert (len(config.launches.kernel_launches) == 1) == whole
    if whole:
        assert config.launches.kernel_launches[0].grid[0] == 4 * config.constants.HEADS


def test_more_segments_than_fit_at_once_are_dealt_in_equal_shares():
    narrow = [replace_requests(make(), n)._replace(page_table=torch.empty(n, 4, dtype=torch.int32)) for n in (264, 265)]
    assert [len(mla_decode.configure(facts(c)).launches.kernel_launches) for c in narrow] == [1, 2]


def listed(call: MLADecodeCall, n: int = 2048, by_slot: bool = False) -> MLADecodeCall:
    where = {"page_table": None, "seq_lens": None} if by_slot else {}
    return call._replace(indices=torch.empty(call.out.shape[0], n, dtype=torch.int32), **where)


@pytest.mark.parametrize("by_slot", [False, True])
@pytest.mark.parametrize(
    ("format", "heads", "copies"),
    # Of a thread, 16 bytes each: of 64 keys 1024 or 512 bytes of latents, rotary parts, group scales.
    [("bf16", 16, 36), ("bf16", 128, 24), ("fp8_e4m3", 128, 18), ("fp8_ds_mla", 16, 21), ("fp8_ds_mla", 128, 20)],
)
def test_rows_of_listed_keys_are_copied_16_bytes_at_a_time(format, heads, copies, by_slot):
    call = listed(replace_requests(make(format, heads, page=3), 512), by_slot=by_slot)
    kernels = compiled(call)
    assert next(iter(kernels)) == "compact_visible_listed_rows_kernel"
    assert all(k["shared"] <= SHARED for k in kernels.values())
    split = next(k for name, k in kernels.items() if name.startswith("mla_decode"))
    sass = split["sass"]()
    assert "UTMALDG" not in sass
    assert len(re.findall(r"LDGSTS\.E\.BYPASS\.128 ", sass)) == copies
    assert "LDGSTS.E " not in sass
    assert split["n_spills"] <= since({(3, 6): 96, (3, 7): 160})  # addresses, between tiles


def test_lists_of_more_keys_than_the_workspace_holds_are_refused():
    call = make()
    assert mla_decode.why_not(facts(listed(call, 1 << 24))) is None
    assert "lists of 67108864 keys in all, got 67108868" in mla_decode.why_not(facts(listed(call, (1 << 24) + 1)))
    config = mla_decode.configure(facts(listed(call, 0)))
    assert config.launches.kernel_launches == ()


@pytest.mark.parametrize(("format", "heads"), [("fp8_e4m3", 16), ("fp8_ds_mla", 128), ("bf16", 16), ("bf16", 128)])
def test_an_lse_without_its_sinks_is_made_by_every_kernel(format, heads):
    call = replace_requests(make(format, heads), 512)._replace(sinks=torch.empty(heads))
    both, keys = compiled(call), compiled(call._replace(lse_of_keys=True))
    assert both.keys() == keys.keys()
    for name, kernel in keys.items():
        assert kernel["shared"] <= SHARED
        # One more logarithm's operand, and no maximum of its own.
        assert kernel["ptx"] != both[name]["ptx"], name
