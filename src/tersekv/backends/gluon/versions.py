"""Gluon names that differ between versions of Triton, for kernels. What differs on the host is in
`backends/host/versions.py`.

Each is chosen by what the module has, never by a version: so newer Triton versions are tried too.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# Barrier of all threads of the CTA, or of the partition. So named from 3.7 on.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# TMA copies, and cp.async copies. So named from 3.8 on; 3.9 keeps the old names, and they raise.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
async_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
# (memory, dtype, shape, layout): a method with this name from 3.9 on.
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
