"""The shipped demo models: find, load, save."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .deepseek import DeepseekConfig, DeepseekLM, freqs_cis
from .llama import LlamaConfig, LlamaLM, cos_sin_cache

__all__ = [
    "MODELS",
    "DeepseekConfig",
    "DeepseekLM",
    "DemoModel",
    "LlamaConfig",
    "LlamaLM",
    "cos_sin_cache",
    "freqs_cis",
    "load",
    "save",
    "weights_path",
]

DemoModel = LlamaLM | DeepseekLM
WEIGHTS_DIR = Path(__file__).with_name("weights")
MODELS = {"llama": (LlamaConfig, LlamaLM), "deepseek": (DeepseekConfig, DeepseekLM)}


def weights_path(name: str) -> Path:
    return WEIGHTS_DIR / f"{name}.safetensors"


def load(
    name: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    path: Path | None = None,
) -> DemoModel:
    """The trained model `name` ("llama" | "deepseek"), in eval mode and without gradients."""
    if name not in MODELS:
        raise ValueError(f"demo model: want one of {sorted(MODELS)}, got {name!r}")
    config_class, model_class = MODELS[name]
    with safe_open(path or weights_path(name), framework="pt") as file:
        config = config_class(**json.loads(file.metadata()["config"]))
        state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    # Built on "meta": every weight comes from the file, and the caller's random state stays as it is.
    with torch.device("meta"):
        model = model_class(config)
    model.load_state_dict({key: x.to(device, dtype) for key, x in state.items()}, assign=True)
    return model.eval().requires_grad_(False)


def save(name: str, model: DemoModel, path: Path | None = None) -> Path:
    """Write the weights as bf16, the config as JSON in the header."""
    path = path or weights_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {key: x.detach().to("cpu", torch.bfloat16).contiguous() for key, x in model.state_dict().items()}
    save_file(state, path, metadata={"model": name, "config": json.dumps(asdict(model.config))})
    return path
