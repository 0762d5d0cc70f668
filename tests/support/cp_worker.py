"""What every rank of tests/serving/test_context_parallel.py runs: each case against one process with the whole cache.

All ranks make the same problem from the same seed, keep their part of it, and compare their share of the heads with a
decode over the whole cache. Slots that a rank does not own are 0xFF bytes, dead page-table entries huge.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from no_sync import NoHostReads
from paged_case import HUGE, nan_like, poison

import tersekv
from tersekv.ops import context_parallel, exchange
from tersekv.ops.context_parallel import ContextParallel, exchange_cost, shard_seq_lens, shard_slot_mapping

SIZE = 8  # slots of a page on a rank
LENS = (1, 37, 0, 150, 16, 64)
LATENT, ROTARY = 128, 32


@dataclass(frozen=True)
class Case:
    """kv: K/V cache, else latent. lens count the tokens of all ranks; q_lens None: `drafts` rows a request."""

    name: str
    kv: bool = True
    format: str = "bf16"
    lens: tuple[int, ...] = LENS
    drafts: int = 1
    q_lens: tuple[int, ...] | None = None
    padding: int = 0  # query rows after the last request
    interleave: int = SIZE
    exchange: str = "all_to_all"
    heads: int = 8  # of all ranks
    kv_heads: int = 2
    sharded_q: bool = True
    window: int | None = None
    sinks: bool = False
    softcap: float = 0.0
    scale: bool = False  # softmax_scale and out_scale are tensors
    dtype: torch.dtype = torch.float32
    wire: torch.dtype = torch.float32
    index: torch.dtype = torch.int32
    workspace: bool = False
    given: bool = False  # out and lse are strided tensors of the caller
    parts: bool = False  # q as (q_nope, q_pe)
    layout: str = "NHD"
    packed: bool = False
    scales: str = "apart"
    local: bool = False  # the rank's own lengths are given
    tolerance: float = 1e-5


BOTH = ("all_to_all", "reduce_scatter")
CASES = [
    *[Case(f"{x}-every-{i}", exchange=x, interleave=i) for x in BOTH for i in (1, 4, SIZE)],
    *[Case(f"{x}-replicated-q", exchange=x, sharded_q=False, sinks=True) for x in BOTH],
    *[Case(f"{x}-heads-do-not-divide", exchange=x, sharded_q=False, heads=6, sinks=True, drafts=2) for x in BOTH],
    *[Case(f"{x}-fewer-heads-than-ranks", exchange=x, sharded_q=False, heads=1, kv_heads=1) for x in BOTH],
    *[Case(f"{x}-sinks", exchange=x, sinks=True, interleave=1) for x in BOTH],
    *[Case(f"{x}-nobody-holds-a-token", exchange=x, lens=(0, 0), sinks=True) for x in BOTH],
    *[Case(f"{x}-no-requests", exchange=x, lens=()) for x in BOTH],
    *[Case(f"{x}-workspace", exchange=x, workspace=True, given=True, sinks=True) for x in BOTH],
    *[Case(f"{x}-bf16", exchange=x, dtype=torch.bfloat16, tolerance=3e-3) for x in BOTH],
    *[Case(f"drafts-every-{i}", drafts=5, lens=(3, 37, 0, 150, 9), interleave=i) for i in (1, 4, SIZE)],
    *[Case(f"{x}-lengths-given", exchange=x, local=True, sinks=True) for x in BOTH],
    Case("mla-lengths-given", kv=False, local=True, kv_heads=1, interleave=4),
    Case("many-drafts", drafts=40, lens=(37, 150), interleave=4),
    Case("ragged-drafts", q_lens=(1, 4, 2, 0, 3, 9), padding=3, sinks=True),
    Case("ragged-drafts-int64", q_lens=(1, 4, 2, 0, 3, 9), index=torch.int64, interleave=1),
    Case("uint32", index=torch.uint32, drafts=2, window=11),
    *[Case(f"window-{w}", window=w, interleave=4) for w in (1, 5, 16, 48, 400)],
    *[Case(f"window-{w}-drafts", window=w, drafts=3, sinks=True) for w in (7, 32)],
    Case("window-ragged", window=19, q_lens=(1, 4, 2, 0, 3, 9), padding=2, interleave=1),
    Case("window-hnd", window=21, layout="HND", interleave=1),
    Case("window-packed", window=21, packed=True),
    Case("window-inline", window=21, drafts=2, scales="inline", format="fp8_per_token_head"),
    Case("window-hnd-inline", window=21, scales="inline", layout="HND", format="int8_per_token_head"),
    Case("softcap-and-scales", softcap=3.0, scale=True, sinks=True),
    *[Case(f, format=f, drafts=2) for f in ("fp8_e4m3", "fp8_e5m2", "int8_per_token_head", "nvfp4")],
    Case("int4_per_token_head", format="int4_per_token_head", drafts=2),
    Case("wire-bf16", wire=torch.bfloat16, dtype=torch.bfloat16, tolerance=3e-3),
    Case("wire-fp16", wire=torch.float16, tolerance=6e-4),
    *[Case(f"mla-{x}", kv=False, exchange=x, kv_heads=1) for x in BOTH],
    Case("mla-drafts", kv=False, drafts=3, lens=(2, 37, 0, 150), interleave=4, parts=True, kv_heads=1),
    Case("mla-ragged", kv=False, q_lens=(1, 4, 2, 0, 3, 9), padding=1, interleave=1, scale=True, kv_heads=1),
    Case("mla-replicated-q", kv=False, sharded_q=False, heads=6, kv_heads=1, workspace=True, given=True),
    Case("mla-fp8_ds_mla", kv=False, format="fp8_ds_mla", kv_heads=1, dtype=torch.bfloat16, tolerance=3e-3),
    Case("mla-fp8_e4m3", kv=False, format="fp8_e4m3", kv_heads=1, wire=torch.bfloat16, tolerance=3e-3),
]  # fmt: skip


class Problem:
    """The tensors of a case: the whole cache, and this rank's."""

    def __init__(self, c: Case, rank: int, world: int) -> None:
        self.c, self.rank, self.world = c, rank, world
        self.random = torch.Generator().manual_seed(len(c.name) + sum(c.lens))
        pool = tersekv.PagePool(sum(-(-n // (SIZE * world)) for n in c.lens) + 2, SIZE * world)
        pool.add("dead", 1)  # page 0 belongs to nobody here
        requests = list(range(len(c.lens)))
        for r in requests:
            pool.add(r, c.lens[r])
        self.pages = pool.num_pages
        self.slots = pool.slot_mapping(requests, c.lens)
        self.table = pool.page_table(requests, max_pages=max([len(pool.pages(r)) for r in requests], default=0) + 1)
        self.seq_lens = torch.tensor(c.lens, dtype=torch.int32)
        self.rows = sum(c.q_lens) + c.padding if c.q_lens else c.drafts * len(c.lens)
        self.cu = None if c.q_lens is None else torch.tensor([0, *c.q_lens]).cumsum(0).to(c.index)
        self.d, self.dv = (64, 32) if c.kv and not c.packed else (64, 64)
        if not c.kv:
            self.d, self.dv = LATENT + ROTARY, LATENT
        self.q = self.normal(self.rows, c.heads, self.d).to(c.dtype)
        self.sinks = self.normal(c.heads) if c.sinks else None
        self.new = [self.normal(len(self.slots), n) for n in self.widths()]

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random)

    def widths(self) -> tuple[int, int]:
        return (self.c.kv_heads * self.d, self.c.kv_heads * self.dv) if self.c.kv else (LATENT, ROTARY)

    def layer(self, size: int, slots: torch.Tensor):
        """A cache with pages of `size` slots, into which all tokens are appended that have a slot."""
        c = self.c
        if not c.kv:
            layer = tersekv.PagedLatentCache.allocate(
                1, self.pages, size, format=c.format, kv_lora_rank=LATENT, qk_rope_head_dim=ROTARY
            )[0]
            for x in filter(torch.is_tensor, (layer.ckv, layer.kpe, layer.ckv_scale_cache)):
                poison(x)
            tersekv.mla_append(*self.new, layer, slots)
            return layer
        layer = tersekv.PagedKVCache.allocate(
            1, self.pages, size, c.kv_heads, self.d, head_dim_v=self.dv, format=c.format, layout=c.layout,
            packed=c.packed, scales=c.scales,
        )[0]  # fmt: skip
        for x in filter(torch.is_tensor, (layer.k, layer.v, layer.k_scale_cache, layer.v_scale_cache)):
            poison(x)
        tersekv.append(*(x.unflatten(1, (c.kv_heads, -1)) for x in self.new), layer, slots)
        return layer

    def mine(self) -> tuple:
        """This rank's layer and page table. Its pages have numbers of their own, in another order on every rank."""
        slots = shard_slot_mapping(self.slots, self.rank, self.world, SIZE, self.c.interleave)
        order = torch.arange(self.pages).roll(self.rank + 1)
        slots = torch.where(slots >= 0, order[slots // SIZE] * SIZE + slots % SIZE, slots)
        owned = shard_seq_lens(self.seq_lens, self.rank, self.world, self.c.interleave)
        live = torch.arange(self.table.shape[1]) * SIZE < owned[:, None]
        table = torch.where(live, order[self.table.clamp(min=0)], HUGE)
        return self.layer(SIZE, slots), table.to(self.c.index)

    def options(self) -> dict:
        c = self.c
        options: dict = {"cu_seqlens_q": self.cu, "max_q_len": max(c.q_lens) if c.q_lens else None}
        scale = self.d**-0.5
        options |= {"softmax_scale": torch.full((1,), scale) if c.scale else scale}
        options |= {"out_scale": torch.full((1,), 3.0) if c.scale else 1.0, "return_lse": True}
        return options | ({"window": c.window, "softcap": c.softcap} if c.kv else {})

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE of one process with the whole cache."""
        size = SIZE * self.world
        options = self.options() | ({"sinks": self.sinks} if self.c.kv else {})
        op = tersekv.decode if self.c.kv else tersekv.mla_decode
        table = torch.where(self.table >= 0, self.table, HUGE)
        return op(self.q.float(), self.layer(size, self.slots), table, self.seq_lens, **options)

    def sharded(self, cp: ContextParallel) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's heads of both, through the group."""
        c, heads = self.c, self.heads()
        layer, table = self.mine()
        given = heads if c.sharded_q else slice(None)
        q, options = self.q[:, given], self.options()
        if c.kv:
            options |= {"sinks": None if self.sinks is None else self.sinks[given]}
        if c.given:
            share = heads.stop - heads.start
            options["out"] = nan_like(share, self.rows, self.dv + 8)[..., : self.dv].transpose(0, 1).to(c.dtype)
            options["lse"] = nan_like(share, self.rows).T
        if c.local:
            options["local_seq_lens"] = cp.local_seq_lens(self.seq_lens)
        op = cp.decode if c.kv else cp.mla_decode
        parts = (q[..., :LATENT], q[..., LATENT:]) if c.parts else q
        out, lse = op(parts, layer, table, self.seq_lens.to(c.index), **options)
        if c.given:
            assert out is options["out"]
            assert lse is options["lse"]
        assert out.dtype == c.dtype
        return out, lse

    def heads(self) -> slice:
        share = -(-self.c.heads // self.world)
        return slice(min(self.rank * share, self.c.heads), min((self.rank + 1) * share, self.c.heads))

    def group(self) -> ContextParallel:
        c = self.c
        options = {"interleave": c.interleave, "exchange": c.exchange, "sharded_q": c.sharded_q, "wire_dtype": c.wire}
        cp = ContextParallel(**options)
        if not c.workspace:
            return cp
        heads = self.heads().stop - self.heads().start if c.sharded_q else c.heads
        need = cp.workspace_bytes(self.rows, heads, self.d, self.dv, c.dtype)
        return ContextParallel(**options, workspace=torch.full((need,), 0xFF, dtype=torch.uint8))


def check_against_whole(c: Case) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    p = Problem(c, rank, world)
    out, lse = p.sharded(p.group())
    want_out, want_lse = (x[:, p.heads()] for x in p.whole())
    torch.testing.assert_close(lse, want_lse, atol=1e-4, rtol=0)
    error = (out.double() - want_out.double()).norm() / max(float(want_out.double().norm()), 1e-30)
    assert error <= c.tolerance, f"relative norm {float(error):.2e}, want at most {c.tolerance:.0e}"
    assert (out[lse == -torch.inf] == 0).all()


def check_append() -> None:
    """Owned rows are the whole cache's, to the byte; the others are untouched."""
    rank, world = dist.get_rank(), dist.get_world_size()
    p = Problem(Case("append", format="fp8_per_token_head", interleave=4), rank, world)
    slots = shard_slot_mapping(p.slots, rank, world, SIZE, 4)
    ours, whole = p.layer(SIZE, slots), p.layer(SIZE * world, p.slots)
    own = slots >= 0
    for name in ("k", "v", "k_scale_cache", "v_scale_cache"):
        a, b = (getattr(x, name).flatten(0, 1).view(torch.uint8) for x in (ours, whole))
        assert torch.equal(a[slots[own]], b[p.slots[own]])
        rest = torch.ones(len(a), dtype=torch.bool)
        rest[slots[own]] = False
        assert (a[rest] == 0xFF).all()
    owned = shard_seq_lens(p.seq_lens, rank, world, 4)
    assert int(owned.sum()) == int(own.sum())


def check_bytes_on_the_wire(how: str) -> None:
    """What is sent is what exchange_cost says; where gloo sums, what a reduce_scatter would send."""
    rank, world = dist.get_rank(), dist.get_world_size()
    p = Problem(Case("bytes", exchange=how, drafts=2), rank, world)
    sent: list[int] = []

    def counted(name, share):
        real = getattr(dist, name)

        def call(*args, **kwargs):
            x = args[1] if len(args) > 1 else args[0]
            sent.append(x.nbytes * share[0] // share[1])
            return real(*args, **kwargs)

        return name, real, call

    others = world - 1
    gather = exchange._collective("all_gather_single", "all_gather_into_tensor").__name__
    fakes = [counted(gather, (others, 1)), counted("all_to_all_single", (others, world))]
    fakes.append(counted("all_reduce", (others, world)))
    for name, _, call in fakes:
        setattr(dist, name, call)
    try:
        p.sharded(p.group())
    finally:
        for name, real, _ in fakes:
            setattr(dist, name, real)
    want = exchange_cost(how, world, p.rows, p.c.heads, p.d, p.dv, q_bytes=4)
    assert (sum(sent), len(sent)) == want, f"sent {sent}, want {want}"


def check_no_host_reads(how: str) -> None:
    """Everything but the attention itself, which on a CPU may read lengths."""
    rank, world = dist.get_rank(), dist.get_world_size()
    real = context_parallel.decode

    def attention(*args, out, lse, **kwargs):
        out.zero_()
        lse.zero_()

    try:
        context_parallel.decode = attention
        for options in ({}, {"drafts": 3}, {"window": 7}, {"q_lens": (1, 4, 2, 0, 3, 9)}):
            p = Problem(Case("sync", exchange=how, sinks=True, **options), rank, world)
            layer, table = p.mine()
            cp, arguments = p.group(), p.options()
            arguments["sinks"] = p.sinks[p.heads()]
            with NoHostReads():
                cp.decode(p.q[:, p.heads()], layer, table, p.seq_lens, **arguments)
    finally:
        context_parallel.decode = real


def check_rehearsal(how: str) -> None:
    """One rank alone goes through a step; afterwards the ranks agree as ever."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for c in (Case("rehearsal", exchange=how, drafts=2), Case("rehearsal", exchange=how, local=True)):
        p = Problem(c, rank, world)
        cp = p.group()
        if rank == world - 1:
            with cp.rehearsal():
                p.sharded(cp)
        out, _ = p.sharded(cp)
        torch.testing.assert_close(out, p.whole()[0][:, p.heads()], atol=1e-5, rtol=1e-5)


def check_latents_without_rotary_part() -> None:
    """V4's records, of more bytes than their rank has values; q joined and in parts."""
    rank, world = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(0)
    rows, q = (torch.randn(n, LATENT, generator=random) for n in (40, world))
    slots, q, lens, table = torch.arange(40), q[None], torch.tensor([40]), torch.arange(5)[None]

    def cache(size: int, slots: torch.Tensor) -> tersekv.PagedLatentLayer:
        layer = tersekv.PagedLatentCache.allocate(1, 5, size, format="fp8_v4", kv_lora_rank=LATENT)[0]
        tersekv.mla_append(rows, None, layer, slots)
        return layer

    want = tersekv.mla_decode(q, cache(SIZE * world, slots), table, lens, softmax_scale=0.1)[:, rank : rank + 1]
    ours, mine = cache(SIZE, shard_slot_mapping(slots, rank, world, SIZE, SIZE)), q[:, rank : rank + 1]
    for query in (mine, (mine, None), (mine, mine[..., :0])):
        out = ContextParallel(interleave=SIZE).mla_decode(query, ours, table, lens, softmax_scale=0.1)
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


def check_refused_latent_queries() -> None:
    """Parts that differ would be copied side by side all the same; a third would be left out."""
    p = Problem(Case("mla-refusals", kv=False, kv_heads=1, drafts=2), dist.get_rank(), dist.get_world_size())
    layer, table = p.mine()
    q = p.q[:, p.heads()]
    a, b = q[..., :LATENT], q[..., LATENT:]
    for error, words, query in (
        (ValueError, "q_pe: want", (a, b[:1])),
        (ValueError, "q_pe: want", (a, b.half())),
        (ValueError, "q: want [T, H, 128 + 32], got rows of 128", a),
        (ValueError, "q_pe: want a tensor for a cache with a rotary part, got None", (a, None)),
        (ValueError, "q_nope: want [T, H, 128], got rows of 160", (q, None)),
        (ValueError, "q_nope: want [T, H, 128], got rows of 32", (b, a)),
        (ValueError, "q_nope: want [T, H, 128], got rows of 96", (q[:0, :, :96], q[:0, :, 96:])),
        (ValueError, "q_pe: want [T, H, 32], got rows of 64", (a, q[..., :64])),
        (TypeError, "q: want Tensor or (q_nope, q_pe)", (a, b, b)),
        (TypeError, "q: want Tensor or (q_nope, q_pe)", (q,)),
    ):
        with pytest.raises(error) as caught:
            ContextParallel(interleave=SIZE).mla_decode(query, layer, table, p.seq_lens, softmax_scale=0.1)
        assert words in str(caught.value), str(caught.value)
    without = tersekv.PagedLatentLayer.of(layer.ckv, kv_lora_rank=LATENT)
    with pytest.raises(ValueError, match=r"q_pe: want \[T, H, 0\], got rows of 32"):
        ContextParallel(interleave=SIZE).mla_decode((a, b), without, table, p.seq_lens, softmax_scale=0.1)


def check_refusals() -> None:
    """Every rank refuses alike, before anything is sent."""
    rank, world = dist.get_rank(), dist.get_world_size()
    p = Problem(Case("refusals"), rank, world)
    layer, table = p.mine()
    q = p.q[:, p.heads()]

    def refused(error, words, cp: ContextParallel | None = None, q=q, table=table, lens=p.seq_lens, **options) -> None:
        with pytest.raises(error) as caught:
            (cp or ContextParallel(interleave=SIZE)).decode(q, layer, table, lens, **options)
        assert words in str(caught.value), str(caught.value)

    refused(tersekv.UnsupportedError, "mask", mask=torch.zeros(len(q), 2, dtype=torch.uint16))
    refused(tersekv.UnsupportedError, "out", out_dtype=torch.float8_e4m3fn)
    refused(ValueError, "window", window=0)
    refused(ValueError, "page_table", table=table[:-1])
    refused(ValueError, "q: want T", q=q[:-1])
    refused(ValueError, "sinks", sinks=torch.zeros(q.shape[1] + 1))
    refused(TypeError, "sinks: want Tensor", sinks=[0.0] * q.shape[1])
    refused(TypeError, "window: want int", window=2.5)
    refused(TypeError, "return_lse: want bool", return_lse=1)
    refused(ValueError, "q: want head_dim", q=q[..., :32])
    refused(ValueError, "page_table: want int32", table=table.float())
    refused(ValueError, "seq_lens: want int32", lens=p.seq_lens.float())
    for how in BOTH:
        cp = ContextParallel(interleave=SIZE, exchange=how)
        for lse in (torch.zeros(q.shape[:2], dtype=torch.float64), torch.zeros(1, 1).expand(q.shape[:2])):
            refused(ValueError, "lse: want", cp, lse=lse)
        refused(ValueError, "out: want memory for each element", cp, out=torch.zeros(p.dv).expand(*q.shape[:2], p.dv))
    refused(ValueError, "out: want [T, share, Dv]", out=torch.zeros(len(q), q.shape[1] + 1, p.dv))
    small = torch.zeros(64, dtype=torch.uint8)
    refused(ValueError, "workspace: want", ContextParallel(interleave=SIZE, workspace=small))


OTHERS = {
    "append": check_append,
    "latents-without-rotary-part": check_latents_without_rotary_part,
    "refused-latent-queries": check_refused_latent_queries,
    "refusals": check_refusals,
    **{f"bytes-{x}": (lambda x=x: check_bytes_on_the_wire(x)) for x in BOTH},
    **{f"rehearsal-{x}": (lambda x=x: check_rehearsal(x)) for x in BOTH},
    **{f"no-host-reads-{x}": (lambda x=x: check_no_host_reads(x)) for x in BOTH},
}
NAMES = [*(c.name for c in CASES), *OTHERS]


def start(rank: int, world: int, folder: str, seconds: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world,
        timeout=timedelta(seconds=seconds),
    )  # fmt: skip


def run_all(rank: int, world: int, folder: str) -> None:
    """Write {name: error or None} to folder/rank.json. A rank that fails a case goes on with the next."""
    start(rank, world, folder, 30)
    checks = {c.name: (lambda c=c: check_against_whole(c)) for c in CASES} | OTHERS
    results: dict[str, str | None] = {}
    for name, check in checks.items():
        try:
            check()
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
            if "gloo/" in results[name] or "Timed out" in results[name]:
                break  # the ranks no longer agree on what comes next
        dist.barrier()
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    os._exit(0)  # gloo's threads may outlive the interpreter, which C++ answers with an abort


def leave_or_wait(rank: int, world: int, folder: str, seconds: float, dies: bool) -> None:
    """The last rank dies or hangs; the others write how long their call took to fail, and with what."""
    start(rank, world, folder, seconds)
    p = Problem(Case("left"), rank, world)
    p.sharded(p.group())
    if rank == world - 1:
        if not dies:
            time.sleep(2 * seconds)
        os._exit(1)
    began, error = time.monotonic(), "none"
    try:
        for _ in range(2):
            p.sharded(p.group())
    except RuntimeError as e:
        error = f"{type(e).__name__}: {e}"
    Path(folder, f"{rank}.json").write_text(json.dumps([time.monotonic() - began, error]))
    os._exit(0)  # the group is broken: leave without its goodbye
