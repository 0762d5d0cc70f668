"""Lists of blocks (`indices`) as page tables: one launch before kernels that read pages, which know neither positions
nor padding. Each list becomes a request of one query row, with the pages that the row sees side by side.

A block is one page, several, or one of the equal parts of a page, which are pages of these tables then. The page that
the row's position cuts comes last, as often as it is listed: an entry that stands twice counts twice. A length is
int64: keys in the lower 32 bits, up to the end of the last cut page; above them how often the cut page repeats, 0
mostly. Kernels that read lengths as int32 see keys; masks leave out the ends of earlier cut pages, by
`load_first_cut_key` and `is_before_cut`, of Gluon's kernels in `sm90/parts/mask`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from ...host import launch
from ...host.bind import HostAction, KernelLaunch, LaunchSequence, TensorArg, Workspace, tensor_args
from ...host.kernel_config import KernelConfig
from ...host.key_lists import (
    NO_LISTS,
    KeyListConfig,
    facts_with_listed_rows_as_requests,
    has_list_per_head,
    key_list_args,
    key_list_config,
)
from ...host.row_programs import uses_pdl
from .key_lists import page_table_row_ptr_or_key_list
from .token_rows import pdl_early_launch_and_wait

PAGES, LENS = "listed_pages", "listed_lens"  # slices of the workspace: [Hx, T, pages] and [Hx, T]
_MAX_PAGES = 1 << 26  # of all lists: 256 MB of workspace
_MAX_BLOCK = 1024  # pages that are looked at together
_ANY_LENGTH = 1 << 31  # of a list
_MIN_PART_TOKENS = 16  # tokens: of fewer, a page id a key saves nothing


@dataclass(frozen=True)
class ListedPagesConfig(KernelConfig):
    LIST: KeyListConfig
    PAGE: int  # tokens of a listed page
    PARTS: int  # listed pages of a page of the cache
    PAGES_PER_ENTRY: int
    BLOCK: int  # pages
    USE_PDL: bool


@triton.jit(do_not_specialize=["num_requests", "num_rows", "num_pages", "stride_list_t", "stride_list_h"])
def list_visible_pages_kernel(
    PAGE_TABLE, INDICES, INDEX_LENS, LIST_SEQ_LENS, LIST_CU_SEQLENS_Q, PAGES_OUT, LENS_OUT, num_requests, num_rows,
    num_slots, num_pages, stride_table_b, stride_list_t, stride_list_h, stride_list_n, cfg: tl.constexpr,
):  # fmt: skip
    """Stores the pages that query row i_row sees by its list i_list, and its length."""
    pdl_early_launch_and_wait(cfg.USE_PDL)
    i_row, i_list = tl.program_id(0), tl.program_id(1)
    lists = (
        INDICES, INDEX_LENS, LIST_SEQ_LENS, LIST_CU_SEQLENS_Q, num_requests, num_slots, stride_list_t, stride_list_h,
        stride_list_n,
    )  # fmt: skip
    keys = page_table_row_ptr_or_key_list(PAGE_TABLE, stride_table_b, i_row, i_list, lists, cfg)
    i_request = i_list.to(tl.int64) * num_rows + i_row
    p_pages, num_whole, num_cut = PAGES_OUT + i_request * num_pages, 0, 0
    # Whole pages, side by side
    for i in range(0, tl.cdiv(num_pages, cfg.BLOCK)):
        o_page = i * cfg.BLOCK + tl.arange(0, cfg.BLOCK)
        i_entry = o_page // cfg.PAGES_PER_ENTRY
        listed = (i_entry < keys.num_entries) & (o_page < num_pages)
        entry = tl.load(keys.p_entries + i_entry.to(tl.int64) * keys.stride, mask=listed, other=0).to(tl.int64)
        # An entry past the row's own position may be any number: no product before it is dropped.
        listed = listed & (entry >= 0) & (entry <= keys.last // cfg.LIST.BLOCK)
        position = tl.where(listed, entry, 0) * cfg.LIST.BLOCK + o_page % cfg.PAGES_PER_ENTRY * cfg.PAGE
        whole = listed & (position + cfg.PAGE - 1 <= keys.last)
        cut = listed & (position <= keys.last) & (position + cfg.PAGE - 1 > keys.last)
        page = load_listed_page_ids(keys.p_page_ids, position, whole, cfg)
        tl.store(p_pages + num_whole + tl.cumsum(whole.to(tl.int32), 0) - 1, page, mask=whole)
        num_whole += tl.sum(whole.to(tl.int32), 0)
        num_cut += tl.sum(cut.to(tl.int32), 0)
    # The page that the row's position cuts
    cut_page = load_listed_page_ids(keys.p_page_ids, keys.last, num_cut > 0, cfg)
    for i in range(0, tl.cdiv(num_cut, cfg.BLOCK)):
        o_page = i * cfg.BLOCK + tl.arange(0, cfg.BLOCK)
        tl.store(p_pages + num_whole + o_page, cut_page + o_page * 0, mask=o_page < num_cut)
    num_keys = (num_whole + num_cut).to(tl.int64) * cfg.PAGE
    num_keys -= tl.where(num_cut > 0, cfg.PAGE - 1 - keys.last % cfg.PAGE, 0)
    tl.store(LENS_OUT + i_request, num_keys + (tl.maximum(num_cut - 1, 0).to(tl.int64) << 32))


@triton.jit
def load_listed_page_ids(p_page_ids, position, mask, cfg: tl.constexpr):
    """Returns the ids of the listed pages that hold positions: page of the cache × PARTS + part."""
    page = tl.load(p_page_ids + position // (cfg.PAGE * cfg.PARTS), mask=mask, other=0).to(tl.int32)
    return page * cfg.PARTS + (position // cfg.PAGE % cfg.PARTS).to(tl.int32)


@triton.jit
def load_first_cut_key(SEQ_LENS, i_request, num_keys, cfg: tl.constexpr):
    """Returns the key from which on all pages of a request are the same cut one, or num_keys: one that is cut is the
    last, unless a list has it several times."""
    if cfg.LIST.AS_PAGES:
        repeats = (tl.load(SEQ_LENS + i_request) >> 32).to(tl.int32)
        first = ((num_keys + cfg.PAGE - 1) // cfg.PAGE - 1 - repeats) * cfg.PAGE
        return tl.where(repeats > 0, first, num_keys)
    else:
        return num_keys


@triton.jit
def is_before_cut(o_n, num_keys, first_cut_key, cfg: tl.constexpr):
    """Returns which keys do not lie behind the end of a cut page. All cut pages end where the last one does."""
    keys_of_cut_page = (num_keys - 1) % cfg.PAGE + 1
    return (o_n < first_cut_key) | (o_n % cfg.PAGE < keys_of_cut_page)


def why_not_listed_pages(f: SimpleNamespace) -> str | None:
    """Returns why lists of blocks cannot become page tables."""
    page, block = f.k_cache.shape[1], f.block_size
    if block % page and (page % block or block < _MIN_PART_TOKENS):
        parts = f"of equal parts of {_MIN_PART_TOKENS} tokens or more"
        return f"wants lists of whole pages, of {page} tokens, or {parts}, got blocks of {block}"
    if f.k_cache.shape[0] * (page // listed_page_size(f)) >= 2**31:
        return f"wants parts of pages that int32 counts, got {f.k_cache.shape[0]} pages of {page} tokens"
    keys, pages = num_listed_pages(f) * listed_page_size(f), f.out.shape[0] * f.indices.shape[1] * num_listed_pages(f)
    if keys >= 2**31:  # a length has the number of cut pages above them
        return f"wants lists of fewer than 2^31 keys, got {keys}"
    return f"wants lists of {_MAX_PAGES} pages in all, got {pages}" if pages > _MAX_PAGES else None


def listed_pages_config(f: SimpleNamespace) -> KeyListConfig:
    """Returns LIST of kernels that read these page tables; NO_LISTS without lists."""
    if f.indices is None:
        return NO_LISTS
    return KeyListConfig(AS_PAGES=True, PER_HEAD=has_list_per_head(f), PARTS=f.k_cache.shape[1] // listed_page_size(f))


def facts_of_listed_pages(f: SimpleNamespace) -> SimpleNamespace:
    """Returns the facts by which kernels that read these page tables are chosen: those of dense decode over pages of
    this size, a row a request."""
    size, requests = listed_page_size(f), facts_with_listed_rows_as_requests(f, listed_page_size(f))
    caches = {name: getattr(f, name) for name in ("k_cache", "v_cache")}
    sizes = {name: x._replace(shape=(x.shape[0], size, *x.shape[2:])) for name, x in caches.items()}
    return SimpleNamespace(**vars(requests) | sizes | {"indices": None})


def listed_pages_args(f: SimpleNamespace) -> dict[str, Any]:
    """Returns the page table that lists became, in place of the call's. Every row is a request."""
    return {
        "PAGE_TABLE": TensorArg(PAGES), "SEQ_LENS": TensorArg(LENS), "stride_table_b": num_listed_pages(f),
        "CU_SEQLENS_Q": None,
    }  # fmt: skip


def prepend_list_pages_launch(
    f: SimpleNamespace, launches: LaunchSequence | HostAction, workspace_floats: int
) -> LaunchSequence | HostAction:
    """Returns the launches, behind that of listed pages if there are lists, which shares their workspace.

    f: facts as the call has them; workspace_floats: of the launches
    """
    if f.indices is None or not launches.kernel_launches:
        return launches
    workspace = Workspace(workspace_floats, listed_pages_slices(f))
    return LaunchSequence(list_pages_launch(f), *launches.kernel_launches, workspace=workspace)


def list_pages_launch(f: SimpleNamespace) -> KernelLaunch:
    """Returns the launch; facts as the call has them."""
    page = listed_page_size(f)
    arguments: dict[str, Any] = tensor_args(PAGE_TABLE="page_table") | key_list_args(f, 0)
    arguments = {name: x for name, x in arguments.items() if name in list_visible_pages_kernel.arg_names} | {
        "PAGES_OUT": TensorArg(PAGES), "LENS_OUT": TensorArg(LENS), "num_rows": f.out.shape[0],
        "num_pages": num_listed_pages(f),
    }  # fmt: skip
    block = min(max(launch.next_power_of_2(num_listed_pages(f)), 32), _MAX_BLOCK)
    # num_pages bounds entries, so that lists of another length do not recompile.
    lists = replace(key_list_config(f), LENGTH=_ANY_LENGTH)
    cfg = ListedPagesConfig(lists, page, f.k_cache.shape[1] // page, f.block_size // page, block, uses_pdl(f))
    options: dict[str, Any] = {"launch_pdl": True} if cfg.USE_PDL else {}
    grid = f.out.shape[0], f.indices.shape[1]
    return KernelLaunch(
        list_visible_pages_kernel, grid, arguments | {"cfg": cfg}, num_warps=1 if block <= 128 else 4, **options
    )


def num_listed_pages(f: SimpleNamespace) -> int:
    """Returns the pages of a list, all visible."""
    return f.indices.shape[-1] * (f.block_size // listed_page_size(f))


def listed_page_size(f: SimpleNamespace) -> int:
    """Returns the tokens of a listed page: a page of the cache, or a part of it that is a block."""
    return min(f.block_size, f.k_cache.shape[1])


def listed_pages_slices(f: SimpleNamespace) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns the slices of the workspace by name."""
    rows, lists = f.out.shape[0], f.indices.shape[1]
    return {PAGES: ((lists, rows, num_listed_pages(f)), torch.int32), LENS: ((lists, rows), torch.int64)}
