"""The classes that vLLM asks for where an indexer chooses the keys of latent attention: DeepSeek V3.2, GLM-5.

vLLM's indexer, with its own cache and kernels, writes each row's positions into one buffer of all layers. Rows of
prompts and of decoded requests read them in one call: tersekv takes positions and the page table as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.attention.sparse_mla_attention import SharedTopkIndicesBuffer
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MLAAttentionImpl,
)

from ..ops.mla import mla_decode
from .vllm import MLA_SPARSE_NAME
from .vllm_checkpoint import require_alike
from .vllm_mla import FORMATS, LatentPages, TersekvMLABackend
from .vllm_saved import saved_file

# What vLLM's layer passes and this attention does not need; anything else, such as a model's sinks, is refused.
_UNUSED = ("q_lora_rank", "qk_nope_head_dim", "qk_head_dim", "v_head_dim", "kv_b_proj", "index_group_builder")


class TersekvMLASparseBackend(TersekvMLABackend):
    @staticmethod
    def get_name() -> str:
        return MLA_SPARSE_NAME

    @staticmethod
    def get_impl_cls() -> type[TersekvMLASparseImpl]:  # type: ignore[override]
        return TersekvMLASparseImpl

    @staticmethod
    def get_builder_cls() -> type[TersekvMLASparseMetadataBuilder]:  # type: ignore[override]
        return TersekvMLASparseMetadataBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        return True


@dataclass
class TersekvMLASparseMetadata(AttentionMetadata):
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor  # [B + 1]
    seq_lens: Tensor  # [B], new tokens included
    block_table: Tensor  # [B, max_pages]
    slot_mapping: Tensor
    # vLLM's layer sends what it counts as decoded to `forward_mqa`: here that is every row.
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0
    prefill: None = None


class TersekvMLASparseMetadataBuilder(AttentionMetadataBuilder[TersekvMLASparseMetadata]):
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # abstract in vLLM

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> TersekvMLASparseMetadata:
        m = common_attn_metadata
        if m.causal is not True:
            raise NotImplementedError("causal: want True, tersekv attends causally only")
        return TersekvMLASparseMetadata(
            num_reqs=m.num_reqs, num_actual_tokens=m.num_actual_tokens, max_query_len=m.max_query_len,
            max_seq_len=m.max_seq_len, query_start_loc=m.query_start_loc, seq_lens=m.seq_lens,
            block_table=m.block_table_tensor, slot_mapping=m.slot_mapping, num_decodes=m.num_reqs,
            num_decode_tokens=m.num_actual_tokens,
        )  # fmt: skip


class TersekvMLASparseImpl(LatentPages, SharedTopkIndicesBuffer, MLAAttentionImpl[TersekvMLASparseMetadata]):
    is_sparse = True
    supports_dense_mha_prefill = False
    supports_dcp, supports_pcp = False, False
    # Kernels for every cache take a query of 16 bits, which keeps its digits.
    supports_quant_query_input = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        *,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        indexer: Any = None,
        topk_indices_buffer: Tensor | None = None,
        **mla: Any,
    ) -> None:
        self._config = config = get_current_vllm_config_or_none()
        if config is not None:
            require_alike(config)
        refused = {
            "alibi_slopes": alibi_slopes, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            "additional_config.tersekv.saved": saved_file(config),
            "attention_config.hisparse_config": config and config.attention_config.hisparse_config,
            **{name: value for name, value in mla.items() if name not in _UNUSED},
        }  # fmt: skip
        for option, value in refused.items():
            if value is not None:
                raise NotImplementedError(f"tersekv has no {option} for sparse latent attention (got {value!r})")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"tersekv attends to a decoder's cache only, got attn_type={attn_type!r}")
        if kv_cache_dtype != "auto" and kv_cache_dtype not in FORMATS:
            raise ValueError(f"kv_cache_dtype: want auto, {', '.join(FORMATS)} for MLA, got {kv_cache_dtype!r}")
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)
        if self.topk_indices_buffer is None:
            raise ValueError("topk_indices_buffer: want the positions that an indexer chose, got None")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.kv_cache_dtype, self.kv_lora_rank, self.qk_rope_head_dim = kv_cache_dtype, kv_lora_rank, qk_rope_head_dim

    def record_logical_topk_ready(self) -> None:
        """What the indexer wrote is read on the stream that wrote it."""

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: TersekvMLASparseMetadata,
        layer: Any,
    ) -> tuple[Tensor, None]:
        """Absorbed attention of all rows [T, H, L + R], each over the positions that the indexer chose for it."""
        pages, m = self._layer(kv_c_and_k_pe_cache, layer._k_scale), attn_metadata
        rows = (q if isinstance(q, Tensor) else q[0]).shape[0]
        chosen = self.topk_indices_buffer
        assert chosen is not None
        out = mla_decode(
            q, pages, m.block_table, m.seq_lens, softmax_scale=self.scale, indices=chosen[:rows],
            cu_seqlens_q=m.query_start_loc, max_q_len=m.max_query_len,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out, None
