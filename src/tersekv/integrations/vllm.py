"""tersekv as an attention backend of vLLM: `vllm serve MODEL --attention-backend TERSEKV --kv-cache-dtype fp8`.

Installing tersekv is enough: vLLM calls `register` in each of its processes, through the entry point `tersekv` of its
plugin group `vllm.general_plugins`. Releases before 0.32 know no names of plugins: there it is CUSTOM.

What it covers, what it refuses and what each release of vLLM lacks is in docs/serving.md.
"""

from __future__ import annotations

from typing import Any

NAME = "TERSEKV"
BACKEND = "tersekv.integrations.vllm_attention.TersekvBackend"


def register() -> None:
    """Make tersekv the backends TERSEKV and CUSTOM. Calling it again changes nothing; nothing else is imported."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    if hasattr(AttentionBackendEnum, "register") and NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, BACKEND)
        # A spawned process unpickles vLLM's configuration before it loads plugins: the name must bring itself along.
        AttentionBackendEnum[NAME].__reduce_ex__ = lambda protocol: (_registered, ())


def _registered() -> Any:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register()
    return AttentionBackendEnum[NAME]


def name() -> str:
    """What vLLM calls the backend."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return NAME if NAME in AttentionBackendEnum.__members__ else "CUSTOM"
