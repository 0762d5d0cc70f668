"""`transcode`: pages of one cache into pages of another, of any formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from struct import pack, unpack
from typing import Any, get_type_hints
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..cache import PagedKVCache, PagedLatentCache
from ..calls import LAYER_COLUMNS, TranscodeCall
from ..dispatch import checks
from ..dispatch.launch_cache import CallSignature, lookup
from ..dispatch.plan import plan
from ..formats import ALL_FORMATS, TENSOR, latent_format
from ..layers import PagedKVLayer, PagedLatentLayer
from ..scalars import as_int, as_non_negative_int, round_to_fp32
from ..tracing import tracing
from .registry import dispatch_call
from .scales import attributes, float_and_tensor

Pages = Tensor | Sequence[int]
AnyCache = PagedKVCache | PagedLatentCache | PagedKVLayer | PagedLatentLayer
_KINDS = (PagedKVCache, PagedLatentCache, PagedKVLayer, PagedLatentLayer)
_ALL_LAYERS_AT_ONCE = ("triton",)  # backends whose kernels take `TranscodeCall.layers`
_CODES = ("src_k", "src_v", "k_cache", "v_cache")
_SCALES = LAYER_COLUMNS[-4:]
_TENSORS = LAYER_COLUMNS[:-4]
_INPUTS = tuple(name for name, hint in get_type_hints(TranscodeCall).items() if hint in (Tensor, Tensor | None))


def transcode(
    src: AnyCache,
    src_pages: Pages,
    dst: AnyCache,
    dst_pages: Pages,
    *,
    num_tokens: int | Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Copy tokens from pages of one cache into pages of another, in its formats, in every layer, in place.

        >>> sizes = {"num_layers": 2, "num_pages": 8, "num_kv_heads": 2, "head_dim": 64}
        >>> hot = tersekv.PagedKVCache.allocate(page_size=16, format="fp8_e4m3", **sizes)
        >>> cold = tersekv.PagedKVCache.allocate(page_size=32, format="int4_per_token_head", layout="HND", **sizes)
        >>> tersekv.transcode(hot, [3, 0, 5], cold, [7, 1], num_tokens=40)

        src, dst:    two caches of one kind on one device, or one layer of each: the same layers, heads and head sizes.
                     Formats, page sizes, layouts, places and values of scales, rotations and channel scales are free.
                     dst is written, and shares no memory with src
        src_pages:   [n]  int32 | int64 | uint32 on that device, or a list of ints, which is copied there
        dst_pages:   [m]  likewise; each page once
        num_tokens:  how many, in the order of src_pages, fill the slots of dst_pages in theirs; later slots stay as
                     they are, and later pages are not looked at. None: all that src_pages hold. An integer tensor [1]
                     on the device: a graph may be replayed with another number, at most what both lists hold

    A row (of a token and head, K and V apart) whose format, scale of the tensor, rotation and channel scales are equal
    on both sides is copied, byte by byte. Any other becomes fp32, never 16 bits, and is quantised as `append` does it:
    bytes are equal on every backend. Equal rotations are not undone where only the format changes.

    On a GPU one launch does all layers of a pair of formats; while torch.compile traces each layer is a call. The first
    call with two caches makes what the next ones need: make it before a CUDA graph is captured.

    Raises TypeError or ValueError before anything is written: for caches that do not fit together, for too few pages,
    and on the CPU, for lists of ints, and in checked mode for a page outside its cache or twice in dst_pages. Elsewhere
    tokens of pages outside are skipped. The arithmetic: `tersekv.calls.TranscodeCall`.
    """
    layers = _layers(src, dst)
    lists = {
        "src_pages": _page_list("src_pages", src_pages, dst), "dst_pages": _page_list("dst_pages", dst_pages, dst),
    }  # fmt: skip
    tokens, tokens_t = _tokens(num_tokens, lists, src, dst)
    pages: dict[str, Any] = {**lists, "num_tokens": tokens, "num_tokens_t": tokens_t}
    if tracing():
        for pair in layers:
            dispatch_call("transcode", TranscodeCall(**_fields(*pair), **pages), backend)
        return
    if tokens_t is None:
        for name, listed, cache in (("src_pages", src_pages, src), ("dst_pages", dst_pages, dst)):
            _check_list(name, listed, tokens, cache)
    groups = _groups(src, dst, layers)
    calls = [TranscodeCall(**group.fields[0], **pages, layers=group.table) for group in groups]
    if not _takes_all_layers(calls[0], backend):
        calls = [TranscodeCall(**fields, **pages) for group in groups for fields in group.fields]
    if len(calls) > 1:
        for call in calls:  # all are checked before the first is written
            plan("transcode", call, backend)
    for call in calls:
        _run(call, backend)


class _Group:
    """Layers that one launch may do: tensors with equal facts, the same of them there."""

    def __init__(self, fields: list[dict[str, Any]]) -> None:
        self.fields = fields
        self.table = _table(fields) if len(fields) > 1 else None
        self.addresses = _addresses(fields)

    def moved(self) -> bool:
        """Whether some tensor has other memory than when the table was made."""
        return self.addresses != _addresses(self.fields)


def _takes_all_layers(call: TranscodeCall, backend: str | None) -> bool:
    """Whether the backend that runs the first layer alone can run all that are like it."""
    return plan("transcode", call._replace(layers=None), backend).backend in _ALL_LAYERS_AT_ONCE


def _run(call: TranscodeCall, backend: str | None) -> None:
    inputs = tuple(getattr(call, name) for name in _INPUTS)
    options = (*(x for x in call if not isinstance(x, Tensor)), backend)
    if lookup("transcode", options, inputs) is None:
        dispatch_call("transcode", call, backend, CallSignature(options, inputs))


# By dst, then src: what their layers have in common, as long as both live.
_known: WeakKeyDictionary[Any, WeakKeyDictionary[Any, list[_Group]]] = WeakKeyDictionary()


def _groups(src: AnyCache, dst: AnyCache, layers: list[tuple[Any, Any]]) -> list[_Group]:
    """The layers by what one launch may do."""
    if isinstance(src, (PagedKVLayer, PagedLatentLayer)):
        _check_memory(layers)
        return [_Group([_fields(*pair)]) for pair in layers]
    found = _known.setdefault(dst, WeakKeyDictionary()).get(src)
    if found is None or any(group.moved() for group in found):
        if src.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("transcode: want a call with these caches before a CUDA graph is captured, got none")
        _check_memory(layers)
        fields = [_fields(*pair) for pair in layers]
        alike: dict[tuple, list[dict[str, Any]]] = {}
        for of_layer in fields:
            alike.setdefault(_key(of_layer), []).append(of_layer)
        found = _known[dst][src] = [_Group(group) for group in alike.values()]
    return found


def _key(fields: Mapping[str, Any]) -> tuple:
    """What layers of a group have in common: everything that a launch depends on but addresses and values."""
    formats = [fields[name] for name in ("src_format", "src_v_format", "format", "v_format")]
    tensors = [fields[name] for name in _TENSORS]
    facts = [None if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() % 16) for x in tensors]
    scales = [round_to_fp32(fields[f"src_{side}_scale"]) == round_to_fp32(fields[f"{side}_scale"]) for side in "kv"]
    return (*formats, *facts, *scales)


def _addresses(fields: list[dict[str, Any]]) -> list[int]:
    return [of_layer[name].data_ptr() for of_layer in fields for name in _CODES]


def _table(fields: list[dict[str, Any]]) -> Tensor:
    """`TranscodeCall.layers` of these layers."""
    first, rows = fields[0], []
    for of_layer in fields:
        distances = [
            0 if of_layer[n] is None else (of_layer[n].data_ptr() - first[n].data_ptr()) // 16 for n in _TENSORS
        ]
        rows.append(distances + [unpack("i", pack("f", round_to_fp32(of_layer[name])))[0] for name in _SCALES])
    return torch.tensor(rows, dtype=torch.int64, device=first["src_k"].device)


def _layers(src: AnyCache, dst: AnyCache) -> list[tuple[Any, Any]]:
    """Layers of both, that fit together."""
    for name, cache in (("src", src), ("dst", dst)):
        if not isinstance(cache, _KINDS):
            raise TypeError(f"{name}: want a cache or a layer of one, got {type(cache).__name__}")
        if not cache.page_size:
            raise ValueError(f"{name}: want at least one slot a page, got 0")
    if type(src) is not type(dst):
        raise TypeError(f"dst: want {type(src).__name__} as src is, got {type(dst).__name__}")
    kv = isinstance(src, (PagedKVCache, PagedKVLayer))
    names = ("num_kv_heads", "head_dim", "head_dim_v") if kv else ("kv_lora_rank", "qk_rope_head_dim")
    whole = isinstance(src, (PagedKVCache, PagedLatentCache))
    for name in (*(("num_layers",) if whole else ()), *names, "device"):
        want, got = getattr(src, name), getattr(dst, name)
        if want != got:
            raise ValueError(f"dst: want {name} {want} as src has, got {got}")
        if want == 0:
            raise ValueError(f"src: want {'rows' if kv else 'latent rows with a rotary part'}, got {name} 0")
    return list(zip(src.layers, dst.layers, strict=True)) if whole else [(src, dst)]  # type: ignore[union-attr]


def _check_memory(layers: list[tuple[Any, Any]]) -> None:
    """Raise ValueError if dst lies among src, as far as the first and the last byte of each tensor say."""
    spans = sorted(
        (*_span(x), side) for pair in layers for side, of in enumerate(pair) for x in _codes(of) if x.numel()
    )
    ends = [0, 0]  # of src and dst, so far
    for begin, end, side in spans:
        if begin < ends[1 - side]:
            raise ValueError("dst: want memory of its own, got some of src's (copy_pages copies within a cache)")
        ends[side] = max(ends[side], end)


def _span(x: Tensor) -> tuple[int, int]:
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _codes(layer: PagedKVLayer | PagedLatentLayer) -> tuple[Tensor, Tensor]:
    return (layer.k, layer.v) if isinstance(layer, PagedKVLayer) else (layer.ckv, layer.kpe)


def _page_list(name: str, pages: Pages, dst: AnyCache) -> Tensor:
    if isinstance(pages, Tensor):
        checks.tensor(name, pages, "n")
        return pages
    if not isinstance(pages, Sequence) or isinstance(pages, str):
        raise TypeError(f"{name}: want Tensor or a list of ints, got {type(pages).__name__}")
    return torch.tensor([as_int(name, page) for page in pages], dtype=torch.int64, device=dst.device)


def _tokens(
    given: int | Tensor | None, lists: Mapping[str, Tensor], src: AnyCache, dst: AnyCache
) -> tuple[int, Tensor | None]:
    """(most tokens, how many of them or None) of `num_tokens`."""
    held = len(lists["src_pages"]) * src.page_size
    if given is None:
        return held, None
    if isinstance(given, Tensor):
        return min(held, len(lists["dst_pages"]) * dst.page_size), given.reshape(1) if given.dim() == 0 else given
    return as_non_negative_int("num_tokens", given), None


def _check_list(name: str, pages: Pages, tokens: int, cache: AnyCache) -> None:
    """Raise ValueError for a page of a list of ints that is outside its cache, or written twice."""
    if isinstance(pages, Tensor):
        return
    used, seen = pages[: -(-tokens // cache.page_size)], set[int]()
    for i, page in enumerate(used):
        if not 0 <= page < cache.num_pages:
            raise ValueError(f"{name}: want pages in [0, {cache.num_pages}), got {page} at {i}")
        if name == "dst_pages" and page in seen:
            raise ValueError(f"dst_pages: want each page once, got {page} again")
        seen.add(page)


def _fields(src: Any, dst: Any) -> dict[str, Any]:
    """The fields of a call that two layers give."""
    fields = {**layer_fields(src, "src_"), **layer_fields(dst, "")}
    for side in "kv":
        names = [f"{prefix}{side}_{what}" for prefix in ("src_", "") for what in ("signs", "channel_scale")]
        signs, channels, new_signs, new_channels = (fields[name] for name in names)
        if signs is new_signs and channels is new_channels:  # equal without a look at values
            fields.update(dict.fromkeys(names))
    return fields


def layer_fields(layer: PagedKVLayer | PagedLatentLayer, prefix: str) -> dict[str, Any]:
    """What a layer gives of a call's record, as "src_" or as "", the destination."""
    found: dict[str, Any]
    names: tuple[str, ...] = ("src_k", "src_v") if prefix else ("k_cache", "v_cache")
    if isinstance(layer, PagedKVLayer):
        format, v_format, more = attributes(layer)
        formats, codes, stored = (
            (format, v_format or format),
            (layer.k, layer.v),
            (layer.k_scale_cache, layer.v_scale_cache),
        )
        scales = layer.k_scale, layer.v_scale
    else:
        f, more = latent_format(layer.format), (None,) * 4
        rotary = f.name if f.rope_storage is None else _format_of(f.rope_storage)
        formats, codes = (f.name, rotary), (layer.ckv.unsqueeze(2), layer.kpe.unsqueeze(2))
        stored = (None if layer.ckv_scale_cache is None else layer.ckv_scale_cache.unsqueeze(2)), None
        scales = (layer.kv_scale, layer.kv_scale if ALL_FORMATS[rotary].scale == TENSOR else 1.0)
    found = {f"{prefix}format": formats[0], f"{prefix}v_format": formats[1]}
    for side, name, x, s, scale in zip("kv", names, codes, stored, scales, strict=True):
        value, tensor = float_and_tensor(scale, f"{side}_scale")
        found |= {name: x, f"{prefix}{side}_scale_cache": s}
        found |= {f"{prefix}{side}_scale": value, f"{prefix}{side}_scale_t": tensor}
    names = ("k_signs", "v_signs", "k_channel_scale", "v_channel_scale")
    return found | {prefix + name: x for name, x in zip(names, more, strict=True)}


def _format_of(dtype: torch.dtype) -> str:
    return next(name for name, f in ALL_FORMATS.items() if f.storage == dtype)
