"""The attention backend that SGLang asks for. See `tersekv.integrations.sglang`."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from .. import env
from ..layers import PagedKVLayer
from ..ops.decode import decode
from ..ops.prefill import prefill
from .sglang_pool import TersekvPool
from .vllm_warm_up import DECODE_ROWS, Limits, warm_up

# Options of SGLang's that would have another part of it read or write the pool, or attend otherwise, and the value that
# leaves them off.
_REFUSED: dict[str, Any] = {
    "speculative_algorithm": None,
    "dllm_algorithm": None,
    "disaggregation_mode": "null",
    "enable_pdmux": False,
    "enable_two_batch_overlap": False,
    "enable_hierarchical_cache": False,
    "enable_hisparse": False,
    "enable_lmcache": False,
    "enable_flexkv": False,
    "enable_unified_cache_external_linker": False,
    "enable_unified_memory": False,
    "enable_page_major_kv_layout": False,
    "enable_kv_cache_sharding": False,
    "dcp_size": 1,
    "attn_cp_size": 1,
}
_EXTENDS = (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL)


@dataclass
class Metadata:
    """One batch, shared by all layers.

    table, window_table:  [B, max_pages]  of the pool, and of the one of layers with a window where they have their own
    window_slots:         [T]  where new rows go in that pool
    rows:                 how `prefill` tells the requests' rows apart; None: one each
    """

    seq_lens: Tensor  # [B] new tokens included
    table: Tensor
    window_table: Tensor | None
    window_slots: Tensor | None
    rows: dict[str, Any] | None


class TersekvBackend(AttentionBackend):
    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        given = resolved_view(runner.server_args)
        _refuse(runner, given)
        self.pool = runner.token_to_kv_pool
        self.two_pools = isinstance(self.pool, SWAKVPool)
        parts = (self.pool.full_kv_pool, self.pool.swa_kv_pool) if self.two_pools else (self.pool,)
        for part in parts:
            if not isinstance(part, TersekvPool):
                raise NotImplementedError(f"token_to_kv_pool: want tersekv's, got {type(part).__name__} for this model")
        self.page_size = parts[0].page_size
        self.slots = runner.req_to_token_pool.req_to_token  # [requests, tokens]
        self.chunked = runner.model_config.attention_chunk_size is not None
        self.limits = _limits(given, *self.slots.shape)
        self._seen: set[int] = set()
        self._compiled: set[str] = set()

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.forward_metadata = self._metadata(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """For a graph of decodes: what a replay changes is read from tensors that stay."""
        if not forward_batch.forward_mode.is_decode():
            raise NotImplementedError(f"forward_mode: want DECODE in a graph, got {forward_batch.forward_mode.name}")
        self.forward_metadata = self._metadata(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing: a graph's tables lie in its own memory."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        """Whether SGLang may use kernels of Triton's beside."""
        return self.slots.is_cuda

    def _metadata(self, batch: Any) -> Metadata:
        """No value of a tensor is read on the host. A table has room for the longest request that may come, so that all
        batches are alike in it."""
        first = self.slots[:, :: self.page_size].index_select(0, batch.req_pool_indices)
        window_table = window_slots = None
        if self.two_pools:
            window_table = self._pages(self.pool.translate_loc_from_full_to_swa(first))
            window_slots = self.pool.translate_loc_from_full_to_swa(batch.out_cache_loc)
        mode, rows = batch.forward_mode, None
        if mode in _EXTENDS:
            told = batch.extend_seq_lens_cpu
            most = batch.out_cache_loc.shape[0] if told is None else max(told, default=1)
            if most > 1:
                ends = batch.extend_seq_lens.cumsum(0, dtype=torch.int32)
                rows = {"cu_seqlens_q": torch.nn.functional.pad(ends, (1, 0)), "max_q_len": int(most)}
        elif not mode.is_decode_or_idle():
            raise NotImplementedError(f"forward_mode: want DECODE, EXTEND, MIXED or SPLIT_PREFILL, got {mode.name}")
        return Metadata(batch.seq_lens.to(torch.int32), self._pages(first), window_table, window_slots, rows)

    def _pages(self, slots: Tensor) -> Tensor:
        return (slots if self.page_size == 1 else slots // self.page_size).to(torch.int32)

    def forward_decode(self, q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._attend(q, *args, **kwargs)

    def forward_extend(self, q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._attend(q, *args, **kwargs)

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
        _refuse_call(forward_batch, more)
        m = self.forward_metadata
        assert isinstance(m, Metadata)
        table, pool, index = m.table, self.pool, layer.layer_id - self.pool.start_layer
        if self.two_pools:
            index, windowed = self.pool.layers_mapping[layer.layer_id]
            pool = self.pool.swa_kv_pool if windowed else self.pool.full_kv_pool
            if windowed:
                assert m.window_table is not None
                table = m.window_table
        pages = pool.layer(index, layer.k_scale, layer.v_scale)
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
        if m.rows is not None and m.rows["max_q_len"] > DECODE_ROWS:
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
        _refuse_layer(layer, self.chunked)
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


def _refuse_call(batch: Any, more: dict[str, Any]) -> None:
    """What a call may ask for that would change who sees what."""
    asked = [name for name, x in more.items() if x is not None and x is not False]
    asked += [name for name in ("encoder_lens", "mha_return_lse") if getattr(batch, name) not in (None, False)]
    if asked:
        raise NotImplementedError(f"tersekv has no {', '.join(asked)}")


def _refuse_layer(layer: Any, chunked: bool) -> None:
    plain = {
        "is_cross_attention": False, "attn_type": AttentionType.DECODER, "pos_encoding_mode": "NONE",
        "logit_capping_method": "tanh", "xai_temperature_len": -1, **({"use_irope": False} if chunked else {}),
    }  # fmt: skip
    for name, want in plain.items():
        if getattr(layer, name) != want:
            raise NotImplementedError(f"{name}: want {want!r} for tersekv, got {getattr(layer, name)!r}")


def _limits(given: Any, requests: int, tokens: int) -> Limits:
    """Of all batches: requests, and rows."""
    chunk = given.chunked_prefill_size or -1
    rows = chunk if chunk > 0 else max(given.max_prefill_tokens, tokens)
    return Limits(requests, rows + (requests if given.enable_mixed_chunk else 0), 1)


def _refuse(runner: Any, given: Any) -> None:
    """What this backend would not serve right, by name."""
    if runner.use_mla_backend:
        raise NotImplementedError("attention_backend: tersekv serves no latent attention (MLA) in SGLang; want another")
    if torch.version.hip is not None:
        raise NotImplementedError(
            "tersekv in SGLang wants CUDA or a CPU: on ROCm, models write rows of their own dtype"
        )
    for name, off in _REFUSED.items():
        got = getattr(given, name, off)
        if got != off:
            raise NotImplementedError(f"{name}: want {off!r} for attention_backend=tersekv, got {got!r}")
    graphs = getattr(given.cuda_graph_config, "prefill", None)
    if graphs is not None and graphs.backend == "full":
        raise NotImplementedError("cuda_graph_backend_prefill: want 'breakable' or 'disabled' for tersekv, got 'full'")
    # As the user gave it: what SGLang makes of "auto" may follow a checkpoint's scales.
    format, dtype = env.sglang_format(), runner.server_args.kv_cache_dtype
    if format is not None and dtype not in ("auto", "bf16", "bfloat16", format):
        raise ValueError(f"kv_cache_dtype: want 'auto' or 'bf16' beside TERSEKV_SGLANG_FORMAT={format}, got {dtype!r}")
