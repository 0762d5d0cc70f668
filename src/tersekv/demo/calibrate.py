"""What caches have to be told of a model: scales of tensors and of channels, from another part of the text."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..attributes import HADAMARD, channel_scale
from ..cache import PagedKVCache
from ..formats import ALL_FORMATS, KV_FORMATS
from ..layers import PagedKVLayer
from ..ops.append import append
from ..recipe import Recipe
from .attend import Scales
from .search import REFERENCE
from .subject import Runner, Subject

_PAGE = 16
Tick = Callable[[str, float], None]  # (what is being done, work done since the last call)


def windows(tokens: Tensor, context: int) -> list[Tensor]:
    """Pieces of up to context + 1 tokens, neighbours sharing one: every token but the first is predicted once."""
    return [tokens[i : i + context + 1] for i in range(0, len(tokens) - 1, context)]


def score(paged: Runner, inputs: dict[Hashable, Tensor], chunk: int, logits: list[Tensor]) -> Iterator[int]:
    """Prefill each request in chunks, through the cache, and append its logits [t, vocab] to the list.

    Yields the number of tokens of each step. Every token attends to cached rows alone, its own row among them.
    """
    parts: dict[Hashable, list[Tensor]] = {r: [] for r in inputs}
    for begin in range(0, max(len(x) for x in inputs.values()), chunk):
        new = {r: x[begin : begin + chunk] for r, x in inputs.items() if begin < len(x)}
        counts = [len(x) for x in new.values()]
        for r, part in zip(new, paged.step(new).float().cpu().split(counts), strict=True):
            parts[r].append(part)
        yield sum(counts)
    for r in inputs:
        paged.free(r)
        logits.append(torch.cat(parts[r]))


class Calibration:
    """What a model caches of a text: run once, in 16 bits, when something is first asked for.

    tokens:  [N >= 2]; `batch` windows of them are run at most. None: recipes that want it raise ValueError
    """

    def __init__(self, subject: Subject, tokens: Tensor | None, batch: int, chunk: int, tick: Tick) -> None:
        self._subject, self._tokens, self._batch, self._chunk, self._tick = subject, tokens, batch, chunk, tick
        self._largest: dict[tuple[bool, bool], list[tuple[float, ...]]] = {}

    @cached_property
    @torch.inference_mode()
    def rows(self) -> list[tuple[Tensor, ...]]:
        """[T, H, D] and [T, H, Dv] of K and V in each layer; of latents [T, L] and [T, R]."""
        if self._tokens is None:
            raise ValueError("other: want another part of the text to calibrate on, got None")
        pieces = windows(self._tokens, self._subject.context)[: self._batch]
        longest = max(map(len, pieces))
        paged = self._subject.runner(REFERENCE, len(pieces), longest, _PAGE, None)
        inputs: dict[Hashable, Tensor] = {i: piece[:-1] for i, piece in enumerate(pieces)}
        for step in score(paged, inputs, self._chunk, []):
            self._tick(f"{self._subject.name} calibration", step)
        return paged.rows()

    @cached_property
    def channels(self) -> list[tuple[Tensor, ...]]:
        """Channel scales of K and V in each layer."""
        return [tuple(channel_scale(x) for x in layer) for layer in self.rows]

    def options(self, r: Recipe) -> Mapping[str, Any] | None:
        """What a recipe's cache takes in place of a format; None: it is one alone."""
        return None if r.plain else r.options(self._subject.num_layers, self.channels if r.channels else None)

    def scales(self, r: Recipe) -> Scales:
        """Scales of each layer's tensors in which the largest values of a recipe's rows just fit."""
        return fitting_scales(r, self.largest(r))

    def largest(self, r: Recipe) -> list[tuple[float, ...]]:
        """Largest magnitudes in each layer as a recipe lays rows down: of K and V, or of latent rows."""
        key = r.rotated, r.channels
        if key not in self._largest:
            self._largest[key] = [self._of_layer(r, i) for i in range(len(self.rows))]
        return self._largest[key]

    def filled(self, i: int, r: Recipe) -> PagedKVLayer:
        """Layer i of a recipe's K/V cache, with this text's rows in slots 0, 1, 2 …"""
        k, v = self.rows[i]
        options: dict[str, Any] = {"format": r.layers(self._subject.num_layers)[i]}
        if r.rotated:
            options["rotation"] = HADAMARD
        if r.channels:
            options["k_channel_scale"], options["v_channel_scale"] = self.channels[i]
        if r.fitted:
            options["k_scale"], options["v_scale"] = self.scales(r)[i]
        pages, (heads, dim) = -(-len(k) // _PAGE), k.shape[1:]
        made = PagedKVCache.allocate(
            1, pages, _PAGE, heads, dim, head_dim_v=v.shape[-1], device=k.device, **options
        )  # fmt: skip
        append(k, v, made[0], torch.arange(len(k), device=k.device))
        return made[0]

    def attributes(self, r: Recipe) -> PagedKVCache:
        """A K/V cache of one slot with a recipe's formats, scales, signs and channel scales, for `save_attributes`.

        Raises ValueError for a model whose layers have heads of different sizes.
        """
        sizes = list(dict.fromkeys((k.shape[1], k.shape[2], v.shape[2]) for k, v in self.rows))
        if len(sizes) > 1:
            raise ValueError(f"want layers whose heads are alike, got (H, D, Dv) of {', '.join(map(str, sizes))}")
        (heads, dim, dim_v), layers = sizes[0], self._subject.num_layers
        options = r.options(layers, self.channels if r.channels else None)
        made = PagedKVCache.allocate(
            layers, 1, 1, heads, dim, head_dim_v=dim_v, device=self.rows[0][0].device, **options
        )  # fmt: skip
        if not r.fitted:
            return made
        each = zip(made.layers, self.scales(r), strict=True)
        return PagedKVCache([replace(layer, k_scale=k, v_scale=v) for layer, (k, v) in each], dim, dim_v)

    def _of_layer(self, r: Recipe, i: int) -> tuple[float, ...]:
        stored = self.rows[i]
        if r.rotated or r.channels:
            layer = self.filled(i, Recipe((REFERENCE,) * 2, r.rotated, r.channels))
            stored = layer.k, layer.v
        sizes = tuple(float(x.abs().max()) for x in stored)
        return sizes if set(self._subject.formats) <= set(KV_FORMATS) else (max(sizes),)


def fitting_scales(r: Recipe, largest: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Scales of each layer's tensors that let their largest values just fit."""
    each = r.layers(len(largest))
    return [
        tuple(ALL_FORMATS[name].fitting_scale(x) for name, x in zip(names, layer, strict=False))
        for names, layer in zip(each, largest, strict=True)
    ]
