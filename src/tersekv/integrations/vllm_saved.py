"""`--additional-config '{"tersekv": {"saved": "FILE"}}'`: vLLM's layers with the attributes of a file.

A spec tells its backend the cache dtype and not its layer. So `--kv-cache-dtype` says what pages take, with
`--kv-cache-dtype-skip-layers` for layers in 16 bits, and has to agree with the file; the layer's number, which its name
holds, then picks its formats and attributes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from .saved_layers import SavedLayers, saved_layers
from .vllm_pages import FORMATS, kind_of

_OPTION = "additional_config"
_SAVED = f"{_OPTION}.tersekv.saved"
_SIXTEEN = ("auto", "bfloat16", "float16")


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
    """Raise ValueError, with the options to give, unless vLLM's pages have each layer's bytes."""
    plain = {i for i, both in enumerate(found.formats) if both in (("bf16", "bf16"), ("fp16", "fp16"))}
    others = [i for i in range(len(found.formats)) if i not in plain]
    names, wanted = list(_SIXTEEN), set[str]()
    if others:
        sizes, attributes = found.found.sizes, found.found.attributes
        rotated = all({"k_signs", "v_signs"} <= attributes[i].keys() for i in others)
        named = {both: _names(both, rotated) for both, _ in Counter(found.formats[i] for i in others).most_common()}
        taken = {kind_of(*both).row_bytes(sizes["head_dim"], sizes["head_dim_v"]) for both in named}
        if not all(named.values()) or len(taken) > 1:
            got = ", ".join("/".join(dict.fromkeys(both)) for both in named)
            raise ValueError(
                f"{_SAVED}: want formats of equal bytes that vLLM has a cache dtype for, beside layers in 16 bits "
                f"(+ends=bf16), got {got} in {found.path!r}"
            )
        names, wanted = [name for every in named.values() for name in every], {str(i) for i in plain}
    if dtype not in names or {*skipped} != wanted:
        want, got = (
            f"{name} with kv_cache_dtype_skip_layers {' '.join(map(str, layers)) or 'none'}"
            for name, layers in ((names[0], sorted(wanted, key=int)), (dtype, skipped))
        )
        raise ValueError(f"kv_cache_dtype: want {want}, as {found.path!r} has its layers, got {got}")


def _names(both: tuple[str, str], rotated: bool) -> list[str]:
    """The cache dtypes whose pages hold these formats."""
    return [n for n, kind in FORMATS.items() if (kind.k.name, kind.v.name) == both and (rotated or not kind.rotated)]


def index_of(found: SavedLayers, layer_name: str) -> int:
    """Which of the model's layers it is, by the number in its name."""
    numbers = [int(part) for part in layer_name.split(".") if part.isdecimal()]
    if len(numbers) != 1 or numbers[0] >= len(found.formats):
        want = f"layers named by a number below {len(found.formats)}, the layers in {found.path!r}"
        raise ValueError(f"{_SAVED}: want {want}, got {layer_name!r}")
    return numbers[0]
