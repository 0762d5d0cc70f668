"""A demo model that keeps its past in a paged cache of any format: the attention callbacks, and a step of tokens."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..cache import PagedKVCache, PagedLatentCache
from ..formats import KV_FORMATS, LATENT_FORMATS
from ..ops.append import rope_append
from ..ops.decode import decode
from ..ops.mla import MLAPrefillPlan, mla_append, mla_decode, mla_prefill, mla_prefill_plan
from ..ops.prefill import MANY_ROWS, prefill
from ..pages import PagePool, written_rows
from .deepseek import DeepseekLayer, DeepseekLM, freqs_cis
from .llama import LlamaLM, cos_sin_cache
from .models import DemoModel
from .parts import half_split_table, rms_norm

# Dequantising scales of one layer's tensors: (k, v), or (latent row,).
Scales = Sequence[tuple[float, ...]]


class Step(NamedTuple):
    """Where the new tokens of B requests go and what they see; shared by all layers."""

    slots: Tensor  # [T]
    positions: Tensor  # [T]
    page_table: Tensor  # [B, max_pages]
    seq_lens: Tensor  # [B], new tokens included
    cache_lens: Tensor  # [B], before them
    cu_seqlens_q: Tensor  # [B + 1]
    rows: dict[str, Any]  # how decode tells the requests' rows apart
    max_q_len: int
    plan: MLAPrefillPlan | None


class Paged:
    """A model, its cache and the pages of its requests. `step` runs new tokens of some requests."""

    model: DemoModel

    def __init__(self, model: DemoModel, cache: PagedKVCache | PagedLatentCache) -> None:
        self.model, self.bytes_per_token = model, cache.bytes_per_token
        self.pool = PagePool(cache.num_pages, cache.page_size)
        self.device = model.embed.weight.device
        self.now: Step | None = None

    def step(self, new: Mapping[Hashable, Tensor]) -> Tensor:
        """new: request -> tokens [t]; an unknown request starts. Returns logits [sum of t, vocab], in order."""
        requests, counts = list(new), [len(t) for t in new.values()]
        for request, n in zip(requests, counts, strict=True):
            if request not in self.pool:
                self.pool.add(request)
            self.pool.extend(request, n)
        self.now = self._place(requests, counts)
        return self.model(torch.cat(list(new.values())), self.attend)

    def free(self, request: Hashable) -> None:
        """Forget a request."""
        self.pool.free(request)

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def _place(self, requests: list[Hashable], counts: list[int]) -> Step:
        pool, device, most = self.pool, self.device, max(counts)
        total = torch.tensor([pool.num_tokens(r) for r in requests], dtype=torch.int32)
        new = torch.tensor(counts, dtype=torch.int32)
        cu = torch.cat((new[:1] * 0, new.cumsum(0, dtype=torch.int32))).to(device)
        return Step(
            pool.slot_mapping(requests, counts, device=device),
            pool.positions(requests, counts, device=device),
            pool.page_table(requests, device=device),
            total.to(device),
            (total - new).to(device),
            cu,
            {} if min(counts) == most else {"cu_seqlens_q": cu, "max_q_len": most},
            most,
            self._plan(total.tolist(), counts),
        )

    def _plan(self, seq_lens: list[int], counts: list[int]) -> MLAPrefillPlan | None:
        return None


class PagedLlama(Paged):
    """K and V rows in a `PagedKVCache`: `rope_append`, then `prefill` for many tokens, `decode` for a few."""

    formats = tuple(KV_FORMATS)

    def __init__(
        self, model: LlamaLM, format: str, num_pages: int, page_size: int, scales: Scales | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """options: of the cache, in place of its format."""
        c, device = model.config, model.embed.weight.device
        cache = PagedKVCache.allocate(
            c.num_layers, num_pages, page_size, c.num_kv_heads, c.head_dim, device=device,
            **({"format": format} if options is None else options),
        )  # fmt: skip
        if scales is not None:
            layers = [replace(x, k_scale=k, v_scale=v) for x, (k, v) in zip(cache.layers, scales, strict=True)]
            cache = PagedKVCache(layers, c.head_dim, c.head_dim)
        super().__init__(model, cache)
        self.cache, self.table, self.softmax_scale = cache, cos_sin_cache(c, device), c.softmax_scale

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, H, D], unrotated -> [T, Hq, D]."""
        s, layer = cast(Step, self.now), self.cache[layer_idx]
        q = cast(Tensor, rope_append(q, k, v, layer, s.slots, self.table, s.positions))
        if s.max_q_len >= MANY_ROWS:
            out = prefill(
                q, layer, s.page_table, s.seq_lens, s.cu_seqlens_q, softmax_scale=self.softmax_scale,
                max_q_len=s.max_q_len,
            )  # fmt: skip
        else:
            out = decode(q, layer, s.page_table, s.seq_lens, softmax_scale=self.softmax_scale, **s.rows)
        return cast(Tensor, out)

    def rows(self) -> list[tuple[Tensor, ...]]:
        """K and V [T, H, D] in each layer of a 16-bit cache."""
        return [written_rows(layer.k, layer.v) for layer in self.cache.layers]


class PagedDeepseek(Paged):
    """Latent rows in a `PagedLatentCache`: `mla_prefill` for many tokens, absorbed `mla_decode` for one a request."""

    formats = tuple(LATENT_FORMATS)

    def __init__(
        self, model: DeepseekLM, format: str, num_pages: int, page_size: int, scales: Scales | None = None
    ) -> None:
        c, device = model.config, model.embed.weight.device
        cache = PagedLatentCache.allocate(
            c.num_layers, num_pages, page_size, format=format, kv_lora_rank=c.kv_lora_rank,
            qk_rope_head_dim=c.qk_rope_head_dim, device=device,
        )  # fmt: skip
        if scales is not None:
            cache = PagedLatentCache([replace(x, kv_scale=s) for x, (s,) in zip(cache.layers, scales, strict=True)])
        super().__init__(model, cache)
        self.cache, self.config = cache, c
        self.freqs = freqs_cis(c, device)
        self.table = half_split_table(c.max_pos, c.qk_rope_head_dim, c.rope_theta).to(device)
        self.layers = [cast(DeepseekLayer, layer) for layer in model.layers]
        dtype = model.embed.weight.dtype
        # mla_prefill takes 16-bit activations. The weights are shipped in bf16; fp16 keeps more of the rest.
        self.half = dtype if dtype.itemsize == 2 else torch.float16
        self.kv_b = [layer.kv_b_proj.to(self.half) for layer in self.layers]

    def attend(self, layer_idx: int, q: Tensor, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        """q [T, H, Dn + Dr], kv_c [T, L], k_pe [T, Dr], unrotated and un-normed -> [T, H, Dv]."""
        if cast(Step, self.now).plan is None:
            return self._absorbed(layer_idx, q, kv_c, k_pe)
        return self._prefill(layer_idx, q, kv_c, k_pe)

    def _prefill(self, layer_idx: int, q: Tensor, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        s, c = cast(Step, self.now), self.config
        half_q, half_kv_c, half_k_pe = (x.to(self.half) for x in (q, kv_c, k_pe))
        out = mla_prefill(
            half_q, self.cache[layer_idx], s.page_table, s.cache_lens, s.cu_seqlens_q, self.freqs,
            self.layers[layer_idx].kv_norm_gamma, self.kv_b[layer_idx], cast(MLAPrefillPlan, s.plan),
            softmax_scale=c.softmax_scale, kv_c=half_kv_c, k_pe=half_k_pe, epsilon=c.norm_eps,
        )  # fmt: skip
        return cast(Tensor, out).to(q.dtype)

    def _absorbed(self, layer_idx: int, q: Tensor, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        s, c, layer = cast(Step, self.now), self.config, self.layers[layer_idx]
        w_uk, w_uv = layer.kv_b_proj.unflatten(0, (c.num_heads, -1)).split((c.qk_nope_head_dim, c.head_dim_v), dim=1)
        q_nope, q_pe = q.split((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=-1)
        q_latent = torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1).contiguous()
        latent = rms_norm(kv_c, layer.kv_norm_gamma, c.norm_eps)
        q_latent_out, q_pe_out = mla_append(
            latent, k_pe, self.cache[layer_idx], s.slots, cos_sin_cache=self.table, positions=s.positions,
            interleaved=True, q_nope=q_latent, q_pe=q_pe,
        )  # fmt: skip
        out = mla_decode(
            (cast(Tensor, q_latent_out), cast(Tensor, q_pe_out)), self.cache[layer_idx], s.page_table, s.seq_lens,
            softmax_scale=c.softmax_scale,
        )  # fmt: skip
        return torch.bmm(cast(Tensor, out).transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1)

    def _plan(self, seq_lens: list[int], counts: list[int]) -> MLAPrefillPlan | None:
        return None if max(counts) == 1 else mla_prefill_plan(seq_lens, counts, device=self.device)

    def rows(self) -> list[tuple[Tensor, ...]]:
        """Latent and rotary parts [T, L], [T, R] in each layer of a 16-bit cache."""
        return [written_rows(layer.ckv, layer.kpe) for layer in self.cache.layers]


RUNNERS: dict[str, type[PagedLlama] | type[PagedDeepseek]] = {"llama": PagedLlama, "deepseek": PagedDeepseek}
