"""Which token of a Hugging Face batch lies in which page: padding is skipped, windows reuse their pages.

transformers counts a batch in columns: every row has the same number of tokens, padding among them. Here a row is a
request that holds its real tokens alone, so that padding takes no room and no time. All of this is host bookkeeping;
what the kernels need is made once per forward and shared by the layers that see the same keys.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..pages import PageCopy
from .transformers_layers import CACHE_ARGUMENT
from .transformers_requests import TABLE_STEP, Capacity, RequestPages, Run

LOST = (
    f"{CACHE_ARGUMENT}: want the whole past, got one of which a part, tokens that a window sees or the state of a "
    "layer, a failed call has overwritten; call reset() and start again"
)


class Piece(NamedTuple):
    """New tokens that are written and attend together: T tokens of B requests.

    rows:          [T] int64, which of the B * length tokens of the forward; None: all of them, in order
    slots:         [T] int64, where they go
    page_table:    [B, max_pages] int32
    seq_lens:      [B] int32, tokens of each request, those of this piece included
    cu_seqlens_q:  [B + 1] int32; None: as many of every request
    max_q_len:     most tokens of one request
    end:           the column of the forward behind its last token
    real:          [T] bool, which of the rows are tokens: the outputs of others are 0; None: all

    Where attention stays within chunks, a request here is what one has in one chunk: its pages begin with it.
    """

    rows: Tensor | None
    slots: Tensor
    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None
    max_q_len: int
    end: int
    real: Tensor | None = None


class Step(NamedTuple):
    """One forward as the layers of one window see it: pages to copy first, then piece by piece."""

    copies: list[PageCopy]
    num_pages: int
    pieces: list[Piece]

    def to(self, device: torch.device) -> Step:
        """The same for layers on another device."""
        pieces = []
        for p in self.pieces:
            tensors: dict[str, Any] = {n: x.to(device) for n, x in p._asdict().items() if isinstance(x, Tensor)}
            pieces.append(p._replace(**tensors))
        return self._replace(pieces=pieces)


class Past(NamedTuple):
    """What a `Book` knows of all forwards so far: the columns that each brought, and which of them are real."""

    columns: int
    counts: list[int]
    history: list[tuple[int, Tensor | None]]
    requests: dict[int | None, RequestPages]

    def overwritten(self, copies: dict[int | None, list[PageCopy]]) -> bool:
        """Whether some of these copies go to pages that hold its tokens."""
        return any(pages.hold({c.dst for c in copies[window]}) for window, pages in self.requests.items())


class Book:
    """The tokens of one batch: how many columns there are, which of them are real, and where each lies.

    A forward, and whatever else changes the batch, happens whole or not at all. What cannot be undone, since a window's
    pages were written again, ends in an error that asks for `reset`.
    """

    def __init__(self, capacity: Capacity, windows: Sequence[int | None]) -> None:
        self._capacity, self._windows = capacity, list(dict.fromkeys(windows))
        self.reset()

    def reset(self) -> None:
        """Forget the batch and its size."""
        self.columns = 0  # tokens of every row, padding included
        self.counts: list[int] = []  # real tokens of each request
        self._history: list[tuple[int, Tensor | None]] = []  # of every forward: columns, and which are real
        self._requests: dict[int | None, RequestPages] = {}
        self._forget_steps()
        self._copies: dict[int | None, list[PageCopy]] = {}  # of the last forward
        self._before: Past | None = None  # what the last forward came after
        self.lost = False  # pages were written for what was undone

    @contextmanager
    def undone(self) -> Iterator[Past]:
        """If what is done within fails, it was not done. Brings what there was before."""
        before = self._past()
        try:
            yield before
        except BaseException:
            self._go_back(before)
            raise

    def step(
        self, window: int | None, start: int, batch: int, length: int, mask: Tensor | None, device: torch.device,
        attention_chunk: int | None = None,
    ) -> Step:  # fmt: skip
        """What the layers of a window do in the forward that brings columns [start, start + length) of B rows.

        mask:             [B, start + length] bool, False for padding; None: no padding
        attention_chunk:  tokens of a chunk, within which attention stays; None: no chunks
        """
        if self.lost:
            raise RuntimeError(LOST)
        if start == self.columns:
            with self.undone() as before:
                self._begin(batch, length, mask)
                self._copies = {w: pages.extend(self.counts) for w, pages in self._requests.items()}
                self._before = before
        elif start + length != self.columns or len(self.counts) != batch:
            raise RuntimeError(
                f"{CACHE_ARGUMENT}: a layer is at token {start}, the cache at {self.columns}: the last forward did not "
                "reach all layers; call reset() and start again"
            )
        kind = window, attention_chunk
        if kind not in self._steps:
            self._steps[kind] = {device: self._place(window, attention_chunk, length, device)}
        steps = self._steps[kind]
        if device not in steps:
            steps[device] = next(iter(steps.values())).to(device)
        return steps[device]

    @property
    def page_size(self) -> int:
        return self._capacity.page_size

    @property
    def chunk(self) -> int:
        return self._capacity.chunk

    def told(self) -> tuple[int, list[int], Tensor | None, list[list[int]]]:
        """What `restore` and `restore_padding` make a batch from: columns, tokens of each request, which columns are
        real [B, columns], and of each window the first token of each request that is still there."""
        batch = len(self.counts)
        every = ((n, torch.ones(batch, n, dtype=torch.bool, device="cpu")) for n, _ in self._history)
        parts = [ones if real is None else real for (_, ones), (_, real) in zip(every, self._history, strict=True)]
        padded = any(real is not None for _, real in self._history)
        intact = [pages.intact for pages in self._requests.values()]
        return self.columns, self.counts, torch.cat(parts, 1) if padded else None, intact

    def restore(self, columns: int, counts: Sequence[int], intact: Sequence[Sequence[int]]) -> None:
        """A batch with pages for so many tokens. Raises OutOfPagesError."""
        self.reset()
        requests = {w: RequestPages(w, self._capacity, [0] * len(counts), max(counts)) for w in self._windows}
        for pages, first in zip(requests.values(), intact, strict=True):
            pages.extend(counts)
            pages.intact = list(first)
        self.columns, self.counts, self._requests = columns, list(counts), requests
        self._history = [(columns, None)]

    def restore_padding(self, real: Tensor) -> None:
        """Which columns [B, columns] are real."""
        self._history = [(self.columns, real)]

    def listed_pages(self, window: int | None) -> list[int]:
        """The pages of the first request in the order of its tokens, then those of the next one."""
        return self._requests[window].listed_pages()

    def num_pages(self, window: int | None) -> int:
        """Pages that a layer of this window needs now."""
        return self._requests[window].pool.num_pages

    def held_pages(self, window: int | None) -> list[Run]:
        """Pages that requests have, those for the forward under way among them; the same list as long as they do."""
        if window not in self._held:
            self._held[window] = self._requests[window].held_pages()
        return self._held[window]

    def written_pages(self, window: int | None) -> set[int]:
        """Pages in which the last forward put its tokens."""
        assert self._before is not None
        if window not in self._written:
            before = self._before.counts or [0] * len(self.counts)
            self._written[window] = self._requests[window].pages_between(before, self.counts)
        return self._written[window]

    def select(self, sources: Sequence[int]) -> dict[int | None, list[PageCopy]]:
        """Rows become copies of rows, as in beam search. Returns the pages to copy, for the layers of each window.

        Half done where it raises OutOfPagesError: see `undone`.
        """
        wrong = [s for s in sources if not 0 <= s < len(self.counts)]
        if wrong:
            raise ValueError(f"beam_idx: want rows in [0, {len(self.counts)}), got {wrong[0]}")
        index = torch.tensor(list(sources), dtype=torch.int64, device="cpu")
        history = [(n, None if real is None else real[index]) for n, real in self._history]
        copies = {window: pages.select(sources) for window, pages in self._requests.items()}
        self._history, self.counts = history, [self.counts[s] for s in sources]
        self._before = None
        self._forget_steps()
        return copies

    def crop(self, columns: int) -> None:
        """Forget the last `columns` columns. Raises ValueError and changes nothing where that is not possible."""
        if not 0 <= columns <= self.columns:
            raise ValueError(f"crop: want at most {self.columns} tokens to remove, got {columns}")
        if columns == self.columns:  # a batch without tokens has no size
            return self.reset()
        history, counts, left = list(self._history), list(self.counts), columns
        while left:
            n, real = history.pop()
            cut = min(n, left)
            gone = [cut] * len(counts) if real is None else real[:, n - cut :].sum(1).tolist()
            counts = [have - lost for have, lost in zip(counts, gone, strict=True)]
            if cut < n:
                history.append((n - cut, None if real is None else real[:, : n - cut]))
            left -= cut
        for pages in self._requests.values():
            pages.check_crop(counts)
        for pages in self._requests.values():
            pages.crop(counts)
        self._history, self.counts, self.columns = history, counts, self.columns - columns
        self._before = None
        self._forget_steps()

    def take_back(self, start: int) -> int:
        """Undo the forward under way, in which the layer that was at token `start` failed. Returns the columns left."""
        before = self._before
        if before is not None and start == before.columns < self.columns:
            try:
                for window, pages in before.requests.items():
                    after = self._requests[window]
                    after.check_crop(before.counts)
                    pages.lose(after)
            except ValueError:
                self.lost = True
            self._go_back(before)
        return self.columns

    def _forget_steps(self) -> None:
        """What was found out about the last forward."""
        self._steps: dict[tuple[int | None, int | None], dict[torch.device, Step]] = {}
        self._held: dict[int | None, list[Run]] = {}
        self._written: dict[int | None, set[int]] = {}

    def _past(self) -> Past:
        requests = {window: copy.copy(pages) for window, pages in self._requests.items()}
        return Past(self.columns, self.counts, list(self._history), requests)

    def _go_back(self, past: Past) -> None:
        self.columns, self.counts, self._history, self._requests = past
        self._before = None
        self._forget_steps()

    def _begin(self, batch: int, length: int, mask: Tensor | None) -> None:
        """Count a new forward."""
        if not self.columns:
            self.counts = [0] * batch
        if len(self.counts) != batch:
            raise ValueError(
                f"input_ids: want a batch of {len(self.counts)}, which the cache holds, got {batch}; "
                "call reset() for another batch"
            )
        real = None if mask is None else self._real(mask, batch, length)
        new = [length] * batch if real is None else real.sum(1).tolist()
        after = [have + more for have, more in zip(self.counts, new, strict=True)]
        if not self.columns:
            self._requests = {w: RequestPages(w, self._capacity, self.counts, max(after)) for w in self._windows}
        self.counts = after
        self._history.append((length, real))
        self.columns += length
        self._forget_steps()

    def _real(self, mask: Tensor, batch: int, length: int) -> Tensor | None:
        """Which new columns are real, bool [B, length] on the host; None: all."""
        want = [batch, self.columns + length]
        if list(mask.shape) != want:
            raise ValueError(f"attention_mask: want {want}, past and new tokens, got {list(mask.shape)}")
        past = mask[:, : self.columns].sum(1, keepdim=True)
        told = torch.cat((past, mask[:, self.columns :]), dim=1).cpu()  # one copy from the device
        if told[:, 0].tolist() != self.counts:
            raise ValueError(
                f"attention_mask: want the past as it was when it was written, {self.counts} real tokens, "
                f"got {told[:, 0].tolist()}; no token of the past can be hidden or shown later (reset() starts anew)"
            )
        real = told[:, 1:].to(torch.bool)
        return None if bool(real.all()) else real

    def _place(self, window: int | None, attention_chunk: int | None, length: int, device: torch.device) -> Step:
        assert self._before is not None
        pages = self._requests[window]
        table, real = pages.table(max(self.counts)), self._history[-1][1]
        # Of the first forward there were no counts before.
        before = torch.tensor(self._before.counts or [0] * len(self.counts), device="cpu")
        pieces: list[Piece] = []
        for begin in range(0, length, self._capacity.chunk):
            piece, before = _piece(begin, min(begin + self._capacity.chunk, length), length, real, before, table,
                                   self._capacity.page_size, attention_chunk, device)  # fmt: skip
            if piece is not None:
                pieces.append(piece)
        return Step(self._copies[window], pages.pool.num_pages, pieces)


def _piece(
    begin: int, end: int, length: int, real: Tensor | None, before: Tensor, table: Tensor, page_size: int,
    attention_chunk: int | None, device: torch.device,
) -> tuple[Piece | None, Tensor]:  # fmt: skip
    """Columns [begin, end) of a forward of `length`; None where all are padding. Also the tokens after it."""
    batch = len(before)
    part = torch.ones(batch, end - begin, dtype=torch.bool, device="cpu") if real is None else real[:, begin:end]
    new = part.sum(1)
    most = int(new.max())
    if most == 0:
        return None, before
    position = (before[:, None] + part.cumsum(1) - 1).clamp(min=0)
    slots = table.gather(1, position // page_size) * page_size + position % page_size
    whole = real is None and begin == 0 and end == length
    rows = torch.arange(begin, end, device="cpu") + torch.arange(batch, device="cpu")[:, None] * length
    after = before + new
    used = -(-int(after.max()) // page_size)
    used = min(used + -used % TABLE_STEP, table.shape[1])
    seen = table[:, :used]
    lens = after
    if attention_chunk is not None:
        seen, lens, new = _within_chunks(table, before, after, attention_chunk, page_size)
        most = int(new.max())
    cu = torch.cat((new[:1] * 0, new.cumsum(0)))
    return Piece(
        None if whole else rows[part].to(device),
        slots[part].to(device),
        seen.to(device, torch.int32),
        lens.to(device, torch.int32),
        cu.to(device, torch.int32) if bool((new != most).any()) else None,
        most,
        end,
    ), after


def _within_chunks(
    table: Tensor, before: Tensor, after: Tensor, chunk: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [before[b], after[b]) of each request, as one request for each chunk in which some of them lie.

    Returns the page tables [R, chunk // page_size] from each chunk's first token on, its tokens [R] up to the last new
    one, and how many of those are new [R].
    """
    whose, first, lens, new = [], [], [], []
    for b, (low, high) in enumerate(zip(before.tolist(), after.tolist(), strict=True)):
        while low < high:
            begin = low // chunk * chunk
            end = min(high, begin + chunk)
            whose.append(b)
            first.append(begin // page_size)
            lens.append(end - begin)
            new.append(end - low)
            low = end
    columns = torch.tensor(first, device="cpu")[:, None] + torch.arange(chunk // page_size, device="cpu")
    held = table[torch.tensor(whose, device="cpu")].gather(1, columns.clamp(max=table.shape[1] - 1))
    return held, torch.tensor(lens, device="cpu"), torch.tensor(new, device="cpu")
