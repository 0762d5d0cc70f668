"""The state of layers beside keys and values: of linear attention, Mamba and convolutions, mixed with attention or not.

It stays in transformers' own layers, unquantised; here it follows what happens to the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from ..errors import UnsupportedError


class States:
    """All layers of a cache that have a state.

    in_place: keep the tensors that the first forward made, for compiled models; the batch keeps its size
    """

    def __init__(self, layers: Sequence[Any], in_place: bool) -> None:
        self._in_place = in_place
        self._layers = [x for x in layers if isinstance(x, LinearAttentionCacheLayerMixin)]

    def tensors(self) -> list[Tensor]:
        """All that lives from token to token."""
        return [x for _, _, x in self._each()]

    def reset(self) -> None:
        """Begin anew."""
        if not self._in_place:
            return self.release()
        for layer in self._layers:
            LinearAttentionCacheLayerMixin.reset(layer)

    def release(self) -> None:
        """Begin anew, with a batch of any size."""
        for layer in self._layers:
            recorded = layer.record_past
            LinearAttentionLayer.__init__(layer, number_of_states=layer.number_of_states)
            layer.record_past = recorded

    def picked(self, rows: Tensor) -> list[Tensor]:
        """Each of `tensors` with row i as it is in row rows[i]; nothing is changed."""
        return [x.index_select(0, rows.to(x.device)) for x in self.tensors()]

    def put(self, tensors: Sequence[Tensor]) -> None:
        """What `picked` returned becomes the state."""
        for (held, i, x), new in zip(self._each(), tensors, strict=True):
            if self._in_place:
                x.copy_(new)
            else:
                held[i] = new

    def check_kept(self, what: str) -> None:
        """Raises UnsupportedError where the model that ran keeps its state itself, out of a cache's reach."""
        if self._layers and not self.tensors():
            raise UnsupportedError(
                f"{what}: want a model that leaves its state to its cache, got one that keeps it in its own modules, "
                "where it can be neither reordered nor taken back"
            )

    def check_crop(self, tokens: int, left: int) -> None:
        """Raises UnsupportedError unless every state can go back by `tokens` and leave `left` tokens."""
        self.check_kept("crop")
        for layer in self._layers:
            if any(x is not None for x in layer.recurrent_states.values()):
                raise UnsupportedError(
                    "crop: want layers that can go back, got a recurrent state, which holds all tokens at once; "
                    "run without drafts, or crop all tokens"
                )
            for i, x in layer.conv_states.items():
                if x is not None and (
                    not layer.record_past or x.shape[-1] - tokens < min(layer.conv_kernel_size[i], left)
                ):
                    raise UnsupportedError(
                        f"crop: want activate_past_recording() before the tokens that go, as generate calls it for "
                        f"drafts, got a convolution that keeps {x.shape[-1]} columns, of which {tokens} are to go"
                    )

    def crop(self, tokens: int) -> None:
        """Go back by so many tokens, where `check_crop` lets it; 0: keep no more than the next token needs."""
        for layer in self._layers:
            if layer.record_past and any(x is not None for x in layer.conv_states.values()):
                LinearAttentionCacheLayerMixin.crop(layer, -tokens)

    def told(self) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        """What `restore` makes the states from: of each layer its words, and tensors by name."""
        words, tensors = [], {}
        for i, layer in enumerate(self._layers):
            own = {f"state.{i}.{kind}.{j}": x for kind, j, x in _parts(layer)}
            tensors.update(own)
            kernels = [layer.conv_kernel_size[j] for j in range(layer.number_of_states)]
            words.append({"tensors": list(own), "kernels": kernels, "records": layer.record_past})
        return words, tensors

    def restore(self, words: Sequence[dict[str, Any]], tensors: dict[str, Tensor]) -> None:
        """The states as they were told."""
        for layer, word in zip(self._layers, words, strict=True):
            layer.record_past = word["records"]
            for name in word["tensors"]:
                _, _, kind, number = name.split(".")
                j, x = int(number), tensors[name]
                if kind == "conv":
                    LinearAttentionLayer.lazy_initialization(
                        layer, conv_states=x, state_idx=j, conv_kernel_size=word["kernels"][j]
                    )
                    layer.conv_states[j] = x
                else:
                    LinearAttentionLayer.lazy_initialization(layer, recurrent_states=x, state_idx=j)
                    layer.recurrent_states[j] = x
                layer.has_previous_state[j] = True

    def mark(self) -> None:
        """Tell compiled models that what is written into stays where it is."""
        for x in self.tensors():
            torch._dynamo.mark_static_address(x)

    def _each(self) -> list[tuple[dict[int, Tensor | None], int, Tensor]]:
        """(where it is held, under which number, tensor) of each part of a state."""
        held = [states for layer in self._layers for states in (layer.conv_states, layer.recurrent_states)]
        return [(states, i, x) for states in held for i, x in states.items() if x is not None]


def _parts(layer: Any) -> list[tuple[str, int, Tensor]]:
    """(kind, number, tensor) of each part of a layer's state."""
    held = (("conv", layer.conv_states), ("recurrent", layer.recurrent_states))
    return [(kind, j, x) for kind, states in held for j, x in states.items() if x is not None]
