"""The write kernels, compiled for chips that are not there: they fit, they do not spill, they round as written."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
from compile_tools import ARCHS, compile_launches, since
from drawn import half

from tersekv.backends.host import row_programs
from tersekv.cache import PagedKVCache, PagedLatentCache
from tersekv.calls import LAYER_COLUMNS, AppendCall, MergeCall, MLAAppendCall, RopeAppendCall, TranscodeCall
from tersekv.dispatch import checks
from tersekv.dispatch.plan import facts
from tersekv.formats import KV_FORMATS
from tersekv.ops.transcode import layer_fields

T = 2048
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def index(n: int = T) -> torch.Tensor:
    return empty(n, dtype=torch.int64)


def append_call(fmt: str) -> AppendCall:
    c = PagedKVCache.allocate(1, 8, 16, 8, 128, format=fmt)[0]
    return AppendCall(
        empty(T, 8, 128), empty(T, 8, 128), c.k, c.v, c.k_scale_cache, c.v_scale_cache, index(),
        None, None, None, None, fmt, 1.0, None, 1.0, None, False,
    )  # fmt: skip


def rope_call(fmt: str, *, tokens: int = T, interleaved: bool = False, paged: bool = False) -> RopeAppendCall:
    c = PagedKVCache.allocate(1, 8, 16, 8, 128, format=fmt)[0]
    q, k, v = empty(tokens, 48, 128).split([32, 8, 8], 1)
    place = (None, *[index(tokens)] * 4) if paged else (index(tokens), None, None, None, None)
    return RopeAppendCall(
        q, None, k, None, v, empty(4096, 128, dtype=torch.float32), index(tokens), empty(tokens, 32, 128, dtype=E4M3),
        None, c.k, c.v, c.k_scale_cache, c.v_scale_cache, *place, fmt, interleaved,
        1.0, None, 1.0, None, 1.0, None, False, paged,
    )  # fmt: skip


def mla_call(fmt: str, *, heads: int = 128, interleaved: bool = True) -> MLAAppendCall:
    c = PagedLatentCache.allocate(1, 8, 64, format=fmt)[0]
    return MLAAppendCall(
        empty(T, heads, 64), empty(T, heads, 512), empty(T, 512), empty(T, 64), empty(4096, 64, dtype=torch.float32),
        index(), empty(T, heads, 64, dtype=E4M3), empty(T, heads, 512, dtype=E4M3), c.ckv, c.kpe, c.ckv_scale_cache,
        index(), None, None, None, None, fmt, interleaved, 1.0, None, 1.0, None, False, False,
    )  # fmt: skip


def merge_call() -> MergeCall:
    return MergeCall(empty(2, T, 32, 128), empty(2, T, 32, dtype=torch.float32), empty(T, 32, 128), None)


def transcode_call(src: str, dst: str, **options: Any) -> TranscodeCall:
    """Pages of 16 to pages of 64 in HND, 32 layers in one launch."""
    a = PagedKVCache.allocate(1, 256, 16, 8, 128, format=src, **options)[0]
    b = PagedKVCache.allocate(1, 64, 64, 8, 128, format=dst, layout="HND", **options)[0]
    return TranscodeCall(
        **layer_fields(a, "src_"), **layer_fields(b, ""), src_pages=index(256), dst_pages=index(64), num_tokens=4096,
        layers=empty(32, len(LAYER_COLUMNS), dtype=torch.int64),
    )  # fmt: skip


def compiled(op: str, call: Any, arch: int | str) -> dict[str, Any]:
    """The one kernel that the call launches."""
    backend = importlib.import_module(f"tersekv.backends.triton.{op}")
    f = facts(op, call, arch if isinstance(arch, int) else None)
    checks.facts(f)
    (kernel,) = compile_launches(backend.run, call, backend.configure(f), arch)
    return kernel


def assert_fits(kernel: dict[str, Any], registers: int = 128) -> None:
    """registers: 128 are 4 programs of 4 warps or more on every chip."""
    assert kernel["n_spills"] == 0
    assert kernel["n_regs"] <= registers
    assert kernel["shared"] <= 16384


def assert_rounds_as_written(kernel: dict[str, Any]) -> None:
    """No multiply-add is fused, no subnormal flushed."""
    if "ptx" in kernel:
        compiled = re.sub(r"// begin inline asm.*?// end inline asm", "", kernel["ptx"], flags=re.DOTALL)
        assert "f16.f32" not in compiled  # fp32 → fp16 → fp8 would round twice
        assert not re.search(r"\bfma\.|\.ftz\b|\bdiv\.(full|approx)|\brcp\b", compiled)
    else:
        # nnan is no licence: LLVM adds it where it proves that there is no NaN.
        assert not re.search(r"fast|contract|reassoc|arcp|afn", _arithmetic_lines(kernel["llir"]))


def _arithmetic_lines(llir: str) -> str:
    return "\n".join(line for line in llir.splitlines() if re.search(r"= f(add|sub|mul|div)\b", line))


@pytest.mark.parametrize("arch", ARCHS)
def test_rope_append_compiles_for_every_chip(arch):
    kernel = compiled("rope_append", rope_call("fp8_e4m3"), arch)
    assert_fits(kernel)
    assert_rounds_as_written(kernel)
    if isinstance(arch, int):
        assert ("griddepcontrol.wait" in kernel["ptx"]) == (arch >= 90)
        assert bool(kernel["metadata"].launch_pdl) == (arch >= 90)
        native = len(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32", kernel["ptx"]))
        assert (native > 0) == (arch >= 90)
        # Every access to rows has 16 bytes, and no value changes threads.
        assert "ld.global.v4.b32" in kernel["ptx"]
        assert "st.global.v4.b32" in kernel["ptx"]
        assert not re.search(r"(ld|st)\.global[.\w]*\.[bu](8|16)\b|shared|shfl", kernel["ptx"])


@pytest.mark.parametrize("arch", ARCHS)
def test_mla_append_compiles_for_every_chip(arch):
    kernel = compiled("mla_append", mla_call("fp8_ds_mla"), arch)
    assert_fits(kernel)
    assert_rounds_as_written(kernel)


@pytest.mark.parametrize("arch", ARCHS)
def test_append_compiles_for_every_chip(arch):
    kernel = compiled("append", append_call("fp8_per_token_head"), arch)
    assert_fits(kernel)
    assert_rounds_as_written(kernel)


@pytest.mark.parametrize("arch", ARCHS)
def test_appends_of_int4_compile_for_every_chip(arch):
    fmt = "int4_per_token_head"
    append = append_call(fmt)
    calls = (("append", append), ("append", append._replace(widen=False)), ("rope_append", rope_call(fmt)))
    for op, call in calls:
        kernel = compiled(op, call, arch)
        assert_fits(kernel)
        assert_rounds_as_written(kernel)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("k", "v"), [("fp8_e4m3", "int4_per_token_head"), ("nvfp4", "int8_per_token_head")])
def test_appends_of_turned_rows_in_two_formats_compile_for_every_chip(k, v, arch):
    cache = PagedKVCache.allocate(
        1, 8, 16, 8, 128, format=(k, v), scales="tail", rotation="hadamard", k_channel_scale=torch.ones(8, 128),
        v_channel_scale=torch.ones(8, 128),
    )  # fmt: skip
    c = cache[0]
    more = {
        "k_cache": c.k, "v_cache": c.v, "k_scale_cache": c.k_scale_cache, "v_scale_cache": c.v_scale_cache,
        "v_format": v, "k_signs": c.k_signs, "v_signs": c.v_signs, "k_channel_scale": c.k_channel_scale,
        "v_channel_scale": c.v_channel_scale,
    }  # fmt: skip
    for op, call in (("append", append_call(k)), ("rope_append", rope_call(k))):
        kernel = compiled(op, call._replace(**more), arch)
        assert_fits(kernel, since({(3, 6): 128, (3, 7): 226, (3, 8): 128}))
        assert_rounds_as_written(kernel)


@pytest.mark.parametrize(("arch", "fmt"), half(ARCHS, ["fp8_e4m3", "fp8_e5m2"]))
def test_appends_of_codes_copy_them_on_every_chip(arch, fmt):
    dtype = KV_FORMATS[fmt].storage
    call = append_call(fmt)
    rows = {"k": empty(T, 8, 128, dtype=dtype), "v": empty(T, 8, 128, dtype=dtype)}
    latents = {"kv_c": empty(T, 512, dtype=dtype), "k_pe": empty(T, 64, dtype=dtype)}
    plain = dict.fromkeys(("q_rope", "q_nope", "cos_sin_cache", "positions", "q_rope_out", "q_nope_out"))
    mla = mla_call(fmt)._replace(**latents, **plain)
    for kernel in (compiled("append", call._replace(**rows), arch), compiled("mla_append", mla, arch)):
        assert_fits(kernel)
        if "ptx" in kernel:
            assert not re.search(r"\bcvt\.[\w.]*(e4m3|e5m2|f16|f32)", kernel["ptx"])


@pytest.mark.parametrize("arch", ARCHS)
def test_merge_states_compiles_for_every_chip(arch):
    assert_fits(compiled("merge_states", merge_call(), arch))


@pytest.mark.parametrize(("arch", "fmt"), half([80, 90], list(KV_FORMATS)))
def test_append_compiles_for_every_format(fmt, arch):
    kernel = compiled("append", append_call(fmt), arch)
    assert_fits(kernel)
    assert_rounds_as_written(kernel)
    assert "ld.global.v4.b32" in kernel["ptx"]


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_thread_writes_the_nvfp4_blocks_that_it_reads(dtype):
    call = append_call("nvfp4")
    kernel = compiled("append", call._replace(k=call.k.to(dtype), v=call.v.to(dtype)), 90)
    assert kernel["shared"] == 0
    assert "shfl" not in kernel["ptx"]
    assert "st.global.v2.b32" in kernel["ptx"]  # 16 values


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_many_nvfp4_rows_give_a_thread_two_blocks_of_a_row(dtype):
    x = empty(16384, 8, 128, dtype=dtype)
    kernel = compiled("append", append_call("nvfp4")._replace(k=x, v=x, slot_mapping=index(16384)), 90)
    assert_fits(kernel)
    assert kernel["shared"] == 0
    assert "st.global.v4.b32" in kernel["ptx"]  # 32 values
    assert "st.global.b16" in kernel["ptx"]  # and their two scales
    assert "VIADD.16" not in kernel["sass"](), "ptxas gets the pair of scales wrong with 16-bit sums"


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("rope_append", rope_call("nvfp4", interleaved=True, paged=True)),
        ("rope_append", rope_call("int8_per_token_head", tokens=1)),
        ("mla_append", mla_call("fp8_e4m3", heads=16)),
    ],
    ids=["nvfp4 interleaved paged", "int8 one token", "mla fp8 16 heads"],
)
def test_other_variants_compile(op, call):
    kernel = compiled(op, call, 90)
    assert_fits(kernel)
    assert_rounds_as_written(kernel)


@pytest.mark.parametrize(
    ("op", "call", "parts"),
    [
        ("append", append_call("fp8_e4m3"), 2),
        ("append", append_call("nvfp4"), 2),
        ("rope_append", rope_call("fp8_e4m3", tokens=32), 3),
        ("rope_append", rope_call("int8_per_token_head", tokens=32), 3),
        ("mla_append", mla_call("fp8_e4m3"), 4),
    ],
    ids=["append", "append nvfp4", "rope", "rope int8", "mla"],
)
def test_overlapping_launches_wait_before_they_read(op, call, parts):
    ptx = compiled(op, call, 90)["ptx"]
    before, *after = re.split(r"griddepcontrol\.wait", ptx)
    assert len(after) == parts
    assert not re.search(r"(ld|st)\.global", before)
    late = call.format in ("nvfp4", "int8_per_token_head")
    for part in after:
        assert re.search(r"ld\.global|griddepcontrol\.launch_dependents|bar\.warp\.sync", part)[0] == "ld.global"
        assert not late or "griddepcontrol.launch_dependents" in part
    assert ("griddepcontrol.launch_dependents" in before) == (not late)


PLACED = [("append", "bf16"), ("rope_append", "nvfp4"), ("mla_append", "fp8_ds_mla")]


@pytest.mark.parametrize(("placed", "dtypes"), half(PLACED, ["int64", "int32", "int32 int64", "uint32 int64"]))
def test_places_by_kv_indices_compile_for_every_index_dtype(placed, dtypes):
    """dtypes: of batch_indices and positions; of kv_indptr and kv_indices, if they differ."""
    op, fmt = placed
    first, second = (getattr(torch, (dtypes.split() * 2)[i]) for i in (0, 1))
    call: Any = (
        mla_call(fmt, heads=1) if op == "mla_append" else {"append": append_call, "rope_append": rope_call}[op](fmt)
    )
    places = (index().to(first), index().to(first), index(9).to(second), index(64).to(second))
    fields = ("batch_indices", "kv_positions", "kv_indptr", "kv_indices")
    call = call._replace(slot_mapping=None, **dict(zip(fields, places, strict=True)))
    if op == "append":
        c = PagedKVCache.allocate(1, 8, 1, 1, 64, format=fmt)[0]
        call = call._replace(k=empty(T, 1, 64), v=empty(T, 1, 64), k_cache=c.k, v_cache=c.v)
    kernel = compiled(op, call, 90)
    assert_fits(kernel)


def test_rotated_rows_are_cut_by_how_many_there_are():
    token = 48 * 128
    fp8 = [row_programs.elements_and_warps_of_rotated_program(n * token, "fp8_e4m3") for n in (1, 128, 256, 2048)]
    assert fp8 == [(1024, 4), (1024, 4), (2048, 8), (2048, 4)]
    per_head = [
        row_programs.elements_and_warps_of_rotated_program(n * token, "fp8_per_token_head") for n in (1, 256, 512, 2048)
    ]
    assert per_head == [(1024, 4), (2048, 4), (2048, 4), (4096, 4)]
    assert [row_programs.issues_loads_first(n * token) for n in (1, 256, 2048, 16384)] == [True, True, False, True]


def test_ptxas_fuses_nothing_either():
    kernel = compiled("rope_append", rope_call("fp8_e4m3"), 90)
    assert "FFMA" not in kernel["sass"]()


COLD = [("fp8_e4m3", "int4_per_token_head"), ("int4_per_token_head", "fp8_e4m3"), ("bf16", "nvfp4"), ("nvfp4", "bf16")]


@pytest.mark.parametrize(("arch", "pair"), half(ARCHS, COLD))
def test_a_transcode_compiles_for_every_chip(arch, pair):
    kernel = compiled("transcode", transcode_call(*pair), arch)
    assert_fits(kernel, 168 if pair[1] == "int4_per_token_head" else 128)  # a thread holds a row: 3 programs
    assert_rounds_as_written(kernel)
    if isinstance(arch, int):  # of each layer too, whose tensors lie somewhere else
        # Of 4 and 8 bits the wider ones: a thread stores what it loads.
        wide_loads, wide_stores = pair != COLD[1], pair != COLD[0] or arch == 80
        assert ("ld.global.v4.b32" if wide_loads else "ld.global.v2.b32") in kernel["ptx"]
        assert ("st.global.v4.b32" if wide_stores else "st.global.v2.b32") in kernel["ptx"]


@pytest.mark.parametrize("arch", [80, 90])
def test_a_copy_between_page_sizes_moves_16_bytes_at_a_time(arch):
    kernel = compiled("transcode", transcode_call("int8_per_token_head", "int8_per_token_head"), arch)
    assert_fits(kernel, 40)
    assert kernel["shared"] == 0
    assert not re.search(r"\bcvt\.[\w.]*(e4m3|e5m2|f16|f32)", kernel["ptx"])
    assert "ld.global.v4" in kernel["ptx"]
    assert "st.global.v4" in kernel["ptx"]


@pytest.mark.parametrize("source", ["fp8_e4m3", "int8_per_token_head"])
def test_a_thread_holds_64_codes_that_become_nvfp4(source):
    """Instructions of K and of V, with both divisions' rare ways; element by element there were 47 a code."""
    kernel = compiled("transcode", transcode_call(source, "nvfp4"), 90)
    assert_fits(kernel, 64 if source == "fp8_e4m3" else 168)
    assert_rounds_as_written(kernel)
    assert instructions(kernel) < (21 if source == "fp8_e4m3" else 30) * 2 * 64


def instructions(kernel: dict[str, Any]) -> int:
    return len(re.findall(r"/\*[0-9a-f]{4,5}\*/ +(?!NOP)\S", kernel["sass"]()))


@pytest.mark.parametrize(("pair", "most"), [(COLD[0], 13), (("bf16", "int4_per_token_head"), 13), (COLD[1], 11)])
def test_words_of_a_row_stay_in_the_threads_that_load_them(pair, most):
    """Nothing crosses shared memory, and few numbers are held at a time; element by element there were 15 or more."""
    kernel = compiled("transcode", transcode_call(*pair), 90)
    assert_fits(kernel, 64)
    assert kernel["shared"] == 0
    assert instructions(kernel) < most * 2 * 64


@pytest.mark.parametrize("source", ["bf16", "fp8_e4m3", "int8_per_token_head"])
@pytest.mark.parametrize("rotation", [None, "hadamard"])
@pytest.mark.parametrize("arch", ARCHS)
def test_a_thread_holds_a_row_that_becomes_int4(arch, rotation, source):
    """No number of a row crosses to another thread, and none spills."""
    a = PagedKVCache.allocate(1, 256, 16, 8, 128, format=source)[0]
    b = PagedKVCache.allocate(1, 64, 64, 8, 128, format="int4_per_token_head", rotation=rotation)[0]
    fields = {**layer_fields(a, "src_"), **layer_fields(b, "")}
    call = TranscodeCall(**fields, src_pages=index(256), dst_pages=index(64), num_tokens=4096, layers=None)
    kernel = compiled("transcode", call, arch)
    assert kernel["n_spills"] == 0
    assert_rounds_as_written(kernel)
    if arch in (80, 89, 90):
        assert kernel["n_regs"] <= (255 if rotation and source == "bf16" else 168)
        assert kernel["ptx"].count("shfl.sync.bfly") <= 16  # of the check for NaN, and of signs


@pytest.mark.parametrize("arch", [80, 90])
def test_a_transcode_of_rotated_rows_does_not_spill(arch):
    for pair in COLD[:2]:
        kernel = compiled("transcode", transcode_call(*pair, rotation="hadamard"), arch)
        assert kernel["n_spills"] == 0
        assert kernel["n_regs"] <= 192
        assert_rounds_as_written(kernel)
