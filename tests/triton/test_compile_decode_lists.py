"""Paged decode over lists of blocks, compiled for chips that are not there: a launch writes the page tables that
dense decode's kernel reads."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from compile_tools import compile_launches, since
from drawn import half
from test_compile_decode import call_of

from tersekv.backends.host.key_lists import NO_LISTS
from tersekv.backends.triton import attention
from tersekv.backends.triton.decode import entry as decode
from tersekv.calls import AttentionCall
from tersekv.dispatch import checks
from tersekv.dispatch.plan import facts

FORMATS = ("fp8_e4m3", "bf16", "int8_per_token_head", "nvfp4", "int4_per_token_head", "fp8_per_token_head")
ARCHS = (80, 90, 120, "gfx942")


def listed(call: AttentionCall, n: int = 16, block: int = 128, each_head: bool = True) -> AttentionCall:
    lists = call.k_cache.shape[2] if each_head else 1
    return call._replace(indices=torch.zeros(len(call.q), lists, n, dtype=torch.int32), block_size=block)


def config_of(call: AttentionCall, arch: int | str) -> decode.Config:
    f = facts("decode", call, arch=arch if isinstance(arch, int) else None)
    checks.facts(f)
    return attention.configure(f)


def compiled(call: AttentionCall, arch: int | str) -> list[dict]:
    return compile_launches(attention.run, call, config_of(call, arch), arch)


@pytest.mark.parametrize(("fmt", "arch", "each_head"), half(FORMATS, ARCHS, (True, False)))
def test_as_tuned_as_dense_decode(fmt, arch, each_head):
    """The tiles, copies and registers of dense decode over as many keys, up to the few of the cut pages' mask."""
    call, dense = listed(call_of(fmt), each_head=each_head), call_of(fmt, max_pages=32)
    found, want = config_of(call, arch).constants, config_of(dense, arch).constants
    assert each_head == found.LIST.PER_HEAD
    assert replace(found, LIST=NO_LISTS, USE_PDL=False) == want
    pages, split, combine = compiled(call, arch)
    assert pages["name"] == "list_visible_pages_kernel"
    assert pages["grid"] == (2, 8 if each_head else 1, 1)
    assert max(pages["n_spills"], combine["n_spills"]) == 0
    most = 112 if (fmt, arch, each_head) == ("int4_per_token_head", 80, True) else 16
    assert split["n_spills"] <= compiled(dense, arch)[0]["n_spills"] + since({(3, 6): 16, (3, 9): most})
    if arch in (90, 120):
        assert "griddepcontrol.wait" in split["ptx"], "it begins while lists are written"


@pytest.mark.parametrize("options", [
    {"page_size": 16}, {"page_size": 128}, {"head_dim": 256}, {"page_size": 48, "block": 96}, {"n": 200},
    {"page_size": 1, "block": 1, "n": 70}, {"page_size": 256, "block": 64}, {"page_size": 64, "block": 16},
], ids=str)  # fmt: skip
@pytest.mark.parametrize(("fmt", "arch"), [("fp8_e4m3", 90), ("int8_per_token_head", 80), ("nvfp4", 120)])
def test_other_pages_and_heads(fmt, arch, options):
    options = dict(options)
    n, block = options.pop("n", 16), options.pop("block", 128)
    call, page = listed(call_of(fmt, **options), n, block), min(block, options.pop("page_size", 64))
    split, dense_call = compiled(call, arch)[1], call_of(fmt, max_pages=n * block // page, page_size=page, **options)
    dense = compiled(dense_call, arch)[0]
    assert config_of(call, arch).constants.USE_TMA == config_of(dense_call, arch).constants.USE_TMA
    assert split["n_spills"] <= dense["n_spills"] + 16


def test_parts_of_pages_are_counted_in_32_bits():
    f = facts("decode", listed(call_of("fp8_e4m3"), block=16), arch=90)
    assert decode.reads_listed_pages(f)
    for pages, is_read in ((2**29 - 1, True), (2**29, False)):
        cache = f.k_cache._replace(shape=(pages, *f.k_cache.shape[1:]))
        assert decode.reads_listed_pages(SimpleNamespace(**vars(f) | {"k_cache": cache})) == is_read


def test_lists_of_more_pages_than_the_workspace_holds_are_looked_up_key_by_key():
    for n, is_read in ((1 << 22, True), ((1 << 22) + 1, False)):  # 2 requests of 8 heads
        call = listed(call_of("fp8_e4m3"), n, block=64)
        assert is_read == config_of(call, 90).constants.LIST.AS_PAGES


def test_lists_of_keys_beyond_int32_are_looked_up_key_by_key():
    """One list, whose pages are few enough."""
    for page, is_read in ((64, True), (128, False)):
        call = listed(call_of("fp8_e4m3", page_size=page), 1 << 24, block=page, each_head=False)
        f = facts("decode", call, arch=90)
        assert decode.reads_listed_pages(f) == is_read


def test_the_launch_of_pages_is_not_compiled_anew_for_lists_of_another_length():
    """Up to a power of two of pages: what changes is an argument that Triton does not specialise on."""
    first, other = (config_of(listed(call_of("fp8_e4m3"), n), 90).launches.kernel_launches[0] for n in (9, 16))
    free = {p.name for p in first.launch.fn.params if p.do_not_specialize}
    changed = {name for name, x in first.arguments.items() if other.arguments[name] != x}
    assert changed == {"num_pages", "stride_list_t", "stride_list_h"}
    assert changed <= free
    assert first.launch.options == other.launch.options
