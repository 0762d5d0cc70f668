"""The torch backend of prefill against a dense fp64 attention, what k and v mean, and what is said of bad calls."""

from __future__ import annotations

import dense_reference as dense
import pytest
import torch
from no_sync import NoHostReads
from paged_case import HUGE, kv_case, nan_like, raw
from script import script

import tersekv
from tersekv.backends.torch import online_softmax, requests
from tersekv.testing.bench import prefill

FORMATS = list(tersekv.KV_FORMATS)
EXACT = 5e-6  # relative norm with fp32 outputs
LENS, NEW = [37, 0, 3, 64], [9, 0, 5, 64]  # a chunk, nothing, more rows than tokens, a whole prompt


def rows_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])


def problem(format="fp8_e4m3", lens=None, new=None, *, group=2, **options):
    """A case whose cache holds all tokens, queries in fp32, new rows in bf16, cu_seqlens_q."""
    lens, new = LENS if lens is None else lens, NEW if new is None else new
    case = kv_case(format, lens, **options)
    heads, d, dv, t = case.layer.num_kv_heads, case.layer.head_dim, case.layer.head_dim_v, sum(new)
    k, v = torch.randn(t, heads, d).bfloat16(), torch.randn(t, heads, dv).bfloat16()
    return case, torch.randn(t, heads * group, d), k, v, rows_of(new)


def run(case, q, cu, **options):
    """(out, lse) of the torch backend; both start as NaN."""
    layer = case.layer
    out, lse = nan_like(*q.shape[:2], layer.head_dim_v), nan_like(*q.shape[:2])
    table = options.pop("page_table", case.page_table)
    tersekv.prefill(q, layer, table, case.seq_lens, cu, out=out, lse=lse, backend="torch", **options)
    return out, lse


def reference(case, q, cu, k=None, v=None, **options):
    """Every token a page of its own, those that k and v bring in place of what the cache holds."""
    sides = dense.dequantise(case.layer)
    size, cu = case.layer.page_size, cu.tolist()
    tables, lens = case.lists()
    flat, found = [], ([], [])
    for b, n in enumerate(lens):
        first = n - (cu[b + 1] - cu[b])
        flat.append([len(found[0]) + j for j in range(n)])
        for j in range(n):
            for held, side, given in zip(found, sides, (k, v), strict=True):
                mine = given is not None and j >= first
                held.append(given[cu[b] + j - first].double() if mine else side[tables[b][j // size], j % size])
    pages = [torch.stack(x)[:, None] for x in found]
    options.setdefault("softmax_scale", q.shape[-1] ** -0.5)
    return dense.attention(q.double(), *pages, flat, lens, cu_seqlens_q=cu, **options)


def check(case, q, cu, tolerance=EXACT, page_table=None, **options):
    given = {} if page_table is None else {"page_table": page_table}
    out, lse = run(case, q, cu, **given, **options)
    want, want_lse = reference(case, q, cu, **options)
    assert dense.relative(out, want) < tolerance
    assert torch.equal(lse.isneginf(), want_lse.isneginf())
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def without_new(case, new):
    """A page table that has nothing for the new tokens; poison in their slots, where a page holds older ones too."""
    table = case.page_table.clone()
    for b, (n, q) in enumerate(zip(case.seq_lens.tolist(), new, strict=True)):
        held = max(n - q, 0)
        table[b, -(-held // case.layer.page_size) :] = HUGE
        for j in range(held, min(n, -(-held // case.layer.page_size) * case.layer.page_size)):
            page, slot = int(case.page_table[b, j // case.layer.page_size]), j % case.layer.page_size
            for x in (case.layer.k, case.layer.v, case.layer.k_scale_cache, case.layer.v_scale_cache):
                if x is not None:
                    raw(x)[page, slot] = 0xFF if x.element_size() == 1 else torch.nan
    return table


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_matches_dense_fp64(format):
    case, q, k, v, cu = problem(format)
    check(case, q, cu)
    check(case, q, cu, k=k, v=v, page_table=without_new(case, NEW))


@pytest.mark.parametrize("device_path", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("window", [None, 7])
def test_options_hold_over_pages_and_new_rows_together(window, device_path, monkeypatch):
    case, q, k, v, cu = problem("int8_per_token_head", page_size=5, group=3, head_dim_v=16)
    table = without_new(case, NEW)
    if device_path:
        for module in (online_softmax, requests):
            monkeypatch.setattr(module, "may_read", lambda x: False)
    options = {"window": window, "sinks": torch.randn(6), "softcap": 3.0, "softmax_scale": 0.3}
    check(case, q, cu, k=k, v=v, page_table=table, **options)


def test_the_device_path_reads_nothing_on_the_host(monkeypatch):
    case, q, k, v, cu = problem("nvfp4")
    for module in (online_softmax, requests):
        monkeypatch.setattr(module, "may_read", lambda x: False)
    with NoHostReads():
        for new in ({}, {"k": k, "v": v}):
            tersekv.prefill(q, case.layer, case.page_table, case.seq_lens, cu, backend="torch", max_q_len=64, **new)


def test_scales_of_heads_and_of_the_output_are_those_of_decode():
    case, q, k, v, cu = problem("fp8_e4m3")
    case = case.with_layer(k_scale=torch.tensor([0.5, 1.5]), v_scale=torch.tensor([2.0, 0.25]))
    check(case, q, cu)
    check(case, q, cu, k=k, v=v)
    once, _ = run(case, q, cu, k=k, v=v)
    twice, _ = run(case, q, cu, k=k, v=v, out_scale=2.0)
    torch.testing.assert_close(twice, 2 * once)


def test_without_new_rows_it_is_decode():
    case, q, _, _, cu = problem()
    out, lse = run(case, q, cu, window=11)
    same = tersekv.decode(
        q, case.layer, case.page_table, case.seq_lens, cu_seqlens_q=cu, window=11, return_lse=True, backend="torch"
    )
    assert torch.equal(out, same[0])
    assert torch.equal(lse, same[1])


def test_it_does_not_matter_whether_the_new_rows_are_in_the_cache():
    case, q, k, v, cu = problem("fp8_e4m3", [37], [9])
    before = run(case, q, cu, k=k, v=v)
    slots = [int(case.page_table[0, j // 16]) * 16 + j % 16 for j in range(28, 37)]
    tersekv.append(k, v, case.layer, torch.tensor(slots))
    after = run(case, q, cu, k=k, v=v)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def test_chunks_over_16_bits_are_the_whole_prompt():
    layer = tersekv.PagedKVCache.allocate(1, 4, 16, 2, 32, format="bf16")[0]
    k, v = torch.randn(50, 2, 32).bfloat16(), torch.randn(50, 2, 32).bfloat16()
    q, table = torch.randn(50, 4, 32), torch.tensor([[2, 0, 3, 1]])
    whole = tersekv.prefill(q, layer, table, torch.tensor([50]), torch.tensor([0, 50]), k=k, v=v)
    parts = []
    for start, stop in ((0, 20), (20, 21), (21, 50)):
        new = k[start:stop], v[start:stop]
        parts.append(
            tersekv.prefill(
                q[start:stop], layer, table, torch.tensor([stop]), torch.tensor([0, stop - start]), k=new[0], v=new[1]
            )
        )
        slots = torch.tensor([int(table[0, j // 16]) * 16 + j % 16 for j in range(start, stop)])
        tersekv.append(*new, layer, slots)
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)


def test_rows_behind_the_last_request_are_0():
    case, q, k, v, _ = problem("bf16", [20, 9], [4, 3])
    for new in ({}, {"k": k, "v": v}):
        out, lse = run(case, q, torch.tensor([0, 2, 5]), **new)
        assert (out[5:] == 0).all()
        assert lse[5:].isneginf().all()
        assert out[:5].isfinite().all()


def test_a_cache_without_pages_holds_no_prefix():
    layer = tersekv.PagedKVLayer(bf(0, 16, 2, 32), bf(0, 16, 2, 32), "bf16")
    q, k, v = torch.randn(5, 4, 32), torch.randn(5, 2, 32).bfloat16(), torch.randn(5, 2, 32).bfloat16()
    out = tersekv.prefill(q, layer, torch.zeros(1, 0).int(), torch.tensor([5]), torch.tensor([0, 5]), k=k, v=v)
    torch.testing.assert_close(out[0], v[0].float().repeat_interleave(2, 0))


@pytest.mark.parametrize("new_rows", [[], ["--new-rows"]])
def test_the_benchmark_judges_before_it_times(new_rows, monkeypatch, capsys):
    benchmark, options = (
        script("benchmarks/prefill.py"),
        ["--small", "--formats", "nvfp4", "--device", "cpu", *new_rows],
    )
    assert benchmark.main([*options, "--cells", "uneven", "--peers", "none"]) == 0
    assert "TFLOP/s" in capsys.readouterr().out
    monkeypatch.setattr(prefill, "prefill", lambda *args, **options: None)
    assert benchmark.main([*options, "--cells", "uneven", "--peers", "none"]) == 1
    assert "before anything is timed" in capsys.readouterr().out


def bf(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


BAD = [
    ({"k": bf(2, 2, 16)}, "k: want [T=2, H=2, D=32] bfloat16, got [2, 2, 16] bfloat16 (D as in q)"),
    ({"k": bf(2, 2, 32).half()}, "k: want [T=2, H=2, D=32] bfloat16, got [2, 2, 32] float16"),
    ({"k": torch.zeros(2, 2, 32), "q": torch.zeros(2, 4, 32)},
     "k: want [T=2, H=2, D=32] bfloat16 | float16, got [2, 2, 32] float32"),
    ({"v": bf(2, 2, 16).half()}, "v: want [T=2, H=2, Dv=16] bfloat16, got [2, 2, 16] float16"),
    ({"k": None}, "v: want None without k, got a tensor"),
    ({"v": None}, "v: want a tensor beside k, got None"),
    ({"cu_seqlens_q": torch.tensor([0, 2])}, "cu_seqlens_q: want [B+1=3] int32 | int64 | uint32, got [2] int64"),
    ({"cu_seqlens_q": None}, "cu_seqlens_q: want Tensor, got NoneType"),
    ({"window": 0}, "window: want a positive number of keys (own included) or None, got 0"),
    ({"max_q_len": 0}, "max_q_len: want a positive bound on the rows of a request, got 0"),
    ({"seq_lens": torch.tensor([3, 50])},
     "seq_lens: want at most 24 before the new tokens (max_pages * S), got 49 at 1"),
    ({"page_table": torch.full((2, 3), 4)}, "page_table: want page ids in [0, 4), got 4 at request 0"),
]  # fmt: skip


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(("changed", "message"), BAD, ids=[f"{i} {next(iter(c))}" for i, (c, _) in enumerate(BAD)])
def test_a_bad_call_says_what_is_wrong(changed, message, checked, monkeypatch):
    monkeypatch.setenv("TERSEKV_CHECKED", str(int(checked)))
    call = {
        "q": bf(2, 4, 32), "k": bf(2, 2, 32), "v": bf(2, 2, 16), "page_table": torch.zeros(2, 3).int(),
        "cache": tersekv.PagedKVCache.allocate(1, 4, 8, 2, 32, format="fp8_e4m3", head_dim_v=16)[0],
        "seq_lens": torch.tensor([3, 4]), "cu_seqlens_q": torch.tensor([0, 1, 2]),
    } | changed  # fmt: skip
    with pytest.raises((ValueError, TypeError)) as e:
        tersekv.prefill(**call, backend="torch")
    told = str(e.value)
    assert told == (message.replace("at request 0", "at [0, 0]") if checked else message)
