"""Every documented way of calling a function of `compat`, and every two ways together: a second call takes the launch
cache, and computes what the long way does. Outputs left out or given, empty tensors, tensors that are given twice,
scales as numbers and as tensors, indices of every dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import test_compat_known_calls as known
import torch
from test_compat_known_calls import (
    BF,
    E4M3,
    F32,
    HQ,
    U8,
    D,
    H,
    L,
    P,
    R,
    S,
    T,
    append,
    append_mla,
    concat,
    decode_wrapper,
    i32,
    per_token_head,
    prefill_wrapper,
    reshape,
    rope,
    single_decode,
    single_prefill,
    trtllm,
    x,
    xqa,
    xqa_batch,
    xqa_batch_mla,
    xqa_mla,
)
from torch import Tensor

from tersekv import UnsupportedError
from tersekv.backends.cpu import library
from tersekv.compat import flashinfer as fi
from tersekv.dispatch import launch_cache
from tersekv.dispatch.plan import Plan
from tersekv.ops import registry

Call = dict[str, Any]
# Changes a call in place.
Way = Callable[[Call], None]


def way(**changes: Any) -> Way:
    """Arguments by name; a function makes its value of the call."""

    def change(call: Call) -> None:
        call.update({name: value(call) if callable(value) else value for name, value in changes.items()})

    change.__name__ = ", ".join(changes)
    return change


def one(_: Call) -> Tensor:
    return torch.tensor([0.5])


def no_dims(_: Call) -> Tensor:
    return torch.tensor(0.5)


def scales(*names: str) -> dict[str, list[Way]]:
    """An axis for each scale, and one for the same tensor as all of them."""

    def same(call: Call) -> None:
        call.update(dict.fromkeys(names, torch.tensor([0.5])))

    every: dict[str, list[Way]] = {n: [way(**{n: one}), way(**{n: no_dims}), way(**{n: 0.5})] for n in names}
    return every | {"same scale": [same]} if len(names) > 1 else every


def indices(table: str, lens: str, two_dims: bool) -> dict[str, list[Way]]:
    """int64 and uint32 beside int32."""
    found = [way(**{lens: lambda c: c[lens].long()}), way(**{lens: lambda c: c[lens].view(torch.uint32)})]
    if two_dims:
        found.append(way(**{lens: lambda c: c[lens][:, 0]}))
    tables = [way(**{table: lambda c: c[table].long()}), way(**{table: lambda c: c[table].view(torch.uint32)})]
    return {table: tables, lens: found}


OUT = [way(out=lambda c: x(*c["query"].shape)), way(out=lambda c: x(*c["query"].shape, dtype=E4M3))]
TWO_ROWS = {"query": lambda c: x(2 * T, HQ, D), "q_len_per_req": 2}
RAGGED = {"query": lambda c: x(6, HQ, D), "q_len_per_req": 3, "q_cu_seq_lens": lambda c: i32(0, 1, 4, 6)}
DRAFTS = [
    way(**TWO_ROWS), way(**TWO_ROWS, mask=lambda c: x(T, 2, 2, dtype=torch.uint16)), way(**RAGGED),
    way(**RAGGED, mask=lambda c: x(6, 2, dtype=torch.uint16)),
]  # fmt: skip
SINKS = [way(sinks=lambda c: x(HQ, dtype=F32))]
LSE = [way(return_lse=True), way(return_lse=True, lse=lambda c: x(T, HQ, dtype=F32))]


def nvfp4_batch(joint: bool = False) -> tuple[Callable, Call]:
    def caches(width: int, dtype: torch.dtype) -> Any:
        if joint:
            return x(P, 2, S, H, width, dtype=dtype)
        return x(P, S, H, width, dtype=dtype), x(P, S, H, width, dtype=dtype)

    function, call = xqa_batch()
    return function, call | {"kv_cache": caches(D // 2, U8), "kv_cache_sf": caches(D // 16, E4M3)}


def batch() -> dict[str, list[Way]]:
    wide, codes = (lambda c: x(T, 2 * HQ, D)[:, :HQ]), (lambda c: x(T, HQ, D, dtype=E4M3))
    return {
        "drafts": DRAFTS, "query": [way(query=wide), way(query=codes)], **scales("bmm1_scale", "bmm2_scale"),
        "o_scale": [way(o_scale=None), way(o_scale=0.5)], "out": OUT,
        "sinks": SINKS, "window": [way(window_left=3)], **indices("block_tables", "seq_lens", True),
        "pages": [way(kv_cache=lambda c: list(c["kv_cache"])), way(kv_cache=lambda c: (c["kv_cache"][0],) * 2)],
    }  # fmt: skip


def xqa_ways() -> dict[str, list[Way]]:
    two = {"q": lambda c: x(T, 1, 2, HQ, D), "output": lambda c: x(T, 1, 2, HQ, D), "q_seq_len": 2}
    ragged = {"q": lambda c: x(6, HQ, D), "output": lambda c: x(6, HQ, D), "q_seq_len": 3}
    return {
        **scales("q_scale", "kv_scale"), "rcp": [way(rcp_out_scale=0.5)],
        "output": [way(output=lambda c: x(*c["q"].shape, dtype=E4M3))],
        "sinks": [way(sinks=lambda c: x(H, HQ // H, dtype=F32)), *SINKS], **indices("page_table", "seq_lens", True),
        "window": [way(sliding_win_size=3)], "v": [way(v_cache=lambda c: c["k_cache"])],
        "drafts": [way(**two), way(**two, mask=lambda c: x(T, 2, 2, dtype=torch.uint16)),
                   way(**ragged, q_cu_seq_lens=lambda c: i32(0, 1, 4, 6))],
    }  # fmt: skip


def xqa_mla_ways() -> dict[str, list[Way]]:
    return {
        **scales("q_scale", "kv_scale"), **indices("page_table", "seq_lens", True),
        "q": [way(q=lambda c: x(T, 1, HQ, L + R, dtype=E4M3))],
        "v": [way(v_cache=lambda c: c["k_cache"].clone()), way(v_cache=lambda c: c["k_cache"][..., :L])],
        "output": [way(output=lambda c: x(T, 1, HQ, L, dtype=E4M3))],
    }  # fmt: skip


def rope_ways(latent: bool) -> dict[str, list[Way]]:
    whole = {
        "q_rope": lambda c: x(T, HQ, D), "k_rope": lambda c: x(T, H, D), "cos_sin_cache": lambda c: x(20, D, dtype=F32),
        "q_nope": None, "k_nope": None,
    }  # fmt: skip
    empty = {"q_nope": lambda c: x(T, HQ, 0), "k_nope": lambda c: x(T, H, 0)}
    none = {"q_nope_out": lambda c: x(T, HQ, 0, dtype=E4M3)}
    q_parts = [way(**whole), way(**whole | empty), way(**whole, **none), way(**whole | empty, **none)]
    if latent:
        q_parts = [way(q_nope=lambda c: x(T, HQ, 0)), way(q_nope=lambda c: x(T, HQ, 0), **none)]

    def nope_out(call: Call) -> Tensor:
        width = 0 if call["q_nope"] is None else call["q_nope"].shape[-1]
        return x(T, HQ, width, dtype=E4M3)

    return {
        "parts": q_parts, "rope out": [way(q_rope_out=lambda c: x(*c["q_rope"].shape, dtype=E4M3))],
        "nope out": [way(q_nope_out=nope_out)],
        **scales("quant_scale_q", "quant_scale_kv"), "positions": [way(pos_ids=lambda c: c["positions"])],
        "neox": [way(is_neox=False)],
    }  # fmt: skip


def wrapper_ways(rows: int) -> dict[str, list[Way]]:
    out, lse = {"out": lambda c: x(rows, HQ, D)}, {"lse": lambda c: x(rows, HQ, dtype=F32), "return_lse": True}
    return {
        **scales("q_scale", "k_scale", "v_scale"), "lse": [way(return_lse=True)], "sinks": SINKS,
        "out": [way(**out), way(**out, **lse)],
    }  # fmt: skip


PLACES = ("kv_indices", "kv_indptr", "batch_indices", "positions")
ROWS_TWICE = {
    "value": [way(value=lambda c: c["key"])], "slots": [way(slot_mapping=lambda c: c["slot_mapping"].int())],
    "rows": [way(key=lambda c: c["key"].float(), value=lambda c: c["value"].float())],
}  # fmt: skip


def int4() -> tuple[Callable, Call]:
    function, call = per_token_head(dtype=torch.int8)
    caches = {n: x(P, S, H, D // 2, dtype=U8) for n in ("key_cache", "value_cache")}
    return function, call | caches | {"kv_quant_mode": "INT4_PER_TOKEN_HEAD"}


def merge_state() -> tuple[Callable, Call]:
    return fi.merge_state, {
        "v_a": x(T, H, D), "s_a": x(T, H, dtype=F32), "v_b": x(T, H, D), "s_b": x(T, H, dtype=F32),
    }  # fmt: skip


def ways_of() -> Iterator[tuple[str, Callable[[], tuple[Callable, Call]], dict[str, list[Way]]]]:
    """(name, what makes a plain call, axes of ways)."""
    for dtype in (E4M3, BF, torch.int8):
        yield f"xqa_batch {dtype}", lambda dtype=dtype: xqa_batch(dtype), batch()
        yield f"trtllm {dtype}", lambda dtype=dtype: trtllm(dtype), {
            **scales("bmm1_scale", "bmm2_scale"), "o_scale": [way(o_scale=0.5)], "out": OUT, "lse": LSE,
            "dtype": [way(out_dtype=torch.float16)], "backend": [way(backend="xqa"), way(backend="trtllm-gen")],
        }  # fmt: skip
        yield f"xqa {dtype}", lambda dtype=dtype: xqa(dtype), xqa_ways()
        yield f"decode wrapper {dtype}", lambda dtype=dtype: decode_wrapper(dtype), wrapper_ways(T)
        yield f"single_decode {dtype}", lambda dtype=dtype: single_decode(dtype), {
            **scales("q_scale", "k_scale", "v_scale"), "lse": [way(return_lse=True)], "v": [way(v=lambda c: c["k"])],
            "window": [way(window_left=70)],
        }  # fmt: skip
    for joint in (False, True):
        yield f"xqa_batch nvfp4 {joint}", lambda joint=joint: nvfp4_batch(joint), {
            **scales("bmm1_scale", "bmm2_scale"), "o_scale": [way(o_scale=0.5)], "out": OUT
        }  # fmt: skip
    yield "xqa nvfp4", lambda: xqa(U8, sf=True), {
        **scales("q_scale", "kv_scale"),
        "v": [way(v_cache=lambda c: c["k_cache"], v_sf_cache=lambda c: c["k_sf_cache"])],
    }  # fmt: skip
    for dtype in (E4M3, BF):
        yield f"xqa_mla {dtype}", lambda dtype=dtype: xqa_mla(dtype), xqa_mla_ways()
        yield f"xqa_batch_mla {dtype}", lambda dtype=dtype: xqa_batch_mla(dtype=dtype), {
            **scales("bmm1_scale", "bmm2_scale"), **indices("block_tables", "seq_lens", False),
            "pages": [way(kv_cache=lambda c: c["kv_cache"][:, 0])],
            "rows": [way(query=lambda c: x(T, 2, HQ, L + R)), way(query=lambda c: x(T, 1, HQ, L + R, dtype=E4M3))],
            "out": [way(out=lambda c: x(*c["query"].shape[:3], L))],
        }  # fmt: skip
    for latent in (False, True):
        yield f"rope {latent}", lambda latent=latent: rope(latent), rope_ways(latent)
    for how in ({}, {"joint": True}, {"hnd": True}, {"dtype": BF}):
        yield f"append {how}", lambda how=how: append(**how), {
            "value": [way(append_value=lambda c: c["append_key"])],
            "places": [way(positions=lambda c: c["batch_indices"])],
            "rows": [way(append_key=lambda c: x(T, H, D, dtype=F32), append_value=lambda c: x(T, H, D, dtype=F32))],
            "int64": [way(**{n: lambda c, n=n: c[n].long() for n in PLACES})],
        }  # fmt: skip
    yield "append_mla", append_mla, {
        "places": [way(positions=lambda c: c["batch_indices"])],
        "rows": [way(append_ckv=lambda c: x(T, L + R)[:, :L], append_kpe=lambda c: x(T, L + R)[:, L:])],
    }  # fmt: skip
    yield "prefill wrapper", prefill_wrapper, wrapper_ways(9)
    yield "single_prefill", single_prefill, {
        "causal": [way(causal=True)], "lse": [way(return_lse=True)], "v": [way(v=lambda c: c["k"])],
        "scales": [way(scale_q=one, scale_k=one, scale_v=one)], "dtype": [way(o_dtype=torch.float16)],
    }  # fmt: skip
    for dtype in (E4M3, torch.int8):
        yield f"per_token_head {dtype}", lambda dtype=dtype: per_token_head(dtype), ROWS_TWICE
    yield "per_token_head int4", int4, ROWS_TWICE
    for kind in ({}, {"dtype": BF, "name": "auto"}):
        yield f"reshape {kind}", lambda kind=kind: reshape(**kind), {**ROWS_TWICE, **scales("k_scale", "v_scale")}
        yield f"concat {kind}", lambda kind=kind: concat(**kind), {
            **scales("scale"), "k_pe": [way(k_pe=lambda c: c["k_pe"][:, 0])]
        }  # fmt: skip
    yield "merge_state", merge_state, {"same": [way(v_b=lambda c: c["v_a"]), way(s_b=lambda c: c["s_a"])]}


FUNCTIONS = {name: (plain, axes) for name, plain, axes in ways_of()}


def calls_of(name: str) -> Iterator[tuple[str, Callable[[], tuple[Callable, Call]]]]:
    """(ways, what makes the call): the plain one, each way and every two of different axes."""
    plain, axes = FUNCTIONS[name]
    single = [(axis, change) for axis, changes in axes.items() for change in changes]
    for chosen in [(), *((s,) for s in single), *combinations(single, 2)]:
        if len({axis for axis, _ in chosen}) < len(chosen):
            continue

        def make(chosen=chosen) -> tuple[Callable, Call]:
            function, call = plain()
            for _, change in chosen:
                change(call)
            return function, call

        yield f"{name}: {[change.__name__ for _, change in chosen]}", make


@pytest.fixture
def forget(monkeypatch) -> Callable[[], None]:
    def clear() -> None:
        launch_cache._launches.clear()
        launch_cache._recent.clear()

    for cache in ("_launches", "_recent"):
        monkeypatch.setattr(launch_cache, cache, {})
    return clear


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_way_takes_the_launch_cache_the_second_time(name, monkeypatch, forget):
    long = []

    def dispatch(op, call, backend=None):
        long.append(call)
        return Plan("fake", print, None, None, lambda config, at: lambda addresses: True)

    monkeypatch.setattr(registry, "dispatch", dispatch)
    missed, made = [], 0
    for ways, make in calls_of(name):
        forget()
        long.clear()
        for _ in range(2):
            function, call = make()
            try:
                function(**call)
            except (UnsupportedError, ValueError):  # two ways that exclude each other
                break
        else:
            made += 1
            missed += [ways] * (len(long) != 1)
    assert not missed
    assert made >= 3


@pytest.mark.skipif(library.why_no_library() is not None, reason="no native library here")
@pytest.mark.parametrize("name", [n for n in FUNCTIONS if not n.startswith("single_prefill")])
def test_every_way_computes_the_same_by_the_cache_and_the_long_way(name, monkeypatch, forget):
    monkeypatch.setattr(known, "x", numbers)
    monkeypatch.setitem(globals(), "x", numbers)
    dispatched = SimpleNamespace(calls=0)
    real = registry.dispatch

    def dispatch(*args, **options):
        dispatched.calls += 1
        return real(*args, **options)

    monkeypatch.setattr(registry, "dispatch", dispatch)
    differ, short = [], 0
    for ways, make in calls_of(name):
        forget()
        try:
            function, call = make()
            function(**call)
        except (UnsupportedError, ValueError):
            continue
        function, call = make()  # other numbers
        kept, before = [t.clone() for t in tensors_in(call)], dispatched.calls
        by_cache = [as_bytes(t) for t in (*tensors_in(function(**call)), *tensors_in(call))]
        short += dispatched.calls == before
        for t, old in zip(tensors_in(call), kept, strict=True):
            t.copy_(old)
        forget()
        by_long_way = [as_bytes(t) for t in (*tensors_in(function(**call)), *tensors_in(call))]
        same = len(by_cache) == len(by_long_way) and all(map(torch.equal, by_cache, by_long_way))
        differ += [ways] * (not same)
    assert not differ
    assert short >= 3, "the launch cache was asked"


@pytest.mark.parametrize("dtype", [E4M3, BF])
def test_values_that_begin_where_keys_do_with_other_strides_take_scales_of_either_kind(dtype, forget):
    room = numbers(P, 2 * S, L + R, dtype=dtype)
    pages, values = room[:, :S], room.flatten()[: P * S * (L + R)].view(P, S, L + R)
    found = []
    for scale in (0.5, torch.tensor([0.5]), torch.tensor([0.5])):
        function, call = xqa_mla(dtype, q_scale=scale, kv_scale=scale)
        function(**call | {"k_cache": pages, "v_cache": values})
        found.append(call["output"])
    assert torch.equal(found[1], found[2])
    torch.testing.assert_close(found[0], found[1])
    function, call = xqa_mla(dtype, q_scale=0.5, kv_scale=0.5)
    function(**call | {"k_cache": pages, "v_cache": pages})
    assert not torch.allclose(found[0], call["output"])


def numbers(*shape: int, dtype: torch.dtype = BF) -> Tensor:
    """Random ones, small enough for every dtype."""
    if dtype in (U8, torch.int8, torch.uint16):
        return torch.randint(0, 100, shape).to(dtype)
    return torch.rand(shape).add(0.1).to(dtype)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in tensors_in(v)] if isinstance(value, (tuple, list)) else []


def as_bytes(t: Tensor) -> Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8).clone()
