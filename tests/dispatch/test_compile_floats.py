"""Numbers that differ from call to call under torch.compile, as layers' scales do: equal results."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tersekv
from tersekv.compat import flashinfer, vllm
from tersekv.testing.memory import as_bytes

BF, E4M3 = torch.bfloat16, torch.float8_e4m3fn
T, HQ, H, D, L, R, S = 5, 4, 2, 32, 128, 16, 8
# The first and the third as of layers without a scale of their own; one halfway between two fp32 numbers. Of more than
# eight torch makes no graphs: it has one for each float that no arithmetic of tensors takes.
PAIRS = ((1.0, 1.0), (0.3, 3.0), (1.0, 0.3), (1 + 2.0**-24, 1e-3), (0.7, 1 + 3 * 2.0**-24), (0.3, 3.0))


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF)


def kv(format: str, k_scale: float, v_scale: float) -> tersekv.PagedKVLayer:
    layer = tersekv.PagedKVCache.allocate(1, 3, S, H, D, format=format)[0]
    tersekv.append(rows(2 * S, H, D, seed=1), rows(2 * S, H, D, seed=2), layer, torch.arange(2 * S))
    return replace(layer, k_scale=k_scale, v_scale=v_scale)


def latent(format: str, kv_scale: float, _: float) -> tersekv.PagedLatentLayer:
    make = tersekv.PagedLatentCache.allocate
    layer = make(1, 3, S, format=format, kv_lora_rank=L, qk_rope_head_dim=R, split=True)[0]
    tersekv.mla_append(rows(2 * S, L, seed=1), rows(2 * S, R, seed=2), layer, torch.arange(2 * S))
    return replace(layer, kv_scale=kv_scale)


def stored(layer) -> list[Tensor]:
    """Bytes of all pages."""
    names = ("k", "v", "k_scale_cache", "v_scale_cache", "ckv", "kpe")
    found = (getattr(layer, name, None) for name in names)
    return [as_bytes(x).clone() for x in found if x is not None]


TABLE, LENS, ROWS = torch.tensor([[0, 1, 2]]), torch.tensor([15]), torch.tensor([0, T])
SLOTS, POSITIONS, COS = torch.tensor([16, 3, -1, 18, 19]), torch.arange(T), torch.linspace(-1, 1, 20 * R).view(20, R)
OLD, PLAN = torch.tensor([10]), tersekv.mla_prefill_plan([15], [T])
Q, Q1, K, V = rows(T, HQ, D), rows(1, HQ, D), rows(T, H, D), rows(T, H, D, seed=3)
KV_C, K_PE, Q_NOPE, Q_PE, Q_MLA = rows(T, L), rows(T, R), rows(T, HQ, L), rows(T, HQ, R), rows(T, HQ, 24 + R)
GAMMA, UP, W_UK, W_UV = rows(L), rows(HQ * 48, L), rows(HQ, L, 24), rows(HQ, 24, L)
PAGES = {
    "kv_indices": torch.tensor([2, 1]), "kv_indptr": torch.tensor([0, 2]), "positions": POSITIONS,
    "batch_indices": torch.zeros(T, dtype=torch.int32), "page_size": S,
}  # fmt: skip


def append(layer, x: float, y: float):
    tersekv.append(K, V, layer, SLOTS)
    return ()


def rope_append(layer, x: float, y: float):
    return (tersekv.rope_append(Q, K, V, layer, SLOTS, COS, POSITIONS, q_dtype=E4M3, q_scale=y),)


def mla_append(layer, x: float, y: float):
    query = {"q_nope": Q_NOPE, "q_pe": Q_PE, "q_dtype": E4M3, "q_scale": y}
    return tersekv.mla_append(KV_C, K_PE, layer, SLOTS, cos_sin_cache=COS, positions=POSITIONS, **query)


def decode(layer, x: float, y: float):
    return tersekv.decode(Q1, layer, TABLE, LENS, softmax_scale=x, softcap=y, out_scale=x, return_lse=True)


def prefill(layer, x: float, y: float):
    numbers = {"softmax_scale": x, "softcap": y, "out_scale": x}
    return (tersekv.prefill(Q, layer, TABLE, LENS, ROWS, k=K, v=V, **numbers),)


def mla_decode(layer, x: float, y: float):
    return (tersekv.mla_decode((Q_NOPE[:1], Q_PE[:1]), layer, TABLE, LENS, softmax_scale=y, out_scale=x),)


def mla_prefill(layer, x: float, y: float):
    new = {"kv_c": KV_C, "k_pe": K_PE, "softmax_scale": y, "epsilon": x * 1e-3}
    return (tersekv.mla_prefill(Q_MLA.clone(), layer, TABLE, OLD, ROWS, COS, GAMMA, UP, PLAN, **new),)


def mla_decode_branch(layer, x: float, y: float):
    new = {"kv_c": KV_C[:1], "k_pe": K_PE[:1], "softmax_scale": y, "epsilon": x * 1e-3}
    return (tersekv.mla_decode_branch(Q_MLA[:1], layer, TABLE, OLD, COS, GAMMA, W_UK, W_UV, **new),)


def of_flashinfer(layer, x: float, y: float):
    scales = {"quant_scale_q": x, "quant_scale_kv": y}
    return flashinfer.rope_quantize_fp8_append_paged_kv_cache(
        Q[..., :R], K[..., :R], Q[..., R:], K[..., R:], V, COS, POSITIONS, paged_kv_cache=(layer.k, layer.v), **PAGES,
        **scales,
    )  # fmt: skip


def of_vllm(layer, x: float, y: float):
    vllm.reshape_and_cache_flash(K, V, layer.k, layer.v, SLOTS, "fp8", x, y)
    return ()


KV_CALLS = (append, rope_append, decode, prefill, of_flashinfer, of_vllm)
LATENT_CALLS = (mla_append, mla_decode, mla_prefill, mla_decode_branch)
CASES = [
    *itertools.product(KV_CALLS, [kv], ["fp8_e4m3"]),
    *itertools.product(KV_CALLS[:4], [kv], ["nvfp4"]),
    *itertools.product(LATENT_CALLS, [latent], ["fp8_e4m3"]),
]


def allocated(format: str, x: float, y: float) -> Tensor:
    cache = tersekv.PagedKVCache.allocate(1, 3, S, H, D, format=format, k_scale=x, v_scale=y)
    tersekv.append(K, V, cache[0], SLOTS)
    return cache[0].k.view(torch.uint8)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("format", ["fp8_e4m3", "nvfp4"])
def test_a_cache_may_be_made_with_other_numbers_at_each_call(format: str, dynamic: bool | None):
    torch._dynamo.reset()
    compiled = torch.compile(allocated, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for x, y in PAIRS:
        assert torch.equal(compiled(format, x, y), allocated(format, x, y)), (x, y)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(("call", "layer", "format"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_numbers_may_differ_from_call_to_call(call: Callable, layer: Callable, format: str, dynamic: bool | None):
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for x, y in PAIRS:
        got_in, want_in = layer(format, x, y), layer(format, x, y)
        got, want = compiled(got_in, x, y), call(want_in, x, y)
        for a, b in zip([*got, *stored(got_in)], [*want, *stored(want_in)], strict=True):
            assert torch.equal(as_bytes(a), as_bytes(b)), (x, y)


def test_a_scale_that_fp32_does_not_hold_is_told_while_it_compiles():
    for x, y in ((-1.0, 1.0), (1e-50, 1.0), (1.0, 1e50)):
        torch._dynamo.reset()
        compiled = torch.compile(append, fullgraph=True, backend="eager")
        name = "k_scale" if x != 1 else "v_scale"
        with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=f"{name}: want a positive number"):
            compiled(kv("fp8_e4m3", x, y), x, y)
