"""The attention of llama.cpp over its quantised caches, called in its own library: a peer of `cpu_decode.py`.

The library is that of llama-cpp-python, which pip compiles for the machine (`pip install llama-cpp-python`, with cmake
and a C++ compiler; its `llama_cpp/lib` holds `libggml-base.so` and `libggml-cpu.so`), or of a folder that is named.
Rows of a head lie side by side, so that it reads memory in order; pages it has none.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_bool, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# Its types: number, bytes and values of a block. q8_0 and q4_0 have an fp16 scale for 32 values.
TYPES = {"f16": (1, 2, 1), "q8_0": (8, 34, 32), "q4_0": (2, 18, 32)}
ROOM = 1 << 20  # of a context: what describes tensors and the graph


class _Init(Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


class _Plan(Structure):
    _fields_ = [
        ("work_size", c_size_t), ("work_data", c_void_p), ("n_threads", c_int), ("threadpool", c_void_p),
        ("abort_callback", c_void_p), ("abort_data", c_void_p), ("use_ref", c_bool), ("more", c_int64 * 8),
    ]  # fmt: skip


class Quantised(NamedTuple):
    type: str
    call: Callable[[], Tensor]  # [Hq, D] fp32, in memory that the next call writes again
    k: Tensor  # [L, H, D] fp32: what its cache holds
    v: Tensor
    bytes: int


class Ggml:
    """Its functions, from `libggml-base` and `libggml-cpu` of a folder."""

    def __init__(self, folder: Path) -> None:
        self.base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        self.cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"))
        self.cpu.ggml_cpu_init()
        pointer, number = c_void_p, c_int64
        for name, result, *arguments in (
            ("init", pointer, _Init), ("free", None, pointer), ("get_data", pointer, pointer),
            ("new_tensor_4d", pointer, pointer, c_int, number, number, number, number),
            ("flash_attn_ext", pointer, pointer, pointer, pointer, pointer, pointer, c_float, c_float, c_float),
            ("new_graph", pointer, pointer), ("build_forward_expand", None, pointer, pointer),
            ("quantize_chunk", c_size_t, c_int, pointer, pointer, number, number, number, pointer),
        ):  # fmt: skip
            f = getattr(self.base, f"ggml_{name}")
            f.restype, f.argtypes = result, arguments
        self.cpu.ggml_graph_plan.restype = _Plan
        self.cpu.ggml_graph_plan.argtypes = [pointer, c_int, pointer]
        self.cpu.ggml_graph_compute.argtypes = [pointer, POINTER(_Plan)]

    def attention(self, type: str, q: Tensor, k: Tensor, v: Tensor, threads: int) -> Quantised:
        """Of q [Hq, D] over k and v [L, H, D]."""
        number, block_bytes, block = TYPES[type]
        (length, heads, dim), base = k.shape, self.base
        size = length * heads * dim // block * block_bytes
        context = base.ggml_init(_Init(2 * size + q.numel() * 16 + ROOM, None, False))
        query = base.ggml_new_tensor_4d(context, 0, dim, 1, q.shape[0], 1)
        wide = q.float().contiguous()
        ctypes.memmove(base.ggml_get_data(query), wide.data_ptr(), 4 * wide.numel())
        tensors, held = [], []
        for x in (k, v):
            tensor = base.ggml_new_tensor_4d(context, number, dim, length, heads, 1)
            rows, at = x.transpose(0, 1).contiguous(), base.ggml_get_data(tensor)
            base.ggml_quantize_chunk(number, rows.data_ptr(), at, 0, length * heads, dim, None)
            codes = torch.frombuffer((ctypes.c_uint8 * size).from_address(at), dtype=torch.uint8)
            held.append(dequantised(type, codes).view(heads, length, dim).transpose(0, 1))
            tensors.append(tensor)
        out = base.ggml_flash_attn_ext(context, query, *tensors, None, dim**-0.5, 0.0, 0.0)
        graph = base.ggml_new_graph(context)
        base.ggml_build_forward_expand(graph, out)
        plan = self.cpu.ggml_graph_plan(graph, threads, None)
        work = ctypes.create_string_buffer(max(plan.work_size, 1))
        plan.work_data = ctypes.addressof(work)
        floats = (c_float * q.numel()).from_address(base.ggml_get_data(out))
        result = torch.frombuffer(floats, dtype=torch.float32).view(q.shape)

        def call(_keep: object = work) -> Tensor:
            if self.cpu.ggml_graph_compute(graph, byref(plan)) != 0:
                raise RuntimeError("ggml_graph_compute failed")
            return result

        return Quantised(type, call, *held, 2 * size)


def dequantised(type: str, codes: Tensor) -> Tensor:
    if type == "f16":
        return codes.view(torch.float16).float()
    blocks = codes.view(-1, TYPES[type][1])
    scale, rest = blocks[:, :2].contiguous().view(torch.float16).float(), blocks[:, 2:]
    if type == "q8_0":
        return rest.contiguous().view(torch.int8).float() * scale
    return (torch.cat([rest & 15, rest >> 4], -1).float() - 8) * scale


def found(folder: str | None) -> Ggml | None:
    """The library of a folder, or of llama-cpp-python; None: there is none."""
    spec = importlib.util.find_spec("llama_cpp")
    if folder is None and (spec is None or spec.origin is None):
        return None
    return Ggml(Path(folder) if folder else Path(spec.origin).parent / "lib")  # type: ignore[union-attr, arg-type]
