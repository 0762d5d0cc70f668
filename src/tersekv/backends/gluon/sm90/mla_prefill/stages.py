"""The launches of one MLA prefill plan on Hopper, and its scratch."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from ....host.bind import Launches, Scratch, Template
from ....triton.mla_prefill import entry as portable
from ....triton.mla_prefill import prepare
from ....triton.mla_prefill import project as portable_project
from ....triton.mla_prefill.tune import Choice
from . import attention, latents, project, three_warpgroups


def launches(f: SimpleNamespace, choice: Choice, sms: int, own_product: bool, overlaps: bool) -> Launches:
    """New rows are stored; then for each chunk its latents, their product, and the attention, which of a single chunk
    may be that of three warpgroups and, where it fails, the usual one behind it."""
    chunks, most = portable.chunks_of(f)
    only, last = len(chunks) == 1, len(chunks) - 1
    of_three = only and own_product and f.q.dtype == torch.bfloat16 and three_warpgroups.fits(f, sms)
    templates: list[Template] = [prepare.prepared(f, choice.native_casts, queries=False)]
    for i, (chunk, rows) in enumerate(chunks):
        templates += (
            latents.prepared(f, chunk, rows, most, choice.native_casts, i == 0, overlaps),
            project.prepared(f, rows, most, sms, overlaps) if own_product
            else portable_project.prepared(f, rows, most, choice.product, choice.native_fp8),
            *([three_warpgroups.prepared(f, chunk, rows, sms, overlaps)] if of_three else []),
            attention.prepared(f, chunk, rows, i > 0, i < last, sms, overlaps, of_three),
        )  # fmt: skip
    # COUNTER: see `attention.prepared`; the last is idle. DIRTY: values of the row may be NaN.
    places = portable.places(f) | {"COUNTER": ((4,), torch.int32), "DIRTY": ((most,), torch.int8)}
    return Launches(*templates, scratch=Scratch(0, places, portable.MOST_KEPT))
