"""Every function of `compat` that makes an operation's call knows it again, and gives its launch the same addresses as
the long way does: of the caller's tensors, of what they are seen as, and of new outputs."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tersekv import UnsupportedError
from tersekv.calls import CALLS
from tersekv.compat import flashinfer as fi
from tersekv.compat import max as mx
from tersekv.compat import vllm
from tersekv.dispatch import launch_cache
from tersekv.dispatch.plan import Plan
from tersekv.ops import registry

BF, E4M3, E5M2, F32, U8 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.uint8
T, HQ, H, D, P, S, L, R = 3, 4, 2, 32, 6, 8, 128, 16


def x(*shape, dtype=BF):
    return torch.ones(shape).to(dtype)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def scale():
    return torch.tensor([0.5])


def kv(dtype=E4M3, hnd=False, joint=False):
    shape = (P, H, S, D) if hnd else (P, S, H, D)
    return x(P, 2, *shape[1:], dtype=dtype) if joint else (x(*shape, dtype=dtype), x(*shape, dtype=dtype))


def place():
    return {"batch_indices": i32(0, 0, 0), "positions": i32(7, 8, 9), "kv_indices": i32(3, 1), "kv_indptr": i32(0, 2)}


def requests():
    return i32(*[[1, 2]] * T), i32(*[[9]] * T)


def xqa_batch(dtype=E4M3, joint=False, hnd=False, **more):
    table, lens = requests()
    names = ("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len")
    values = x(T, HQ, D), kv(dtype, hnd, joint), x(1), table, lens, 16
    layout = {"kv_layout": "HND"} if hnd else {}
    return fi.xqa_batch_decode_with_kv_cache, dict(zip(names, values, strict=True)) | layout | more


def trtllm(dtype=E4M3, joint=False, **more):
    _, call = xqa_batch(dtype, joint, hnd=True)
    return fi.trtllm_batch_decode_with_kv_cache, call | more


def xqa(dtype=E4M3, flat=False, sf=False, **more):
    table, lens = requests()
    dim = D // 2 if sf else D
    shape = (P * S * H, dim) if flat else (P, S, H, dim)
    caches = x(*shape, dtype=dtype), x(*shape, dtype=dtype)
    call = {
        "q": x(T, 1, HQ, D), "k_cache": caches[0], "v_cache": caches[1], "page_table": table, "seq_lens": lens,
        "output": x(T, 1, HQ, D), "workspace_buffer": x(1), "semaphores": x(1), "num_kv_heads": H, "page_size": S,
    }  # fmt: skip
    if sf:
        call |= {n: x(*shape[:-1], D // 16, dtype=U8) for n in ("k_sf_cache", "v_sf_cache")}
    return fi.xqa, call | more


def xqa_mla(dtype=E4M3, view=False, **more):
    table, lens = requests()
    rows = x(P, S, 1, L + R, dtype=dtype)
    values = rows[..., :L] if view else rows
    return fi.xqa_mla, {
        "q": x(T, 1, HQ, L + R), "k_cache": rows, "v_cache": values, "page_table": table, "seq_lens": lens,
        "output": x(T, 1, HQ, L), "workspace_buffer": x(1), "semaphores": x(1), "page_size": S, **more,
    }  # fmt: skip


def xqa_batch_mla(rows=1, dtype=E4M3, **more):
    table, lens = requests()
    return fi.xqa_batch_decode_with_kv_cache_mla, {
        "query": x(T, rows, HQ, L + R), "kv_cache": x(P, 1, S, L + R, dtype=dtype), "workspace_buffer": x(1),
        "qk_nope_head_dim": 64, "kv_lora_rank": L, "qk_rope_head_dim": R, "block_tables": table,
        "seq_lens": lens[:, 0], "max_seq_len": 16, **more,
    }  # fmt: skip


def rope(latent=False, **more):
    keys = {"k_rope": x(T, R), "k_nope": x(T, L), "v": None} if latent else {
        "k_rope": x(T, H, R), "k_nope": x(T, H, D - R), "v": x(T, H, D)
    }  # fmt: skip
    cache = (x(P, S, L, dtype=E4M3), x(P, S, R, dtype=E4M3)) if latent else kv()
    return fi.rope_quantize_fp8_append_paged_kv_cache, {
        "q_rope": x(T, HQ, R), "q_nope": x(T, HQ, D - R), **keys, "cos_sin_cache": x(20, R, dtype=F32),
        "pos_ids": i32(5, 6, 7), "paged_kv_cache": cache, "page_size": S, **place(), **more,
    }  # fmt: skip


def append(**how):
    layout = {"kv_layout": "HND"} if how.get("hnd") else {}
    rows = {"append_key": x(T, H, D), "append_value": x(T, H, D), "paged_kv_cache": kv(**how)}
    return fi.append_paged_kv_cache, {**rows, **place(), "kv_last_page_len": i32(2), **layout}


def append_mla(joint=False):
    rows = x(P, S, L + R, dtype=E4M3)
    parts = (rows[..., :L], rows[..., L:]) if joint else (x(P, S, L, dtype=E4M3), x(P, S, R, dtype=E4M3))
    more = {"ckv_cache": parts[0], "kpe_cache": parts[1], "kv_last_page_len": i32(2)}
    return fi.append_paged_mla_kv_cache, {"append_ckv": x(T, L), "append_kpe": x(T, R), **place(), **more}


_PAGES = i32(0, 2, 4, 6), i32(3, 1, 0, 2, 5, 4), i32(1, 1, 1)


def decode_wrapper(dtype=E4M3, joint=False, **more):
    w = fi.BatchDecodeWithPagedKVCacheWrapper(x(1))
    w.plan(*_PAGES, HQ, H, D, S, q_data_type=BF, kv_data_type=dtype)
    return w.run, {"q": x(T, HQ, D), "paged_kv_cache": kv(dtype, joint=joint), **more}


def prefill_wrapper(causal=True, **more):
    w = fi.BatchPrefillWithPagedKVCacheWrapper(x(1))
    w.plan(i32(0, 4, 8, 9), *_PAGES, HQ, H, D, S, causal=causal, q_data_type=BF, kv_data_type=E4M3)
    return w.run, {"q": x(9, HQ, D), "paged_kv_cache": kv(), **more}


def single_prefill(**more):
    return fi.single_prefill_with_kv_cache, {"q": x(3, HQ, D), "k": x(9, H, D), "v": x(9, H, D), **more}


def single_decode(dtype=BF, hnd=False, **more):
    k, v = (x(H, 99, D, dtype=dtype) if hnd else x(99, H, D, dtype=dtype) for _ in range(2))
    layout = {"kv_layout": "HND"} if hnd else {}
    return fi.single_decode_with_kv_cache, {"q": x(HQ, D), "k": k, "v": v, **layout, **more}


def per_token_head(dtype=E4M3, padding=0, **more):
    return vllm.triton_reshape_and_cache_flash_per_token_head_quant, {
        "key": x(T + padding, H, D), "value": x(T + padding, H, D), "key_cache": x(P, S, H, D + 4, dtype=dtype),
        "value_cache": x(P, S, H, D + 4, dtype=dtype), "k_scale_cache": x(P, S, H, dtype=F32),
        "v_scale_cache": x(P, S, H, dtype=F32), "slot_mapping": torch.tensor([9, 3, -1]), **more,
    }  # fmt: skip


def reshape(dtype=U8, name="fp8", **more):
    both = {"k_scale": scale(), "v_scale": scale()}
    return vllm.reshape_and_cache_flash, {
        "key": x(T + 2, H, D), "value": x(T + 2, H, D), "key_cache": x(P, S, H, D, dtype=dtype),
        "value_cache": x(P, S, H, D, dtype=dtype), "slot_mapping": torch.tensor([9, 3, -1]), "kv_cache_dtype": name,
        **both, **more,
    }  # fmt: skip


def concat(width=L + R, rank=L, rope=R, dtype=U8, name="fp8", **more):
    return vllm.concat_and_cache_mla, {
        "kv_c": x(T + 1, rank), "k_pe": x(T + 1, 1, rope), "kv_cache": x(P, S, width, dtype=dtype),
        "slot_mapping": torch.tensor([9, 3, -1]), "kv_cache_dtype": name, "scale": scale(), **more,
    }  # fmt: skip


def branch(name, fp8=True, cache=BF, **more):
    layers, dn = 3, 128
    blocks = x(P, 1, layers, S, 1, L + R, dtype=cache)
    collection = mx.PagedKVCacheCollection(blocks, i32(5, 8), i32([1, 2], [3, 4]), 1, 8)
    w = E4M3 if fp8 else BF
    both = {"kv_b_proj": x(HQ * 2 * dn, L, dtype=w), "w_uk": x(HQ, L, dn, dtype=w), "w_uv": x(HQ, dn, L, dtype=w)}
    scales = {"kv_b_proj_scale": x(HQ * 2, 1, dtype=F32)}
    scales |= {"w_uk_scale": x(HQ, 1, 1, dtype=F32), "w_uv_scale": x(HQ, 1, 1, dtype=F32)}
    buffer = {"buffer_row_offsets": i32(0, 6, 15), "cache_offsets": i32(0, 0, 0), "buffer_length": 15}
    call = {
        "output": x(2, HQ, dn), "q": x(2, HQ, dn + R), "input_row_offsets": i32(0, 1, 2),
        "freqs_cis": x(30, R, dtype=F32), "kv_norm_gamma": x(L), "kv_collection": collection, "layer_idx": 1,
        "scale": 0.1, "epsilon": 1e-6,
    }  # fmt: skip
    used = ["kv_b_proj"] * ("prefill" in name) + ["w_uk", "w_uv"] * ("decode" in name)
    weights = {n: both[n] for n in used}
    if fp8:
        weights |= {f"{n}_scale": scales[f"{n}_scale"] for n in used}
    more = {n: v() if callable(v) else v for n, v in more.items()}
    return getattr(mx, name), call | (buffer if "prefill" in name else {}) | weights | more


RAW = {"kv_input": lambda: x(2, L + R), "cache": E4M3}
CASES = {
    "xqa_batch_decode_with_kv_cache": [
        (xqa_batch, {}), (xqa_batch, {"joint": True}), (xqa_batch, {"hnd": True, "window_left": 3}),
        (xqa_batch, {"dtype": torch.int8}), (xqa_batch, {"dtype": torch.int8, "joint": True}),
        (xqa_batch, {"bmm2_scale": scale(), "bmm1_scale": scale()}), (xqa_batch, {"out": x(T, HQ, D)}),
    ],
    "trtllm_batch_decode_with_kv_cache": [
        (trtllm, {}), (trtllm, {"joint": True}), (trtllm, {"return_lse": True, "out_dtype": torch.float16}),
        (trtllm, {"q_len_per_req": None, "cum_seq_lens_q": i32(0, 1, 2, 3), "max_q_len": 1}),
        (trtllm, {"out": x(T, HQ, D), "lse": x(T, HQ, dtype=F32), "bmm1_scale": scale(), "bmm2_scale": scale()}),
    ],
    "xqa": [
        (xqa, {}), (xqa, {"flat": True}), (xqa, {"dtype": U8, "sf": True}), (xqa, {"kv_scale": scale()}),
        (xqa, {"q_scale": scale(), "kv_scale": 0.5}), (xqa, {"dtype": torch.int8}),
        (xqa, {"sinks": x(H, HQ // H, dtype=F32)}), (xqa, {"dtype": BF, "output": x(T, 1, HQ, D, dtype=E4M3)}),
    ],
    "xqa_mla": [
        (xqa_mla, {}), (xqa_mla, {"view": True}), (xqa_mla, {"kv_scale": scale()}),
        (xqa_mla, {"q_scale": scale(), "kv_scale": 0.5}), (xqa_mla, {"dtype": BF}),
    ],
    "xqa_batch_decode_with_kv_cache_mla": [
        (xqa_batch_mla, {}), (xqa_batch_mla, {"rows": 2, "bmm1_scale": scale()}), (xqa_batch_mla, {"dtype": BF}),
        (xqa_batch_mla, {"out": x(T, HQ, L), "bmm2_scale": scale()}),
    ],
    "rope_quantize_fp8_append_paged_kv_cache": [
        (rope, {}), (rope, {"latent": True}), (rope, {"quant_scale_kv": scale()}),
    ],
    "append_paged_kv_cache": [
        (append, {}), (append, {"joint": True}), (append, {"hnd": True}), (append, {"dtype": BF}),
    ],
    "append_paged_mla_kv_cache": [(append_mla, {}), (append_mla, {"joint": True})],
    "BatchDecodeWithPagedKVCacheWrapper": [
        (decode_wrapper, {}), (decode_wrapper, {"joint": True, "return_lse": True}), (decode_wrapper, {"dtype": BF}),
        (decode_wrapper, {"k_scale": 0.5, "v_scale": scale(), "sinks": x(HQ, dtype=F32)}),
        (decode_wrapper, {"out": x(T, HQ, D), "lse": x(T, HQ, dtype=F32), "return_lse": True}),
    ],
    "BatchPrefillWithPagedKVCacheWrapper": [
        (prefill_wrapper, {}), (prefill_wrapper, {"causal": False}), (prefill_wrapper, {"return_lse": True}),
        (prefill_wrapper, {"window_left": 2, "out": x(9, HQ, D)}),
    ],
    "single_prefill_with_kv_cache": [(single_prefill, {}), (single_prefill, {"causal": True, "return_lse": True})],
    "single_decode_with_kv_cache": [
        (single_decode, {}), (single_decode, {"hnd": True, "return_lse": True}), (single_decode, {"window_left": 70}),
        (single_decode, {"dtype": E4M3, "q_scale": 0.5, "k_scale": 0.5, "v_scale": scale()}),
    ],
    "triton_reshape_and_cache_flash_per_token_head_quant": [
        (per_token_head, {}), (per_token_head, {"dtype": torch.int8, "padding": 2, "kv_quant_mode": 2}),
    ],
    "reshape_and_cache_flash": [
        (reshape, {}), (reshape, {"dtype": E5M2, "name": "fp8_e5m2", "k_scale": 0.5}),
        (reshape, {"dtype": BF, "name": "auto"}), (reshape, {"dtype": E4M3, "k_scale": 0.5, "v_scale": 2}),
    ],
    "concat_and_cache_mla": [
        (concat, {}), (concat, {"dtype": BF, "name": "auto"}), (concat, {"scale": 0.5}),
        (concat, {"width": 656, "rank": 512, "rope": 64, "name": "fp8_ds_mla"}),
    ],
    **{
        f"mla_{name}_{kind}": [
            (branch, {"name": f"mla_{name}_{kind}", "fp8": kind == "fp8", **more}) for more in (*extra, {}, RAW)
        ]
        for name, extra in (
            ("prefill_branch", ()), ("decode_branch", ()),
            ("prefill_decode_graph", ({"max_seq_len": 1}, {"max_seq_len": 2})),
        )
        for kind in ("fp8", "bf16")
    },
}  # fmt: skip
for _name in ("mla_prefill_decode_graph_fp8", "mla_prefill_decode_graph_bf16"):
    CASES[_name] = [(f, {"max_seq_len": 1, **options}) for f, options in CASES[_name]]

# What makes no call of an operation, or one with tensors of its own: that it is short is asked below.
OTHERS = {
    "get_batch_indices_positions", "get_seq_lens", "merge_state", "merge_states", "mla_prefill_plan", "PagedKVCache",
    "PagedKVCacheCollection",
    # An indexer's: test_compat_vllm_indexer.py
    "indexer_k_quant_and_cache", "cp_gather_indexer_k_quant_cache", "top_k_per_row_decode", "top_k_per_row_prefill",
    # test_compat_flashinfer_topk.py
    "TopKTieBreak", "top_k", "top_k_page_table_transform", "top_k_ragged_transform",
}  # fmt: skip


def test_every_public_function_is_here():
    assert {*fi.__all__, *vllm.__all__, *mx.__all__} == CASES.keys() | OTHERS


@pytest.fixture
def machine(monkeypatch):
    """Calls that went the long way, and addresses that the short way gave to a launch."""
    seen = SimpleNamespace(calls=[], given=[])

    def bind(config, at):
        def launch(addresses):
            seen.given.append({name: addresses[i] for name, i in at.items()})
            return True

        return launch

    def dispatch(op, call, backend=None):
        seen.calls.append((op, call))
        return Plan("fake", print, None, None, bind)

    monkeypatch.setattr(registry, "dispatch", dispatch)
    for known in ("_launches", "_recent"):
        monkeypatch.setattr(launch_cache, known, {})
    return seen


def fresh(value):
    """Other tensors of the same shapes and strides."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(fresh, value))
    return value.clone() if isinstance(value, Tensor) else value


CALLED = [(name, f, options) for name, cases in CASES.items() for f, options in cases]
IDS = [f"{name}-{' '.join(options) or 'plain'}-{i}" for i, (name, f, options) in enumerate(CALLED)]


@pytest.mark.parametrize(("name", "make", "options"), CALLED, ids=IDS)
def test_a_known_call_is_launched_with_the_addresses_of_the_long_way(name, make, options, machine, monkeypatch):
    function, first = make(**options)
    function(**first)
    assert len(machine.calls) == 1
    _, second = make(**{n: fresh(v) for n, v in options.items()})
    result = function(**second)
    assert len(machine.calls) == 1, "the second call took the long way"
    monkeypatch.setattr(launch_cache, "_recent", {})
    monkeypatch.setattr(launch_cache, "_launches", {})
    function(**second)
    op, call = machine.calls[-1]
    long, (short,) = call._asdict(), machine.given
    written = {n for n in CALLS[op][1] if n in ("out", "lse", "q_rope_out", "q_nope_out")}
    made = written - {n for n, x in long.items() if isinstance(x, Tensor) and _of_caller(x, second)}
    want = {n: x.data_ptr() for n, x in long.items() if isinstance(x, Tensor) and n not in made}
    assert {n: at for n, at in short.items() if n not in made} == want
    results = result if isinstance(result, tuple) else (result,)
    new = {x.data_ptr() for x in results if isinstance(x, Tensor) and x.numel() and not _of_caller(x, second)}
    assert {short[n] for n in made if n in short} == new


def _of_caller(x: Tensor, call: dict) -> bool:
    pointers = {t.untyped_storage().data_ptr() for t in call.values() if isinstance(t, Tensor)}
    return x.untyped_storage().data_ptr() in pointers


# Accepted without effect, by their signatures.
IDLE = {
    "workspace_buffer", "semaphores", "max_seq_len", "enable_pdl", "sm_count", "qk_nope_head_dim", "kv_last_page_len",
    "ctx", "args", "pos_encoding_mode", "use_fp16_qk_reduction", "rope_scale", "rope_theta", "backend",
    "use_tensor_cores", "multi_ctas_kv_counter_buffer", "bf16q_fp8kv_transform_mode",
}  # fmt: skip


# What the graphs are given is for one of two branches, which stand here themselves.
@pytest.mark.parametrize("name", [n for n in CASES if "graph" not in n])
def test_every_option_is_a_part_of_what_is_known(name, machine):
    """A call that differs in one option from a known one takes the long way, where it is refused or made anew."""
    make, options = CASES[name][0]
    function, call = make(**options)
    function(**call)
    for option in inspect.signature(function).parameters.keys() - IDLE:
        if isinstance(call.get(option), Tensor):
            continue
        before = len(machine.calls)
        try:
            function(**{**call, option: "?"})
        except (ValueError, TypeError, AttributeError, UnsupportedError):  # what "?" is to whom
            continue
        assert len(machine.calls) > before, option
    machine.given.clear()
    function(**call)
    assert machine.given, "the call itself is known still"


def test_a_second_merge_takes_the_short_way(machine):
    parts = x(T, HQ, D), x(T, HQ, dtype=F32)
    for call in (
        lambda: fi.merge_state(*parts, *parts),
        lambda: fi.merge_states(x(T, 3, HQ, D), x(T, 3, HQ, dtype=F32)),
    ):
        call()
        long = len(machine.calls)
        machine.given.clear()
        out, lse = call()
        assert (len(machine.calls), len(machine.given)) == (long, 1)
        assert (machine.given[0]["out"], machine.given[0]["lse"]) == (out.data_ptr(), lse.data_ptr())
