"""tersekv as an attention backend of SGLang: `TERSEKV_SGLANG_FORMAT=nvfp4 … --attention-backend tersekv`.

Installing tersekv is enough: SGLang calls `register` in each of its processes, through the entry point `tersekv` of its
plugin group `sglang.srt.plugins`. `--kv-cache-dtype` takes no names but SGLang's own, so an environment variable names
the format of the pool, a recipe, or a file of `tersekv eval --save`; without it the format is the one of
`--kv-cache-dtype`.

What it covers and what it refuses is in docs/serving.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NAME = "tersekv"


def register() -> None:
    """Make tersekv an attention backend with a pool of its own. Calling it again changes nothing."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME in ATTENTION_BACKEND_CHOICES:
        return
    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_backend)
    sizes = "sglang.srt.model_executor.pool_configurator."
    for place, hook in (
        ("sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._resolve_kv_pool_class", _pool_class),
        (sizes + "DefaultPoolConfigurator._compute_cell_size", _bytes_per_token),
        (sizes + "HybridSWAPoolConfigurator.__init__", _bytes_of_both_pools),
        ("sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler.get_mha_host_pool_cls", _host_pool_class),
        ("sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend", _draft_backend),
    ):
        HookRegistry.register(place, hook, HookType.AROUND)


def _backend(runner: Any) -> Any:
    if runner.use_mla_backend:
        from .sglang_mla import TersekvMLABackend

        return TersekvMLABackend(runner)
    from .sglang_attention import TersekvBackend

    return TersekvBackend(runner)


def _draft_backend(
    original: Callable,
    factory: Any,
    name: str,
    backends: dict[str, Callable],
    error: str,
    stamps_children: bool = False,
) -> Any:
    """Of a draft model, for its steps in one object, or for what follows a verification."""

    def own() -> tuple[str, Any]:
        backend = _backend(factory.draft_model_runner)
        if not stamps_children:
            return NAME, backend
        from .sglang_drafts import DraftSteps

        return NAME, DraftSteps(backend, factory.topk, factory.speculative_num_steps)

    return original(factory, name, {**backends, NAME: own}, error, stamps_children)


def _chosen() -> bool:
    """Whether this process attends with tersekv. Raises ValueError where another backend would read its pool."""
    from sglang.srt.runtime_context import attention_backends

    prefill, decode = attention_backends()
    if (prefill == NAME) != (decode == NAME):
        raise ValueError(f"attention_backend: want {NAME} for prefill and decode, got {prefill!r} and {decode!r}")
    return prefill == NAME


def _pool_class(original: Callable, configurator: Any, *, kind: str, default: type) -> type:
    if kind not in ("mha", "mla") or not _chosen():
        return original(configurator, kind=kind, default=default)
    if kind == "mla":
        from .sglang_mla_pool import TersekvMLAPool

        return TersekvMLAPool
    from .sglang_pool import TersekvDraftPool, TersekvPool

    return TersekvDraftPool if configurator.is_draft_worker else TersekvPool


def _host_pool_class(original: Callable, buffer_info: Any) -> type:
    """Of a hierarchical cache."""
    from .sglang_host import host_pool_class

    return host_pool_class(original, buffer_info)


def _bytes_per_token(original: Callable, configurator: Any, kvc: Any, num_layers: int) -> int:
    """What a token takes in all layers, from which SGLang sizes its pool."""
    own = original(configurator, kvc, num_layers)
    if not _chosen():
        return own
    if kvc.use_mla_backend:
        from .sglang_mla_pool import latents, row_bytes

        model = kvc.model_config
        return num_layers * row_bytes(latents(kvc.kv_cache_dtype), model.kv_lora_rank, model.qk_rope_head_dim)
    from .sglang_pool import bytes_of_heads

    return bytes_of_heads(kvc, num_layers)[0]


def _bytes_of_both_pools(original: Callable, configurator: Any, kvc: Any) -> None:
    """The same for models whose layers with a window have a pool of their own: what a token takes in one layer."""
    original(configurator, kvc)
    if not kvc.use_mla_backend and _chosen():
        from .sglang_pool import bytes_of_heads

        configurator._full_per_token, configurator._swa_per_token = bytes_of_heads(kvc, 1)
        configurator._recompute_cell_size()
