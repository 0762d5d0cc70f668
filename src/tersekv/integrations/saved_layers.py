"""What an engine's layers take from a file of `save_attributes`: the formats, and the attributes of a rank's heads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import saved


class SavedLayers(NamedTuple):
    """formats: K's and V's of every layer of the model; heads: those of this rank."""

    path: str
    formats: list[tuple[str, str]]
    heads: slice
    found: saved.Saved

    def attributes(self, index: int, device: torch.device) -> dict[str, Any]:
        """Fields of a PagedKVLayer: those of the model's layer `index`."""
        every = self.found.sizes["num_kv_heads"]

        def own(name: str, x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            of_heads = not name.endswith("signs") and x.dim() > 0 and len(x) == every
            return (x[self.heads] if of_heads else x).to(device)

        return {name: own(name, x) for name, x in self.found.attributes[index].items()}


def saved_layers(name: str, path: str, heads: int, dims: Sequence[int], rank: int, ranks: int) -> SavedLayers:
    """The layers in a file, as rank `rank` of `ranks` holds them.

    name:   what the engine's user gives the file by
    heads:  KV heads of a layer on this rank
    dims:   K's head size, and V's where it is known

    Raises ValueError for a file that `save_attributes` did not write, or of heads of another number or size.
    """
    try:
        found = read(path)
    except OSError as e:
        raise ValueError(
            f"{name}: want a file that `tersekv eval --save FILE` wrote, got {path!r}: {e.strerror}"
        ) from None
    every = found.sizes["num_kv_heads"]
    own = max(every // ranks, 1)  # where there are more ranks than heads, several have the same
    got = (own, found.sizes["head_dim"], found.sizes["head_dim_v"])[: 1 + len(dims)]
    if got != (heads, *dims):
        want = f"{heads} KV heads a rank with head sizes {', '.join(map(str, dims))}"
        of = f"{own} of {every}" if ranks > 1 else str(own)
        raise ValueError(f"{name}: want attributes of {want}, got {of} with {', '.join(map(str, got[1:]))} in {path!r}")
    start = rank * every // ranks
    return SavedLayers(path, found.formats, slice(start, start + own), found)


def read(path: str) -> saved.Saved:
    """A file's content, read once for all layers."""
    now = os.stat(path)
    return _read(path, (now.st_mtime_ns, now.st_size))


@lru_cache(maxsize=4)
def _read(path: str, changed: tuple[int, int]) -> saved.Saved:
    """changed: when the file was, and its size: what it holds then is another entry."""
    return saved.read(path)
