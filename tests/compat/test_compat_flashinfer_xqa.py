"""tersekv.compat.flashinfer: xqa and xqa_mla."""

import math

import pytest
import torch
from compat_reference import BF16, E4M3, E5M2, LENS, TABLE, P, S, attention, close, index, kv_codes, pack, raw, values

from tersekv.compat import flashinfer as fi


@pytest.mark.parametrize("form", ["NHD", "HND", "rows"])
@pytest.mark.parametrize("stored", [BF16, E4M3, torch.uint8])
def test_xqa_divides_the_scores_by_the_root_of_the_head_size(stored, form):
    q = torch.randn(3, 1, 4, 32).to(BF16)
    (k, ksf), (v, vsf) = kv_codes(stored, 2, 32), kv_codes(stored, 2, 32)
    sinks = torch.randn(2, 2)
    given = [k, v, ksf, vsf]
    if form == "HND":
        given = [None if x is None else x.transpose(1, 2).contiguous() for x in given]
    if form == "rows":
        given = [None if x is None else x.flatten(0, 2) for x in given]
    output = torch.full((3, 1, 4, 32), float("nan"), dtype=BF16)
    returned = fi.xqa(
        q, given[0], given[1], index(TABLE, torch.uint32), index([[n] for n in LENS], torch.uint32), output, None, None,
        2, S, sinks, q_scale=1.7, kv_scale=0.6, sliding_win_size=5, kv_layout="NHD" if form == "rows" else form,
        rcp_out_scale=99.0, k_sf_cache=given[2], v_sf_cache=given[3],
    )  # fmt: skip
    assert returned is None
    want = attention(
        q[:, 0], values(k, ksf), values(v, vsf), TABLE, LENS, [1] * 3, logits=1.7 * 0.6 / math.sqrt(32), out=0.6,
        window=5, sinks=sinks.flatten(),
    )  # fmt: skip
    close(output[:, 0], want)


@pytest.mark.parametrize("stored", [BF16, E4M3])
def test_xqa_takes_drafts_tensor_scales_and_an_fp8_output(stored):
    lens = [9, 3, 14]
    q = torch.randn(3, 1, 3, 4, 16).to(BF16)
    k, v = kv_codes(stored, 2, 16, lens)[0], kv_codes(stored, 2, 16, lens)[0]
    output = torch.empty(3, 1, 3, 4, 16, dtype=E4M3)
    full = [[1, 1, 1]] * 3
    fi.xqa(
        q, k, v, index(TABLE), index([[n] for n in lens]), output, None, None, 2, S, None, torch.tensor([1.3]),
        torch.tensor(0.8), rcp_out_scale=4.0, q_seq_len=3, mask=torch.stack([pack(full, 2)] * 3),
    )  # fmt: skip
    want = attention(
        q.flatten(0, 2), k.double(), v.double(), TABLE, lens, [3] * 3, logits=1.3 * 0.8 / 4, out=0.8 * 4.0,
        sees=lambda b, i, j: True,
    )  # fmt: skip
    close(output.flatten(0, 2), want, 5e-2)


def test_xqa_takes_packed_ragged_drafts():
    rows = [2, 0, 3]
    q = torch.randn(5, 4, 16).to(BF16)
    k, v = kv_codes(E4M3, 2, 16)[0], kv_codes(E4M3, 2, 16)[0]
    output = torch.full((5, 4, 16), float("nan"), dtype=BF16)
    fi.xqa(
        q, k, v, index(TABLE), index([[n] for n in LENS]), output, None, None, 2, S, q_seq_len=3,
        q_cu_seq_lens=index([0, 2, 2, 5]),
    )  # fmt: skip
    close(output, attention(q, k.double(), v.double(), TABLE, LENS, rows, logits=0.25))


BAD_XQA = {
    "beam": ({"q": torch.zeros(3, 2, 4, 16, dtype=BF16)}, "q: want"),
    "no columns": ({"q": torch.zeros(3, 1, 4, 0, dtype=BF16)}, "q: want head_dim a multiple of 8 up to 576, got 0"),
    "page size": ({"page_size": 8}, "k_cache: want pages of page_size=8"),
    "heads": ({"num_kv_heads": 4}, "k_cache: want pages of page_size=4 and num_kv_heads=4"),
    "seq_lens": ({"seq_lens": torch.zeros(3, 2, dtype=torch.int32)}, "seq_lens: want"),
    "output": ({"output": torch.zeros(3, 1, 4, 8, dtype=BF16)}, "output: want"),
    "scale": ({"kv_scale": torch.ones(3)}, "kv_scale: "),
    "window": ({"sliding_win_size": -1}, "sliding_win_size: want a number of keys, or 0 for all, got -1"),
    "drafts": ({"q_seq_len": 2}, "q: want 3 (entries of seq_lens) × q_seq_len=2 rows"),
    "longest draft": (
        {
            "q": torch.zeros(5, 4, 16, dtype=BF16),
            "output": torch.zeros(5, 4, 16, dtype=BF16),
            "q_seq_len": 2,
            "q_cu_seq_lens": torch.tensor([0, 3, 4, 5], dtype=torch.int32),
        },
        "q_seq_len: want at least 3, the rows of request 0, got 2",
    ),
}


@pytest.mark.parametrize("case", BAD_XQA)
def test_bad_xqa_calls_name_the_callers_argument(case):
    change, start = BAD_XQA[case]
    call = {
        "q": torch.zeros(3, 1, 4, 16, dtype=BF16),
        "k_cache": torch.zeros(P, S, 2, 16, dtype=E4M3),
        "v_cache": torch.zeros(P, S, 2, 16, dtype=E4M3),
        "page_table": index(TABLE),
        "seq_lens": index([[n] for n in LENS]),
        "output": torch.zeros(3, 1, 4, 16, dtype=BF16),
        "workspace_buffer": None,
        "semaphores": None,
        "num_kv_heads": 2,
        "page_size": S,
    }
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        fi.xqa(**(call | change))
    assert str(caught.value).startswith(start)


def mla_call(q, k, v, output, **scales):
    return fi.xqa_mla(
        q, k, v, index(TABLE, torch.uint32), index([[n] for n in LENS], torch.uint32), output, None, None, S, **scales
    )


MLA_FORMS = {
    "token rows": lambda k: (k.flatten(0, 1), k.flatten(0, 1)),
    "token rows, first columns": lambda k: (k.flatten(0, 1), k.flatten(0, 1)[:, :512]),
    "pages": lambda k: (k, k),
    "pages, first columns": lambda k: (k, k[..., :512]),
    "pages with a head": lambda k: (k[:, :, None], k[:, :, None]),
    "mixed": lambda k: (k[:, :, None], k.flatten(0, 1)[:, :512]),
}


@pytest.mark.parametrize("form", MLA_FORMS)
def test_xqa_mla_reads_one_row_as_key_and_value_without_a_root(form, monkeypatch):
    q = torch.randn(3, 1, 5, 576).to(E4M3)
    k = kv_codes(E4M3, 1, 576)[0][:, :, 0]
    output = torch.full((3, 1, 5, 512), float("nan"), dtype=BF16)
    ops = []
    dispatch_call = fi.dispatch_call
    monkeypatch.setattr(fi, "dispatch_call", lambda op, *rest: (ops.append(op), dispatch_call(op, *rest)))
    assert mla_call(q, *MLA_FORMS[form](k), output, q_scale=0.05, kv_scale=0.5) is None
    keys = k[:, :, None].double()
    want = attention(q[:, 0], keys, keys[..., :512], TABLE, LENS, [1] * 3, logits=0.05 * 0.5, out=0.5)
    close(output[:, 0], want)
    assert ops == ["mla_decode"]


@pytest.mark.parametrize("stored", [E4M3, BF16])
def test_xqa_mla_takes_other_dtypes_and_scales_on_the_device(stored):
    q = torch.randn(3, 1, 5, 576).to(stored)
    k = kv_codes(stored, 1, 576)[0][:, :, 0]
    output = torch.full((3, 1, 5, 512), float("nan"), dtype=BF16)
    mla_call(q, k, k, output, q_scale=torch.tensor([0.05]), kv_scale=torch.tensor([0.5]))
    keys = k[:, :, None].double()
    close(output[:, 0], attention(q[:, 0], keys, keys[..., :512], TABLE, LENS, [1] * 3, logits=0.025, out=0.5))


@pytest.mark.parametrize("form", ["first columns", "the same tensor", "their own"])
def test_xqa_mla_is_one_graph_under_torch_compile(form):
    q, k = torch.randn(3, 1, 5, 576).to(BF16), kv_codes(BF16, 1, 576)[0][:, :, 0]
    v = {"first columns": k[..., :512], "the same tensor": k, "their own": kv_codes(BF16, 1, 576)[0][:, :, 0]}[form]
    outs = [torch.full((3, 1, 5, 512), float("nan"), dtype=BF16) for _ in range(2)]
    torch._dynamo.reset()
    torch.compile(mla_call, fullgraph=True, backend="aot_eager")(q, k, v, outs[0], q_scale=0.05)
    mla_call(q, k, v, outs[1], q_scale=0.05)
    close(outs[0], outs[1])


@pytest.mark.parametrize("columns", [576, 512])
def test_xqa_mla_reads_values_of_their_own_memory(columns):
    q = torch.randn(3, 1, 5, 576).to(E4M3)
    k, v = kv_codes(E4M3, 1, 576)[0][:, :, 0], kv_codes(E4M3, 1, columns)[0][:, :, 0]
    output = torch.full((3, 1, 5, 512), float("nan"), dtype=BF16)
    mla_call(q, k, v, output, q_scale=0.05, kv_scale=0.5)
    keys, vals = k[:, :, None].double(), v[:, :, None, :512].double()
    close(output[:, 0], attention(q[:, 0], keys, vals, TABLE, LENS, [1] * 3, logits=0.025, out=0.5))


def test_xqa_mla_reads_656_byte_rows():
    q = torch.randn(3, 1, 5, 576).to(BF16)
    rows = torch.full((P, S, 656), 0xFF, dtype=torch.uint8)
    keys = torch.full((P, S, 1, 576), float("nan"), dtype=torch.float64)
    for b, n in enumerate(LENS):
        for j in range(n):
            codes, scales, pe = torch.randn(512).to(E4M3), torch.rand(4) + 0.1, torch.randn(64).to(BF16)
            at = TABLE[b][j // S], j % S
            rows[at] = torch.cat((raw(codes), raw(scales), raw(pe)))
            keys[at][0] = torch.cat((codes.double() * scales.double().repeat_interleave(128), pe.double()))
    output = torch.full((3, 1, 5, 512), float("nan"), dtype=BF16)
    mla_call(q, rows, rows, output, q_scale=0.05)
    close(output[:, 0], attention(q[:, 0], keys, keys[..., :512], TABLE, LENS, [1] * 3, logits=0.05))


BAD_MLA = {
    "q": ({"q": torch.zeros(3, 1, 5, 570, dtype=E4M3)}, "q: want rows of 512 + 64"),
    "page size": ({"page_size": 8}, "k_cache: want"),
    "v dtype": ({"v_cache": torch.zeros(P, S, 576, dtype=E5M2)}, "v_cache: want the rows of k_cache"),
    "copied rows with scales": (
        {"k_cache": torch.zeros(P, S, 656, dtype=torch.uint8), "v_cache": torch.zeros(P, S, 656, dtype=torch.uint8)},
        "v_cache: want k_cache itself, or a view of its rows, for rows of fp8_ds_mla, got a copy",
    ),
    "v columns": ({"v_cache": torch.zeros(P, S, 256, dtype=E4M3)}, "v_cache: want the rows of k_cache"),
    "output": ({"output": torch.zeros(3, 1, 4, 512, dtype=BF16)}, "output: want"),
    "output as wide as a row": (
        {"output": torch.zeros(3, 1, 5, 576, dtype=BF16)},
        "output: want [B, 1, H, L], L below the 576 columns of a row, got [3, 1, 5, 576]",
    ),
    "output as wide as a row of other memory": (
        {"output": torch.zeros(3, 1, 5, 576, dtype=BF16), "v_cache": torch.zeros(P, S, 576, dtype=E4M3)},
        "output: want [B, 1, H, L], L below the 576 columns of a row, got [3, 1, 5, 576]",
    ),
    "output as wide as a query of 656-byte rows": (
        {
            "k_cache": torch.zeros(P, S, 656, dtype=torch.uint8),
            "q": torch.zeros(3, 1, 5, 576, dtype=BF16),
            "output": torch.zeros(3, 1, 5, 576, dtype=BF16),
        },
        "output: want [B, 1, H, L], L below the 576 columns of a row, got [3, 1, 5, 576]",
    ),
    "table": ({"page_table": torch.zeros(2, 4, dtype=torch.int32)}, "page_table: want"),
    "scale": ({"kv_scale": torch.ones(2)}, "kv_scale: want"),
}


@pytest.mark.parametrize("case", BAD_MLA)
def test_bad_xqa_mla_calls_name_the_callers_argument(case):
    change, start = BAD_MLA[case]
    k = torch.zeros(P, S, 576, dtype=E4M3)
    call = {
        "q": torch.zeros(3, 1, 5, 576, dtype=E4M3),
        "k_cache": k,
        "v_cache": k,
        "page_table": index(TABLE),
        "seq_lens": index([[n] for n in LENS]),
        "output": torch.zeros(3, 1, 5, 512, dtype=BF16),
        "workspace_buffer": None,
        "semaphores": None,
        "page_size": S,
    }
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        fi.xqa_mla(**(call | change))
    assert str(caught.value).startswith(start)


def batch_mla_call(q, rows, **changes):
    call = {
        "query": q,
        "kv_cache": rows,
        "workspace_buffer": None,
        "qk_nope_head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "block_tables": index(TABLE),
        "seq_lens": index(LENS),
        "max_seq_len": max(LENS),
    }
    return fi.xqa_batch_decode_with_kv_cache_mla(**(call | changes))


@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("form", [lambda k: k, lambda k: k[:, None]], ids=["3-D", "4-D"])
def test_batch_decode_of_latent_rows_scales_the_output_alone_by_the_second_scale(form, q_len):
    q = torch.randn(3, q_len, 5, 576).to(E4M3)
    k = kv_codes(E4M3, 1, 576)[0][:, :, 0]
    out = batch_mla_call(q, form(k), bmm1_scale=0.025, bmm2_scale=torch.tensor([0.5]))
    assert out.shape == (3, q_len, 5, 512)
    assert out.dtype == BF16
    keys = k[:, :, None].double()
    want = attention(q.flatten(0, 1), keys, keys[..., :512], TABLE, LENS, [q_len] * 3, logits=0.025, out=0.5)
    close(out.flatten(0, 1), want)
    given = torch.full((3, 5, 512) if q_len == 1 else out.shape, float("nan"), dtype=BF16)
    assert batch_mla_call(q, form(k), out=given, bmm1_scale=0.025, bmm2_scale=0.5) is given
    assert torch.equal(given.view(out.shape), out)


BAD_BATCH_MLA = {
    "query": ({"query": torch.zeros(3, 1, 5, 570, dtype=E4M3)}, "query: want [B, Q, H, L + R] with L=512, R=64, got"),
    "rank": ({"query": torch.zeros(3, 5, 576, dtype=E4M3)}, "query: want [B, Q, H, L + R], got [3, 5, 576]"),
    "kv_cache": ({"kv_cache": torch.zeros(P, S, 512, dtype=E4M3)}, "kv_cache: want [P, S, L + R] or [P, 1, S, L + R]"),
    "two heads": ({"kv_cache": torch.zeros(P, 2, S, 576, dtype=E4M3)}, "kv_cache: want [P, S, L + R] or"),
    "out": ({"out": torch.zeros(3, 5, 576, dtype=BF16)}, "out: want [B, Q, H, L] = [3, 1, 5, 512], got [3, 5, 576]"),
    "sinks": ({"sinks": [torch.zeros(5)]}, "sinks: want None for MLA, got list"),
    "table": ({"block_tables": torch.zeros(2, 4, dtype=torch.int32)}, "block_tables: want"),
    "scale": ({"bmm1_scale": torch.ones(2)}, "bmm1_scale: want"),
    "dtype": ({"kv_cache": torch.zeros(P, S, 576)}, "kv_cache: want one of"),
}


@pytest.mark.parametrize("case", BAD_BATCH_MLA)
def test_bad_batch_decodes_of_latent_rows_name_the_callers_argument(case):
    change, start = BAD_BATCH_MLA[case]
    q, rows = torch.zeros(3, 1, 5, 576, dtype=E4M3), torch.zeros(P, S, 576, dtype=E4M3)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        batch_mla_call(q, rows, **change)
    assert str(caught.value).startswith(start)
