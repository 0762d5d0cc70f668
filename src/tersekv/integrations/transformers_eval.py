"""A Hugging Face model as `tersekv eval` measures it: tokens in, logits out, the past in a `TersekvCache`."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from ..errors import UnsupportedError
from ..formats import KV_FORMATS, LATENT_FORMATS, MAX_HEAD_DIM_V
from .transformers import ATTENTION, TersekvCache
from .transformers_layers import CACHE_ARGUMENT, layer_kinds

_CONTEXT = 2048
_SENTENCE = re.compile(r"(?<=[.!?]) +(?=[A-Z])")
_CHARACTERS = 32  # of a text for each token that is wanted: what comes after them is not tokenised


class NotAModelError(ValueError):
    """The name or folder holds no causal language model that can be measured."""


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Whatever a part of a model is wrong with, as a NotAModelError of one sentence that names the part."""
    try:
        yield
    except UnsupportedError as e:
        raise NotAModelError(str(e)) from e
    # Files of others fail in the ways of their formats: transformers has no error of its own for what it cannot read.
    except Exception as e:
        said = " ".join(str(e).split()) or "no reason given"
        kind = "" if isinstance(e, (OSError, ValueError, ImportError)) else f"{type(e).__name__}: "
        raise NotAModelError(f"{what}: {kind}{_SENTENCE.split(said)[0]}") from e


class HuggingFaceModel:
    """A causal language model and its tokenizer, from a folder or by its name on the hub.

        dtype:    "auto": the checkpoint's own; float32 on a CPU; bfloat16 for a float32 checkpoint on a GPU
        context:  tokens of a window of the text; None: 2048, or as many as the model has positions for

    The weights are loaded when the model first runs. Raises NotAModelError.
    """

    unit = "token"

    def __init__(self, name: str, device: str = "cpu", dtype: str = "auto", context: int | None = None) -> None:
        self.name, self._device = name.rstrip("/").split("/")[-1], torch.device(device)
        self._path = name
        if name.startswith((".", "/", "~")) and not Path(name).is_dir():  # no name on the hub begins so
            raise NotAModelError("want a folder, or a model's name on the hub; there is no such folder")
        with _reading("no config of a model that can run"):
            config = AutoConfig.from_pretrained(name)
            if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
                raise ValueError(f"want a causal language model, got {config.model_type}")
            self._config = config.get_text_config(decoder=True)
            layer_kinds(self._config)
            self._latent = getattr(self._config, "kv_lora_rank", None) is not None
            row = self._row()
        with _reading("no tokenizer that can be read"):
            self._tokenizer = AutoTokenizer.from_pretrained(name)
        if row % 8 or (row > MAX_HEAD_DIM_V and not self._latent):
            size = "kv_lora_rank" if self._latent else "head_dim"
            raise NotAModelError(f"want a {size} that is a multiple of 8, at most {MAX_HEAD_DIM_V}, got {row}")
        self.dtype = _dtype(dtype, getattr(config, "dtype", None), self._device)
        most = self.positions = getattr(self._config, "max_position_embeddings", None) or _CONTEXT
        if context is not None and context > most:
            raise NotAModelError(f"want a context of at most {most} tokens, the model's positions, got {context}")
        self.context = context or min(_CONTEXT, most)
        self.title = f"{self.name}, {'latent (MLA)' if self._latent else 'K/V'} cache, {str(self.dtype)[6:]} model"

    @property
    def formats(self) -> tuple[str, ...]:
        """Those that can hold rows of the model's size."""
        table = LATENT_FORMATS if self._latent else KV_FORMATS
        return tuple(name for name, f in table.items() if self._row() % (f.scale_block or 8) == 0)

    def _row(self) -> int:
        """Numbers of a row: of a head, or of a latent."""
        c = self._config
        size = c.kv_lora_rank if self._latent else getattr(c, "head_dim", None)
        return size or c.hidden_size // c.num_attention_heads

    @cached_property
    def model(self) -> Any:
        """The weights, in eval mode on the device, with the paged attention."""
        bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # `tersekv eval` draws its own
        try:
            with _reading("no weights that can be read"):
                model = AutoModelForCausalLM.from_pretrained(
                    self._path, attn_implementation=ATTENTION, dtype=self.dtype
                )
        finally:
            if bars:
                logging.enable_progress_bar()
        return model.to(self._device).eval().requires_grad_(False)

    @property
    def num_layers(self) -> int:
        return sum(kind.attends for kind in layer_kinds(self._config))

    def bytes_of(self, tokens: int) -> int:
        """The bytes of UTF-8 text that `encode` looks at for so many tokens."""
        return 4 * _CHARACTERS * tokens

    def encode(self, text: str, most: int) -> Tensor:
        """At least `most` tokens of a text, if it has as many: [N] int64."""
        ids = self._tokenizer(text[: most * _CHARACTERS])["input_ids"]
        largest, known = max(ids, default=0), self._config.vocab_size
        if largest >= known:
            raise NotAModelError(f"want a tokenizer of the model's own {known} tokens, got one that writes {largest}")
        return torch.tensor(ids, dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True)

    def prompt(self, tokens: Tensor, most: int) -> Tensor:
        """The first `most` tokens."""
        return tokens[:most]

    def runner(
        self, format: str, requests: int, longest: int, page_size: int, scales: Sequence[tuple[float, ...]] | None,
        options: Mapping[str, Any] | None = None,
    ) -> PagedModel:  # fmt: skip
        """The model over new caches, one for each request. options: of these, in place of their format."""
        options = {"page_size": page_size, "max_tokens": longest, **(options or {"format": format})}
        if scales is not None:
            names = ("kv_scale",) if self._latent else ("k_scale", "v_scale")
            options.update(zip(names, (list(s) for s in zip(*scales, strict=True)), strict=True))
        return PagedModel(self.model, options)


class PagedModel:
    """A model whose requests have a `TersekvCache` each. `step` runs new tokens of some requests."""

    def __init__(self, model: Any, options: Mapping[str, Any]) -> None:
        """options: of the caches"""
        self._model, self._options = model, options
        self._caches: dict[Hashable, TersekvCache] = {}
        self._spare: list[TersekvCache] = []
        self.device: torch.device = model.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token takes in all layers; 0 before the first step."""
        return max((c.bytes_per_token for c in (*self._caches.values(), *self._spare)), default=0)

    def step(self, new: Mapping[Hashable, Tensor]) -> Tensor:
        """new: request -> tokens [t]; an unknown request starts. Returns logits [sum of t, vocab], in order."""
        out = []
        for request, tokens in new.items():
            if request not in self._caches:
                self._caches[request] = self._spare.pop() if self._spare else self._fresh()
            ids = tokens[None].to(self.device)
            out.append(self._model(ids, **{CACHE_ARGUMENT: self._caches[request]}).logits[0])
        return torch.cat(out)

    def free(self, request: Hashable) -> None:
        """Forget a request; its pages serve the next one."""
        cache = self._caches.pop(request)
        cache.reset()
        self._spare.append(cache)

    def rows(self) -> list[tuple[Tensor, ...]]:
        """Of a 16-bit cache: the rows that its pages hold of each of a layer's tensors, of all requests so far."""
        caches = *self._caches.values(), *self._spare
        each = [[layer.store.rows() for layer in c.paged if layer.store is not None] for c in caches]
        return [tuple(map(torch.cat, zip(*layer, strict=True))) for layer in zip(*each, strict=True)]

    def _fresh(self) -> TersekvCache:
        return TersekvCache(self._model.config, **self._options)


def _dtype(wanted: str, stored: Any, device: torch.device) -> torch.dtype:
    """The dtype to run in. The GPU kernels take no fp32 queries; on a CPU fp32 is the fastest, and the most exact."""
    if wanted != "auto":
        return getattr(torch, wanted)
    if device.type == "cpu":
        return torch.float32
    known = getattr(torch, stored, None) if isinstance(stored, str) else stored
    return known if known in (torch.bfloat16, torch.float16) else torch.bfloat16
