"""What a program sets for all of torch changes no result: autocast, default dtype and device, tensors of no memory."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tersekv
from tersekv.calls import CALLS
from tersekv.compat import _flashinfer_views, flashinfer
from tersekv.dispatch import plan
from tersekv.testing.cases import OPS, cases
from tersekv.testing.make import make

BF, E4M3 = torch.bfloat16, torch.float8_e4m3fn
EVERY = [next(c for c in cases((op,), (f,))) for op in OPS for f in dict.fromkeys(c.format for c in cases((op,)))]
CHUNKS = [c for c in cases(("mla_prefill",)) if "chunk" in c.name]


def written(case, context) -> list[torch.Tensor]:
    """The bytes that a case writes where the context holds."""
    call = make(case)
    with context:
        plan.dispatch(case.op, call)
    outs = (getattr(call, name) for name in CALLS[case.op][1])
    return [x.contiguous().flatten().view(torch.uint8) for x in outs if x is not None]


def same(case, context) -> None:
    want, got = written(case, nullcontext()), written(case, context)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def name(case) -> str:
    return f"{case.op} {case.format} {case.name}"


@contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("half", [torch.float16, BF], ids=["fp16", "bf16"])
@pytest.mark.parametrize("case", EVERY + CHUNKS[:2], ids=name)
def test_autocast_changes_no_bit(case, half):
    same(case, torch.autocast("cpu", dtype=half))


@pytest.mark.parametrize("dtype", [BF, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("case", EVERY + CHUNKS[:2], ids=name)
def test_a_default_dtype_changes_no_bit(case, dtype):
    same(case, default_dtype(dtype))


@pytest.mark.parametrize("case", EVERY + CHUNKS[:2], ids=name)
def test_a_default_device_of_other_tensors_changes_no_bit(case):
    same(case, torch.device("meta"))


def decode_call(device=None):
    """What append and decode take, with a page of other people's in the table."""
    cache = tersekv.PagedKVCache.allocate(1, 4, 16, 2, 64, format="int8_per_token_head", device=device)[0]
    k, v = torch.randn(20, 2, 64, device=device), torch.randn(20, 2, 64, device=device)
    table = torch.tensor([[2, 0, 1]], device=device)
    return k, v, cache, torch.arange(32, 52, device=device) % 48, torch.randn(1, 4, 64, device=device), table


def step(k, v, cache, slots, q, table):
    tersekv.append(k, v, cache, slots)
    lens = torch.full((1,), 20, device=q.device)
    return tersekv.decode(q, cache, table, lens, return_lse=True)


def test_fake_tensors_get_fake_results():
    with FakeTensorMode():
        out, lse = step(*decode_call())
    assert (out.shape, lse.shape) == ((1, 4, 64), (1, 4))


def test_fake_tensors_leave_nothing_behind_for_real_ones():
    _flashinfer_views._kept_one.cache_clear()
    with FakeTensorMode():
        _flashinfer_views.layer(torch.zeros(4, 2, 16, 2, 32, dtype=torch.int8), "NHD", None)
    kv = _flashinfer_views.layer(torch.zeros(4, 2, 16, 2, 32, dtype=torch.int8), "NHD", None)
    assert type(kv.k_scale_cache) is torch.Tensor
    assert (kv.k_scale_cache == 1).all()


@pytest.mark.filterwarnings("error")
def test_fake_views_of_rows_are_not_asked_for_their_memory():
    with FakeTensorMode():
        k, index, out = torch.zeros(8, 16, 576).to(E4M3), torch.ones(2, 2, dtype=torch.int32), torch.zeros(2, 1, 8, 512)
        q = torch.zeros(2, 1, 8, 576).to(E4M3)
        flashinfer.xqa_mla(q, k, k[..., :512], index, index[0], out.to(BF), None, None, 16)


def test_meta_tensors_get_shapes():
    out, lse = step(*decode_call("meta"))
    assert (out.shape, out.device.type, lse.shape) == ((1, 4, 64), "meta", (1, 4))


def test_a_traced_step_holds_the_operators_and_computes_the_same():
    torch.manual_seed(0)
    given = decode_call()
    traced = make_fx(step)(*given)
    called = [str(n.target) for n in traced.graph.nodes if n.op == "call_function"]
    assert "tersekv.append.default" in called
    assert "tersekv.decode.default" in called
    for a, b in zip(traced(*given), step(*given), strict=True):
        assert torch.equal(a, b)


def negated(x: torch.Tensor) -> torch.Tensor:
    view = torch._neg_view(-x)
    assert view.is_neg()
    assert torch.equal(view, x)
    return view


def test_a_negated_view_is_refused_before_and_after_a_call_without():
    k, v, cache, slots, q, table = decode_call()
    lens = torch.full((1,), 20)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^q: want memory as it reads, got a negated view \(x\.resolve_neg\(\)\)"):
            tersekv.decode(negated(q), cache, table, lens)
        with pytest.raises(ValueError, match=r"^k: want memory as it reads"):
            tersekv.append(negated(k), v, cache, slots)
        tersekv.append(k, v, cache, slots)
        tersekv.decode(q, cache, table, lens)
