"""The attention backend that SGLang asks for where a model has latent attention (MLA).

SGLang's layer does the projections. Prompts without earlier tokens bring keys and values of all heads, which `prefill`
attends to as they are; whatever else there is comes absorbed, and `mla_decode` attends to the pages. What a model in
float32 brings is absorbed always, because `prefill` takes keys of 16 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha import resolve_attn_backend
from torch import Tensor

from ..layers import PagedKVLayer
from ..ops.mla import mla_decode
from ..ops.prefill import prefill
from .sglang import NAME
from .sglang_batch import Metadata, PagedBackend, refuse_call, refuse_layer
from .sglang_mla_pool import TersekvMLAPool

_PLAIN = {"is_cross_attention": False, "logit_cap": 0.0, "sliding_window_size": -1, "xai_temperature_len": -1}


def forward_method(attn: Any, forward_batch: Any) -> AttnForwardMethod:
    """Which of its methods SGLang's layer takes: those that it takes for `triton`, whose rules are ours too."""
    if resolve_attn_backend(forward_batch).absorbs:
        return AttnForwardMethod.MLA
    return AttentionBackendRegistry.get_handler("triton")(attn, forward_batch)


class TersekvMLABackend(PagedBackend):
    pool_class = TersekvMLAPool

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.absorbs = runner.model_config.dtype == torch.float32
        self._seen: set[tuple[int, int]] = set()
        AttentionBackendRegistry.register(NAME, forward_method)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **more: Any,
    ) -> Tensor:
        """Absorbed: attention of q [T, H × (L + R)] over the pool, which takes k [T, 1, L + R] first. Else of
        q [T, H × (Dn + R)] to the same tokens' k and v [T, H, ·], whose latents are in the pool already."""
        refuse_call(forward_batch, more)
        kind = layer.layer_id, layer.qk_head_dim
        if kind not in self._seen:
            refuse_layer(layer, _PLAIN)
            self._seen.add(kind)
        m, scale = self.forward_metadata, float(layer.scaling)
        assert isinstance(m, Metadata)
        pages, table = self._pages_of(layer)
        rows = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty(len(rows), layer.tp_q_head_num, layer.v_head_dim)
        if (layer.qk_head_dim, layer.v_head_dim) == (pages.kv_lora_rank + pages.qk_rope_head_dim, pages.kv_lora_rank):
            if save_kv_cache:
                self.pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch, swa_loc=m.window_slots), k, v)
            mla_decode(rows, pages, table, m.seq_lens, **(m.rows or {}), softmax_scale=scale, out=out)
        else:
            # All that they see they bring themselves, and no page is read.
            none = PagedKVLayer.of(tuple(x.new_empty(1, self.page_size, *x.shape[1:]) for x in (k, v)))
            which = m.rows or {"cu_seqlens_q": torch.arange(len(rows) + 1, dtype=torch.int32, device=q.device)}
            prefill(rows, none, table, m.seq_lens, **which, k=k, v=v, softmax_scale=scale, out=out)
        return out.view(q.shape[0], -1)
