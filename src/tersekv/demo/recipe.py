"""What a cache is made of, in one word: `int8_per_token_head/nvfp4+rotated+ends=bf16`.

A format, or K's and V's with a `/` between them; behind it `+fitted`: scales of the tensors in which the largest values
just fit. Of K/V caches also `+rotated` (K and V), `+channels` (K and V scaled by channel), and `+ends=FORMAT` or
`+ends=K/V`: of the first and the last layer. Numbers are calibrated on another part of the text than is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attributes import HADAMARD
from ..formats import ALL_FORMATS, BLOCK, KV_FORMATS, TENSOR

REFERENCE = "bf16"
_PLAIN = ("rotated", "channels", "fitted")
_FOUR_BITS = ("int4_per_token_head", "nvfp4")
_EIGHT_BITS = ("int8_per_token_head", "fp8_per_token_head")


@dataclass(frozen=True)
class Recipe:
    """formats, ends: K's and V's; ends None: no other than `formats`."""

    formats: tuple[str, str]
    rotated: bool = False
    channels: bool = False
    ends: tuple[str, str] | None = None
    fitted: bool = False

    @property
    def plain(self) -> bool:
        """Whether it is a format, its scales aside, and nothing else: what latent caches have too."""
        return self == Recipe((self.formats[0],) * 2, fitted=self.fitted)

    @property
    def calibrated(self) -> bool:
        """Whether it has numbers that a text has to give."""
        return self.channels or self.fitted

    def layers(self, count: int) -> list[tuple[str, str]]:
        """The formats of each layer."""
        each = [self.formats] * count
        if self.ends is not None:
            each[0] = each[-1] = self.ends
        return each

    def options(self, layers: int, channels: Sequence[tuple[Tensor, ...]] | None) -> dict[str, Any]:
        """As K/V caches take them in place of a format. channels: scales of K and V by layer, where it has them."""
        options: dict[str, Any] = {"layer_formats": self.layers(layers)}
        if self.rotated:
            options["rotation"] = HADAMARD
        if channels is not None:
            sides = (torch.stack(side) for side in zip(*channels, strict=True))
            options.update(zip(("k_channel_scale", "v_channel_scale"), sides, strict=True))
        return options


def recipe(text: str) -> Recipe:
    """The recipe of a word. Raises ValueError that says what of it is wrong."""
    first, *more = text.split("+")
    formats, found, ends = _pair(first), set(), None
    for word in more:
        name, _, value = word.partition("=")
        if name == "ends" and value and ends is None:
            ends = _pair(value)
        elif word in _PLAIN and word not in found:
            found.add(word)
        else:
            raise ValueError(f"want +rotated, +channels, +fitted or +ends=FORMAT once each, got +{word}")
    made = Recipe(formats, "rotated" in found, "channels" in found, ends, "fitted" in found)
    if not made.plain and not {*formats, *(ends or formats)} <= set(KV_FORMATS):
        raise ValueError(f"want formats of K/V caches ({', '.join(KV_FORMATS)}) for {text!r}")
    if made.fitted and not any(ALL_FORMATS[f].scale in (TENSOR, BLOCK) for f in (*formats, *(ends or ()))):
        raise ValueError(f"want a format that takes a scale for +fitted, got {text!r}")
    return made


def _pair(text: str) -> tuple[str, str]:
    names = text.split("/")
    if len(names) > 2 or not all(name in ALL_FORMATS for name in names):
        raise ValueError(f"want one of {', '.join(ALL_FORMATS)}, or K/V of two, got {text!r}")
    return names[0], names[-1]


def searched(formats: Sequence[str]) -> list[str]:
    """What a search tries where these formats are: each alone, and with fitted scales where it takes some; those of few
    bits rotated, with channel scales, beside 8 bits for K, and with 8 bits in the first and last layer."""
    few = [f for f in _FOUR_BITS if f in formats]
    eight = next((f for f in _EIGHT_BITS if f in formats), None)
    fitted = [f"{f}+fitted" for f in formats if ALL_FORMATS[f].scale in (TENSOR, BLOCK)]
    if eight is None or not set(formats) <= set(KV_FORMATS):
        return [*formats, *fitted]
    found = [*formats, *fitted, f"{eight}+rotated"]
    for f in few:
        found += [f"{f}+rotated", f"{f}+channels", f"{f}+rotated+channels", f"{f}+ends={eight}"]
        found += [f"{eight}/{f}", f"{f}/{eight}", f"{eight}/{f}+rotated", f"{eight}/{f}+channels"]
    found += [f"{a}/{b}" for a in few for b in few if a != b]
    return list(dict.fromkeys(found))
