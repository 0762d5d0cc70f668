"""The layers of a `TersekvCache`: keys and values go from a model to its attention function and into pages."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from ..errors import UnsupportedError
from .transformers_indexer import IndexedStore, serve
from .transformers_layers import INDEXERS, INSTEAD, LayerKind
from .transformers_pages import Piece, Step
from .transformers_requests import Run
from .transformers_store import Rules, Store, check_expanded, named

if TYPE_CHECKING:
    from .transformers_cache import TersekvCache

ATTENTION = "tersekv"
EAGER = "a TersekvCache counts tokens and pages on the host: its update and its attention run outside of graphs"


class Handover(threading.local):
    """From `update`, which knows the cache, to the attention function, which knows padding and queries.

    transformers calls the one right before the other, and passes nothing along but the two tensors.
    """

    layer: TersekvLayer | None = None
    # Of the last layer. Compiled models look at it: PyTorch 2.10 has no guard for the layer itself.
    compileable = False

    def __init__(self) -> None:
        # Whose keys and values later layers of this forward attend to, by the index of the layer.
        self.lenders: dict[int, TersekvLayer] = {}

    def take(self) -> TersekvLayer | None:
        """The layer whose `update` came last, if nobody took it yet."""
        layer, self.layer = self.layer, None
        if layer is not None:
            layer.waiting = False
        return layer

    def lender(self, key: Tensor) -> TersekvLayer | None:
        """The layer of this forward that wrote these keys for others to read, if there is one."""
        for layer in self.lenders.values():
            if layer.lent is not None and layer.lent.given[0] is key:
                return layer
        return None


class Lent(NamedTuple):
    """What a layer leaves to those that have no keys and values of their own, until the last of them has attended.

    given:    [B, H, T, D], [B, H, T, Dv] that are read by others too
    step:     where they were written
    first:    whether nothing was written before
    readers:  how many layers are still to come
    """

    given: tuple[Tensor, Tensor]
    step: Step
    first: bool
    readers: int


handover = Handover()


class TersekvLayer(CacheLayerMixin):
    """One layer of a `TersekvCache`. Its rows are written by the attention function, not by `update`."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: TersekvCache, index: int, kind: LayerKind) -> None:
        """index: of this layer among those that attend"""
        super().__init__()
        self._cache, self.index, self.kind = cache, index, kind
        self.is_sliding = (kind.window or kind.attention_chunk) is not None
        self.store: Store | None = None
        self.columns = 0  # tokens of every row, padding included
        self.waiting = False  # tokens came by `update`, and no attention function has taken them
        self.new: tuple[Tensor, Tensor] | None = None
        self.lent: Lent | None = None
        self._versions: tuple[int, ...] = ()  # of `new`, as `update` got them
        # Of a forward in which the indexer came first: what it does, the store, and where that is written and read.
        self._begun: tuple[Step, Store, Store] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: pages are allocated when the first tokens are written."""

    # NOTE: a compiled model leaves its graph here and in the attention function, and comes back after them.
    @torch.compiler.disable(reason=EAGER)
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See `hand_over`."""
        return self.hand_over(key_states, value_states)

    def hand_over(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Hand the new tokens over to the attention function, which writes them and attends.

            key_states, value_states:  [B, H, T, D], [B, H, T, Dv]; latents: [B, 1, T, L], [B, 1, T, R]

        Returns them as they are; of latents only the last token, since all that the model does with them is to expand
        them into heads that nobody reads. Raises RuntimeError if the last ones, of this layer or of the one before it,
        were never taken.
        """
        last = handover.layer
        if last is None or last._cache is not self._cache:
            last = self
        if self.waiting or last.waiting:
            self.waiting = last.waiting = False
            handover.layer = None
            raise RuntimeError(
                f"attn_implementation: want {ATTENTION!r} for a TersekvCache, got another, which attends to new tokens "
                f"alone: load the model with attn_implementation={ATTENTION!r} or call "
                f"model.set_attn_implementation({ATTENTION!r}), and reset() the cache (a model whose attention does "
                "not go through transformers' AttentionInterface cannot run with it)"
            )
        if self.kind.indexer is not None:
            serve(self.kind.indexer)
        self.new, self.lent, self.waiting = (key_states, value_states), None, True
        handover.layer, handover.compileable = self, self.is_compileable
        self._versions = tuple(map(_version, self.new))
        if self._cache.holds_latents(key_states, value_states):
            return key_states[:, :, -1:], value_states[:, :, -1:]
        return key_states, value_states

    def check_brought(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raises UnsupportedError if an attention function got other keys or values than the last `update`.

        Attention reads what is stored, and would ignore a change in silence. Latents come back expanded: how, is
        looked at in a batch's first forward.
        """
        given = self.new if self.lent is None else self.lent.given
        assert given is not None
        # Readers of lent keys may attend with the last queries alone.
        tokens = given[0].shape[2] if self.lent is None else min(given[0].shape[2], query.shape[2])
        if (given[0].shape[0], tokens) != (query.shape[0], query.shape[2]):
            raise UnsupportedError(
                f"query: want a token [B, T] for each of the keys {list(given[0].shape)} that {named(module)} gave "
                f"to its cache, got {list(query.shape)}: attention to another sequence is not supported; {INSTEAD}"
            )
        if self._cache.holds_latents(*given):
            if self.first:
                check_expanded(module, *given, key, value)
            return
        for name, got, gave, version in zip(("key", "value"), (key, value), given, self._versions, strict=True):
            if got is not gave or _version(got) != version:
                raise UnsupportedError(
                    f"{name}: want {list(gave.shape)} as {named(module)} gave it to its cache, got another tensor, or "
                    f"other numbers, {list(got.shape)}: a model that rearranges or changes keys or values after "
                    f"the cache's update cannot attend to what is stored; {INSTEAD}"
                )

    def attend(self, query: Tensor, width: int, mask: Tensor | None, rules: Rules, module: torch.nn.Module) -> Tensor:
        """Write the tokens of the last `update` and attend to all that every query sees.

            query:  [B, Hq, T, D]; mask: [B, past + T] bool, False for padding, or None
            width:  Dv

        Returns [B, T, Hq, Dv]; 0 in rows of padding. New tokens are written first, so that a query sees its own token
        and those before it as the cache holds them, in the prefill as in every later step, unless `exact_prefill`.
        """
        self._check_window(rules, module)
        assert self.new is not None
        given, self.new = self.new, None
        query, key, value = _one_dtype(query, *given)
        first = self.first
        if self.kind.sparse != (rules.indices is not None):
            want, got = ("keys that {} chose", "none") if self.kind.sparse else ("None from {}", "some")
            raise UnsupportedError(f"indices: want {want.format(named(module))}, got {got}; {INSTEAD}")
        step, store, here = self._begun or self._opened(key, value, mask)
        self._begun, stores = None, [here]
        if first and self._cache.exact_prefill:
            stores.append(self._cache.exact_store(key, value, step.num_pages))
        out = self._by_pieces(step.pieces, stores, stores[-1], (query, key, value), width, rules, module)
        self._close(store)
        self._count(key.shape[2])
        if self.kind.readers:
            self.lent = Lent(given, step, first, self.kind.readers)
            handover.lenders[self.index] = self
        return out

    def choose(self, q: Tensor, k: Tensor, weights: Tensor, mask: Tensor | None, most: int) -> Tensor:
        """Write the new keys of this layer's indexer, and choose what each row reads. Attention comes next.

            q:        [B, T, Hi, Di]; k: [B, T, Di]; weights: [B, T, Hi]
            mask:     [B, past + T] bool, False for padding, or None
            most:     keys of a row

        Returns positions [B, T, at most `most`] int32 in each request, −1 behind them and in rows of padding.
        """
        assert self.new is not None
        try:
            if mask is not None and mask.shape[1] != self.columns + k.shape[1]:
                raise UnsupportedError(
                    f"attention_mask: want [B, {self.columns + k.shape[1]}] with 0 for padding, got {list(mask.shape)}"
                )
            step, _, here = self._begun = self._opened(*self.new, mask)
            assert isinstance(here, IndexedStore)
            q, weights = here.queries(q.detach().flatten(0, 1), weights.flatten(0, 1))
            keys = k.detach().flatten(0, 1)
            width = max((p.page_table.shape[1] * self._cache.book.page_size for p in step.pieces), default=0)
            chosen = torch.full((len(q), min(most, width)), -1, dtype=torch.int32, device=q.device)
            for piece in step.pieces:
                rows = slice(None) if piece.rows is None else piece.rows
                here.append_index(keys[rows], piece.slots)
                chosen[rows] = here.select(q[rows], weights[rows], piece, chosen.shape[1])
        except BaseException:
            handover.take()
            self.take_back()
            raise
        return chosen.unflatten(0, k.shape[:2])

    def update_indexer(self, *args: Any, **kwargs: Any) -> Tensor:
        """Refused: see `choose`."""
        raise UnsupportedError(
            f"update_indexer: want one of the indexers {', '.join(INDEXERS)} that a TersekvCache knows, got another; "
            f"{INSTEAD}"
        )

    def attend_again(self, query: Tensor, width: int, rules: Rules, module: torch.nn.Module) -> Tensor:
        """The same for a layer that reads what this one wrote in this forward: query [B, Hq, at most T, D]."""
        self._check_window(rules, module)
        assert self.lent is not None
        assert self.store is not None
        given, step, first, readers = self.lent
        query, key, value = _one_dtype(query, *given)
        late = key.shape[2] - query.shape[2]
        if late:
            query = torch.nn.functional.pad(query, (0, 0, late, 0))
        stores, seen = [], self.store.open()
        if first and self._cache.exact_prefill:
            seen = self._cache.exact_store(key, value, step.num_pages)
            stores.append(seen)
        pieces = [p for p in step.pieces if stores or p.end > late]
        out = self._by_pieces(pieces, stores, seen, (query, key, value), width, rules, module)[:, late:]
        self.store.close()
        self.lent = self.lent._replace(readers=readers - 1)
        if readers == 1:
            self.forget_lent()
        return out

    def _by_pieces(
        self, pieces: list[Piece], stores: list[Store], seen: Store, tensors: tuple[Tensor, Tensor, Tensor],
        width: int, rules: Rules, module: torch.nn.Module,
    ) -> Tensor:  # fmt: skip
        """Write each piece's keys and values into the stores, then attend to what is seen: [B, T, Hq, Dv]."""
        batch, _, length, _ = tensors[0].shape
        q, k, v = (x.detach().transpose(1, 2).flatten(0, 1) for x in tensors)
        outs = []
        for piece in pieces:
            here = (q, k, v) if piece.rows is None else tuple(x.index_select(0, piece.rows) for x in (q, k, v))
            for store in stores:
                store.append(here[1], here[2], piece.slots)
            chosen = rules.indices if rules.indices is None or piece.rows is None else rules.indices[piece.rows]
            out = seen.attend(here[0], piece, rules._replace(indices=chosen), module)
            outs.append(out if piece.real is None else out.where(piece.real[:, None, None], 0.0))
        return _placed(outs, pieces, tensors[0], width).unflatten(0, (batch, length))

    def _check_window(self, rules: Rules, module: torch.nn.Module) -> None:
        if rules.window != self.kind.window:
            raise UnsupportedError(
                f"sliding_window: want {self.kind.window} in attention layer {self.index}, as the config says, got "
                f"{rules.window} from {named(module)}: a window has to reach the attention function; {INSTEAD}"
            )

    def take_back(self) -> None:
        """Undo the forward under way, in which this layer failed, or one that reads what it wrote."""
        if self.lent is not None:
            self.columns -= self.lent.given[0].shape[2]
        self.new = self._begun = None
        self.forget_lent()
        columns = self._cache.book.take_back(self.columns)
        for layer in self._cache.paged:
            layer.columns = min(layer.columns, columns)
            if layer.store is not None:
                layer.store.take_back()
        self._cache.lose_states(not columns)

    @property
    def first(self) -> bool:
        """Whether no token of this batch was written yet."""
        return self.columns == 0

    def _begin(self, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Step, Store]:
        """What this layer does with new tokens, and the store with all pages for it."""
        begins = self.columns == self._cache.book.columns
        step = self._cache.book.step(
            self.kind.kept, self.columns, key.shape[0], key.shape[2], mask, key.device, self.kind.attention_chunk
        )
        if begins:  # all layers' tensors grow before one of them is written
            self._cache.make_room()
        if self.store is None:
            self.store = self._cache.make_store(self.index, key, value, step.num_pages)
        return step, self.store

    def _opened(self, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Step, Store, Store]:
        """What this layer does with new tokens, its store, and where that is written and read."""
        step, store = self._begin(key, value, mask)
        return step, store, store.open(step.copies)

    def _close(self, store: Store) -> None:
        """The tokens of this forward are written."""
        if self._cache.offloaded:
            store.close(self._cache.book.written_pages(self.kind.kept))

    def held_pages(self) -> list[Run]:
        """Pages of this layer that requests have."""
        return self._cache.book.held_pages(self.kind.kept)

    def _count(self, length: int) -> None:
        """So many new tokens of every row, padding included, were written."""
        self.columns += length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys, offset): every token counts, in layers with a window too."""
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens of every row, padding included."""
        return self.columns

    def get_max_length(self) -> int:
        """−1: no maximum."""
        return -1

    def forget(self) -> None:
        """Start again; pages stay allocated."""
        self.columns, self.new, self._begun, self.waiting = 0, None, None, False
        self.forget_lent()
        if self.store is not None:
            self.store.forget()

    def forget_lent(self) -> None:
        """No other layer of this forward reads what this one wrote."""
        self.lent = None
        if handover.lenders.get(self.index) is self:
            del handover.lenders[self.index]

    def reset(self) -> None:
        """Refused: the pages belong to all layers."""
        raise UnsupportedError("reset: call it on the TersekvCache; its layers share their pages")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refused: the pages belong to all layers."""
        raise UnsupportedError("reorder_cache: call it on the TersekvCache; its layers share their pages")

    def offload(self) -> None:
        """Refused: two buffers serve all layers."""
        raise UnsupportedError("offload: call it on the TersekvCache; its layers share two buffers")


class WithState:
    """What a layer that attends has beside where it has a state, too, as transformers' mixed layers do."""

    def __init__(self, cache: TersekvCache, index: int, kind: LayerKind) -> None:
        super().__init__(cache, index, kind)  # type: ignore[call-arg]
        LinearAttentionLayer.__init__(self, number_of_states=kind.state.number_of_states)  # type: ignore[arg-type]

    def lazy_initialization(self, *new: Tensor, **state: Any) -> None:
        """Of keys and values, or of a state, which comes by name."""
        if new:
            super().lazy_initialization(*new)  # type: ignore[misc]
        else:
            LinearAttentionLayer.lazy_initialization(self, **state)  # type: ignore[arg-type]


class TersekvMixedLayer(WithState, TersekvLayer, LinearAttentionLayer):
    """A layer with keys and values in pages, and a state in transformers' own tensors."""

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether the state can go back, as its pages can."""
        return super(CacheLayerMixin, self).is_croppable  # type: ignore[misc, no-any-return]


def _version(x: Tensor) -> int:
    """How often a tensor was written in place, where torch counts it and nothing is being traced."""
    return -1 if torch.compiler.is_compiling() or x.is_inference() else x._version


def _one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All three in autocast's dtype where it is on, as it gives them to other attention functions."""
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        return query.to(dtype), key.to(dtype), value.to(dtype)
    if not query.dtype == key.dtype == value.dtype:
        got = ", ".join(str(x.dtype).removeprefix("torch.") for x in (query, key, value))
        raise UnsupportedError(f"query, key, value: want one dtype from a layer of the model, got {got}")
    return query, key, value


def _placed(outs: list[Tensor], pieces: list[Piece], query: Tensor, width: int) -> Tensor:
    """The rows of all pieces [B * T, Hq, Dv]; rows of padding are 0."""
    if len(outs) == 1 and pieces[0].rows is None:
        return outs[0]
    batch, heads, length, _ = query.shape
    out = query.new_zeros(batch * length, heads, width)
    for rows, part in zip((p.rows for p in pieces), outs, strict=True):
        assert rows is not None  # only a piece that is alone takes all rows
        out.index_copy_(0, rows, part)
    return out
