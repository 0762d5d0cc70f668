"""Attention over caches whose pages are longer than int32 counts: what is read lies where 64 bits say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tersekv.backends.host import launch
from tersekv.backends.triton import attention
from tersekv.backends.triton.mla_decode import entry as mla_decode
from tersekv.dispatch import plan
from tersekv.testing.cases import Case
from tersekv.testing.make import make
from tersekv.testing.memory import moved

FAR = 2**31 + 64  # elements


def spread(x: Tensor, dim: int) -> Tensor:
    """x in memory of which little is touched: the last of dimension `dim` lies more than 2^31 elements behind."""
    step = -(-FAR // (16 * (x.shape[dim] - 1))) * 16
    strides = list(x.contiguous().stride())
    page = step * x.shape[dim]
    strides = [page if i == 0 else step if i == dim else n for i, n in enumerate(strides)]
    out = torch.empty(page * x.shape[0], dtype=x.dtype).as_strided(x.shape, strides)
    for at in torch.cartesian_prod(torch.arange(x.shape[0]), torch.arange(x.shape[dim])).tolist():
        index = tuple(at[0] if i == 0 else at[1] if i == dim else slice(None) for i in range(x.dim()))
        out.view(torch.uint8)[index] = x.view(torch.uint8)[index]
    return out


def alone(call, *names: str):
    """The call with the one page of its one request, and the same in other memory."""
    page = int(call.page_table[0, 0])
    call.page_table[0, 0] = 0
    caches = {n: getattr(call, n) for n in names}
    call = call._replace(**{n: None if x is None else x[page : page + 1] for n, x in caches.items()})
    return call, moved(call, "cpu")


def check(backend, op: str, far, near) -> None:
    for call in (far, near):
        config = backend.configure(plan.facts(op, call))
        assert (call is far) == config.constants.INT64_OFFSETS
        backend.run(call, config)
    assert near.out.isfinite().all()
    assert torch.equal(far.out, near.out)


@pytest.mark.parametrize("dim", [1, 2], ids=["slots", "heads"])
@pytest.mark.parametrize(("fmt", "name"), [("bf16", "k_cache"), ("bf16", "v_cache"), ("nvfp4", "k_scale_cache")])
def test_decode(fmt, name, dim):
    case = Case("decode", fmt, "far", lens=(3,), page=3, heads=2, group=2, dim=16)
    call, near = alone(make(case), "k_cache", "v_cache", "k_scale_cache", "v_scale_cache")
    check(attention, "decode", call._replace(**{name: spread(getattr(call, name), dim)}), near)


@pytest.mark.parametrize(("fmt", "name"), [("bf16", "k_cache"), ("nvfp4", "v_scale_cache")])
def test_prefill(fmt, name, monkeypatch):
    monkeypatch.setattr(launch, "num_sms", lambda f: 1)  # so many blocks of rows take prefill's own kernel
    case = Case("prefill", fmt, "far", lens=(3,), q_lens=(2,), page=3, heads=2, group=2, dim=16)
    call, near = alone(make(case), "k_cache", "v_cache", "k_scale_cache", "v_scale_cache")
    check(attention, "prefill", call._replace(**{name: spread(getattr(call, name), 1)}), near)


@pytest.mark.parametrize("name", ["ckv", "kpe"])
def test_mla_decode(name):
    case = Case("mla_decode", "bf16", "far", lens=(3,), page=3, heads=1, group=2, rank=64, rope=16, split=True)
    call, near = alone(make(case), "ckv", "kpe")
    check(mla_decode, "mla_decode", call._replace(**{name: spread(getattr(call, name), 1)}), near)


def head_by_head(x: Tensor) -> Tensor:
    """Memory for x [T, Hq, D] whose last head lies 2^31 elements behind the first, and as many lie before that: there
    32 bits would lead."""
    strides = (x.shape[2] + 16, -(-(2**31) // (x.shape[1] - 1)), 1)
    room = torch.empty(2**32 + x.shape[0] * strides[0], dtype=x.dtype)
    return room.as_strided(x.shape, strides, 2**31).fill_(torch.nan)


@pytest.mark.parametrize("invariant", [False, True], ids=["", "batch invariant"])
@pytest.mark.parametrize("op", ["decode", "prefill", "mla_decode"])
def test_outputs_that_lie_head_by_head(op, invariant, monkeypatch):
    """Rows of requests, of requests that are cut, and those behind the last request."""
    monkeypatch.setattr(launch, "num_sms", lambda f: 4 if op != "prefill" else 1)
    sizes = (
        {"rank": 64, "rope": 16, "heads": 1, "group": 4} if op == "mla_decode" else {"heads": 2, "dim": 16, "group": 2}
    )
    case = Case(op, "bf16", "far", lens=(700, 5), q_lens=(2, 2), page=16, ragged=True, **sizes)
    near = make(case)
    near.cu_seqlens_q[-1] = 3  # a row of no request
    near = near._replace(batch_invariant=invariant)
    far = moved(near, "cpu")
    far = far._replace(out=head_by_head(near.out))
    backend = mla_decode if op == "mla_decode" else attention
    for call in (far, near):
        backend.run(call, backend.configure(plan.facts(op, call)))
    assert near.out.isfinite().all()
    assert torch.equal(far.out, near.out)
    assert torch.equal(far.lse, near.lse)
