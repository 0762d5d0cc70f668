"""vLLM's NIXL connector over tersekv's pages: what it registers and the byte ranges that it makes of block ids.

NIXL itself is not here: a stand-in keeps the ranges that vLLM prepares, and the tests copy them. Peers are pages of
tersekv in this process, of one rank or of two that share the heads.
"""

from __future__ import annotations

import ctypes
import socket
from typing import Any

import msgspec
import pytest
import torch
from checkpoints import llama
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker, metadata
from vllm_cpu import engine

from tersekv.demo import models
from tersekv.integrations.vllm_connectors import refuse_other_block_sizes
from tersekv.integrations.vllm_pages import FORMATS, pages_of
from tersekv.ops.append import append

BLOCK = 16


class Nixl:
    """What vLLM's worker asks of NIXL."""

    def __init__(self, *_: Any) -> None:
        self.prepared: list[Any] = []
        self.registered: list[tuple[int, int, int, str]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None

    def get_reg_descs(self, ranges: list, mem_type: str) -> list:
        self.registered += ranges
        return ranges

    def get_agent_metadata(self) -> bytes:
        return b"agent"

    def add_remote_agent(self, agent: bytes) -> str:
        return "peer"

    def prep_xfer_dlist(self, agent: str, ranges: Any, mem_type: str) -> int:
        self.prepared.append(ranges)
        return len(self.prepared) - 1

    def get_new_notifs(self) -> dict:
        return {}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def nixl(monkeypatch):
    monkeypatch.setattr(base_worker, "NixlWrapper", Nixl)
    monkeypatch.setattr(base_worker, "nixl_agent_config", None)
    monkeypatch.setattr(base_worker, "check_nixl_version", lambda _: None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free.getsockname()[1]))


def options(name: str) -> dict[str, Any]:
    connector = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    return {
        "kv_cache_dtype": name, "dtype": "float32", "block_size": BLOCK, "num_gpu_blocks_override": 16,
        "max_model_len": 128, "kv_transfer_config": connector,
    }  # fmt: skip


def blocks(worker: Any, handle: int, num_blocks: int) -> list[list[tuple[int, int]]]:
    """(address, bytes) of every block of every layer, of strided ranges (address, bytes, device, stride, count)."""
    ranges = worker.nixl_wrapper.prepared[handle].tolist()
    every = [(a + i * stride, n) for a, n, _, stride, count in ranges for i in range(count)]
    return [every[i : i + num_blocks] for i in range(0, len(every), num_blocks)]


def peer(worker: Any, caches: list[torch.Tensor], block_size: int = BLOCK) -> metadata.NixlAgentMetadata:
    """What a rank of another engine with these pages of its layers would send of itself."""
    payload = worker.xfer_handshake_metadata
    meta = msgspec.msgpack.Decoder(metadata.NixlAgentMetadata).decode(payload.agent_metadata_bytes)
    page, n = caches[0][0].nbytes, len(caches)
    meta.engine_id, meta.num_blocks, meta.block_size = "peer", len(caches[0]), block_size
    meta.kv_caches_base_addr = [c.data_ptr() for c in caches]
    meta.block_lens, meta.block_strides, meta.region_num_blocks = [page] * n, [page] * n, [len(caches[0])] * n
    return meta


def filled(name: str, rows: list[tuple[torch.Tensor, torch.Tensor]], num_blocks: int) -> list[torch.Tensor]:
    """Pages of each layer with its rows (k, v) [T, H, D], slot after slot."""
    kind, (tokens, heads, dim) = FORMATS[name], rows[0][0].shape
    caches = []
    for k, v in rows:
        cache = torch.zeros(num_blocks, heads, BLOCK, kind.row_bytes(dim, dim), dtype=torch.uint8)
        one = torch.full((), 0.02)
        append(k, v, pages_of(cache.view(kind.dtype), name, dim, one, one), torch.arange(tokens))
        caches.append(cache)
    return caches


SHARED = ("fp8", "int8_per_token_head", "int4_per_token_head+rotated", "fp8_e4m3/int4_per_token_head")


@pytest.mark.parametrize(("name", "ranks"), [("nvfp4", 1), *((n, r) for n in SHARED for r in (1, 2))])
def test_the_bytes_of_block_ids_are_a_head_or_a_block_with_its_scales(model, nixl, name, ranks):
    c, num_blocks = models.load("llama").config, 8
    torch.manual_seed(0)
    size = c.num_layers, 2, num_blocks * BLOCK, c.num_kv_heads, c.head_dim
    rows = [(k, v) for k, v in torch.randn(size)]
    whole = filled(name, rows, num_blocks)
    share = c.num_kv_heads // ranks
    sent = [
        filled(name, [tuple(x[:, r * share : (r + 1) * share] for x in both) for both in rows], num_blocks)
        for r in range(ranks)
    ]
    there, here = [5, 0, 3], [9, 2, 11]
    with engine(model, **options(name)):
        worker = get_kv_transfer_group().connector_worker
        assert worker.kv_cache_layout == "LBHNC"
        assert {*worker.block_len_per_layer} == {whole[0][0].nbytes}, "pages with their scales"
        mine = [x.view(torch.uint8) for x in worker.device_kv_caches.values()]
        for r in range(ranks):
            worker.add_remote_agent(peer(worker, sent[r]), r, ranks)
        split = worker.src_xfer_handles_by_tp_ratio
        local = [worker.src_xfer_handles_by_block_size[BLOCK]] if ranks == 1 else split[-ranks, BLOCK]
        for r, handle in enumerate(local):
            sources = blocks(worker, worker.dst_xfer_side_handles["peer"][r], num_blocks)
            for source, target in zip(sources, blocks(worker, handle, len(mine[0])), strict=True):
                for i, j in zip(there, here, strict=True):
                    (start, nbytes), (end, wanted) = source[i], target[j]
                    assert nbytes == wanted
                    ctypes.memmove(end, start, nbytes)
        for got, want in zip(mine, whole, strict=True):
            assert torch.equal(got[here], want[there])
        refuse_other_block_sizes()  # these are equal


def test_a_peer_whose_blocks_have_another_size_is_refused(model, nixl):
    c = models.load("llama").config
    small = [torch.zeros(8, c.num_kv_heads, 8, 2 * (c.head_dim + 4), dtype=torch.uint8) for _ in range(c.num_layers)]
    with engine(model, **options("int8_per_token_head")):
        worker = get_kv_transfer_group().connector_worker
        worker.add_remote_agent(peer(worker, small, 8), 0, 1)
        with pytest.raises(RuntimeError, match=r"--block-size: want 16 in engine peer too, got 8"):
            refuse_other_block_sizes()
