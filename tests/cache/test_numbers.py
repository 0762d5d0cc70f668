"""Numbers as callers give them: NumPy's everywhere, truth values nowhere, and none that fp32 does not hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tersekv
from tersekv.compat import flashinfer as fi
from tersekv.compat import vllm as vl
from tersekv.scalars import as_float, as_int, round_to_fp32

BF = torch.bfloat16
E4M3 = torch.float8_e4m3fn
torch.manual_seed(0)
K, V = torch.randn(8, 16, 2, 64).to(BF), torch.randn(8, 16, 2, 64).to(BF)
Q = torch.randn(2, 8, 64).to(BF)
TABLE, LENS = torch.tensor([[3, 1], [0, 5]]), torch.tensor([30, 9])


def attend(**options):
    return tersekv.decode(Q, (K, V), TABLE, LENS, **options)


def xqa_batch(**options):
    return fi.xqa_batch_decode_with_kv_cache(Q, (K, V), None, TABLE, LENS, 32, **options)


def xqa(**options):
    out = torch.full((2, 1, 8, 64), torch.nan, dtype=BF)
    given = {"num_kv_heads": 2, "page_size": 16, **options}
    fi.xqa(Q[:, None], K, V, TABLE, LENS, out, None, None, **given)
    return out


def allocated(**options):
    sizes = {"num_layers": 1, "num_pages": 4, "page_size": 16, "num_kv_heads": 2, "head_dim": 64}
    cache = tersekv.PagedKVCache.allocate(**sizes | {"format": "fp8_e4m3", **options})
    assert type(cache.head_dim) is type(cache.head_dim_v) is int
    assert type(cache[0].k_scale) is float
    tersekv.append(K[0], V[0], cache[0], torch.arange(16))
    return cache[0].k.view(torch.uint8)


def latents(**options):
    cache = tersekv.PagedLatentCache.allocate(**{"num_layers": 1, "num_pages": 4, "page_size": 16} | options)
    tersekv.mla_append(torch.randn(3, 512).fill_(2.0), torch.ones(3, 64), cache[0], torch.arange(3))
    return cache[0].ckv.view(torch.uint8)


def flash(**options):
    cache = torch.zeros(8, 16, 2, 64).to(E4M3)
    given = {"k_scale": 1.0, "v_scale": 1.0, **options}
    vl.reshape_and_cache_flash(K[0], V[0], cache, cache.clone(), torch.arange(16), "fp8", *given.values())
    return cache.view(torch.uint8)


NUMPY = [
    (attend, {"window": 5, "max_q_len": 1}), (attend, {"softmax_scale": 0.25, "softcap": 2.0, "out_scale": 0.5}),
    (xqa_batch, {"window_left": 5}), (xqa_batch, {"q_len_per_req": 1}),
    (xqa_batch, {"bmm1_scale": 0.25, "bmm2_scale": 2.0}), (xqa_batch, {"o_scale": 2.0}),
    (xqa, {"num_kv_heads": 2, "page_size": 16}),
    (xqa, {"q_seq_len": 1, "sliding_win_size": 4}), (xqa, {"q_scale": 0.25, "kv_scale": 2.0, "rcp_out_scale": 1.0}),
    (allocated, {"num_layers": 1, "num_pages": 4, "page_size": 16, "num_kv_heads": 2, "head_dim": 64}),
    (allocated, {"head_dim_v": 64}), (allocated, {"k_scale": 0.5, "v_scale": 2.0}),
    (latents, {"format": "bf16", "kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    (latents, {"format": "fp8_e4m3", "kv_scale": 0.5}), (flash, {"k_scale": 0.5, "v_scale": 2.0}),
]  # fmt: skip


@pytest.mark.parametrize(("f", "options"), NUMPY, ids=lambda x: getattr(x, "__name__", None) or ", ".join(x))
def test_numbers_may_be_numpys(f, options):
    kinds = {int: (np.int32, np.int64, np.uint16), float: (np.float32, np.float16, np.float64), str: (str,) * 3}
    want = f(**options)
    for i in range(3):
        assert torch.equal(f(**{n: kinds[type(x)][i](x) for n, x in options.items()}), want)


def prefill(**options):
    cache = tersekv.PagedLatentCache.allocate(1, 4, 16, format="bf16")[0]
    return tersekv.mla_prefill(
        torch.ones(4, 2, 192).to(BF), cache, torch.tensor([[2, 1]]), torch.tensor([0]), torch.tensor([0, 4]),
        torch.ones(20, 64), torch.ones(512).to(BF), torch.ones(512, 512).to(BF), tersekv.mla_prefill_plan([4], [4]),
        kv_c=torch.ones(4, 512).to(BF), k_pe=torch.ones(4, 64).to(BF), **{"softmax_scale": 0.1, **options},
    )  # fmt: skip


def test_the_numbers_of_a_prefill_may_be_numpys():
    want = prefill(epsilon=0.5)
    assert torch.equal(prefill(softmax_scale=np.float64(0.1), epsilon=np.float32(0.5)), want)


def stored(scale, **options):
    layer = tersekv.PagedKVLayer.of((K.to(E4M3), V.to(E4M3)), **{options["side"]: scale})
    return tersekv.decode(Q, layer, TABLE, LENS)


WRONG = [
    (attend, {"softmax_scale": True}, TypeError, "softmax_scale: want a number or a Tensor, got bool"),
    (attend, {"softcap": True}, TypeError, "softcap: want a number or None, got bool"),
    (attend, {"window": True}, TypeError, "window: want int, got bool True"),
    (attend, {"max_q_len": np.True_}, TypeError, "max_q_len: want int, got "),
    (attend, {"softmax_scale": 1e39}, ValueError, "softmax_scale: want a finite number, not negative in fp32, got"),
    (attend, {"out_scale": -1e39}, ValueError, "out_scale: want a finite number in fp32, got -1e+39"),
    (attend, {"softcap": 1e39}, ValueError, "softcap: want 0 (none) or a positive, finite number in fp32, got"),
    (attend, {"softcap": 1e-46}, ValueError, "softcap: want 0 (none) or a positive, finite number, got 1e-46"),
    (attend, {"softmax_scale": 10**400}, ValueError, "softmax_scale: want a number or a Tensor that fp32"),
    (prefill, {"softmax_scale": None}, TypeError, "softmax_scale: want a number, got NoneType"),
    (prefill, {"softmax_scale": "0.07"}, TypeError, "softmax_scale: want a number, got str"),
    (prefill, {"softmax_scale": torch.ones(1)}, TypeError, "softmax_scale: want a number, got Tensor"),
    (prefill, {"epsilon": None}, TypeError, "epsilon: want a number, got NoneType"),
    (prefill, {"epsilon": float("inf")}, ValueError, "epsilon: want a finite number, not negative, got inf"),
    (stored, {"scale": 1e39, "side": "k_scale"}, ValueError, "k_scale: want a positive, finite number in fp32, got"),
    (stored, {"scale": 1e-46, "side": "v_scale"}, ValueError, "v_scale: want a positive number that fp32 holds, got"),
    (stored, {"scale": True, "side": "v_scale"}, TypeError, "v_scale: want a number or a Tensor, got bool"),
    (allocated, {"k_scale": True}, TypeError, "k_scale: want a number or a Tensor, got bool"),
    (allocated, {"num_layers": True}, TypeError, "num_layers: want int, got bool True"),
    (allocated, {"k_scale": 1e-46}, ValueError, "k_scale: want a positive number that fp32 holds, and its rec"),
    (allocated, {"k_scale": 1e39}, ValueError, "k_scale: want a positive number that fp32 holds, and its rec"),
    (latents, {"format": "fp8_e4m3", "kv_scale": True}, TypeError, "kv_scale: want a number or a Tensor, got bool"),
    (flash, {"k_scale": True}, TypeError, "k_scale: want a number or Tensor, got bool"),
    (xqa, {"q_scale": True}, TypeError, "q_scale: want a number or Tensor, got bool"),
]  # fmt: skip


@pytest.mark.parametrize(("f", "options", "error", "message"), WRONG, ids=[f"{f.__name__} {o}" for f, o, _, _ in WRONG])
def test_a_number_that_cannot_be_meant_is_named(f, options, error, message):
    with pytest.raises(error) as e:
        f(**options)
    assert str(e.value).startswith(message)


def test_an_append_says_what_fp32_does_not_hold():
    layer = tersekv.PagedKVLayer.of((K.to(E4M3), V.to(E4M3)), k_scale=1e39)
    with pytest.raises(ValueError, match=r"^k_scale: want a positive number that fp32 holds, and its reciprocal too"):
        tersekv.append(K[0], V[0], layer, torch.arange(16))


def test_the_largest_and_the_smallest_number_of_fp32_pass():
    attend(softmax_scale=3.4028234e38)
    stored(1.5e-45, side="v_scale")


def test_the_helpers_give_pythons_own_numbers():
    assert type(as_float("x", np.float32(2))) is type(as_float("x", np.int8(2))) is type(as_float("x", 2)) is float
    assert type(as_int("x", np.int64(2))) is int
    assert [round_to_fp32(x) for x in (1e39, -1e39, 1e-46)] == [float("inf"), -float("inf"), 0.0]
    assert round_to_fp32(0.1) == float(np.float32(0.1))
