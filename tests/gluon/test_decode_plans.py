"""Gluon's paged decode: who gets a plan, and how requests, rows and tiles are dealt."""

from __future__ import annotations

import pytest
import torch
from test_decode_compile import FORMATS, FOUR_BITS, call_of, of_sizes, tuned, turned, why_not

from tersekv.backends.gluon import decode
from tersekv.calls import AttentionCall
from tersekv.dispatch import checks
from tersekv.dispatch.plan import facts


def test_bounds_on_ragged_rows_share_their_kernels():
    """A longer prompt in the batch compiles nothing new, up to a power of two."""
    cu = torch.zeros(65, dtype=torch.int32)
    shapes = [
        decode.configure(facts("decode", call_of("fp8_e4m3", cu_seqlens_q=cu, max_q_len=n), arch=90)).shape
        for n in (130, 200, 256)
    ]
    assert shapes[0] == shapes[1] == shapes[2]


@pytest.mark.parametrize(
    ("fmt", "page", "requests", "pages", "tile", "joined"),
    [
        ("int8_per_token_head", 64, 1000, 2, 32, True),
        ("fp8_e4m3", 64, 256, 6, 32, True),
        ("fp8_e4m3", 64, 256, 7, 64, True),  # longer
        ("fp8_e4m3", 64, 64, 2, 64, True),  # fewer
        ("int8_per_token_head", 16, 136, 27, 32, True),
        ("int8_per_token_head", 16, 100, 27, 32, False),  # pieces of segments are many
        ("nvfp4", 64, 1000, 16, 32, True),
        ("nvfp4", 64, 100, 16, 64, True),
        ("nvfp4", 64, 64, 16, 64, False),  # splits of requests are many
    ],
)
def test_many_short_requests_are_little_cut(fmt, page, requests, pages, tile, joined):
    call = call_of(fmt, page_size=page, requests=requests, max_pages=pages)
    config = decode.configure(facts("decode", call, arch=90))
    assert (config.constants.BLOCK_N, config.shape.FUSED_COMBINE_ROWS > 0) == (tile, joined)


@pytest.mark.parametrize(
    ("fmt", "requests", "pages", "grid"),
    [
        ("nvfp4", 130, 6, 260),
        ("nvfp4", 130, 7, 264),  # longer
        ("nvfp4", 100, 6, 264),  # fewer than CTAs
        ("nvfp4", 200, 6, 264),  # many more
        ("fp8_e4m3", 200, 6, 400),
    ],
)
def test_as_many_short_requests_as_ctas_are_not_split(fmt, requests, pages, grid):
    config = decode.configure(facts("decode", call_of(fmt, requests=requests, max_pages=pages), arch=90))
    assert [launch.grid[0] for launch in config.launches.kernel_launches] == [grid]
    assert (grid == 2 * requests) == config.shape.UNSPLIT


@pytest.mark.parametrize(
    ("fmt", "options", "reason"),
    [
        ("bf16", {"drafts": 8}, "at most 16 query rows"),
        ("fp8_e4m3", {"head_dim": 88}, "head sizes"),
        ("nvfp4", {"head_dim": 32}, "head sizes"),
        ("nvfp4", {"head_dim": 96, "group": 8, "drafts": 8}, "head sizes of 64, 128 or 256 with 64 query rows"),
        ("nvfp4", {"head_dim": 96, "page_size": 24}, "pages of a multiple of 16 with blocks of 6 scales"),
        ("fp8_e4m3", {"head_dim": 96, "group": 8, "drafts": 8}, "head sizes of 64, 128 or 256 with 64 query rows"),
        ("int4_per_token_head", {"head_dim": 80, "heads": 1, "page_size": 24}, "in pages of a multiple of 16"),
        ("int4_per_token_head", {"head_dim": 80, "scales": "inline"}, "multiples of 16 bytes"),
        ("fp8_e4m3", {"page_size": 12}, "pages of a multiple of 8"),
        ("int8_per_token_head", {"page_size": 24, "heads": 2}, "and 128 bytes of 8 keys in pages of no multiple of 16"),
        ("nvfp4", {"scales": "inline"}, "multiples of 16 bytes"),
        ("fp8_per_token_head", {"heads": 6}, "stored scales"),
        ("int4_per_token_head", {"group": 8, "drafts": 8, "head_dim": 256}, "head sizes up to 128 with 64 query rows"),
        ("fp8_e4m3/int4_per_token_head", {"group": 8, "drafts": 8}, "at most 32 query rows"),
        ("bf16/int4_per_token_head", {}, "takes no pairs with 16 bits"),
        ("fp8_e4m3", {"head_dim": 512, "group": 8, "drafts": 8}, "at most 32 query rows of a KV head with heads of"),
        ("nvfp4", {"head_dim": 512, "layout": "HND"}, "heads side by side with heads of 512"),
        ("int8_per_token_head", {"head_dim": 512, "heads": 4, "drafts": 4}, "stored scales"),
        ("fp8_e4m3", {"head_dim": 384}, "from 64 to 256, or 512 both, got 384"),
    ],
)
def test_refuses_what_it_does_not_run(fmt, options, reason):
    assert reason in why_not(call_of(fmt, **options))


def test_bf16_keys_leave_a_finer_query_to_triton():
    """Turned it is of fp32, and bf16 would round it."""
    call = call_of("bf16")
    assert why_not(call) is why_not(turned(call, "v", "v")) is None
    assert "got float16" in why_not(call._replace(q=call.q.half()))
    for turn in (("k", ""), ("", "k"), ("kv", "kv")):
        assert "wants keys that lie as they are with bf16" in why_not(turned(call, *turn))
        assert why_not(turned(call_of("fp16"), *turn)) is None
    assert "heads of up to 256 with rotated rows" in why_not(turned(call_of("fp8_e4m3", head_dim=512), "v", ""))


def test_queries_come_ahead_where_they_can():
    """With their tiles, in copies of 16 bytes; not with many rows, nor where the ring of tiles leaves no room."""

    def ahead(fmt, q=None, **options):
        call = call_of(fmt, **options)
        return decode.configure(
            facts("decode", call if q is None else call._replace(q=q), arch=90)
        ).shape.NUM_QUERY_STAGES

    for fmt in FORMATS:
        assert ahead(fmt) == (0 if fmt in FOUR_BITS else 2)
    assert ahead("fp8_e4m3", page_size=16) == 1
    assert ahead("fp8_e4m3", group=16) == ahead("fp8_e4m3", drafts=8) == 0
    assert ahead("fp8_e4m3", q=torch.empty(64, 32, 136, dtype=torch.bfloat16)[..., :128]) == 0
    assert "LDGSTS.E.BYPASS.128" in tuned("fp8_e4m3")[0]["sass"]()


def narrowed(x: torch.Tensor, width: int) -> torch.Tensor:
    """A tensor like x whose rows take `width` elements."""
    return torch.empty(*x.shape[:-1], width, dtype=x.dtype)[..., : x.shape[-1]]


def test_refuses_what_a_tensor_map_cannot_hold():
    call = call_of("fp8_e4m3")
    k = call.k_cache
    behind = torch.empty(k.numel() + 8, dtype=torch.uint8)[8:].view(k.dtype).view(k.shape)
    for bad in (narrowed(k, 136), behind, k[:, :, :1].expand_as(k), k[:, :1].expand_as(k), k[:1].expand_as(k), k[:0]):
        for changes in ({"k_cache": bad}, {"v_cache": bad}):
            assert "rows at equal distances" in why_not(call._replace(**changes))
    assert why_not(call._replace(k_cache=narrowed(k, 144))) is None


def test_more_rows_than_fit_31_bits_are_named_by_their_pages():
    call = AttentionCall(*[x.to("meta") if isinstance(x, torch.Tensor) else x for x in call_of("fp8_e4m3")])
    many, too_many = (torch.empty(n, 64, 8, 128, dtype=call.k_cache.dtype, device="meta") for n in (2**24, 2**25))
    for x, dims in ((many, 4), (too_many, 5)):  # 2^40 elements, and twice that
        wide = call._replace(k_cache=x, v_cache=x)
        assert why_not(wide) is None
        assert len(decode.configure(facts("decode", wide, arch=90)).tensor_map_specs["K"].shape) == dims


@pytest.mark.parametrize("side", ["k_scale", "v_scale"])
def test_scales_of_heads_must_lie_side_by_side(side):
    for bad in (torch.ones(16)[::2], torch.ones(1).expand(8)):
        with pytest.raises(ValueError, match=f"{side}: want stride 1"):
            checks.facts(facts("decode", call_of("fp8_e4m3", **{f"{side}_t": bad}), arch=90))


@pytest.mark.parametrize("sides", [("k", ""), ("", "v")])
def test_rows_that_are_padded_are_not_turned(sides):
    """A rotation goes by the head's size, and the tile has another."""
    call = of_sizes("fp8_e4m3", 96, 96)
    assert decode.why_not(facts("decode", call, arch=90)) is None
    assert "rotated rows or channel scales" in decode.why_not(facts("decode", turned(call, *sides), arch=90))
