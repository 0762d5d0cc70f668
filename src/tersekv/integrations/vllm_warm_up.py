"""Every kernel that vLLM's batches will need, compiled before its first request; SGLang's are among them.

vLLM warms up and captures graphs with batches of its own choice, and with no prompt among them. So the first of them
that a layer sees with its pages makes its calls for batches of all kinds, on rows of zeros: slots of −1 leave the cache
as it is, and what they attend to is thrown away. Before that, processes side by side compile what these calls launch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layers import PagedKVLayer
from ..ops.append import append
from ..ops.compile_workers import chip_of, compile_ahead, on_meta
from ..ops.decode import decode
from ..ops.prefill import prefill

# Requests with this many new rows or fewer are decoded; others, prompts and chunks of them, are prefilled.
DECODE_ROWS = 16
CUT = 32
BLOCK = 128  # rows of a program of prefill, at most
_log = logging.getLogger("tersekv")


class Limits(NamedTuple):
    """What a batch may have at most: requests, rows, and rows of each request of a graph's batch."""

    requests: int
    rows: int
    decode_rows: int


def warm_up(q: Tensor, pages: PagedKVLayer, metadata: Any, own_rows: bool, options: dict[str, Any]) -> None:
    """Make the calls of every kind of batch.

    q:         [T, Hq, D] of a batch that is like all in dtype, and in its metadata's index tensors
    metadata:  of that batch, with `limits`
    own_rows:  whether prompts bring keys and values
    """
    chip = chip_of(q.device)
    if chip is not None:
        tensors = {n: on_meta(getattr(metadata, n)) for n in ("block_table", "seq_lens", "slot_mapping")}
        like = SimpleNamespace(limits=metadata.limits, **tensors)
        alike = {name: on_meta(x) for name, x in options.items()}
        # As warnings: engines leave our logger as it is, which then shows nothing less, and somebody waits.
        say = partial(_log.warning, "tersekv: %s")
        compile_ahead([*calls(on_meta(q), on_meta(pages), like, own_rows, alike)], chip, say=say)
    for call in calls(q, pages, metadata, own_rows, options):
        call()


def calls(q: Tensor, pages: PagedKVLayer, metadata: Any, own_rows: bool, options: dict[str, Any]) -> Iterator[partial]:
    """Kernels are chosen by sizes in powers of two, and for numbers that are 1, multiples of 16, or others."""
    limits, table = metadata.limits, metadata.block_table

    def rows(n: int) -> list[Tensor]:
        heads = (q.shape[1:], (pages.num_kv_heads, pages.head_dim), (pages.num_kv_heads, pages.head_dim_v))
        return [q.new_zeros(n, *shape) for shape in heads]

    # Numbers come from the host: on meta tensors arithmetic takes a millisecond.
    ints = partial(torch.tensor, dtype=torch.int32, device=q.device)

    def nothing(requests: int) -> dict[str, Any]:
        """A table and lengths of 0."""
        return {"page_table": table.new_zeros(requests, table.shape[1]), "seq_lens": ints([0] * requests)}

    def ends(requests: int, n: int) -> list[int]:
        """n rows, dealt evenly."""
        return [i * n // requests for i in range(requests + 1)]

    for n in sizes(limits.rows):
        _, k, v = rows(n)
        yield partial(append, k, v, pages, metadata.slot_mapping.new_full((n,), -1))
    steps = sizes(limits.requests)
    # Few requests are cut among multiprocessors, each number of them otherwise.
    for b in sorted({*range(1, min(limits.requests, CUT) + 1), *steps}):
        for n in {1, limits.decode_rows}:
            yield partial(decode, rows(b * n)[0], pages, **nothing(b), **options)
        for most in (2, 4, 8, 9, DECODE_ROWS):
            least = b + most - 1
            for n in (
                {least, min(least + 1, b * most), -(-least // 16) * 16, b * most} if b in steps else {least, b * most}
            ):
                ragged: dict[str, Any] = {"cu_seqlens_q": ints(ends(b, n)), "max_q_len": most}
                yield partial(decode, rows(n)[0], pages, **nothing(b), **ragged, **options)
    # With keys and values of their own no kernel is chosen by the number of rows, nor by a request's beyond a block.
    for most in (n for n in sizes(limits.rows) if n > DECODE_ROWS and (not own_rows or n <= BLOCK or n == limits.rows)):
        for b in steps:
            for n in {most} if b == 1 or own_rows else {-(-most // 16) * 16, -(-most // 16) * 16 + 1}:
                new, k, v = rows(n)
                own: dict[str, Any] = {"k": k, "v": v} if own_rows else {}
                rows_of = [end - start for start, end in pairwise(ends(b, n))]  # no token before the new ones
                for after in (0, 1, 2):  # requests before them in the tensors, whose addresses are aligned or not
                    where = {
                        "page_table": table.new_zeros(after + b, table.shape[1])[after:],
                        "seq_lens": ints([0] * after + rows_of)[after:],
                    }
                    cu = ints(ends(b, n))
                    yield partial(prefill, new, pages, **where, cu_seqlens_q=cu, max_q_len=most, **own, **options)


def sizes(most: int) -> list[int]:
    """The powers of two and their successors, up to `most` and with it."""
    powers = [1 << i for i in range(most.bit_length())]
    return sorted({min(n, most) for p in powers for n in (p, p + 1)} | {most})
