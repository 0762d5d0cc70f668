"""Compiles a model's kernels before its first request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache import PagedKVCache, PagedLatentCache
from ..layers import PagedKVLayer, PagedLatentLayer
from ..scalars import as_positive_int
from .append import append, rope_append
from .compile_workers import chip_of, compile_ahead, on_meta, outline
from .decode import decode
from .mla import mla_append, mla_decode
from .prefill import prefill

_log = logging.getLogger("tersekv")


@torch.no_grad()
def warm_up(
    cache: PagedKVCache | PagedLatentCache,
    num_q_heads: int,
    *,
    batch_sizes: Iterable[int] = (1,),
    drafts: Iterable[int] = (1,),
    ragged_tokens: Iterable[int] = (),
    max_pages: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    cos_sin_cache: Tensor | None = None,
    interleaved: bool | None = None,
    backend: str | None = None,
    processes: int | None = None,
    **options: Any,
) -> dict[str, float]:
    """Run every append and every decode of a model on skipped rows; the cache stays unchanged.

        >>> seconds = tersekv.warm_up(cache, num_q_heads=8, batch_sizes=[2])
        >>> list(seconds)
        ['append, 2 requests, 2 rows', 'decode, 2 requests, 2 rows']

        cache:          the model's own: kernels are compiled for its formats, strides, alignment and scales
        num_q_heads:    of the calls to come
        batch_sizes:    requests in a step; a CUDA graph needs the sizes that it is captured for
        drafts:         new tokens of each request, the same for all
        ragged_tokens:  total rows of steps with `cu_seqlens_q`, such as prompts, for `prefill` over K and V and for
                        decodes; each is tried with every batch size
        max_pages:      columns of the page table; None: all pages of the cache
        dtype:          of q, k and v
        cos_sin_cache:  with it `rope_append` runs, or `mla_append` with rotation; without, plain appends
        interleaved:    of the rotation; None: the operation's default
        processes:      that compile side by side for an NVIDIA GPU; None: one for each core, at most 16; 1: this one
        options:        of `decode` or `mla_decode`: window, sinks, softcap, softmax_scale, out_dtype, return_lse, …

    Index tensors are of the types that `PagePool` makes: int32 tables and lengths, int64 slots and positions. Other
    types, like other options, are other kernels. Not covered: `k` and `v` of `prefill`, `mla_prefill`,
    `mla_decode_branch`, `merge_states`, and numbers of drafts or rows that are not given here; with logging at DEBUG,
    "tersekv" reports what is compiled and when.

    Returns seconds per kind of call, compiling included: near zero where Triton's cache on disk has it all.
    Raises UnsupportedError if no backend can run a call, ValueError or TypeError for a bad argument.
    """
    _check(cache, dtype, options)
    batches, rows = _counts("batch_sizes", batch_sizes), _counts("drafts", drafts)
    tokens = _counts("ragged_tokens", ragged_tokens)
    heads = as_positive_int("num_q_heads", num_q_heads)
    columns = cache.num_pages if max_pages is None else as_positive_int("max_pages", max_pages)
    processes = None if processes is None else as_positive_int("processes", processes)
    rope: dict[str, Any] = {}
    if cos_sin_cache is not None:
        rope = {"cos_sin_cache": cos_sin_cache} | ({} if interleaved is None else {"interleaved": interleaved})
    steps = [_BatchShape(b, b * n, False) for b in batches for n in rows]
    steps += [_BatchShape(b, t, True) for b in batches for t in tokens]
    options["backend"] = backend
    taken: dict[str, float] = {}
    chip = chip_of(cache.layers[0].device)
    if chip is not None and processes != 1:
        alike = {outline(layer): on_meta(layer) for layer in cache.layers}
        given = [{name: on_meta(x) for name, x in more.items()} for more in (rope, options)]
        ahead = [call for _, call in _calls([*alike.values()], steps, heads, columns, dtype, *given)]
        compile_ahead(ahead, chip, processes=processes)
    for name, call in _calls(cache.layers, steps, heads, columns, dtype, rope, options):
        start = time.perf_counter()
        call()
        if chip is not None:
            torch.cuda.synchronize(cache.layers[0].device)
        taken[name] = taken.get(name, 0.0) + time.perf_counter() - start
    for name, seconds in taken.items():
        _log.debug("warm_up: %s: %.3f s", name, seconds)
    return taken


def _calls(
    layers: Iterable[PagedKVLayer | PagedLatentLayer], steps: list[_BatchShape], heads: int, columns: int,
    dtype: torch.dtype, rope: dict, options: dict,
) -> Iterator[tuple[str, partial]]:  # fmt: skip
    """Yields the kind and the call of every step in every layer."""
    layers = [*layers]
    for step in steps:
        for layer in layers:
            new = partial(torch.zeros, dtype=dtype, device=layer.device)
            calls: Callable[..., list[partial]] = _latent_calls if isinstance(layer, PagedLatentLayer) else _kv_calls
            pages = step.page_arguments(columns, layer.device)
            for call in calls(layer, heads, step.rows, new, pages, rope, options):
                yield f"{call.func.__name__}, {step}", call


def _counts(name: str, values: Iterable[int]) -> list[int]:
    if not isinstance(values, Iterable):
        raise TypeError(f"{name}: want a sequence of int, got {values!r}")
    return [as_positive_int(name, n) for n in values]


def _check(cache: Any, dtype: Any, options: dict[str, Any]) -> None:
    if not isinstance(cache, (PagedKVCache, PagedLatentCache)):
        raise TypeError(f"cache: want PagedKVCache or PagedLatentCache, got {type(cache).__name__}")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: want a torch.dtype, got {dtype!r}")
    if isinstance(cache, PagedLatentCache) and options.get("softmax_scale") is None:
        raise ValueError("softmax_scale: want a number or a Tensor for a latent cache, got None")


class _BatchShape(NamedTuple):
    requests: int
    rows: int
    ragged: bool

    def __str__(self) -> str:
        return f"{self.requests} requests, {self.rows} rows{', ragged' if self.ragged else ''}"

    def page_arguments(self, max_pages: int, device: torch.device) -> dict[str, Any]:
        """Returns the page and row arguments of a decode: lengths 0, so that it reads nothing."""
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
    k, v = (new(rows, layer.num_kv_heads, dim) for dim in (layer.head_dim, layer.head_dim_v))
    q, backend = new(rows, q_heads, k.shape[-1]), options["backend"]
    slots = torch.full((rows,), -1, dtype=torch.int64, device=k.device)  # nothing is written
    write: partial = partial(append, k, v, layer, slots, backend=backend)
    if rope:
        write = partial(rope_append, q, k, v, layer, slots, positions=torch.zeros_like(slots), backend=backend, **rope)
    calls: list[partial] = [write, partial(decode, q, layer, **pages, **options)]
    if "cu_seqlens_q" in pages:
        calls.append(partial(prefill, q, layer, **pages, **options))
    return calls


def _latent_calls(
    layer: PagedLatentLayer, q_heads: int, rows: int, new: Callable[..., Tensor], pages: dict, rope: dict, options: dict
) -> list[partial]:
    rank, rotary = layer.kv_lora_rank, layer.qk_rope_head_dim
    q = (new(rows, q_heads, rank), new(rows, q_heads, rotary))
    rope = rope if rotary else {}
    slots = torch.full((rows,), -1, dtype=torch.int64, device=q[0].device)
    more = dict(rope, positions=torch.zeros_like(slots), q_pe=q[1]) if rope else {}
    write = partial(mla_append, new(rows, rank), new(rows, rotary), layer, slots, backend=options["backend"], **more)
    return [write, partial(mla_decode, q, layer, **pages, **options)]
