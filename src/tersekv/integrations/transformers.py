"""Hugging Face transformers over paged caches: importing this registers the attention function "tersekv".

    import tersekv.integrations.transformers as tersekv_hf

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tersekv")
    cache = tersekv_hf.TersekvCache(model.config, format="fp8_per_token_head")
    model.generate(**inputs, cache=cache)  # transformers before 5.24: past_key_values=cache

`TersekvCache` keeps the past; the attention function writes new tokens into its pages and attends to them: a prompt in
pieces of `chunk` tokens with `tersekv.prefill`, later tokens one by one and drafts together with `tersekv.decode`, and
all of them with `tersekv.mla_decode` where the model caches latents. Whoever attends sees what the cache holds, in the
prefill too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from ..errors import OutOfPagesError, UnsupportedError
from .transformers_cache import TersekvCache
from .transformers_cache_layers import ATTENTION, EAGER, TersekvLayer, handover
from .transformers_indexer import UNPADDED
from .transformers_layers import CACHE_ARGUMENT, INDEXED, INSTEAD
from .transformers_static import TersekvStaticCache
from .transformers_store import Rules, named

__all__ = ["ATTENTION", "TersekvCache", "TersekvLayer", "TersekvStaticCache", "attention", "padding"]

# What a model may ask for that no paged kernel computes.
_REFUSED = ("position_bias", "cu_seq_lens_q", "cu_seq_lens_k", "head_mask")
# Stands for every mask that is neither causal, nor a window, nor padding.
_OTHER = torch.ones(1, 1, 1, 1, dtype=torch.bool)


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The attention function of `attn_implementation="tersekv"`; transformers calls it right after `Cache.update`.

        query:           [B, Hq, T, D]
        key, value:      the new tokens, as `TersekvLayer.update` got them; latents are taken from there
        attention_mask:  what `padding` made
        options:         see `_attention`

    Returns ([B, T, Hq, Dv], None). No gradient flows. Raises RuntimeError without a `TersekvCache`, and
    UnsupportedError for what the kernels do not compute.
    """
    within = handover.compileable and torch.compiler.is_compiling()
    return (_attention if within else _outside)(module, query, key, value, attention_mask, **options)


# NOTE: a compiled model leaves its graph here and in `TersekvLayer.update`, and comes back after them.
@torch.compiler.disable(reason=EAGER)
def _outside(*args: Any, **options: Any) -> tuple[Tensor, None]:
    layer = handover.layer or handover.lender(args[2])
    try:
        return _attention(*args, **options)
    except BaseException:
        if layer is not None:
            layer.take_back()
        raise


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """See `attention`.

    scaling:                         softmax scale; None: 1 / sqrt(D)
    sliding_window, softcap, s_aux:  of the layer; s_aux are gpt-oss's sinks [Hq]
    indices:                         [B, T, n] positions of the keys that each row reads, as `TersekvLayer.choose` says
    """
    taken = handover.take()
    layer = taken or handover.lender(key)
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedError(
            f"{named(module)} is not causal, and a cache holds the past alone; where it is no part of the "
            "language model, choose attn_implementation={'text_config': 'tersekv'}"
        )
    if layer is None:
        raise RuntimeError(
            f"{CACHE_ARGUMENT}: want a TersekvCache with attn_implementation='tersekv', got another cache or none, "
            f"which gives {named(module)} {key.shape[2]} keys for {query.shape[2]} queries; pass "
            f"{CACHE_ARGUMENT}=TersekvCache(model.config, format=...), or call model.set_attn_implementation('sdpa') "
            "for every other cache (StaticCache, QuantizedCache, ...), as generate needs it of its assistant_model, "
            "and of the model itself for guidance_scale"
        )
    layer.check_brought(module, query, key, value)
    if dropout:
        raise UnsupportedError(f"dropout: want 0, since a quantised cache is for inference, got {dropout}")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        raise UnsupportedError(
            "requires_grad: want a forward under torch.no_grad(), or model.requires_grad_(False), since no gradient "
            "flows through a quantised cache, got a query, key or value that wants one"
        )
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise UnsupportedError(
                f"{name}: want None with attn_implementation='tersekv', got a value from {named(module)}; {INSTEAD}"
            )
    if attention_mask is not None and attention_mask.shape[-1] == UNPADDED.shape[-1]:
        attention_mask = None
    elif attention_mask is not None and _is_row(attention_mask, layer):
        attention_mask = attention_mask[:, 0, 0]
    elif attention_mask is not None and attention_mask.dim() != 2 and not _marks(attention_mask, query, layer):
        got = "another kind" if attention_mask is _OTHER else f"{list(attention_mask.shape)}"
        raise UnsupportedError(
            f"attention_mask: want [B, tokens], 0 for padding, since {named(module)} runs with causal, "
            f"sliding-window and chunked masks alone, got {got} (a mask of a shape of its own, blocks that see each "
            f"other, packed sequences); {INSTEAD}"
        )
    sinks = None if s_aux is None else s_aux.detach().to(torch.float32)
    chosen = None if indices is None else indices.flatten(0, 1)
    rules = Rules(scaling, sliding_window, float(softcap or 0.0), sinks, chosen)
    if taken is None:
        return layer.attend_again(query, value.shape[-1], rules, module), None
    return layer.attend(query, value.shape[-1], attention_mask, rules, module), None


def _is_row(mask: Tensor, layer: TersekvLayer) -> bool:
    """Whether a mask is [B, 1, 1, past + T], as `padding` makes it where a model cuts masks along their queries."""
    told = mask is not _OTHER and not layer.is_compileable and mask.dtype == torch.bool
    return told and mask.dim() == 4 and mask.shape[1:3] == (1, 1)


def _marks(mask: Tensor, query: Tensor, layer: TersekvLayer) -> bool:
    """Whether a mask tells new tokens from padding, as `padding` makes it for a static cache."""
    want = query.shape[0], 1, query.shape[2], 1
    return layer.is_compileable and mask is not _OTHER and tuple(mask.shape) == want


def padding(
    *, attention_mask: Tensor | None = None, allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False, use_vmap: bool = False, q_length: int = 0, kv_length: int = 0,
    q_offset: int | Tensor = 0, config: Any = None, mask_function: Any = None, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """The mask function of `attn_implementation="tersekv"`: where there is padding, and nothing else.

    The kernels know causality, windows and chunks themselves. Returns attention_mask [B, past + T] as it is, or
    [B, 1, 1, past + T] where layers share keys and values, or choose keys by an indexer; for a static cache, whose
    offset is a tensor, that of the new tokens [B, 1, T, 1], which keeps its shape from token to token; for any other
    mask (blocks of an image that see each other, packed sequences, a prefix) one that `attention` refuses, since models
    make masks for encoders, too, that then nobody attends to.
    """
    static = isinstance(q_offset, Tensor)
    # For one new token and a static cache transformers wants a mask in any case.
    sparse = INDEXED in (getattr(config, "layer_types", None) or ())  # whose models want a mask in any case, too
    causal = sparse and mask_function is causal_mask_function
    allowed = allow_is_causal_skip or causal or (static and q_length == 1 and not use_vmap)
    if not allowed or allow_is_bidirectional_skip:
        return _OTHER
    if attention_mask is None:
        return UNPADDED if sparse else None
    if not static:
        # Layers that read the keys of others may attend with the last queries alone, and cut the mask for them.
        cut = sparse or getattr(config, "num_kv_shared_layers", None)
        return attention_mask[:, None, None] if cut else attention_mask
    if attention_mask.shape[1] > kv_length:
        raise OutOfPagesError(
            f"max_tokens: want at least {attention_mask.shape[1]} in TersekvStaticCache, prompt and new tokens with "
            f"their padding, got {kv_length}"
        )
    return attention_mask[:, None, -q_length:, None]


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, padding)
