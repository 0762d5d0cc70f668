"""The pages of each request of a Hugging Face batch, for all layers of one window: a window's are used again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import OutOfPagesError
from ..pages import PageCopy, PagePool

TABLE_STEP = 8  # page tables grow in steps of this many columns, so that few shapes are ever planned for
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
        self.intact = [0] * len(counts)  # first token of each request whose row has not been overwritten
        for request in self._ids:
            self.pool.add(request)

    def __copy__(self) -> RequestPages:
        """The same pages, to go back to."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other.pool, other._tables, other.intact = copy.copy(self.pool), dict(self._tables), list(self.intact)
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
                self.intact[b] = max(self.intact[b], ((n - 1) // size - self.ring + 1) * size)
        return copies

    def table(self, most: int) -> Tensor:
        """[B, max_pages] int64 on the host: the page of every token up to `most`; −1 where there is none."""
        width = -(-most // self.pool.page_size)
        width += -width % TABLE_STEP
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
        self._ids, self.intact = new, [self.intact[s] for s in sources]
        return copies

    def hold(self, pages: set[int]) -> bool:
        """Whether a request has one of these pages."""
        return any(not pages.isdisjoint(self.pool.pages(request)) for request in self._ids)

    def held_pages(self) -> list[Run]:
        """Pages that some request has."""
        return runs({page for request in self._ids for page in self.pool.pages(request)})

    def listed_pages(self) -> list[int]:
        """The pages of one request after those of the other."""
        return [page for request in self._ids for page in self.pool.pages(request)]

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
        self.intact = list(by.intact)

    def check_crop(self, counts: Sequence[int]) -> None:
        """Raise unless every request can go back to `counts[b]` tokens."""
        for b, n in enumerate(counts):
            if self._window is not None and n > 0 and max(0, n - self._window + 1) < self.intact[b]:
                want = self.intact[b] + self._window - 1
                raise ValueError(
                    f"crop: want at least {want} tokens kept in request {b}, since a window of {self._window} keeps "
                    f"no older ones (a larger chunk keeps more), got {n}"
                )

    def crop(self, counts: Sequence[int]) -> None:
        """Go back to `counts[b]` tokens of each request."""
        for b, (request, n) in enumerate(zip(self._ids, counts, strict=True)):
            self.pool.truncate(request, min(self._held(n), self.pool.num_tokens(request)))
            self.intact[b] = self.intact[b] if n else 0

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
