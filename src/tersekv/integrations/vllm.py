"""tersekv as an attention backend of vLLM: `vllm serve MODEL --attention-backend CUSTOM --kv-cache-dtype fp8`.

Installing tersekv is enough: vLLM calls `register` in each of its processes, through the entry point `tersekv` of its
plugin group `vllm.general_plugins`.

Written against the public v1 interface of vLLM 0.28 (`vllm.v1.attention.backend`, pages of the logical shape
[blocks, heads, tokens, content]), and against nothing else. It has never run inside vLLM: tests/integrations holds it
against a stub of that interface. What it covers, and what it refuses, is in docs/serving.md.
"""

from __future__ import annotations

BACKEND = "tersekv.integrations.vllm_attention.TersekvBackend"


def register() -> None:
    """Make tersekv vLLM's CUSTOM attention backend. Calling it again changes nothing; nothing else is imported yet."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
