"""The classes that vLLM asks for: backend, metadata and its builder, implementation. See `tersekv.integrations.vllm`.

A page holds, per head and token, K's row and then V's, each with its stored scales after its codes: the bytes that
vLLM's own Triton backend keeps for the per-token-head formats. For nvfp4 the block scales are linear, and int4 is not
rotated as vLLM's is, so these pages are read by no other backend. Any strides will do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)

from ..formats import BLOCK, TENSOR, KVFormat, kv_format
from ..layers import PagedKVLayer
from ..ops.append import append
from ..ops.decode import decode

_FORMATS = {  # vLLM's kv_cache_dtype → ours; "auto" follows the pages' dtype
    "bfloat16": "bf16",
    "float16": "fp16",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "fp8_per_token_head": "fp8_per_token_head",
    "int8_per_token_head": "int8_per_token_head",
    "nvfp4": "nvfp4",
    "int4_per_token_head": "int4_per_token_head",
}
_AUTO = {torch.bfloat16: "bf16", torch.float16: "fp16"}
# vLLM's quantisation modes with stored scales.
_PACKED = {"FP8_PER_TOKEN_HEAD", "INT8_PER_TOKEN_HEAD", "INT4_PER_TOKEN_HEAD", "NVFP4"}

# A prompt of this many tokens or more with nothing cached before it goes through SDPA, over its 16-bit keys and values.
# Decode would be right as well, but its tiles are made for few rows.
PROMPT_ROWS = 64


class TersekvBackend(AttentionBackend):
    supported_dtypes = [torch.float16, torch.bfloat16]  # noqa: RUF012 (vLLM's own way)
    supported_kv_cache_dtypes = ["auto", *_FORMATS]  # noqa: RUF012
    forward_includes_kv_cache_update = False
    accept_output_buffer = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TersekvImpl]:
        return TersekvImpl

    @staticmethod
    def get_builder_cls() -> type[TersekvMetadataBuilder]:
        return TersekvMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[blocks, heads, tokens, content], for the releases that ask for a shape; later ones take `customize_spec`."""
        f = kv_format("bf16" if cache_dtype_str == "auto" else _FORMATS[_known(cache_dtype_str)])
        return num_blocks, num_kv_heads, block_size, 2 * f.row_bytes(head_size) // _stored(f).itemsize

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Room for the scales that are stored in the rows."""
        mode = spec.kv_quant_mode.name
        if spec.state_content_bytes is not None or mode not in _PACKED:
            return spec
        f = kv_format(mode.lower())
        return replace(spec, state_content_bytes=f.row_bytes(spec.head_size) + f.row_bytes(spec.head_size_v))

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 0 < head_size <= 512 and head_size % 8 == 0

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *more: Any, **others: Any
    ) -> str | None:
        if kv_cache_dtype == "nvfp4" and head_size % 16:
            return f"nvfp4 wants a head_size that is a multiple of 16, got {head_size}"
        return None

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER


@dataclass
class TersekvMetadata(AttentionMetadata):
    """One step, shared by all layers.

    rows:          how decode tells the requests' rows apart; empty where all have the same number
    prompts:       (first row, end) of requests with nothing cached before this step and PROMPT_ROWS or more
    cached_lens:   [B] seq_lens, 0 for these prompts; None where there are none
    only_prompts:  there are no other requests
    """

    num_actual_tokens: int
    seq_lens: Tensor  # [B] new tokens included
    block_table: Tensor  # [B, max_pages]
    slot_mapping: Tensor  # [T]
    rows: dict[str, Any]
    prompts: list[tuple[int, int]]
    cached_lens: Tensor | None
    only_prompts: bool


class TersekvMetadataBuilder(AttentionMetadataBuilder):
    # Lengths, tables and slots may change between replays; the rows of a request may not.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> TersekvMetadata:
        m = common_attn_metadata
        if not m.causal:
            raise NotImplementedError("tersekv attends causally only")
        starts = m.query_start_loc_cpu.tolist()
        counts = [end - start for start, end in pairwise(starts)]
        # A captured graph is padded with requests of no rows, at the end, up to its full number of tokens.
        real = len(counts) - next((i for i, n in enumerate(reversed(counts)) if n), len(counts))
        uniform = set(counts[:real]) <= {m.max_query_len} and m.num_actual_tokens == m.num_reqs * m.max_query_len
        rows = {} if uniform else {"cu_seqlens_q": m.query_start_loc, "max_q_len": m.max_query_len}
        prompts = _new_prompts(m, counts) if m.max_query_len >= PROMPT_ROWS else []
        lens = None
        if prompts:
            old = torch.tensor([b not in prompts for b in range(m.num_reqs)]).to(m.seq_lens.device, non_blocking=True)
            lens = m.seq_lens * old
        return TersekvMetadata(
            m.num_actual_tokens, m.seq_lens, m.block_table_tensor, m.slot_mapping, rows,
            [(starts[b], starts[b + 1]) for b in prompts], lens,
            all(n == 0 or b in prompts for b, n in enumerate(counts)),
        )  # fmt: skip


def _new_prompts(m: Any, counts: list[int]) -> list[int]:
    """Requests whose rows are all they have. The host's lengths are upper bounds, so equality is certain."""
    lens = getattr(m, "seq_lens_cpu_upper_bound", None)
    if lens is None:
        return []
    return [b for b, (n, total) in enumerate(zip(counts, lens.tolist(), strict=False)) if n == total >= PROMPT_ROWS]


class TersekvImpl(AttentionImpl):
    supports_quant_query_input = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **unknown: Any,
    ) -> None:
        refused = {"alibi_slopes": alibi_slopes, **{k: v for k, v in unknown.items() if v not in (None, False, -1)}}
        for name, value in refused.items():
            if value is not None:
                raise NotImplementedError(f"tersekv has no {name} (got {value!r})")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"tersekv attends to a decoder's cache only, got attn_type={attn_type!r}")
        _known(kv_cache_dtype)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.kv_sharing_target_layer_name = kv_cache_dtype, kv_sharing_target_layer_name
        self.window, self.softcap, self.sinks = sliding_window, float(logits_soft_cap or 0.0), sinks
        self._pages: tuple[Any, PagedKVLayer] | None = None

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the rows that have a slot; key and value [T or more, H, D] may be padded."""
        n = slot_mapping.shape[0]
        append(key[:n], value[:n], self._layer(layer, kv_cache), slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TersekvMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of query [T, Hq, D] over the pages, which hold this step's rows already, into `output`."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale: want None, since tersekv quantises no output for vLLM")
        m = attn_metadata
        if m is None:  # vLLM profiles its memory
            return output.fill_(0)
        n = m.num_actual_tokens
        q, out = query[:n], output.view(-1, self.num_heads, self.head_size)[:n]
        plain = self.window is None and self.sinks is None and self.softcap == 0.0
        prompts, lens = ([], m.seq_lens) if m.cached_lens is None or not plain else (m.prompts, m.cached_lens)
        if not (prompts and m.only_prompts):
            decode(
                q, self._layer(layer, kv_cache), m.block_table, lens,
                softmax_scale=self.scale, window=self.window, sinks=self._sinks_fp32(), softcap=self.softcap,
                out=out, **m.rows,
            )  # fmt: skip
        for start, end in prompts:
            part = slice(start, end)
            a, b, c = (x[part].transpose(0, 1)[None] for x in (q, key, value))
            done = F.scaled_dot_product_attention(a, b, c, is_causal=True, scale=self.scale, enable_gqa=True)
            out[part] = done[0].transpose(0, 1)
        return output

    def _layer(self, layer: Any, kv_cache: Tensor) -> PagedKVLayer:
        """The pages as tersekv sees them, made again when vLLM puts other pages or scales in their place."""
        k_scale, v_scale = layer._k_scale, layer._v_scale
        key = (
            kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride(), kv_cache.dtype,
            k_scale.data_ptr(), k_scale.shape, v_scale.data_ptr(), v_scale.shape,
        )  # fmt: skip
        if self._pages is None or self._pages[0] != key:
            self._pages = key, pages_of(kv_cache, self.kv_cache_dtype, self.head_size, k_scale, v_scale)
        return self._pages[1]

    def _sinks_fp32(self) -> Tensor | None:
        """The sinks as they are now: weights may be loaded anew in place, also between the replays of a graph."""
        return None if self.sinks is None else self.sinks.detach().float()


def pages_of(kv_cache: Tensor, kv_cache_dtype: str, head_size: int, k_scale: Tensor, v_scale: Tensor) -> PagedKVLayer:
    """vLLM's pages [blocks, H, tokens, content] of one layer as a PagedKVLayer, without copying.

    k_scale, v_scale: vLLM's dequantising fp32 scales, seen and not copied: one element, or one a head (nvfp4: one, the
                      global scale)

    Raises ValueError for a content that is not K's row and V's row of the format, and for scales of another dtype.
    """
    name = _AUTO.get(kv_cache.dtype) if kv_cache_dtype == "auto" else _FORMATS.get(kv_cache_dtype)
    if name is None:
        known = ", ".join(map(str, _AUTO))
        raise ValueError(f"kv_cache: want pages of {known} for {kv_cache_dtype!r}, got {kv_cache.dtype}")
    f = kv_format(name)
    row = f.row_bytes(head_size)
    if kv_cache.dim() != 4 or kv_cache.shape[3] * kv_cache.element_size() != 2 * row:
        raise ValueError(
            f"kv_cache: want [blocks, heads, tokens, {2 * row} bytes] for {name} and head_size={head_size}, "
            f"got {list(kv_cache.shape)} {kv_cache.dtype}"
        )
    sides: list[tuple[Tensor, Tensor | None]] = []
    for half in kv_cache.transpose(1, 2).view(_stored(f)).chunk(2, -1):
        if f.scale_dtype is None:
            sides.append((half, None))
            continue
        codes, scales = half[..., : f.code_bytes(head_size)], half[..., f.code_bytes(head_size) :].view(f.scale_dtype)
        sides.append((codes.view(f.storage), scales if f.scale_block else scales[..., 0]))
    (k, ks), (v, vs) = sides
    both = [("layer._k_scale", k_scale), ("layer._v_scale", v_scale)]
    one = [_scale(side, s, f, k.shape[2]) if f.scale in (TENSOR, BLOCK) else 1.0 for side, s in both]
    return PagedKVLayer(k, v, name, one[0], one[1], ks, vs)


def _scale(name: str, scale: Tensor, f: KVFormat, heads: int) -> Tensor:
    """A view of a layer's scale: what vLLM writes into it later counts."""
    sizes = (1, heads) if f.scale == TENSOR else (1,)
    if scale.dtype != torch.float32 or scale.numel() not in sizes or not scale.is_contiguous():
        want = " or ".join(map(str, dict.fromkeys(sizes)))
        raise ValueError(
            f"{name}: want contiguous float32 with {want} elements for {f.name}, got {list(scale.shape)} {scale.dtype}"
        )
    return scale.detach().view(-1)


def _known(kv_cache_dtype: str) -> str:
    if kv_cache_dtype != "auto" and kv_cache_dtype not in _FORMATS:
        raise ValueError(f"kv_cache_dtype: want auto, {', '.join(_FORMATS)}, got {kv_cache_dtype!r}")
    return kv_cache_dtype


def _stored(f: KVFormat) -> torch.dtype:
    """What the pages are seen as: bytes where rows hold codes and scales, else the codes' own dtype."""
    return f.storage if f.scale_dtype is None else torch.uint8
