"""Which formats, scales and attributes the layers of a `TersekvCache` have, from what its caller gives."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from ..attributes import HADAMARD
from ..cache import PagedKVCache
from ..formats import ALL_FORMATS, meant
from ..layers import Formats, PagedKVLayer, kv_pair
from ..recipe import spelt

_DEFAULT = "fp8_e4m3"


def chosen(
    layers: int, format: Formats | None, layer_formats: Sequence[Formats] | None, saved: str | os.PathLike | None,
    attributes: Mapping[str, Any], scales: Mapping[str, Any],
) -> tuple[list[Formats], dict[str, Any], list[PagedKVLayer] | None]:  # fmt: skip
    """The format of each layer, rotation and channel scales, and the layers of a file that holds them and the scales.

    Raises ValueError for what is no format, and for what is said twice.
    """
    attributes, others = dict(attributes), {"layer_formats": layer_formats, **attributes, **scales}
    if saved is not None:
        for name, value in {"format": format, **others}.items():
            if value is not None and not (isinstance(value, float) and value == 1.0):
                raise ValueError(f"{name}: want it or saved={os.fspath(saved)!r}, which holds it, got both")
        made = PagedKVCache.allocate_saved(saved, 1, 1, device="cpu")
        if len(made) != layers:
            raise ValueError(f"saved: want attributes of {layers} layers, got {len(made)} in {os.fspath(saved)!r}")
        return list(made.layer_formats), attributes, list(made.layers)
    word = spelt(format, layers, "saved=FILE", **others)
    if word is not None:
        format, layer_formats = None, word.layers(layers)
        attributes["rotation"] = HADAMARD if word.rotated else attributes["rotation"]
    if layer_formats is None:
        return _pairs([_DEFAULT if format is None else format] * layers), attributes, None
    if format is not None:
        raise ValueError(f"format: want it or layer_formats, got both, {format!r} and {layer_formats!r}")
    if len(layer_formats) != layers:
        raise ValueError(f"layer_formats: want {layers} entries, one a layer, got {len(layer_formats)}")
    return _pairs(layer_formats), attributes, None


def _pairs(entries: Sequence[Formats]) -> list[Formats]:
    """The entries, K's and V's as one name where they are the same."""
    both = [kv_pair("format", entry) for entry in entries]
    for name in (name for names in both for name in names):
        if not isinstance(name, str) or name not in ALL_FORMATS:
            raise ValueError(f"format: want one of {', '.join(ALL_FORMATS)}, got {name!r}{meant(name, ALL_FORMATS)}")
    return [k if k == v else (k, v) for k, v in both]


def scale_of_layers(name: str, scale: float | Sequence[float], layers: int) -> list[float]:
    """One number for each layer."""
    each: list[Any]
    try:
        each = list(scale)  # type: ignore[arg-type]
    except TypeError:  # a number, or a tensor without dimensions, which has an __iter__ too
        each = [scale] * layers
    if len(each) != layers or not all(isinstance(s, Real) and not isinstance(s, bool) and float(s) > 0 for s in each):
        raise ValueError(f"{name}: want a positive number, or one for each of {layers} layers, got {scale!r}")
    return [float(s) for s in each]
