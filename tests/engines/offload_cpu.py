"""vLLM's offloading to the host's memory, where the device is the host: all of it is vLLM's own but the copy itself.

Streams and events are nothing here, and `copy` moves the bytes of each range that vLLM's worker computes.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_cpu  # noqa: F401 (before anything of vLLM)
from vllm.v1.kv_offload.base import CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

COPIED: list[tuple[int, int, int]] = []  # (from, to, bytes) of each copy


class OnDevice(torch.Tensor):
    """A tensor that vLLM's worker takes for a device's."""

    is_cuda = True


class Event:
    def __init__(self, **_: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class TorchWithEvents:
    """torch as vLLM's worker uses it: on CPUs vLLM puts a stand-in for events there, which cannot be asked."""

    Event = Event

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class HostSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> gpu_worker.CPUOffloadingWorker:
        if not self._worker:
            tensors = [
                CanonicalKVCacheTensor(t.tensor.as_subclass(OnDevice), t.page_size_bytes) for t in kv_caches.tensors
            ]
            self._worker = self.create_worker(CanonicalKVCaches(tensors, kv_caches.group_data_refs))
        return self._worker


def copy(source: int, target: int, nbytes: int) -> None:
    ctypes.memmove(target, source, nbytes)


def offload_on_cpus(monkeypatch: pytest.MonkeyPatch, copy: Any = copy) -> None:
    """From here on vLLM's worker copies at once, with `copy`."""
    stream = SimpleNamespace(wait_stream=lambda other: None, wait_event=lambda event: None)
    platform = SimpleNamespace(
        Stream=lambda: stream, current_stream=lambda: stream, stream=lambda s: nullcontext(), is_xpu=lambda: False,
        is_rocm=lambda: False, is_cuda_alike=lambda: False,
    )  # fmt: skip

    def swap(source: torch.Tensor, target: torch.Tensor, sizes: torch.Tensor, **_: Any) -> None:
        for each in zip(source.tolist(), target.tolist(), sizes.tolist(), strict=True):
            COPIED.append(each)
            copy(*each)

    COPIED.clear()
    monkeypatch.setattr(gpu_worker, "current_platform", platform)
    monkeypatch.setattr(gpu_worker, "_select_swap_blocks_fn", lambda *_: swap)
    monkeypatch.setattr(gpu_worker, "torch", TorchWithEvents())


def transfer_config(**more: Any) -> dict[str, Any]:
    extra = {"spec_name": "HostSpec", "spec_module_path": "offload_cpu", "cpu_bytes_to_use": 1 << 26, **more}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
