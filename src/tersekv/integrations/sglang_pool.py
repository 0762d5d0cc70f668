"""SGLang's K/V pool in tersekv's formats: codes by token, and stored scales by token beside them.

Every buffer begins with a token's slot, as SGLang's own do, so that whatever moves slots moves all of a row.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, unwrap_write_loc
from sglang.srt.runtime_context import get_parallel, get_spec
from torch import Tensor

from .. import env
from ..attributes import HADAMARD
from ..formats import BLOCK, KV_FORMATS, TENSOR, KVFormat, held, kv_format
from ..layers import PagedKVLayer, make_attributes
from ..ops.append import append
from ..recipe import recipe
from .saved_layers import read, saved_layers
from .sglang_host import RowsInfo

OF_DTYPE = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}


FORMAT = "TERSEKV_SGLANG_FORMAT"


class Kind(NamedTuple):
    """K's and V's format of a layer."""

    k: KVFormat
    v: KVFormat

    def row_bytes(self, head_dim: int, head_dim_v: int) -> int:
        return self.k.row_bytes(head_dim) + self.v.row_bytes(head_dim_v)


class Chosen(NamedTuple):
    """What the layers of a pool hold, by index.

    alike:  whether all of the model's have the same formats, whichever are in the pool
    saved:  the file that says it, if one does
    """

    kinds: list[Kind]
    alike: bool
    rotated: bool = False
    saved: str | None = None


def chosen(dtype: torch.dtype, layers: int, first: int = 0, draft: bool = False) -> Chosen:
    """What a pool holds: as the environment says, by a recipe's word or a file, or as SGLang's dtype.

    layers, first:  how many there are in the pool, and the model's index of its first
    draft:          whether the model drafts for another; `--speculative-draft-kv-cache-dtype` then goes before
    """
    own = draft and get_spec().speculative_draft_kv_cache_dtype is not None
    word = (None if own else env.sglang_format()) or OF_DTYPE.get(dtype)
    if word is None:
        raise ValueError(f"{FORMAT}: want a format, a recipe or a file, got None for a pool of {dtype}")
    try:
        made = recipe(word)
        if not {*made.formats, *(made.ends or ())} <= {*KV_FORMATS}:
            raise ValueError(f"want formats of K/V caches ({', '.join(KV_FORMATS)}), got {word!r}")
    except ValueError as e:
        if os.path.exists(word):
            if draft:
                want = "a recipe, or a format for the draft model by --speculative-draft-kv-cache-dtype"
                raise ValueError(f"{FORMAT}: want {want}, got {word!r}") from None
            return _of_file(word, layers, first)
        want = f"a recipe ({e}) or a file that `tersekv eval --save FILE` wrote"
        raise ValueError(f"{FORMAT}: want {want}, got {word!r}") from None
    if made.calibrated:
        want = "a file that `tersekv eval --save FILE` wrote, which has the numbers of +channels and +fitted"
        raise ValueError(f"{FORMAT}: want {want}, got {word!r}")
    if made.ends is not None and (layers < 2 or get_parallel().pp_size > 1):
        raise ValueError(
            f"{FORMAT}: want no +ends for parts of a model's layers, got {word!r}; a file has them by layer"
        )
    alike = made.ends in (None, made.formats)
    return Chosen([Kind(kv_format(k), kv_format(v)) for k, v in made.layers(layers)], alike, made.rotated)


def _of_file(path: str, layers: int, first: int) -> Chosen:
    every = read(path).formats
    alike = len({*every}) == 1
    own = (every if alike else every[first:])[:layers]
    if len(own) < layers:
        raise ValueError(f"{FORMAT}: want layers {first} to {first + layers - 1}, got {len(every)} in {path!r}")
    return Chosen([Kind(kv_format(k), kv_format(v)) for k, v in own], alike, saved=path)


def _alike(of: str = "two pools", more: str = "; with --disable-hybrid-swa-memory there is one") -> str:
    return f"{FORMAT}: want the same formats in all layers of {of}, got {env.sglang_format()!r}{more}"


def bytes_of_heads(kvc: Any, layers: int) -> tuple[int, int]:
    """Bytes of a token in the layers that see everything, and in one with a window, on this rank.

    layers:  of the pool that everything is in; 1 where there are two, in one format
    """
    model, parallel, info = kvc.model_config, get_parallel(), kvc.layer_info
    every = chosen(kvc.kv_cache_dtype, info.end_layer - info.start_layer, info.start_layer)
    if every.saved is not None and len(read(every.saved).formats) != model.num_hidden_layers:
        got = f"{len(read(every.saved).formats)} in {every.saved!r}"
        raise ValueError(f"{FORMAT}: want attributes of {model.num_hidden_layers} layers, got {got}")
    kinds = every.kinds[:1] * layers if every.alike else every.kinds
    if len(kinds) != layers:
        hybrid = getattr(kvc, "mambaish_config", None) is not None
        raise NotImplementedError(_alike("a hybrid", "") if hybrid else _alike())
    heads = model.get_num_kv_heads(parallel.attn_tp_size, parallel.attn_dcp_size)
    full = heads * sum(kind.row_bytes(model.head_dim, model.v_head_dim) for kind in kinds)
    if not model.is_hybrid_swa:
        return full, full
    heads = model.get_swa_num_kv_heads(parallel.attn_tp_size)
    return full, heads * kinds[0].row_bytes(model.swa_head_dim, model.swa_v_head_dim)


class TersekvPool(MHATokenToKVPool):
    """k_buffer, v_buffer: [slots, H, elements] a layer; k_scale_buffer, v_scale_buffer: [slots, H, bytes] where K or V
    stores scales, else None."""

    dtype: torch.dtype
    draft = False

    def _create_buffers(self) -> None:
        if self.post_capture_active:
            raise NotImplementedError(
                "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING: want 0, tersekv's pool is allocated at once"
            )
        if self.is_quantized_kv_cache or self.kv_cache_layout != "nhd":
            got = f"{type(self.quant_method).__name__} in layout {self.kv_cache_layout!r}"
            raise NotImplementedError(f"kv_cache_dtype: want a plain pool in layout 'nhd' for tersekv's, got {got}")
        self.chosen = chosen(self.dtype, self.layer_num, self.start_layer, self.draft)
        kinds, dims = self.chosen.kinds, (self.head_dim, self.v_head_dim)
        for k, v in dict.fromkeys(kinds):
            held(k, "head_dim", self.head_dim)
            held(v, "v_head_dim", self.v_head_dim)
        self._saved = None
        if self.chosen.saved is not None:
            parallel = get_parallel()
            self._saved = saved_layers(
                FORMAT, self.chosen.saved, self.head_num, dims, parallel.attn_tp_rank, parallel.attn_tp_size
            )
        # bfloat16 for unrotated rows alone: on CUDA, SGLang's models then write them into the buffers themselves.
        dtypes = {f.storage for kind in kinds for f in kind}
        as_they_come = not self.chosen.rotated and self._saved is None
        self.dtype = dtypes.pop() if len(dtypes) == 1 and as_they_come else torch.uint8
        # PyTorch indexes no tensors of 8-bit floats.
        self.store_dtype = torch.uint8 if self.dtype.itemsize == 1 else self.dtype
        self.native_k_scale_buffer = self.native_v_scale_buffer = self.dq_k_buffer = self.dq_v_buffer = None
        memory = torch.cuda.use_mem_pool(self.custom_mem_pool) if self.enable_custom_mem_pool else nullcontext()
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE), memory:
            self.k_buffer, self.v_buffer = (
                [self._rows(kind[side].code_bytes(dims[side]), self.store_dtype) for kind in kinds] for side in (0, 1)
            )
            self.k_scale_buffer = self.v_scale_buffer = None
            if any(f.scale_dtype is not None for kind in kinds for f in kind):
                self.k_scale_buffer, self.v_scale_buffer = (
                    [self._rows(kind[side].scale_bytes(dims[side]), torch.uint8) for kind in kinds] for side in (0, 1)
                )
        rotation = HADAMARD if self.chosen.rotated else None
        self._signs = make_attributes(rotation, dims, torch.device(self.device), None, None)[:2]
        self._layers: dict[int, tuple[Any, Any, PagedKVLayer]] = {}
        self._kv_buffer_descs = self._build_kv_buffer_descs()
        self._init_data_ptrs_and_strides()

    def _slot_move_pointer_buffers(self) -> list[Tensor]:
        """Those with bytes: SGLang's kernel takes strides for bytes, and an empty tensor's is not 0."""
        return [x for x in super()._slot_move_pointer_buffers() if x.numel()]

    def _init_kv_copy_and_warmup(self) -> None:
        """SGLang's goes by the first buffer's rows; those of V, of scales and of other layers may be wider."""
        super()._init_kv_copy_and_warmup()
        config = self._kv_copy_config
        if config is not None:
            config["byte_tiles"] = -(-int(self.data_strides.max()) // config["bytes_per_tile"])

    def _mha_buffer_info(self) -> RowsInfo:
        """For a hierarchical cache: the bytes of each layer's rows."""
        plain = super()._mha_buffer_info()
        buffers = [self.k_buffer, self.v_buffer]
        if self.k_scale_buffer is not None and self.v_scale_buffer is not None:
            buffers += [self.k_scale_buffer, self.v_scale_buffer]
        rows = tuple(
            tuple(x.view(torch.uint8).flatten(1) for x in layer if x.numel()) for layer in zip(*buffers, strict=True)
        )
        return RowsInfo(**{name: getattr(plain, name) for name in plain.__struct_fields__}, rows=rows)

    def _rows(self, nbytes: int, dtype: torch.dtype) -> Tensor:
        # Slot 0 and the rest of its page take the rows of padding.
        shape = (self.size + self.page_size, self.head_num, nbytes // dtype.itemsize)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def layer(self, index: int, *scales: Any) -> PagedKVLayer:
        """The pages of the pool's layer `index`. scales: of K and of V, SGLang's of the layer, one number or none each;
        left out: those of the call before."""
        known = self._layers.get(index)
        if known is not None and not scales:
            return known[2]
        k_scale, v_scale = scales or (None, None)
        if known is None or known[0] is not k_scale or known[1] is not v_scale:
            known = self._layers[index] = k_scale, v_scale, self._pages(index, k_scale, v_scale)
        return known[2]

    def _pages(self, index: int, k_scale: Any, v_scale: Any) -> PagedKVLayer:
        def pages(x: Tensor, dtype: torch.dtype) -> Tensor:
            return x.view(-1, self.page_size, *x.shape[1:]).view(dtype)

        def stored(buffers: list[Tensor] | None, f: KVFormat) -> Tensor | None:
            if buffers is None or f.scale_dtype is None:
                return None
            scales = pages(buffers[index], f.scale_dtype)
            return scales if f.scale_block else scales[..., 0]

        if not self.chosen.alike and self.model_layer_ids[index] != self.start_layer + index:
            raise NotImplementedError(_alike())  # which of the model's are whose, is told after they are made
        k, v = self.chosen.kinds[index]
        made = PagedKVLayer(
            pages(self.k_buffer[index], k.storage), pages(self.v_buffer[index], v.storage), (k.name, v.name),
            _one("k_scale", k_scale, k), _one("v_scale", v_scale, v),
            stored(self.k_scale_buffer, k), stored(self.v_scale_buffer, v), *self._signs,
        )  # fmt: skip
        if self._saved is None:
            return made
        return replace(made, **self._saved.attributes(self.model_layer_ids[index], made.device))

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k: Tensor,
        cache_v: Tensor,
        k_scale: Any = None,
        v_scale: Any = None,
        layer_id_override: int | None = None,
        dcp_kv_mask: Tensor | None = None,
    ) -> None:
        """Write rows [T, H, D] into their slots."""
        if dcp_kv_mask is not None:
            raise NotImplementedError("dcp_kv_mask: want None, tersekv's pool is of one rank")
        index = (layer.layer_id if layer_id_override is None else layer_id_override) - self.start_layer
        k, v = cache_k.view(-1, self.head_num, self.head_dim), cache_v.view(-1, self.head_num, self.v_head_dim)
        slots = unwrap_write_loc(loc_info)[0].contiguous()  # of a draft model's step they are a column
        append(k, v, self.layer(index, k_scale, v_scale), slots)

    def set_kv_buffer_prefix_valid(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("set_kv_buffer_prefix_valid: tersekv's pool serves no DSpark draft")


class TersekvDraftPool(TersekvPool):
    """Of a model that drafts for another."""

    draft = True


def _one(name: str, scale: Any, f: KVFormat) -> float | Tensor:
    """A scale of the tensor as SGLang has it; a tensor is seen and not copied: what is loaded into it later counts."""
    if scale is None or f.scale not in (TENSOR, BLOCK):
        return 1.0
    if not isinstance(scale, Tensor):
        return float(scale)
    if scale.dtype != torch.float32 or scale.numel() != 1:
        raise ValueError(f"{name}: want one float32 for {f.name}, got {list(scale.shape)} {scale.dtype}")
    return scale.detach().view(1)
