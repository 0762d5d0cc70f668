"""Random requests through a TieredPool, whose rows say which token they are of."""

from __future__ import annotations

import random
from typing import Any

import torch

import tersekv
from tersekv.errors import OutOfPagesError

SIZES = {"num_layers": 2, "page_size": 4, "num_kv_heads": 2, "head_dim": 32}


def rows(tokens: list[int], device: Any) -> torch.Tensor:
    """[T, H, D] bf16, exact in fp8 too: values that depend on token and position."""
    ids, at = torch.tensor(tokens), torch.arange(len(tokens))
    x = (ids * 7 + at * 3) % 13 - 6
    return (x[:, None, None] + torch.arange(2)[:, None]).expand(-1, 2, 32).to(torch.bfloat16).to(device)


def append(pool: Any, cache: Any, request: Any, tokens: list[int], new: int) -> None:
    """The last rows of a request's tokens."""
    x = rows(tokens, cache.device)[len(tokens) - new :]
    slots = pool.slot_mapping([request], [new], device="cpu")
    slots = slots.pin_memory().to(cache.device, non_blocking=True) if cache.device.type == "cuda" else slots
    for layer in cache.layers:
        tersekv.append(x, -x, layer, slots)


def held(pool: Any, cache: Any, request: Any, tokens: list[int]) -> torch.Tensor:
    """Whether every layer has these tokens' rows: bool, on the device."""
    n = len(tokens)
    pages = torch.tensor(pool.pages(request), dtype=torch.int64)
    pages = pages.pin_memory().to(cache.device, non_blocking=True) if cache.device.type == "cuda" else pages
    want, good = rows(tokens, cache.device), []
    for layer in cache.layers:
        for x, y in ((layer.k, want), (layer.v, -want)):
            got = x.view(torch.uint8)[pages].view(x.dtype).flatten(0, 1)[:n].to(torch.bfloat16)
            good.append((got == y).all())
    return torch.stack(good).all()


def run(cache: Any, pool: Any, steps: int, seed: int, before: Any = lambda: None) -> dict[str, Any]:
    """Requests that come, grow and end. Returns what was found, and whether all rows were right."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(50) for _ in range(draw.randrange(5, 17))] for _ in range(3)]
    running: dict[int, list[int]] = {}
    ended: list[list[int]] = []
    right, found, cold, refused = [], 0, 0, 0
    for request in range(steps):
        start = draw.choice(ended) if ended and draw.random() < 0.6 else draw.choice(prompts)
        tokens = start + [draw.randrange(50) for _ in range(draw.randrange(1, 9))]
        before()
        free = pool.num_free_pages
        try:
            got = pool.acquire(request, tokens)
        except OutOfPagesError:
            refused += 1
            assert pool.num_free_pages == free
            assert request not in pool
        else:
            got.wait()
            append(pool, cache, request, tokens, got.num_new_tokens)
            right.append(held(pool, cache, request, tokens))
            found, cold = found + got.num_tokens, cold + got.num_cold_tokens
            if draw.random() < 0.5:
                pool.commit(request, tokens)
            running[request] = tokens
        while running and (len(running) > 3 or draw.random() < 0.4):
            ending = draw.choice([*running])
            tokens = running.pop(ending)
            right.append(held(pool, cache, ending, tokens))
            pool.release(ending, tokens)
            ended.append(tokens)
    return {"right": torch.stack(right), "found": found, "cold": cold, "refused": refused}
