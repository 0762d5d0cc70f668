"""Caches dealt across ranks, against one process with the whole cache; gloo on CPUs. The ranks run cp_worker.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import cp_worker
import pytest
import torch
import torch.multiprocessing as mp
from no_sync import NoHostReads

import tersekv
from tersekv.ops import shards
from tersekv.ops.context_parallel import (
    ContextParallel,
    ExchangeCost,
    exchange_cost,
    shard_heads,
    shard_seq_lens,
    shard_slot_mapping,
)

ROOT = Path(__file__).parents[2]


@cache
def results(world: int) -> list[dict]:
    """Of each rank, by case: None or an error. All cases share one start of the processes."""
    with TemporaryDirectory() as folder:
        files = [Path(folder, f"{rank}.json") for rank in range(world)]
        try:
            mp.spawn(cp_worker.run_all, (world, folder), nprocs=world)
            return [json.loads(f.read_text()) for f in files]
        except Exception as e:
            return [dict.fromkeys(cp_worker.NAMES, f"the ranks did not finish: {e}")] * world


@pytest.mark.parametrize("name", cp_worker.NAMES)
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_agree_with_one_process(world, name):
    for rank, found in enumerate(results(world)):
        assert found.get(name, "did not run") is None, f"rank {rank}: {found.get(name, 'did not run')}"


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "hangs"])
def test_a_rank_that_leaves_is_an_error_in_bounded_time(dies):
    seconds, world = 3.0, 2
    with TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        ranks = [
            context.Process(target=cp_worker.leave_or_wait, args=(r, world, folder, seconds, dies))
            for r in range(world)
        ]
        for p in ranks:
            p.start()
        end = time.monotonic() + 60
        for p in ranks:
            p.join(max(end - time.monotonic(), 0))
        hung = [r for r, p in enumerate(ranks) if p.is_alive()]
        for r in hung:
            ranks[r].kill()
        assert not hung
        took, error = json.loads(Path(folder, "0.json").read_text())
        assert error != "none"
        assert took < seconds + 5, error


@pytest.mark.parametrize("kv", [True, False], ids=["kv", "mla"])
def test_one_rank_needs_no_process_group(kv):
    case = cp_worker.Case("alone", kv=kv, drafts=3, sinks=kv, kv_heads=2 if kv else 1, interleave=4)
    p = cp_worker.Problem(case, 0, 1)
    for x, want in zip(p.sharded(p.group()), p.whole(), strict=True):
        assert torch.equal(x, want)
    assert ContextParallel().workspace_bytes(64, 8, 128, 128) == 0


def test_one_rank_takes_masks():
    p = cp_worker.Problem(cp_worker.Case("mask", drafts=2, lens=(5, 9)), 0, 1)
    layer, table = p.mine()
    mask = torch.tensor([[1, 0], [2, 0]] * 2, dtype=torch.uint16)
    out = ContextParallel().decode(p.q, layer, table, p.seq_lens, mask=mask)
    assert torch.equal(out, tersekv.decode(p.q, layer, table, p.seq_lens, mask=mask))


def test_given_lengths_are_for_one_row_a_request():
    cp, lens, table = ContextParallel(), torch.tensor([5, 9]), torch.zeros(2, 3, dtype=torch.int32)
    assert cp._plain(None, 2, table, lens, None, None) is None
    assert cp._plain(cp.local_seq_lens(lens), 2, table, lens, None, None).seq_lens.tolist() == [5, 9]
    with pytest.raises(ValueError, match=r"local_seq_lens: want \[B=2\], got \[1\]"):
        cp._plain(lens[:1], 2, table, lens, None, None)
    for rows, cu, window in ((4, None, None), (2, torch.tensor([0, 1, 2]), None), (2, None, 3)):
        with pytest.raises(tersekv.UnsupportedError, match="local_seq_lens: want one query row"):
            cp._plain(lens, rows, table, lens, cu, window)


def test_one_rank_takes_given_lengths_as_more_ranks_do():
    p = cp_worker.Problem(cp_worker.Case("alone", lens=(5, 9)), 0, 1)
    layer, table = p.mine()
    wrong = p.seq_lens - 1
    out = ContextParallel().decode(p.q, layer, table, p.seq_lens, local_seq_lens=wrong)
    assert torch.equal(out, tersekv.decode(p.q, layer, table, wrong))
    with pytest.raises(ValueError, match=r"local_seq_lens: want \[B=2\], got \[1\]"):
        ContextParallel().decode(p.q, layer, table, p.seq_lens, local_seq_lens=wrong[:1])


@pytest.mark.parametrize("interleave", [1, 3, 16])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_every_token_has_one_owner(world, interleave):
    lens = torch.arange(200)
    owner = lens // interleave % world
    for rank in range(world):
        want = torch.tensor([int((owner[:n] == rank).sum()) for n in lens])
        got = shard_seq_lens(lens, rank, world, interleave)
        assert got.dtype == torch.int32
        assert torch.equal(got.long(), want)


@pytest.mark.parametrize("interleave", [1, 4, 8])
def test_local_slots_are_dense_and_in_order(interleave):
    world, size, tokens = 3, 8, 100
    pool = tersekv.PagePool(9, size * world)
    pool.add("other", 30)
    pool.add("ours", tokens)
    slots = pool.slot_mapping(["ours"], [tokens])
    pages = torch.tensor(pool.pages("ours"))
    for rank in range(world):
        local = shard_slot_mapping(slots, rank, world, size, interleave)
        mine = local[local >= 0]
        assert len(mine) == int(shard_seq_lens(torch.tensor([tokens]), rank, world, interleave))
        j = torch.arange(len(mine))
        assert torch.equal(mine, pages[j // size] * size + j % size)


def test_a_negative_slot_is_skipped_on_every_rank():
    slots = torch.tensor([-1, 5, -(2**31), 40], dtype=torch.int64)
    for rank in range(2):
        assert (shard_slot_mapping(slots, rank, 2, 16, 16)[[0, 2]] == -1).all()


def test_bad_deals_are_refused():
    slots = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="page_size: want a multiple of 3"):
        shard_slot_mapping(slots, 0, 2, 16, 3)
    with pytest.raises(ValueError, match=r"rank: want a rank in \[0, 2\)"):
        shard_seq_lens(slots, 2, 2)
    with pytest.raises(ValueError, match="interleave: want a positive"):
        ContextParallel(interleave=0)
    with pytest.raises(TypeError, match="interleave: want int, got str '16'"):
        ContextParallel(interleave="16")
    with pytest.raises(TypeError, match="slot_mapping: want Tensor, got list"):
        shard_slot_mapping([0], 0, 2, 16)
    with pytest.raises(ValueError, match=r"slot_mapping: want int32 \| int64 \| uint32, got float32"):
        shard_slot_mapping(slots.float(), 0, 2, 16)
    with pytest.raises(ValueError, match="exchange: want 'all_to_all' or"):
        ContextParallel(exchange="ring")
    with pytest.raises(ValueError, match="wire_dtype: want fp32 for a reduce_scatter"):
        ContextParallel(exchange="reduce_scatter", wire_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "world"), [(32, 8, 4), (32, 8, 8), (32, 2, 8), (128, 1, 8), (16, 4, 1)]
)
def test_head_shards_fit_their_kv_heads(q_heads, kv_heads, world):
    group = q_heads // kv_heads
    seen = []
    for rank in range(world):
        shard = shard_heads(q_heads, kv_heads, rank, world)
        seen += range(shard.q.start, shard.q.stop)
        needed = {h // group for h in range(shard.q.start, shard.q.stop)}
        assert needed == set(range(shard.kv.start, shard.kv.stop))
        same = [r for r in range(world) if shard_heads(q_heads, kv_heads, r, world).kv == shard.kv]
        assert same == [r for r in range(world) if r // shard.replicas == rank // shard.replicas]
    assert seen == list(range(q_heads))


def test_uneven_heads_are_refused():
    with pytest.raises(ValueError, match="num_q_heads: want a multiple of world=3"):
        shard_heads(32, 8, 0, 3)
    with pytest.raises(ValueError, match="num_q_heads: want a multiple of 8, got 12"):
        shard_heads(12, 8, 0, 4)
    with pytest.raises(ValueError, match="num_kv_heads: want a divisor or a multiple of 4"):
        shard_heads(24, 6, 0, 4)


def test_windows_that_match_the_deal_use_the_cache_as_it_is():
    deal, lens = shards.TokenSharding(1, 4, 8), torch.tensor([100, 7])
    table = torch.zeros(2, 5, dtype=torch.int32)
    fits = shards.local_rows(deal, 2, table, lens, None, 1, window=64, page_size=8)
    assert (fits.window, fits.by_token) == (16, False)
    other = shards.local_rows(deal, 2, table, lens, None, 1, window=60, page_size=8)
    assert (other.window, other.by_token) == (None, True)
    assert other.page_table.shape[1] == deal.most_owned(60) == 16


def test_tokens_as_pages_need_a_common_pitch():
    layer = tersekv.PagedKVCache.allocate(1, 3, 8, 2, 32, format="bf16")[0]
    wide = torch.zeros(3, 9, 2, 32, dtype=torch.bfloat16)[:, :8]
    with pytest.raises(tersekv.UnsupportedError, match="window: want a multiple of interleave"):
        shards.token_pages(tersekv.PagedKVLayer(layer.k, wide, "bf16"))


def test_local_rows_read_nothing_on_the_host():
    lens, table = torch.tensor([100, 7, 0]), torch.zeros(3, 5, dtype=torch.int32)
    cu = torch.tensor([0, 1, 4, 6])
    with NoHostReads():
        for rows, starts, window, masks in ((3, None, None, True), (6, None, None, True), (6, cu, None, True),
                                            (6, cu, None, False), (6, cu, 13, True), (6, None, 32, True)):  # fmt: skip
            deal = shards.TokenSharding(1, 4, 8)
            shards.local_rows(deal, rows, table, lens, starts, 3, window=window, page_size=8, masks=masks)


def test_the_example_runs_as_it_stands():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, ROOT / "examples" / "context_parallel.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("relative difference") == 1
    alone = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "context_parallel.py"], capture_output=True, text=True, env=alone
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 ranks, 4 heads each, relative difference")


def test_the_benchmark_judges_and_times_every_case_on_a_cpu(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [ROOT / "benchmarks" / "context_parallel.py", "--device", "cpu", "--seconds", "0", "--json"]
    done = subprocess.run([*command, *script, tmp_path / "lines"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert len({(r["name"], r["exchange"], r["wire"], r["sharded_q"]) for r in results}) == 16
    assert all(min(r["step_us"], r["attend_us"], r["wire_us"], r["one_gpu_us"]) > 0 for r in results)
    assert all(r["world"] == 2 and r["cache_bytes"] * 2 == r["cache_bytes_one_gpu"] for r in results)


# What docs/context_parallel.md fits to the measurements: seconds a collective, bytes a second, seconds of attention a
# token, seconds of local work around the messages of either exchange.
LATENCY, BANDWIDTH, TOKEN = 10.5e-6, 145e9, 0.45e-9
LOCAL = {"all_to_all": 15e-6, "reduce_scatter": 43e-6}


def cost_table() -> list[str]:
    """The rows of which docs/context_parallel.md shows some, from its stated numbers."""
    rows, heads, length = 8, 128, 1_000_000
    lines = []
    for world in (1, 2, 4, 8, 16, 32, 64, 72):
        attention = rows * length * TOKEN / world
        cost = exchange_cost("all_to_all", world, rows, heads, 576, 512, wire_bytes=2)
        seconds = cost.seconds(LATENCY, BANDWIDTH) + (LOCAL["all_to_all"] if world > 1 else 0)
        lines.append(f"| {world} | {' | '.join(f'{x * 1e6:.0f}' for x in (attention, seconds, attention + seconds))} |")
    return lines


def kept() -> list[dict]:
    return json.loads((ROOT / "benchmarks" / "results" / "h200_context_parallel.json").read_text())["results"]


def measured_table() -> list[str]:
    """The rows of measurements of which docs/context_parallel.md shows some, from the stored results."""
    lines = []
    for r in kept():
        if r["exchange"] == "all_to_all" and r["wire"] == "float32":
            continue
        step, attend, alone = r["step_us"], r["attend_us"], r["one_gpu_us"]
        cells = [r["name"].replace("x", "×") + ", q whole" * (not r["sharded_q"]), r["world"], r["exchange"]]
        cells += [f"{x:.0f}" for x in (alone, step, attend, r["wire_us"])]
        lines.append(f"| {' | '.join(map(str, cells))} | {alone / step:.2f} × |")
    return lines


@pytest.mark.parametrize(("table", "row"), [(cost_table, r"\| \d+ \| \d"), (measured_table, r"\| (gqa|mla) ")])
def test_tables_of_the_docs_are_what_the_model_and_the_results_say(table, row):
    text = (ROOT / "docs" / "context_parallel.md").read_text()
    lines = [line for line in text.splitlines() if re.match(row, line)]
    assert len(lines) > 3
    assert set(lines) <= set(table())


def test_the_fitted_latency_and_bandwidth_explain_the_measured_messages():
    for r in kept():
        cost = ExchangeCost(r["bytes_sent"], r["collectives"])
        assert abs(cost.seconds(LATENCY, BANDWIDTH) * 1e6 - r["wire_us"]) < 8, r
