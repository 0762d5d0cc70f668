"""A Hugging Face cache in a file, to go on from in another process.

The file is a safetensors file as `record_file` writes it: each layer's pages, those of one request after those of the
other, its attributes, and the states beside. Metadata say which model it was, and what is in the batch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .. import saved
from ..cache import PagedKVCache, PagedLatentCache, device_of
from ..layers import Formats
from ..recipe import recipe
from ..record_file import Entry, Record, bytes_of, page_indices, page_tensors, placed, puts, read, write
from ..records import ATTRIBUTES
from .transformers_pages import LOST
from .transformers_store import Store

if TYPE_CHECKING:
    from .transformers_cache import TersekvCache

_KIND = "a TersekvCache, 1"
_SIZES = {
    PagedKVCache: ("num_kv_heads", "head_dim", "head_dim_v"),
    PagedLatentCache: ("kv_lora_rank", "qk_rope_head_dim"),
}
_TENSOR = "tensor"  # what stands in the metadata for an attribute that is one
_Any = TypeVar("_Any", bound="TersekvCache")
Found = list[tuple[str, Tensor, Sequence[int] | None]]


@torch.no_grad()
def save(cache: TersekvCache, path: str | os.PathLike) -> None:
    """See `TersekvCache.save`."""
    stores = _stores(cache)
    cache.states.check_kept("save")
    words: list[dict[str, Any]] = []
    found: Found = []
    for i, (layer, store) in enumerate(zip(cache.paged, stores, strict=True)):
        store.settle()
        (word,), attributes = saved.words(store.cache.layers, ATTRIBUTES[type(store.cache)])
        sizes = {name: getattr(store.cache, name) for name in _SIZES[type(store.cache)]}
        words.append({**word, "sizes": sizes, "index": [c.format for c in store.caches[1:]]})
        found += [(_of(i, name), x, None) for name, x in attributes.items()]
        found += _pages(i, store, cache.book.listed_pages(layer.kind.kept))
    states, tensors = cache.states.told()
    columns, counts, real, intact = cache.book.told()
    batch = {"columns": columns, "counts": counts, "intact": intact, "padded": real is not None}
    found += [(name, x, None) for name, x in tensors.items()]
    found += [] if real is None else [("real", real.to(torch.uint8), None)]
    made = {"page_size": cache.book.page_size, "chunk": cache.book.chunk, "exact_prefill": cache.exact_prefill}
    metadata = {
        "tersekv": _KIND,
        "model": json.dumps(_model(cache.config)),
        "cache": json.dumps(made),
        "layers": json.dumps(words),
        "batch": json.dumps(batch),
        "states": json.dumps(states),
    }
    write(placed(found), metadata, path)


@torch.no_grad()
def load(
    kind: type[_Any], path: str | os.PathLike, config: Any, format: Formats | None,
    device: torch.device | str | Sequence[torch.device | str] | None, offload: bool, options: dict[str, Any],
) -> _Any:  # fmt: skip
    """See `TersekvCache.load`."""
    file = Record(*bytes_of(os.fspath(path)))
    metadata = file.metadata(_KIND)
    text = config.get_text_config(decoder=True)
    file.compare_metadata(metadata, {"model": json.dumps(_model(text))}, "the model has")
    words, batch = file.told(metadata, "layers"), file.told(metadata, "batch")
    cache = _empty(kind, config, file, words, format, {**file.told(metadata, "cache"), **options})
    devices = _devices(device, len(words))
    if offload:
        cache.offload()
    attributes = [_attributes(file, metadata, i, word) for i, word in enumerate(words)]
    cache.set_attributes([{**word, **own} for word, own in zip(words, attributes, strict=True)])
    real = (
        torch.empty(len(batch["counts"]), batch["columns"], dtype=torch.uint8, device="cpu")
        if batch["padded"]
        else None
    )
    cache.book.restore(batch["columns"], batch["counts"], batch["intact"])
    found: Found = []
    for i, (layer, word) in enumerate(zip(cache.paged, words, strict=True)):
        layer.store = _store(cache, i, word["sizes"], devices[i])
        found += [(_of(i, name), x, None) for name, x in attributes[i].items() if isinstance(x, Tensor)]
        found += _pages(i, layer.store, cache.book.listed_pages(layer.kind.kept))
        layer.columns = batch["columns"]
    states = file.told(metadata, "states")
    tensors = {name: file.entry(name).source.to(devices[0]) for layer in states for name in layer["tensors"]}
    found += [(name, x, None) for name, x in tensors.items()]
    found += [] if real is None else [("real", real, None)]
    _take(file, metadata, placed(found))
    cache.states.restore(states, tensors)
    if real is not None:
        cache.book.restore_padding(real.bool())
    return cache


def _devices(device: torch.device | str | Sequence[torch.device | str] | None, layers: int) -> list[torch.device]:
    """The device of each layer."""
    each = [device] * layers if device is None or isinstance(device, (str, torch.device)) else list(device)
    if len(each) != layers:
        raise ValueError(f"device: want one, or one for each of {layers} layers, got {len(each)}")
    return [device_of(x) or torch.get_default_device() for x in each]  # type: ignore[arg-type]


def _stores(cache: TersekvCache) -> list[Store]:
    """All of them, where all have the same tokens."""
    if cache.book.lost:
        raise RuntimeError(LOST)
    if not cache.book.columns:
        raise ValueError("save: want a cache that holds tokens, got an empty one")
    behind = [layer.index for layer in cache.paged if layer.columns != cache.book.columns]
    if behind:
        raise RuntimeError(f"save: want a last forward that reached all layers, got none in layer {behind[0]}")
    return [layer.store for layer in cache.paged if layer.store is not None]


def _model(config: Any) -> dict[str, Any]:
    """What makes a config this model's: not what every config has, such as the dtype of its weights."""
    common = {*PreTrainedConfig().to_dict(), "use_cache", "quantization_config"}
    own = {name: x for name, x in config.to_dict().items() if name not in common}
    return json.loads(json.dumps({"model_type": config.model_type, **own}, default=str))


def _of(i: int, name: str) -> str:
    """The name in the file of an attribute that `saved.words` calls 0.name."""
    return f"{i}.{name.removeprefix('0.')}"


def _pages(i: int, store: Store, pages: Sequence[int]) -> Found:
    """The pages of layer i, and those of its indexer."""
    found: Found = []
    for part, cache in zip(("", "index."), store.caches, strict=False):
        found += [(f"{i}.{part}{name}", x, pages) for name, x in page_tensors(cache[0])]
    return found


def _empty(
    kind: type[_Any], config: Any, file: Record, words: list[Any], format: Formats | None, options: dict[str, Any]
) -> _Any:
    """A cache for what a file holds. Refuses a file of another format than is asked for."""
    formats = [tuple(f) if isinstance(f := word["format"], list) else f for word in words]
    if format is not None:
        made = kind(config, format)
        rotated = isinstance(format, str) and recipe(format).rotated
        for i, (word, got, want) in enumerate(zip(words, formats, made.formats, strict=True)):
            if got != want:
                file.fail(f"layers.{i}.format", f"{want!r}, as format says", repr(got))
            if rotated and not {"k_signs", "v_signs"} <= word.keys():
                file.fail(f"layers.{i}.k_signs", f"rotated rows, as format={format!r} says", "others")
    index = next((word["index"][0] for word in words if word["index"]), None)
    return kind(config, layer_formats=formats, index_format=index, **options)


def _attributes(file: Record, metadata: dict[str, Any], i: int, word: dict[str, Any]) -> dict[str, Any]:
    """Scales, signs and channel scales of layer i: numbers, and tensors, which are read."""
    own = {name: x for name, x in word.items() if name not in ("format", "sizes", "index")}
    for name, x in own.items():
        if x == _TENSOR:
            entry = file.entry(f"{i}.{name}")
            _take(file, metadata, [entry])
            own[name] = entry.source
    return own


def _store(cache: TersekvCache, i: int, sizes: dict[str, int], device: torch.device) -> Store:
    if "kv_lora_rank" in sizes:
        heads, dims = 1, (sizes["kv_lora_rank"], sizes["qk_rope_head_dim"])
    else:
        heads, dims = sizes["num_kv_heads"], (sizes["head_dim"], sizes["head_dim_v"])
    key, value = (torch.empty(1, heads, 0, d, device=device) for d in dims)
    return cache.make_store(i, key, value, cache.book.num_pages(cache.paged[i].kind.kept))


def _take(file: Record, metadata: dict[str, Any], entries: list[Entry]) -> None:
    """Read entries, one after the other; raises ValueError for bytes that are not those of the checksums."""
    if len(entries) > 1:
        file.compare_entries(entries)
        file.body(entries)
    for entry in entries:
        pages = page_indices([entry])
        stored, sums = read([entry], file.data, entry.source.device)
        file.compare_checksums(metadata, sums)
        for put in puts([entry], stored, pages):
            put()


def attributes_of(words: Sequence[dict[str, Any]]) -> list[Any]:
    """What `KVStore` takes for a layer whose attributes it gets."""
    return [SimpleNamespace(**{**dict.fromkeys(saved.NAMES), **word, **word["sizes"]}) for word in words]
