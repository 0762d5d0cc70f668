"""TieredPool: a PagePool that keeps what requests computed, and moves what none of them reads to the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nsmallest
from typing import Any, NamedTuple

import torch

from .cache import PagedKVCache, PagedLatentCache
from .errors import OutOfPagesError
from .page_mover import Cache, PageMover, cold_template
from .pages import PagePool
from .prefix import Tokens, page_keys, token_ids
from .scalars import as_non_negative_int, as_positive_int

_CHUNK = 32 << 20  # bytes on their way at a time


@dataclass(slots=True, eq=False)
class KeptPage:
    """A full page that is kept for later requests; what a policy looks at."""

    key: bytes  # of its tokens and all before (`prefix.page_keys`)
    depth: int  # pages before it
    hot: int | None  # page of the cache
    cold: int | None = None  # page in the host's memory; both: they hold the same tokens
    last_used: int = 0  # number of the call that acquired or freed it last
    uses: int = 0  # requests that found it
    arrival: tuple[int, Any] | None = None  # number and event of its last way back


class Acquired(NamedTuple):
    """What `TieredPool.acquire` found."""

    pages: tuple[int, ...]  # of the request, in the order of its tokens
    num_tokens: int  # that these pages hold already, from the first on
    num_new_tokens: int  # to compute and append
    num_cold_tokens: int  # of num_tokens: that come from the host's memory
    ready: Any  # torch.cuda.Event after which they are there; None: they are

    def wait(self, stream: Any = None) -> None:
        """Let a stream wait until the pages are there, by default the current one of the cache's device. The host does
        not wait."""
        if self.ready is not None:
            (stream or torch.cuda.current_stream(self.ready.device)).wait_event(self.ready)


def _last_arrival(pages: Iterable[KeptPage]) -> Any:
    """The event after which all of these pages are there; None: they are."""
    arrivals = [page.arrival for page in pages if page.arrival is not None]
    return max(arrivals, key=lambda arrival: arrival[0])[1] if arrivals else None


def lru(page: KeptPage) -> tuple[int, int]:
    """The policy that lets pages go in the order in which they were used last, the ends of prompts first."""
    return page.last_used, -page.depth


class TieredPool(PagePool):
    """A `PagePool` of a cache that finds prefixes of earlier requests again, and a colder tier of it on the host.

        >>> pool = tersekv.TieredPool(cache, cold_pages=64, cold_format="int4_per_token_head")
        >>> prompt = list(range(40))
        >>> pool.acquire("first", prompt).num_new_tokens  # nothing is known yet: append 40 rows
        40
        >>> pool.release("first", prompt)
        >>> found = pool.acquire("second", prompt)  # two full pages of 16
        >>> found.wait()
        >>> found.num_tokens, found.num_new_tokens
        (32, 8)

    cache:        the PagedKVCache or PagedLatentCache whose pages these are; appends and attentions go on as ever
    cold_pages:   pages in the host's memory, pinned for a GPU; 0: what makes room is forgotten
    cold_format:  of these, as `allocate` takes it; None: the cache's own formats and attributes, so bytes are copied
    policy:       KeptPage → a number or tuple; the smallest goes first. Default: least recently used
    chunk_bytes:  on their way at a time
    cold_options: of `allocate`: rotation, scales of the tensor or of channels

    A request's pages keep their numbers as long as it runs, so page tables of a captured graph stay true, and are
    never moved away. Full pages are shared between requests and never written again; the last, partly filled page is a
    request's own. Where a call needs room, pages that no request reads move away: on a GPU by streams beside the
    caller's, which waits only until they are read. A page that came back is kept on the host too, as long as there is
    room, and leaves again for nothing: requantising does not add up.

    `acquire` writes pages that nobody owns: copy what `extend` names (`copy_pages`) before the pool's next call.

    Not thread-safe, and one stream at a time appends. Raises TypeError or ValueError for another kind of cache and for
    a cold format that cannot hold its rows.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        cold_pages: int,
        cold_format: Any = None,
        policy: Callable[[KeptPage], Any] = lru,
        chunk_bytes: int = _CHUNK,
        **cold_options: Any,
    ) -> None:
        if not isinstance(cache, (PagedKVCache, PagedLatentCache)):
            raise TypeError(f"cache: want PagedKVCache or PagedLatentCache, got {type(cache).__name__}")
        if not callable(policy):
            raise TypeError(f"policy: want a function of a KeptPage, got {type(policy).__name__}")
        super().__init__(cache.num_pages, cache.page_size)
        cold_pages, chunk_bytes = (
            as_non_negative_int("cold_pages", cold_pages), as_positive_int("chunk_bytes", chunk_bytes),
        )  # fmt: skip
        template = cold_template(cache, cold_format, **cold_options)
        self._mover = PageMover(cache, template, cold_pages, chunk_bytes) if cold_pages else None
        self._policy = policy
        self._kept: dict[bytes, KeptPage] = {}
        self._of_hot: dict[int, KeptPage] = {}
        self._free_cold = list(range(cold_pages))
        heapify(self._free_cold)
        self._twins: dict[Hashable, set[KeptPage]] = {}  # by request: what it computed too, in pages of its own
        self._returning: set[KeptPage] = set()  # found by the call that makes room for them
        self._calls = self._arrivals = 0
        self.pages_moved_away = self.pages_moved_back = 0  # since the pool was made

    def __reduce__(self) -> tuple:
        raise TypeError("TieredPool: want one pool a cache, got a copy")

    def __copy__(self) -> PagePool:
        return self.__reduce__()[0]

    def grow(self, num_pages: int) -> None:
        raise ValueError(f"num_pages: want those of the cache, {self.num_pages}, got {num_pages}")

    @property
    def num_evictable_pages(self) -> int:
        """Pages that are kept and no request reads: what can become free."""
        return sum(self._owners[page] == 1 for page in self._of_hot)

    @property
    def num_cold_pages(self) -> int:
        """Pages that are kept in the host's memory."""
        return sum(page.cold is not None for page in self._kept.values())

    @property
    def cold_nbytes(self) -> int:
        """Bytes of the host's memory that the tier takes."""
        return 0 if self._mover is None else self._mover.nbytes

    def match(self, tokens: Tokens) -> int:
        """Tokens of a prompt that `acquire` would find. The last token is never found: its row gives the answer."""
        return len(self._found(tokens)[1]) * self.page_size

    def acquire(self, request_id: Hashable, tokens: Tokens) -> Acquired:
        """A new request with these tokens: the pages that are known, and room for the rest.

        Pages in the host's memory are on their way back when the call returns: let the stream that reads them wait
        (`Acquired.wait`). Raises OutOfPagesError, with the pool as it was, if running requests read too many pages.
        """
        self._new(request_id)
        count, found = self._found(tokens)
        cold = [page for page in found if page.hot is None]
        self._returning = set(cold)
        taken = [page.hot for page in found if page.hot is not None]
        for hot in taken:
            self._owners[hot] += 1
        try:
            fresh = self._take(-(-count // self.page_size) - len(found) + len(cold))
            taken += fresh
            self._come_back(cold, fresh)
        except BaseException:
            self._release(taken)
            raise
        finally:
            self._returning = set()
        self._calls += 1
        for page in found:
            page.last_used, page.uses = self._calls, page.uses + 1
        pages = [page.hot for page in found if page.hot is not None] + fresh[len(cold) :]
        self._pages[request_id], self._tokens[request_id] = pages, count
        held = len(found) * self.page_size
        return Acquired(tuple(pages), held, count - held, len(cold) * self.page_size, _last_arrival(found))

    def commit(self, request_id: Hashable, tokens: Tokens) -> None:
        """Keep the full pages of a request for others, once its rows are appended: after its prompt, say.

        tokens:  all of the request so far, or the first of them

        Raises ValueError for more tokens than the request has, and for pages that are kept with others.
        """
        pages, ids = self._pages[self._known(request_id)], token_ids(tokens)
        if len(ids) > self._tokens[request_id]:
            raise ValueError(f"tokens: want at most the request's {self._tokens[request_id]}, got {len(ids)}")
        keys = page_keys(ids, self.page_size)
        for page, key in zip(pages, keys, strict=False):
            if page in self._of_hot and self._of_hot[page].key != key:
                raise ValueError(f"tokens: want those of page {page}, which is kept, got others")
        for depth, (page, key) in enumerate(zip(pages, keys, strict=False)):
            kept = self._kept.setdefault(key, KeptPage(key, depth, None))
            if kept.hot is None:
                kept.hot, kept.arrival, self._of_hot[page] = page, None, kept
                self._owners[page] += 1
            elif kept.hot != page:  # two requests computed it, and this page is not shared
                self._twins.setdefault(request_id, set()).add(kept)

    def release(self, request_id: Hashable, tokens: Tokens | None = None) -> None:
        """The request ends: `commit` and `free`. Raises ValueError for a request that was released before."""
        if tokens is not None:
            self.commit(request_id, tokens)
        self.free(request_id)

    def free(self, request_id: Hashable) -> None:
        """Forget a request. Its pages that are kept stay, until others need the room."""
        self._calls += 1
        for page in self._pages[self._known(request_id)]:
            if page in self._of_hot:
                self._of_hot[page].last_used = self._calls
        for kept in self._twins.pop(request_id, ()):
            kept.last_used = self._calls
        super().free(request_id)

    def make_room(self, num_pages: int) -> None:
        """Have `num_pages` free pages. What a call does by itself may so be done before, where the streams are idle.

        Raises OutOfPagesError, with the pool as it was, if running requests read too many pages.
        """
        short = as_non_negative_int("num_pages", num_pages) - len(self._free)
        if short <= 0:
            return
        idle = [kept for page, kept in self._of_hot.items() if self._owners[page] == 1]
        if len(idle) < short:
            got = f"{len(self._free)} and {len(idle)} that no request reads, of {self.num_pages}"
            raise OutOfPagesError(f"want {num_pages} free pages, got {got}")
        self._move_away(nsmallest(short, idle, key=self._policy))

    def _take(self, n: int) -> list[int]:
        self.make_room(n)
        return super()._take(n)

    def _found(self, tokens: Tokens) -> tuple[int, list[KeptPage]]:
        """(number of tokens, the kept pages that hold the first of them)."""
        ids, found = token_ids(tokens), []
        for key in page_keys(ids[:-1], self.page_size):
            if key not in self._kept:
                break
            found.append(self._kept[key])
        return len(ids), found

    def _come_back(self, pages: list[KeptPage], to: Iterable[int]) -> None:
        moves = [(hot, page) for page, hot in zip(pages, to, strict=False)]
        if not moves or self._mover is None:
            return
        event = self._mover.back([(hot, page.cold) for hot, page in moves if page.cold is not None])
        self.pages_moved_back += len(moves)
        self._arrivals += 1
        for hot, page in moves:
            page.hot, self._of_hot[hot] = hot, page
            self._owners[hot] += 1
            page.arrival = None if event is None else (self._arrivals, event)

    def _move_away(self, pages: list[KeptPage]) -> None:
        """Free the cache's pages of these, the least useful first."""
        new = [page for page in pages if page.cold is None]
        self._make_cold_room(len(new), {*pages} | self._returning)
        # Where there is no room for all, the most useful stay.
        moves = [*zip(reversed(new), nsmallest(len(new), self._free_cold), strict=False)]
        if self._mover is not None:
            self._mover.away([(page.hot, cold) for page, cold in moves if page.hot is not None])
            self.pages_moved_away += len(moves)
            self._mover.wait(_last_arrival(pages))  # of pages for which perhaps nobody has waited yet
        for page, _ in moves:
            page.cold = heappop(self._free_cold)
        hot = []
        for page in pages:
            assert page.hot is not None
            hot.append(page.hot)
            del self._of_hot[page.hot]
            page.hot = page.arrival = None
            if page.cold is None:
                del self._kept[page.key]
        self._release(hot)

    def _make_cold_room(self, n: int, stay: set[KeptPage]) -> None:
        """Have up to n free pages on the host: first those that the cache has too, then by the policy."""
        short = n - len(self._free_cold)
        if short <= 0 or self._mover is None:
            return
        there = [page for page in self._kept.values() if page.cold is not None and page not in stay]
        for page in nsmallest(short, there, key=lambda page: (page.hot is None, self._policy(page))):
            assert page.cold is not None
            heappush(self._free_cold, page.cold)
            page.cold = None
            if page.hot is None:
                del self._kept[page.key]
