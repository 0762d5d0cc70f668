"""`TersekvStaticCache`: a `TersekvCache` of fixed room that knows its tokens on the device alone, for compiled models.

`TersekvCache` counts tokens and pages on the host, and so a graph ends at each of its attentions. Here every request
has its own pages from the start, nothing that a forward decides depends on a number that the host would have to know,
and all tensors that live from token to token stay where they are: one graph holds a whole decode step, and a CUDA graph
of it can be replayed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from ..errors import OutOfPagesError, UnsupportedError
from ..layers import Formats
from ..scalars import as_positive_int
from .transformers_cache import TersekvCache
from .transformers_cache_layers import TersekvLayer, WithState
from .transformers_layers import CACHE_ARGUMENT
from .transformers_pages import LOST, Piece, Step
from .transformers_requests import Capacity, ring_pages
from .transformers_store import LatentStore, Store

FIRST = (
    "the first forward of a TersekvStaticCache allocates its pages: run it eagerly, as generate does, or call "
    "early_initialization before it"
)
INSTEAD = "a TersekvCache can"


class StaticBook:
    """The tokens of a batch of fixed size, counted on the device, and the pages that each request always has.

    The layers of a forward come one after the other: what the first with a window finds out serves the others with it,
    and the last one counts.
    """

    def __init__(self, capacity: Capacity, windows: Sequence[int | None]) -> None:
        assert capacity.max_tokens is not None
        self.page_size, self._chunk = capacity.page_size, capacity.chunk
        self._layers, self._windows = len(windows), list(dict.fromkeys(windows))
        self._width = -(-capacity.max_tokens // capacity.page_size)
        self.room = self._width * capacity.page_size  # tokens of a request
        self.batch = 0  # requests; 0: none yet
        self.columns = torch.zeros((), dtype=torch.int64, device="cpu")  # tokens of every row, padding included
        self.counts = self.columns  # [B] int64: real tokens of each request
        self.tables: dict[int | None, Tensor] = {}  # [B, max_pages] int32
        self._next = 0  # the layer that comes next in this forward
        self._length = 0  # new tokens of a request in this forward
        self._after: tuple[Tensor, Tensor] | None = None  # columns and counts behind it
        self.first = True  # no forward has come to its end
        self.lost = False  # a window's pages were written for a forward that was undone
        self._steps: dict[tuple[int | None, int | None], Step] = {}

    def allocate(self, batch: int, device: torch.device) -> None:
        """Requests, their counts and their pages."""
        if self.batch:
            if batch != self.batch:
                raise ValueError(
                    f"input_ids: want a batch of {self.batch}, which the cache holds, got {batch}; make another "
                    "TersekvStaticCache for another batch"
                )
            return
        self.batch = batch
        self.columns = torch.zeros((), dtype=torch.int64, device=device)
        self.counts = torch.zeros(batch, dtype=torch.int64, device=device)
        page = torch.arange(self._width, device=device)
        for window in self._windows:
            held = self.num_pages(window) // batch
            requests = torch.arange(batch, device=device)[:, None] * held
            self.tables[window] = (requests + page % held).to(torch.int32)

    def num_pages(self, window: int | None) -> int:
        """Pages of a layer. With a window, what a request's next page overwrites is before every window to come."""
        each = self._width if window is None else min(self._width, ring_pages(window, self._chunk, self.page_size))
        return self.batch * each

    def tensors(self) -> list[Tensor]:
        """All that lives from token to token."""
        return [self.columns, self.counts, *self.tables.values()]

    def reset(self) -> None:
        """Forget all tokens."""
        self.columns.zero_()
        self.counts.zero_()
        self._next, self._after, self._steps, self.first, self.lost = 0, None, {}, True, False

    def select(self, indices: Tensor) -> None:
        """Row i takes the counts of row indices[i]."""
        self.counts.copy_(self.counts.index_select(0, indices))

    def step(
        self, index: int, window: int | None, batch: int, length: int, mask: Tensor | None,
        attention_chunk: int | None = None,
    ) -> Step:  # fmt: skip
        """What attention layer `index` does in the forward that brings `length` columns of B rows.

        mask:             [B, length] bool, False for padding; None: no padding
        attention_chunk:  tokens of a chunk, within which attention stays; None: no chunks
        """
        self.allocate(batch, self.counts.device)
        if self.lost:
            raise RuntimeError(LOST)
        if index != self._next:
            raise RuntimeError(
                f"{CACHE_ARGUMENT}: want layer {self._next}, since a forward goes through all layers in order, got "
                f"layer {index}; call reset() and start again"
            )
        if index == 0:
            if length > self.room:
                raise OutOfPagesError(f"max_tokens: want room for {length} new tokens of a request, got {self.room}")
            new = length if mask is None else mask.sum(1)
            self._length, self._after = length, (self.columns + length, self.counts + new)
        kind = window, attention_chunk
        if kind not in self._steps:
            pieces = self._pieces(self.tables[window], length, mask)
            if attention_chunk is not None:
                pieces = [self._within_chunks(piece, self.tables[window], attention_chunk) for piece in pieces]
            self._steps[kind] = Step([], self.num_pages(window), pieces)
        return self._steps[kind]

    def count(self) -> None:
        """A layer has written its tokens. Behind the last one, they are counted."""
        self._next += 1
        if self._next == self._layers:
            assert self._after is not None
            self.columns.copy_(self._after[0])
            self.counts.copy_(self._after[1])
            self._next, self._after, self._steps, self.first = 0, None, {}, False

    def take_back(self, index: int) -> None:
        """Undo the forward under way, in which layer `index` failed: what lies beyond the counts is not seen."""
        if index == self._next and self._after is not None:
            windows = any(w is not None for w in self._windows)
            self.lost = windows and self._length > self._chunk and not self.first
            self._next, self._after, self._steps = 0, None, {}

    def _pieces(self, table: Tensor, length: int, mask: Tensor | None) -> list[Piece]:
        before, pieces = self.counts, []
        for begin in range(0, length, self._chunk):
            end = min(begin + self._chunk, length)
            if mask is None:
                places = before[:, None] + torch.arange(end - begin, device=table.device)
                before = before + (end - begin)
                rows = None if end - begin == length else _rows(len(table), begin, end, length, table.device).flatten()
                pieces.append(
                    Piece(rows, self._slots(table, places).flatten(), table, before.int(), None, end - begin, end)
                )
                continue
            part = mask[:, begin:end]
            new = part.sum(1)
            places = (before[:, None] + part.cumsum(1) - 1).clamp(min=0)
            slots = self._slots(table, places).where(part, -1).flatten()
            before, real = before + new, part.flatten()
            if length == 1:  # a row without a token attends to its past, and is not looked at
                pieces.append(Piece(None, slots, table, before.int(), None, 1, end, real))
                continue
            # Tokens first, request by request; behind them rows that are no request's.
            order = (~real).to(torch.uint8).argsort(stable=True)
            rows = _rows(len(table), begin, end, length, table.device).flatten()[order]
            ends = torch.cat((new[:1] * 0, new.cumsum(0))).int()
            pieces.append(Piece(rows, slots[order], table, before.int(), ends, end - begin, end, real[order]))
        return pieces

    def _within_chunks(self, piece: Piece, table: Tensor, chunk: int) -> Piece:
        """The same tokens, with a request for each chunk in which some may lie: those in which none do are empty."""
        after, most = piece.seq_lens.long(), piece.max_q_len
        new = after.new_full(after.shape, most) if piece.cu_seqlens_q is None else piece.cu_seqlens_q.diff().long()
        before = after - new
        # Of several tokens, the first may be the last of its chunk; a row without one still has a chunk to look at.
        number = torch.arange(1 if most == 1 else (most - 2) // chunk + 2, device=table.device)
        first = (after - 1).clamp(min=0) if most == 1 else before
        begin = first[:, None] // chunk * chunk + number * chunk
        low = torch.maximum(before[:, None], begin)
        high = torch.minimum(after[:, None], begin + chunk)
        pages = begin[..., None] // self.page_size + torch.arange(chunk // self.page_size, device=table.device)
        held = table[:, None].expand(-1, len(number), -1).gather(2, pages.clamp(max=table.shape[1] - 1))
        ends = (high - low).clamp(min=0).flatten().cumsum(0)
        single = most == 1 and piece.cu_seqlens_q is None
        return piece._replace(
            page_table=held.flatten(0, 1),
            seq_lens=(high - begin).clamp(min=0).flatten().int(),
            cu_seqlens_q=None if single else torch.cat((ends[:1] * 0, ends)).int(),
            max_q_len=min(most, chunk),
        )

    def _slots(self, table: Tensor, places: Tensor) -> Tensor:
        """Slots of the tokens at `places` [B, n]. Beyond the room there are none: indexing fails on every device."""
        held = (self._pages if torch.compiler.is_compiling() else self._within)(table, places)
        return held.long() * self.page_size + places % self.page_size

    def _pages(self, table: Tensor, places: Tensor) -> Tensor:
        return table.gather(1, places // self.page_size)

    def _within(self, table: Tensor, places: Tensor) -> Tensor:
        """The same; a CPU tells at once what is beyond the room."""
        try:
            return self._pages(table, places)
        except RuntimeError as e:
            wanted = int(places.max()) + 1
            if wanted <= self.room:
                raise
            raise OutOfPagesError(f"max_tokens: want room for {wanted} tokens of a request, got {self.room}") from e


def _rows(batch: int, begin: int, end: int, length: int, device: torch.device) -> Tensor:
    """[B, end - begin]: which of the B * length tokens of a forward are in columns [begin, end)."""
    return torch.arange(batch, device=device)[:, None] * length + torch.arange(begin, end, device=device)


class TersekvStaticLayer(TersekvLayer):
    """One layer of a `TersekvStaticCache`."""

    _cache: TersekvStaticCache
    is_compileable = True
    is_croppable = False
    supports_early_init = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See `hand_over`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self.hand_over(key_states, value_states)

    # Which pages there are depends on the sizes of the first keys and values.
    @torch.compiler.disable(reason=FIRST)
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate this layer's pages; only sizes, dtype and device are looked at."""
        try:
            with torch.inference_mode(False):  # else nothing outside of that mode could write into them
                self._cache.book.allocate(key_states.shape[0], key_states.device)
                pages = self._cache.book.num_pages(self.kind.kept)
                self.store = self._cache.make_store(self.index, key_states, value_states, pages)
        except BaseException:
            self._cache.release()
            raise
        self.is_initialized = True
        self.mark()

    def mark(self) -> None:
        """Tell compiled models that what is written into stays where it is: CUDA graphs then need no copies of it."""
        assert self.store is not None
        if isinstance(self.store, LatentStore):
            self.store.join()
        for x in (*self.store.tensors(), *self._cache.book.tensors()):
            torch._dynamo.mark_static_address(x)

    @property
    def first(self) -> bool:
        return self._cache.book.first

    def _begin(self, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Step, Store]:
        assert self.store is not None
        length = key.shape[2]
        if mask is not None:
            mask = mask[:, 0, :, 0] if mask.dim() == 4 else mask[:, -length:]
        if key.device != self._cache.book.counts.device:
            raise UnsupportedError(
                f"{CACHE_ARGUMENT}: want all layers on {self._cache.book.counts.device} for a TersekvStaticCache, got "
                f"layer {self.index} on {key.device}; {INSTEAD} have layers on several devices"
            )
        kind = self.kind
        step = self._cache.book.step(self.index, kind.kept, key.shape[0], length, mask, kind.attention_chunk)
        return step, self.store

    def _count(self, length: int) -> None:
        self._cache.book.count()

    def take_back(self) -> None:
        """Undo the forward under way, in which this layer failed, or one that reads what it wrote."""
        book = self._cache.book
        self.new = None
        if self.lent is not None and self.lent.first:
            return self._cache.reset()
        book.lost = book.lost or self.lent is not None
        self.forget_lent()
        book.take_back(self.index)
        self._cache.lose_states(book.first)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys, offset): all that there is room for."""
        return self._cache.book.room, 0

    def get_seq_length(self) -> Tensor:  # type: ignore[override]
        """Tokens of every row, padding included: a tensor, as transformers' own static layers have it."""
        return self._cache.book.columns

    def get_max_length(self) -> int:
        """Tokens of a row that there is room for."""
        return self._cache.book.room


class TersekvStaticMixedLayer(WithState, TersekvStaticLayer, LinearAttentionLayer):
    """A static layer with a state in transformers' own tensors."""


class TersekvStaticCache(TersekvCache):
    """A paged cache for compiled models: on a GPU `generate` compiles its decode step by itself.

        config, format, ...:  as `TersekvCache` takes them, but for `num_pages`
        max_tokens:           tokens of a sequence that there is room for, padding included: prompt and new ones

    Room for `max_tokens` of every sequence of the first batch is allocated by the first forward, which is to run
    eagerly (`generate` runs it so), or by `early_initialization`; a layer with a sliding window has room for window +
    chunk tokens. The batch keeps its size. `reset()` starts anew in the same pages: nothing is compiled again. What
    needs the host to know the tokens is refused: drafts (`crop`), batches that shrink or grow.
    """

    layer_classes = (TersekvStaticLayer, TersekvStaticMixedLayer)

    def __init__(self, config: Any, format: Formats | None = None, *, max_tokens: int, **options: Any) -> None:
        if options.pop("num_pages", None) is not None:
            raise ValueError("num_pages: want None for a TersekvStaticCache, whose room is max_tokens, got a number")
        super().__init__(config, format, max_tokens=as_positive_int("max_tokens", max_tokens), **options)
        if any(layer.kind.sparse for layer in self.paged):
            raise UnsupportedError(
                f"config: want layers that see all keys or a window for a TersekvStaticCache, got indexers of "
                f"{config.model_type}; {INSTEAD}"
            )

    def early_initialization(
        self, batch_size: int, num_heads: int | list[int], head_dim: int | list[int], dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Allocate the pages before the first forward, so that this can be compiled, too; K's and V's heads alike."""
        if None not in self._latent_sizes:
            raise UnsupportedError(
                "early_initialization: want a model that caches K and V, got one whose latents have sizes of their "
                "own; run the first forward eagerly, as generate does"
            )
        super().early_initialization(batch_size, num_heads, head_dim, dtype, device)

    def make_book(self, capacity: Capacity, windows: Sequence[int | None]) -> StaticBook:
        """Which token lies where, for layers with these windows."""
        return StaticBook(capacity, windows)

    def release(self) -> None:
        """Without tokens, pages and size of the batch, as before the first forward."""
        for layer in self.paged:
            layer.store, layer.is_initialized = None, False
        self.reset()
        self.states.release()
        self.book.batch = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for layer in self.paged:
            if layer.store is not None:
                layer.mark()  # type: ignore[attr-defined]
        self.states.mark()

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: which of the last tokens were padding, only the device knows."""
        raise UnsupportedError(
            f"crop: want a TersekvCache to take tokens back from, as assisted generation does, got a "
            f"{type(self).__name__}"
        )

    def offload(self) -> TersekvCache:  # type: ignore[override]
        """Refused: which pages hold tokens, only the device knows."""
        raise UnsupportedError(f"offload: want a TersekvCache, whose pages the host knows, got a {type(self).__name__}")

    def save(self, path: str | os.PathLike) -> None:
        """Refused: which pages hold tokens, only the device knows."""
        raise UnsupportedError(f"save: want a TersekvCache, whose pages the host knows, got a {type(self).__name__}")

    @classmethod
    def load(cls, path: str | os.PathLike, config: Any, **options: Any) -> TersekvStaticCache:  # type: ignore[override]
        """Refused, as `save` is."""
        raise UnsupportedError(f"load: want a TersekvCache, whose pages the host knows, got a {cls.__name__}")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Row i continues the past of row indices[i]. The batch keeps its size."""
        book = self.book
        if not isinstance(indices, Tensor):
            raise TypeError(f"indices: want Tensor, got {type(indices).__name__}")
        if list(indices.shape) != [book.batch] or indices.dtype not in (torch.int32, torch.int64):
            raise UnsupportedError(
                f"indices: want a row for each of {book.batch}, since a {type(self).__name__} keeps its size, got "
                f"{list(indices.shape)} {indices.dtype}; {INSTEAD} shrink and grow"
            )
        indices = indices.to(book.counts.device)
        self.states.check_kept("indices")
        states = self.states.picked(indices)
        # As bytes: some devices gather no fp8.
        pages = [
            x.view(torch.uint8).view(book.batch, -1)
            for layer in self.paged if layer.store is not None for x in layer.store.tensors()
        ]  # fmt: skip
        # One copy for all, made before anything is changed.
        room = torch.empty(max((x.numel() for x in pages), default=0), dtype=torch.uint8, device=indices.device)
        book.select(indices)
        for x in pages:
            x.copy_(torch.index_select(x, 0, indices, out=room[: x.numel()].view(x.shape)))
        self.states.put(states)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused, unless once: the batch keeps its size."""
        if repeats != 1:
            raise UnsupportedError(
                f"repeats: want 1, since a {type(self).__name__} keeps its size, got {repeats}; {INSTEAD} grow"
            )

    @property
    def batch_size(self) -> int:
        """Rows of the batch; −1 before the first forward."""
        return self.book.batch or -1
