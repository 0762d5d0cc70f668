"""Hopper's decode with head sizes that are no powers of two: its rows in shared memory are, filled up with zeros or
with what lies beside them (`tensor_maps._padded_heads_and_word_shift_per_head`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tersekv.dispatch.plan import plan
from tersekv.testing.cases import Case
from tersekv.testing.make import make
from tersekv.testing.verify import PASSED, run

pytestmark = pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="kernels for Hopper")
FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head")
LENS = (70, 9, 0, 400, 129)


def passes(fmt: str, dim: int, dim_v: int = 0, drafts: int = 1, group: int = 4, **options: Any) -> None:
    fields = {"lens": LENS, "heads": 4, "page": 64, "mask": drafts > 1, "spread": True, **options}
    fields = {"q_lens": (drafts,) * len(fields["lens"]), **fields}
    case = Case("decode", fmt, "sizes", group=group, dim=dim, dim_v=dim_v, **fields)
    result = run(case, "cuda", "gluon")
    assert result.status == PASSED, result.message


@pytest.mark.parametrize("group", [1, 5, 8])
@pytest.mark.parametrize(("dim", "dim_v"), [(80, 0), (96, 0), (112, 0), (144, 0), (192, 0), (192, 128), (64, 96)])
@pytest.mark.parametrize("fmt", FORMATS)
def test_one_row(fmt, dim, dim_v, group):
    passes(fmt, dim, dim_v, group=group)


@pytest.mark.parametrize(("heads", "page"), [(2, 64), (4, 8), (8, 16)])
@pytest.mark.parametrize(
    ("dim", "dim_v"),
    [(80, 0), (96, 0), (112, 0), (144, 0), (176, 0), (192, 0), (192, 128), (224, 96), (112, 80), (128, 80)],
)
def test_four_bit_integers(dim, dim_v, page, heads):
    for drafts in (1, 4):
        passes("int4_per_token_head", dim, dim_v, drafts, heads=heads, page=page)


@pytest.mark.parametrize(("heads", "page", "layout"), [(4, 64, "NHD"), (4, 16, "HND"), (8, 32, "NHD"), (2, 128, "NHD"),
                                                       (1, 16, "HND")])  # fmt: skip
@pytest.mark.parametrize(
    ("dim", "dim_v"),
    [(80, 0), (96, 0), (112, 0), (144, 0), (160, 0), (176, 0), (192, 0), (224, 0), (192, 128), (64, 96), (112, 80)],
)
def test_block_scales(dim, dim_v, heads, page, layout):
    """Copied by word: rows that begin in words and between them, of heads side by side and apart."""
    for options in ({}, {"drafts": 4}, {"group": 16}, {"lens": (9000, 1, 17)}):
        passes("nvfp4", dim, dim_v, heads=heads, page=page, layout=layout, **options)


@pytest.mark.parametrize(("heads", "page", "layout"), [(4, 64, "HND"), (2, 16, "HND"), (1, 128, "NHD"), (6, 32, "HND")])
@pytest.mark.parametrize(("dim", "dim_v"), [(80, 0), (112, 0), (144, 0), (240, 0), (112, 96), (64, 80)])
@pytest.mark.parametrize("fmt", ["int4_per_token_head", "nvfp4"])
def test_codes_in_chunks(fmt, dim, dim_v, heads, page, layout):
    """Rows at odd multiples of 8 bytes."""
    for options in ({}, {"drafts": 4}, {"lens": (9000, 1, 17)}):
        passes(fmt, dim, dim_v, heads=heads, page=page, layout=layout, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"scales": "tail"},
        {"page": 16, "window": 40, "sinks": True},
        {"ragged": True, "q_lens": (3, 1, 0, 2, 4), "dtype": "float16"},
        {"softcap": 20.0, "scale": "tensor"},
        {"out_dtype": "float8_e4m3fn", "lse": False, "strided": True},
        {"heads": 12, "packed": True},
        {"v_format": "int4_per_token_head"},
        {"v_format": "fp8_e4m3"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", [96, 160, 192])
def test_block_scales_with(dim, options):
    passes("nvfp4", dim, **options)


@pytest.mark.parametrize("dim", [80, 96, 112, 144, 160])
def test_scales_that_are_no_number_stay_in_their_head(dim):
    call = make(Case("decode", "nvfp4", "no number", lens=LENS, heads=8, page=64, dim=dim), "cuda")
    expected = plan("decode", call, "gluon")
    expected.run(call, expected.config)
    out = call.out.clone()
    for side in (call.k_scale_cache, call.v_scale_cache):
        side.view(torch.uint8)[:, :, 2::4] = 0x7F
    call.out.fill_(7)
    expected.run(call, expected.config)
    group = call.q.shape[1] // 8
    well = [h for h in range(call.q.shape[1]) if h // group % 4 != 2]
    ill = [h for h in range(call.q.shape[1]) if h // group % 4 == 2]
    assert torch.equal(call.out[:, well], out[:, well])
    assert call.out[call.seq_lens > 0][:, ill].isnan().all()


@pytest.mark.parametrize("heads", [3, 6])
@pytest.mark.parametrize("dim", [80, 112])
def test_any_number_of_heads(dim, heads):
    passes("fp8_e4m3", dim, heads=heads, packed=True)


@pytest.mark.parametrize("dim", [80, 112, 144])
@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2"])
def test_what_is_no_number_stays_in_its_head(fmt, dim):
    """Rows are copied with some of their neighbours' columns, whose NaN must not get into the products."""
    call = make(Case("decode", fmt, "no number", lens=LENS, heads=8, page=64, dim=dim), "cuda")
    expected = plan("decode", call, "gluon")
    expected.run(call, expected.config)
    out = call.out.clone()
    for side in (call.k_cache, call.v_cache):
        side.view(torch.uint8)[:, :, 2::4] = 0x7F
    call.out.fill_(7)
    expected.run(call, expected.config)
    there = call.seq_lens > 0
    group = call.q.shape[1] // 8
    ill = [h for h in range(call.q.shape[1]) if h // group % 4 == 2]
    well = [h for h in range(call.q.shape[1]) if h // group % 4 != 2]
    assert torch.equal(call.out[:, well], out[:, well])
    assert call.out[there][:, ill].isnan().all()


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "HND"},
        {"heads": 2},
        {"heads": 8, "page": 8},
        {"heads": 8, "packed": True},
        {"heads": 1, "page": 128},
        {"page": 16, "window": 40, "sinks": True},
        {"drafts": 8},
        {"ragged": True, "q_lens": (3, 1, 0, 2, 4), "dtype": "float16"},
        {"softcap": 20.0, "scale": "tensor"},
        {"out_dtype": "float8_e4m3fn", "lse": False, "strided": True},
        {"scales": "tail"},
        {"lens": (9000, 1, 17)},
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", [80, 112, 192])
@pytest.mark.parametrize("fmt", ["fp8_e4m3", "int8_per_token_head"])
def test_with(fmt, dim, options):
    if fmt == "fp8_e4m3":
        options = {n: x for n, x in options.items() if n != "scales"}
    passes(fmt, dim, **options)
