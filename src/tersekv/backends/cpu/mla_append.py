"""mla_append, natively: rotates queries and rotary keys, quantizes latents, and stores latent rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tersekv.formats import BF16, FP16, TENSOR, latent_format, rope_dtype

from . import append, library, records
from .append import make_quantized_row_write, make_query_row_writes
from .library import BoundLaunch, NativeLaunch
from .records import CallFacts, StridedTensor

_TENSORS = (
    "q_rope", "q_nope", "kv_c", "k_pe", "cos_sin_cache", "positions", "q_rope_out", "q_nope_out", "ckv", "kpe",
    "ckv_scale_cache", "q_scale_t", "kv_scale_t", *append.SLOT_FIELDS,
)  # fmt: skip
# Formats that the kernels store; an unknown one they would cast.
_FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "fp8_v4", "fp8_v41")
_HALF = {f.storage: f for f in (BF16, FP16)}


def why_not(f: SimpleNamespace) -> str | None:
    return library.why_not(f) if f.format in _FORMATS else f"has no {f.format}"


def configure(f: SimpleNamespace) -> NativeLaunch:
    facts, fmt = CallFacts(f, _TENSORS), latent_format(f.format)
    scales = (
        StridedTensor(records.NONE)
        if f.ckv_scale_cache is None
        else facts.address_index_and_strides("ckv_scale_cache", has_heads=False)
    )
    latent = make_quantized_row_write(
        facts, "kv_c", fmt, facts.address_index_and_strides("ckv", has_heads=False), scales, facts.scale("kv_scale")
    )
    row_writes = [*make_query_row_writes(facts), latent]
    if f.kpe.shape[-1]:
        # Only a per-tensor scale applies to the rotary part; group scales are the latent's alone.
        rotary_format = fmt if fmt.scale == TENSOR else _HALF[rope_dtype(fmt)]
        row_writes.append(make_quantized_row_write(
            facts, "k_pe", rotary_format, facts.address_index_and_strides("kpe", has_heads=False),
            StridedTensor(records.NONE), facts.scale("kv_scale"), apply_rope=f.cos_sin_cache is not None,
        ))  # fmt: skip
    return NativeLaunch("append", append.make_append_record(facts, f.kv_c, f.ckv, row_writes), _TENSORS)


def run(call: Any, config: NativeLaunch) -> None:
    config.run(call)


def bind(config: NativeLaunch, at: dict[str, int]) -> BoundLaunch:
    return config.bind(at)
