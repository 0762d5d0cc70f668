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
from tersekv.formats import KV_FORMATS, LATENT_FORMATS
from tersekv.testing.codes import decode_row

sys.path.insert(0, str(Path(__file__).parent))
import pages
from pages import ROOT, table

RESULTS = ROOT / "benchmarks" / "results"
FILES = {
    "docs/index.md": ("demo",), "docs/formats.md": ("errors", "latent-errors", "demo", "demo-mla"),
    "docs/scales.md": ("scales", "calibrated"), "README.md": ("demo",),
}  # fmt: skip
HEADS, DIM, TOKENS, QUERIES, RANK, ROPE = 4, 128, 1024, 32, 512, 64
SOME = ("bf16", "fp8_e4m3", "fp8_per_token_head", "int8_per_token_head", "nvfp4", "int4_per_token_head")


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


def kv_layer(name: str, k: Tensor, v: Tensor, scale: float = 1.0) -> tersekv.PagedKVLayer:
    layer = tersekv.PagedKVCache.allocate(1, TOKENS // 64, 64, HEADS, DIM, format=name, k_scale=scale, v_scale=scale)[0]
    tersekv.append(k, v, layer, torch.arange(TOKENS), backend="torch")
    return layer


def read_back(layer: tersekv.PagedKVLayer) -> Tensor:
    """K as it is stored: code × scale."""
    stored = None if layer.k_scale_cache is None else layer.k_scale_cache.flatten(0, 1)
    return decode_row(layer.k.flatten(0, 1), stored, KV_FORMATS[layer.format], torch.tensor(layer.k_scale))


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
    """Error of rows and of attention, K/V formats."""
    out = []
    for name, f in KV_FORMATS.items():
        cells = [f"`{name}`", f"{8 * f.row_bytes(DIM) / DIM:g}"]
        for outliers in (False, True):
            k, v = rows(1, outliers), rows(2)
            small = torch.ones(DIM, dtype=torch.bool)
            small[::32] = not outliers
            layer = kv_layer(name, k, v)
            q = torch.randn(QUERIES, HEADS, DIM, generator=torch.Generator().manual_seed(3))
            q[..., ::32] /= 20 if outliers else 1  # scores of the same size
            attention = relative(attend(layer, q), dense(q, k, v))
            cells += [percent(relative(read_back(layer)[..., small], k[..., small])), percent(attention)]
        out.append(cells)
    return table(("format", "bits a value", "rows", "attention", "rows, outliers", "attention, outliers"), out)


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
        bits = 8 * tersekv.latent_bytes_per_token(name) / (RANK + ROPE)
        out.append([f"`{name}`", f"{bits:.3g}", percent(relative(read, kv_c)), percent(relative(_tensor(got), want))])
    return table(("format", "bits a value", "latent rows", "attention"), out)


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
                   kl, f"{m['top1']:.1%}".replace("100.0%", "100%")]  # fmt: skip


DEMO = ("format", "bytes/token", "times smaller", "perplexity", "KL, nats/byte", "same top-1")
TABLES: dict[str, Callable[[], str]] = {
    "errors": errors,
    "latent-errors": latent_errors,
    "scales": scales,
    "demo": lambda: table(DEMO, demo("llama", SOME)),
    "demo-mla": lambda: table(DEMO, demo("deepseek", tuple(LATENT_FORMATS))),
    "calibrated": lambda: table(("model", "scales", *DEMO), [
        [model, how, *row]
        for model, names in (("Llama-style", ("fp8_e4m3", "fp8_e5m2", "nvfp4")), ("MLA", ("fp8_e4m3", "fp8_e5m2")))
        for how, file in (("1.0", "demo_cpu.json"), ("calibrated", "demo_cpu_calibrated.json"))
        for row in demo({"MLA": "deepseek"}.get(model, "llama"), names, file)
    ]),
}  # fmt: skip


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
    sys.exit(pages.main("Tables of accuracy in docs/ and README.md.", wanted, alike))
