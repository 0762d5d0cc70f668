"""What SGLang's hierarchical cache asks of a device and a CPU lacks: streams, events, and memory that CUDA has pinned.

A CPU does all in order, so that these do nothing. Import this before a test starts an engine.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import sglang_cpu  # noqa: F401 (before anything of SGLang)
import torch
from sglang.srt.mem_cache.pool_host import common, mla
from torch import Tensor


class _Done:
    """A stream, or an event: all of it has happened."""

    def __init__(self, *args: Any, **options: Any) -> None:
        if options.get("enable_timing"):
            raise NotImplementedError

    def record(self, *args: Any) -> None:
        pass

    wait = synchronize = wait_stream = wait_event = record_event = record

    def query(self) -> bool:
        return True


def copy_slots(src_layers: list[Tensor], dst_layers: list[Tensor], src_indices: Tensor, dst_indices: Tensor, **_: Any):
    """SGLang's `direct` copies, which latents take: slots of some layers."""
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


torch.cpu.Event = torch.cpu.Stream = _Done
torch.cpu.stream = lambda stream: nullcontext()
torch.cpu.current_stream = lambda *args: _Done()
common._cuda_host_register = lambda *args, **options: None
mla.transfer_kv_direct = copy_slots
