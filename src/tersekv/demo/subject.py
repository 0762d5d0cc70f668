"""What is measured: a model, the formats of its cache, and how its text is cut. The built-in models are subjects."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from . import text
from .attend import RUNNERS, Scales
from .models import DemoModel, load

TITLES = {"llama": "Llama-style model, K/V cache", "deepseek": "DeepSeek-style model, latent (MLA) cache"}


class Runner(Protocol):
    """A model over a paged cache of one format."""

    @property
    def device(self) -> torch.device: ...

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token takes in all layers; known after the first step."""
        ...

    def step(self, new: Mapping[Hashable, Tensor]) -> Tensor:
        """new: request -> tokens [t]; an unknown request starts. Returns logits [sum of t, vocab], in order."""
        ...

    def free(self, request: Hashable) -> None:
        """Forget a request."""
        ...

    def rows(self) -> list[tuple[Tensor, ...]]:
        """Of a 16-bit cache: the rows [T, …] that its pages hold of each of a layer's tensors, freed requests' too."""
        ...


class Subject(Protocol):
    """A model that can be run over a paged cache of several formats."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def unit(self) -> str:
        """What a token is: "byte" or "token"."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        ...

    @property
    def formats(self) -> tuple[str, ...]: ...

    @property
    def num_layers(self) -> int:
        """Of the cache."""
        ...

    @property
    def context(self) -> int:
        """Tokens of a window of the text."""
        ...

    @property
    def positions(self) -> int:
        """Tokens that a sequence may have."""
        ...

    def runner(
        self, format: str, requests: int, longest: int, page_size: int, scales: Scales | None,
        options: Mapping[str, Any] | None = None,
    ) -> Runner:  # fmt: skip
        """The model over a new cache with room for `requests` of up to `longest` tokens. options: of the cache, in
        place of its format."""
        ...

    def prompt(self, tokens: Tensor, most: int) -> Tensor:
        """The beginning of a text, up to a good place to stop."""
        ...

    def decode(self, tokens: Tensor) -> str: ...


class BuiltIn:
    """One of the two models of this package; loaded when it is first run."""

    unit = "byte"

    def __init__(self, name: str, device: str = "cpu") -> None:
        self.name, self.title, self.device = name, TITLES[name], device
        self.formats = RUNNERS[name].formats

    @property
    def dtype(self) -> torch.dtype:
        """The GPU kernels take no fp32 queries; fp16 rounds less than bf16."""
        return torch.float32 if torch.device(self.device).type == "cpu" else torch.float16

    @cached_property
    def model(self) -> DemoModel:
        return load(self.name, self.device, self.dtype)

    @property
    def num_layers(self) -> int:
        return self.model.config.num_layers

    @property
    def context(self) -> int:
        return self.model.config.train_context

    @property
    def positions(self) -> int:
        return self.model.config.max_pos

    def runner(
        self, format: str, requests: int, longest: int, page_size: int, scales: Scales | None,
        options: Mapping[str, Any] | None = None,
    ) -> Runner:  # fmt: skip
        make: Any = RUNNERS[self.name]
        more = () if options is None else (options,)
        return make(self.model, format, requests * -(-longest // page_size), page_size, scales, *more)

    def prompt(self, tokens: Tensor, most: int) -> Tensor:
        """Up to a blank if there is one."""
        head = tokens[:most]
        blanks = (head == ord(" ")).nonzero().flatten()
        return head[: int(blanks[-1]) + 1] if len(blanks) else head

    def decode(self, tokens: Tensor) -> str:
        return text.decode(tokens)
