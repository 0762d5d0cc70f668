"""Files of pages: a safetensors header with checksums, and bytes that go to the host and come back.

What a record of pages says is in `records`; here is how it is written, and what makes a file one.

A checksum is the sum of page i's times B^(i + 1), a page's that of its 64-bit words times A^(j + 1), modulo 2^64: the
device works it out, no word can change alone, and chunks may be of any size.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_PAGES = ("k", "v", "k_scale_cache", "v_scale_cache", "ckv", "kpe", "ckv_scale_cache", "scale")
_DTYPES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.int8: "I8", torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip
_WORDS = torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8  # by size
_A, _B = 6364136223846793005, 2862933555777941757  # odd, so that powers have inverses
_CHUNK = 1 << 24  # bytes on their way at a time
_ALIGNED = 64  # bytes that the data begin at a multiple of
_MOST_HEADER = 100_000_000  # safetensors' own limit


class Entry(NamedTuple):
    """A tensor of a record, and where its bytes lie behind the header."""

    name: str
    source: Tensor  # of the cache
    pages: Sequence[int] | None  # of its first dimension; None: all of it, as a whole
    shape: tuple[int, ...]
    begin: int
    end: int


def page_tensors(layer: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors [P, ...] of a layer of a paged cache: all that its pages hold."""
    named = ((name, getattr(layer, name, None)) for name in _PAGES)
    return ((name, x) for name, x in named if isinstance(x, Tensor) and x.shape[-1])


def placed(found: Iterable[tuple[str, Tensor, Sequence[int] | None]]) -> list[Entry]:
    """(name, source, pages) in the order of a record's bytes. Wide elements come first, so that each begins where its
    elements may."""
    entries, end = [], 0
    for name, x, pages in sorted(found, key=lambda of: -of[1].itemsize):
        shape = tuple(x.shape) if pages is None else (len(pages), *x.shape[1:])
        begin, end = end, end + torch.Size(shape).numel() * x.itemsize
        entries.append(Entry(name, x, pages, shape, begin, end))
    return entries


def write(entries: Sequence[Entry], metadata: dict[str, str], path: str | os.PathLike | None) -> Tensor | None:
    """A record in the host's memory, pinned if something of it lies on a GPU, or in a file, which appears when it is
    complete."""
    if path is not None and not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: want a path or None, got {type(path).__name__}")
    empty = {entry.name: "0" * 16 for entry in entries}
    start = len(_header(entries, metadata, empty))
    pinned = any(entry.source.device.type == "cuda" for entry in entries)
    record = torch.empty(start + _nbytes(entries), dtype=torch.uint8, pin_memory=pinned, device="cpu")
    sums = _read(entries, record[start:])
    header = _header(entries, metadata, dict(zip(empty, sums, strict=True)))
    record[:start] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    if path is None:
        return record
    # Under a name that no other writer has first: a file that is there is whole.
    unfinished = Path(f"{os.fspath(path)}.{token_hex(8)}.unfinished")
    try:
        with open(unfinished, "xb") as file:
            file.write(record.numpy().data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return None


class Record:
    """A record's header and bytes, each entry checked as it is taken. name: how errors name the record."""

    def __init__(self, name: str, data: Tensor) -> None:
        self._name, self._data = name, data
        if len(data) < 8:
            self.fail("record", "a safetensors header", f"{len(data)} bytes")
        length = int.from_bytes(data[:8].numpy().tobytes(), "little")
        self._start = 8 + length
        if length > min(len(data) - 8, _MOST_HEADER):
            self.fail("record", "a safetensors header", f"{len(data)} bytes, the header alone {length}")
        header = self._json("header", data[8 : self._start].numpy().tobytes().decode("utf-8", "replace"))
        self._metadata, self._tensors = header.pop("__metadata__", {}), header

    def fail(self, entry: str, want: str, got: Any) -> None:
        raise ValueError(f"{self._name}: {entry}: want {want}, got {got}")

    def _json(self, entry: str, text: Any, kind: type = dict) -> Any:
        found: Any = None
        try:
            found = json.loads(text)
        except (ValueError, TypeError, RecursionError) as e:
            self.fail(entry, "JSON", e)
        if not isinstance(found, kind):
            self.fail(entry, f"a {kind.__name__} in JSON", type(found).__name__)
        return found

    def metadata(self, kind: str) -> dict[str, Any]:
        found = self._metadata
        if not isinstance(found, dict) or found.get("tersekv") != kind:
            got = repr(found["tersekv"]) if isinstance(found, dict) and "tersekv" in found else "another's file"
            self.fail("tersekv", repr(kind), got)
        return found

    def told(self, found: dict[str, Any], entry: str, kind: type = object) -> Any:
        """An entry of the metadata, from JSON."""
        if entry not in found:
            self.fail(entry, "an entry", "none")
        return self._json(entry, found[entry], kind)

    def compare_metadata(self, found: dict[str, Any], want: dict[str, str], whose: str) -> None:
        """Each wanted entry, as JSON; whose: what has it so."""
        for entry, text in want.items():
            ours, theirs = json.loads(text), self.told(found, entry)
            if ours != theirs:
                where, x, y = _difference(entry, ours, theirs)
                self.fail(where, f"{x!r} as {whose}", repr(y))

    def compare_entries(self, entries: Sequence[Entry]) -> None:
        want = {e.name: _described(e) for e in entries}
        for name in sorted(self._tensors.keys() | want.keys()):
            if self._tensors.get(name) != want.get(name):
                self.fail(name, str(want.get(name, "no tensor")), self._tensors.get(name, "none"))

    def entry(self, name: str) -> Entry:
        """A whole tensor as the header has it, its source empty, on the CPU."""
        found = self._tensors.get(name)
        if found is None:
            self.fail(name, "a tensor", "none")
        kinds, room = {text: dtype for dtype, text in _DTYPES.items()}, len(self.data)
        try:
            dtype, shape, (begin, end) = kinds[found["dtype"]], tuple(found["shape"]), found["data_offsets"]
            whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
            fits = whole and end <= room and end - begin == prod(shape) * dtype.itemsize
        except (KeyError, TypeError, ValueError):
            fits = False
        if not fits:
            self.fail(name, f"dtype, shape and data_offsets of a tensor in {room} bytes", found)
        return Entry(name, torch.empty(shape, dtype=dtype, device="cpu"), None, shape, begin, end)

    @property
    def data(self) -> Tensor:
        """The bytes behind the header."""
        body = self._data[self._start :]
        return body if body.data_ptr() % 8 == 0 else body.clone()

    def number(self, metadata: dict[str, Any], entry: str, most: int) -> int:
        text = str(metadata.get(entry))
        if not text.isdecimal() or int(text) > most:
            self.fail(entry, f"a number up to {most}", text)
        return int(text)

    def body(self, entries: Sequence[Entry]) -> Tensor:
        """The bytes of all entries."""
        body, nbytes = self.data, _nbytes(entries)
        if len(body) != nbytes:
            self.fail("record", f"{nbytes} bytes behind the header", len(body))
        return body

    def compare_checksums(self, metadata: dict[str, Any], entries: Sequence[Entry], sums: Sequence[str]) -> None:
        stored = self._json("checksums", metadata.get("checksums"))
        for entry, got in zip(entries, sums, strict=True):
            if stored.get(entry.name) != got:
                self.fail(entry.name, f"bytes of the checksum {stored.get(entry.name)}", got)


def _nbytes(entries: Sequence[Entry]) -> int:
    return entries[-1].end


def _described(entry: Entry) -> dict[str, Any]:
    """As safetensors' header has it."""
    return {"dtype": _DTYPES[entry.source.dtype], "shape": [*entry.shape], "data_offsets": [entry.begin, entry.end]}


def _header(entries: Sequence[Entry], metadata: dict[str, str], checksums: dict[str, str]) -> bytes:
    """The bytes before the tensors' own."""
    described: dict[str, Any] = {"__metadata__": metadata | {"checksums": json.dumps(checksums)}}
    text = json.dumps(described | {entry.name: _described(entry) for entry in entries}).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def bytes_of(record: Any) -> tuple[str, Tensor]:
    """A record's name in errors, and its bytes; those of a file are mapped."""
    if isinstance(record, Tensor):
        if record.dtype != torch.uint8 or record.dim() != 1 or record.device.type != "cpu":
            got = f"{list(record.shape)} {record.dtype} on {record.device}"
            raise ValueError(f"record: want [bytes] uint8 on the CPU, got {got}")
        return "record", record.contiguous()
    if isinstance(record, (bytes, bytearray, memoryview)):
        return "record", torch.frombuffer(bytearray(record), dtype=torch.uint8) if len(record) else torch.empty(
            0, dtype=torch.uint8
        )
    if not isinstance(record, (str, os.PathLike)):
        raise TypeError(f"record: want a path, a Tensor or bytes, got {type(record).__name__}")
    if os.path.isdir(record):
        raise ValueError(f"{os.fspath(record)}: want a record that export_pages wrote, got a folder")
    with open(record, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return os.fspath(record), torch.empty(0, dtype=torch.uint8)
        whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return os.fspath(record), torch.frombuffer(whole, dtype=torch.uint8)


def _bytes(x: Tensor) -> Tensor:
    """All bytes of a tensor in the order of its elements, 1-D."""
    return x.contiguous().view(-1).view(torch.uint8)


def _chunks(entry: Entry) -> Iterator[tuple[int, int, slice]]:
    """First and last page of each chunk, and where its bytes lie; an entry that is no pages counts as one."""
    count = entry.shape[0] if entry.pages is not None else 1
    size = (entry.end - entry.begin) // max(count, 1)
    step = max(1, _CHUNK // max(size, 1))
    for first in range(0, count, step):
        last = min(first + step, count)
        yield first, last, slice(entry.begin + first * size, entry.begin + last * size)


def _difference(entry: str, ours: Any, theirs: Any) -> tuple[str, Any, Any]:
    """Where two parts of the metadata differ first, and what stands there."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        pairs = [(key, ours[key], theirs[key]) for key in ours]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = [(str(i), x, y) for i, (x, y) in enumerate(zip(ours, theirs, strict=True))]
    else:
        return entry, ours, theirs
    key, x, y = next((key, x, y) for key, x, y in pairs if x != y)
    return _difference(f"{entry}.{key}", x, y)


class _Checksum:
    """The checksum of an entry, summed up where its bytes are."""

    def __init__(self, entry: Entry, device: torch.device, powers: dict[tuple[int, int], Tensor]) -> None:
        """powers: kept from entry to entry, as most are of one size"""
        count = entry.shape[0] if entry.pages is not None else 1
        words = -(-(entry.end - entry.begin) // max(count, 1) // 8)
        for key in ((_A, words), (_B, count)):
            if key not in powers:
                powers[key] = torch.full(key[1:], key[0], dtype=torch.int64, device=device).cumprod(0)
        self._of_words, self._of_pages = powers[_A, words], powers[_B, count]
        self.total = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, data: Tensor, first: int, last: int) -> None:
        """data: the bytes of pages first to last, 1-D."""
        rows = data.view(last - first, -1)
        if rows.shape[1] % 8:
            rows = F.pad(rows, (0, -rows.shape[1] % 8))
        elif rows.storage_offset() % 8:
            rows = rows.clone()
        rows = rows.view(torch.int64)
        self.total += ((rows * self._of_words).sum(1) * self._of_pages[first:last]).sum()


def _spelt(sums: Sequence[Tensor]) -> list[str]:
    """Checksums as text, once the device has them."""
    return [f"{n % (1 << 64):016x}" for n in (torch.stack([*sums]).tolist() if sums else [])]


def _read(entries: Sequence[Entry], out: Tensor) -> list[str]:
    """Copy the bytes of all entries to `out` on the host. Returns their checksums."""
    streams, sums = {device: _Streams(device) for device in {entry.source.device for entry in entries}}, []
    powers: dict[Any, dict[tuple[int, int], Tensor]] = {device: {} for device in streams}
    for entry in entries:
        device = entry.source.device
        at = streams[device]
        with at.compute():
            checksum = _Checksum(entry, device, powers[device])
            pages = None if entry.pages is None else torch.tensor(entry.pages, dtype=torch.int64, device=device)
        for first, last, where in _chunks(entry):
            with at.compute():
                data = _bytes(entry.source if pages is None else _indexed(entry.source)[pages[first:last]])
                checksum.add(data, first, last)
            with at.copy(data):
                out[where].copy_(data, non_blocking=True)
        sums.append(checksum.total)
    for at in streams.values():
        at.finish()
    return _spelt(sums)


def read(entries: Sequence[Entry], body: Tensor, device: torch.device) -> tuple[list[Tensor], list[str]]:
    """The bytes of entries that follow each other, where the cache is, and their checksums."""
    start, end = entries[0].begin, entries[-1].end
    there = body[start:end]
    if device.type != "cpu":
        there = torch.empty(end - start, dtype=torch.uint8, device=device)
    streams, sums, powers = _Streams(device), [], {}  # type: ignore[var-annotated]
    for entry in entries:
        with streams.compute():
            checksum = _Checksum(entry, device, powers)
        for first, last, where in _chunks(entry):
            here = slice(where.start - start, where.stop - start)
            if device.type != "cpu":
                piece = body[where]
                if device.type == "cuda" and not piece.is_pinned():  # the last chunk is still on its way
                    piece = piece.pin_memory()
                with streams.copy(there, after_compute=False):
                    there[here].copy_(piece, non_blocking=True)
            with streams.compute(after_copy=True):
                checksum.add(there[here], first, last)
        sums.append(checksum.total)
    streams.finish()
    return [there[entry.begin - start : entry.end - start] for entry in entries], _spelt(sums)


def put(entry: Entry, stored: Tensor) -> None:
    """The bytes of an entry become its pages, or all of it."""
    if entry.pages is None:
        entry.source.copy_(stored.view(entry.source.dtype).view(entry.shape))
        return
    x = _indexed(entry.source)
    if stored.storage_offset() % x.itemsize:
        stored = stored.clone()
    x[torch.tensor(entry.pages, dtype=torch.int64, device=x.device)] = stored.view(x.dtype).view(-1, *x.shape[1:])


def same(entry: Entry, stored: Tensor) -> bool:
    """Whether the bytes of an entry are what it holds."""
    return torch.equal(stored, _bytes(entry.source))


def _indexed(x: Tensor) -> Tensor:
    """The same bytes in the widest elements that a tensor's strides allow: rows are indexed element by element."""
    for dtype in _WORDS:
        n = dtype.itemsize // x.itemsize
        if n and not any(s % n for s in (x.shape[-1], x.storage_offset(), *x.stride()[:-1])) and x.stride(-1) == 1:
            return x.view(dtype)
    return x


class _Streams:
    """On a GPU two streams: one computes, one copies, each chunk when the other has done with it; at most two chunks
    are on their way. Elsewhere everything runs in order."""

    def __init__(self, device: torch.device) -> None:
        self._current: Any = None
        if device.type == "cuda":
            self._current = torch.cuda.current_stream(device)
            self._compute, self._copy = torch.cuda.Stream(device), torch.cuda.Stream(device)
            for stream in (self._compute, self._copy):
                stream.wait_stream(self._current)
            self._copied: list[Any] = []

    @contextmanager
    def compute(self, after_copy: bool = False) -> Iterator[None]:
        if self._current is None:
            yield
            return
        if after_copy:
            self._compute.wait_stream(self._copy)
        elif len(self._copied) > 1:
            self._compute.wait_event(self._copied[-2])
        with torch.cuda.stream(self._compute):
            yield

    @contextmanager
    def copy(self, data: Tensor, after_compute: bool = True) -> Iterator[None]:
        """data: what the device reads or writes, which has to outlive the copy."""
        if self._current is None:
            yield
            return
        if after_compute:
            self._copy.wait_stream(self._compute)
        with torch.cuda.stream(self._copy):
            yield
        data.record_stream(self._copy)
        self._copied = [*self._copied[-1:], self._copy.record_event()]

    def finish(self) -> None:
        """Wait for both."""
        if self._current is not None:
            self._current.wait_stream(self._compute)
            self._current.wait_stream(self._copy)
            self._copy.synchronize()
