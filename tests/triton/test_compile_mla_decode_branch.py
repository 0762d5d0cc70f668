"""The decode branch's first launch compiled for chips that are not there."""

from __future__ import annotations

import pytest
import torch
from compile_tools import ARCHS, FEW_SPILLS, compile_launch, record

from tersekv.backends.triton.mla_decode_branch import entry as mla_decode_branch
from tersekv.cache import PagedLatentCache
from tersekv.calls import MLADecodeBranchCall
from tersekv.dispatch import plan

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def call_of(tokens=1, heads=16, fp8=True, format="bf16", ragged=True, pages=65, rank=512) -> MLADecodeBranchCall:
    """One new token for each request; tensors are never read."""
    c = PagedLatentCache.allocate(1, 4, 64, format=format, kv_lora_rank=rank)[0]

    def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype)

    def weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        scale = empty(heads, n // 128, k // 128, dtype=torch.float32)
        return empty(heads, n, k, dtype=E4M3 if fp8 else BF16), scale if fp8 else None

    i32 = torch.int32
    return MLADecodeBranchCall(
        empty(tokens, heads, 192), empty(tokens, rank), empty(tokens, 64), c.ckv, c.kpe, c.ckv_scale_cache,
        empty(tokens, pages, dtype=i32), empty(tokens, dtype=i32), empty(tokens + 1, dtype=i32) if ragged else None,
        empty(8192, 64, dtype=torch.float32), empty(rank), *weight(rank, 128), *weight(128, rank),
        empty(tokens, heads, 128), format, 1, 192**-0.5, None, 1e-6, 1.0, None,
    )  # fmt: skip


def launches(backend, call: MLADecodeBranchCall, arch: int | str) -> dict[str, tuple]:
    f = plan.facts("mla_decode_branch", call, None if isinstance(arch, str) else arch)
    return {x[0].fn.__name__: x for x in record(backend.run, call, backend.configure(f))}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("fp8", [True, False], ids=["e4m3", "bf16"])
def test_every_chip_compiles_the_first_launch_without_spills(fp8, arch):
    fn, _, args, options = launches(mla_decode_branch, call_of(fp8=fp8), arch)["rope_store_project_kernel"]
    kernel = compile_launch(fn, args, options, arch)
    assert kernel["n_spills"] <= FEW_SPILLS
    assert kernel["shared"] <= {80: 163, 90: 227, 100: 227, "gfx942": 64}.get(arch, 99) << 10


@pytest.mark.parametrize(("format", "tokens", "ragged"), [("fp8_e4m3", 8, False), ("fp8_ds_mla", 64, True)])
def test_it_stores_rows_of_every_format(format, tokens, ragged):
    call = call_of(tokens, format=format, ragged=ragged)
    fn, grid, args, options = launches(mla_decode_branch, call, 90)["rope_store_project_kernel"]
    kernel = compile_launch(fn, args, options, 90)
    assert kernel["n_spills"] <= FEW_SPILLS
    # Rows and rotated heads of each token, the lengths, and the projection's programs.
    projection = mla_decode_branch.configure(plan.facts("mla_decode_branch", call, 90)).query_projection.tile
    columns, rows = -(-512 // projection.block_n), -(-tokens // projection.block_m)
    assert grid[0] == 2 * tokens + 1 + 16 * columns * rows


def test_launches_overlap_where_the_chip_lets_them():
    for arch, overlaps in ((80, False), (90, True)):
        fn, _, args, options = launches(mla_decode_branch, call_of(), arch)["rope_store_project_kernel"]
        text = compile_launch(fn, args, options, arch)["ptx"]
        assert ("griddepcontrol.launch_dependents" in text) == overlaps
        assert options.get("launch_pdl", False) == overlaps


def test_the_branch_is_as_many_launches_as_decode_and_two():
    names = list(launches(mla_decode_branch, call_of(heads=128), 90))
    assert names == [
        "rope_store_project_kernel",
        "stream_k_mla_decode_kernel",
        "combine_by_split_metadata_kernel",
        "project_kernel",
    ]
