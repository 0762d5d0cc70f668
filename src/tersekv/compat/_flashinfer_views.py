"""FlashInfer's shapes as tersekv sees them: views, and what the caller says of them checked. No copies."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..formats import BLOCK, TOKEN_HEAD, kv_format
from ..layers import PagedKVLayer, PagedLatentLayer
from ..tracing import tracing
from ._adapt import as_host_int, dtype_name, joined, tensor, with_caller_names

_CACHE = {"cache": "kv_cache"}


def layer(
    kv_cache: Tensor | tuple[Tensor, Tensor], layout: str, sf: Tensor | tuple[Tensor, Tensor] | None
) -> PagedKVLayer:
    """The cache as tersekv sees it; raw int8 codes get scales of 1 that take no memory."""
    if not isinstance(kv_cache, (Tensor, tuple, list)):
        raise TypeError(f"kv_cache: want Tensor or a tuple of two, got {type(kv_cache).__name__}")
    for t in kv_cache if isinstance(kv_cache, (tuple, list)) else ():
        tensor("kv_cache", t)
    kv = with_caller_names(_CACHE, lambda: PagedKVLayer.of(kv_cache, layout=layout))
    f = kv_format(kv.formats[0])
    if f.scale == BLOCK and sf is None:
        raise ValueError(f"scale_cache: want the e4m3 block scales of a {dtype_name(kv.k.dtype)} cache, got None")
    if f.scale != BLOCK and sf is not None:
        raise ValueError(f"scale_cache: want None beside a {dtype_name(kv.k.dtype)} cache, got block scales")
    if sf is not None:
        kv = PagedKVLayer.of(kv_cache, layout=layout, scale_cache=_block_scales(sf))
    if f.scale != TOKEN_HEAD:
        return kv
    one = _one(kv.k.device)
    k_ones, v_ones = (one.expand(t.shape[:3]) for t in (kv.k, kv.v))
    return PagedKVLayer(kv.k, kv.v, kv.formats[0], 1.0, 1.0, k_ones, v_ones)


def _block_scales(sf: Tensor | tuple[Tensor, Tensor]) -> Tensor | tuple[Tensor, ...]:
    if isinstance(sf, (tuple, list)):
        return tuple(_e4m3(x) for x in sf)
    return _e4m3(sf)


def _e4m3(x: Tensor) -> Tensor:
    """Block scales in their own dtype; FlashInfer hands them out as bytes too."""
    return x.view(torch.float8_e4m3fn) if tensor("scale_cache", x).dtype == torch.uint8 else x


def _one(device: torch.device) -> Tensor:
    # NOTE: memory that a CUDA graph's capture allocates holds 1 only after a replay, and a traced tensor has none.
    if tracing() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return torch.ones((), dtype=torch.float32, device=device)
    return _kept_one(device, torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0)


@functools.cache
def _kept_one(device: torch.device, stream: int) -> Tensor:
    """One for each stream, so that a use never has to wait for another stream's fill."""
    return torch.ones((), dtype=torch.float32, device=device)


def latent_layer(rows: Tensor, rank: int) -> PagedLatentLayer:
    return PagedLatentLayer.of(rows, kv_lora_rank=rank)


def draft_rows(name: str, option: str, t: int, b: int, rows: int | None, cu_seqlens_q: Tensor | None) -> int:
    """The largest number of query rows of a request."""
    if rows is not None:
        rows = as_host_int(option, rows)
    if cu_seqlens_q is None:
        rows = (t // b if b else 1) if rows is None else rows
        if t != b * rows:
            raise ValueError(f"{name}: want {b} (entries of seq_lens) × {option}={rows} rows, got {t}")
        return rows
    tensor("q_cu_seq_lens", cu_seqlens_q)
    if rows is None:
        return t
    if rows <= 1:
        raise ValueError(f"{option}: want the largest number of drafts (> 1) beside q_cu_seq_lens, got {rows}")
    return rows


def beam_rows(name: str, x: Tensor, drafts: int | None) -> Tensor:
    """[B, 1, heads, dim] or [B, 1, drafts, heads, dim] as [T, heads, dim], which ragged rows (drafts None) are."""
    if drafts is None and tensor(name, x).dim() == 3:
        return x
    if tensor(name, x).dim() not in (4, 5) or x.shape[1] != 1 or (x.dim() == 5 and x.shape[2] != drafts):
        want = "[T, heads, dim]" if drafts is None else f"[B, 1, heads, dim] or [B, 1, {drafts}, heads, dim]"
        raise ValueError(f"{name}: want {want}, got {list(x.shape)}")
    return x[:, 0] if x.dim() == 4 else joined(name, x[:, 0])


def beam_lens(seq_lens: Tensor) -> Tensor:
    if tensor("seq_lens", seq_lens).dim() == 2 and seq_lens.shape[1] == 1:
        return seq_lens[:, 0]
    if seq_lens.dim() != 1:
        raise ValueError(f"seq_lens: want [B, 1] or [B], got {list(seq_lens.shape)}")
    return seq_lens


def head_rows(name: str, x: Tensor | None, heads: int, page_size: int, layout: str) -> Tensor:
    """A K or V cache as [P, S, H, dim], checked against what the caller says of it."""
    if layout not in ("NHD", "HND"):
        raise ValueError(f"kv_layout: want 'NHD' or 'HND', got {layout!r}")
    x = tensor(name, x)
    heads, page_size = as_host_int("num_kv_heads", heads), as_host_int("page_size", page_size)
    if x.dim() == 2 and x.shape[0] % max(page_size * heads, 1) == 0:
        inner = (page_size, heads) if layout == "NHD" else (heads, page_size)
        x = x.unflatten(0, (x.shape[0] // max(page_size * heads, 1), *inner))
    if x.dim() == 4 and layout == "HND":
        x = x.transpose(1, 2)
    if x.dim() != 4 or x.shape[1] != page_size or x.shape[2] != heads:
        raise ValueError(
            f"{name}: want pages of page_size={page_size} and num_kv_heads={heads} in {layout}, got {list(x.shape)}"
        )
    return x


def latent_rows(name: str, x: Tensor, page_size: int) -> Tensor:
    """Latent rows as [P, S, dim], checked against the caller's page size."""
    page_size = as_host_int("page_size", page_size)
    if tensor(name, x).dim() == 2 and page_size > 0 and x.shape[0] % page_size == 0:
        return x.unflatten(0, (x.shape[0] // page_size, page_size))
    rows = x[:, :, 0] if x.dim() == 4 and x.shape[2] == 1 else x
    if rows.dim() != 3 or rows.shape[1] != page_size:
        raise ValueError(
            f"{name}: want [tokens, dim], [P, S, dim] or [P, S, 1, dim] with page_size={page_size}, got {list(x.shape)}"
        )
    return rows


def halves(kv_cache: Any, sf: Any = None) -> tuple[tuple, dict[str, str]]:
    """K, V and their stored scales as a call gives them, and what of these is part of another (`_adapt.lookup_cached`).

    Values that lie in K's tensor are part of it; scales of raw int8 codes are those of `layer`.
    """
    parts = {}
    k, v = kv_cache if type(kv_cache) in (tuple, list) and len(kv_cache) == 2 else (kv_cache, None)
    if v is None:
        parts["v_cache"] = "k_cache"
    if sf is None and isinstance(k, Tensor) and k.dtype == torch.int8:
        sf = _one(k.device)
    ks, vs = sf if type(sf) in (tuple, list) and len(sf) == 2 else (sf, None)
    if ks is not None and vs is None:
        parts["v_scale_cache"] = "k_scale_cache"
    return (k, v, ks, vs), parts
