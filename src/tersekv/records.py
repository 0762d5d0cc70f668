"""Pages that leave the device: `export_pages` writes a record that describes itself, `import_pages` reads it back.

A record is a safetensors file, or the same bytes in a host buffer. Metadata: `tersekv`, what it is; `sizes`, of the
pages; `layout`, the order of a page's rows, whatever it is in a cache; `num_tokens`; `layers`, of each its format and
attributes as in `saved`; `checksums`. Tensors: `0.k` [n, S, H, …], the pages of layer 0 in the order in which they were
named, and so on; `0.k_signs`, its attributes.

A checksum is the sum of page i's times B^(i + 1), a page's that of its 64-bit words times A^(j + 1), modulo 2^64: the
device works it out, no word can change alone, and chunks may be of any size.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import saved
from .cache import PagedKVCache, PagedLatentCache
from .scalars import as_int, as_non_negative_int

Cache = PagedKVCache | PagedLatentCache
_KINDS = {PagedKVCache: "pages of a PagedKVCache, 1", PagedLatentCache: "pages of a PagedLatentCache, 1"}
_SIZES = {
    PagedKVCache: ("num_kv_heads", "head_dim", "head_dim_v"),
    PagedLatentCache: ("kv_lora_rank", "qk_rope_head_dim"),
}
_ATTRIBUTES = {PagedKVCache: saved.NAMES, PagedLatentCache: ("kv_scale",)}
_PAGES = ("k", "v", "k_scale_cache", "v_scale_cache", "ckv", "kpe", "ckv_scale_cache")
_DTYPES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip
_WORDS = torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8  # by size
_A, _B = 6364136223846793005, 2862933555777941757  # odd, so that powers have inverses
_CHUNK = 1 << 24  # bytes on their way at a time
_ALIGNED = 64  # bytes that the data begin at a multiple of
_MOST_HEADER = 100_000_000  # safetensors' own limit


class _Entry(NamedTuple):
    """A tensor of a record, and where its bytes lie behind the header."""

    name: str
    source: Tensor  # of the cache
    pages: bool  # its first dimension is indexed by the pages
    shape: tuple[int, ...]
    begin: int
    end: int


@torch.no_grad()
def export_pages(
    cache: Cache,
    pages: Tensor | Sequence[int],
    path: str | os.PathLike | None = None,
    *,
    num_tokens: int | None = None,
) -> Tensor | None:
    """Whole pages of all layers, scales and attributes included, as a record in the host's memory, or in a file.

        >>> record = tersekv.export_pages(cache, [3, 0], num_tokens=20)
        >>> tersekv.import_pages(cache, [1, 2], record)
        20

        pages:       pages of the cache in the order of their tokens, a list of ints or an integer tensor
        path:        of the file; it appears when it is complete. None: the record is returned
        num_tokens:  that the pages hold; None: every slot. The record keeps the number, and every slot

    Returns [bytes] uint8 on the CPU, in pinned memory if the cache lies on a GPU, or None. A record is a safetensors
    file, which its library and `mmap` read too. On a GPU copies run on a stream of their own, chunk by chunk, beside
    what gathers the next chunk; the call waits for them. Raises ValueError for a page outside the cache and for a
    number of tokens that the pages do not hold, TypeError for what is no cache or no pages; OSError: no place to write.
    """
    listed = _page_list(cache, pages)
    tokens = len(listed) * cache.page_size if num_tokens is None else as_non_negative_int("num_tokens", num_tokens)
    if tokens > len(listed) * cache.page_size:
        raise ValueError(f"num_tokens: want at most {len(listed) * cache.page_size}, what the pages hold, got {tokens}")
    entries, words = _entries(cache, len(listed))
    metadata = _metadata(cache, len(listed), tokens, words)
    empty = {entry.name: "0" * 16 for entry in entries}
    start = len(_header(entries, metadata, empty))
    record = torch.empty(
        start + _nbytes(entries), dtype=torch.uint8, pin_memory=cache.device.type == "cuda", device="cpu"
    )
    sums = _read_pages(entries, listed, record[start:], cache.device)
    header = _header(entries, metadata, dict(zip(empty, sums, strict=True)))
    record[:start] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    if path is None:
        return record
    # Under another name first: a file that is there is whole.
    unfinished = Path(f"{os.fspath(path)}.{os.getpid()}.unfinished")
    try:
        with open(unfinished, "wb") as file:
            file.write(record.numpy().data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return None


@torch.no_grad()
def import_pages(
    cache: Cache, pages: Tensor | Sequence[int], record: str | os.PathLike | Tensor | bytes | bytearray | memoryview
) -> int:
    """Write the pages of a record into pages of a cache, bit by bit as they were exported. Returns their `num_tokens`.

        >>> tersekv.export_pages(cache, [3, 0], "prompt.safetensors")
        >>> tersekv.import_pages(cache, [1, 2], "prompt.safetensors")
        32

        pages:   of the cache, each once, as many as the record has
        record:  a path, or what `export_pages` returned, or its bytes

    The cache has the record's formats, sizes, scales of the tensor and attributes; its layout and number of pages are
    its own. Everything is checked before anything is written, so on a GPU the record lies there once more meanwhile.
    Raises ValueError for a torn or foreign record, for one of another cache, and for a checksum that differs, with the
    record's name and the entry; for a page outside the cache or named twice. TypeError for what is none of these.
    """
    listed = _page_list(cache, pages)
    if len({*listed}) < len(listed):
        twice = next(page for i, page in enumerate(listed) if page in listed[:i])
        raise ValueError(f"pages: want each page once, got {twice} again")
    name, data = _bytes_of(record)
    file = _Record(name, data)
    metadata = file.metadata(_KINDS[type(cache)])
    entries, words = _entries(cache, len(listed))
    file.compare_metadata(metadata, _metadata(cache, len(listed), 0, words))
    file.compare_entries(entries)
    tokens = file.number(metadata, "num_tokens", len(listed) * cache.page_size)
    body = file.body(_nbytes(entries))
    there, sums = _on_device(entries, body, cache.device)
    file.compare_checksums(metadata, entries, sums)
    stored = [(entry, there[entry.begin : entry.end]) for entry in entries]
    for entry, data in stored:
        if not entry.pages and not torch.equal(data, _bytes(entry.source)):
            file.fail(entry.name, "the values that the cache has", "others")
    at = torch.tensor(listed, dtype=torch.int64, device=cache.device)
    for entry, data in stored:
        if entry.pages:
            _write_pages(entry, at, data)
    return tokens


class _Record:
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

    def compare_metadata(self, found: dict[str, Any], want: dict[str, str]) -> None:
        """What of a cache is named in the metadata."""
        for entry in ("sizes", "layout", "layers"):
            if entry not in found:
                self.fail(entry, "an entry", "none")
            ours, theirs = json.loads(want[entry]), self._json(entry, found[entry], object)
            if ours != theirs:
                where, x, y = _difference(entry, ours, theirs)
                self.fail(where, f"{x!r} as the cache and the pages named have", repr(y))

    def compare_entries(self, entries: Sequence[_Entry]) -> None:
        want = {e.name: _described(e) for e in entries}
        for name in sorted(self._tensors.keys() | want.keys()):
            if self._tensors.get(name) != want.get(name):
                self.fail(name, str(want.get(name, "no tensor")), self._tensors.get(name, "none"))

    def number(self, metadata: dict[str, Any], entry: str, most: int) -> int:
        text = str(metadata.get(entry))
        if not text.isdecimal() or int(text) > most:
            self.fail(entry, f"a number up to {most}", text)
        return int(text)

    def body(self, nbytes: int) -> Tensor:
        body = self._data[self._start :]
        if len(body) != nbytes:
            self.fail("record", f"{nbytes} bytes behind the header", len(body))
        return body if body.data_ptr() % 8 == 0 else body.clone()

    def compare_checksums(self, metadata: dict[str, Any], entries: Sequence[_Entry], sums: Sequence[str]) -> None:
        stored = self._json("checksums", metadata.get("checksums"))
        for entry, got in zip(entries, sums, strict=True):
            if stored.get(entry.name) != got:
                self.fail(entry.name, f"bytes of the checksum {stored.get(entry.name)}", got)


def _page_list(cache: Cache, pages: Tensor | Sequence[int]) -> list[int]:
    """Pages as ints, each inside the cache."""
    if not isinstance(cache, (PagedKVCache, PagedLatentCache)):
        raise TypeError(f"cache: want PagedKVCache or PagedLatentCache, got {type(cache).__name__}")
    if isinstance(pages, Tensor):
        if pages.dim() != 1 or pages.is_floating_point():
            raise TypeError(
                f"pages: want a list of ints or an integer Tensor [n], got {list(pages.shape)} {pages.dtype}"
            )
        pages = pages.tolist()
    if not isinstance(pages, Sequence) or isinstance(pages, str):
        raise TypeError(f"pages: want a list of ints or an integer Tensor [n], got {type(pages).__name__}")
    listed, num_pages = [as_int("pages", page) for page in pages], cache.num_pages
    for i, page in enumerate(listed):
        if not 0 <= page < num_pages:
            raise ValueError(f"pages: want pages in [0, {num_pages}), got {page} at {i}")
    return listed


def _entries(cache: Cache, num_pages: int) -> tuple[list[_Entry], list[dict[str, Any]]]:
    """The tensors of a record in the order of their bytes, and what it says of each layer. Wide elements come first, so
    that each begins where its elements may."""
    words, attributes = saved.words(cache.layers, _ATTRIBUTES[type(cache)])
    found = [(name, x, False, tuple(x.shape)) for name, x in attributes.items()]
    for i, layer in enumerate(cache.layers):
        for name, x in _page_tensors(layer):
            found.append((f"{i}.{name}", x, True, (num_pages, *x.shape[1:])))
    entries, end = [], 0
    for name, x, of_pages, shape in sorted(found, key=lambda of: -of[1].itemsize):
        begin, end = end, end + _count(shape) * x.itemsize
        entries.append(_Entry(name, x, of_pages, shape, begin, end))
    return entries, words


def _page_tensors(layer: Any) -> Iterator[tuple[str, Tensor]]:
    named = ((name, getattr(layer, name, None)) for name in _PAGES)
    return ((name, x) for name, x in named if x is not None and x.shape[-1])


def _count(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _nbytes(entries: Sequence[_Entry]) -> int:
    return entries[-1].end


def _described(entry: _Entry) -> dict[str, Any]:
    """As safetensors' header has it."""
    return {"dtype": _DTYPES[entry.source.dtype], "shape": [*entry.shape], "data_offsets": [entry.begin, entry.end]}


def _metadata(cache: Cache, num_pages: int, tokens: int, words: list[dict[str, Any]]) -> dict[str, str]:
    sizes = {name: getattr(cache, name) for name in _SIZES[type(cache)]}
    return {
        "tersekv": _KINDS[type(cache)],
        "sizes": json.dumps({"num_pages": num_pages, "page_size": cache.page_size, **sizes}),
        "layout": json.dumps("NHD"),
        "num_tokens": str(tokens),
        "layers": json.dumps(words),
    }


def _header(entries: Sequence[_Entry], metadata: dict[str, str], checksums: dict[str, str]) -> bytes:
    """The bytes before the tensors' own."""
    described: dict[str, Any] = {"__metadata__": metadata | {"checksums": json.dumps(checksums)}}
    text = json.dumps(described | {entry.name: _described(entry) for entry in entries}).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(record: Any) -> tuple[str, Tensor]:
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


def _chunks(entry: _Entry) -> Iterator[tuple[int, int, slice]]:
    """First and last page of each chunk, and where its bytes lie; an entry that is no pages counts as one."""
    count = entry.shape[0] if entry.pages else 1
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

    def __init__(self, entry: _Entry, device: torch.device, powers: dict[tuple[int, int], Tensor]) -> None:
        """powers: kept from entry to entry, as most are of one size"""
        count = entry.shape[0] if entry.pages else 1
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


def _read_pages(entries: Sequence[_Entry], listed: list[int], out: Tensor, device: torch.device) -> list[str]:
    """Copy the bytes of all entries to `out` on the host. Returns their checksums."""
    pages = torch.tensor(listed, dtype=torch.int64, device=device)
    # Two buffers in turn: memory that another stream still reads could not be had again without waiting.
    most = max((where.stop - where.start for entry in entries for *_, where in _chunks(entry)), default=0)
    buffers = torch.empty(2, -(-most // _ALIGNED) * _ALIGNED, dtype=torch.uint8, device=device).unbind()
    streams, sums, powers, turn = _Streams(device), [], {}, 0  # type: ignore[var-annotated]
    for entry in entries:
        with streams.compute():
            checksum = _Checksum(entry, device, powers)
        for first, last, where in _chunks(entry):
            turn ^= 1
            data = buffers[turn][: where.stop - where.start]
            with streams.compute():
                if entry.pages:
                    x = _indexed(entry.source)
                    rows = data.view(x.dtype).view(last - first, *x.shape[1:])
                    torch.index_select(x, 0, pages[first:last], out=rows)
                else:
                    data.copy_(_bytes(entry.source))
                checksum.add(data, first, last)
            with streams.copy(data):
                out[where].copy_(data, non_blocking=True)
        sums.append(checksum.total)
    streams.finish()
    return _spelt(sums)


def _on_device(entries: Sequence[_Entry], body: Tensor, device: torch.device) -> tuple[Tensor, list[str]]:
    """The bytes of a record where the cache is, and the checksums of its entries."""
    if device.type == "cpu":
        there = body
    else:
        there = torch.empty(len(body), dtype=torch.uint8, device=device)
    streams, sums, powers = _Streams(device), [], {}  # type: ignore[var-annotated]
    for entry in entries:
        with streams.compute():
            checksum = _Checksum(entry, device, powers)
        for first, last, where in _chunks(entry):
            if there is not body:
                piece = body[where]
                if device.type == "cuda" and not piece.is_pinned():  # the last chunk is still on its way
                    piece = piece.pin_memory()
                with streams.copy(there, after_compute=False):
                    there[where].copy_(piece, non_blocking=True)
            with streams.compute(after_copy=True):
                checksum.add(there[where], first, last)
        sums.append(checksum.total)
    streams.finish()
    return there, _spelt(sums)


def _write_pages(entry: _Entry, pages: Tensor, stored: Tensor) -> None:
    x = _indexed(entry.source)
    x[pages] = stored.view(x.dtype).view(-1, *x.shape[1:])


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
