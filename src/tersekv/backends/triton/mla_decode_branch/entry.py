"""The decode branch of MLA: one launch that rotates, norms, stores and projects queries, then decode's, then the last
projection. What lies between launches is kept scratch: the call is bound, checked and planned as one.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from ...host import launch
from ...host.bind import PART, Bound, Fields, Step, bound
from .. import mla_project
from ..mla_decode import entry as mla_decode
from . import enter

_ALIGNED = 256
_MOST_KEPT = 1 << 24  # numbers of scratch that are kept for the next call; more, for some 256 tokens, is given back
# What decode's launches take of the branch.
_INNER = {"q_nope": "Q_NOPE", "q_pe": "Q_PE", "seq_lens": "SEQ_LENS", "out": "LATENTS"}
LAST = Fields("LATENTS w_uv w_uv_scale out")


class Parts(NamedTuple):
    """Facts of the operations that the branch is made of."""

    first: SimpleNamespace  # mla_project
    decode: SimpleNamespace
    last: SimpleNamespace  # mla_project


class Place(NamedTuple):
    """A part of the scratch."""

    offset: int  # bytes
    shape: tuple[int, ...]
    dtype: torch.dtype


class Config(NamedTuple):
    first: mla_project.Config
    decode: Any  # of the backend's mla_decode
    last: mla_project.Config
    places: dict[str, Place]
    scratch: int  # fp32 numbers: decode's, then the places
    steps: list[Step]  # from the first call on


def parts(f: SimpleNamespace) -> Parts:
    tokens, heads, dq = f.q.shape
    rank, rope = f.ckv.shape[2], f.kpe.shape[2]

    def rows(columns: int) -> Any:
        return f.q._replace(shape=(tokens, heads, columns), stride=(heads * columns, columns, 1), aligned=True)

    q_nope, latents, where = rows(rank), rows(rank), {"device": f.device, "arch": f.arch}
    lens = f.cache_lens._replace(dtype=torch.int32, stride=(1,), aligned=True)
    x = f.q._replace(shape=(tokens, heads, dq - rope))
    given = {n: x for n, x in vars(f).items() if n not in ("q", "op")}
    given |= {"q_nope": q_nope, "q_pe": rows(rope), "seq_lens": lens, "out": latents, "lse": None, "out_scale": 1.0}
    return Parts(
        SimpleNamespace(x=x, weight=f.w_uk, weight_scale=f.w_uk_scale, out=q_nope, **where),
        SimpleNamespace(**given, out_scale_t=None, precision="exact"),
        SimpleNamespace(x=latents, weight=f.w_uv, weight_scale=f.w_uv_scale, out=f.out, **where),
    )


def why_not(f: SimpleNamespace) -> str | None:
    return mla_decode.why_not(parts(f).decode)


def configure(f: SimpleNamespace, decode: ModuleType = mla_decode) -> Config:
    p = parts(f)
    config, places = decode.configure(p.decode), {}
    end = 4 * config.scratch
    for name, fact in (
        ("Q_NOPE", p.decode.q_nope), ("Q_PE", p.decode.q_pe), ("SEQ_LENS", p.decode.seq_lens), ("LATENTS", p.decode.out)
    ):  # fmt: skip
        end = -(-end // _ALIGNED) * _ALIGNED
        places[name] = Place(end, fact.shape, fact.dtype)
        end += prod(fact.shape) * fact.dtype.itemsize
    first, last = (mla_project.configure(x) for x in (p.first, p.last))
    return Config(first, config, last, places, -(-end // 4), [])


def run(
    call: Any, config: Config, decode: ModuleType = mla_decode, steps: Callable[..., list[Step]] | None = None
) -> None:
    """decode, steps: another backend's `mla_decode`, and its launches of the branch"""
    if call.q.shape[0] == 0:
        return
    if call.cache_lens.shape[0] == 0:
        call.out.zero_()
        return
    kept = config.scratch <= _MOST_KEPT
    memory = launch.scratch(config.scratch, call.q) if kept else call.q.new_empty(config.scratch, dtype=torch.float32)
    given = SimpleNamespace(**call._asdict(), **_views(memory, config), lse=None, out_scale_t=None)
    if not config.steps:
        # All at once: another thread may be here too.
        config.steps[:] = (steps or launches)(call, given, config, decode)
    for step in config.steps:
        described = decode._caches(given, config.decode) if step.described else ()
        step.template(*step.fields(given, memory), descriptors=described)


def bind(config: Config, at: dict[str, int]) -> Bound | None:
    if not config.steps or config.scratch > _MOST_KEPT:
        return None
    places = {PART: 0} | {name: place.offset for name, place in config.places.items()}
    return bound(config.steps, at, config.scratch, places)


def launches(call: Any, given: SimpleNamespace, config: Config, decode: ModuleType) -> list[Step]:
    """The launches, in order."""
    last = SimpleNamespace(x=given.LATENTS, weight=call.w_uv, weight_scale=call.w_uv_scale, out=call.out)
    return [
        Step(enter.prepared(call, config.first), enter.FIELDS),
        *[step._replace(fields=inner(step.fields)) for step in decode.steps(config.decode)],
        Step(mla_project._prepared(last, config.last), LAST),
    ]


def inner(fields: Fields) -> Fields:
    """Decode's tensors by the branch's names."""
    return Fields(" ".join(_INNER.get(n, n) for n in fields.names))


def _views(memory: torch.Tensor, config: Config) -> dict[str, torch.Tensor]:
    as_bytes = memory.view(torch.uint8)
    return {
        name: as_bytes[p.offset : p.offset + prod(p.shape) * p.dtype.itemsize].view(p.dtype).view(p.shape)
        for name, p in config.places.items()
    }
