"""A plan is found again by what it depends on, and by nothing less."""

from __future__ import annotations

import pytest
import torch

import tersekv
from tersekv.calls import AttentionCall, attention_inputs
from tersekv.dispatch import plan, signature

BYTES = torch.zeros(1 << 16, dtype=torch.uint8)


def call(**other) -> AttentionCall:
    layer = tersekv.PagedKVCache.allocate(1, 4, 8, 2, 16, format="bf16")[0]
    fields = {
        "q": torch.zeros(3, 4, 16, dtype=torch.bfloat16), "k_cache": layer.k, "v_cache": layer.v,
        "page_table": torch.zeros(3, 4, dtype=torch.int32), "seq_lens": torch.ones(3, dtype=torch.int32),
        "out": torch.zeros(3, 4, 16, dtype=torch.bfloat16), "format": "bf16", "max_q_len": 1, "window": 0,
        "softcap": 0.0, "softmax_scale": 0.25, "k_scale": 1.0, "v_scale": 1.0, "out_scale": 1.0, "precision": "exact",
    } | other  # fmt: skip
    return AttentionCall(**{n: fields.get(n, AttentionCall._field_defaults.get(n)) for n in AttentionCall._fields})


def tensors(c: AttentionCall) -> tuple:
    return signature.FIELD_GETTERS["decode"][0](c)


def at(offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose first byte lies `offset` bytes behind a multiple of 16."""
    first = -BYTES.data_ptr() % 16 + offset
    size = torch.Size(shape).numel() * dtype.itemsize
    return BYTES[first : first + size].view(dtype).view(shape)


HALF = torch.bfloat16
OTHERS = {
    "dtype": {"q": torch.zeros(3, 4, 16, dtype=torch.float16)},
    "shape": {"page_table": torch.zeros(3, 5, dtype=torch.int32)},
    "strides": {"q": torch.zeros(4, 3, 16, dtype=HALF).transpose(0, 1)},
    "wide-rows": {"out": torch.zeros(3, 4, 24, dtype=HALF)[..., :16]},
    "place": {"q": at(8, (3, 4, 16), HALF)},
    "device": {"seq_lens": torch.ones(3, dtype=torch.int32, device="meta")},
    "one-more": {"lse": torch.zeros(3, 4)},
    "another-field": {"k_scale_t": torch.ones(1)},
}


@pytest.mark.parametrize("what", OTHERS)
def test_tensors_that_differ_in_what_a_plan_depends_on_are_told_apart(what):
    base = call(v_scale_t=torch.ones(1)) if what == "another-field" else call()
    other = call(**OTHERS[what])
    assert not signature.TensorSignature(tensors(base)).matches(tensors(other))
    assert not signature.TensorSignature(tensors(other)).matches(tensors(base))
    assert tuple(map(signature.tensor_key, tensors(base))) != tuple(map(signature.tensor_key, tensors(other)))


def test_values_and_addresses_are_no_facts():
    assert signature.TensorSignature(tensors(call())).matches(tensors(call(q=torch.ones(3, 4, 16, dtype=HALF))))
    assert signature.TensorSignature(tensors(call())).matches(tensors(call(q=at(16, (3, 4, 16), HALF))))
    key = signature.tensor_key(torch.zeros(1, 4).as_strided((1, 4), (99, 1)))
    assert key == signature.tensor_key(torch.zeros(1, 4))


def test_the_next_call_needs_no_key(monkeypatch):
    first = plan.plan("decode", call())
    made = []
    monkeypatch.setattr(plan, "tensor_key", lambda x: made.append(x) or signature.tensor_key(x))
    assert plan.plan("decode", call()) is first
    assert not made
    assert plan.plan("decode", call(window=3)) is not first  # other options are looked up apart
    made.clear()
    assert plan.plan("decode", call()) is first
    assert plan.plan("decode", call(window=3)).config == plan.plan("decode", call(window=3)).config
    assert not made


def test_without_guards_the_key_finds_the_plan(monkeypatch):
    monkeypatch.setattr(signature, "_guards", None)
    c = call(softmax_scale=0.7)
    first = plan.plan("decode", c)
    assert not signature.TensorSignature(tensors(c)).matches(tensors(c))
    assert plan.plan("decode", call(softmax_scale=0.7)) is first


def test_a_tensor_given_twice_finds_its_plan():
    x = torch.zeros(3, 2, 16, dtype=HALF)
    layer = tersekv.PagedKVCache.allocate(1, 4, 8, 2, 16, format="bf16")[0]
    for _ in range(3):
        x += 1
        tersekv.append(x, x, layer, torch.tensor([0, 9, 30]))
    assert (layer.k[[0, 1, 3], [0, 1, 6]] == 3).all()


def test_attention_inputs_are_the_tensors_of_the_record_in_its_order():
    names = signature.TENSOR_FIELDS["decode"]
    assert attention_inputs(**{n: n for n in names}) == names == signature.TENSOR_FIELDS["prefill"]
