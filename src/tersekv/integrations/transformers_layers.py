"""What layers a model of Hugging Face transformers has, as its config tells, and which families cannot be served."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationMixin
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..errors import UnsupportedError

# What transformers calls the cache in `generate` and in a model's forward: 5.24 renamed it, and warns of the old name.
CACHE_ARGUMENT = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
INSTEAD = "run it with attn_implementation='sdpa' or 'eager' and one of transformers' own caches"


def layer_windows(config: Any) -> list[int | None]:
    """The sliding window of each layer, None where there is none. Raises UnsupportedError for other kinds of layer, and
    for families that a `TersekvCache` cannot serve whatever their layers.
    """
    _check_class(config)
    kinds = getattr(config, "layer_types", None) or []
    if "chunked_attention" in kinds or (not kinds and getattr(config, "attention_chunk_size", None)):
        raise UnsupportedError(
            f"config: want full or sliding-window attention in every layer of {config.model_type}, got chunked "
            f"attention; {INSTEAD}"
        )
    if getattr(config, "num_kv_shared_layers", None):
        raise UnsupportedError(
            f"config: want keys and values of its own in every layer of {config.model_type}, got layers that share "
            f"them; {INSTEAD}"
        )
    if getattr(config, "n_recurrent_loops", 1) > 1:  # the model gives its cache a copy of a layer for each loop
        raise UnsupportedError(
            f"config: want every layer of {config.model_type} once in a forward, got layers that run in loops; "
            f"{INSTEAD}"
        )
    windows: list[int | None] = []
    try:
        layers = DynamicCache(config=config).layers
    except AttributeError as e:
        raise UnsupportedError(
            f"config: want the layers of a language model, got {type(config).__name__} of {config.model_type}, which "
            f"does not tell them ({e}); {INSTEAD}"
        ) from e
    for i, layer in enumerate(layers):
        # By type, not by isinstance: layers with a state of their own are subclasses of these.
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedError(
                f"config: want full or sliding-window attention in every layer of {config.model_type}, got "
                f"{kinds[i] if kinds else type(layer).__name__} in layer {i}; {INSTEAD}"
            )
        windows.append(getattr(layer, "sliding_window", None))
    return windows


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
