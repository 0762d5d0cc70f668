"""Decode in shapes off the beaten track, and the plain case that reads as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...cache import PagedKVCache
from ...formats import kv_bytes_per_token, kv_format
from ...ops.decode import decode
from ..compare import limit_of
from . import data
from .cases import HEAD_DIM, KV_HEADS, Case
from .decode import PEER_LIMIT


@dataclass(frozen=True, slots=True)
class Shape(Case):
    """A decode. `tokens` counts the drafts."""

    name: str = "plain"
    kv_heads: int = KV_HEADS
    head_dim: int = HEAD_DIM
    head_dim_v: int = 0  # 0: head_dim
    layout: str = "NHD"
    drafts: int = 1
    tree: bool = False  # the drafts are a tree, by a mask; else causal
    window: int = 0
    sinks: bool = False
    longest: int = 0  # tokens of one request among the others; 0: it is as these

    @property
    def verb(self) -> str:
        return "decode"

    @property
    def sizes(self) -> tuple[str, ...]:
        dims = f"D {self.head_dim}" + f"/{self.head_dim_v}" * bool(self.head_dim_v)
        return f"H {self.heads}/{self.kv_heads}", dims, f"page {self.page}"

    @property
    def is_causal(self) -> bool:
        """Whether every row sees all that came before it, and nothing else: what other libraries are asked for."""
        return self.drafts == 1 and not (self.tree or self.window or self.sinks) and self.layout == "NHD"

    @property
    def bytes_per_token(self) -> int:
        return kv_bytes_per_token(self.format, self.kv_heads, self.head_dim, self.head_dim_v or None)

    @property
    def keys(self) -> int:
        """Keys that some row of a request sees."""
        return min(self.tokens, self.window + self.drafts - 1) if self.window else self.tokens

    @property
    def all_keys(self) -> int:
        """Of all requests."""
        return int(lengths(self).sum()) if self.uneven or self.longest else self.requests * self.keys

    @property
    def plain(self) -> Shape:
        """The plain case with as many bytes, in the requests of the ordinary cell and in pages of 64."""
        requests = 64 if self.all_keys >= 1 << 16 else 4
        total = self.all_keys * self.bytes_per_token
        tokens = max(1, round(total / requests / kv_bytes_per_token(self.format, KV_HEADS, HEAD_DIM)))
        return Shape("shape", self.format, requests, tokens)


def shapes(format: str, device: str) -> Iterator[Shape]:
    """The shapes of a format; small ones on a CPU."""
    b, n, long, many = (4, 512, (1, 4096), (64, 32)) if device == "cpu" else (64, 8192, (1, 1 << 20), (1024, 512))
    base = Shape("shape", format, b, n)
    for d in (64, 256):
        yield replace(base, name=f"D {d}", head_dim=d)
    for group in (1, 5, 8, 16):
        yield replace(base, name=f"group {group}", heads=group * KV_HEADS)
    yield replace(base, name="HND", layout="HND")
    yield replace(base, name="8 drafts", drafts=8)
    yield replace(base, name="8 drafts, tree", drafts=8, tree=True)
    for group in (8, 16):
        yield replace(base, name=f"8 drafts, G {group}", drafts=8, tree=True, heads=group * KV_HEADS)
    yield replace(base, name=f"window {n // 8}", window=n // 8)
    yield replace(base, name="sinks", sinks=True)
    for requests, tokens in (long, many):
        yield replace(base, name=f"{requests} x {tokens}", requests=requests, tokens=tokens)


def drafts(format: str, device: str) -> Iterator[Shape]:
    """2 to 32 rows of a request, in chains and in trees, with 4 query heads a K/V head."""
    cells = ((4, 512),) if device == "cpu" else ((24, 6000), (64, 8192))
    for b, n in cells:
        for rows in (2, 4, 8, 16, 32):
            for tree in (False, True):
                name = f"{rows} drafts" + ", tree" * tree
                yield Shape("shape", format, b, n, name=name, drafts=rows, tree=tree)


def uneven(format: str, device: str) -> Iterator[Shape]:
    """One long request among short ones, and very many short ones."""
    long, shorts = (2000, ((4, 100),)) if device == "cpu" else (100_000, ((16, 8192), (64, 2000), (256, 500)))
    for b, n in shorts:
        yield Shape("shape", format, b, n, name=f"one of {long}", longest=long)
    for b, n in ((32, 16),) if device == "cpu" else ((1000, 100), (1000, 300), (2000, 100)):
        yield Shape("shape", format, b, n, name=f"{b} short")
        yield Shape("shape", format, b, n, name=f"{b} short, uneven", uneven=True)
    if device != "cpu":
        yield Shape("shape", format, 48, 1500, name="up to 3000", uneven=True)


def sizes(format: str, device: str) -> Iterator[Shape]:
    """Head sizes and pages that few models have, and stored scales behind their rows."""
    b, n = (4, 512) if device == "cpu" else (64, 8192)
    base, f = Shape("shape", format, b, n), kv_format(format)
    dims = ((80, 0), (96, 0), (112, 0), (192, 0), (192, 128))
    for d, dv in dims:
        yield replace(base, name=f"D {d}" + f"/{dv}" * bool(dv), head_dim=d, head_dim_v=dv)
    yield replace(base, name="D 512", requests=b, tokens=n // 2, heads=16, kv_heads=4, head_dim=512)
    for page in (8, 16, 20, 24, 48):
        yield replace(base, name=f"page {page}", page=page)
    yield replace(base, name="D 96, page 16", head_dim=96, page=16)
    if f.scale_dtype is not None:
        for scales in ("inline", "tail"):
            yield replace(base, name=f"scales {scales}", scales=scales)


EIGHT_BITS = ("fp8_e4m3", "fp8_per_token_head", "int8_per_token_head")
# Name → (the shapes of a format, the formats if none are named).
PRESETS: dict[str, tuple[Callable[[str, str], Iterator[Shape]], tuple[str, ...]]] = {
    "shapes": (shapes, ("fp8_e4m3",)),
    "drafts": (drafts, EIGHT_BITS),
    "uneven": (uneven, EIGHT_BITS),
    "sizes": (sizes, (*EIGHT_BITS, "nvfp4", "int4_per_token_head", "bf16")),
}


def lengths(c: Shape) -> Tensor:
    """[B] tokens of each request, on the CPU."""
    lens = data.lengths(c)
    if c.longest:
        lens[len(lens) // 2] = c.longest
    return lens


class ShapeDecode:
    """The problem of a shape, judged by dense fp64 attention of its first, longest and last request."""

    peer_limit = PEER_LIMIT

    def __init__(self, case: Shape, device: torch.device, backend: str | None = None) -> None:
        self.case, c = case, case
        self.host_lens = lengths(c)
        used, keys, dv = -(-self.host_lens // c.page), c.all_keys, c.head_dim_v or c.head_dim
        copies = data.rotations(device, keys * c.bytes_per_token)
        self.tables = data.page_tables(used, copies, device)
        self.layer = layer = PagedKVCache.allocate(
            1, copies * int(used.sum()), c.page, c.kv_heads, c.head_dim, head_dim_v=dv, format=c.format,
            layout=c.layout, scales=c.scales, device=device,
        )[0]  # fmt: skip
        for codes, scales in ((layer.k, layer.k_scale_cache), (layer.v, layer.v_scale_cache)):
            data.fill(codes, scales, kv_format(c.format))
        self.q = torch.randn(c.requests * c.drafts, c.heads, c.head_dim, device=device).bfloat16()
        self.out = self.q.new_empty(*self.q.shape[:2], dv)
        self.sinks = torch.randn(c.heads, device=device) if c.sinks else None
        self.nbytes = keys * c.bytes_per_token
        self.flops = 2 * keys * c.drafts * c.heads * (c.head_dim + dv)
        self.limit, self.scale = limit_of("out", c.precision), c.head_dim**-0.5
        self.lens = lens = self.host_lens.to(device)
        mask = _tree_mask(c, device)

        def call(table: Tensor) -> Any:
            return lambda: decode(
                self.q, layer, table, lens, out=self.out, mask=mask, window=c.window or None, sinks=self.sinks,
                backend=backend,
            )  # fmt: skip

        self.calls = [call(table) for table in self.tables]

    def poison(self) -> None:
        data.poison(self.out)

    def error(self, result: Any) -> float:
        """Relative norm of the worst of them; `result`: the output, if it is not in `out`."""
        out = result.view_as(self.out) if isinstance(result, Tensor) else self.out
        rows, last = out.unflatten(0, (self.case.requests, -1)), self.case.requests - 1
        return max(data.relative(rows[b], self.expected(b)) for b in {0, int(self.host_lens.argmax()), last})

    def kv(self, b: int) -> tuple[Tensor, Tensor]:
        """fp64 keys and values [n, H, D] of request b."""
        a, f = self.layer, kv_format(self.case.format)
        where = data.places(self.tables[0, b], int(self.host_lens[b]), self.case.page)
        return data.values(a.k, a.k_scale_cache, f, where), data.values(a.v, a.v_scale_cache, f, where)

    def expected(self, b: int) -> Tensor:
        """[drafts, Hq, D] fp64 of request b."""
        c, (k, v) = self.case, self.kv(b)
        q = self.q.unflatten(0, (c.requests, -1))[b].double().unflatten(1, (c.kv_heads, -1))
        scores = torch.einsum("thgd,nhd->thgn", q, k) * self.scale
        scores.masked_fill_(~_seen(c, len(k), q.device)[:, None, None], -torch.inf)
        if self.sinks is not None:
            sink = self.sinks.double().view(1, c.kv_heads, -1, 1).expand(*scores.shape[:3], 1)
            p = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            p = scores.softmax(-1)
        return torch.einsum("thgn,nhd->thgd", p, v).flatten(1, 2)


def _ancestors(c: Shape) -> list[set[int]]:
    """Drafts that each draft sees, itself included."""
    if not c.tree:
        return [set(range(i + 1)) for i in range(c.drafts)]
    seen = [{0}]
    for i in range(1, c.drafts):
        seen.append({i} | seen[(i - 1) // 2])
    return seen


def _tree_mask(c: Shape, device: torch.device) -> Tensor | None:
    if not c.tree:
        return None
    bits = [sum(1 << j for j in seen) for seen in _ancestors(c)]
    return (
        torch.tensor([[x & 0xFFFF, x >> 16] for x in bits] * c.requests, dtype=torch.int32).to(torch.uint16).to(device)
    )


def _seen(c: Shape, tokens: int, device: torch.device) -> Tensor:
    """[drafts, tokens] bool."""
    prefix, key = tokens - c.drafts, torch.arange(tokens, device=device)
    rows = []
    for i, drafts in enumerate(_ancestors(c)):
        row = key < prefix
        row[[prefix + j for j in drafts]] = True
        rows.append(row & (key > prefix + i - c.window) if c.window else row)
    return torch.stack(rows)
