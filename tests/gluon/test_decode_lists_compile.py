"""Gluon's decode over lists of blocks, compiled for a GPU that is not there: lists become page tables."""

from __future__ import annotations

import pytest
import torch
from compile_tools import compile_launches, since
from test_decode_compile import FORMATS, call_of, turned

from tersekv.backends.gluon import attention, decode
from tersekv.calls import AttentionCall
from tersekv.dispatch import checks
from tersekv.dispatch.plan import facts
from tersekv.testing.cases import Case
from tersekv.testing.make import make

PAIRS = ("fp8_e4m3/int4_per_token_head", "int8_per_token_head/nvfp4")


def listed(fmt: str, requests: int, n: int = 16, block: int = 128, each_head: bool = True, **options) -> AttentionCall:
    call = call_of(fmt, requests=requests, **options)
    lists = call.k_cache.shape[2] if each_head else 1
    return call._replace(indices=torch.zeros(len(call.q), lists, n, dtype=torch.int32), block_size=block)


def config_of(call: AttentionCall) -> decode.Config:
    f = facts("decode", call, arch=90)
    checks.facts(f)
    assert attention.why_not(f) is None
    return decode.configure(f)


def compiled(call: AttentionCall) -> list[dict]:
    """The launches: pages of lists, the split pass, a combine perhaps. None spills."""
    kernels = compile_launches(attention.run, call, config_of(call), 90)
    assert kernels[0]["name"] == "list_visible_pages_kernel"
    assert max(x["n_spills"] for x in kernels) <= since({(3, 6): 0, (3, 9): 8})
    assert "UTMALDG" in kernels[1]["sass"](), "pages come by tensor copies"
    return kernels


@pytest.mark.parametrize(("requests", "unsplit", "launches"), [(1, False, 3), (32, True, 2), (128, False, 2)])
@pytest.mark.parametrize("fmt", [*FORMATS, *PAIRS])
def test_a_list_for_each_head(fmt, requests, unsplit, launches):
    """Four warps share the keys of a head: a request a CTA where these fill the GPU about once, else ranges."""
    call = listed(fmt, requests)
    config = config_of(call)
    shape = config.shape
    found = shape.KEY_PARTS, config.constants.LIST.PER_HEAD, shape.HEAD_GROUPS, shape.UNSPLIT
    assert found == (4, True, 8, unsplit)
    kernels = compiled(call)
    assert len(kernels) == launches
    assert kernels[0]["grid"] == (requests, 8, 1)
    assert kernels[1]["grid"][0] == 8 * requests if unsplit else kernels[1]["grid"][0] <= 8 * 49


@pytest.mark.parametrize("options", [
    {"page_size": 16}, {"page_size": 16, "layout": "HND"}, {"page_size": 32, "layout": "HND"}, {"page_size": 128},
    {"page_size": 16, "head_dim": 64}, {"head_dim": 256}, {"group": 16, "heads": 4}, {"group": 16, "head_dim": 64},
    {"scales": "tail"}, {"softcap": 20.0, "sinks": torch.empty(32)}, {"page_size": 48, "block": 96}, {"heads": 2},
], ids=lambda x: str({k: v for k, v in x.items() if k != "sinks"}))  # fmt: skip
@pytest.mark.parametrize("fmt", ["fp8_e4m3", "int8_per_token_head", "nvfp4", "int4_per_token_head", "bf16"])
def test_ranges_of_each_head(fmt, options):
    call = listed(fmt, 8 if "heads" in options else 128, **options)
    assert config_of(call).shape.KEY_PARTS == 4
    compiled(call)


@pytest.mark.parametrize(
    ("fmt", "options"),
    [
        ("fp8_e4m3", {}),
        ("bf16", {"group": 8}),
        ("int8_per_token_head", {"page_size": 16}),
        ("nvfp4", {}),
        ("int4_per_token_head", {"head_dim": 256}),
        ("fp8_e4m3", {"group": 32, "heads": 4}),
        ("fp8_e4m3", {"head_dim": 512, "heads": 2}),
        ("fp8_e4m3", {"page_size": 8, "block": 8, "n": 512}),
        ("fp8_e4m3", {"n": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("requests", [1, 40])
def test_one_list_for_all_heads_runs_as_dense_decode(fmt, requests, options):
    call = listed(fmt, requests, each_head=False, **options)
    shape, lists = config_of(call).shape, config_of(call).constants.LIST
    assert lists.AS_PAGES
    assert not lists.PER_HEAD
    pages = call.indices.shape[2] * call.block_size // call.k_cache.shape[1]
    dense = call._replace(
        indices=None, block_size=1, page_table=torch.empty(requests, pages, dtype=torch.int32),
    )  # fmt: skip
    assert shape == config_of(dense).shape
    compiled(call)


def test_rotated_rows_of_one_list():
    compiled(turned(listed("fp8_e4m3", 40, each_head=False), "kv", "kv"))


def test_rows_of_drafts_are_requests_of_their_own():
    call = make(Case("decode", "fp8_e4m3", "x", dim=128, page=64, listed=4, block_size=64, each_head=True, heads=8,
                     lens=(100, 70, 9), q_lens=(20, 1, 3), ragged=True))  # fmt: skip
    config = config_of(call)
    assert config.shape.UNSPLIT
    pages, split = config.launches.kernel_launches
    assert pages.grid == (24, 8, 1)
    assert split.grid == (24 * 8, 1, 1)
    assert split.arguments["CU_SEQLENS_Q"] is None
    assert split.arguments["B"] == 24


@pytest.mark.parametrize(
    ("requests", "n", "unsplit"),
    [(12, 16, False), (13, 16, True), (49, 16, True), (50, 16, False), (4, 2, True), (3, 2, False), (32, 32, True),
     (32, 33, False)],
)  # fmt: skip
def test_a_cta_has_a_whole_list_where_these_fill_the_gpu_once(requests, n, unsplit):
    assert unsplit == config_of(listed("fp8_e4m3", requests, n)).shape.UNSPLIT


def test_lists_without_entries_and_calls_without_rows_launch_nothing():
    assert config_of(listed("fp8_e4m3", 4, n=0)).launches.kernel_launches == ()
    assert config_of(listed("fp8_e4m3", 0)).launches.kernel_launches == ()


def test_lists_of_more_pages_than_the_workspace_holds_are_refused():
    f = facts("decode", listed("fp8_e4m3", 1 << 12, n=1 << 10), arch=90)
    assert attention.why_not(f) is None
    f = facts("decode", listed("fp8_e4m3", 1 << 12, n=1025), arch=90)
    assert attention.why_not(f) == "wants lists of 67108864 pages in all, got 67174400"
