"""tersekv: the KV cache of large language models in few bits, in pages.

The names below are imported at first use, so that `import tersekv` loads neither a backend nor Triton.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "append": "ops.append",
    "rope_append": "ops.append",
    "decode": "ops.decode",
    "prefill": "ops.prefill",
    "mla_append": "ops.mla",
    "mla_decode": "ops.mla",
    "mla_decode_branch": "ops.mla_branch",
    "Selected": "ops.mla",
    "mla_prefill": "ops.mla",
    "mla_prefill_plan": "ops.mla",
    "mla_project": "ops.mla",
    "MLAPrefillPlan": "ops.mla",
    "merge_states": "ops.merge",
    "index_append": "ops.index",
    "index_query": "ops.index",
    "index_scores": "ops.index_select",
    "index_topk": "ops.index_select",
    "index_select": "ops.index_select",
    "channel_scale": "attributes",
    "transcode": "ops.transcode",
    "warm_up": "ops.warm_up",
    "PagedKVCache": "cache",
    "PagedKVLayer": "layers",
    "PagedLatentCache": "cache",
    "PagedLatentLayer": "layers",
    "PagedIndexCache": "index_cache",
    "PagedIndexLayer": "index_layers",
    "PagePool": "pages",
    "TieredPool": "tiers",
    "copy_pages": "pages",
    "export_pages": "records",
    "import_pages": "records",
    "KV_FORMATS": "formats",
    "LATENT_FORMATS": "formats",
    "INDEX_FORMATS": "formats",
    "kv_bytes_per_token": "formats",
    "kv_page_bytes": "formats",
    "latent_bytes_per_token": "formats",
    "index_bytes_per_token": "formats",
    "KernelError": "errors",
    "UnsupportedError": "errors",
    "OutOfPagesError": "errors",
}

if TYPE_CHECKING:
    from .attributes import channel_scale
    from .cache import PagedKVCache, PagedLatentCache
    from .errors import KernelError, OutOfPagesError, UnsupportedError
    from .formats import (
        INDEX_FORMATS,
        KV_FORMATS,
        LATENT_FORMATS,
        index_bytes_per_token,
        kv_bytes_per_token,
        kv_page_bytes,
        latent_bytes_per_token,
    )
    from .index_cache import PagedIndexCache
    from .index_layers import PagedIndexLayer
    from .layers import PagedKVLayer, PagedLatentLayer
    from .ops.append import append, rope_append
    from .ops.decode import decode
    from .ops.index import index_append, index_query
    from .ops.index_select import index_scores, index_select, index_topk
    from .ops.merge import merge_states
    from .ops.mla import MLAPrefillPlan, Selected, mla_append, mla_decode, mla_prefill, mla_prefill_plan, mla_project
    from .ops.mla_branch import mla_decode_branch
    from .ops.prefill import prefill
    from .ops.transcode import transcode
    from .ops.warm_up import warm_up
    from .pages import PagePool, copy_pages
    from .records import export_pages, import_pages
    from .tiers import TieredPool

# A library says nothing unless its caller asks: logging.getLogger("tersekv").setLevel(logging.DEBUG) and a handler.
logging.getLogger(__name__).addHandler(logging.NullHandler())

__all__ = [
    "INDEX_FORMATS",
    "KV_FORMATS",
    "LATENT_FORMATS",
    "KernelError",
    "MLAPrefillPlan",
    "OutOfPagesError",
    "PagePool",
    "PagedIndexCache",
    "PagedIndexLayer",
    "PagedKVCache",
    "PagedKVLayer",
    "PagedLatentCache",
    "PagedLatentLayer",
    "Selected",
    "TieredPool",
    "UnsupportedError",
    "append",
    "channel_scale",
    "copy_pages",
    "decode",
    "export_pages",
    "import_pages",
    "index_append",
    "index_bytes_per_token",
    "index_query",
    "index_scores",
    "index_select",
    "index_topk",
    "kv_bytes_per_token",
    "kv_page_bytes",
    "latent_bytes_per_token",
    "merge_states",
    "mla_append",
    "mla_decode",
    "mla_decode_branch",
    "mla_prefill",
    "mla_prefill_plan",
    "mla_project",
    "prefill",
    "rope_append",
    "transcode",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
