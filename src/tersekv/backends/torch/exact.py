"""The wrapper of every `run` of this backend, which makes it compute in exactly the dtypes it names."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def without_grad_and_autocast(run: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Returns `run` without gradients and without autocast, which would round operands of products to 16 bits."""

    @wraps(run)
    def run_without_grad_and_autocast(call: Any, config: Any) -> None:
        fields = call if isinstance(call, tuple) else vars(call).values()
        kind = next(x for x in fields if isinstance(x, Tensor)).device.type
        with torch.no_grad():
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                with torch.autocast(kind, enabled=False):
                    run(call, config)
            else:
                run(call, config)

    return run_without_grad_and_autocast
