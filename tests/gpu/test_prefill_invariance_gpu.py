"""batch_invariant="prefill" on a GPU: a token's bits through chunks of prefill and steps of decode."""

from __future__ import annotations

import pytest
import torch
from chunks import rows_that_differ
from paged_case import Case

from tersekv import PagedKVCache
from tersekv.formats import kv_format
from tersekv.testing.bench import data

LENS, ROWS = (20000, 3, 4096, 70), (70, 3, 9, 70)
CHUNKS = ((64, 6), (1, 69), (2, 1), (5, 4))
FORMATS = ("bf16", "fp8_e4m3", "fp8_per_token_head", "int8_per_token_head", "nvfp4", "int4_per_token_head")


@pytest.mark.parametrize(("page", "window", "dim"), [(64, None, 128), (16, 1000, 128), (64, None, 256)])
@pytest.mark.parametrize("format", FORMATS)
def test_a_token_has_the_same_bits(format, page, window, dim):
    torch.manual_seed(0)
    pages = sum(-(-n // page) for n in LENS)
    layer = PagedKVCache.allocate(1, pages, page, 4, dim, format=format, device="cuda")[0]
    for codes, scales in ((layer.k, layer.k_scale_cache), (layer.v, layer.v_scale_cache)):
        data.fill(codes, scales, kv_format(format))
    lens = torch.tensor(LENS, dtype=torch.int32)
    tables = data.page_tables(-(-lens // page), 1, torch.device("cuda"))[0]
    q = torch.randn(sum(ROWS), 16, dim, device="cuda").bfloat16()
    case = Case(layer, tables, lens.cuda())
    assert rows_that_differ(case, q, ROWS, CHUNKS, window=window) == []
