"""Writes the messages that docs/troubleshooting.md quotes: each is provoked here, and taken as the library says it.

    python scripts/troubleshooting.py            check: exit code 1 if the page is out of date
    python scripts/troubleshooting.py --write    bring the page up to date

A comment in the page names the messages of the block after it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import tersekv
from tersekv.compat import vllm
from tersekv.dispatch import plan
from tersekv.ops.context_parallel import ContextParallel, shard_slot_mapping
from tersekv.testing.case import Case
from tersekv.testing.make import make

sys.path.insert(0, str(Path(__file__).parent))
from pages import ROOT, main

PAGE = ROOT / "docs" / "troubleshooting.md"
BLOCK = re.compile(r"<!-- says: (.*?) -->\n```text\n(.*?)\n```", re.DOTALL)
BF16 = torch.bfloat16
INT = torch.int32


def layer(name="fp8_e4m3", heads=8, dim=128, pages=8, **options):
    return tersekv.PagedKVCache.allocate(1, pages, 16, heads, dim, format=name, **options)[0]


def rows(heads=8, dim=128, tokens=5, dtype=BF16):
    return torch.zeros(tokens, heads, dim, dtype=dtype)


def slots(*values):
    return torch.tensor(values or range(5))


def append(k=None, v=None, cache=None, at=None):
    k = rows() if k is None else k
    cache = layer() if cache is None else cache
    tersekv.append(k, k if v is None else v, cache, slots() if at is None else at)


def decode(q=None, cache=None, table=None, lens=None, **options):
    q = torch.zeros(2, 32, 128, dtype=BF16) if q is None else q
    table = torch.zeros(2, 4, dtype=INT) if table is None else table
    lens = torch.ones(2, dtype=INT) if lens is None else lens
    return tersekv.decode(q, layer() if cache is None else cache, table, lens, **options)


def rope_append(table, positions=None):
    tersekv.rope_append(None, rows(), rows(), layer(), slots(), table, slots() if positions is None else positions)


def latent(name="fp8_e4m3"):
    return tersekv.PagedLatentCache.allocate(1, 4, 16, format=name)[0]


def mla_decode(q):
    tersekv.mla_decode(q, latent(), torch.zeros(1, 4, dtype=INT), torch.ones(1, dtype=INT), softmax_scale=0.07)


def mla_prefill(name, proj=torch.float8_e4m3fn, **options):
    q, one = torch.zeros(3, 2, 192, dtype=BF16), torch.tensor([0, 3], dtype=INT)
    tersekv.mla_prefill(
        q, latent(name), torch.zeros(1, 4, dtype=INT), torch.zeros(1, dtype=INT), one, torch.zeros(64, 64),
        torch.ones(512), torch.zeros(512, 512).to(proj), tersekv.mla_prefill_plan([3], [3]), softmax_scale=0.07,
        **options,
    )  # fmt: skip


def pool(tokens=40):
    p = tersekv.PagePool(num_pages=4, page_size=16)
    p.add("a", tokens)
    return p


def on_sm_75():
    plan.plan("decode", make(Case("decode", "fp8_e4m3", "plain", heads=8, dim=128)), arch=75)


def two_ranks():
    cp = ContextParallel()
    cp.world = 2
    return cp


def failing(why: Exception, kernel: str | None = None, backend: str = "gluon") -> Callable:
    """A decode on a device whose kernel meets this error; which it does here is of no matter to the message."""

    def provoke():
        def run(call, config):
            raise why

        if kernel is not None:
            why.kernel = kernel
        real, plan.plan = plan.plan, lambda *call, **options: plan.Plan(backend, run, None, None)
        try:
            decode(
                torch.zeros(2, 32, 128, dtype=BF16, device="meta"), layer(device="meta"),
                *(torch.zeros(*shape, dtype=INT, device="meta") for shape in ((2, 4), (2,))),
            )  # fmt: skip
        finally:
            plan.plan = real

    return provoke


PLAIN: dict[str, Callable] = {
    "heads": lambda: append(k=rows(heads=4)),
    "head_dim": lambda: decode(q=torch.zeros(2, 32, 64, dtype=BF16)),
    "cache dtype": lambda: append(cache=tersekv.PagedKVLayer(*torch.zeros(2, 8, 16, 8, 128), "fp8_e4m3")),
    "k and v": lambda: append(v=rows(dtype=torch.float16)),
    "q dtype": lambda: append(k=rows(dtype=torch.float64)),
    "slots short": lambda: append(at=slots(0, 1, 2)),
    "slots float": lambda: append(at=torch.zeros(5)),
    "strides": lambda: append(k=torch.zeros(5, 128, 8, dtype=BF16).transpose(1, 2)),
    "device": lambda: append(at=torch.zeros(5, dtype=INT, device="meta")),
    "group": lambda: decode(q=torch.zeros(2, 30, 128, dtype=BF16)),
    "drafts": lambda: decode(q=torch.zeros(3, 32, 128, dtype=BF16)),
    "2-D q": lambda: decode(q=torch.zeros(2, 4096, dtype=BF16)),
    "window": lambda: decode(window=0),
    "mask dtype": lambda: decode(q=torch.zeros(8, 32, 128, dtype=BF16), mask=torch.ones(8, 4, dtype=torch.bool)),
    "sinks": lambda: decode(sinks=torch.zeros(32, dtype=BF16)),
    "format": lambda: layer("fp8"),
    "latent format": lambda: latent("int8_per_token_head"),
    "step": lambda: layer("nvfp4", dim=72),
    "layout": lambda: layer(layout="BHND"),
    "not a pair": lambda: append(cache=torch.zeros(8, 16, 8, 128, dtype=BF16)),
    "no scales": lambda: append(cache=tersekv.PagedKVLayer.of((layer().k, layer().v), format="fp8_per_token_head")),
    "scale of none": lambda: append(cache=layer("int8_per_token_head", k_scale=0.5)),
    "scale zero": lambda: append(cache=layer(k_scale=0.0)),
    "scale shape": lambda: append(cache=layer(k_scale=torch.ones(8, 1))),
    "cos dtype": lambda: rope_append(torch.zeros(64, 128, dtype=BF16)),
    "unabsorbed": lambda: mla_decode(torch.zeros(1, 16, 192, dtype=BF16)),
    "raw rows": lambda: mla_prefill("fp8_e4m3"),
    "proj scale": lambda: mla_prefill("bf16"),
    "out of pages": lambda: pool().extend("a", 40),
    "cp mask": lambda: two_ranks().decode(rows(32, tokens=2), layer(), None, None, mask=torch.zeros(1)),
    "cp page": lambda: shard_slot_mapping(slots(), 0, 2, page_size=16, interleave=6),
    "named": lambda: decode(backend="triton"),
    "no compilation": failing(RuntimeError("PassManager::run failed"), "decode_small_m_or_shared_tiles_kernel"),
    "no compiler": failing(
        RuntimeError(
            "Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl."
        ),
        "stream_k_decode_kernel", "triton",
    ),
    "lost device": failing(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), "a_kernel"),
    "sm_75": on_sm_75,
    "vllm dtype": lambda: vllm.reshape_and_cache_flash(
        rows(), rows(), layer().k, layer().v, slots(), "int4_per_token_head", 1.0, 1.0
    ),
}  # fmt: skip
SHORT = ("no compiler", "lost device")  # quoted without the call and the versions
CHECKED: dict[str, Callable] = {
    "slot": lambda: append(at=slots(0, 1, 2, 3, 128)),
    "page": lambda: decode(table=torch.tensor([[0, 1], [8, 0]]), lens=torch.tensor([20, 3])),
    "length": lambda: decode(table=torch.tensor([[0, 1], [2, 0]]), lens=torch.tensor([40, 3])),
    "position": lambda: rope_append(torch.zeros(4, 128), positions=slots(0, 1, 2, 3, 4)),
    "bound": lambda: decode(torch.zeros(4, 32, 128, dtype=BF16), cu_seqlens_q=torch.tensor([0, 1, 4]), max_q_len=2),
}


def message(provoke: Callable) -> str:
    try:
        provoke()
    except (ValueError, tersekv.UnsupportedError, tersekv.KernelError, tersekv.OutOfPagesError) as e:
        text = f"{type(e).__name__}: {e}".replace("meta", "cuda:0")
        text = re.sub(r"^  with: .*$", "  with: Triton 3.6.0, torch 2.13.0, Python 3.12.3", text, flags=re.MULTILINE)
    else:
        raise AssertionError("nothing was raised")
    return text


def messages() -> dict[str, str]:
    """Name → message. The environment is as the caller left it afterwards."""
    before = {name: os.environ.pop(name, None) for name in ("TERSEKV_BACKEND", "TERSEKV_CHECKED")}
    try:
        found = {name: message(provoke) for name, provoke in PLAIN.items()}
        found |= {name: re.sub(r"^  (call|with): .*\n", "", found[name], flags=re.MULTILINE) for name in SHORT}
        os.environ["TERSEKV_CHECKED"] = "1"
        return found | {name: message(provoke) for name, provoke in CHECKED.items()}
    finally:
        os.environ.pop("TERSEKV_CHECKED", None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


def renewed(text: str, said: dict[str, str]) -> str:
    """The page with every quoted message as it is said now. Raises KeyError for a name that nothing provokes."""

    def block(match: re.Match) -> str:
        lines = "\n".join(said[name] for name in match[1].split(", "))
        return f"<!-- says: {match[1]} -->\n```text\n{lines}\n```"

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    sys.exit(main("The messages of docs/troubleshooting.md.", lambda: {PAGE: renewed(PAGE.read_text(), messages())}))
