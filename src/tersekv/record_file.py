"""Files of pages: a safetensors header with checksums, and bytes that go to the host and come back.

What a record of pages says is in `records`; here is how it is written, and what makes a file one.

A checksum is the sum of page i's times B^(i + 1), a page's that of its 64-bit words times A^(j + 1), modulo 2^64: the
device works it out, no word can change alone, and chunks may be of any size.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
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
    complete. The metadata get a checksum of their own."""
    if path is not None and not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: want a path or None, got {type(path).__name__}")
    metadata = metadata | {"metadata": _metadata_sum(metadata)}
    empty = {entry.name: "0" * 16 for entry in entries}
    start = len(_header(entries, metadata, empty))
    pinned = any(entry.source.device.type == "cuda" for entry in entries)
    record = torch.empty(start + _nbytes(entries), dtype=torch.uint8, pin_memory=pinned, device="cpu")
    sums = _read(entries, record[start:])
    header = _header(entries, metadata, dict(zip(empty, sums, strict=True)))
    record[:start] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    if path is None:
        return record
    write_whole(path, record.numpy().data)
    return None


def write_whole(path: str | os.PathLike, data: bytes | memoryview) -> None:
    """Write a file under a name that no other writer has, then rename it: a file that is there is whole."""
    unfinished = Path(f"{os.fspath(path)}.{token_hex(8)}.unfinished")
    try:
        with open(unfinished, "xb") as file:
            file.write(data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _metadata_sum(metadata: dict[str, Any]) -> str:
    """Of all but the two entries that hold checksums."""
    summed = {name: text for name, text in metadata.items() if name not in ("metadata", "checksums")}
    return f"{zlib.crc32(json.dumps(summed, sort_keys=True).encode()):08x}"


class Record:
    """A record's header and bytes, each entry checked as it is taken. name: how errors name the record."""

    def __init__(self, name: str, data: Tensor) -> None:
        self._name, self._data = name, data
        if len(data) < 8:
            self.fail("header", "a safetensors header", f"{len(data)} bytes")
        length = int.from_bytes(data[:8].numpy().tobytes(), "little")
        self._start = 8 + length
        if length > min(len(data) - 8, _MOST_HEADER):
            self.fail("header", "a safetensors header", f"{len(data)} bytes, the header alone {length}")
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
        """The metadata of a record of this kind and version, which pass their checksum."""
        found = self._metadata
        if not isinstance(found, dict) or found.get("tersekv") != kind:
            got = repr(found["tersekv"]) if isinstance(found, dict) and "tersekv" in found else "another's file"
            self.fail("tersekv", repr(kind), got)
        if found.get("metadata") != _metadata_sum(found):
            self.fail("metadata", f"the checksum {_metadata_sum(found)}", found.get("metadata"))
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
            self.fail("tensors", f"{nbytes} bytes behind the header", len(body))
        return body

    def compare_checksums(self, metadata: dict[str, Any], sums: Checksums) -> None:
        """Waits for the device."""
        stored = self._json("checksums", metadata.get("checksums"))
        for name, got in sums.spelt().items():
            if stored.get(name) != got:
                self.fail(name, f"bytes of the checksum {stored.get(name)}", got)


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


class _Piece(NamedTuple):
    """Pages of an entry, and where their bytes lie; an entry that is no pages counts as one."""

    entry: Entry
    first: int
    last: int
    where: slice


def _count(entry: Entry) -> int:
    return 1 if entry.pages is None else entry.shape[0]


def _chunks(entries: Iterable[Entry]) -> Iterator[tuple[slice, list[_Piece]]]:
    """What is on its way at a time: pieces that follow each other, and where the bytes of all of them lie."""
    chunk: list[_Piece] = []
    for entry in entries:
        size, last = (entry.end - entry.begin) // max(_count(entry), 1), 0
        while last < _count(entry):
            first, begin = last, entry.begin + last * size
            if chunk and (chunk[-1].where.stop != begin or begin + size > chunk[0].where.start + _CHUNK):
                yield slice(chunk[0].where.start, chunk[-1].where.stop), chunk
                chunk = []
            free = (chunk[0].where.start if chunk else begin) + _CHUNK - begin
            last = min(_count(entry), first + max(1, free // max(size, 1)))
            chunk.append(_Piece(entry, first, last, slice(begin, entry.begin + last * size)))
    if chunk:
        yield slice(chunk[0].where.start, chunk[-1].where.stop), chunk


def _difference(entry: str, ours: Any, theirs: Any) -> tuple[str, Any, Any]:
    """Where two parts of the metadata differ first, and what stands there."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        pairs = [(key, ours[key], theirs[key]) for key in ours]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = [(str(i), x, y) for i, (x, y) in enumerate(zip(ours, theirs, strict=True))]
    elif isinstance(ours, dict) and isinstance(theirs, dict):
        pairs = [(key, ours.get(key, "none"), theirs.get(key, "none")) for key in sorted({*ours, *theirs}, key=str)]
    elif isinstance(ours, list) and isinstance(theirs, list):
        return f"number of {entry}", len(ours), len(theirs)
    else:
        return entry, ours, theirs
    key, x, y = next((key, x, y) for key, x, y in pairs if x != y)
    return _difference(f"{entry}.{key}", x, y)


class Checksums:
    """The checksums of entries, summed up where their bytes are."""

    def __init__(self, entries: Iterable[Entry], device: torch.device) -> None:
        self._rows: dict[str, tuple[int, int]] = {}  # of an entry in the sums of its pages, a matrix for each number
        counts: dict[int, int] = {}
        for entry in entries:
            n = _count(entry)
            self._rows[entry.name] = n, counts.get(n, 0)
            counts[n] = counts.get(n, 0) + 1
        self._device = device
        self._of_pages = {n: torch.zeros(rows, n, dtype=torch.int64, device=device) for n, rows in counts.items()}

    def add(self, pieces: Sequence[_Piece], data: Tensor) -> None:
        """data: the bytes of all of them, 1-D. Whole entries of one size that follow each other are summed at once."""
        first, begin = 0, pieces[0].where.start
        for i, piece in enumerate(pieces):
            if i + 1 < len(pieces) and self._go_on(piece, pieces[i + 1]):
                continue
            run = pieces[first : i + 1]
            self._add(run, data[run[0].where.start - begin : piece.where.stop - begin])
            first = i + 1

    def _go_on(self, piece: _Piece, after: _Piece) -> bool:
        (n, i), (m, j) = (self._rows[p.entry.name] for p in (piece, after))
        whole = all(p.last - p.first == n for p in (piece, after))
        sizes = {p.entry.end - p.entry.begin for p in (piece, after)}
        return whole and (n, i + 1) == (m, j) and len(sizes) == 1

    def _add(self, run: Sequence[_Piece], data: Tensor) -> None:
        (n, row), first, last = self._rows[run[0].entry.name], run[0].first, run[0].last
        rows = data.view(len(run) * (last - first), -1)
        if rows.shape[1] % 8:
            rows = F.pad(rows, (0, -rows.shape[1] % 8))
        elif rows.storage_offset() % 8:
            rows = rows.clone()
        words, flat = rows.view(torch.int64), self._of_pages[n].view(-1)
        at = row * n + first
        torch.sum(words * _powers(_A, words.shape[1], self._device), 1, out=flat[at : at + len(rows)])

    def spelt(self) -> dict[str, str]:
        """As text, by name, in the order of the entries. Waits for the device."""
        sums = {n: (x * _powers(_B, n, self._device)).sum(1).tolist() for n, x in self._of_pages.items()}
        return {name: f"{sums[n][i] % (1 << 64):016x}" for name, (n, i) in self._rows.items()}


@lru_cache(16)
def _powers(base: int, n: int, device: torch.device) -> Tensor:
    """base^1 to base^n. Kept: records of a cache are of the same sizes."""
    with torch.inference_mode(False):
        return torch.full((n,), base, dtype=torch.int64, device=device).cumprod(0)


def _read(entries: Sequence[Entry], out: Tensor) -> list[str]:
    """Copy the bytes of all entries to `out` on the host. Returns their checksums."""
    sums: dict[str, str] = {}
    for device in {entry.source.device for entry in entries}:
        sums |= _read_from(device, [entry for entry in entries if entry.source.device == device], out)
    return [sums[entry.name] for entry in entries]


def _read_from(device: torch.device, entries: Sequence[Entry], out: Tensor) -> dict[str, str]:
    # Of few pieces first: while their bytes are on their way the host has time for those of many.
    chunks, sums = sorted(_chunks(entries), key=lambda of: len(of[1])), Checksums(entries, device)
    # Two in turn: memory that a stream still copies could not be had again without waiting.
    most = max((whole.stop - whole.start for whole, _ in chunks), default=0)
    buffers = torch.empty(2, -(-most // _ALIGNED) * _ALIGNED, dtype=torch.uint8, device=device)
    pages = page_indices(entries)

    def gather(half: int, whole: slice, chunk: list[_Piece]) -> None:
        for piece in chunk:
            entry, begin = piece.entry, piece.where.start - whole.start
            data = buffers[half, begin : piece.where.stop - whole.start]
            if entry.pages is None:
                data.copy_(_bytes(entry.source))
            else:
                x, listed = _indexed(entry.source, begin), pages[id(entry.pages)][piece.first : piece.last]
                torch.index_select(x, 0, listed, out=data.view(x.dtype).view(-1, *x.shape[1:]))
        sums.add(chunk, buffers[half, : whole.stop - whole.start])

    def away(half: int, whole: slice, chunk: list[_Piece]) -> None:
        out[whole].copy_(buffers[half, : whole.stop - whole.start], non_blocking=True)

    _pipelined(device, chunks, gather, away)
    return sums.spelt()


def read(entries: Sequence[Entry], body: Tensor, device: torch.device) -> tuple[list[Tensor], Checksums]:
    """The bytes of entries that follow each other, where the cache is, and their checksums: the call does not wait."""
    start, end = entries[0].begin, entries[-1].end
    there = torch.empty(end - start, dtype=torch.uint8, device=device)
    sums, pinned = Checksums(entries, device), device.type != "cuda" or body.is_pinned()

    def back(half: int, whole: slice, chunk: list[_Piece]) -> None:
        data = body[whole]
        if not pinned:  # PyTorch has it again when the copy is done
            data = data.pin_memory()
        there[whole.start - start : whole.stop - start].copy_(data, non_blocking=True)

    def add(half: int, whole: slice, chunk: list[_Piece]) -> None:
        sums.add(chunk, there[whole.start - start : whole.stop - start])

    _pipelined(device, sorted(_chunks(entries), key=lambda of: len(of[1])), back, add, in_halves=False)
    return [there[e.begin - start : e.end - start] for e in entries], sums


def puts(entries: Sequence[Entry], stored: Sequence[Tensor], pages: Mapping[int, Tensor]) -> list[Callable[[], object]]:
    """Calls that make the bytes of entries their pages, each named once, or all of each; pages: `page_indices`."""
    found: list[Callable[[], object]] = []
    for entry, data in zip(entries, stored, strict=True):
        if entry.pages is None:
            found.append(partial(entry.source.copy_, data.view(entry.source.dtype).view(entry.shape)))
        else:
            x = _indexed(entry.source, int(data.storage_offset()))
            found.append(partial(x.index_copy_, 0, pages[id(entry.pages)], data.view(x.dtype).view(-1, *x.shape[1:])))
    return found


def page_indices(entries: Iterable[Entry]) -> dict[int, Tensor]:
    """The entries' pages where they lie, by the list's identity: most entries share one. May wait for the device."""
    found: dict[int, Tensor] = {}
    for entry in entries:
        if entry.pages is not None and id(entry.pages) not in found:
            packed = array("q", entry.pages)
            listed = torch.frombuffer(packed, dtype=torch.int64) if packed else torch.empty(0, dtype=torch.int64)
            found[id(entry.pages)] = listed.to(entry.source.device)
    return found


def same(entry: Entry, stored: Tensor) -> bool:
    """Whether the bytes of an entry are what it holds."""
    return torch.equal(stored, _bytes(entry.source))


def _indexed(x: Tensor, begin: int) -> Tensor:
    """The same bytes in the widest elements that a tensor's strides allow, and their other place, which begins at this
    byte of an aligned buffer: rows are indexed element by element."""
    for dtype in _WORDS:
        n = dtype.itemsize // x.itemsize
        places = (begin // x.itemsize, x.shape[-1], x.storage_offset(), *x.stride()[:-1])
        if n and not any(place % n for place in places) and x.stride(-1) == 1:
            return x.view(dtype)
    return x


def _pipelined(
    device: torch.device, chunks: Sequence[tuple], first: Callable, second: Callable, in_halves: bool = True
) -> None:
    """`first(half, *chunk)`, then `second` of the same, for each chunk. On a GPU each has a stream of its own, so that
    one chunk's second runs beside the next one's first; in_halves: what was the second's, a half of two buffers, is
    free before the first takes it again. The host waits for neither: the current stream does, at the end."""
    if device.type != "cuda":
        for i, chunk in enumerate(chunks):
            first(i % 2, *chunk)
            second(i % 2, *chunk)
        return
    current, streams = torch.cuda.current_stream(device), _streams(device)
    for stream in streams:
        stream.wait_stream(current)
    free: list[Any] = [None, None]  # events
    try:
        for i, chunk in enumerate(chunks):
            if in_halves and free[i % 2] is not None:
                streams[0].wait_event(free[i % 2])
            with torch.cuda.stream(streams[0]):
                first(i % 2, *chunk)
            streams[1].wait_stream(streams[0])
            with torch.cuda.stream(streams[1]):
                second(i % 2, *chunk)
            free[i % 2] = streams[1].record_event()
    finally:  # nothing that they use is made anew before
        for stream in streams:
            current.wait_stream(stream)


@lru_cache
def _streams(device: torch.device) -> tuple[Any, Any]:
    """Kept: memory stays with the stream that it was made on."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)
