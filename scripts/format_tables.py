"""Writes the tables that say what a format costs in accuracy: measured here on made-up rows (a second on a CPU), and
taken from what `tersekv demo --json` stored in benchmarks/results/.

    python scripts/format_tables.py            check: exit code 1 if a page is out of date
    python scripts/format_tables.py --write    bring the pages up to date

A check allows 5% of difference: another PyTorch may add in another order.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

import tersekv
from tersekv.demo.measure import Measured, ModelResult
from tersekv.demo.report import agreement, frontier
from tersekv.formats import KV_FORMATS, LATENT_FORMATS
from tersekv.recipe import recipe
from tersekv.testing.codes import decode_row
from tersekv.testing.reference_rotation import back

sys.path.insert(0, str(Path(__file__).parent))
import pages
from pages import ROOT, table

RESULTS = ROOT / "benchmarks" / "results"
FILES = {
    "docs/index.md": ("demo",), "docs/formats.md": ("errors", "latent-errors", "demo-mla"),
    "docs/scales.md": ("scales",),
    "docs/choosing.md": ("search", "outliers", "outlier-pairs"),
}  # fmt: skip
HEADS, DIM, TOKENS, QUERIES, RANK, ROPE = 4, 128, 1024, 32, 512, 64
MIXED = (
    "int8_per_token_head/int4_per_token_head", "fp8_e4m3/int4_per_token_head", "int8_per_token_head+rotated",
    "int4_per_token_head+rotated", "nvfp4+rotated", "int8_per_token_head+channels", "int4_per_token_head+channels",
    "nvfp4+channels",
)  # fmt: skip
SOME = ("bf16", "fp8_e4m3", "fp8_per_token_head", "int8_per_token_head", "nvfp4", "int4_per_token_head")


def other(x: Tensor) -> Tensor:
    """Rows like these, but for their numbers."""
    size = x.square().mean((0, 1)).sqrt()
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(6)) * size


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def percent(x: float) -> str:
    return f"{100 * x:.2g}%"


def rows(seed: int, outliers: bool = False) -> Tensor:
    """Normal rows [T, H, D]; with outliers, 4 channels of every head are 20 times larger, as K's often are."""
    x = torch.randn(TOKENS, HEADS, DIM, generator=torch.Generator().manual_seed(seed))
    if outliers:
        x[..., ::32] *= 20
    return x


def kv_layer(word: str, k: Tensor, v: Tensor, scale: float = 1.0) -> tersekv.PagedKVLayer:
    """The rows in a cache of one layer; its channel scales are those of other rows of the same kind."""
    options = recipe(word).options(1, [tuple(tersekv.channel_scale(other(x)) for x in (k, v))])
    if not recipe(word).channels:
        options = {name: x for name, x in options.items() if "channel" not in name}
    layer = tersekv.PagedKVCache.allocate(1, TOKENS // 64, 64, HEADS, DIM, **options, k_scale=scale, v_scale=scale)[0]
    tersekv.append(k, v, layer, torch.arange(TOKENS), backend="torch")
    return layer


def read_back(layer: tersekv.PagedKVLayer) -> Tensor:
    """K as it is stored: code × scale."""
    stored = None if layer.k_scale_cache is None else layer.k_scale_cache.flatten(0, 1)
    codes = decode_row(layer.k.flatten(0, 1), stored, KV_FORMATS[layer.formats[0]], torch.tensor(layer.k_scale))
    return back(codes, layer.k_signs, layer.k_channel_scale)


def attend(layer: tersekv.PagedKVLayer, q: Tensor) -> Tensor:
    table_ = torch.arange(TOKENS // 64, dtype=torch.int32)[None].expand(QUERIES, -1)
    return _tensor(tersekv.decode(q, layer, table_, torch.full((QUERIES,), TOKENS), backend="torch"))


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = torch.einsum("qhd,thd->qht", q.double(), k.double()) * DIM**-0.5
    return torch.einsum("qht,thd->qhd", p.softmax(-1), v.double())


def _tensor(x: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    assert isinstance(x, Tensor)
    return x


@cache
def errors() -> str:
    """Error of rows and of attention, K/V caches."""
    out = []
    for word in (*KV_FORMATS, *MIXED):
        cells = [f"`{word}`"]
        for outliers in (False, True):
            k, v = rows(1, outliers), rows(2)
            small = torch.ones(DIM, dtype=torch.bool)
            small[::32] = not outliers
            layer = kv_layer(word, k, v)
            q = torch.randn(QUERIES, HEADS, DIM, generator=torch.Generator().manual_seed(3))
            q[..., ::32] /= 20 if outliers else 1  # scores of the same size
            attention = relative(attend(layer, q), dense(q, k, v))
            cells += [percent(relative(read_back(layer)[..., small], k[..., small])), percent(attention)]
        out.append(cells)
    return table(("format", "rows of K", "attention", "rows of K, outliers", "attention, outliers"), out)


@cache
def latent_errors() -> str:
    """The same for latent rows."""
    g = torch.Generator().manual_seed(4)
    kv_c, k_pe = torch.randn(TOKENS, RANK, generator=g), torch.randn(TOKENS, ROPE, generator=g)
    q = torch.randn(QUERIES, 16, RANK + ROPE, generator=g)
    p = torch.einsum("qhd,td->qht", q.double(), torch.cat([kv_c, k_pe], -1).double()) * 192**-0.5
    want = torch.einsum("qht,td->qhd", p.softmax(-1), kv_c.double())
    out = []
    for name, f in LATENT_FORMATS.items():
        layer = tersekv.PagedLatentCache.allocate(1, TOKENS // 64, 64, format=name)[0]
        tersekv.mla_append(kv_c, k_pe, layer, torch.arange(TOKENS), backend="torch")
        pages = torch.arange(TOKENS // 64, dtype=torch.int32)[None]
        full = torch.full((QUERIES,), TOKENS)
        got = tersekv.mla_decode(q, layer, pages.expand(QUERIES, -1), full, softmax_scale=192**-0.5, backend="torch")
        stored = None if layer.ckv_scale_cache is None else layer.ckv_scale_cache.flatten(0, 1)
        read = decode_row(layer.ckv.flatten(0, 1), stored, f, torch.tensor(1.0))
        out.append([f"`{name}`", percent(relative(read, kv_c)), percent(relative(_tensor(got), want))])
    return table(("format", "latent rows", "attention"), out)


@cache
def scales() -> str:
    """Error of normal rows over the scale."""
    x = rows(5)
    largest = float(x.abs().amax())
    out = []
    for scale in (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0):
        cells = [f"{scale:g}"]
        for name in ("fp8_e4m3", "fp8_e5m2", "nvfp4"):
            cells.append(percent(relative(read_back(kv_layer(name, x, x, scale)), x)))
        out.append(cells)
    head = ("scale", *(f"`{n}`" for n in ("fp8_e4m3", "fp8_e5m2", "nvfp4")))
    return f"Error of normal rows (largest value {largest:.1f}) over the scale:\n\n" + table(head, out)


def demo(model: str, names: Sequence[str], file: str = "demo_cpu.json") -> Iterator[list[str]]:
    models = {m["model"]: m["formats"] for m in json.loads((RESULTS / file).read_text())["models"]}
    for m in models[model]:
        if m["format"] in names:
            kl = "reference" if m["format"] == "bf16" else f"{m['kl']:.1e}"
            yield [m["format"], str(m["bytes_per_token"]), f"{m['times_smaller']:.2f}", f"{m['perplexity']:.4f}",
                   kl, agreement(m["top1"])]  # fmt: skip


def search() -> str:
    """Of the caches that a search tried, those without options and, in bold, those that no other beats."""
    (model,) = json.loads((RESULTS / "search_cpu.json").read_text())["models"]
    measured = [Measured(**m) for m in model["formats"]]
    found, best = [], frontier(ModelResult(model["model"], 0, 0, "", measured))
    for m in sorted(measured, key=lambda m: (m.bytes_per_token, m.kl)):
        kl = "reference" if m.format == "bf16" else f"{m.kl:.1e}"
        if m not in best and "+" in m.format:
            continue
        name = f"**{m.format}**" if m in best else m.format
        found.append([name, str(m.bytes_per_token), kl, f"{m.perplexity:.4f}", f"{m.needles}/{model['needles']}"])
    shown = f"{len(found)} of the {len(measured)} caches tried; each other variant is beaten by one of these.\n\n"
    return shown + table(("cache", "bytes/token", "KL, nats/byte", "perplexity", "needles found"), found)


def outliers() -> str:
    """K alone in a format, on the model as it is and with outliers."""
    plain, hurt, *_ = (m["kl"] for m in _outlier_models())
    ways = ("", "+rotated", "+channels", "+rotated+channels")
    found = []
    for f in dict.fromkeys(word.split("/")[0] for word in plain if "/" in word):
        asis = [f"{plain[f'{f}/bf16{way}']:.1e}" for way in ways[:3]]
        found.append([f"`{f}`", *asis, *(f"{hurt[f'{f}/bf16{way}']:.1e}" for way in ways)])
    each = ("plain", "rotated", "channel scales")
    return table(("K in", *each, *(f"outliers, {way}" for way in (*each, "both"))), found)


def outlier_pairs() -> str:
    """K in int4 over every choice of outliers, from the least KL to the largest."""
    _, *hurt = _outlier_models()
    ways = {"plain": "", "rotated": "+rotated", "with channel scales": "+channels"}
    said = []
    for name, way in ways.items():
        kls = sorted(m["kl"][f"int4_per_token_head/bf16{way}"] for m in hurt)
        said.append(f"{kls[0]:.1e} to {kls[-1]:.1e} {name}")
    return f"Over {len(hurt)} choices of outlier pairs, K in int4 costs {', '.join(said)}.\n"


def _outlier_models() -> list[dict]:
    return json.loads((RESULTS / "outliers_cpu.json").read_text())["models"]


DEMO = ("format", "bytes/token", "times smaller", "perplexity", "KL, nats/byte", "same top-1")
TABLES: dict[str, Callable[[], str]] = {
    "errors": errors,
    "latent-errors": latent_errors,
    "scales": scales,
    "demo": lambda: table(DEMO, demo("llama", SOME)),
    "demo-mla": lambda: table(DEMO, demo("deepseek", tuple(LATENT_FORMATS))),
    "search": search,
    "outliers": outliers,
    "outlier-pairs": outlier_pairs,
}


def renewed(text: str, names: Iterable[str]) -> str:
    """`text` with its tables written anew."""
    return pages.renewed(text, TABLES, names)


def alike(old: str, new: str, allowed: float = 0.05) -> bool:
    """The same words, and numbers that differ by little."""
    pattern = r"\d+(?:\.\d+)?(?:e-?\d+)?"
    a, b = ([float(x) for x in re.findall(pattern, text)] for text in (old, new))
    same = re.sub(pattern, "0", old) == re.sub(pattern, "0", new)
    return same and all(abs(x - y) <= allowed * max(abs(x), abs(y)) for x, y in zip(a, b, strict=True))


def wanted() -> dict[Path, str]:
    return {ROOT / name: renewed((ROOT / name).read_text(), names) for name, names in FILES.items()}


if __name__ == "__main__":
    sys.exit(pages.main("Tables of accuracy in docs/.", wanted, alike))
