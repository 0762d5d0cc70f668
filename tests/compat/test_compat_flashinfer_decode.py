"""tersekv.compat.flashinfer: trtllm_batch_decode_with_kv_cache, single_decode_with_kv_cache, and what is named only."""

import math
import re
from pathlib import Path

import pytest
import torch
from compat_reference import BF16, E4M3, FP16, LENS, TABLE, S, attention, close, index, kv_codes, pack, values

import tersekv
from tersekv import UnsupportedError
from tersekv.compat import _flashinfer_single as single
from tersekv.compat import flashinfer as fi

DOCS = Path(__file__).parents[2] / "docs"


def base2(q, k, lens, rows, *, logits, window=0, sinks=None, table=TABLE):
    """LSE [T, Hq] of causal rows, base 2, fp64."""
    group, size, got, t = q.shape[1] // k.shape[2], k.shape[1], [], 0
    for b, n in enumerate(lens):
        keys = torch.stack([k[int(table[b][j // size]), j % size] for j in range(n)]).double()
        for i in range(rows[b]):
            own = n - rows[b] + i
            seen = keys[max(0, own - window + 1) if window else 0 : own + 1]
            scores = torch.einsum("nhd,hd->nh", seen.repeat_interleave(group, 1), q[t].double()) * logits
            total = scores.logsumexp(0)
            got.append((total if sinks is None else torch.logaddexp(total, sinks.double())) / math.log(2))
            t += 1
    return torch.stack(got)


def trtllm(query, kv_cache, lens=LENS, **options):
    return fi.trtllm_batch_decode_with_kv_cache(query, kv_cache, None, index(TABLE), index(lens), 16, **options)


@pytest.mark.parametrize("form", ["HND", "HND joint", "NHD", "NHD joint"])
@pytest.mark.parametrize("stored", [BF16, E4M3, torch.uint8])
def test_trtllm_decodes_pages_that_are_hnd_unless_they_are_said_not_to_be(stored, form):
    (k, ksf), (v, vsf) = kv_codes(stored, 2, 32), kv_codes(stored, 2, 32)
    q, sinks, out = torch.randn(3, 4, 32).to(BF16), torch.randn(4), torch.full((3, 4, 32), float("nan"), dtype=BF16)
    layout = form.split()[0]
    given = [x if x is None or layout == "NHD" else x.transpose(1, 2).contiguous() for x in (k, v, ksf, vsf)]
    cache = torch.stack(given[:2], 1) if "joint" in form else (given[0], given[1])
    options = {} if layout == "HND" else {"kv_layout": "NHD"}
    if ksf is not None:
        options["kv_cache_sf"] = (given[2], given[3])
    got, lse = trtllm(
        q, cache, bmm1_scale=0.2, bmm2_scale=1.5, window_left=4, sinks=sinks, out=out, return_lse=True, **options
    )
    assert got is out
    k, v = values(k, ksf), values(v, vsf)
    close(out, attention(q, k, v, TABLE, LENS, [1] * 3, logits=0.2, out=1.5, window=5, sinks=sinks))
    torch.testing.assert_close(
        lse.double(), base2(q, k, LENS, [1] * 3, logits=0.2, window=5, sinks=sinks), rtol=0, atol=2e-3
    )


def test_trtllm_takes_drafts_uniform_masked_and_ragged():
    lens, (k, _), (v, _) = [9, 3, 14], kv_codes(E4M3, 2, 16, [9, 3, 14]), kv_codes(E4M3, 2, 16, [9, 3, 14])
    hnd, (keys, vals) = (k.transpose(1, 2), v.transpose(1, 2)), (k.double(), v.double())
    q = torch.randn(9, 4, 16).to(BF16)
    uniform = trtllm(q, hnd, lens, q_len_per_req=3, bmm1_scale=0.25)
    close(uniform, attention(q, keys, vals, TABLE, lens, [3] * 3, logits=0.25))
    mask = torch.stack([pack([[1, 1, 1]] * 3, 2)] * 3)
    masked = trtllm(q, hnd, lens, q_len_per_req=3, bmm1_scale=0.25, mask=mask)
    close(masked, attention(q, keys, vals, TABLE, lens, [3] * 3, logits=0.25, sees=lambda b, i, j: True))
    rows, lse = [2, 1, 3], torch.empty(6, 4)
    ragged = trtllm(
        q[:6], hnd, lens, q_len_per_req=None, cum_seq_lens_q=index([0, 2, 3, 6]), max_q_len=3, bmm1_scale=0.25, lse=lse
    )
    close(ragged, attention(q[:6], keys, vals, TABLE, lens, rows, logits=0.25))
    # A given LSE is written, though it is not returned.
    torch.testing.assert_close(lse.double(), base2(q, keys, lens, rows, logits=0.25), rtol=0, atol=2e-3)


def test_trtllms_output_has_the_querys_dtype_or_that_which_is_asked_for():
    (k, _), (v, _) = kv_codes(E4M3, 2, 32), kv_codes(E4M3, 2, 32)
    hnd, q = (k.transpose(1, 2), v.transpose(1, 2)), torch.randn(3, 4, 32).to(E4M3)
    scales = {"bmm1_scale": torch.tensor([0.2]), "bmm2_scale": torch.tensor([0.5])}
    want = attention(q.float(), k.double(), v.double(), TABLE, LENS, [1] * 3, logits=0.2, out=0.5)
    eight_bits = trtllm(q, hnd, **scales)
    assert eight_bits.dtype == E4M3
    close(eight_bits, want, 5e-2)
    for dtype in (BF16, FP16):
        found = trtllm(q, hnd, out_dtype=dtype, **scales)
        assert found.dtype == dtype
        close(found, want, 5e-3)
    # o_scale is xqa's, and multiplies a 16-bit output alone.
    close(trtllm(q, hnd, out_dtype=BF16, o_scale=2.0, backend="xqa", **scales), 2 * want, 5e-3)
    close(trtllm(q, hnd, out_dtype=BF16, o_scale=2.0, backend="trtllm-gen", **scales), want, 5e-3)
    close(trtllm(q, hnd, o_scale=2.0, **scales), want, 5e-2)


class FP4Tensor:
    """What FlashInfer hands an nvfp4 output in."""


REFUSED = {
    "nvfp4": ({"out_dtype": "nvfp4"}, UnsupportedError, "^out_dtype: .*not an nvfp4 output, got 'nvfp4'"),
    "fp4 out": ({"out": FP4Tensor()}, UnsupportedError, "^out: .*not an nvfp4 output, got FP4Tensor"),
    "o_sf_scale": ({"o_sf_scale": 1.0}, UnsupportedError, "^o_sf_scale: want None"),
    "o_sf_vec_size": ({"o_sf_vec_size": 16}, UnsupportedError, "^o_sf_vec_size: want None"),
    "skips": ({"skip_softmax_threshold_scale_factor": 1.0}, UnsupportedError, "^skip_softmax_threshold_scale_factor: "),
    "log2": ({"bmm1_scale_log2": torch.ones(1)}, UnsupportedError, "^bmm1_scale_log2: want None, .* as bmm1_scale"),
    "tables": ({"uses_shared_paged_kv_idx": False}, UnsupportedError, "^uses_shared_paged_kv_idx: want True"),
    "sparse": ({"enable_block_sparse_attention": True}, UnsupportedError, "^enable_block_sparse_attention: want False"),
    "backend": ({"backend": "fa2"}, ValueError, "^backend: want auto, xqa or trtllm-gen, got 'fa2'"),
    "max_q_len": ({"max_q_len": 2}, ValueError, "^cum_seq_lens_q, max_q_len: want both or neither"),
    "cum": (
        {"cum_seq_lens_q": index([0, 1, 2, 3]), "max_q_len": 1, "q_len_per_req": 2}, ValueError,
        "^q_len_per_req: want None beside cum_seq_lens_q, got 2",
    ),
    "starts": (
        {"cum_seq_lens_q": index([0, 1]), "max_q_len": 1}, ValueError, "^cum_seq_lens_q: want",
    ),
    "drafts": ({"q_len_per_req": 2}, ValueError, "^query: want 3 .entries of seq_lens. × q_len_per_req=2 rows, got 3"),
    "window": ({"window_left": -2}, ValueError, "^window_left: want a number of keys, or -1 for all, got -2"),
    "scale": ({"bmm2_scale": "1"}, TypeError, "^bmm2_scale: "),
    "lse": ({"lse": torch.empty(3)}, ValueError, "^lse: want"),
    "dtype": ({"out_dtype": torch.int8}, ValueError, "^out_dtype: want"),
    "layout": ({"kv_layout": "SHD"}, ValueError, "^kv_layout: want"),
    "scales": ({"kv_cache_sf": (torch.ones(1), torch.ones(1))}, ValueError, "^kv_cache_sf: want None"),
    "flag": ({"return_lse": 1}, TypeError, "^return_lse: want bool"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_trtllm_cannot_do_is_refused_by_its_name(name):
    change, error, message = REFUSED[name]
    k = torch.zeros(9, 2, S, 32, dtype=E4M3)
    with pytest.raises(error, match=message):
        trtllm(torch.zeros(3, 4, 32, dtype=BF16), (k, k), **change)


def keys(n, d, dtype, layout):
    rows = torch.randn(n, 2, d).to(dtype)
    return rows.double(), rows if layout == "NHD" else rows.transpose(0, 1).contiguous()


@pytest.mark.parametrize("n", [1, 2, 3, 31, 63, 64, 65, 128, 200])
@pytest.mark.parametrize(("layout", "stored"), [("NHD", BF16), ("HND", E4M3), ("HND", FP16)])
def test_one_token_over_keys_of_no_cache(n, layout, stored):
    (k, k_given), (v, v_given) = keys(n, 32, stored, layout), keys(n, 16, stored, layout)
    q = torch.randn(4, 32).to(BF16)
    out, lse = fi.single_decode_with_kv_cache(
        q, k_given, v_given, layout, q_scale=1.2, k_scale=0.5, v_scale=2.0, return_lse=True
    )
    table, logits = [list(range(n))], 0.6 / math.sqrt(32)
    assert (out.shape, out.dtype, lse.shape) == ((4, 16), BF16, (4,))
    close(out[None], attention(q[None], k[:, None], v[:, None], table, [n], [1], logits=logits, out=2.0), 5e-3)
    want = base2(q[None], k[:, None], [n], [1], logits=logits, table=table)
    torch.testing.assert_close(lse[None].double(), want, rtol=0, atol=2e-3)


@pytest.mark.parametrize("left", [-1, 0, 5, 69, 98, 99, 1000])
def test_its_window_is_of_the_last_keys(left):
    (k, k_given), (v, v_given) = keys(100, 32, BF16, "NHD"), keys(100, 32, BF16, "NHD")
    q = torch.randn(4, 32).to(BF16)
    out = fi.single_decode_with_kv_cache(q, k_given, v_given, window_left=left, sm_scale=0.3)
    window = left + 1
    close(out[None], attention(
        q[None], k[:, None], v[:, None], [list(range(100))], [100], [1], logits=0.3, window=window), 5e-3
    )  # fmt: skip


def test_its_scores_are_capped_and_an_8_bit_query_has_an_8_bit_output():
    (k, k_given), (v, v_given) = keys(70, 32, E4M3, "NHD"), keys(70, 32, E4M3, "NHD")
    q = torch.randn(4, 32).to(E4M3)
    out = fi.single_decode_with_kv_cache(q, k_given, v_given, logits_soft_cap=2.0, sm_scale=0.5)
    assert out.dtype == E4M3
    scores = 2.0 * torch.tanh(torch.einsum("nhd,hd->hn", k.repeat_interleave(2, 1), q.double()) * 0.5 / 2.0)
    close(out, torch.einsum("hn,nhd->hd", scores.softmax(-1), v.repeat_interleave(2, 1)), 5e-2)


def test_no_key_at_all_is_an_output_of_zeros():
    k = torch.empty(0, 2, 32, dtype=BF16)
    out, lse = fi.single_decode_with_kv_cache(torch.ones(4, 32, dtype=BF16), k, k, return_lse=True)
    assert out.tolist() == torch.zeros(4, 32).tolist()
    assert lse.tolist() == [-math.inf] * 4


def test_pages_have_few_sizes_however_many_keys_there_are():
    """Kernels are compiled for the size of a page: were it the number of keys, each token would compile one."""
    assert {single._as_pages(torch.empty(n, 2, 8)).shape[1] for n in range(1, 300)} == {1, 2, 4, 8, 16, 32, 64}


BAD_SINGLE = {
    "rope": ({"pos_encoding_mode": "ROPE_LLAMA"}, UnsupportedError, "^pos_encoding_mode: want 'NONE'"),
    "layout": ({"kv_layout": "SHD"}, ValueError, "^kv_layout: want 'NHD' or 'HND'"),
    "q": ({"q": torch.zeros(1, 4, 32, dtype=BF16)}, ValueError, "^q: want \\[Hq, D\\], got \\[1, 4, 32\\]"),
    "v": ({"v": torch.zeros(4, 2, 32, dtype=BF16)}, ValueError, "^v: want N and H of k"),
    "codes": (dict.fromkeys("kv", torch.zeros(5, 2, 16, dtype=torch.uint8)), ValueError, "^k, v: want|block scales"),
    "heads": ({"q": torch.zeros(3, 32, dtype=BF16)}, ValueError, "^q: want"),
    "window": ({"window_left": -2}, ValueError, "^window_left: want -1 or more, got -2"),
    "scale": ({"sm_scale": "1"}, TypeError, "^sm_scale: want"),
}


@pytest.mark.parametrize("name", BAD_SINGLE)
def test_bad_single_decodes_name_the_callers_argument(name):
    change, error, message = BAD_SINGLE[name]
    call = {"q": torch.zeros(4, 32, dtype=BF16), **dict.fromkeys("kv", torch.zeros(5, 2, 32, dtype=BF16))}
    with pytest.raises(error, match=message):
        fi.single_decode_with_kv_cache(**(call | change))


def test_both_compile():
    (_, k), (_, v) = keys(100, 32, BF16, "NHD"), keys(100, 32, BF16, "NHD")
    q = torch.randn(4, 32).to(BF16)
    alone = torch.compile(
        lambda *x: fi.single_decode_with_kv_cache(*x, window_left=70), fullgraph=True, backend="eager"
    )
    assert torch.equal(alone(q, k, v), fi.single_decode_with_kv_cache(q, k, v, window_left=70))
    cache = tuple(kv_codes(BF16, 2, 32)[0].transpose(1, 2) for _ in range(2))
    batch = torch.compile(lambda q: trtllm(q, cache, return_lse=True), fullgraph=True, backend="eager")
    rows = torch.randn(3, 4, 32).to(BF16)
    for got, want in zip(batch(rows), trtllm(rows, cache, return_lse=True), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", fi.ABSENT)
def test_what_is_not_here_says_what_to_use(name):
    """In an import and in an attribute; and what it says is there."""
    for take in (lambda: exec(f"from tersekv.compat.flashinfer import {name}", {}), lambda: getattr(fi, name)):
        with pytest.raises(ImportError, match=f"tersekv.compat.flashinfer has no {name}: use ") as caught:
            take()
    assert caught.value.name == "tersekv.compat.flashinfer"
    way = fi.ABSENT[name]
    ours, theirs = re.findall(r"tersekv\.(\w+)", way), [x for x in fi.__all__ if re.search(rf"\b{x}\b", way)]
    assert ours or theirs or "wrapper" in way
    assert all(hasattr(tersekv, x) for x in ours)
    assert name in (DOCS / "migration.md").read_text()


def test_other_names_are_missing_as_in_any_module():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = fi.nothing
    assert not hasattr(fi, "nothing")
