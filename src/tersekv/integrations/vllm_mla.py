"""The classes that vLLM asks for where a model has latent attention (MLA): see `tersekv.integrations.vllm`.

vLLM's layer does the projections and calls here for what touches the cache. Pages are vLLM's own bytes in every cache
dtype, so what it brings for prompts reads them too: on a GPU its prefill backends attend, over latents that its
operators gather, or tersekv does (`vllm_mla_prefill.py`), if it is asked to. On a CPU these operators are missing:
there tersekv attends, and prompts of a float32 model, whose keys no page could hold, are decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf

from ..formats import latent_bytes_per_token
from ..layers import PagedLatentLayer
from ..ops.mla import mla_append, mla_decode
from .vllm import MLA_NAME
from .vllm_checkpoint import layer_with, require_alike, require_scales
from .vllm_latents import FORMATS, latents_of
from .vllm_mla_prefill import TersekvMLAPrefill, prompts
from .vllm_saved import saved_file
from .vllm_warm_up import Limits, first_time, query_signature, warm_up_latents


class TersekvMLABackend(MLACommonBackend):
    supported_dtypes = [torch.float16, torch.bfloat16]  # noqa: RUF012 (vLLM's own way)
    supported_kv_cache_dtypes = ["auto", *FORMATS]  # noqa: RUF012

    @staticmethod
    def get_name() -> str:
        return MLA_NAME

    @staticmethod
    def get_impl_cls() -> type[TersekvMLAImpl]:
        return TersekvMLAImpl

    @staticmethod
    def get_builder_cls() -> type[TersekvMLAMetadataBuilder]:
        return TersekvMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """vLLM before 0.32 takes the cache's shape from the backend."""
        is_record = FORMATS.get(cache_dtype_str) == "fp8_ds_mla"
        return num_blocks, block_size, latent_bytes_per_token("fp8_ds_mla") if is_record else head_size

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """A latent and its rotary part, or without one."""
        return [576, 512]

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        """A float32 model is taken on CPUs alone."""
        return dtype in cls.supported_dtypes or (dtype == torch.float32 and current_platform.is_cpu())


@dataclass
class TersekvMLAMetadata(MLACommonMetadata):
    seq_lens: Tensor | None = None  # [B] of all requests, new tokens included
    limits: Limits | None = None  # of all batches; None: unknown


class TersekvMLAMetadataBuilder(MLACommonMetadataBuilder[TersekvMLAMetadata]):
    # What is decoded are requests of equal numbers of rows: one, or one and drafts.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    query_len_support = QueryLenSupport.UNIFORM

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, TersekvMLAMetadata)
        scheduler = vllm_config.scheduler_config
        self.limits = Limits(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, self.reorder_batch_threshold)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> TersekvMLAMetadata:
        if common_attn_metadata.causal is not True:
            raise NotImplementedError("causal: want True, tersekv attends causally only")
        m = super().build(common_prefix_len, common_attn_metadata, fast_build)
        m.seq_lens, m.limits = common_attn_metadata.seq_lens, self.limits
        return m


class LatentPages:
    """An attention's pages, written and seen as a PagedLatentLayer: one for dense and for sparse attention."""

    kv_cache_dtype: str
    kv_lora_rank: int
    qk_rope_head_dim: int
    _config: Any  # vLLM's, or None
    _pages: tuple[Any, PagedLatentLayer] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        if self._config is not None:
            require_scales(*layer_with(self, self._config), self.kv_cache_dtype, self._config, sides="k")

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write the rows that have a slot: kv_c_normed [T or more, L], k_pe [T or more, 1, R] rotated,
        R 0 where the model has no rotary part."""
        n = slot_mapping.shape[0]
        if kv_cache.numel():  # vLLM profiles its memory without pages
            pages = self._layer(kv_cache, k_scale)
            rotary = k_pe[:n].view(-1, k_pe.shape[-1])[:n] if pages.qk_rope_head_dim else None
            mla_append(kv_c_normed[:n], rotary, pages, slot_mapping)

    def _layer(self, kv_cache: Tensor, k_scale: Tensor) -> PagedLatentLayer:
        """The pages [P, S, row] as tersekv sees them, made again when vLLM has other pages or scales."""
        key = (
            kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride(), kv_cache.dtype, k_scale.data_ptr(), k_scale.shape,
        )  # fmt: skip
        if self._pages is None or self._pages[0] != key:
            rotary = self.qk_rope_head_dim
            self._pages = key, latents_of(kv_cache, self.kv_cache_dtype, self.kv_lora_rank, k_scale, rotary)
        return self._pages[1]


class TersekvMLAImpl(LatentPages, MLACommonImpl[TersekvMLAMetadata]):
    can_return_lse_for_decode = True
    supports_dcp, supports_pcp = True, False

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
        **mla: Any,
    ) -> None:
        refused = {
            "alibi_slopes": alibi_slopes, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap,
            "indexer": mla.get("indexer"),
        }  # fmt: skip
        for option, value in refused.items():
            if value is not None:
                raise NotImplementedError(f"tersekv has no {option} for latent attention (got {value!r})")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"tersekv attends to a decoder's cache only, got attn_type={attn_type!r}")
        if kv_cache_dtype != "auto" and kv_cache_dtype not in FORMATS:
            raise ValueError(f"kv_cache_dtype: want auto, {', '.join(FORMATS)} for MLA, got {kv_cache_dtype!r}")
        self._config = get_current_vllm_config_or_none()
        if self._config is not None:
            require_alike(self._config)
        if (saved := saved_file(self._config)) is not None:
            raise NotImplementedError(f"additional_config.tersekv.saved: want none for latent attention, got {saved!r}")
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name, **mla,
        )  # fmt: skip
        # Kernels for every cache take a query of 16 bits, which keeps its digits.
        self.supports_quant_query_input = False

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Absorbed attention of the decoded requests' rows [T, H, L + R], whose last is a request's last token.

        The LSE [T, H] fp32 comes along for context parallelism: of the keys of this rank, −inf where it has none.
        """
        pages, m = self._layer(kv_c_and_k_pe_cache, layer._k_scale), attn_metadata.decode
        options = {"softmax_scale": self.scale, "return_lse": self.need_to_return_lse_for_decode}
        self._compile_once(q if isinstance(q, tuple) else (q,), pages, attn_metadata, options)
        done = mla_decode(q, pages, m.block_table, m.seq_lens, **options)
        return done if isinstance(done, tuple) else (done, None)

    def _compile_once(
        self, q: tuple[Tensor, ...], pages: PagedLatentLayer, attn_metadata: Any, options: dict[str, Any]
    ) -> None:
        """As `TersekvImpl` does, for what is decoded."""
        limits, m = getattr(attn_metadata, "limits", None), attn_metadata.decode
        kept = [(x.shape[1:], x.stride(), x.dtype) for x in (pages.ckv, pages.kpe)]
        kind = (
            pages.format, kept, [query_signature(x) for x in q], m.block_table.shape[1], limits, options["return_lse"],
        )  # fmt: skip
        if limits is not None and first_time(kind, q[0].device):
            index = SimpleNamespace(
                limits=limits, block_table=m.block_table, seq_lens=m.seq_lens, slot_mapping=attn_metadata.slot_mapping
            )
            warm_up_latents(q, pages, index, options)

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        k_scale: Tensor,
        output: Tensor,
        output_scale: Tensor | None = None,
    ) -> None:
        """Prompts and chunks of them, q [T, H, Dn + R] into output [T, H · Dv]."""
        m = attn_metadata.prefill
        if not current_platform.is_cpu() and not isinstance(m.prefill_backend, TersekvMLAPrefill):
            super().forward_mha(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale)
            return
        if self.dcp_world_size > 1:
            raise NotImplementedError("mla_prefill_backend: want one of vLLM's for pages dealt to ranks, got tersekv's")
        if output_scale is not None:
            raise NotImplementedError("output_scale: want None, since tersekv quantises no output for vLLM")
        sizes = [self.qk_nope_head_dim, self.v_head_dim]
        w_kv = get_and_maybe_dequant_weights(self.kv_b_proj, out_dtype=q.dtype).T
        weights = w_kv.unflatten(1, (self.num_heads, sum(sizes))).split(sizes, -1)
        pages, out = self._layer(kv_c_and_k_pe_cache, k_scale), output.view(-1, self.num_heads, self.v_head_dim)
        seq_lens = attn_metadata.seq_lens[attn_metadata.num_decodes :]
        if q.dtype == torch.float32:
            self._by_decode(q, pages, m, seq_lens, weights, out)
            return
        context = [0] * len(seq_lens) if m.chunked_context is None else m.chunked_context.context_lens_list
        prompts(
            q, kv_c_normed, k_pe.squeeze(1), pages, m.block_table, context, seq_lens, m.query_start_loc, weights, out,
            softmax_scale=self.scale, max_q_len=m.max_query_len,
        )  # fmt: skip

    def _by_decode(
        self, q: Tensor, pages: PagedLatentLayer, m: Any, seq_lens: Tensor, weights: tuple[Tensor, Tensor], out: Tensor
    ) -> None:
        w_k, w_v = weights
        q_nope, q_pe = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        latent = mla_decode(
            (torch.einsum("thn,lhn->thl", q_nope, w_k), q_pe), pages, m.block_table, seq_lens,
            softmax_scale=self.scale, cu_seqlens_q=m.query_start_loc, max_q_len=m.max_query_len,
        )  # fmt: skip
        out.copy_(torch.einsum("thl,lhv->thv", latent, w_v))
