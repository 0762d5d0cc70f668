"""rope_append on the oracle: every byte of the cache and of the rotated query against a slow reference."""

from __future__ import annotations

import numpy as np
import pytest
import slow_reference as slow
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from no_sync import NoHostReads

from tersekv import KV_FORMATS, PagedKVCache, rope_append
from tersekv.calls import RopeAppendCall
from tersekv.dispatch.plan import dispatch

OUT = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)
INDEX = (torch.int32, torch.int64, torch.uint32)
HALF = ("bf16", "fp16")


def table(max_pos: int, r: int) -> torch.Tensor:
    """[max_pos, R] fp32: [cos | sin]."""
    angle = torch.arange(max_pos)[:, None] / 10 ** (torch.arange(r // 2) * 4 / r)
    return torch.cat([angle.cos(), angle.sin()], -1)


def rotated(x: np.ndarray, cos_sin: torch.Tensor, positions: list[int], interleaved: bool) -> np.ndarray:
    """x [T, H, D] fp32 with its first R columns rotated; rows of unknown positions are left as they are."""
    r, out = cos_sin.shape[1], x.copy()
    for t, p in enumerate(positions):
        if 0 <= p < cos_sin.shape[0]:
            cos, sin = cos_sin[p].numpy()[: r // 2], cos_sin[p].numpy()[r // 2 :]
            out[t, :, :r] = slow.rotate(x[t, :, :r], cos, sin, interleaved)
    return out


def memory_of(layer, *others) -> slow.Memory:
    return slow.Memory(layer.k, layer.v, layer.k_scale_cache, layer.v_scale_cache, *others)


def poke_q(memory: slow.Memory, out: torch.Tensor, q: np.ndarray, zero: list[bool]) -> None:
    for t, is_zero in enumerate(zero):
        for h in range(q.shape[1]):
            memory.poke(out, (t, h), slow.cast_bytes(np.zeros_like(q[t, h]) if is_zero else q[t, h], out.dtype))


@settings(deadline=None, max_examples=120)
@given(
    format=st.sampled_from(list(KV_FORMATS)),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    out_dtype=st.sampled_from(OUT),
    index=st.sampled_from(INDEX),
    blocks=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    r=st.sampled_from([2, 6, 16]),
    interleaved=st.booleans(),
    q_scale=st.sampled_from([1.0, 0.3, "tensor"]),
    layout=st.sampled_from(["NHD", "HND"]),
    data=st.data(),
)
def test_every_byte_is_the_slow_reference(
    format, dtype, out_dtype, index, blocks, r, interleaved, q_scale, layout, data
):
    d, dv, heads, group, max_pos = 16 * blocks[0], 16 * blocks[1], 2, 2, 7
    layer = PagedKVCache.allocate(1, 2, 3, heads, d, format=format, head_dim_v=dv, layout=layout)[0]
    low = 0 if index == torch.uint32 else -2
    n = data.draw(st.integers(0, 6))
    slots = data.draw(st.lists(st.integers(low, 7), min_size=n, max_size=n))
    positions = data.draw(st.lists(st.integers(low, max_pos), min_size=n, max_size=n))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows = slow.spicy(rng, (n, heads, d + dv), dtype, False).clamp(-1e4, 1e4)
    k, v = rows.split([d, dv], -1)
    q = slow.spicy(rng, (n, heads * group, d), dtype, False).clamp(-1e4, 1e4)
    q_out = torch.zeros(n, heads * group + 1, d + 8, dtype=out_dtype)[:, 1:, :d]
    cos_sin = table(max_pos, r)
    known = [0 <= p < max_pos for p in positions]

    memory = memory_of(layer, q_out)
    places = [s if ok else -1 for s, ok in zip(slots, known, strict=True)]
    slow.poke_kv(memory, layer, rotated(slow.fp32(k), cos_sin, positions, interleaved), slow.fp32(v), places)
    m = np.float32(1) / np.float32(1.7 if q_scale == "tensor" else q_scale)
    poke_q(memory, q_out, rotated(slow.fp32(q), cos_sin, positions, interleaved) * m, [not ok for ok in known])

    q_scale = torch.tensor([1.7]) if q_scale == "tensor" else q_scale
    slot_mapping, positions = (torch.tensor(x, dtype=index) for x in (slots, positions))
    got = rope_append(
        q, k, v, layer, slot_mapping, cos_sin, positions,
        interleaved=interleaved, q_out=q_out, q_scale=q_scale, backend="torch",
    )  # fmt: skip
    assert got is q_out
    memory.check()


@pytest.mark.parametrize("zero_padding", [False, True])
@pytest.mark.parametrize("nope", [False, True])
def test_parts_of_a_row_go_together_and_padding_is_zero_if_asked(zero_padding, nope):
    """FlashInfer's call: [rope | nope] given apart, places by request, padding with a negative request."""
    heads, r, n = 2, 8, 24
    layer = PagedKVCache.allocate(1, 4, 2, heads, r + n * nope, format="fp8_e4m3", head_dim_v=16)[0]
    rng = np.random.default_rng(0)
    batch, pos, rope_pos = [1, -1, 0, 1, 0, -1], [0, 0, 3, 1, 4, 2], [0, 1, 2, 9, 3, -1]
    q_rope, k_rope = slow.spicy(rng, (6, 3 * heads, r), torch.bfloat16, False).split([2 * heads, heads], 1)
    q_nope, k_nope = slow.spicy(rng, (6, 3 * heads, n), torch.bfloat16, False).split([2 * heads, heads], 1)
    v = slow.spicy(rng, (6, heads, 16), torch.bfloat16)
    outs = [torch.zeros(6, 2 * heads, d, dtype=torch.float8_e4m3fn) for d in (r, n)]
    cos_sin = table(5, r)
    indptr, pages = [0, 2, 3], [3, 0, 2]

    memory = memory_of(layer, *outs)
    slots = [2 * 2, -1, 1, -1, -1, -1]  # the fourth has no rotation, the fifth lies behind its request
    rows = rotated(slow.fp32(k_rope), cos_sin, rope_pos, False)
    rows = np.concatenate([rows, slow.fp32(k_nope)], -1) if nope else rows
    m = np.float32(0.7)
    slow.poke_kv(memory, layer, rows, slow.fp32(v), slots, k_scale=(m,), v_scale=(np.float32(1.3),))
    zero = [(b < 0 and zero_padding) or not 0 <= p < 5 for b, p in zip(batch, rope_pos, strict=True)]
    poke_q(memory, outs[0], rotated(slow.fp32(q_rope), cos_sin, rope_pos, False) * np.float32(2.1), zero)
    if nope:
        poke_q(memory, outs[1], slow.fp32(q_nope) * np.float32(2.1), zero)

    place = [torch.tensor(x, dtype=torch.int32) for x in (batch, pos, indptr, pages)]
    call = RopeAppendCall(
        q_rope, q_nope if nope else None, k_rope, k_nope if nope else None, v, cos_sin, torch.tensor(rope_pos),
        outs[0], outs[1] if nope else None, layer.k, layer.v, None, None, None, *place, "fp8_e4m3", False,
        2.1, None, 9.0, torch.tensor([0.7]), 9.0, torch.tensor([1.3]), True, zero_padding,
    )  # fmt: skip
    call = call._replace(q_scale=float(np.float32(2.1)))
    dispatch("rope_append", call, "torch")
    memory.check()


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32), interleaved=st.booleans(), r=st.sampled_from([8, 16]))
def test_lengths_survive_and_scores_depend_on_distance_only(seed, interleaved, r):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 1, 16, generator=g).expand(5, 1, 16)
    y = torch.randn(1, 1, 16, generator=g).expand(5, 1, 16)
    layer = PagedKVCache.allocate(1, 1, 5, 1, 16, format="bf16")[0]
    cos_sin, slots = table(32, r), torch.arange(5)

    def turn(x, positions):
        return rope_append(x, y, y, layer, slots, cos_sin, positions, interleaved=interleaved, backend="torch")

    a, b = turn(x, torch.arange(5) * 2), turn(y, torch.arange(5) * 2 + 7)
    assert torch.allclose(a.norm(dim=-1), x.norm(dim=-1), rtol=1e-6)
    assert torch.allclose((a * b).sum(-1), (a * b).sum(-1)[:1], atol=1e-4)
    assert torch.equal(a[..., r:], x[..., r:])


def test_rows_of_q_may_be_longer_than_those_of_k_that_are_rotated_whole():
    cache = PagedKVCache.allocate(1, 2, 4, 2, 16, format="bf16")[0]
    q, k = torch.randn(3, 4, 24).bfloat16(), torch.randn(3, 2, 16).bfloat16()
    at = torch.arange(3)
    got = rope_append(q, k, k.clone(), cache, at, table(8, 16), at)
    short = rope_append(q[..., :16].contiguous(), k, k.clone(), cache, at, table(8, 16), at)
    assert torch.equal(got, torch.cat([short, q[..., 16:]], -1))


def test_no_query_and_no_tokens():
    layer = PagedKVCache.allocate(1, 1, 4, 1, 16, format="nvfp4")[0]
    memory = memory_of(layer)
    k = torch.ones(0, 1, 16)
    none = torch.zeros(0, dtype=torch.int64)
    assert rope_append(None, k, k, layer, none, table(4, 8), none, backend="torch") is None
    assert rope_append(k, k, k, layer, none, table(4, 8), none, backend="torch").shape == (0, 1, 16)
    memory.check()


def test_an_empty_table_knows_no_position():
    layer = PagedKVCache.allocate(1, 1, 4, 1, 16, format="fp8_per_token_head")[0]
    memory = memory_of(layer)
    k, zero = torch.ones(1, 1, 16), torch.zeros(1, dtype=torch.int32)
    q = rope_append(k, k, k, layer, zero, table(0, 8), zero, q_dtype=torch.float8_e5m2, backend="torch")
    assert not q.view(torch.uint8).any()
    memory.check()


def test_no_device_value_is_read_on_the_host():
    layer = PagedKVCache.allocate(1, 1, 4, 1, 16, format="int8_per_token_head")[0]
    k, cos_sin, positions = torch.ones(2, 1, 16), table(4, 8), torch.tensor([1, 9])
    with NoHostReads():
        rope_append(k, k, k, layer, torch.tensor([0, -1]), cos_sin, positions, backend="torch")


def test_checked_mode_names_the_position(monkeypatch):
    monkeypatch.setenv("TERSEKV_CHECKED", "1")
    layer = PagedKVCache.allocate(1, 1, 4, 1, 16, format="bf16")[0]
    k = torch.ones(2, 1, 16)
    with pytest.raises(ValueError, match=r"^positions: want every entry in \[0, 4\), got -1 at 1$"):
        rope_append(None, k, k, layer, torch.tensor([0, 1]), table(4, 8), torch.tensor([3, -1]), backend="torch")
