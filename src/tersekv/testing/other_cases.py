"""Cases of the caches that a call has beside its own: the pages that a transcode reads, a second set of keys."""

from __future__ import annotations

from dataclasses import replace

from ..formats import LATENT_FORMATS, LATENT_RECORDS, latent_format
from .case import Case


def source_case(c: Case) -> Case:
    """The case of the pages that a transcode reads."""
    return replace(
        c, format=c.src_format or c.format, v_format=c.src_v_format or (c.v_format if not c.src_format else ""),
        page=c.src_page, layout=c.src_layout, scales=c.src_scales, rotation=c.src_rotation, channels=c.src_channels,
        scale=c.src_scale, packed=False, gaps="", split=c.split and c.src_format != "fp8_ds_mla",
    )  # fmt: skip


def extra_case(c: Case) -> Case:
    """The case of a second set of keys."""
    f = latent_format(c.extra_format or c.format)
    scale = {"one": "float", "float": "tensor"}.get(c.scale, "one")
    return replace(
        c, name=f"{c.name} extra", format=f.name, page=c.extra_page, listed=c.extra_listed, by_slot=c.extra_by_slot,
        block_size=1, lens=tuple(n // 2 + 3 for n in c.lens), q_lens=c.q_lens or (1,) * len(c.lens), scale=scale,
        split=c.split and f.scale_dtype is None, extra_listed=-1,
    )  # fmt: skip


def extra_formats(c: Case) -> list[str]:
    """The formats that hold rows of a case's sizes, for a second set of keys; half of the entries are its own."""
    fits = [f.name for f in LATENT_FORMATS.values() if c.rank % (f.scale_block or 8) == 0]
    fits += [*LATENT_RECORDS] if (c.rank, c.rope) == (512, 0) else []
    return fits + [""] * len(fits)
