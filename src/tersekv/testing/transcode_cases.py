"""What `tersekv verify` runs of `transcode`: pairs of formats, page sizes, layouts, scales and attributes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..formats import KV_FORMATS, LATENT_FORMATS, kv_format, latent_format
from .case import Case, next_format, up_to_step


def transcode(base: Case, i: int) -> Iterator[Case]:
    """Of a table of all pairs every format has a few, and every format is read."""
    base = replace(base, lens=(70,), spread=True)
    if base.format == "fp8_ds_mla":
        yield from _latents(base, i)
        return
    odd = up_to_step(base.format, (40, 72, 80, 96, 104, 120, 80)[i % 7])
    names = [*KV_FORMATS]
    other, third = next_format(base.format), names[(i + 3) % len(names)]
    odd = max(odd, up_to_step(other, odd), up_to_step(third, odd), key=lambda d: d % 16 == 0)
    scaled = replace(base, src_scale="float", scale="float")
    yield replace(base, name="copy to pages of 64", src_format=base.format, page=64)
    yield replace(base, name="next format", src_format=other, src_page=64, page=16)
    for case in (
        replace(base, name="third format hnd", src_format=third, layout="HND", page=3, src_scales="tail"),
        replace(base, name="hnd inline to tail", src_format=other, src_layout="HND", src_scales="inline", scales="tail",
                heads=3, dim=odd, src_page=5, page=64, index="int64"),
        replace(base, name="K and V of other formats", src_format=third, src_v_format=other, v_format=third, dim=odd),
        replace(base, name="copy hnd tail", src_page=3, src_layout="HND", scales="tail", page=1, index="uint32"),
        replace(base, name="equal rotations, D 128", src_format=other, src_rotation="kv", rotation="kv", alike=True,
                dim=128),
        replace(base, name="equal rotations copied", src_rotation="kv", rotation="kv", channels="v", src_channels="v",
                alike=True, src_page=64),
        replace(base, name=f"rotated D {odd}", src_format=third, rotation="kv", channels="k", dim=odd, heads=1),
        replace(base, name="rotated back", src_format=other, src_rotation="kv", src_channels="v", dim_v=128),
        replace(base, name="other signs and channels", src_rotation="kv", rotation="kv", src_channels="k",
                channels="kv"),
        replace(base, name="other channels", src_format=third, src_rotation="v", rotation="v", src_channels="kv",
                channels="kv", alike=False, page=64),
        replace(base, name="tokens on the device", src_format=other, ragged=True, slack=40, src_page=3),
        replace(base, name="no tokens", lens=(0,)),
        replace(base, name="one token", lens=(1,), src_format=third, page=1, strided=True),
        replace(base, name="8 heads D 256", src_format=other, heads=8, dim=256, lens=(33,), gaps="slots"),
    ):  # fmt: skip
        yield replace(case, quick=False)
    if kv_format(base.format).scale in ("tensor", "block"):
        for case in (
            replace(scaled, name="copy of one scale", alike=True, src_page=64),
            replace(scaled, name="another scale"),
            replace(scaled, name="scale tensors", src_scale="tensor", scale="tensor", alike=True, page=64),
            replace(scaled, name="another scale tensor", src_format=third, src_scale="float", scale="tensor"),
        ):
            yield replace(case, quick=False)
    if kv_format(base.format).scale == "tensor":
        heads = replace(scaled, src_scale="head", scale="tensor", heads=3, quick=False)
        yield replace(heads, name="a scale per head, one equal")
        yield replace(heads, name="a scale per head", scale="head", src_format=third, src_scale="one")
    if base.format in LATENT_FORMATS:
        yield from _latents(replace(base, name=f"latents {base.name}"), i)


def _latents(base: Case, i: int) -> Iterator[Case]:
    base = replace(base, latents=True, heads=1, page=64, quick=False)
    others = [name for name in LATENT_FORMATS if name != base.format]
    yield replace(base, name="latents copied", src_page=16)
    for name in others:
        yield replace(base, name=f"latents of {name}", src_format=name)
    yield replace(base, name="latents rank 256 rope 32", src_format=others[i % 4], rank=256, rope=32, page=3)
    if latent_format(base.format).scale == "tensor":
        yield replace(base, name="latents split scaled", split=True, scale="tensor", src_scale="float")
