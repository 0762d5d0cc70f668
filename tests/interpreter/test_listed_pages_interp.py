"""Lists of blocks as page tables, interpreted: what kernels see that read them is what lists name by definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tersekv.backends.host.bind import Workspace
from tersekv.backends.triton.parts.listed_pages import (
    LENS,
    PAGES,
    list_pages_launch,
    listed_page_size,
    listed_pages_slices,
    num_listed_pages,
)
from tersekv.dispatch import plan
from tersekv.testing.cases import Case
from tersekv.testing.make import make
from tersekv.testing.reference_lists import _used, positions, row_places

BASE = Case("decode", "bf16", "pages", lens=(137, 1, 0, 230, 64), heads=2, dim=32, page=16, listed=6, block_size=16)
CASES = [
    BASE,
    replace(BASE, name="of each head", each_head=True, list_lens=True, block_size=64),
    replace(BASE, name="again", each_head=True, lists="again", listed=70, block_size=32, index="int64", strided=True),
    replace(BASE, name="again, one list", lists="again", listed=9, block_size=128, page=64, list_lens=True),
    replace(BASE, name="again, uint32", lists="again", listed=50, page=3, block_size=96, index="uint32"),
    replace(BASE, name="shared", lists="shared", lens=(150,), q_lens=(20,), each_head=True),
    replace(BASE, name="drafts", lens=(137, 4, 3, 70), q_lens=(3, 3, 3, 3), each_head=True, list_lens=True),
    replace(BASE, name="ragged", lens=(137, 40, 0, 70), q_lens=(20, 1, 0, 17), ragged=True, lists="again"),
    replace(BASE, name="ragged, slack", lens=(137, 40), q_lens=(9, 1), ragged=True, slack=5, block_size=48),
    replace(BASE, name="parts of pages", page=64, each_head=True, list_lens=True),
    replace(BASE, name="thirds of pages, again", page=48, lists="again", listed=50, lens=(137, 1, 0, 230, 65)),
    replace(BASE, name="more than one step", lens=(2000, 5, 1900), listed=300, block_size=64, lists="again"),
]


def keys_of_kernels(pages: list[int], length: int, page: int) -> list[tuple[int, int]]:
    """(page, slot) of the keys that kernels see: `load_first_cut_key`, `is_before_cut`."""
    num_keys, repeats = length & 0xFFFFFFFF, length >> 32
    first_cut_key = (-(-num_keys // page) - 1 - repeats) * page if repeats else num_keys
    slots_of_cut_page = (num_keys - 1) % page + 1
    seen = (j for j in range(num_keys) if j < first_cut_key or j % page < slots_of_cut_page)
    return [(pages[j // page], j % page) for j in seen]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_case(case):
    call = make(case)
    f = plan.facts("decode", call)
    tensors = Workspace(0, listed_pages_slices(f)).tensors_with_workspace(call)
    tables, lens = getattr(tensors, PAGES).fill_(-7), getattr(tensors, LENS).fill_(-7)
    list_pages_launch(f)(tensors)
    assert tables.shape == (call.indices.shape[1], len(call.out), num_listed_pages(f))
    page = listed_page_size(f)
    parts = case.page // page
    for h in range(call.indices.shape[1]):
        index_lens = call.index_lens
        if index_lens is not None and index_lens.dim() == 2:
            index_lens = index_lens[:, h if index_lens.shape[1] > 1 else 0]
        for t, (b, last) in enumerate(row_places(call)):
            want = [
                (int(call.page_table[b, j // case.page]) * parts + j % case.page // page, j % page)
                for j in positions(_used(call.indices[:, h], index_lens, t), last, case.block_size)
            ]
            got = keys_of_kernels(tables[h, t].tolist(), int(lens[h, t]), page)
            assert sorted(got) == sorted(want), (h, t)
            used = -(-(int(lens[h, t]) & 0xFFFFFFFF) // page)
            assert (tables[h, t, used:] == -7).all(), "nothing is stored behind"
    assert bool((lens >> 32).any()) == (case.lists == "again"), "a page that is cut repeats"


def test_numbers_past_a_row_are_dropped_before_they_are_multiplied():
    call = make(replace(BASE, index="int64", each_head=True))
    call.indices[:, :, 0] = torch.tensor([2**62, -(2**62)])
    want = make(replace(BASE, index="int64", each_head=True))
    want.indices[:, :, 0] = -1
    found = []
    for x in (call, want):
        f = plan.facts("decode", x)
        tensors = Workspace(0, listed_pages_slices(f)).tensors_with_workspace(x)
        tables, lens = getattr(tensors, PAGES).fill_(-7), getattr(tensors, LENS)
        list_pages_launch(f)(tensors)
        found.append((tables.clone(), lens.clone()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
