"""`--additional-config '{"tersekv": {"saved": "FILE"}}'`: vLLM's layers with the formats and attributes of a file.

A layer's number is in its name. When weights are loaded, and before vLLM asks what its pages take, each gets the cache
dtype of its formats; its pages then get the attributes.
"""

from __future__ import annotations

from typing import Any

from .saved_layers import SavedLayers, saved_layers
from .vllm_checkpoint import layer_number
from .vllm_pages import FORMATS

_OPTION = "additional_config"
_SAVED = f"{_OPTION}.tersekv.saved"


def saved_file(config: Any) -> str | None:
    """The file that a vLLM configuration names."""
    more = getattr(config, _OPTION, None)
    given = more.get("tersekv") if isinstance(more, dict) else None
    if given is None:
        return None
    if not isinstance(given, dict) or given.keys() != {"saved"} or not isinstance(given["saved"], str):
        raise ValueError(f'{_OPTION}: want {{"tersekv": {{"saved": FILE}}}}, got {{"tersekv": {given!r}}}')
    return given["saved"]


def layers_of(config: Any, heads: int, head_size: int) -> SavedLayers | None:
    """What this rank's layers of a model take from the file that its configuration names, if it does.

    Raises ValueError for a file of another model, and for cache dtypes that are not the file's.
    """
    path = saved_file(config)
    if path is None:
        return None
    ranks, rank = config.parallel_config.tensor_parallel_size, 0
    if ranks > 1:
        from vllm.distributed import get_tensor_model_parallel_rank

        rank = get_tensor_model_parallel_rank()
    found = saved_layers(_SAVED, path, heads, (head_size,), rank, ranks)
    count = config.model_config.get_total_num_hidden_layers()
    if len(found.formats) != count:
        got = f"{len(found.formats)} in {path!r}"
        raise ValueError(f"{_SAVED}: want attributes of {count} layers, got {got}")
    cache = config.cache_config
    _require_dtypes(found, cache.cache_dtype, list(getattr(cache, "kv_cache_dtype_skip_layers", None) or []))
    return found


def _require_dtypes(found: SavedLayers, dtype: str, skipped: list[str]) -> None:
    """Raise ValueError for formats that vLLM has no cache dtype for, and for options that say otherwise."""
    of = {both: _cache_dtypes(both) for both in found.formats}
    if not all(of.values()):
        got = ", ".join("/".join(dict.fromkeys(both)) for both, names in of.items() if not names)
        raise ValueError(f"{_SAVED}: want formats that vLLM has a cache dtype for, got {got} in {found.path!r}")
    names = [name for each in of.values() for name in each]
    if dtype not in ("auto", *names) or skipped:
        want = f"auto or {', '.join(names)} without kv_cache_dtype_skip_layers, as {found.path!r} has its layers"
        raise ValueError(f"kv_cache_dtype: want {want}, got {dtype} with {' '.join(skipped) or 'none'}")


def _cache_dtypes(both: tuple[str, str]) -> list[str]:
    """vLLM's names for pages of these formats; whether rows lie rotated is for the file to say."""
    return [n for n, kind in FORMATS.items() if (kind.k.name, kind.v.name) == both and not kind.rotated]


def cache_dtype_of(found: SavedLayers, layer_name: str) -> str:
    """vLLM's name for the pages of a layer."""
    return _cache_dtypes(found.formats[index_of(found, layer_name)])[0]


def index_of(found: SavedLayers, layer_name: str) -> int:
    """Which of the model's layers it is, by the number in its name."""
    number = layer_number(layer_name)
    if number is None or number >= len(found.formats):
        want = f"layers named by a number below {len(found.formats)}, the layers in {found.path!r}"
        raise ValueError(f"{_SAVED}: want {want}, got {layer_name!r}")
    return number
