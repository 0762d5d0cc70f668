"""What `tersekv verify` runs: small frozen cases for every operation × format × variant.

A case is a description; `make.py` turns it into tensors, poisoned wherever nothing may be read. Sizes are spread
over the formats, so that a GPU compiles few distinct kernels and every size still meets some format.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..formats import KV_FORMATS, LATENT_FORMATS, LATENT_RECORDS, KVFormat, kv_format, latent_format
from . import index_cases
from .case import Case, Lens, next_format, up_to_step
from .transcode_cases import transcode


def cases(
    ops: tuple[str, ...] | None = None, formats: tuple[str, ...] | None = None, *, quick: bool = False
) -> Iterator[Case]:
    """The cases of the operations and formats named (None: all); `quick` keeps those that matter most."""
    for op, (known, variants) in _VARIANTS.items():
        if ops is not None and op not in ops:
            continue
        for i, name in enumerate(known):
            if formats is not None and name not in formats:
                continue
            for case in variants(Case(op, name, "plain", quick=True), i):
                if case.quick or not quick:
                    yield case


def _dtype_of(f: KVFormat) -> str:
    """The dtype of a format's codes, as a case names it."""
    return str(f.storage).removeprefix("torch.")


def _append(base: Case, i: int) -> Iterator[Case]:
    odd = up_to_step(base.format, (40, 72, 80, 96, 104, 120, 80)[i % 7])
    base = replace(base, lens=(20, 3, 0, 40), q_lens=(5, 3, 0, 9), skip=True)
    yield base
    yield replace(base, name="no tokens", lens=(4, 0), q_lens=(0, 0))
    yield replace(base, name="one token", lens=(7,), q_lens=(1,), skip=False, page=3, quick=False)
    for case in (
        replace(
            base, name="hnd packed inline strided", layout="HND", packed=True, scales="inline", strided=True, page=64
        ),
        replace(
            base, name=f"inline D {odd} pages of 3", scales="inline", dim=odd, dim_v=up_to_step(base.format, 24), page=3
        ),
        replace(base, name="fp32 scales int64", dtype="float32", index="int64", scale="float", page=1),
        replace(base, name="fp16 scale tensors uint32", dtype="float16", index="uint32", scale="tensor", skip=False),
        replace(
            base, name=f"tail hnd D {odd} pages of 3", scales="tail", layout="HND", dim=odd, dim_v=odd + 16, page=3
        ),
        replace(base, name="kv_indices quantising scales", place="pages", scale="tensor", reciprocal=True),
        replace(base, name="D 256 Dv 512", dim=256, dim_v=512, heads=1, page=256),
        replace(base, name="8 heads D 128", lens=(300, 40), q_lens=(300, 0), heads=8, dim=128, dtype="float16"),
        replace(base, name=f"rotated D {odd}", rotation="kv", dim=odd, dim_v=128, dtype="float32"),
        replace(base, name="rotated keys channel scales", rotation="k", channels="kv", dim=96, heads=3, scales="tail"),
        replace(base, name="V of another format", v_format=next_format(base.format), scales="tail", page=3, heads=3),
    ):
        yield replace(case, quick=False)
    if kv_format(base.format).scale == "tensor":
        yield replace(base, name="a scale per head", scale="head", quick=False)
        codes = replace(base, name="codes", dtype=_dtype_of(kv_format(base.format)), quick=False)
        yield replace(codes, scale="float", strided=True)
        yield replace(codes, name="codes kv_indices hnd", place="pages", scale="head", layout="HND", dim=odd, page=3)
    if kv_format(base.format).scale != "none":  # 16-bit NaNs differ in their bits
        yield replace(base, name="nan and inf", special=True, quick=False)
    if kv_format(base.format).code == "int4":
        yield replace(base, name="ranges as they are", widen=False, special=True, quick=False)


def _rope_append(base: Case, i: int) -> Iterator[Case]:
    odd = up_to_step(base.format, (40, 72, 80, 96, 104, 120, 80)[i % 7])
    base = replace(base, lens=(20, 3, 0, 40), q_lens=(5, 3, 0, 9), skip=True)
    yield replace(base, name="neox e4m3 query", out_dtype="float8_e4m3fn")
    for case in (
        replace(base, name="partial interleaved", rotary=32, interleaved=True, dim=128, layout="HND", packed=True),
        replace(base, name="no query", query=False, dtype="float16", index="int64", page=64),
        replace(base, name="no tokens", lens=(4, 0), q_lens=(0, 0)),
        replace(base, name="kv_indices zero padding", place="pages", zero_padding=True, index="uint32"),
        replace(base, name=f"R 24 of {odd}", dim=odd, dim_v=up_to_step(base.format, 56), rotary=24, group=5, page=3),
        replace(base, name="e5m2 query scale tensors", out_dtype="float8_e5m2", scale="tensor", strided=True, page=1),
        replace(base, name="fp32 D 256", dtype="float32", dim=256, heads=1, group=8, scales="inline", scale="float"),
        replace(base, name="quantising scales", place="pages", scale="tensor", reciprocal=True, rotary=16),
        replace(base, name="tail", scales="tail", heads=3, page=5),
        replace(base, name="rotated", rotation="kv", channels="k", rotary=32, dtype="float16", group=2),
        replace(
            base, name="V of another format", v_format=next_format(base.format), rotation="v", channels="v", dim=128
        ),
    ):
        yield replace(case, quick=False)


def _mla_append(base: Case, i: int) -> Iterator[Case]:
    base = replace(base, lens=(20, 3, 0, 40), q_lens=(5, 3, 0, 9), skip=True, group=4, interleaved=True, q_nope=512)
    yield replace(base, name="with query", out_dtype="float8_e4m3fn")
    for case in (
        replace(base, name="rows only", rotate=False, query=False, index="int64", page=64),
        replace(base, name="no tokens", lens=(4, 0), q_lens=(0, 0)),
        replace(base, name="one token neox", lens=(9,), q_lens=(1,), skip=False, interleaved=False, dtype="float16"),
        replace(base, name="kv_indices zero padding", place="pages", zero_padding=True, index="uint32"),
        replace(base, name="scale tensors strided", scale="tensor", strided=True, page=1, out_dtype="float8_e5m2"),
        replace(base, name="rank 256 rope 32", rank=256, rope=32, q_nope=128, dtype="float32", page=3, scale="float"),
        replace(base, name="quantising scales", place="pages", scale="tensor", reciprocal=True, q_nope=128),
        replace(base, name="no rotary part", rope=0, rotate=False, query=False, gaps="columns" if i % 2 else ""),
    ):
        yield replace(case, quick=False)
    if base.format != "fp8_ds_mla":
        yield replace(base, name="split", split=True, quick=False)
    if latent_format(base.format).scale == "tensor":
        rows = replace(base, query=False, rotate=False, quick=False)
        yield replace(rows, name="nan and inf", special=True)
        rows = replace(rows, dtype=_dtype_of(latent_format(base.format)), scale="float")
        yield replace(rows, name="codes", strided=True)
        yield replace(rows, name="codes kv_indices split", place="pages", split=True, rank=72, rope=24, page=3)


def _decode(base: Case, i: int) -> Iterator[Case]:
    odd = up_to_step(base.format, (72, 40, 80, 96, 104, 120, 80)[i % 7])
    odd_v = up_to_step(base.format, (72, 40, 24, 56, 32, 64, 32)[i % 7])
    base = replace(base, dim=128)
    yield base
    drafts = replace(base, lens=(37, 4, 0, 70), q_lens=(3, 3, 3, 3))
    yield replace(drafts, name="drafts tree mask", mask=True, layout="HND", packed=True, scales="inline")
    ragged = replace(base, lens=(37, 4, 0, 70), q_lens=(2, 4, 0, 1), ragged=True)
    eight = replace(base, lens=(70, 9, 0, 200), q_lens=(8, 8, 8, 8), mask=True, page=64)
    for case in (
        replace(eight, name="8 drafts tree"),
        replace(eight, name="8 drafts tree G 8 sinks", group=8, sinks=True, layout="HND"),
        replace(
            ragged, name="many ragged rows window", lens=(37, 40, 0, 70), q_lens=(20, 1, 0, 17), group=8, window=30
        ),
        replace(
            base, name="G 1 fp16 window", group=1, heads=3, dtype="float16", window=20, index="int64", scales="inline"
        ),
        replace(base, name="G 16 sinks softcap", group=16, heads=1, sinks=True, softcap=20.0, page=64, scale="float"),
        replace(ragged, name="ragged drafts window", window=5, index="uint32", page=1, dim=64),
        replace(ragged, name="drafts fp16 sinks", dtype="float16", sinks=True, page=64, group=8),
        replace(base, name=f"D {odd} Dv {odd_v} G 5 pages of 3", dim=odd, dim_v=odd_v, group=5, page=3),
        replace(base, name="D 192 Dv 128 pages of 256", dim=192, dim_v=128, group=8, page=256, lens=(300, 511)),
        replace(base, name="D 256", dim=256, group=8, page=64, lens=(65, 200)),
        replace(base, name="tail pages of 64", scales="tail", heads=8, page=64),
        replace(base, name=f"tail hnd D {odd} Dv {odd_v}", scales="tail", layout="HND", dim=odd, dim_v=odd_v, page=3),
        replace(base, name="D 512 G 8", dim=512, group=8, heads=1, lens=(65, 20), lse=False),
        replace(base, name="D 512 long", dim=512, heads=4, lens=(2500, 3, 700), page=64, sinks=True, scale="tensor"),
        replace(ragged, name="D 512 drafts hnd", dim=512, heads=4, page=16, layout="HND", window=40, softcap=20.0),
        replace(base, name="D 32 long", dim=32, heads=1, lens=(5000, 3, 700), page=64),
        replace(base, name="no requests", lens=(), q_lens=()),
        replace(base, name="scale tensors e4m3 out", scale="tensor", out_dtype="float8_e4m3fn", page=64),
        replace(base, name="e4m3 query", dtype="float8_e4m3fn", out_dtype="bfloat16"),
        replace(base, name="e5m2 out", out_dtype="float8_e5m2", lse=False),
        replace(base, name="strided spread fast", strided=True, spread=True, precision="fast", page=64),
        replace(base, name="fp32 spread", dtype="float32", spread=True, lse=False),
        replace(base, name="rotated sinks window", rotation="kv", sinks=True, window=30, page=64),
        replace(ragged, name=f"rotated D {odd} Dv {odd_v}", rotation="kv", channels="kv", dim=odd, dim_v=odd_v, page=3),
        replace(base, name="channel scales softcap e4m3 query", channels="kv", softcap=20.0, dtype="float8_e4m3fn",
                out_dtype="bfloat16", spread=True),
        replace(base, name="V of another format", v_format=next_format(base.format), group=8, scale="float"),
        replace(base, name="V of another format, rotated, tail", v_format=next_format(base.format), rotation="k",
                channels="v", scales="tail", dim=64, dtype="float16", lse=False),
    ):  # fmt: skip
        yield replace(case, quick=False)
    yield from _listed_blocks(base, odd, odd_v)
    if kv_format(base.format).scale == "tensor":
        yield replace(base, name="a scale per head", scale="head", quick=False)
    if base.format == "bf16":
        yield replace(base, name="fp16 query spread", dtype="float16", spread=True, quick=False)


def _listed_blocks(base: Case, odd: int, odd_v: int) -> Iterator[Case]:
    listed = replace(base, listed=9, block_size=16, lens=(137, 1, 0, 230), quick=False)
    yield from (
        replace(listed, name="listed blocks"),
        replace(listed, name="lists of each head sinks", each_head=True, list_lens=True, sinks=True, page=64, heads=3),
        replace(listed, name=f"listed blocks of 3 rotated D {odd} Dv {odd_v}", block_size=3, listed=65, rotation="kv",
                channels="kv", dim=odd, dim_v=odd_v, page=16, group=5, q_lens=(2, 2, 2, 2), scale="float"),
        replace(listed, name="listed blocks of 128 in pages of 16 tail", block_size=128, listed=5, scales="tail",
                lens=(900, 5, 600), list_lens=True, index="uint32", softcap=20.0),
        replace(listed, name="listed pages of each head again G 8", block_size=64, each_head=True, lists="again",
                page=64, lens=(900, 5, 0, 600), group=8, softcap=20.0),
        replace(listed, name="listed pages of each head", block_size=128, listed=2, each_head=True, page=64, heads=8,
                list_lens=True, layout="HND", sinks=True, q_lens=(2, 1, 0, 1), ragged=True),
        replace(listed, name="listed ragged rows int64 strided", q_lens=(20, 1, 0, 17), ragged=True, each_head=True,
                index="int64", strided=True, page=3, layout="HND", group=8),
        replace(listed, name="listed tokens V of another format", block_size=1, listed=64, page=64, dtype="float16",
                v_format=next_format(base.format), lists="again", batch_invariant=True),
        replace(listed, name="listed e4m3 query G 16 batch invariant", dtype="float8_e4m3fn", out_dtype="bfloat16",
                group=16, heads=1, listed=50, lens=(900, 9), batch_invariant=True, scale="tensor"),
        replace(listed, name="listed sinks of inf", sinks=True, sink="inf", out_dtype="float32", each_head=True),
        replace(base, name="sinks of inf", sinks=True, sink="inf", page=64, group=8, quick=False),
        replace(base, name="sinks of inf long drafts", sinks=True, sink="inf", lens=(900, 3), q_lens=(20, 20), group=8,
                quick=False),
    )  # fmt: skip


def _prefill(base: Case, i: int) -> Iterator[Case]:
    odd = up_to_step(base.format, (80, 72, 112, 96, 104, 120, 80)[i % 7])
    odd_v = up_to_step(base.format, (64, 40, 24, 96, 32, 64, 112)[i % 7])
    base = replace(base, dim=128, lens=(37, 4, 0, 70), q_lens=(20, 4, 0, 33), ragged=True)
    yield base
    new = replace(base, new_rows=True)
    yield replace(new, name="new rows")
    for case in (
        replace(
            new,
            name="new rows window sinks hnd packed",
            window=12,
            sinks=True,
            layout="HND",
            packed=True,
            scales="inline",
            page=64,
        ),
        replace(new, name="more new rows than tokens", lens=(3, 0, 90, 9), q_lens=(5, 2, 1, 9), page=1, softcap=20.0),
        replace(new, name="new rows e4m3 query", dtype="float8_e4m3fn", out_dtype="bfloat16", scale="float"),
        replace(base, name="window softcap fp16 pages of 3", dtype="float16", window=20, softcap=20.0, page=3, dim=64),
        replace(
            base,
            name="no prefix sinks strided spread",
            lens=(150, 9),
            q_lens=(150, 9),
            sinks=True,
            strided=True,
            spread=True,
            page=64,
            index="int64",
            precision="fast",
        ),
        replace(base, name=f"D {odd} Dv {odd_v} G 5", dim=odd, dim_v=odd_v, group=5, heads=1, index="uint32"),
        replace(base, name="D 192 Dv 128 MHA", dim=192, dim_v=128, group=1, page=256, lens=(300, 511), q_lens=(7, 1)),
        replace(new, name="D 256 scale tensors e4m3 out", dim=256, scale="tensor", out_dtype="float8_e4m3fn", page=64),
        replace(base, name="D 512 window", dim=512, lens=(37, 300, 0, 150), q_lens=(20, 90, 0, 33), window=70, page=32),
        replace(base, name="D 512 e4m3 query sinks softcap", dim=512, dtype="float8_e4m3fn", out_dtype="bfloat16",
                lens=(200, 131), q_lens=(33, 131), page=64, layout="HND", sinks=True, softcap=20.0),
        replace(new, name="new rows D 512 fp16", dim=512, dtype="float16", lens=(37, 300, 0, 150),
                q_lens=(20, 90, 0, 33), spread=True, scale="float"),
        replace(new, name="new rows D 320 Dv 512 window", dim=320, dim_v=512, group=16, heads=1, window=40, page=8),
        replace(base, name="D 512 Dv 128 MHA", dim=512, dim_v=128, group=1, lens=(170, 9), q_lens=(170, 9), page=16),
        replace(base, name="e4m3 query e5m2 out", dtype="float8_e4m3fn", out_dtype="float8_e5m2", lse=False),
        replace(base, name="fast window sinks", precision="fast", lens=(170, 4, 0, 300), q_lens=(40, 4, 0, 130),
                window=90, sinks=True, page=64),
        replace(base, name="no tokens", lens=(4, 0), q_lens=(0, 0)),
        replace(new, name="fp32", dtype="float32", lse=False),
        replace(
            base, name="rotated, V of another format", rotation="kv", v_format=next_format(base.format), scales="tail"
        ),
        replace(new, name="new rows, rotated, channel scales", rotation="kv", channels="kv", scale="float", sinks=True),
        replace(base, name="listed blocks", listed=6, block_size=16, each_head=True, list_lens=True, sinks=True),
        replace(base, name="listed blocks of many rows", listed=4, block_size=64, heads=8, lens=(330,), q_lens=(290,)),
        replace(base, name="one list for all", listed=20, block_size=4, lists="shared", lens=(150,), q_lens=(70,)),
        replace(new, name=f"new rows, channel scales, D {odd}", channels="kv", rotation="v", dim=odd, dim_v=odd_v),
    ):  # fmt: skip
        yield replace(case, quick=False)
    if kv_format(base.format).scale == "tensor":
        yield replace(new, name="a scale per head", scale="head", quick=False)


def _mla_decode(base: Case, i: int) -> Iterator[Case]:
    base = replace(base, heads=1, group=16, page=64)
    yield base
    drafts = replace(base, lens=(37, 4, 0, 70), q_lens=(2, 2, 2, 2))
    for case in (
        replace(base, name="H 1 pages of 16", group=1, page=16, lens=(37, 1, 0, 130, 16)),
        replace(base, name="H 128", group=128, lens=(200, 77)),
        replace(base, name="H 5 fp16 pages of 3", group=5, dtype="float16", page=3, index="int64"),
        replace(drafts, name="drafts", index="uint32", page=32),
        replace(drafts, name="ragged drafts", q_lens=(2, 4, 0, 1), ragged=True, page=1),
        replace(drafts, name="ragged drafts H 4", group=4, q_lens=(2, 4, 0, 1), ragged=True),
        replace(
            base,
            name="e4m3 query",
            dtype="float8_e4m3fn",
            out_dtype="bfloat16",
            group=128,
            lens=(130, 64),
            scale="float",
        ),
        replace(base, name="long", lens=(3000, 5, 600), page=128),
        replace(base, name="no requests", lens=(), q_lens=()),
        replace(base, name="scale tensors e4m3 out", scale="tensor", out_dtype="float8_e4m3fn"),
        replace(base, name="strided spread fast", strided=True, spread=True, precision="fast", group=64),
        replace(base, name="rank 256 rope 32", rank=256, rope=32, group=8),
        replace(base, name="fp32", dtype="float32", lse=False),
        replace(
            base,
            name="no rotary part",
            rope=0,
            gaps="" if i % 2 else "columns",
            q_lens=(2, 2, 2, 2),
            lens=(37, 4, 0, 130),
        ),
        replace(base, name="no rotary part fp16 pages of 3", rope=0, page=3, dtype="float16", group=40, scale="float"),
    ):
        yield replace(case, quick=False)
    if base.format != "fp8_ds_mla":
        yield replace(base, name="split", split=True, quick=False)
    yield from _listed_latents(base, i)


def _mla_append_any(base: Case, i: int) -> Iterator[Case]:
    if base.format in LATENT_FORMATS:
        yield from _mla_append(base, i)
        return
    base = replace(
        base, lens=(20, 3, 0, 40), q_lens=(5, 3, 0, 9), skip=True, rope=0, rotate=False, query=False, page=64
    )
    yield replace(base, name="rows only")
    for case in (
        replace(base, name="fp32 pages of 3 int64 strided", dtype="float32", page=3, index="int64", strided=True),
        replace(base, name="no tokens", lens=(4, 0), q_lens=(0, 0)),
        replace(base, name="kv_indices fp16 with gaps", place="pages", dtype="float16", gaps="slots", index="uint32"),
        replace(base, name="many rows", lens=(700,), q_lens=(700,), page=16, skip=False),
    ):
        yield replace(case, quick=False)


def _mla_decode_any(base: Case, i: int) -> Iterator[Case]:
    """Of rows without a rotary part: the cases that have none."""
    if base.format in LATENT_FORMATS:
        yield from _mla_decode(base, i)
        return
    base = replace(base, heads=1, group=16, page=64, rope=0)
    yield base
    drafts = replace(base, lens=(37, 4, 0, 1300), q_lens=(3, 3, 3, 3), quick=False)
    yield replace(drafts, name="drafts fp16 spread pages of 3", page=3, dtype="float16", spread=True, group=40)
    for case in _listed_latents(base, i):
        yield replace(case, rope=0, scale="one")


def _listed_latents(base: Case, i: int) -> Iterator[Case]:
    listed = replace(base, listed=70, lens=(37, 1, 0, 130))
    yield replace(listed, name="listed positions", list_lens=i % 2 == 0)
    for case in (
        replace(listed, name="listed slots sinks", by_slot=True, sinks=True, group=64, list_lens=True),
        replace(listed, name="listed drafts uint32", lens=(137, 4, 0, 70), q_lens=(3, 3, 3, 3), index="uint32", page=3),
        replace(listed, name="listed ragged rows strided", lens=(137, 40, 0, 70), q_lens=(20, 1, 0, 17), ragged=True,
                group=40, page=1, strided=True, index="int64"),
        replace(listed, name="listed slots H 128 pages of 61", by_slot=True, group=128, page=61, lens=(200, 77),
                index="uint32", dtype="float16"),
        replace(listed, name="listed blocks of 3", block_size=3, listed=33, list_lens=True, q_lens=(2, 2, 2, 2),
                lens=(90, 4, 2, 70), scale="tensor", out_dtype="float8_e4m3fn"),
        replace(listed, name="blocks of 128 in pages of 16", block_size=128, listed=5, page=16, lens=(1500, 5, 600),
                scale="float"),
        replace(listed, name="one list for all", lists="shared", lens=(300,), q_lens=(5,), listed=64, spread=True),
        replace(listed, name="entries that repeat", lists="again", by_slot=i % 2 == 0, listed=65),
        replace(listed, name="empty lists", listed=0, sinks=True),
        replace(listed, name="2048 of 3000", listed=2048, lens=(3000, 5, 2600), page=128),
        replace(listed, name="listed sinks of inf", sinks=True, sink="inf", listed=9),
        replace(listed, name="listed, no rotary part", rope=0, by_slot=i % 2 == 0, sinks=True, page=64, gaps="columns"),
        replace(listed, name="listed fp16 batch invariant", dtype="float16", batch_invariant=True, lse=False),
        replace(listed, name="listed e4m3 query far sinks", dtype="float8_e4m3fn", out_dtype="bfloat16", sinks=True,
                sink="far", batch_invariant=True, listed=700, lens=(900, 9)),
        replace(listed, name="listed sinks, lse of keys", sinks=True, lse_of_keys=True, listed=700, lens=(900, 9, 0)),
        replace(base, name="sinks, lse of keys", sinks=True, lse_of_keys=True, lens=(37, 1, 0, 3000)),
        replace(listed, name="two sets", extra_listed=40, sinks=True, extra_page=64, list_lens=True),
        replace(listed, name="two sets of slots, of another format", extra_listed=40, by_slot=True, extra_by_slot=True,
                extra_format=_next_latent(base.format), group=64, rope=0, scale="float", lists="again"),
        replace(listed, name="two sets, lse of keys", extra_listed=40, sinks=True, lse_of_keys=True, sink="far"),
        replace(listed, name="two sets, the first empty", listed=0, extra_listed=70, sinks=True, sink="inf"),
        replace(listed, name="two sets, the second empty", extra_listed=0, by_slot=True, lse=False),
        replace(listed, name="slots and positions of ragged rows", by_slot=True, extra_listed=33, extra_page=3,
                lens=(137, 40, 0, 70), q_lens=(20, 1, 0, 17), ragged=True, strided=True, index="uint32", sinks=True,
                scale="tensor", out_dtype="float8_e4m3fn"),
        replace(listed, name="positions and slots of drafts batch invariant", extra_listed=900, extra_by_slot=True,
                lens=(1937, 4, 6, 70), q_lens=(3, 3, 3, 3), batch_invariant=True, dtype="float16",
                extra_format=_next_latent(base.format), block_size=3),
        replace(base, name="sinks", sinks=True, lens=(37, 1, 0, 3000)),
        replace(base, name="sinks of -inf ragged", sinks=True, sink="-inf", q_lens=(2, 1, 0, 1), ragged=True),
    ):  # fmt: skip
        yield replace(case, quick=False)
    if base.format in ("bf16", "fp16"):
        largest = replace(listed, max_logits=True, by_slot=True, list_lens=True, quick=False)
        yield replace(largest, name="largest scores", page=1, sinks=True, lse_of_keys=True, group=64)
        yield replace(largest, name="largest scores of splits", listed=1500, lens=(2000, 7, 0), scale="tensor")


def _next_latent(name: str) -> str:
    if name in LATENT_RECORDS:
        return "bf16"
    names = [*LATENT_FORMATS]
    return names[(names.index(name) + 1) % len(names)]


def _mla_prefill(base: Case, i: int) -> Iterator[Case]:
    base = replace(base, heads=1, group=4, lens=(37, 5, 0, 70), q_lens=(20, 5, 0, 33))
    yield base
    cases = [
        replace(base, name="chunked", chunk=32, index="int64", page=3),
        replace(base, name="one token", lens=(1,), q_lens=(1,)),
        replace(base, name="no tokens", lens=(0,), q_lens=(0,)),
        replace(base, name="16-bit weight fp16", dtype="float16", weight="", page=64),
        replace(base, name="16-bit weight", weight="", dim_v=64, nope=64, index="uint32"),
        replace(base, name="16 heads", group=16, lens=(150,), q_lens=(130,), page=128, dim_v=128),
        replace(base, name="wide", group=2, lens=(150, 0, 70), q_lens=(140, 0, 3), chunk=100, dim_v=128),
        replace(base, name="scaled rows strided", scale="float", strided=True, spread=True, page=1),
        replace(base, name="no rotary part", rope=0, chunk=32, weight="" if i % 2 else base.weight),
    ]
    if base.format in ("bf16", "fp16"):
        cases.append(replace(base, name="raw rows in the cache", raw_in_cache=True, page=64))
    if base.format == "bf16":
        cases.append(replace(base, name="sharp", sharp=True, lens=(600,), q_lens=(40,), group=2, page=64, lse=False))
    if base.format != "fp8_ds_mla":
        cases.append(replace(base, name="split", split=True))
    for case in cases:
        yield replace(case, quick=False)


def _mla_project(base: Case, i: int) -> Iterator[Case]:
    base = replace(base, lens=(3,), heads=1, group=4, dim=128, dim_v=256)
    yield base
    for case in (
        replace(base, name="many rows", lens=(70,), dim=512, dim_v=128, spread=True),
        replace(base, name="strided", lens=(17,), strided=True),
        replace(base, name="no tokens", lens=(0,)),
    ):
        yield replace(case, quick=False)
    if base.format != "fp8_e4m3":
        yield replace(base, name="odd sizes", dim=72, dim_v=40, quick=False)


def _mla_decode_branch(base: Case, i: int) -> Iterator[Case]:
    base = replace(base, lens=(37, 1, 5, 130), heads=1, group=16, page=64, dim_v=128)
    yield base
    ragged = replace(base, lens=(37, 4, 9, 70), q_lens=(2, 4, 0, 1), ragged=True)
    cases = [
        replace(base, name="one token H 64", lens=(700,), group=64),
        replace(base, name="ragged drafts 16-bit weights", q_lens=(2, 4, 0, 1), lens=(37, 4, 9, 70), ragged=True,
                weight="", page=16, group=5),
        replace(base, name="drafts", lens=(37, 4, 9, 70), q_lens=(2, 2, 2, 2), index="uint32", page=32),
        replace(ragged, name="fp16", dtype="float16", index="int64", page=3, group=4),
        replace(base, name="long", lens=(1500, 5, 600), page=128),
        replace(base, name="30 requests", lens=tuple(range(1, 301, 10)), group=8),
        replace(base, name="scale tensors strided", scale="tensor", strided=True, page=1, group=4),
        replace(base, name="rank 256 rope 32 Dv 64", rank=256, rope=32, weight="", nope=64, dim_v=64, group=3),
        replace(base, name="no tokens", lens=(4, 0), q_lens=(0, 0)),
        replace(base, name="no rotary part", rope=0, q_lens=(1, 1, 2, 0), ragged=True),
    ]  # fmt: skip
    if base.format in ("bf16", "fp16"):
        cases.append(replace(base, name="raw rows in the cache", raw_in_cache=True))
    if base.format == "fp8_e4m3":  # on Hopper the last merge and projection are one launch for so many heads
        cases.append(replace(base, name="H 128", lens=(700, 77), group=128, scale="float"))
    if base.format != "fp8_ds_mla":
        cases.append(replace(base, name="split", split=True))
    for case in cases:
        yield replace(case, quick=False)


def _merge(base: Case, i: int) -> Iterator[Case]:
    yield replace(base, name="2 parts", lens=(7,), dim=128)
    for case in (
        replace(base, name="5 parts", parts=5, lens=(33,), dim=72, strided=True),
        replace(base, name="1 part", parts=1, lens=(3,), dim=512),
        replace(base, name="no tokens", lens=(0,)),
        replace(base, name="many parts", parts=70, lens=(2,), heads=1, group=1, dim=32),
    ):
        yield replace(case, quick=False)


_MERGE_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _merge_of(base: Case, i: int) -> Iterator[Case]:
    return _merge(replace(base, dtype=_MERGE_DTYPES[base.format]), i)


_VARIANTS = {
    "append": (tuple(KV_FORMATS), _append),
    "rope_append": (tuple(KV_FORMATS), _rope_append),
    "decode": (tuple(KV_FORMATS), _decode),
    "prefill": (tuple(KV_FORMATS), _prefill),
    "mla_append": ((*LATENT_FORMATS, *LATENT_RECORDS), _mla_append_any),
    "mla_decode": ((*LATENT_FORMATS, *LATENT_RECORDS), _mla_decode_any),
    "mla_prefill": (tuple(LATENT_FORMATS), _mla_prefill),
    "mla_project": (("bf16", "fp16", "fp8_e4m3"), _mla_project),
    "mla_decode_branch": (tuple(LATENT_FORMATS), _mla_decode_branch),
    "merge_states": (tuple(_MERGE_DTYPES), _merge_of),
    "transcode": ((*KV_FORMATS, "fp8_ds_mla"), transcode),
    **index_cases.VARIANTS,
}
OPS = tuple(_VARIANTS)
__all__ = ["OPS", "Case", "Lens", "cases", "formats_of"]


def formats_of(op: str) -> tuple[str, ...]:
    """The formats that cases of an operation have."""
    return _VARIANTS[op][0]
