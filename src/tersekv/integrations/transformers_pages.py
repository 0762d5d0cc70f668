"""Which token of a Hugging Face batch lies in which page: padding is skipped, windows reuse their pages.

transformers counts a batch in columns: every row has the same number of tokens, padding among them. Here a row is a
request that holds its real tokens alone, so that padding takes no room and no time. All of this is host bookkeeping;
what the kernels need is made once per forward and shared by the layers that see the same keys.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import OutOfPagesError
from ..pages import PageCopy, PagePool
from .transformers_layers import CACHE_ARGUMENT

LOST = (
    f"{CACHE_ARGUMENT}: want the whole past, got one of which a part, tokens that a window sees or the state of a "
    "layer, a failed call has overwritten; call reset() and start again"
)
_TABLE_STEP = 8  # page tables grow in steps of this many columns, so that few shapes are ever planned for


Run = tuple[int, int]  # pages: the first, and the one behind the last


def runs(pages: Iterable[int]) -> list[Run]:
    """Pages, those together that follow each other."""
    found: list[Run] = []
    for page in sorted(pages):
        if found and found[-1][1] == page:
            found[-1] = (found[-1][0], page + 1)
        else:
            found.append((page, page + 1))
    return found


def pages_of(found: Iterable[Run]) -> set[int]:
    """The pages of runs."""
    return {page for begin, end in found for page in range(begin, end)}


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


class Capacity(NamedTuple):
    """How many pages a layer has.

    page_size:   tokens of a page
    chunk:       most new tokens of a request that are written and attend together
    max_tokens:  tokens of a request that there is room for from the start; None: those of the first forward
    num_pages:   a limit; None: grow as tokens come
    """

    page_size: int
    chunk: int
    max_tokens: int | None
    num_pages: int | None


def ring_pages(window: int, chunk: int, page_size: int) -> int:
    """Pages in which a request with a sliding window always finds what `chunk` new tokens see."""
    return -(-(window - 1 + chunk) // page_size) + 1


class RequestPages:
    """The pages of B requests, for all layers of one window.

    Without a window a request holds a page for every `page_size` tokens. With one, it holds at most `ring` pages, and
    token t lies in number t // page_size % ring of them: what it overwrites is before every window still to come.
    """

    def __init__(self, window: int | None, capacity: Capacity, counts: Sequence[int], first: int) -> None:
        """counts: tokens of each request, all 0; first: tokens of the longest request in the first forward."""
        size = capacity.page_size
        self._capacity = capacity
        self._window = window
        self.ring = None if window is None else ring_pages(window, capacity.chunk, size)
        each = -(-max(first, capacity.max_tokens or 0) // size) + 1
        most = len(counts) * (each if self.ring is None else min(each, self.ring))
        self.pool = PagePool(max(1, most if capacity.num_pages is None else capacity.num_pages), size)
        self._ids = [(0, b) for b in range(len(counts))]
        self._generation = 0
        self._tables: dict[int, Tensor] = {}  # by width, as long as no page changes hands
        self._intact = [0] * len(counts)  # first token of each request whose row has not been overwritten
        for request in self._ids:
            self.pool.add(request)

    def __copy__(self) -> RequestPages:
        """The same pages, to go back to."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other.pool, other._tables, other._intact = copy.copy(self.pool), dict(self._tables), list(self._intact)
        return other

    def extend(self, counts: Sequence[int]) -> list[PageCopy]:
        """Room for `counts[b]` tokens in all of request b, of every request or of none: raises OutOfPagesError."""
        used = self._used
        new = [self._held(n) - self.pool.num_tokens(r) for r, n in zip(self._ids, counts, strict=True)]
        copies = self._with_room(lambda: self.pool.extend_all(self._ids, new))
        if copies or self._used != used:
            self._tables = {}
        if self.ring is not None:
            size = self.pool.page_size
            for b, n in enumerate(counts):
                self._intact[b] = max(self._intact[b], ((n - 1) // size - self.ring + 1) * size)
        return copies

    def table(self, most: int) -> Tensor:
        """[B, max_pages] int64 on the host: the page of every token up to `most`; −1 where there is none."""
        width = -(-most // self.pool.page_size)
        width += -width % _TABLE_STEP
        if width not in self._tables:
            columns = width if self.ring is None else self.ring
            held = self.pool.page_table(self._ids, device="cpu", max_pages=columns).to(torch.int64)
            self._tables[width] = held if self.ring is None else held[:, torch.arange(width, device="cpu") % self.ring]
        return self._tables[width]

    def select(self, sources: Sequence[int]) -> list[PageCopy]:
        """Request i becomes a copy of what request sources[i] was. Pages are shared; those of a window are copied.

        Half done where it raises OutOfPagesError: see `Book.undone`.
        """
        self._generation += 1
        self._tables = {}
        new = [(self._generation, b) for b in range(len(sources))]
        copies: list[PageCopy] = []
        heirs: dict[int, int] = {}  # of a window: the first request that keeps a source's own pages
        for b, source in enumerate(sources):
            if self.ring is None or heirs.setdefault(source, b) == b:
                self.pool.fork(self._ids[source], new[b])
        for request in self._ids:
            self.pool.free(request)
        if self.ring is not None:
            for b, source in enumerate(sources):
                if heirs[source] != b:
                    tokens = self.pool.num_tokens(new[heirs[source]])
                    self._with_room(partial(self.pool.add, new[b], tokens))
                    both = zip(self.pool.pages(new[heirs[source]]), self.pool.pages(new[b]), strict=True)
                    copies += [PageCopy(*pair) for pair in both]
        self._ids, self._intact = new, [self._intact[s] for s in sources]
        return copies

    def hold(self, pages: set[int]) -> bool:
        """Whether a request has one of these pages."""
        return any(not pages.isdisjoint(self.pool.pages(request)) for request in self._ids)

    def held_pages(self) -> list[Run]:
        """Pages that some request has."""
        return runs({page for request in self._ids for page in self.pool.pages(request)})

    def pages_between(self, before: Sequence[int], after: Sequence[int]) -> set[int]:
        """Pages of tokens before[b] to after[b] of each request."""
        size, found = self.pool.page_size, set()
        for request, low, high in zip(self._ids, before, after, strict=True):
            pages = self.pool.pages(request)
            first, last = low // size, -(-high // size)
            if self.ring is not None:
                first = max(first, last - self.ring)
            found |= {pages[i if self.ring is None else i % self.ring] for i in range(first, last) if high > low}
        return found

    def lose(self, by: RequestPages) -> None:
        """What later pages of the same requests have overwritten, these have lost as well."""
        self._intact = list(by._intact)

    def check_crop(self, counts: Sequence[int]) -> None:
        """Raise unless every request can go back to `counts[b]` tokens."""
        for b, n in enumerate(counts):
            if self._window is not None and n > 0 and max(0, n - self._window + 1) < self._intact[b]:
                want = self._intact[b] + self._window - 1
                raise ValueError(
                    f"crop: want at least {want} tokens kept in request {b}, since a window of {self._window} keeps "
                    f"no older ones (a larger chunk keeps more), got {n}"
                )

    def crop(self, counts: Sequence[int]) -> None:
        """Go back to `counts[b]` tokens of each request."""
        for b, (request, n) in enumerate(zip(self._ids, counts, strict=True)):
            self.pool.truncate(request, min(self._held(n), self.pool.num_tokens(request)))
            self._intact[b] = self._intact[b] if n else 0

    @property
    def _used(self) -> int:
        return self.pool.num_pages - self.pool.num_free_pages

    def _held(self, tokens: int) -> int:
        """Tokens that the pool is asked to keep of a request that has `tokens`."""
        return tokens if self.ring is None else min(tokens, self.ring * self.pool.page_size)

    def _with_room(self, take: Callable[[], Any]) -> Any:
        """Take pages; make the pool larger as long as it has too few and may grow."""
        while True:
            try:
                return take()
            except OutOfPagesError as e:
                pages = self.pool.num_pages
                if self._capacity.num_pages is not None:
                    raise OutOfPagesError(
                        f"num_pages: want more than {pages} pages of {self.pool.page_size} tokens a layer for these "
                        f"{len(self._ids)} requests, got a limit of {pages} ({e})"
                    ) from None
                self.pool.grow(pages + max(len(self._ids), pages // 4))


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
    used = min(used + -used % _TABLE_STEP, table.shape[1])
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
