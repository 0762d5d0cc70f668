"""Chunks that LMCache stores in tersekv's formats: through its storage manager, as its server builds it, to files."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import pytest
import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig, StorageManagerConfig
from lmcache.v1.distributed.l2_adapters.config import add_l2_adapters_args, parse_args_to_l2_adapters_config
from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor
from lmcache.v1.distributed.storage_manager import StorageManager

from tersekv.integrations import lmcache as serde  # registers
from tersekv.integrations.lmcache_chunks import ChunkCodec

HEAD_DIM, FORMAT = 64, "int8_per_token_head/int4_per_token_head+rotated"
SHAPES = [(2, 3, 16, 256), (2, 1, 16, 128)]  # groups of layers: K and V, layers, tokens, heads · HEAD_DIM
LAYOUT = MemoryLayoutDesc([torch.Size(shape) for shape in SHAPES], [torch.bfloat16] * len(SHAPES))
KEYS = [ObjectKey(bytes([i]) * 32, "model", 0) for i in range(3)]


@pytest.fixture
def start():
    """Makes storage managers over a folder; the test's end closes them."""
    made = []

    def manager(folder: Path, **given) -> StorageManager:
        spec = {
            "type": "plugin", "module_path": "tersekv.integrations.lmcache", "class_name": "Adapter",
            "adapter_params": {"type": "fs", "base_path": str(folder)},
            "serde": {"type": "tersekv", "format": FORMAT, "head_dim": HEAD_DIM, **given},
        }  # fmt: skip
        parser = argparse.ArgumentParser()
        add_l2_adapters_args(parser)
        adapters = parse_args_to_l2_adapters_config(parser.parse_args(["--l2-adapter", json.dumps(spec)]))
        memory = L1ManagerConfig(L1MemoryManagerConfig(1 << 24, use_lazy=False, shm_name=""))
        made.append(StorageManager(StorageManagerConfig(memory, EvictionConfig("noop"), l2_adapter_config=adapters)))
        return made[-1]

    yield manager
    for manager in made:
        manager.close()


def chunks() -> list[list[torch.Tensor]]:
    """A chunk a key, of each group of layers."""
    torch.manual_seed(0)
    return [[torch.randn(shape).bfloat16() for shape in SHAPES] for _ in KEYS]


def stored(manager: StorageManager, folder: Path) -> list[Path]:
    """The files of these chunks, once they are there."""
    objects = manager.reserve_write(KEYS, LAYOUT)
    for key, groups in zip(KEYS, chunks(), strict=True):
        for i, x in enumerate(groups):
            objects[key].get_tensor(i).copy_(x)
    manager.finish_write(KEYS)
    for _ in range(200):
        if len(found := sorted(folder.rglob("*.data"))) == len(KEYS):
            return found
        time.sleep(0.05)
    raise AssertionError(f"want {len(KEYS)} files, got {len(found)}")


def fetched(manager: StorageManager) -> tuple[int, list[list[torch.Tensor]]]:
    """How many chunks come from the folder, and what they hold."""
    handle = manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(KEYS, 0, LAYOUT)]))
    assert manager.wait_prefetch_status(handle, 20)
    (hits,) = manager.query_prefetch_status(handle).l2_hit_cells
    got = hits.popcount()
    if not got:
        return got, []
    with manager.read_prefetched_results(KEYS[:got]) as objects:
        found = [[obj.get_tensor(i).clone() for i in range(len(SHAPES))] for obj in objects]
    manager.finish_read_prefetched(KEYS[:got])
    return got, found


def test_another_server_finds_what_one_stored(start, tmp_path):
    codec = ChunkCodec(FORMAT, HEAD_DIM)
    want = sum(codec.nbytes(shape) for shape in SHAPES)
    files = stored(start(tmp_path), tmp_path)
    assert [file.stat().st_size for file in files] == [want] * len(KEYS)
    got, found = fetched(start(tmp_path))
    assert got == len(KEYS)
    for groups, before in zip(found, chunks(), strict=True):
        for x, y in zip(groups, before, strict=True):
            data, back = torch.empty(codec.nbytes(y.shape), dtype=torch.uint8), torch.empty_like(y)
            codec.encode(y, data)
            codec.decode(data, back)
            assert torch.equal(x, back)
            assert not torch.equal(x, y)


def test_chunks_of_another_format_are_not_found(start, tmp_path):
    stored(start(tmp_path), tmp_path)
    assert fetched(start(tmp_path, format="int8_per_token_head/int4_per_token_head"))[0] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"format": "nvfp4", "head_dim": 64, "heads": 2},
            "serde: want format, .*, max_workers, got heads",
        ),
        ({"format": "nvfp5", "head_dim": 64}, "format: want one of"),
        ({"format": "bf16", "head_dim": 0}, "head_dim: want"),
    ],
)
def test_options_are_checked_when_the_server_starts(options, message):
    with pytest.raises(ValueError, match=message):
        create_serde_processor(SerdeConfig("tersekv", options))


def test_an_adapter_without_a_type_is_refused():
    with pytest.raises(ValueError, match="adapter_params: want the type of an adapter, got"):
        serde.Adapter({})
