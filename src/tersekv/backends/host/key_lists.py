"""Lists of keys (`indices`) on the host: facts in which every query row is a request, and the kernels' arguments."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from .bind import tensor_args
from .kernel_config import KernelConfig

_NONE = {"INDICES": None, "INDEX_LENS": None, "LIST_SEQ_LENS": None, "LIST_CU_SEQLENS_Q": None}


@dataclass(frozen=True)
class KeyListConfig(KernelConfig):
    """How query rows list their keys. LENGTH -1: they do not, and requests' keys are read in order."""

    LENGTH: int = -1  # entries of a list
    BLOCK: int = 1  # positions of an entry
    BY_SLOT: bool = False
    HAS_LENS: bool = False
    LENS_STRIDE: int = 0  # from row to row
    LENS_STRIDE_H: int = 0  # from list to list of a row; 0: all of a row are as long
    VARLEN_Q: bool = False  # rows of requests are counted by cu_seqlens_q
    MAX_SEQLEN_Q: int = 0  # rows of each request otherwise
    CAUSAL: bool = True  # positions past a row's own are not seen
    AS_PAGES: bool = False  # a launch before wrote lists as page tables, which are read in order: LENGTH is -1
    PER_HEAD: bool = False  # these page tables and lengths are [HEADS, B]
    PARTS: int = 1  # of a page of the cache, each a page of these tables


NO_LISTS = KeyListConfig()


def key_list_config(f: SimpleNamespace) -> KeyListConfig:
    if f.indices is None:
        return NO_LISTS
    lens, ragged = f.index_lens, f.cu_seqlens_q is not None
    per_list = lens is not None and len(lens.shape) == 2 and lens.shape[1] > 1
    return KeyListConfig(
        LENGTH=f.indices.shape[-1],
        BLOCK=f.block_size,
        BY_SLOT=f.page_table is None,
        HAS_LENS=lens is not None,
        LENS_STRIDE=0 if lens is None else lens.stride[0],
        LENS_STRIDE_H=lens.stride[1] if per_list else 0,
        VARLEN_Q=ragged and f.page_table is not None,
        MAX_SEQLEN_Q=0 if ragged or f.page_table is None else f.max_q_len,
        CAUSAL=f.seq_lens is not None or f.page_table is None,
    )


def has_list_per_head(f: SimpleNamespace) -> bool:
    """Returns whether each KV head has a list of blocks of its own."""
    return f.indices is not None and f.indices.shape[1] > 1


def facts_of_extra_key_set(f: SimpleNamespace) -> SimpleNamespace:
    """Returns the facts of a call over its second set of keys alone, whose lists may hold any position: no seq_lens."""
    fields = vars(f)
    extra = {name.removeprefix("extra_"): x for name, x in fields.items() if name.startswith("extra_")}
    none = {f"extra_{name}": None for name in extra}
    return SimpleNamespace(**fields | none | extra | {"seq_lens": None, "block_size": 1})


def facts_with_listed_rows_as_requests(f: SimpleNamespace, cache_page_size: int) -> SimpleNamespace:
    """Returns the facts by which kernels are chosen: with lists every row is a request, which holds its list's keys."""
    if f.indices is None:
        return f
    rows, keys = f.out.shape[0], f.indices.shape[-1] * f.block_size
    table = f.indices._replace(shape=(rows, -(-keys // cache_page_size)), stride=(0, 1))
    lens = f.indices._replace(shape=(rows,), stride=(1,))
    return SimpleNamespace(
        **vars(f) | {"page_table": table, "seq_lens": lens, "cu_seqlens_q": None, "max_q_len": 1}
    )  # fmt: skip


def key_list_args(f: SimpleNamespace, num_slots: int) -> dict[str, Any]:
    """Returns the arguments of a split pass that find the keys of its rows; SEQ_LENS is the lists' lengths then.

    num_slots: of the cache; where rows see all positions, those of a row of the page table
    """
    if f.indices is None:
        return _NONE | dict.fromkeys(
            ("num_requests", "num_slots", "stride_list_t", "stride_list_h", "stride_list_n"), 0
        )
    stride = f.indices.stride
    by_slot = f.page_table is None
    lens = {"SEQ_LENS": None} if f.index_lens is None else tensor_args(SEQ_LENS="index_lens")
    requests: dict[str, Any] = {"num_requests": 0 if by_slot else f.page_table.shape[0]}
    if not by_slot and f.seq_lens is not None:
        requests |= tensor_args(LIST_SEQ_LENS="seq_lens")
    ragged = {} if by_slot or f.cu_seqlens_q is None else tensor_args(LIST_CU_SEQLENS_Q="cu_seqlens_q")
    table = {"PAGE_TABLE": None, "stride_table_b": 0} if by_slot else {"stride_table_b": f.page_table.stride[0]}
    return _NONE | tensor_args(INDICES="indices") | requests | ragged | table | lens | {
        "INDEX_LENS": None if f.index_lens is None else tensor_args(INDEX_LENS="index_lens")["INDEX_LENS"],
        "CU_SEQLENS_Q": None, "num_slots": num_slots, "stride_list_t": stride[0],
        "stride_list_h": stride[1] if len(stride) == 3 and f.indices.shape[1] > 1 else 0, "stride_list_n": stride[-1],
    }  # fmt: skip
