"""MLA prefill's Gluon kernels, compiled for a GPU that is not there: what matters in the machine code, and who gets
a plan."""

from __future__ import annotations

import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compile_tools import compile_launch, record, since

from tersekv.backends.gluon import mla_prefill
from tersekv.cache import PagedLatentCache
from tersekv.calls import MLAPrefillCall
from tersekv.dispatch import plan

SHARED = 227 << 10


def call_of(
    tokens: int = 4096, heads: int = 16, nope: int = 128, rope: int = 64, dim_v: int = 128, rank: int = 512,
    fp8: bool = True, chunks: int = 1, dtype: torch.dtype = torch.bfloat16, lse: bool = False, gap: int = 0,
) -> MLAPrefillCall:  # fmt: skip
    """A call whose tensors are never read."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    c = PagedLatentCache.allocate(1, 2, 64, format="bf16", kv_lora_rank=rank, qk_rope_head_dim=rope)[0]
    rows, f32, i32 = heads * (nope + dim_v), torch.float32, torch.int32
    weight = empty(rows, rank, dtype=torch.float8_e4m3fn if fp8 else dtype)
    q = empty(tokens, heads, nope + rope + gap)[..., : nope + rope]
    return MLAPrefillCall(
        q, empty(tokens, rank), empty(tokens, rope), c.ckv, c.kpe, c.ckv_scale_cache, empty(1, 64, dtype=i32),
        empty(1, dtype=i32), empty(2, dtype=i32), empty(8192, rope, dtype=f32), empty(rank), weight,
        empty(rows // 128, rank // 128, dtype=f32) if fp8 else None, empty(chunks, 2, dtype=i32),
        empty(chunks, 1, dtype=i32), empty(tokens, heads, dim_v), empty(tokens, heads, dtype=f32) if lse else None,
        [tokens] * chunks, "bf16", tokens, 0.07, 1e-6, 1.0, None, "exact",
    )  # fmt: skip


def facts(call: MLAPrefillCall, arch: int = 90) -> SimpleNamespace:
    return plan.facts("mla_prefill", call, arch)


@cache
def compiled(**sizes: Any) -> dict[tuple[str, int], dict[str, Any]]:
    """What each launch of a call compiles to, by name and number."""
    call = call_of(**sizes)
    assert mla_prefill.why_not(facts(call)) is None
    launches = record(mla_prefill.run, call, mla_prefill.configure(facts(call)))
    return {
        (fn.fn.__name__, i): compile_launch(fn, args, kwargs, 90)
        for i, (fn, _, args, kwargs) in enumerate(launches)
        if fn.is_gluon()
    }


def loops(sass: str, *holding: str) -> list[list[str]]:
    """Innermost loops that hold these instructions: from the target of a backward branch to the branch.

    Waits spin behind the end of the program and branch back from there; those are none.
    """
    lines = [m for line in sass.splitlines() if (m := re.search(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", line))]
    at = {int(m[1], 16): i for i, m in enumerate(lines)}
    found: list[tuple[int, int]] = []
    for i, m in enumerate(lines):
        branch = re.search(r"\bBRA (?:`\()?0x([0-9a-f]+)", m[2])
        start = at.get(int(branch[1], 16), i) if branch else i
        if start < i and not any("EXIT" in m[2] for m in lines[start:i]):
            found.append((start, i))
    inner = [a for a in found if not any(b != a and a[0] <= b[0] and b[1] <= a[1] and b[1] - b[0] > 8 for b in found)]
    texts = [[m[2] for m in lines[a : b + 1]] for a, b in inner]
    return [t for t in texts if all(any(h in line for line in t) for h in holding)]


def count(lines: list[str], what: str) -> int:
    return sum(what in line for line in lines)


def test_every_kernel_fits_a_multiprocessor():
    kernels = compiled()
    assert [name for name, _ in kernels] == ["blockwise_gemm_kernel", "attention_kernel"]
    assert all(k["shared"] <= SHARED for k in kernels.values())


def test_the_product_keeps_its_matrix_instructions_in_flight_and_never_spills():
    k = compiled()["blockwise_gemm_kernel", 2]
    sass = k["sass"]()
    assert k["n_spills"] == 0
    tiles = loops(sass, "QGMMA")
    assert len(tiles) == 2  # one for each warpgroup
    for tile in tiles:
        assert count(tile, "QGMMA") == 2 * 4 * 4  # halves, steps of 128 columns, 32 a time
        waits = [line for line in tile if "WARPGROUP.DEPBAR" in line]
        assert len(waits) == 2 * 4  # where ptxas serialises them, each product has a wait of its own
        assert sum("0x0" in line for line in waits) == 1  # one half is scaled while the other is multiplied
        assert count(tile, "FFMA") == 64 * 4
    assert "UTMALDG" in sass
    assert "UTMASTG" in sass


@pytest.mark.parametrize("rank", [128, 256, 384])
def test_the_product_of_fewer_columns_fits_too(rank):
    k = compiled(rank=rank)["blockwise_gemm_kernel", 2]
    assert (k["n_spills"], count(k["sass"]().splitlines(), "QGMMA")) == (0, 2 * 2 * 4 * rank // 128)


def test_the_queries_are_rotated_once_and_without_fused_multiply_adds():
    call = call_of(tokens=512, chunks=2)
    launches = record(mla_prefill.run, call, mla_prefill.configure(facts(call)))
    latents = [
        (fn, args, kwargs)
        for fn, _, args, kwargs in launches
        if fn.fn.__name__ == "gather_and_requantize_latents_kernel"
    ]
    first = "ROPE_Q_AND_CLEAR_PADDING"
    assert [dict(zip(fn.arg_names, args, strict=True))[first] for fn, args, _ in latents] == [True, False]
    fn, args, kwargs = latents[0]
    assert compile_launch(fn, args, kwargs, 90)["ptx"].count("fma.rn") == 0


def test_attention_hides_the_softmax_behind_the_products():
    sass = compiled()["attention_kernel", 3]["sass"]()
    steps = [step for step in loops(sass, "HGMMA") if count(step, "BAR.SYNC") < 8]  # whole tiles, without NaN checks
    assert len(steps) == 2
    for step in steps:
        assert count(step, "HGMMA") == 8 + 4 + 8  # nope, rotary part, values
        # 3.8's ptxas, of 12.9, keeps nine words of 520 instructions in local memory.
        assert count(step, "LDL") + count(step, "STL") <= since({(3, 6): 0, (3, 8): 9, (3, 9): 0})
        waits = [i for i, line in enumerate(step) if "WARPGROUP.DEPBAR" in line]
        assert len(waits) == 2
        between = step[waits[0] : waits[1]]
        assert count(between, "MUFU.EX2") >= 64
        released = next(i for i, line in enumerate(between) if "SYNCS.ARRIVE" in line)
        assert count(between[:released], "MUFU.EX2") == 0  # keys are released before the exponentials


def test_with_much_to_do_three_warpgroups_go_first_and_two_again_if_they_failed():
    found = compiled(heads=128)
    assert [name for name, _ in found] == [
        "blockwise_gemm_kernel", "attention_three_warpgroups_kernel", "attention_kernel",
    ]  # fmt: skip
    k = found["attention_three_warpgroups_kernel", 3]
    assert k["shared"] <= SHARED
    steps = [step for step in loops(k["sass"](), "HGMMA") if count(step, "BAR.SYNC") < 9]
    assert len(steps) == 3
    for step in steps:
        assert count(step, "HGMMA") == 8 + 4 + 8
        assert count(step, "LDL") + count(step, "STL") <= since({(3, 6): 0, (3, 8): 16})  # of 440 instructions
        assert count(step, "FMNMX") == 0  # the maximum is known
        released = next(i for i, line in enumerate(step) if "SYNCS.ARRIVE" in line)
        # Keys are released before the exponentials; from 3.8 on two of these come before.
        assert count(step[:released], "MUFU.EX2") <= since({(3, 6): 0, (3, 8): 2})


@pytest.mark.parametrize(
    "sizes", [{"chunks": 2}, {"dtype": torch.float16, "fp8": False}, {"fp8": False}, {"tokens": 512}], ids=str
)
def test_three_warpgroups_are_for_one_chunk_of_many_items_in_bf16(sizes):
    call = call_of(heads=128, **sizes)
    names = [fn.fn.__name__ for fn, *_ in record(mla_prefill.run, call, mla_prefill.configure(facts(call)))]
    assert "attention_three_warpgroups_kernel" not in names


def test_later_chunks_keep_their_matrix_instructions_in_flight_too():
    for (name, i), k in compiled(tokens=512, chunks=3).items():
        for step in loops(k["sass"](), "HGMMA") if name == "attention_kernel" else ():
            assert count(step, "WARPGROUP.DEPBAR") == 2, i


def test_a_launch_waits_for_the_one_ahead_of_it():
    call = call_of(tokens=512)
    kernels = [
        (compile_launch(fn, args, kwargs, 90)["ptx"], kwargs)
        for fn, _, args, kwargs in record(mla_prefill.run, call, mla_prefill.configure(facts(call)))
    ]
    (stored, first), *others = kernels
    assert "griddepcontrol" not in stored  # rows are stored when all before is done, and before anything is gathered
    assert not first.get("launch_pdl")
    assert len(others) == 3
    for ptx, kwargs in others:
        assert kwargs["launch_pdl"]
        assert ptx.count("griddepcontrol.wait") == 1


def test_a_call_that_only_appends_takes_its_turn_before_it_reads():
    call = call_of(tokens=1)._replace(buffer_lengths=[0])
    ((fn, _, args, kwargs),) = record(mla_prefill.run, call, mla_prefill.configure(facts(call)))
    assert fn.fn.__name__ == "rope_norm_store_kernel"
    assert kwargs["launch_pdl"]
    before, behind = compile_launch(fn, args, kwargs, 90)["ptx"].split("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in before
    assert "ld.global" not in before
    assert "ld.global" in behind


@pytest.mark.parametrize(
    "sizes",
    [{"chunks": 3, "tokens": 512}, {"dtype": torch.float16, "fp8": False}, {"heads": 128, "rank": 256, "lse": True}],
    ids=str,
)
def test_other_calls_fit(sizes):
    for (name, _), k in compiled(**sizes).items():
        assert k["shared"] <= SHARED, name
        # Addresses that only an item's end needs may lie in local memory; the loops are looked at above.
        two, three = since({(3, 6): (128, 160), (3, 8): (128, 256), (3, 9): (464, 256)})
        assert k["n_spills"] <= {"attention_kernel": two, "attention_three_warpgroups_kernel": three}.get(name, 0), name


def test_a_later_call_only_fills_in_addresses():
    call = call_of(tokens=512, chunks=2)
    config = mla_prefill.configure(facts(call))
    names = [fn.fn.__name__ for fn, *_ in record(mla_prefill.run, call, config)]
    assert names == [
        "rope_norm_store_kernel",
        *["gather_and_requantize_latents_kernel", "blockwise_gemm_kernel", "attention_kernel"] * 2,
    ]
    scratch = config.launches.workspace
    memory = torch.empty(scratch.num_floats)
    offsets = scratch.offsets()
    for name, tensor in scratch.slice_views(memory).items():
        assert (tensor is None) == (name not in offsets)
        assert tensor is None or tensor.data_ptr() == memory.data_ptr() + offsets[name]


def test_a_16_bit_weight_takes_the_portable_product():
    call = call_of(fp8=False)
    names = [fn.fn.__name__ for fn, *_ in record(mla_prefill.run, call, mla_prefill.configure(facts(call)))]
    assert names == [
        "rope_norm_store_kernel",
        "gather_and_requantize_latents_kernel",
        "blockwise_gemm_kernel",
        "attention_kernel",
    ]
    assert not mla_prefill.configure(facts(call)).use_gluon_gemm


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"dim_v": 64}, "needs heads of 128 nope, 64 rotary and 128 value dims, got 128, 64 and 64"),
        ({"gap": 4}, "needs q on a multiple of 16 bytes, tokens outermost, strides multiples of 8"),
    ],
)
def test_what_it_cannot_do_is_named(sizes, reason):
    found = mla_prefill.why_not(facts(call_of(tokens=8, heads=2, **sizes)))
    assert found is not None
    assert found.startswith(reason)


def test_the_stride_of_a_single_token_means_nothing():
    call = call_of(tokens=1)
    odd = call._replace(q=torch.empty_strided((1, 16, 192), (5, 192, 1), dtype=torch.bfloat16))
    assert facts(odd).q == facts(call).q
    for c in (call, odd):
        launches = record(mla_prefill.run, c, mla_prefill.configure(facts(c)))
        maps = next(args for fn, _, args, _ in launches if fn.fn.__name__ == "attention_kernel")[:2]
        assert [x.strides for x in maps] == [[16 * 192, 1]] * 2


def test_a_weight_that_no_tensor_map_takes_goes_to_the_portable_product():
    call = call_of(tokens=8)
    w = call.kv_b_proj
    wide = torch.empty(w.shape[0], 528, dtype=w.dtype)
    for weight, own in ((wide[:, :512], True), (wide[:, 8:520], False), (w[:1].expand_as(w), False)):
        assert mla_prefill.configure(facts(call._replace(kv_b_proj=weight))).use_gluon_gemm is own
