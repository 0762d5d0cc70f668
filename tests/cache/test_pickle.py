"""Public objects are copied, pickled, saved and sent to other processes: formats, layouts and shared buffers stay."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import subprocess
import sys

import pytest
import torch
import torch.multiprocessing as mp

import tersekv
from tersekv import INDEX_FORMATS, KV_FORMATS, LATENT_FORMATS, PagedIndexCache, PagedKVCache, PagedLatentCache
from tersekv.compat.max import PagedKVCacheCollection
from tersekv.testing.memory import as_bytes, storage_bytes


def pickled(x):
    return pickle.loads(pickle.dumps(x))


def saved(x, **options):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, **options)


WAYS = {
    "pickle": pickled,
    "protocol 2": lambda x: pickle.loads(pickle.dumps(x, 2)),
    "deepcopy": copy.deepcopy,
    "torch.save": lambda x: saved(x, weights_only=True),
    "torch.save, any pickle": lambda x: saved(x, weights_only=False),
}


def filled(cache):
    """Every byte of its memory different from that of a new cache."""
    random = torch.Generator().manual_seed(1)
    for layer in cache.layers:
        for t in tensors(layer):
            memory = storage_bytes(t)
            if t.dtype != torch.float32 or t.dim() > 1:  # not the scales that a caller gave
                memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8, generator=random))
    return cache


def tensors(layer) -> list[torch.Tensor]:
    values = (getattr(layer, n) for n in layer.__slots__)
    return [x for x in values if isinstance(x, torch.Tensor)]


def kv(format, layout, packed, place, **scales):
    return filled(PagedKVCache.allocate(
        3, 4, 2, 3, 64, format=format, layout=layout, packed=packed, scales=place, **scales
    ))  # fmt: skip


CACHES = {
    f"{name} {layout} {'packed' * packed} {place}": lambda a=(name, layout, packed, place): kv(*a)
    for name in KV_FORMATS
    for layout in ("NHD", "HND")
    for packed in (False, True)
    for place in ("apart", "inline", "tail")
}
CACHES |= {
    f"latent {name} {'split' * split}": lambda name=name, split=split: filled(
        PagedLatentCache.allocate(2, 3, 4, format=name, kv_lora_rank=128, qk_rope_head_dim=32, split=split)
    )
    for name in LATENT_FORMATS
    for split in (False, True)
    if name != "fp8_ds_mla" or not split
}
CACHES |= {
    f"index {name} {rotation}": lambda name=name, rotation=rotation: filled(
        PagedIndexCache.allocate(2, 3, 4, format=name, rotation=rotation)
    )
    for name in INDEX_FORMATS
    for rotation in (None, "hadamard")
}
CACHES["scale tensors"] = lambda: kv(
    "fp8_e4m3", "NHD", False, "apart", k_scale=torch.linspace(1, 2, 3), v_scale=torch.full((1,), 3.0)
)


def one_buffer():
    """All layers in one tensor, a layer outermost in its strides."""
    rows = torch.arange(5 * 2 * 4 * 2 * 3 * 32, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    return PagedKVCache.from_tensors(list(rows.view(5, 4, 2, 2, 3, 32).unbind(0)[1:]))


CACHES["one buffer of all layers"] = one_buffer


def same(old, new) -> None:
    """Equal to the byte, in the same strides, sharing what was shared, and nothing with the old."""
    assert type(new) is type(old)
    homes: dict[int, int] = {}
    for a, b in zip(old, new, strict=True):
        assert type(a) is type(b)
        for name in a.__slots__:
            x, y = getattr(a, name), getattr(b, name)
            if not isinstance(x, torch.Tensor):
                assert x == y
                continue
            assert (x.dtype, x.shape, x.stride(), x.device) == (y.dtype, y.shape, y.stride(), y.device)
            assert x.storage_offset() == y.storage_offset()
            assert torch.equal(as_bytes(x), as_bytes(y))
            mine, its = (t.untyped_storage().data_ptr() for t in (x, y))
            assert mine != its
            assert homes.setdefault(mine, its) == its
    assert len(set(homes.values())) == len(homes)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CACHES)
def test_a_cache_comes_back(name, way):
    cache = CACHES[name]()
    new = WAYS[way](cache)
    same(cache.layers, new.layers)
    assert repr(new) == repr(cache)
    assert new.nbytes == cache.nbytes


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CACHES)
def test_a_layer_comes_back(name, way):
    layer = CACHES[name]()[-1]
    same([layer], [WAYS[way](layer)])


def test_a_shallow_copy_is_of_the_same_memory():
    cache = kv("nvfp4", "HND", True, "inline")
    assert copy.copy(cache)[0].k.data_ptr() == cache[0].k.data_ptr()
    assert copy.copy(cache[0]).v_scale_cache.data_ptr() == cache[0].v_scale_cache.data_ptr()


def test_what_comes_back_is_written_and_read_like_the_old():
    cache = kv("int8_per_token_head", "HND", True, "inline")
    for c in (cache, new := pickled(cache)):
        tersekv.append(torch.ones(2, 3, 64), torch.ones(2, 3, 64), c[1], torch.tensor([1, 5]))
    same(cache.layers, new.layers)


def write(cache, done):
    storage_bytes(cache[1].k)[3] = 77
    done.put(repr(cache))


@pytest.mark.parametrize("format", ["nvfp4", "fp8_per_token_head", "bf16"])
def test_another_process_gets_the_same_memory(format):
    """As of any tensor that torch.multiprocessing sends."""
    cache = kv(format, "NHD", False, "inline")
    context = mp.get_context("spawn")
    done = context.SimpleQueue()
    other = context.Process(target=write, args=(cache, done))
    other.start()
    told = done.get()
    other.join()
    assert (other.exitcode, told) == (0, repr(cache))
    assert storage_bytes(cache[1].k)[3] == 77


def test_torch_load_of_weights_alone_needs_the_class_imported_and_nothing_else(tmp_path):
    torch.save({"cache": kv("nvfp4", "NHD", False, "inline")}, tmp_path / "x.pt")
    code = "import torch, tersekv; tersekv.PagedKVCache; print(torch.load('x.pt')['cache'].format)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "nvfp4\n"), done.stderr


def pool():
    p = tersekv.PagePool(num_pages=8, page_size=4)
    p.add("a", 10)
    p.fork("a", "b")
    return p


def collection():
    rows = torch.arange(4 * 2 * 2 * 48).to(torch.uint8).view(torch.float8_e4m3fn).view(4, 1, 2, 2, 1, 48)
    lens, table = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    return PagedKVCacheCollection(rows, lens, table, 3, 4)


@pytest.mark.parametrize("way", WAYS)
def test_another_projects_cache_comes_back(way):
    old = collection()
    new = WAYS[way](old)
    layer, latest = old.get_key_cache(1), WAYS[way](new.get_key_cache(1))
    same([layer.latent(32)], [latest.latent(32)])
    assert latest[3:] == layer[3:] == (3, 4, None)


OTHERS = {
    "PagePool": pool,
    "MLAPrefillPlan": lambda: tersekv.mla_prefill_plan([9, 4], [3, 2], 4),
    "UnsupportedError": lambda: tersekv.UnsupportedError("decode has no backend"),
    "OutOfPagesError": lambda: tersekv.OutOfPagesError("want 3 pages"),
    "KernelError": lambda: tersekv.KernelError("append on sm_90"),
    "KV_FORMATS": lambda: tersekv.KV_FORMATS,
    "LATENT_FORMATS": lambda: tersekv.LATENT_FORMATS,
    "INDEX_FORMATS": lambda: tersekv.INDEX_FORMATS,
}
HERE = {f"Paged{kind}{what}" for kind in ("KV", "Latent", "Index") for what in ("Cache", "Layer")}


def state(x):
    """What an object holds, to compare."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.tolist()
    if isinstance(x, (list, tuple)):
        return [state(y) for y in x]
    if isinstance(x, Exception):
        return type(x), x.args
    return {k: state(v) for k, v in vars(x).items()} if hasattr(x, "__dict__") else x


@pytest.mark.parametrize("way", ["pickle", "protocol 2", "deepcopy", "torch.save, any pickle"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_public_objects_come_back(name, way):
    x = OTHERS[name]()
    assert state(WAYS[way](x)) == state(x)


def test_no_public_name_is_left_out():
    objects = {n for n in tersekv.__all__ if not inspect.isfunction(getattr(tersekv, n))}
    assert objects == HERE | OTHERS.keys() | {"Selected", "TieredPool"}


@pytest.mark.parametrize("way", WAYS)
def test_the_pages_of_a_tiered_pool_lie_in_one_cache(way):
    cache = PagedKVCache.allocate(1, 2, 4, 1, 16, format="bf16")
    with pytest.raises(TypeError, match="TieredPool: want one pool a cache, got a copy"):
        WAYS[way](tersekv.TieredPool(cache, cold_pages=1))
