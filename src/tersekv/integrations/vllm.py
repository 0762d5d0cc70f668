"""tersekv as an attention backend of vLLM: `vllm serve MODEL --attention-backend TERSEKV --kv-cache-dtype fp8`.

For models with latent attention, such as DeepSeek's, the name is TERSEKV_MLA; where an indexer chooses its keys, as in
DeepSeek V3.2, TERSEKV_MLA_SPARSE.

Installing tersekv is enough: vLLM calls `register` in each of its processes, through the entry point `tersekv` of its
plugin group `vllm.general_plugins`. Releases before 0.32 know no names of plugins: there it is CUSTOM.

What it covers, what it refuses and what each release of vLLM lacks is in docs/serving.md.
"""

from __future__ import annotations

from typing import Any

NAME = "TERSEKV"
BACKEND = "tersekv.integrations.vllm_attention.TersekvBackend"
MLA_NAME = "TERSEKV_MLA"
MLA_BACKEND = "tersekv.integrations.vllm_mla.TersekvMLABackend"
MLA_SPARSE_NAME = "TERSEKV_MLA_SPARSE"
MLA_SPARSE_BACKEND = "tersekv.integrations.vllm_mla_sparse.TersekvMLASparseBackend"
MLA_PREFILL = "tersekv.integrations.vllm_mla_prefill.TersekvMLAPrefill"
_FIRST_MODE = 1 << 16  # of our members of vLLM's KVQuantMode


def register() -> None:
    """Make tersekv the backends TERSEKV, CUSTOM, TERSEKV_MLA and TERSEKV_MLA_SPARSE, and its cache dtypes known.
    Calling it again changes nothing."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    if hasattr(AttentionBackendEnum, "register"):
        for name, backend in ((NAME, BACKEND), (MLA_NAME, MLA_BACKEND), (MLA_SPARSE_NAME, MLA_SPARSE_BACKEND)):
            if name not in AttentionBackendEnum.__members__:
                register_backend(name, backend)
                # A spawned process unpickles vLLM's configuration before it loads plugins: the name must bring itself.
                AttentionBackendEnum[name].__reduce_ex__ = lambda protocol, name=name: (_registered, (name,))
        # Every release that can name TERSEKV_MLA has this.
        from vllm.v1.attention.backends.mla.prefill import MLAPrefillBackendEnum, register_mla_prefill_backend

        register_mla_prefill_backend(MLAPrefillBackendEnum.CUSTOM, MLA_PREFILL)
    _register_cache_dtypes()


def _registered(name: str) -> Any:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register()
    return AttentionBackendEnum[name]


def name() -> str:
    """What vLLM calls the backend."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return NAME if NAME in AttentionBackendEnum.__members__ else "CUSTOM"


def _register_cache_dtypes() -> None:
    """Values of --kv-cache-dtype that vLLM has no name for, in the releases that take more (0.33 does)."""
    from vllm.config import cache

    from .vllm_pages import OWN

    if not hasattr(cache, "register_kv_cache_dtype"):
        return
    for cache_dtype, kind in OWN.items():
        if cache_dtype not in cache.KV_CACHE_DTYPES:
            mode = _quant_mode(cache_dtype)
            handler = {
                "name": cache_dtype,
                "torch_dtype": lambda self, dtype=kind.dtype: dtype,
                "quant_mode": lambda self, mode=mode: mode,
            }
            cache.register_kv_cache_dtype(cache_dtype)(type("Handler", (), handler))


def _quant_mode(cache_dtype: str) -> Any:
    """A member of vLLM's KVQuantMode of the dtype's name: a layer's spec tells its backend nothing else of the dtype,
    and CUSTOM, made for dtypes like ours, has the number of another member."""
    from vllm.v1.kv_cache_interface import KVQuantMode

    from .vllm_pages import OWN

    number = _FIRST_MODE + list(OWN).index(cache_dtype)
    members = KVQuantMode._value2member_map_
    if number not in members:
        mode = int.__new__(KVQuantMode, number)
        mode._name_, mode._value_ = cache_dtype, number
        mode.__reduce_ex__ = lambda protocol: (_quant_mode, (cache_dtype,))  # type: ignore[method-assign,assignment]
        members[number] = mode
    return members[number]
