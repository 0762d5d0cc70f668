"""Every public function and class shows an example before its arguments, and the example runs on a CPU."""

from __future__ import annotations

import doctest
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tersekv
from tersekv.compat import flashinfer

COMPAT = ("flashinfer", "vllm", "max", "flash_mla", "deep_gemm")
BF16 = torch.bfloat16
L, R, DN, DV = 512, 64, 128, 128  # latent rank, rotary and other dimensions of a latent head, its values


def public() -> Iterator[tuple[str, str, Any]]:
    """(module, name, thing) of every public function and class."""
    for module in ("tersekv", *(f"tersekv.compat.{name}" for name in COMPAT)):
        home = importlib.import_module(module)
        for name in home.__all__:
            if callable(getattr(home, name)):
                yield module, name, getattr(home, name)


every = pytest.mark.parametrize(
    ("module", "name", "thing"), [pytest.param(*entry, id=".".join(entry[:2])) for entry in public()]
)


@every
def test_a_docstring_opens_with_an_example(module, name, thing):
    assert opens_with_an_example(thing), f"{name}: the second paragraph of its docstring has to begin with >>>"


@every
def test_the_examples_run_and_show_what_they_print(module, name, thing, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    parts = {name: thing}
    if inspect.isclass(thing):
        parts |= {f"{name}.{key}": getattr(thing, key) for key in vars(thing) if not key.startswith("_")}
    for part, value in parts.items():
        doc = inspect.getdoc(value) or "" if callable(value) else ""
        report = failures(doc, part, names_for(module, name))
        assert not report, report


@pytest.mark.parametrize("after", ["", "\n    x:  a number\n", "\n    x:  a number\n\n    >>> f(1)\n"])
def test_a_missing_or_late_example_is_found(after):
    def f(x):
        return x

    f.__doc__ = f"Return it.\n{after}"
    assert not opens_with_an_example(f)
    f.__doc__ = f"Return it.\n\n    >>> f(1)\n    1\n{after}"
    assert opens_with_an_example(f)


@pytest.mark.parametrize("example", [">>> 1 + 1\n3", ">>> unknown"])
def test_a_wrong_example_is_found(example):
    assert failures(example, "wrong", {})


def opens_with_an_example(thing: Any) -> bool:
    paragraphs = (inspect.getdoc(thing) or "").split("\n\n")
    return len(paragraphs) > 1 and paragraphs[1].lstrip().startswith(">>> ")


def failures(doc: str, name: str, names: dict[str, Any]) -> str:
    """What is wrong with a docstring's examples, as doctest reports it."""
    test = doctest.DocTestParser().get_doctest(doc, names, name, None, 0)
    report: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    return "".join(report)


def names_for(module: str, name: str) -> dict[str, Any]:
    """The names that an example may use: two requests of 60 and 40 tokens, 8 query heads over 2 heads of 64, pages of
    16 slots; 16 latent heads."""
    torch.manual_seed(0)
    names: dict[str, Any] = {"torch": torch, "tersekv": tersekv}
    home = importlib.import_module(module)
    pool = tersekv.PagePool(num_pages=16, page_size=16)
    pool.add("a", 60)
    pool.add("b", 40)
    both, new = ["a", "b"], [60, 40]
    names |= {
        "pool": pool, "slot_mapping": pool.slot_mapping(both, new), "positions": pool.positions(both, new),
        "page_table": pool.page_table(both), "seq_lens": pool.seq_lens(both),
        "cu_seqlens_q": torch.tensor([0, 60, 100]), "cos_sin_cache": cos_sin(128, 64),
    }  # fmt: skip
    if module == "tersekv":
        names |= index_names(names["slot_mapping"])
        return names | kv_names(names["slot_mapping"]) | latent_names() | weights(fp8=False)
    names |= {key: getattr(home, key) for key in home.__all__}
    if module == "tersekv.compat.flashinfer":
        return names | flashinfer_names(pool, both)
    if module == "tersekv.compat.vllm":
        key, value = torch.randn(2, 100, 2, 64, dtype=BF16)
        return names | latent_names() | {"key": key, "value": value, "k_scale": 0.01, "v_scale": 0.01}
    if module != "tersekv.compat.max":
        return names
    return names | max_names(home, names["page_table"]) | weights(fp8=name.endswith("fp8"))


def cos_sin(positions: int, r: int) -> torch.Tensor:
    angle = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(0, r, 2) / r)
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def kv_names(slots: torch.Tensor) -> dict[str, Any]:
    k, v = torch.randn(2, 100, 2, 64)
    cache = tersekv.PagedKVCache.allocate(2, 16, 16, 2, 64, format="fp8_e4m3", k_scale=0.01, v_scale=0.01)
    for layer in cache.layers:
        tersekv.append(k, v, layer, slots)
    return {"k": k, "v": v, "q": torch.randn(2, 8, 64), "cache": cache}


def latent_names() -> dict[str, Any]:
    cache = tersekv.PagedLatentCache.allocate(1, 16, 16, format="bf16")
    kv_c, k_pe = torch.randn(100, L, dtype=BF16), torch.randn(100, R, dtype=BF16)
    return {"kv_c": kv_c, "k_pe": k_pe, "latent_cache": cache}


def index_names(slots: torch.Tensor) -> dict[str, Any]:
    cache, k = tersekv.PagedIndexCache.allocate(1, 16, 16), torch.randn(100, 128)
    tersekv.index_append(k, cache[0], slots)
    return {"index_k": k, "index_cache": cache}


def weights(fp8: bool) -> dict[str, Any]:
    """What is between a latent and its 16 heads, in bf16 or in blocks of e4m3."""
    shapes = {"w_uk": (16, L, DN), "w_uv": (16, DV, L), "kv_b_proj": (16 * (DN + DV), L)}
    made: dict[str, Any] = {
        "freqs_cis": torch.view_as_real(torch.polar(torch.ones(128, R // 2), torch.rand(128, R // 2))).flatten(1),
        "kv_norm_gamma": torch.ones(L, dtype=BF16),
    }
    for name, shape in shapes.items():
        made[name] = (torch.randn(shape) / L**0.5).to(torch.float8_e4m3fn if fp8 else BF16)
        made[f"{name}_scale"] = torch.ones(*shape[:-2], shape[-2] // 128, shape[-1] // 128)
    return made


def flashinfer_names(pool: tersekv.PagePool, both: list[str]) -> dict[str, Any]:
    pages, lens = pool.ragged_pages(both), pool.seq_lens(both)
    starts = torch.tensor([0, 60, 100], dtype=torch.int32)
    batch_indices, positions = flashinfer.get_batch_indices_positions(starts, lens, 100)
    k, v = torch.randn(2, 100, 2, 64, dtype=BF16)
    k_cache, v_cache = torch.randn(2, 16, 16, 2, 64, dtype=BF16)
    return {
        "q": torch.randn(100, 8, 64, dtype=BF16), "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache,
        "fp8_kv_cache": tuple(torch.zeros(16, 16, 2, 64, dtype=torch.float8_e4m3fn) for _ in range(2)),
        "ckv": torch.randn(100, L, dtype=BF16), "kpe": torch.randn(100, R, dtype=BF16),
        "ckv_cache": torch.zeros(16, 16, L, dtype=BF16), "kpe_cache": torch.zeros(16, 16, R, dtype=BF16),
        "qo_indptr": starts, "kv_indptr": pages.kv_indptr, "kv_indices": pages.kv_indices,
        "kv_last_page_len": pages.last_page_len, "batch_indices": batch_indices, "positions": positions,
        "block_tables": pool.page_table(both), "workspace_buffer": torch.empty(0, dtype=torch.uint8),
        "semaphores": torch.empty(0, dtype=torch.int32),
    }  # fmt: skip


def max_names(home: Any, page_table: torch.Tensor) -> dict[str, Any]:
    """One new token for each of two requests that hold 59 and 39."""
    lens = torch.tensor([59, 39], dtype=torch.uint32)
    blocks = torch.randn(16, 1, 2, 16, 1, L + R, dtype=BF16)
    table = page_table.clamp(min=0).to(torch.uint32)
    return {
        "output": torch.empty(2, 16, DV, dtype=BF16), "q": torch.randn(2, 16, DN + R, dtype=BF16),
        "input_row_offsets": torch.tensor([0, 1, 2], dtype=torch.uint32), "cache_lengths": lens, "lookup_table": table,
        "kv_collection": home.PagedKVCacheCollection(blocks, lens, table, 1, 59), "max_seq_len": 1,
        "buffer_row_offsets": torch.tensor([0, 60, 100], dtype=torch.uint32),
        "cache_offsets": torch.zeros(3, dtype=torch.uint32), "buffer_length": 100,
    }  # fmt: skip
