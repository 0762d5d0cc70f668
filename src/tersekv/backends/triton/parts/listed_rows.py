"""Lists of keys (`indices`) as rows of the cache: one launch before kernels that gather rows, which know neither
positions nor pages nor padding. What a query row does not see is left out: the others stand side by side, in order."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ...host import launch
from ...host.bind import KernelLaunch, TensorArg, tensor_args
from ...host.kernel_config import KernelConfig
from ...host.key_lists import KeyListConfig, key_list_args, key_list_config
from .key_lists import PAGES, SLOTS, VISIBLE, load_page_ids_or_pages_slots_and_visible, page_table_row_ptr_or_key_list

ROWS, LENS = "listed_rows", "listed_lens"  # slices of the workspace: [T, keys] and [T]
_MAX_BLOCK = 2048  # keys that are looked at together


@dataclass(frozen=True)
class ListedRowsConfig(KernelConfig):
    LIST: KeyListConfig
    PAGE: int
    BLOCK_N: int
    INT64_OFFSETS: bool = True


@triton.jit(do_not_specialize=["num_requests"])
def compact_visible_listed_rows_kernel(
    PAGE_TABLE, INDICES, INDEX_LENS, LIST_SEQ_LENS, LIST_CU_SEQLENS_Q, ROWS_OUT, LENS_OUT, num_requests, num_slots,
    num_keys, page_stride_in_rows, stride_table_b, stride_list_t, stride_list_h, stride_list_n, cfg: tl.constexpr,
):  # fmt: skip
    """Stores the rows of the keys that query row i_row sees, and their number. The next kernel waits for it (PDL)."""
    gdc_launch_dependents()
    i_row = tl.program_id(0)
    lists = (
        INDICES, INDEX_LENS, LIST_SEQ_LENS, LIST_CU_SEQLENS_Q, num_requests, num_slots, stride_list_t, stride_list_h,
        stride_list_n,
    )  # fmt: skip
    # The list of this row
    keys = page_table_row_ptr_or_key_list(PAGE_TABLE, stride_table_b, i_row, tl.program_id(1), lists, cfg)
    p_rows, count = ROWS_OUT + i_row.to(tl.int64) * num_keys, 0
    # Its keys, in blocks: those that the row sees are stored side by side
    for n_block in range(0, tl.cdiv(num_keys, cfg.BLOCK_N)):
        found = load_page_ids_or_pages_slots_and_visible(keys, n_block, num_keys, cfg)
        visible = found[VISIBLE]
        place = count + tl.cumsum(visible.to(tl.int32), 0) - 1
        tl.store(p_rows + place, (found[PAGES] * page_stride_in_rows + found[SLOTS]).to(tl.int32), mask=visible)
        count += tl.sum(visible.to(tl.int32), 0)
    tl.store(LENS_OUT + i_row, count)


def compact_listed_rows_launch(f: SimpleNamespace, page_stride_in_rows: int) -> KernelLaunch:
    """Returns the launch. page_stride_in_rows: rows of the cache from one page to the next."""
    pages, page = f.ckv.shape[:2]
    num_keys = f.indices.shape[-1] * f.block_size
    arguments: dict[str, Any] = tensor_args(PAGE_TABLE="page_table") | key_list_args(f, pages * page)
    arguments = {name: x for name, x in arguments.items() if name in compact_visible_listed_rows_kernel.arg_names} | {
        "ROWS_OUT": TensorArg(ROWS), "LENS_OUT": TensorArg(LENS), "num_keys": num_keys,
        "page_stride_in_rows": page_stride_in_rows,
    }  # fmt: skip
    block = min(launch.next_power_of_2(num_keys), _MAX_BLOCK)
    cfg = ListedRowsConfig(key_list_config(f), page, block)
    return KernelLaunch(compact_visible_listed_rows_kernel, (f.out.shape[0],), arguments | {"cfg": cfg}, num_warps=8)


def listed_rows_slices(f: SimpleNamespace) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns the slices of the workspace by name."""
    rows, keys = f.out.shape[0], f.indices.shape[-1] * f.block_size
    return {ROWS: ((rows, keys), torch.int32), LENS: ((rows,), torch.int32)}
