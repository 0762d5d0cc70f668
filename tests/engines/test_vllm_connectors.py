"""Which connectors get blocks whose heads have their scales in tails, and which blocks can have them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import vllm_cpu  # noqa: F401 (before anything of vLLM)
from vllm.config import KVTransferConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode
from vllm.v1.kv_cache_layout import KVCacheLayout

from tersekv.integrations import vllm_attention
from tersekv.integrations.vllm import register
from tersekv.integrations.vllm_attention import TersekvBackend, TersekvMetadataBuilder
from tersekv.integrations.vllm_connectors import takes_tokens
from tersekv.integrations.vllm_pages import pages_of

register()
BLOCKS, TOKENS = "OffloadingConnector", "ExampleConnector"


@pytest.mark.parametrize(("transfer", "tokens"), [
    ({"kv_connector": BLOCKS}, False),
    ({"kv_connector": "NixlConnector"}, False),
    ({"kv_connector": TOKENS}, True),
    ({"kv_connector": "LMCacheConnectorV1"}, True),
    ({"kv_connector": BLOCKS, "kv_connector_module_path": "mine"}, True),
    ({"kv_connector": "MultiConnector", "kv_connector_extra_config": {
        "connectors": [{"kv_connector": BLOCKS}]}}, False),
    ({"kv_connector": "MultiConnector", "kv_connector_extra_config": {
        "connectors": [{"kv_connector": BLOCKS}, {"kv_connector": TOKENS}]}}, True),
    ({"kv_connector": "MultiConnector"}, True),
])  # fmt: skip
def test_who_takes_tokens_out_of_blocks(transfer, tokens):
    config = SimpleNamespace(kv_transfer_config=KVTransferConfig(kv_role="kv_both", **transfer))
    assert takes_tokens(config) == tokens


@pytest.mark.parametrize(("mode", "tails"), [
    ("fp8", False), ("auto", False), ("int8_per_token_head", True), ("nvfp4", True), ("fp8_e4m3+rotated", False),
    ("fp8_e4m3/int4_per_token_head", True),
])  # fmt: skip
def test_only_pages_with_scales_ask_peers_for_equal_blocks(mode, tails, monkeypatch):
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=32, dtype=torch.uint8, kv_quant_mode=get_kv_quant_mode(mode)
    )
    builder, asked = TersekvMetadataBuilder(spec, ["layer"], None, torch.device("cpu")), []
    monkeypatch.setattr(vllm_attention, "refuse_other_block_sizes", lambda: asked.append(True))
    one = torch.ones(1, dtype=torch.int32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    builder.build(0, CommonAttentionMetadata(starts, starts, one, 1, 1, 1, 1, one[None], one, True))
    assert asked == [True] * tails


def test_a_block_in_smaller_pieces_is_refused():
    assert set(KVCacheLayout) - set(TersekvBackend.supported_kv_cache_layouts()) == {
        KVCacheLayout.LHBNC,
        KVCacheLayout.BHLNC,
    }
    cache = torch.zeros(4, 2 * 16, 2, 72, dtype=torch.uint8)[:, ::2].transpose(1, 2)
    one = torch.ones(())
    with pytest.raises(ValueError, match="kv_cache: want a head's or a block's bytes in one piece"):
        pages_of(cache, "int8_per_token_head", 32, one, one)
