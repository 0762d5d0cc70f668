"""Pages on the host, on the device itself: the same numbers, in the order of the streams, without waiting for them."""

from __future__ import annotations

import copy
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from packaging.version import Version

pytest.importorskip("transformers", reason="the cache is of Hugging Face transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))
from transformers_models import VOCABULARY, over, tiny

from tersekv import KV_FORMATS
from tersekv.integrations.transformers import TersekvCache
from tersekv.integrations.transformers_offload import OffloadedStore, Pipe

LATENTS = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "first_k_dense_replace": 2,
    "num_hidden_layers": 3,
}  # fmt: skip
INDEXER = {"index_head_dim": 128, "index_topk": 32, "index_n_heads": 32}
CASES = {
    "every format, one a layer": ("llama", {"num_hidden_layers": len(KV_FORMATS)}, {"layer_formats": list(KV_FORMATS)}),
    "windows": ("gemma2", {"num_hidden_layers": 5}, {"format": "int8_per_token_head"}),
    "latents": ("deepseek_v3", LATENTS, {"layer_formats": ["fp8_ds_mla", "fp8_e4m3", "bf16"]}),
    "an indexer": ("deepseek_v32", {**LATENTS, **INDEXER}, {"format": "fp8_ds_mla", "index_format": "index_fp8"}),
    "shared keys": ("gemma4", {"global_head_dim": 64}, {"format": "fp8_e4m3"}),
}


@pytest.fixture(params=CASES)
def case(request):
    family, sizes, options = CASES[request.param]
    if request.param == "an indexer" and Version(version("transformers")) < Version("5.20"):
        pytest.skip(f"layers with an indexer are known from transformers 5.20 on, got {version('transformers')}")
    model = tiny(family, dtype=torch.bfloat16, **{"hidden_size": 256, "head_dim": 64, **sizes}).cuda()
    return model, {"page_size": 16, "chunk": 64, **options}, torch.randint(1, VOCABULARY, (3, 330), device="cuda")


@pytest.fixture
def strict(monkeypatch):
    """Loading and taking back wait for nothing, and come late: a stream that is not waited for shows."""

    def watched(kind, name):
        own = getattr(kind, name)

        def run(self, *args):
            torch.cuda.set_sync_debug_mode("error")
            try:
                if name in ("load", "save"):
                    torch.cuda._sleep(400_000)
                return own(self, *args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(kind, name, run)

    for kind, name in ((OffloadedStore, "load"), (OffloadedStore, "save"), (Pipe, "_load"), (Pipe, "close")):
        watched(kind, name)


@torch.inference_mode()
def test_steps_are_those_of_a_cache_on_the_device(case, strict):
    model, options, ids = case
    caches = [TersekvCache(model.config, **options), TersekvCache(model.config, **options).offload()]

    def same(part):
        want, got = (model(part, **over(cache)).logits for cache in caches)
        assert torch.equal(got, want)

    same(ids[:, :300])
    assert all(x.is_pinned() for layer in caches[1].paged for x in layer.store._host)
    for i in range(300, 312):
        same(ids[:, i : i + 1])
    for cache in caches:
        cache.batch_select_indices(torch.tensor([2, 0, 0], device="cuda"))
    for i in range(312, 322):
        same(ids[:, i : i + 1])
    other = copy.deepcopy(caches[1])
    assert all(x.is_pinned() for layer in other.paged for x in layer.store._host)
    same(ids[:, 322:325])
    caches[1] = other
    caches[0].crop(-3)
    same(ids[:, 325:])


@torch.inference_mode()
def test_the_device_holds_two_layers():
    model = tiny("llama", dtype=torch.bfloat16, num_hidden_layers=8, head_dim=64, hidden_size=256).cuda()
    ids = torch.randint(1, VOCABULARY, (2, 2000), device="cuda")
    cache = TersekvCache(model.config, format="fp8_e4m3").offload()
    model(ids[:, :16], **over(cache))
    cache.reset()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    model(ids, **over(cache))
    (pipe,) = cache._pipes.values()
    held = sum(x.numel() for x in pipe._buffers)
    assert held < 0.3 * cache.nbytes
