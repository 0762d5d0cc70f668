"""FlashInfer's signatures take the short way of the verbs: a call like one before it goes straight to its launch."""

from __future__ import annotations

import pytest
import torch

from tersekv.backends.cpu import library
from tersekv.compat import _flashinfer_append, _flashinfer_decode, flashinfer
from tersekv.compat.flashinfer import rope_quantize_fp8_append_paged_kv_cache as rope
from tersekv.compat.flashinfer import xqa_batch_decode_with_kv_cache as xqa
from tersekv.dispatch import launch_cache
from tersekv.testing.memory import as_bytes

pytestmark = pytest.mark.skipif(library.why_no_library() is not None, reason="no native library here")
E4M3, T, HQ, H, D, R, S = torch.float8_e4m3fn, 3, 4, 2, 32, 16, 8


class LongWay(Exception):
    pass


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch):
    for known in ("_launches", "_recent"):
        monkeypatch.setattr(launch_cache, known, {})


@pytest.fixture
def only_short(monkeypatch):
    """Call it, and whatever does not take the short way raises LongWay."""

    def refuse(*args):
        raise LongWay

    def arm():
        for module in (_flashinfer_append, _flashinfer_decode, flashinfer):
            monkeypatch.setattr(module, "dispatch_call", refuse)

    return arm


def rope_call(latent=False, whole=False, **more):
    torch.manual_seed(0)
    rest = None if whole else torch.randn(T, HQ, D - R).bfloat16()
    rows = {"q_rope": torch.randn(T, HQ, D if whole else R).bfloat16(), "q_nope": rest}
    if latent:
        rows |= {"k_rope": torch.randn(T, R).bfloat16(), "k_nope": torch.randn(T, D).bfloat16(), "v": None}
        cache = torch.zeros(4, S, D).to(E4M3), torch.zeros(4, S, R).to(E4M3)
    else:
        rows |= {"k_rope": torch.randn(T, H, D if whole else R).bfloat16(), "v": torch.randn(T, H, D).bfloat16()}
        rows |= {"k_nope": None if whole else torch.randn(T, H, D - R).bfloat16()}
        cache = torch.zeros(4, S, H, D).to(E4M3), torch.zeros(4, S, H, D).to(E4M3)
    place = {
        "cos_sin_cache": torch.randn(20, D if whole else R), "pos_ids": torch.tensor([5, 6, 7], dtype=torch.int32),
        "kv_indices": torch.tensor([3, 1], dtype=torch.int32), "kv_indptr": torch.tensor([0, 2], dtype=torch.int32),
        "batch_indices": torch.zeros(T, dtype=torch.int32), "positions": torch.tensor([7, 8, 9], dtype=torch.int32),
    }  # fmt: skip
    return {**rows, **place, "paged_kv_cache": cache, "page_size": S, **more}


def results(call):
    """Bytes of both outputs and of the cache, after a call."""
    for x in call["paged_kv_cache"]:
        as_bytes(x).zero_()
    return [as_bytes(x).clone() for x in (*rope(**call), *call["paged_kv_cache"])]


ONE = torch.tensor([0.5])
NO_Q, NO_K = torch.empty(T, HQ, 0, dtype=torch.bfloat16), torch.empty(T, H, 0, dtype=torch.bfloat16)
NO_OUT = torch.empty(T, HQ, 0, dtype=E4M3)
# As callers have them for whom all columns are rotated, or whose query has none to pass on.
NO_COLUMNS = [
    {"whole": True, "q_nope_out": NO_OUT}, {"whole": True, "q_nope": NO_Q}, {"whole": True, "k_nope": NO_K},
    {"whole": True, "q_nope": NO_Q, "k_nope": NO_K, "q_nope_out": NO_OUT}, {"latent": True, "q_nope": NO_Q},
    {"whole": True, "q_nope": NO_Q, "q_rope_out": torch.empty(T, HQ, D, dtype=E4M3)},
    {"latent": True, "q_nope": NO_Q, "q_nope_out": NO_OUT, "quant_scale_kv": ONE},
]  # fmt: skip


def named(options):
    """What stands in the id of a test: names alone, since a tensor's values may differ between two processes."""
    return " ".join(options) or "plain"


@pytest.mark.parametrize("options", [
    {}, {"whole": True}, {"latent": True}, {"quant_scale_kv": ONE, "quant_scale_q": ONE.clone()}, {"is_neox": False},
    {"q_rope_out": torch.empty(T, HQ, R, dtype=E4M3)}, {"latent": True, "quant_scale_kv": ONE},
    {"q_nope_out": torch.empty(T, HQ, D - R, dtype=E4M3)}, *NO_COLUMNS,
], ids=named)  # fmt: skip
def test_a_second_append_is_short_and_the_same(options, only_short):
    call = rope_call(**options)
    first = results(call)
    only_short()
    again = results({**call, "pos_ids": call["pos_ids"].clone(), "batch_indices": call["batch_indices"].clone()})
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert first[2].any()
    other = results({**call, "positions": call["positions"] - 2})  # values are read anew
    assert not torch.equal(first[2], other[2])


@pytest.mark.parametrize("options", NO_COLUMNS, ids=named)
def test_what_has_no_columns_is_still_what_a_call_is_known_by(options, only_short):
    call = rope_call(**options)
    first = rope(**call)
    only_short()
    again = rope(**call)
    assert [(x.shape, x.dtype) for x in again] == [(x.shape, x.dtype) for x in first]
    if "q_nope_out" in options:
        assert again[1] is options["q_nope_out"]
    for name in ("q_nope", "k_nope", "q_nope_out"):
        x = options.get(name)
        others = [] if x is None else [x[:-1], x.float(), x[..., None, :], torch.empty(*x.shape[:2], 8, dtype=x.dtype)]
        for other in (*others, 3):
            with pytest.raises((LongWay, ValueError, TypeError)):
                rope(**{**call, name: other})


def test_positions_that_are_given_twice_are_one_tensor(only_short):
    call = rope_call()
    call["pos_ids"] = call["positions"]
    first = results(call)
    only_short()
    again = results(call)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    apart = {**call, "pos_ids": call["positions"].clone()}
    with pytest.raises(LongWay):  # two tensors are another call
        rope(**apart)


@pytest.mark.parametrize("change", [
    {"quant_scale_kv": 0.25}, {"quant_scale_q": 0.25}, {"is_neox": False}, {"page_size": 8.0}, {"page_size": 16},
    {"quantize_dtype": torch.float8_e5m2}, {"quant_scale_kv": True}, {"kv_layout": "HND"},
], ids=named)  # fmt: skip
def test_an_append_with_another_option_is_another_call(change, only_short):
    call = rope_call()
    rope(**call)
    only_short()
    rope(**call)
    with pytest.raises((LongWay, ValueError, TypeError)):
        rope(**{**call, **change})


def decode_call(joint=False, nvfp4=False, **more):
    torch.manual_seed(0)
    width = D // 2 if nvfp4 else D
    shape = (6, 2, S, H, width) if joint else (6, S, H, width)
    make = (lambda: torch.randint(0, 256, shape, dtype=torch.uint8)) if nvfp4 else lambda: torch.randn(shape).to(E4M3)
    call = {"kv_cache": make() if joint else (make(), make())}
    if nvfp4:
        call["kv_cache_sf"] = torch.rand(*shape[:-1], D // 16).to(E4M3)
    table = torch.tensor([[3, 1], [2, 5]], dtype=torch.int32)
    lens = torch.tensor([9, 13], dtype=torch.int32)
    return {**call, "query": torch.randn(2, HQ, D).bfloat16(), "workspace_buffer": torch.empty(0),
            "block_tables": table, "seq_lens": lens, "max_seq_len": 16, "bmm1_scale": 0.2, **more}  # fmt: skip


@pytest.mark.parametrize("options", [
    {}, {"joint": True}, {"joint": True, "nvfp4": True}, {"bmm1_scale": ONE}, {"bmm2_scale": ONE, "o_scale": 0.5},
    {"out": torch.empty(2, HQ, D, dtype=torch.bfloat16)}, {"window_left": 4, "sinks": torch.ones(HQ)},
    {"seq_lens": torch.tensor([[9], [13]], dtype=torch.int32)},
], ids=named)  # fmt: skip
def test_a_second_decode_is_short_and_the_same(options, only_short):
    call = decode_call(**options)
    first = xqa(**call).clone()
    only_short()
    again = xqa(**{**call, "block_tables": call["block_tables"].clone()})
    assert torch.equal(first, again)
    assert "out" not in options or again is options["out"]
    assert not torch.equal(first, xqa(**{**call, "query": call["query"] * 2}))


@pytest.mark.parametrize("change", [
    {"bmm1_scale": 0.3}, {"bmm2_scale": 0.3}, {"o_scale": 2.0}, {"window_left": 3}, {"q_len_per_req": True},
    {"kv_layout": "HND"}, {"bmm1_scale": 1}, {"bmm2_scale": True},
], ids=named)  # fmt: skip
def test_a_decode_with_another_option_is_another_call(change, only_short):
    call = decode_call()
    xqa(**call)
    only_short()
    xqa(**call)
    with pytest.raises((LongWay, ValueError, TypeError)):
        xqa(**{**call, **change})


def test_errors_of_the_short_way_name_the_callers_arguments(only_short):
    call = decode_call()
    xqa(**call)
    only_short()
    call["block_tables"] = torch.full_like(call["block_tables"], 99)
    with pytest.raises(ValueError, match=r"^block_tables: want page ids in \[0, 6\), got 99"):
        xqa(**call)
