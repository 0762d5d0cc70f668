"""What Gluon's kernels ask of the copy engine, without a GPU: every box of decode, and the copies as compiled."""

from __future__ import annotations

import json
import math
import re
from itertools import product

import pytest
import torch
from compile_tools import compile_launch, compile_launches, record
from copies import copies, faults

from tersekv.backends.gluon import decode
from tersekv.backends.gluon.sm90.parts.tensor_maps import (
    SMEM_ALIGNMENT,
    KVLayout,
    TensorMapSpec,
    align_smem_bytes,
    why_no_tensor_map,
)
from tersekv.cache import PagedKVCache
from tersekv.calls import AttentionCall
from tersekv.dispatch.plan import facts, plan
from tersekv.formats import KV_FORMATS
from tersekv.testing.cases import Case
from tersekv.testing.make import make

DIMS = ((64, 64), (128, 128), (256, 256), (64, 128), (256, 64), (96, 96), (192, 128))
OWN_SCALES = ("fp8_per_token_head", "int8_per_token_head", "nvfp4", "int4_per_token_head")


def call_of(fmt: str, heads: int, page: int, dims: tuple[int, int], layout: str, group: int, **places):
    """A call without memory."""
    d, dv = dims
    cache = PagedKVCache.allocate(
        1, 5, page, heads, d, head_dim_v=dv, format=fmt, layout=layout, device="meta", **places
    )
    c = cache[0]
    q = torch.empty(8, heads * group, d, dtype=torch.bfloat16, device="meta")
    table = torch.empty(8, 128, dtype=torch.int32, device="meta")
    return AttentionCall(
        q=q, k_cache=c.k, v_cache=c.v, k_scale_cache=c.k_scale_cache, v_scale_cache=c.v_scale_cache, page_table=table,
        seq_lens=table[:, 0], out=q[..., :dv].contiguous(), format=fmt, max_q_len=1, softmax_scale=0.1,
    )  # fmt: skip


def assert_copies_are_possible(spec: TensorMapSpec, places: int, step: int) -> None:
    """places: bytes of the ring; step: bytes from one copy to the next."""
    assert why_no_tensor_map(spec.shape, spec.strides, spec.box, spec.view.itemsize, spec.swizzle, step) is None
    assert step % 128 == 0
    assert step >= spec.nbytes()
    assert places % step == 0


@pytest.mark.parametrize("fmt", [name for name, f in KV_FORMATS.items() if f.code in decode.SUPPORTED_CODES])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_every_copy_of_decode_is_possible(fmt, layout):
    planned = 0
    pages, packed = (8, 16, 24, 32, 48, 64, 256), (False, True)
    inline = ("apart", "inline", "tail")[: 1 + 2 * (fmt in OWN_SCALES)]
    for heads, page, dims, p, i, group in product(range(1, 9), pages, DIMS, packed, inline, (1, 12, 40)):
        if p and (dims[0] != dims[1] or i == "tail"):
            continue
        f = facts(
            "decode",
            call_of(fmt, heads, page, dims, layout, group, packed=p, scales=i),
            arch=90,
        )
        if decode.why_not(f) is not None:
            continue
        config = decode.configure(f)
        tile_cfg, stages = config.shape, config.shape.STAGES
        copied = [x.SCALE_KIND and not tile_cfg.LARGE_M and not x.SCALE_BLOCKS for x in (tile_cfg.K, tile_cfg.V)]
        copied += [not x.CODE_STRIDES for x in (tile_cfg.K, tile_cfg.V)]
        assert len(config.tensor_map_specs) == sum(map(bool, copied)), "a box that is not possible was left out"
        for side, name in ((tile_cfg.K, "K"), (tile_cfg.V, "V")):
            codes, scales = config.tensor_map_specs[name], config.tensor_map_specs.get(name + "_SCALES")
            assert_copies_are_possible(codes, stages * tile_cfg.COPIES_PER_BUFFER * side.COPY_BYTES, side.COPY_BYTES)
            assert 2 * math.prod(side.SMEM_SHAPE) == stages * tile_cfg.COPIES_PER_BUFFER * side.COPY_BYTES
            assert codes.nbytes() == side.COPY_BYTES, "what is expected is what arrives"
            if scales is not None:
                assert_copies_are_possible(
                    scales, stages * tile_cfg.COPIES_PER_BUFFER * side.SCALE_SMEM_PITCH, side.SCALE_SMEM_PITCH
                )
                assert scales.nbytes() == side.SCALE_COPY_BYTES
                assert_scales_are_read_where_they_lie(side, tile_cfg)
        planned += 1
    assert planned > 100


def assert_scales_are_read_where_they_lie(side: KVLayout, tile_cfg: decode.DecodeTileConfig) -> None:
    """As `decode_attend.scale_box` counts boxes, and `decode_fetch.copy_scales` the places of copies."""
    per_copy = tile_cfg.KEYS_PER_BUFFER // tile_cfg.MMA_KEYS
    scale_bytes = tile_cfg.COPIES_PER_BUFFER * side.SCALE_COPY_BYTES // per_copy
    stage_bytes = tile_cfg.COPIES_PER_BUFFER * side.SCALE_SMEM_PITCH
    assert side.SCALE_SMEM_SHAPE[0] * scale_bytes == tile_cfg.STAGES * stage_bytes
    assert tile_cfg.COPIES_PER_BUFFER == 1 or side.SCALE_SMEM_PITCH == side.SCALE_COPY_BYTES, (
        "two copies lie side by side"
    )
    step = side.SCALE_SMEM_SHAPE[0] // (tile_cfg.STAGES * per_copy)
    read = [(stage * per_copy + j) * step * scale_bytes for stage in range(tile_cfg.STAGES) for j in range(per_copy)]
    assert read == [stage * stage_bytes + j * scale_bytes for stage in range(tile_cfg.STAGES) for j in range(per_copy)]


@pytest.mark.parametrize(
    ("fmt", "heads", "dims", "windows"),
    [
        ("fp8_e4m3", 8, (80, 80), (4, 4)),
        ("fp8_e4m3", 6, (80, 112), (2, 2)),
        ("int8_per_token_head", 8, (80, 112), (4, 2)),
        ("fp8_e5m2", 4, (144, 96), (4, 1)),
        ("fp8_e4m3", 5, (80, 80), (1, 1)),
        ("int4_per_token_head", 8, (80, 96), (4, 2)),
        ("int4_per_token_head", 4, (112, 176), (2, 4)),
        ("int4_per_token_head", 12, (144, 144), (4, 4)),
        ("bf16", 8, (80, 80), (1, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("page", [8, 64])
def test_every_heads_row_lies_where_it_is_read_in_its_window(fmt, heads, dims, windows, page):
    """The map seen with strides, all of it within the cache: in its box, a row is STEP units on from the last one's."""
    call = call_of(fmt, heads, page, dims, "NHD", 4)
    call = call._replace(k_cache=_random_like(call.k_cache), v_cache=_random_like(call.v_cache))
    f = facts("decode", call, arch=90)
    assert decode.why_not(f) is None
    config = decode.configure(f)
    shape = config.shape
    for side, name, cache, n in ((shape.K, "K", call.k_cache, windows[0]), (shape.V, "V", call.v_cache, windows[1])):
        spec, units = config.tensor_map_specs[name], cache.view(torch.int16).flatten(0, 1)
        assert side.PADDED_HEADS == n == spec.padded_heads
        rows = torch.as_strided(units, spec.shape, spec.strides)  # raises beyond the cache
        assert spec.shape[-1] <= spec.box[-1]
        for h in range(heads):
            row = rows[:, h // n, h % n] if n > 1 else rows[:, h]
            own = row.flatten(0, 1)[:, side.HEAD_SHIFT * (h % n) :][:, : units.shape[2]]
            assert torch.equal(own, units[:, h])
        aligned = all(units % 16 == 0 for units in spec.strides[:-1])
        assert n == 1 or aligned or fmt.startswith("int4"), "copies of 8 bits begin at multiples of 32 bytes"


def _random_like(x: torch.Tensor) -> torch.Tensor:
    return torch.randint(256, (*x.shape[:-1], x.shape[-1] * x.element_size()), dtype=torch.uint8).view(x.dtype)


def test_places_are_whole_multiples_of_128_bytes():
    assert [align_smem_bytes(n) for n in (1, 64, 128, 129, 512)] == [128, 128, 128, 256, 512]
    assert SMEM_ALIGNMENT == 128


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"shape": [0, 64]}, "a shape of [0, 64]"),
        ({"shape": [2**31, 64]}, "a shape of"),
        ({"strides": [0, 1]}, "strides of [0, 1]"),
        ({"strides": [60, 1]}, "strides of [60, 1]"),
        ({"strides": [2**39, 1]}, "strides of"),
        ({"strides": [64, 2]}, "strides of [64, 2]"),
        ({"box": [512, 64]}, "boxes of [512, 64]"),
        ({"box": [16, 4]}, "rows of 8 bytes"),
        ({"box": [24, 64]}, "boxes of [24, 64]"),
        ({"box": [64, 8]}, "rows of 16 bytes"),
        ({"box": [1, 512], "swizzle": 0}, "boxes of [1, 512]"),
        ({"box": [1, 32], "swizzle": 64}, "boxes that lie 64 bytes apart"),
        ({"smem_copy_pitch_bytes": 192}, "boxes that lie 192 bytes apart"),
        ({"smem_copy_pitch_bytes": 1024}, "boxes that lie 1024 bytes apart"),
        ({"shape": [1] * 6, "strides": [8] * 5 + [1], "box": [8] * 6}, "6 dimensions"),
    ],
    ids=str,
)
def test_a_copy_that_is_not_possible_says_why(wrong, says):
    right = {"shape": [100, 64], "strides": [64, 1], "box": [16, 64], "swizzle": 128, "smem_copy_pitch_bytes": 0}
    assert why_no_tensor_map(**right, itemsize=2) is None
    reason = why_no_tensor_map(**{**right, **wrong}, itemsize=2)
    assert reason is not None
    assert reason.startswith(says)


@pytest.mark.parametrize(
    ("name", "strides", "dims"),
    [
        ("scale", (2**31, 4, 1), (3, 4)),  # slots are rows
        ("scale", (2**33, 1, 16), (3, 4)),  # heads are rows
        ("cache", (2**29 * 256, 256, 64), (4, 5)),
    ],
)
def test_where_int32_does_not_count_all_rows_pages_are_a_dimension(name, strides, dims):
    """Of five pages; kernels number the rows of a cache in int32."""
    call = call_of("int8_per_token_head", 4, 16, (64, 64), "NHD", 4)
    for page, rank in zip((strides[0] // 2, strides[0]), dims, strict=True):
        names = [f"{x}_{name}_cache" if name == "scale" else f"{x}_cache" for x in "kv"]
        x = getattr(call, names[0])
        wide = torch.empty_strided(
            (5, *x.shape[1:]), (page, *strides[1:], 1)[: x.dim()], dtype=x.dtype, device="meta"
        )  # fmt: skip
        f = facts("decode", call._replace(**dict.fromkeys(names, wide)), arch=90)
        assert decode.why_not(f) is None
        specs = decode.configure(f).tensor_map_specs
        assert {len(specs[n].shape) for n in (("K_SCALES", "V_SCALES") if name == "scale" else "KV")} == {rank}


@pytest.mark.parametrize("fmt", OWN_SCALES)
@pytest.mark.parametrize("scales", ["apart", "tail"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_copies_are_asked_for_where_rows_lie(fmt, scales, layout):
    """Coordinates as `decode_fetch` makes them, of the first head of a program: the addresses of a copy's box."""
    for heads, page in product((1, 2, 4, 8), (8, 16, 24, 64)):
        call = call_of(fmt, heads, page, (128, 128), layout, 4, scales=scales)
        f = facts("decode", call, arch=90)
        if decode.why_not(f) is not None:  # too few heads side by side, apart
            continue
        config = decode.configure(f)
        tile_cfg, names = (
            config.shape,
            {"K": "k_cache", "V": "v_cache", "K_SCALES": "k_scale_cache", "V_SCALES": "v_scale_cache"},
        )
        for at, spec in config.tensor_map_specs.items():
            x = getattr(call, names[at])
            side, size, word = tile_cfg.K if at[0] == "K" else tile_cfg.V, x.element_size(), spec.view.itemsize
            copy, keys = (
                tile_cfg.KEYS_PER_BUFFER // tile_cfg.COPIES_PER_BUFFER,
                tile_cfg.MMA_KEYS // tile_cfg.COPIES_PER_BUFFER,
            )
            i_page, slot, h0 = 3, page - copy, heads - tile_cfg.HEADS_PER_CTA
            rows = [(i_page * spec.rows_per_page + slot) // keys] if spec.rows_per_page else [i_page, slot // keys]
            if len(at) == 1:
                place = [*rows, h0 // (tile_cfg.HEADS_PER_CTA // spec.box[-3]), 0, 0]
            elif side.SCALE_ROWS_ARE_KEYS:
                place = [*rows, 0, h0 * side.SCALE_WORDS]
            else:
                place = (
                    [slot // keys, i_page * spec.rows_per_page + h0, 0]
                    if spec.rows_per_page
                    else [i_page, slot // keys, h0, 0]
                )
            assert all(p + b <= n for p, b, n in zip(place, spec.box, spec.shape, strict=True))
            first = sum(p * s for p, s in zip(place, spec.strides, strict=True))
            steps = torch.zeros([], dtype=torch.int64)
            for n, s in zip(spec.box, spec.strides, strict=True):
                steps = steps[..., None] + s * torch.arange(n)
            rows = x.stride(1) * torch.arange(slot, slot + copy)[:, None, None]
            of_heads = x.stride(2) * torch.arange(h0, h0 + tile_cfg.HEADS_PER_CTA)[None, :, None]
            row_words = (x.shape[3] if x.dim() == 4 else 1) * size // word
            want = (i_page * x.stride(0) + rows + of_heads) * size + word * torch.arange(row_words)
            if len(at) == 1 or not side.SCALE_ROWS_ARE_KEYS:  # boxes of 16 keys, or halves of one, then heads
                want = want.reshape(copy // keys, keys, tile_cfg.HEADS_PER_CTA, row_words).transpose(1, 2)
            got = (first + steps) * word
            if at in "KV" and spec.box[-3] < tile_cfg.HEADS_PER_CTA:  # several heads a row
                n = tile_cfg.HEADS_PER_CTA // spec.box[-3]
                got = got.reshape(-1, spec.box[-3], keys, n, row_words).transpose(2, 3)
            assert torch.equal(got.flatten(), want.flatten()), (at, heads, page)


@pytest.mark.parametrize(
    ("fmt", "page", "dim", "layout"),
    [
        ("bf16", 8, 256, "NHD"),
        ("fp8_e4m3", 24, 64, "NHD"),
        ("int8_per_token_head", 8, 128, "HND"),
        ("nvfp4", 8, 128, "HND"),
    ],
)
def test_two_copies_of_8_keys_are_read_as_a_box_of_16(fmt, page, dim, layout):
    """What the compiler makes of a box, as it says in TTGIR: for each element in memory, whose it is."""
    call = make(Case("decode", fmt, "halves", heads=4, page=page, dim=dim, layout=layout))
    p = plan("decode", call, arch=90)
    assert p.backend == "gluon"
    tile_cfg, text = p.config.shape, compile_launches(p.run, call, p.config, 90)[0]["ttgir"]
    encodings = dict(re.findall(r"^(#\w+) = #ttg\.shared_linear<{offset = (\[.*?\]\])", text, re.MULTILINE))
    views = set(re.findall(r"memdesc_reshape .*? -> !ttg\.memdesc<([\dx]+)x([if]\d+), (#\w+)", text))
    seen = set()
    for dims, word, name in views:
        shape = [int(n) for n in dims.split("x")]
        heads, keys, width = (*shape, 1)[:3]
        assert (heads, keys) == (tile_cfg.HEADS_PER_CTA, tile_cfg.MMA_KEYS)
        at = torch.zeros(1, len(shape), dtype=torch.int64)
        for base in json.loads(encodings[name]):  # of a bit of the offset
            at = torch.cat([at, at ^ torch.tensor(base)])
        head, key, column = (*at.T, torch.zeros(len(at), dtype=torch.int64))[:3]
        panel = min(width, 64) if word == "i16" else width
        line = ((key // 8 * (width // panel) + column // panel) * heads + head) * 8 + key % 8  # as they are copied
        byte = (line * panel + column % panel) * (2 if word == "i16" else 4)
        if word == "i16":
            byte ^= (byte >> 7 & (panel * 2 // 16 - 1)) << 4  # a panel's swizzle
        assert torch.equal(byte, torch.arange(len(at)) * (2 if word == "i16" else 4)), dims
        seen.add(word)
    stored = {"i32"} if tile_cfg.K.SCALE_KIND == "block" else {"f32"} if tile_cfg.K.SCALE_KIND else set()
    assert seen == {"i16"} | stored


@pytest.mark.parametrize(
    ("fmt", "options"), [("int8_per_token_head", {"dim": 64}), ("nvfp4", {"dim": 64, "dim_v": 128})], ids=str
)
def test_scales_of_one_head_are_copied_to_places_of_128_bytes(fmt, options):
    """As compiled; `compile_launches` looks for faults in every kernel."""
    call = make(Case("decode", fmt, "copies", heads=1, page=16, **options))
    p = plan("decode", call, arch=90)
    assert p.backend == "gluon"
    text = compile_launches(p.run, call, p.config, 90)[0]["ttgir"]
    assert copies(text) >= 4
    assert faults(text) == []


def test_what_is_wrong_with_copies_is_seen():
    """64 bytes a copy, as scales of 16 keys of one head are; and a barrier that waits for more than comes."""
    call = make(Case("decode", "int8_per_token_head", "copies", heads=1, page=16))
    p = plan("decode", call, arch=90)
    fn, _, args, kwargs = record(p.run, call, p.config)[0]
    tile_cfg = args[-1]
    assert (tile_cfg.K.SCALE_COPY_BYTES, tile_cfg.K.SCALE_SMEM_PITCH) == (64, 128)
    packed = _side(tile_cfg.K), _side(tile_cfg.V)
    wrong = type(tile_cfg)(**{**vars(tile_cfg), "K": packed[0], "V": packed[1]})
    with pytest.raises(AssertionError, match="a copy begins at a multiple of 64 bytes"):
        compile_launch(fn, (*args[:-1], wrong), kwargs, 90)
    text = compile_launch(fn, args, kwargs, 90)["ttgir"]
    assert faults(text) == []
    assert "expects" in faults(re.sub(r"(barrier_expect %\w+), 2048", r"\1, 2064", text))[0]


def _side(side: KVLayout) -> KVLayout:
    return type(side)(
        **{
            **vars(side),
            "SCALE_SMEM_PITCH": 64,
            "SCALE_SMEM_SHAPE": (side.SCALE_SMEM_SHAPE[0] // 2, *side.SCALE_SMEM_SHAPE[1:]),
        }
    )
