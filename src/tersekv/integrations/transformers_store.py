"""What one layer of a Hugging Face model keeps: K and V, or the latents of MLA, in a paged cache of one layer."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..attributes import channel_scale
from ..cache import PagedKVCache, PagedLatentCache
from ..errors import UnsupportedError
from ..layers import Formats, PagedKVLayer, PagedLatentLayer
from ..ops.append import append
from ..ops.decode import decode
from ..ops.mla import mla_append, mla_decode
from ..ops.prefill import MANY_ROWS, prefill
from ..pages import PageCopy, copy_pages, written_rows
from ..record_file import page_tensors
from ..saved import NAMES
from .transformers_pages import Piece


class Rules(NamedTuple):
    """What an attention layer asks for beside its tensors."""

    softmax_scale: float | None
    window: int | None
    softcap: float
    sinks: Tensor | None
    indices: Tensor | None = None  # [T, n] positions of the keys that each row reads; None: all


class Store:
    """The rows of one layer.

    caches: of one layer each, with the same pages; the first is that of keys and values, or latents
    """

    caches: list[Any]

    @property
    def cache(self) -> Any:
        """That of keys and values, or latents."""
        return self.caches[0]

    def append(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write new rows [T, H, ...]."""
        raise NotImplementedError

    def attend(self, q: Tensor, piece: Piece, rules: Rules, module: torch.nn.Module) -> Tensor:
        """q [T, Hq, D] → [T, Hq, Dv]."""
        raise NotImplementedError

    def with_pages(self, num_pages: int) -> Store:
        """A store like this one, without rows."""
        raise NotImplementedError

    def tensors(self) -> list[Tensor]:
        """All that is written into, where it is marked for compiled models."""
        raise NotImplementedError

    def largest(self) -> tuple[float, ...]:
        """Largest magnitudes in a 16-bit cache."""
        raise NotImplementedError

    def rows(self) -> tuple[Tensor, ...]:
        """What was written into a 16-bit cache."""
        raise NotImplementedError

    def channel_scales(self) -> tuple[Tensor, ...]:
        """Of K and of V in a 16-bit cache."""
        raise NotImplementedError

    def open(self, copies: Sequence[PageCopy] = ()) -> Store:
        """Where a forward writes and reads, once these pages are copied."""
        self.copy(copies)
        return self

    def close(self, pages: Iterable[int] = ()) -> None:
        """A forward has written these pages where `open` said."""

    def take_back(self) -> None:
        """A forward has failed in the middle."""

    def forget(self) -> None:
        """No row is needed any more."""

    def settle(self) -> None:
        """Return when `caches` hold all that was written."""

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy whole pages."""
        if copies:
            for cache in self.caches:
                copy_pages(cache, copies)

    def grow(self, num_pages: int) -> None:
        """The same rows in more pages."""
        larger = self.with_pages(num_pages).caches
        for new, old in zip(larger, self.caches, strict=True):
            for (_, x), (_, y) in zip(page_tensors(new[0]), page_tensors(old[0]), strict=True):
                # One byte wide as bytes: some devices copy no fp8.
                dst, src = (t.view(torch.uint8) if t.element_size() == 1 else t for t in (x, y))
                dst[: len(src)] = src
        self.caches = larger


class KVStore(Store):
    """K and V rows of one layer; H heads of D (V: Dv) numbers."""

    def __init__(
        self, key: Tensor, value: Tensor, format: Formats, num_pages: int, page_size: int, k_scale: float,
        v_scale: float, attributes: Mapping[str, Any] | None = None, saved: PagedKVLayer | None = None,
    ) -> None:  # fmt: skip
        """key, value: [B, H, T, D], [B, H, T, Dv] of the first forward: sizes and device.

        attributes: rotation and channel scales, as `PagedKVCache.allocate` takes them
        saved:      a layer whose scales and attributes this one gets instead
        """
        more = {n: x.to(key.device) if isinstance(x, Tensor) else x for n, x in (attributes or {}).items()}
        self._sizes: dict[str, Any] = {
            "num_layers": 1, "page_size": page_size, "num_kv_heads": key.shape[1], "head_dim": key.shape[-1],
            "head_dim_v": value.shape[-1], "format": format, "k_scale": k_scale, "v_scale": v_scale,
            "device": key.device, **more,
        }  # fmt: skip
        self._saved: dict[str, Any] = {}
        if saved is not None:
            sizes = key.shape[1], key.shape[-1], value.shape[-1]
            if sizes != (saved.num_kv_heads, saved.head_dim, saved.head_dim_v):
                want = f"(H, D, Dv) = {sizes}, as the model has"
                raise ValueError(f"saved: want {want}, got {(saved.num_kv_heads, saved.head_dim, saved.head_dim_v)}")
            values = {name: getattr(saved, name) for name in NAMES}
            self._saved = {n: x.to(key.device) if isinstance(x, Tensor) else x for n, x in values.items()}
        self.caches = [self._allocate(num_pages)]

    def with_pages(self, num_pages: int) -> KVStore:
        """A store like this one, without rows."""
        made = copy.copy(self)
        made.caches = [self._allocate(num_pages)]
        return made

    def _allocate(self, num_pages: int) -> PagedKVCache:
        made = PagedKVCache.allocate(num_pages=num_pages, **self._sizes)
        if not self._saved:
            return made
        return PagedKVCache([replace(made[0], **self._saved)], made.head_dim, made.head_dim_v)

    def append(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """key, value: [T, H, D], [T, H, Dv]."""
        append(key, value, self.cache[0], slots)

    def tensors(self) -> list[Tensor]:
        """All that is written into."""
        layer = self.cache[0]
        return [x for x in (layer.k, layer.v, layer.k_scale_cache, layer.v_scale_cache) if x is not None]

    def attend(self, q: Tensor, piece: Piece, rules: Rules, module: torch.nn.Module) -> Tensor:
        """q [T, Hq, D] → [T, Hq, Dv]."""
        rows = piece.cu_seqlens_q
        many = piece.max_q_len >= MANY_ROWS
        if many and rows is None:
            rows = torch.arange(0, len(q) + 1, piece.max_q_len, dtype=torch.int32, device=q.device)
        out = (prefill if many else decode)(
            q, self.cache[0], piece.page_table, piece.seq_lens, softmax_scale=rules.softmax_scale,
            window=rules.window, sinks=rules.sinks, softcap=rules.softcap, cu_seqlens_q=rows,  # type: ignore[arg-type]
            max_q_len=piece.max_q_len,
        )  # fmt: skip
        return cast(Tensor, out)

    def largest(self) -> tuple[float, ...]:
        """Largest magnitude of K and of V in a 16-bit cache."""
        return tuple(float(x.abs().max()) for x in (self.cache[0].k, self.cache[0].v))

    def rows(self) -> tuple[Tensor, ...]:
        """K and V [T, H, D], [T, H, Dv] in a 16-bit cache."""
        return written_rows(self.cache[0].k, self.cache[0].v)

    def channel_scales(self) -> tuple[Tensor, ...]:
        """Of K and of V in a 16-bit cache."""
        # Slots that were never written are rows of zeros: they change no channel beside another.
        return tuple(channel_scale(x.flatten(0, 1)) for x in (self.cache[0].k, self.cache[0].v))


class LatentStore(Store):
    """Latent rows of one MLA layer: L latent and R rotary numbers a token, shared by all heads."""

    def __init__(
        self, key: Tensor, value: Tensor, format: str, num_pages: int, page_size: int, kv_scale: float
    ) -> None:
        """key, value: [B, 1, T, L] normed latents and [B, 1, T, R] rotated keys of the first forward."""
        self._sizes: dict[str, Any] = {
            "num_layers": 1, "page_size": page_size, "kv_lora_rank": key.shape[-1],
            "qk_rope_head_dim": value.shape[-1], "format": format, "kv_scale": kv_scale, "device": key.device,
        }  # fmt: skip
        self.caches = [PagedLatentCache.allocate(num_pages=num_pages, **self._sizes)]
        self._joined: Tensor | None = None

    def with_pages(self, num_pages: int) -> LatentStore:
        """A store like this one, without rows."""
        made = copy.copy(self)
        made.caches = [PagedLatentCache.allocate(num_pages=num_pages, **self._sizes)]
        return made

    @property
    def layer(self) -> PagedLatentLayer:
        """What is written and read."""
        if self._joined is None:
            return self.cache[0]
        more = {name: self._sizes[name] for name in ("format", "kv_lora_rank", "kv_scale")}
        return PagedLatentLayer.of(self._joined, **more)

    def join(self) -> None:
        """From now on rows are seen through one tensor of whole ones: the graph of a compiled model takes no two views
        of one memory."""
        layer = self.cache[0]
        whole = torch.empty(0, dtype=torch.uint8, device=layer.device).set_(layer.ckv.untyped_storage())
        rows = whole.view(layer.num_pages, layer.page_size, -1)
        self._joined = rows if layer.ckv_scale_cache is not None else rows.view(layer.ckv.dtype)

    def append(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """key, value: [T, 1, L], [T, 1, R]."""
        mla_append(key[:, 0], value[:, 0], self.layer, slots)

    def tensors(self) -> list[Tensor]:
        """All that is written into."""
        assert self._joined is not None
        return [self._joined]

    def attend(self, q: Tensor, piece: Piece, rules: Rules, module: torch.nn.Module) -> Tensor:
        """q [T, H, Dn + R] → [T, H, Dv]: absorbed, so that one latent row is key and value of every head."""
        if rules.window is not None or rules.softcap or rules.sinks is not None:
            raise UnsupportedError("latent caches have no sliding window, softcap or sinks")
        if rules.softmax_scale is None:
            raise ValueError("scaling: want a number for a latent cache, got None")
        w_uk, w_uv = absorbed_weights(module, q)
        q_nope, q_pe = q.split((w_uk.shape[1], q.shape[-1] - w_uk.shape[1]), dim=-1)
        q_latent = torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1).contiguous()
        out = mla_decode(
            (q_latent, q_pe.contiguous()), self.layer, piece.page_table, piece.seq_lens,
            softmax_scale=rules.softmax_scale, cu_seqlens_q=piece.cu_seqlens_q, max_q_len=piece.max_q_len,
            indices=rules.indices,
        )  # fmt: skip
        return torch.bmm(cast(Tensor, out).transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1)

    def channel_scales(self) -> tuple[Tensor, ...]:
        """Refused."""
        raise ValueError("channel_scales: want a cache of K and V, got one of latents")

    def rows(self) -> tuple[Tensor, ...]:
        """Latent and rotary parts [T, L], [T, R] in a 16-bit cache."""
        return written_rows(self.cache[0].ckv, self.cache[0].kpe)

    def largest(self) -> tuple[float, ...]:
        """Largest magnitude in a 16-bit cache, latent and rotary part alike."""
        return (max(float(x.abs().max()) for x in (self.cache[0].ckv, self.cache[0].kpe)),)


def absorbed_weights(module: Any, q: Tensor) -> tuple[Tensor, Tensor]:
    """w_uk [H, Dn, L] and w_uv [H, Dv, L] of an MLA module, in q's dtype: views of its `kv_b_proj`.

    Under autocast the weight may be of another dtype: the products cast it, as they do in a linear layer. Raises
    UnsupportedError for a module without them, or whose weight is quantised or has a bias.
    """
    projection = getattr(module, "kv_b_proj", None)
    weight = getattr(projection, "weight", None)
    nope, dv = getattr(module, "qk_nope_head_dim", None), getattr(module, "v_head_dim", None)
    if not isinstance(weight, Tensor) or nope is None or dv is None:
        raise UnsupportedError(
            f"{type(module).__name__} caches latents, but has no kv_b_proj, qk_nope_head_dim and v_head_dim to absorb"
        )
    heads = q.shape[1]
    castable = weight.dtype == q.dtype or (weight.is_floating_point() and torch.is_autocast_enabled(q.device.type))
    if not castable or weight.dim() != 2 or weight.shape[0] != heads * (nope + dv):
        raise UnsupportedError(
            f"kv_b_proj: want a weight [{heads} * ({nope} + {dv}), L] {q.dtype}, got {list(weight.shape)} "
            f"{weight.dtype}"
        )
    if getattr(projection, "bias", None) is not None:
        raise UnsupportedError("kv_b_proj: want no bias, which cannot be absorbed, got one")
    w_uk, w_uv = weight.unflatten(0, (heads, -1)).split((nope, dv), dim=1)
    return w_uk, w_uv


def check_expanded(module: Any, latent: Tensor, rotary: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises UnsupportedError if a module made other heads of its last latent row than its absorbed weights do.

    latent, rotary:  [B, 1, T, L], [B, 1, T, R]
    key, value:      [B, H, 1, Dn + R], [B, H, 1, Dv], of the last token
    """
    w_uk, w_uv = absorbed_weights(module, key)
    last, turned = latent[:, 0, -1], rotary[:, :, -1].expand(-1, key.shape[1], -1)
    wanted = (
        torch.cat((torch.einsum("bl,hdl->bhd", last, w_uk), turned), -1),
        torch.einsum("bl,hdl->bhd", last, w_uv),
    )
    # A few roundings of the dtype, or of products in TF32.
    allowed = max(4 * torch.finfo(w_uk.dtype).eps, 1e-2)
    for name, got, want in zip(("key", "value"), (key, value), wanted, strict=True):
        same = got.shape == (*want.shape[:2], 1, want.shape[2])
        if not same or (got[:, :, 0].float() - want.float()).norm() > allowed * want.float().norm():
            raise UnsupportedError(
                f"{name}: want what kv_b_proj makes of the latents that {named(module)} gave to its cache, got "
                f"{list(got.shape)} of other numbers: its weight alone can be absorbed (no adapter, no hook, nothing "
                "between it and the attention)"
            )


def named(module: Any) -> str:
    """The class of a module, and the family of its model."""
    family = getattr(getattr(module, "config", None), "model_type", None)
    return f"{type(module).__name__} of {family}" if family else type(module).__name__
