"""index_query: rotates and quantizes an indexer's queries, and folds their scales into the weights of its heads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tersekv.formats import index_format

from .exact import without_grad_and_autocast
from .index_rows import quantize_index_rows_to_codes_and_scales_if_any, rope_hadamard_and_validity_of_tokens


def why_not(f: SimpleNamespace) -> str | None:
    return None


def configure(f: SimpleNamespace) -> None:
    return None


@without_grad_and_autocast
def run(call: Any, config: None) -> None:
    x, known = rope_hadamard_and_validity_of_tokens(call, call.q.float(), call.q.dtype)
    if known is not None:
        x = torch.where(known[:, None, None], x, 0.0)
    codes, scales = quantize_index_rows_to_codes_and_scales_if_any(x, index_format(call.format), x.shape[-1])
    call.q_out.copy_(codes)
    weights = x.new_ones(x.shape[:2]) if call.weights is None else call.weights.float()
    weights = weights * weights.new_full((), call.weight_scale)
    call.weights_out.copy_(weights if scales is None else weights * scales[..., 0])
