"""A stand-in for vLLM's v1 attention interface: the names, signatures and defaults that a backend meets, no more.

Written from the interface's public documentation (0.28). What it cannot show is whether vLLM calls them in this order.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, IntEnum
from types import ModuleType

import torch


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(Enum):
    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


class KVQuantMode(IntEnum):
    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4
    NVFP4 = 5


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype: torch.dtype
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE
    state_content_bytes: int | None = None

    @property
    def content_bytes(self) -> int:
        return self.state_content_bytes or (self.head_size + self.head_size_v) * self.dtype.itemsize


class AttentionBackend(ABC):
    supported_dtypes = (torch.float16, torch.bfloat16)
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16")
    forward_includes_kv_cache_update = True

    @staticmethod
    @abstractmethod
    def get_name(): ...

    @staticmethod
    @abstractmethod
    def get_impl_cls(): ...

    @staticmethod
    @abstractmethod
    def get_builder_cls(): ...

    @classmethod
    def customize_spec(cls, spec):
        return spec

    @classmethod
    def supports_head_size(cls, head_size):
        return True

    @classmethod
    def supports_dtype(cls, dtype):
        return dtype in cls.supported_dtypes

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype):
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def is_mla(cls):
        return False

    @classmethod
    def supports_sink(cls):
        return False

    @classmethod
    def supports_attn_type(cls, attn_type):
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_combination(cls, *args):
        return None


class AttentionMetadata:
    pass


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True
    seq_lens_cpu_upper_bound: torch.Tensor | None = None


class AttentionMetadataBuilder(ABC):
    _cudagraph_support = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = None

    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)


class AttentionImpl(ABC):
    @abstractmethod
    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads=None,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None,
    ): ...

    @abstractmethod
    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ): ...


class AttentionBackendEnum(Enum):
    TRITON_ATTN = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"
    CUSTOM = None

    def get_class(self):
        module, name = _overrides[self].rsplit(".", 1)
        return getattr(importlib.import_module(module), name)


_overrides: dict[AttentionBackendEnum, str] = {}


def register_backend(backend, class_path=None, is_mamba=False):
    def decorate(cls):
        _overrides[backend] = f"{cls.__module__}.{cls.__qualname__}"
        return cls

    if class_path is None:
        return decorate
    _overrides[backend] = class_path
    return lambda cls: cls


def modules() -> dict[str, ModuleType]:
    """What `sys.modules` must hold for `import vllm…` to find this file's names."""
    backend, registry = ModuleType("vllm.v1.attention.backend"), ModuleType("vllm.v1.attention.backends.registry")
    here = sys.modules[__name__]
    for name in ("AttentionBackendEnum", "register_backend"):
        setattr(registry, name, getattr(here, name))
    for name in (
        "AttentionBackend",
        "AttentionCGSupport",
        "AttentionImpl",
        "AttentionMetadata",
        "AttentionMetadataBuilder",
        "AttentionType",
        "CommonAttentionMetadata",
    ):
        setattr(backend, name, getattr(here, name))
    packages = ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends")
    return {**{p: ModuleType(p) for p in packages}, backend.__name__: backend, registry.__name__: registry}
