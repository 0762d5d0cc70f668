"""MiniMax's model takes caches of its own class alone, and calls the state of its layers by names of its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from .transformers_cache import TersekvCache
from .transformers_static import TersekvStaticCache


class _Named:
    """The names under which the model looks for a state."""

    layers: list[Any]

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        layer = self.layers[layer_idx]
        layer.update_recurrent_state(linear_cache)
        layer.has_previous_state[0] = True

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        layer = self.layers[layer_idx]
        return layer.recurrent_states[0] if layer.has_previous_state[0] else None

    def __len__(self) -> int:
        return len(self.layers)


class TersekvMiniMaxCache(_Named, TersekvCache, MiniMaxCache):
    """What `TersekvCache(config)` becomes for MiniMax."""


class TersekvStaticMiniMaxCache(_Named, TersekvStaticCache, MiniMaxCache):
    """What `TersekvStaticCache(config, ...)` becomes for MiniMax."""


CLASSES = {TersekvCache: TersekvMiniMaxCache, TersekvStaticCache: TersekvStaticMiniMaxCache}
