"""Whether operators are recorded now, and not only run."""

from __future__ import annotations

import torch

_modes = torch._C._len_torch_dispatch_stack
_TRACERS = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)


def tracing() -> bool:
    """Whether operators are recorded, and tensors may have no memory: torch.compile, make_fx, FakeTensorMode."""
    if torch.compiler.is_compiling():
        return True
    return _modes() > 0 and any(torch._C._get_dispatch_mode(m) for m in _TRACERS)
