"""The cache that `tersekv eval` was asked for: which it is, the file that keeps it, and the lines to paste."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..demo.calibrate import Calibration
from ..demo.measure import ModelResult, formats_of
from ..demo.report import smallest
from ..demo.search import REFERENCE
from ..demo.subject import BuiltIn, Subject
from ..formats import ALL_FORMATS, BLOCK, KV_FORMATS, TENSOR
from ..recipe import Recipe, recipe


def unsaveable(args: argparse.Namespace, subjects: Sequence[Subject]) -> str | None:
    """Why --save has nothing to keep; None: it has, or was not given."""
    if getattr(args, "save", None) is None:
        return None
    if len(subjects) != 1:
        return f"--save: want one model, by --model, got {', '.join(s.name for s in subjects)}"
    if not {*subjects[0].formats} <= {*KV_FORMATS}:
        return f"--save: want a model that caches K and V, got {subjects[0].name}, which caches latents"
    if args.within is None and (args.search or len(formats_of(subjects[0], args.formats)) != 2):
        return "--save: want --within, or one cache in --formats, to know which to keep"
    return None


def chosen(args: argparse.Namespace, result: ModelResult) -> str | None:
    """The cache that the options name: the smallest within a distance, or the only one that was measured."""
    if getattr(args, "within", None) is not None:
        near = smallest(result, args.within)
        return None if near is None else near.format
    found = [m.format for m in result.formats if m.format != REFERENCE and m.kl is not None]
    return found[0] if len(found) == 1 and not getattr(args, "search", False) else None


def as_measured(args: argparse.Namespace, word: str) -> Recipe:
    """The recipe of a word, with the scales that --calibrate gave it."""
    r = recipe(word)
    takes = any(ALL_FORMATS[f].scale in (TENSOR, BLOCK) for f in (*r.formats, *(r.ends or ())))
    return replace(r, fitted=True) if args.calibrate and takes else r


def lines(
    args: argparse.Namespace, subject: Subject, word: str, calibration: Calibration | None, saved: bool
) -> Iterator[str]:
    """How a cache is made in Python."""
    r, latent = as_measured(args, word), not {*subject.formats} <= {*KV_FORMATS}
    told = f"format={word.replace('+fitted', '')!r}"
    if saved:
        path = str(args.save)
        if not isinstance(subject, BuiltIn):
            yield from _transformers(f"saved={path!r}")
        yield f"cache = tersekv.PagedKVCache.allocate_saved({path!r}, num_pages=64, page_size=16)"
    elif r.calibrated and not latent:
        yield f"# {word} has numbers of this text: run this again with --save FILE, which keeps them"
    else:
        if r.fitted and calibration is not None:
            told += f", kv_scale={[scale for (scale,) in calibration.scales(r)]}"
        if not isinstance(subject, BuiltIn):
            yield from _transformers(told)
        elif not latent:
            yield f"cache = tersekv.PagedKVCache.allocate({_sizes(subject)}, num_pages=64, page_size=16, {told})"


def _transformers(options: str) -> Iterator[str]:
    yield "from tersekv.integrations.transformers import TersekvCache"
    yield f"cache = TersekvCache(model.config, {options})"


def _sizes(subject: BuiltIn) -> str:
    config = subject.model.config
    return f"{subject.num_layers}, num_kv_heads={config.num_kv_heads}, head_dim={config.head_dim}"
