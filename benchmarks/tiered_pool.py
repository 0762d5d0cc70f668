"""What a colder tier of pages is worth: chats that share system prompts, served from a `TieredPool`.

    python benchmarks/tiered_pool.py --measure --device cuda --out times.json     how long a GPU takes, once
    python benchmarks/tiered_pool.py --quality --out quality.json                 what the cold format costs
    python benchmarks/tiered_pool.py --times times.json --out simulated.json      the simulation, on any CPU

The model has the sizes of Llama 3.1 8B, its cache bf16. `--measure` times pages on their way to the host and back, and
the prefill of a layer: projections, append, attention and MLP over random weights, times the number of layers. The
simulation makes every decision by a real TieredPool over a small cache of as many pages; the clock alone is modelled,
by those times. One GPU prefills turn after turn while requests decode beside it at 25 ms a token.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tersekv

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, PAGE = 32, 32, 8, 128, 4096, 14336, 64
HOT = "bf16"
TIERS: dict[str, dict[str, Any]] = {
    "bf16": {}, "fp8_e4m3": {"cold_format": "fp8_e4m3"},
    "int4 rotated": {"cold_format": "int4_per_token_head", "rotation": "hadamard"},
}  # fmt: skip
HOT_BYTES, HOST_BYTES = 40e9, (32e9, 64e9, 128e9)
TURNS, USERS_PER_S, SECONDS_OF_TOKEN, MEAN_PAUSE = 1000, 0.5, 0.025, 60.0
RUNS, DEMO_PAGE = 5, 16


# How long a GPU takes.


def seconds(call: Callable[[], object]) -> float:
    """The median of some runs, by events."""
    found = []
    for _ in range(RUNS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found[1:])


def line(points: dict[int, float]) -> dict[str, float]:
    """Seconds = fixed + per_token × tokens, through the first and the last point."""
    (n0, t0), (n1, t1) = min(points.items()), max(points.items())
    per_token = (t1 - t0) / (n1 - n0)
    return {"fixed": max(0.0, t0 - n0 * per_token), "per_token": per_token}


def measured_tier(options: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Pages away and back, until the caller's stream may go on. What came back is compared where bytes are copied."""
    away, back, counts = {}, {}, (256, 8192)
    cache = tersekv.PagedKVCache.allocate(
        LAYERS, counts[-1] // PAGE, PAGE, KV_HEADS, HEAD_DIM, format=HOT, device=device
    )
    for layer in cache.layers:
        layer.k.normal_()
        layer.v.normal_()
    want = cache[LAYERS - 1].v.clone()
    pool = tersekv.TieredPool(cache, cold_pages=counts[-1] // PAGE, **options)
    mover = pool._mover
    assert mover is not None
    order = torch.randperm(counts[-1] // PAGE, generator=torch.Generator().manual_seed(0)).tolist()
    for n in counts:
        moves = [(hot, cold) for cold, hot in enumerate(order[: n // PAGE])]
        torch.cuda.synchronize()

        def whole(way: Callable, moves: list = moves) -> Callable[[], None]:
            def call() -> None:
                way(moves)
                for stream in (mover._copy, mover._compute):
                    torch.cuda.current_stream().wait_stream(stream)

            return call

        away[n], back[n] = seconds(whole(mover.away)), seconds(whole(mover.back))
    if not options and not torch.equal(cache[LAYERS - 1].v, want):
        raise RuntimeError("want the rows that left, got others")
    page = pool.cold_nbytes // pool.num_pages
    return {"page_bytes": page, "away": line(away), "back": line(back), "points": {"away": away, "back": back}}


def measured_prefill(device: torch.device) -> dict[str, Any]:
    """Seconds of all layers = fixed + per_token × new tokens + per_pair × (query, key) pairs."""
    most = 16384
    cache = tersekv.PagedKVCache.allocate(1, most // PAGE, PAGE, KV_HEADS, HEAD_DIM, format=HOT, device=device)[0]
    table = torch.arange(most // PAGE, dtype=torch.int32, device=device)[None]
    widths = ((HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM), (HIDDEN, HIDDEN), (HIDDEN, 2 * INNER), (INNER, HIDDEN))
    qkv_w, out_w, up_w, down_w = (torch.randn(*w, dtype=torch.bfloat16, device=device) * 0.02 for w in widths)
    cos_sin = torch.randn(most, HEAD_DIM, device=device)
    rows, values = [], []
    for new, total in ((64, 512), (64, most), (512, 512), (512, most), (4096, 4096), (4096, most)):
        x = torch.randn(new, HIDDEN, dtype=torch.bfloat16, device=device)
        at = torch.arange(total - new, total, device=device)
        lens = torch.tensor([total], dtype=torch.int32, device=device)
        cu = torch.tensor([0, new], dtype=torch.int32, device=device)

        def layer(x: Any = x, at: Any = at, lens: Any = lens, cu: Any = cu, new: int = new) -> None:
            sizes = [HEADS, KV_HEADS, KV_HEADS]
            q, k, v = (x @ qkv_w).view(new, -1, HEAD_DIM).split(sizes, 1)
            q = tersekv.rope_append(q, k, v, cache, at, cos_sin, at)
            y = tersekv.prefill(q, cache, table, lens, cu, softmax_scale=HEAD_DIM**-0.5, max_q_len=new)
            gate, up = (y.view(new, -1) @ out_w @ up_w).chunk(2, 1)
            (torch.nn.functional.silu(gate) * up) @ down_w

        rows.append([1.0, new, new * (total - new / 2)])
        values.append(LAYERS * seconds(layer))
    # Relative errors count, so that short prompts do.
    weight = 1 / torch.tensor(values, dtype=torch.float64)
    fit = torch.linalg.lstsq(
        torch.tensor(rows, dtype=torch.float64) * weight[:, None], torch.ones(len(rows), 1).double()
    )
    names = ("fixed", "per_token", "per_pair")
    fitted = dict(zip(names, fit.solution.flatten().tolist(), strict=True))
    return fitted | {"points": [[*row[1:], value] for row, value in zip(rows, values, strict=True)]}


def measure(device: torch.device) -> dict[str, Any]:
    chip = torch.cuda.get_device_name(device)
    tiers = {name: measured_tier(options, device) for name, options in TIERS.items()}
    return {"device": chip, "torch": torch.__version__, "prefill": measured_prefill(device), "tiers": tiers}


# What the cold format costs.


@torch.inference_mode()
def quality() -> list[dict[str, Any]]:
    """KL of the second half of each window, whose first half lies in pages that were away, from a cache in 16 bits."""
    from tersekv.demo import text
    from tersekv.demo.calibrate import windows
    from tersekv.demo.subject import BuiltIn

    found = []
    ways = {
        "llama": [("bf16", None, {}), ("fp8_e4m3", None, {}), *((hot, cold, options) for hot in ("bf16", "fp8_e4m3")
                  for cold, options in (("fp8_e4m3", {}), ("int4_per_token_head", {}),
                                        ("int4_per_token_head", {"rotation": "hadamard"})) if hot != cold)],
        "deepseek": [("bf16", None, {}), ("bf16", "fp8_e4m3", {}), ("bf16", "fp8_ds_mla", {})],
    }  # fmt: skip
    for name, listed in ways.items():
        subject, reference = BuiltIn(name), None
        tokens = text.encode(text.heldout_text())
        pieces = windows(tokens, subject.context)[:8]
        for hot, cold, options in listed:
            logits = []
            for piece in pieces:
                half = len(piece) // 2 // DEMO_PAGE * DEMO_PAGE
                paged = subject.runner(hot, 1, len(piece), DEMO_PAGE, None)
                paged.step({0: piece[:half]})
                if cold is not None:
                    away_and_back(paged, half // DEMO_PAGE, cold, options)
                logits.append(paged.step({0: piece[half:-1]}).double().log_softmax(-1))
            log_q = torch.cat(logits)
            reference = log_q if reference is None else reference
            kl = torch.nn.functional.kl_div(log_q, reference, reduction="batchmean", log_target=True).item()
            found.append({"model": name, "hot": hot, "cold": cold, "rotated": bool(options), "kl": max(0.0, kl)})
            print(f"{name:<10}{hot:<10} by {cold} {options.get('rotation', '')}: {kl:.2e} nats a token", flush=True)
    return found


def away_and_back(paged: Any, pages: int, cold: str, options: dict[str, Any]) -> None:
    pool = tersekv.TieredPool(paged.cache, cold_pages=pages, cold_format=cold, **options)
    listed = list(paged.pool.pages(0))[:pages]
    assert pool._mover is not None
    pool._mover.away([*zip(listed, range(pages), strict=True)])
    pool._mover.back([*zip(listed, range(pages), strict=True)])


# The simulation.


class Chat:
    """A user's turns: a shared system prompt, a document of the user's own, then questions and answers that add up."""

    def __init__(self, draw: random.Random, systems: list[list[int]]) -> None:
        weights = [1 / (i + 1) for i in range(len(systems))]
        self.tokens = list(draw.choices(systems, weights)[0])
        self.turns = min(12, 1 + int(draw.expovariate(1 / 5)))
        self.draw = draw
        self.more(4000)

    def more(self, mean: int) -> None:
        n = max(8, int(self.draw.expovariate(1 / mean)))
        self.tokens += [self.draw.randrange(1 << 30) for _ in range(n)]


def arrivals(seed: int) -> list[tuple[float, Chat]]:
    """Poisson: when each user's first question comes."""
    draw = random.Random(seed)
    systems = [[draw.randrange(1 << 30) for _ in range(draw.randrange(800, 3200))] for _ in range(12)]
    at, found = 0.0, []
    turns = 0
    while turns < TURNS:
        at += draw.expovariate(USERS_PER_S)
        found.append((at, Chat(draw, systems)))
        turns += found[-1][1].turns
    return found


def simulate(times: dict[str, Any], tier: str | None, host_bytes: float, seed: int = 0) -> dict[str, float]:
    """One run. The GPU prefills in order of arrival; a link carries pages, both ways in turn."""
    torch.set_num_threads(1)  # small tensors
    token_bytes = LAYERS * 2 * KV_HEADS * HEAD_DIM * 2
    hot_pages = int(HOT_BYTES / token_bytes / PAGE)
    t = times["tiers"].get(tier or "", None)
    cold_pages = int(host_bytes / t["page_bytes"]) if t else 0
    small = tersekv.PagedKVCache.allocate(1, hot_pages, PAGE, 1, 16, format=HOT)
    pool = tersekv.TieredPool(small, cold_pages=cold_pages, **(TIERS[tier] if tier else {}))
    events: list[tuple[float, int, str, Chat]] = [(at, i, "ask", chat) for i, (at, chat) in enumerate(arrivals(seed))]
    heapq.heapify(events)
    number, gpu_free, link_free = len(events), 0.0, 0.0
    waiting: list[tuple[float, int, Chat]] = []
    first_token, prompt, found_hot, found_cold, most = [], 0, 0, 0, 0
    while events:
        now, i, what, chat = heapq.heappop(events)
        if what == "ask":
            chat.more(300)
            waiting.append((now, i, chat))
        else:
            pool.release(i, chat.tokens)
            chat.turns -= 1
            if chat.turns > 0:
                number += 1
                heapq.heappush(events, (now + chat.draw.expovariate(1 / MEAN_PAUSE), number, "ask", chat))
        while waiting:
            asked, request, chat = waiting[0]
            before = pool.pages_moved_away
            try:
                got = pool.acquire(request, chat.tokens)
            except tersekv.OutOfPagesError:
                break
            waiting.pop(0)
            pool.commit(request, chat.tokens)
            link_free = max(link_free, now)
            for way, tokens in (("away", PAGE * (pool.pages_moved_away - before)), ("back", got.num_cold_tokens)):
                if tokens:
                    link_free += t[way]["fixed"] + tokens * t[way]["per_token"]
            ready = link_free if got.num_cold_tokens else now
            n, p = got.num_new_tokens, times["prefill"]
            pairs = n * (got.num_tokens + n / 2)
            gpu_free = max(gpu_free, ready) + p["fixed"] + n * p["per_token"] + pairs * p["per_pair"]
            first_token.append(gpu_free - asked)
            prompt, found_cold = prompt + len(chat.tokens), found_cold + got.num_cold_tokens
            found_hot += got.num_tokens - got.num_cold_tokens
            held = len(chat.tokens)
            chat.more(250)
            try:
                pool.extend(request, len(chat.tokens) - held)
            except tersekv.OutOfPagesError:
                chat.tokens = chat.tokens[:held]  # the answer ends early
            answered = gpu_free + SECONDS_OF_TOKEN * (len(chat.tokens) - held)
            heapq.heappush(events, (answered, request, "end", chat))
            most = max(most, pool.num_cold_pages)
    first_token.sort()
    return {
        "host_gb": cold_pages * t["page_bytes"] / 1e9 if t else 0.0, "turns": len(first_token),
        "host_tokens": cold_pages * PAGE, "cold_pages_used": most,
        "hit_rate": (found_hot + found_cold) / prompt, "hit_rate_cold": found_cold / prompt,
        "ttft_mean": statistics.fmean(first_token), "ttft_median": statistics.median(first_token),
        "ttft_p99": first_token[int(0.99 * len(first_token))],
    }  # fmt: skip


def simulated(times: dict[str, Any]) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    for tier, host in [(None, 0.0), *((tier, host) for tier in TIERS for host in HOST_BYTES)]:
        found.append({"tier": tier, "host_bytes": host, **simulate(times, tier, host)})
        print(json.dumps(found[-1]), flush=True)
    return {"times": times["device"], "hot_bytes": HOT_BYTES, "hot": HOT, "users_per_s": USERS_PER_S, "runs": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--measure", action="store_true", help="time a GPU")
    parser.add_argument("--quality", action="store_true", help="run the demo's models")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--times", type=Path, help="what --measure wrote")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.measure:
        found: Any = measure(torch.device(args.device))
    elif args.quality:
        found = quality()
    elif args.times:
        found = simulated(json.loads(args.times.read_text()))
    else:
        parser.error("want --measure, --quality or --times FILE")
    text = json.dumps(found, indent=1) + "\n"
    if args.out:
        args.out.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
