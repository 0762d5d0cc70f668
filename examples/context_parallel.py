"""A cache dealt across ranks: torchrun --standalone --nproc-per-node=2 examples/context_parallel.py

Without torchrun it runs as one rank.
"""

import os

import torch
import torch.distributed as dist

import tersekv
from tersekv.ops.context_parallel import ContextParallel, shard_slot_mapping

if "RANK" in os.environ:  # torchrun sets it
    dist.init_process_group("gloo")
torch.manual_seed(0)  # the same problem on every rank
cp = ContextParallel(interleave=16)  # pages of 16 tokens, dealt in turn
pool = tersekv.PagePool(num_pages=8, page_size=16 * cp.world)  # one pool for all ranks, whose pages they share
for name, tokens in (("short", 5), ("long", 100)):
    pool.add(name, tokens)
slots, table = pool.slot_mapping(["short", "long"], [5, 100]), pool.page_table(["short", "long"])
k, v, q = torch.randn(105, 2, 64), torch.randn(105, 2, 64), torch.randn(2, 4 * cp.world, 64)

cache = tersekv.PagedKVCache.allocate(1, 8, 16, 2, 64, format="fp8_per_token_head")
tersekv.append(k, v, cache[0], shard_slot_mapping(slots, cp.rank, cp.world, 16, cp.interleave))
mine = slice(4 * cp.rank, 4 * cp.rank + 4)  # this rank's query heads
out = cp.decode(q[:, mine], cache[0], table, pool.seq_lens(["short", "long"]))

whole = tersekv.PagedKVCache.allocate(1, 8, 16 * cp.world, 2, 64, format="fp8_per_token_head")
tersekv.append(k, v, whole[0], slots)
want = tersekv.decode(q, whole[0], table, pool.seq_lens(["short", "long"]))[:, mine]
error = float((out - want).norm() / want.norm())
assert error < 1e-5
if cp.rank == 0:
    print(f"{cp.world} ranks, {out.shape[1]} heads each, relative difference to one rank: {error:.1e}")
if dist.is_initialized():
    dist.destroy_process_group()
