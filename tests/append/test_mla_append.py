"""mla_append on the oracle: every byte of the latent cache and of the query against a slow reference."""

from __future__ import annotations

import numpy as np
import pytest
import slow_reference as slow
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from no_sync import NoHostReads
from test_rope_append import OUT, poke_q, rotated, table

from tersekv import LATENT_FORMATS, PagedLatentCache, PagedLatentLayer, mla_append
from tersekv.calls import MLAAppendCall
from tersekv.dispatch.plan import dispatch

F32 = np.float32
SCALED = ("fp8_e4m3", "fp8_e5m2")


def poke_latent(
    memory: slow.Memory, layer: PagedLatentLayer, c: np.ndarray, pe: np.ndarray, slots: list[int], m: float = 1.0
) -> None:
    """Expect fp32 c [T, L] and pe [T, R] in the layer's slots; m multiplies both where the format has a scale."""
    codes, scales = slow.rows(c, layer.format, F32(m))
    rope = slow.cast_bytes(pe * F32(m if layer.format in SCALED else 1), layer.kpe.dtype)
    pages, size = layer.ckv.shape[:2]
    for t, slot in enumerate(slots):
        if 0 <= slot < pages * size:
            place = (slot // size, slot % size)
            memory.poke(layer.ckv, place, codes[t])
            memory.poke(layer.kpe, place, rope[t])
            if scales is not None:
                memory.poke(layer.ckv_scale_cache, place, scales[t])


def memory_of(layer: PagedLatentLayer, *others) -> slow.Memory:
    return slow.Memory(layer.ckv, layer.kpe, layer.ckv_scale_cache, *others)


@settings(deadline=None, max_examples=120)
@given(
    format=st.sampled_from(list(LATENT_FORMATS)),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    out_dtype=st.sampled_from(OUT),
    rank=st.sampled_from([128, 256]),
    r=st.sampled_from([2, 8]),
    split=st.booleans(),
    interleaved=st.booleans(),
    scale=st.sampled_from([1.0, 0.3, "tensor"]),
    data=st.data(),
)
def test_every_byte_is_the_slow_reference(format, dtype, out_dtype, rank, r, split, interleaved, scale, data):
    scale = scale if format in SCALED else 1.0
    m = F32(1) / F32(0.3 if scale == "tensor" else scale)
    kv_scale = torch.tensor([0.3]) if scale == "tensor" else scale
    layer = PagedLatentCache.allocate(
        1, 2, 3, format=format, kv_lora_rank=rank, qk_rope_head_dim=r,
        split=split and format != "fp8_ds_mla", kv_scale=kv_scale,
    )[0]  # fmt: skip
    n, heads, max_pos = data.draw(st.integers(0, 5)), 2, 6
    slots = data.draw(st.lists(st.integers(-2, 7), min_size=n, max_size=n))
    positions = data.draw(st.lists(st.integers(-1, max_pos), min_size=n, max_size=n))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    c = slow.spicy(rng, (n, rank + 4), dtype, layer.ckv.itemsize == 1)[:, 4:]
    pe = slow.spicy(rng, (n, r), dtype, False).clamp(-1e4, 1e4)
    q_nope, q_pe = slow.spicy(rng, (n, heads, 24 + r), dtype, False).clamp(-1e4, 1e4).split([24, r], -1)
    outs = [torch.zeros(n, heads, d, dtype=out_dtype) for d in (24, r)]
    cos_sin = table(max_pos, r)
    known = [0 <= p < max_pos for p in positions]
    places = [s if ok else -1 for s, ok in zip(slots, known, strict=True)]

    memory = memory_of(layer, *outs)
    turned = rotated(slow.fp32(pe)[:, None], cos_sin, positions, interleaved)[:, 0]
    poke_latent(memory, layer, slow.fp32(c), turned, places, m)
    zero = [not ok for ok in known]
    poke_q(memory, outs[0], slow.fp32(q_nope) * (F32(1) / F32(0.6)), zero)
    poke_q(memory, outs[1], rotated(slow.fp32(q_pe), cos_sin, positions, interleaved) * (F32(1) / F32(0.6)), zero)
    got = mla_append(
        c, pe, layer, torch.tensor(slots, dtype=torch.int32), cos_sin_cache=cos_sin,
        positions=torch.tensor(positions, dtype=torch.int64), interleaved=interleaved,
        q_nope=q_nope, q_pe=q_pe, q_nope_out=outs[0], q_pe_out=outs[1], q_scale=0.6, backend="torch",
    )  # fmt: skip
    assert got[0] is outs[0]
    assert got[1] is outs[1]
    memory.check()


@pytest.mark.parametrize("format", LATENT_FORMATS)
def test_without_a_table_k_pe_is_stored_as_it_is(format):
    layer = PagedLatentCache.allocate(1, 2, 2, format=format, kv_lora_rank=128, qk_rope_head_dim=4)[0]
    rng = np.random.default_rng(1)
    c, pe = slow.spicy(rng, (3, 128), torch.bfloat16, False), slow.spicy(rng, (3, 4), torch.bfloat16, False)
    memory = memory_of(layer)
    poke_latent(memory, layer, slow.fp32(c), slow.fp32(pe), [3, -1, 0])
    assert mla_append(c, pe, layer, torch.tensor([3, -1, 0]), backend="torch") == (None, None)
    memory.check()


@pytest.mark.parametrize("zero_padding", [False, True])
def test_flashinfer_places_over_two_views_of_one_buffer(zero_padding):
    """ckv and kpe are columns of rows of 576; a request's pages are found through kv_indices."""
    buffer = torch.zeros(3, 2, 576, dtype=torch.float8_e4m3fn)
    layer = PagedLatentLayer(buffer[..., :512], buffer[..., 512:], "fp8_e4m3")
    rng = np.random.default_rng(2)
    c, pe = slow.spicy(rng, (4, 512), torch.bfloat16), slow.spicy(rng, (4, 64), torch.bfloat16, False)
    q = slow.spicy(rng, (4, 1, 64), torch.bfloat16, False)
    out = torch.zeros(4, 1, 64, dtype=torch.float8_e4m3fn)
    batch, pos, rope_pos = [0, -1, 0, 1], [1, 0, 2, 0], [1, 2, 2, 0]
    cos_sin, m = table(8, 64), F32(1.9)
    memory = memory_of(layer, out)
    turned = rotated(slow.fp32(pe)[:, None], cos_sin, rope_pos, True)[:, 0]
    poke_latent(memory, layer, slow.fp32(c), turned, [2 * 2 + 1, -1, 0, 2], m)
    poke_q(memory, out, rotated(slow.fp32(q), cos_sin, rope_pos, True), [b < 0 and zero_padding for b in batch])
    place = [torch.tensor(x, dtype=torch.int32) for x in (batch, pos, [0, 2, 3], [2, 0, 1])]
    call = MLAAppendCall(
        q, None, c, pe, cos_sin, torch.tensor(rope_pos), out, None, layer.ckv, layer.kpe, None, None, *place,
        "fp8_e4m3", True, 1.0, None, 9.0, torch.tensor([float(m)]), True, zero_padding,
    )  # fmt: skip
    dispatch("mla_append", call, "torch")
    memory.check()


@pytest.mark.parametrize("format", LATENT_FORMATS)
def test_nothing_is_written_for_no_tokens_or_only_dropped_ones(format):
    layer = PagedLatentCache.allocate(1, 2, 2, format=format)[0]
    memory = memory_of(layer)
    none = torch.zeros(0, dtype=torch.int32)
    mla_append(torch.ones(0, 512), torch.ones(0, 64), layer, none, backend="torch")
    mla_append(torch.ones(2, 512), torch.ones(2, 64), layer, torch.tensor([-5, 4]), backend="torch")
    memory.check()


@pytest.mark.parametrize("format", LATENT_FORMATS)
def test_no_device_value_is_read_on_the_host(format):
    layer = PagedLatentCache.allocate(1, 2, 2, format=format)[0]
    cos_sin, positions, slots = table(4, 64), torch.tensor([1, 9]), torch.tensor([2, -1])
    with NoHostReads():
        mla_append(
            torch.ones(2, 512), torch.ones(2, 64), layer, slots,
            cos_sin_cache=cos_sin, positions=positions, q_pe=torch.ones(2, 1, 64), backend="torch",
        )  # fmt: skip


def test_a_dtype_that_contradicts_an_output_names_it():
    layer = PagedLatentCache.allocate(1, 2, 4, format="bf16", kv_lora_rank=8, qk_rope_head_dim=8)[0]
    x, q, at = torch.zeros(2, 8), torch.zeros(2, 1, 8), torch.arange(2)
    given = {"cos_sin_cache": torch.zeros(2, 8), "positions": at, "q_dtype": torch.float16}
    for name in ("q_pe", "q_nope"):
        with pytest.raises(ValueError, match=f"^q_dtype: want {name}_out's own bfloat16 or None, got float16"):
            mla_append(x, x, layer, at, **given, **{name: q, f"{name}_out": q.bfloat16()})
