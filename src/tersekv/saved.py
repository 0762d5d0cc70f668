"""Attributes of a cache in a safetensors file: what `save_attributes` writes, and what `allocate_saved` takes of it.

Metadata: `tersekv`, what the file is; `sizes`, the heads'; `layers`, of each its format and attributes, a number or
_TENSOR where the file has a tensor of that name, such as "0.k_signs". Whatever else a file holds is an error that names
the file, the entry, what was wanted and what came: rows that were stored with one attribute and are read with another
give wrong results in silence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attributes import all_positive, all_signs, block_of, fitting_scale
from .formats import TENSOR, KVFormat, kv_format, readable
from .layers import PagedKVLayer
from .record_file import write_whole
from .scalars import as_float, as_positive_int
from .shapes import dtype_name

_KIND = "attributes of a PagedKVCache, 2"  # what a file of them says of itself
_SIZES = ("num_kv_heads", "head_dim", "head_dim_v")
NAMES = ("k_scale", "v_scale", "k_signs", "v_signs", "k_channel_scale", "v_channel_scale")
_NUMBERS = NAMES[:2]
_TENSOR = "tensor"
_MOST_HEADS = 1 << 16


class Saved(NamedTuple):
    sizes: dict[str, Any]  # numbers, as `PagedKVCache.allocate` takes them
    formats: list[Any]  # of each layer
    attributes: list[dict[str, Any]]  # fields of each layer


def write(path: str | os.PathLike, layers: Sequence[PagedKVLayer], sizes: Mapping[str, int]) -> None:
    """Write a file, which appears when it is complete. OSError: no place to write."""
    from safetensors.torch import save

    said, tensors = words(layers, NAMES)
    metadata = {"tersekv": _KIND, "sizes": json.dumps(dict(sizes)), "layers": json.dumps(said)}
    # Not `save_file`, whose files only their owner reads.
    write_whole(path, save({name: x.clone() for name, x in tensors.items()}, metadata))  # layers may share one


def words(layers: Sequence[Any], names: Sequence[str]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """What is said of each layer: its format, and of these fields a number or _TENSOR; and the tensors by name."""
    said, tensors = [], {}
    for i, layer in enumerate(layers):
        word: dict[str, Any] = {"format": layer.format}
        for name in names:
            value = getattr(layer, name)
            if isinstance(value, Tensor):
                tensors[f"{i}.{name}"] = value.detach().contiguous()
                word[name] = _TENSOR
            elif value is not None:
                word[name] = as_float(name, value, "a number or a Tensor")  # of NumPy's JSON knows none
        said.append(word)
    return said, tensors


def read(path: str | os.PathLike) -> Saved:
    """What a file holds. Raises ValueError for one that `write` did not write."""
    metadata, tensors = _contents(path)
    if metadata.get("tersekv") != _KIND:
        got = repr(metadata["tersekv"]) if "tersekv" in metadata else "another's"
        raise ValueError(f"{os.fspath(path)}: want a file that save_attributes wrote, got {got}")
    file = _File(path, metadata, tensors)
    sizes, words = file.sizes(), file.words()
    formats = [file.formats(i, word, sizes) for i, word in enumerate(words)]
    named = {f"{i}.{name}" for i, word in enumerate(words) for name in word if word[name] == _TENSOR}
    for key in sorted(tensors.keys() ^ named):
        file.require(key in tensors, key, "a tensor, as layers says", "none")
        file.require(key in named, key, "none, as layers says", "a tensor")
    attributes = []
    for i, (word, both) in enumerate(zip(words, formats, strict=True)):
        values = {name: tensors[f"{i}.{name}"] if x == _TENSOR else x for name, x in word.items() if name != "format"}
        attributes.append({name: file.attribute(i, name, x, both, sizes) for name, x in values.items()})
    return Saved(sizes, [(k.name, v.name) for k, v in formats], attributes)


def _contents(path: str | os.PathLike) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a safetensors file."""
    from safetensors import SafetensorError, safe_open

    if os.path.isdir(path):
        raise ValueError(f"{os.fspath(path)}: want a file that save_attributes wrote, got a folder")
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as e:
        raise ValueError(f"{os.fspath(path)}: want a safetensors file, got {e}") from None


class _File:
    """A file's entries, each checked as it is taken."""

    def __init__(self, path: str | os.PathLike, metadata: dict[str, str], tensors: dict[str, Tensor]) -> None:
        self._path, self._metadata, self._tensors = os.fspath(path), metadata, tensors

    def require(self, ok: bool, entry: str, want: str, got: Any) -> None:
        if not ok:
            raise ValueError(f"{self._path}: {entry}: want {want}, got {got}")

    def sizes(self) -> dict[str, int]:
        found = self._json("sizes", dict, f"an object of {', '.join(_SIZES)}")
        self.require(found.keys() == set(_SIZES), "sizes", f"an object of {', '.join(_SIZES)}", found)
        sizes = {name: self._taken(f"sizes.{name}", as_positive_int, name, found[name]) for name in _SIZES}
        heads = sizes["num_kv_heads"]
        self.require(heads <= _MOST_HEADS, "sizes.num_kv_heads", f"at most {_MOST_HEADS}", heads)
        return sizes

    def words(self) -> list[dict[str, Any]]:
        """What is said of each layer."""
        words = self._json("layers", list, "a list with an object for each layer")
        self.require(len(words) > 0, "layers", "at least one layer", "none")
        for i, word in enumerate(words):
            self.require(isinstance(word, dict), f"layers.{i}", "an object", repr(word))
            for name in ("format", *_NUMBERS):
                self.require(name in word, f"layers.{i}.{name}", "an entry", "none")
            for name, x in word.items():
                known = name in ("format", *NAMES)
                self.require(known, f"layers.{i}.{name}", f"one of format, {', '.join(NAMES)}", "another name")
                number_too = name in ("format", *_NUMBERS)
                self.require(number_too or x == _TENSOR, f"layers.{i}.{name}", repr(_TENSOR), repr(x))
        return words

    def formats(self, i: int, word: dict[str, Any], sizes: dict[str, int]) -> tuple[KVFormat, KVFormat]:
        entry, given = f"layers.{i}.format", word["format"]
        names = given if isinstance(given, list) else [given, given]
        want = "the name of a format, or K's and V's"
        self.require(len(names) == 2 and all(isinstance(x, str) for x in names), entry, want, repr(given))
        k, v = (self._taken(entry, kv_format, name) for name in names)
        self._taken("sizes", readable, (k, v), (sizes["head_dim"], sizes["head_dim_v"]))
        return k, v

    def attribute(
        self, i: int, name: str, x: Any, both: tuple[KVFormat, KVFormat], sizes: dict[str, int]
    ) -> float | Tensor:
        """A scale of the tensor, signs or channel scales of layer i, as a layer has them."""
        entry = f"{i}.{name}" if isinstance(x, Tensor) else f"layers.{i}.{name}"
        side, heads = "kv".index(name[0]), sizes["num_kv_heads"]
        f, dim = both[side], sizes[("head_dim", "head_dim_v")[side]]
        if name in _NUMBERS:
            count = heads if f.scale == TENSOR else 1
            scale = self._taken(entry, fitting_scale, name, x, f, torch.device("cpu"), count)  # files are read there
            if isinstance(x, Tensor):
                self._taken(entry, all_positive, name, x)
            return scale
        shape = (block_of(dim),) if name.endswith("signs") else (heads, dim)
        got = f"{list(x.shape)} {dtype_name(x.dtype)}"
        fits = x.shape == shape and x.dtype == torch.float32
        self.require(fits, entry, f"{list(shape)} float32", got)
        self._taken(entry, all_signs if name.endswith("signs") else all_positive, name, x)
        return x

    def _json(self, entry: str, kind: type, want: str) -> Any:
        self.require(entry in self._metadata, entry, want, "none")
        try:
            found = json.loads(self._metadata[entry])
        except (ValueError, RecursionError) as e:
            raise ValueError(f"{self._path}: {entry}: want {want} in JSON, got {e}") from None
        self.require(isinstance(found, kind), entry, want, repr(found))
        return found

    def _taken(self, entry: str, check: Any, *args: Any) -> Any:
        """check(*args), whose errors name the file and the entry."""
        try:
            return check(*args)
        except (ValueError, TypeError) as e:
            raise ValueError(f"{self._path}: {entry}: {str(e).partition(': ')[2]}") from None
