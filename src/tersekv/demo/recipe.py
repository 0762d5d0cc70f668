"""What a cache is made of, in one word: `int8_per_token_head/nvfp4+rotated+ends=bf16`.

A format, or K's and V's with a `/` between them; then, of K/V caches, `+rotated` (K and V), `+channels` (K and V scaled
by channel, calibrated on the reference's rows), and `+ends=FORMAT` or `+ends=K/V`: of the first and the last layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..formats import ALL_FORMATS, KV_FORMATS

_PLAIN = ("rotated", "channels")
_FOUR_BITS = ("nvfp4",)
_EIGHT_BITS = ("int8_per_token_head", "fp8_per_token_head")


@dataclass(frozen=True)
class Recipe:
    """formats, ends: K's and V's; ends None: no other than `formats`."""

    formats: tuple[str, str]
    rotated: bool = False
    channels: bool = False
    ends: tuple[str, str] | None = None

    @property
    def plain(self) -> bool:
        """Whether it is a format and nothing else: what latent caches have too."""
        return self == Recipe((self.formats[0],) * 2)

    def layers(self, count: int) -> list[tuple[str, str]]:
        """The formats of each layer."""
        each = [self.formats] * count
        if self.ends is not None:
            each[0] = each[-1] = self.ends
        return each

    def options(self, channels: Sequence[tuple[Tensor, ...]]) -> dict[str, Any] | None:
        """As caches take them in place of a format; None: it is one alone. channels: scales of K and V by layer."""
        if self.plain:
            return None
        options: dict[str, Any] = {"layer_formats": self.layers(len(channels))}
        if self.rotated:
            options["rotation"] = "hadamard"
        if self.channels:
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
            raise ValueError(f"want +rotated, +channels or +ends=FORMAT once each, got +{word}")
    made = Recipe(formats, "rotated" in found, "channels" in found, ends)
    if not made.plain and not {*formats, *(ends or formats)} <= set(KV_FORMATS):
        raise ValueError(f"want formats of K/V caches ({', '.join(KV_FORMATS)}) for {text!r}")
    return made


def _pair(text: str) -> tuple[str, str]:
    names = text.split("/")
    if len(names) > 2 or not all(name in ALL_FORMATS for name in names):
        raise ValueError(f"want one of {', '.join(ALL_FORMATS)}, or K/V of two, got {text!r}")
    return names[0], names[-1]


def searched(formats: Sequence[str]) -> list[str]:
    """What a search tries where these formats are: each alone; those of few bits rotated, with channel scales, beside
    8 bits for K, and with 8 bits in the first and last layer."""
    few = [f for f in _FOUR_BITS if f in formats]
    eight = next((f for f in _EIGHT_BITS if f in formats), None)
    if eight is None or not set(formats) <= set(KV_FORMATS):
        return list(formats)
    found = [*formats, f"{eight}+rotated"]
    for f in few:
        found += [f"{f}+rotated", f"{f}+channels", f"{f}+rotated+channels", f"{f}+ends={eight}"]
        found += [f"{eight}/{f}", f"{f}/{eight}", f"{eight}/{f}+rotated", f"{eight}/{f}+channels"]
    found += [f"{a}/{b}" for a in few for b in few if a != b]
    return list(dict.fromkeys(found))
