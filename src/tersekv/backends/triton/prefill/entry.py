"""Paged prefill in Triton: one launch, and decode's kernels where the rows are too few to fill a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ....formats import BLOCK, E4M3_MAX, E5M2_MAX, TOKEN_HEAD, KVFormat, kv_format
from ...host import launch
from ...host.bind import Bound, Fields, Step, bound
from ...host.record import Record
from .. import decode
from .kernels import prefill_kernel
from .tune import Tiles, tiles

_OUT_MAX = {torch.float8_e4m3fn: E4M3_MAX, torch.float8_e5m2: E5M2_MAX}
_OUT_KIND = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_CODE = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2", torch.int8: "int8", torch.uint8: "nvfp4"}
_AT_ONCE = 1024  # requests among which a block looks for its own
_FIELDS = Fields(
    "q k v k_cache v_cache k_scale_cache v_scale_cache page_table seq_lens cu_seqlens_q sinks out lse "
    "softmax_scale_t k_scale_t v_scale_t out_scale_t"
)


@dataclass(frozen=True)
class Constants(Record):
    """What the kernel is compiled for. The names are its."""

    CODE: str
    PARTS: int  # codes in a 16-bit word
    TOKEN_SCALES: bool
    BLOCK_SCALES: bool
    BYTES: bool  # e4m3 block scales come as uint8 and are converted by hand
    ASM: bool  # unpack by PTX
    BF16: bool  # multiply in bf16; else fp16
    TWO: bool  # the query is fp16 and multiplied as the sum of two bf16 tiles
    Q_BYTES: bool  # the query is e4m3 and comes as bytes
    NEW: bool  # k and v bring the new tokens' rows
    HEADS: int
    GROUP: int
    D: int
    DV: int
    WORDS_K: int  # D / PARTS
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
    kernel: launch.Template
    empty: bool


def why_not(f: SimpleNamespace) -> str | None:
    return decode.why_not(_as_decode(f))


def configure(f: SimpleNamespace) -> Any:
    fmt = kv_format(f.format)
    t = tiles(f, fmt)
    heads = f.k_cache.shape[2]
    blocks = f.q.shape[0] * (f.q.shape[1] // max(heads, 1)) // t.rows + f.seq_lens.shape[0]
    if f.k is None and blocks * heads < launch.num_sms(f):
        return decode.configure(_as_decode(f))
    constants = Constants(**_format(f, fmt), **_geometry(f, t, fmt), **_features(f))
    tensor = launch.TENSOR
    kernel = launch.Template(
        prefill_kernel, (max(blocks * heads, 1),), (
            *[tensor] * 13, f.softmax_scale, tensor, f.k_scale, tensor, f.v_scale, tensor, f.out_scale, tensor,
            f.softcap, f.seq_lens.shape[0], f.q.shape[0], *_strides(f), constants,
        ), fp8_as_bytes=False, num_warps=t.num_warps, num_stages=t.stages,
    )  # fmt: skip
    return Config(constants, kernel, 0 in f.q.shape or f.seq_lens.shape[0] == 0)


def run(call: Any, config: Any) -> None:
    if not isinstance(config, Config):
        decode.run(call, config)
    elif config.empty:
        call.out.zero_()
        if call.lse is not None:
            call.lse.fill_(float("-inf"))
    else:
        config.kernel(*_FIELDS(_as_the_kernel_takes_it(call, config)))


def bind(config: Any, at: dict[str, int]) -> Bound | None:
    if not isinstance(config, Config):
        return decode.bind(config, at)
    return None if config.empty else bound([Step(config.kernel, _FIELDS)], at)


def _as_decode(f: SimpleNamespace) -> SimpleNamespace:
    """The facts as decode's: without a mask its rows are causal."""
    return SimpleNamespace(**vars(f), mask=None)


def _as_the_kernel_takes_it(call: Any, config: Config) -> Any:
    """Caches as 16-bit words, and bytes in place of 8-bit floats where the kernel converts them by itself."""
    c, compiled = config.constants, config.kernel.launch.compiled
    if c.PARTS > 1 and not compiled:  # from then on only addresses are looked at
        call = call._replace(k_cache=_words(call.k_cache), v_cache=_words(call.v_cache))
    if c.BYTES:
        ks, vs = (launch.as_bytes(x) for x in (call.k_scale_cache, call.v_scale_cache))
        call = call._replace(k_scale_cache=ks, v_scale_cache=vs)
    if c.Q_BYTES:
        call = call._replace(q=call.q.view(torch.uint8))
    return call if c.OUT_KIND == "float" else call._replace(out=call.out.view(torch.uint8))


def _words(x: torch.Tensor) -> torch.Tensor:
    """The memory of 8-bit codes as 16-bit words."""
    return x.view(torch.int16)


def _format(f: SimpleNamespace, fmt: KVFormat) -> dict[str, Any]:
    by_hand = launch.e4m3_by_hand(f)
    left_over = 128.0 if fmt.scale == BLOCK else 1.0  # by tiles.block_scales
    return {
        "CODE": _CODE.get(fmt.storage, "half"),
        "PARTS": _parts(fmt),
        "TOKEN_SCALES": fmt.scale == TOKEN_HEAD,
        "BLOCK_SCALES": fmt.scale == BLOCK,
        "BYTES": by_hand,
        "ASM": launch.has_ptx(f) and not (fmt.storage == torch.float8_e4m3fn and by_hand),
        "BF16": fmt.storage == torch.bfloat16,
        "TWO": fmt.storage == torch.bfloat16 and f.q.dtype == torch.float16,
        "Q_BYTES": by_hand and f.q.dtype == torch.float8_e4m3fn,
        "K_FACTOR": left_over,
        "V_FACTOR": left_over,
    }


def _parts(fmt: KVFormat) -> int:
    return 2 * fmt.values_per_element // fmt.storage.itemsize


def _geometry(f: SimpleNamespace, t: Tiles, fmt: KVFormat) -> dict[str, Any]:
    d, dv, page, parts = f.q.shape[2], f.out.shape[2], f.k_cache.shape[1], _parts(fmt)
    block_d, block_dv = (max(16, launch.next_power_of_2(n // parts)) for n in (d, dv))
    return {
        "NEW": f.k is not None,
        "HEADS": f.k_cache.shape[2],
        "GROUP": f.q.shape[1] // max(f.k_cache.shape[2], 1),
        "D": d,
        "DV": dv,
        "WORDS_K": d // parts,
        "WORDS_V": dv // parts,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "PAGE": page,
        "ROWS": t.rows,
        "TILE": t.tile,
        "ONE_PAGE": page % t.tile == 0,
        "BLOCK_B": min(_AT_ONCE, launch.next_power_of_2(max(f.seq_lens.shape[0], 1))),
        "FAR": launch.spans_far(f.k_cache, f.v_cache, f.k_scale_cache, f.v_scale_cache),
    }


def _features(f: SimpleNamespace) -> dict[str, Any]:
    return {
        "WINDOW": f.window,
        "HAS_SINKS": f.sinks is not None,
        "HAS_LSE": f.lse is not None,
        "SOFTCAP": f.softcap > 0,
        "SOFTMAX_T": f.softmax_scale_t is not None,
        "K_T": f.k_scale_t is not None,
        "K_T_STRIDE": _per_head(f.k_scale_t),
        "V_T": f.v_scale_t is not None,
        "V_T_STRIDE": _per_head(f.v_scale_t),
        "OUT_T": f.out_scale_t is not None,
        "OUT_MAX": _OUT_MAX.get(f.out.dtype, 0.0),
        "OUT_KIND": "float" if launch.rounds_to_fp8(f) else _OUT_KIND.get(f.out.dtype, "float"),
    }


def _per_head(t: Any) -> int:
    return 1 if t is not None and t.shape[0] > 1 else 0


def _strides(f: SimpleNamespace) -> tuple[int, ...]:
    """In the order of the kernel's arguments; caches in 16-bit words."""
    caches = [n * x.dtype.itemsize // 2 for x in (f.k_cache, f.v_cache) for n in x.stride[:3]]
    scales = [n for x in (f.k_scale_cache, f.v_scale_cache) for n in ((0, 0, 0) if x is None else x.stride[:3])]
    new = [n for x in (f.k, f.v) for n in ((0, 0) if x is None else x.stride[:2])]
    return (
        *f.q.stride[:2], *new, *caches, *scales, f.page_table.stride[0], *f.out.stride[:2],
        *(f.lse.stride if f.lse is not None else (0, 0)),
    )  # fmt: skip
