"""Lists of keys, two sets of keys and records with exponents in the native kernels, beside the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged_case import kv_case

import tersekv
from tersekv import Selected
from tersekv.backends.cpu import build
from tersekv.testing import verify

pytestmark = pytest.mark.usefixtures("native")
I32, FORMATS, RECORDS = torch.int32, [*tersekv.LATENT_FORMATS, "fp8_v4", "fp8_v41"], ("fp8_v4", "fp8_v41")
PAGES, PAGE = 40, 64
LEVELS = tuple(build._LEVELS)
BIG = {"rtol": 1e-4, "atol": 1e-5}


def filled(format, rope=0, pages=PAGES, scale=1.0):
    rope = 0 if format in RECORDS else rope
    layer = tersekv.PagedLatentCache.allocate(1, pages, PAGE, format=format, qk_rope_head_dim=rope)[0]
    tokens = pages * PAGE
    kv, pe = torch.randn(tokens, 512) * scale, torch.randn(tokens, rope) if rope else None
    tersekv.mla_append(kv, pe, layer, torch.randperm(tokens))
    return layer


def attend(q, layer, *where, **options):
    return [
        tersekv.mla_decode(q, layer, *where, softmax_scale=0.05, return_lse=True, out_dtype=torch.float32,
                           backend=backend, **options)
        for backend in ("cpu", "torch")
    ]  # fmt: skip


def close(pair, **tolerance):
    for got, want in zip(*pair, strict=True):
        torch.testing.assert_close(got, want, **(tolerance or BIG))


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("format", FORMATS)
def test_long_lists_are_split_over_threads(format, threads):
    torch.manual_seed(0)
    layer, q = filled(format, 64), torch.randn(3, 9, 512 if format in RECORDS else 576)
    lists = torch.stack([torch.randperm(PAGES * PAGE) for _ in range(3)]).to(I32)
    lists[1, ::3], lists[2, 700:] = -1, -5
    torch.set_num_threads(threads)
    close(attend(q, layer, None, None, indices=lists))
    table = torch.randperm(PAGES).to(I32).expand(3, -1)
    close(attend(q, layer, table, torch.tensor([2400, 77, 3]), indices=lists, index_lens=torch.tensor([2500, 9, 1])))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("first", ["fp8_v4", "bf16", "fp8_e4m3"])
@pytest.mark.parametrize("second", ["fp8_v41", "fp8_v4", "fp8_e5m2"])
def test_two_sets_of_any_formats_and_lengths(first, second, dtype):
    torch.manual_seed(0)
    a, b = filled(first), filled(second, pages=4)
    q = torch.randn(5, 20, 512).to(dtype)
    one = torch.full((5, 800), -1, dtype=I32)
    two = torch.full((5, 130), -1, dtype=I32)
    for row, (n, m) in enumerate([(800, 130), (0, 130), (800, 0), (0, 0), (1, 1)]):
        one[row, 800 - n :], two[row, 130 - m :] = torch.randperm(PAGES * PAGE)[:n], torch.randperm(4 * PAGE)[:m]
    for threads in (1, 3):
        torch.set_num_threads(threads)
        pair = attend(q, a, None, None, indices=one, extra=Selected(b, two), sinks=torch.randn(20))
        close(pair, rtol=1e-3, atol=1e-4)
        assert pair[0][1][3].isneginf().all()
        assert not pair[0][0][3].any()


def test_the_scale_of_each_set_multiplies_its_own_keys_and_values():
    torch.manual_seed(0)
    q, lists = torch.randn(2, 4, 512), torch.arange(100, dtype=I32).expand(2, -1)
    layers = [filled("fp8_e4m3", pages=4) for _ in range(2)]
    for first, second in ((0.5, 3.0), (torch.tensor([2.0]), 0.25), (1.0, torch.tensor([0.125]))):
        a, b = (replace(x, kv_scale=s) for x, s in zip(layers, (first, second), strict=True))
        close(attend(q, a, None, None, indices=lists, extra=Selected(b, lists)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("format", RECORDS)
def test_bytes_of_records_are_the_oracles_whatever_the_bits(format, level, native):
    if level not in native.levels():
        pytest.skip(f"this machine has no {level}")
    native.use_level(level)
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (256, 512), dtype=torch.int64).to(I32).view(torch.float32)
    bits[:, -64:] = bits[:, -64:].nan_to_num(nan=1.0)  # 16-bit NaNs differ in their bits
    edges = torch.full((3, 512), 448.0) * torch.tensor([[1 - 2**-24], [1.0], [1 + 2**-23]])
    x = torch.cat([bits, torch.randn(64, 512), 1e-4 * torch.randn(64, 512), edges, edges * 2**-20, torch.zeros(1, 512)])
    got, want = (tersekv.PagedLatentCache.allocate(1, 6, 70, format=format)[0] for _ in range(2))
    slots = torch.randperm(6 * 70)[: len(x)]
    slots[::9], slots[1::50] = -1, 6 * 70
    for layer, backend in ((got, "cpu"), (want, "torch")):
        layer.ckv_scale_cache.fill_(7)
        tersekv.mla_append(x, None, layer, slots, backend=backend)
    for name in ("ckv", "ckv_scale_cache"):
        a, b = (getattr(layer, name).view(torch.uint8) for layer in (got, want))
        assert torch.equal(a, b), name


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("format", RECORDS)
def test_every_exponent_is_read(format, level, native):
    if level not in native.levels():
        pytest.skip(f"this machine has no {level}")
    native.use_level(level)
    layer = filled(format, pages=8)
    for exponent in (0, 1, 60, 127, 128, 190, 255):
        layer.ckv_scale_cache[5, 3] = exponent
        q = torch.full((1, 2, 512), 2.0 ** (100 - exponent) if 0 < exponent < 255 else 1.0)
        pair = attend(q, layer, None, None, indices=torch.tensor([[5 * PAGE + 3]]))
        close(pair, rtol=2e-3, atol=0, equal_nan=True) if exponent else close(pair, rtol=1e-2, atol=1e-37)


@pytest.mark.parametrize("block", [1, 3, 64, 100])
@pytest.mark.parametrize("format", ["bf16", "nvfp4", "int4_per_token_head", "fp8_per_token_head"])
def test_blocks_of_one_list_or_one_a_head(format, block):
    torch.manual_seed(0)
    case = kv_case(format, [900, 1, 333], heads=2, head_dim=64)
    q = torch.randn(6, 8, 64)
    for heads in (1, 2):
        n = 900 // block + 1
        lists = torch.stack([torch.randperm(n) for _ in range(6 * heads)]).view(6, heads, n)
        lists[:, :, ::4] = -1
        lens = torch.randint(0, n + 1, (6, heads))
        results = [
            tersekv.decode(
                q, case.layer, case.page_table, case.seq_lens, indices=lists, index_lens=lens, block_size=block,
                softcap=20.0, sinks=torch.linspace(-1, 1, 8), return_lse=True, out_dtype=torch.float32, backend=backend,
            )
            for backend in ("cpu", "torch")
        ]  # fmt: skip
        close(results, rtol=1e-3, atol=1e-4)


def test_a_row_has_the_same_bits_alone_and_among_others():
    torch.manual_seed(0)
    layer, q = filled("fp8_v4", pages=80), torch.randn(6, 16, 512).bfloat16()
    lists = torch.stack([torch.randperm(80 * PAGE)[:4500] for _ in range(6)]).to(I32)
    lens = torch.tensor([4500, 3, 2048, 0, 2049, 4097])

    def results(rows, threads):
        torch.set_num_threads(threads)
        return tersekv.mla_decode(
            q[rows], layer, None, None, indices=lists[rows], index_lens=lens[rows], softmax_scale=0.05,
            batch_invariant=True, return_lse=True, backend="cpu", extra=Selected(layer, lists[rows, :70]),
        )  # fmt: skip

    whole = results(slice(0, 6), 3)
    for row in range(6):
        for a, b in zip(results(slice(row, row + 1), 1), whole, strict=True):
            assert torch.equal(a[0], b[row])


def complaint(function, *args, **options):
    with pytest.raises(ValueError, match=r"want .*, got ") as e:
        function(*args, **options)
    return str(e.value)


WRONG = {
    "slot": (None, [[3, -1, 2560]], None, "2560 at [1, 2]"),
    "slot of the second set": (None, [[3, -1, 2559]], [[256, 1]], "256 at [1, 0]"),
    "position": (3000, [[3, 2999, -1]], None, "2999 at [1, 1]"),
    "page": (200, [[3, 199, 100]], None, "99 at [1, 3]"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_entries_are_refused_in_the_oracles_words_and_nothing_is_written(what):
    length, first, second, got = WRONG[what]
    layer, other, q = filled("bf16"), filled("fp8_v4", pages=4), torch.randn(3, 4, 512)
    table = torch.arange(PAGES, dtype=I32).expand(3, -1).clone()
    table[:, 1:4] = 99 if what == "page" else table[:, 1:4]
    where = (None, None) if length is None else (table, torch.full((3,), length))
    lists = torch.tensor([[0, -1, 1], *first, [2, 2, 2]])
    extra = None if second is None else Selected(other, torch.tensor([[0, -1], *second, [1, 1]]))
    told, out = [], torch.full((3, 4, 512), 7.0)
    for backend in ("cpu", "torch"):
        told.append(complaint(tersekv.mla_decode, q, layer, *where, indices=lists, extra=extra, softmax_scale=1.0,
                              out=out, backend=backend))  # fmt: skip
    assert told[0] == told[1]
    assert told[0].endswith(f", got {got}")
    assert (out == 7.0).all()


@pytest.mark.parametrize("page", [None, 9999])
def test_wrong_blocks_of_a_head_are_refused_in_the_oracles_words(page):
    case = kv_case("bf16", [900], heads=2, head_dim=64)
    lists, table, column = torch.tensor([[[0, 1], [-1, 30]]]), case.page_table.clone(), 2 * 64 // case.layer.page_size
    if page is not None:
        lists[0, 1, 1], table[0, column] = 2, page
    told = [
        complaint(tersekv.decode, torch.randn(1, 4, 64), case.layer, table, torch.tensor([5000]),
                  indices=lists, block_size=64, backend=backend)
        for backend in ("cpu", "torch")
    ]  # fmt: skip
    assert told[0] == told[1]
    assert told[0].startswith("indices: " if page is None else "page_table: ")
    assert page is None or told[0].endswith(f" for listed keys, got {page} at [0, {column}]")


@pytest.mark.parametrize("op", ["mla_append", "mla_decode"])
def test_what_reads_or_writes_lists_and_records_is_native(op):
    for case in verify.cases((op,), None, quick=True):
        assert verify.run(case, "cpu").backend == "cpu", case.id
