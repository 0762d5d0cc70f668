"""Compile what a model will need before its first request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache import PagedKVCache, PagedKVLayer, PagedLatentCache, PagedLatentLayer
from ..formats import kv_format
from .append import append, rope_append
from .decode import decode
from .mla import mla_append, mla_decode

_log = logging.getLogger("tersekv")


@torch.no_grad()
def warm_up(
    cache: PagedKVCache | PagedLatentCache,
    num_q_heads: int,
    *,
    batch_sizes: Sequence[int] = (1,),
    drafts: Sequence[int] = (1,),
    ragged_tokens: Sequence[int] = (),
    max_pages: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    cos_sin_cache: Tensor | None = None,
    interleaved: bool | None = None,
    backend: str | None = None,
    **options: Any,
) -> dict[str, float]:
    """Run every write and every decode that a model will make, on rows that do not exist; the cache stays as it is.

        cache:          the cache itself: its formats, strides, alignment and scales are what kernels are compiled for
        num_q_heads:    of the calls to come
        batch_sizes:    requests in a step; a CUDA graph needs the sizes that it is captured for
        drafts:         new tokens of each request, the same for all
        ragged_tokens:  rows in all of steps with `cu_seqlens_q`, prompts among them (tried with every batch size)
        max_pages:      columns of the page table; None: all pages of the cache
        dtype:          of q, k and v
        cos_sin_cache:  with it `rope_append` runs, or `mla_append` with rotation; without, plain appends
        interleaved:    of the rotation; None: the operation's default
        options:        of `decode` or `mla_decode`: window, sinks, softcap, softmax_scale, out_dtype, return_lse, …

    Index tensors are of the types that `PagePool` makes: int32 tables and lengths, int64 slots and positions. Other
    types, like other options, are other kernels. Not covered: `mla_prefill` and `merge_states`, and anything that is
    compiled for another number of drafts' rows; with logging at DEBUG, "tersekv" tells what is compiled and when.

    Returns seconds per kind of call, compiling included: near zero where Triton's cache on disk has it all.
    Raises UnsupportedError where no backend can run what is asked for, ValueError or TypeError for a bad argument.
    """
    _check(cache, dtype, options, batch_sizes=batch_sizes, drafts=drafts, ragged_tokens=ragged_tokens)
    rope: dict[str, Any] = {}
    if cos_sin_cache is not None:
        rope = {"cos_sin_cache": cos_sin_cache} | ({} if interleaved is None else {"interleaved": interleaved})
    steps = [_Step(b, b * n, False) for b in batch_sizes for n in drafts]
    steps += [_Step(b, t, True) for b in batch_sizes for t in ragged_tokens]
    taken: dict[str, float] = {}
    for step in steps:
        for layer in cache.layers:
            new = partial(torch.zeros, dtype=dtype, device=_device(layer))
            calls: Callable[..., list[partial]] = _latent_calls if isinstance(layer, PagedLatentLayer) else _kv_calls
            pages = step.page_arguments(max_pages or cache.num_pages, _device(layer))
            for call in calls(layer, num_q_heads, step.rows, new, pages, rope, dict(options, backend=backend)):
                start = time.perf_counter()
                call()
                if _device(layer).type == "cuda":
                    torch.cuda.synchronize(_device(layer))
                name = f"{call.func.__name__}, {step}"
                taken[name] = taken.get(name, 0.0) + time.perf_counter() - start
    for name, seconds in taken.items():
        _log.debug("warm_up: %s: %.3f s", name, seconds)
    return taken


def _check(cache: Any, dtype: Any, options: dict[str, Any], **sizes: Any) -> None:
    if not isinstance(cache, (PagedKVCache, PagedLatentCache)):
        raise TypeError(f"cache: want PagedKVCache or PagedLatentCache, got {type(cache).__name__}")
    for name, values in sizes.items():
        if not isinstance(values, Iterable) or not all(isinstance(n, int) for n in values):
            raise TypeError(f"{name}: want a sequence of int, got {values!r}")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: want a torch.dtype, got {dtype!r}")
    if isinstance(cache, PagedLatentCache) and options.get("softmax_scale") is None:
        raise ValueError("softmax_scale: want a number or a Tensor for a latent cache, got None")


class _Step(NamedTuple):
    requests: int
    rows: int
    ragged: bool

    def __str__(self) -> str:
        return f"{self.requests} requests, {self.rows} rows{', ragged' if self.ragged else ''}"

    def page_arguments(self, max_pages: int, device: torch.device) -> dict[str, Any]:
        """What a decode is told of pages and rows: lengths 0, so that nothing is read."""
        found: dict[str, Any] = {
            "page_table": torch.full((self.requests, max_pages), -1, dtype=torch.int32, device=device),
            "seq_lens": torch.zeros(self.requests, dtype=torch.int32, device=device),
        }
        if self.ragged:
            ends = torch.full((self.requests + 1,), self.rows, dtype=torch.int32, device=device)
            ends[:-1].zero_()
            found |= {"cu_seqlens_q": ends, "max_q_len": self.rows}
        return found


def _kv_calls(
    layer: PagedKVLayer, q_heads: int, rows: int, new: Callable[..., Tensor], pages: dict, rope: dict, options: dict
) -> list[partial]:
    per, heads = kv_format(layer.format).values_per_element, layer.k.shape[2]
    k, v = (new(rows, heads, x.shape[-1] * per) for x in (layer.k, layer.v))
    q, backend = new(rows, q_heads, k.shape[-1]), options["backend"]
    slots = torch.full((rows,), -1, dtype=torch.int64, device=k.device)  # nothing is written
    write: partial = partial(append, k, v, layer, slots, backend=backend)
    if rope:
        write = partial(rope_append, q, k, v, layer, slots, positions=torch.zeros_like(slots), backend=backend, **rope)
    return [write, partial(decode, q, layer, **pages, **options)]


def _latent_calls(
    layer: PagedLatentLayer, q_heads: int, rows: int, new: Callable[..., Tensor], pages: dict, rope: dict, options: dict
) -> list[partial]:
    rank, rotary = layer.ckv.shape[-1], layer.kpe.shape[-1]
    q = (new(rows, q_heads, rank), new(rows, q_heads, rotary))
    slots = torch.full((rows,), -1, dtype=torch.int64, device=q[0].device)
    more = dict(rope, positions=torch.zeros_like(slots), q_pe=q[1]) if rope else {}
    write = partial(mla_append, new(rows, rank), new(rows, rotary), layer, slots, backend=options["backend"], **more)
    return [write, partial(mla_decode, q, layer, **pages, **options)]


def _device(layer: PagedKVLayer | PagedLatentLayer) -> torch.device:
    return (layer.ckv if isinstance(layer, PagedLatentLayer) else layer.k).device
