"""`TersekvCache`: a Hugging Face `Cache` whose layers keep their past in paged, quantised tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..formats import ALL_FORMATS, INDEX_FORMATS, KV_FORMATS
from ..layers import Formats, kv_pair
from ..scalars import as_int, as_positive_int
from . import transformers_saved
from .transformers_cache_layers import TersekvLayer, TersekvMixedLayer
from .transformers_formats import chosen, scale_of_layers
from .transformers_indexer import IndexedStore
from .transformers_layers import LayerKind, layer_kinds
from .transformers_offload import OffloadedStore, Pipe
from .transformers_pages import Book
from .transformers_requests import Capacity
from .transformers_states import States
from .transformers_store import KVStore, LatentStore, Store

HALF = ("bf16", "fp16")


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
        page_size:   tokens of a page; a divisor of the chunk where attention stays within chunks
        max_tokens:  tokens of a sequence that there is room for from the start; longer ones make the cache grow
        num_pages:   a limit for each layer, beyond which OutOfPagesError is raised; None: grow as tokens come
        chunk:       new tokens of a sequence that are written and attend together; bounds the prefill's memory and what
                     a layer with a sliding window keeps (window + chunk tokens)
        exact_prefill:  True: the first forward of a batch attends to its keys and values in 16 bits, in a second cache
                     that is gone after each layer; False: to what is stored, as every later forward does
        index_format:  of the keys of an indexer, where a model has one: bf16 | fp16 | fp8_e4m3 | index_fp8. None: bf16,
                     or fp16 with latents in fp16
        k_scale, v_scale, kv_scale:  dequantising scales of fp8_e4m3, fp8_e5m2 and nvfp4 (kv_scale: of latents): a
                     number, or one for each layer

    The model must run with attn_implementation="tersekv". Keys and values that a model caches before it expands them
    into heads are kept as latents; the state of a layer without them stays in transformers' own classes, and "layer"
    above means one that attends. Padding takes no room. Raises ValueError for arguments that cannot be, and
    UnsupportedError for models with other than full, sliding-window and chunked attention, or whose attention does not
    go through `AttentionInterface`.
    """

    layer_classes: tuple[type[TersekvLayer], type[TersekvLayer]] = (TersekvLayer, TersekvMixedLayer)

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
        index_format: str | None = None,
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
        self.config = config
        places = layer_kinds(config)
        kinds = [kind for kind in places if kind.attends]
        _check_page_size(page_size, kinds)
        scales = {"k_scale": k_scale, "v_scale": v_scale, "kv_scale": kv_scale}
        attributes = {"rotation": rotation, "k_channel_scale": k_channel_scale, "v_channel_scale": v_channel_scale}
        each, self._attributes, self._saved = chosen(len(kinds), format, layer_formats, saved, attributes, scales)
        self._scales = {name: scale_of_layers(name, s, len(kinds)) for name, s in scales.items()}
        self._latent_sizes = (getattr(config, "kv_lora_rank", None), getattr(config, "qk_rope_head_dim", None))
        for name in (name for entry in each for name in kv_pair("format", entry)):
            if name not in KV_FORMATS and None in self._latent_sizes:
                known = ", ".join(KV_FORMATS)
                raise ValueError(
                    f"format: want one of {known} for {config.model_type}, which caches K and V, got {name!r}"
                )
        self.formats = each
        self._index = _index_sizes(config, kinds, index_format)
        for name in ("k_channel_scale", "v_channel_scale"):
            scale = self._attributes[name]
            if isinstance(scale, Tensor) and scale.dim() == 3 and len(scale) != len(kinds):
                got = list(scale.shape)
                raise ValueError(f"{name}: want [H, D], or one for each of {len(kinds)} layers, got {got}")
        half = all(entry in HALF for entry in self.formats)
        self.format, self.exact_prefill = self.formats[0], exact_prefill and not half
        self.book = self.make_book(Capacity(page_size, chunk, max_tokens, num_pages), [kind.kept for kind in kinds])
        self.paged = [self.layer_classes[kind.state is not None](self, i, kind) for i, kind in enumerate(kinds)]
        paged = iter(self.paged)
        layers = [next(paged) if kind.attends else kind.state for kind in places]
        self._pipes: dict[torch.device, Pipe] = {}
        self.offloaded = False
        self.states = States(layers, in_place=self.layer_classes[0].is_compileable)
        Cache.__init__(self, layers=layers)
        if config.model_type == "minimax":
            from .transformers_minimax import CLASSES  # a subclass, and its model takes long to import

            self.__class__ = CLASSES.get(type(self), type(self))

    def make_book(self, capacity: Capacity, windows: Sequence[int | None]) -> Any:
        """Which token lies where, for layers with these windows."""
        return Book(capacity, windows)

    def lose_states(self, all_lost: bool) -> None:
        """A forward was undone in the middle: no state goes back. all_lost: it was the first, so nothing is missed."""
        if all_lost:
            self.states.reset()
        elif self.states.tensors():
            self.book.lost = True

    def holds_latents(self, key: Tensor, value: Tensor) -> bool:
        """Whether [B, H, T, D] and [B, H, T, Dv] are the latents and rotary keys of MLA."""
        return key.shape[1] == 1 and (key.shape[-1], value.shape[-1]) == self._latent_sizes

    def make_store(self, index: int, key: Tensor, value: Tensor, num_pages: int) -> Store:
        """The store of a layer, made from its first keys and values."""
        # Pages made in inference mode could not be written outside it.
        with torch.inference_mode(False), torch.no_grad():
            if not self.offloaded:
                return self._store(index, key, value, num_pages)
            return self._on_host(self._store(index, key, value, 1), index, num_pages)

    def _on_host(self, small: Store, index: int, num_pages: int) -> OffloadedStore:
        device = small.cache.device
        if device not in self._pipes:
            self._pipes[device] = Pipe(device)
        return OffloadedStore(small, num_pages, self.paged[index], self._pipes[device])

    def _store(self, index: int, key: Tensor, value: Tensor, num_pages: int) -> Store:
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
            if self.paged[index].kind.indexer is None:
                return LatentStore(key, value, format, num_pages, size, kv_scale)
            index_format = self._index["index_format"] or ("fp16" if format == "fp16" else "bf16")
            more = {**self._index, "index_format": index_format}
            return IndexedStore(key, value, format, num_pages, size, kv_scale, **more)
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
                pages = self.book.num_pages(layer.kind.kept)
                if pages > layer.store.cache.num_pages:
                    with torch.inference_mode(False), torch.no_grad():
                        layer.store.grow(pages)

    def offload(self) -> TersekvCache:  # type: ignore[override]
        """Keep all pages in the host's memory from now on, and bring each layer's when it runs. Returns the cache.

            >>> cache = TersekvCache(model.config, format="int4_per_token_head").offload()

        A device holds the pages of two layers: of the one that runs, and of the next one, which come on a stream of
        their own, in the cache's format. Pages that a forward wrote go back. The host's memory is pinned, and waited
        for only where the cache grows. On a CPU these are copies. States beside the pages stay where they are.
        """
        for layer in self.paged:
            if layer.store is not None and not isinstance(layer.store, OffloadedStore):
                store = self._on_host(layer.store.with_pages(1), layer.index, layer.store.cache.num_pages)
                store.fill(layer.store)
                layer.store = store
        self.offloaded = True  # only now: where memory runs out on the way, the next call goes on
        return self

    def save(self, path: str | os.PathLike) -> None:
        """Write all tokens, and the states beside them, to a file from which `load` makes a cache that goes on.

            >>> cache.save("prompt.safetensors")

        It waits for the device. Pages that beams share are written for each. Raises ValueError for an empty cache,
        RuntimeError for one that asks for `reset`, UnsupportedError for a model that keeps a state in its modules;
        OSError: no place to write.
        """
        transformers_saved.save(self, path)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        config: Any,
        *,
        format: Formats | None = None,
        device: torch.device | str | Sequence[torch.device | str] | None = None,
        max_tokens: int | None = None,
        num_pages: int | None = None,
        offload: bool = False,
    ) -> TersekvCache:
        """The cache that `save` wrote, with its formats, scales, attributes, page size and chunk.

            >>> cache = TersekvCache.load("prompt.safetensors", model.config, device="cuda")

            config:   of the model that goes on: every entry that belongs to the family has to be as it was; weights are
                      not looked at
            format:   what the file has to be in; None: whatever it is in
            device:   of the pages and states, or one for each layer that attends; None: torch's default
            max_tokens, num_pages:  as `TersekvCache` takes them
            offload:  whether the pages come to the host, as after `offload()`

        Raises ValueError for a torn or foreign file, for one of another model and of another format, and for bytes that
        are not those of its checksums, with the names of the file and of the entry.
        """
        if not hasattr(config, "get_text_config"):
            raise TypeError(f"config: want a transformers config such as model.config, got {type(config).__name__}")
        room = {"max_tokens": max_tokens, "num_pages": num_pages}
        return transformers_saved.load(cls, path, config, format, device, offload, room)

    def set_attributes(self, layers: Sequence[dict[str, Any]]) -> None:
        """Scales of the tensor, signs and channel scales of each layer, as a file of `save` has them."""
        if "kv_scale" in layers[0]:
            self._scales["kv_scale"] = [layer["kv_scale"] for layer in layers]
        else:
            self._saved = transformers_saved.attributes_of(layers)

    def reset(self) -> None:
        """Forget all tokens, and the size of the batch. The pages stay allocated."""
        self.book.reset()
        self.states.reset()
        for layer in self.paged:
            layer.forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last −tokens_to_remove tokens of every row, such as drafts that were not accepted.

        Raises ValueError for a positive number, and where a sliding window no longer holds what it would see;
        UnsupportedError where the state of a layer cannot go back, unless all tokens go.
        """
        tokens_to_remove = as_int("tokens_to_remove", tokens_to_remove)  # transformers 5.17 brings a tensor
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: want 0 or a negative number, got {tokens_to_remove}")
        left = self.book.columns + tokens_to_remove
        if tokens_to_remove and left > 0:
            self.states.check_crop(-tokens_to_remove, left)
        self.book.crop(-tokens_to_remove)
        if left:
            self.states.crop(-tokens_to_remove)
        else:
            self.states.reset()
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
            rows, mask = len(self.book.counts), indices.dtype == torch.bool
            found = indices.to("cpu")
            found = found.nonzero()[:, 0] if mask and list(found.shape) == [rows] else found
            known = found.dim() == 1 and found.dtype in (torch.int32, torch.int64)
            if not known or bool(((found < 0) | (found >= rows)).any()):
                got = f"{list(indices.shape)} {indices.dtype}" if not known else indices.tolist()
                raise ValueError(f"indices: want rows in [0, {rows}), or a mask of all, got {got}")
            if not len(found):
                raise ValueError("indices: want a row at least, got none")
            self._select(found.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, one after the other."""
        repeats = as_positive_int("repeats", repeats)
        if self.book.columns:
            self._select([row for row in range(len(self.book.counts)) for _ in range(repeats)])

    def _select(self, sources: list[int]) -> None:
        self.states.check_kept("beam_idx")
        states = self.states.picked(torch.tensor(sources, device="cpu"))
        with self.book.undone() as before:
            copies = self.book.select(sources)
            self.make_room()
            try:
                for layer in self.paged:
                    if layer.store is not None:
                        layer.store.copy(copies[layer.kind.kept])
            except BaseException:
                self.book.lost = before.overwritten(copies)
                raise
        self.states.put(states)

    @property
    def batch_size(self) -> int:
        """Rows of the batch; −1 before the first forward."""
        return len(self.book.counts) or -1

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers that have been written; a window keeps it for some time only."""
        return sum(c.bytes_per_token for layer in self.paged if layer.store is not None for c in layer.store.caches)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages that are allocated."""
        return sum(c.nbytes for layer in self.paged if layer.store is not None for c in layer.store.caches)

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
        if len(stores) < len(self.paged) or not self.book.columns:
            raise ValueError(f"{what}: want a cache that a forward has written, got an empty one")
        return stores


def _index_sizes(config: Any, kinds: Sequence[LayerKind], format: str | None) -> dict[str, Any]:
    """Of the keys of indexers. Raises ValueError for a format where there are none, or that keeps none."""
    if not any(kind.indexer for kind in kinds):
        if format is not None:
            raise ValueError(f"index_format: want None for {config.model_type}, which has no indexer, got {format!r}")
        return {}
    if format is not None and format not in INDEX_FORMATS:
        raise ValueError(f"index_format: want one of {', '.join(INDEX_FORMATS)}, got {format!r}")
    return {"index_head_dim": config.index_head_dim, "index_format": format}


def _check_page_size(page_size: int, kinds: Sequence[LayerKind]) -> None:
    """Raises ValueError unless every chunk of attention begins with a page."""
    for chunk in {kind.attention_chunk for kind in kinds if kind.attention_chunk}:
        if chunk % page_size:
            raise ValueError(f"page_size: want a divisor of attention_chunk_size = {chunk}, got {page_size}")
