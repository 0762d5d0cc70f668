"""What a search for the best cache tries."""

from __future__ import annotations

from collections.abc import Sequence

from ..formats import ALL_FORMATS, BLOCK, KV_FORMATS, TENSOR

REFERENCE = "bf16"
_FOUR_BITS = ("int4_per_token_head", "nvfp4")
_EIGHT_BITS = ("int8_per_token_head", "fp8_per_token_head")


def searched(formats: Sequence[str]) -> list[str]:
    """What a search tries where these formats are: each alone, and with fitted scales where it takes some; those of few
    bits rotated, with channel scales, beside 8 bits for K, and with 8 bits in the first and last layer."""
    few = [f for f in _FOUR_BITS if f in formats]
    eight = next((f for f in _EIGHT_BITS if f in formats), None)
    fitted = [f"{f}+fitted" for f in formats if ALL_FORMATS[f].scale in (TENSOR, BLOCK)]
    if eight is None or not set(formats) <= set(KV_FORMATS):
        return [*formats, *fitted]
    found = [*formats, *fitted, f"{eight}+rotated"]
    for f in few:
        found += [f"{f}+rotated", f"{f}+channels", f"{f}+rotated+channels", f"{f}+ends={eight}"]
        found += [f"{eight}/{f}", f"{f}/{eight}", f"{eight}/{f}+rotated", f"{eight}/{f}+channels"]
    found += [f"{a}/{b}" for a in few for b in few if a != b]
    return list(dict.fromkeys(found))
