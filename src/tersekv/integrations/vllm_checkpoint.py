"""What a checkpoint says of its cache: which layers it has quantised and to what, and whether its scales can be scales.

vLLM gives all layers one cache dtype, though ModelOpt names those it has quantised, each with an algorithm
(`kv_cache_quantized_layers`). It loads scales as they are, and lets those that are missing be 1.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors import safe_open
from torch import Tensor

from ..formats import BLOCK, TENSOR, KVFormat
from .vllm_pages import FORMATS

_log = logging.getLogger("tersekv")
_MAP = "kv_cache_quantized_layers"
_SCALES = ("k_scale", "v_scale", "kv_scale")  # what a name ends in, behind its last dot
_ALGORITHMS = {"FP8": "fp8_e4m3", "NVFP4": "nvfp4", "FP8_K_NVFP4_V": "fp8_e4m3/nvfp4"}


def layer_number(name: str) -> int | None:
    """A model's layer by its name, `model.layers.3.self_attn.attn`; None where that has no number, or several."""
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    return numbers[0] if len(numbers) == 1 else None


def layer_with(impl: Any, config: Any) -> tuple[str, Any]:
    """vLLM's layer that has this implementation, with its name."""
    layers = config.compilation_config.static_forward_context
    return next((name, layer) for name, layer in layers.items() if getattr(layer, "impl", None) is impl)


def quantised_layers(config: Any) -> dict[int, str] | None:
    """The cache dtypes of the layers that a checkpoint's map names; None without one, or with a --kv-cache-dtype that
    is not of the map: that is the user's word.

    Raises ValueError for a map that cannot be read, and where vLLM would load no scales.
    """
    quant = _quantization(config)
    quant = {**quant, **(quant.get("quantization") or {})}
    of_layers = quant.get(_MAP)
    if not of_layers:
        return None
    found = {}
    for name, layer in of_layers.items():
        algorithm, number = layer.get("quant_algo"), layer_number(name)
        if algorithm not in _ALGORITHMS or number is None:
            want = f"layers named by one number, each with a quant_algo of {', '.join(_ALGORITHMS)}"
            raise ValueError(f"{_MAP}: want {want}, got {name!r} with {algorithm!r}")
        found[number] = _ALGORITHMS[algorithm]
    cache_dtype = config.cache_config.cache_dtype
    if cache_dtype == "auto":  # vLLM knows no name for the whole, and would drop the scales
        names = ", ".join(sorted(set(found.values())))
        raise ValueError(f"kv_cache_dtype: want one of {names}, as the checkpoint's {_MAP} has its layers, got auto")
    return found if FORMATS.get(cache_dtype) in [FORMATS[name] for name in found.values()] else None


def require_alike(config: Any) -> None:
    """Raise NotImplementedError for a map that leaves some layers in 16 bits, or has several formats."""
    found = quantised_layers(config)
    if found is not None:
        count = config.model_config.get_total_num_hidden_layers()
        if len(found) != count or len(set(found.values())) != 1:
            got = f"{', '.join(sorted(set(found.values())))} in {len(found)}"
            raise NotImplementedError(f"{_MAP}: want {count} layers alike for latent attention, got {got}")


def require_scales(name: str, layer: Any, cache_dtype: str, config: Any, sides: str = "kv") -> None:
    """Raise ValueError for scales of the checkpoint that are none, or that should be loaded from it and are not."""
    kind = FORMATS.get(cache_dtype)
    if kind is None or config.load_config.load_format == "dummy":
        return
    for side, f in (("k", kind.k), ("v", kind.v)):
        if f.scale in (TENSOR, BLOCK) and side in sides:
            _require_scale(name, layer, side, f, config)


def _require_scale(layer_name: str, layer: Any, side: str, f: KVFormat, config: Any) -> None:
    name = f"{layer_name}.{side}_scale"
    values = getattr(layer, f"_{side}_scale").detach().float().flatten()
    if not bool((values.isfinite() & (values > 0)).all()):
        raise ValueError(f"{name}: want finite numbers above 0 for {f.name}, got {values.tolist()}")
    quant, model, number = _quantization(config), config.model_config, layer_number(layer_name)
    # A draft's layers may be of no quantised checkpoint.
    if not quant or getattr(layer, "quant_config", None) is None or number is None or not bool((values == 1).all()):
        return
    kept = _scales(model.model, model.revision, config.load_config.download_dir)
    if kept is None:
        return
    endings = f"{side}_scale", "kv_scale"
    of_layer = [x for n, x in kept.items() if layer_number(n) == number and n.rpartition(".")[2] in endings]
    scheme = quant.get("kv_cache_scheme") or {}
    # ModelOpt may leave out scales of 1.
    if not of_layer and quant.get("quant_method") == "compressed-tensors" and scheme.get("dynamic") is False:
        raise ValueError(f"{name}: want it in the checkpoint, whose kv_cache_scheme is static, got none for {f.name}")
    if any(x.float().ne(1).any() for x in of_layer):
        got = [x.flatten().tolist() for x in of_layer]
        raise ValueError(f"{name}: want the checkpoint's {got} for {f.name}, got 1: this vLLM does not load it")


def _quantization(config: Any) -> dict[str, Any]:
    """A checkpoint's quantization_config; vLLM puts a hf_quant_config.json into its place."""
    model = config.model_config
    hf = getattr(model, "model_arch_config", None) or getattr(model, "hf_config", None)  # 0.26 has the second alone
    return getattr(hf, "quantization_config", None) or {}


@lru_cache(maxsize=2)
def _scales(model: str, revision: str | None, downloads: str | None) -> dict[str, Tensor] | None:
    """A checkpoint's scales of K and V by name, None where its safetensors are not on this machine."""
    folder = Path(model)
    if not folder.is_dir():
        try:
            folder = Path(
                snapshot_download(
                    model, revision=revision, cache_dir=downloads, local_files_only=True, allow_patterns="*.safetensors"
                )
            )
        except (LocalEntryNotFoundError, HFValidationError):
            folder = Path()
    files = sorted(folder.glob("*.safetensors")) if folder != Path() else []
    if not files:
        _log.warning("tersekv: no safetensors of %s are on this machine: its scales of K and V are not checked", model)
        return None
    found = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            names = [n for n in opened.keys() if n.rpartition(".")[2] in _SCALES]  # noqa: SIM118
            found.update({n: opened.get_tensor(n) for n in names})
    return found
