"""Sparse models, in which an indexer chooses the keys that each row reads: its keys have pages beside the latents.

A model's own indexer wants all of its keys back from the cache, and scores every one for every row and head at once.
Over a `TersekvCache` it projects and rotates as before; keys go into pages, and `index_select` takes the best from
there. The model hands what it returns, positions in each request, to the attention function, and to layers without an
indexer of their own.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..index_cache import PagedIndexCache
from ..ops.index import index_append, index_query
from ..ops.index_select import index_select
from .transformers_layers import CACHE_ARGUMENT, INDEXERS
from .transformers_pages import Piece
from .transformers_store import LatentStore

if TYPE_CHECKING:
    from .transformers_cache_layers import TersekvLayer

# The mask of a batch without padding: these models cut masks before they look at them, and so need one.
UNPADDED = torch.ones(1, 1, 1, 0, dtype=torch.bool)


class IndexedStore(LatentStore):
    """Latent rows of one layer, and the keys of its indexer in the same pages."""

    def __init__(self, *args: Any, index_head_dim: int, index_format: str) -> None:
        super().__init__(*args)
        self._index_sizes: dict[str, Any] = {"head_dim": index_head_dim, "format": index_format}
        self.caches.append(self._index(self.cache.num_pages))

    def _index(self, num_pages: int) -> PagedIndexCache:
        sizes = {"page_size": self.cache.page_size, "device": self.cache.device, **self._index_sizes}
        return PagedIndexCache.allocate(1, num_pages, **sizes)

    def with_pages(self, num_pages: int) -> IndexedStore:
        """A store like this one, without rows."""
        made = super().with_pages(num_pages)
        assert isinstance(made, IndexedStore)
        made.caches.append(self._index(num_pages))
        return made

    def queries(self, q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """q [T, Hi, Di] and the heads' weights [T, Hi], as the keys are stored."""
        return index_query(q, weights, cache=self.caches[1][0])

    def append_index(self, k: Tensor, slots: Tensor) -> None:
        """k: [T, Di]"""
        index_append(k, self.caches[1][0], slots)

    def select(self, q: Tensor, weights: Tensor, piece: Piece, k: int) -> Tensor:
        """Positions [T, k] of the keys that score best, −1 behind them."""
        chosen, _ = index_select(
            q, weights, self.caches[1][0], piece.page_table, piece.seq_lens, k, cu_seqlens_q=piece.cu_seqlens_q,
            max_q_len=piece.max_q_len,
        )  # fmt: skip
        return chosen


def serve(family: str) -> None:
    """From now on the indexers of a family select from the pages of a `TersekvCache`, if one comes with the call."""
    name, rope = INDEXERS[family]
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    kind = getattr(modeling, name)
    own, rotate = kind.forward, getattr(modeling, rope)
    if hasattr(own, "over_pages"):
        return

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(own).bind(self, *args, **kwargs).arguments
        layers = getattr(given.get(CACHE_ARGUMENT), "layers", ())
        layer = layers[self.layer_idx] if self.layer_idx < len(layers) else None
        if not hasattr(layer, "choose"):
            return own(self, *args, **kwargs)
        return _chosen(
            self, layer, rotate, given["hidden_states"], given["q_resid"], given["position_embeddings"],
            given["attention_mask"],
        )  # fmt: skip

    forward.over_pages = True  # type: ignore[attr-defined]
    kind.forward = forward


@torch.compiler.disable(reason="pages are counted on the host")
@torch.no_grad()
def _chosen(
    indexer: Any, layer: TersekvLayer, rotate: Any, hidden: Tensor, q_resid: Tensor, cos_sin: tuple[Tensor, Tensor],
    mask: Tensor,
) -> Tensor:  # fmt: skip
    """Positions [B, T, k] int32 of the keys that each row reads; its queries, keys and weights are the model's."""
    q = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    k = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    width = indexer.qk_rope_head_dim
    turned = rotate(q[..., :width], k[..., :width], *cos_sin, unsqueeze_dim=2)
    q, k = (torch.cat((head, x[..., width:]), -1) for head, x in zip(turned, (q, k), strict=True))
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype))
    return layer.choose(q, k[:, :, 0], weights, mask[:, 0] if mask.shape[-1] else None, indexer.index_topk)
