"""A mode in which reading a tensor's value on the host, or a shape that depends on values, is an error."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "item", "is_nonzero")


class NoHostReads(TorchDispatchMode):
    """On a GPU each of these would wait for the device; here they can be seen without one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in _READS or name.startswith("_unique"):
            raise AssertionError(f"{name} reads a device value on the host")
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            assert not masks, f"{name} with a mask has a shape that depends on values"
        return func(*args, **(kwargs or {}))
