"""Absorbed MLA decode in fp32 over the exact codes: one latent row is key and value of every head."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tersekv.formats import (
    BATCH_INVARIANCE,
    LATENT_SINKS,
    LISTS,
    LSE_OF_KEYS,
    MAX_LOGITS,
    TWO_SETS,
    UE8M0,
    latent_format,
)

from .exact import without_grad_and_autocast
from .gather import KeySlots, PagedRows, dequant_blocks
from .key_lists import KeySet, attend_to_lists, listed_keys
from .online_softmax import (
    Results,
    attend_to_batch_keys,
    call_scale,
    finalize_to_out_and_lse,
    rows_by_kv_head,
)
from .quantize import dequantize, why_no_codec
from .requests import MaskAndSoftcap, request_batches_on_cpu_else_one_batch, why_not_batch_invariant

SUPPORTS = (BATCH_INVARIANCE, LISTS, LATENT_SINKS, TWO_SETS, LSE_OF_KEYS, MAX_LOGITS)


def why_not(f: SimpleNamespace) -> str | None:
    extra = latent_format(f.extra_format or f.format)
    return why_no_codec(latent_format(f.format)) or why_no_codec(extra) or why_not_batch_invariant(f)


def configure(f: SimpleNamespace) -> None:
    return None


@without_grad_and_autocast
def run(call: Any, config: None) -> None:
    t, heads, rank = call.out.shape
    results = Results(t, heads, rank, call.out.device)
    if call.indices is not None:
        sets = [call] if call.extra_indices is None else [call, _call_over_extra_set_without_seq_lens(call)]
        listed = [_listed_key_set(x, "extra." if i else "") for i, x in enumerate(sets)]
        attend_to_lists(listed, call.sinks, 0.0, results, call.lse_of_keys)
        results.store_outputs_lses_and_max_logits(call, call_scale(call, "out_scale"))
        return
    source, kv_scale = LatentSource(call), call_scale(call, "kv_scale")
    q = _query_parts_times_kv_and_softmax_scale(call)
    for batch in request_batches_on_cpu_else_one_batch(call, MaskAndSoftcap(), source.num_pages, source.page_size):
        state = attend_to_batch_keys([rows_by_kv_head(x, batch, 1) for x in q], source, batch, MaskAndSoftcap())
        if state is not None:
            results.copy_rows_from_batch(batch, *finalize_to_out_and_lse(state, call.sinks, 1, call.lse_of_keys))
    results.store_outputs_lses_and_max_logits(call, kv_scale * call_scale(call, "out_scale"))


def _call_over_extra_set_without_seq_lens(call: Any) -> SimpleNamespace:
    """Returns the call with its extra set of keys as its only one. Without seq_lens, rows see all positions."""
    names = ("ckv", "kpe", "ckv_scale_cache", "page_table", "indices", "index_lens", "format", "kv_scale", "kv_scale_t")
    second = {name: getattr(call, f"extra_{name}") for name in names}
    return SimpleNamespace(**call._asdict() | second | {"seq_lens": None, "block_size": 1})


def _query_parts_times_kv_and_softmax_scale(call: Any) -> list[Tensor]:
    """Returns the parts of the query in fp32, times the scales of scores."""
    factor = call_scale(call, "kv_scale") * call_scale(call, "softmax_scale")
    return [x.to(torch.float32) * factor for x in (call.q_nope, call.q_pe)[: 1 + (call.kpe.shape[2] > 0)]]


def _listed_key_set(call: Any, error_name_prefix: str) -> KeySet:
    source = LatentSource(call)
    keys = listed_keys(call, source.num_pages, source.page_size, error_name_prefix)
    return KeySet(_query_parts_times_kv_and_softmax_scale(call), source, keys, call_scale(call, "kv_scale"))


class LatentSource:
    """A paged latent cache as a PagedSource with one head; the caller applies the per-tensor scale."""

    heads = 1

    def __init__(self, call: Any) -> None:
        self._format = latent_format(call.format)
        self._ckv, self._kpe, self._scales = call.ckv, call.kpe, call.ckv_scale_cache
        self.num_pages, self.page_size = call.ckv.shape[:2]
        self.widest = call.out.shape[2]

    def load_k_parts_and_unapplied_scale_or_none(self, at: KeySlots) -> tuple[list[Tensor], Tensor | None]:
        if self._format.scale == UE8M0:  # rows of bytes, the rotary part among them
            codes = self._ckv.view(torch.uint8)[at.pages, at.slots]  # some devices cannot index fp8
            return [dequantize(codes, self._scales[at.pages, at.slots], self._format)], None
        ckv = PagedRows(self._ckv.unsqueeze(2))
        if self._scales is None:
            latents = ckv.load(at)
        else:
            latents = dequant_blocks(ckv, PagedRows(self._scales.unsqueeze(2)), at)
        return [latents, *([PagedRows(self._kpe.unsqueeze(2)).load(at)] if self._kpe.shape[2] else [])], None

    def load_v_and_scale(self, at: KeySlots, k_parts: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        return k_parts[0], None
