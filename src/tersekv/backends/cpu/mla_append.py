"""mla_append, natively: rotate queries and rotary keys, quantise latents, and write latent rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tersekv.formats import BF16, FP16, TENSOR, latent_format, rope_dtype

from . import append, library, records
from .append import query_streams, stored
from .library import Bound, Launch
from .records import Facts, Place

_TENSORS = (
    "q_rope", "q_nope", "kv_c", "k_pe", "cos_sin_cache", "positions", "q_rope_out", "q_nope_out", "ckv", "kpe",
    "ckv_scale_cache", "q_scale_t", "kv_scale_t", *append.PLACES,
)  # fmt: skip
# That the kernels store by name: what they do not know, they would cast.
_FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla")
_HALF = {f.storage: f for f in (BF16, FP16)}


def why_not(f: SimpleNamespace) -> str | None:
    return library.why_not(f) if f.format in _FORMATS else f"has no {f.format}"


def configure(f: SimpleNamespace) -> Launch:
    facts, fmt = Facts(f, _TENSORS), latent_format(f.format)
    scales = Place(records.NONE) if f.ckv_scale_cache is None else facts.place("ckv_scale_cache", heads=False)
    latent = stored(facts, "kv_c", fmt, facts.place("ckv", heads=False), scales, facts.scale("kv_scale"))
    # Only a scale of the tensor covers the rotary part; group scales are the latent's alone.
    rotary_format = fmt if fmt.scale == TENSOR else _HALF[rope_dtype(fmt)]
    rotary = stored(
        facts, "k_pe", rotary_format, facts.place("kpe", heads=False), Place(records.NONE), facts.scale("kv_scale"),
        rotated=f.cos_sin_cache is not None,
    )  # fmt: skip
    streams = [*query_streams(facts), latent, rotary]
    return Launch("append", append.append(facts, f.kv_c, f.ckv, streams), _TENSORS)


def run(call: Any, config: Launch) -> None:
    config.run(call)


def bind(config: Launch, at: dict[str, int]) -> Bound:
    return config.bind(at)
