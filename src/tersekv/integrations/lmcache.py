"""tersekv's formats as a serde of LMCache's multiprocess server: what its L2 adapters store.

LMCache imports this file as a plugin of its adapters, which registers the serde `tersekv`; `Adapter` is then the
adapter that its parameters name:

    lmcache server … --l2-adapter '{"type": "plugin", "module_path": "tersekv.integrations.lmcache",
        "class_name": "Adapter", "adapter_params": {"type": "fs", "base_path": "/cache"},
        "serde": {"type": "tersekv", "format": "int8_per_token_head/nvfp4", "head_dim": 128}}'

`format`, `head_dim` and `device` as `ChunkCodec` takes them; `max_workers`: threads, 1.
"""

from __future__ import annotations

from typing import Any

from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.distributed.serde import (
    AsyncSerdeProcessor,
    Deserializer,
    SerdeProcessor,
    Serializer,
    register_serde_factory,
)
from torch import Tensor

from .lmcache_chunks import ChunkCodec


class TersekvSerializer(Serializer):
    """The groups of a chunk's layers, one behind the other."""

    def __init__(self, codec: ChunkCodec) -> None:
        self._codec = codec

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        out, end = _bytes("dst", dst), 0
        for i, _ in enumerate(src.get_shapes()):
            end += self._codec.encode(_group("src", src, i), out[end:])
        return end

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        return sum(self._codec.nbytes(shape) for shape in layout_desc.shapes)


class TersekvDeserializer(Deserializer):
    def __init__(self, codec: ChunkCodec) -> None:
        self._codec = codec

    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        data, end = _bytes("src", src), 0
        for i, shape in enumerate(dst.get_shapes()):
            self._codec.decode(data[end:], _group("dst", dst, i))
            end += self._codec.nbytes(shape)


class Adapter(L2AdapterInterface):
    """The adapter of LMCache that `params` describe, as `--l2-adapter` would."""

    def __new__(cls, params: dict[str, Any], l1_memory_desc: Any = None) -> Any:
        if not isinstance(params.get("type"), str):
            raise ValueError(f"adapter_params: want the type of an adapter, got {params!r}")
        config = get_l2_adapter_config_class(params["type"]).from_dict(params)
        return create_l2_adapter(config, l1_memory_desc)


def _group(name: str, obj: Any, i: int) -> Tensor:
    found = obj.get_tensor(i)
    if found is None:
        raise ValueError(f"{name}: want bytes in memory, got {type(obj).__name__}")
    return found


def _bytes(name: str, obj: Any) -> Tensor:
    if obj.tensor is None:
        raise ValueError(f"{name}: want bytes in memory, got {type(obj).__name__}")
    return obj.tensor.view(-1)


def _serde(options: dict[str, Any]) -> SerdeProcessor:
    given = {"max_workers": 1, **options}
    if unknown := given.keys() - {"format", "head_dim", "device", "max_workers"}:
        raise ValueError(f"serde: want format, head_dim, device, max_workers, got {', '.join(sorted(unknown))}")
    workers = given.pop("max_workers")
    codec = ChunkCodec(**given)
    return AsyncSerdeProcessor(TersekvSerializer(codec), TersekvDeserializer(codec), max_workers=workers)


register_serde_factory("tersekv", _serde)
