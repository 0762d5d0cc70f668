"""fp32 tensors and words in a file of the safetensors format, which any reader of that format takes."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_LENGTH = struct.Struct("<Q")
_MOST = 100_000_000  # bytes of a header


def write(path: str | os.PathLike, tensors: Mapping[str, Tensor], words: Mapping[str, str]) -> None:
    """A file with these fp32 tensors; it comes into being whole, or not at all."""
    header: dict[str, Any] = {"__metadata__": dict(words)}
    parts, end = [], 0
    for name, x in tensors.items():
        data = bytes(x.detach().to("cpu").contiguous().view(-1).view(torch.uint8).tolist())  # NumPy need not be there
        header[name] = {"dtype": "F32", "shape": list(x.shape), "data_offsets": [end, end + len(data)]}
        parts.append(data)
        end += len(data)
    told = json.dumps(header).encode()
    told += b" " * (-len(told) % 8)  # so that the tensors begin at a multiple of 8
    part = f"{os.fspath(path)}.{os.getpid()}"
    with open(part, "wb") as file:
        file.write(b"".join((_LENGTH.pack(len(told)), told, *parts)))
    os.replace(part, path)


def read(path: str | os.PathLike) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The fp32 tensors of a file, on the CPU, and its words. Raises ValueError for a file that is none of these."""
    with open(path, "rb") as file:
        data = file.read()
    try:
        (size,) = _LENGTH.unpack_from(data)
        if size > min(len(data), _MOST):
            raise ValueError("a header that is longer than the file")
        header = json.loads(data[_LENGTH.size : _LENGTH.size + size])
        words, body = header.pop("__metadata__", {}), data[_LENGTH.size + size :]
        return {name: _tensor(body, **entry) for name, entry in header.items()}, words
    except (struct.error, ValueError, TypeError, AttributeError, RuntimeError) as e:
        raise ValueError(f"{os.fspath(path)}: want a safetensors file of float32 tensors, got {e}") from None


def _tensor(body: bytes, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    begin, end = data_offsets
    if dtype != "F32" or not 0 <= begin <= end <= len(body):
        raise ValueError(f"{dtype} from byte {begin} to {end} of {len(body)}")
    flat = torch.frombuffer(bytearray(body[begin:end]), dtype=torch.float32) if end > begin else torch.empty(0)
    return flat.view(shape)
