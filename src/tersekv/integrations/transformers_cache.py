"""`TersekvCache`: a Hugging Face `Cache` whose layers keep their past in paged, quantised tensors."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ..errors import UnsupportedError
from ..formats import ALL_FORMATS, KV_FORMATS
from ..layers import Formats, kv_pair
from ..scalars import as_int, as_positive_int
from .transformers_formats import chosen, scale_of_layers
from .transformers_layers import INSTEAD, layer_windows
from .transformers_pages import Book, Capacity, Step
from .transformers_store import KVStore, LatentStore, Rules, Store, check_expanded, copy, named

ATTENTION = "tersekv"
HALF = ("bf16", "fp16")
EAGER = "a TersekvCache counts tokens and pages on the host: its update and its attention run outside of graphs"


class Handover(threading.local):
    """From `update`, which knows the cache, to the attention function, which knows padding and queries.

    transformers calls the one right before the other, and passes nothing along but the two tensors.
    """

    layer: TersekvLayer | None = None
    # Of the last layer. Compiled models look at it: PyTorch 2.10 has no guard for the layer itself.
    compileable = False

    def take(self) -> TersekvLayer | None:
        """The layer whose `update` came last, if nobody took it yet."""
        layer, self.layer = self.layer, None
        if layer is not None:
            layer.waiting = False
        return layer


handover = Handover()


class TersekvLayer(CacheLayerMixin):
    """One layer of a `TersekvCache`. Its rows are written by the attention function, not by `update`."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: TersekvCache, index: int, window: int | None) -> None:
        super().__init__()
        self._cache, self.index, self.window = cache, index, window
        self.is_sliding = window is not None
        self.store: Store | None = None
        self.columns = 0  # tokens of every row, padding included
        self.waiting = False  # tokens came by `update`, and no attention function has taken them
        self.new: tuple[Tensor, Tensor] | None = None
        self._versions: tuple[int, ...] = ()  # of `new`, as `update` got them

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
        self.new, self.waiting = (key_states, value_states), True
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
        assert self.new is not None
        if self.new[0].shape[::2] != query.shape[::2]:
            raise UnsupportedError(
                f"query: want a token [B, T] for each of the keys {list(self.new[0].shape)} that {named(module)} gave "
                f"to its cache, got {list(query.shape)}: attention to another sequence is not supported; {INSTEAD}"
            )
        if self._cache.holds_latents(*self.new):
            if self.first:
                check_expanded(module, *self.new, key, value)
            return
        for name, got, gave, version in zip(("key", "value"), (key, value), self.new, self._versions, strict=True):
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
        assert self.new is not None
        (key, value), self.new = self.new, None
        query, key, value = _one_dtype(query, key, value)
        batch, length = key.shape[0], key.shape[2]
        if rules.window != self.window:
            raise UnsupportedError(
                f"sliding_window: want {self.window} in layer {self.index}, as the config says, got {rules.window} "
                f"from {named(module)}: a window has to reach the attention function; {INSTEAD}"
            )
        step, store = self._begin(key, value, mask)
        seen = store
        if self.first and self._cache.exact_prefill:
            seen = self._cache.exact_store(key, value, step.num_pages)
        q, k, v = (x.detach().transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        outs = []
        for piece in step.pieces:
            here = (q, k, v) if piece.rows is None else tuple(x.index_select(0, piece.rows) for x in (q, k, v))
            store.append(here[1], here[2], piece.slots)
            if seen is not store:
                seen.append(here[1], here[2], piece.slots)
            out = seen.attend(here[0], piece, rules, module)
            outs.append(out if piece.real is None else out.where(piece.real[:, None, None], 0.0))
        placed = _placed(outs, step, query, width).unflatten(0, (batch, length))
        self._count(length)
        return placed

    def take_back(self) -> None:
        """Undo the forward under way, in which this layer failed."""
        self.new = None
        columns = self._cache.book.take_back(self.columns)
        for layer in self._cache.paged:
            layer.columns = min(layer.columns, columns)

    @property
    def first(self) -> bool:
        """Whether no token of this batch was written yet."""
        return self.columns == 0

    def _begin(self, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Step, Store]:
        """What this layer does with new tokens, and the store with all pages for it."""
        begins = self.columns == self._cache.book.columns
        step = self._cache.book.step(self.window, self.columns, key.shape[0], key.shape[2], mask, key.device)
        if begins:  # all layers' tensors grow before one of them is written
            self._cache.make_room()
        if self.store is None:
            self.store = self._cache.make_store(self.index, key, value, step.num_pages)
        copy(self.store, step.copies)
        return step, self.store

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
        self.columns, self.new, self.waiting = 0, None, False

    def reset(self) -> None:
        """Refused: the pages belong to all layers."""
        raise UnsupportedError("reset: call it on the TersekvCache; its layers share their pages")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refused: the pages belong to all layers."""
        raise UnsupportedError("reorder_cache: call it on the TersekvCache; its layers share their pages")

    def offload(self) -> None:
        """Refused."""
        raise UnsupportedError("offload: a TersekvCache stays on its device")


class TersekvCache(Cache):
    """A paged cache in any format for `model.generate(..., cache=cache)`, before transformers 5.24 `past_key_values=`.

        config:      the model's config; tells layers with a sliding window from those without
        format:      bf16 | fp16 | fp8_e4m3 | fp8_e5m2 for every model; fp8_per_token_head | int8_per_token_head |
                     nvfp4 | int4_per_token_head where K and V are cached, or two of these, K's and V's; fp8_ds_mla
                     where latents are (DeepSeek); or a word of `tersekv eval`, such as
                     "int8_per_token_head/nvfp4+rotated+ends=bf16". None: fp8_e4m3
        layer_formats:  instead of it, a name or K's and V's for each layer
        saved:       instead of these, scales and attributes, a file that `tersekv eval --save` or
                     `PagedKVCache.save_attributes` wrote for this model
        rotation, k_channel_scale, v_channel_scale:  where K and V are cached, as `PagedKVCache.allocate` takes them;
                     the scales for all layers, or [layers, H, D] and [layers, H, Dv]
        page_size:   tokens of a page
        max_tokens:  tokens of a sequence that there is room for from the start; longer ones make the cache grow
        num_pages:   a limit for each layer, beyond which OutOfPagesError is raised; None: grow as tokens come
        chunk:       new tokens of a sequence that are written and attend together; bounds the prefill's memory and what
                     a layer with a sliding window keeps (window + chunk tokens)
        exact_prefill:  True: the first forward of a batch attends to its keys and values in 16 bits, in a second cache
                     that is gone after each layer; False: to what is stored, as every later forward does
        k_scale, v_scale, kv_scale:  dequantising scales of fp8_e4m3, fp8_e5m2 and nvfp4 (kv_scale: of latents): a
                     number, or one for each layer

    The model must run with attn_implementation="tersekv". Keys and values that a model caches before it expands them
    into heads are kept as latents. Padding takes no room. Raises ValueError for arguments that cannot be, and
    UnsupportedError for models with other than full and sliding-window attention, or whose attention does not go
    through `AttentionInterface`.
    """

    layer_kind: type[TersekvLayer] = TersekvLayer

    def __init__(
        self,
        config: Any,
        format: Formats | None = None,
        *,
        layer_formats: Sequence[Formats] | None = None,
        saved: str | os.PathLike | None = None,
        rotation: str | Sequence[str | None] | None = None,
        k_channel_scale: Tensor | None = None,
        v_channel_scale: Tensor | None = None,
        page_size: int = 64,
        max_tokens: int | None = None,
        num_pages: int | None = None,
        chunk: int = 256,
        exact_prefill: bool = False,
        k_scale: float | Sequence[float] = 1.0,
        v_scale: float | Sequence[float] = 1.0,
        kv_scale: float | Sequence[float] = 1.0,
    ) -> None:
        page_size, chunk = as_positive_int("page_size", page_size), as_positive_int("chunk", chunk)
        max_tokens = None if max_tokens is None else as_positive_int("max_tokens", max_tokens)
        num_pages = None if num_pages is None else as_positive_int("num_pages", num_pages)
        if not isinstance(exact_prefill, bool):
            raise TypeError(f"exact_prefill: want True or False, got {exact_prefill!r}")
        if not hasattr(config, "get_text_config"):
            raise TypeError(f"config: want a transformers config such as model.config, got {type(config).__name__}")
        config = config.get_text_config(decoder=True)
        windows = layer_windows(config)
        scales = {"k_scale": k_scale, "v_scale": v_scale, "kv_scale": kv_scale}
        attributes = {"rotation": rotation, "k_channel_scale": k_channel_scale, "v_channel_scale": v_channel_scale}
        each, self._attributes, self._saved = chosen(len(windows), format, layer_formats, saved, attributes, scales)
        self._scales = {name: scale_of_layers(name, s, len(windows)) for name, s in scales.items()}
        self._latent_sizes = (getattr(config, "kv_lora_rank", None), getattr(config, "qk_rope_head_dim", None))
        for name in (name for entry in each for name in kv_pair("format", entry)):
            if name not in KV_FORMATS and None in self._latent_sizes:
                known = ", ".join(KV_FORMATS)
                raise ValueError(
                    f"format: want one of {known} for {config.model_type}, which caches K and V, got {name!r}"
                )
        self.formats = each
        for name in ("k_channel_scale", "v_channel_scale"):
            scale = self._attributes[name]
            if isinstance(scale, Tensor) and scale.dim() == 3 and len(scale) != len(windows):
                got = list(scale.shape)
                raise ValueError(f"{name}: want [H, D], or one for each of {len(windows)} layers, got {got}")
        half = all(entry in HALF for entry in self.formats)
        self.format, self.exact_prefill = self.formats[0], exact_prefill and not half
        self.book = self.make_book(Capacity(page_size, chunk, max_tokens, num_pages), windows)
        self.paged = [self.layer_kind(self, i, w) for i, w in enumerate(windows)]
        super().__init__(layers=list(self.paged))

    def make_book(self, capacity: Capacity, windows: Sequence[int | None]) -> Any:
        """Which token lies where, for layers with these windows."""
        return Book(capacity, windows)

    def holds_latents(self, key: Tensor, value: Tensor) -> bool:
        """Whether [B, H, T, D] and [B, H, T, Dv] are the latents and rotary keys of MLA."""
        return key.shape[1] == 1 and (key.shape[-1], value.shape[-1]) == self._latent_sizes

    def make_store(self, index: int, key: Tensor, value: Tensor, num_pages: int) -> Store:
        """The store of a layer, made from its first keys and values."""
        size = self.book.page_size
        k_scale, v_scale, kv_scale = (self._scales[n][index] for n in ("k_scale", "v_scale", "kv_scale"))
        latents = self.holds_latents(key, value)
        for name, kind in (("k_scale", "K and V"), ("v_scale", "K and V"), ("kv_scale", "latents")):
            if self._scales[name][index] != 1.0 and latents != (kind == "latents"):
                got = f"{self._scales[name][index]:g} in layer {index}"
                raise ValueError(f"{name}: want 1.0 for a model that does not cache {kind}, got {got}")
        given = {n: x for n, x in self._attributes.items() if x is not None}
        own = {n: x[index] if isinstance(x, Tensor) and x.dim() == 3 else x for n, x in given.items()}
        format = self.formats[index]
        if latents:
            if own or self._saved or not isinstance(format, str):
                got = ", ".join(own) or ("saved" if self._saved else f"format={format!r}")
                raise ValueError(f"format: want one and no attributes for a model that caches latents, got {got}")
            return LatentStore(key, value, format, num_pages, size, kv_scale)
        if self._saved is not None:
            return KVStore(key, value, format, num_pages, size, 1.0, 1.0, saved=self._saved[index])
        return KVStore(key, value, format, num_pages, size, k_scale, v_scale, own)

    def exact_store(self, key: Tensor, value: Tensor, num_pages: int) -> Store:
        """A store of 16 bits with the same pages, for the layer's first forward."""
        half, size = HALF[key.dtype == torch.float16], self.book.page_size
        if self.holds_latents(key, value):
            return LatentStore(key, value, half, num_pages, size, 1.0)
        return KVStore(key, value, half, num_pages, size, 1.0, 1.0)

    def make_room(self) -> None:
        """All pages that the book counts, in every layer that has been written."""
        for layer in self.paged:
            if layer.store is not None:
                pages = self.book.num_pages(layer.window)
                if pages > layer.store.cache.num_pages:
                    layer.store.grow(pages)

    def reset(self) -> None:
        """Forget all tokens, and the size of the batch. The pages stay allocated."""
        self.book.reset()
        for layer in self.paged:
            layer.forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last −tokens_to_remove tokens of every row, such as drafts that were not accepted.

        Raises ValueError for a positive number, and where a sliding window no longer holds what it would see.
        """
        tokens_to_remove = as_int("tokens_to_remove", tokens_to_remove)  # transformers 5.17 brings a tensor
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: want 0 or a negative number, got {tokens_to_remove}")
        self.book.crop(-tokens_to_remove)
        for layer in self.paged:
            layer.columns += tokens_to_remove if layer.columns else 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i continues the past of row beam_idx[i], as in beam search: pages are shared until one is written."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`, in their order; a row may be kept several times. A mask bool [B] will do, too."""
        if not isinstance(indices, Tensor):
            raise TypeError(f"indices: want Tensor, got {type(indices).__name__}")
        if self.book.columns:
            rows = torch.arange(len(self.book.counts), device="cpu")
            try:
                chosen = rows[indices.to("cpu")]
            except IndexError:
                got = list(indices.shape) if indices.dtype == torch.bool else indices.tolist()
                raise ValueError(f"indices: want rows in [0, {len(rows)}), or a mask of all, got {got}") from None
            if not len(chosen):
                raise ValueError("indices: want a row at least, got none")
            self._select(chosen.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, one after the other."""
        repeats = as_positive_int("repeats", repeats)
        if self.book.columns:
            self._select([row for row in range(len(self.book.counts)) for _ in range(repeats)])

    def _select(self, sources: list[int]) -> None:
        with self.book.undone() as before:
            copies = self.book.select(sources)
            self.make_room()
            try:
                for layer in self.paged:
                    if layer.store is not None:
                        copy(layer.store, copies[layer.window])
            except BaseException:
                self.book.lost = before.overwritten(copies)
                raise

    @property
    def batch_size(self) -> int:
        """Rows of the batch; −1 before the first forward."""
        return len(self.book.counts) or -1

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers that have been written; a window keeps it for some time only."""
        return sum(layer.store.cache.bytes_per_token for layer in self.paged if layer.store is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages that are allocated."""
        return sum(layer.store.cache.nbytes for layer in self.paged if layer.store is not None)

    def fitted_scales(self, format: Formats) -> dict[str, list[float]]:
        """Of a 16-bit cache: the scales of each layer that let the largest values that it holds just fit `format`.

            >>> TersekvCache(config, "fp8_e4m3", **observed.fitted_scales("fp8_e4m3"))

        format:  a name, or K's and V's; 1.0 for one that takes no scale

        They go with unrotated rows without channel scales. Raises ValueError for a cache in another format, whose
        codes do not tell, and for an empty one.
        """
        largest = [store.largest() for store in self._observed("fitted_scales")]
        wanted = [ALL_FORMATS.get(name) for name in kv_pair("format", format)]
        if None in wanted:
            raise ValueError(f"format: want one of {', '.join(ALL_FORMATS)}, or K's and V's, got {format!r}")
        names = ("kv_scale",) if len(largest[0]) == 1 else ("k_scale", "v_scale")
        each = zip(names, wanted, zip(*largest, strict=True), strict=False)
        return {name: [f.fitting_scale(x) for x in sizes] for name, f, sizes in each if f is not None}

    def channel_scales(self) -> dict[str, Tensor]:
        """Of a 16-bit cache: K's and V's channel scales [layers, H, D], [layers, H, Dv], from the rows that it holds.

            >>> TersekvCache(config, "int4_per_token_head", **observed.channel_scales())

        Raises ValueError for a cache in another format, for an empty one and for one of latents.
        """
        k, v = zip(*(store.channel_scales() for store in self._observed("channel_scales")), strict=True)
        where = k[0].device  # layers may lie on several
        sides = (torch.stack([x.to(where) for x in side]) for side in (k, v))
        return dict(zip(("k_channel_scale", "v_channel_scale"), sides, strict=True))

    def _observed(self, what: str) -> list[Store]:
        """The store of each layer of a 16-bit cache that holds tokens."""
        stores = [layer.store for layer in self.paged if layer.store is not None]
        if not all(entry in HALF for entry in self.formats):
            raise ValueError(f"{what}: want a cache in {' or '.join(HALF)}, got {self.format}")
        if len(stores) < len(self.paged):
            raise ValueError(f"{what}: want a cache that a forward has written, got an empty one")
        return stores


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


def _placed(outs: list[Tensor], step: Step, query: Tensor, width: int) -> Tensor:
    """The rows of all pieces [B * T, Hq, Dv]; rows of padding are 0."""
    if len(outs) == 1 and step.pieces[0].rows is None:
        return outs[0]
    batch, heads, length, _ = query.shape
    out = query.new_zeros(batch * length, heads, width)
    for rows, part in zip((p.rows for p in step.pieces), outs, strict=True):
        assert rows is not None  # only a piece that is alone takes all rows
        out.index_copy_(0, rows, part)
    return out
