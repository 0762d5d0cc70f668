"""What layers a model of Hugging Face transformers has, as its config tells, and which families cannot be served."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationMixin, cache_utils
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from ..errors import UnsupportedError

# What transformers calls the cache in `generate` and in a model's forward: 5.24 renamed it, and warns of the old name.
CACHE_ARGUMENT = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
INSTEAD = "run it with attn_implementation='sdpa' or 'eager' and one of transformers' own caches"

# Of each family the class of its indexer, and what rotates the first columns of its queries and keys.
INDEXERS = {
    "axk2": ("AXK2Indexer", "apply_rotary_pos_emb"),
    "deepseek_v32": ("DeepseekV32Indexer", "apply_rotary_pos_emb"),
    "glm_moe_dsa": ("GlmMoeDsaIndexer", "apply_rotary_pos_emb_interleave"),
}
INDEXED = "indexed_attention"  # what configs call such a layer

_MIXED = (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)
# 5.24's name for layers without a cache: those of experts alone, and those that attend to the keys of others.
_EMPTY = (cache_utils.DummyLayer,) if hasattr(cache_utils, "DummyLayer") else ()


class LayerKind(NamedTuple):
    """What one layer of a model has in its cache.

    attends:          whether it has keys and values, or latents, of its own
    window:           tokens that a query sees, its own included; None: all
    attention_chunk:  tokens of a chunk, within which a query sees those before it; None: no chunks
    readers:          how many later layers attend to its keys and values, and have none of their own
    sparse:           whether a query sees no more than the keys that an indexer chose, of this layer or of one before
    indexer:          the family of the layer's own indexer; None: it has none
    state:            transformers' own layer for all else that it has: the state of a linear attention, a convolution
    """

    attends: bool
    window: int | None = None
    attention_chunk: int | None = None
    readers: int = 0
    state: Any = None
    sparse: bool = False
    indexer: str | None = None

    @property
    def kept(self) -> int | None:
        """The last tokens that are kept at least; None: all. Layers that read come when all new tokens are written."""
        return None if self.readers else self.window or self.attention_chunk


def layer_kinds(config: Any) -> list[LayerKind]:
    """Every layer that has a place in the model's cache. Raises UnsupportedError for other kinds of layer, and for
    families that a `TersekvCache` cannot serve whatever their layers.
    """
    _check_class(config)
    if getattr(config, "n_recurrent_loops", 1) > 1:  # the model gives its cache a copy of a layer for each loop
        raise UnsupportedError(
            f"config: want every layer of {config.model_type} once in a forward, got layers that run in loops; "
            f"{INSTEAD}"
        )
    try:
        layers = DynamicCache(config=config).layers
    except AttributeError as e:
        raise UnsupportedError(
            f"config: want the layers of a language model, got {type(config).__name__} of {config.model_type}, which "
            f"does not tell them ({e}); {INSTEAD}"
        ) from e
    names = list(getattr(config, "layer_types", None) or [])
    readers = _readers(config, names)
    kinds = [
        _kind(config, layer, names[i] if names else type(layer).__name__, i, readers.get(i, 0))
        for i, layer in enumerate(layers)
    ]
    if not any(kind.attends for kind in kinds):
        raise UnsupportedError(f"config: {config.model_type} keeps a state instead of keys and values; {INSTEAD}")
    return kinds


def _kind(config: Any, layer: Any, name: str, index: int, readers: int) -> LayerKind:
    # By type, not by isinstance: layers with more of their own are subclasses of these.
    found = type(layer)
    if found is LinearAttentionLayer or found in _EMPTY:
        return LayerKind(False, state=layer)
    if name == INDEXED and config.model_type in INDEXERS:
        types = getattr(config, "indexer_types", None)  # "shared": what an earlier layer chose
        own = types is None or types[index] == "full"
        return LayerKind(True, sparse=True, indexer=config.model_type if own else None)
    if found not in (DynamicLayer, DynamicSlidingWindowLayer, *_MIXED):
        raise UnsupportedError(
            f"config: want attention with full, sliding-window or chunked masks, or a state, in every layer of "
            f"{config.model_type}, got {name} in layer {index}; {INSTEAD}"
        )
    window, chunk = getattr(layer, "sliding_window", None), None
    if name == "chunked_attention" or (name == found.__name__ and getattr(config, "sliding_window", None) is None):
        window, chunk = None, window
    state = LinearAttentionLayer(number_of_states=layer.number_of_states) if found in _MIXED else None
    return LayerKind(True, window, chunk, readers, state)


def _readers(config: Any, names: list[str]) -> dict[int, int]:
    """How many layers attend to the keys and values of each layer that others share."""
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    if not shared and "reuse" not in (getattr(config, "kv_sharing_modes", None) or ()):
        return {}
    first = config.num_hidden_layers - shared
    lenders = {name: i for i, name in enumerate(names[:first])}  # the last one of each kind
    if not shared or not set(names[first:]) <= set(lenders):
        raise UnsupportedError(
            f"config: want keys and values of an earlier layer of the same kind in layers of {config.model_type} that "
            f"have none of their own, got layers that share them in another way; {INSTEAD}"
        )
    return {i: names[first:].count(name) for name, i in lenders.items() if name in names[first:]}


# Only the image tower of these goes through the interface; transformers looks for its name in the file alone.
_OWN_ATTENTION = ("git",)


def _check_class(config: Any) -> None:
    """Raises UnsupportedError for a family whose model cannot ask for the attention function, or has no attention."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    for kind in found if isinstance(found, tuple) else (found,):
        if kind is None:
            continue
        if getattr(kind, "_is_stateful", False) and not getattr(config, "layer_types", None):
            does = "keeps a state instead of keys and values"
        elif config.model_type in _OWN_ATTENTION or not kind._can_set_attn_implementation():
            does = "computes attention in its own code, past transformers' AttentionInterface"
        else:
            continue
        raise UnsupportedError(f"config: {kind.__name__} of {config.model_type} {does}; {INSTEAD}")
