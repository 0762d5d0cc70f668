"""Every kernel that vLLM's batches will need, compiled before its first request; SGLang's are among them.

vLLM warms up and captures graphs with batches of its own choice. So the first of them that a layer sees with its pages
makes its calls for batches of all kinds, on rows of zeros: slots of −1 leave the cache as it is, and what they attend
to is thrown away. Before that, processes side by side compile what these calls launch, in three jobs: the capture of
graphs need not wait for kernels of prompts, which take longest.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layers import PagedKVLayer, PagedLatentLayer
from ..ops.append import append
from ..ops.compile_workers import Chip, chip_of, compile_ahead, on_meta
from ..ops.decode import decode
from ..ops.mla import mla_append, mla_decode
from ..ops.prefill import prefill

# Requests with this many new rows or fewer are decoded; others, prompts and chunks of them, are prefilled.
DECODE_ROWS = 16
CUT = 32
BLOCK = 128  # rows of a program of prefill, at most
ANY_SCALE = 1.0  # softmax_scale of calls to compile for: no kernel depends on it, and models choose it as they like
_log = logging.getLogger("tersekv")
_postponed: list[Callable[[], None]] = []  # what a batch does not need itself
Job = Callable[..., Iterator[partial]]
_done: dict[str, set[Job]] = {}  # for kinds of layers
_early: dict[str, dict[Job, threading.Thread]] = {}  # what compiles for kinds of layers, before there are pages


class Limits(NamedTuple):
    """What a batch may have at most: requests, rows, and rows of each request of a graph's batch."""

    requests: int
    rows: int
    decode_rows: int


def decode_rows_of(vllm_config: Any) -> int:
    """Rows of a request that is decoded: a token, and drafts."""
    drafts = getattr(getattr(vllm_config, "speculative_config", None), "num_speculative_tokens", None)
    return min(1 + (drafts or 0), DECODE_ROWS)


def limits_of(vllm_config: Any) -> Limits | None:
    scheduler = getattr(vllm_config, "scheduler_config", None)
    if scheduler is None:
        return None
    return Limits(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, decode_rows_of(vllm_config))


def compile_early(
    kind: Any,
    q: Tensor,
    pages: PagedKVLayer,
    columns: int,
    limits: Limits,
    own_rows: bool,
    options: dict[str, Any],
    windows: Collection[int | None],
) -> None:
    """Start to compile what `warm_up` will ask for, in a thread for each job: vLLM prepares much before it makes pages.

    kind:     of layers for which this is done once
    q, pages: like those to come: [1, Hq, D], and a layer of few pages
    columns:  of a page table
    """
    chip = chip_of(pages.device)
    if chip is None or repr(kind) in _early:
        return
    ints = torch.empty(1, columns, dtype=torch.int32, device=pages.device)
    like = SimpleNamespace(
        limits=limits, block_table=ints, seq_lens=ints[0, :1], slot_mapping=ints.new_empty(1, dtype=torch.int64)
    )
    all_options = [options | {"window": w} for w in sorted_windows(windows)]
    _early[repr(kind)] = _start_to_compile(JOBS, own_rows, q, pages, like, all_options, chip)


def warm_up(
    q: Tensor,
    pages: PagedKVLayer,
    metadata: Any,
    own_rows: bool,
    options: dict[str, Any],
    windows: Collection[int | None] = (),
    jobs: Collection[Job] | None = None,
) -> None:
    """Make the calls of every kind of batch.

    q:         [T, Hq, D] of a batch that is like all in dtype, and in its metadata's index tensors
    metadata:  of that batch, with `limits`
    own_rows:  whether prompts bring keys and values
    windows:   of all layers alike: kernels for each are compiled together, since workers take seconds to start
    jobs:      some of JOBS; None: all
    """
    jobs, chip = JOBS if jobs is None else jobs, chip_of(pages.device)
    if chip is not None:
        _wait_for_early(jobs)
        all_options = [options | {"window": w} for w in sorted_windows({options["window"], *windows})]
        for thread in _start_to_compile(jobs, own_rows, q, pages, metadata, all_options, chip).values():
            thread.join()
    for job in jobs:
        for call in job(own_rows, q, pages, metadata, options):
            call()


def sorted_windows(windows: Collection[int | None]) -> list[int | None]:
    """None first: whoever compiles for the same windows asks for the same calls."""
    return sorted(windows, key=lambda w: -1 if w is None else w)


def warm_up_latents(q: tuple[Tensor, ...], pages: PagedLatentLayer, metadata: Any, options: dict[str, Any]) -> None:
    """Likewise for latents: what is written, and what is decoded. q: (q_nope, q_pe), or of both in one."""
    chip = chip_of(pages.device)
    if chip is not None:
        _wait_for_early(JOBS)
        _compile(latent_calls, q, pages, metadata, [options], chip)
    for call in latent_calls(q, pages, metadata, options):
        call()


def first_jobs(kind: Any, device: torch.device, wanted: Collection[Job]) -> list[Job]:
    """Returns those jobs that were not done yet in this process for such a layer on a GPU, and notes them as done; none
    during a graph's capture."""
    if device.type != "cuda":
        return []
    done = _done.setdefault(repr(kind), set())
    jobs = [job for job in wanted if job not in done]
    if jobs and torch.cuda.is_current_stream_capturing():
        return []
    done.update(jobs)
    return jobs


def first_time(kind: Any, device: torch.device) -> bool:
    """Whether latents of this kind were not warmed up yet in this process, on a GPU; not during a graph's capture."""
    return bool(first_jobs(kind, device, (latent_calls,)))


def postpone(call: Callable[[], None]) -> None:
    """Leaves a call to `run_postponed`."""
    _postponed.append(call)


def run_postponed() -> None:
    """Before a batch: makes the calls that an earlier one left. Most often there are none."""
    while _postponed:
        _postponed.pop()()


def _start_to_compile(
    jobs: Collection[Job],
    own_rows: bool,
    q: Tensor,
    pages: PagedKVLayer,
    metadata: Any,
    all_options: list[dict[str, Any]],
    chip: Chip,
) -> dict[Job, threading.Thread]:
    """Starts a thread for each job, whose processes run beside the others': importing and a job's longest kernel take
    most of the time, and few cores."""
    threads = {}
    for job in jobs:
        args = partial(job, own_rows), q, pages, metadata, all_options, chip
        threads[job] = threading.Thread(target=_compile, args=args, name="tersekv-compile", daemon=True)
        threads[job].start()
    return threads


def _wait_for_early(jobs: Collection[Job]) -> None:
    """Waits for what was begun for layers of any kind: processes for the same calls would wait for each other."""
    for threads in _early.values():
        for job in jobs:
            threads[job].join()


def _compile(
    make: Job,
    q: Any,
    pages: Any,
    metadata: Any,
    all_options: list[dict[str, Any]],
    chip: Chip,
) -> None:
    tensors = {n: on_meta(getattr(metadata, n)) for n in ("block_table", "seq_lens", "slot_mapping")}
    like = SimpleNamespace(limits=metadata.limits, **tensors)
    on_q = tuple(map(on_meta, q)) if isinstance(q, tuple) else on_meta(q)
    alike = [{name: on_meta(x) for name, x in some.items()} | {"softmax_scale": ANY_SCALE} for some in all_options]
    to_compile = [call for some in alike for call in make(on_q, on_meta(pages), like, some)]
    # As warnings: engines leave our logger as it is, which then shows nothing less, and somebody waits.
    compile_ahead(to_compile, chip, say=partial(_log.warning, "tersekv: %s"))


def uniform_calls(
    own_rows: bool, q: Tensor, pages: PagedKVLayer, metadata: Any, options: dict[str, Any]
) -> Iterator[partial]:
    """Calls of batches that graphs are captured with: requests of as many rows each are decoded; and what is written,
    of prompts too. Kernels are chosen by sizes in powers of two."""
    limits = metadata.limits
    for n in sizes(limits.rows):
        _, k, v = _zero_rows(q, pages, n)
        yield partial(append, k, v, pages, metadata.slot_mapping.new_full((n,), -1))
    for b in _numbers_of_requests(limits):
        for n in {1, limits.decode_rows}:
            yield partial(decode, _zero_rows(q, pages, b * n)[0], pages, **_no_keys(metadata, b), **options)


def ragged_calls(
    own_rows: bool, q: Tensor, pages: PagedKVLayer, metadata: Any, options: dict[str, Any]
) -> Iterator[partial]:
    """Calls in which requests of various rows are decoded. Kernels are chosen for numbers that are 1, multiples of 16,
    or others."""
    steps = sizes(metadata.limits.requests)
    for b in _numbers_of_requests(metadata.limits):
        for most in (2, 4, 8, 9, DECODE_ROWS):
            least = b + most - 1
            few = {least, b * most}
            for n in few | {min(least + 1, b * most), -(-least // 16) * 16} if b in steps else few:
                ragged: dict[str, Any] = {"cu_seqlens_q": _ints(_ends(b, n), q), "max_q_len": most}
                yield partial(decode, _zero_rows(q, pages, n)[0], pages, **_no_keys(metadata, b), **ragged, **options)


def prefill_calls(
    own_rows: bool, q: Tensor, pages: PagedKVLayer, metadata: Any, options: dict[str, Any]
) -> Iterator[partial]:
    """Calls of prompts. With keys and values of their own no kernel is chosen by the number of rows, nor by a request's
    beyond a block."""
    limits, table = metadata.limits, metadata.block_table
    for most in (n for n in sizes(limits.rows) if n > DECODE_ROWS and (not own_rows or n <= BLOCK or n == limits.rows)):
        for b in sizes(limits.requests):
            for n in {most} if b == 1 or own_rows else {-(-most // 16) * 16, -(-most // 16) * 16 + 1}:
                new, k, v = _zero_rows(q, pages, n)
                own: dict[str, Any] = {"k": k, "v": v} if own_rows else {}
                ends = _ends(b, n)
                rows_of = [end - start for start, end in pairwise(ends)]  # no token before the new ones
                for after in (0, 1, 2):  # requests before them in the tensors, whose addresses are aligned or not
                    where = {
                        "page_table": table.new_zeros(after + b, table.shape[1])[after:],
                        "seq_lens": _ints([0] * after + rows_of, q)[after:],
                    }
                    cu = _ints(ends, q)
                    yield partial(prefill, new, pages, **where, cu_seqlens_q=cu, max_q_len=most, **own, **options)


JOBS: tuple[Job, ...] = (uniform_calls, ragged_calls, prefill_calls)


def _numbers_of_requests(limits: Limits) -> list[int]:
    """Few requests are cut among multiprocessors, each number of them otherwise."""
    return sorted({*range(1, min(limits.requests, CUT) + 1), *sizes(limits.requests)})


def _ints(values: list[int], like: Tensor) -> Tensor:
    """Numbers come from the host: on meta tensors arithmetic takes a millisecond."""
    return torch.tensor(values, dtype=torch.int32, device=like.device)


def _no_keys(metadata: Any, requests: int) -> dict[str, Any]:
    """A page table, and lengths of 0."""
    table = metadata.block_table
    return {"page_table": table.new_zeros(requests, table.shape[1]), "seq_lens": _ints([0] * requests, table)}


def _zero_rows(q: Tensor, pages: PagedKVLayer, n: int) -> list[Tensor]:
    """n rows of zeros of a query like q, of keys and of values."""
    heads = (q.shape[1:], (pages.num_kv_heads, pages.head_dim), (pages.num_kv_heads, pages.head_dim_v))
    return [q.new_zeros(n, *shape) for shape in heads]


def _ends(requests: int, n: int) -> list[int]:
    """n rows, dealt evenly."""
    return [i * n // requests for i in range(requests + 1)]


def latent_calls(
    q: tuple[Tensor, ...], pages: PagedLatentLayer, metadata: Any, options: dict[str, Any]
) -> Iterator[partial]:
    """Requests that are decoded have one row each, or all one and drafts; prompts are another's."""
    limits, table = metadata.limits, metadata.block_table
    for n in sizes(limits.rows):
        latent, rotary = (q[0].new_zeros(n, dim) for dim in (pages.kv_lora_rank, pages.qk_rope_head_dim))
        slots = metadata.slot_mapping.new_full((n,), -1)
        yield partial(mla_append, latent, rotary if pages.qk_rope_head_dim else None, pages, slots)
    for b in _numbers_of_requests(limits):
        where = table.new_zeros(b, table.shape[1]), metadata.seq_lens.new_zeros(b)
        for n in sorted({1, limits.decode_rows}):
            rows = [query_like(x, b * n) for x in q]
            both = rows[0] if len(rows) == 1 else (rows[0], rows[1])
            yield partial(mla_decode, both, pages, *where, **options)


def query_like(x: Tensor, n: int) -> Tensor:
    """n rows [n, H, D] of zeros, laid out as x: cut out of longer rows, or heads before rows, as
    `bmm(…).transpose(0, 1)` leaves them."""
    if is_head_major(x):
        return x.new_zeros(x.shape[1], n, x.stride(0))[..., : x.shape[2]].transpose(0, 1)
    return x.new_zeros(n, max(x.stride(0), 1)).as_strided((n, *x.shape[1:]), x.stride())


def is_head_major(x: Tensor) -> bool:
    """Whether a query [T, H, D] has its heads before its rows: the stride of a head then goes by the number of rows."""
    return x.shape[1] > 1 and x.stride(1) >= x.stride(0)


def query_signature(x: Tensor) -> tuple[Any, ...]:
    """What kernels are chosen by, whatever the number of rows."""
    return x.shape[1:], x.dtype, (x.stride(0), x.stride(2)) if is_head_major(x) else x.stride()


def sizes(most: int) -> list[int]:
    """The powers of two and their successors, up to `most` and with it."""
    powers = [1 << i for i in range(most.bit_length())]
    return sorted({min(n, most) for p in powers for n in (p, p + 1)} | {most})
