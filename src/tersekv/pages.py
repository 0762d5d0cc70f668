"""PagePool: which request owns which page of a cache. Plain host bookkeeping; tensors are made when asked for.

Typical step: `copies = pool.extend_all(requests, new_tokens)`, `copy_pages(cache, copies)` before the next append, then
`slot_mapping`, `page_table` and `seq_lens` for the kernels.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from .cache import PagedLayers
from .errors import OutOfPagesError
from .index_layers import PagedIndexLayer
from .layers import PagedKVLayer
from .scalars import as_int, as_non_negative_int, as_positive_int
from .tracing import tracing

Device = torch.device | str | None


class PageCopy(NamedTuple):
    """Page `dst` takes the place of the shared page `src`: its rows must be copied before the next append."""

    src: int
    dst: int


class RaggedPages(NamedTuple):
    """The pages of B requests in FlashInfer's form: all int32."""

    kv_indptr: Tensor  # [B + 1] first page of each request in kv_indices
    kv_indices: Tensor  # [total pages]
    last_page_len: Tensor  # [B] tokens in the last page; 0 for a request without tokens


class PagePool:
    """Pages of one cache, shared out to requests.

        >>> pool = tersekv.PagePool(num_pages=64, page_size=16)
        >>> pool.add("a", num_tokens=20)
        >>> pool.pages("a"), pool.slot_mapping(["a"], [2])
        ((0, 1), tensor([18, 19]))

    Requests are named by any hashable id. Pages are shared between forks and counted; a page that is shared is never
    written: whoever adds a token to a shared, partly filled page gets a copy of it first.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = (
            as_positive_int("num_pages", num_pages),
            as_positive_int("page_size", page_size),
        )
        self._free = list(range(self.num_pages - 1, -1, -1))  # the last is taken first
        self._owners = [0] * self.num_pages
        self._pages: dict[Hashable, list[int]] = {}
        self._tokens: dict[Hashable, int] = {}

    def __copy__(self) -> PagePool:
        """The same requests in a pool of its own: what happens to one is not seen in the other."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other._free, other._owners, other._tokens = list(self._free), list(self._owners), dict(self._tokens)
        other._pages = {request: list(pages) for request, pages in self._pages.items()}
        return other

    def __repr__(self) -> str:
        free = f"{len(self._free)} of {self.num_pages} pages free"
        return f"{type(self).__name__}({len(self)} requests, {free}, page_size={self.page_size})"

    def __len__(self) -> int:
        """Requests in the pool."""
        return len(self._pages)

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._pages

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    @property
    def utilisation(self) -> float:
        """Fraction of the pages that some request owns."""
        return 1 - len(self._free) / self.num_pages

    def grow(self, num_pages: int) -> None:
        """Make the pool larger: the cache's tensors have `num_pages` pages now. Pages keep their owners."""
        num_pages = as_int("num_pages", num_pages)
        if num_pages < self.num_pages:
            raise ValueError(f"num_pages: want at least {self.num_pages}, got {num_pages}")
        self._free = [*range(num_pages - 1, self.num_pages - 1, -1), *self._free]
        self._owners += [0] * (num_pages - self.num_pages)
        self.num_pages = num_pages

    def pages(self, request_id: Hashable) -> tuple[int, ...]:
        """The pages of a request, in the order of its tokens."""
        return tuple(self._pages[self._known(request_id)])

    def num_tokens(self, request_id: Hashable) -> int:
        """Tokens of a request."""
        return self._tokens[self._known(request_id)]

    def add(self, request_id: Hashable, num_tokens: int = 0) -> None:
        """A new request with room for `num_tokens`. Raises OutOfPagesError and leaves the pool as it was."""
        self._new(request_id)
        num_tokens = as_non_negative_int("num_tokens", num_tokens)
        self._pages[request_id] = self._take(-(-num_tokens // self.page_size))
        self._tokens[request_id] = num_tokens

    def extend(self, request_id: Hashable, num_tokens: int = 1) -> list[PageCopy]:
        """Room for `num_tokens` more. Returns the page to copy before they are written, if any (see `copy_pages`).

        Raises OutOfPagesError and leaves the pool as it was.
        """
        return self.extend_all([request_id], [num_tokens])

    def extend_all(self, request_ids: Sequence[Hashable], num_tokens: Iterable[int]) -> list[PageCopy]:
        """Room for `num_tokens[i]` more in each request, or in none. Returns the pages to copy before they are written.

        Raises OutOfPagesError and leaves the pool as it was.
        """
        numbers = self._counts("num_tokens", request_ids, num_tokens)
        counts = [as_non_negative_int("num_tokens", n) for n in numbers]
        wanted: list[tuple[int, bool]] = []  # fresh pages of each request, and whether the first is a copy
        owners: dict[int, int] = {}  # of partly filled pages, once the requests before have copies of their own
        for request, n in zip(request_ids, counts, strict=True):
            pages, old = self._pages[request], self._tokens[request]
            shared = n > 0 and old % self.page_size > 0 and owners.setdefault(pages[-1], self._owners[pages[-1]]) > 1
            if shared:
                owners[pages[-1]] -= 1
            wanted.append((-(-(old + n) // self.page_size) - len(pages) + shared, shared))
        fresh = iter(self._take(sum(more for more, _ in wanted)))
        copies = []
        for request, n, (more, shared) in zip(request_ids, counts, wanted, strict=True):
            pages, new = self._pages[request], list(islice(fresh, more))
            if shared:
                copies.append(PageCopy(pages[-1], new[0]))
                self._owners[pages.pop()] -= 1
            pages += new
            self._tokens[request] += n
        return copies

    def fork(self, source_id: Hashable, request_id: Hashable) -> None:
        """A new request with the tokens of `source_id`, sharing its pages. Takes no page."""
        pages = self._pages[self._known(source_id)]
        self._new(request_id)
        for page in pages:
            self._owners[page] += 1
        self._pages[request_id], self._tokens[request_id] = list(pages), self._tokens[source_id]

    def truncate(self, request_id: Hashable, num_tokens: int) -> None:
        """Keep the first `num_tokens` of a request, such as the accepted drafts; free the pages after them."""
        pages, old = self._pages[self._known(request_id)], self._tokens[request_id]
        num_tokens = as_int("num_tokens", num_tokens)
        if not 0 <= num_tokens <= old:
            raise ValueError(f"num_tokens: want in [0, {old}], got {num_tokens}")
        keep = -(-num_tokens // self.page_size)
        self._release(pages[keep:])
        del pages[keep:]
        self._tokens[request_id] = num_tokens

    def free(self, request_id: Hashable) -> None:
        """Forget a request. Pages that no other request shares become free."""
        self._release(self._pages.pop(self._known(request_id)))
        del self._tokens[request_id]

    def page_table(
        self, request_ids: Sequence[Hashable], *, device: Device = None, max_pages: int | None = None
    ) -> Tensor:
        """[B, max_pages] int32, −1 after a request's pages. max_pages: None takes the longest request's."""
        rows = [self._pages[self._known(r)] for r in request_ids]
        longest = max(map(len, rows), default=0)
        width = longest if max_pages is None else as_int("max_pages", max_pages)
        if width < longest:
            raise ValueError(f"max_pages: want at least {longest}, got {max_pages}")
        return _int32([row + [-1] * (width - len(row)) for row in rows], device).view(len(rows), width)

    def seq_lens(self, request_ids: Sequence[Hashable], *, device: Device = None) -> Tensor:
        """[B] int32: tokens of each request."""
        return _int32([self.num_tokens(r) for r in request_ids], device)

    def slot_mapping(
        self, request_ids: Sequence[Hashable], new_tokens: Iterable[int], *, device: Device = None
    ) -> Tensor:
        """[sum(new_tokens)] int64: page * S + offset of the last `new_tokens[i]` tokens of each request, in order.

        Raises ValueError for a request that is named twice, whose slots would be the same.
        """
        slots = []
        for request, position in self._newest(request_ids, new_tokens):
            page, offset = divmod(position, self.page_size)
            slots.append(self._pages[request][page] * self.page_size + offset)
        return torch.tensor(slots, dtype=torch.int64, device=device)

    def positions(self, request_ids: Sequence[Hashable], new_tokens: Iterable[int], *, device: Device = None) -> Tensor:
        """[sum(new_tokens)] int64: position in its request of each token of `slot_mapping`; what RoPE needs."""
        positions = [position for _, position in self._newest(request_ids, new_tokens)]
        return torch.tensor(positions, dtype=torch.int64, device=device)

    def ragged_pages(self, request_ids: Sequence[Hashable], *, device: Device = None) -> RaggedPages:
        """kv_indptr, kv_indices and last_page_len of these requests."""
        indptr, indices, last = [0], [], []
        for request in request_ids:
            n, pages = self.num_tokens(request), self._pages[request]
            indices += pages
            indptr.append(len(indices))
            last.append((n - 1) % self.page_size + 1 if n else 0)
        return RaggedPages(*(_int32(x, device) for x in (indptr, indices, last)))

    def _newest(self, request_ids: Sequence[Hashable], new_tokens: Iterable[int]) -> list[tuple[Hashable, int]]:
        counts = self._counts("new_tokens", request_ids, new_tokens)
        out = []
        for request, n in zip(request_ids, counts, strict=True):
            total = self.num_tokens(request)
            if not 0 <= n <= total:
                raise ValueError(f"new_tokens: want in [0, {total}] for request {request!r}, got {n}")
            out += [(request, position) for position in range(total - n, total)]
        return out

    def _counts(self, name: str, request_ids: Sequence[Hashable], numbers: Iterable[int]) -> list[int]:
        """A number for each of these requests, each named once."""
        try:
            listed = iter(numbers)
        except TypeError:  # a tensor or an array without dimensions has an __iter__ too
            raise TypeError(f"{name}: want a number for each request, got {type(numbers).__name__}") from None
        counts = [as_int(name, n) for n in listed]
        if len(request_ids) != len(counts):
            raise ValueError(f"{name}: want {len(request_ids)} numbers, got {len(counts)}")
        self._once(request_ids)
        return counts

    def _once(self, request_ids: Sequence[Hashable]) -> None:
        seen = set()
        for request in map(self._known, request_ids):
            if request in seen:
                raise ValueError(f"request_ids: want each request once, got {request!r} again")
            seen.add(request)

    def _take(self, n: int) -> list[int]:
        if n > len(self._free):
            raise OutOfPagesError(f"want {n} free pages, got {len(self._free)} of {self.num_pages}")
        taken = [self._free.pop() for _ in range(n)]
        for page in taken:
            self._owners[page] = 1
        return taken

    def _release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)

    def _known(self, request_id: Hashable) -> Hashable:
        if request_id not in self._pages:
            raise ValueError(f"request_id: want a request of this pool, got {request_id!r}")
        return request_id

    def _new(self, request_id: Hashable) -> None:
        if request_id in self._pages:
            raise ValueError(f"request_id: want a new one, got {request_id!r}, which is in the pool")


@torch.no_grad()
def copy_pages(cache: PagedLayers, copies: Sequence[tuple[int, int]]) -> None:
    """Copy whole pages, scales included, in every layer of a cache: (src, dst) pairs, as if one after the other.

        >>> pool.fork("a", "c")
        >>> copies = pool.extend("c", 1)  # the fork's last page is partly filled and shared
        >>> tersekv.copy_pages(cache, copies)

    Raises ValueError for a page outside the cache, and TypeError for what is no cache or no list of pairs.
    """
    if not isinstance(cache, PagedLayers):
        want = "PagedKVCache, PagedLatentCache or PagedIndexCache"
        raise TypeError(f"cache: want {want}, got {type(cache).__name__}")
    if not isinstance(copies, Sequence):
        raise TypeError(f"copies: want a list of (src, dst), got {type(copies).__name__}")
    first: dict[int, int] = {}  # page → the page whose present rows it will hold
    for pair in copies:
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError(f"copies: want (src, dst) pairs, got {pair!r}")
        src, dst = (as_int("copies", page) for page in pair)
        if not (0 <= src < cache.num_pages and 0 <= dst < cache.num_pages):
            raise ValueError(f"copies: want pages in [0, {cache.num_pages}), got ({src}, {dst})")
        first[dst] = first.get(src, src)
    if not first:
        return
    src_pages, dst_pages = torch.tensor([[*first.values()], [*first]], device=cache.device)
    for tensors in _by_memory(cache):
        rows = [t[src_pages] for t in tensors]  # all before any is written
        for t, x in zip(tensors, rows, strict=True):
            t[dst_pages] = x


def _by_memory(cache: PagedLayers) -> list[list[Tensor]]:
    """The tensors of all layers, those together that may share memory: K and V, or two layers, may be one tensor."""
    tensors = []
    for layer in cache.layers:
        if isinstance(layer, PagedKVLayer):
            of_layer = [layer.k, layer.v, layer.k_scale_cache, layer.v_scale_cache]
        elif isinstance(layer, PagedIndexLayer):
            of_layer = [layer.k, layer.scale]
        else:
            of_layer = [layer.ckv, layer.kpe, layer.ckv_scale_cache]
        # As bytes: some devices index no fp8.
        tensors += [t.view(torch.uint8) if t.element_size() == 1 else t for t in of_layer if t is not None]
    if tracing():  # tensors may have no addresses
        return [tensors]
    groups: list[list[Tensor]] = []
    end = -1
    for t in sorted((t for t in tensors if t.numel()), key=Tensor.data_ptr):
        if t.data_ptr() >= end:
            groups.append([])
        groups[-1].append(t)
        last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
        end = max(end, t.data_ptr() + (last + 1) * t.element_size())
    return groups


def written_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The rows that were written into tensors [P, S, …] of a zeroed cache in 16 bits, as [T, …] each, by slot."""
    rows = [x.flatten(0, 1) for x in tensors]
    there = torch.stack([x.flatten(1).any(1) for x in rows]).any(0)
    return tuple(x[there] for x in rows)


def _int32(values: list, device: Device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
