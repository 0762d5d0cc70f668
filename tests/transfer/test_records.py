"""Records of pages: what comes back is what left, to the bit; anything else is refused by name, and nothing written."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest
import torch
from no_sync import NoHostReads
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import tersekv
from tersekv import KV_FORMATS, LATENT_FORMATS, PagedKVCache, PagedLatentCache, record_file, records
from tersekv.testing.memory import as_bytes, storage_bytes

LAYOUTS = ({}, {"layout": "HND", "scales": "tail"}, {"scales": "inline"})
NAMES = ("k", "v", "k_scale_cache", "v_scale_cache", "ckv", "kpe", "ckv_scale_cache")


def kv(format="fp8_e4m3", pages=6, size=4, layers=2, **options) -> PagedKVCache:
    return PagedKVCache.allocate(layers, pages, size, 2, 32, format=format, **options)


def latent(format, pages=6) -> PagedLatentCache:
    return PagedLatentCache.allocate(2, pages, 4, format=format, kv_lora_rank=128, qk_rope_head_dim=6)


def filled(cache, seed: int = 0):
    """Any bytes: codes and scales that no append would store too."""
    random = torch.Generator().manual_seed(seed)
    for layer in cache.layers:
        for x in tensors(layer):
            as_bytes(x).copy_(torch.randint(256, as_bytes(x).shape, generator=random, dtype=torch.uint8))
    return cache


def tensors(layer) -> list[torch.Tensor]:
    return [x for x in (getattr(layer, name, None) for name in NAMES) if x is not None]


def contents(cache) -> list[torch.Tensor]:
    return [storage_bytes(x).clone() for layer in cache.layers for x in tensors(layer)]


def assert_pages_equal(a, pages, b, others) -> None:
    for x, y in zip(a.layers, b.layers, strict=True):
        for one, other in zip(tensors(x), tensors(y), strict=True):
            assert torch.equal(as_bytes(one)[pages], as_bytes(other)[others])


@pytest.mark.parametrize("to", ["buffer", "bytes", "file"])
@pytest.mark.parametrize("format", [*KV_FORMATS, ("fp8_e4m3", "int4_per_token_head")], ids=str)
def test_pages_come_back_as_they_left_in_any_layout(format, to, tmp_path):
    path = tmp_path / "record"
    for i, (src, dst) in enumerate(zip(LAYOUTS, (*LAYOUTS[1:], LAYOUTS[0]), strict=True)):
        a, b = filled(kv(format, **src)), filled(kv(format, pages=9, **dst), seed=1)
        others, before = [p for p in range(9) if p not in (8, 0, 3)], contents(b)
        record = tersekv.export_pages(a, [5, 0, 2], path if to == "file" else None, num_tokens=9 + i)
        given = {"file": path, "bytes": None if record is None else bytes(record), "buffer": record}[to]
        assert tersekv.import_pages(b, torch.tensor([8, 0, 3], dtype=torch.int32), given) == 9 + i
        assert_pages_equal(a, [5, 0, 2], b, [8, 0, 3])
        kept = filled(kv(format, pages=9, **dst), seed=1)
        assert_pages_equal(kept, others, b, others)
        assert len(before) == len(contents(b))


@pytest.mark.parametrize("format", LATENT_FORMATS)
def test_pages_of_latents_come_back(format):
    a, b = filled(latent(format)), filled(latent(format), seed=1)
    assert tersekv.import_pages(b, [1, 4], tersekv.export_pages(a, [3, 2])) == 8
    assert_pages_equal(a, [3, 2], b, [1, 4])


@pytest.mark.parametrize("chunk", [1, 200, 1 << 24])
def test_chunks_of_any_size_give_the_same_record(chunk, monkeypatch):
    a, b = filled(kv("nvfp4", rotation="hadamard")), kv("nvfp4", rotation="hadamard")
    want = tersekv.export_pages(a, [5, 0, 2])
    monkeypatch.setattr(record_file, "_CHUNK", chunk)
    assert torch.equal(tersekv.export_pages(a, [5, 0, 2]), want)
    tersekv.import_pages(b, [0, 1, 2], want)
    assert_pages_equal(a, [5, 0, 2], b, [0, 1, 2])


def test_the_library_of_safetensors_reads_a_record(tmp_path):
    path, channels = tmp_path / "record.safetensors", torch.rand(2, 2, 32) + 0.5
    a = filled(kv("int8_per_token_head", rotation="hadamard", k_channel_scale=channels))
    tersekv.export_pages(a, [5, 0], path, num_tokens=7)
    with safe_open(path, framework="pt") as file:
        said = file.metadata()
        assert said["tersekv"] == "pages of a PagedKVCache, 2"
        assert said["num_tokens"] == "7"
        sizes = {"num_pages": 2, "page_size": 4, "num_kv_heads": 2, "head_dim": 32, "head_dim_v": 32}
        assert json.loads(said["sizes"]) == sizes
        assert [word["format"] for word in json.loads(said["layers"])] == ["int8_per_token_head"] * 2
        assert torch.equal(file.get_tensor("1.k"), a[1].k[[5, 0]])
        assert torch.equal(file.get_tensor("0.k_channel_scale"), channels[0])
        assert torch.equal(as_bytes(file.get_tensor("0.v_scale_cache")), as_bytes(a[0].v_scale_cache)[[5, 0]])
    assert [p.name for p in tmp_path.iterdir()] == ["record.safetensors"]


def test_pages_that_share_memory_take_only_equal_bytes():
    shared = PagedKVCache.from_tensors([torch.zeros(6, 1, 4, 2, 32, dtype=torch.bfloat16)] * 2)
    refused(shared, tersekv.export_pages(filled(kv("bf16")), [5, 0]), "0.v: want the bytes of 0.k, whose memory the ")
    shared[0].k[5] = 1
    assert tersekv.import_pages(shared, [1], tersekv.export_pages(shared, [5])) == 4
    assert shared[1].v[1].eq(1).all()
    rows = torch.randn(6, 4, 2, 32).to(torch.bfloat16)
    narrow = PagedKVCache.from_tensors([(rows, rows[..., :16])])
    assert tersekv.import_pages(narrow, [1], tersekv.export_pages(narrow, [5])) == 4
    assert torch.equal(rows[1], rows[5])


def test_a_record_without_pages_is_one():
    a = filled(kv())
    before = contents(a)
    assert tersekv.import_pages(a, [], tersekv.export_pages(a, [])) == 0
    assert all(map(torch.equal, contents(a), before))


def refused(cache, record, message: str, pages=(1, 4)) -> None:
    before = contents(cache)
    with pytest.raises(ValueError, match=message):
        tersekv.import_pages(cache, [*pages], record)
    assert all(map(torch.equal, contents(cache), before))


def test_every_changed_byte_is_found():
    """Of the tensors, by the checksum; of the header, by what it says."""
    a = filled(kv("fp8_e4m3", layers=1, size=1, pages=3))
    record = tersekv.export_pages(a, [2, 0])
    before = contents(a)
    for i in range(len(record)):
        torn = record.clone()
        torn[i] ^= 1 << (i % 8)
        with pytest.raises(ValueError, match=r"^record: "):
            tersekv.import_pages(a, [2, 0], torn)
        assert all(map(torch.equal, contents(a), before))


@pytest.mark.parametrize("format", ["bf16", "nvfp4"])
def test_words_and_pages_that_changed_places_are_found(format):
    record = tersekv.export_pages(filled(kv(format, layers=1)), [2, 0])
    for step in (4, 8, record_page(format)):
        body = record[-2 * record_page(format) :]
        swapped = body.clone()
        swapped[:step], swapped[step : 2 * step] = body[step : 2 * step], body[:step]
        assert not torch.equal(swapped, body)
        refused(
            kv(format, layers=1),
            torch.cat([record[: -len(body)], swapped]),
            "record: 0.v.*: want bytes of the checksum",
        )


def record_page(format: str) -> int:
    """Bytes of what comes last in a record's page: V, or its scales."""
    last = tensors(kv(format, layers=1)[0])[-1]
    return last[0].numel() * last.element_size()


def test_a_torn_record_is_refused_by_name(tmp_path):
    path, whole = tmp_path / "torn", bytes(tersekv.export_pages(filled(kv()), [5, 0]))
    for length in (0, 5, 8, 100, 1000, len(whole) - 1, len(whole) // 2):
        path.write_bytes(whole[:length])
        refused(kv(), path, "torn: .*: want")
    path.write_bytes(whole + b"\0")
    refused(kv(), path, "torn: tensors: want [0-9]+ bytes behind the header")
    path.write_bytes(b"\xff" * 4096)
    refused(kv(), path, "torn: header: want a safetensors header")
    path.write_bytes((30).to_bytes(8, "little") + b"[" * 30)
    refused(kv(), path, "torn: header: want JSON")
    refused(kv(), tmp_path, "want a record that export_pages wrote, got a folder")


@pytest.mark.parametrize("other", ["1", "7", "8"])
def test_another_number_of_tokens_is_refused(other):
    record = bytes(tersekv.export_pages(filled(kv()), [5, 0], num_tokens=6))
    torn = record.replace(b'"num_tokens": "6"', f'"num_tokens": "{other}"'.encode())
    assert torn != record
    refused(kv(), torn, "record: metadata: want the checksum [0-9a-f]{8}, got [0-9a-f]{8}")


def test_a_record_of_the_version_without_a_checksum_of_its_metadata_is_refused(tmp_path):
    path = tmp_path / "old"
    tersekv.export_pages(filled(kv()), [5, 0], path)
    tensors_of, said = load_file(path), safe_open(path, framework="pt").metadata()
    del said["metadata"]
    save_file(tensors_of, path, said)
    refused(kv(), path, "old: metadata: want the checksum [0-9a-f]{8}, got None")
    save_file(tensors_of, path, {**said, "tersekv": "pages of a PagedKVCache, 1"})
    refused(kv(), path, "old: tersekv: want 'pages of a PagedKVCache, 2', got 'pages of a PagedKVCache, 1'")


def test_a_foreign_file_is_refused_by_name(tmp_path):
    path = tmp_path / "foreign"
    save_file({"0.k": torch.zeros(2)}, path)
    refused(kv(), path, "foreign: tersekv: want 'pages of a PagedKVCache, 2', got another's file")
    kv().save_attributes(path)
    refused(kv(), path, "foreign: tersekv: want 'pages of a PagedKVCache, 2', got 'attributes of a PagedKVCache, 2'")
    tersekv.export_pages(latent("bf16"), [0, 1], path)
    refused(kv(), path, "want 'pages of a PagedKVCache, 2', got 'pages of a PagedLatentCache, 2'")
    tersekv.export_pages(kv(), [0, 1], path)
    tensors_of, said = load_file(path), safe_open(path, framework="pt").metadata()
    save_file({name: x for name, x in tensors_of.items() if name != "1.v"}, path, said)
    refused(kv(), path, "foreign: .*: want")
    with pytest.raises(FileNotFoundError):
        tersekv.import_pages(kv(), [0], tmp_path / "none")


OTHERS = [
    (kv("bf16"), "layers.0.format: want 'bf16' as the cache and the pages named have, got 'fp8_e4m3'"),
    (kv(layers=1), "number of layers: want"),
    (kv(size=8), "sizes.page_size: want 8"),
    (PagedKVCache.allocate(2, 6, 4, 2, 32, format="fp8_e4m3", head_dim_v=64), "sizes.head_dim_v: want 64"),
    (kv(k_scale=0.5), "layers.0.k_scale: want 0.5"),
    (kv(k_scale=torch.ones(1)), "layers.0.k_scale: want 'tensor' as the cache and the pages named have, got 1.0"),
    (kv(rotation="hadamard"), "layers.0.k_signs: want"),
]


@pytest.mark.parametrize(("cache", "message"), OTHERS, ids=[m for _, m in OTHERS])
def test_a_record_of_another_cache_is_refused(cache, message):
    refused(filled(cache), tersekv.export_pages(filled(kv()), [5, 0]), f"record: {message}")


def test_a_record_of_other_signs_is_refused():
    a, b = (kv(rotation=(None, "hadamard")) for _ in range(2))
    b = PagedKVCache([b[0], replace(b[1], v_signs=-b[1].v_signs)], 32, 32)
    refused(filled(b), tersekv.export_pages(filled(a), [5, 0]), "record: 1.v_signs: want the values that the cache has")


WRONG = [
    ({"pages": [6]}, ValueError, r"pages: want pages in \[0, 6\), got 6 at 0"),
    ({"pages": [0, -1]}, ValueError, r"pages: want pages in \[0, 6\), got -1 at 1"),
    ({"pages": torch.tensor([0.5])}, TypeError, "pages: want a list of ints or an integer Tensor"),
    ({"pages": 3}, TypeError, "pages: want a list of ints or an integer Tensor"),
    ({"pages": [True]}, TypeError, "pages: want int, got bool"),
    ({"cache": kv()[0]}, TypeError, "cache: want PagedKVCache or PagedLatentCache, got PagedKVLayer"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG, ids=[m[:40] for _, _, m in WRONG])
def test_bad_calls_raise(wrong, error, message):
    args = {"cache": kv(), "pages": [0]} | wrong
    with pytest.raises(error, match=message):
        tersekv.export_pages(*args.values())
    with pytest.raises(error, match=message):
        tersekv.import_pages(*args.values(), tersekv.export_pages(kv(), [0]))


def test_bad_numbers_and_records_raise():
    with pytest.raises(ValueError, match="num_tokens: want at most 8, what the pages hold, got 9"):
        tersekv.export_pages(kv(), [0, 1], num_tokens=9)
    with pytest.raises(TypeError, match="record: want a path, a Tensor or bytes, got int"):
        tersekv.import_pages(kv(), [0], 3)
    with pytest.raises(ValueError, match=r"record: want \[bytes\] uint8 on the CPU, got \[2\] torch.float32"):
        tersekv.import_pages(kv(), [0], torch.zeros(2))
    with pytest.raises(TypeError, match="path: want a path or None, got int"):
        tersekv.export_pages(kv(), [0], 3)
    refused(kv(), tersekv.export_pages(kv(), [0, 1, 2]), "sizes.num_pages: want 2")
    refused(kv(), tersekv.export_pages(kv(), [0, 1]), "pages: want each page once, got 3 again", pages=(3, 3))


def test_an_export_that_fails_leaves_no_file(tmp_path):
    (tmp_path / "record").mkdir()
    with pytest.raises(OSError, match="record"):
        tersekv.export_pages(kv(), [0], tmp_path / "record")
    assert [p.name for p in tmp_path.iterdir()] == ["record"]


def test_writers_of_one_file_do_not_meet(tmp_path, monkeypatch):
    """Of one process, or of two whose ids are equal, as in two containers."""
    path, barrier, replace_file = tmp_path / "record", Barrier(2, timeout=60), Path.replace

    def replace_together(self, target):
        barrier.wait()  # both have written
        return replace_file(self, target)

    monkeypatch.setattr(Path, "replace", replace_together)
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(tersekv.export_pages, filled(kv(), seed), [5, seed], path) for seed in (0, 1)]:
            done.result()
    assert [p.name for p in tmp_path.iterdir()] == ["record"]
    assert tersekv.import_pages(kv(), [0, 1], path) == 8


def test_what_runs_on_the_device_reads_nothing_on_the_host(monkeypatch):
    """Sums are read once, at the end."""
    a = filled(kv("nvfp4"))
    entries, _ = records._entries(a, [3, 1])
    body = torch.empty(entries[-1].end, dtype=torch.uint8)
    monkeypatch.setattr(record_file.Checksums, "spelt", lambda sums: dict.fromkeys(sums._rows, ""))
    pages = record_file.page_indices(entries)
    with NoHostReads():
        record_file._read_from(a.device, entries, body)
        there, _ = record_file.read(entries, body, a.device)
        for put in record_file.puts(entries, there, pages):
            put()


@pytest.mark.parametrize("most", [1, 100, 1 << 12, 1 << 24])
def test_chunks_hold_every_byte_once_and_what_is_small_goes_together(most, monkeypatch):
    entries, _ = records._entries(kv("int4_per_token_head", layers=5), [4, 2, 0])
    monkeypatch.setattr(record_file, "_CHUNK", most)
    end, count = 0, 0
    for whole, chunk in record_file._chunks(entries):
        assert whole.start == end
        for piece in chunk:
            entry, size = piece.entry, (piece.entry.end - piece.entry.begin) // 3
            assert piece.where == slice(entry.begin + piece.first * size, entry.begin + piece.last * size)
            assert piece.where.start == end
            end = piece.where.stop
        assert whole.stop == end
        assert whole.stop - whole.start <= most or (len(chunk) == 1 and chunk[0].last == chunk[0].first + 1)
        count += 1
    assert end == entries[-1].end
    assert most < 1 << 24 or count == 1


class FakeStream:
    """What was handed to it runs later, in order; waits hold it up."""

    current: FakeStream

    def __init__(self, *_) -> None:
        self.todo, self.done = [], 0

    def record_event(self):
        return self, len(self.todo)

    def wait_event(self, event) -> None:
        self.todo.append(event)

    def wait_stream(self, other) -> None:
        self.wait_event(other.record_event())

    def ready(self) -> bool:
        if self.done == len(self.todo):
            return False
        step = self.todo[self.done]
        return callable(step) or step[0].done >= step[1]

    def run(self) -> None:
        step, self.done = self.todo[self.done], self.done + 1
        if callable(step):
            step()


@pytest.mark.parametrize("seed", range(20))
def test_two_streams_share_two_buffers_whatever_comes_first(seed, monkeypatch):
    """Any order that the waits admit: each chunk's bytes go on as they came, and what follows sees all of them."""
    current, made, draw = FakeStream(), [], random.Random(seed)

    @contextmanager
    def on(stream):
        FakeStream.current = stream
        yield

    monkeypatch.setattr(
        record_file, "_streams", lambda device: made or made.extend([FakeStream(), FakeStream()]) or made
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", on)
    source, buffers, got, after = [None] * 7, [None, None], [], []
    current.todo.append(lambda: source.__setitem__(slice(None), range(7)))  # what the caller did before

    def first(half: int, i: int) -> None:
        FakeStream.current.todo.append(lambda: buffers.__setitem__(half, source[i]))

    def second(half: int, i: int) -> None:
        FakeStream.current.todo.append(lambda: got.append(buffers[half]))

    record_file._pipelined(torch.device("cuda"), [(i,) for i in range(7)], first, second)
    current.todo.append(lambda: after.extend(got))
    streams = [current, *made]
    while ready := [stream for stream in streams if stream.ready()]:
        draw.choice(ready).run()
    assert all(stream.done == len(stream.todo) for stream in streams)
    assert after == [*range(7)]
