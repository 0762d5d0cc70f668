"""Random cases from the whole documented space: `draw(seed, i)` always gives the same one.

Sizes are drawn by orders of magnitude, so that most cases are small and some have tens of thousands of tokens or
hundreds of requests. What a case may cost is bounded by its work, not by its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from ..formats import (
    BLOCK,
    KV_FORMATS,
    LATENT_FORMATS,
    LATENT_RECORDS,
    MAX_HEAD_DIM,
    MAX_HEAD_DIM_V,
    TENSOR,
    KVFormat,
    kv_format,
    latent_format,
)
from .cases import OPS, Case, Lens, formats_of
from .other_cases import extra_formats

_HALF = ("bfloat16", "float16")
_FLOAT = (*_HALF, "float32")
_FP8 = ("float8_e4m3fn", "float8_e5m2")
_INDEX = ("int32", "int64", "uint32", "mixed")
_SCALES = ("one", "float", "tensor", "head")
# Attentions over K/V caches are what most calls are; the rest have fewer parameters.
_WEIGHTS = {"decode": 5, "prefill": 2, "append": 3, "rope_append": 3, "mla_append": 2, "mla_decode": 3,
            "mla_prefill": 2, "mla_project": 1, "mla_decode_branch": 2, "merge_states": 1, "transcode": 2,
            "index_append": 1, "index_query": 1, "index_scores": 1, "index_topk": 1, "index_select": 1}  # fmt: skip
_MOST_TOKENS = 160_000
_MOST_VALUES = 1 << 24  # that a cache or new rows hold
_MOST_WRITTEN = 1 << 20  # values of an output, where it is the caller who chose many query rows
_MOST_LISTED = 60_000  # entries of lists, which references take one by one
_MOST_SCORES = 1 << 26  # columns that queries are multiplied with, over all requests and heads


class Dice(Random):
    """Draws that the parameters need."""

    def maybe(self, chance: float) -> bool:
        return self.random() < chance

    def some(self, values: Sequence[Any], weights: Sequence[float] | None = None) -> Any:
        return self.choices(values, weights)[0]

    def log(self, low: int, high: int) -> int:
        """Between both, each order of magnitude alike."""
        return min(high, max(low, int(math.exp(self.uniform(math.log(low), math.log(high + 1))))))


def draw(seed: int, i: int, ops: Sequence[str] | None = None, formats: Sequence[str] | None = None) -> Case:
    """Case i of a seed, of the operations and formats named (None: all). Raises ValueError if none fits."""
    dice = Dice(f"tersekv {seed} {i}")
    known = [(op, name) for op in OPS for name in formats_of(op) if not (ops and op not in ops)]
    known = [(op, name) for op, name in known if not formats or name in formats]
    if not known:
        raise ValueError("no operation named has a format named")
    weights = [_WEIGHTS[op] / len(formats_of(op)) for op, _ in known]
    op, name = dice.some(known, weights)
    case = _DRAWS[op](dice, Case(op, name, f"{seed}.{i}"))
    return replace(case, head_major=dice.maybe(0.15))


def _lens(dice: Dice, most: int) -> Lens:
    """Lengths of 1 to 256 requests that hold at most so many tokens: equal, uneven, one among short ones, some 0."""
    requests = dice.log(1, 256) if dice.maybe(0.7) else dice.some((1, 2, 3, 4, 8))
    largest = max(min(most // requests, 40_000), 1)
    n = dice.log(1, largest)
    how = dice.some(("equal", "even", "uneven", "one long"), (2, 2, 3, 1))
    if how == "equal":
        return (n,) * requests
    if how == "even":
        return tuple(max(n + dice.randint(-2, 2), 0) for _ in range(requests))
    if how == "one long":
        longest = dice.log(n, max(min(most - n * requests, 40_000), n))
        return (*[dice.randint(0, min(n, 40)) for _ in range(requests - 1)], longest)
    return tuple(dice.randint(0, n) for _ in range(requests))


def _new(dice: Dice, lens: Lens, most: int) -> Lens:
    """How many of the tokens are new: all, one each, a few, ragged; at most so many together."""
    how = dice.some(("all", "one", "few", "ragged"), (1, 2, 2, 3))
    if how == "all" and sum(lens) <= most:
        return lens
    each = max(most // max(len(lens), 1), 1)
    top = 1 if how == "one" else dice.log(1, min(each, 16 if how == "few" else each))
    return tuple(min(n, top if how in ("one", "few") else dice.randint(0, top)) for n in lens)


def _multiple(dice: Dice, step: int, most: int, usual: Sequence[int]) -> int:
    """One of the usual sizes, or any multiple of step."""
    usual = [n for n in usual if n % step == 0 and n <= most]
    return dice.some(usual) if dice.maybe(0.7) else step * dice.randint(1, most // step)


def _page(dice: Dice) -> int:
    usual = (1, 8, 16, 32, 64, 128, 256)
    return dice.some(usual, (1, 1, 5, 2, 4, 1, 1)) if dice.maybe(0.85) else dice.randint(1, 256)


def _kv(dice: Dice, case: Case) -> Case:
    """Of K/V caches: sizes, layout, place of scales, gaps."""
    f, other = kv_format(case.format), dice.some([*KV_FORMATS]) if dice.maybe(0.2) else ""
    other = "" if other == case.format else other
    step = max(x.scale_block or 8 for x in (f, kv_format(other or case.format)))
    dim = _multiple(dice, step, MAX_HEAD_DIM, (64, 128, 128, 128, 192, 256, 512))
    dim_v = 0 if dice.maybe(0.8) else _multiple(dice, step, MAX_HEAD_DIM_V, (64, 128, 256, 512))
    if not dim_v and dim > MAX_HEAD_DIM_V:
        dim_v = _multiple(dice, step, MAX_HEAD_DIM_V, (128, 512))
    longest = max(dim - MAX_HEAD_DIM, (dim_v or dim) - MAX_HEAD_DIM_V) + step > 0
    gaps = ("slots", "heads") if longest else ("slots", "heads", "columns")
    owned = {f.scale, kv_format(other or case.format).scale}
    kinds = _SCALES[:3] if BLOCK in owned else _SCALES if TENSOR in owned else _SCALES[:1]
    return replace(
        case, dim=dim, dim_v=dim_v, heads=dice.some((1, 1, 1, 2, 2, 4, 8, dice.randint(1, 16))), page=_page(dice),
        layout=dice.some(("NHD", "HND")), packed=dim_v in (0, dim) and not other and dice.maybe(0.3), v_format=other,
        rotation=dice.some(("", "k", "v", "kv"), (6, 1, 1, 2)), channels=dice.some(("", "k", "v", "kv"), (6, 1, 1, 1)),
        scales=dice.some(("apart", "inline", "tail"), (5, 2, 2)), gaps=_gaps(dice, gaps),
        index=dice.some(_INDEX), strided=dice.maybe(0.2), scale=dice.some(kinds),
    )  # fmt: skip


def _latent(dice: Dice, case: Case) -> Case:
    """Of latent caches."""
    f = latent_format(case.format)
    step, record = f.scale_block or 8, case.format in LATENT_RECORDS
    rope = 0 if record else dice.some((64, 0, 2 * dice.randint(1, 32)), (7, 1, 2))
    return replace(
        case, rank=512 if record or dice.maybe(0.8) else _multiple(dice, step, 512, (128, 256, 384, 512)),
        rope=rope, split=f.scale_dtype is None and dice.maybe(0.4),
        page=_page(dice), gaps=_gaps(dice, ("slots", "columns")), index=dice.some(_INDEX), strided=dice.maybe(0.2),
        scale=dice.some(_SCALES[:3] if f.scale == TENSOR else _SCALES[:1]), heads=1,
    )  # fmt: skip


def _gaps(dice: Dice, kinds: Sequence[str]) -> str:
    return dice.some(kinds) if dice.maybe(0.2) else ""


def _written(dice: Dice, case: Case, values: int) -> Case:
    """Of appends: which tokens are new (a token's rows hold so many values), where they go, whose scales quantise."""
    most = max(min(_MOST_VALUES // values // 4, 32_768), 1)
    most = most if dice.maybe(0.06) else min(most, 300)
    lens = _lens(dice, max(min(_MOST_VALUES // values, _MOST_TOKENS), 1))
    q_lens = _new(dice, lens, most)
    place = dice.some(("slots", "pages"))
    reciprocal = place == "pages" and case.scale == "tensor" and dice.maybe(0.5)
    return replace(
        case, lens=lens, q_lens=q_lens, place=place, skip=dice.maybe(0.5), reciprocal=reciprocal,
        dtype=dice.some(_FLOAT, (4, 3, 1)),
    )  # fmt: skip


def _append(dice: Dice, case: Case) -> Case:
    case = _kv(dice, case)
    case = _written(dice, case, case.heads * (case.dim + (case.dim_v or case.dim)))
    # 16-bit NaNs differ in their bits; what is special stands in the fifth row.
    f = kv_format(case.format)
    if f.scale == TENSOR and dice.maybe(0.2):  # codes are stored as they are
        return replace(case, dtype=_codes(f), v_format="", rotation="", channels="")
    scaled = "none" not in (f.scale, kv_format(case.v_format or case.format).scale)
    special = scaled and sum(case.q_lens or ()) > 4 and dice.maybe(0.2)
    return replace(case, special=special, widen=f.code != "int4" or dice.maybe(0.8))


def _rope_append(dice: Dice, case: Case) -> Case:
    case = _kv(dice, case)
    group, query = dice.some((1, 2, 4, 5, 8, 16)), dice.maybe(0.8)
    case = _written(dice, case, case.heads * (case.dim * (1 + group * query) + (case.dim_v or case.dim)))
    rotary = 0 if dice.maybe(0.6) else 2 * dice.randint(1, case.dim // 2)
    return replace(
        case, group=group, query=query, rotary=rotary, interleaved=dice.maybe(0.5),
        out_dtype=_written_as(dice), zero_padding=case.place == "pages" and dice.maybe(0.3),
    )  # fmt: skip


def _mla_append(dice: Dice, case: Case) -> Case:
    case = _latent(dice, case)
    rotate = case.rope > 0 and dice.maybe(0.8)
    query = rotate and dice.maybe(0.7)
    group, q_nope = dice.some((1, 2, 5, 16, 128)), dice.some((512, 512, 128, 8 * dice.randint(1, 64)))
    case = _written(dice, case, case.rank + case.rope + query * group * (case.rope + q_nope))
    f = latent_format(case.format)
    bare = f.scale == TENSOR and not (rotate or query)
    if bare and dice.maybe(0.4):
        return replace(case, rotate=False, query=False, dtype=_codes(f))
    special = bare and sum(case.q_lens or ()) > 4
    return replace(
        case, group=group, q_nope=q_nope, rotate=rotate, query=query, interleaved=dice.maybe(0.5),
        out_dtype=_written_as(dice), special=special and dice.maybe(0.3),
        zero_padding=case.place == "pages" and dice.maybe(0.3),
    )  # fmt: skip


def _codes(f: KVFormat) -> str:
    """The dtype of rows that are codes already."""
    return str(f.storage).removeprefix("torch.")


def _written_as(dice: Dice) -> str:
    """Dtype of rotated queries; "": that of the rows."""
    return dice.some(("", *_FP8, *_FLOAT), (3, 4, 1, 1, 1, 0.5))


def _decode(dice: Dice, case: Case) -> Case:
    case = _kv_attention(dice, case)
    if dice.maybe(0.15):
        return _listed(dice, replace(case, window=0))
    return replace(case, mask=dice.maybe(0.2))


def _prefill(dice: Dice, case: Case) -> Case:
    """Ragged new rows: all of a request, some, or more than it holds."""
    case = _kv_attention(dice, case)
    if dice.maybe(0.3) and sum(case.lens) * case.heads * case.group * max(case.lens) * 64 <= _MOST_SCORES:
        case = replace(case, q_lens=case.lens)
    case = replace(case, ragged=True)
    if dice.maybe(0.15):
        return _listed(dice, replace(case, window=0))
    return replace(case, new_rows=dice.maybe(0.4))


def _kv_attention(dice: Dice, case: Case) -> Case:
    case = _kv(dice, case)
    group = dice.some((1, 2, 4, 4, 5, 8, 8, 16, dice.randint(1, 72)))
    lens = _lens(dice, _live(dice, case.heads * (case.dim + (case.dim_v or case.dim))))
    case = replace(_attention(dice, case, lens, case.heads * group, case.dim_v or case.dim), group=group)
    fast = dice.maybe(0.1)
    return replace(
        case, window=_window(dice), sinks=dice.maybe(0.2), softcap=_softcap(dice), spread=dice.maybe(0.2),
        precision="fast" if fast else "exact", batch_invariant=dice.maybe(0.1),
    )  # fmt: skip


def _window(dice: Dice) -> int:
    """None, some keys, or more than there are, up to the end of the types that kernels count in."""
    if not dice.maybe(0.25):
        return 0
    end = dice.some((2**31, 2**32, 2**63))
    return min(end - dice.randint(-2, 2), 2**63 - 1) if dice.maybe(0.2) else dice.log(1, 5000)


def _softcap(dice: Dice) -> float:
    """None, usual ones, or any over ten decades: from where scores are all but signs to where they are as they were."""
    return dice.some((0.0, 20.0, 50.0, 10.0 ** dice.uniform(-3, 7)), (6, 1, 1, 2))


def _mla_decode(dice: Dice, case: Case) -> Case:
    case = _latent(dice, case)
    group = dice.some((1, 4, 8, 16, 16, 32, 64, 128, dice.randint(1, 128)))
    lens = _lens(dice, _live(dice, case.rank + case.rope))
    case = replace(_attention(dice, case, lens, group, case.rank), group=group)
    fast, alone = dice.maybe(0.1), dice.maybe(0.1)
    case = replace(case, precision="fast" if fast else "exact", spread=dice.maybe(0.2), batch_invariant=alone,
                   sinks=dice.maybe(0.2))  # fmt: skip
    case = replace(case, sink=dice.some(("", "inf", "-inf", "far"), (6, 1, 1, 1)) if case.sinks else "")
    case = _listed(dice, case) if dice.maybe(0.4) else case
    largest = case.listed >= 0 and case.extra_listed < 0 and case.lse and case.format in ("bf16", "fp16")
    return replace(case, lse_of_keys=case.sinks and dice.maybe(0.3), max_logits=largest and dice.maybe(0.3))


def _listed(dice: Dice, case: Case) -> Case:
    """Lists of keys: of a few entries, of what tiles hold and one more or less, of more than there are."""
    rows = max(sum(case.q_lens if case.q_lens is not None else (1,) * len(case.lens)), 1) * case.heads
    most = max(min(_MOST_LISTED // rows, 2051), 1)
    listed = min(dice.some((0, 1, 63, 64, 65, 2048, 2051, dice.log(1, 2051))), most)
    latent = case.op == "mla_decode"
    by_slot = latent and dice.maybe(0.4)
    block_size = 1 if by_slot else dice.some((1, 1, 3, 8, 16, 48, 64, 128))
    if latent and dice.maybe(0.4):
        case = replace(case, extra_listed=min(dice.some((0, 1, 64, dice.log(1, 600))), most),
                       extra_by_slot=dice.maybe(0.5), extra_page=_page(dice),
                       extra_format=dice.some(extra_formats(case)))  # fmt: skip
    return replace(
        case, listed=listed, by_slot=by_slot, block_size=block_size, list_lens=dice.maybe(0.4),
        each_head=not latent and dice.maybe(0.4),
        lists=dice.some(("", "shared", "again"), (6, 1 if len(case.lens) == 1 else 0, 1)),
    )  # fmt: skip


def _live(dice: Dice, values: int) -> int:
    """Tokens that a cache may hold, of so many values each; mostly far fewer than could be."""
    most = max(min(_MOST_VALUES // values, _MOST_TOKENS), 1)
    return most if dice.maybe(0.1) else min(most, 2000)


def _attention(dice: Dice, case: Case, lens: Lens, heads: int, columns: int) -> Case:
    """Query rows of an attention: one, some, or ragged ones, more than a request holds too; dtypes; LSE."""
    longest, requests = max(lens, default=0), len(lens)
    rows_at_most = min(_MOST_SCORES // max(longest * heads * 64, 1), _MOST_WRITTEN // (heads * columns))
    most = max(rows_at_most // requests, 1)
    how = dice.some(("one", "drafts", "many", "ragged"), (5, 3, 1, 3))
    rows = 1 if how == "one" else dice.log(1, min(most, 8 if how == "drafts" else 300))
    q_lens = (rows,) * requests
    if how == "ragged":
        q_lens = tuple(dice.randint(0, rows) for _ in range(requests))
    dtype = dice.some((*_FLOAT, *_FP8), (5, 4, 1, 2, 0.5))
    return replace(
        case, lens=lens, q_lens=q_lens, ragged=how == "ragged", slack=_slack(dice), dtype=dtype, lse=dice.maybe(0.6),
        out_dtype=dice.some(("", *_HALF, "float32", *_FP8), (6, 1, 1, 1, 1, 0.5)),
    )  # fmt: skip


def _slack(dice: Dice) -> int:
    """How far max_q_len is above the most rows of a request, as where the host knows no more than a bound."""
    return dice.log(1, 100) if dice.maybe(0.2) else 0


def _epsilon(dice: Dice) -> float:
    return dice.some((1e-6, 1e-5, 10.0 ** dice.uniform(-12, 1)), (3, 1, 1))


def _weights(dice: Dice, case: Case) -> Case:
    """Of MLA's up-projections: e4m3 wants blocks of 128."""
    blocks = case.rank % 128 == 0 and dice.maybe(0.65)
    nope, dim_v = (dice.some((128, 128, 128, 256)) if blocks else dice.some((128, 64, 32, 96, 192)) for _ in "kv")
    return replace(
        case, weight="float8_e4m3fn" if blocks else "", nope=nope, dim_v=dim_v, dtype=dice.some(_HALF, (3, 1)),
        raw_in_cache=case.format in _16_BITS and dice.maybe(0.3), epsilon=_epsilon(dice), slack=_slack(dice),
    )  # fmt: skip


_16_BITS = ("bf16", "fp16")


def _mla_prefill(dice: Dice, case: Case) -> Case:
    case = _weights(dice, _latent(dice, case))
    group = dice.some((1, 2, 4, 16, 16, dice.randint(1, 40)))
    wide = group * (case.nope + case.dim_v)
    most = max(min(_MOST_VALUES // wide // 4, 4000), 1)
    lens = _lens(dice, most if dice.maybe(0.2) else min(most, 300))
    q_lens = _new(dice, lens, max(_MOST_SCORES // max(max(lens) * wide, 1), len(lens)))
    total = sum(lens)
    chunk = dice.randint(max(total // 6, 1), total + 3) if total and dice.maybe(0.3) else 0
    return replace(
        case, group=group, lens=lens, q_lens=q_lens, chunk=chunk, ragged=True, spread=dice.maybe(0.2),
        lse=dice.maybe(0.6),
    )  # fmt: skip


def _mla_decode_branch(dice: Dice, case: Case) -> Case:
    case = _weights(dice, _latent(dice, case))
    group = dice.some((1, 4, 8, 16, 64, 128, dice.randint(1, 40)), (4, 4, 4, 5, 0.5, 0.5, 3))
    lens = tuple(max(n, 1) for n in _lens(dice, _live(dice, 3 * (case.rank + case.rope))))
    how = dice.some(("one", "drafts", "ragged"), (5, 2, 3))
    rows = min(1 if how == "one" else dice.randint(1, 8), min(lens))
    q_lens = (rows,) * len(lens)
    if how == "ragged":
        q_lens = tuple(dice.randint(0, min(n, 8)) for n in lens)
    return replace(case, group=group, lens=lens, q_lens=q_lens, ragged=how == "ragged", lse=False)


def _mla_project(dice: Dice, case: Case) -> Case:
    blocks = case.format == "fp8_e4m3"
    step = 128 if blocks else 8
    dim, dim_v = (_multiple(dice, step, 512, (128, 256, 512)) for _ in "kn")
    group = dice.some((1, 2, 5, 16, 128))
    tokens = dice.log(1, max(min(_MOST_VALUES // (group * (dim + dim_v)), 300), 1))
    return replace(
        case, lens=(tokens,), heads=1, group=group, dim=dim, dim_v=dim_v, strided=dice.maybe(0.3),
        spread=dice.maybe(0.3),
    )  # fmt: skip


def _merge_states(dice: Dice, case: Case) -> Case:
    parts, heads, dim = dice.log(1, 128), dice.log(1, 64), _multiple(dice, 1, 512, (64, 128, 512))
    tokens = dice.log(1, max(min(_MOST_VALUES // (parts * heads * dim * 4), 20_000), 1))
    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[case.format]
    return replace(
        case, parts=parts, heads=heads, group=1, dim=dim, lens=(tokens,), dtype=dtype, strided=dice.maybe(0.3),
        lse=dice.maybe(0.6), out_dtype=dice.some(("", *_FLOAT)),
    )  # fmt: skip


def _transcode(dice: Dice, case: Case) -> Case:
    """One request's tokens, from pages of another kind."""
    latents = case.format == "fp8_ds_mla" or (case.format in LATENT_FORMATS and dice.maybe(0.2))
    other = replace(case, format=dice.some([*(LATENT_FORMATS if latents else KV_FORMATS)]))
    case, other = ((_latent if latents else _kv)(dice, x) for x in (case, other))
    if latents:
        case = replace(case, rank=(other if other.format == "fp8_ds_mla" else case).rank, rope=case.rope or 64)
        values = case.rank + case.rope
    else:  # sizes of heads that all formats hold
        formats = {case.format, case.v_format, other.format, other.v_format} - {""}
        step = max(kv_format(name).scale_block or 8 for name in formats)
        case = replace(case, dim=-(-case.dim // step) * step, dim_v=-(-case.dim_v // step) * step)
        values = case.heads * (case.dim + (case.dim_v or case.dim))
    most = max(min(_MOST_VALUES // values // 4, 32_768), 1)
    return replace(
        case, latents=latents, src_format=other.format, src_v_format=other.v_format, src_page=other.page,
        src_layout=other.layout, src_scales=other.scales, src_rotation=other.rotation, src_channels=other.channels,
        src_scale=other.scale, lens=(dice.log(1, most if dice.maybe(0.1) else min(most, 300)),),
        alike=dice.maybe(0.4), spread=dice.maybe(0.7), ragged=dice.maybe(0.3), slack=dice.log(1, 100),
    )  # fmt: skip


def _index(dice: Dice, case: Case) -> Case:
    """Of an indexer's caches."""
    dim = dice.some((128, 128, 128, 64, 256, 8 * dice.randint(1, 32)))
    gaps = _gaps(dice, ("slots", "pages", "columns"))
    return replace(case, dim=dim, page=_page(dice), gaps=gaps, index=dice.some(_INDEX), strided=dice.maybe(0.2))


def _index_rows(dice: Dice, case: Case, values: int) -> Case:
    """Of rows that are rotated and cast: which are new, RoPE, rotation."""
    case = _written(dice, case, values)
    return replace(
        case, place="slots", reciprocal=False, rotate=dice.maybe(0.8), rope_last=dice.maybe(0.4),
        rotary=min(64, case.dim) if dice.maybe(0.5) else 2 * dice.randint(1, case.dim // 2),
        interleaved=dice.maybe(0.5), rotation=dice.some(("", "k")), round16=dice.maybe(0.4),
    )  # fmt: skip


def _index_append(dice: Dice, case: Case) -> Case:
    case = _index(dice, case)
    case = _index_rows(dice, case, case.dim)
    norm = dice.maybe(0.5)
    plain = not norm and not case.rotate and case.format in ("index_fp8", "fp8_e4m3") and not case.rotation
    special = plain and sum(case.q_lens or ()) > 4 and dice.maybe(0.5)
    return replace(case, norm=norm, epsilon=_epsilon(dice), special=special)


def _index_query(dice: Dice, case: Case) -> Case:
    case = replace(_index(dice, case), heads=_index_heads(dice), gaps="")
    return replace(_index_rows(dice, case, case.heads * case.dim), weighted=dice.maybe(0.8))


def _index_heads(dice: Dice) -> int:
    return dice.some((16, 32, 64, 64, 4, 1, dice.randint(1, 140)))


def _index_scored(dice: Dice, case: Case) -> Case:
    """Requests of short contexts: the references go key by key."""
    case = replace(_index(dice, case), heads=_index_heads(dice))
    lens = _lens(dice, 1000)
    how = dice.some(("one", "drafts", "ragged"), (4, 2, 2))
    most = max(min(_MOST_SCORES // (64 * case.heads * max(max(lens), 1) * len(lens)), 8), 1)
    rows = 1 if how == "one" else dice.randint(1, most)
    q_lens = (rows,) * len(lens) if how != "ragged" else tuple(dice.randint(0, rows) for _ in lens)
    half = {"bf16": "bfloat16", "fp16": "float16"}.get(case.format)
    dtypes = (half, "float8_e4m3fn") if half else ("float8_e4m3fn", "float8_e4m3fn", *_HALF)
    ratio, block = dice.some((1, 1, 1, 4, dice.randint(2, 9))), dice.some((1, 1, 1, 4, 64, 128, dice.randint(2, 200)))
    return replace(
        case, lens=lens, q_lens=q_lens, ragged=how == "ragged", slack=_slack(dice), dtype=dice.some(dtypes),
        weighted=dice.maybe(0.8), ratio=ratio, relu=dice.maybe(0.8), each=dice.maybe(0.2), block=block,
        width=dice.log(1, 2000) if dice.maybe(0.2) else 0, spread=dice.maybe(0.3), whole=dice.maybe(0.5),
        scale=dice.some(_SCALES[:2]), starts=block == 1 and how != "ragged" and dice.maybe(0.2),
    )  # fmt: skip


def _taken(dice: Dice, case: Case) -> Case:
    """Of selections: how many columns, and which before all others."""
    top = dice.some((1, 8, 64, 512, 2048, dice.log(1, 3000)))
    first, last = (0 if dice.maybe(0.7) else dice.log(1, 2 * top) for _ in range(2))
    return replace(case, top=top, keep_first=first, keep_last=last)


def _index_select(dice: Dice, case: Case) -> Case:
    case = _taken(dice, _index_scored(dice, case))
    return replace(case, open_group=case.block == 1 and dice.maybe(0.5))


def _index_topk(dice: Dice, case: Case) -> Case:
    lens = _lens(dice, dice.some((1000, 60_000), (5, 1)))
    case = replace(case, lens=lens, each=dice.maybe(0.3), heads=dice.randint(1, 4), strided=dice.maybe(0.2))
    width = dice.log(1, 2 * max(max(lens), 1)) if dice.maybe(0.3) else 0
    case = _taken(dice, replace(
        case, width=width, index=dice.some(_INDEX), whole=dice.maybe(0.4), special=dice.maybe(0.3),
        open_group=dice.maybe(0.3), lse=dice.maybe(0.7),
    ))  # fmt: skip
    return replace(case, starts=not case.open_group and dice.maybe(0.3))


_DRAWS = {
    "append": _append,
    "rope_append": _rope_append,
    "mla_append": _mla_append,
    "decode": _decode,
    "prefill": _prefill,
    "mla_decode": _mla_decode,
    "mla_prefill": _mla_prefill,
    "mla_project": _mla_project,
    "mla_decode_branch": _mla_decode_branch,
    "merge_states": _merge_states,
    "transcode": _transcode,
    "index_append": _index_append,
    "index_query": _index_query,
    "index_scores": _index_scored,
    "index_topk": _index_topk,
    "index_select": _index_select,
}
