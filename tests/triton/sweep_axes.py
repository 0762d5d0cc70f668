"""What kernels are specialised on, as axes; rows of them that hold every pair of values; and the calls of such rows.

A row is one value for each axis of its operation (a second word tells apart axes of one operation). Axes named like
fields of `testing.cases.Case` go into a case; the others change what `testing.make` made of it, since nothing is
executed:

    requests, drafts   how many, and new tokens of each
    i_<field>          dtype of an index tensor
    shift              kinds of tensors that begin off a multiple of 16 bytes
    table              "wide": room for many keys; "gaps": rows of the page table lie apart
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import combinations
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tersekv.formats import INDEX_FORMATS, KV_FORMATS, LATENT_FORMATS, LATENT_RECORDS
from tersekv.testing import make as making
from tersekv.testing.cases import Case
from tersekv.testing.make import make

Axes = dict[str, tuple[Any, ...]]
Row = dict[str, Any]

_DTYPES = ("bfloat16", "float16", "float32")
_INDEX = ("int32", "int64", "uint32")
_BOTH = (False, True)
_OUT = ("", "float8_e4m3fn", "float8_e5m2")
_FACTORS = ("one", "float", "tensor", "head")
_KINDS = {
    "caches": "k_cache v_cache ckv kpe src_k src_v extra_ckv extra_kpe",
    "scales": "k_scale_cache v_scale_cache src_k_scale_cache src_v_scale_cache ckv_scale_cache extra_ckv_scale_cache "
    "kv_b_proj_scale w_uk_scale w_uv_scale",
    "indices": "page_table seq_lens cu_seqlens_q slot_mapping batch_indices kv_positions kv_indptr kv_indices "
    "positions cache_lens buffer_row_offsets cache_offsets visible indices index_lens extra_page_table extra_indices "
    "extra_index_lens",
    "weights": "cos_sin_cache freqs_cis kv_norm_weight kv_b_proj w_uk w_uv weight sinks mask norm_weight norm_bias "
    "weights open_group",
    "outputs": "out lse q_rope_out q_nope_out q_out weights_out out_lens",
}
_KIND = {name: kind for kind, names in _KINDS.items() for name in names.split()}

# The first value of an axis is the plain one.
_KV: Axes = {
    "format": tuple(KV_FORMATS),
    "heads": (2, 1, 3, 4, 8),
    "dim": (64, 128, 256, 96, 32, 80),
    "dim_v": (0, 64, 128, 512),
    "layout": ("NHD", "HND"),
    "packed": _BOTH,
    "scales": ("apart", "inline", "tail"),
    "v_format": ("", "bf16", "fp8_e4m3", "int8_per_token_head", "nvfp4", "int4_per_token_head"),
    "rotation": ("", "k", "v", "kv"),
    "channels": ("", "k", "v", "kv"),
    "page": (16, 1, 3, 64, 256),
    "scale": _FACTORS,
}
_LATENT: Axes = {
    "format": tuple(LATENT_FORMATS),
    "rank": (512, 256),
    "rope": (64, 32),
    "split": _BOTH,
    "page": (64, 1, 3, 16, 32, 128),
    "scale": _FACTORS[:3],
}
_COMMON: Axes = {"dtype": _DTYPES, "strided": _BOTH, "shift": ("", "rows", *_KINDS)}
_WRITE: Axes = {
    **_COMMON,
    "drafts": (5, 1, 700),
    "place": ("slots", "pages"),
    "reciprocal": _BOTH,
    "i_slot_mapping": _INDEX,
    "i_batch_indices": _INDEX,
    "i_kv_positions": _INDEX,
    "i_kv_indptr": _INDEX,
    "i_kv_indices": _INDEX,
}
_ROTATE: Axes = {
    "interleaved": _BOTH,
    "query": (True, False),
    "out_dtype": _OUT,
    "zero_padding": _BOTH,
    "i_positions": _INDEX,
}
_READ: Axes = {
    **_COMMON,
    "dtype": ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
    "out_dtype": ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"),
    "requests": (3, 1, 150),
    "drafts": (1, 3, 8),
    "ragged": _BOTH,
    "lse": (True, False),
    "table": ("", "wide", "gaps"),
    "i_page_table": _INDEX,
    "i_seq_lens": _INDEX,
    "i_cu_seqlens_q": _INDEX,
}
_NEW: Axes = {
    **{k: v for k, v in _READ.items() if k not in ("dtype", "out_dtype", "i_seq_lens")},
    "dtype": _DTYPES[:2],
    "group": (4, 1, 16, 64),
    "nope": (128, 64),
    "dim_v": (128, 64),
    "weight": ("float8_e4m3fn", ""),
    "raw_in_cache": _BOTH,
    "i_cache_lens": _INDEX,
}
_INDEX_ROWS: Axes = {
    **_COMMON, "format": tuple(INDEX_FORMATS), "dim": (128, 64, 40, 256), "rotate": (True, False),
    "rotary": (64, 0, 24), "rope_last": _BOTH, "interleaved": _BOTH, "rotation": ("", "k"), "round16": _BOTH,
    "drafts": (5, 1, 700), "i_positions": _INDEX,
}  # fmt: skip
_SCORED: Axes = {
    **_COMMON, "format": tuple(INDEX_FORMATS), "dtype": ("float8_e4m3fn", "bfloat16", "float16"),
    "heads": (64, 1, 5, 16, 130), "dim": (128, 64, 40, 256), "page": (64, 1, 3, 16, 128), "requests": (3, 1, 150),
    "drafts": (1, 2, 8), "ragged": _BOTH, "each": _BOTH, "relu": (True, False), "weighted": (True, False),
    "ratio": (1, 4), "block": (1, 3, 128, 200), "gaps": ("", "pages", "columns"), "scale": ("one", "float"),
    "table": ("", "wide", "gaps"), "i_page_table": _INDEX, "i_seq_lens": _INDEX, "i_cu_seqlens_q": _INDEX,
}  # fmt: skip
_TAKEN: Axes = {"top": (8, 1, 2048), "keep_first": (0, 3), "keep_last": (0, 4), "open_group": _BOTH}
_LISTED: Axes = {
    "listed": (70, 1, 2048),
    "block_size": (1, 4, 48),
    "list_lens": _BOTH,
    "i_indices": _INDEX,
    "i_index_lens": _INDEX,
}
AXES: dict[str, Axes] = {
    "append": {**_KV, **_WRITE},
    "rope_append": {**_KV, **_WRITE, **_ROTATE, "group": (4, 1, 5), "rotary": (0, 16, 32, 24)},
    "mla_append": {
        **_LATENT, **_WRITE, **_ROTATE, "drafts": (5, 1, 130), "group": (4, 1, 16, 128), "q_nope": (512, 128),
        "rotate": (True, False),
    },
    "decode": {
        **_KV, **_READ, "group": (4, 1, 5, 8, 16), "mask": _BOTH, "window": (0, 5), "softcap": (0.0, 20.0),
        "sinks": _BOTH, "drafts": (1, 3, 8, 20),
    },
    "prefill": {
        **{k: v for k, v in {**_KV, **_READ}.items() if k not in ("ragged", "table")}, "group": (4, 1, 5, 8, 16),
        "window": (0, 5), "softcap": (0.0, 20.0), "sinks": _BOTH, "new_rows": _BOTH, "drafts": (3000, 1, 40),
    },
    "mla_decode": {**_LATENT, **_READ, "group": (16, 1, 5, 32, 48, 64, 128)},
    "decode listed": {
        **_KV, **_READ, **_LISTED, "each_head": _BOTH, "group": (4, 1, 5, 8, 16), "softcap": (0.0, 20.0),
        "sinks": _BOTH,
    },
    "decode listed pages": {
        **_KV, **_READ, **_LISTED, "block_size": (128, 64, 48), "page": (64, 16, 32, 128), "requests": (3, 40, 150),
        "listed": (9, 1, 70), "each_head": (True, False), "group": (4, 1, 8, 16, 32), "softcap": (0.0, 20.0),
        "sinks": _BOTH,
    },
    "prefill listed": {
        **{k: v for k, v in {**_KV, **_READ}.items() if k not in ("ragged", "table")}, **_LISTED,
        "block_size": (128, 16, 48), "each_head": _BOTH, "group": (4, 1, 5, 16), "softcap": (0.0, 20.0),
        "sinks": _BOTH, "drafts": (70, 3), "requests": (30, 1, 150), "listed": (9, 1, 70),
    },
    "mla_decode listed": {
        **_LATENT, **_READ, **_LISTED, "by_slot": _BOTH, "sinks": _BOTH, "lse_of_keys": _BOTH,
        "group": (16, 1, 5, 32, 48, 64, 128),
    },
    "mla_prefill": {
        **_LATENT, **_NEW, "chunk": (0, 32), "drafts": (20, 1, 130), "requests": (3, 1, 30),
        "i_buffer_row_offsets": _INDEX, "i_cache_offsets": _INDEX,
    },
    "mla_decode_branch": {**_LATENT, **_NEW, "requests": (3, 1, 30), "group": (16, 1, 4, 64, 128)},
    "mla_project": {
        "format": ("bf16", "fp16", "fp8_e4m3"), "requests": (3, 1, 70), "group": (4, 1, 128), "dim": (128, 72, 512),
        "dim_v": (128, 40, 256), "strided": _BOTH, "shift": _COMMON["shift"],
    },
    "transcode": {
        **{k: v for k, v in _KV.items() if k != "packed"}, "src_format": ("", *KV_FORMATS), "src_page": (16, 1, 64),
        "src_layout": ("NHD", "HND"), "src_scales": ("apart", "inline", "tail"), "src_rotation": ("", "k", "v", "kv"),
        "src_channels": ("", "k", "v", "kv"), "src_scale": _FACTORS, "alike": _BOTH, "ragged": _BOTH,
        "shift": ("", "caches", "scales"), "requests": (70, 1, 4000), "i_src_pages": _INDEX, "i_dst_pages": _INDEX,
        "i_num_tokens_t": _INDEX,
    },
    "merge_states": {
        "dtype": _DTYPES, "parts": (2, 1, 5, 70), "requests": (7, 1, 300), "group": (4, 1, 16),
        "dim": (128, 32, 72, 512), "strided": _BOTH, "lse": (True, False), "shift": ("", "rows", "outputs"),
    },
    "index_append": {
        **_INDEX_ROWS, "norm": _BOTH, "page": (64, 1, 3, 16), "gaps": ("", "pages", "columns"),
        "i_slot_mapping": _INDEX,
    },
    "index_query": {**_INDEX_ROWS, "heads": (64, 1, 3, 16), "weighted": (True, False), "head_major": _BOTH},
    "index_scores": {**_SCORED, "width": (0, 50)},
    "index_topk": {
        **_TAKEN, "requests": (7, 1, 300), "heads": (3,), "each": _BOTH, "width": (0, 60, 20000), "lse": (True, False),
        "strided": _BOTH, "shift": ("", "rows", "outputs", "weights", "indices"), "i_visible": _INDEX,
    },
    "index_select": {**_SCORED, **_TAKEN},
    "mla_append without rotary": {**_LATENT, **_WRITE, "rope": (0,), "rotate": (False,), "query": (False,)},
    "mla_decode without rotary": {**_LATENT, **_READ, "rope": (0,), "group": (16, 1, 5, 32, 48, 64, 128)},
    "mla_prefill without rotary": {
        **_LATENT, **_NEW, "rope": (0,), "chunk": (0, 32), "drafts": (20, 1, 130), "requests": (3, 1, 30),
    },
    "mla_decode_branch without rotary": {**_LATENT, **_NEW, "rope": (0,), "group": (16, 1, 4, 64, 128)},
    "mla_decode two sets": {
        **_LATENT, **_READ, **_LISTED, "rope": (64, 0), "by_slot": _BOTH, "sinks": _BOTH, "group": (16, 1, 5, 64, 128),
        "extra_listed": (70, 1, 0), "extra_by_slot": _BOTH, "extra_page": (16, 1, 3, 64),
        "extra_format": ("", "bf16", "fp8_ds_mla"), "i_extra_page_table": _INDEX, "i_extra_indices": _INDEX,
        "i_extra_index_lens": _INDEX,
    },
}  # fmt: skip
_RECORDS: Axes = {
    "format": tuple(LATENT_RECORDS), "rank": (512,), "rope": (0,), "page": (64, 1, 3, 16, 128), "gaps": ("", "pages"),
}  # fmt: skip
AXES |= {
    "mla_append of records": {
        **_RECORDS, **_WRITE, "drafts": (5, 1, 130), "rotate": (False,), "query": (False,), "reciprocal": (False,),
    },
    "mla_decode of records": {**_RECORDS, **_READ, "group": (16, 1, 5, 32, 48, 64, 128)},
    "mla_decode listed of records": {
        **_RECORDS, **_READ, **_LISTED, "by_slot": _BOTH, "sinks": _BOTH, "group": (16, 1, 5, 32, 48, 64, 128),
        "extra_listed": (-1, 70), "extra_by_slot": _BOTH, "extra_format": ("", "bf16"),
    },
}  # fmt: skip


def call_of(op: str, row: Row) -> Any:
    """The call record of a row."""
    op, row = op.split()[0], dict(row)
    requests, drafts = row.pop("requests", 1), row.pop("drafts", 1)
    shift, table = row.pop("shift", ""), row.pop("table", "")
    index = {name: row.pop(name) for name in list(row) if name.startswith("i_")}
    lens = (requests,) if op in ("merge_states", "mla_project", "transcode") else (drafts + 4,) * requests
    fmt = row.pop("format", "bf16")
    name = " ".join(map(str, row.values()))
    with _without_values():
        call = make(Case(op, fmt, name, lens=lens, q_lens=(drafts,) * len(lens), **{"heads": 1, **row}))
    changed = {k: v if v is None else _changed(k, v, index.get(f"i_{k}"), shift, table) for k, v in _tensors(call)}
    return call._replace(**changed)


@contextmanager
def _without_values() -> Iterator[None]:
    """`make` leaves out what takes its time: values, which nothing here looks at."""
    empty = {
        "encode": lambda x, dtype: x.new_empty(x.shape, dtype=dtype),
        "write_rows": lambda *args: None,
        "put": lambda *args: None,
        "poisoned": lambda *shape, dtype: torch.empty(shape, dtype=dtype),
    }
    with ExitStack() as stack:
        for name, function in empty.items():
            stack.enter_context(mock.patch.object(making, name, function))
        stack.enter_context(mock.patch.object(making._Maker, "normal", lambda self, *shape: torch.empty(shape)))
        yield


def _tensors(call: Any) -> Iterator[tuple[str, Tensor | None]]:
    return ((k, v) for k, v in zip(call._fields, call, strict=True) if isinstance(v, Tensor))


def _changed(name: str, x: Tensor, index: str | None, shift: str, table: str) -> Tensor:
    """As x, without its values."""
    if index is not None:
        x = x.to(getattr(torch, index))
    if name == "page_table" and table:
        rows, columns = x.shape
        columns = 4096 if table == "wide" else columns
        x = x.new_empty(rows, columns + 3 * (table == "gaps"))[:, :columns]
    if shift and _KIND.get(name, "rows") == shift:
        room = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        x = x.new_empty(room + 16).as_strided(x.shape, x.stride(), 1)
    return x


def pairs_of(row: Row) -> set[tuple]:
    """Every two values of a row, each as (axis, value)."""
    return set(combinations(sorted(row.items(), key=lambda x: x[0]), 2))


def all_pairs(axes: Axes) -> set[tuple]:
    out: set[tuple] = set()
    for a, b in combinations(sorted(axes), 2):
        out |= {((a, x), (b, y)) for x in axes[a] for y in axes[b]}
    return out


def covering(axes: Axes, possible: Callable[[Row], bool], seed: int, refused: set[tuple]) -> Iterator[Row]:
    """Rows that hold every pair of values, those that hold most of them first.

    possible: whether a row is a call that is taken
    refused:  gets the pairs that no row can hold, as far as was tried
    """
    rng, left = random.Random(seed), all_pairs(axes)
    wanted = sorted(left, key=repr)
    rng.shuffle(wanted)
    for pair in wanted:
        if pair not in left:
            continue
        found = next((row for row in _attempts(pair, axes, left, rng) if possible(row)), None)
        if found is None:
            refused.add(pair)
            left.discard(pair)
            continue
        left -= pairs_of(found)
        yield found


def _attempts(pair: tuple, axes: Axes, left: set[tuple], rng: random.Random) -> Iterable[Row]:
    """Rows that hold the pair: first such that hold many that are left, then plainer and plainer ones."""
    for plain in (0.0, 0.0, 0.0, 0.3, 0.3, 0.6, 0.6, 0.8, 0.8, 0.9, 1.0):
        row = dict(pair)
        names = [n for n in axes if n not in row]
        rng.shuffle(names)
        for name in names:
            if rng.random() < plain:
                row[name] = axes[name][0]
            else:
                row[name] = max(axes[name], key=lambda v, n=name: (_gain(row, n, v, left), rng.random()))
        yield row


def _gain(row: Row, name: str, value: Any, left: set[tuple]) -> int:
    mine = (name, value)
    return sum((((n, v), mine) if n < name else (mine, (n, v))) in left for n, v in row.items())
