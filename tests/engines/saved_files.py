"""Files of attributes for the byte-level Llama, with every attribute there is, and what the reference makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

import tersekv
from tersekv.formats import TENSOR, kv_format

LAYERS, KV_HEADS, DIM = 4, 2, 64


def write(path: Path, formats: list[str]) -> dict:
    """Write a file of layers in these formats, a name or K/V each, all rotated, no two alike; what Reference takes."""
    g = torch.Generator().manual_seed(1)
    pairs = [(f.split("/")[0], f.split("/")[-1]) for f in formats]
    plain = tersekv.PagedKVCache.allocate(
        len(formats), 1, 8, KV_HEADS, DIM, layer_formats=pairs, rotation="hadamard", device="cpu"
    )
    layers, scales, channels = [], [], []
    for layer in plain.layers:
        both = [0.5 + torch.rand(KV_HEADS, DIM, generator=g) for _ in range(2)]
        sizes = [
            0.02 + 0.03 * torch.rand(KV_HEADS, generator=g) if kv_format(f).scale == TENSOR else 1.0
            for f in layer.formats
        ]
        channels.append(tuple(both))
        scales.append(tuple(sizes))
        values = dict(zip(("k_scale", "v_scale", "k_channel_scale", "v_channel_scale"), (*sizes, *both), strict=True))
        layers.append(replace(layer, **values))
    tersekv.PagedKVCache(layers, DIM, DIM).save_attributes(path)
    return {"format": [f"{f}+rotated" for f in formats], "scales": scales, "channels": channels}
