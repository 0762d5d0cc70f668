"""What tersekv calls for in an engine's warm-up compiles every kernel that batches to come need, Hopper's and other."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

import tersekv
from tersekv.integrations.vllm_pages import FORMATS, pages_of
from tersekv.integrations.vllm_warm_up import DECODE_ROWS, JOBS, Limits, warm_up
from tersekv.ops.append import append
from tersekv.ops.decode import decode
from tersekv.ops.prefill import prefill

LIMITS = Limits(requests=12, rows=300, decode_rows=3)
HEADS, KV_HEADS, DIM, PAGE, COLUMNS = 32, 8, 128, 16, 64
OPTIONS = {"softmax_scale": 0.1, "window": None, "sinks": None, "softcap": 0.0}


def batch(counts: list[int]):
    """The calls of a batch with these rows of each request, as `vllm_attention` makes them."""
    few = next((i for i, n in enumerate(counts) if n > DECODE_ROWS), len(counts))
    t, rows = sum(counts), sum(counts[:few])
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    q, k, v = (torch.zeros(t, h, DIM, dtype=torch.bfloat16) for h in (HEADS, KV_HEADS, KV_HEADS))
    table, lens = torch.zeros(len(counts), COLUMNS, dtype=torch.int32), torch.zeros(len(counts), dtype=torch.int32)
    return q, k, v, table, lens, starts, few, rows


@pytest.mark.parametrize(
    ("compiled", "name"), [(80, "auto"), (90, "fp8"), (90, "int8_per_token_head")], indirect=["compiled"]
)
def test_no_kernel_is_compiled_after_the_warm_up(compiled, name):
    kind = FORMATS.get(name)
    dtype, row = (torch.bfloat16, 2 * DIM) if kind is None else (kind.dtype, kind.row_bytes(DIM, DIM))
    one = torch.ones(())
    pages = pages_of(torch.zeros(4, KV_HEADS, PAGE, row, dtype=dtype), name, DIM, one, one)
    q, _, _, table, lens, *_ = batch([1])
    first = SimpleNamespace(
        limits=LIMITS, block_table=table, seq_lens=lens, slot_mapping=torch.zeros(1, dtype=torch.int64)
    )
    for job in JOBS:
        for call in job(True, q, pages, first, OPTIONS):
            call()
    assert 0 < len(compiled) <= 60  # an engine waits for each
    warm, draw = set(compiled), random.Random(0)
    for _ in range(25):
        counts = sorted(draw.choice((1, 1, 1, 2, 3, 9, 16)) for _ in range(draw.randint(0, LIMITS.requests - 2)))
        counts = [counts[0]] * len(counts) if counts and draw.random() < 0.5 and counts[0] in (1, 3) else counts
        counts += [draw.randint(DECODE_ROWS + 1, 70) for _ in range(draw.randint(0 if counts else 1, 2))]
        q, k, v, table, lens, starts, few, n = batch(counts)
        append(k, v, pages, torch.full((len(q),), -1))
        if n:
            ragged = {} if {*counts[:few]} in ({1}, {LIMITS.decode_rows}) else {
                "cu_seqlens_q": starts[: few + 1], "max_q_len": max(counts[:few])
            }  # fmt: skip
            decode(q[:n], pages, table[:few], lens[:few], **ragged, **OPTIONS)
        if n < len(q):
            prefill(
                q[n:], pages, table[few:], lens[few:], starts[few:] - n, k=k[n:], v=v[n:], max_q_len=max(counts[few:]),
                **OPTIONS,
            )  # fmt: skip
        assert compiled == warm, (counts, compiled - warm)


@pytest.mark.parametrize(("compiled", "format"), [(80, "nvfp4"), (90, "fp8_per_token_head")], indirect=["compiled"])
def test_nor_after_sglangs(compiled, format):
    """Its batches, as `sglang_attention` makes them: single tokens, or prompts and chunks of any length, unsorted."""
    cache = tersekv.PagedKVCache.allocate(1, 4, PAGE, KV_HEADS, DIM, format=format)[0]
    q, _, _, table, lens, *_ = batch([1])
    limits = LIMITS._replace(decode_rows=1)
    first = SimpleNamespace(limits=limits, block_table=table, seq_lens=lens, slot_mapping=torch.zeros(1).long())
    for job in JOBS:
        for call in job(True, q, cache, first, OPTIONS):
            call()
    assert compiled
    warm, draw = set(compiled), random.Random(1)
    for _ in range(40):
        most = draw.choice((1, 2, 16, 17, 70, 300))
        counts = [draw.randint(1, most) for _ in range(draw.randint(1, LIMITS.requests))]
        while sum(counts) > LIMITS.rows:
            counts.remove(max(counts))
        q, k, v, table, lens, starts, *_ = batch(counts)
        append(k, v, cache, torch.full((len(q),), -1))
        rows = {} if max(counts) == 1 else {"cu_seqlens_q": starts, "max_q_len": max(counts)}
        if max(counts) > DECODE_ROWS:
            prefill(q, cache, table, lens, **rows, k=k, v=v, **OPTIONS)
        else:
            decode(q, cache, table, lens, **rows, **OPTIONS)
        assert compiled == warm, (counts, compiled - warm)


@pytest.mark.parametrize("compiled", [80, 90], indirect=True)
@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3", "nvfp4"])
def test_numbers_of_requests_and_rows_compile_no_kernel_anew(request, compiled, format):
    """But one for each size of batch whose lengths are summed at once (`at_once`)."""
    cache = tersekv.PagedKVCache.allocate(1, 4, PAGE, KV_HEADS, DIM, format=format)[0]
    for requests in (33, 64, 65, 144):
        q, _, _, table, lens, *_ = batch([1] * requests)
        decode(q, cache, table, lens, **OPTIONS)
        for more in (0, 1):
            q, _, _, table, lens, starts, *_ = batch([2] * (requests - 1) + [1 + more])
            decode(q, cache, table, lens, cu_seqlens_q=starts, max_q_len=2, **OPTIONS)
    splits = [kernel for kernel in compiled if "combine" not in kernel[0]]
    # Those of one row, and of two; up to 64 requests, and up to 256; on Hopper others where so few are cut that they
    # join themselves, or come in smaller tiles, and over 16 bits those of parts of the keys.
    hopper = request.node.callspec.params["compiled"] == 90
    assert (len(splits), len(compiled) - len(splits)) == ((8 if format == "bf16" else 6) if hopper else 4, 2)
    decoded = set(compiled)
    for requests in (33, 64, 65, 144):
        q, k, v, table, lens, starts, *_ = batch([70] * requests)
        for after in (0, 1):  # of requests that are decoded before
            prefill(
                q[70 * after :], cache, table[after:], lens[after:], starts[after:] - 70 * after, k=k[70 * after :],
                v=v[70 * after :], max_q_len=70, **OPTIONS,
            )  # fmt: skip
    assert len(compiled - decoded) == (2 if request.node.callspec.params["compiled"] == 80 else 1)


@pytest.mark.parametrize("name", ["fp8", "int8_per_token_head", "nvfp4+rotated"])
def test_the_cache_stays_as_it_is(name):
    kind, one = FORMATS[name], torch.ones(())
    raw = torch.full((4, 2, 16, kind.row_bytes(32, 32)), 1, dtype=torch.uint8)
    pages = pages_of(raw.view(kind.dtype), name, 32, one, one)
    q, _, _, table, lens, *_ = batch([1])
    index = {"block_table": table, "seq_lens": lens, "slot_mapping": torch.zeros(1, dtype=torch.int64)}
    warm_up(
        torch.zeros(1, 4, 32, dtype=q.dtype), pages, SimpleNamespace(limits=Limits(4, 40, 2), **index), True, OPTIONS
    )
    assert (raw == 1).all()
