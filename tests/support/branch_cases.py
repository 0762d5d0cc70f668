"""Small cases of the decode branch, and a record of it as keyword arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tersekv import PagedLatentLayer
from tersekv.testing.cases import Case

BASE = Case(
    "mla_decode_branch", "bf16", "small", lens=(13, 1, 9, 2), heads=1, group=2, page=3, rank=128, rope=16, nope=128,
    dim_v=128,
)  # fmt: skip
RAGGED = replace(BASE, name="ragged", q_lens=(6, 1, 0, 2), ragged=True)


def arguments(call: Any) -> dict[str, Any]:
    """A record as the public function takes it."""
    layer = PagedLatentLayer(call.ckv, call.kpe, call.format, call.kv_scale, call.ckv_scale_cache)
    names = (
        "q page_table cache_lens freqs_cis kv_norm_gamma w_uk w_uv w_uk_scale w_uv_scale kv_c k_pe cu_seqlens_q out "
        "softmax_scale"
    )
    return {n: getattr(call, n) for n in names.split()} | {"cache": layer}
