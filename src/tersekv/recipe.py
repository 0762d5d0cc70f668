"""What a cache is made of, in one word: `int8_per_token_head/nvfp4+rotated+ends=bf16`.

A format, or K's and V's with a `/` between them; behind it `+fitted`: scales of the tensors in which the largest values
just fit. Of K/V caches also `+rotated` (K and V), `+channels` (K and V scaled by channel), and `+ends=FORMAT` or
`+ends=K/V`: of the first and the last layer. The numbers of `+channels` and `+fitted` come from a calibration:
`tersekv eval --save FILE` keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .attributes import HADAMARD
from .formats import ALL_FORMATS, BLOCK, KV_FORMATS, TENSOR, meant

_PLAIN = ("rotated", "channels", "fitted")
# The keywords that say the same as a word's parts.
_KEYWORDS = {
    "rotated": ("rotation",),
    "channels": ("k_channel_scale", "v_channel_scale"),
    "fitted": ("k_scale", "v_scale", "kv_scale"),
}


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


def spelt(format: object, count: int, saved: str, **keywords: Any) -> Recipe | None:
    """The recipe of a `format` that is more than a name, for a cache of `count` layers; None: a name, or no word.

    saved:     how the cache takes numbers from a file
    keywords:  those of the cache that may say the same, None or 1.0 where they were not given

    Raises ValueError for a word that is none, for one that wants numbers, and for what is said twice.
    """
    if not isinstance(format, str) or not {"/", "+"} & {*format}:
        return None
    try:
        found = recipe(format)
    except ValueError as e:
        raise ValueError(f"format: {e}") from None
    if keywords["layer_formats"] is not None:
        raise ValueError(f"layer_formats: want it or format={format!r}, got both")
    parts = {"rotated": found.rotated, "channels": found.channels, "fitted": found.fitted}
    for part in (name for name, there in parts.items() if there):
        for keyword in _KEYWORDS[part]:
            value = keywords.get(keyword)
            if value is not None and not (isinstance(value, float) and value == 1.0):
                raise ValueError(f"{keyword}: want it or +{part} of format={format!r}, got both")
        if part in ("channels", "fitted"):
            raise ValueError(
                f"format: want the numbers of +{part} by {saved}, a file that `tersekv eval --save FILE` wrote, or by "
                f"{' and '.join(k for k in _KEYWORDS[part] if k in keywords)} without +{part}; got {format!r} alone"
            )
    if found.ends and count < 2:
        raise ValueError(f"format: want at least 2 layers for +ends, got {count} for {format!r}")
    return found


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
        near = next(filter(None, (meant(name, ALL_FORMATS) for name in names if name not in ALL_FORMATS)), "")
        raise ValueError(f"want one of {', '.join(ALL_FORMATS)}, or K/V of two, got {text!r}{near}")
    return names[0], names[-1]
