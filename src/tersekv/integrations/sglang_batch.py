"""What SGLang's backends of both kinds share: which layer is in which pool, and the metadata of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.environ import envs
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import TreeMaskMode, VerifyMask
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from .. import env
from .sglang import NAME
from .sglang_drafts import draft_mask

# Options of SGLang's that would have another part of it read or write the pool, or attend otherwise, and the value that
# leaves them off.
REFUSED: dict[str, Any] = {
    "dllm_algorithm": None,
    "disaggregation_mode": "null",
    "enable_pdmux": False,
    "enable_two_batch_overlap": False,
    "hicache_storage_backend": None,
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
# Algorithms with a draft model, and what is likewise left off beside one.
DRAFT_MODELS = ("EAGLE", "EAGLE3", "STANDALONE")
REFUSED_BESIDE_A_DRAFT_MODEL: dict[str, Any] = {
    "speculative_adaptive": False,
    "speculative_draft_window_size": None,
    "enable_multi_layer_eagle": False,
    "enable_dp_attention": False,
    "enable_hierarchical_cache": False,
}
_EXTENDS = (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL, ForwardMode.DRAFT_EXTEND_V2)


@dataclass
class Metadata:
    """One batch, shared by all layers.

    table, window_table:  [B, max_pages]  of the pool, and of the one of layers with a window where they have their own
    window_slots:         [T]  where new rows go in that pool
    rows:                 how `prefill` tells the requests' rows apart, or which drafts see which; None: one each, or a
                          chain of drafts
    """

    seq_lens: Tensor  # [B] new tokens included
    table: Tensor
    window_table: Tensor | None
    window_slots: Tensor | None
    rows: dict[str, Any] | None


class PagedBackend(AttentionBackend):
    """What a batch is, whatever attends to it; subclasses say of which class their pool is, and attend."""

    needs_cpu_seq_lens = False
    verify_mask: VerifyMask | None = None
    pool_class: type
    speculates: tuple[str | None, ...] = (None,)  # by these algorithms

    def __init__(self, runner: Any) -> None:
        super().__init__()
        server_args = resolved_view(runner.server_args)
        _refuse(runner, server_args, self.speculates)
        # Models ask the backend for both.
        self.pool = self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.two_pools = isinstance(self.pool, SWAKVPool)
        self.hybrid = isinstance(self.pool, HybridLinearKVPool)
        if self.two_pools:
            parts = [self.pool.full_kv_pool, self.pool.swa_kv_pool]
        else:
            parts = [self.pool.full_kv_pool if self.hybrid else self.pool]
        for part in parts:
            if not isinstance(part, self.pool_class):
                raise NotImplementedError(f"token_to_kv_pool: want tersekv's, got {type(part).__name__} for this model")
        speculative = getattr(server_args, "speculative_algorithm", None) is not None
        if self.hybrid and speculative:
            got = server_args.speculative_algorithm
            raise NotImplementedError(f"speculative_algorithm: want None for a hybrid model in tersekv, got {got!r}")
        self.drafts: int = server_args.speculative_num_draft_tokens if speculative else 0
        self.page_size = parts[0].page_size
        self.slots = runner.req_to_token_pool.req_to_token  # [requests, tokens]
        self.chain = self.full_masks = False
        if speculative and server_args.speculative_algorithm in DRAFT_MODELS:
            # One branch needs no mask. Those of several SGLang writes into a tensor of ours.
            self.chain = server_args.speculative_eagle_topk == 1
            if not runner.is_draft_worker:
                self.verify_mask = self._verify_mask()
        elif speculative:
            # Masks of n-grams have the earlier tokens in them on all but a CPU.
            self.full_masks = self.slots.is_cuda

    def _pages_of(self, layer: Any, *scales: Any) -> tuple[Any, Tensor]:
        """A layer's pages, in whichever pool they are, and the table of the batch in it."""
        m, pool, index = self.forward_metadata, self.pool, layer.layer_id - self.pool.start_layer
        assert isinstance(m, Metadata)
        if self.pool.layer_transfer_counter is not None:  # a hierarchical cache brings pages back layer by layer
            self.pool.layer_transfer_counter.wait_until(index)
        if self.hybrid:
            pool, index = self.pool.full_kv_pool, self.pool._transfer_full_attention_id(layer.layer_id)
        if self.two_pools:
            index, windowed = self.pool.layers_mapping[layer.layer_id]
            if windowed:
                assert m.window_table is not None
                return self.pool.swa_kv_pool.layer(index, *scales), m.window_table
            pool = self.pool.full_kv_pool
        return pool.layer(index, *scales), m.table

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.forward_metadata = self.metadata_of(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a graph, of drafts: each batch brings its mask in a tensor of its own."""
        if self._verifies(forward_batch) and not self.chain:
            mask = self._mask(forward_batch)
            self.masks[: len(mask)] = mask

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """For a graph of decodes or of drafts: what a replay changes is read from tensors that stay."""
        mask = None
        if self._verifies(forward_batch):
            mask = self.masks[: len(forward_batch.seq_lens) * self.drafts]
        elif not forward_batch.forward_mode.is_decode():
            raise NotImplementedError(f"forward_mode: want DECODE in a graph, got {forward_batch.forward_mode.name}")
        self.forward_metadata = self.metadata_of(forward_batch, mask)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """The drafts' masks; a graph's tables lie in its own memory."""
        words = 2 * -(-self.drafts // 32)
        self.masks = torch.zeros(max_num_tokens, words, dtype=torch.uint16, device=self.slots.device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        """Whether SGLang may use kernels of Triton's beside."""
        return self.slots.is_cuda

    def _verifies(self, batch: Any) -> bool:
        return self.drafts > 0 and batch.forward_mode.is_target_verify()

    def _verify_mask(self) -> VerifyMask:
        requests = len(self.slots)
        buffer = torch.ones(requests * self.drafts**2, dtype=torch.bool, device=self.slots.device)
        return VerifyMask(buffer, TreeMaskMode.QLEN_ONLY, requests, is_read=not self.chain)

    def _mask(self, batch: Any) -> Tensor:
        return draft_mask(batch.spec_info.custom_mask, batch.seq_lens, self.drafts, self.full_masks)

    def metadata_of(self, batch: Any, mask: Tensor | None = None) -> Metadata:
        """No value of a tensor is read on the host. A table has room for the longest request that may come, so that all
        batches are alike in it."""
        first = self.slots[:, :: self.page_size].index_select(0, batch.req_pool_indices)
        window_table = window_slots = None
        if self.two_pools:
            window_table = self._pages(self.pool.translate_loc_from_full_to_swa(first))
            window_slots = self.pool.translate_loc_from_full_to_swa(batch.out_cache_loc)
        mode, lens = batch.forward_mode, batch.seq_lens
        rows: dict[str, Any] | None = None
        if self._verifies(batch):
            lens = lens + self.drafts
            if not self.chain:
                rows = {"mask": self._mask(batch) if mask is None else mask}
        elif mode in _EXTENDS:
            extend_lens = batch.extend_seq_lens_cpu
            most = batch.out_cache_loc.shape[0] if extend_lens is None else max(extend_lens, default=1)
            if most > 1:
                ends = batch.extend_seq_lens.cumsum(0, dtype=torch.int32)
                rows = {"cu_seqlens_q": torch.nn.functional.pad(ends, (1, 0)), "max_q_len": int(most)}
        elif not mode.is_decode_or_idle():
            raise NotImplementedError(f"forward_mode: want DECODE, EXTEND, MIXED or SPLIT_PREFILL, got {mode.name}")
        return Metadata(lens.to(torch.int32), self._pages(first), window_table, window_slots, rows)

    def _pages(self, slots: Tensor) -> Tensor:
        return (slots if self.page_size == 1 else slots // self.page_size).to(torch.int32)

    def forward_decode(self, q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._attend(q, *args, **kwargs)

    def forward_extend(self, q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._attend(q, *args, **kwargs)

    def _attend(self, q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError


def refuse_call(batch: Any, more: dict[str, Any]) -> None:
    """What a call may ask for that would change who sees what."""
    options = {**more, **{name: getattr(batch, name) for name in ("encoder_lens", "mha_return_lse")}}
    asked = [name for name, x in options.items() if x is not None and x is not False]
    if asked:
        raise NotImplementedError(f"tersekv has no {', '.join(asked)}")


def refuse_layer(layer: Any, plain: dict[str, Any]) -> None:
    for name, want in plain.items():
        if getattr(layer, name) != want:
            raise NotImplementedError(f"{name}: want {want!r} for tersekv, got {getattr(layer, name)!r}")


def _refuse(runner: Any, server_args: Any, speculates: tuple[str | None, ...]) -> None:
    """What these backends would not serve right, by name."""
    if torch.version.hip is not None:
        raise NotImplementedError(
            "tersekv in SGLang wants CUDA or a CPU: on ROCm, models write rows of their own dtype"
        )
    got = getattr(server_args, "speculative_algorithm", None)
    if got not in speculates:
        want = " or ".join(map(repr, speculates))
        raise NotImplementedError(f"speculative_algorithm: want {want} for attention_backend=tersekv, got {got!r}")
    refused = REFUSED
    if got in DRAFT_MODELS:
        refused = REFUSED | REFUSED_BESIDE_A_DRAFT_MODEL
        got = getattr(server_args, "speculative_draft_attention_backend", None)
        if got not in (None, NAME):
            raise NotImplementedError(f"speculative_draft_attention_backend: want {NAME!r}, got {got!r}")
        if envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get():
            raise NotImplementedError("SGLANG_ENABLE_OVERLAP_PLAN_STREAM: want 0 for attention_backend=tersekv")
    for name, off in refused.items():
        got = getattr(server_args, name, off)
        if got != off:
            raise NotImplementedError(f"{name}: want {off!r} for attention_backend=tersekv, got {got!r}")
    if getattr(server_args, "enable_hierarchical_cache", False) and server_args.hicache_io_backend != "direct":
        got = server_args.hicache_io_backend
        raise NotImplementedError(f"hicache_io_backend: want 'direct' for tersekv's host pool, got {got!r}")
    graphs = getattr(server_args.cuda_graph_config, "prefill", None)
    if graphs is not None and graphs.backend == "full":
        raise NotImplementedError("cuda_graph_backend_prefill: want 'breakable' or 'disabled' for tersekv, got 'full'")
    # As the user gave it: what SGLang makes of "auto" may follow a checkpoint's scales.
    format, dtype = env.sglang_format(), runner.server_args.kv_cache_dtype
    if format is not None and dtype not in ("auto", "bf16", "bfloat16", format):
        raise ValueError(f"kv_cache_dtype: want 'auto' or 'bf16' beside TERSEKV_SGLANG_FORMAT={format}, got {dtype!r}")
