"""Whole attentions of sparse models as functions: from an indexer's keys to outputs, beside dense fp64 formulas.

The formulas are the models' own (MiniMax M3, QSA of Qwen4Exp): they score, sort and mask over all keys at once.
"""

from __future__ import annotations

import pytest
import torch

import tersekv

H, G, D = 2, 4, 64  # KV heads, query heads of each, head size
LENS = [300, 41, 6]  # tokens of each request
NEW = [70, 3, 6]  # of these, rows that attend: a prefill, drafts, a whole prompt
CACHED = "bf16"


def rounded(*shape):
    """Numbers that 16 bits hold."""
    return torch.randn(*shape).to(torch.bfloat16)


def paged(page_size, records):
    """A pool with a request for each entry, in pages that are not in order, and the page table [B, max_pages]."""
    pool = tersekv.PagePool(sum(-(-n // page_size) + 1 for n in records), page_size)
    for half in (lambda n: n // 2, lambda n: n - n // 2):
        for b, n in enumerate(records):
            pool.extend(b, half(n)) if b in pool else pool.add(b, half(n))
    return pool, pool.page_table(range(len(records)))


@pytest.fixture
def batch():
    """Queries [T, Hq, D], K and V of each request, their cache, page table, lengths and first rows."""
    torch.manual_seed(0)
    size = 16
    pool, table = paged(size, LENS)
    cache = tersekv.PagedKVCache.allocate(1, pool.num_pages, size, H, D, format=CACHED)[0]
    k, v = ([rounded(n, H, D) for n in LENS] for _ in range(2))
    tersekv.append(torch.cat(k), torch.cat(v), cache, pool.slot_mapping(range(len(LENS)), LENS))
    lens = torch.tensor(LENS, dtype=torch.int32)
    cu = torch.tensor([0, *torch.tensor(NEW).cumsum(0)], dtype=torch.int32)
    return rounded(sum(NEW), H * G, D), k, v, cache, table, lens, cu


def attend(q, cache, table, lens, cu, indices, index_lens, block):
    """Through both functions: they read the same lists."""
    options = {"indices": indices, "index_lens": index_lens, "block_size": block, "cu_seqlens_q": cu}
    outs = [f(q, cache, table, lens, max_q_len=max(NEW), **options) for f in (tersekv.decode, tersekv.prefill)]
    assert (outs[0].double() - outs[1].double()).norm() < 4e-3 * outs[0].double().norm()
    return outs[0].double()


def dense(q, k, v, seen):
    """fp64 attention of one request: q [T, Hq, D], k, v [N, H, D], seen [T, H, N] bool."""
    q = q.double().unflatten(1, (H, G))
    s = torch.einsum("thgd,nhd->thgn", q, k.double()) * D**-0.5
    p = s.masked_fill(~seen[:, :, None], float("-inf")).softmax(-1)
    return torch.einsum("thgn,nhd->thgd", p, v.double()).flatten(1, 2)


def positions(n, new):
    return torch.arange(n - new, n)


def requests(cu):
    """(request, its rows) of each."""
    return [(b, slice(int(cu[b]), int(cu[b + 1]))) for b in range(len(LENS))]


def best(scores, count):
    """The largest of fp64 scores that are not −∞, of equal ones the first: a set."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    return {i for i in order[:count] if scores[i] > float("-inf")}


@pytest.mark.parametrize(("block", "count", "first", "last"), [(32, 4, 1, 2), (16, 3, 0, 1), (128, 2, 0, 0)])
def test_minimax_m3(batch, block, count, first, last):
    """A list of blocks for each KV head. A block scores as its largest key does; the first and the last blocks are read
    in any case, and count."""
    q, k, v, cache, table, lens, cu = batch
    index = tersekv.PagedIndexCache.allocate(1, cache.num_pages, cache.page_size, head_dim=128, format="bf16")[0]
    keys, queries = [rounded(n, 128) for n in LENS], rounded(len(q), H, 128)
    slots = torch.cat([table[b, torch.arange(n) // 16].long() * 16 + torch.arange(n) % 16 for b, n in enumerate(LENS)])
    tersekv.index_append(torch.cat(keys), index, slots)
    chosen, counts = tersekv.index_select(
        queries, None, index, table, lens, count, cu_seqlens_q=cu, max_q_len=max(NEW), heads="each", relu=False,
        reduce_blocks=block, keep_first=first, keep_last=last,
    )  # fmt: skip
    out = attend(q, cache, table, lens, cu, chosen, counts, block)
    for b, rows in requests(cu):
        seen = torch.zeros(NEW[b], H, LENS[b], dtype=torch.bool)
        scores = torch.einsum("thd,nd->thn", queries[rows].double(), keys[b].double())
        for t, pos in enumerate(positions(LENS[b], NEW[b]).tolist()):
            blocks = pos // block + 1
            forced = {*range(min(first, blocks)), *range(max(0, blocks - last), blocks)}
            for h in range(H):
                each = [scores[t, h, i * block : min((i + 1) * block, pos + 1)].max().item() for i in range(blocks)]
                each = [float("-inf") if i in forced else x for i, x in enumerate(each)]
                read = forced | best(each, count - len(forced))
                assert read == {x for x in chosen[rows][t, h].tolist() if x >= 0}
                for i in read:
                    seen[t, h, i * block : min((i + 1) * block, pos + 1)] = True
        want = dense(q[rows], k[b], v[b], seen)
        assert (out[rows] - want).norm() < 4e-3 * want.norm()


@pytest.mark.parametrize("count", [3, 12, 512])
def test_qsa(batch, count):
    """One list of groups of 4 tokens for all heads. A group's key is the mean of its tokens'; the open group, which has
    none yet, is read in any case, and does not count."""
    r, heads = 4, 8
    q, k, v, cache, table, lens, cu = batch
    pool, index_table = paged(8, [n // r for n in LENS])
    index = tersekv.PagedIndexCache.allocate(1, pool.num_pages, 8, head_dim=128, format="bf16")[0]
    raw, queries = [rounded(n, 128) for n in LENS], rounded(len(q), heads, 128)
    keys = [x[: len(x) // r * r].unflatten(0, (-1, r)).float().mean(1).to(torch.bfloat16) for x in raw]
    groups = [len(x) for x in keys]
    tersekv.index_append(torch.cat(keys), index, pool.slot_mapping(range(len(LENS)), groups))
    chosen, counts = tersekv.index_select(
        queries, None, index, index_table, lens, count, cu_seqlens_q=cu, max_q_len=max(NEW), ratio=r,
        scale=128**-0.5, open_group=True,
    )  # fmt: skip
    out = attend(q, cache, table, lens, cu, chosen[:, None], counts, r)
    for b, rows in requests(cu):
        seen = torch.zeros(NEW[b], H, LENS[b], dtype=torch.bool)
        scores = torch.einsum("thd,nd->thn", queries[rows].double(), keys[b].double()).relu().sum(1) * 128**-0.5
        for t, pos in enumerate(positions(LENS[b], NEW[b]).tolist()):
            visible = (pos + 1) // r
            read = best(scores[t, :visible].tolist(), count) | ({visible} if (pos + 1) % r else set())
            assert read == {x for x in chosen[rows][t].tolist() if x >= 0}
            for i in read:
                seen[t, :, i * r : min((i + 1) * r, pos + 1)] = True
        want = dense(q[rows], k[b], v[b], seen)
        assert (out[rows] - want).norm() < 4e-3 * want.norm()
