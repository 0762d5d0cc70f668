"""The classes that vLLM asks for: backend, metadata, its builder, implementation. See `tersekv.integrations.vllm`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from ..formats import NVFP4_BLOCK
from ..layers import PagedKVLayer
from ..ops.append import append
from ..ops.decode import decode
from ..ops.prefill import prefill
from .vllm import name
from .vllm_checkpoint import layer_number, layer_with, quantised_layers, require_scales
from .vllm_connectors import refuse_other_block_sizes, takes_tokens
from .vllm_pages import BLOCK_STEP, FORMATS, Kind, holds_scales, kind_of, known, pages_of, pages_shape, with_scales
from .vllm_saved import cache_dtype_of, index_of, layers_of
from .vllm_warm_up import (
    DECODE_ROWS,
    JOBS,
    Limits,
    compile_early,
    decode_rows_of,
    first_jobs,
    limits_of,
    postpone,
    run_postponed,
    warm_up,
)

# Rows of a request that may see each other: a mask says so, bit by bit.
MASKED_ROWS = 64
JOBS_OF_GRAPHS, JOBS_WITHOUT_PROMPTS = JOBS[:1], JOBS[:2]


class TersekvBackend(AttentionBackend):
    supported_dtypes = [torch.float16, torch.bfloat16]  # noqa: RUF012 (vLLM's own way)
    supported_kv_cache_dtypes = ["auto", *FORMATS]  # noqa: RUF012
    forward_includes_kv_cache_update = False
    accept_output_buffer = True

    @staticmethod
    def get_name() -> str:
        return name()

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
        return pages_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(BLOCK_STEP)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Those whose blocks are in one piece, as connectors copy them."""
        from vllm.v1.kv_cache_layout import KVCacheLayout  # the releases that ask have it

        return tuple(layout for layout in KVCacheLayout if layout.is_block_compact)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return with_scales(spec)

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        """A float32 query is taken by the kernels for CPUs alone."""
        return dtype in cls.supported_dtypes or (dtype == torch.float32 and current_platform.is_cpu())

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 0 < head_size <= 512 and head_size % 8 == 0

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *more: Any, **others: Any
    ) -> str | None:
        if kv_cache_dtype is not None and "nvfp4" in kv_cache_dtype and head_size % NVFP4_BLOCK:
            return f"nvfp4 wants a head_size that is a multiple of {NVFP4_BLOCK}, got {head_size}"
        return None

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Of drafts that see each other, as DFlash's do."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """The builder reads the host's query lengths: they must be the device's."""
        return False

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER


@dataclass
class TersekvMetadata(AttentionMetadata):
    """One step, shared by all layers: first requests of few new rows, then the others.

    few_rows, few:  query rows and requests that decode attends with
    rows:           how decode tells the requests' rows apart, and a mask; empty where all have the same number
    starts:         [B - few + 1] first query row of each other request, from 0
    most_rows:      the host's bound on their rows
    causal:         False: the new rows of a request see each other; all are decoded
    limits:         of all batches; None: unknown
    jobs:           of `vllm_warm_up`, that are to be done before this batch
    """

    num_actual_tokens: int
    seq_lens: Tensor  # [B] new tokens included
    block_table: Tensor  # [B, max_pages]
    slot_mapping: Tensor  # [T]
    few_rows: int
    few: int
    rows: dict[str, Any]
    starts: Tensor
    most_rows: int
    limits: Limits | None = None
    causal: bool = True
    jobs: tuple[Any, ...] = JOBS


class TersekvMetadataBuilder(AttentionMetadataBuilder):
    # Lengths, tables and slots may change between replays; the rows of a request may not.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # vLLM puts requests of so many rows first: those of one token, and of one token and drafts.
        self.reorder_batch_threshold = decode_rows_of(vllm_config)
        # Those of more rows stand where the others let them: which kernels they get must not depend on it.
        self.most_decode_rows = self.reorder_batch_threshold if is_batch_invariant() else DECODE_ROWS
        self.has_tails = holds_scales(kv_cache_spec)
        self.everything: dict[int, list[Tensor]] = {}
        self.limits = limits_of(vllm_config)
        self.has_warm_up_batches = _has_warm_up_batches(vllm_config)
        # Its query lengths are computed on the device and copied to the host without waiting for them.
        if getattr(getattr(vllm_config, "cache_config", None), "kv_sharing_fast_prefill", False):
            raise NotImplementedError("kv_sharing_fast_prefill: want False, tersekv attends to every row of a prompt")

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> TersekvMetadata:
        """common_prefix_len is a hint, for backends that attend to a common prefix once: nothing depends on it here."""
        m = common_attn_metadata
        run_postponed()
        if self.has_tails:
            refuse_other_block_sizes()
        _refuse_what_is_no_causal_batch(m)
        starts = m.query_start_loc_cpu.tolist()
        counts = [end - start for start, end in pairwise(starts)]
        few = len(counts)
        if m.causal:
            few = next((b for b, n in enumerate(counts) if n > self.most_decode_rows), few)
        # A captured graph is padded with requests of no rows, at the end, up to its full number of tokens.
        rows = m.num_actual_tokens if few == len(counts) else starts[few]
        real = few - next((i for i, n in enumerate(reversed(counts[:few])) if n), few)
        most = max(counts[:few], default=0)
        # Graphs are captured for these numbers of rows; others are too many to compile for each.
        uniform = most in (0, 1, self.reorder_batch_threshold) and set(counts[:real]) <= {most} and rows == few * most
        ragged = {} if uniform else {"cu_seqlens_q": m.query_start_loc[: few + 1], "max_q_len": most}
        if not m.causal:
            ragged["mask"] = self._mask(rows, most, m.seq_lens.device)
        # A graph is captured over vLLM's own tensors, which outlive it: nothing is computed where nothing must be.
        rest = m.query_start_loc[few:] - rows if 0 < few < len(counts) else m.query_start_loc[few:]
        return TersekvMetadata(
            m.num_actual_tokens, m.seq_lens, m.block_table_tensor, m.slot_mapping, rows, few, ragged,
            rest, max(counts[few:], default=0), self.limits, m.causal,
            JOBS_WITHOUT_PROMPTS if self.has_warm_up_batches and few == len(counts) else JOBS,
        )  # fmt: skip

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> TersekvMetadata:
        captured = super().build_for_cudagraph_capture(common_attn_metadata)
        return replace(captured, jobs=JOBS_OF_GRAPHS if self.has_warm_up_batches else JOBS)

    def _mask(self, rows: int, most: int, device: torch.device) -> Tensor:
        """Every row of a request sees every other [rows, W]: of tensors that outlive captured graphs."""
        if most > MASKED_ROWS:
            raise NotImplementedError(f"causal: want True for requests of more than {MASKED_ROWS} rows, got {most}")
        width = 2 * max(1, -(-most // 32))
        kept = self.everything.setdefault(width, [])
        if not kept or len(kept[-1]) < rows:
            requests = 0 if self.limits is None else self.limits.requests
            bits = torch.full((max(rows, requests * 16 * width), width), -1, dtype=torch.int16, device=device)
            kept.append(bits.view(torch.uint16))
        return kept[-1][:rows]


def _give_dtype(layer: Any, cache_dtype: str, model_dtype: torch.dtype) -> None:
    layer.kv_cache_dtype = cache_dtype
    layer.kv_cache_torch_dtype = model_dtype if cache_dtype == "auto" else FORMATS[cache_dtype].dtype


def is_batch_invariant() -> bool:
    """Whether VLLM_BATCH_INVARIANT is set; not every release has it."""
    return bool(getattr(envs, "VLLM_BATCH_INVARIANT", False))


def _has_warm_up_batches(config: Any) -> bool:
    """Whether two batches of few rows come before the first request beside those of graphs: vLLM's second runner warms
    up by them, and compiles kernels of its own for long between the two."""
    kernels, model = getattr(config, "kernel_config", None), getattr(config, "model_config", None)
    asks = getattr(config, "use_v2_model_runner", False) and getattr(kernels, "enable_jit_warmup", True)
    return bool(asks) and getattr(model, "runner_type", None) != "pooling"


def _refuse_what_is_no_causal_batch(m: Any) -> None:
    """What a release may put into a batch's metadata that would change who sees what."""
    if not isinstance(m.causal, bool):
        raise NotImplementedError("causal: want True or False for all requests of a batch, got a value each")
    for field in ("dcp_local_seq_lens", "rswa_prefix_lens", "mm_req_doc_ranges", "encoder_seq_lens"):
        if getattr(m, field, None) is not None:
            raise NotImplementedError(f"{field}: want None, tersekv attends to all of a decoder's own cache")


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
        asked = {k: v for k, v in unknown.items() if isinstance(v, Tensor) or v not in (None, False, -1)}
        refused = {"alibi_slopes": alibi_slopes, **asked}
        for option, value in refused.items():
            if value is not None:
                raise NotImplementedError(f"tersekv has no {option} (got {value!r})")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"tersekv attends to a decoder's cache only, got attn_type={attn_type!r}")
        known(kv_cache_dtype)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.kv_sharing_target_layer_name = kv_cache_dtype, kv_sharing_target_layer_name
        self.window, self.softcap, self.sinks = sliding_window, float(logits_soft_cap or 0.0), sinks
        self.batch_invariant = is_batch_invariant()
        self._config = get_current_vllm_config_or_none()
        self.saved = layers_of(self._config, self.num_kv_heads, head_size)
        self.quantised = None if self._config is None or self.saved is not None else quantised_layers(self._config)
        self._pages: tuple[Any, PagedKVLayer] | None = None
        if self._config is not None and self.saved is None and self.quantised is None:
            self._compile_before_weights(self._config)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Give the layer the cache dtype that a file or the checkpoint has for it, before vLLM asks for its pages."""
        if self._config is None:
            return
        name, layer = layer_with(self, self._config)
        if self.saved is not None:
            _give_dtype(layer, cache_dtype_of(self.saved, name), act_dtype)
            return
        if self.quantised is not None and self.kv_cache_dtype != "auto":
            number = layer_number(self.kv_sharing_target_layer_name or name)
            self.kv_cache_dtype = "auto" if number is None else self.quantised.get(number, "auto")
            _give_dtype(layer, self.kv_cache_dtype, act_dtype)
        if self.kv_sharing_target_layer_name is None:  # others read by the scales of that layer
            require_scales(name, layer, self.kv_cache_dtype, self._config)
            self._compile_early(layer, act_dtype, self._config)

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
        key: Tensor | None,
        value: Tensor | None,
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
        if not m.causal and self.window is not None:
            raise NotImplementedError(f"sliding_window: want none where drafts see each other, got {self.window}")
        pages = self._layer(layer, kv_cache)
        out = output.view(-1, self.num_heads, pages.head_dim_v)
        options = self._options()
        self._compile_once(query, pages, m, options)
        n = m.few_rows
        if n:
            decode(query[:n], pages, m.block_table[: m.few], m.seq_lens[: m.few], out=out[:n], **m.rows, **options)
        rest = slice(n, m.num_actual_tokens)
        if rest.start < rest.stop:
            k, v = self._own_rows(query, key, value, rest)
            prefill(
                query[rest], pages, m.block_table[m.few :], m.seq_lens[m.few :], m.starts, k=k, v=v,
                max_q_len=m.most_rows, out=out[rest], **options,
            )  # fmt: skip
        return output

    def _compile_before_weights(self, config: Any) -> None:
        """Starts to compile for all layers as the last one is made: weights take longest to come, and no kernel depends
        on them."""
        found = config.compilation_config.static_forward_context.values()
        layers = [layer for layer in found if isinstance(getattr(layer, "impl", None), TersekvImpl)]
        model = config.model_config
        if model is None or len(layers) + 1 != model.get_num_layers(config.parallel_config):
            return
        for layer in layers:
            if layer.impl.kv_sharing_target_layer_name is None:
                layer.impl._compile_early(layer, model.dtype, config, self)

    def _compile_early(self, layer: Any, act_dtype: torch.dtype, config: Any, *unlisted: TersekvImpl) -> None:
        """For pages as they will be, if nothing but the layer and the configuration decides on them; once for each kind
        of layer.

        unlisted:  implementations of layers that vLLM does not list yet
        """
        limits, model = limits_of(config), config.model_config
        if limits is None or model is None or config.kv_transfer_config is not None:
            return
        size = config.cache_config.block_size
        is_plain = act_dtype.itemsize == 2 and getattr(layer, "head_size_v", None) in (None, self.head_size)
        is_plain = is_plain and not model.is_hybrid
        if not size or not is_plain:
            return
        shape = pages_shape(2, size, self.num_kv_heads, self.head_size, self.kv_cache_dtype)
        dtype = act_dtype if self.kv_cache_dtype == "auto" else FORMATS[self.kv_cache_dtype].dtype
        query = torch.empty(1, self.num_heads, self.head_size, dtype=act_dtype, device=layer._k_scale.device)
        compile_early(
            (self.num_heads, shape, self.kv_cache_dtype), query,
            self._view_pages(layer, torch.empty(shape, dtype=dtype, device=query.device)),
            -(-model.max_model_len // size), limits, self._brings_rows(query), self._options(),
            self._windows_of_layers_alike(*unlisted),
        )  # fmt: skip

    def _options(self) -> dict[str, Any]:
        return {
            "softmax_scale": self.scale, "window": self.window, "sinks": self._sinks_fp32(), "softcap": self.softcap,
            "batch_invariant": self.batch_invariant,
        }  # fmt: skip

    def _compile_once(self, query: Tensor, pages: PagedKVLayer, m: TersekvMetadata, options: dict[str, Any]) -> None:
        """With the first batch that a kind of layer sees with its pages, which is one of vLLM's own warm-up."""
        if m.limits is None:
            return
        tensors = (pages.k, pages.v, pages.k_scale_cache, pages.v_scale_cache)
        kind = (
            pages.formats, pages.rotation, [(x.shape[1:], x.stride()) for x in tensors if x is not None],
            [s.shape if isinstance(s, Tensor) else s for s in (pages.k_scale, pages.v_scale)],
            [c is None for c in (pages.k_channel_scale, pages.v_channel_scale)],
            query.shape[1:], query.dtype, m.block_table.shape[1], m.limits, self.kv_sharing_target_layer_name is None,
            [x.shape if isinstance(x, Tensor) else x for x in options.values()],
        )  # fmt: skip
        jobs = first_jobs(kind, query.device, m.jobs)
        if not jobs:
            return
        q, device, windows = query[:1], query.device, self._windows_of_layers_alike()
        run_jobs = partial(warm_up, q, pages, m, self._brings_rows(query), options, windows)
        run_jobs(jobs)
        if m.jobs == JOBS_WITHOUT_PROMPTS:  # which the next batch may bring
            postpone(lambda: run_jobs(first_jobs(kind, device, JOBS)))

    def _windows_of_layers_alike(self, *unlisted: TersekvImpl) -> set[int | None]:
        """Of layers with the same heads and cache dtype: kernels of others are compiled with their own first batch."""

        def heads(impl: TersekvImpl) -> tuple[Any, ...]:
            return impl.num_heads, impl.num_kv_heads, impl.head_size, impl.kv_cache_dtype

        layers = {} if self._config is None else self._config.compilation_config.static_forward_context
        found = [*(getattr(layer, "impl", None) for layer in layers.values()), *unlisted]
        return {impl.window for impl in found if isinstance(impl, TersekvImpl) and heads(impl) == heads(self)}

    def _brings_rows(self, query: Tensor) -> bool:
        """Whether prompts attend to their own rows as they came: to those of 16 bits, where the layer stores them."""
        # A layer that shares another's cache is given rows that nobody stores: only the pages count.
        return self.kv_sharing_target_layer_name is None and query.dtype != torch.float32

    def _own_rows(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, rows: slice
    ) -> tuple[Tensor | None, Tensor | None]:
        """The new tokens' keys and values as they came: nearer than their codes, and dense. Those of 16 bits alone."""
        if key is None or value is None or not self._brings_rows(query):
            return None, None
        return key[rows], value[rows]

    def _layer(self, layer: Any, kv_cache: Tensor) -> PagedKVLayer:
        """The pages as tersekv sees them, made again when vLLM puts other pages or scales in their place."""
        writer = self._writer(layer)
        k_scale, v_scale = writer._k_scale, writer._v_scale
        key = (
            kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride(), kv_cache.dtype,
            k_scale.data_ptr(), k_scale.shape, v_scale.data_ptr(), v_scale.shape,
        )  # fmt: skip
        if self._pages is None or self._pages[0] != key:
            self._pages = key, self._view_pages(writer, kv_cache)
        return self._pages[1]

    def _writer(self, layer: Any) -> Any:
        """The layer that writes the pages: one that shares another's reads them as that one wrote them."""
        # The layer's, not the implementation's: vLLM tells a draft's layers after they are made.
        name = getattr(layer, "kv_sharing_target_layer_name", None)
        if name is None or self._config is None:
            return layer
        return self._config.compilation_config.static_forward_context[name]

    def _view_pages(self, writer: Any, kv_cache: Tensor) -> PagedKVLayer:
        impl: Any = getattr(writer, "impl", self)
        holds: str | Kind = impl.kv_cache_dtype
        attributes: dict[str, Any] = {}
        if self.saved is not None:
            index = index_of(self.saved, writer.layer_name)
            holds, attributes = kind_of(*self.saved.formats[index]), self.saved.attributes(index, kv_cache.device)
        pages = pages_of(
            kv_cache, holds, self.head_size, writer._k_scale, writer._v_scale, getattr(writer, "head_size_v", None),
            inline=has_kv_transfer_group() and (self._config is None or takes_tokens(self._config)),
        )  # fmt: skip
        return replace(pages, **attributes)

    def _sinks_fp32(self) -> Tensor | None:
        """The sinks as they are now: weights may be loaded anew in place, also between the replays of a graph."""
        return None if self.sinks is None else self.sinks.detach().float()
