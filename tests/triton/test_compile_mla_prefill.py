"""MLA prefill compiled for chips that are not there: instructions, registers, shared memory; and its facts → config."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compile_tools import FEW_SPILLS, compile_launch, record, since

from tersekv import UnsupportedError
from tersekv.backends.triton.mla_prefill import entry as mla_prefill
from tersekv.backends.triton.mla_prefill.config import (
    AttentionTile,
    GemmTile,
    MLAPrefillConfig,
    attention_tile_candidates,
    gemm_tile_candidates,
)
from tersekv.cache import PagedLatentCache
from tersekv.calls import MLAPrefillCall
from tersekv.dispatch import plan

# Of wide heads, and of a tile that Hopper does not choose.
WIDE_SPILLS = since({(3, 6): 0, (3, 7): 224, (3, 9): 32})
SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
MATRIX = {80: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}


def make(
    tokens: int = 4096, heads: int = 16, nope: int = 128, rope: int = 64, dim_v: int = 128, rank: int = 512,
    format: str = "bf16", dtype: torch.dtype = torch.bfloat16, fp8: bool = True, chunks: int = 1, scale: float = 0.07,
) -> MLAPrefillCall:  # fmt: skip
    """A call whose tensors are never read."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    c = PagedLatentCache.allocate(1, 2, 64, format=format, kv_lora_rank=rank, qk_rope_head_dim=rope)[0]
    rows, f32, i32 = heads * (nope + dim_v), torch.float32, torch.int32
    weight = empty(rows, rank, dtype=torch.float8_e4m3fn if fp8 else dtype)
    return MLAPrefillCall(
        empty(tokens, heads, nope + rope), empty(tokens, rank), empty(tokens, rope), c.ckv, c.kpe, c.ckv_scale_cache,
        empty(1, 64, dtype=i32), empty(1, dtype=i32), empty(2, dtype=i32), empty(8192, rope, dtype=f32), empty(rank),
        weight, empty(rows // 128, rank // 128, dtype=f32) if fp8 else None,
        empty(chunks, 2, dtype=i32), empty(chunks, 1, dtype=i32), empty(tokens, heads, dim_v),
        empty(tokens, heads, dtype=f32), [tokens] * chunks, format, tokens, scale, 1e-6, 1.0, None, "exact",
    )  # fmt: skip


def facts(call: MLAPrefillCall, arch: int | str) -> SimpleNamespace:
    return plan.facts("mla_prefill", call, None if isinstance(arch, str) else arch)


def compiled(
    call: MLAPrefillCall, arch: int | str, choice: MLAPrefillConfig | None = None, only: str = ""
) -> dict[str, Any]:
    """What each distinct kernel of a call compiles to, by name."""
    out = {}
    f = facts(call, arch)
    config = (
        mla_prefill.Config(choice, mla_prefill.make_append_and_chunk_launches(f, choice))
        if choice
        else mla_prefill.configure(f)
    )
    for fn, _, args, kwargs in record(mla_prefill.run, call, config):
        if only in fn.fn.__name__:
            result = compile_launch(fn, args, kwargs, arch)
            out[result["name"]] = result
    return out


@pytest.mark.parametrize("arch", [80, 89, 90, 100, 120])
def test_products_use_the_matrix_units_and_tiles_fit(arch):
    kernels = compiled(make(), arch)
    assert set(kernels) == {
        "rope_norm_store_kernel",
        "gather_and_requantize_latents_kernel",
        "blockwise_gemm_kernel",
        "attention_kernel",
    }
    for name, k in kernels.items():
        assert k["shared"] <= SHARED[arch], name
        # Descriptor kernels for sm_120 have 8 bytes of stack; more would be spills.
        assert k["n_spills"] <= max(0 if arch == 90 else 8, FEW_SPILLS), name
        assert name in ("rope_norm_store_kernel", "gather_and_requantize_latents_kernel") or MATRIX[arch] in k["ptx"], (
            name
        )
    blockwise_gemm = kernels["blockwise_gemm_kernel"]["ptx"]
    assert ("e4m3" in blockwise_gemm or "f8f6f4" in blockwise_gemm) == (arch >= 89)


def test_amd_compiles():
    kernels = compiled(make(), "gfx942")
    assert all(k["n_spills"] == 0 and k["shared"] <= 64 << 10 for k in kernels.values())


def test_rotation_is_compiled_without_fused_multiply_adds():
    ptx = compiled(make(), 90, only="rope_norm_store_kernel")["rope_norm_store_kernel"]["ptx"]
    assert "fma.rn.f32" not in ptx
    assert "sqrt.rn.f32" in ptx


def test_fp8_products_on_hopper_start_every_128_columns_afresh_and_run_in_flight():
    sass = compiled(make(), 90, only="blockwise_gemm_kernel")["blockwise_gemm_kernel"]["sass"]()
    products = [line for line in sass.splitlines() if "QGMMA" in line]
    assert len(products) == 4  # a step of 128 columns, 32 a time
    assert sum("RZ" in line for line in products) == 1
    # One wait for each step: where ptxas serialises products, each of them has a wait of its own.
    assert sass.count("WARPGROUP.DEPBAR") == 1
    assert "UTMALDG" in sass
    assert "UTMASTG" in sass


def test_attention_on_hopper_loads_tiles_by_tma_and_keeps_products_in_flight():
    sass = compiled(make(), 90, only="attention_kernel")["attention_kernel"]["sass"]()
    loops = 2  # whole tiles, masked tiles
    assert sass.count("HGMMA") == loops * (8 + 4 + 4)  # nope, rotary part, values
    assert sass.count("WARPGROUP.DEPBAR") <= loops * 3
    assert sass.count("UTMALDG") == loops * 3 * 3  # k, rotary part, v: twice before the loop and in it


def test_every_candidate_on_hopper_compiles_without_spills():
    call = make()
    attention, products = (
        candidates(facts(call, 90)) for candidates in (attention_tile_candidates, gemm_tile_candidates)
    )
    assert 2 <= len(attention) <= 4
    assert 2 <= len(products) <= 4
    for tile in attention[1:]:
        k = compiled(call, 90, MLAPrefillConfig(tile, products[0], True, True), "attention")["attention_kernel"]
        assert k["n_spills"] <= WIDE_SPILLS, (tile, k["n_spills"])
        assert k["shared"] <= SHARED[90], tile
    for tile in products[1:]:
        k = compiled(call, 90, MLAPrefillConfig(attention[0], tile, True, True), "blockwise_gemm")[
            "blockwise_gemm_kernel"
        ]
        assert (k["n_spills"] <= FEW_SPILLS, k["shared"] <= SHARED[90]) == (True, True), tile


@pytest.mark.parametrize(
    ("arch", "sizes"),
    [
        (80, {"nope": 256, "rope": 128, "dim_v": 256}),
        (89, {"nope": 192, "dim_v": 256}),
        (90, {"nope": 256, "rope": 128, "dim_v": 256, "chunks": 2}),
        (90, {"nope": 96, "rope": 32, "dim_v": 80, "rank": 192, "fp8": False, "dtype": torch.float16}),
    ],
    ids=str,
)
def test_other_sizes_fit(arch, sizes):
    for name, k in compiled(make(**sizes), arch).items():
        assert k["shared"] <= SHARED[arch], name
        assert k["n_spills"] <= max(0 if arch == 90 else 8, WIDE_SPILLS), (name, k["n_spills"])


def test_the_measured_choices_come_first_on_hopper():
    assert mla_prefill.configure(facts(make(), 90)).choice == MLAPrefillConfig(
        AttentionTile(128, 64, 8, 3, True), GemmTile(64, 128, 128, 4, 3, True), native_fp8=True, native_casts=True
    )


def test_sm_89_multiplies_e4m3_but_rounds_to_it_by_bit_arithmetic():
    call = make(format="fp8_e4m3")
    config = mla_prefill.configure(facts(call, 89)).choice
    assert (config.native_fp8, config.native_casts) == (True, False)
    for name in (
        "rope_norm_store",
        "gather_and_requantize_latents",
    ):  # sm_89 converts through fp16, rounded toward zero
        assert "cvt.rn.satfinite.e4m3x2" not in compiled(call, 89, only=name)[f"{name}_kernel"]["ptx"]
    gather = "gather_and_requantize_latents_kernel"
    assert "cvt.rn.satfinite.e4m3x2.f32" in compiled(call, 90, only=gather)[gather]["ptx"]


@pytest.mark.parametrize("arch", [80, 89, 90])
@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"])
def test_every_format_compiles(arch, format):
    call = make(format=format)
    names = ("rope_norm_store_kernel", "gather_and_requantize_latents_kernel")
    assert [name for name in names for name in compiled(call, arch, only=name)] == [*names]


def test_several_chunks_launch_once_each_and_carry_their_state():
    call = make(chunks=3)
    launches = record(mla_prefill.run, call, mla_prefill.configure(facts(call, 90)))
    names = [fn.fn.__name__ for fn, *_ in launches]
    assert names == [
        "rope_norm_store_kernel",
        *["gather_and_requantize_latents_kernel", "blockwise_gemm_kernel", "attention_kernel"] * 3,
    ]


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"nope": 288}, "needs heads of 1 to 256 nope and value dims, got 288 and 128"),
        ({"rope": 192}, "needs at most 128 rotary dims, got 192"),
        ({"scale": -1.0}, "needs softmax_scale > 0, got -1.0"),
        ({"rank": 8192, "heads": 1}, "needs a latent rank of at most 4096, got 8192"),
    ],
)
def test_what_it_cannot_do_is_named(sizes, reason):
    assert mla_prefill.why_not(facts(make(tokens=4, **{"heads": 2, **sizes}), 90)) == reason


def test_old_chips_and_the_cpu_are_refused():
    call = make(tokens=4, heads=2)
    assert mla_prefill.why_not(facts(call, 75)) == "needs sm_80 or newer, got sm_75"
    with pytest.raises(UnsupportedError, match="needs a CUDA or HIP device, got cpu"):
        plan.plan("mla_prefill", call, "triton")


def test_unaligned_weights_and_odd_heads_go_without_descriptors():
    call = make(tokens=4, heads=2)
    assert mla_prefill.configure(facts(call, 90)).choice.product.tma
    weight = torch.empty(call.kv_b_proj.numel() + 8, dtype=torch.float8_e4m3fn)[8:].view(call.kv_b_proj.shape)
    off = mla_prefill.configure(facts(call._replace(kv_b_proj=weight), 90)).choice
    assert (off.product.tma, off.attention.tma) == (False, True)
    odd = mla_prefill.configure(facts(make(tokens=4, heads=2, nope=96, dim_v=96), 90)).choice
    assert (odd.product.tma, odd.attention.tma) == (True, False)
