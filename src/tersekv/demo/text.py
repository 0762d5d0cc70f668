"""Bytes as tokens: the shipped held-out text, a model's loss on a text, greedy generation."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from .models import DemoModel

HELDOUT_PATH = Path(__file__).with_name("heldout.txt")


def encode(text: str, device: torch.device | str = "cpu") -> Tensor:
    """[N] int64, one token a UTF-8 byte."""
    return torch.tensor(list(text.encode("utf-8")), dtype=torch.int64, device=device)


def decode(tokens: Tensor) -> str:
    """Text of byte tokens [N]; bytes that are no UTF-8 become U+FFFD."""
    return bytes(tokens.tolist()).decode("utf-8", errors="replace")


def heldout_text() -> str:
    """Python documentation that no demo model has seen (see NOTICE.txt)."""
    return HELDOUT_PATH.read_text("utf-8")


@torch.inference_mode()
def bits_per_byte(model: DemoModel, tokens: Tensor, context: int | None = None, batch: int = 4) -> float:
    """Dense loss over tokens [N], cut into windows of `context` (default: the trained one) without a past.

    Every byte is predicted once at most; the tail that fills no window is left out.
    """
    context = context or model.config.train_context
    windows = tokens.unfold(0, context + 1, context)  # [W, context + 1], neighbours share one token
    nats = 0.0
    for chunk in windows.split(batch):
        logits = model(chunk[:, :-1]).float()
        nats += F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten(), reduction="sum").item()
    return nats / (windows.shape[0] * context * math.log(2))


@torch.inference_mode()
def continued(prompt: Tensor, num_tokens: int, step: Callable[[Tensor], Tensor]) -> Tensor:
    """Greedy continuation [num_tokens] of prompt [T].

    step(new tokens [t]) -> logits [t, vocab]: it sees the prompt, then one token a call, and remembers them itself.
    """
    new, out = prompt, []
    for _ in range(num_tokens):
        new = step(new)[-1].argmax(-1, keepdim=True)
        out.append(new)
    return torch.cat(out) if out else prompt[:0]
