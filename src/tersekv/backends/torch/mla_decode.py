"""Absorbed MLA decode in fp32 over the exact codes: one latent row is key and value of every head."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tersekv.formats import BATCH_INVARIANCE, LATENT_SINKS, LISTS, latent_format

from .exact import without_autocast
from .gather import KeySlots, PagedRows, dequant_blocks
from .key_lists import KeySet, attend_to_lists, listed_keys
from .online_softmax import Results, attend_to_batch_keys, call_scale, finalize_to_out_and_lse, rows_by_kv_head
from .quantize import why_no_codec
from .requests import MaskAndSoftcap, request_batches, why_not_batch_invariant

SUPPORTS = (BATCH_INVARIANCE, LISTS, LATENT_SINKS)


def why_not(f: SimpleNamespace) -> str | None:
    return why_no_codec(latent_format(f.format)) or why_not_batch_invariant(f)


def configure(f: SimpleNamespace) -> None:
    return None


@without_autocast
def run(call: Any, config: None) -> None:
    source = LatentSource(call)
    t, heads, rank = call.out.shape
    results = Results(t, heads, rank, call.out.device)
    kv_scale = call_scale(call, "kv_scale")
    factor = kv_scale * call_scale(call, "softmax_scale")
    q = [x.to(torch.float32) * factor for x in (call.q_nope, call.q_pe)]
    if call.indices is not None:
        keys = listed_keys(call, source.num_pages, source.page_size)
        attend_to_lists([KeySet(q, source, keys)], call.sinks, 0.0, results)
        results.write(call, kv_scale * call_scale(call, "out_scale"))
        return
    for batch in request_batches(call, MaskAndSoftcap(), source.num_pages, source.page_size):
        state = attend_to_batch_keys([rows_by_kv_head(x, batch, 1) for x in q], source, batch, MaskAndSoftcap())
        if state is not None:
            results.put(batch, *finalize_to_out_and_lse(state, call.sinks, 1))
    results.write(call, kv_scale * call_scale(call, "out_scale"))


class LatentSource:
    """A paged latent cache as a PagedSource with one head; the caller applies the per-tensor scale."""

    heads = 1

    def __init__(self, call: Any) -> None:
        self._ckv, self._kpe = (PagedRows(x.unsqueeze(2)) for x in (call.ckv, call.kpe))
        self._scales = None if call.ckv_scale_cache is None else PagedRows(call.ckv_scale_cache.unsqueeze(2))
        self.num_pages, self.page_size = call.ckv.shape[:2]
        self.widest = call.ckv.shape[2]
        self._latents: Tensor | None = None

    def keys(self, at: KeySlots) -> tuple[list[Tensor], Tensor | None]:
        if self._scales is None:
            self._latents = self._ckv.load(at)
        else:
            self._latents = dequant_blocks(self._ckv, self._scales, at)
        return [self._latents, self._kpe.load(at)], None

    def values(self, at: KeySlots) -> tuple[Tensor, Tensor | None]:
        assert self._latents is not None
        return self._latents, None
