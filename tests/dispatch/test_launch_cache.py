"""The short way of a call: only what is like a call before takes it, with its own addresses; outputs are its own."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import tersekv
from tersekv.calls import MergeCall, attention_inputs
from tersekv.dispatch import launch_cache, plan, signature
from tersekv.dispatch.signature import TENSOR_FIELDS

BF = torch.bfloat16


class Backend:
    """Stands in for the torch backend's launches: notes addresses by the tensors' names."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, int]]] = []
        self.willing = True

    def bind(self, op: str) -> Any:
        def bind(config, at):
            def launch(addresses):
                if self.willing:
                    self.calls.append((op, {name: addresses[i] for name, i in at.items()}))
                return self.willing

            return launch

        return bind

    def last(self) -> dict[str, int]:
        return self.calls[-1][1]


@pytest.fixture
def bound(monkeypatch) -> Backend:
    """Operations of the torch backend can be bound, nothing is known yet."""
    backend = Backend()
    monkeypatch.setenv("TERSEKV_BACKEND", "torch")
    for op in TENSOR_FIELDS:
        monkeypatch.setattr(plan._module("torch", op), "bind", backend.bind(op), raising=False)
    for home, memory in ((plan, "_plans"), (plan, "_recent"), (launch_cache, "_recent"), (launch_cache, "_launches")):
        monkeypatch.setattr(home, memory, {})
    return backend


LAYER = tersekv.PagedKVCache.allocate(1, 8, 8, 2, 32, format="bf16")[0]
LATENT = tersekv.PagedLatentCache.allocate(1, 8, 8, format="bf16", kv_lora_rank=64, qk_rope_head_dim=16)[0]


def indices(b: int = 2, pages: int = 4) -> dict[str, torch.Tensor]:
    return {"page_table": torch.zeros(b, pages, dtype=torch.int32), "seq_lens": torch.full((b,), 5).int()}


def query(b: int = 2, dim: int = 32) -> torch.Tensor:
    return torch.randn(b, 4, dim).to(BF)


def test_the_second_call_launches_with_its_own_addresses(bound):
    for _ in range(3):
        q, given = query(), indices()
        out, lse = tersekv.decode(q, LAYER, **given, return_lse=True)
    assert len(bound.calls) == 2
    want = {"q": q, "k_cache": LAYER.k, "v_cache": LAYER.v, **given, "out": out, "lse": lse}
    assert bound.last() == {n: x.data_ptr() for n, x in want.items()}
    assert (out.shape, out.dtype, out.is_contiguous()) == (q.shape, BF, True)
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((2, 4), torch.float32, True)


def test_outputs_are_those_that_were_given_or_new_ones(bound):
    q, given, out, lse = query(), indices(), torch.zeros(2, 4, 32, dtype=BF), torch.zeros(2, 4)
    made = [tersekv.decode(q, LAYER, **given, lse=lse) for _ in range(3)]
    assert made[1] is not made[2]
    assert made[1].data_ptr() != made[2].data_ptr()
    for _ in range(2):
        assert tersekv.decode(q, LAYER, **given, out=out) is out
        got = tersekv.decode(q, LAYER, **given, out=out, lse=lse, return_lse=True)
        assert got[0] is out
        assert got[1] is lse
    assert bound.last()["lse"] == lse.data_ptr()
    for _ in range(2):
        got = tersekv.decode(q, LAYER, **given, out=out, return_lse=True)
        assert got[0] is out
    assert bound.last()["lse"] == got[1].data_ptr()


def test_columns_of_a_joined_query_are_found_behind_its_address(bound):
    for _ in range(2):
        q = query(dim=80)
        tersekv.mla_decode(q, LATENT, **indices(), softmax_scale=0.1)
    assert bound.last()["q_nope"] == q.data_ptr()
    assert bound.last()["q_pe"] == q.data_ptr() + 64 * 2
    pair = query(dim=64), query(dim=16)
    for _ in range(2):
        tersekv.mla_decode(pair, LATENT, **indices(), softmax_scale=0.1)
    assert [bound.last()[n] for n in ("q_nope", "q_pe")] == [x.data_ptr() for x in pair]


def test_lists_of_keys_take_the_short_way(bound):
    for by_slot in (False, True):
        for _ in range(3):
            q, lists, lens, sinks = (
                query(dim=80),
                torch.zeros(2, 3, dtype=torch.int32),
                torch.ones(2).int(),
                torch.ones(4),
            )
            where = (None, None) if by_slot else indices().values()
            given = {"indices": lists, "index_lens": lens, "sinks": sinks}
            tersekv.mla_decode(q, LATENT, *where, **given, softmax_scale=0.1)
        assert bound.last().items() >= {n: x.data_ptr() for n, x in given.items()}.items()
        assert ("page_table" in bound.last()) != by_slot
    count = len(bound.calls)
    tersekv.mla_decode(q, LATENT, *where, softmax_scale=0.1, indices=lists[:, :2])
    assert len(bound.calls) == count, "a list of another length is another call"
    for _ in range(2):
        blocks = torch.zeros(2, 2, 3, dtype=torch.int32)
        tersekv.decode(query(), LAYER, **indices(), indices=blocks, block_size=4)
    assert bound.last()["indices"] == blocks.data_ptr()
    count = len(bound.calls)
    tersekv.decode(query(), LAYER, **indices(), indices=blocks, block_size=2)
    assert len(bound.calls) == count, "blocks of another size are another call"


@pytest.mark.parametrize("rotary", [32, 16])
def test_parts_of_rotated_rows_are_found_behind_their_addresses(bound, rotary):
    slots, cos_sin = torch.tensor([0, 9, 30]), torch.randn(9, rotary)
    for _ in range(2):
        q, k, v, positions = query(3), torch.randn(3, 2, 32).to(BF), torch.randn(3, 2, 32).to(BF), torch.zeros(3).long()
        out = tersekv.rope_append(q, k, v, LAYER, slots, cos_sin, positions)
    want = {"q_rope": q, "k_rope": k, "v": v, "q_rope_out": out, "positions": positions, "slot_mapping": slots}
    assert bound.last().items() >= {n: x.data_ptr() for n, x in want.items()}.items()
    if rotary < 32:
        nope = {"q_nope": q, "k_nope": k, "q_nope_out": out}
        assert bound.last().items() >= {n: x.data_ptr() + 2 * rotary for n, x in nope.items()}.items()


def test_appends_merges_and_projections_take_the_short_way(bound):
    kv, pe, slots = torch.randn(2, 64).to(BF), torch.randn(2, 16).to(BF), torch.tensor([1, 2])
    outs, lses = torch.randn(3, 2, 4, 32), torch.randn(3, 2, 4)
    x, w = query(), torch.randn(4, 128, 32).to(BF)
    w_uk, w_uv = torch.randn(4, 64, 32).to(BF), torch.randn(4, 128, 64).to(BF)
    for _ in range(2):
        tersekv.append(torch.zeros(2, 2, 32, dtype=BF), torch.zeros(2, 2, 32, dtype=BF), LAYER, slots)
        assert tersekv.mla_append(kv, pe, LATENT, slots) == (None, None)
        turned = tersekv.mla_append(kv, pe, LATENT, slots, cos_sin_cache=torch.zeros(9, 16), positions=slots.clone(),
                                    q_pe=query(dim=16), q_nope=query(dim=64))  # fmt: skip
        merged = tersekv.merge_states(outs, lses)
        projected = tersekv.mla_project(x, w)
        step, lens = query(dim=48), torch.full((2,), 4).int()
        values = tersekv.mla_decode_branch(
            step, LATENT, indices()["page_table"], lens, torch.zeros(9, 16), torch.ones(64).to(BF), w_uk, w_uv,
            softmax_scale=0.1, kv_c=kv, k_pe=pe,
        )  # fmt: skip
    ops = ["append", "mla_append", "mla_append", "merge_states", "mla_project", "mla_decode_branch"]
    assert [op for op, _ in bound.calls] == ops
    assert [x.shape[-1] for x in turned] == [64, 16]
    addresses = {n: x.data_ptr() for n, x in zip(("q_nope_out", "q_rope_out"), turned, strict=True)}
    assert bound.calls[2][1].items() >= addresses.items()
    assert bound.calls[3][1].items() >= {"out": merged[0].data_ptr(), "lse": merged[1].data_ptr()}.items()
    assert bound.calls[4][1]["out"] == projected.data_ptr()
    own = {"q": step, "cache_lens": lens, "w_uk": w_uk, "w_uv": w_uv, "kv_c": kv, "ckv": LATENT.ckv, "out": values}
    assert bound.last().items() >= {n: x.data_ptr() for n, x in own.items()}.items()


BYTES = torch.zeros(4096, dtype=torch.uint8)
FIRST = -BYTES.data_ptr() % 16
OTHERS = {
    "dtype": {"q": query().half()},
    "shape": {"page_table": torch.zeros(2, 5, dtype=torch.int32)},
    "strides": {"q": torch.randn(4, 2, 32).to(BF).transpose(0, 1)},
    "place in 16 bytes": {"q": BYTES[FIRST + 8 : FIRST + 520].view(BF).view(2, 4, 32)},
    "a tensor more": {"sinks": torch.zeros(4)},
    "an output more": {"return_lse": True},
    "given output": {"out": torch.zeros(2, 4, 32, dtype=BF)},
    "window": {"window": 3},
    "softcap": {"softcap": 5.0},
    "scale": {"softmax_scale": 0.3},
    "scale on the device": {"softmax_scale": torch.ones(1)},
    "output's scale": {"out_scale": 2.0},
    "output's dtype": {"out_dtype": torch.float32},
    "rows": {"max_q_len": 1},
    "backend": {"backend": "torch"},
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_not_like_a_call_before_goes_the_long_way(bound, what):
    call = {"q": query(), "cache": LAYER, **indices()}
    tersekv.decode(**call)
    tersekv.decode(**{**call, **OTHERS[what]})
    assert not bound.calls
    tersekv.decode(**call)  # the first is known still
    assert len(bound.calls) == 1


@pytest.mark.parametrize(
    ("before", "bad"),
    [({"window": 1}, {"window": 1.0}), ({"max_q_len": 1}, {"max_q_len": 1.0}), ({"softcap": 5.0}, {"softcap": "5"}),
     ({"out_dtype": None}, {"out_dtype": ["bf16"]}), ({}, {"page_table": [[0]]}), ({}, {"mask": [1]}),
     ({"softmax_scale": 1.0}, {"softmax_scale": "1"})],
)  # fmt: skip
def test_what_equals_a_good_argument_is_checked_all_the_same(bound, before, bad):
    call = {"q": query(), "cache": LAYER, **indices()}
    for _ in range(2):
        tersekv.decode(**{**call, **before})
    assert len(bound.calls) == 1
    with pytest.raises((TypeError, ValueError), match="want"):
        tersekv.decode(**{**call, **bad})


def test_a_scale_on_the_device_is_passed_by_its_address(bound):
    for _ in range(2):
        scale = torch.ones(1)
        tersekv.decode(query(), LAYER, **indices(), softmax_scale=scale)
    assert bound.last()["softmax_scale_t"] == scale.data_ptr()


def test_a_mask_in_three_dimensions_is_remembered_as_the_view_that_it_is(bound):
    mask = torch.zeros(1, 2, 2, dtype=torch.int16).transpose(0, 1).view(torch.uint16)  # flattened as a view
    for _ in range(2):
        tersekv.decode(query(), LAYER, **indices(), mask=mask)
    assert len(bound.calls) == 1
    wide = torch.zeros(2, 2, 2, dtype=torch.int16).transpose(0, 1).view(torch.uint16)  # would have to be copied
    with pytest.raises(ValueError, match=r"^mask: want strides that let the first two dimensions be viewed as one"):
        tersekv.decode(query(4), LAYER, **indices(), mask=wide)


def test_a_launch_that_declines_goes_the_long_way_and_is_remembered_once(bound):
    bound.willing = False
    for _ in range(5):
        tersekv.decode(query(), LAYER, **indices())
    assert not bound.calls
    ((known,),) = launch_cache._recent.values()
    bound.willing = True
    tersekv.decode(query(), LAYER, **indices())
    assert len(bound.calls) == 1
    assert list(launch_cache._recent.values()) == [[known]]
    assert list(launch_cache._launches.values()) == [known]


def test_many_shapes_are_known_the_latest_first(bound):
    sizes = range(1, 9)
    for b in sizes:
        tersekv.decode(query(b), LAYER, **indices(b))
    assert not bound.calls
    for b in (*sizes, 2, 8, 7):
        tersekv.decode(query(b), LAYER, **indices(b))
    assert len(bound.calls) == len(sizes) + 3
    ((first, *others),) = launch_cache._recent.values()
    assert first.matches(attention_inputs(q=query(7), k_cache=LAYER.k, v_cache=LAYER.v, **indices(7)))
    assert len(others) == launch_cache._MAX_TRIED - 1 == 3


def test_the_memory_is_bounded(bound, monkeypatch):
    monkeypatch.setattr(launch_cache, "_MAX_CALLS", 3)
    for scale in range(1, 9):
        tersekv.decode(query(), LAYER, **indices(), softmax_scale=float(scale))
        assert len(launch_cache._recent) == len(launch_cache._launches) <= 3


def test_checked_mode_goes_the_long_way(bound, monkeypatch):
    call = (query(), LAYER)
    given = indices()
    for _ in range(2):
        tersekv.decode(*call, **given)
    monkeypatch.setenv("TERSEKV_CHECKED", "1")
    with pytest.raises(ValueError, match="page_table"):
        tersekv.decode(*call, given["page_table"] + 99, given["seq_lens"])
    assert len(bound.calls) == 1


def test_no_tensor_is_kept_alive(bound):
    layer, q, given = tersekv.PagedKVCache.allocate(1, 8, 8, 2, 32, format="bf16")[0], query(), indices()
    for _ in range(2):
        out = tersekv.decode(q, layer, **given)
    assert len(bound.calls) == 1
    seen = [weakref.ref(x) for x in (layer.k, layer.v, q, *given.values(), out)]
    del layer, q, given, out
    gc.collect()
    assert [x() for x in seen] == [None] * len(seen)


def test_nothing_is_remembered_while_a_graph_is_captured(bound, monkeypatch):
    monkeypatch.setattr(launch_cache, "_is_captured", lambda x: True)
    for _ in range(2):
        tersekv.decode(query(), LAYER, **indices())
    assert not bound.calls


def test_without_guards_every_call_goes_the_long_way(bound, monkeypatch):
    monkeypatch.setattr(signature, "_guards", None)
    for _ in range(3):
        tersekv.decode(query(), LAYER, **indices())
    assert not bound.calls


def test_a_call_that_is_traced_is_recorded_though_one_like_it_is_known(bound):
    q, given, out = query(), indices(), torch.empty(2, 4, 32, dtype=BF)

    def call(q):
        return tersekv.decode(q, LAYER, **given, out=out)

    call(q), call(q)
    assert len(bound.calls) == 1
    called = [str(n.target) for n in make_fx(call)(q).graph.nodes]
    assert "tersekv.decode.default" in called
    assert len(bound.calls) == 1


def test_backends_that_bind_nothing_are_not_remembered(monkeypatch):
    monkeypatch.setenv("TERSEKV_BACKEND", "torch")
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "_recent", {})
    monkeypatch.setattr(launch_cache, "_launches", {})
    for _ in range(2):
        tersekv.decode(query(), LAYER, **indices())
    assert not launch_cache._launches


def test_a_backend_that_has_nothing_to_bind_yet_is_asked_again(bound, monkeypatch):
    asked = []
    monkeypatch.setattr(plan._module("torch", "decode"), "bind", lambda config, at: asked.append(at))
    for _ in range(3):
        tersekv.decode(query(), LAYER, **indices())
    assert len(asked) == 3
    assert not launch_cache._launches


def test_a_record_with_a_tensor_from_elsewhere_is_not_remembered(bound):
    outs, lses = torch.randn(3, 2, 4, 32), torch.randn(3, 2, 4)
    out, lse = torch.empty(2, 4, 32), torch.empty(2, 4)
    call, given = MergeCall(outs, lses, out, lse), (outs, lses, None, None)
    p = plan.dispatch("merge_states", call)
    launch_cache.insert("merge_states", launch_cache.CallSignature((), given, {"out": out}), call, p)
    assert not launch_cache._launches  # nobody said where lse comes from
    launch_cache.insert("merge_states", launch_cache.CallSignature((), given, {"out": out, "lse": lse}), call, p)
    assert launch_cache._launches


def test_a_count_that_changes_behind_its_holders_back_is_read_anew(bound):
    window = torch.tensor(3)
    for n in (3, 3, 1):
        window.fill_(n)
        tersekv.decode(query(), LAYER, **indices(), window=window)
        known = {x for (_, options), *_ in launch_cache._launches for x in options if type(x) is int}
    assert known >= {3, 1}


def test_a_tensor_that_is_given_twice_is_one_address_of_another_call(bound):
    def given(twice: bool) -> tuple[torch.Tensor, torch.Tensor]:
        k = torch.randn(2, 2, 32).to(BF)
        return k, (k if twice else k.clone())

    for twice, known in ((True, 0), (True, 1), (False, 1), (False, 2), (True, 3), (False, 4)):
        (k, v), before = given(twice), len(bound.calls)
        tersekv.append(k, v, LAYER, torch.arange(2))
        assert len(bound.calls) == known
        if known > before:
            assert (bound.last()["k"], bound.last()["v"]) == (k.data_ptr(), v.data_ptr())
    other = torch.randn(3, 2, 32).to(BF)
    tersekv.append(other, other, LAYER, torch.arange(3))
    assert len(bound.calls) == 4, "of another shape"


def test_what_is_given_twice_and_copied_once_is_not_cached(bound):
    x = torch.ones(2)
    call = MergeCall(torch.ones(2, 1), torch.ones(2), torch.ones(1), torch.ones(1))
    launch_cache.insert(
        "merge_states", launch_cache.CallSignature((), (x, x, call.out, call.lse)), call._replace(outs=x),
        plan.Plan("torch", print, None, None, bound.bind("merge_states")),
    )  # fmt: skip
    assert not launch_cache._launches
    launch_cache.insert(
        "merge_states", launch_cache.CallSignature((), (x, x, call.out, call.lse)), call._replace(outs=x, lses=x),
        plan.Plan("torch", print, None, None, bound.bind("merge_states")),
    )  # fmt: skip
    assert launch_cache._launches


def test_one_is_not_true_and_a_pair_with_none_no_joined_query(bound):
    k, table, at = torch.randn(2, 2, 32).to(BF), torch.zeros(8, 32), torch.arange(2)
    q, joined = query(), torch.randn(2, 4, 80).to(BF)
    for _ in range(2):
        tersekv.rope_append(q, k, k.clone(), LAYER, at, table, at.clone(), interleaved=True)
        tersekv.mla_decode(joined, LATENT, **indices(), softmax_scale=0.1)
        tersekv.mla_decode(joined, LATENT, **indices(), softmax_scale=0.1, return_lse=True)
        tersekv.decode(q, LAYER, **indices(), return_lse=True)
    with pytest.raises(TypeError, match="interleaved: want bool, got int"):
        tersekv.rope_append(q, k, k.clone(), LAYER, at, table, at.clone(), interleaved=1)
    with pytest.raises(TypeError, match="return_lse: want bool, got int"):
        tersekv.mla_decode(joined, LATENT, **indices(), softmax_scale=0.1, return_lse=1)
    with pytest.raises(TypeError, match="return_lse: want bool, got int"):
        tersekv.decode(q, LAYER, **indices(), return_lse=1)
    with pytest.raises(ValueError, match="q_pe: want a tensor for a cache with a rotary part, got None"):
        tersekv.mla_decode((joined, None), LATENT, **indices(), softmax_scale=0.1)


@pytest.mark.parametrize("v_before", [1, 0], ids=["k and v", "k twice"])
def test_an_output_over_an_argument_is_found_after_like_calls_that_had_none(v_before, bound):
    q, rows, lengths = query(4), torch.randn(2, 4, 2, 32).to(BF), indices(1) | {"cu_seqlens_q": torch.tensor([0, 4])}

    def call(k, v, out=None):
        out = torch.empty(4, 2, 32, dtype=BF) if out is None else out
        tersekv.prefill(q[:, :2], LAYER, **lengths, k=rows[k], v=rows[v], out=out)

    for _ in range(3):
        call(0, v_before)
    count = len(bound.calls)
    assert count == 2, "after the first call, calls take the short way, also with two arguments at one address"
    with pytest.raises(ValueError, match="out: want memory of its own, got a tensor that begins where v does"):
        call(0, 1, rows[1])
    assert len(bound.calls) == count
    call(0, 1)
    assert len(bound.calls) == count + v_before, "addresses of their own are another pattern than one address"
    call(1, 1 - v_before)
    assert len(bound.calls) == count + v_before + 1
