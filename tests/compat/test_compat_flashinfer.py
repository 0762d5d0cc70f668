"""tersekv.compat.flashinfer: signatures, paged decode and merges, in FlashInfer's units."""

import inspect

import pytest
import torch
from compat_reference import (
    BF16,
    E4M3,
    E5M2,
    F32,
    FP16,
    HUGE_PAGE,
    LENS,
    TABLE,
    P,
    S,
    attention,
    close,
    index,
    kv_codes,
    pack,
    poisoned,
    raw,
    same_bytes,
    values,
)

from tersekv.compat import flashinfer as fi
from tersekv.compat._flashinfer_views import layer

REQUIRED = inspect.Parameter.empty
SIGNATURES = {
    "rope_quantize_fp8_append_paged_kv_cache": [
        *[(n, REQUIRED) for n in ("q_rope", "k_rope", "q_nope", "k_nope", "v", "cos_sin_cache", "pos_ids")],
        *[(n, REQUIRED) for n in ("paged_kv_cache", "kv_indices", "kv_indptr", "batch_indices", "positions")],
        ("is_neox", True),
        ("quantize_dtype", None),
        ("quant_scale_q", 1.0),
        ("quant_scale_kv", 1.0),
        ("page_size", 16),
        ("kv_layout", "NHD"),
        ("q_rope_out", None),
        ("q_nope_out", None),
        ("enable_pdl", False),
    ],
    "xqa_batch_decode_with_kv_cache": [
        *[(n, REQUIRED) for n in ("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len")],
        ("bmm1_scale", 1.0),
        ("bmm2_scale", 1.0),
        ("window_left", -1),
        ("out", None),
        ("sinks", None),
        ("kv_layout", "NHD"),
        ("enable_pdl", None),
        ("q_len_per_req", 1),
        ("o_scale", 1.0),
        ("mask", None),
        ("kv_cache_sf", None),
        ("q_cu_seq_lens", None),
    ],
    "xqa": [
        *[(n, REQUIRED) for n in ("q", "k_cache", "v_cache", "page_table", "seq_lens", "output", "workspace_buffer")],
        *[(n, REQUIRED) for n in ("semaphores", "num_kv_heads", "page_size")],
        ("sinks", None),
        ("q_scale", 1.0),
        ("kv_scale", 1.0),
        ("sliding_win_size", 0),
        ("kv_layout", "NHD"),
        ("sm_count", None),
        ("enable_pdl", None),
        ("rcp_out_scale", 1.0),
        ("q_seq_len", 1),
        ("mask", None),
        ("k_sf_cache", None),
        ("v_sf_cache", None),
        ("q_cu_seq_lens", None),
    ],
    "xqa_mla": [
        *[(n, REQUIRED) for n in ("q", "k_cache", "v_cache", "page_table", "seq_lens", "output", "workspace_buffer")],
        *[(n, REQUIRED) for n in ("semaphores", "page_size")],
        ("q_scale", 1.0),
        ("kv_scale", 1.0),
        ("sm_count", None),
        ("enable_pdl", None),
    ],
    "append_paged_kv_cache": [
        *[(n, REQUIRED) for n in ("append_key", "append_value", "batch_indices", "positions", "paged_kv_cache")],
        *[(n, REQUIRED) for n in ("kv_indices", "kv_indptr", "kv_last_page_len")],
        ("kv_layout", "NHD"),
    ],
    "append_paged_mla_kv_cache": [
        *[(n, REQUIRED) for n in ("append_ckv", "append_kpe", "batch_indices", "positions", "ckv_cache", "kpe_cache")],
        *[(n, REQUIRED) for n in ("kv_indices", "kv_indptr", "kv_last_page_len")],
    ],
    "get_seq_lens": [(n, REQUIRED) for n in ("kv_indptr", "kv_last_page_len", "page_size")],
    "get_batch_indices_positions": [
        *[(n, REQUIRED) for n in ("append_indptr", "seq_lens", "nnz")],
        *[(n, None) for n in ("batch_indices", "positions")],
    ],
    "xqa_batch_decode_with_kv_cache_mla": [
        *[(n, REQUIRED) for n in ("query", "kv_cache", "workspace_buffer", "qk_nope_head_dim", "kv_lora_rank")],
        *[(n, REQUIRED) for n in ("qk_rope_head_dim", "block_tables", "seq_lens", "max_seq_len")],
        ("out", None),
        ("bmm1_scale", 1.0),
        ("bmm2_scale", 1.0),
        ("sinks", None),
        ("enable_pdl", None),
    ],
    "trtllm_batch_decode_with_kv_cache": [
        *[(n, REQUIRED) for n in ("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len")],
        *[("bmm1_scale", 1.0), ("bmm2_scale", 1.0), ("window_left", -1)],
        *[(n, None) for n in ("out", "out_dtype", "o_sf_scale", "o_sf_vec_size", "sinks")],
        *[("kv_layout", "HND"), ("enable_pdl", None), ("backend", "auto"), ("q_len_per_req", 1), ("o_scale", 1.0)],
        *[(n, None) for n in ("mask", "max_q_len", "cum_seq_lens_q", "skip_softmax_threshold_scale_factor")],
        *[("kv_cache_sf", None), ("uses_shared_paged_kv_idx", True), ("lse", None), ("return_lse", False)],
        *[("bmm1_scale_log2", None), ("multi_ctas_kv_counter_buffer", None)],
        *[("enable_block_sparse_attention", False), ("bf16q_fp8kv_transform_mode", None)],
    ],
    "single_decode_with_kv_cache": [
        *[(n, REQUIRED) for n in ("q", "k", "v")],
        *[("kv_layout", "NHD"), ("pos_encoding_mode", "NONE"), ("use_tensor_cores", False)],
        *[(n, None) for n in ("q_scale", "k_scale", "v_scale")],
        ("window_left", -1),
        *[(n, None) for n in ("logits_soft_cap", "sm_scale", "rope_scale", "rope_theta")],
        ("return_lse", False),
    ],
    "merge_state": [(n, REQUIRED) for n in ("v_a", "s_a", "v_b", "s_b")],
    "merge_states": [(n, REQUIRED) for n in ("v", "s")],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_order_and_defaults_are_flashinfers(name):
    parameters = inspect.signature(getattr(fi, name)).parameters.values()
    assert [(p.name, p.default) for p in parameters] == SIGNATURES[name]


# In test_compat_flashinfer_wrappers.py.
OTHERS = {  # the last four: test_compat_flashinfer_topk.py
    "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper", "single_prefill_with_kv_cache",
    "TopKTieBreak", "top_k", "top_k_page_table_transform", "top_k_ragged_transform",
}  # fmt: skip


def test_everything_public_is_covered_here():
    assert set(fi.__all__) == set(SIGNATURES) | OTHERS


@pytest.mark.parametrize("form", ["pair", "one tensor", "HND pair", "HND one tensor"])
@pytest.mark.parametrize("stored", [BF16, FP16, E4M3, E5M2, torch.int8, torch.uint8])
def test_decode_of_every_cache_dtype_and_shape(stored, form):
    q = torch.randn(3, 4, 32).to(BF16)
    (k, ksf), (v, vsf) = kv_codes(stored, 2, 32), kv_codes(stored, 2, 32)
    hnd = form.startswith("HND")
    pairs = [(k, v), (ksf, vsf)]
    if hnd:
        pairs = [tuple(None if x is None else x.transpose(1, 2).contiguous() for x in p) for p in pairs]
    given, sf = pairs
    if form.endswith("one tensor"):
        given = torch.stack([raw(x).view(x.shape[:-1] + (-1,)) for x in given], 1).view(stored)
        sf = None if sf[0] is None else torch.stack([raw(x) for x in sf], 1).view(E4M3)
    elif sf[0] is None:
        sf = None
    bmm1, bmm2 = (0.01, 0.02) if stored == torch.int8 else (0.2, 0.7)
    got = fi.xqa_batch_decode_with_kv_cache(
        q, given, torch.full((8,), 0xFF, dtype=torch.uint8), index(TABLE), index(LENS, torch.uint32), 16, bmm1, bmm2,
        kv_layout="HND" if hnd else "NHD", kv_cache_sf=sf,
    )  # fmt: skip
    assert got.dtype == BF16
    close(got, attention(q, values(k, ksf), values(v, vsf), TABLE, LENS, [1, 1, 1], logits=bmm1, out=bmm2))


def test_raw_int8_codes_get_scales_of_one_that_take_no_memory():
    kv = layer(torch.zeros(P, 2, S, 2, 32, dtype=torch.int8), "NHD", None)
    assert kv.k_scale_cache.shape == (P, S, 2)
    assert kv.k_scale_cache.untyped_storage().nbytes() == 4
    assert kv.k_scale_cache.eq(1).all()


def test_one_plane_is_key_and_value():
    q = torch.randn(3, 4, 32).to(FP16)
    k, _ = kv_codes(E4M3, 1, 32)
    got = fi.xqa_batch_decode_with_kv_cache(q, k[:, None], None, index(TABLE), index(LENS), 16, 0.3)
    close(got, attention(q, k.double(), k.double(), TABLE, LENS, [1] * 3, logits=0.3))


def test_values_may_be_longer_or_shorter_than_keys():
    q = torch.randn(3, 4, 32).to(BF16)
    k, v = kv_codes(E4M3, 2, 32)[0], kv_codes(E4M3, 2, 16)[0]
    got = fi.xqa_batch_decode_with_kv_cache(q, (k, v), None, index(TABLE), index(LENS), 16, 0.2)
    assert got.shape == (3, 4, 16)
    close(got, attention(q, k.double(), v.double(), TABLE, LENS, [1] * 3, logits=0.2))


@pytest.mark.parametrize("window_left", [-1, 0, 2, 5, 100])
@pytest.mark.parametrize("drafts", [1, 3])
def test_window_left_counts_the_keys_before_each_draft_rows_own(window_left, drafts):
    lens = [9, 3, 14]
    q = torch.randn(3 * drafts, 4, 16).to(BF16)
    k, v = kv_codes(BF16, 2, 16, lens)[0], kv_codes(BF16, 2, 16, lens)[0]
    got = fi.xqa_batch_decode_with_kv_cache(
        q, (k, v), None, index(TABLE), index(lens), 16, 0.25, window_left=window_left, q_len_per_req=drafts
    )
    want = attention(q, k.double(), v.double(), TABLE, lens, [drafts] * 3, logits=0.25, window=window_left + 1)
    close(got, want)


def test_mask_bits_say_which_drafts_a_draft_sees():
    lens, drafts = [9, 3, 14], 3
    tree = [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    full = [[1, 1, 1]] * 3
    alone = [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    bits = [tree, full, alone]
    mask = torch.stack([pack(x, 2) for x in bits])
    q = torch.randn(9, 4, 16).to(BF16)
    k, v = kv_codes(E4M3, 2, 16, lens)[0], kv_codes(E4M3, 2, 16, lens)[0]
    got = fi.xqa_batch_decode_with_kv_cache(
        q, (k, v), None, index(TABLE), index(lens), 16, 0.25, q_len_per_req=drafts, mask=mask
    )
    sees = lambda b, i, j: bool(bits[b][i][j])  # noqa: E731
    close(got, attention(q, k.double(), v.double(), TABLE, lens, [3] * 3, logits=0.25, sees=sees))


def test_ragged_drafts_by_cumulative_lengths():
    lens, rows = [9, 1, 14], [2, 0, 3]
    q = torch.randn(5, 4, 16).to(BF16)
    k, v = kv_codes(E4M3, 2, 16, lens)[0], kv_codes(E4M3, 2, 16, lens)[0]
    bits = [[[1, 0], [0, 1]], [], [[1, 0, 0], [1, 1, 0], [1, 0, 1]]]
    mask = torch.cat([pack(x, 2) for x in bits if x])
    call = (q, (k, v), None, index(TABLE), index(lens), 16, 0.25)
    for q_len in (3, None):
        got = fi.xqa_batch_decode_with_kv_cache(
            *call, q_len_per_req=q_len, mask=mask, q_cu_seq_lens=index([0, 2, 2, 5])
        )
        sees = lambda b, i, j: bool(bits[b][i][j])  # noqa: E731
        close(got, attention(q, k.double(), v.double(), TABLE, lens, rows, logits=0.25, sees=sees))
    with pytest.raises(ValueError, match=r"^q_len_per_req: want the largest number of drafts"):
        fi.xqa_batch_decode_with_kv_cache(*call, q_cu_seq_lens=index([0, 2, 2, 5]))


def test_sinks_are_scaled_logits_without_a_value():
    q = torch.randn(3, 4, 16).to(BF16)
    k, v = kv_codes(BF16, 2, 16)[0], kv_codes(BF16, 2, 16)[0]
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0])
    got = fi.xqa_batch_decode_with_kv_cache(q, (k, v), None, index(TABLE), index(LENS), 16, 0.25, sinks=sinks)
    close(got, attention(q, k.double(), v.double(), TABLE, LENS, [1] * 3, logits=0.25, sinks=sinks))


@pytest.mark.parametrize("stored", [BF16, E4M3, torch.int8])
@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("out_dtype", [BF16, FP16, E4M3])
def test_o_scale_multiplies_16_bit_outputs_only_and_bmm2_every_cache(stored, tensors, out_dtype):
    q = torch.randn(3, 4, 16).to(BF16)
    k, v = kv_codes(stored, 2, 16)[0], kv_codes(stored, 2, 16)[0]
    bmm1, bmm2 = 0.02, 0.04
    scales = [torch.tensor([x]) for x in (bmm1, bmm2)] if tensors else [bmm1, bmm2]
    out = torch.full((3, 4, 16), float("nan")).to(out_dtype)
    got = fi.xqa_batch_decode_with_kv_cache(
        q, (k, v), None, index(TABLE), index(LENS), 16, *scales, out=out, o_scale=8.0
    )
    assert got is out
    factor = bmm2 if out_dtype == E4M3 else bmm2 * 8.0
    want = attention(q, k.double(), v.double(), TABLE, LENS, [1] * 3, logits=bmm1, out=factor)
    close(got, want, 5e-2 if out_dtype == E4M3 else 3e-3)


def test_an_fp8_output_saturates():
    q = torch.zeros(1, 1, 16, dtype=BF16)
    k, v = torch.zeros(1, 4, 1, 16, dtype=E4M3), torch.full((1, 4, 1, 16), 400.0).to(E4M3)
    out = torch.empty(1, 1, 16, dtype=E4M3)
    fi.xqa_batch_decode_with_kv_cache(q, (k, v), None, index([[0]]), index([3]), 4, 1.0, 100.0, out=out)
    assert (out.float() == 448).all()


def test_requests_without_keys_give_zeros_and_no_requests_nothing():
    q = torch.randn(2, 4, 16).to(BF16)
    k = poisoned(2, 4, 2, 16, dtype=E4M3)
    out = torch.full((2, 4, 16), float("nan"), dtype=BF16)
    fi.xqa_batch_decode_with_kv_cache(q, (k, k), None, index([[HUGE_PAGE]] * 2), index([0, 0]), 4, out=out)
    assert not out.any()
    got = fi.xqa_batch_decode_with_kv_cache(
        q[:0], (k, k), None, torch.empty(0, 1, dtype=torch.int32), torch.empty(0, dtype=torch.int32), 4
    )
    assert got.shape == (0, 4, 16)


def test_strides_of_queries_caches_tables_and_outputs_are_honoured():
    q = torch.randn(3, 8, 32).to(BF16)[:, ::2, 8:24]
    both = torch.stack((kv_codes(E4M3, 2, 16)[0].view(torch.uint8), kv_codes(E4M3, 2, 16)[0].view(torch.uint8)), 3)
    both = both.view(E4M3)  # K and V of a head side by side
    k, v = both[:, :, :, 0], both[:, :, :, 1]
    table = torch.cat((index(TABLE), index(TABLE)), 1)[:, :4]
    out = torch.full((3, 4, 32), float("nan"), dtype=BF16)
    got = fi.xqa_batch_decode_with_kv_cache(q, (k, v), None, table, index(LENS), 16, 0.25, out=out[..., 16:])
    close(got, attention(q, k.double(), v.double(), TABLE, LENS, [1] * 3, logits=0.25))
    assert out[..., :16].isnan().all()


BAD_DECODES = {
    "query rank": ({"query": torch.zeros(3, 64, dtype=BF16)}, ValueError, "query: "),
    "query rows": (
        {"q_len_per_req": 2},
        ValueError,
        "query: want 3 (entries of seq_lens) × q_len_per_req=2 rows, got 3",
    ),
    "table": ({"block_tables": torch.zeros(2, 4, dtype=torch.int32)}, ValueError, "block_tables: "),
    "table dtype": ({"block_tables": torch.zeros(3, 4)}, ValueError, "block_tables: "),
    "seq_lens": ({"seq_lens": torch.zeros(3, 2, dtype=torch.int32)}, ValueError, "seq_lens: "),
    "layout": ({"kv_layout": "NDH"}, ValueError, "kv_layout: "),
    "cache": ({"kv_cache": None}, TypeError, "kv_cache: want Tensor or a tuple of two, got NoneType"),
    "block scales of none": (
        {"kv_cache_sf": (torch.zeros(9, 4, 2, dtype=E4M3),) * 2},
        ValueError,
        "kv_cache_sf: want None beside a bfloat16 cache, got block scales",
    ),
    "other scales of none": (
        {"kv_cache_sf": (torch.zeros(9, 4, 2, 16, dtype=BF16),) * 2},
        ValueError,
        "kv_cache_sf: want None beside a bfloat16 cache, got block scales",
    ),
    "longest draft": (
        {"query": torch.zeros(5, 4, 16, dtype=BF16), "q_len_per_req": 2, "q_cu_seq_lens": index([0, 3, 4, 5])},
        ValueError,
        "q_len_per_req: want at least 3, the rows of request 0, got 2",
    ),
    "three caches": ({"kv_cache": (torch.zeros(1),) * 3}, ValueError, "kv_cache: "),
    "cache rank": ({"kv_cache": torch.zeros(9, 3, 4, 2, 16, dtype=BF16)}, ValueError, "kv_cache: "),
    "head dim": (
        {"query": torch.zeros(3, 4, 24, dtype=BF16)},
        ValueError,
        "query: want head_dim 16 as in kv_cache[0] ",
    ),
    "window": ({"window_left": -2}, ValueError, "window_left: want a number of keys, or -1 for all, got -2"),
    "value dtype": (
        {"kv_cache": (torch.zeros(9, 4, 2, 16, dtype=BF16), torch.zeros(9, 4, 2, 16, dtype=FP16))},
        ValueError,
        "kv_cache[1]: ",
    ),
    "nvfp4 without scales": ({"kv_cache": torch.zeros(9, 2, 4, 2, 8, dtype=torch.uint8)}, ValueError, "kv_cache_sf: "),
    "scales without nvfp4": ({"kv_cache_sf": torch.zeros(9, 2, 4, 2, 1, dtype=E4M3)}, ValueError, "kv_cache_sf: "),
    "bmm1": ({"bmm1_scale": torch.ones(2)}, ValueError, "bmm1_scale: "),
    "bmm2": ({"bmm2_scale": torch.ones(1, dtype=torch.float64)}, ValueError, "bmm2_scale: "),
    "bmm1 no number": ({"bmm1_scale": "1"}, TypeError, "bmm1_scale: "),
    "o_scale": ({"o_scale": torch.ones(2)}, ValueError, "o_scale: "),
    "mask dtype": ({"mask": torch.zeros(3, 1, 2, dtype=torch.int32)}, ValueError, "mask: "),
    "sinks": ({"sinks": torch.zeros(3)}, ValueError, "sinks: "),
    "out": ({"out": torch.zeros(3, 4, 8, dtype=BF16)}, ValueError, "out: "),
}


@pytest.mark.parametrize("case", BAD_DECODES)
def test_bad_decodes_name_the_callers_argument(case):
    change, error, start = BAD_DECODES[case]
    call = {
        "query": torch.zeros(3, 4, 16, dtype=BF16),
        "kv_cache": torch.zeros(9, 2, 4, 2, 16, dtype=BF16),
        "workspace_buffer": None,
        "block_tables": index(TABLE),
        "seq_lens": index(LENS),
        "max_seq_len": 16,
    }
    with pytest.raises(error) as caught:
        fi.xqa_batch_decode_with_kv_cache(**(call | change))
    assert str(caught.value).startswith(start)


def merged(v, s):
    """v [n, T, H, D], s [n, T, H] base 2, fp64: the definition in base 2."""
    top = s.max(0).values
    top = torch.where(top.isinf(), 0.0, top)
    w = torch.exp2(s - top)
    total = w.sum(0)
    out = (w[..., None] * torch.where(w[..., None] == 0, 0.0, v)).sum(0) / torch.where(total == 0, 1.0, total)[
        ..., None
    ]
    return out, torch.log2(total) + top


@pytest.mark.parametrize("dtype", [BF16, FP16, F32])
def test_merge_states_is_base_two_in_and_out(dtype):
    v, s = torch.randn(5, 4, 3, 16).to(dtype), torch.randn(5, 4, 3) * 6
    s[0, 1], s[1] = -torch.inf, -torch.inf  # a part without keys, a token without any
    v[0, 1] = float("nan")
    s_before = s.clone()
    out, lse = fi.merge_states(v, s)
    want, want_lse = merged(v.transpose(0, 1).double(), s.transpose(0, 1).double())
    assert out.dtype == dtype
    assert lse.dtype == F32
    close(out, want)
    assert not out[1].any()
    assert (lse[1] == -torch.inf).all()
    live = torch.arange(5) != 1
    assert (lse[live].double() - want_lse[live]).abs().max() < 1e-5
    assert torch.equal(s, s_before)


def test_merge_state_merges_two_and_agrees_with_merge_states():
    v, s = torch.randn(5, 2, 3, 16).to(BF16), torch.randn(5, 2, 3) * 4
    got = fi.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    want = fi.merge_states(v, s)
    assert same_bytes(got[0], want[0])
    assert same_bytes(got[1], want[1])


def test_bad_merges_name_the_callers_argument():
    v, s = torch.zeros(5, 2, 3, 16), torch.zeros(5, 2, 3)
    with pytest.raises(ValueError, match=r"^s: "):
        fi.merge_states(v, s.half())
    for dtype in (torch.int32, torch.bool, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=r"^s: want float32, got "):
            fi.merge_states(v, s.to(dtype))
        with pytest.raises(ValueError, match=r"^s_a: want float32, got "):
            fi.merge_state(v[:, 0], s[:, 0].to(dtype), v[:, 1], s[:, 1].to(dtype))
    with pytest.raises(ValueError, match=r"^v: want"):
        fi.merge_states(v[0], s[0])
    with pytest.raises(ValueError, match=r"^v_b: want"):
        fi.merge_state(v[:, 0], s[:, 0], v[:3, 1], s[:3, 1])
    with pytest.raises(ValueError, match=r"^s_b: want"):
        fi.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1].double())
