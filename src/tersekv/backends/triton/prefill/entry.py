"""Paged prefill in Triton: one launch, and decode's kernels where the rows are too few to fill a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from ....formats import pair_of
from ...host import launch
from ...host.bind import BYTES, WORDS, Bound, Instead, Launches, Template, given, strides
from ...host.record import Record
from ...host.split_merge import alone, is_empty, rows_of, see_nothing, written
from ..decode import entry as decode
from .kernels import prefill_kernel
from .tune import Tiles, tiles

TAKES = decode.TAKES  # a block of rows is one program's, and sees all its keys in their order
_ANY_ROWS = 1 << 10  # of a request, where its blocks are not chosen by those of others


@dataclass(frozen=True)
class Constants(Record):
    """What the kernel is compiled for. The names are its."""

    K: decode.Codes  # keys; those that follow are of values, and PARTS of outputs
    CODE: str
    PARTS: int
    TOKEN_SCALES: bool
    BLOCK_SCALES: bool
    BYTES: bool
    ASM: bool
    STEP: int
    SCALE_STEP: int
    BF16: bool  # multiply in bf16; else fp16
    TWO: bool  # the query is multiplied as the sum of two bf16 tiles
    Q_BYTES: bool  # the query is e4m3 and comes as bytes
    NEW: bool  # k and v bring the new tokens' rows
    HEADS: int
    GROUP: int
    D: int
    DV: int
    WORDS_K: int  # D / K.PARTS
    WORDS_V: int
    BLOCK_D: int
    BLOCK_DV: int
    PAGE: int
    ROWS: int
    TILE: int
    ONE_PAGE: bool
    BLOCK_B: int
    WINDOW: int
    HAS_SINKS: bool
    HAS_LSE: bool
    SOFTCAP: bool
    SOFTMAX_T: bool
    K_T: bool
    K_T_STRIDE: int
    V_T: bool
    V_T_STRIDE: int
    OUT_T: bool
    OUT_MAX: float
    OUT_KIND: str  # "e4m3" or "e5m2": the output is written as bytes, by bit arithmetic; "float": by the chip's cast
    K_FACTOR: float
    V_FACTOR: float
    FAR: bool  # a page is longer than int32 counts


class Config(NamedTuple):
    constants: Constants
    launches: Launches | Instead


def why_not(f: SimpleNamespace) -> str | None:
    return decode.why_not(_as_decode(f))


def configure(f: SimpleNamespace) -> Config | decode.Config:
    t = tiles(alone(f, _ANY_ROWS), *pair_of(f))
    heads, requests = f.k_cache.shape[2], f.seq_lens.shape[0]
    blocks = f.q.shape[0] * (f.q.shape[1] // max(heads, 1)) // t.rows + requests
    if f.k is None and blocks * heads < launch.num_sms(f) and not f.batch_invariant:
        return decode.configure(_as_decode(f))
    c = constants(f, t)
    if is_empty(f):
        return Config(c, Instead(see_nothing))
    arguments = _strides(f) | decode.turns_of(f) | {
        **given(KN="k", VN="v", TABLE="page_table", LENS="seq_lens", SINKS="sinks", LSE="lse"), **rows_of(f),
        **given(SOFTMAX_T="softmax_scale_t", K_T="k_scale_t", V_T="v_scale_t", OUT_T="out_scale_t"),
        **given(WORDS, K="k_cache", V="v_cache"),
        **given(BYTES if c.Q_BYTES else "", Q="q"),
        **given(BYTES if c.BYTES else "", KS="k_scale_cache", VS="v_scale_cache"),
        **given(BYTES if c.OUT_KIND != "float" else "", OUT="out"),
        "softmax_scale": f.softmax_scale, "k_scale": f.k_scale, "v_scale": f.v_scale, "out_scale": f.out_scale,
        "softcap": f.softcap, "B": requests, "T": f.q.shape[0], "c": c,
    }  # fmt: skip
    kernel = Template(prefill_kernel, (blocks * heads,), arguments, num_warps=t.num_warps, num_stages=t.stages)
    return Config(c, Launches(kernel))


def run(call: Any, config: Config | decode.Config) -> None:
    config.launches(call)


def bind(config: Config | decode.Config, at: dict[str, int]) -> Bound | None:
    return config.launches.bind(at)


def constants(f: SimpleNamespace, t: Tiles) -> Constants:
    return Constants(**decode.format_constants(f), **decode.option_constants(f), **written(f), **_geometry(f, t))


def _as_decode(f: SimpleNamespace) -> SimpleNamespace:
    """The facts as decode's: without a mask its rows are causal."""
    return SimpleNamespace(**vars(f), mask=None)


def _geometry(f: SimpleNamespace, t: Tiles) -> dict[str, Any]:
    page = f.k_cache.shape[1]
    return {
        **decode.columns_of(f),
        "NEW": f.k is not None,
        "HEADS": f.k_cache.shape[2],
        "GROUP": f.q.shape[1] // max(f.k_cache.shape[2], 1),
        "PAGE": page,
        "ROWS": t.rows,
        "TILE": t.tile,
        "ONE_PAGE": page % t.tile == 0,
        "BLOCK_B": decode.at_once(f.seq_lens.shape[0]),
        "FAR": launch.spans_far(f.k_cache, f.v_cache, f.k_scale_cache, f.v_scale_cache),
    }


def _strides(f: SimpleNamespace) -> dict[str, int]:
    """Of all tensors; of caches see `decode.cache_strides`."""
    found = strides(f.q, sq_="th") | strides(f.k, skn_="th") | strides(f.v, svn_="th")
    return (
        found
        | decode.cache_strides(f)
        | strides(f.out, so_="th")
        | strides(f.lse, sl_="th")
        | {"st_b": f.page_table.stride[0]}
    )
