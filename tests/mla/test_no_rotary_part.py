"""Latent caches without a rotary part (R = 0): layers, calls, and what is said of calls that do not fit."""

from __future__ import annotations

import re

import pytest
import torch

import tersekv
from tersekv.dispatch import plan
from tersekv.testing import make
from tersekv.testing.cases import Case

BF16, I32 = torch.bfloat16, torch.int32
FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla")
PAGE, SCALE = 16, 0.05
TABLE, LENS = torch.tensor([[3, 1, 2], [0, 4, 0]], dtype=I32), torch.tensor([40, 20], dtype=I32)


def filled(format, rope=0, **options):
    """A cache of two requests; with a rotary part, one of zeros."""
    layer = tersekv.PagedLatentCache.allocate(1, 5, PAGE, format=format, qk_rope_head_dim=rope, **options)[0]
    rows = torch.randn(60, 512, generator=torch.Generator().manual_seed(1))
    at = [(b, j) for b, n in enumerate(LENS.tolist()) for j in range(n)]
    slots = torch.tensor([int(TABLE[b, j // PAGE]) * PAGE + j % PAGE for b, j in at])
    tersekv.mla_append(rows, torch.zeros(60, rope) if rope else None, layer, slots)
    return layer


def attend(q, layer, **options):
    return tersekv.mla_decode(q, layer, TABLE, LENS, softmax_scale=SCALE, return_lse=True, **options)


@pytest.mark.parametrize("format", FORMATS)
def test_it_is_a_rotary_part_of_zeros_that_takes_no_bytes(format):
    plain, zeros = filled(format), filled(format, 64)
    assert plain.kpe.shape == (5, PAGE, 0)
    size = tersekv.latent_bytes_per_token(format, 512, 0)
    assert size == {"bf16": 1024, "fp16": 1024, "fp8_ds_mla": 528}.get(format, 512)
    q = torch.randn(2, 4, 512)
    want = attend(torch.cat([q, torch.randn(2, 4, 64)], -1), zeros)
    for given in (q, (q, None), (q, q[..., :0])):
        for got, x in zip(attend(given, plain), want, strict=True):
            torch.testing.assert_close(got, x, rtol=0, atol=1e-5)
    lists = torch.arange(40).expand(2, 40)
    torch.testing.assert_close(attend(q, plain, indices=lists)[0], want[0], rtol=0, atol=1e-5)


def test_rows_of_engines_are_read_without_the_rotary_part_that_they_have():
    full = filled("fp8_ds_mla", 64)
    rows = torch.empty(0, dtype=torch.uint8).set_(full.ckv.untyped_storage()).view(5, PAGE, 656)
    rows[..., 528:] = 0xFF  # NaN
    layer = tersekv.PagedLatentLayer.of(rows, format="fp8_ds_mla", qk_rope_head_dim=0)
    q = torch.randn(2, 4, 512)
    assert torch.equal(attend(q, layer)[0], attend(q, filled("fp8_ds_mla"))[0])
    tersekv.mla_append(torch.randn(1, 512), None, layer, torch.tensor([70]))
    assert (rows[..., 528:] == 0xFF).all()


def test_layers_over_tensors():
    rows = torch.zeros(2, 4, 512, dtype=BF16)
    for layer in (tersekv.PagedLatentLayer.of(rows), tersekv.PagedLatentLayer.of((rows, None)),
                  tersekv.PagedLatentLayer(rows, None, "bf16"),
                  tersekv.PagedLatentLayer.of(torch.zeros(2, 4, 576, dtype=BF16), qk_rope_head_dim=0)):  # fmt: skip
        assert (layer.kv_lora_rank, layer.qk_rope_head_dim, layer.kpe.dtype) == (512, 0, BF16)
    split = tersekv.PagedLatentCache.allocate(1, 2, 4, format="fp8_e4m3", qk_rope_head_dim=0, split=True)
    assert split[0].kpe.shape == (2, 4, 0)
    assert split.bytes_per_token == 512


def test_pages_are_copied_and_recorded_and_not_transcoded():
    cache = tersekv.PagedLatentCache([filled("fp8_ds_mla")])
    want = cache[0].ckv[3].clone()
    tersekv.import_pages(cache, [4], tersekv.export_pages(cache, [3]))
    tersekv.copy_pages(cache, [(3, 0)])
    assert torch.equal(cache[0].ckv[[4, 0]].view(torch.uint8), want.expand(2, -1, -1).view(torch.uint8))
    with pytest.raises(ValueError, match="src: want latent rows with a rotary part, got qk_rope_head_dim 0"):
        tersekv.transcode(cache, [3], cache, [0])


def test_under_torch_compile():
    layer = filled("fp8_e4m3")
    q, rows, slots = torch.randn(2, 4, 512), torch.randn(3, 512), torch.tensor([-1, 75, 76])

    def step(q, rows, slots):
        tersekv.mla_append(rows, None, layer, slots)
        return attend((q, None), layer)

    want = step(q, rows, slots)
    got = torch.compile(step, backend="aot_eager", fullgraph=True)(q, rows, slots)
    assert torch.equal(got[0], want[0])


def prefill(layer, freqs_cis=None, k_pe=None, dim=32):
    q, kv_c, w = torch.randn(20, 2, dim).to(BF16), torch.randn(20, 512).to(BF16), torch.randn(2 * 64, 512).to(BF16)
    step = tersekv.mla_prefill_plan([20], [20])
    starts = torch.tensor([0, 20], dtype=I32)
    gamma, lens = torch.ones(512, dtype=BF16), torch.zeros(1, dtype=I32)
    return tersekv.mla_prefill(
        q, layer, TABLE[:1], lens, starts, freqs_cis, gamma, w, step, softmax_scale=SCALE, kv_c=kv_c, k_pe=k_pe
    )


def test_a_prefill_rotates_nothing():
    assert prefill(filled("bf16")).shape == (20, 2, 32)


WRONG = [
    (lambda: tersekv.mla_append(torch.zeros(1, 512), None, filled("bf16", 64), torch.tensor([0])),
     "k_pe: want a tensor for a cache with a rotary part, got None"),
    (lambda: tersekv.mla_append(torch.zeros(1, 512), torch.zeros(1, 64), filled("bf16"), torch.tensor([0])),
     "k_pe: want a rotary size of 0 as in kpe [5, 16, 0], got 64"),
    (lambda: tersekv.mla_append(torch.zeros(1, 512), None, filled("bf16"), torch.tensor([0]),
                                cos_sin_cache=torch.zeros(9, 64), positions=torch.tensor([0])),
     "cos_sin_cache: want None without a rotary part, got a tensor"),
    (lambda: attend(torch.zeros(2, 4, 576), filled("bf16")), "q: want [T, H, 512 + 0], got [2, 4, 576]"),
    (lambda: attend((torch.zeros(2, 4, 512), None), filled("bf16", 64)),
     "q_pe: want a tensor for a cache with a rotary part, got None"),
    (lambda: prefill(filled("bf16", 64), k_pe=torch.zeros(20, 64).to(BF16), dim=96),
     "freqs_cis: want a tensor for a cache with a rotary part, got None"),
    (lambda: tersekv.PagedLatentLayer.of(torch.zeros(1, 2, 576, dtype=BF16), qk_rope_head_dim=32),
     "qk_rope_head_dim: want 0 or 64 as in cache, got 32"),
    (lambda: tersekv.PagedLatentLayer.of(filled("bf16", 64), qk_rope_head_dim=0),
     "cache: want tensors beside qk_rope_head_dim, got a layer"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_what_does_not_fit_is_said(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call()


@pytest.mark.parametrize("op", ["mla_decode", "mla_prefill", "mla_decode_branch"])
def test_hoppers_kernels_refuse_it_and_the_portable_ones_run(op):
    call = make.make(Case(op, "fp8_e4m3", "x", heads=1, group=16, page=64, rope=0, dim_v=128, lens=(37, 5)))
    with pytest.raises(tersekv.UnsupportedError, match=r"gluon: .*, got .*\b0\b"):
        plan.plan(op, call, "gluon", arch=90)
    assert plan.plan(op, call, arch=90).backend == "triton"
