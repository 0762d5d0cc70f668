"""The attention backend that SGLang asks for. See `tersekv.integrations.sglang`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from ..layers import PagedKVLayer
from ..ops.decode import decode
from ..ops.prefill import prefill
from .sglang_batch import DRAFT_MODELS, Metadata, PagedBackend, refuse_call, refuse_layer
from .sglang_pool import TersekvPool
from .vllm_warm_up import DECODE_ROWS, Limits, warm_up

_PLAIN = {
    "is_cross_attention": False, "attn_type": AttentionType.DECODER, "pos_encoding_mode": "NONE",
    "logit_capping_method": "tanh", "xai_temperature_len": -1,
}  # fmt: skip


class TersekvBackend(PagedBackend):
    pool_class = TersekvPool
    speculates = (None, "NGRAM", *DRAFT_MODELS)

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.chunked = runner.model_config.attention_chunk_size is not None
        requests, tokens = self.slots.shape
        each = self.drafts if self.chain else 1
        self.limits = _limits(resolved_view(runner.server_args), requests, tokens, each)
        self._seen: set[int] = set()
        self._compiled: set[str] = set()

    def _attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        sinks: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """Attention of q [T, Hq × D] over the pool, which takes k and v [T, H, D] first. Without `save_kv_cache` it has
        them already, from the model itself."""
        refuse_call(forward_batch, more)
        m = self.forward_metadata
        assert isinstance(m, Metadata)
        # A layer that brings no rows reads another's, by the scales that these were written with.
        pages, table = self._pages_of(layer, *(() if k is None else (layer.k_scale, layer.v_scale)))
        rows = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        options: dict[str, Any] = {
            "softmax_scale": float(layer.scaling), "softcap": float(layer.logit_cap or 0.0),
            # SGLang counts the keys before a query's own.
            "window": None if layer.sliding_window_size < 0 else layer.sliding_window_size + 1,
            "sinks": None if sinks is None else sinks.detach().float(),
        }  # fmt: skip
        # New rows as they came are nearer than their codes, and dense. Those of 16 bits alone, and of this layer's own.
        brings = save_kv_cache and k is not None and q.dtype != torch.float32
        self._first_look(layer, rows, pages, table, forward_batch, brings, options)
        if save_kv_cache and k is not None:
            where = KVWriteLoc.for_batch(forward_batch, swa_loc=m.window_slots)
            self.pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        out = q.new_empty(len(rows), layer.tp_q_head_num, layer.v_head_dim)
        if m.rows is not None and m.rows.get("max_q_len", 1) > DECODE_ROWS:
            own: dict[str, Any] = {"k": k, "v": v} if brings else {}
            prefill(rows, pages, table, m.seq_lens, **m.rows, **own, out=out, **options)
        else:
            decode(rows, pages, table, m.seq_lens, **(m.rows or {}), out=out, **options)
        return out.view(q.shape[0], -1)

    def _first_look(
        self,
        layer: Any,
        q: Tensor,
        pages: PagedKVLayer,
        table: Tensor,
        batch: Any,
        brings: bool,
        options: dict[str, Any],
    ) -> None:
        """A layer is looked at once: on a GPU, within SGLang's own warm-up, all that its kind needs is compiled."""
        if layer.layer_id in self._seen or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        refuse_layer(layer, _PLAIN | ({"use_irope": False} if self.chunked else {}))
        if self.drafts:  # which are not as far apart as their rows
            refuse_layer(layer, {"sliding_window_size": -1})
        self._seen.add(layer.layer_id)
        given = (*options.values(), pages.k_scale, pages.v_scale)
        values = [x.shape if isinstance(x, Tensor) else x for x in given]
        kind = repr((pages, q.shape[1:], q.dtype, brings, values))
        if q.is_cuda and kind not in self._compiled:
            self._compiled.add(kind)
            assert isinstance(self.forward_metadata, Metadata)
            like = SimpleNamespace(
                limits=self.limits, block_table=table, seq_lens=self.forward_metadata.seq_lens,
                slot_mapping=batch.out_cache_loc,
            )  # fmt: skip
            warm_up(q, pages, like, brings, options)


def _limits(given: Any, requests: int, tokens: int, each: int) -> Limits:
    """Of all batches: requests, and rows; and those of each request that is decoded."""
    chunk = given.chunked_prefill_size or -1
    rows = chunk if chunk > 0 else max(given.max_prefill_tokens, tokens)
    return Limits(requests, rows + (requests if given.enable_mixed_chunk else 0), each)
