"""MLA decode compiled for chips that are not there: instructions, registers, shared memory; and its facts → config."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from compile_tools import compile_launch, record

from tersekv.backends.triton.mla_decode import config as mla_decode_tune
from tersekv.backends.triton.mla_decode import entry as mla_decode
from tersekv.cache import PagedLatentCache
from tersekv.calls import MLADecodeCall
from tersekv.dispatch import plan
from tersekv.formats import latent_format

SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
BF16 = torch.bfloat16


def make(format="fp8_e4m3", heads=16, page=64, q_dtype=BF16, requests=4, drafts=1, rank=512, rope=64) -> MLADecodeCall:
    """A call whose tensors are never read."""
    c = PagedLatentCache.allocate(1, 4, page, format=format, kv_lora_rank=rank, qk_rope_head_dim=rope)[0]
    rows = requests * drafts
    q = torch.empty(rows, heads, rank + rope, dtype=q_dtype)
    return MLADecodeCall(
        q[..., :rank], q[..., rank:], c.ckv, c.kpe, c.ckv_scale_cache, torch.empty(requests, 64, dtype=torch.int32),
        torch.empty(requests, dtype=torch.int32), None, torch.empty(rows, heads, rank, dtype=BF16),
        torch.empty(rows, heads), format, drafts, 0.1, None, 1.0, None, 1.0, None, "exact",
    )  # fmt: skip


def configure(call: MLADecodeCall, arch: int | str) -> mla_decode.Config:
    f = plan.facts("mla_decode", call, None if isinstance(arch, str) else arch)
    assert isinstance(arch, str) or mla_decode.why_not(f) is None
    return mla_decode.configure(f)


def compiled(call: MLADecodeCall, arch: int | str, name: str = "stream_k_mla_decode_kernel") -> dict[str, Any]:
    for fn, _, args, kwargs in record(mla_decode.run, call, configure(call, arch)):
        if fn.fn.__name__ == name:
            return compile_launch(fn, args, kwargs, arch)
    raise AssertionError(name)


def innermost_loop(sass: str) -> list[str]:
    """Instructions of the first loop that multiplies: that of the tiles that every row sees whole."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)
    code = [(int(address, 16), text) for address, text in found]
    loops = []
    for address, text in code:
        jump = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        if jump and int(jump[1], 16) < address:
            body = [t for a, t in code if int(jump[1], 16) <= a <= address]
            if any("MMA" in t for t in body):
                loops.append((int(jump[1], 16), body))
    smallest = min(len(body) for _, body in loops)
    return min((start, body) for start, body in loops if len(body) < 2 * smallest)[1]


def count(code: list[str], *names: str) -> int:
    return sum(any(re.match(rf"(@!?U?P\w+ )?{n}\b", t) for n in names) for t in code)


@pytest.mark.parametrize(
    ("format", "heads"), [("fp8_e4m3", 16), ("fp8_e4m3", 128), ("bf16", 16), ("bf16", 128), ("fp8_ds_mla", 16)]
)
def test_the_loop_on_hopper_spills_nothing_and_overlaps_loads(format, heads):
    k = compiled(make(format, heads), 90)
    assert k["shared"] <= SHARED[90]
    loop = innermost_loop(k["sass"]())
    assert count(loop, "STL", "LDL") == 0
    assert count(loop, "HGMMA") > 0
    # More than one buffer of every tile.
    buffers = re.findall(r"ttg.local_alloc : \(\) -> !ttg.memdesc<(\d)x32x\d+x(?:i16|bf16)", k["ttgir"])
    assert buffers
    assert all(int(n) >= 2 for n in buffers)
    if format != "bf16":
        # One conversion for two codes, and no detour.
        assert count(loop, "F2FP") > 0
        assert count(loop, "I2F", "F2F", "HADD2") == 0


def test_a_latent_row_is_read_once_for_keys_and_values():
    loop = innermost_loop(compiled(make(), 90)["sass"]())
    assert count(loop, "UTMALDG") == 4 + 1  # chunks of 64 words, and the rotary part


@pytest.mark.parametrize(
    ("arch", "format"), [(80, "fp8_e4m3"), (89, "bf16"), (100, "bf16"), (120, "bf16"), (120, "fp8_e4m3")]
)
def test_other_chips_compile_and_fit(arch, format):
    k = compiled(make(format, 128 if format == "bf16" else 16), arch)
    assert k["shared"] <= SHARED[arch]


def test_amd_compiles_and_fits():
    assert compiled(make("fp8_e4m3"), "gfx942")["shared"] <= 64 << 10


@pytest.mark.parametrize("page", [16, 3])
def test_small_pages_compile_and_fit(page):
    k = compiled(make("fp8_e4m3", 16, page), 90)
    assert k["shared"] <= SHARED[90]
    assert count(innermost_loop(k["sass"]()), "STL", "LDL") == 0


def test_an_fp16_query_on_a_bf16_cache_fits():
    assert compiled(make("bf16", 128, q_dtype=torch.float16), 90)["shared"] <= SHARED[90]


@pytest.mark.parametrize(
    ("heads", "drafts", "rows", "blocks"),
    [(1, 1, 16, 1), (16, 1, 16, 1), (16, 4, 64, 1), (64, 1, 64, 1), (128, 1, 64, 2), (96, 1, 64, 1), (128, 3, 64, 2)],
)
def test_query_heads_are_dealt_in_blocks_that_read_the_same_tiles(heads, drafts, rows, blocks):
    config = configure(make(heads=heads, drafts=drafts), 90)
    c = config.constants
    assert (rows, blocks, heads) == (c.BLOCK_M, c.HEADS, c.GROUP * c.HEADS)
    assert config.launches.kernel_launches[0].grid[0] % blocks == 0
    assert config.launches.kernel_launches[1].grid[1] == min(rows, drafts * c.GROUP)


@pytest.mark.parametrize("format", ["fp8_e4m3", "bf16", "fp8_ds_mla"])
def test_whole_rows_are_loaded_by_descriptors_where_pages_hold_tiles(format):
    assert configure(make(format), 90).cache_matrices[0].columns == 512 // configure(make(format), 90).constants.PACK
    assert configure(make(format, page=16), 90).constants.USE_TMA
    assert not configure(make(format, page=24), 90).constants.USE_TMA
    assert not configure(make(format), 80).constants.USE_TMA


@pytest.mark.parametrize("format", ["fp8_e4m3", "bf16", "fp8_ds_mla"])
@pytest.mark.parametrize("heads", [16, 64])
def test_candidates_begin_with_the_choice_and_are_few(format, heads):
    call = make(format, heads)
    f = plan.facts("mla_decode", call, 90)
    listed = mla_decode_tune.benchmark_tile_configs_chosen_first(f, latent_format(format))
    assert listed[0] == mla_decode_tune.choose_tile_config(f, latent_format(format))
    assert len(listed) == len(set(listed)) <= 8
