"""Which of vLLM's KV connectors move whole blocks, or a block's heads: these leave scales with their codes.

For them each head of a block has its scales in its tail (`vllm_pages.py`), which is one piece of the block's bytes, as
it is in vLLM's own order of heads and tokens. A connector that takes tokens out of blocks, or is not known to do
otherwise, gets every row with its scales behind it, which only slower kernels read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

_WHOLE_BLOCKS = ("OffloadingConnector", "SimpleCPUOffloadConnector", "DecodeBenchConnector")
# They put blocks of another size together token by token, which `refuse_other_block_sizes` finds out.
_EQUAL_BLOCKS = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")


def takes_tokens(config: Any) -> bool:
    """Whether a connector of this vLLM configuration may take tokens out of blocks."""
    return not all(_moves_blocks(*connector) for connector in _connectors(config.kv_transfer_config))


def _connectors(transfer: Any) -> Iterator[tuple[str | None, str | None]]:
    """Name and module of each connector, those of a MultiConnector in its place."""
    if transfer.kv_connector == "MultiConnector" and transfer.kv_connector_module_path is None:
        for one in transfer.kv_connector_extra_config.get("connectors", [{}]):
            yield one.get("kv_connector"), one.get("kv_connector_module_path")
    else:
        yield transfer.kv_connector, transfer.kv_connector_module_path


def _moves_blocks(name: str | None, module: str | None) -> bool:
    if module is not None:  # of a plugin, whatever its name
        return False
    return name in _WHOLE_BLOCKS or (name in _EQUAL_BLOCKS and _knows_peers())


def _knows_peers() -> bool:
    """Whether a release tells what NIXL's peers have."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.utils import EngineTransferInfo
    except ImportError:
        return False
    return "remote_block_size" in EngineTransferInfo.__annotations__


def refuse_other_block_sizes() -> None:
    """Raise RuntimeError for a peer of this process's connector whose blocks have another number of tokens."""
    if not has_kv_transfer_group():
        return
    connector = get_kv_transfer_group()
    for one in getattr(connector, "_connectors", None) or [connector]:
        topology = getattr(getattr(one, "connector_worker", None), "transfer_topo", None)
        if topology is None:  # of another kind, or nothing is registered yet
            continue
        for (engine, _), peer in topology._engines.items():
            if peer.remote_block_size != topology.block_size:
                raise RuntimeError(
                    f"--block-size: want {topology.block_size} in engine {engine} too, got {peer.remote_block_size}: "
                    "blocks of tersekv keep scales in tails, and are not put together from smaller ones"
                )
