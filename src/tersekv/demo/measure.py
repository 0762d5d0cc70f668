"""What a cache format costs and what it keeps: size, perplexity, distance to the 16-bit cache, speed, a sample."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedError
from ..formats import KV_FORMATS
from ..recipe import Recipe, recipe
from . import text
from .attend import Scales
from .calibrate import Calibration, Tick, score, windows
from .needle import Needles
from .search import REFERENCE
from .subject import Runner, Subject

_ROWS = 256  # rows of logits that are compared at once: in fp64 those of a large vocabulary take much memory


@dataclass(frozen=True)
class Settings:
    """How to measure; the same for every format, so that the cache alone differs."""

    page_size: int = 16
    chunk: int = 256  # query rows of a request in one step of the scoring
    batch: int = 4  # requests that share the pages
    generate: int = 48
    prompt: int = 160
    calibrate: bool = False
    needles: int = 0  # keys of each K/V head to look for; of another part of the text


@dataclass(frozen=True)
class Measured:
    """One format on one model. Numbers are None where `unsupported` says why."""

    format: str
    bytes_per_token: int | None = None  # all layers, stored scales included
    times_smaller: float | None = None  # than the 16-bit cache
    perplexity: float | None = None  # per byte or token
    kl: float | None = None  # nats per byte or token, of the distribution from the reference's
    top1: float | None = None  # share of places where both find the same one the likeliest
    tokens_per_s: float | None = None  # of the generation, one request
    sample: str | None = None
    same: int | None = None  # leading tokens of the sample that equal the reference's
    needles: int | None = None  # keys that are found among all others, of those that the model's result counts
    unsupported: str | None = None


@dataclass(frozen=True)
class ModelResult:
    model: str
    bytes_scored: int
    context: int
    prompt: str
    formats: list[Measured]
    title: str | None = None
    unit: str = "byte"
    needles: int | None = None  # keys that were looked for


@dataclass(frozen=True)
class Run:
    """What one format gave, before it is compared."""

    logits: Tensor  # [N, vocab] fp32 on the host
    sample: Tensor  # [generate]
    tokens_per_s: float
    bytes_per_token: int


def formats_of(subject: Subject, wanted: Sequence[str] | None = None) -> list[str]:
    """The formats of a model's cache among the wanted ones (None: all), the reference first."""
    own = [f for f in subject.formats if f != REFERENCE and (wanted is None or f in wanted)]
    others = [f for f in wanted or () if f not in subject.formats and _held(subject, recipe(f))]
    return [REFERENCE, *own, *others] if own or others or wanted is None or REFERENCE in wanted else []


def _held(subject: Subject, r: Recipe) -> bool:
    """Whether the model's caches can be made so: of its own formats, and anything but one format only of K and V."""
    return {*r.formats, *(r.ends or ())} <= {*subject.formats} and (r.plain or {*subject.formats} <= {*KV_FORMATS})


def measure(
    subject: Subject, tokens: Tensor, settings: Settings, formats: Sequence[str] | None = None,
    tick: Tick | None = None, begun: list[ModelResult] | None = None, other: Tensor | Calibration | None = None,
) -> ModelResult:  # fmt: skip
    """Run a model on tokens [N >= 2] of its device through the paged cache, once for each format.

    other:  another part of the text, to calibrate on, or what came of it; raises ValueError where it is wanted and None
    begun:  gets the result before the first format is run: what is measured is kept if the run is cut short
    """
    tick = tick or (lambda what, work: None)
    # A model with learned positions can take no token past the last of them.
    generate = min(settings.generate, subject.positions // 2)
    settings = replace(settings, generate=generate, prompt=min(settings.prompt, subject.positions - generate))
    prompt = subject.prompt(tokens, settings.prompt)
    calibration = other
    if not isinstance(calibration, Calibration):
        calibration = Calibration(subject, other, settings.batch, settings.chunk, tick)  # type: ignore[arg-type]
    reference, targets = None, tokens[1:].cpu()
    context = min(subject.context, len(targets))
    result = ModelResult(
        subject.name, len(targets), context, subject.decode(prompt), [], subject.title, subject.unit
    )  # fmt: skip
    needles = None
    if settings.needles and other is not None and {*subject.formats} <= {*KV_FORMATS}:
        needles = Needles(calibration, settings.needles, subject.dtype)
        result = replace(result, needles=needles.number)
    if begun is not None:
        begun.append(result)
    for format in formats_of(subject, formats):
        r, scales = recipe(format), None
        try:
            if r.fitted or (settings.calibrate and format != REFERENCE):
                scales = calibration.scales(r)
            options = calibration.options(r)
            run = run_format(subject, format, tokens, prompt, settings, scales, tick, options)
            found = None if needles is None else needles.found(replace(r, fitted=scales is not None))
        except UnsupportedError as e:
            result.formats.append(Measured(format, unsupported=str(e)))
            if reference is None:
                raise
            continue
        reference = reference or run
        result.formats.append(replace(compare(format, run, reference, targets, subject), needles=found))
    return result


@torch.inference_mode()
def run_format(
    subject: Subject, format: str, tokens: Tensor, prompt: Tensor, settings: Settings, scales: Scales | None,
    tick: Tick, options: Mapping[str, Any] | None = None,
) -> Run:  # fmt: skip
    pieces = windows(tokens, subject.context)
    longest = max(len(pieces[0]), len(prompt) + settings.generate)
    more = () if options is None else (options,)
    paged = subject.runner(recipe(format).formats[0], settings.batch, longest, settings.page_size, scales, *more)
    label = f"{subject.name} {format}"
    logits: list[Tensor] = []
    for i in range(0, len(pieces), settings.batch):
        some = dict(enumerate(pieces[i : i + settings.batch]))
        for step in score(paged, {r: piece[:-1] for r, piece in some.items()}, settings.chunk, logits):
            tick(label, step)
    sample, rate = generate(paged, prompt, settings.generate)
    tick(label, settings.generate)
    return Run(torch.cat(logits), sample, rate, paged.bytes_per_token)


def generate(paged: Runner, prompt: Tensor, num_tokens: int) -> tuple[Tensor, float]:
    """Greedy continuation [num_tokens], and tokens a second of its median decode step (NaN for fewer than two tokens).

    The median passes over the first step, which may compile, and over what else the machine does.
    """
    times: list[float] = []

    def step(new: Tensor) -> Tensor:
        logits = paged.step({"sample": new})
        if paged.device.type == "cuda":
            torch.cuda.synchronize(paged.device)
        times.append(time.perf_counter())
        return logits

    out = text.continued(prompt, num_tokens, step)
    paged.free("sample")
    steps = [b - a for a, b in pairwise(times)]
    return out.cpu(), 1 / median(steps) if steps else math.nan


def compare(format: str, run: Run, reference: Run, targets: Tensor, subject: Subject) -> Measured:
    """Judge a run against the reference's. In fp64: a 16-bit cache differs from another by 1e-6 nats."""
    nats = kl = top1 = 0.0
    for begin in range(0, len(targets), _ROWS):
        log_p, log_q = (x.logits[begin : begin + _ROWS].double().log_softmax(-1) for x in (reference, run))
        nats += F.nll_loss(log_q, targets[begin : begin + _ROWS], reduction="sum").item()
        kl += F.kl_div(log_q, log_p, reduction="sum", log_target=True).item()
        top1 += (log_p.argmax(-1) == log_q.argmax(-1)).double().sum().item()
    same = (run.sample == reference.sample).long().cumprod(0).sum()
    return Measured(
        format,
        run.bytes_per_token,
        reference.bytes_per_token / run.bytes_per_token,
        math.exp(nats / len(targets)),
        max(0.0, kl / len(targets)),
        top1 / len(targets),
        run.tokens_per_s,
        subject.decode(run.sample),
        int(same),
    )
