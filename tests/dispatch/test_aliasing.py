"""Outputs that begin where another tensor does, and outputs that autograd would have to follow."""

from __future__ import annotations

import pytest
import torch
from branch_cases import BASE, arguments

import tersekv
from tersekv import PagedKVLayer, PagedLatentLayer
from tersekv.compat import flashinfer
from tersekv.testing.make import make

BF = torch.bfloat16
TABLE, LENS, SLOTS = torch.tensor([[0, 1], [2, 3]]), torch.tensor([9, 16]), torch.arange(2)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(BF)


def kv() -> PagedKVLayer:
    return PagedKVLayer(rows(4, 8, 2, 32), rows(4, 8, 2, 32), "bf16")


def refused(name: str, other: str):
    message = rf"^{name}: want memory of its own, got a tensor that begins where {other} does$"
    return pytest.raises(ValueError, match=message)


def test_a_projection_does_not_overwrite_its_rows():
    x, w = rows(3, 2, 128), rows(2, 128, 128)
    before = x.clone()
    for out in (x, x.view(3, 2, 128)):
        with refused("out", "x"):
            tersekv.mla_project(x, w, out=out)
    assert torch.equal(x, before)


def test_an_attention_does_not_overwrite_what_it_reads():
    layer, q = kv(), rows(2, 4, 32)
    before = layer.v.clone()
    with refused("out", "v_cache"):
        tersekv.decode(q, layer, TABLE, LENS, out=layer.v[0, :4].view(2, 4, 32))
    assert torch.equal(layer.v, before)
    sinks = torch.zeros(2, 4)
    with refused("lse", "sinks"):
        tersekv.decode(q, layer, TABLE, LENS, sinks=sinks[0], lse=sinks)
    latents = PagedLatentLayer.of(rows(4, 8, 144), kv_lora_rank=128)
    with refused("out", "kpe"):
        tersekv.mla_decode(rows(1, 1, 144), latents, TABLE[:1], LENS[:1], softmax_scale=0.1,
                           out=latents.kpe.as_strided((1, 1, 128), (144, 144, 1)))  # fmt: skip


@pytest.mark.parametrize("name", ["q", "kv_c", "k_pe", "cache", "w_uv"])
def test_the_decode_branch_overwrites_no_argument(name):
    given = arguments(make(BASE)) | {"out": None}
    x = given[name].ckv if name == "cache" else given[name]
    tokens, heads = given["q"].shape[:2]
    given["out"] = torch.empty(0, dtype=BF).set_(  # of a small argument the storage grows
        x.untyped_storage(), x.storage_offset() * x.element_size() // 2, (tokens, heads, 128), (heads * 128, 128, 1)
    )
    before = x.clone()
    with refused("out", "ckv" if name == "cache" else name):
        tersekv.mla_decode_branch(**given)
    assert torch.equal(before.view(torch.uint8), x.view(torch.uint8))


def test_strides_of_a_single_token_mean_nothing():
    q = rows(1, 8, 32)[:, :4]
    out = q.view(1, 128).view(1, 4, 32)
    assert (q.stride(), out.stride()) == ((256, 32, 1), (128, 32, 1))
    layer = kv()
    want = tersekv.decode(q, layer, TABLE[:1], LENS[:1])
    assert torch.equal(tersekv.decode(q, layer, TABLE[:1], LENS[:1], out=out), want)


def test_a_query_without_heads_does_not_hide_a_cache_that_is_one_tensor():
    k, layer = rows(1, 2, 32), PagedKVLayer(one := rows(4, 8, 2, 32), one, "bf16")
    angles, where = torch.zeros(16, 32), torch.zeros(1, dtype=torch.int64)
    with refused("v_cache", "k_cache"):
        tersekv.rope_append(rows(1, 0, 32), k, k.clone(), layer, where, angles, where)


def test_a_query_may_be_overwritten_in_its_own_dtype_and_strides():
    layer, q = kv(), rows(2, 4, 32)
    want = tersekv.decode(q, layer, TABLE, LENS)
    with refused("out", "q"):
        tersekv.decode(q, layer, TABLE, LENS, out=q.view(4, 2, 32).transpose(0, 1))
    with refused("out", "q"):
        tersekv.decode(q, layer, TABLE, LENS, out=q.view(torch.float8_e4m3fn)[..., :32])
    assert torch.equal(tersekv.decode(q, layer, TABLE, LENS, out=q), want)
    table, k = torch.randn(20, 32), rows(2, 2, 32)
    want = tersekv.rope_append(q, k, k, kv(), SLOTS, table, SLOTS)
    with refused("q_out", "k"):
        tersekv.rope_append(k.clone(), k, k.clone(), kv(), SLOTS, table, SLOTS, q_out=k)
    assert torch.equal(tersekv.rope_append(q, k, k, kv(), SLOTS, table, SLOTS, q_out=q), want)


def test_a_merge_may_go_to_its_first_part_but_not_to_its_weights():
    outs, lses = torch.randn(3, 5, 2, 8), torch.randn(3, 5, 2)
    want, _ = tersekv.merge_states(outs, lses)
    with refused("lse", "lses"):
        tersekv.merge_states(outs, lses, lse=lses[0])
    got, _ = tersekv.merge_states(outs, lses, out=outs[0])
    assert torch.equal(got, want)


def test_rows_may_come_from_the_cache_that_they_are_appended_to():
    layer = kv()
    k, v = (x.flatten(0, 1)[:5] for x in (layer.k, layer.v))
    tersekv.append(k, v, layer, torch.arange(20, 25))
    assert torch.equal(layer.k.flatten(0, 1)[20:25], k)


def test_k_and_v_in_one_tensor_are_not_appended_to_by_flashinfers_name_either():
    index = torch.zeros(2, dtype=torch.int32)
    with refused(r"paged_kv_cache\[1\]", r"paged_kv_cache\[0\]"):
        flashinfer.append_paged_kv_cache(
            rows(2, 2, 32), rows(2, 2, 32), index, index + SLOTS.int(), rows(4, 1, 8, 2, 32), index, index, index
        )


def test_an_output_that_requires_grad_is_refused_while_autograd_is_on():
    layer, q, leaf = kv(), rows(2, 4, 32), torch.zeros(2, 4, 32, dtype=BF, requires_grad=True)
    for out in (leaf, leaf * 1):
        with pytest.raises(ValueError, match=r"^out: want a tensor without gradients, .* got requires_grad=True$"):
            tersekv.decode(q, layer, TABLE, LENS, out=out)
    with pytest.raises(ValueError, match=r"^lse: want a tensor without gradients"):
        tersekv.decode(q, layer, TABLE, LENS, lse=torch.zeros(2, 4, requires_grad=True))
    with torch.no_grad():
        assert tersekv.decode(q, layer, TABLE, LENS, out=leaf) is leaf
    with pytest.raises(ValueError, match=r"^out: want a tensor without gradients"):
        tersekv.decode(q, layer, TABLE, LENS, out=leaf)
