"""The decode branch of MLA: one launch that rotates, norms, stores and projects queries, then decode's, then the last
projection. What lies between launches is kept scratch: the call is bound, checked and planned as one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from ...host.bind import Bound, Instead, Launches, Scratch, Template
from ...host.split_merge import see_nothing
from .. import mla_project
from ..mla_decode import entry as mla_decode
from . import enter

_MOST_KEPT = 64 << 20  # bytes of scratch that are kept for the next call; more, for some 256 tokens, is given back
# What decode's launches take of the branch.
_INNER = {
    "q_nope": "Q_NOPE", "q_pe": "Q_PE", "seq_lens": "SEQ_LENS", "out": "LATENTS", "lse": None, "out_scale_t": None
}  # fmt: skip


class Parts(NamedTuple):
    """Facts of the operations that the branch is made of."""

    first: SimpleNamespace  # mla_project
    decode: SimpleNamespace
    last: SimpleNamespace  # mla_project


class Config(NamedTuple):
    first: mla_project.Choice
    decode: Any  # of the backend's mla_decode
    launches: Launches | Instead


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
        SimpleNamespace(**given, out_scale_t=None, precision="exact", batch_invariant=False),
        SimpleNamespace(x=latents, weight=f.w_uv, weight_scale=f.w_uv_scale, out=f.out, **where),
    )


def why_not(f: SimpleNamespace) -> str | None:
    return mla_decode.why_not(parts(f).decode)


def configure(
    f: SimpleNamespace, decode: ModuleType = mla_decode, last: Callable[..., list[Template]] | None = None
) -> Config:
    """decode, last: another backend's `mla_decode`, and its launches of the branch behind the first two"""
    p = parts(f)
    first, config = mla_project.choose(p.first), decode.configure(p.decode)
    if f.q.shape[0] == 0 or f.cache_lens.shape[0] == 0:
        return Config(first, config, Instead(see_nothing) if f.q.shape[0] else Launches())
    split, *merge = (t.renamed(_INNER) for t in config.launches.templates)
    templates = [enter.prepared(f, first), split, *((last or merged_then_projected)(f, p, config, merge))]
    places = {
        name: (fact.shape, fact.dtype)
        for name, fact in (
            ("Q_NOPE", p.decode.q_nope), ("Q_PE", p.decode.q_pe), ("SEQ_LENS", p.decode.seq_lens),
            ("LATENTS", p.decode.out),
        )
    }  # fmt: skip
    scratch = Scratch(config.launches.scratch.numbers, places, _MOST_KEPT)
    return Config(first, config, Launches(*templates, scratch=scratch))


def merged_then_projected(f: SimpleNamespace, p: Parts, config: Any, merge: list[Template]) -> list[Template]:
    choice = mla_project.choose(p.last)
    return [*merge, mla_project.prepared(p.last, choice, "LATENTS", "w_uv", "w_uv_scale")]


def run(call: Any, config: Config) -> None:
    config.launches(call)


def bind(config: Config, at: dict[str, int]) -> Bound | None:
    return config.launches.bind(at)
