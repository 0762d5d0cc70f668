"""Paged decode in fp32 over the exact codes; see `attention` for the softmax and `codes` for the conversions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from tersekv.formats import BATCH_INVARIANCE, BLOCK, CHANNELS, PAIRS, ROTATION, KVFormat, pair_of

from . import rotation
from .append import why_no_codec_pair
from .attention import Results, attend, call_scale, finalize_softmax, rows_by_kv_head
from .exact import without_autocast
from .gather import KeySlots, PagedRows, dequant_blocks
from .quantize import zero_points
from .requests import Rules, request_batches, why_not_batch_invariant

SUPPORTS = (PAIRS, ROTATION, CHANNELS, BATCH_INVARIANCE)


def why_not(f: SimpleNamespace) -> str | None:
    return why_no_codec_pair(f) or why_not_batch_invariant(f)


def configure(f: SimpleNamespace) -> None:
    return None


@without_autocast
def run(call: Any, config: None) -> None:
    source = KVSource(call)
    rules = Rules(call.window, call.mask, call.softcap)
    t, q_heads, head_dim_v = call.out.shape
    results = Results(t, q_heads, head_dim_v, call.out.device)
    q = rotation.query(call)
    k_factor = call_scale(call, "softmax_scale") * per_head(call_scale(call, "k_scale"), q_heads)
    for batch in request_batches(call, rules, source.num_pages, source.page_size):
        state = attend([rows_by_kv_head(q * k_factor, batch, source.heads)], source, batch, rules)
        if state is not None:
            results.put(batch, *finalize_softmax(state, call.sinks, source.heads))
    results.out = rotation.output(call, results.out)
    results.write(call, per_head(call_scale(call, "v_scale"), q_heads) * call_scale(call, "out_scale"))


class KVSource:
    """A paged K/V cache as a PagedSource; the caller applies the per-tensor scales."""

    def __init__(self, call: Any) -> None:
        self._k_format, self._v_format = pair_of(call)
        self._k, self._v = PagedRows(call.k_cache, self._k_format.code), PagedRows(call.v_cache, self._v_format.code)
        self._ks, self._vs = (None if x is None else PagedRows(x) for x in (call.k_scale_cache, call.v_scale_cache))
        self.num_pages, self.page_size, self.heads = call.k_cache.shape[:3]
        self.widest = max(call.q.shape[2], call.out.shape[2])

    def keys(self, at: KeySlots) -> tuple[list[Tensor], Tensor | None]:
        x, factor = self._load(self._k_format, self._k, self._ks, at)
        return [x], factor

    def values(self, at: KeySlots) -> tuple[Tensor, Tensor | None]:
        return self._load(self._v_format, self._v, self._vs, at)

    def _load(
        self, f: KVFormat, codes: PagedRows, scales: PagedRows | None, at: KeySlots
    ) -> tuple[Tensor, Tensor | None]:
        if scales is None:
            return codes.load(at), None
        if f.scale == BLOCK:
            return dequant_blocks(codes, scales, at), None
        x, factor = codes.load(at), scales.load(at)
        return x - zero_points(factor)[..., None] if f.code == "int4" else x, factor


def per_head(scale: float | Tensor, q_heads: int) -> float | Tensor:
    """Returns a scale [1] or [H] in a shape that broadcasts against rows [T, Hq, D]."""
    if not isinstance(scale, Tensor) or len(scale) == 1:
        return scale
    return scale.repeat_interleave(q_heads // len(scale))[:, None]
