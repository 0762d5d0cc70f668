"""bench --ops sparse,block_sparse: prefills, and blocks of a K/V cache; their lists, counts, verdicts and summary."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch

from tersekv.cli import main
from tersekv.formats import kv_bytes_per_token
from tersekv.testing.bench import block_sparse, data, engine, measure, report, sparse
from tersekv.testing.bench.cases import (
    ALIKE_LISTS,
    BLOCK_FORMATS,
    CPU_QUICK,
    GPU,
    ONE_LIST,
    PER_HEAD,
    Case,
    grid,
    with_cells,
)
from tersekv.testing.bench.engine import OK, RED, Limits, Result
from tersekv.testing.bench.lists import Lists

CPU = torch.device("cpu")
LIMITS = Limits(copy=4e12, matmul=600e12)
LATENT = Case("sparse_prefill", "fp8_e4m3", 0, 20, heads=4, page=16, total=50, listed=9)
DECODE = Case("block_decode", "int8_per_token_head", 3, 61, heads=16, page=16, listed=32, block=8, lists=PER_HEAD)
PREFILL = replace(DECODE, op="block_prefill", requests=0, tokens=20, total=61)
CASES = (LATENT, DECODE, replace(DECODE, lists=ONE_LIST), PREFILL, replace(PREFILL, lists=ALIKE_LISTS))
by_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(data, "ROTATE", {"cpu": 1e5})
    monkeypatch.setattr(measure, "_CPU_SECONDS", 0.01)


def lists_of(case: Case, heads: int = 2) -> Lists:
    return Lists(case, data.lengths(case), heads)


def test_the_grid_holds_prefills_and_blocks():
    every = {c.id for c in grid(GPU, ("sparse", "block_sparse"))}
    for cell in ("1024 of 32768", "8192 of 32768"):
        assert all(f"sparse_prefill / bf16 / {cell} / H {h} / page 64 / 2048 listed" in every for h in (16, 64, 128))
    for name in BLOCK_FORMATS:
        for b in (1, 8, 32, 128):
            assert f"decode / {name} / {b} x 2048 / H 32 / page 64" in every
            for lists in (PER_HEAD, ONE_LIST):
                assert f"block_decode / {name} / {b} x 8192 / H 32 / page 64 / 16 blocks of 128 / {lists}" in every
        for lists in (PER_HEAD, ALIKE_LISTS):
            assert f"block_prefill / {name} / 8192 of 32768 / H 32 / page 64 / 16 blocks of 128 / {lists}" in every


def test_cells_named_are_all_that_is_timed():
    ops = "sparse", "block_sparse"
    assert {c.op for c in grid(with_cells(GPU, ["2x4096"]), ops)} == {"sparse", "decode", "block_decode"}
    assert {c.op for c in grid(with_cells(GPU, ["8of64"]), ops)} == {"sparse_prefill", "block_prefill"}
    assert {c.cell for c in grid(with_cells(GPU, ["2x300", "8of64", "7"]), ops)} == {"2 x 300", "8 of 64", "7"}


@pytest.mark.parametrize("case", [*CASES, replace(DECODE, uneven=True), replace(PREFILL, total=0)], ids=lambda c: c.id)
def test_lists_are_of_what_a_row_sees_and_counted_by_the_key(case):
    lists, reads, keys = lists_of(case), 0, set()
    rows = len(lists.indices)
    assert rows == (case.requests or case.tokens)
    for t in range(rows):
        request = t if case.requests else 0
        n = int(data.lengths(case)[request])
        visible_len = n if case.requests else n - rows + t + 1
        blocks = -(-visible_len // case.block)
        for head, row in enumerate(lists.indices[t].tolist()):
            entries = [x for x in row if x >= 0]
            assert max(Counter(entries).values()) == 1
            assert len(entries) == min(blocks, -(-case.listed // case.block))
            assert row == entries + [-1] * (len(row) - len(entries))
            assert blocks - 1 in entries
            assert max(entries) < blocks
            read = [j for x in entries for j in range(x * case.block, (x + 1) * case.block)]
            assert lists.positions(t, head).tolist() == [j for j in read if j < visible_len]
            reads += sum(j < visible_len for j in read)
            keys |= {(request, head, j) for j in read if j < n}
    assert (lists.reads, lists.keys) == (reads, len(keys))


def test_neighbours_share_the_entries_that_they_should():
    case, common = replace(PREFILL, tokens=1024, total=16384, listed=128), []
    for lists in (PER_HEAD, ALIKE_LISTS):
        groups = lists_of(replace(case, lists=lists)).indices.unflatten(0, (-1, 64)).tolist()
        common.append(
            [len(set.intersection(*({*row[head]} for row in rows))) / 16 for rows in groups for head in (0, 1)]
        )
    assert max(common[0]) < 0.1  # the last block, where it is the same
    assert {*common[1]} <= {14 / 16, 15 / 16, 1}
    assert 0.87 <= sum(common[1]) / len(common[1]) < 0.96


@by_case
def test_it_is_timed(case):
    r = engine.run(case, CPU)
    assert r.status == OK, r.reason
    assert r.error > 0


def test_bytes_are_of_distinct_keys_and_flops_of_all_that_are_read():
    p = block_sparse.BlockSparse(PREFILL, CPU)
    rows = p.lists.indices.nbytes + 2 * 20 * 16 * 128 * 2
    assert p.nbytes == p.lists.keys * kv_bytes_per_token(PREFILL.format, 1, 128) + rows
    assert p.flops == 4 * p.lists.reads * 2 * 128
    one = block_sparse.BlockSparse(replace(DECODE, lists=ONE_LIST), CPU)
    read = 3 * (3 * 8 + 5)  # three whole blocks, and the last one
    assert one.nbytes == read * kv_bytes_per_token(DECODE.format, 8, 128) + one.lists.indices.nbytes
    assert one.flops == 4 * read * 16 * 128


@by_case
@pytest.mark.parametrize("wrong", ["nothing", "another list", "a row"])
def test_a_wrong_result_is_red(case, wrong, monkeypatch):
    module, names = (sparse, ["mla_decode"]) if case is LATENT else (block_sparse, ["decode", "prefill"])

    def spoiled(real):
        def other(*args, indices, out, **options):
            if wrong == "nothing":
                return
            real(*args, indices=indices.flip(0) // 2 if wrong == "another list" else indices, out=out, **options)
            if wrong == "a row":
                out[-1, -1] *= 1.5

        return other

    for name in names:
        monkeypatch.setattr(module, name, spoiled(getattr(module, name)))
    assert engine.run(case, CPU).status == RED


def test_the_summary_compares_with_dense_decode_by_the_key():
    case = replace(DECODE, format="bf16")
    assert case.dense == Case("decode", "bf16", 3, 32, heads=16, page=16)
    assert LATENT.dense is None
    slow = replace(case, requests=9)
    times = [(case.dense, 10.0, 8e6), (case, 20.0, 8e6), (slow.dense, 10.0, 8e6), (slow, 10.0, 4e6), (PREFILL, 1.0, 1)]
    text = "\n".join(report.summary([Result(c, OK, us, 1e-3, "", 1, int(n)) for c, us, n in times], LIMITS))
    assert "keys per second over those of the dense decode over as many keys\n  bf16 " in text
    assert f"{PER_HEAD}  0.5x (2 cases), at least 0.5x: {case.id}" in text
    assert "dense" not in "\n".join(report.summary([Result(case, OK, 5.0, 1e-3, "", 1, 1)], LIMITS))


def test_the_command_takes_both_kinds_of_cells(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Limits, "of", lambda device: LIMITS)
    stored = tmp_path / "r.jsonl"
    argv = ["bench", "--device", "cpu", "--quick", "--ops", "sparse,block_sparse", "--formats", "fp8_e4m3"]
    assert main.main([*argv, "--peers", "none", "--cells", "2x300,5of300", "--json", str(stored)]) == 0
    assert "7 timed, 0 not run, 0 red, 0 failed" in capsys.readouterr().out
    lines = [json.loads(text) for text in stored.read_text().splitlines()]
    assert [r["op"] for r in lines] == [
        "sparse", "sparse_prefill", "decode", "block_decode", "block_decode", "block_prefill", "block_prefill"
    ]  # fmt: skip
    assert all(c.heads * c.tokens <= 1 << 17 for c in grid(CPU_QUICK, ("sparse", "block_sparse")))


def test_copies_of_long_caches_fit_a_gpu(monkeypatch):
    """A list reads 2 MB of a cache of a million tokens: as many copies as half of the free memory holds."""
    monkeypatch.setattr(data, "ROTATE", {"cuda": 4e8})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 << 30, 140 << 30))
    gpu = torch.device("cuda")
    assert data.rotations(gpu, 2 << 20) == 128
    assert data.rotations(gpu, 2 << 20, held=1 << 30) == 50
    assert data.rotations(gpu, 2 << 20, held=200 << 30) == 1
