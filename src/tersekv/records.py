"""Pages that leave the device: `export_pages` writes a record that describes itself, `import_pages` reads it back.

A record is a safetensors file, or the same bytes in a host buffer. Metadata: `tersekv`, what it is; `sizes`, of the
pages; `layout`, the order of a page's rows, whatever it is in a cache; `num_tokens`; `layers`, of each its format and
attributes as in `saved`; `checksums`, of each tensor; `metadata`, that of the others. Tensors: `0.k` [n, S, H, …], the
pages of layer 0 in the order in which they were named, and so on; `0.k_signs`, its attributes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import record_file, saved
from .cache import PagedKVCache, PagedLatentCache
from .scalars import as_int, as_non_negative_int

Cache = PagedKVCache | PagedLatentCache
_KINDS = {PagedKVCache: "pages of a PagedKVCache, 2", PagedLatentCache: "pages of a PagedLatentCache, 2"}
_SIZES = {
    PagedKVCache: ("num_kv_heads", "head_dim", "head_dim_v"),
    PagedLatentCache: ("kv_lora_rank", "qk_rope_head_dim"),
}
ATTRIBUTES = {PagedKVCache: saved.NAMES, PagedLatentCache: ("kv_scale",)}


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
    entries, words = _entries(cache, listed)
    metadata = {"tersekv": _KINDS[type(cache)], "num_tokens": str(tokens)} | _metadata(cache, len(listed), words)
    return record_file.write(entries, metadata, path)


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
    its own. Everything is checked before anything is written, so the record lies beside the cache once more meanwhile.
    Raises ValueError for a torn or foreign record, for one of another cache, and for a checksum that differs, with the
    record's name and the entry; for a page outside the cache or named twice. TypeError for what is none of these.
    """
    listed = _page_list(cache, pages)
    if len({*listed}) < len(listed):
        twice = next(page for i, page in enumerate(listed) if page in listed[:i])
        raise ValueError(f"pages: want each page once, got {twice} again")
    name, data = record_file.bytes_of(record)
    file = record_file.Record(name, data)
    metadata = file.metadata(_KINDS[type(cache)])
    entries, words = _entries(cache, listed)
    file.compare_metadata(metadata, _metadata(cache, len(listed), words), "the cache and the pages named have")
    file.compare_entries(entries)
    tokens = file.number(metadata, "num_tokens", len(listed) * cache.page_size)
    places = record_file.page_indices(entries)
    there, sums = record_file.read(entries, file.body(entries), cache.device)
    own = [i for i, entry in enumerate(entries) if entry.pages is not None]
    # While the bytes are on their way.
    puts = record_file.puts([entries[i] for i in own], [there[i] for i in own], places)
    file.compare_checksums(metadata, sums)
    for entry, stored in zip(entries, there, strict=True):
        if entry.pages is None and not record_file.same(entry, stored):
            file.fail(entry.name, "the values that the cache has", "others")
    _compare_shared(file, entries, there)
    for put in puts:
        put()
    return tokens


def _compare_shared(file: record_file.Record, entries: Sequence[record_file.Entry], stored: Sequence[Tensor]) -> None:
    """Pages that the cache has twice, as of K and V in one tensor, cannot hold two contents."""
    first: dict[int, int] = {}  # the entry that begins at an address
    for i, entry in enumerate(entries):
        if entry.pages and (j := first.setdefault(entry.source.data_ptr(), i)) < i:
            a, b = (stored[n].view(-1, entries[n].shape[-1] * entries[n].source.itemsize) for n in (j, i))
            width = min(a.shape[1], b.shape[1])  # V may be the first columns of K
            if not torch.equal(a[:, :width], b[:, :width]):
                file.fail(entry.name, f"the bytes of {entries[j].name}, whose memory the cache shares", "others")


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
    listed = [*pages] if {*map(type, pages)} == {int} else [as_int("pages", page) for page in pages]
    most = cache.num_pages
    if listed and not 0 <= min(listed) <= max(listed) < most:
        i, page = next((i, page) for i, page in enumerate(listed) if not 0 <= page < most)
        raise ValueError(f"pages: want pages in [0, {most}), got {page} at {i}")
    return listed


def _entries(cache: Cache, listed: Sequence[int]) -> tuple[list[record_file.Entry], list[dict[str, Any]]]:
    """The tensors of a record in the order of their bytes, and what it says of each layer."""
    words, attributes = saved.words(cache.layers, ATTRIBUTES[type(cache)])
    found: list[tuple[str, Tensor, Sequence[int] | None]] = [(name, x, None) for name, x in attributes.items()]
    for i, layer in enumerate(cache.layers):
        found += [(f"{i}.{name}", x, listed) for name, x in record_file.page_tensors(layer)]
    return record_file.placed(found), words


def _metadata(cache: Cache, num_pages: int, words: list[dict[str, Any]]) -> dict[str, str]:
    sizes = {name: getattr(cache, name) for name in _SIZES[type(cache)]}
    return {
        "sizes": json.dumps({"num_pages": num_pages, "page_size": cache.page_size, **sizes}),
        "layout": json.dumps("NHD"),
        "layers": json.dumps(words),
    }
